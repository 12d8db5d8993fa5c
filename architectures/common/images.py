"""What the configs of many families that see images have in common, read into specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_models.architectures.common.model import take_only
from liger_models.architectures.multimodal import text_part
from liger_models.architectures.registry import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.spec import (
    AttentionSpec,
    BlockSpec,
    LayerNormSpec,
    ModelSpec,
    NormSpec,
    PatchMergerSpec,
    PatchSpec,
    RopeSpec,
    VisionSpec,
)


def language_model(c: HFConfig) -> ModelSpec:
    """The language model of a config, as its own family has it."""
    text = text_part(c)
    return find_architecture(text.model_type).spec(text)


def turned_by_axes(c: HFConfig, model: ModelSpec, sections: Sequence[int]) -> ModelSpec:
    """The model with positions in time, row and column, by which the pairs of a head turn in a row: as many
    by each as the config's `mrope_section` says, or these `sections`.

    Raises:
        ConfigError: the sections do not share out the pairs.
    """
    sections = _sections(c, sections)
    return _with_axes(c, model, tuple(i % 3 for i, count in enumerate(sections) for _ in range(count)))


def turned_by_axes_in_turn(c: HFConfig, model: ModelSpec, sections: Sequence[int]) -> ModelSpec:
    """The same, but that axes take turns, pair i going to axis i % 3, until row and column have had their
    share; time takes all others (Qwen3-VL).

    Raises:
        ConfigError: the sections are not three, or do not share out the pairs.
    """
    sections = _sections(c, sections)
    axes = [0] * sum(sections)
    for axis in (1, 2) if len(sections) == 3 else ():
        for i in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[i] = axis
    return _with_axes(c, model, tuple(axes) if len(sections) == 3 else ())


def _with_axes(c: HFConfig, model: ModelSpec, axes: tuple[int, ...]) -> ModelSpec:
    blocks = []
    for block in model.blocks:
        mixer = block.mixer
        assert isinstance(mixer, AttentionSpec)
        assert mixer.rope is not None
        if len(axes) != mixer.rope.dim // 2:
            raise ConfigError(
                f"{c.name}: mrope_section must share out the {mixer.rope.dim // 2} pairs of dimensions of a "
                f"head among time, row and column; it gives {len(axes)}"
            )
        blocks.append(replace(block, mixer=replace(mixer, rope=replace(mixer.rope, axes=axes))))
    return replace(model, blocks=tuple(blocks))


def _sections(c: HFConfig, default: Sequence[int]) -> list[int]:
    text: Mapping[str, Any] = c.raw.get("text_config") or c.raw
    for key in ("rope_parameters", "rope_scaling"):
        found = text.get(key)
        if isinstance(found, Mapping) and "mrope_section" in found:
            sections = found["mrope_section"]
            if not isinstance(sections, list) or not all(type(n) is int and n >= 0 for n in sections):
                raise ConfigError(
                    f"{c.name}: mrope_section must be a list of counts, found {abbreviate(sections)}"
                )
            return sections
    return list(default)


def encoder_attention(v: HFConfig, hidden_size: int, heads: int, theta: float = 10000.0) -> AttentionSpec:
    """Attention of all patches of a picture to all others, half of whose pairs turn by the row, the others by
    the column, with the same frequencies (Qwen2-VL). `v` is the encoder's config.

    Raises:
        ConfigError: the width is no multiple of four times the heads.
    """
    if hidden_size % (4 * heads):
        raise ConfigError(
            f"{v.name}: {heads} heads of {hidden_size} dimensions together; expected a multiple of "
            f"{4 * heads}"
        )
    head_dim = hidden_size // heads
    quarter = head_dim // 4
    rope = RopeSpec(
        head_dim,
        _axial_theta(v, theta),
        axes=(0,) * quarter + (1,) * quarter,
        frequencies=(*range(0, 2 * quarter, 2),) * 2,
    )
    return AttentionSpec(
        heads, heads, head_dim, head_dim**-0.5, rope, qkv_bias=True, o_bias=True, causal=False
    )


def patches(v: HFConfig, size: int, bias: bool, frames: int | None = None) -> PatchSpec:
    """Patches of pictures of three colours, from the encoder's config; of so many `frames`, or as many as it
    says.
    """
    size = v.take_count("patch_size", size)
    take_only(v, in_channels=3, in_chans=3, num_channels=3, spatial_patch_size=size)
    frames = v.take_count("temporal_patch_size", 2) if frames is None else frames
    return PatchSpec(size, frames, bias=bias)


def grid_vision(
    c: HFConfig,
    v: HFConfig,
    hidden_size: int,
    block: BlockSpec,
    norm: NormSpec | LayerNormSpec,
    *,
    depth: int = 32,
    patch_size: int = 14,
    patch_bias: bool = False,
    **settings: Any,
) -> VisionSpec:
    """An encoder of pictures of all sizes, as the Qwen families have it: see `VisionSpec`.

    Args:
        c, v: the config, and the encoder's.
        hidden_size, block, norm: the encoder's width, its layers, and the norm in front of its way out.
        depth, patch_size: where the config does not say.
        patch_bias: whether the layer over patches has one.
        settings: further fields of the spec.
    """
    for key in ("vision_start_token_id", "vision_end_token_id", "vision_token_id"):
        c.take(key, None)  # which the processor places
    return VisionSpec(
        hidden_size,
        patches(v, patch_size, patch_bias),
        (block,) * v.take_count("depth", depth),
        PatchMergerSpec(v.take_count("spatial_merge_size", 2), norm),
        c.take_count("image_token_id", 151655, least=0),
        c.take_count("video_token_id", 151656, least=0),
        kinds="mm_token_type_ids",
        **settings,
    )


def _axial_theta(v: HFConfig, default: float) -> float:
    default = v.take_number("rope_theta", default)  # as older configs have it
    rope = v.take("rope_parameters", {})
    if not isinstance(rope, Mapping) or not rope.keys() <= {"rope_type", "rope_theta"}:
        raise ConfigError(
            f"{v.name}: rope_parameters may hold rope_type and rope_theta, found {abbreviate(rope)}"
        )
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ConfigError(f"{v.name}: the rope_type of an encoder must be axial, found {rope['rope_type']!r}")
    return float(rope.get("rope_theta", default))
