"""What encoders of images have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_models.architectures.common import activation
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_finite
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import Activation, AttentionSpec, MLPProjectorSpec, PatchSpec, RopeSpec

LINEAR_NAMES = ((".up_proj.", ".fc1."), (".down_proj.", ".fc2."))
"""What most encoders call the layers of their MLPs."""


def whole_attention(
    v: HFConfig, hidden_size: int, heads: int, *, bias: bool = True, **settings: Any
) -> AttentionSpec:
    """Attention of all patches of a picture to all others. `v` is the encoder's config; `settings` are
    further fields of the spec.

    Raises:
        ConfigError: heads that do not share out the width.
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
    """The same, in which half of a head's pairs turn by the row, the others by the column, with the same
    frequencies (Qwen2-VL).

    Args:
        theta: where the config does not say.
        axes: of the first half and of the second, 0 being the row.
        rotary: further fields of the `RopeSpec`.

    Raises:
        ConfigError: the width is no multiple of four times the heads.
    """
    if hidden_size % (4 * heads):
        raise ConfigError(
            f"{v.name}: {heads} heads of {hidden_size} dimensions together; expected a multiple of "
            f"{4 * heads}"
        )
    head_dim = hidden_size // heads
    quarter, (first, second) = head_dim // 4, axes
    rotary = {"frequencies": (*range(0, 2 * quarter, 2),) * 2, **rotary}
    rope = RopeSpec(head_dim, _axial_theta(v, theta), axes=(first,) * quarter + (second,) * quarter, **rotary)
    return whole_attention(v, hidden_size, heads, bias=bias, rope=rope)


def _axial_theta(v: HFConfig, default: float) -> float:
    default = v.take_number("rope_theta", default)  # as older configs have it
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
    """Patches of pictures of three colours, from the encoder's config; of so many `frames`, or as many as it
    says.
    """
    size = v.take_count("patch_size", size)
    v.take_only(in_channels=3, in_chans=3, num_channels=3, spatial_patch_size=size)
    frames = v.take_count("temporal_patch_size", 2) if frames is None else frames
    return PatchSpec(size, frames, bias=bias)


def projector_activation(c: HFConfig) -> Activation:
    """Between the linear layers that lead out of the encoder."""
    c.fill({"projector_hidden_act": "gelu"})
    return activation(c, "projector_hidden_act", gated=False)


def mlp_projector(c: HFConfig) -> MLPProjectorSpec:
    """Two linear layers out of the encoder, whose activation and biases the config says (LLaVA)."""
    c.take("image_seq_length", None)  # which the processor reads
    return MLPProjectorSpec(projector_activation(c), c.take_flag("multimodal_projector_bias", True))


def states_read(c: HFConfig, v: HFConfig, default: int) -> tuple[int, ...]:
    """The states of the encoder that the config's `vision_feature_layer` names, one or a list of them: 0 is
    what enters its first layer, i what layer i gives, the first being 1; negative ones count from the end.

    Raises:
        ConfigError: there is no such state.
    """
    depth, named = v.take_count("num_hidden_layers"), c.take("vision_feature_layer", default)
    states = named if isinstance(named, list) else [named]
    if not states or not all(type(i) is int and -depth - 1 <= i <= depth for i in states):
        raise ConfigError(
            f"{c.name}: vision_feature_layer must be a state of the encoder's {depth} layers or a list of "
            f"such, from {-depth - 1} to {depth}, found {abbreviate(named)}"
        )
    return tuple(i % (depth + 1) for i in states)
