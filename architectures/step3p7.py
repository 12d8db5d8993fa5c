"""Step 3.7 Flash (StepFun, 2026): QK-norm per head, a gate on attention's output, a different number of heads
and other rotary settings in layers with a sliding window, and experts whose gates are capped after the
activation. An encoder of whole images and of crops.
"""

from dataclasses import replace

from liger_models.architectures.common import FULL, SLIDING
from liger_models.architectures.common.images import own_text
from liger_models.architectures.common.step import language_model
from liger_models.architectures.encoders import step3p7 as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.architectures.registry.multimodal import text_part
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

EXPERTS = ("*.experts.*",)
RELEASED = (
    *((f".mlp.experts.{name}_proj", f".moe.{name}_proj.weight") for name in ("gate", "up", "down")),
    *((".mlp.router.correction_bias", ".moe.router_bias"), (".mlp.router.", ".moe.gate.")),
    (".mlp.shared_expert.", ".share_expert."),
)
IN_MEMORY = (
    *((".router.correction_bias", ".gate.e_score_correction_bias"), (".router.", ".gate.")),
    (".shared_expert.", ".shared_experts."),
)


def further_layers(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the layers for multi-token prediction, which do not run."""
    text = text_part(c)
    depth = text.take_count("num_hidden_layers")
    more = text.take_count(("num_nextn_predict_layers", "num_mtp_layers"), 0, least=0)
    return tuple(f"*model.*layers.{depth + i}.*" for i in range(more))


@register(
    "step3p7",
    reference="Step3p7ForConditionalGeneration",
    vision=True,
    layouts=(
        Layout(
            RELEASED,
            EXPERTS,
            encoder.PERMUTED,
            parts=(("vision.", Layout(encoder.RELEASED, root="")),),
            joined=encoder.JOINED,
            apart=(("*.experts.gate_up_proj", ("gate_proj", "up_proj")),),
        ),
        Layout(
            IN_MEMORY,
            EXPERTS,
            root="model.language_model.",
            parts=(("vision.", Layout(encoder.NAMES, root="model.")),),
        ),
    ),
    carried=further_layers,
)
def step3p7(c: HFConfig) -> ModelSpec:
    model = language_model(own_text(c))
    return replace(model, vision=encoder.vision(c, c.part("vision_config")))


# -- tests

for_tests(
    "step3p7",
    tiny={
        "text_config": {
            "model_type": "step3p5",
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "mlp_bias": True,
            "sliding_window": 7,
            "num_sliding_attention_heads": 6,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "query_pre_attn_scalar": 11,
            "swiglu_limits": [0.0, 0.01, 0.0],
            "swiglu_limits_shared": [0.02, 0.0, 0.01],
            "moe_intermediate_size": 24,
            "share_expert_dim": 40,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_router_scaling_factor": 1.7,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "vision_config": encoder.TINY,
        "image_token_id": 3,
        "projector_bias": True,
    },
    variants={
        "as released": {
            "text_config": {
                "rope_parameters": ...,
                "rope_theta": [10000.0, 50000.0, 10000.0, 7.0],
                "partial_rotary_factors": [1.0, 0.5, 1.0, 0.25],
                "num_nextn_predict_layers": 1,
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
                "mlp_layer_types": ...,
                "moe_layers_enum": "1,2,3",
                "num_sliding_attention_heads": ...,
                "attention_other_setting": {"num_attention_heads": 6},
                "swiglu_limits": [0.0, 0.01, 0.0, 0.0],
                "swiglu_limits_shared": None,
            },
        }
    },
)
