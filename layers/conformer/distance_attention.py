"""Attention of all frames of a clip to one another, with biases by distance (Phi-4-multimodal,
arXiv:2503.01743, section 2.1.2; biases after T5, arXiv:1910.10683, section 2.1).

    score(i, j) = scale * q_i k_j + table[clamp(j - i, -m, m - 1) + m]        in one clip, for each head

The table of 2 m rows is the encoder's, and all of its layers read it. Everything between the projections is
in float32. Scores of one clip exist at a time, and at every level only queries, keys and values are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.conformer.clip_attention import attend_by_clip, lengths_of
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear, in_order
from liger_models.layers.recompute.activation_memory import ActivationMemory, recompute
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import DistanceAttentionSpec


class DistanceTable(nn.Module):
    """Learned numbers for the distances of keys from their queries.

    Args:
        rows: the number of distances.
        width: the numbers for each, such as a bias of each head.
    """

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self) -> Tensor:
        """The table [rows, width], for layers that read it."""
        return self.weight.view_as(self.weight)  # an output of its own, for hooks of sharding frameworks

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise like a matrix."""
        nn.init.normal_(self.weight, 0.0, std, generator)


class DistanceAttention(nn.Module):
    """Attention within the clips of a batch.

    Args:
        hidden_size: the width D of the hidden states.
        spec: the heads and the scale.
        layer: the index of the layer; unused.
        backend: unused; torch computes it.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: DistanceAttentionSpec,
        layer: int = 0,
        backend: AttentionBackend = "auto",
    ):
        super().__init__()
        self.spec = spec
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.q_size)
        self.qkv_proj = PackedLinear(hidden_size, parts, bias=True)
        self.o_proj = Linear(spec.q_size, hidden_size, bias=True)

    def forward(self, x: Tensor, sequences: Sequences, table: Tensor) -> Tensor:
        """x [F, D] and the table [2 m, heads] -> [F, D]."""
        out = recompute(self._attend, in_order(self, "qkv_proj")(x), table, lengths_of(sequences))
        return self.o_proj(out.to(x.dtype))

    def _attend(self, qkv: Tensor, table: Tensor, lengths: list[int]) -> Tensor:
        """qkv [F, 3 N d] -> [F, N d], in float32 or wider."""
        dtype = torch.promote_types(qkv.dtype, torch.float32)
        biases = {n: bias_by_distance(table.to(dtype), n) for n in dict.fromkeys(lengths)}

        def scores(q: Tensor, k: Tensor, _: int) -> Tensor:
            return (q * self.spec.scale) @ k.mT + biases[q.shape[1]]

        return attend_by_clip(qkv, lengths, self.spec.head_dim, scores)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: sounds are encoded whole."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per frame: queries, keys and values, and the output as it is projected."""
        return 4 * itemsize * self.spec.q_size

    def extra_repr(self) -> str:
        return f"heads={self.spec.num_attention_heads}, head_dim={self.spec.head_dim}"


def bias_by_distance(table: Tensor, frames: int) -> Tensor:
    """The bias of each key for each query of a clip, [heads, frames, frames], from a table [2 m, heads]."""
    most = len(table) // 2
    distance = torch.arange(1 - frames, frames, device=table.device).clamp(-most, most - 1)
    rows = table.index_select(0, distance + most)  # from the first key of the last query on
    return rows.unfold(0, frames, 1).flip(0).transpose(0, 1)
