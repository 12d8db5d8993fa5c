"""MiniMax-Text-01 (MiniMax, 2025, arXiv:2501.08313): lightning attention in seven of every eight layers,
softmax attention in the others, and Mixtral's experts. Branches are added to the outputs of the norms before
them.
"""

from dataclasses import replace

from liger_models.architectures.common import (
    FULL,
    LINEAR,
    activation,
    attention,
    chosen_experts,
    decoder,
    expert_layouts,
    layer_types,
)
from liger_models.architectures.mixtral import IN_BLOCKS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, LightningSpec, ModelSpec, NormSpec

DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


@register(
    "minimax",
    reference="MiniMaxForCausalLM",
    layouts=(
        Layout(IN_BLOCKS),
        *expert_layouts(),
    ),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    carried=lambda c: tuple(f"*.self_attn.{name}" for name in DECAYS),
    unread={"block_size": "a setting of the reference's computation, with the same results"},
)
def minimax(c: HFConfig) -> ModelSpec:
    norm = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5))
    full = attention(c, window=c.take_count("sliding_window", None), theta=1e6)
    moe = chosen_experts(c, ("num_local_experts", "num_experts"), size="intermediate_size")
    kinds = layer_types(c, lambda i: LINEAR if i % 2 else FULL, (LINEAR, FULL))
    ((a, x), (b, y), of_mlp) = (
        [c.take_number(f"{part}_{factor}_factor", 1) for factor in ("alpha", "beta")]
        for part in ("full_attn", "linear_attn", "mlp")
    )
    blocks = []
    for layer, kind in enumerate(kinds):
        decays = decays_of(full.num_attention_heads, layer, len(kinds))
        linear = LightningSpec(decays, full.head_dim, activation(c))
        mixer, stream, branch = (full, a, x) if kind == FULL else (linear, b, y)
        block = BlockSpec(mixer, moe, norm, "from_norms", stream_scales=(stream, of_mlp[0]))
        blocks.append(replace(block, branch_scales=(branch, 1.0, of_mlp[1])))
    return decoder(c, blocks, norm)


def decays_of(heads: int, layer: int, layers: int) -> tuple[float, ...]:
    """Decays of the heads of a layer, which are lower in later layers (section 2.2)."""
    share = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    return tuple(2.0 ** (-8 * head / heads) * share for head in range(1, heads + 1))


# -- tests

for_tests(
    "minimax",
    tiny={
        "num_hidden_layers": 3,
        "rms_norm_eps": 3e-3,  # the norm of the embeddings hides their scale otherwise
        "layer_types": [FULL, LINEAR, LINEAR],
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 7,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "block_size": 8,
        **{
            f"{part}_alpha_factor": n
            for part, n in (("full_attn", 1.5), ("linear_attn", 1.75), ("mlp", 1.25))
        },
        **{f"{part}_beta_factor": n for part, n in (("full_attn", 0.5), ("linear_attn", 0.75), ("mlp", 0.9))},
    },
    variants={"in turns": {"layer_types": ...}},
    skip={
        "key:num_experts": "another name of num_local_experts",
        "field:MoESpec.softmax_after_top_k": "the same function as renormalised shares of all",
    },
)
