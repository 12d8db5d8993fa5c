"""Llama 4 (Meta, 2025): Llama 4's text models with an encoder of square tiles, with rotary embeddings by row
and column.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import llama4 as encoder
from liger_models.architectures.llama4_text import TEXT
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import ModelSpec


@register(
    "llama4",
    reference="Llama4ForConditionalGeneration",
    vision=True,
    layouts=(
        replace(
            TEXT,
            rename=(*TEXT.rename, ("lm_head.", "language_model.lm_head.")),
            permuted=(*TEXT.permuted, ("vision.encoder.patch_embed.weight", "d (c h w) -> d c h w")),
            root="language_model.model.",
            parts=(("vision.", Layout(encoder.NAMES, root="")),),
        ),
    ),
)
def llama4(c: HFConfig) -> ModelSpec:
    for key in ("boi_token_index", "eoi_token_index"):
        c.take(key, None)  # placed by the processor
    image_id = c.take_count(("image_token_index", "image_token_id"), 200092, least=0)
    return replace(language_model(c), vision=encoder.vision(c.part("vision_config"), image_id))


# -- tests

for_tests(
    "llama4",
    tiny={
        "text_config": {
            **find_architecture("llama4_text").tiny,
            "model_type": "llama4_text",
            "num_hidden_layers": 2,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "floor_scale": 8192,  # the reference counts padding in the positions that scale queries
        },
        "vision_config": encoder.TINY,
        "image_token_index": 3,
        "tie_word_embeddings": False,
    },
)
