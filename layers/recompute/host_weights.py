"""Frozen weights in host memory, streamed to the device one unit ahead of their use.

    forward:  unit i runs    meanwhile the weights of unit i + 1 are copied to the device
    backward: unit i runs    meanwhile those of unit i - 1

A unit is a layer, the embedding or the head. After its pass its parameters refer to host memory again, so
that a state dict, an export or a merge reads them there; in the backward pass they stay until another unit's
turn. Every copy has memory of its own: a tensor that autograd has saved over a copy keeps that copy, and is
never overwritten. On a GPU host memory is page-locked, and copies run on a stream of their own. On a CPU the
same happens with ordinary memory, for tests.
"""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

LEAST = 1 << 16
"""Parameters of fewer bytes stay on the device."""


class HostWeights:
    """The weights of some units of a model.

    Args:
        units: in the order of the forward pass.
        device: where they run.
    """

    def __init__(self, units: Sequence[nn.Module], device: torch.device):
        self.device = device
        self.units = list(units)
        self._place = {id(unit): number for number, unit in enumerate(self.units)}
        self._homes: dict[int, Tensor] = {}  # by address: host memory that holds weights
        self._here: dict[int, _Copies] = {}  # by number of the unit
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cleared = -1  # the backward pass at whose end copies are dropped
        for unit in self.units:
            unit.register_forward_pre_hook(self._before)
            unit.register_forward_hook(self._after)

    def __deepcopy__(self, _: Any) -> HostWeights:
        raise TypeError("a model with weights_memory='host' cannot be copied; load it a second time")

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move parameters to host memory. Those that share memory, such as a tied head or parts of a packed
        weight, continue to share it.
        """
        groups: dict[int, list[nn.Parameter]] = {}
        for p in parameters:
            address = p.untyped_storage().data_ptr()
            if address not in self._homes and p.untyped_storage().nbytes() >= LEAST:
                groups.setdefault(address, []).append(p)
        for group in groups.values():
            memory = _bytes_of(group[0].data)
            # In pages of its own, since only whole pages can be locked. (torch's pinned memory comes in
            # powers of two.)
            home = torch.frombuffer(mmap.mmap(-1, memory.nbytes), dtype=torch.uint8)
            home.copy_(memory)
            if self._stream is not None:
                runtime: Any = torch.cuda.cudart()
                torch.cuda.check_error(int(runtime.cudaHostRegister(home.data_ptr(), home.nbytes, 0)))
                weakref.finalize(self, runtime.cudaHostUnregister, home.data_ptr()).atexit = False
            self._homes[home.data_ptr()] = home
            for p in group:
                p.data = _over(home, p.data)

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this host memory."""
        return tensor.untyped_storage().data_ptr() in self._homes

    def bytes_of(self, unit: nn.Module) -> int:
        """Bytes of a unit on the host."""
        return sum(home.nbytes for home, _ in self._groups(unit))

    @property
    def host_bytes(self) -> int:
        return sum(home.nbytes for home in self._homes.values())

    def clear(self) -> None:
        """Drop all copies on the device."""
        for number in list(self._here):
            self._drop(number)

    # -- hooks

    def _before(self, unit: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "weights_memory='host' moves weights between layers, which torch.compile cannot follow: use "
                "either of them"
            )
        self._use(self._place[id(unit)], backward=_in_backward())

    def _after(self, unit: nn.Module, _: Any, output: Any) -> None:
        if _in_backward():
            return  # recomputed: its backward pass follows
        number = self._place[id(unit)]
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(_before_backward, weakref.ref(self), number))
        self._drop(number)

    def _use(self, number: int, backward: bool) -> None:
        """Give a unit its weights, start copying the next unit's, and drop the others."""
        following = number - 1 if backward else number + 1
        for other in [other for other in self._here if other not in (number, following)]:
            self._drop(other)
        self._fetch(number)
        copies = self._here[number]
        if not copies.used:
            copies.used = True
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_event(copies.done)
            for p, here in zip(copies.parameters, copies.tensors, strict=True):
                p.data = here
        # The embedding, the first unit, has no backward pass.
        if bool(backward) <= following < len(self.units):
            self._fetch(following)
        if backward and self._cleared != (task := torch._C._current_graph_task_id()):
            self._cleared = task
            engine: Any = Variable._execution_engine
            engine.queue_callback(self.clear)

    def _fetch(self, number: int) -> None:
        """Start copying a unit's weights, unless they are on the device."""
        if number in self._here:
            return
        copies = _Copies()
        for home, group in self._groups(self.units[number]):
            here = torch.empty_like(home, device=self.device)
            for p, at_home in group:
                copies.parameters.append(p)
                copies.homes.append(at_home)
                copies.tensors.append(_over(here, at_home))
            self._copy(home, here)
        if self._stream is not None:
            copies.done = self._stream.record_event()
        self._here[number] = copies

    def _copy(self, home: Tensor, here: Tensor) -> None:
        if self._stream is None:
            here.copy_(home)
            return
        # The new memory may belong to work that is still queued.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            here.copy_(home, non_blocking=True)

    def _drop(self, number: int) -> None:
        copies = self._here.pop(number, None)
        if copies is None:
            return
        if self._stream is not None and not copies.used:  # its memory is reused only after the copy
            torch.cuda.current_stream(self.device).wait_event(copies.done)
        if copies.used:
            for p, home in zip(copies.parameters, copies.homes, strict=True):
                p.data = home

    def _groups(self, unit: nn.Module) -> Iterator[tuple[Tensor, list[tuple[nn.Parameter, Tensor]]]]:
        """Each piece of a unit's host memory, with the parameters in it and their tensors there."""
        # A unit in use may share parameters with this one.
        away = {
            id(p): home
            for copies in self._here.values()
            for p, home in zip(copies.parameters, copies.homes, strict=True)
        }
        groups: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
        for p in unit.parameters():
            at_home = away.get(id(p), p.data)
            address = at_home.untyped_storage().data_ptr()
            if address in self._homes:
                if p.requires_grad:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(p.shape)} is trained, but its memory is on the host "
                        "(weights_memory='host' streams frozen weights); freeze it, or train adapters"
                    )
                groups.setdefault(address, []).append((p, at_home))
        for address, group in groups.items():
            yield self._homes[address], group


def device_of(model: Any) -> torch.device:
    """The device on which a decoder runs."""
    weights = getattr(model, "host_weights", None)
    device: torch.device = model.embed_tokens.weight.device if weights is None else weights.device
    return device


class _Copies:
    """A unit's weights on the device."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.homes: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.done: Any = None
        self.used = False


def _before_backward(owner: weakref.ref[HostWeights], number: int, _: Tensor) -> None:
    weights = owner()
    if weights is not None:
        weights._use(number, backward=True)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors(part)


def _bytes_of(p: Tensor) -> Tensor:
    """All bytes of a tensor's memory, whatever part of it the tensor is."""
    return torch.empty(0, dtype=torch.uint8, device=p.device).set_(p.untyped_storage())  # type: ignore[call-overload]


def _over(memory: Tensor, p: Tensor) -> Tensor:
    """A tensor like p over other bytes."""
    empty: Any = torch.empty(0, dtype=p.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), p.storage_offset(), p.shape, p.stride())
