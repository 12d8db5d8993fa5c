"""Compilation of the kernels of a first training step side by side, before its layers run.

Copies of one layer of each kind, of the final norm and of the head, on the meta device, run forward and
backward once (kernels/_ahead.py). Copies share nothing with the model: hooks, states and random numbers of
the model see nothing of it. Kernels that this does not reach compile at their first launch, such as those of
attention over packed documents, of images and of the optimizer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.kernels._ahead import compile_ahead
from liger_models.kernels._dispatch import autocasts
from liger_models.layers.blocks import add_and_norm, run_block
from liger_models.layers.model.head import LMHead
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.recompute.activation_memory import RERUN
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences


def compile_first_step(model: Any, x: Tensor, sequences: Sequences) -> None:
    """Begin to compile what a training step of a decoder launches, once for all models that are alike.

    Args:
        model: a decoder, perhaps with its head.
        x: [T, H], the input of its layers, on their GPU.
        sequences: the batch.
    """
    if autocasts(x) or sequences.slice is not None:
        return
    parameters = list(model.parameters())
    plain = all(type(p) is nn.Parameter and p.device == x.device for p in parameters)
    if not plain or any(map(has_hooks, model.modules())):
        return  # sharded, quantised, on several devices, or watched
    kinds = frozenset((p.dtype, p.requires_grad, p.shape) for p in parameters)
    layers = frozenset(layer.spec for layer in model.layers)
    key = layers, kinds, x.dtype, x.requires_grad
    compile_ahead(_step, key, x, model, sequences.documents.shape)


def _step(x: Tensor, model: Any, shape: tuple[int, int]) -> Tensor:
    """Run one layer of each kind twice, since the first of all has no residual, then norm and head."""
    imaginary: dict[int, Any] = {id(t): _without_data(t) for t in (*model.parameters(), *model.buffers())}
    sequences = Sequences.from_call(shape if shape[0] * shape[1] == len(x) else (1, len(x)), x.device)
    sequences.prepare_rotary(model.spec.ropes)
    residual, offload = None, Offload()
    for layer in {layer.spec: layer for layer in model.layers if not layer.reads}.values():
        own = copy.deepcopy(layer, imaginary)
        if own.activation_memory in RERUN:
            own.set_activation_memory("lean")
        for _ in range(2):
            x, residual, *_ = run_block(own, x, residual, sequences, offload=offload)
    x = add_and_norm(copy.deepcopy(model.norm, imaginary), x, residual)[0]
    head = getattr(model, "lm_head", None)
    if type(head) is not LMHead:
        return x
    labels = torch.empty(len(x), dtype=torch.int64, device=x.device)
    options = {"num_valid": len(x) - 1, "num_items": 1, "form": model.logit_form}
    return copy.deepcopy(head, imaginary)(x, labels, **options)


def _without_data(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, requires_grad=tensor.requires_grad)
    return like
