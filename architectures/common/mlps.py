"""MLPs and experts: activations, sizes, and checkpoint names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liger_models.convert.checkpoints.layout import Layout
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError, abbreviate
from liger_models.layers.specs import Activation, ClampedSwiGLU, MLPSpec, MoESpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def activation(
    c: HFConfig, key: str = "hidden_act", gated: bool = True, also: Sequence[str] = ()
) -> Activation:
    """Kernel name of the config's activation; `also` are further ones that the family's gates may have."""
    name = c.take(key, "silu")
    plain = ("quick_gelu", "relu", "relu2", "xielu")
    known = [known for known in _ACTIVATIONS if not (gated and known in plain) or known in also]
    if name not in known:
        raise ConfigError(f"{c.name}: {key} {name!r} is unknown; expected one of {', '.join(known)}")
    return _ACTIVATIONS[name]


def clamped_activation(c: HFConfig) -> ClampedSwiGLU:
    """SwiGLU with gate and input clamped to `swiglu_limit`.

    Raises:
        ConfigError: a limit that is not above zero.
    """
    limit = c.take_number("swiglu_limit", 10.0)
    if not limit > 0:
        raise ConfigError(f"{c.name}: swiglu_limit must be above 0, found {limit}")
    return ClampedSwiGLU(1.0, limit, plus_one=False)


def mlp(c: HFConfig, *, bias: bool = False, gated: bool = True, key: str = "hidden_act") -> MLPSpec:
    """An MLP, from the keys of nearly every config; `key` is the activation's."""
    return MLPSpec(c.take_count("intermediate_size"), activation(c, key, gated), bias, gated)


def experts_and_chosen(
    c: HFConfig,
    keys: Sequence[str] = ("num_experts", "num_local_experts"),
    chosen_keys: Sequence[str] = ("num_experts_per_tok",),
) -> tuple[int, int]:
    """Number of experts, and number of experts per token, each under any of several keys.

    Raises:
        ConfigError: more experts per token than experts.
    """
    experts, chosen = c.take_count(tuple(keys)), c.take_count(tuple(chosen_keys))
    if chosen > experts:
        raise ConfigError(
            f"{c.name}: {chosen_keys[0]} is {chosen} and {keys[0]} {experts}; expected at most {experts}"
        )
    return experts, chosen


def chosen_experts(
    c: HFConfig,
    keys: Sequence[str] = ("num_experts", "num_local_experts"),
    chosen_keys: Sequence[str] = ("num_experts_per_tok",),
    *,
    size: str = "moe_intermediate_size",
    **settings: Any,
) -> MoESpec:
    """Experts, from the keys of many configs; `size` is the key of their width. `settings` are other fields
    of the `MoESpec`.
    """
    return MoESpec(
        *experts_and_chosen(c, keys, chosen_keys),
        intermediate_size=c.take_count(size),
        activation=activation(c),
        aux_loss_coef=aux_loss_coef(c),
        **settings,
    )


def experts_of_two_widths(
    c: HFConfig, keys: Sequence[str], chosen_keys: Sequence[str], bias: bool, **settings: Any
) -> MoESpec:
    """Experts of text and of pictures, whose widths are a list under `moe_intermediate_size`, with shared
    ones, each as wide as one of text. `bias` is that of the shared ones; `settings` are other fields of the
    `MoESpec`.

    Raises:
        ConfigError: not two widths.
    """
    sizes = c.take("moe_intermediate_size", [1536, 512])
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise ConfigError(
            f"{c.name}: moe_intermediate_size must be two widths, of the text experts and of the image "
            f"experts, found {abbreviate(sizes)}"
        )
    act, width = activation(c), c.take_count("moe_num_shared_experts", 2, least=0) * sizes[0]
    return MoESpec(
        *experts_and_chosen(c, keys, chosen_keys),
        *(sizes[0], act),
        shared_expert=MLPSpec(width, act, bias) if width else None,
        aux_loss_coef=aux_loss_coef(c),
        image_size=sizes[1],
        **settings,
    )


INPUTS_FIRST = (
    ("*.experts.gate_up_proj", "e h i -> e i h"),
    ("*.experts.down_proj", "e i h -> e h i"),
)
"""`permuted` of a `Layout`, for checkpoints with transposed experts."""


def expert_layouts(
    *rename: tuple[str, str], permuted: tuple[tuple[str, str], ...] = ()
) -> tuple[Layout, ...]:
    """Layouts of checkpoints with separate experts, or all in one tensor; `rename` applies first."""
    names = (*rename, (".router.", ".gate."))
    return Layout(names, permuted=permuted), Layout(names, ("*.experts.*",), permuted)


def aux_loss_coef(c: HFConfig) -> float:
    """Weight of the load balancing loss: the references add it if `output_router_logits` is set."""
    coef = c.take_number("router_aux_loss_coef")
    return coef if c.take_flag("output_router_logits", False) else 0.0
