"""Compilation of the kernels of a first training step side by side, before its layers run.

Copies of one layer of each kind, of the final norm and of the head, on the meta device, run forward and
backward once (kernels/_ahead.py). Copies share no tensor with the model, whose hooks, states and random
numbers do not notice. In one of several processes, whose layers may be sharded, gathered and divided, whole
ones are made from their specs instead. Kernels that this does not reach compile at their first launch, such
as those of attention over packed documents, of images and of an exchange between processes.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_models.kernels import embedding
from liger_models.kernels._ahead import compile_ahead
from liger_models.kernels._dispatch import autocasts
from liger_models.layers.blocks import BLOCKS, add_and_norm, run_block
from liger_models.layers.model.head import LMHead
from liger_models.layers.parts.gated_streams import make_last_norm
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.recompute.activation_memory import ON_HOST, RERUN
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.sequences import Sequences

_begun: WeakSet[nn.Module] = WeakSet()


def compile_first_step(model: Any, x: Tensor, sequences: Sequences) -> None:
    """Begin to compile what a training step of a decoder launches, once for all models that are alike.

    Nothing is compiled under autocast, nor for models that are quantised, on several devices or have hooks,
    nor in one of several processes for models with adapters or a dtype of their own for computation: their
    kernels compile at their first launch.

    Args:
        model: a decoder, perhaps with its head.
        x: [T, H], the input of its layers, on their GPU.
        sequences: the batch.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.is_cuda or model in _begun:
        return
    _begun.add(model)
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if autocasts(x) or sequences.cache is not None or model.spec.streams is not None:
        return
    with suppress(Exception):  # the step itself says what is wrong
        parameters = list(model.parameters())
        plain = all(type(p) is nn.Parameter and p.device == x.device for p in parameters)
        if (
            not parameters
            or not (several or plain)
            or any(map(has_hooks, [] if several else model.modules()))
        ):
            return
        kinds = frozenset((p.dtype, p.requires_grad, p.shape) for p in parameters)
        layers = frozenset(layer.spec for layer in model.layers)
        key = layers, kinds, x.dtype, x.requires_grad, several
        compile_ahead(_step, key, x, model, sequences.documents.shape, several)


def _step(x: Tensor, model: Any, shape: tuple[int, int], several: bool) -> Tensor:
    """Run one layer of each kind twice, since the first of all has no residual, then norm and head."""
    _run_embedding(model, x)
    sequences = Sequences.from_call(shape if shape[0] * shape[1] == len(x) else (1, len(x)), x.device)
    sequences.prepare_rotary(model.spec.ropes, model.rotary_factors())
    residual, offload = None, Offload()
    layers, norm, head = _made_anew(model, x.dtype) if several else _copied(model)
    for layer in layers:
        if layer.activation_memory in (*RERUN, ON_HOST):
            layer.set_activation_memory("lean")
        for _ in range(2):
            x, residual, *_ = run_block(layer, x, residual, sequences, offload=offload)
    x = add_and_norm(norm, x, residual)[0]
    if head is None:
        return x
    labels = torch.empty(len(x), dtype=torch.int64, device=x.device)
    options = {"num_valid": len(x) - 1, "num_items": 1, "form": model.logit_form}
    out: Tensor = head(x, labels, **options)
    return out


def _run_embedding(model: Any, x: Tensor) -> None:
    """Look up rows for the tokens of x, forward and backward, if the table is trained."""
    table = model.embed_tokens.weight
    if type(table) is nn.Parameter and table.requires_grad:
        ids = torch.empty(len(x), dtype=torch.int64, device=x.device)
        rows = embedding(ids, _without_data(table).requires_grad_(), model.embed_tokens.padding_idx)
        rows.backward(torch.empty_like(rows))


def _kinds(model: Any) -> list[Any]:
    """One layer of each kind."""
    return [*{layer.spec: layer for layer in model.layers if not layer.reads}.values()]


def _copied(model: Any) -> tuple[list[Any], Any, Any]:
    """Copies of one layer of each kind, of the norm and of the head, if any, on the meta device."""
    copies: dict[int, Any] = {}
    head = getattr(model, "lm_head", None)
    layers = [_copy(layer, copies) for layer in _kinds(model)]
    return layers, _copy(model.norm, copies), _copy(head, copies) if type(head) is LMHead else None


def _made_anew(model: Any, dtype: torch.dtype) -> tuple[list[Any], Any, Any]:
    """The same, made from their specs.

    Raises:
        ValueError: the model's own are not as their specs make them, or do not compute in `dtype`.
    """
    spec, layers = model.spec, []
    with torch.device("meta"):
        for layer in _kinds(model):
            backends: list[Any] = [mixer.backend for mixer in layer.mixers if hasattr(mixer, "backend")]
            own = BLOCKS[layer.spec.topology](spec.hidden_size, layer.spec, 0, *backends[:1])
            own.set_activation_memory(layer.activation_memory)
            layers.append(_in_dtypes_of(layer, own, dtype))
        norm = _in_dtypes_of(model.norm, make_last_norm(spec))
        head = getattr(model, "lm_head", None)
        if isinstance(head, LMHead):
            own_head = LMHead(spec.hidden_size, spec.vocab_size, spec.head_bias, spec.float32_head)
            head = _in_dtypes_of(head, own_head, dtype)
    return layers, norm, head


def _in_dtypes_of(found: nn.Module, own: nn.Module, most: torch.dtype | None = None) -> nn.Module:
    """`own` with the dtypes and the trained parameters of a module, which has parts of the same tensors."""
    theirs = dict(found.named_parameters())
    if {name: p.shape for name, p in own.named_parameters()} != {name: p.shape for name, p in theirs.items()}:
        raise ValueError("other parameters than its spec's")
    if most is not None and max(theirs.values(), key=Tensor.numel).dtype != most:
        raise ValueError("another dtype")
    for name, p in own.named_parameters():
        p.data = p.data.to(theirs[name].dtype)
        p.requires_grad_(theirs[name].requires_grad)
    return own


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
