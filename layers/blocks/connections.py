"""Connections between layers: what one layer makes and later ones read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liger_models.layers.attention.latent_attention import LatentAttention
from liger_models.layers.blocks.block import Block, keys_and_values, latents
from liger_models.layers.specs import AttentionSpec, LatentAttentionSpec, SharedAttentionSpec


def connect(layers: Sequence[Block]) -> None:
    """Make layers return or note what later layers read.

    Raises:
        ValueError: a layer reads what no earlier one makes, or makes what none reads.
    """
    _hand_on_keys(layers)
    _hand_on_latents(layers)
    _share_chosen_keys(layers)
    _check_shortcuts(layers)


def _check_shortcuts(layers: Sequence[Block]) -> None:
    """Check that the output of experts that skip a layer is added after the next layer.

    Raises:
        ValueError: the next layer does not add it, or a layer would add what no experts made.
    """
    for i, layer in enumerate(layers):
        if layer.spec.topology != "shortcut":
            continue
        if layer.spec.experts is None:
            before = layers[i - 1].spec
            if before.topology != "shortcut" or before.experts is None:
                raise ValueError(f"layer {i} adds the output of experts of layer {i - 1}, which has none")
            continue
        after = layers[i + 1].spec if i + 1 < len(layers) else None
        if after is None or after.topology != "shortcut" or after.experts is not None:
            raise ValueError(
                f"the experts of layer {i} skip a layer; expected layer {i + 1} to have the topology "
                "'shortcut' and no experts, and to add their output"
            )


def _share_chosen_keys(layers: Sequence[Block]) -> None:
    """Make the layers whose indexer chooses keys for later layers note them.

    Raises:
        ValueError: the source layer comes later, or has no indexer, or the reading one has.
    """
    for i, layer in enumerate(layers):
        for mixer in layer.spec.mixers:
            if not isinstance(mixer, LatentAttentionSpec) or mixer.keys_of is None:
                continue
            source = getattr(layers[mixer.keys_of], "self_attn", None) if 0 <= mixer.keys_of < i else None
            if not isinstance(source, LatentAttention) or source.spec.indexer is None or mixer.indexer:
                raise ValueError(
                    f"layer {i} attends to the keys that layer {mixer.keys_of} chooses; expected an earlier "
                    "layer with an indexer, and none of its own"
                )
            source.shares_keys = True


def _hand_on_keys(layers: Sequence[Block]) -> None:
    """Make layers return the keys and values that later layers read.

    Raises:
        ValueError: the source layer comes later, has no keys of its own or unexpected ones, or cannot return
            them.
    """
    for i, reader in enumerate(layers):
        mixer = reader.spec.mixer
        if not isinstance(mixer, SharedAttentionSpec):
            continue
        read = layers[mixer.keys_of] if 0 <= mixer.keys_of < i else reader
        source = read.spec.mixer
        alike = ("num_key_value_heads", "head_dim", "window")
        if (
            not isinstance(source, AttentionSpec)
            or "keys of another layer" not in read.supports
            or source.chunk is not None
            or source.value_dim != source.head_dim
            or any(getattr(source, name) != getattr(mixer, name) for name in alike)
        ):
            raise ValueError(
                f"layer {i} reads the keys and values of layer {mixer.keys_of}; expected an earlier one that "
                f"has keys of its own, passes them on, and has the same {', '.join(alike)}, no chunks, and "
                "values as wide as keys"
            )
        read.makes = keys_and_values(mixer.keys_of)


def _hand_on_latents(layers: Sequence[Block]) -> None:
    """Make layers return the latents that later layers read.

    Raises:
        ValueError: the source layer comes later, has no latents of its own or unexpected ones, or cannot
            return them; or a layer that could share latents does not.
    """
    for i, reader in enumerate(layers):
        mixer = reader.spec.mixer
        if not isinstance(mixer, LatentAttentionSpec) or mixer.latents_of is None:
            continue
        read = layers[mixer.latents_of] if 0 <= mixer.latents_of < i else reader
        source = read.spec.mixer
        alike = ("kv_lora_rank", "qk_rope_head_dim", "rope", "norm", "latent_scale")
        if (
            not isinstance(source, LatentAttentionSpec)
            or "latents of another layer" not in read.supports
            or source.latents_of is not None
            or any(getattr(source, name) != getattr(mixer, name) for name in alike)
        ):
            raise ValueError(
                f"layer {i} reads the latents of layer {mixer.latents_of}; expected an earlier one that has "
                f"latents of its own, passes them on, and has the same {', '.join(alike)}"
            )
        read.makes = latents(mixer.latents_of)
        attention: Any = read.token_mixer
        attention.shares_latents = True
    for i, layer in enumerate(layers):
        if layer.spec.topology == "shared_latents" and not layer.reads and not layer.makes:
            raise ValueError(f"layer {i} of topology 'shared_latents' shares no latents; use 'pre_norm'")
