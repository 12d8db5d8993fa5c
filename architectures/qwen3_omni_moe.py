"""Qwen3-Omni's thinker (Xu et al., 2025, arXiv:2509.17765): Qwen3 with experts, with the image encoder of
Qwen3-VL and an encoder of sound that hears eight seconds at a time; 80 ms make a token.
"""

from dataclasses import replace

from liger_models.architectures.audio_encoders import qwen_omni, whisper
from liger_models.architectures.common import expert_layouts
from liger_models.architectures.encoders.qwen import NAMES_3, TINY_3
from liger_models.architectures.qwen3_vl import TINY, TINY_ROPE, qwen3_vl
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec, VisionSpec

SEES = (
    *(name for name in NAMES_3 if name[0] not in ("deep.", ".linear_1.", ".linear_2.")),
    *(("deep.", "merger_list."), (".linear_1.", ".mlp.0."), (".linear_2.", ".mlp.2."), (".norm.", ".ln_q.")),
)
HEARS = (
    ("encoder.norm_after.", "ln_post."),
    *((f"encoder.conv{i}.", f"conv2d{i}.") for i in (1, 2, 3)),
    ("encoder.", ""),
    *((f"projector.linear_{i}.", f"proj{i}.") for i in (1, 2)),
    *whisper.LAYER_NAMES,
)
PACKED = ("vision.encoder.layers.*.qkv_proj.*",)


@register(
    "qwen3_omni_moe_thinker",
    reference="Qwen3OmniMoeThinkerForConditionalGeneration",
    vision=True,
    audio=True,
    layouts=qwen_omni.layouts(
        HEARS, SEES, *(replace(layout, whole=(*layout.whole, *PACKED)) for layout in expert_layouts())
    ),
    carried=lambda c: qwen_omni.OTHER_PARTS,
    unread=qwen_omni.UNREAD,
)
def qwen3_omni_moe(c: HFConfig) -> ModelSpec:
    c = qwen_omni.thinker(c)
    v = c.part("vision_config")
    v.take_only(apply_vit_abs_pos_embed=True)
    for key in ("image_size", "tokens_per_second"):
        v.take(key, None)  # of released files; the reference reads neither
    model = qwen3_vl(c)
    assert isinstance(model.vision, VisionSpec)
    audio_id = c.take_count("audio_token_id", 151646, least=0)
    audio = qwen_omni.convolved_audio(c.part("audio_config"), audio_id, model.hidden_size)
    return qwen_omni.with_encoders(c, model, model.vision, audio, sound_start=151669, newer=True)


# -- tests

for_tests(
    "qwen3_omni_moe_thinker",
    tiny={
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.5,
            "mlp_only_layers": [0],
            "rope_parameters": TINY_ROPE,
        },
        "vision_config": {"model_type": "qwen3_omni_moe_vision_encoder", **TINY_3},
        "audio_config": {
            **qwen_omni.TINY_AUDIO,
            "model_type": "qwen3_omni_moe_audio_encoder",
            "n_window": 50,
            "n_window_infer": 200,
            "downsample_hidden_size": 6,
            "output_dim": 48,
        },
        "audio_token_id": 7,
        **TINY,
        **qwen_omni.TINY_IDS,
    },
    skip=qwen_omni.SKIP,
)
