"""Squared norm of many tensors, for clipping: the sum of x^2 over all elements of all tensors.

Each program sums a chunk in float32, and the programs' sums are added in float64. Minimum traffic: each
tensor once. One launch for all tensors; deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_models.kernels._dispatch import ceil_div, float64_device, jit, on_device_of, tl, use_triton
from liger_models.kernels.optimizer._operands import copied_to


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements: a float64 0-d tensor on the tensors' device; for MPS, on the host.

    Args:
        tensors: at least one; of any floating dtypes and shapes, on one device.
    """
    return SumOfSquares(tensors)() if use_triton(*tensors) else sum_of_squares_plain(tensors)


class SumOfSquares:
    """The launches of `sum_of_squares` on these tensors, which can be used again while none of them moves.

    Attributes:
        copied: whether a tensor had to be copied first, so that the launches read this copy.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        by_kind: dict[tuple[torch.dtype, bool], list[int]] = {}
        read = [tensor.contiguous() for tensor in tensors]
        self._copies = [x for x, tensor in zip(read, tensors, strict=True) if x is not tensor]
        for place, x in enumerate(read):
            if x.numel():
                aligned = x.data_ptr() % 16 == 0 and x.numel() % 16 == 0
                by_kind.setdefault((x.dtype, aligned), []).append(place)
        self._nothing = torch.zeros(1, device=tensors[0].device)
        with on_device_of(self._nothing):
            self._launches = [_prepared(read, alike, aligned) for (_, aligned), alike in by_kind.items()]

    @property
    def copied(self) -> bool:
        return bool(self._copies)

    def __call__(self) -> Tensor:
        """The sum, as `sum_of_squares`."""
        with on_device_of(self._nothing):
            sums = [_sums(launch) for launch in self._launches]
        return torch.cat([self._nothing, *sums]).double().sum()

    def moved(self, addresses: Sequence[int]) -> bool:
        """Read tensors at other addresses from now on, contiguous ones of the same dtypes and sizes. False,
        without effect, if that needs other launches.
        """
        columns = [torch.tensor([addresses[place] for place in launch.places]) for launch in self._launches]
        for launch, column in zip(self._launches, columns, strict=True):
            if launch.aligned and (column % 16).any():
                return False
        for launch, column in zip(self._launches, columns, strict=True):
            launch.rows[:, 0] = column
            launch.table = copied_to(launch.rows, self._nothing.device)
        return True


@dataclass
class _Launch:
    """One launch.

    Attributes:
        places: of its tensors, among all.
        rows: its table, on the host: address, numel, first chunk and number of chunks of each tensor.
        chunks, table, tensor_of_chunk, element, aligned: the number of programs, and their operands.
    """

    places: list[int]
    rows: Tensor
    chunks: int
    table: Tensor
    tensor_of_chunk: Tensor
    element: str
    aligned: bool


def sum_of_squares_plain(tensors: Sequence[Tensor]) -> Tensor:
    """Plain twin of `sum_of_squares`."""
    # Norms in float32: in bfloat16, the default, they would have an error of half a percent.
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norms = torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=wide))
    return norms.to(float64_device(norms.device), torch.float64).square().sum()


_BLOCK = 4096
_CHUNK_BLOCKS = 16
_ELEMENT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _prepared(all_tensors: Sequence[Tensor], places: list[int], aligned: bool) -> _Launch:
    """The launch for the tensors at these places."""
    tensors = [all_tensors[place] for place in places]
    listed, chunks = [], 0
    for tensor in tensors:
        count = ceil_div(tensor.numel(), _BLOCK * _CHUNK_BLOCKS)
        listed.append([tensor.data_ptr(), tensor.numel(), chunks, count])
        chunks += count
    device, rows = tensors[0].device, torch.tensor(listed)
    table = copied_to(rows, device)
    numbers = torch.arange(len(rows), dtype=torch.int32, device=device)
    tensor_of_chunk = numbers.repeat_interleave(table[:, 3], output_size=chunks)
    return _Launch(places, rows, chunks, table, tensor_of_chunk, _ELEMENT[tensors[0].dtype], aligned)


def _sums(launch: _Launch) -> Tensor:
    """Sums of all chunks."""
    sums = torch.empty(launch.chunks, dtype=torch.float32, device=launch.table.device)
    _sum_of_squares_kernel[(launch.chunks,)](
        launch.table,
        launch.tensor_of_chunk,
        sums,
        ELEMENT=launch.element,
        ALIGNED=launch.aligned,
        CHUNK_BLOCKS=_CHUNK_BLOCKS,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return sums


@jit
def _sum_of_squares_kernel(
    table,
    tensor_of_chunk,
    sums,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = table + tl.load(tensor_of_chunk + chunk).to(tl.int64) * 4
    address, size = tl.load(row), tl.load(row + 1)
    if ELEMENT == "bfloat16":
        x = address.to(tl.pointer_type(tl.bfloat16))
    elif ELEMENT == "float16":
        x = address.to(tl.pointer_type(tl.float16))
    else:
        x = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    start = (chunk - tl.load(row + 2)) * CHUNK_BLOCKS * BLOCK
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(CHUNK_BLOCKS):
        left = tl.maximum(tl.minimum(size - start, BLOCK), 0).to(tl.int32)
        inside = lane < left
        if ALIGNED:
            inside = tl.max_constancy(inside, 16)
        value = tl.load(x + start + lane, inside, 0.0).to(tl.float32)
        total += value * value
        start += BLOCK
    tl.store(sums + chunk, tl.sum(total))
