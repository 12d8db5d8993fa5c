"""The location of the text part in the checkpoints of a multimodal family, for multimodal_table.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from liger_models.convert.errors import ConfigError, abbreviate


@dataclass(frozen=True)
class Multimodal:
    """A family of multimodal models.

    texts: the possible `model_type`s of its text part, each with the text family's.
    prefixes: (with, without): name prefixes of the text part here and in a text-only checkpoint; the first
        match counts.
    tied: whether the head is tied to the embedding by default.
    tied_by_text: whether the text part's own `tie_word_embeddings` counts, too.
    without: keys of the text part that the text family would read but the multimodal model does not.
    renamed: keys of the text part, each with the text family's names of it.
    axes: positions have several axes, which are equal for text.
    settings: of the text part, regardless of its config.
    defaults: the reference's defaults for the text part, in addition to the text family's.
    cross_attention: key of the text part that lists cross-attention layers to images. They are skipped
        without images, and are not part of the text model.
    extra_ids: embedding rows after the vocabulary, unused by text.
    within: where the language model lies in a model with others: the key of its config, and the prefix of its
        tensors' names. Tensors without it belong to the others.
    aside: keys next to the text part that concern its encoders, in this family alone.
    missing: the parts that its images and sounds, or some of these, need and liger_models lacks, for errors.
    """

    texts: Mapping[str, str]
    prefixes: tuple[tuple[str, str], ...] = (("model.language_model.", "model."), ("language_model.", ""))
    tied: bool = False
    tied_by_text: bool = False
    without: tuple[str, ...] = ()
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    axes: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    cross_attention: str | None = None
    extra_ids: int = 0
    within: tuple[str, str] | None = None
    aside: tuple[str, ...] = ()
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
    "patch_merge_mlp.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "multi_modal_projector.",
    "visual.",
    "vision_embedder.",
    "image_newline",
    *("vision_final_layernorm.", "vision_projector.", "mlp1."),  # of Nemotron 3 Omni
    *("sound_encoder.", "sound_projection."),
    "connector.",
    *("merger.", "layerwise_projectors.", "spatial_projectors."),
    "projector.",
    "encoder.",
    "mm_projector.",
    "visual_embeddings_table.",
    "vision_encoder.",
    "vision_projection.",
    "aligner.",
    "vit.",
    "mlp_AR.",
    "embed_tokens_extend.",
)
