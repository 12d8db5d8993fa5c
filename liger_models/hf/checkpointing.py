"""Gradient checkpointing switches of transformers and trainers, mapped to our activation memory levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from liger_models.layers.model.decoder import Decoder
from liger_models.layers.recompute.activation_memory import RERUN, ActivationMemory


class CheckpointingSwitches:
    """Mixin for a transformers model with a `base_decoder`."""

    base_decoder: Any
    disable_input_require_grads: Any
    enable_input_require_grads: Any

    @property
    def activation_memory(self) -> tuple[ActivationMemory, ...]:
        """The level of each layer: layers/recompute/activation_memory.py."""
        return Decoder.activation_memory.fget(self.base_decoder)  # type: ignore[attr-defined]

    def set_activation_memory(
        self, levels: str | Sequence[str], memory_budget: float | str | None = None
    ) -> None:
        """`layers.Decoder.set_activation_memory`."""
        Decoder.set_activation_memory(self.base_decoder, levels, memory_budget)

    def set_cuda_graphs(self, enabled: bool = True) -> None:
        """`layers.Decoder.set_cuda_graphs`."""
        Decoder.set_cuda_graphs(self.base_decoder, enabled)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """`layers.Decoder.activation_checkpointing_enable`: the level `checkpoint`."""
        Decoder.activation_checkpointing_enable(
            self.base_decoder, activation_checkpointing_kwargs, every_n_layers, offload
        )
        if getattr(self, "_hf_peft_config_loaded", False):
            self.disable_input_require_grads()  # a second registration would drop the handle of the first
            self.enable_input_require_grads()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Older name of `activation_checkpointing_enable`."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Restore the previous levels."""
        Decoder.gradient_checkpointing_disable(self.base_decoder)
        if getattr(self, "_hf_peft_config_loaded", False):
            self.disable_input_require_grads()

    activation_checkpointing_disable = gradient_checkpointing_disable

    def _set_gradient_checkpointing(self, enable: bool = True, *others: Any, **options: Any) -> None:
        """Hook for tools with their own checkpointing function (LLaMA-Factory); our level replaces it."""
        (self.activation_checkpointing_enable if enable else self.gradient_checkpointing_disable)()

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(level in RERUN for level in self.activation_memory)

    is_activation_checkpointing = is_gradient_checkpointing
