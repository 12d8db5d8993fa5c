"""The trained part of a model: frozen weights, rows of new tokens, and rows that it can hardly learn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.adapter import LowRankAdapter
from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.errors import ConfigError
from liger_models.layers.projections.stored_weight import kept_weights
from liger_models.models.base_model import LigerBaseModel
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.models.classifier import LigerSequenceClassifier
from liger_models.models.ternary import check_run
from liger_models.training.config import TrainConfig
from liger_models.training.data.corpora.learned_tokens import LearnedTokens
from liger_models.training.processes.world import World
from liger_models.training.text.added_tokens import rows_of
from liger_models.training.text.tokenizer import TextTokenizer

NEAR_ZERO = 1e-3  # of the median norm of all rows; trained rows differ by factors of a few


def check_language_model(model: LigerCausalLM, config: TrainConfig) -> None:
    """
    Raises:
        ConfigError: the model does not predict tokens from those before.
    """
    kinds = {LigerBaseModel: "base model without a head", LigerSequenceClassifier: "sequence classifier"}
    for kind, name in kinds.items():
        if isinstance(model, kind):
            raise ConfigError(
                f"{config.model} is a {name}, but objective {config.objective} trains language models; "
                "choose one, or objective reward"
            )
    if model.spec.is_bidirectional:
        raise ConfigError(
            f"{config.model} has bidirectional attention, so each token attends to those that it would "
            f"predict, but objective {config.objective} trains causal language models; choose one, or "
            "objective reward"
        )


def new_rows(config: TrainConfig, origin: Callable[[], Path], tokenizer: TextTokenizer) -> range:
    """Ids of the tokens that are new to the model from which a run begins.

    Args:
        origin: the folder of that model's tokenizer.
        tokenizer: the run's.

    Raises:
        ConfigError: new tokens for an adapter that is trained further.
    """
    if config.adapter:
        ids = LowRankAdapter.open(Path(config.adapter), config.model).tokens
        rows = range(ids[0], ids[-1] + 1) if ids else range(0)
        if config.add_tokens or ids != list(rows):
            found = f"add_tokens {config.add_tokens}" if config.add_tokens else f"trained rows of {ids[:8]}"
            raise ConfigError(
                f"{config.adapter} is trained further, with {found}, but an adapter can get no further "
                "tokens, and its rows must be adjacent; merge it (liger-models merge) and train new "
                "adapters"
            )
        return rows
    if not config.add_tokens:
        return range(0)
    return rows_of(config.add_tokens, TextTokenizer(origin()), tokenizer)


def check_new_rows_are_trained(model: LigerCausalLM) -> None:
    """Refuse frozen rows of new tokens, about which the model could learn little.

    Raises:
        ConfigError: the embedding or the head is frozen.
    """
    for name in model.tables_of_vocabulary:
        table: Any = model.get_submodule(name)
        if not table.weight.requires_grad:
            raise ConfigError(
                f"add_tokens adds rows to {name}, which freeze or train_only freezes; train it, too"
            )


def split_patterns(text: str) -> tuple[str, ...]:
    """The patterns in a text, separated by commas."""
    return tuple(filter(None, (pattern.strip() for pattern in text.split(","))))


def freeze(model: LigerCausalLM, patterns: Sequence[str], train_only: Sequence[str] = ()) -> None:
    """Freeze some of a model's parameters: see its `freeze`. Projections are split if these divide them.

    Raises:
        ConfigError: a pattern that matches nothing or only some of one parameter's tensors, or nothing is
            left to train.
    """
    if not (patterns or train_only):
        return
    asked = f"--freeze {','.join(patterns)}" if patterns else ""
    asked += f"{' ' * bool(asked)}--train-only {','.join(train_only)}" if train_only else ""
    try:
        if model.freezing_divides_projections(*patterns, train_only=train_only):
            model.split_projections()
        model.freeze(*patterns, train_only=train_only)
    except ValueError as error:
        raise ConfigError(f"{asked}: {error}") from error
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"{asked}: nothing is left to train; freeze fewer parts")


def choose_trained(model: LigerCausalLM, config: TrainConfig) -> None:
    """Freeze the weights that the settings name, and train indexers if they ask for it.

    Raises:
        ConfigError: as for `freeze`; or no layer has an indexer, or other settings do not support its loss;
            or adapters would be merged into weights that the model rounds.
    """
    check_run(model.spec, config.merge)
    if config.objective_options.get("indexer_loss"):
        for option, unset in (("lora", None), ("cuda_graphs", False), ("sequence_parallel", 1)):
            if getattr(config, option) != unset:
                raise ConfigError(f"indexer_loss does not work with {option}: omit one of them")
        try:
            model.train_indexers()
        except ValueError as error:
            raise ConfigError(f"indexer_loss was given, but {error} ({config.model}); omit it") from None
    freeze(model, config.freeze, config.train_only)


def freezing_divide(config: TrainConfig, world: World) -> Callable[[LigerCausalLM], object] | None:
    """Function that divides a model over the processes. It freezes first, since this may split projections,
    which a divided model cannot.
    """
    divide = world.divide
    indexers = config.objective_options.get("indexer_loss")
    if divide is None or not (config.freeze or config.train_only or indexers):
        return divide

    def frozen_and_divided(model: LigerCausalLM) -> None:
        choose_trained(model, config)
        divide(model)

    return frozen_and_divided


def is_frozen(module: torch.nn.Module) -> bool:
    """Whether a module's weights are frozen, other than by being kept in quantised bits."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own) and not kept_weights(module)


def untrained_rows_warning(
    model: LigerCausalLM, learned: LearnedTokens, tokenizer: TextTokenizer
) -> str | None:
    """Warning for data whose tokens have frozen rows near zero in the embedding or the head, as with
    adapters; None if there are none.
    """
    embedding, head = model.embed_tokens.weight, model.lm_head.weight
    # Embedding rows of placeholders are unused.
    replaced = set(model.spec.placeholders.values())
    new: Any = getattr(model.embed_tokens, "trained_rows", None)
    added = set() if new is None else set(range(new.first, new.first + len(new.weight)))
    tables = [("embedding", embedding, learned.seen - replaced - added)]
    if head is not embedding and not hasattr(model.lm_head, "base_layer"):  # no adapter
        tables.append(("head", head, (learned.last | learned.within) - added))
    found = {name: rows for name, table, ids in tables if (rows := _near_zero(table, ids))}
    if not found:
        return None
    tokens = sorted({token for rows in found.values() for token in rows})
    names = ", ".join(str(tokenizer.backend.id_to_token(token)) for token in tokens[:8])
    return (
        f"the data have the tokens {names}{', ...' if len(tokens) > 8 else ''}, whose rows of the "
        f"{' and the '.join(found)} are near zero and frozen, so the model can learn little about them. This "
        "happens where a base model is trained with a chat template; use the instruct version of the model, "
        "a template of tokens that the model knows, or train all weights (without --lora)"
    )


@torch.no_grad()
def _near_zero(table: Tensor, ids: Collection[int]) -> list[int]:
    """Tokens whose rows of a frozen table are far smaller than others."""
    if table.requires_grad or is_sharded(table) or not ids:
        return []
    norms = torch.linalg.vector_norm(table, dim=1, dtype=torch.float32)
    within = [token for token in sorted(ids) if token < len(norms)]
    small = norms[within] <= NEAR_ZERO * norms.median()
    return [token for token, is_small in zip(within, small.tolist(), strict=True) if is_small]
