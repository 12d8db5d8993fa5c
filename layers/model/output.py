"""Output of a model: a dict whose entries are attributes, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


class ModelOutput(OrderedDict[str, Any]):
    """Built from keywords or, by wrappers that convert outputs, from a mapping. Entries that are None are
    left out. Declared entries are attributes, None if missing. As in transformers, `output[0]` and
    `output[:2]` index the entries that are there, in the order loss, logits, hidden_states, and `to_tuple()`
    returns them all; iterating gives names, as for any dict.

    Ordered, since FSDP2 (a policy with output_dtype) would make a plain dict of any other.
    """

    def __init__(self, entries: Mapping[str, Any] | None = None, /, **named: Any):
        entries = {**(entries or {}), **named}
        super().__init__({name: value for name, value in entries.items() if value is not None})

    def __getitem__(self, name: Any) -> Any:
        return self.to_tuple()[name] if isinstance(name, int | slice) else super().__getitem__(name)

    def to_tuple(self) -> tuple[Any, ...]:
        """The entries without their names."""
        return tuple(self.values())

    def __init_subclass__(cls) -> None:
        # Wrappers (FSDP, DDP, torch.compile) find the tensors of an output through this registry.
        _pytree.register_pytree_node(
            cls,
            lambda output: (list(output.values()), list(output.keys())),
            lambda values, names: cls(**dict(zip(names, values, strict=True))),
            serialized_type_name=f"{cls.__module__}.{cls.__name__}",
        )


class CausalLMOutput(ModelOutput):
    """`loss` (float32 scalar), `logits` ([batch, seq, V]), `hidden_states` (a tuple of [batch, seq, H]),
    `mtp_loss` and `indexer_loss` (float32 scalars), each only if present; `output.loss`, `output["loss"]`.
    """

    @property
    def loss(self) -> Tensor | None:
        return self.get("loss")

    @property
    def logits(self) -> Tensor | None:
        return self.get("logits")

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        return self.get("hidden_states")

    @property
    def mtp_loss(self) -> Tensor | None:
        return self.get("mtp_loss")

    @property
    def indexer_loss(self) -> Tensor | None:
        return self.get("indexer_loss")

    @property
    def routed_experts(self) -> Tensor | None:
        return self.get("routed_experts")


class DistillationOutput(CausalLMOutput):
    """Result of `model.distill`: `loss`, and its parts without gradients and weights."""

    @property
    def divergence(self) -> Tensor:
        return self["divergence"]

    @property
    def hard_loss(self) -> Tensor | None:
        return self.get("hard_loss")


class ScoreOutput(ModelOutput):
    """Result of `model.score`, [batch, seq - 1] or [batch, seq], each only if requested.

    Raises:
        TypeError: a wrapper rounds the scores, which would change the loss.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"{name} would be rounded to {value.dtype}: the model is wrapped with an output_dtype (of "
                "FSDP2's MixedPrecisionPolicy; accelerate sets one by itself), and scores are float32; make "
                "that output_dtype torch.float32"
            )
        super().__setitem__(name, value)

    @property
    def log_probs(self) -> Tensor:
        return self["log_probs"]

    @property
    def entropy(self) -> Tensor | None:
        return self.get("entropy")

    @property
    def is_top1(self) -> Tensor | None:
        return self.get("is_top1")

    @property
    def log_sum_sq_probs(self) -> Tensor | None:
        return self.get("log_sum_sq_probs")

    @property
    def weighted_sum(self) -> Tensor | None:
        return self.get("weighted_sum")

    @property
    def router_loss(self) -> Tensor | None:
        return self.get("router_loss")

    @property
    def routed_experts(self) -> Tensor | None:
        return self.get("routed_experts")
