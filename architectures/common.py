"""What many families' configs have in common, read into specs."""

from __future__ import annotations

from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.spec import Activation, AttentionSpec, MLPSpec, RopeSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


def attention(c: HFConfig, *, bias: bool = False, window: int | None = None) -> AttentionSpec:
    """Grouped-query attention with rotary positions, from the keys that nearly every config has."""
    hidden_size, heads = c.take_count("hidden_size"), c.take_count("num_attention_heads")
    kv_heads = c.take_count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{c.name}: num_attention_heads is {heads} and num_key_value_heads {kv_heads}; "
            "the first must be a multiple of the second"
        )
    head_dim = c.take_count("head_dim", None)
    if head_dim is None:
        if hidden_size % heads:
            raise ConfigError(
                f"{c.name}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
                f"{heads}; give head_dim"
            )
        head_dim = hidden_size // heads
    return AttentionSpec(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(c, head_dim),
        window=window,
        qkv_bias=bias,
        o_bias=bias,
    )


def rope(c: HFConfig, head_dim: int) -> RopeSpec:
    """The rotary settings, in whichever spelling the config has them."""
    settings = c.take_rope()
    if "mrope_section" in settings:
        raise ConfigError(
            f"{c.name}: mrope_section asks for rotary positions on several axes, which {c.model_type!r} "
            "models do not have"
        )
    share = settings.pop("partial_rotary_factor")
    if share != 1:  # the references of these families turn whole heads, whatever the config says
        raise ConfigError(
            f"{c.name}: partial_rotary_factor is {share}, but {c.model_type!r} models turn "
            "whole heads; remove it"
        )
    dim = head_dim
    if dim < 2 or dim % 2:
        raise ConfigError(f"{c.name}: rotary positions need an even number of dimensions, found {dim}")
    for key in ("short_factor", "long_factor"):
        if key in settings and len(settings[key]) != dim // 2:
            raise ConfigError(f"{c.name}: {key} must hold {dim // 2} numbers, found {len(settings[key])}")
    return RopeSpec(
        dim=dim,
        theta=settings.pop("rope_theta"),
        type=settings.pop("rope_type"),
        max_position_embeddings=c.take_count("max_position_embeddings"),
        **settings,
    )


def mlp(c: HFConfig, *, bias: bool = False) -> MLPSpec:
    """A gated MLP."""
    return MLPSpec(c.take_count("intermediate_size"), activation(c, c.take("hidden_act", "silu")), bias)


def activation(c: HFConfig, name: str) -> Activation:
    """The kernel of an activation's name in the config."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(
            f"{c.name}: hidden_act {name!r} is unknown; expected one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
