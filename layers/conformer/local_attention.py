"""Attention of the frames of a clip to the last W frames, with relative positions (encoders of sound of
Gemma 3n and Gemma 4, after Transformer-XL, arXiv:1901.02860, section 3.3).

    q_i = softplus(s) * q_scale * (x_i @ W_q^T);    k_j = k_scale * (x_j @ W_k^T)
    score(i, j) = c * tanh((q_i k_j + q_i r[i - j]) / c)        0 <= i - j < W, in one clip
    r = sinusoids @ W_r^T                                       a row for each distance

Frames are cut into blocks of B = W - 1, whose queries see keys of their own block and of the one before: 2 B
columns of scores for each frame. Everything between the projections is in float32. `lean` keeps queries, keys
and values alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.parts.sinusoids import cached_sinusoids
from liger_models.layers.projections.clipped_linear import ClippedLinear, ClippedProjections
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory, recompute
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import LocalAttentionSpec


class LocalAttention(nn.Module):
    """Attention within the clips of a batch.

    Args:
        hidden_size: the width D of the hidden states.
        spec: heads, scales and the window.
        layer: the index of the layer; unused.
        backend: unused; torch computes it.
    """

    activation_memory: ActivationMemory = "lean"

    def __init__(
        self, hidden_size: int, spec: LocalAttentionSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        self.spec = spec
        projections, linear = (ClippedProjections, ClippedLinear) if spec.clipped else (PackedLinear, Linear)
        self.qkv_proj = projections(hidden_size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.q_size))
        self.o_proj = linear(spec.q_size, hidden_size, bias=False)
        self.relative_k_proj = Linear(hidden_size, spec.q_size, bias=False)
        self.per_dim_scale = nn.Parameter(torch.empty(spec.head_dim))
        self.reset_parameters()

    def reset_parameters(self, *_: object) -> None:
        """Initialise the scales of queries to zero, as the reference does."""
        nn.init.zeros_(self.per_dim_scale)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [F, D] -> [F, D]."""
        table = cached_sinusoids(self.spec.block + 1, x.shape[1], x.device)
        relative = self.relative_k_proj(table.flip(0).to(x.dtype))  # from the farthest to the frame itself
        bounds = sequences.documents.bounds()
        starts = None if bounds is None else bounds[0]
        operands = self.qkv_proj(x), relative, F.softplus(self.per_dim_scale), starts
        out = (
            self._attend(*operands) if self.activation_memory == "all" else recompute(self._attend, *operands)
        )
        return self.o_proj(out.to(x.dtype))

    def _attend(self, qkv: Tensor, relative: Tensor, scale: Tensor, starts: Tensor | None) -> Tensor:
        """qkv [F, 3 N d], relative [B + 1, N d] from the largest distance to 0, scale [d], the first frame of
        each frame's clip [F] -> [F, N d], in float32 or wider.
        """
        spec, frames, dtype = self.spec, len(qkv), torch.promote_types(qkv.dtype, torch.float32)
        heads, block = (spec.num_attention_heads, spec.head_dim), spec.block
        q, k, v = (part.to(dtype).unflatten(-1, heads) for part in qkv.chunk(3, dim=-1))
        q = _in_blocks(q * spec.q_scale * scale, block)  # [N, blocks, B, d]
        k, v = (_with_block_before(part, block) for part in (k * spec.k_scale, v))  # [N, blocks, 2 B, d]
        by_place = q.flatten(1, 2) @ relative.to(dtype).unflatten(-1, heads).permute(1, 2, 0)
        scores = q @ k.transpose(2, 3) + _shifted(by_place.unflatten(1, q.shape[1:3]))
        scores = (scores / spec.softcap).tanh() * spec.softcap
        hidden = ~_visible(frames, block, spec.window, starts, q.device)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v).permute(1, 2, 0, 3).flatten(0, 1).flatten(1)[:frames]

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: sounds are encoded whole."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per frame on a GPU: queries, keys and values, and the output as it is projected; with
        `all`, in float32, queries, keys and values, the latter two with those of the block before, and scores
        before and after their cap, and the weights.
        """
        spec = self.spec
        kept = itemsize * 4 * spec.q_size
        if level == "all":
            kept += 4 * (5 * spec.q_size + 3 * 2 * spec.block * spec.num_attention_heads)
        return kept

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_attention_heads}, head_dim={spec.head_dim}, window={spec.window}"


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """[F, N, d] -> [N, blocks, B, d], with zeros after the last frame."""
    x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % block))
    return x.unflatten(0, (-1, block)).permute(2, 0, 1, 3)


def _with_block_before(x: Tensor, block: int) -> Tensor:
    """[F, N, d] -> [N, blocks, 2 B, d]: each block after the one before, or after zeros."""
    blocks = _in_blocks(F.pad(x, (0, 0, 0, 0, block, 0)), block)
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2)


def _shifted(x: Tensor) -> Tensor:
    """By distance, from B to 0, [.., B, B + 1] -> by key of both blocks, [.., B, 2 B]: row c moves c columns
    to the right. What comes from other rows is at distances that no query sees.
    """
    block = x.shape[-2]
    rows = F.pad(x, (0, block)).flatten(-2)
    return rows[..., : 2 * block**2].unflatten(-1, (block, 2 * block))


def _visible(frames: int, block: int, window: int, starts: Tensor | None, device: torch.device) -> Tensor:
    """Which of the keys of both blocks each query attends to, [blocks, B, 2 B]."""
    blocks = -(-frames // block)
    query = torch.arange(blocks * block, device=device).view(blocks, block, 1)
    key = block * torch.arange(-1, blocks - 1, device=device)[:, None, None]
    key = key + torch.arange(2 * block, device=device)
    if starts is None:
        first: Tensor = query.new_zeros(1)
    else:
        first = F.pad(starts, (0, blocks * block - frames)).view(blocks, block, 1)
    return (key <= query) & (key > query - window) & (key >= first)
