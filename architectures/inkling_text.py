"""Inkling (Thinking Machines, 2026), its text part: short convolutions after keys, values and both branches,
learned scores by distance in place of rotary positions, QK-norm, a sliding window on five layers of six, and
experts of every token that share in the router's softmax.
"""

from dataclasses import replace
from typing import Any

from liger_models.architectures.common import activation, decoder, experts_and_chosen, layer_types
from liger_models.architectures.common.grouped_attention import CONVOLVED, convolved_attention
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

FULL, SLIDING = CONVOLVED
NAMES = (
    *((f".{part}_sconv.", f".{part}_sconv.conv1d.") for part in ("k", "v", "attn", "mlp")),
    *((".self_attn.profiles", ".self_attn.rel_logits_proj.proj"), (".mlp_scale", ".mlp.global_scale")),
    *((".router.correction_bias", ".gate.e_score_correction_bias"), (".router.", ".gate.")),
    (".mlp.sinks.", ".mlp.shared_experts."),
)
WHOLE, OLDER = ("*.experts.*",), (".embed_tokens.embed_norm.", ".embed_norm.")
MTP = ("chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids")


@register(
    "inkling_text",
    reference="InklingForCausalLM",
    # The second is that of transformers before 5.23, and the last that of its modules.
    layouts=(Layout(NAMES, WHOLE), Layout((*NAMES, OLDER), WHOLE), Layout(NAMES, WHOLE)),
    carried=lambda c: ("model.mtp.*",) if c.take("num_mtp_layers", None) else (),
    defaults={
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
        **{"swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 128},
        **{"moe_intermediate_size": 3072, "n_routed_experts": 256, "num_experts_per_tok": 6},
    },
    fixed={"attention_dropout": 0.0, "shared_expert_sink": True},
    other_names={
        **{"sliding_window": "sliding_window_size", "sconv_kernel_size": "conv_kernel_size"},
        **{"embedding_multiplier": "logits_mup_width_multiplier", "num_local_experts": "n_routed_experts"},
    },
    unread={
        **{"tie_word_embeddings": "the head is one of its own", "number_of_conv_states": "it is always four"},
        "rms_norm_eps_moe_gate": "the router has no norm",
        **dict.fromkeys(MTP, "of modules for multi-token prediction, which the reference leaves out"),
    },
)
def inkling_text(c: HFConfig) -> ModelSpec:
    c.take("max_position_embeddings", None)  # there are no positions
    norm, layers = NormSpec(eps=c.take_number("rms_norm_eps", 1e-6)), c.take_count("num_hidden_layers")
    local, first = c.take("local_layer_ids", None), c.take_count("dense_mlp_idx", 0, least=0)
    slides = {i for i in range(layers) if (i + 1) % 6} if local is None else set(local)
    kinds = layer_types(c, lambda i: SLIDING if i in slides else FULL, (FULL, SLIDING))
    of_mlps = ("dense", "sparse")
    mlps = layer_types(c, lambda i: of_mlps[i >= first], of_mlps, "mlp_layer_types")
    act, dense = activation(c), c.take_count("dense_intermediate_size", None)
    # Where dense MLPs have a key of their own, the usual one is the experts'.
    width, of_experts = c.take_count("intermediate_size", 24576), c.take_count("moe_intermediate_size")
    moe = MoESpec(
        *experts_and_chosen(c, ("n_routed_experts",)),
        *(of_experts if dense is None else width, act),
        score="sigmoid",
        correction_bias=True,
        float32_router=True,
        routed_scaling_factor=c.take_number("route_scale", 8.0),
        sink_experts=c.take_count("n_shared_experts", 2),
    )
    parts: dict[str, Any] = {"dense": MLPSpec(dense or width, act), "sparse": moe}
    parts |= {kind: convolved_attention(c, kind, norm) for kind in (FULL, SLIDING)}
    both = zip(kinds, mlps, strict=True)
    blocks = [BlockSpec(parts[kind], parts[mlp], norm, topology="convolved") for kind, mlp in both]
    divisor, predicted = (
        c.take_number("logits_mup_width_multiplier", 24.0),
        c.take_count("unpadded_vocab_size", None),
    )
    model = decoder(c, blocks, norm, id_norm=norm, logit_scale=1 / divisor)
    predicted = None if predicted is None or predicted >= model.vocab_size else predicted
    return replace(model, tie_word_embeddings=False, predicted_ids=predicted)


# -- tests

for_tests(
    "inkling_text",
    tiny={
        **{
            "rope_parameters": ...,
            "max_position_embeddings": ...,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
        **{"swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8},
        **{"sliding_window_size": 7, "d_rel": 5, "rel_extent": 11, "log_scaling_n_floor": 3},
        **{"log_scaling_alpha": 0.7, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        **{"moe_intermediate_size": 24, "n_routed_experts": 5, "num_experts_per_tok": 2},
        **{"n_shared_experts": 3, "route_scale": 1.7, "logits_mup_width_multiplier": 0.7},
        **{"unpadded_vocab_size": 127, "conv_kernel_size": 3},
    },
    variants={
        "layers by number": {"layer_types": ..., "local_layer_ids": [1]},
        "all kinds by default": {"layer_types": ..., "mlp_layer_types": ..., "dense_mlp_idx": 1},
        "other names": {
            **{
                "conv_kernel_size": ...,
                "sconv_kernel_size": 2,
                "sliding_window_size": ...,
                "sliding_window": 5,
            },
            **{"logits_mup_width_multiplier": ..., "embedding_multiplier": 1.3},
            **{"n_routed_experts": ..., "num_local_experts": 4},
        },
        "width of dense MLPs": {"dense_intermediate_size": 40},
    },
    skip={
        **{
            f"swap:model.layers.{i}.self_attn.q_norm.weight": "only the product of both counts"
            for i in range(3)
        },
        "refusal:head_dim_by_division": "head_dim has a default",
        "refusal:odd_head_dim": "nothing rotates",
        "positions:given": "the reference scales queries by the count of tokens, whatever their positions",
    },
)
