"""Merging of patches within image encoders: between two layers, or before a second part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from liger_models.layers.specs.block import BlockSpec
from liger_models.layers.specs.norms import LayerNormSpec, NormSpec


@dataclass(frozen=True)
class WindowMergerSpec:
    """Merging of `merge` times `merge` adjacent patches after layer `after` of an encoder: in each window
    attention in `num_attention_heads` heads after a `norm`; then another norm of the concatenated patches
    and two linear layers of inner width `size`, with an approximate GELU between them, whose output is added
    to the patches' mean (MiniCPM-V 4.6).
    """

    after: int
    num_attention_heads: int
    size: int
    norm: LayerNormSpec
    merge: ClassVar[int] = 2


@dataclass(frozen=True)
class QueryEncoderSpec:
    """Second part of an encoder, after its `blocks`: a neck to `channels` as in `ConvolutionProjectorSpec`,
    and two convolutions of stride 2 to `inner` and to `hidden_size` channels, which make a feature of sixteen
    patches. Learned queries follow the features of a picture: the first number in `queries`, or the second
    if there are more features than that. `blocks` of this width have causal attention in which the
    features of a picture all attend to one another. After `norm` the queries alone are read (DeepSeek-OCR 2).
    """

    channels: int
    inner: int
    hidden_size: int
    queries: tuple[int, int]
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    merge: ClassVar[int] = 4

    def number_of(self, features: int) -> int:
        """The place in `queries` of the number of queries of a picture."""
        return int(features > self.queries[0])

    def tokens_of(self, patches: int) -> tuple[int, int]:
        """The numbers of features and of queries of a picture."""
        features = patches // self.merge**2
        return features, self.queries[self.number_of(features)]
