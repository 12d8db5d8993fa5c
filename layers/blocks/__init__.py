"""Transformer blocks, one file per topology of mixer, MLP, norms and residual stream.

May import attention, experts and parts. A new topology is a new block, never a flag of an old one.
"""

from liger_models.layers.blocks.block import (
    DISTANCES,
    EMBEDDINGS,
    IDS,
    IMAGES,
    Block,
    add_and_norm,
    joined,
    keys_and_values,
    own_input,
    run_block,
)
from liger_models.layers.blocks.encoders.conformer import ConformerBlock, ConformerSandwichBlock
from liger_models.layers.blocks.from_norms import FromNormsBlock
from liger_models.layers.blocks.gated_cross import GatedCrossBlock
from liger_models.layers.blocks.gated_pre_norm import GatedPreNormBlock
from liger_models.layers.blocks.hyper_connected import AltUpBlock, GatedStreamsBlock, HyperConnectedBlock
from liger_models.layers.blocks.layer_scale import LayerScaleBlock
from liger_models.layers.blocks.one_part import OnePartBlock
from liger_models.layers.blocks.parallel import ParallelBlock, ParallelTwoNormsBlock
from liger_models.layers.blocks.post_norm import NormedSumsBlock, PostNormBlock
from liger_models.layers.blocks.pre_norm import ConvolvedBlock, MLPNormBlock, PreNormBlock
from liger_models.layers.blocks.sandwich import SandwichBlock
from liger_models.layers.blocks.scaled_sandwich import (
    ScaledSandwichBlock,
    ScaledSandwichWithExpertsBlock,
)
from liger_models.layers.blocks.shared_latents import SharedLatentsBlock
from liger_models.layers.blocks.shared_transformer import SharedTransformerBlock
from liger_models.layers.blocks.shortcut import ShortcutBlock
from liger_models.layers.blocks.side_by_side import SideBySideBlock

__all__ = [
    "BLOCKS",
    "DISTANCES",
    "EMBEDDINGS",
    "IDS",
    "IMAGES",
    "Block",
    "add_and_norm",
    "joined",
    "keys_and_values",
    "own_input",
    "run_block",
]

BLOCKS: dict[str, type[Block]] = {
    "pre_norm": PreNormBlock,
    "mlp_norm": MLPNormBlock,
    "convolved": ConvolvedBlock,
    "from_norms": FromNormsBlock,
    "layer_scale": LayerScaleBlock,
    "gated_pre_norm": GatedPreNormBlock,
    "gated_cross": GatedCrossBlock,
    "sandwich": SandwichBlock,
    "scaled_sandwich": ScaledSandwichBlock,
    "scaled_sandwich_with_experts": ScaledSandwichWithExpertsBlock,
    "post_norm": PostNormBlock,
    "normed_sums": NormedSumsBlock,
    "parallel": ParallelBlock,
    "parallel_two_norms": ParallelTwoNormsBlock,
    "one_part": OnePartBlock,
    "shared_latents": SharedLatentsBlock,
    "shortcut": ShortcutBlock,
    "side_by_side": SideBySideBlock,
    "shared_transformer": SharedTransformerBlock,
    "hyper_connected": HyperConnectedBlock,
    "conformer": ConformerBlock,
    "conformer_sandwich": ConformerSandwichBlock,
    "gated_streams": GatedStreamsBlock,
    "altup": AltUpBlock,
}
"""The class of a block, by the topology of its spec."""
