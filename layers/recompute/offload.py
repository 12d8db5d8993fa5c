"""Offloading to host memory of the inputs of recomputed layers, overlapped with GPU work.

    forward:  layer i runs        meanwhile its input is copied to pinned host memory
    backward: layer i runs again  meanwhile the input of layer i - 1 is copied back

Each layer's input is on the GPU while this layer and the next one run, and on the host for the rest of the
step. Results that take longer to compute than to copy, such as attention's output for a long sequence, go to
the host, too, and come back when the layer begins to run again: `Results`. Copies run in order on a separate
stream per device, so a released buffer can be reused at once: the next copy into it happens later. Buffers
are cached here, since pinning memory takes longer than copying to it.

`torch.autograd.graph.save_on_cpu` synchronises with every copy, pins memory for every tensor, and also moves
a layer's other inputs. On a CPU ordinary memory is used instead.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_models.layers.recompute.activation_memory import check_version, run_again
from liger_models.layers.recompute.host_memory import available_host_memory

# Size of a host buffer in bytes; a tensor's last one has the next power of two, since torch pins only such
# sizes.
CHUNK = 1 << 26
_LEAST = 1 << 12
_SMALL = 1 << 8  # results of up to so many bytes stay on the device


# Share of the host's memory up to which results follow the inputs. The rest is for data and other processes.
SHARE = 0.5


class Offload:
    """Layers of one call that keep their inputs on the host.

    Args:
        wanted: bytes of host memory for the inputs and results of all layers; with None no results are kept.
    """

    def __init__(self, wanted: int | None = None) -> None:
        self._last: Callable[[], OnHost | None] = _nothing
        self._away: list[Leaving] = []
        self.keeps_results = wanted is not None and wanted <= SHARE * host_memory_left()

    def recompute(
        self, layer: Callable[..., Any], x: Tensor, *args: Any, results: Results | None = None
    ) -> Any:
        """Run `layer(x, *args)`, save x on the host, and run it again in the backward pass, like `recompute`
        in layers/recompute/activation_memory.py. The layer may call `results` in both runs.

        Raises:
            RuntimeError: in the backward pass, if x or a result was modified in place during its copy.
        """
        kept = OnHost(x, self._last)
        self._last = weakref.ref(kept)
        first = [x]  # only the first run may hold it
        results = Results() if results is None else results

        def run(_: Tensor, *args: Any) -> Any:
            if first:
                with results.first_run():
                    return layer(first.pop(), *args)
            kept.fetch()
            with results.second_run():  # before the input of the previous layer, which is needed later
                return layer(kept.get(), *args)

        # torch restores the random state for its arguments' devices: dropout draws the same numbers again.
        return run_again(run, x.new_empty(0), *args)

    def settle(self) -> None:
        """Before each layer: release the GPU copy of the last layer's input once it is on the host, and what
        earlier layers have saved.
        """
        last = self._last()
        if last is not None:
            last.release()
        if self._away:
            self._release([saved for saved in self._away if saved.is_due])

    def ran(self, x: Tensor, saved: Leaving | None = None) -> None:
        """After each layer: x is its output, and `saved` what leaves the device."""
        for earlier in self._away:
            earlier.following_ran(x)
        if saved is not None:
            saved.leave()
            self._away.append(saved)

    def finish(self) -> None:
        """After all layers: release what they have saved."""
        self._release(list(self._away))

    def _release(self, due: list[Leaving]) -> None:
        for saved in due:
            saved.release()
            self._away.remove(saved)


class Leaving(Protocol):
    """Saved tensors of a layer on their way to the host: layers/recompute/saved_on_host.py."""

    @property
    def is_due(self) -> bool: ...
    def leave(self) -> None: ...
    def following_ran(self, x: Tensor) -> None: ...
    def release(self) -> None: ...


class Results:
    """Results of a layer's functions, computed in its first run and kept on the host until it runs again."""

    def __init__(self) -> None:
        self._kept: list[tuple[OnHost | Tensor, ...]] = []
        self._calls: int | None = None  # so far in this run; None outside of runs
        self._is_first = False

    def __call__(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the function's results; the n-th call of the second run returns those of the first run."""
        number = self._calls
        if number is None:  # part of the layer runs once more within its backward pass
            return function()
        self._calls = number + 1
        if self._is_first:
            found = function()
            self._kept.append(tuple(OnHost(x) if x.nbytes > _SMALL else x for x in found))
            return found
        return tuple(kept.get() if isinstance(kept, OnHost) else kept for kept in self._kept[number])

    @contextlib.contextmanager
    def first_run(self) -> Iterator[None]:
        """The layer's first run. At its end the results leave the device."""
        with self._run(is_first=True):
            yield
        for kept in self._on_host():
            kept.release()

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        """Another run, at whose beginning the copies back start."""
        for kept in self._on_host():
            kept.fetch()
        with self._run(is_first=False):
            yield

    @contextlib.contextmanager
    def _run(self, is_first: bool) -> Iterator[None]:
        self._calls, self._is_first = 0, is_first
        try:
            yield
        finally:  # the second run may stop early
            self._calls = None

    def _on_host(self) -> list[OnHost]:
        return [kept for result in self._kept for kept in result if isinstance(kept, OnHost)]


class OnHost:
    """A tensor on the host, and at times also on its device.

    Args:
        tensor: copied to the host, starting now.
        before: returns the one needed after this one in the backward pass, or None.
        stays: `get` leaves the tensor on the device, for further calls.
    """

    def __init__(
        self, tensor: Tensor, before: Callable[[], OnHost | None] | None = None, stays: bool = False
    ):
        self._memory, self._before, self._stays = _memory_of(tensor.device), before or _nothing, stays
        self._requires_grad, self._shape, self._dtype = tensor.requires_grad, tensor.shape, tensor.dtype
        self._given: Tensor | None = tensor.detach()
        self._version, self._edited = tensor._version, tensor._version
        contiguous = self._given.contiguous()
        self._buffers = self._memory.take(contiguous.nbytes)
        self._there: Tensor | None = contiguous  # on the device; its copy ends at:
        self._copied = self._memory.copy(contiguous, self._buffers, to_host=True)

    def release(self) -> None:
        """Release the device tensor after the copy."""
        if self._there is not None:
            self._memory.wait(self._copied)
            self._there = None
        if self._given is not None:
            self._edited, self._given = self._given._version, None

    def fetch(self) -> None:
        """Start copying back, if it is not on the device."""
        if self._there is not None:
            return
        self._there = torch.empty(self._shape, dtype=self._dtype, device=self._memory.device)
        self._copied = self._memory.copy(self._there, self._buffers, to_host=False)
        if self._stays:
            check_version(self._shape, self._edited, self._version)
            self._given, self._version = self._there, self._there._version

    def get(self) -> Tensor:
        """The tensor, on its device; also starts fetching the one needed next."""
        self.fetch()
        tensor = self._there
        assert tensor is not None
        if self._stays:
            self._memory.wait(self._copied)
            assert self._given is not None
            check_version(tensor.shape, self._given._version, self._version)
            return tensor
        self.release()
        # A modification may have been copied in part.
        check_version(tensor.shape, self._edited, self._version)
        if (before := self._before()) is not None:
            before.fetch()
        return tensor.detach().requires_grad_(self._requires_grad)

    def __del__(self) -> None:
        if hasattr(self, "_copied"):
            self.release()
            self._memory.give(self._buffers)


class _HostMemory:
    """Buffers on the host, and copies between them and a device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.free: dict[int, list[Tensor]] = {}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, count: int) -> list[Tensor]:
        """Buffers of `count` bytes or a little more."""
        return [self._buffer(size) for size in _sizes(count)]

    def give(self, buffers: list[Tensor]) -> None:
        """Return buffers, for reuse after the pending copies."""
        for buffer in buffers:
            self.free.setdefault(len(buffer), []).append(buffer)

    def _buffer(self, size: int) -> Tensor:
        if free := self.free.get(size):
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def copy(self, tensor: Tensor, buffers: list[Tensor], to_host: bool) -> torch.cuda.Event | None:
        """Copy a contiguous tensor to or from buffers, after all queued work; returns its end's event."""
        parts = tensor.view(-1).view(torch.uint8).split(CHUNK)
        pairs = [(buffer[: len(part)], part) for buffer, part in zip(buffers, parts, strict=True)]
        pairs = pairs if to_host else [(part, buffer) for buffer, part in pairs]
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, copied: torch.cuda.Event | None) -> None:
        """Make work queued from now on wait for a copy, without blocking the host."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


def _sizes(count: int) -> Iterator[int]:
    """Sizes of the buffers that hold `count` bytes."""
    for _ in range(count // CHUNK):
        yield CHUNK
    if rest := count % CHUNK:
        yield max(_LEAST, 1 << (rest - 1).bit_length())


def host_bytes(count: int) -> int:
    """Host memory taken by `count` bytes of a tensor."""
    return sum(_sizes(count))


def host_memory_left() -> int:
    """Bytes of host memory that this process may still allocate, an equal share among the processes on this
    host; a pebibyte if the system does not report it.
    """
    available = available_host_memory()
    left = 1 << 50 if available is None else available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return left + sum(size * len(free) for memory in _MEMORIES.values() for size, free in memory.free.items())


def drop_unused_buffers() -> None:
    """Return the memory of unused buffers to the operating system."""
    if not any(memory.free for memory in _MEMORIES.values()):
        return
    for memory in _MEMORIES.values():
        memory.free.clear()
    if torch.cuda.is_available() and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


_MEMORIES: dict[torch.device, _HostMemory] = {}


def _memory_of(device: torch.device) -> _HostMemory:
    if device not in _MEMORIES:
        _MEMORIES[device] = _HostMemory(device)
    return _MEMORIES[device]


def _nothing() -> None:
    return None
