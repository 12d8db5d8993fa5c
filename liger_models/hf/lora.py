"""PEFT's LoRA layers on our models, run by our operation (layers/low_rank.py).

    LowRankLinear(x) = base_layer(x) + sum of scaling[a] * lora_B[a](lora_A[a](lora_dropout[a](x)))

PEFT makes its layers, and then notes its configs on the model that it has adapted (`model.peft_config =
...`). Our models take that as the sign to look through their layers (`take_over`): a
`peft.tuners.lora.Linear` becomes a `LowRankLinear`, which is the same object with the same parameters, names,
files, merging and switches, and another forward. Nothing of PEFT is changed, and models of others never come
here.

What our operation does not cover runs as PEFT has it, in the same layer: variants (DoRA, aLoRA, ...),
adapters that a call names for each row, merged and disabled adapters, hooks on parts of the layer, parts that
are sharded or replaced. A layer of PEFT that has attributes which are unknown here is left as it is.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import layer as peft_lora
from torch import Tensor, nn

from liger_models.layers.linear import has_hooks
from liger_models.layers.low_rank import Adapter, Projection, low_rank_linear, projection_of


def take_over(model: nn.Module) -> None:
    """Run PEFT's LoRA layers in a model by our operation, wherever it can."""
    for module in model.modules():
        if type(module) is peft_lora.Linear and is_known(module):
            module.__class__ = LowRankLinear


class LowRankLinear(peft_lora.Linear):  # type: ignore[misc]
    """PEFT's LoRA layer with our forward."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of the base layer's output."""
        projection = None if args or kwargs else self.low_rank_projection()
        if projection is None or not projection.adapters:
            return super().forward(x, *args, **kwargs)
        return low_rank_linear(x, projection)

    def low_rank_projection(self) -> Projection | None:
        """The layer as layers/low_rank.py takes it, or None where PEFT's own forward must run."""
        base = projection_of(self.base_layer)
        adapters = active_adapters(self)
        if base is None or adapters is None:
            return None
        return Projection(base.weight, base.bias, adapters)


def active_adapters(layer: Any) -> tuple[Adapter, ...] | None:
    """The low-rank paths of one of PEFT's LoRA layers as they are now, or None where they are more."""
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


def is_known(layer: Any) -> bool:
    """Whether a layer of PEFT has the attributes that we know alone: a newer PEFT may compute with others."""
    return _attributes(layer) <= _KNOWN and not layer.fan_in_fan_out


def _attributes(layer: nn.Module) -> set[str]:
    return (vars(layer).keys() - vars(nn.Module()).keys()) | layer._modules.keys() | layer._parameters.keys()


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
}


def _is_plain(linear: nn.Module) -> bool:
    """One of the two small layers: a matrix without a bias (`lora_bias` gives B one)."""
    projection = projection_of(linear)
    return projection is not None and projection.bias is None


def _probability(dropout: nn.Module) -> float | None:
    """Of one of PEFT's dropout layers (an identity where there is none); None of anything else."""
    if has_hooks(dropout):
        return None
    if type(dropout) is nn.Identity:
        return 0.0
    if type(dropout) is nn.Dropout and not dropout.inplace:
        return dropout.p if dropout.training else 0.0
    return None
