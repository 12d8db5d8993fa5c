"""Shared parts of image encoders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from liger_models.architectures.common import activation
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_finite
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    Activation,
    AnyresPictures,
    AttentionSpec,
    MLPProjectorSpec,
    PatchSpec,
    RopeSpec,
)

LINEAR_NAMES = ((".up_proj.", ".fc1."), (".down_proj.", ".fc2."))
"""Usual names of the layers of an encoder's MLPs."""


def whole_attention(
    v: HFConfig, hidden_size: int, heads: int, *, bias: bool = True, **settings: Any
) -> AttentionSpec:
    """Bidirectional attention over all patches of an image. `v` is the encoder's config; `settings` are other
    fields of the spec.

    Raises:
        ConfigError: the width is not a multiple of the heads.
    """
    if hidden_size % heads:
        raise ConfigError(
            f"{v.name}: {heads} heads of {hidden_size} dimensions together; expected a multiple"
        )
    head_dim = hidden_size // heads
    biases = {"qkv_bias": bias, "o_bias": bias}
    return AttentionSpec(heads, heads, head_dim, head_dim**-0.5, causal=False, **{**biases, **settings})


def axial_attention(
    v: HFConfig,
    hidden_size: int,
    heads: int,
    *,
    bias: bool = True,
    theta: float = 10000.0,
    axes: tuple[int, int] = (0, 1),
    **rotary: Any,
) -> AttentionSpec:
    """The same with half of a head's pairs rotated by the row and half by the column, with the same
    frequencies (Qwen2-VL).

    Args:
        theta: default value.
        axes: of the first and of the second half; 0 is the row.
        rotary: other fields of the `RopeSpec`.

    Raises:
        ConfigError: the width is not a multiple of four times the heads.
    """
    if hidden_size % (4 * heads):
        raise ConfigError(
            f"{v.name}: {heads} heads of {hidden_size} dimensions together; expected a multiple of "
            f"{4 * heads}"
        )
    head_dim = hidden_size // heads
    quarter, (first, second) = head_dim // 4, axes
    rotary = {"frequencies": (*range(0, 2 * quarter, 2),) * 2, **rotary}
    rope = RopeSpec(head_dim, axial_theta(v, theta), axes=(first,) * quarter + (second,) * quarter, **rotary)
    return whole_attention(v, hidden_size, heads, bias=bias, rope=rope)


def axial_theta(v: HFConfig, default: float) -> float:
    """Theta of an encoder's rotary positions, in either spelling.

    Raises:
        ConfigError: another rope type, or not a number above 0.
    """
    default = v.take_number("rope_theta", default)  # as in older configs
    rope = v.take("rope_parameters", {})
    if not isinstance(rope, Mapping) or not rope.keys() <= {"rope_type", "rope_theta"}:
        raise ConfigError(
            f"{v.name}: rope_parameters may hold rope_type and rope_theta, found {abbreviate(rope)}"
        )
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ConfigError(f"{v.name}: the rope_type of an encoder must be axial, found {rope['rope_type']!r}")
    theta = rope.get("rope_theta", default)
    if not is_finite(theta) or theta <= 0:
        raise ConfigError(f"{v.name}: rope_theta must be a number above 0, found {abbreviate(theta)}")
    return float(theta)


def patches(v: HFConfig, size: int, bias: bool, frames: int | None = None) -> PatchSpec:
    """Patches of three-channel images, from the encoder's config, with `frames` frames or the config's."""
    size = v.take_count("patch_size", size)
    v.take_only(in_channels=3, in_chans=3, num_channels=3, spatial_patch_size=size)
    frames = v.take_count("temporal_patch_size", 2) if frames is None else frames
    return PatchSpec(size, frames, bias=bias)


def projector_activation(c: HFConfig) -> Activation:
    """Activation between the linear layers of the projector."""
    c.fill({"projector_hidden_act": "gelu"})
    return activation(c, "projector_hidden_act", gated=False)


def mlp_projector(c: HFConfig) -> MLPProjectorSpec:
    """Projector of two linear layers, with the config's activation and biases (LLaVA)."""
    c.take("image_seq_length", None)  # read by the processor
    return MLPProjectorSpec(projector_activation(c), c.take_flag("multimodal_projector_bias", True))


def states_read(
    c: HFConfig, v: HFConfig, default: int | list[int], older: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """Encoder states selected by the config's `vision_feature_layer`, one or a list: 0 is the input of the
    first layer, i the output of layer i, counting from 1; negative ones count from the end. `older` are older
    names of the key.

    Raises:
        ConfigError: there is no such state.
    """
    depth = v.take_count("num_hidden_layers")
    named = c.take_one_of("vision_feature_layer", *older, default=default)
    states = named if isinstance(named, list) else [named]
    if not states or not all(type(i) is int and -depth - 1 <= i <= depth for i in states):
        raise ConfigError(
            f"{c.name}: vision_feature_layer must be a state of the encoder's {depth} layers or a list of "
            f"such, from {-depth - 1} to {depth}, found {abbreviate(named)}"
        )
    return tuple(i % (depth + 1) for i in states)


def tiles(
    c: HFConfig, v: HFConfig, default: list[list[int]], most: int | None, frame_pool: int | None = None
) -> AnyresPictures:
    """Images as tiles, in the best of the config's `image_grid_pinpoints`; `most` and `frame_pool` as in
    `AnyresPictures`.

    Raises:
        ConfigError: not pairs of multiples of the encoder's image size.
    """
    size, pairs = v.take_count("image_size"), c.take("image_grid_pinpoints", default)
    good = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n > 0 for n in pair)
        for pair in pairs
    )
    if not good or not pairs or any(n % size for pair in pairs for n in pair):
        raise ConfigError(
            f"{c.name}: image_grid_pinpoints must be pairs of a height and a width, multiples of the "
            f"encoder's image_size, {size}; found {abbreviate(pairs)}"
        )
    return AnyresPictures(size, tuple((h, w) for h, w in pairs), most, frame_pool)


def tokens_by_patches(c: HFConfig) -> tuple[tuple[int, int], ...]:
    """The number of tokens of an image for each number of patches of a square.

    Raises:
        ConfigError: not such numbers.
    """
    found: Any = c.take("projector_patch_to_query_dict", {"1225": 128, "4900": 256})
    good = isinstance(found, dict) and found and all(str(key).isdecimal() for key in found)
    if not good or any(
        math.isqrt(int(key)) ** 2 != int(key) or type(count) is not int or count < 1
        for key, count in found.items()
    ):
        raise ConfigError(
            f"{c.name}: projector_patch_to_query_dict must give a number of tokens for each number of "
            f"patches of a square, found {abbreviate(found)}"
        )
    return tuple((int(key), count) for key, count in found.items())
