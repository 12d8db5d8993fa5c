"""Multimodal families with a supported language model: the location of the text part in their checkpoints. A
family is listed only if pure text goes through exactly the computation of the text family. Families with
supported encoders are registered, too.

    text = text_config(raw, "config.json")  # the config of a text-only checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from liger_models.architectures.registry.text_sizes import SIZES
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, UnsupportedModelError, abbreviate


@dataclass(frozen=True)
class Multimodal:
    """A family of multimodal models.

    texts: the possible `model_type`s of its text part, each with the text family's.
    prefixes: (with, without): name prefixes of the text part here and in a text-only checkpoint; the first
        match counts.
    tied: whether the head is tied to the embedding by default.
    tied_by_text: whether the text part's own `tie_word_embeddings` counts, too.
    without: keys of the text part that the text family would read but the multimodal model does not.
    axes: positions have several axes, which are equal for text.
    settings: of the text part, regardless of its config.
    defaults: the reference's defaults for the text part, in addition to the text family's.
    cross_attention: key of the text part that lists cross-attention layers to images. They are skipped
        without images, and are not part of the text model.
    extra_ids: embedding rows after the vocabulary, unused by text.
    within: where the language model lies in a model with others: the key of its config, and the prefix of its
        tensors' names. Tensors without it belong to the others.
    missing: what its images and sounds need and liger_models does not have, for errors.
    """

    texts: Mapping[str, str]
    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "model."), ("language_model.", ""))
    tied: bool = False
    tied_by_text: bool = False
    without: tuple[str, ...] = ()
    axes: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    cross_attention: str | None = None
    extra_ids: int = 0
    within: tuple[str, str] | None = None
    missing: str = ""

    def name_in_text(self, name: str, raw: Mapping[str, Any]) -> str | None:
        """Name of a tensor in a text-only checkpoint; None for tensors of the towers and of cross-attention
        layers.

        Args:
            name: in a checkpoint whose config.json holds `raw`.
        """
        if self.within is not None:
            if not name.startswith(self.within[1]):
                return None
            name = name.removeprefix(self.within[1])
        if name.removeprefix("model.").startswith(_TOWERS):
            return None
        for here, there in self.prefixes:
            if name.startswith(here):
                name = there + name.removeprefix(here)
                break
        if self.cross_attention is None or not name.startswith("model.layers."):
            return name
        number, _, own = name.removeprefix("model.layers.").partition(".")
        layers = self.cross_attention_layers(raw["text_config"])
        if not number.isdecimal() or int(number) in layers:
            return None if number.isdecimal() else name
        return f"model.layers.{int(number) - sum(layer < int(number) for layer in layers)}.{own}"

    def cross_attention_layers(self, text: Mapping[str, Any]) -> list[int]:
        """Cross-attention layers to image features, from a text part's config.

        Raises:
            ConfigError: not a list of numbers.
        """
        if self.cross_attention is None:
            return []
        found = text.get(self.cross_attention)
        found = self.defaults[self.cross_attention] if found is None else found
        if not isinstance(found, list) or not all(type(layer) is int and layer >= 0 for layer in found):
            raise ConfigError(f"{self.cross_attention} must be a list of layers, found {abbreviate(found)}")
        return sorted(set(found))


# Name prefixes of the towers' tensors, also after "model.".
_TOWERS = (
    "vision_tower.",
    "vision_model.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "multi_modal_projector.",
    "visual.",
    "vision_embedder.",
    "image_newline",
    *("vision_final_layernorm.", "mlp1.", "sound_encoder.", "sound_projection."),  # of Nemotron 3 Omni
    "connector.",
    "projector.",
    "mm_projector.",
    "visual_embeddings_table.",
    "vision_encoder.",
    "vision_projection.",
    "aligner.",
)

_OWN_ROOT = (("model.language_model.", "model."), ("language_model.", "model."))

_QWEN2: dict[str, Any] = {
    "prefixes": (("model.language_model.", "model."),),
    "tied_by_text": True,
    "axes": True,
    "defaults": {
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_window_layers": 80,
    },
}

_THINKERS: dict[str, Multimodal] = {
    "qwen2_5_omni_thinker": Multimodal(
        {"qwen2_5_omni_text": "qwen2"},
        _OWN_ROOT,
        axes=True,
        defaults={
            **{"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944},
            **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
            **{"rope_theta": 1e6, "max_window_layers": 28},
        },
        missing="an encoder of sound",
    ),
    "qwen3_omni_moe_thinker": Multimodal(
        {"qwen3_omni_moe_text": "qwen3_moe"},
        _OWN_ROOT,
        without=("use_sliding_window", "layer_types"),
        axes=True,
        defaults={
            **{"vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944},
            **{"num_hidden_layers": 28, "num_attention_heads": 28, "rope_theta": 1e6, "norm_topk_prob": True},
        },
        missing="an encoder of sound",
    ),
}

MULTIMODAL: dict[str, Multimodal] = {
    **_THINKERS,
    # The whole models, which also speak.
    **{
        kind.removesuffix("_thinker"): replace(family, within=("thinker_config", "thinker."))
        for kind, family in _THINKERS.items()
    },
    "aria": Multimodal({"aria_text": "aria_text"}, missing="learned queries that attend to patches"),
    "cohere_compass": Multimodal(
        {"cohere_compass_text": "cohere_compass_text"},
        _OWN_ROOT,
        missing="positions on three axes in layers of two types",
    ),
    "lfm3_vl": Multimodal({"lfm3": "lfm3"}, tied=True, missing="convolutions over grids of patches"),
    "got_ocr2": Multimodal(
        {"qwen2": "qwen2"},
        tied=True,
        missing="SAM's encoder: windows with learned relative positions, and convolutions",
    ),
    "qwen2_audio": Multimodal(
        {"qwen2": "qwen2"}, settings={"tie_word_embeddings": False}, missing="an encoder of sound"
    ),
    "voxtral": Multimodal(
        {"llama": "llama"},
        settings={"tie_word_embeddings": False},
        defaults={
            **{"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "head_dim": 128},
            **{"num_hidden_layers": 30, "num_key_value_heads": 8, "max_position_embeddings": 131072},
            **{"rms_norm_eps": 1e-5, "rope_theta": 1e8},
        },
        missing="an encoder of sound",
    ),
    # The whole model does not scale its logits, though Command R's own does.
    **{
        kind: Multimodal({"cohere2": "cohere2"}, tied=True, settings={"logit_scale": 1.0})
        for kind in ("aya_vision", "cohere2_vision")
    },
    "deepseek_vl": Multimodal({"llama": "llama"}, _OWN_ROOT, tied=True),
    "lighton_ocr": Multimodal({"qwen3": "qwen3"}, _OWN_ROOT, tied=True),
    "exaone4_5": Multimodal({"exaone4": "exaone4", "exaone4_5_text": "exaone4"}, _OWN_ROOT),
    **{
        kind: Multimodal(
            {"llama": "llama"},
            (("model.text_model.", "model."),),
            without=("perceiver_config", "pixel_shuffle_factor"),
        )
        for kind in ("idefics3", "smolvlm")
    },
    **{
        kind: Multimodal(
            {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"},
            tied_by_text=True,
            missing=missing,
        )
        for kind, missing in (("llava_next", ""), ("llava_next_video", "pooled frames"))
    },
    "kimi_k25": Multimodal(
        {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"},
        (
            ("language_model.model.blocks.", "model.layers."),  # as transformers saves it
            ("model.language_model.", "model."),
            ("language_model.", ""),
        ),
        tied=True,
        defaults={"max_position_embeddings": 4096},
    ),
    "ovis2": Multimodal({"qwen2": "qwen2"}, _OWN_ROOT, tied=True, missing="a vocabulary of images"),
    "video_llama_3": Multimodal(
        {"qwen2": "qwen2"},
        _OWN_ROOT,
        tied_by_text=True,
    ),
    **{
        kind: Multimodal(
            {"glm4v_text": "glm4"},
            _OWN_ROOT,
            tied_by_text=True,
            axes=True,
            settings={"attention_bias": True},
            defaults={
                **{"head_dim": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
                **{"max_position_embeddings": 32768, "pad_token_id": None},
            },
        )
        for kind in ("glm4v", "glm46v")
    },
    "glm4v_moe": Multimodal(
        {"glm4v_moe_text": "glm4_moe"},
        _OWN_ROOT,
        tied_by_text=True,
        axes=True,
        without=("router_aux_loss_coef",),  # of a loss that is refused where it is asked for
        defaults={
            **{"head_dim": None, "attention_bias": True, "max_position_embeddings": 65536},
            **{"num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "pad_token_id": None},
        },
    ),
    "glm_ocr": Multimodal(
        {"glm_ocr_text": "glm4"},
        _OWN_ROOT,
        tied_by_text=True,
        axes=True,
        settings={"attention_bias": False},
        defaults={
            **{"vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5},
            **{"partial_rotary_factor": 1.0, "pad_token_id": None},
        },
    ),
    "gemma3": Multimodal({"gemma3_text": "gemma3_text"}, tied=True, without=("final_logit_softcapping",)),
    "gemma4": Multimodal({"gemma4_text": "gemma4_text"}, _OWN_ROOT, tied=True),
    "gemma4_unified": Multimodal(
        {"gemma4_unified_text": "gemma4_text"},
        _OWN_ROOT,
        tied=True,
        defaults={
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
        },
        missing="patches that are embedded without an encoder",
    ),
    "internvl": Multimodal({kind: kind for kind in ("qwen2", "qwen3", "qwen3_moe", "llama")}, tied=True),
    "lfm2_vl": Multimodal({"lfm2": "lfm2"}, tied=True, without=("tie_embedding",)),
    "llama4": Multimodal({"llama4_text": "llama4_text"}, tied_by_text=True),
    "llava": Multimodal({"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}, tied_by_text=True),
    "llava_onevision": Multimodal({"qwen2": "qwen2"}, tied_by_text=True),
    "vipllava": Multimodal({"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}),
    "mllama": Multimodal(
        {"mllama_text_model": "llama"},
        settings={"tie_word_embeddings": False},
        defaults={
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 128004,
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        },
        cross_attention="cross_attention_layers",
        extra_ids=8,
    ),
    "mistral3": Multimodal({kind: kind for kind in ("mistral", "ministral3", "mistral4")}, tied=True),
    "muse_glimmer": Multimodal(
        {"muse_glimmer_text": "muse_glimmer_text"},
        _OWN_ROOT,
        defaults={
            **{"vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968},
            **{"num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2},
            **{"head_dim": 128, "max_position_embeddings": 131072, "sliding_window": 2048},
        },
    ),
    "nemotron_h_omni": Multimodal(
        {"nemotron_h": "nemotron_h"},
        missing="RADIO's encoder: several tokens before the patches of each image, positions cropped from a "
        "resized square, and scales that checkpoints leave out",
    ),
    "paligemma": Multimodal(
        {"gemma": "gemma", "gemma2": "gemma2"},
        tied=True,
        without=("num_image_tokens", "use_bidirectional_attention"),
    ),
    "qwen2_vl": Multimodal({"qwen2_vl_text": "qwen2"}, **_QWEN2),
    "qwen2_5_vl": Multimodal({"qwen2_5_vl_text": "qwen2"}, **_QWEN2),
    "qwen3_5": Multimodal({"qwen3_5_text": "qwen3_5_text"}, _OWN_ROOT, axes=True),
    "qwen3_5_moe": Multimodal({"qwen3_5_moe_text": "qwen3_5_moe_text"}, _OWN_ROOT, axes=True),
    "qwen3_vl": Multimodal(
        {"qwen3_vl_text": "qwen3"},
        _OWN_ROOT,
        without=("use_sliding_window", "layer_types"),
        axes=True,
        defaults={"rope_theta": 5e5, "max_position_embeddings": 128000},
    ),
    "qwen3_vl_moe": Multimodal(
        {"qwen3_vl_moe_text": "qwen3_moe"},
        _OWN_ROOT,
        without=("use_sliding_window", "layer_types", "norm_topk_prob"),
        axes=True,
        defaults={
            "rope_theta": 5e5,
            "max_position_embeddings": 128000,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
        },
        settings={"norm_topk_prob": True},
    ),
}
"""By `model_type`."""


# Keys next to text_config that concern the towers, the projectors, or the multimodal model as a whole.
_ASIDE_NAMES = """
    architectures auto_map model_type text_config vision_config audio_config ignore_index
    image_token_id image_token_index image_seq_length image_grid_pinpoints video_token_id audio_token_id
    boi_token_index eoi_token_index boi_token_id eoi_token_id boa_token_id eoa_token_id eoa_token_index
    mm_tokens_per_image vision_token_id vision_soft_tokens_per_image
    vision_start_token_id vision_end_token_id vision_feature_layer vision_feature_select_strategy
    projector_hidden_act multimodal_projector_bias spatial_merge_size projection_dim
    downsample_ratio video_token_index vision_aspect_ratio use_image_newline_parameter
    downsample_factor projector_hidden_size projector_bias projector_use_layernorm tie_embedding
    do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_pixels_tolerance max_tiles
    min_image_tokens min_tiles tile_size use_image_special_tokens use_thumbnail
    llm_config sound_config force_image_size vision_hidden_size vit_hidden_size video_pruning_rate
    video_temporal_patch_size img_context_token_id video_context_token_id sound_context_token_id
    alignment_intermediate_size adapter_layer_norm_eps scale_factor
    projection_hidden_size projection_layer_norm_eps image_start_token_id image_end_token_id
    video_start_token_id video_end_token_id visual_indicator_token_ids out_hidden_size
    projector_layernorm_eps projector_patch_to_query_dict max_value_projector_patch_to_query_dict
    position_id_per_seconds seconds_per_chunk user_token_id audio_start_token_id audio_end_token_id
    spatial_pool_mode spatial_pool_stride video_seq_length audio_token_index
"""
_ASIDE = frozenset(_ASIDE_NAMES.split())
_TOP_AND_TEXT = frozenset(
    {"pad_token_id", "vocab_size", "tie_word_embeddings"}
)  # at the top level, not part of the text config


def text_config(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Config of a multimodal checkpoint's text part.

    Top-level keys that are not known to belong to the towers are included, so that none is overlooked.

    Args:
        raw: the content of config.json, whose `model_type` is in the table.
        name: its origin, for messages.

    Raises:
        UnsupportedModelError: an unsupported type of text part.
        ConfigError: there is no text part.
    """
    family = MULTIMODAL[raw["model_type"]]
    if family.within is not None:
        raw = _inner(raw, family.within[0], name)
    nested = raw.get("text_config", raw.get("llm_config"))
    top = {key: value for key, value in raw.items() if key not in _ASIDE}
    if nested is None and "hidden_size" in raw:  # the flat form of older configs
        nested = top
    elif not isinstance(nested, Mapping):
        raise ConfigError(f"{name}: text_config must be an object, found {abbreviate(nested)}")
    usual = next(iter(family.texts))
    kind = nested.get("model_type", usual)
    if not isinstance(kind, str) or kind not in family.texts:
        raise UnsupportedModelError(
            f"{name}: the text part of this {raw['model_type']!r} checkpoint is of the type "
            f"{abbreviate(kind)}; supported are {', '.join(family.texts)}"
        )
    text = {key: value for key, value in top.items() if key not in _TOP_AND_TEXT}
    text |= {**SIZES.get(family.texts[kind], {}), **family.defaults, **nested}
    rope = nested.get("rope_parameters")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key not in nested and isinstance(rope, Mapping) and key in rope:
            text.pop(key, None)  # a default here, not in the file
    if "head_dim" in family.defaults and text["head_dim"] is None:
        text["head_dim"] = _head_dim(text)
    if family.axes:
        text |= _one_axis(text)
    tied = raw.get("tie_word_embeddings")
    tied = family.tied if tied is None else tied
    if family.tied_by_text:
        tied = tied or nested.get("tie_word_embeddings", False)
    text |= {"model_type": family.texts[kind], "tie_word_embeddings": tied}
    if family.cross_attention is not None:
        layers, listed = text["num_hidden_layers"], family.cross_attention_layers(text)
        text["num_hidden_layers"] = layers - sum(layer < layers for layer in listed)
        del text[family.cross_attention]
    text = {key: value for key, value in text.items() if key not in ("architectures", *family.without)}
    return {**text, **family.settings}


def _inner(raw: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """The config under `key`, with the model type of the whole."""
    inner = raw.get(key)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{name}: {key} must be an object, found {abbreviate(inner)}")
    return {**inner, "model_type": raw["model_type"]}


def text_part(c: HFConfig) -> HFConfig:
    """Config of the language model in that of a vision-language model. Top-level keys not known to belong to
    the towers are included, so that none is overlooked; the others are left to the family.
    """
    for key in c.raw:
        if key not in _ASIDE or key == "text_config":
            c.take(key, None)
    text = c.with_raw(text_config(c.raw, c.name))
    text.most_layers = c.most_layers
    return text


def _head_dim(text: Mapping[str, Any]) -> int | None:
    """Width of a head if the heads are together as wide as the model; None: the text family refuses it."""
    width, heads = text["hidden_size"], text["num_attention_heads"]
    whole = type(width) is type(heads) is int and heads > 0 and width % heads == 0
    return width // heads if whole else None


def _one_axis(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings without multi-axis parameters: a text token has the same position on all axes."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), Mapping):
            settings = {k: v for k, v in text[key].items() if k not in ("mrope_section", "mrope_interleaved")}
            kind = settings.pop("type", settings.get("rope_type", "default"))
            settings["rope_type"] = "default" if kind == "mrope" else kind
            found[key] = settings
            if "rope_theta" in settings:
                found["rope_theta"] = settings["rope_theta"]  # not the default
    return found
