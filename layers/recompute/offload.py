"""What layers that run again keep for it, on the host: their inputs, copied while the GPU goes on working.

    forward:  layer i runs        beside it, its input goes to pinned memory of the host
    backward: layer i runs again  beside it, the input of layer i - 1 comes back

Each layer's input is on the GPU while the layer works and while the one behind it does, and on the host for
the rest of the step. Copies run on a stream of their own, one stream a device, in the order in which they are
asked for, so a buffer that is given back can be taken at once: what is copied into it next is copied later.
Buffers stay with this module and are used again, for pinning memory takes longer than copying to it.

`torch.autograd.graph.save_on_cpu`, which is torch's own, waits for every copy, pins anew for every tensor,
and takes what a layer reads beside its input too. On a CPU the same is done with ordinary memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_models.layers.recompute.activation_memory import check_version, run_again
from liger_models.layers.recompute.host_memory import available_host_memory

# A buffer of the host has this many bytes, or if it is a tensor's last one, the next power of two: torch pins
# no other sizes.
CHUNK = 1 << 26
_LEAST = 1 << 12


class Offload:
    """The layers of one call whose inputs are kept on the host."""

    def __init__(self) -> None:
        self._last: Callable[[], _OnHost | None] = _nothing

    def recompute(self, layer: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """Run `layer(x, *args)`, keep x on the host, and run it again in the backward pass, as `recompute` in
        layers/recompute/activation_memory.py does.

        Raises:
            RuntimeError: in the backward pass, if x was modified in place while it was copied.
        """
        kept = _OnHost(x, self._last)
        self._last = weakref.ref(kept)
        first = [x]  # nothing may hold it longer than the first run does

        def run(_: Tensor, *args: Any) -> Any:
            return layer(first.pop() if first else kept.get(), *args)

        # For its arguments' devices torch sets random numbers back: dropout draws the same again.
        return run_again(run, x.new_empty(0), *args)

    def settle(self) -> None:
        """The layer that was last is done: let the GPU's copy of its input go."""
        last = self._last()
        if last is not None:
            last.release()


class _OnHost:
    """A tensor on the host, and now and then on its device too.

    Args:
        tensor: what is copied to the host, from now on.
        before: gives the one that will be needed after this, or None.
    """

    def __init__(self, tensor: Tensor, before: Callable[[], _OnHost | None]):
        self._memory, self._before = _memory_of(tensor.device), before
        self._requires_grad, self._shape, self._dtype = tensor.requires_grad, tensor.shape, tensor.dtype
        self._given: Tensor | None = tensor.detach()
        self._version, self._edited = tensor._version, tensor._version
        contiguous = self._given.contiguous()
        self._buffers = self._memory.take(contiguous.nbytes)
        self._there: Tensor | None = contiguous  # on the device; a copy of it has begun and ends at:
        self._copied = self._memory.copy(contiguous, self._buffers, to_host=True)

    def release(self) -> None:
        """Let go of what is on the device, once the copy has been made."""
        if self._there is not None:
            self._memory.wait(self._copied)
            self._there = None
        if self._given is not None:
            self._edited, self._given = self._given._version, None

    def fetch(self) -> None:
        """Begin to copy it back, if it is not on the device."""
        if self._there is None:
            self._there = torch.empty(self._shape, dtype=self._dtype, device=self._memory.device)
            self._copied = self._memory.copy(self._there, self._buffers, to_host=False)

    def get(self) -> Tensor:
        """The tensor, on its device; and begin to fetch the one that will be needed next."""
        self.fetch()
        tensor = self._there
        assert tensor is not None
        self.release()
        # Some of an edit may have been copied, and some not.
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
        """They are not needed any more, once the copies are made that were asked for."""
        for buffer in buffers:
            self.free.setdefault(len(buffer), []).append(buffer)

    def _buffer(self, size: int) -> Tensor:
        if free := self.free.get(size):
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def copy(self, tensor: Tensor, buffers: list[Tensor], to_host: bool) -> torch.cuda.Event | None:
        """Copy a contiguous tensor to or from buffers, after all that is queued now; the event of its end."""
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
        """Let what is queued from now on begin after a copy, without waiting here."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)


def _sizes(count: int) -> Iterator[int]:
    """Of the buffers that hold `count` bytes."""
    for _ in range(count // CHUNK):
        yield CHUNK
    if rest := count % CHUNK:
        yield max(_LEAST, 1 << (rest - 1).bit_length())


def host_bytes(count: int) -> int:
    """What `count` bytes of a tensor take on the host."""
    return sum(_sizes(count))


def host_memory_left() -> int:
    """Bytes of the host's memory that this process may still take, of those that run beside it on this host
    an equal share; a pebibyte where the system does not say.
    """
    available = available_host_memory()
    left = 1 << 50 if available is None else available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return left + sum(size * len(free) for memory in _MEMORIES.values() for size, free in memory.free.items())


def drop_unused_buffers() -> None:
    """Give the operating system back what buffers no layer uses now."""
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
