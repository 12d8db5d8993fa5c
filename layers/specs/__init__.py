"""Models as data: small frozen dataclasses that families fill in and layers read.

Specs hold sizes and settings, never wiring: the connection of parts is a block's `forward`. There is one
`BlockSpec` per layer, so a pattern over layers (a sliding window on some, full attention on others) is a
tuple, not a flag.

May import only dataclasses of the kernels; everything else may import the specs.
"""

from liger_models.kernels import ClampedSwiGLU
from liger_models.layers.specs.attention import (
    AttentionSpec,
    CrossAttentionSpec,
    DifferentialAttentionSpec,
    IndexerSpec,
    LatentAttentionSpec,
    QKNormSpec,
    SharedAttentionSpec,
)
from liger_models.layers.specs.block import BlockSpec, MixerSpec, SharedSpec, Topology
from liger_models.layers.specs.mlp import Activation, MLPSpec, MoESpec, PerLayerInputSpec, SparseMixerSpec
from liger_models.layers.specs.model import ModelSpec, MTPSpec
from liger_models.layers.specs.norms import LayerNormSpec, NormCast, NormSpec
from liger_models.layers.specs.projectors import (
    AdapterSpec,
    DownsamplingProjectorSpec,
    GatedProjectorSpec,
    LinearProjectorSpec,
    MistralMergerSpec,
    MLPProjectorSpec,
    PatchMergerSpec,
    PoolProjectorSpec,
    ProjectorSpec,
)
from liger_models.layers.specs.recurrent import (
    ChannelDeltaSpec,
    GatedConvSpec,
    GatedDeltaSpec,
    RecurrentSpec,
    SelectiveSpec,
    SSDSpec,
)
from liger_models.layers.specs.rotary import QueryScaleSpec, RopeSpec, RopeType
from liger_models.layers.specs.vision import (
    AntialiasedTable,
    AnyresPictures,
    AxesTable,
    BicubicTable,
    BilinearTable,
    ClipTable,
    CubicTable,
    FadingTable,
    FixedTable,
    FractionTable,
    GridPictures,
    PaddedPictures,
    PatchSpec,
    PlacedPictures,
    PooledGrids,
    ShapedPictures,
    SquarePictures,
    StretchedTable,
    TiledVisionSpec,
    TimeSpec,
    VisionSpec,
)

__all__ = [
    "Activation",
    "AdapterSpec",
    "AntialiasedTable",
    "AnyresPictures",
    "AttentionSpec",
    "AxesTable",
    "BicubicTable",
    "BilinearTable",
    "BlockSpec",
    "ChannelDeltaSpec",
    "ClampedSwiGLU",
    "ClipTable",
    "CrossAttentionSpec",
    "CubicTable",
    "DifferentialAttentionSpec",
    "DownsamplingProjectorSpec",
    "FadingTable",
    "FixedTable",
    "FractionTable",
    "GatedConvSpec",
    "GatedDeltaSpec",
    "GatedProjectorSpec",
    "GridPictures",
    "IndexerSpec",
    "LatentAttentionSpec",
    "LayerNormSpec",
    "LinearProjectorSpec",
    "MLPProjectorSpec",
    "MLPSpec",
    "MTPSpec",
    "MistralMergerSpec",
    "MixerSpec",
    "MoESpec",
    "ModelSpec",
    "NormCast",
    "NormSpec",
    "PaddedPictures",
    "PatchMergerSpec",
    "PatchSpec",
    "PerLayerInputSpec",
    "PlacedPictures",
    "PoolProjectorSpec",
    "PooledGrids",
    "ProjectorSpec",
    "QKNormSpec",
    "QueryScaleSpec",
    "RecurrentSpec",
    "RopeSpec",
    "RopeType",
    "SSDSpec",
    "SelectiveSpec",
    "ShapedPictures",
    "SharedAttentionSpec",
    "SharedSpec",
    "SparseMixerSpec",
    "SquarePictures",
    "StretchedTable",
    "TiledVisionSpec",
    "TimeSpec",
    "Topology",
    "VisionSpec",
]
