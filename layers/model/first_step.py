"""Compilation of the kernels of a first training step side by side, before its layers run.

Copies of one layer of each kind, of the final norm and of the head, on the meta device, run forward and
backward once (kernels/_ahead.py). Copies share no tensor with the model, whose hooks, states and random
numbers do not notice. Kernels that this does not reach compile at their first launch, such as those of
attention over packed documents and of images.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_models.kernels._ahead import compile_ahead
from liger_models.kernels._dispatch import autocasts
from liger_models.layers.blocks import add_and_norm, run_block
from liger_models.layers.model.head import LMHead
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.recompute.activation_memory import RERUN
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences

_begun: WeakSet[nn.Module] = WeakSet()


def compile_first_step(model: Any, x: Tensor, sequences: Sequences) -> None:
    """Begin to compile what a training step of a decoder launches, once for all models that are alike.

    Nothing is compiled under autocast or in one of several processes, nor for models that are sharded,
    quantised, on several devices or have hooks: their kernels compile at their first launch.

    Args:
        model: a decoder, perhaps with its head.
        x: [T, H], the input of its layers, on their GPU.
        sequences: the batch.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.is_cuda or model in _begun:
        return
    _begun.add(model)
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several or autocasts(x) or sequences.cache is not None:
        return
    with suppress(Exception):  # the step itself says what is wrong
        parameters = list(model.parameters())
        plain = all(type(p) is nn.Parameter and p.device == x.device for p in parameters)
        if not parameters or not plain or any(map(has_hooks, model.modules())):
            return
        kinds = frozenset((p.dtype, p.requires_grad, p.shape) for p in parameters)
        layers = frozenset(layer.spec for layer in model.layers)
        key = layers, kinds, x.dtype, x.requires_grad
        compile_ahead(_step, key, x, model, sequences.documents.shape)


def _step(x: Tensor, model: Any, shape: tuple[int, int]) -> Tensor:
    """Run one layer of each kind twice, since the first of all has no residual, then norm and head."""
    copies: dict[int, Any] = {}
    sequences = Sequences.from_call(shape if shape[0] * shape[1] == len(x) else (1, len(x)), x.device)
    sequences.prepare_rotary(model.spec.ropes, model.rotary_factors())
    residual, offload = None, Offload()
    for layer in {layer.spec: layer for layer in model.layers if not layer.reads}.values():
        own = _copy(layer, copies)
        if own.activation_memory in RERUN:
            own.set_activation_memory("lean")
        for _ in range(2):
            x, residual, *_ = run_block(own, x, residual, sequences, offload=offload)
    x = add_and_norm(_copy(model.norm, copies), x, residual)[0]
    head = getattr(model, "lm_head", None)
    if type(head) is not LMHead:
        return x
    labels = torch.empty(len(x), dtype=torch.int64, device=x.device)
    options = {"num_valid": len(x) - 1, "num_items": 1, "form": model.logit_form}
    return _copy(head, copies)(x, labels, **options)


def _copy(module: nn.Module, copies: dict[int, Any]) -> Any:
    """A copy on the meta device. `copies` has everything copied before, by `id`."""
    with _WithoutData():
        return copy.deepcopy(module, copies)


class _WithoutData(TorchFunctionMode):
    """In this context, copies of tensors and parameters are on the meta device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__deepcopy__:
            tensor, copies = args
            return copies.setdefault(id(tensor), _without_data(tensor))
        if function is Tensor.clone:  # by which a parameter copies its data
            return _without_data(args[0])
        return function(*args, **(kwargs or {}))


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
