"""Bytes of the tensors that are alive, whoever made them: forward or backward, hooks or recomputation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from liger_models.layers.memory import offload


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation makes within it, until the storage is freed. Buffers in which
    the level `offload` keeps tensors on the host do not count.

    Args:
        before: tensors whose storages exist already (parameters); they do not count.
        device: the type of device on which storages count.
        unit: storages are rounded up to a multiple of this many bytes, as an allocator does.
        zero: fill memory that operations leave unwritten, for results must not depend on it.
    """

    def __init__(self, before: Iterable[Tensor] = (), device: str = "cpu", unit: int = 1, zero: bool = False):
        super().__init__()
        self.device, self.unit, self.zero = device, unit, zero
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}  # by the address of a storage
        for tensor in before:
            self.exclude(tensor)

    def exclude(self, tensor: Tensor) -> Tensor:
        """Do not count a tensor's storage. Returns the tensor."""
        for part in _parts(tensor):
            storage = part.untyped_storage()
            self._follow(storage, size=0)
            self.now -= self._sizes[storage._cdata]
            self._sizes[storage._cdata] = 0
        return tensor

    def __enter__(self) -> LiveBytes:
        take = offload._HostMemory._buffer
        self._host = mock.patch.object(
            offload._HostMemory, "_buffer", lambda memory, size: self.exclude(take(memory, size))
        )
        self._host.start()
        return super().__enter__()

    def __exit__(self, *failed: Any) -> None:
        super().__exit__(*failed)
        self._host.stop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                for part in _parts(tensor):
                    if part.device.type == self.device:
                        if self.zero and "empty" in function.__name__:
                            part.zero_()
                        self._follow(part.untyped_storage())
        return results

    def _follow(self, storage: Any, size: int | None = None) -> None:
        if (place := storage._cdata) not in self._sizes:
            size = storage.nbytes() if size is None else size
            self._sizes[place] = -(-size // self.unit) * self.unit
            self.now += self._sizes[place]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, place).atexit = False

    def _forget(self, place: int) -> None:
        self.now -= self._sizes.pop(place)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a subclass consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
