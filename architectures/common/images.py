"""Shared parts of vision-language families apart from the encoders: the language model, multi-axis positions,
and checkpoint names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_models.architectures.common.model import SLIDING
from liger_models.architectures.registry import find_architecture
from liger_models.architectures.registry.multimodal import text_part
from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import AttentionSpec, ModelSpec, RecurrentSpec, SharedAttentionSpec

Names = tuple[tuple[str, str], ...]


def language_model(c: HFConfig) -> ModelSpec:
    """The language model of a config, built by its own family."""
    text = text_part(c)
    return find_architecture(text.model_type).spec(text)


def own_text(c: HFConfig) -> HFConfig:
    """The config of a language model that only this family has, whose function calls `finish`.

    Raises:
        ConfigError: it asks for bidirectional attention.
    """
    text = text_part(c)
    if not text.raw.get("is_causal", True):
        raise ConfigError(f"{c.name}: models with images do not support bidirectional attention")
    text.take("is_causal", None)
    return text


def with_axis_sections(c: HFConfig, model: ModelSpec, sections: Sequence[int]) -> ModelSpec:
    """The model with positions on three axes (time, row, column) that take consecutive pairs of a head: as
    many as in the config's `mrope_section`, or these `sections`.

    Raises:
        ConfigError: the sections do not add up to the pairs.
    """
    sections = _sections(c, sections)
    return _with_axes(c, model, tuple(i % 3 for i, count in enumerate(sections) for _ in range(count)))


def with_interleaved_axes(
    c: HFConfig, model: ModelSpec, sections: Sequence[int], layer_type: str | None = None
) -> ModelSpec:
    """The same with alternating axes, pair i using axis i % 3, until row and column have all of theirs; time
    takes the others (Qwen3-VL). With a `layer_type`, only in layers of this type, by its own settings.

    Raises:
        ConfigError: not three sections, or they do not add up to the pairs.
    """
    sections = _sections(c, sections, layer_type)
    axes = [0] * sum(sections)
    for axis in (1, 2) if len(sections) == 3 else ():
        for i in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[i] = axis
    return _with_axes(c, model, tuple(axes) if len(sections) == 3 else (), layer_type=layer_type)


def with_alternating_axes(c: HFConfig, model: ModelSpec, sections: Sequence[int]) -> ModelSpec:
    """The same with row and column in turns, then time; the sections are in this order (ERNIE 4.5 VL).

    Raises:
        ConfigError: not three sections, more of rows than of columns, or they do not add up to the pairs.
    """
    sections = _sections(c, sections)
    if len(sections) != 3 or sections[0] != sections[1]:
        raise ConfigError(
            f"{c.name}: mrope_section must be numbers of pairs for row, column and time, the first two "
            f"equal; found {abbreviate(sections)}"
        )
    return _with_axes(c, model, (1, 2) * sections[0] + (0,) * sections[2])


def with_axes_of_dimensions(c: HFConfig, model: ModelSpec) -> ModelSpec:
    """The model with positions on four axes (count, column, row, number of the image) that take consecutive
    dimensions of a head, twice as many as the config's `mrope_section` says (Hunyuan-VL).

    Raises:
        ConfigError: not four sections, or they do not add up to the pairs.
    """
    sections = _sections(c, ())
    if len(sections) != 4:
        raise ConfigError(
            f"{c.name}: {c.model_type} models need four sections in mrope_section, or xdrope_section, of "
            f"the count, the column, the row and the image; found {abbreviate(sections)}"
        )
    return _with_axes(c, model, tuple(i for i, n in enumerate(sections) for _ in range(2 * n)), of_pair=2)


def _with_axes(
    c: HFConfig, model: ModelSpec, axes: tuple[int, ...], of_pair: int = 1, layer_type: str | None = None
) -> ModelSpec:
    blocks = []
    for block in model.blocks:
        mixer = block.mixer
        if isinstance(mixer, RecurrentSpec) or not _has_axes(mixer, layer_type):
            blocks.append(block)
            continue
        assert isinstance(mixer, AttentionSpec)
        assert mixer.rope is not None
        if len(axes) != of_pair * mixer.rope.dim // 2:
            raise ConfigError(
                f"{c.name}: mrope_section must divide the {mixer.rope.dim // 2} pairs of dimensions of a "
                f"head among the axes (time, row and column); it gives {len(axes) // of_pair}"
            )
        blocks.append(replace(block, mixer=replace(mixer, rope=replace(mixer.rope, axes=axes))))
    return replace(model, blocks=tuple(blocks))


def _has_axes(mixer: Any, layer_type: str | None) -> bool:
    """Whether a layer is of this type, and has positions; layers of any type (None) do."""
    if layer_type is None:
        return True
    return mixer.rope is not None and (mixer.window is not None) == (layer_type == SLIDING)


def _sections(c: HFConfig, default: Sequence[int], layer_type: str | None = None) -> list[int]:
    text: Mapping[str, Any] = c.raw.get("text_config") or c.raw
    for key in ("rope_parameters", "rope_scaling"):
        found = text.get(key)
        if layer_type is not None and isinstance(found, Mapping):
            found = found.get(layer_type, found)
        names = ("mrope_section", "xdrope_section") if isinstance(found, Mapping) else ()
        stated = [] if found is None else [found[name] for name in names if found.get(name) is not None]
        if len(stated) > 1 and stated[0] != stated[1]:
            raise ConfigError(f"{c.name}: mrope_section and xdrope_section differ: {abbreviate(stated)}")
        if stated:
            sections = stated[0]
            if not isinstance(sections, list) or not all(type(n) is int and n >= 0 for n in sections):
                raise ConfigError(
                    f"{c.name}: mrope_section must be a list of counts, found {abbreviate(sections)}"
                )
            return sections
    return list(default)


def with_spans(text: ModelSpec, bidirectional: bool) -> ModelSpec:
    """The language model whose layers with a window show the tokens of an image to one another."""
    blocks = []
    for block in text.blocks:
        assert isinstance(block.mixer, AttentionSpec | SharedAttentionSpec)
        spans = not bidirectional or block.mixer.window is not None
        blocks.append(replace(block, mixer=replace(block.mixer, bidirectional_spans=spans)))
    return replace(text, blocks=tuple(blocks))


def vision_layouts(
    vision: Mapping[str, tuple[str, Names]],
    rename: Names = (),
    whole: tuple[str, ...] = (),
    permuted: Names = (),
) -> tuple[Layout, ...]:
    """Layouts of older files, and of transformers' modules.

    Args:
        vision: name prefixes, their prefixes in a checkpoint, and renames of the rest.
        rename, whole, permuted: as in `Layout`, for the language model.
    """
    return tuple(
        Layout(
            (*rename, *head),
            whole,
            permuted,
            root=text,
            parts=tuple((here, Layout(names, root=root + there)) for here, (there, names) in vision.items()),
        )
        for text, root, head in (
            ("language_model.model.", "", (("lm_head.", "language_model.lm_head."),)),
            ("model.language_model.", "model.", ()),
        )
    )


def tower_layouts(
    encoder: Names, projector: Names = (), permuted: Names = (), inner: str = ""
) -> tuple[Layout, ...]:
    """The same, with the encoder named `vision_tower` and the projector `multi_modal_projector`.

    Args:
        encoder, projector: renames within these.
        permuted: as in `Layout`.
        inner: infix between `vision_tower.` and the encoder's names.
    """
    vision = {
        "vision.encoder.": (f"vision_tower.{inner}", encoder),
        "vision.projector.": ("multi_modal_projector.", projector),
        "vision.newline.": ("", (("weight", "image_newline"),)),
    }
    return vision_layouts(vision, permuted=permuted)
