"""Decoders whose config says `is_causal: false`: all tokens of a document attend to one another."""

from __future__ import annotations

from dataclasses import replace

from liger_models.convert.errors import ConfigError
from liger_models.layers.specs import AttentionSpec, BlockSpec, ModelSpec


def bidirectional(spec: ModelSpec, name: str) -> ModelSpec:
    """The spec with bidirectional attention in every layer.

    As in transformers, a layer with a window of `w` tokens sees `w` tokens on each side of the query: one
    more than its causal window, which counts the query itself.

    Raises:
        ConfigError: a layer mixes tokens in another way. `name` is the config's.
    """
    return replace(spec, blocks=tuple(_block(block, i, name) for i, block in enumerate(spec.blocks)))


def _block(block: BlockSpec, layer: int, name: str) -> BlockSpec:
    mixer = block.mixer
    if not isinstance(mixer, AttentionSpec) or mixer.chunk is not None or block.second_mixer is not None:
        raise ConfigError(
            f"{name}: is_causal is false, but layer {layer} is more than attention with or without a window "
            f"({', '.join(type(mixer).__name__ for mixer in block.mixers)}); bidirectional attention is not "
            "supported here"
        )
    window = None if mixer.window is None else mixer.window + 1
    return replace(block, mixer=replace(mixer, causal=False, window=window))
