"""Optimizer state in host memory, streamed through the GPU in each step.

    to the GPU    | bucket 1 | bucket 2 | bucket 3 | ...
    AdamW         |          | bucket 1 | bucket 2 | ...
    to the host   |          |          | bucket 1 | ...

The three overlap, so a step takes as long as moving the state over the bus in one direction: 48 GB for 8
billion bfloat16 weights, a second at 50 GB/s. Computing on the host would take longer (gradients and weights
cross the bus, and host memory moves the state as often) and give different bits: here results equal those of
`adamw` with its state on the GPU, since rounding depends on an element's index, not on its bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.shards import local_tensor
from liger_models.kernels.optimizer.adamw import AdamWSettings, AdamWTensors, adamw

# Elements per bucket, whose copies take some milliseconds; a multiple of the kernel's vector loads.
BUCKET = 1 << 25
LANES = 3  # buckets on the GPU: one arriving, one in use, one leaving
_ALIGNMENT = 256  # bytes, like torch's own allocations

_STATE = ("exp_avg", "exp_avg_sq", "residue")


def adamw_from_host(
    tensors: Sequence[AdamWTensors],
    settings: AdamWSettings,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """`adamw` on parameters and gradients on one device, with moments and residues in pinned host memory.

    Returns once the state is back on the host and readable.
    """
    buckets = list(_buckets([one for one in tensors if one.parameter.numel()]))
    if not buckets:
        return
    device = buckets[0][0].parameter.device
    size = max(sum(_padded(part.nbytes) for one in bucket for part in _state(one)) for bucket in buckets)
    lanes = [_Lane(size, device) for _ in range(min(LANES, len(buckets)))]
    streams = _Streams(device)
    try:
        for number, bucket in enumerate(buckets):
            lane = lanes[number % len(lanes)]
            there = lane.places(bucket)
            streams.copy_in(_pairs(there, bucket), lane)
            adamw(there, settings, factor, found_inf)
            streams.copy_out(_pairs(bucket, there), lane)
    finally:
        streams.finish()


def room_on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate state of a parameter where this step expects it: on the host, pinned if the parameter is on a
    GPU. For a DTensor it is a DTensor with the same sharding: each process holds its part in its own memory.
    """
    return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=like.device.type != "cpu")


def state_on_host(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Move a parameter's state to the memory of `room_on_host`, unless it is already there."""
    here = local_tensor(tensor)
    if here.device.type == "cpu" and (parameter.device.type == "cpu" or here.is_pinned()):
        return tensor
    room = room_on_host(parameter, tensor.dtype)
    local_tensor(room).copy_(here)
    return room


def lane_bytes(state_bytes: float) -> int:
    """GPU memory of the streamed step, for this many state bytes per element."""
    return int(LANES * BUCKET * state_bytes)


def _state(tensors: AdamWTensors) -> list[Tensor]:
    return [part for name in _STATE if (part := getattr(tensors, name)) is not None]


def _pairs(
    targets: Sequence[AdamWTensors], sources: Sequence[AdamWTensors]
) -> Iterator[tuple[Tensor, Tensor]]:
    for target, source in zip(targets, sources, strict=True):
        yield from zip(_state(target), _state(source), strict=True)


def _buckets(tensors: Sequence[AdamWTensors]) -> Iterator[list[AdamWTensors]]:
    """Pieces of parameters, up to BUCKET elements per bucket."""
    bucket: list[AdamWTensors] = []
    room = BUCKET
    for one in tensors:
        first, size = 0, one.parameter.numel()
        while first < size:
            count = min(room, size - first)
            bucket.append(_piece(one, first, count))
            first += count
            room -= -(-count // _ALIGNMENT) * _ALIGNMENT  # so that pieces are aligned for the kernel
            if room <= 0:
                yield bucket
                bucket, room = [], BUCKET
    if bucket:
        yield bucket


def _piece(tensors: AdamWTensors, first: int, count: int) -> AdamWTensors:
    def part(tensor: Tensor) -> Tensor:
        return tensor.view(-1)[first : first + count]

    parts: dict[str, Any] = {
        name: part(getattr(tensors, name)) for name in ("parameter", "gradient", "exp_avg", "exp_avg_sq")
    }
    residue = None if tensors.residue is None else part(tensors.residue)
    return tensors._replace(**parts, residue=residue, offset=tensors.offset + first)


def _padded(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class _Lane:
    """GPU memory for the state of one bucket after another."""

    def __init__(self, size: int, device: torch.device):
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.free: torch.cuda.Event | None = None  # recorded after the previous contents were copied out

    def places(self, bucket: Sequence[AdamWTensors]) -> list[AdamWTensors]:
        """The bucket with its state in here."""
        first = 0
        placed = []
        for one in bucket:
            here: dict[str, Any] = {}
            for name in _STATE:
                if (part := getattr(one, name)) is not None:
                    here[name] = self.memory[first : first + part.nbytes].view(part.dtype)
                    first += _padded(part.nbytes)
            placed.append(one._replace(**here))
        return placed


class _Streams:
    """Copies that overlap the current stream's work. On a CPU they run in order with it."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.work = torch.cuda.current_stream(device)
            self.come, self.go = _copy_streams(device)
            self.come.wait_stream(self.work)  # queued work may still use the memory of the lanes

    def copy_in(self, pairs: Iterator[tuple[Tensor, Tensor]], lane: _Lane) -> None:
        """Fill a lane; later queued work waits for it."""
        if not self.cuda:
            _copy(pairs)
            return
        if lane.free is not None:
            self.come.wait_event(lane.free)
        with torch.cuda.stream(self.come):
            _copy(pairs)
        self.work.wait_event(self.come.record_event())

    def copy_out(self, pairs: Iterator[tuple[Tensor, Tensor]], lane: _Lane) -> None:
        """Copy the contents of a lane to the host, after all work queued so far."""
        if not self.cuda:
            _copy(pairs)
            return
        self.go.wait_event(self.work.record_event())
        with torch.cuda.stream(self.go):
            _copy(pairs)
        lane.free = self.go.record_event()

    def finish(self) -> None:
        """Wait until all copies to the host are complete."""
        if self.cuda:
            self.come.synchronize()
            self.go.synchronize()


def _copy(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


@functools.cache
def _copy_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
