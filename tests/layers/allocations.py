"""What a training step allocates, counted on the meta device.

Every operation of torch runs on tensors without memory, whose storages are followed until they are
freed. What is chosen by the device is as on a GPU: Triton's operations run, but for their
kernels, and in place of torch's attention stands what allocates as cuDNN does.
"""

from __future__ import annotations

import importlib
import math
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_models.kernels import _dispatch
from liger_models.kernels.losses import _linear_chunks
from liger_models.layers.attention import backends
from liger_models.layers.memory import offload, tiles
from liger_models.layers.sequences import Sequences


def peak_of_a_step(model: Any, batch: int, seq: int, ranks: int = 1, labels: float = 1.0) -> int:
    """Bytes at the largest moment of a forward and a backward pass, without the model's parameters.

    Args:
        model: on the meta device.
        batch, seq: rows, and tokens in each.
        ranks: that divide each row.
        labels: the share of the tokens that have one.
    """
    memory = _Memory([*model.parameters(), *model.buffers()])
    with _as_on_a_gpu(), memory:
        ids = torch.empty(batch, seq, dtype=torch.long, device="meta")
        sequences = Sequences.from_call((batch, seq), ids.device)
        if ranks > 1:
            sequences = sequences.divided(_FirstOf(ranks))
        hidden = model.hidden_states(sequences, ids)
        targets = torch.empty(len(hidden), dtype=torch.long, device="meta")
        valid = min(math.ceil(labels * len(hidden)), len(hidden) - batch)  # a row's last has none
        loss = model.lm_head(hidden, targets, num_valid=valid, form=model.logit_form)
        del hidden
        loss.backward()
    return memory.peak


class _Memory(TorchDispatchMode):
    """Counts the bytes of storages on the meta device, but for those of tensors that were there before."""

    def __init__(self, before: list[Tensor]):
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._follow(tensor.untyped_storage())
        return results

    def _follow(self, storage: Any) -> None:
        if (place := storage._cdata) not in self.sizes:
            self.sizes[place] = -(-storage.nbytes() // 512) * 512  # as torch's allocator rounds
            self.now += self.sizes[place]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, place)

    def _forget(self, place: int) -> None:
        self.now -= self.sizes.pop(place)


class _FirstOf:
    """A group of ranks, of which this is the first."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class _AsCuDNN(torch.autograd.Function):
    """Its output, and in the backward pass its gradients and what it takes beside them."""

    @staticmethod
    def forward(ctx, q, k, v):
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, v.shape[3]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(batch, heads, tokens, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, *held = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        held.append(q.new_empty(q.shape, dtype=torch.float32))
        if q.shape[1] != k.shape[1]:
            held += [torch.empty_like(q), torch.empty_like(q)]
        return gradients


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    of_loss = importlib.import_module("liger_models.kernels.losses.linear_cross_entropy")
    taking = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("liger_models") and getattr(module, "use_triton", None) is _dispatch.use_triton
    ]
    stand_ins: list[tuple[Any, str, Any]] = [
        *((module, "use_triton", lambda *tensors: True) for module in taking),
        (_dispatch.triton.runtime.jit.KernelInterface, "__getitem__", lambda kernel, grid: _nothing),
        (backends, "_grouped_sdpa", lambda q, k, v, spec, mask: _AsCuDNN.apply(q, k, v)),
        (offload._HostMemory, "copy", _nothing),
        (torch.distributed, "all_to_all_single", _nothing),
        (torch, "is_autocast_enabled", lambda *kind: False),  # which knows no meta device
        # In place on a GPU, and by copies on a CPU, which meta is taken for.
        (tiles, "add_product", _nothing),
        (_linear_chunks, "add_product", _nothing),
        (_linear_chunks, "_without_gaps", lambda x: x),
        (of_loss, "valid_rows", lambda labels, vocab, ignored, count: labels.new_empty(count)),
    ]
    with ExitStack() as stack:
        for place, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(place, name, stand_in))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
