"""The size of a vocabulary: rows of the embedding and of the head, and the config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.errors import ConfigError
from liger_models.layers.model.head import LMHead
from liger_models.layers.parts.embedding import TokenEmbedding
from liger_models.layers.specs import ModelSpec
from liger_models.models.new_rows import AT_ONCE, mean_row


def check_vocabulary(spec: ModelSpec, size: int) -> None:
    """Check that a model can have a vocabulary of this size.

    Raises:
        ConfigError: it cannot.
    """
    known = spec.per_layer_vocab_size
    ids = {"the padding token": spec.padding_idx}
    ids |= {f"{kind} tokens": number for kind, number in spec.placeholders.items()}
    beyond = [(name, token) for name, token in ids.items() if token is not None and token >= size]
    if size < 1:
        raise ConfigError(f"a vocabulary of {size} tokens; expected 1 or more")
    if spec.extra_ids and size != spec.vocab_size:
        raise ConfigError(
            f"this model has embeddings of {spec.extra_ids} more ids right after its vocabulary of "
            f"{spec.vocab_size}, such as the image token's, so the vocabulary cannot change its size"
        )
    if spec.predicted_ids is not None and size != spec.vocab_size:
        raise ConfigError(
            f"of this model's vocabulary of {spec.vocab_size} only the first {spec.predicted_ids} ids are "
            "predicted, so it cannot change its size"
        )
    if known is not None and size > known:
        raise ConfigError(
            f"the layers of this model have their own inputs for {known} ids, so the vocabulary can have "
            f"{known} at most; found {size}"
        )
    if size < spec.vocab_size and beyond:
        raise ConfigError(f"a vocabulary of {size} tokens would lack the id {beyond[0][1]} of {beyond[0][0]}")


def with_vocab_size(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Copy of a config.json's content with another `vocab_size`, in its `text_config` if it has one."""
    new = copy.deepcopy(dict(config))
    text = new["text_config"] if isinstance(new.get("text_config"), dict) else new
    text["vocab_size"] = size
    if "vocab_size" in new:
        new["vocab_size"] = size
    return new


@torch.no_grad()
def resize(model: Any, size: int) -> None:
    """Change the number of rows of a LigerCausalLM's tables in place: see `resize_token_embeddings`.

    Raises:
        ConfigError: the model cannot have this vocabulary, is sharded, or is wrapped by adapters.
    """
    check_vocabulary(model.spec, size)
    tables: list[tuple[str, Any]] = [(name, getattr(model, name)) for name in model.tables_of_vocabulary]
    for name, table in tables:
        if any(is_sharded(p) for p in table.parameters()):
            raise ConfigError(
                f"{name} is sharded over processes (FSDP2), so its rows cannot be changed: load the model "
                "with from_hub(..., new_tokens=range(OLD, NEW), shard=...), or resize it before it is sharded"
            )
        wanted = TokenEmbedding if name == "embed_tokens" else LMHead
        if type(table) is not wanted or getattr(table, "trained_rows", None) is not None:
            raise ConfigError(
                f"{name} is a {type(table).__name__} with adapters, so its rows cannot be changed: resize "
                "the vocabulary before adapters are added, or after they are merged"
            )
    made: dict[int, nn.Parameter] = {}  # keeps tied parameters tied
    for name, table in tables:
        for kind, old in list(table.named_parameters(recurse=False)):
            if id(old) not in made:
                made[id(old)] = nn.Parameter(_resized(old, size), requires_grad=old.requires_grad)
            setattr(table, kind, made[id(old)])
            forms = model._canonical_forms
            if (form := forms.get(path := f"{name}.{kind}")) is not None:
                forms[path] = form.with_refs(lambda ref: replace(ref, shape=(size, *ref.shape[1:])))
    for name, table in tables:
        setattr(table, "num_embeddings" if name == "embed_tokens" else "out_features", size)
    model.spec = replace(model.spec, vocab_size=size)
    vars(model.config).update(with_vocab_size(model.config.to_dict(), size))


def _resized(old: Tensor, size: int) -> Tensor:
    """Return [size, ...]: the first rows of `old`, then copies of the mean of all its rows."""
    new = old.new_empty(size, *old.shape[1:])
    new[: len(old)] = old[:size]
    if size > len(old) and not old.is_meta:
        new[len(old) :] = mean_row(old.split(AT_ONCE)).to(old)
    return new
