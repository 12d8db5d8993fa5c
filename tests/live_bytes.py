"""Counting of live tensor bytes from forward, backward, hooks and recomputation, on a CPU that allocates like
a GPU.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from liger_models.kernels import _dispatch
from liger_models.kernels.losses import _linear_chunks
from liger_models.layers.attention import backends, kept_output
from liger_models.layers.model import distilling, head
from liger_models.layers.projections import low_rank_autograd
from liger_models.layers.recompute import offload, tiles

TILE = 64


class LiveBytes(TorchDispatchMode):
    """Counts every storage created within it until it is freed. Host buffers of the level `offload` do not
    count; `on_host` is their number in use.

    Args:
        before: tensors that exist already (parameters); their storages do not count.
        device: device type on which storages count.
        unit: allocation unit in bytes; storages are rounded up to a multiple.
        zero: fill uninitialised memory, on which results must not depend.
    """

    def __init__(self, before: Iterable[Tensor] = (), device: str = "cpu", unit: int = 1, zero: bool = False):
        super().__init__()
        self.device, self.unit, self.zero = device, unit, zero
        self.now = self.peak = self.on_host = 0
        self._sizes: dict[int, int] = {}  # by storage address
        for tensor in before:
            self.exclude(tensor)

    def exclude(self, tensor: Tensor) -> Tensor:
        """Exclude a tensor's storage from the count, and return the tensor."""
        for part in _parts(tensor):
            storage = part.untyped_storage()
            self._follow(storage, size=0)
            self.now -= self._sizes[storage._cdata]
            self._sizes[storage._cdata] = 0
        return tensor

    def __enter__(self) -> LiveBytes:
        take, give = offload._HostMemory.take, offload._HostMemory.give

        def taken(memory: Any, count: int) -> list[Tensor]:
            buffers = [self.exclude(buffer) for buffer in take(memory, count)]
            self.on_host += len(buffers)
            return buffers

        def given(memory: Any, buffers: list[Tensor]) -> None:
            self.on_host -= len(buffers)
            give(memory, buffers)

        self._host = mock.patch.multiple(offload._HostMemory, take=taken, give=given)
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
    """Return the plain tensors inside a tensor subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


@contextmanager
def as_on_a_gpu(device: str = "cpu") -> Iterator[None]:
    """Allocate on a CPU or the meta device as on a GPU. Triton operations run without their kernels, and
    attention is replaced by a function that allocates like cuDNN. Results are meaningless.
    """
    of_loss = importlib.import_module("liger_models.kernels.losses.linear_cross_entropy")
    modules = [module for name, module in sys.modules.items() if name.startswith("liger_models")]
    stand_ins: list[tuple[Any, str, Any]] = [
        (_dispatch.triton.runtime.jit.KernelInterface, "__getitem__", lambda kernel, grid: _nothing),
        (backends, "grouped_attention", lambda q, k, v, spec, mask, once=None: AsCuDNN.apply(q, k, v, once)),
        (backends, "_boundaries_on_host", lambda q, visibility: False),
        (offload._HostMemory, "copy", _nothing),
        # In place on a GPU, with copies on a CPU; meta follows the CPU.
        (low_rank_autograd, "_outer", _wide_product),
        (_linear_chunks, "_without_gaps", lambda x: x),
    ]
    for name, stand_in in (("use_triton", _use_triton), ("add_product", _nothing)):
        home = _dispatch if name == "use_triton" else _linear_chunks
        own = getattr(home, name)
        stand_ins += [(module, name, stand_in) for module in modules if vars(module).get(name) is own]
    if device == "meta":
        stand_ins += [
            *((torch.distributed, name, _nothing) for name in ("all_to_all_single", "send", "recv")),
            (torch, "is_autocast_enabled", lambda *kind: False),  # fails for the meta device
            (torch, "autocast", lambda *kind, **options: nullcontext()),
            (of_loss, "valid_rows", lambda labels, vocab, ignored, count: labels.new_empty(count)),
        ]
    with ExitStack() as stack:
        for place, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(place, name, stand_in))
        yield


@contextmanager
def surroundings() -> Iterator[None]:
    """Simulate a GPU with short tiles."""
    lengths = [
        *((tiles, "TILE", TILE), (head, "_CHUNK", TILE), (distilling, "_CHUNK", TILE)),
        *((backends, "LONG", 2 * TILE), (kept_output, "LEAST_TOKENS", TILE), (offload, "CHUNK", 1 << 15)),
    ]
    with ExitStack() as stack:
        for place, name, value in lengths:
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(as_on_a_gpu())
        yield


def _use_triton(x: Tensor, *others: Tensor | None) -> bool:
    tensors = [tensor for tensor in others if tensor is not None]
    return x.is_floating_point() and all(tensor.dtype != torch.float64 for tensor in (x, *tensors))


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    wide = torch.promote_types(left.dtype, torch.float32)
    return left.new_zeros(left.shape[1], right.shape[1], dtype=wide)


class AsCuDNN(torch.autograd.Function):
    """Attention that allocates like cuDNN: the output, and in backward the gradients and workspace."""

    @staticmethod
    def forward(ctx, q, k, v, once):
        batch, heads, tokens, _ = q.shape

        def run():
            lse = q.new_empty(batch, heads, tokens, dtype=torch.float32)
            return q.new_empty(batch, tokens, heads, v.shape[3]), lse

        out, lse = run() if once is None else once(run)
        out = out.transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, *held = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        held.append(q.new_empty(q.shape, dtype=torch.float32))
        if q.shape[1] != k.shape[1]:
            held += [torch.empty_like(q), torch.empty_like(q)]
        return *gradients, None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
