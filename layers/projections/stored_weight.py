"""Parameters that hold the bytes of quantised weights.

The parts of a weight are uint8, so that no cast of a model changes them, and frozen parameters, so that they
are sharded as others are. The codes have the weight's own name, and the others that name and theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import local_tensor, shape_of
from liger_models.convert.quantised.bitnet import ThreeValues, unpack
from liger_models.convert.quantised.bitsandbytes import MAP
from liger_models.convert.quantised.codes import FLOAT8, as_scale, scale_numbers
from liger_models.convert.quantised.formats import CODES, GROUPS, SCALE, SECOND, ZERO, Blocks
from liger_models.convert.quantised.kept import Kept
from liger_models.kernels import Float8, decode_codes

Shape = tuple[int, int]


def part_name(weight: str, role: str) -> str:
    """The name of the parameter that holds a part of a weight."""
    return weight if role == CODES else f"{weight}_{role.replace(' ', '_')}"


def hold(module: nn.Module, weight: str, kept: Kept) -> None:
    """Register parameters for the parts of a weight, on the meta device."""
    for role, expr in kept.parts.items():
        empty = torch.empty(expr.shape, dtype=torch.uint8, device="meta")
        module.register_parameter(part_name(weight, role), nn.Parameter(empty, requires_grad=False))


def kept_weights(module: nn.Module) -> Mapping[str, Kept]:
    """The weights of a module that are kept in quantised bits, by name."""
    found: Mapping[str, Kept] = getattr(module, "kept_weights", {})
    return found


def dense_shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """The shape of a parameter, of one in quantised bits as if it were dense."""
    kept = kept_weights(module).get(name)
    return shape_of(module.get_parameter(name)) if kept is None else kept.shape


def held(module: nn.Module, weight: str, kept: Kept) -> dict[str, Tensor]:
    """This process's bytes of each part of a weight."""
    return {role: local_tensor(getattr(module, part_name(weight, role))) for role in kept.parts}


def decode(kept: Kept, parts: Mapping[str, Tensor], stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Decode a weight to `dtype`, as if it were held dense in the dtype `stored`.

    Raises:
        TypeError: the codes were cast or replaced.
    """
    if (found := parts[CODES].dtype) != torch.uint8:
        raise TypeError(
            f"the weight of a layer that keeps its quantised bits is {found}, expected the codes as "
            "torch.uint8; load the model without keep_quantised to cast or train its weights"
        )
    narrow = (torch.bfloat16, torch.float16)
    once = dtype if stored == torch.float32 and dtype in narrow else stored
    if isinstance(kept.format, ThreeValues):
        scale = parts[SCALE].flatten().view(kept.dtypes[SCALE])
        return unpack(parts[CODES], scale, once).to(dtype)
    typed, (*stack, _, _) = kept.typed(parts), parts[CODES].shape
    dense = _decode_blocks if isinstance(kept.format, Blocks) else _decode_flat
    return dense(kept.format, kept.matrix, typed, once).view(*stack, *kept.shape[-2:]).to(dtype)


def has_float8_rows(kept: Kept) -> bool:
    """Whether a weight's codes are e4m3 with one scale for each row, or for each matrix: then they can be an
    operand of a float8 product as they are.
    """
    form = kept.format
    if not isinstance(form, Blocks) or form.codes is not FLOAT8 or form.factor is not None:
        return False
    down, across = form.grid(kept.matrix)
    return across == 1 and down in (1, kept.matrix[0]) and not {SECOND, ZERO, GROUPS} & kept.parts.keys()


def float8_rows(kept: Kept, parts: Mapping[str, Tensor]) -> Float8:
    """A weight [out, in] for which `has_float8_rows`, without a copy of its codes."""
    typed, (rows, columns) = kept.typed(parts), kept.shape
    scales = scale_numbers(typed[SCALE]).reshape(-1, 1).float()
    scales = scales.repeat_interleave(rows // len(scales), 0)
    return Float8(parts[CODES].view(torch.float8_e4m3fn).view(rows, columns), scales)


def _decode_blocks(format: Any, shape: Shape, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Decode M matrices in rectangular blocks."""
    codes, (down, across) = parts[CODES], format.grid(shape)
    second, zero, groups = (parts.get(role) for role in (SECOND, ZERO, GROUPS))
    return decode_codes(
        codes,
        scale_numbers(parts[SCALE]).view(len(codes), down, across),
        shape,
        (format.block[0] or shape[0], format.block[1] or shape[1]),
        format.codes.numbers,
        dtype,
        second=None if second is None else as_scale(second).view(-1),
        divides=format.second == "divided by",
        zero=None if zero is None else format.zeros(zero.view(len(codes), -1, across), down),
        groups=None if groups is None else groups.view(len(codes), -1).int(),
        factor=format.factor,
    )


def _decode_flat(format: Any, shape: Shape, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Decode M matrices whose blocks run on from row to row."""
    (rows, columns), count = shape, len(parts[CODES])
    if columns % format.block:
        rows, columns = 1, rows * columns
    return decode_codes(
        parts[CODES].view(count, rows, -1),
        format.scales(parts).view(count, rows, -1),
        (rows, columns),
        (1, format.block),
        "high half first",
        dtype,
        table=parts[MAP].view(count, 16),
    )
