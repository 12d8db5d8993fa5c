"""attention="flash" with flash-attn-4 on a Hopper GPU: as near to the truth as the plain twin."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from liger_models.layers.attention.backends import attend, attend_plain
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import AttentionSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn") is None
        or importlib.util.find_spec("flash_attn.cute") is None
        or not torch.cuda.is_available()
        or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU and flash-attn-4: pip install 'liger_models[flash]'",
    ),
]

ROWS, LENGTH = 2, 640
PACKED = torch.tensor([0, 300, 300, 301, 1001, 1280])  # an empty document, one with one token
# (query heads, key heads, head size, value size), and options.
CASES = {
    "8/2 of 128": ((8, 2, 128, 128), {}),
    "a window": ((8, 2, 128, 128), {"window": 100}),
    "sinks": ((8, 2, 128, 128), {"sinks": True}),
    "a window and sinks, of 64": ((8, 2, 64, 64), {"window": 100, "sinks": True}),
    "every key for itself": ((4, 4, 128, 128), {}),
    "of 64": ((8, 2, 64, 64), {}),
    "of 96": ((8, 2, 96, 96), {}),
    "of 256": ((4, 2, 256, 256), {}),
    "keys of 192, values of 128": ((4, 4, 192, 128), {}),
}


def problem(case: str, form: str):
    (heads, kv_heads, dim, value_dim), asked = CASES[case]
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, **asked)
    cu_seqlens = PACKED if form == "packed" else None
    sequences = Sequences.from_call((ROWS, LENGTH), torch.device("cuda"), cu_seqlens=cu_seqlens)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    sizes = [heads * dim, kv_heads * dim, kv_heads * value_dim]
    row, cotangent = draw(ROWS * LENGTH, sum(sizes)), draw(ROWS * LENGTH, heads, value_dim)
    sinks = draw(heads) + 4 if spec.sinks else None
    return spec, sequences, row, sizes, sinks, cotangent


def results(case: str, form: str, function, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Output and every gradient; queries, keys and values are strided views of one row, as in a model."""
    spec, sequences, row, sizes, sinks, cotangent = problem(case, form)
    packed = row.to(dtype).requires_grad_()
    if sinks is not None:
        sinks = sinks.to(dtype).requires_grad_()
    parts = (packed * 1).split(sizes, dim=1)
    dims = CASES[case][0][2], CASES[case][0][2], CASES[case][0][3]
    q, k, v = (part.unflatten(1, (-1, dim)) for part, dim in zip(parts, dims, strict=True))
    out = function(q, k, v, spec, sequences, sinks=sinks)
    leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(dtype))]


def flash(*args, sinks):
    return attend(*args, "flash", sinks)


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    return (torch.linalg.vector_norm(found.double() - true) / torch.linalg.vector_norm(true)).item()


@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_as_accurate_as_the_plain_twin_and_deterministic(case, form):
    truth = results(case, form, attend_plain, torch.float64)
    plain = results(case, form, attend_plain)
    found = results(case, form, flash)
    for ours, twin, exact in zip(found, plain, truth, strict=True):
        assert distance(ours, exact) <= 1.1 * distance(twin, exact)
    for _ in range(3):
        for again, ours in zip(results(case, form, flash), found, strict=True):
            assert torch.equal(again, ours)


def test_a_compiled_call_gives_the_same_bits():
    found = results("8/2 of 128", "packed", flash)
    torch.compiler.reset()
    for again, ours in zip(results("8/2 of 128", "packed", torch.compile(flash)), found, strict=True):
        assert torch.equal(again, ours)
