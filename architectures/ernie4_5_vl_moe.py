"""ERNIE 4.5 VL (Baidu, 2025): ERNIE 4.5 with separate experts and routers for text and for images and videos,
positions on three axes, and an encoder for images and videos of any size.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.common.deepseek import SHARED_EXPERTS, dense_or_sparse
from liger_models.architectures.common.images import own_text, with_alternating_axes
from liger_models.architectures.common.mlps import experts_of_two_widths
from liger_models.architectures.encoders import qwen as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import BlockSpec, ModelSpec, NormSpec

RELEASED = (
    SHARED_EXPERTS,
    (".mlp.of_images.router.weight", ".mlp.gate.weight_1"),
    (".mlp.of_images.experts.", ".mlp.experts."),
    (".mlp.router.", ".mlp.gate."),
    (".biases.correction_bias", ".moe_statics.e_score_correction_bias"),
)
IN_MEMORY = (
    SHARED_EXPERTS,
    *((".mlp.of_images.", ".mlp.vision_moe."), (".mlp.router.", ".mlp.text_moe.router.")),
    (".mlp.experts.", ".mlp.text_moe.experts."),
    (".router.correction_bias", ".gate.moe_statics.e_score_correction_bias"),
    (".router.", ".gate."),
)
WHOLE = ("vision.encoder.layers.*.qkv_proj.*",)
AS_A_ROW = (("*.correction_bias", "1 e -> (1 e)"),)


@register(
    "ernie4_5_vl_moe",
    reference="Ernie4_5_VLMoeForConditionalGeneration",
    vision=True,
    layouts=(
        Layout(
            RELEASED,
            WHOLE,
            (*encoder.LINEAR_PATCHES, *AS_A_ROW, ("*.router.weight", "h e -> e h")),
            parts=encoder.RELEASED_ERNIE,
            joined=(Joined("biases", ("router", "of_images.router"), kind="correction_bias"),),
        ),
        Layout(
            IN_MEMORY,
            (*WHOLE, "*.experts.*"),
            (*encoder.LINEAR_PATCHES, *AS_A_ROW),
            root="model.language_model.",
            parts=encoder.IN_MEMORY_ERNIE,
        ),
    ),
)
def ernie4_5_vl_moe(c: HFConfig) -> ModelSpec:
    text = own_text(c)
    text.take_only(moe_norm_min=1e-12)
    norm, bias = NormSpec(eps=text.take_number("rms_norm_eps", 1e-5)), text.take_flag("use_bias", False)
    attn, dense = attention(text, bias=bias, interleaved=True, theta=500000.0), mlp(text, bias=bias)
    sparse = experts_of_two_widths(
        *(text, ("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok"), bias),
        correction_bias=True,
        float32_router=True,
    )
    blocks = [BlockSpec(attn, part, norm) for part in dense_or_sparse(text, dense, sparse, 1)]
    model = decoder(text, blocks, norm)
    text.finish()
    vision = encoder.resampled_vision(c, c.part("vision_config"), norm)
    return replace(with_alternating_axes(c, model, (22, 22, 20)), vision=vision)


# -- tests

for_tests(
    "ernie4_5_vl_moe",
    tiny={
        "text_config": {
            "model_type": "ernie4_5_vl_moe_text",
            "head_dim": ...,
            "hidden_size": 48,
            "use_bias": True,
            "pad_token_id": 0,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [24, 16],
            "moe_num_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        },
        "vision_config": encoder.TINY_ERNIE,
        "image_token_id": 3,
        "video_token_id": 4,
        "image_start_token_id": 5,
        "image_end_token_id": 6,
        "video_start_token_id": 7,
        "video_end_token_id": 8,
        "tie_word_embeddings": False,
    },
    variants={
        "no shared expert, a loss of routers": {
            "text_config": {"moe_num_shared_experts": 0, "use_bias": False, "output_router_logits": True}
        }
    },
)
