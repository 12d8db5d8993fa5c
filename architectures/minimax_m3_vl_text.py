"""MiniMax-M3, its text part (MiniMax, 2026): on some layers an indexer chooses blocks of keys for each group
of heads; QK-norm per head, and clamped activations in MLPs and experts.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import (
    attention,
    aux_loss_coef,
    decoder,
    experts_and_chosen,
    layer_types,
)
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import (
    AttentionSpec,
    BlockIndexerSpec,
    BlockSpec,
    ClampedSwiGLU,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    QKNormSpec,
)

SAVED = (
    (".shared_expert.", ".shared_experts."),
    (".router.correction_bias", ".gate.e_score_correction_bias"),
    (".router.", ".gate."),
)
RELEASED = (
    (".mlp.router.correction_bias", ".block_sparse_moe.e_score_correction_bias"),
    (".mlp.router.", ".block_sparse_moe.gate."),
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".mlp.shared_expert.", ".block_sparse_moe.shared_experts!"),  # only routed experts have other names
    *((f".mlp.{name}_proj.", f".mlp!{name}_proj.") for name in ("gate", "up", "down")),
    *((".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."), ("!", ".")),
    (".indexer.", ".index_"),
)
WHOLE = ("*.experts.*", "*.gate_up_proj.*")
FULL, SPARSE = "full_attention", "minimax_m3_sparse"
FLAT = {"sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim"}
FLAT |= {"sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks"}
FLAT |= {"sparse_local_block": "index_local_blocks"}


@register(
    "minimax_m3_vl_text",
    reference="MiniMaxM3VLForCausalLM",
    # The first is saved, and the last is that of transformers' modules.
    layouts=(Layout(SAVED, WHOLE), Layout(RELEASED, of_parts=True), Layout(SAVED, WHOLE)),
    defaults={
        **{"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 524288},
        **{"dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "num_local_experts": 128},
        **{"num_experts_per_tok": 4, "router_aux_loss_coef": 0.001},
    },
    unread={"hidden_act": "the clamped activation has no other name that the reference reads"},
)
def minimax_m3_vl_text(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6), offset=1.0, cast="gemma")
    attn = replace(attention(c, partial=1.0, theta=5e6), qk_norm=QKNormSpec(norm))
    act = ClampedSwiGLU(c.take_number("swiglu_alpha", 1.702), c.take_number("swiglu_limit", 7.0))
    dense, shared = (MLPSpec(c.take_count(f"{kind}_intermediate_size"), act) for kind in ("dense", "shared"))
    moe = MoESpec(
        *experts_and_chosen(c, ("num_local_experts", "num_experts")),
        intermediate_size=c.take_count("intermediate_size"),
        activation=act,
        score="sigmoid",
        correction_bias=True,
        routed_scaling_factor=c.take_number("routed_scaling_factor", 2.0),
        shared_expert=shared,
        aux_loss_coef=aux_loss_coef(c),
    )
    kinds = types(c, "mlp_layer_types", ("dense", "sparse"), c.take("moe_layer_freq", None), 1)
    mlps = [moe if kind == "sparse" else dense for kind in kinds]
    mixers = sparse_layers(c, attn)
    return decoder(c, [BlockSpec(*parts, norm) for parts in zip(mixers, mlps, strict=True)], norm)


def types(c: HFConfig, key: str, names: tuple[str, str], numbers: Any, usual: int) -> list[str]:
    """Type of each layer, from `key` or an older list of 0 for the first name and others for the second."""
    count = c.take_count("num_hidden_layers")
    numbers = [usual] * count if numbers is None else numbers
    good = isinstance(numbers, list) and len(numbers) == count
    return layer_types(c, lambda i: names[bool(numbers[i])] if good else str(numbers), names, key)


def sparse_layers(c: HFConfig, attn: AttentionSpec) -> list[AttentionSpec]:
    """The attention of each layer, with an indexer or without, from flat keys or an older table of them.

    Raises:
        ConfigError: other keys in the table, ones that contradict the flat keys, or sizes that do not fit.
    """
    table = c.take("sparse_attention_config", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{c.name}: sparse_attention_config must be an object, found {table!r}")
    table = {**table}
    kinds = types(c, "layer_types", (FULL, SPARSE), table.pop("sparse_attention_freq", None), 0)
    usual: dict[str, int] = {"index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128}
    usual |= {"index_topk_blocks": 16, "index_local_blocks": 1}
    stated: dict[str, Any] = {FLAT.get(key, key): value for key, value in table.items() if value is not None}
    counts = {key: c.take_count(key, stated.get(key, usual[key]), least=0) for key in usual}
    others = {key: value for key, value in stated.items() if counts.get(key) != value and value is not False}
    groups, dim, size, top_k, local = counts.values()
    turned = attn.rope.dim if attn.rope else 0
    if others or c.take_count("rotary_dim", turned) != turned:
        raise ConfigError(
            f"{c.name}: sparse_attention_config says {others} and rotary_dim {c.take('rotary_dim', None)}; "
            f"expected {counts}, {turned} rotated dimensions (partial_rotary_factor) and nothing else"
        )
    fits = groups and size and top_k >= max(1, local) and dim >= turned
    if not fits or attn.num_attention_heads % groups:
        raise ConfigError(
            f"{c.name}: found {counts}; expected a divisor of the {attn.num_attention_heads} heads, at least "
            f"{turned} dimensions, which are rotated, and at least as many blocks as local ones"
        )
    indexer = BlockIndexerSpec(groups, dim, size, top_k, local)
    return [replace(attn, indexer=indexer if kind == SPARSE else None) for kind in kinds]


# -- tests

for_tests(
    "minimax_m3_vl_text",
    tiny={
        "hidden_act": ...,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "intermediate_size": 24,
        "dense_intermediate_size": 56,
        "shared_intermediate_size": 40,
        "swiglu_limit": 1.0,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "rotary_dim": 8,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": [SPARSE, FULL, SPARSE],
        "index_n_heads": 2,
        "index_head_dim": 12,
        "index_block_size": 3,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
    },
    variants={
        "older names": {
            **dict.fromkeys(("layer_types", "mlp_layer_types", "index_n_heads", "index_head_dim"), ...),
            **dict.fromkeys(("index_block_size", "index_topk_blocks", "index_local_blocks"), ...),
            "moe_layer_freq": [1, 0, 1],
            "sparse_attention_config": {
                **{"sparse_attention_freq": [0, 1, 1], "sparse_num_index_heads": 4, "sparse_index_dim": 10},
                **{"sparse_block_size": 2, "sparse_topk_blocks": 4, "sparse_local_block": 2},
            },
        },
        "larger heads": {"head_dim": 24, "rotary_dim": 12},
        "no block is left out": {"index_topk_blocks": 7, "routed_scaling_factor": 1.3},
        "another block": {"index_topk_blocks": 3, "index_local_blocks": 2, "swiglu_alpha": 1.2},
    },
    skip={
        "key:num_experts": "another name of num_local_experts",
        "key:rotary_dim": "must agree with partial_rotary_factor, which the reference reads",
        "variant:head_dim_apart": "the same",
        "refusal:partial_rotary_factor": "the heads turn in part",
        "positions:given": "the reference takes positions for the places of keys",
        "padding:left": "the reference counts blocks from the first place, padding included",
        "norm:self_attn.indexer.q_norm": "a positive factor of all scores of a query changes no choice",
    },
)
