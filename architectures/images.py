"""What the configs of many families that see images have in common, read into specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_models.architectures.multimodal import text_part
from liger_models.architectures.registry import find_architecture
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.spec import AttentionSpec, ModelSpec, RopeSpec


def language_model(c: HFConfig) -> ModelSpec:
    """The language model of a config, as its own family has it."""
    text = text_part(c)
    return find_architecture(text.model_type).spec(text)


def turned_by_axes(model: ModelSpec, axes: tuple[int, ...]) -> ModelSpec:
    """The model with positions on several axes: pair i of a head turns by axis `axes[i]`."""
    blocks = []
    for block in model.blocks:
        mixer = block.mixer
        assert isinstance(mixer, AttentionSpec)
        assert mixer.rope is not None
        blocks.append(replace(block, mixer=replace(mixer, rope=replace(mixer.rope, axes=axes))))
    return replace(model, blocks=tuple(blocks))


def axes_in_a_row(c: HFConfig, default: Sequence[int], pairs: int) -> tuple[int, ...]:
    """The axis of each pair, of time, row and column in turn, each for as many pairs as `mrope_section` says.

    Raises:
        ConfigError: the sections do not share out the pairs.
    """
    sections = _sections(c, default)
    axes = tuple(i % 3 for i, section in enumerate(sections) for _ in range(section))
    if len(axes) != pairs:
        raise ConfigError(
            f"{c.name}: mrope_section is {abbreviate(sections)}, and the heads of the language model have "
            f"{pairs} pairs of dimensions to share out"
        )
    return axes


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


def _axial_theta(v: HFConfig, default: float) -> float:
    rope = v.take("rope_parameters", {})
    if not isinstance(rope, Mapping) or not rope.keys() <= {"rope_type", "rope_theta"}:
        raise ConfigError(
            f"{v.name}: rope_parameters may hold rope_type and rope_theta, found {abbreviate(rope)}"
        )
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ConfigError(f"{v.name}: the rope_type of an encoder must be axial, found {rope['rope_type']!r}")
    return float(rope.get("rope_theta", default))
