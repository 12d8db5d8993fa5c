"""Qianfan-OCR (Baidu, 2026): Qwen3 for reading documents, with InternVL's encoder over image tiles of one
size; four patches make a token.
"""

from dataclasses import replace

from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import internvl as encoder
from liger_models.architectures.registry import for_tests, register
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import ModelSpec

RELEASED = Layout(
    (("lm_head.", "language_model.lm_head."),),
    ("vision.encoder.*.qkv_proj.*",),
    encoder.PERMUTED,
    root="language_model.model.",
    parts=(
        ("vision.encoder.", Layout(encoder.RELEASED, root="vision_model.")),
        (
            "vision.projector.",
            Layout((("norm.", "0."), ("linear_1.", "1."), ("linear_2.", "3.")), root="mlp1."),
        ),
    ),
)
SAVED = replace(RELEASED, rename=(*RELEASED.rename, (".model.layers.", ".model.encoder.layers.")))
"""transformers 5.17 to 5.24 saves the text's layers under this name, too, and reads both."""
IN_MODULES = Layout(
    permuted=encoder.PERMUTED,
    root="model.language_model.",
    parts=(
        (
            "vision.encoder.",
            Layout((*encoder.NAMES, ("encoder.layer.", "layers.")), root="model.vision_tower."),
        ),
        ("vision.projector.", Layout((("norm.", "layer_norm."),), root="model.multi_modal_projector.")),
    ),
)


@register(
    "qianfan_ocr",
    reference="QianfanOCRForConditionalGeneration",
    vision=True,
    layouts=(RELEASED, SAVED, IN_MODULES),
    carried=lambda c: (
        *encoder.unread(c, "encoder.layers.", "vision_model."),
        *encoder.unread(c, "layers."),
    ),
)
def qianfan_ocr(c: HFConfig) -> ModelSpec:
    v = c.part("vision_config")
    v.fill({"drop_path_rate": 0.1})
    if v.take_dropout("drop_path_rate"):
        raise ConfigError(
            f"{v.name}: drop_path_rate, the rate at which training skips the encoder's branches, is not "
            "supported; pass dropout=0.0, or --dropout 0, to skip none"
        )
    return replace(language_model(c), vision=encoder.vision(c, v, bias=True))


# -- tests

for_tests(
    "qianfan_ocr",
    tiny={
        "text_config": {"model_type": "qwen3"},
        "vision_config": {**encoder.TINY, "model_type": "qianfan_ocr_vision", "drop_path_rate": 0.0},
        "image_token_id": 3,
    },
    variants={
        "a lower layer": {
            "vision_config": encoder.OTHER_FORM,
            "vision_feature_layer": -2,
            "projector_hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        }
    },
    skip={
        "published:config": "no copy was at hand",
        "field:SquarePictures.size": "squares of any size are taken, whose positions are stretched to it",
    },
)
