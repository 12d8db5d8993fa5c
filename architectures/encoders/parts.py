"""Shared parts of image encoders: attention over all patches, patches, projectors, the states that a
projector reads, tiles; and Q-Formers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from liger_models.architectures.common import activation
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.config.rope_config import is_finite
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import (
    Activation,
    AnyresPictures,
    AttentionSpec,
    FrameQueriesSpec,
    LayerNormSpec,
    MLPProjectorSpec,
    PatchSpec,
    RopeSpec,
    WindowQueriesSpec,
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


# -- Q-Formers, of Granite 4 Vision and of Granite Speech

CORNERS = 4
_DROPOUTS = "hidden_dropout_prob", "attention_probs_dropout_prob"
_OF_ATTENTION = (
    *(("q_proj.", "attention.query."), ("k_proj.", "attention.key."), ("v_proj.", "attention.value.")),
    *(("o_proj.", "output.dense."), ("norm.", "output.LayerNorm.")),
)
QUERY_LAYER_NAMES = (
    *(
        (f".{kind}.{here}", f".{kind}.{there}")
        for kind in ("attention", "crossattention")
        for here, there in _OF_ATTENTION
    ),
    *((".up_proj.", ".intermediate_query.dense."), (".down_proj.", ".output_query.dense.")),
    *((".norm_mlp.", ".output_query.LayerNorm."), (".norm_queries.", ".qformer.layernorm.")),
    (".layers.", ".qformer.encoder.layer."),
)
"""Names of a Q-Former in a projector."""
QUERY_NAMES = (
    *QUERY_LAYER_NAMES,
    *((".linear.", ".out_linear."), (".positions", ".image_positions")),
    *(("layerwise.", "layerwise_projectors."), ("spatial.", "spatial_projectors.")),
)
"""Names of the projectors of Granite 4 Vision."""


def targets(c: HFConfig) -> Any:
    """The layers of the language model that get corners of four patches."""
    return c.take("spatial_target_layers", [12, 15, 18, 21])


def states_for_layers(c: HFConfig, v: HFConfig) -> list[tuple[int, int]]:
    """The state of the encoder and the layer of the language model of each projector.

    Raises:
        ConfigError: not such numbers.
    """
    depth, listed = v.take_count("num_hidden_layers"), c.take("deepstack_layer_map")
    layers = targets(c)
    good = isinstance(listed, list) and isinstance(layers, list) and len(layers) <= CORNERS
    good = good and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in listed)
    found = [*listed, *((c.take("spatial_vision_layer", -1), layer) for layer in layers)] if good else []
    good = good and all(type(n) is int for pair in found for n in pair)
    if not good or not all(-depth - 1 <= state <= depth for state, _ in found):
        raise ConfigError(
            f"{c.name}: deepstack_layer_map must be pairs of a state of the encoder's {depth} layers and a "
            f"layer of the language model, and spatial_target_layers up to {CORNERS} layers; "
            f"found {abbreviate(listed)} and {abbreviate(layers)}"
        )
    return [(state % (depth + 1), layer) for state, layer in found]


def query_former(q: HFConfig, window: int, queries: int, inputs: int) -> FrameQueriesSpec:
    """A projector of windows of so many frames, which have so many queries, from the Q-Former's config.

    Args:
        inputs: the width of a frame.

    Raises:
        ConfigError: sizes that the reference cannot run, or dropout.
    """
    q.fill({"hidden_act": "gelu", **dict.fromkeys(_DROPOUTS, 0.1)})
    for key in ("vocab_size", "max_position_embeddings", "pad_token_id"):
        q.take(key, None)  # not read
    q.take_only(use_qformer_text_input=False, position_embedding_type="absolute")  # of text
    width, heads = q.take_count("hidden_size", 768), q.take_count("num_attention_heads", 12)
    if width % heads:
        raise ConfigError(f"{q.name}: {heads} heads of {width} dimensions together; expected a multiple")
    if (found := q.take_count("encoder_hidden_size", 1408)) != inputs:
        raise ConfigError(f"{q.name}: encoder_hidden_size is {found}; expected {inputs}, the encoder's width")
    return FrameQueriesSpec(
        *(window, queries, width, heads, q.take_count("intermediate_size", 3072)),
        LayerNormSpec(q.take_number("layer_norm_eps", 1e-12)),
        q.take_count("num_hidden_layers", 12),
        q.take_count("cross_attention_frequency", 2),
        activation(q, gated=False),
    )


def window_queries(
    c: HFConfig, q: HFConfig, side: int, width: int, layers: tuple[int, ...]
) -> WindowQueriesSpec:
    """The projectors, from the model's config and the Q-Former's own; `layers` are the language model's.

    Raises:
        ConfigError: windows that do not fill a tile of `side` times `side` patches, a width that is not a
            multiple of 64, or dropout.
    """
    q.fill({"hidden_act": "gelu", **dict.fromkeys(_DROPOUTS, 0.1)})
    c.fill({"projector_dropout": 0.1})
    if any(
        config.take_dropout(key)
        for config, key in ((c, "projector_dropout"), *((q, key) for key in _DROPOUTS))
    ):
        raise ConfigError(
            f"{c.name}: dropout in the projectors is not supported; pass dropout=0.0, or --dropout 0, to go "
            "without any"
        )
    for key in (
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "num_attention_heads",
        "encoder_hidden_size",
        "pad_token_id",
    ):
        q.take(key, None)  # not read, or replaced by the encoder's
    q.take_only(use_qformer_text_input=False)
    rate = str(c.take("downsample_rate"))
    few, _, many = rate.partition("/")
    if not few.isdecimal() or not many.isdecimal() or not 0 < int(few) <= int(many) or side % int(many):
        raise ConfigError(
            f"{c.name}: downsample_rate must be two numbers as in '4/8', the second a divisor of the {side} "
            f"patches of a tile's side, found {abbreviate(rate)}"
        )
    if Fraction(rate) != Fraction(1, 2) or side % 2 or width % 64:
        raise ConfigError(
            f"{c.name}: downsample_rate must be one half, since corners are those of four patches, and the "
            f"encoder's width a multiple of 64; found {rate} and {width}"
        )
    return WindowQueriesSpec(
        side,
        int(many),
        int(few),
        layers,
        (0,) * len(layers),
        len(targets(c)),
        width // 64,
        q.take_count("intermediate_size", 3072),
        LayerNormSpec(q.take_number("layer_norm_eps", 1e-12)),
        q.take_count("num_hidden_layers", 12),
        q.take_count("cross_attention_frequency", 2),
        activation(q, gated=False),
    )
