"""An image encoder of two parts: blocks over patches, and blocks in which learned queries read the features
that convolutions make of sixteen patches each (DeepSeek-OCR 2).

    f = conv2(conv1(neck(blocks(patches))))                    [features of a picture]
    [f | queries] -> blocks, in which features all attend to one another, queries to these and earlier queries
    norm of the queries
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_models.kernels._copies import to_device
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.blocks import BLOCKS, Block, add_and_norm, run_block
from liger_models.layers.grids.rows import by_size, in_rows
from liger_models.layers.parts.norm import make_norm
from liger_models.layers.recompute.activation_memory import set_levels
from liger_models.layers.recompute.offload import Offload
from liger_models.layers.sequences.agreement import is_of_several
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.spans import spans_of
from liger_models.layers.specs import QueryEncoderSpec, VisionSpec
from liger_models.layers.vision.convolutions import Convolution, Neck
from liger_models.layers.vision.encoder import VisionEncoder
from liger_models.layers.vision.pictures import Pictures


class Compression(nn.Module):
    """`conv2(conv1(neck(x)))`, two convolutions of stride 2.

    Args:
        width: of a patch, D.
        spec: the numbers of channels.
    """

    def __init__(self, width: int, spec: QueryEncoderSpec):
        super().__init__()
        self.merge = spec.merge
        self.neck = Neck(width, spec.channels)
        self.conv1 = Convolution(spec.channels, spec.inner, stride=2)
        self.conv2 = Convolution(spec.inner, spec.hidden_size, stride=2)

    def forward(self, x: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """x [P, D], in blocks of 4 times 4 patches of pictures with these sizes -> [P / 16, D']."""
        return by_size(x, sizes, self._convolved)

    def _convolved(self, x: Tensor, height: int, width: int) -> Tensor:
        made = self.conv2(self.conv1(self.neck(in_rows(x, height, width, self.merge))))
        return made.flatten(2).transpose(1, 2).flatten(0, 1)


class Queries(nn.Module):
    """Learned vectors, [count, width]."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, dtype: torch.dtype) -> Tensor:
        """The vectors in this dtype."""
        return self.weight.to(dtype)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


class CompressedEncoder(nn.Module):
    """Encode pictures as learned queries.

    Args:
        spec: the blocks over patches, and the `query_encoder`.
        attention: the attention backend, see layers/attention/backends.py.
    """

    def __init__(self, spec: VisionSpec, attention: AttentionBackend = "auto"):
        super().__init__()
        assert spec.query_encoder is not None
        self.spec = spec.query_encoder
        width, depth = self.spec.hidden_size, len(spec.blocks)
        self.of_patches = VisionEncoder(spec, attention)
        self.compression = Compression(spec.hidden_size, self.spec)
        self.few_queries, self.many_queries = (Queries(count, width) for count in self.spec.queries)
        layers = [
            BLOCKS[block.topology](width, block, depth + i, attention)
            for i, block in enumerate(self.spec.blocks)
        ]
        self.of_queries: Sequence[Block] = cast(Any, nn.ModuleList(layers))
        self.norm = make_norm(width, self.spec.norm)

    @property
    def layers(self) -> list[Block]:
        """All layers, in order of execution."""
        return [*self.of_patches.layers, *self.of_queries]

    def forward(self, pictures: Pictures) -> tuple[Tensor]:
        """Return the queries of all pictures, [Q, D']."""
        (x,) = self.of_patches(pictures)
        sizes = [(h, w) for t, h, w in pictures.grids for _ in range(t)]
        x = self.compression(x, sizes)
        counts = [self.spec.tokens_of(h * w) for h, w in sizes]
        tables = [self.few_queries(x.dtype), self.many_queries(x.dtype)]
        numbers = [self.spec.number_of(features) for features, _ in counts]
        unused = [table for number, table in enumerate(tables) if number not in numbers]
        if unused and is_of_several(self):  # the gradients of all tables are exchanged
            x = x + 0 * torch.stack([table.sum() for table in unused]).sum()
        own = [tables[number] for number in numbers]
        pieces = x.split([features for features, _ in counts])
        x = torch.cat([part for both in zip(pieces, own, strict=True) for part in both])
        of_features = torch.cat([torch.arange(f + q, device="cpu") < f for f, q in counts])
        of_features = to_device(of_features, x.device)
        sequences = Sequences.of_lengths([f + q for f, q in counts], x.device)
        spans = spans_of(sequences.documents, of_features)
        sequences.visibility = replace(sequences.visibility, spans=spans)
        sequences.prepare_rotary(tuple(dict.fromkeys(rope for b in self.spec.blocks for rope in b.ropes)))
        residual, offload = None, Offload()
        for layer in self.of_queries:
            x, residual = run_block(layer, x, residual, sequences, offload=offload)
        x = add_and_norm(self.norm, x, residual)[0]
        return (torch.cat(x.split([n for both in counts for n in both])[1::2]),)

    def set_activation_memory(self, levels: str | Sequence[str]) -> None:
        """Call `set_levels` on all layers."""
        set_levels(self.layers, levels)
