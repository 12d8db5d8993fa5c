"""PEFT's LoRA on stacked experts, run in the experts' grouped products (kernels/experts/_expert_paths.py).

For `target_parameters`, PEFT wraps the experts in one `ParamWrapper` per stack, one inside another. Their
forward computes W + s B A of the whole stack, keeps it for the backward pass, and projects a gradient of the
same size. Here each wrapper passes its low-rank paths to the layer that it wraps, and neither exists.
Parameters, names, files, merging and switches stay PEFT's, as in lora.py.

PEFT's own forward runs for disabled and merged adapters, for stacks of biases, and for adapters or experts
that are not plain tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from peft.tuners.lora import layer as peft_lora
from torch import Tensor, nn

from liger_models.convert.checkpoints.adapter_forms import StackOrder, stack_order
from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.errors import ConfigError
from liger_models.hf.adapters.kept_bits import refuse_merging
from liger_models.hf.adapters.peft_layers import active_adapters, has_only
from liger_models.kernels import ExpertPath
from liger_models.kernels.experts._expert_paths import padded_rank
from liger_models.layers.experts.moe import NO_PATHS, Experts, Paths
from liger_models.layers.projections.in_place import change_class


def take_over(wrapper: nn.Module) -> None:
    """Run a PEFT wrapper of stacked experts by our operation, if all its attributes are known."""
    if type(wrapper) is peft_lora.ParamWrapper and isinstance(wrapper.get_base_layer(), Experts):
        known = has_only(wrapper, "parameter_name", "num_experts", "_param_ndim", "_did_swap_in_out_features")
        if known and wrapper.parameter_name not in Experts.stacked_vectors:
            change_class(wrapper, ParamWrapper)


def stacks_of_experts(model: Any, frozen: Collection[str]) -> dict[str, tuple[str, StackOrder | None]]:
    """Map the experts' matrices of a native model to their names in transformers' own model, for adapters of
    all of them, and to their order there.

    Args:
        frozen: paths of frozen modules, which are left out, as are modules for multi-token prediction.

    Raises:
        ConfigError: there are none, or adapter files cannot express an adapter of them.
    """
    weight_map = model.weight_map(model.modules_layout)
    found = {}
    for path, experts in model.named_modules():
        if not isinstance(experts, Experts) or path in frozen or path.startswith("mtp."):
            continue
        for name in (experts.first, "down_proj"):
            stack = f"{path}.{name}"
            expr = weight_map.get(stack)
            p = experts.get_parameter(name)
            refs = [] if expr is None else list(expr.refs())
            if len(refs) != 1 or not (is_sharded(p) or type(p) is nn.Parameter):
                raise ConfigError(
                    f"lora: {stack} is quantised by a library, or no single tensor in transformers' own "
                    "model, so its adapter cannot be written here; leave out experts, or use PEFT on the "
                    "classes of liger_models.hf"
                )
            (ref,) = refs
            found[stack] = ref.name, stack_order([expr], model.architecture.says_transposed)
    if not found:
        raise ConfigError("lora: all experts are frozen, or the model has none; leave out experts")
    return found


class ParamWrapper(peft_lora.ParamWrapper):  # type: ignore[misc]
    """PEFT's wrapper of a stack of experts' matrices with our forward. PEFT looks for this name."""

    def forward(self, x: Tensor, *args: Any, paths: Paths = NO_PATHS, **kwargs: Any) -> Tensor:
        """Map x [T, H] to [T, H]. `paths` belong to the wrappers around this one."""
        own = None if kwargs else self.low_rank_paths()
        if own is None:
            return super().forward(x, *args, paths=paths, **kwargs)
        return self.base_layer(x, *args, paths={**paths, self.parameter_name: own})

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Add adapters to the stack, as PEFT.

        Raises:
            ConfigError: the experts keep quantised bits.
        """
        refuse_merging(self.get_base_layer())
        super().merge(*args, **kwargs)

    def adapter_costs(self) -> dict[str, Any]:
        """Memory costs for layers/memory/adapters.py, with those of the wrappers inside this one: t of each
        stack, for each of a token's experts.
        """
        spec: Any = self.get_base_layer().spec
        inner = self.base_layer
        ranks = [len(path.a) // spec.num_experts for path in self.low_rank_paths() or ()]
        rank = spec.experts_per_token * padded_rank(ranks) if ranks else 0
        rank += inner.adapter_costs()["rank"] if isinstance(inner, ParamWrapper) else 0
        return {"rank": rank}

    def low_rank_paths(self) -> tuple[ExpertPath, ...] | None:
        """Return the active paths, or None where PEFT's own forward must run."""
        adapters, divided = active_adapters(self), self.get_base_layer().exchange is not None
        if adapters is None or not (divided or type(self.get_param()) is nn.Parameter):
            return None
        return tuple(ExpertPath(adapter.a, adapter.b, adapter.scale) for adapter in adapters)
