"""The config of a multimodal checkpoint's text part, for the families of multimodal_table.py.

text = text_config(raw, "config.json")  # the config of a text-only checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_models.architectures.registry.multimodal_table import MULTIMODAL
from liger_models.architectures.registry.text_sizes import SIZES
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, UnsupportedModelError, abbreviate

# Keys next to text_config that concern the towers, the projectors, or the multimodal model as a whole.
_ASIDE_NAMES = """
    architectures auto_map model_type text_config vision_config audio_config ignore_index
    image_token_id image_token_index image_seq_length image_grid_pinpoints video_token_id audio_token_id
    boi_token_index eoi_token_index boi_token_id eoi_token_id boa_token_id eoa_token_id eoa_token_index
    mm_tokens_per_image vision_token_id vision_soft_tokens_per_image audio_soft_tokens_per_image
    vision_start_token_id vision_end_token_id vision_feature_layer vision_feature_layers
    vision_feature_select_strategy projector_hidden_act multimodal_projector_bias spatial_merge_size
    projection_dim
    downsample_ratio video_token_index vision_aspect_ratio use_image_newline_parameter
    merged_hidden_size
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
    fusion_config adapter_config vit_config image_patch_id image_col_id image_low_res_id image_high_res_id
    qformer_config downsample_rate deepstack_layer_map spatial_vision_layer spatial_target_layers
    projector_dropout use_spatial_sampling spatial_stride
    insert_layer_id image_size patch_size drop_vision_last_layer downsample_mode merge_kernel_size
    merger_times image_start_id image_end_id slice_start_id slice_end_id newline_id
    low_res_image_start_token_id frame_start_token_id frame_end_token_id use_frame_special_tokens
    timestamp_token_id token_classification_bias
    encoder_config projector_config window_size has_lora_adapter
    audio_bos_token_id audio_eos_token_id audio_frame_step
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
    top = {key: value for key, value in raw.items() if key not in _ASIDE and key not in family.aside}
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
    for key, names in family.renamed.items():
        if (value := text.pop(key, None)) is not None:
            text |= dict.fromkeys(names, value)
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
    aside = _ASIDE.union(MULTIMODAL[c.raw["model_type"]].aside)
    for key in c.raw:
        if key not in aside or key == "text_config":
            c.take(key, None)
    text = c.with_raw(text_config(c.raw, c.name))
    text.most_layers = c.most_layers
    return text


def _head_dim(text: Mapping[str, Any]) -> int | None:
    """Width of a head if the heads are together as wide as the model; None: the text family refuses it."""
    width, heads = text["hidden_size"], text["num_attention_heads"]
    whole = type(width) is type(heads) is int and heads > 0 and width % heads == 0
    return width // heads if whole else None


_AXES = ("mrope_section", "mrope_interleaved", "xdrope_section")


def _one_axis(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings without multi-axis parameters: a text token has the same position on all axes."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), Mapping):
            unread = (*_AXES, *(["interleaved"] if "mrope_interleaved" in text[key] else []))  # the same
            settings = {k: v for k, v in text[key].items() if k not in unread}
            kind = settings.pop("type", settings.get("rope_type", "default"))
            settings["rope_type"] = "default" if kind == "mrope" else "dynamic" if kind == "xdrope" else kind
            found[key] = settings
            if "rope_theta" in settings:
                found["rope_theta"] = settings["rope_theta"]  # not the default
    return found
