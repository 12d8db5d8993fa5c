"""Inspection of PEFT's LoRA layers: the active low-rank paths, and whether our operation covers them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_models.layers.projections.in_place import child_table
from liger_models.layers.projections.linear import has_hooks
from liger_models.layers.projections.low_rank import add_low_rank, projection_of
from liger_models.layers.projections.low_rank_plan import Adapter


def active_adapters(layer: Any) -> tuple[Adapter, ...] | None:
    """Return the active low-rank paths of a PEFT LoRA layer, or None if it does more than add them."""
    if layer.disable_adapters or layer.merged or not getattr(layer, "cast_input_dtype_enabled", True):
        return None
    adapters = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        if name in layer.lora_variant or not (_is_plain(a) and _is_plain(b)):
            return None
        probability = _probability(dropout)
        if probability is None:
            return None
        adapters.append(Adapter(a.weight, b.weight, layer.scaling[name], probability))
    return tuple(adapters)


def add_paths(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Add the paths to the base layer's own product, or return None where PEFT's forward must run."""
    adapters = None if args or kwargs else active_adapters(layer)
    if not adapters or torch.is_autocast_enabled(x.device.type):
        return None
    return add_low_rank(layer.base_layer(x), x, adapters, in_place=not has_hooks(layer.base_layer))


def costs_of(layer: Any, adapters: tuple[Adapter, ...] | None) -> dict[str, Any]:
    """Return a PEFT layer's memory costs for layers/memory/adapters.py: the rank of its paths where our
    operation runs it, or the kind of PEFT's own forward (`adapters` is None).
    """
    if adapters is not None:
        return {"rank": sum(adapter.a.shape[0] for adapter in adapters)}
    if hasattr(layer, "is_feedforward"):
        quantised = any(kind.__module__.endswith(".bnb") for kind in type(layer).__mro__)
        outputs = "ia3 on outputs, quantised" if quantised else "ia3 on outputs"
        return {"peft": "ia3 on inputs" if layer.is_feedforward else outputs}
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    # No other variant takes more than DoRA.
    kind = "dora" if any(name in layer.lora_variant for name in active) else "lora"
    dropout = any(_probability(layer.lora_dropout[name]) != 0 for name in active)
    return {"peft": f"{kind}, dropout" if dropout else kind}


def is_known(layer: Any) -> bool:
    """Return whether a PEFT layer has only known attributes: a newer PEFT may compute with others."""
    return has_only(layer) and not layer.fan_in_fan_out


def has_only(layer: Any, *further: str) -> bool:
    """Return whether a PEFT layer has only the attributes of a linear one, and these."""
    return _attributes(layer) <= {*_KNOWN, *further}


def _attributes(layer: nn.Module) -> set[str]:
    return (
        (vars(layer).keys() - vars(nn.Module()).keys()) | child_table(layer).keys() | layer._parameters.keys()
    )


_KNOWN = {
    *("base_layer", "r", "lora_alpha", "scaling", "lora_dropout", "lora_A", "lora_B", "lora_embedding_A"),
    *("lora_embedding_B", "lora_magnitude_vector", "lora_variant", "lora_bias", "use_dora", "use_rslora"),
    *(
        "_disable_adapters",
        "merged_adapters",
        "_active_adapter",
        "_caches",
        "ephemeral_gpu_offload",
        "kwargs",
    ),
    *("cast_input_dtype_enabled", "fan_in_fan_out", "is_target_conv_1d_layer", "in_features", "out_features"),
    "adapter_layer_names",  # DoRA lists its magnitudes there
}


def _is_plain(linear: nn.Module) -> bool:
    """Return whether A or B is a matrix without a bias (`lora_bias` gives B one)."""
    projection = projection_of(linear)
    return projection is not None and projection.bias is None


def _probability(dropout: nn.Module) -> float | None:
    """Return the probability of a PEFT dropout layer, 0 for an identity, None for any other module."""
    if has_hooks(dropout):
        return None
    if type(dropout) is nn.Identity:
        return 0.0
    if type(dropout) is nn.Dropout and not dropout.inplace:
        return dropout.p if dropout.training else 0.0
    return None
