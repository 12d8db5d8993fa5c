"""Models in quantised bits without a checkpoint: random codes and scales, made on the device, in the shapes
and formats of published ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import liger_models
from liger_models.convert.checkpoints.expressions import Permute, Ref
from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.quantised.bitsandbytes import MAP, NESTED_MAP, OFFSET
from liger_models.convert.quantised.codes import FLOAT8 as FLOAT8_CODES
from liger_models.convert.quantised.formats import SCALE, Blocks
from liger_models.convert.quantised.kept import Kept
from liger_models.convert.quantised.reader import dense_tensors
from liger_models.convert.quantised.recognition import recognise
from liger_models.layers.projections.stored_weight import kept_weights, part_name
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.stored_weights import keep_stored

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_STATE = ".quant_state.bitsandbytes__nf4"
_BLOCK, _NESTED = 64, 256  # of nf4


def skeleton(config: Mapping[str, Any], form: str = "nf4") -> LigerCausalLM:
    """A model on the meta device that keeps the bits of its experts, or, without experts, of its layers'
    projections: MXFP4 where the checkpoint has stacks of inputs by outputs (gpt-oss), elsewhere `form`.

    Args:
        form: "nf4", with double quantisation, or "fp8", in blocks of 128 x 128.
    """
    model = dense_skeleton(config)
    weight_map = model.weight_map()
    stacked = any(_is_of_experts(native) and isinstance(x, Permute) for native, x in weight_map.items())
    settings = MXFP4 if stacked else {"nf4": NF4, "fp8": FLOAT8}[form]
    is_quantised = _is_of_experts if any(map(_is_of_experts, weight_map)) else _is_projection
    tensors: dict[str, TensorInfo] = {}
    for native, expr in weight_map.items():
        for ref in expr.refs():
            tensors |= _parts(ref, settings if is_quantised(native) else None)
    folder = Path("random bits")
    found = recognise(folder, {"quantization_config": settings}, tensors, _state_of(model))
    assert found is not None
    keep_stored(model, dense_tensors(tensors, found, config), folder)
    return model


def dense_skeleton(config: Mapping[str, Any]) -> LigerCausalLM:
    """The same model on the meta device, with all weights in bfloat16."""
    dense = {key: value for key, value in config.items() if key != "quantization_config"}
    model = liger_models.from_config({**dense, "dtype": "bfloat16"}, device="meta")
    model.split_projections()
    return model


@torch.no_grad()
def fill(model: LigerCausalLM, device: torch.device) -> None:
    """Give a skeleton memory and random values: norms 1, biases 0, dense matrices and codes with a standard
    deviation of about 0.02.
    """
    model.materialize(device)
    bits: set[nn.Parameter] = set()
    for module in model.modules():
        for name, kept in kept_weights(module).items():
            for role in kept.parts:
                part = module.get_parameter(part_name(name, role))
                bits.add(part)
                _draw(part, role, kept)
    for name, tensor in model.saved_tensors().items():
        if tensor in bits:
            continue
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif tensor.dim() < 2 or name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0, 0.02)


def _is_of_experts(native: str) -> bool:
    return native.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj"))


def _is_projection(native: str) -> bool:
    return native.startswith("layers.") and native.endswith("_proj.weight")


def _parts(ref: Ref, settings: Mapping[str, Any] | None) -> dict[str, TensorInfo]:
    def tensor(ending: str, dtype: torch.dtype, *shape: int) -> TensorInfo:
        nbytes = math.prod(shape) * dtype.itemsize
        return TensorInfo(f"{ref.name}{ending}", "model.safetensors", dtype, shape, 0, nbytes)

    if settings is None:
        found = [tensor("", torch.bfloat16, *ref.shape)]
    elif settings is MXFP4:
        experts, inputs, outputs = ref.shape
        grid = experts, outputs, inputs // 32
        found = [tensor("_blocks", torch.uint8, *grid, 16), tensor("_scales", torch.uint8, *grid)]
    elif settings is FLOAT8:
        grid = tuple(-(-size // 128) for size in ref.shape)
        found = [tensor("", torch.float8_e4m3fn, *ref.shape), tensor("_scale_inv", torch.float32, *grid)]
    else:
        rows, columns = ref.shape
        blocks = rows * columns // _BLOCK
        found = [
            tensor("", torch.uint8, rows * columns // 2, 1),
            tensor(".absmax", torch.uint8, blocks),
            tensor(".quant_map", torch.float32, 16),
            tensor(".nested_absmax", torch.float32, -(-blocks // _NESTED)),
            tensor(".nested_quant_map", torch.float32, 256),
            tensor(_STATE, torch.uint8, 1),
        ]
    return {info.name: info for info in found}


def _state_of(model: LigerCausalLM) -> Any:
    """A reader of the tensors that describe nf4 weights."""
    shapes = {ref.name: ref.shape for expr in model.weight_map().values() for ref in expr.refs()}
    state = {"quant_type": "nf4", "blocksize": _BLOCK, "dtype": "bfloat16"}
    state |= {"nested_blocksize": _NESTED, "nested_dtype": "float32", "nested_offset": 0.03}

    def read(info: TensorInfo) -> Tensor:
        shape = list(shapes[info.name.removesuffix(_STATE)])
        return torch.tensor(list(json.dumps({**state, "shape": shape}).encode()), dtype=torch.uint8)

    return read


def _draw(part: Tensor, role: str, kept: Kept) -> None:
    """Random bytes of a part: of codes any, of scales such as a quantiser writes."""
    is_float8 = isinstance(kept.format, Blocks) and kept.format.codes is FLOAT8_CODES
    if is_float8 and role == SCALE:
        part.view(torch.float32).uniform_(1e-4, 2e-4)
    elif is_float8:
        part.random_(0, 120).bitwise_or_(torch.randint_like(part, 2).mul_(128))  # no NaN
    elif kept.dtypes[role] == torch.float32:  # of nf4: scales are 0.02 to 0.04
        numbers = {
            MAP: (-1.0, 1.0),
            NESTED_MAP: (-0.01, 0.01),
            OFFSET: (0.03, 0.03),
        }
        part.view(torch.float32).uniform_(*numbers.get(role, (0.5, 1.0)))
    elif role == SCALE and isinstance(kept.format, Blocks):
        part.random_(117, 122)  # exponents
    else:
        part.random_(0, 256)
