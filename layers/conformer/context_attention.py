"""Attention of the frames of a block to one another, with learned vectors for distances (Granite Speech,
arXiv:2505.08699, section 2; positions after Shaw et al., 2018, arXiv:1803.02155, section 3.2).

    score(i, j) = scale * q_i (k_j + table[i - j + m])        in one block of up to C frames, for each head

Blocks are counted from the beginning of a clip. The table of 2 m + 1 rows is a layer's, and its heads share
it. Everything between the projections is in float32. Scores of a few blocks exist at a time, and at every
level only queries, keys, values and the table are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.conformer.clip_attention import by_key, lengths_of
from liger_models.layers.conformer.distance_attention import DistanceTable
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear, in_order
from liger_models.layers.recompute.activation_memory import ActivationMemory, recompute
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ContextAttentionSpec

TOGETHER = 16  # blocks of one length that are computed at once


class ContextAttention(nn.Module):
    """Attention within blocks of the clips of a batch.

    Args:
        hidden_size: the width D of the hidden states.
        spec: the heads, the scale, the length of a block and the largest distance.
        layer: the index of the layer; unused.
        backend: unused; torch computes it.
    """

    def __init__(
        self, hidden_size: int, spec: ContextAttentionSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        self.spec = spec
        self.q_proj = Linear(hidden_size, spec.q_size, bias=False)
        self.kv_proj = PackedLinear(hidden_size, dict.fromkeys(("k_proj", "v_proj"), spec.q_size))
        self.o_proj = Linear(spec.q_size, hidden_size, bias=True)
        self.distances = DistanceTable(2 * spec.distances + 1, spec.head_dim)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [F, D] -> [F, D]."""
        context = self.spec.context
        blocks = [min(context, n - first) for n in lengths_of(sequences) for first in range(0, n, context)]
        qkv = torch.cat([self.q_proj(x), in_order(self, "kv_proj")(x)], dim=1)
        out = recompute(self._attend, qkv, self.distances(), blocks)
        return self.o_proj(out.to(x.dtype))

    def _attend(self, qkv: Tensor, table: Tensor, blocks: list[int]) -> Tensor:
        """qkv [F, 3 N d] -> [F, N d], in float32 or wider."""
        parts = qkv.split(blocks)
        made: dict[int, Tensor] = {}
        for frames in dict.fromkeys(blocks):
            same = [i for i, n in enumerate(blocks) if n == frames]
            for first in range(0, len(same), TOGETHER):
                some = same[first : first + TOGETHER]
                out = self._attend_within(torch.stack([parts[i] for i in some]), table)
                made |= dict(zip(some, out, strict=True))
        return torch.cat([made[i] for i in range(len(blocks))])

    def _attend_within(self, qkv: Tensor, table: Tensor) -> Tensor:
        """qkv [blocks, n, 3 N d] -> [blocks, n, N d]."""
        dtype, most = torch.promote_types(qkv.dtype, torch.float32), self.spec.distances
        heads = (-1, self.spec.head_dim)
        q, k, v = (x.to(dtype).unflatten(2, heads).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        # From the first key of the last query on.
        own = table.to(dtype).flip(0)[most - q.shape[2] + 1 : most + q.shape[2]].T  # [d, 2 n - 1]
        by_place = by_key((q @ own).flatten(0, 1)).unflatten(0, q.shape[:2])
        weights = ((q @ k.mT + by_place) * self.spec.scale).softmax(-1)  # [blocks, N, n, n]
        return (weights @ v).transpose(1, 2).flatten(2)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: sounds are encoded whole."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per frame: queries, keys and values, and the output as it is projected."""
        return 4 * itemsize * self.spec.q_size

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_attention_heads}, head_dim={spec.head_dim}, context={spec.context}"
