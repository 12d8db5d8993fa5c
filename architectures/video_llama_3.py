"""VideoLLaMA 3 (DAMO Academy, 2025, arXiv:2501.13106): Qwen2.5 with an encoder for images and videos of any
size. Frames are pooled, and patches that hardly differ from those of the frame before are left out.
"""

from dataclasses import replace

from liger_models.architectures.common import mlp
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import clip
from liger_models.architectures.encoders.parts import axial_attention, patches
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.layers.specs import (
    BlockSpec,
    LayerNormSpec,
    MLPProjectorSpec,
    ModelSpec,
    PooledGrids,
    VisionSpec,
)

READOUT = (("linear_1.", "readout.0."), ("linear_2.", "readout.2."))


@register(
    "video_llama_3",
    reference="VideoLlama3ForConditionalGeneration",
    vision=True,
    layouts=(
        Layout(
            root="model.language_model.",
            parts=(
                ("vision.encoder.", Layout(clip.NAMES, root="model.vision_model.")),
                ("vision.projector.", Layout(READOUT, root="model.projector.")),
            ),
        ),
    ),
)
def video_llama_3(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    v.fill({"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 3072})
    width, norm = v.take_count("hidden_size", 768), LayerNormSpec(v.take_number("layer_norm_eps", 1e-6))
    attention = axial_attention(v, width, v.take_count("num_attention_heads", 12))
    vision = VisionSpec(
        width,
        patches(v, 16, bias=True, frames=1),
        (BlockSpec(attention, mlp(v, bias=True, gated=False), norm),) * v.take_count("num_hidden_layers", 12),
        MLPProjectorSpec("gelu"),
        c.take_count("image_token_id", 151655, least=0),
        c.take_count("video_token_id", 151656, least=0),
        pictures=PooledGrids(),
        norm_after=norm,
    )
    return replace(text, vision=vision)


# -- tests

for_tests(
    "video_llama_3",
    tiny={
        "text_config": {**find_architecture("qwen2").tiny, "model_type": "qwen2"},
        "vision_config": {
            **{"model_type": "video_llama_3_vision", "hidden_size": 32, "intermediate_size": 40},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 3, "layer_norm_eps": 2e-3},
        },
        "image_token_id": 3,
        "video_token_id": 4,
        "tie_word_embeddings": False,
    },
)
