"""Attention of the patches of square pictures, within windows or not, with learned relative positions (SAM,
arXiv:2304.02643, appendix A; ViTDet, arXiv:2203.16527; MViTv2, arXiv:2112.01526, section 4.1).

    score(i, j) = scale * q_i k_j + q_i R[row_i - row_j] + q_i C[column_i - column_j]

The last two terms are a product, too, of q_i R and q_i C with the row and the column of j as unit vectors. So
they are further dimensions of the queries and keys, and the scores are never kept:

    [scale * q_i | q_i R[row_i - ..] | q_i C[column_i - ..]]  [k_j | e(row_j) | e(column_j)]

Windows of w times w patches cover the grid. Those at the right and bottom edges reach beyond it; as in the
reference, what is beyond are keys and values of a hidden state of zeros, to which the others attend.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_models.kernels._constants import cached_tensors
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.fused import unmasked_attention
from liger_models.layers.projections.linear import Linear
from liger_models.layers.projections.packed_linear import PackedLinear
from liger_models.layers.recompute.activation_memory import ActivationMemory
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import GridAttentionSpec


class GridAttention(nn.Module):
    """Attention within pictures, or windows of them.

    Args:
        hidden_size: the width D of the hidden states.
        spec: heads, the grid and the windows.
        layer: the index of the layer; unused.
        backend: unused; torch's kernels compute it.
    """

    def __init__(
        self, hidden_size: int, spec: GridAttentionSpec, layer: int = 0, backend: AttentionBackend = "auto"
    ):
        super().__init__()
        self.spec = spec
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), spec.q_size)
        self.qkv_proj = PackedLinear(hidden_size, parts, bias=spec.qkv_bias)
        self.o_proj = Linear(spec.q_size, hidden_size)
        distances = 2 * spec.width - 1
        self.rel_pos_h = nn.Parameter(torch.empty(distances, spec.head_dim))
        self.rel_pos_w = nn.Parameter(torch.empty(distances, spec.head_dim))
        self.reset_parameters()

    def reset_parameters(self, *_: object) -> None:
        """Initialise the relative positions to zero, as the reference does."""
        nn.init.zeros_(self.rel_pos_h)
        nn.init.zeros_(self.rel_pos_w)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x [pictures * side^2, D], in the order of layers/vision/patch_order.py -> the same."""
        spec, device = self.spec, x.device
        size = spec.side**2
        pictures, width = len(x) // size, spec.width
        there, back = _windows(spec.side, spec.merge, width, device)  # [windows, width^2], [side^2]
        if spec.has_padding:
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
        first = size * torch.arange(pictures, device=device)[:, None, None]
        place = torch.where(there < size, there + first, pictures * size).flatten(0, 1)
        # Projected before they were gathered, all places beyond the grid would share a row, whose gradient
        # would be summed in the activations' precision.
        qkv = self.qkv_proj(x[place]).unflatten(-1, (3, spec.num_attention_heads, spec.head_dim))
        q, k, v = qkv.unbind(2)  # [windows of all pictures, width^2, heads, head_dim]
        out = self._attend(q, k, v, width)  # [.., heads * head_dim]
        out = out.view(pictures, -1, spec.q_size)[:, back].flatten(0, 1)
        return self.o_proj(out)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
        """Attention within grids of width^2 patches in raster order, [G, width^2, heads, dim]."""
        distance, places = _distances(width, q.device)
        rows, columns = (table.to(q.dtype)[distance] for table in (self.rel_pos_h, self.rel_pos_w))
        grid = q.unflatten(1, (width, width))
        by_row = torch.einsum("gijhd,ikd->gijhk", grid, rows).flatten(1, 2)
        by_column = torch.einsum("gijhd,jkd->gijhk", grid, columns).flatten(1, 2)
        places = places.to(k.dtype)[None, :, None].expand(*k.shape[:3], -1)
        q = torch.cat([q * self.spec.scale, by_row, by_column], -1)
        k = torch.cat([k, places], -1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return unmasked_attention(q, k, v, 1.0, causal=False).transpose(1, 2).flatten(2)

    def new_cache(
        self, batch: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Nothing: pictures are encoded whole."""
        return ()

    def activation_bytes(self, level: ActivationMemory, itemsize: int) -> int:
        """Bytes kept per patch on a GPU: in the order of windows the input, queries, keys and values, queries
        and keys again with their places, queries by row and by column for the products with distances, the
        output and each head's log-sum-exp in float32; and the output in the order of patches.
        """
        spec = self.spec
        heads, wide = spec.num_attention_heads, spec.head_dim + 2 * spec.width
        within = itemsize * (self.qkv_proj.in_features + 6 * spec.q_size + 2 * heads * wide) + 4 * heads
        places = (-(-spec.side // spec.width) * spec.width) ** 2
        return itemsize * spec.q_size + within * places // spec.side**2

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_attention_heads}, head_dim={spec.head_dim}, window={spec.window}"


@cached_tensors(64)
def _windows(side: int, merge: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The patch at each place of each window, [windows, width^2], side^2 where there is none; and the place
    of each patch among all places, [side^2].
    """
    blocks = torch.arange(side**2, device="cpu").view(side // merge, side // merge, merge, merge)
    raster = blocks.permute(0, 2, 1, 3).reshape(side, side)  # the number of the patch at a row and column
    count = -(-side // width)
    padded = torch.full((count * width, count * width), side**2, device="cpu")
    padded[:side, :side] = raster
    windows = padded.view(count, width, count, width).transpose(1, 2).reshape(count**2, width**2)
    places = windows.flatten().argsort(stable=True)[: side**2]
    return windows.to(device), places.to(device)


@cached_tensors(64)
def _distances(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row of a table of distances for each pair of places along an axis, [width, width]; and the row and
    the column of each place as unit vectors, [width^2, 2 * width].
    """
    axis = torch.arange(width, device="cpu")
    distance = axis[:, None] - axis + width - 1
    unit = torch.eye(width, device="cpu")
    places = torch.cat([unit.repeat_interleave(width, 0), unit.repeat(width, 1)], 1)
    return distance.to(device), places.to(device)
