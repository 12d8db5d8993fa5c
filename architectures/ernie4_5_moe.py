"""ERNIE 4.5 with experts (Baidu, 2025): ERNIE 4.5 with experts in some layers, chosen by a float32 softmax
and a correction bias, and shared experts.
"""

from liger_models.architectures.common import attention, chosen_experts, decoder, expert_layouts, mlp
from liger_models.architectures.common.deepseek import SHARED_EXPERTS
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, NormSpec

ON_DISK = (".router.correction_bias", ".moe_statics.e_score_correction_bias")
IN_MEMORY = (".router.correction_bias", ".gate.moe_statics.e_score_correction_bias")
AS_A_ROW = (("*.correction_bias", "1 e -> (1 e)"),)


@register(
    "ernie4_5_moe",
    reference="Ernie4_5_MoeForCausalLM",
    layouts=(
        *expert_layouts(ON_DISK, SHARED_EXPERTS, permuted=AS_A_ROW),
        *expert_layouts(IN_MEMORY, SHARED_EXPERTS, permuted=AS_A_ROW)[1:],
    ),
    carried=lambda c: ("model.mtp_*",),  # multi-token prediction, which the reference does not run
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "router_aux_loss_coef": 0.001,
    },
    fixed={"moe_gate": "topk", "moe_norm_min": 1e-12, "moe_use_aux_free": True},
    unread={"moe_capacity": "no token is dropped, by the reference neither"},
)
def ernie4_5_moe(c: HFConfig) -> ModelSpec:
    norm, bias = NormSpec(eps=c.take_number("rms_norm_eps", 1e-5)), c.take_flag("use_bias", False)
    attn, dense = attention(c, bias=bias, interleaved=True, theta=500000.0), mlp(c, bias=bias)
    width = c.take_count("moe_num_shared_experts", least=0) * c.take_count("moe_intermediate_size")
    sparse = chosen_experts(
        *(c, ("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok")),
        correction_bias=True,
        float32_router=True,
        shared_expert=MLPSpec(width, dense.activation, bias) if width else None,
    )
    blocks = [BlockSpec(attn, sparse if has else dense, norm) for has in layers_with_experts(c)]
    return decoder(c, blocks, norm, head_bias=bias)


def layers_with_experts(c: HFConfig) -> list[bool]:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`."""
    layers, every = c.take_count("num_hidden_layers"), c.take_count("moe_layer_interval", 1)
    first, last = (c.take_count(f"moe_layer_{end}_index", least=-1) for end in ("start", "end"))
    last = layers - 1 if last == -1 else last
    return [(i + 1) % every == 0 and first <= i <= last for i in range(layers)]


# -- tests

for_tests(
    "ernie4_5_moe",
    tiny={
        "use_bias": True,
        "pad_token_id": 0,
        "moe_num_experts": 4,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "tie_word_embeddings": True,
    },
    variants={
        "every_second": {"moe_layer_interval": 2},
        "not_the_last": {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_num_shared_experts": 0},
    },
    skip={
        "key:num_experts": "another name of moe_num_experts",
        "key:num_experts_per_tok": "another name of moe_k",
    },
)
