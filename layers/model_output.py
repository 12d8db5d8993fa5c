"""What a model returns: a dict whose entries are attributes too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree


class CausalLMOutput(OrderedDict[str, Any]):
    """`loss` (float32 scalar) and `logits` ([batch, seq, V]), each only if there is one; `output.loss`,
    `output["loss"]`.

    Made from names or, as wrappers that convert outputs make them again, from a mapping. None stands for no
    entry. An attribute that is not an entry is None for these two, and an AttributeError otherwise.

    Ordered, since FSDP2 (a policy with output_dtype) would make a plain dict of any other.
    """

    def __init__(self, entries: Mapping[str, Any] | None = None, /, **named: Any):
        entries = {**(entries or {}), **named}
        super().__init__({name: value for name, value in entries.items() if value is not None})

    @property
    def loss(self) -> Tensor | None:
        return self.get("loss")

    @property
    def logits(self) -> Tensor | None:
        return self.get("logits")


def _flatten(output: CausalLMOutput) -> tuple[list[Any], list[str]]:
    return list(output.values()), list(output.keys())


def _unflatten(values: Any, names: Any) -> CausalLMOutput:
    return CausalLMOutput(**dict(zip(names, values, strict=True)))


# Wrappers (FSDP, DDP, torch.compile) look for the tensors of an output through this registry.
_pytree.register_pytree_node(
    CausalLMOutput,
    _flatten,
    _unflatten,
    serialized_type_name="liger_models.layers.model_output.CausalLMOutput",
)
