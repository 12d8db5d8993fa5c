"""Nemotron 3 Nano Omni (NVIDIA, 2026): Nemotron-H with C-RADIO's encoder for images of any size, four patches
of which make a token, and Parakeet's for sounds, of which 80 ms do. Its videos are not supported.
"""

from dataclasses import replace

from liger_models.architectures.audio_encoders import parakeet
from liger_models.architectures.common.images import language_model
from liger_models.architectures.encoders import radio
from liger_models.architectures.nemotron_h import PARTS, STACKED
from liger_models.architectures.registry import find_architecture, for_tests, register
from liger_models.architectures.registry.multimodal import text_part
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import LayerNormSpec, MLPProjectorSpec, ModelSpec, NormSpec

HEAD = ("lm_head.", "language_model.lm_head.")
FINAL_NORM = "vision_final_layernorm"
ON_DISK = Layout(
    (*PARTS, HEAD),
    radio.JOINED,
    radio.PERMUTED,
    root="language_model.backbone.",
    parts=(
        ("vision.projector.patch_norm.", Layout(root=f"{FINAL_NORM}.")),
        ("vision.encoder.", Layout(radio.NAMES, root="vision_model.")),
        (
            "vision.projector.",
            Layout((("norm.", "0."), ("linear_1.", "1."), ("linear_2.", "3.")), root="mlp1."),
        ),
        *parakeet.ON_DISK,
    ),
)
NORM_IN_PROJECTOR = replace(
    ON_DISK, parts=((ON_DISK.parts[0][0], Layout(root=f"vision_projector.{FINAL_NORM}.")), *ON_DISK.parts[1:])
)
IN_MODULES = Layout(
    (*PARTS, HEAD),
    STACKED,
    radio.PERMUTED,
    root="language_model.model.",
    parts=(
        ON_DISK.parts[0],
        ("vision.encoder.", Layout(radio.NAMES_IN_MODULES, root="vision_model.")),
        ("vision.projector.", Layout((("norm.", "layer_norm."),), root="multi_modal_projector.")),
        *parakeet.IN_MODULES,
    ),
)


@register(
    "nemotron_h_omni",
    reference="NemotronH_Omni_Reasoning_V3",
    vision=True,
    audio=True,
    layouts=(ON_DISK, NORM_IN_PROJECTOR, IN_MODULES),
    carried=lambda c: ("language_model.mtp.*", *radio.UNREAD, *parakeet.unread(c)),
    as_stored=lambda spec, names: radio.as_stored(spec, names, FINAL_NORM),
    fixed={"downsample_ratio": 0.5},
    unread=dict.fromkeys(radio.ASIDE.split(), "of processors or videos, or another name"),
)
def nemotron_h_omni(c: HFConfig) -> ModelSpec:
    text, v = language_model(c), c.part("vision_config")
    width = c.take_count(("vision_hidden_size", "vit_hidden_size"), 1280)
    # The reference normalises features where the language model has modules for multi-token prediction.
    predicts = text_part(c).take_count("num_nextn_predict_layers", 0, least=0) > 0
    eps = v.take_number("layer_norm_eps", 1e-6)
    projector = MLPProjectorSpec(
        *("relu2", False, 2, NormSpec(1e-5, cast="float32"), c.take_count("projector_hidden_size", 4096)),
        patch_norm=LayerNormSpec(eps) if predicts else None,
    )
    vision = radio.vision(v, projector, c.take_count(("image_token_id", "img_context_token_id"), least=0))
    if vision.hidden_size != width:
        raise ConfigError(
            f"{c.name}: vision_hidden_size is {width} and the encoder's hidden_size {vision.hidden_size}; "
            "expected the same"
        )
    return replace(text, vision=vision, audio=parakeet.projected(c))


# -- tests

for_tests(
    "nemotron_h_omni",
    tiny={
        "text_config": {
            **find_architecture("nemotron_h").tiny,
            **dict.fromkeys(
                ("hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings"), ...
            ),
            "num_nextn_predict_layers": 1,
        },
        "vision_config": radio.TINY,
        "vision_hidden_size": 32,
        "projector_hidden_size": 28,
        "image_token_id": 3,
        "audio_config": {
            **parakeet.TINY,
            "attention_bias": True,
            "scale_input": True,
            "projection_hidden_size": 20,
            "projection_bias": True,
        },
        "audio_token_id": 7,
    },
    variants={
        "no norm after the encoder": {"text_config": {"num_nextn_predict_layers": 0}},
        "one register, no biases": {"vision_config": {"qkv_bias": False, "num_registers": 1}},
        "no registers": {"vision_config": {"num_registers": 0}},
        "without sounds": {"audio_config": None},
    },
    skip={"published:config": "no copy was at hand"},
)
