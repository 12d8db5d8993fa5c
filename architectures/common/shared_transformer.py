"""State space layers, some of which add attention and an MLP with shared weights (Zamba 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from liger_models.architectures.common.grouped_attention import check_groups
from liger_models.architectures.common.linear_attention import LINEAR
from liger_models.architectures.common.rotary import rope
from liger_models.architectures.common.state_space import known_types
from liger_models.convert.checkpoints.layout import Renames
from liger_models.convert.config.hf_config import HFConfig
from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, SharedSpec

HYBRID = "hybrid"
"""Type of the layers with attention, in addition to LINEAR."""

IN_HYBRIDS = ((".mamba.", ".mamba_decoder.mamba."), (".input_layernorm.", ".mamba_decoder.input_layernorm."))
IN_LAYERS: tuple[tuple[str, Renames], ...] = (
    ("linear", IN_HYBRIDS),
    ("mamba", ((".norm.", ".input_layernorm."),)),
)
NAMES: Renames = (
    ("model.shared.", "model.layers."),
    ("model.norm.", "model.final_layernorm."),
    *((f".{name}_adapters.", f".self_attn.linear_{name}_adapter_list.") for name in "qkv"),
    (".gate_up_adapters.", ".feed_forward.gate_up_proj_adapter_list."),
    (".mlp.", ".feed_forward."),
)
"""Names in checkpoints, which hold shared weights in the first layer that uses them."""


def wide_attention(c: HFConfig) -> AttentionSpec:
    """Attention that reads hidden states and embeddings side by side.

    Raises:
        ConfigError: a number of heads that does not divide the width.
    """
    heads, size = c.take_count("num_attention_heads"), 2 * c.take_count("hidden_size")
    kv_heads = c.take_count("num_key_value_heads", heads)
    check_groups(c, heads, kv_heads)
    if size % heads:
        raise ConfigError(
            f"{c.name}: num_attention_heads is {heads}; expected a divisor of twice hidden_size, {size}"
        )
    head_dim = size // heads
    positions = rope(c, head_dim)
    turns = positions if c.take_flag("use_mem_rope", False) else None
    return AttentionSpec(heads, kv_heads, head_dim, scale=(head_dim / 2) ** -0.5, rope=turns)


def hybrid_layers(
    c: HFConfig, types: Sequence[str], plain: BlockSpec, hybrid: BlockSpec, shared: SharedSpec
) -> list[BlockSpec]:
    """Layers of these types. The weights of `num_mem_blocks` hybrid layers serve all of them, in turn.

    Args:
        plain, hybrid: the layers of each type, without shared weights.
        shared: the adapters of a use.

    Raises:
        ConfigError: `tie_word_embeddings` is false; the reference then shares no weights at all.
    """
    if not c.take_flag("tie_word_embeddings", True):
        raise ConfigError(
            f"{c.name}: tie_word_embeddings is false, with which transformers shares no weights at all in "
            f"{c.model_type!r} models, not even those of attention; expected true"
        )
    number, uses = c.take_count("num_mem_blocks", 1), [i for i, kind in enumerate(types) if kind == HYBRID]
    layers = [plain] * len(types)
    for use, i in enumerate(uses):
        layers[i] = replace(hybrid, shared=replace(shared, first=uses[use % number], use=use))
    return layers


def types_of_layers(c: HFConfig, default: Callable[[], list[str]]) -> list[str]:
    """Type of each layer, LINEAR or HYBRID, under the names of older and newer configs.

    Raises:
        ConfigError: not one type per layer, or an unknown type.
    """
    types = c.take("layers_block_type", None)
    names = {"mamba": LINEAR, LINEAR: LINEAR, HYBRID: HYBRID}
    return known_types(c, default() if types is None else types, names)
