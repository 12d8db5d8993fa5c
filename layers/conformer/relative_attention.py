"""Attention of all frames of a clip to one another, with relative positions (Parakeet, after Transformer-XL,
arXiv:1901.02860, section 3.3).

    score(i, j) = scale * ((q_i + u) k_j + (q_i + v) r[i - j])        in one clip, for each head
    r = sinusoids @ W_r^T                                             a row for each distance

Everything between the projections is in float32. Scores of one clip exist at a time, and at every level only
queries, keys, values and r are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.conformer.clip_attention import attend_by_clip, by_key, lengths_of
from liger_models.layers.parts.sinusoids import sinusoids_by_distance
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear, in_order
from liger_models.layers.recompute.activation_memory import ActivationMemory, recompute
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import RelativeAttentionSpec


class RelativeAttention(nn.Module):
    """Attention within the clips of a batch.

    Args:
        hidden_size: the width D of the hidden states.
        spec: the heads, the scale and the biases.
        layer: the index of the layer; unused.
        backend: unused; torch computes it.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: RelativeAttentionSpec,
        layer: int = 0,
        backend: AttentionBackend = "auto",
    ):
        super().__init__()
        self.spec = spec
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.q_size)
        self.qkv_proj = PackedLinear(hidden_size, parts, bias=spec.bias)
        self.o_proj = Linear(spec.q_size, hidden_size, bias=spec.bias)
        self.relative_k_proj = Linear(hidden_size, spec.q_size, bias=False)
        self.bias_u, self.bias_v = (
            nn.Parameter(torch.empty(spec.num_attention_heads, spec.head_dim)) for _ in range(2)
        )

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Initialise the biases of queries like matrices, as the reference does."""
        for bias in (self.bias_u, self.bias_v):
            nn.init.normal_(bias, 0.0, std, generator)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [F, D] -> [F, D]."""
        lengths = lengths_of(sequences)
        table = sinusoids_by_distance(max(lengths), x.shape[1], x.device, x.dtype)
        relative = self.relative_k_proj(table)  # [2 n - 1, N d] of the longest clip
        operands = in_order(self, "qkv_proj")(x), relative, self.bias_u, self.bias_v
        out = recompute(self._attend, *operands, lengths, sequences.unseen)
        return self.o_proj(out.to(x.dtype))

    def _attend(
        self, qkv: Tensor, relative: Tensor, u: Tensor, v: Tensor, lengths: list[int], unseen: Tensor | None
    ) -> Tensor:
        """qkv [F, 3 N d] -> [F, N d], in float32 or wider."""
        dtype, scale = torch.promote_types(qkv.dtype, torch.float32), self.spec.scale
        u, v = (bias.to(dtype)[:, None] for bias in (u, v))  # [N, 1, d]
        by_distance = relative.to(dtype).unflatten(1, (-1, self.spec.head_dim)).permute(1, 2, 0)
        longest = (by_distance.shape[2] + 1) // 2

        def scores(q: Tensor, k: Tensor, first: int) -> Tensor:
            frames = q.shape[1]
            own = by_distance[:, :, longest - frames : longest + frames - 1]
            by_place = by_key((q + v) @ own) * scale
            if unseen is not None:
                # The least number and not -inf, as in the reference: a frame that no other sees has scores
                # that are all alike.
                hidden = unseen[first : first + frames]
                hidden = hidden | hidden[:, None]
                by_place = by_place.masked_fill(hidden, torch.finfo(dtype).min)
            return (q + u) @ k.mT * scale + by_place

        return attend_by_clip(qkv, lengths, self.spec.head_dim, scores)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: sounds are encoded whole."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per frame: queries, keys and values, the output as it is projected, two rows of r."""
        return itemsize * 6 * self.spec.q_size

    def extra_repr(self) -> str:
        return f"heads={self.spec.num_attention_heads}, head_dim={self.spec.head_dim}"
