"""Causal language models whose labels transformers' Trainer shifts under label smoothing.

Trainer decides this by the name of the model's class. It knows the text models of transformers alone: not the
classes of multimodal models, and not the name in config.json where another family's class runs a model.
"""

from __future__ import annotations

from torch import nn

from liger_models.architectures import Architecture

NAME = "LlamaForCausalLM"


class KnownToTrainer(nn.Module):
    """Mixin: answers Trainer with the name of a class whose labels it shifts, and prints `own_name`."""

    architecture: Architecture

    @property
    def own_name(self) -> str:
        return self.architecture.reference

    def _get_name(self) -> str:
        return NAME

    def __repr__(self) -> str:
        return self.own_name + super().__repr__().removeprefix(self._get_name())
