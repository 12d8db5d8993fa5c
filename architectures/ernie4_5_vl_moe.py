"""ERNIE 4.5 VL (Baidu, 2025): ERNIE 4.5 with experts of text and others of images and videos, each with a
router of their own, and positions on three axes; an encoder for images and videos of any size.
"""

from dataclasses import replace

from liger_models.architectures.common import attention, decoder, mlp
from liger_models.architectures.common.deepseek import SHARED_EXPERTS, dense_or_sparse
from liger_models.architectures.common.images import own_text, with_alternating_axes
from liger_models.architectures.common.mlps import activation, aux_loss_coef, experts_and_chosen
from liger_models.architectures.encoders import ernie4_5_vl as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Joined, Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

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
            (*encoder.PATCHES, *AS_A_ROW, ("*.router.weight", "h e -> e h")),
            parts=encoder.RELEASED,
            joined=(Joined("biases", ("router", "of_images.router"), kind="correction_bias"),),
        ),
        Layout(
            IN_MEMORY,
            (*WHOLE, "*.experts.*"),
            (*encoder.PATCHES, *AS_A_ROW),
            root="model.language_model.",
            parts=encoder.IN_MEMORY,
        ),
    ),
)
def ernie4_5_vl_moe(c: HFConfig) -> ModelSpec:
    text = own_text(c)
    text.take_only(moe_norm_min=1e-12)
    norm, bias = NormSpec(eps=text.take_number("rms_norm_eps", 1e-5)), text.take_flag("use_bias", False)
    attn, dense = attention(text, bias=bias, interleaved=True, theta=500000.0), mlp(text, bias=bias)
    blocks = [BlockSpec(attn, part, norm) for part in dense_or_sparse(text, dense, experts(text, bias), 1)]
    model = decoder(text, blocks, norm)
    text.finish()
    vision = encoder.vision(c, c.part("vision_config"), norm)
    return replace(with_alternating_axes(c, model, (22, 22, 20)), vision=vision)


def experts(c: HFConfig, bias: bool) -> MoESpec:
    """Experts of text and of pictures, with a shared one."""
    sizes = c.take("moe_intermediate_size", [1536, 512])
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise ConfigError(
            f"{c.name}: moe_intermediate_size must be two widths, of the experts of text and of those of "
            f"pictures, found {abbreviate(sizes)}"
        )
    act, width = activation(c), c.take_count("moe_num_shared_experts", 2, least=0) * sizes[0]
    return MoESpec(
        *experts_and_chosen(c, ("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok")),
        sizes[0],
        act,
        correction_bias=True,
        float32_router=True,
        shared_expert=MLPSpec(width, act, bias) if width else None,
        aux_loss_coef=aux_loss_coef(c),
        image_size=sizes[1],
    )


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
        "vision_config": encoder.TINY,
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
