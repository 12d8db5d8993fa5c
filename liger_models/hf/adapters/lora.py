"""PEFT's LoRA layers on our models, run by our operation (layers/projections/low_rank.py).

    LowRankLinear(x) = base_layer(x) + sum of scaling[a] * lora_B[a](lora_A[a](lora_dropout[a](x)))

PEFT makes its layers, and then notes its configs on the model that it has adapted (`model.peft_config =
...`). Our models, native or registered, take that as the sign to look through their layers (`take_over`): a
`peft.tuners.lora.Linear` becomes a `LowRankLinear`, which is the same object with the same parameters, names,
files, merging and switches, and another forward. Nothing of PEFT is changed, and models of others never come
here.

What our operation does not cover runs as PEFT has it, in the same layer (hf/peft_forward.py): variants
(DoRA, aLoRA, ...), adapters that a call names for each row, merged and disabled adapters, hooks on parts of
the layer, parts that are sharded or replaced. A layer of PEFT that has attributes which are unknown here is
left as it is.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import layer as peft_lora
from torch import Tensor, nn

from liger_models.hf.adapters import peft_forward
from liger_models.hf.adapters.peft_layers import active_adapters, costs_of, is_known
from liger_models.layers.projections.in_place import change_class
from liger_models.layers.projections.low_rank import low_rank_linear, projection_of
from liger_models.layers.projections.low_rank_plan import Projection
from liger_models.layers.recompute.activation_memory import ActivationMemory


def take_over(model: nn.Module) -> None:
    """Run PEFT's LoRA layers in a model by our operation, wherever it can."""
    for module in model.modules():
        if type(module) is peft_lora.Linear and is_known(module):
            change_class(module, LowRankLinear)
        elif type(module).__module__ in ("peft.tuners.lora.bnb", "bitsandbytes.nn.modules"):
            from liger_models.hf.adapters import quantised_lora  # which imports bitsandbytes

            quantised_lora.take_over(module)
        else:
            peft_forward.take_over(module)


class LowRankLinear(peft_lora.Linear):  # type: ignore[misc]
    """PEFT's LoRA layer with our forward."""

    activation_memory: ActivationMemory = "lean"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of the base layer's output."""
        projection = None if args or kwargs else self.low_rank_projection()
        if projection is None or not projection.adapters:
            return peft_forward.keep_input_alone(self, super().forward, x, *args, **kwargs)
        return low_rank_linear(x, projection)

    def low_rank_projection(self) -> Projection | None:
        """The layer as layers/projections/low_rank.py takes it, or None where PEFT's own forward must run."""
        base = projection_of(self.base_layer)
        adapters = active_adapters(self)
        if base is None or adapters is None:
            return None
        return Projection(base.weight, base.bias, adapters)

    def adapter_costs(self) -> dict[str, Any]:
        """As layers/memory/adapters.py asks."""
        projection = self.low_rank_projection()
        return costs_of(self, None if projection is None else projection.adapters)
