"""Warning about tokens that the model has never seen and cannot learn: a base model with a chat template."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.models.causal_lm import LigerCausalLM
from liger_models.training.data.corpora.learned_tokens import LearnedTokens
from liger_models.training.text.tokenizer import TextTokenizer

NEAR_ZERO = 1e-3  # of the median norm of all rows; trained rows differ by factors of a few


def untrained_rows_warning(
    model: LigerCausalLM, learned: LearnedTokens, tokenizer: TextTokenizer
) -> str | None:
    """Warning for data whose tokens have frozen rows near zero in the embedding or the head, as with
    adapters; None if there are none.
    """
    embedding, head = model.embed_tokens.weight, model.lm_head.weight
    # Embedding rows of image and video placeholders are unused.
    replaced = {getattr(model.spec.vision, name, None) for name in ("image_id", "video_id")}
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
