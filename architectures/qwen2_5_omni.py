"""Qwen2.5-Omni's thinker (Xu et al., 2025, arXiv:2503.20215): Qwen2.5 with the image encoder of Qwen2.5-VL
and Whisper's encoder of sound, which hears two seconds at a time; 40 ms make a token.
"""

from dataclasses import replace

from liger_models.architectures.audio_encoders import qwen_omni, whisper
from liger_models.architectures.common.images import language_model, with_axis_sections
from liger_models.architectures.encoders.qwen import NAMES, TINY, windowed_vision
from liger_models.architectures.qwen2_5_vl import TINY_TEXT
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec

SPLIT = tuple((f".self_attn.{name}_proj.", f".attn.{name}.") for name in "qkv")
HEARS = (
    ("encoder.norm_after.", "ln_post."),
    ("encoder.", ""),
    ("projector.linear.", "proj."),
    *whisper.LAYER_NAMES,
)


@register(
    "qwen2_5_omni_thinker",
    reference="Qwen2_5OmniThinkerForConditionalGeneration",
    vision=True,
    audio=True,
    layouts=qwen_omni.layouts(HEARS, (*SPLIT, *NAMES), Layout()),
    carried=lambda c: ("*audio_tower.audio_bos_eos_token.weight", *qwen_omni.OTHER_PARTS),
    unread=qwen_omni.UNREAD,
)
def qwen2_5_omni(c: HFConfig) -> ModelSpec:
    c = qwen_omni.thinker(c)
    text, v = language_model(c), c.part("vision_config")
    v.take("tokens_per_second", None)  # position_id_per_seconds counts
    image_id, video_id, audio_id = (
        c.take_count((f"{kind}_token_index", f"{kind}_token_id"), default, least=0)
        for kind, default in (("image", 151655), ("video", 151656), ("audio", 151646))
    )
    vision = replace(windowed_vision(c, v, text.hidden_size), image_id=image_id, video_id=video_id)
    audio = qwen_omni.averaged_audio(c.part("audio_config"), audio_id, text.hidden_size)
    text = with_axis_sections(c, text, (16, 24, 24))
    return qwen_omni.with_encoders(c, text, vision, audio, sound_start=151647, newer=False)


# -- tests

for_tests(
    "qwen2_5_omni_thinker",
    tiny={
        "text_config": {**TINY_TEXT, "model_type": "qwen2_5_omni_text"},
        "vision_config": {
            **TINY,
            "model_type": "qwen2_5_omni_vision_encoder",
            "hidden_act": "silu",
            "intermediate_size": 40,
            "window_size": 12,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
        "audio_config": {
            **qwen_omni.TINY_AUDIO,
            "model_type": "qwen2_5_omni_audio_encoder",
            "n_window": 5,
            "output_dim": 64,
        },
        "image_token_index": 3,
        "video_token_index": 4,
        "audio_token_index": 7,
        **qwen_omni.TINY_IDS,
    },
    skip=qwen_omni.SKIP,
)
