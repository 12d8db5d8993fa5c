"""Tensors that a layer saves for its backward pass, on the host in between: the level `lean@host`.

    forward:  layer i runs      its saved tensors are copied to the host while the next layers run
    backward: layer i + 2 runs  they are copied back meanwhile

Their memory on the device is free from the start of layer i + `SPACING`, or from the end of the forward pass,
until the backward pass of layer i + 2. A layer saves much more than its input: Llama-3-8B's saves 1.44 GiB of
4 x 4,096 tokens, which take 30 ms over 16 lanes of PCIe 5, the time of two or three layers. So such layers
belong four or more apart, and not at the end of a model.

Tensors that others hold stay on the device: parameters, rotary tables and what several layers read. So do
integers and masks, which are small. The rest is copied once by the memory that holds it, and views of it are
made again: queries, keys and values of a packed product are one copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from liger_models.layers.recompute.activation_memory import Kept, Recipe, keep_recipes
from liger_models.layers.recompute.offload import OnHost

T = TypeVar("T")

SPACING = 4
"""Layers from one at this level to the next, for copies that are hidden."""

AHEAD = SPACING // 2
"""Layers whose backward pass, which takes twice as long, runs while tensors are copied back."""

_LEAST = 1 << 12  # smaller tensors stay on the device


class SavedOnHost:
    """The tensors that one layer saves.

    Args:
        layer: its parameters and buffers stay on the device, and those of modules that it borrows.
        others: further tensors that stay.
    """

    def __init__(self, layer: Any, others: Iterable[Tensor]):
        self._owners: list[nn.Module] = [layer, *layer.borrowed]
        self._others = {_memory_of(tensor) for tensor in others}
        self._saved: list[weakref.ref[_Saved]] = []
        self._memories: list[weakref.ref[OnHost]] = []
        self._following = 0  # layers that have run since

    def saving(self) -> AbstractContextManager[Any]:
        """While active, autograd saves the layer's tensors or their recipes."""
        return keep_recipes(self._pack)

    def leave(self) -> None:
        """Start copying to the host. The layer has run, so nothing writes to its tensors any more."""
        groups: dict[Any, list[_Saved]] = {}
        for saved in _living(self._saved):
            tensor = saved.kept.get()
            groups.setdefault((_memory_of(tensor), tensor.dtype), []).append(saved)
        for group in groups.values():
            tensor = group[0].kept.get().detach()
            count = tensor.untyped_storage().nbytes() // tensor.itemsize
            memory = OnHost(tensor.as_strided((count,), (1,), 0), stays=True)
            self._memories.append(weakref.ref(memory))
            for saved in group:
                saved.leave(memory)
        self._saved.clear()
        self._owners.clear()

    def following_ran(self, x: Tensor) -> None:
        """Note that a following layer has run, with the output x."""
        self._following += 1
        if self._following == AHEAD and x.requires_grad:
            x.register_hook(self._fetch)

    @property
    def is_due(self) -> bool:
        """Whether the device memory is to be released before the next layer."""
        return self._following >= SPACING - 1

    def release(self) -> None:
        """Release the device memory after the copies."""
        for memory in _living(self._memories):
            memory.release()

    def _fetch(self, _: Tensor) -> None:
        """Start copying back, in the order in which the backward pass needs the tensors."""
        for memory in reversed(_living(self._memories)):
            memory.fetch()

    def _pack(self, packed: Kept | Recipe) -> Kept | Recipe:
        if isinstance(packed, Recipe):
            packed.replace_inputs(self._pack)
            return packed
        if isinstance(packed, _Saved) or not self._leaves(packed.tensor):
            return packed
        saved = _Saved(packed)
        self._saved.append(weakref.ref(saved))
        return saved

    def _leaves(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.layout != torch.strided:
            return False
        if tensor.untyped_storage().nbytes() < _LEAST:
            return False
        stay = {_memory_of(p) for module in self._owners for p in (*module.parameters(), *module.buffers())}
        return _memory_of(tensor) not in stay | self._others


class _Saved(Kept):
    """A saved tensor: itself, or a view of memory that is on the host."""

    __slots__ = ("__weakref__", "_memory", "_view", "kept")

    def __init__(self, kept: Kept):
        self.kept = kept
        self._memory: OnHost | None = None

    def leave(self, memory: OnHost) -> None:
        """Replace the tensor by its view of this copy of its memory."""
        tensor = self.kept.get()
        self._view = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._memory = memory
        del self.kept

    def get(self) -> Tensor:
        return self.kept.get() if self._memory is None else self._memory.get().as_strided(*self._view)


def _living(references: Iterable[weakref.ref[T]]) -> list[T]:
    return [found for reference in references if (found := reference()) is not None]


def _memory_of(tensor: Tensor) -> int | None:
    """Identifies a living tensor's memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own, such as a DTensor
        return None
