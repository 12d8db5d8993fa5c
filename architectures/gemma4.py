"""Gemma 4 (Google DeepMind, 2026): Gemma 4's text models with an encoder for images and videos of any size;
on sliding layers the tokens of one image attend to each other in both directions.
"""

from collections.abc import Callable
from dataclasses import replace

from liger_models.architectures.common import unread_keys
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import gemma4 as encoder
from liger_models.architectures.gemma4_text import NAMES
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import AttentionSpec, ModelSpec, SharedAttentionSpec, VisionSpec


def carried(c: HFConfig) -> tuple[str, ...]:
    """Patterns of the audio tensors, and of the text model's unread tensors."""
    text = c.with_raw({"model_type": "gemma4_text", **c.raw["text_config"]})
    unread = [f"*language_model.{name.removeprefix('model.')}" for name in unread_keys(text)]
    return ("*audio_tower.*", "*embed_audio.*", *unread)


@register(
    "gemma4",
    reference="Gemma4ForConditionalGeneration",
    vision=True,
    layouts=tuple(
        Layout(
            NAMES,
            ("*.experts.*",),
            (("vision.encoder.patch_embed.weight", "d (h w c) -> d c h w"),),
            root=f"{root}language_model.",
            parts=(("vision.", Layout(encoder.NAMES, root=root)),),
        )
        for root in ("model.", "")
    ),
    carried=carried,
)
def gemma4(c: HFConfig) -> ModelSpec:
    c.take("vision_soft_tokens_per_image", None)  # read by the processor
    return with_images(c, encoder.vision)


def with_images(c: HFConfig, vision: Callable[..., VisionSpec], *, attention: str | None = None) -> ModelSpec:
    """The language model with what an encoder's `vision` builds; `attention` is the default of the config's
    `use_bidirectional_attention`.
    """
    text = language_model(c)
    for key in (
        *("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
        *("audio_token_id", "audio_config"),
    ):
        c.take(key, None)  # placed by the processor; audio tensors are carried along
    bidirectional = c.raw["text_config"].get("use_bidirectional_attention", attention) is not None
    of_images = vision(
        c.part("vision_config"),
        c.take_count("image_token_id", 258880, least=0),
        video_id=c.take_count("video_token_id", 258884, least=0),
        spans="images" if bidirectional else None,
    )
    return replace(with_spans(text, bidirectional), vision=of_images)


def with_spans(text: ModelSpec, bidirectional: bool) -> ModelSpec:
    """The language model whose layers with a window show the tokens of an image to one another."""
    blocks = []
    for block in text.blocks:
        assert isinstance(block.mixer, AttentionSpec | SharedAttentionSpec)
        spans = not bidirectional or block.mixer.window is not None
        blocks.append(replace(block, mixer=replace(block.mixer, bidirectional_spans=spans)))
    return replace(text, blocks=tuple(blocks))


# -- tests

for_tests(
    "gemma4",
    tiny={
        "text_config": {
            **find_architecture("gemma4_text").tiny,
            "model_type": "gemma4_text",
            "hidden_act": ...,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": encoder.TINY,
        "audio_config": None,
        "image_token_id": 3,
        "video_token_id": 4,
    },
    variants={
        "causal, not standardised, clipped": {
            "text_config": {"use_bidirectional_attention": None},
            "vision_config": {
                "standardize": False,
                "num_key_value_heads": 2,
                "use_clipped_linears": True,
            },
        },
    },
)
