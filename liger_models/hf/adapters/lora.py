"""PEFT's LoRA layers on our models, run by our operation (layers/projections/low_rank.py).

    LowRankLinear(x) = base_layer(x) + sum of scaling[a] * lora_B[a](lora_A[a](lora_dropout[a](x)))

PEFT creates its layers, and then sets `model.peft_config`. Our models, native or registered, react to that
by going through their layers (`take_over`): a `peft.tuners.lora.Linear` becomes a `LowRankLinear`, the same
object with the same parameters, names, files, merging and switches, and another forward. PEFT itself and
other libraries' models are not changed.

PEFT's own forward runs in the same layer for cases that our operation does not cover (peft_forward.py):
variants (DoRA, aLoRA, ...), per-row adapters, merged and disabled adapters, hooks on parts of the layer,
sharded or replaced parts. A PEFT layer with unknown attributes is not touched.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import layer as peft_lora
from torch import Tensor, nn

from liger_models.hf.adapters import expert_lora, peft_forward
from liger_models.hf.adapters.kept_bits import adapt_kept_bits, refuse_merging
from liger_models.hf.adapters.peft_layers import active_adapters, add_paths, costs_of, is_known
from liger_models.layers.projections.float8 import runs_in_float8
from liger_models.layers.projections.in_place import change_class
from liger_models.layers.projections.low_rank import low_rank_linear, projection_of
from liger_models.layers.projections.low_rank_plan import Projection
from liger_models.layers.projections.ternary import is_ternary
from liger_models.layers.recompute.activation_memory import ActivationMemory


def take_over(model: nn.Module) -> None:
    """Run the PEFT LoRA layers of a model by our operation where possible.

    Raises:
        ConfigError: an adapter, of layers in quantised bits, that may need the weight.
    """
    for module in list(model.modules()):
        adapt_kept_bits(module, getattr(model, "peft_config", {}))
        if type(module) is peft_lora.Linear and is_known(module):
            change_class(module, LowRankLinear)
        elif type(module).__module__ in ("peft.tuners.lora.bnb", "bitsandbytes.nn.modules"):
            from liger_models.hf.adapters import quantised_lora  # imports bitsandbytes

            quantised_lora.take_over(module)
        else:
            expert_lora.take_over(module)
            peft_forward.take_over(module)


class LowRankLinear(peft_lora.Linear):  # type: ignore[misc]
    """PEFT's LoRA layer with our forward."""

    activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map x [..., in] to [..., out], in the dtype of the base layer's output."""
        projection = None if args or kwargs else self.low_rank_projection()
        if projection is None and (runs_in_float8(self.base_layer) or is_ternary(self.base_layer)):
            out = add_paths(self, x, *args, **kwargs)
            if out is not None:
                return out
        if projection is None or not projection.adapters:
            return peft_forward.keep_input_alone(self, super().forward, x, *args, **kwargs)
        return low_rank_linear(x, projection)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Add adapters to the base layer's weight, as PEFT.

        Raises:
            ConfigError: the base layer keeps quantised bits, or rounds its weight.
        """
        refuse_merging(self.get_base_layer())
        super().merge(*args, **kwargs)

    def low_rank_projection(self) -> Projection | None:
        """Return the layer for layers/projections/low_rank.py, or None where PEFT's own forward must run."""
        base = projection_of(self.base_layer)
        adapters = active_adapters(self)
        if base is None or adapters is None:
            return None
        return base._replace(adapters=adapters)

    def adapter_costs(self) -> dict[str, Any]:
        """Memory costs for layers/memory/adapters.py."""
        projection = self.low_rank_projection()
        return costs_of(self, None if projection is None else projection.adapters)
