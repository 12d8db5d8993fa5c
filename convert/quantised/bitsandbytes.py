"""Weights in the formats of bitsandbytes: nf4 and fp4 (QLoRA: Dettmers et al., 2023, arXiv:2305.14314), and
int8 (LLM.int8(): Dettmers et al., 2022, arXiv:2208.07339).

    4 bits:  value = map[code] absmax,  absmax of each 64 elements of the flattened matrix
    double quantisation:  absmax = nested_map[code] nested_absmax + offset,  nested_absmax of each 256 of them
    8 bits:  value = (code SCB) / 127,  SCB of each row
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.safetensors_header import TensorInfo
from liger_models.convert.errors import CheckpointError, abbreviate
from liger_models.convert.quantised.codes import INT8, look_up_pairs
from liger_models.convert.quantised.formats import (
    CODES,
    ROW,
    SCALE,
    BadScaleError,
    Blocks,
    Fetch,
    Format,
    QuantisedWeight,
)
from liger_models.convert.quantised.pairing import Pairing

MAP, NESTED_SCALE, NESTED_MAP, OFFSET = "map", "nested scale", "nested map", "offset"
STATE = ".quant_state.bitsandbytes__"
STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
SHARE_OF_127 = 7.874015718698502e-3  # the constant of its kernels


def bitsandbytes(pairing: Pairing) -> None:
    """Add the weights of a checkpoint that bitsandbytes wrote."""
    for stem, info in list(pairing.named(*(f"{STATE}{kind}" for kind in ("nf4", "fp4")))):
        _add_four_bits(pairing, stem, info)
    for name, codes in list(pairing.tensors.items()):
        if codes.dtype == torch.int8 and name.endswith(".weight"):
            stem = name.removesuffix("weight")
            scale = pairing.companion(codes, f"{stem}SCB")
            pairing.check_matrix(codes)
            form = pairing.get(f"{stem}weight_format")
            if form is not None:
                order = pairing.values(form)
                if order is not None and (order.numel() != 1 or int(order) != 0):
                    raise CheckpointError(
                        f"{pairing.where(form)}: tensor {form.name!r} says that {name!r} is not stored row "
                        "by row, which is not supported; save it again with a newer bitsandbytes"
                    )
                pairing.own(form)
            format = Blocks(INT8, ROW, factor=SHARE_OF_127, allow_zero=True)
            parts = {CODES: codes, SCALE: scale}
            pairing.add_blocks(name, codes.shape, format, parts, scales=(torch.float32,))
    pairing.check_excluded(pairing.modules("llm_int8_skip_modules"), str.__eq__)


@dataclass(frozen=True)
class FlatBlocks(Format):
    """Codes of four bits, the high half of a byte first, in blocks of consecutive elements of the matrix.

    Attributes:
        kind: "nf4" or "fp4".
        block: elements that share a scale.
        nested: scales that share a scale; 0 if scales are stored in float32.
        offset: added to scales that are quantised.
    """

    kind: str
    block: int
    nested: int = 0
    offset: float = 0.0

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"{self.kind}, groups of {self.block}{', scales quantised' if self.nested else ''}"

    def decode(
        self, weight: QuantisedWeight, fetch: Fetch, start: int, stop: int, device: torch.device
    ) -> Tensor:
        count = math.prod(weight.shape)
        first, last = start // self.block, -(-stop // self.block)
        begin, end = first * self.block, min(last * self.block, count)
        codes, table = fetch(CODES, begin // 2, -(-end // 2)).to(device), fetch(MAP, 0, 16)
        byte = torch.arange(256, device="cpu")
        halves = torch.stack((table[byte >> 4], table[byte & 15]), -1)
        values = look_up_pairs(halves, codes[None]).view(-1)[: end - begin]
        scale = self._scales(fetch, first, last)
        if not torch.isfinite(scale).all():
            raise BadScaleError(
                f"tensor {weight.parts[SCALE].name!r} gives a scale that is not finite; the file is damaged: "
                "download it again"
            )
        values *= scale.to(device).repeat_interleave(self.block)[: end - begin]
        return values[start - begin : stop - begin]

    def rows_of(self, role: str, shape: tuple[int, int], dtype: torch.dtype) -> int:
        rows, columns = shape
        if role == CODES:
            return 1 if columns % 2 else rows
        return rows if role == SCALE and columns % self.block == 0 else 1

    def scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The scales of M matrices in memory, float32 [M, blocks].

        Args:
            parts: [M, ...] as the files have them; of nested scales also `offset` [M, 1], since matrices of a
                stack differ in it.
        """
        scale = parts[SCALE].flatten(1)
        if not self.nested:
            return scale
        named = parts[NESTED_MAP].flatten(1).gather(1, scale.long())
        nested = parts[NESTED_SCALE].flatten(1).repeat_interleave(self.nested, 1)
        return named.mul_(nested[:, : scale.shape[1]]).add_(parts[OFFSET])

    def check_stack(
        self, shape: tuple[int, int], parts: Mapping[str, Tensor], name_of: Callable[[str, int], str]
    ) -> None:
        for role, part in parts.items():
            if part.is_floating_point() and not torch.isfinite(part).all():
                number = int((~torch.isfinite(part)).flatten(1).any(1).nonzero()[0, 0])
                raise BadScaleError(
                    f"tensor {name_of(role, number)!r} holds a number that is not finite; the file is "
                    "damaged: download it again"
                )

    def _scales(self, fetch: Fetch, first: int, last: int) -> Tensor:
        scale = fetch(SCALE, first, last)
        if not self.nested:
            return scale
        above = first // self.nested
        nested = fetch(NESTED_SCALE, above, -(-last // self.nested))
        of_scale = torch.arange(first, last, device="cpu") // self.nested - above
        return fetch(NESTED_MAP, 0, 256)[scale.int()] * nested[of_scale] + self.offset


def _add_four_bits(pairing: Pairing, stem: str, info: TensorInfo) -> None:
    state = _state(pairing, info)
    codes = pairing.companion(info, stem)
    shape, count = tuple(state["shape"]), math.prod(state["shape"])
    nested, block = state.get("nested_blocksize", 0), state["blocksize"]
    pairing.check(codes, [codes.shape], STORAGE, shape)
    if codes.nbytes != -(-count // 2):
        raise CheckpointError(
            f"{pairing.where(codes)}: tensor {stem!r} has {codes.nbytes} bytes, but {info.name!r} says that "
            f"the weight has the shape {shape}, which takes {-(-count // 2)}"
        )
    scales = -(-count // block)
    parts: dict[str, TensorInfo | None] = {
        CODES: replace(codes, dtype=torch.uint8, shape=(codes.nbytes,)),
        SCALE: pairing.companion(codes, f"{stem}.absmax"),
        MAP: pairing.companion(codes, f"{stem}.quant_map"),
    }
    expected: dict[str, tuple[int, torch.dtype]] = {
        SCALE: (scales, torch.uint8 if nested else torch.float32),
        MAP: (16, torch.float32),
    }
    if nested:
        parts[NESTED_SCALE] = pairing.companion(codes, f"{stem}.nested_absmax")
        parts[NESTED_MAP] = pairing.companion(codes, f"{stem}.nested_quant_map")
        expected |= {NESTED_SCALE: (-(-scales // nested), torch.float32), NESTED_MAP: (256, torch.float32)}
    for role, (size, dtype) in expected.items():
        part = parts[role]
        assert part is not None
        pairing.check(part, [(size,)], [dtype], shape)
    format = FlatBlocks(state["quant_type"], block, nested, state.get("nested_offset", 0.0))
    pairing.own(info)
    pairing.add(stem, shape, format, parts)


def _state(pairing: Pairing, info: TensorInfo) -> dict[str, Any]:
    """The JSON in a tensor of bytes, after a check of its values."""
    stored = pairing.values(info)
    if stored is None:
        raise CheckpointError(
            f"{info.name!r} has the shape of its weight, which is not in the headers; download the "
            "checkpoint first"
        )
    try:
        state = json.loads(bytes(stored.view(torch.uint8).tolist()))
        shape, block, nested = state["shape"], state["blocksize"], state.get("nested_blocksize", 256)
        good = len(shape) == 2 and all(type(n) is int and n > 0 for n in (*shape, block, nested))
        good = good and block % 2 == 0 and state["quant_type"] in ("nf4", "fp4")
        good = good and math.isfinite(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError):
        good, state = False, stored.tolist()[:20]
    if not good:
        raise CheckpointError(
            f"{pairing.where(info)}: tensor {info.name!r} does not describe an nf4 or fp4 matrix: "
            f"{abbreviate(state)}"
        )
    return dict(state)
