"""Refusals of models that round their weights to three values (layers/projections/ternary.py)."""

from __future__ import annotations

from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec

_ROUNDS = "rounds its weights to three values (quantization_config)"


def packs_weights(spec: ModelSpec) -> bool:
    """Whether the checkpoint of a model holds weights of three values, packed: its config says so."""
    return spec.ternary is not None and not spec.ternary.rounds_weights


def check_loading(spec: ModelSpec, name: str, *, fresh: bool, merges: bool) -> None:
    """Raise ConfigError if a config, from `name`, is of packed weights, which a fresh model has not, or if an
    adapter cannot be merged into the model as it is read.
    """
    if fresh and packs_weights(spec):
        raise ConfigError(
            f"{name}: quantization_config has quantization_mode 'offline', of a checkpoint with packed "
            "weights; a fresh model has master weights: expected 'online'"
        )
    if merges and spec.ternary is not None:
        raise ConfigError(
            f"{name}: the model {_ROUNDS}, so that an adapter cannot be merged into them: load the base "
            "model, and put the adapter on it with PEFT"
        )


def check_run(spec: ModelSpec, merge: bool) -> None:
    """Raise ConfigError if a training run would merge adapters into rounded weights."""
    if merge and spec.ternary is not None:
        raise ConfigError(
            f"merge adds adapters to weights, but this model {_ROUNDS}, and would round the sums; omit it"
        )
