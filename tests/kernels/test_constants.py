"""cached_tensors: what it keeps serves any later call; and it is the only cache of tensors."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from liger_models.kernels._constants import cached_tensors
from liger_models.layers.attention import backends
from liger_models.layers.grids import anyres, grid_attention
from liger_models.layers.recurrent import lightning
from liger_models.layers.sequences import rotary
from liger_models.layers.specs import RopeSpec
from liger_models.layers.vision import patch_order, position_table

CPU = torch.device("cpu")
CALLS = {  # with arguments that no other test uses
    "decays": lambda: lightning._log_decays((0.123, 0.9), CPU, torch.float32),
    "slopes": lambda: backends._cached_slopes((0.123, 0.9), CPU),
    "frequencies": lambda: rotary._cached_inverse_frequencies(RopeSpec(dim=6, theta=123.0), 0, CPU),
    "windows of grids": lambda: grid_attention._windows(6, 4, 2, 5, 5, CPU),
    "distances": lambda: grid_attention._distances(5, CPU),
    "tiles": lambda: anyres.of_tiles(3, 1, 2, 123, 45, None),
    "whole image": lambda: anyres.of_whole(13),
    "video": lambda: anyres.of_video(13, 1),
    "windows": lambda: patch_order._windows(13, 17, 5),
    "times": lambda: position_table._times(13, 6),
    "resizing": lambda: position_table._resizing(13, 17, "bilinear"),
}


def tensors_of(result):
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_a_run_in_another_mode_leaves_nothing_for_a_real_one(name):
    with FakeTensorMode(), torch.inference_mode(), torch.device("meta"):
        assert tensors_of(CALLS[name]())
    found = tensors_of(CALLS[name]())
    assert all(type(x) is Tensor and x.device == CPU and not x.is_inference() for x in found)
    with torch.inference_mode(), torch.device("meta"):
        again = tensors_of(CALLS[name]())
    assert all(a is b for a, b in zip(found, again, strict=True))
    with FakeTensorMode():
        assert not any(type(x) is Tensor for x in tensors_of(CALLS[name]()))


def test_a_first_call_in_inference_mode_makes_tensors_that_can_be_saved_for_a_backward_pass():
    make = cached_tensors()(lambda n: torch.ones(n, device="cpu"))
    with torch.inference_mode():
        make(3)
    assert not make(3).is_inference()


def makes_tensors(function):
    returns = ast.unparse(function.returns or ast.Constant(""))
    return any(name in returns for name in ("Tensor", "Taps")) and "Callable" not in returns


def test_no_other_cache_holds_tensors():
    root = Path(rotary.__file__).parents[2]
    files = {path for part in ("kernels", "layers") for path in (root / part).rglob("*.py")}
    for file in files - {root / "kernels" / "_constants.py"}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and makes_tensors(node):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                assert not {"functools.cache", "cache"} & set(decorators), (file, node.name)
                assert not any("lru_cache" in decorator for decorator in decorators), (file, node.name)
