"""PEFT's adapters on layers and experts that keep quantised bits (docs/quantised.md), or are sharded over
processes (FSDP2).

PEFT reads a layer's `weight` or a stack's shape, and finds codes there: LoRA without variants does not need
the weight, and stacks get paths of the decoded shape here. Everything else is refused, because PEFT may
compute with the codes. Of a sharded weight PEFT takes the shape of the local rows, as tensor parallelism
needs; such layers get paths of the whole shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from peft.tuners.lora import layer as peft_lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from liger_models.convert.errors import ConfigError
from liger_models.layers.experts.moe import Experts
from liger_models.layers.projections.stored_weight import kept_weights
from liger_models.layers.projections.ternary import check_can_merge


def adapt_kept_bits(module: nn.Module, configs: Mapping[str, Any]) -> None:
    """Check a PEFT layer on a module that keeps quantised bits, and give stacks of experts the paths of their
    decoded shape. Does nothing to other modules.

    Args:
        configs: the model's PEFT configs by adapter.

    Raises:
        ConfigError: an adapter that may need the weight.
    """
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    if base is module:
        return
    wrapper: Any = module
    if isinstance(wrapper, peft_lora.Linear) and isinstance(base, nn.Linear) and _is_divided(base.weight):
        _fit(wrapper, (base.out_features, base.in_features), configs)
    if not kept_weights(base):
        return
    stack = isinstance(wrapper, peft_lora.ParamWrapper) and isinstance(base, Experts)
    if stack and wrapper.parameter_name in kept_weights(base):
        _fit(wrapper, kept_weights(base)[wrapper.parameter_name].shape, configs)
    elif (not stack and not isinstance(wrapper, peft_lora.Linear)) or wrapper.lora_variant:
        variants = sorted(
            {type(variant).__name__ for variant in getattr(wrapper, "lora_variant", {}).values()}
        )
        raise ConfigError(
            f"{', '.join(variants) or type(wrapper).__name__} of PEFT on a {type(base).__name__} may compute "
            "with the codes of its quantised weight; use LoRA without variants (target_modules for layers, "
            "target_parameters for experts), or load the model without keep_quantised"
        )


def refuse_merging(base: nn.Module) -> None:
    """
    Raises:
        ConfigError: the module keeps quantised bits, to which an adapter cannot be added, or rounds its
            weight.
    """
    check_can_merge(base)
    if kept_weights(base):
        raise ConfigError(
            f"an adapter cannot be merged into the quantised bits of a {type(base).__name__}; call "
            "liger_models.models.stored_weights.decode_stored(model) first"
        )


def _is_divided(weight: Tensor) -> bool:
    """Whether a weight is sharded by FSDP2, which gathers it before use."""
    mesh: Any = getattr(weight, "device_mesh", None)
    return mesh is not None and "tp" not in (mesh.mesh_dim_names or ())


def _fit(wrapper: Any, shape: tuple[int, ...], configs: Mapping[str, Any]) -> None:
    """Make paths of a matrix [out, in], or of a stack [E, out, in], again if they have another shape."""
    *stack, wrapper.out_features, wrapper.in_features = shape
    for adapter, a in list(wrapper.lora_A.items()):
        b = wrapper.lora_B[adapter]
        if (b.out_features, a.in_features) == shape[-2:]:
            continue
        rank = math.prod(stack) * wrapper.r[adapter]
        wrapper.lora_A[adapter] = _linear_like(a, shape[-1], rank)
        wrapper.lora_B[adapter] = _linear_like(b, rank, shape[-2])
        wrapper.reset_lora_parameters(adapter, configs[adapter].init_lora_weights)


def _linear_like(old: nn.Linear, inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False, device=old.weight.device, dtype=old.weight.dtype)
    made.requires_grad_(old.weight.requires_grad)
    return made
