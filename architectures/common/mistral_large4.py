"""Mistral Large 4's language model, from its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from liger_models.architectures.common.deepseek import (
    choices_of_keys,
    dense_or_sparse,
    indexed_layers,
    indexer,
    latent_attention,
    older_choices,
    routed_and_shared_experts,
)
from liger_models.architectures.common.mlps import mlp
from liger_models.architectures.common.model import decoder
from liger_models.architectures.common.rotary import turning_layers
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2048.0, "attention_factor": 1.0},
    **{"original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0},
}
"""Default rotary settings."""


def language_model(c: HFConfig) -> ModelSpec:
    """The language model, from its config."""
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    c.take_only(q_lora_rank=None)
    turned = latent_attention(c, interleaved=True, scaling=YARN)
    assert turned.rope is not None
    rope = replace(turned.rope, learned=True)
    turned = replace(turned, norm=norm, rope=rope, learned_query_scale=True)
    dim = turned.qk_head_dim
    still = replace(turned, qk_nope_head_dim=dim, qk_rope_head_dim=0, rope=None)
    indexed_layers(c)
    turns = turning_layers(c)
    sources = latent_sources(c, turns)
    mixers = [
        replace(turned if turns[i] else still, latents_of=None if source == i else source)
        for i, source in enumerate(sources)
    ]
    mixers = choices_of_keys(c, mixers, indexer(c, interleaved=True), older_choices(c))
    sparse = routed_and_shared_experts(c, renormalize=True, float32_router=True)
    inner = dense_or_sparse(c, mlp(c), sparse, c.take_count("first_k_dense_replace", 1, least=0))
    share = {layer for i, source in enumerate(sources) if source != i for layer in (i, source)}
    blocks = [
        BlockSpec(*parts, norm, "shared_latents" if i in share else "pre_norm")
        for i, parts in enumerate(zip(mixers, inner, strict=True))
    ]
    model = decoder(c, blocks, norm, logit_softcap=c.take_number("final_logit_softcapping", 30.0))
    c.finish()
    return model


def latent_sources(c: HFConfig, turns: Sequence[bool]) -> list[int]:
    """The layer whose latents each layer reads: its own index, or an earlier layer's.

    Raises:
        ConfigError: not one such layer each, or another one than the reference would read, the last before it
            that shares its latents and is alike with or without positions.
    """
    found = c.take("kv_source_layers", None)
    found = list(range(len(turns))) if found is None else found
    last: dict[bool, int] = {}
    good = isinstance(found, list) and len(found) == len(turns)
    for i, source in enumerate(found if good else ()):
        if source == i:
            last |= {turns[i]: i} if i in found[i + 1 :] else {}
        good = good and type(source) is int and source in (i, last.get(turns[i]))
    if not good:
        raise ConfigError(
            f"{c.name}: kv_source_layers must have for each of {len(turns)} layers its own index, or that "
            "of the last layer before it whose latents are shared and that is like it with or without rotary "
            f"positions (no_rope_layers), found {abbreviate(found)}"
        )
    return found
