"""Attention of the patches of pictures, within windows or not, with learned relative positions (SAM,
arXiv:2304.02643, appendix A; ViTDet, arXiv:2203.16527; MViTv2, arXiv:2112.01526, section 4.1).

    score(i, j) = scale * q_i k_j + q_i R[row_i - row_j] + q_i C[column_i - column_j]

The last two terms are a product, too, of q_i R and q_i C with the row and the column of j as unit vectors. So
they are further dimensions of the queries and keys, and the scores are never kept:

    [scale * q_i | q_i R[row_i - ..] | q_i C[column_i - ..]]  [k_j | e(row_j) | e(column_j)]

Windows of w times w patches cover the grid. Those at the right and bottom edges reach beyond it; as in the
reference, what is beyond are keys and values of a hidden state of zeros, to which the others attend.

Without windows R and C are of grids of `side` times `side` patches, and interpolated linearly for others
(DeepSeek-OCR 2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_models.kernels._constants import cached_tensors
from liger_models.kernels._dispatch import at_least_float32
from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.attention.fused import unmasked_attention
from liger_models.layers.grids.rows import by_size
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
        """x [P, D], in the order of layers/vision/patch_order.py -> the same. The pictures are those of
        `sequences.grids`; None: they have `side` times `side` patches.
        """
        side, grids = self.spec.side, sequences.grids
        sizes = [(side, side)] if grids is None else grids.sizes
        return self.o_proj(by_size(x, sizes, self._of_size))

    def _of_size(self, x: Tensor, height: int, width: int) -> Tensor:
        """Attention in pictures of this size, [P, D] -> [P, heads * head_dim]."""
        spec, device, size = self.spec, x.device, height * width
        pictures = len(x) // size
        rows, columns = (height, width) if spec.window is None else (spec.window, spec.window)
        # [windows, places of one], [height * width]
        there, back = _windows(height, width, spec.merge, rows, columns, device)
        if there.numel() > size:
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
        first = size * torch.arange(pictures, device=device)[:, None, None]
        place = torch.where(there < size, there + first, pictures * size).flatten(0, 1)
        # Projected before they were gathered, all places beyond the grid would share a row, whose gradient
        # would be summed in the activations' precision.
        qkv = self.qkv_proj(x[place]).unflatten(-1, (3, spec.num_attention_heads, spec.head_dim))
        q, k, v = qkv.unbind(2)  # [windows of all pictures, places of one, heads, head_dim]
        out = self._attend(q, k, v, rows, columns)  # [.., heads * head_dim]
        return out.view(pictures, -1, spec.q_size)[:, back].flatten(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, height: int, width: int) -> Tensor:
        """Attention within grids of patches in raster order, [G, height * width, heads, dim]."""
        by_rows = _resized(self.rel_pos_h, height).to(q.dtype)[_distances(height, q.device)]
        by_columns = _resized(self.rel_pos_w, width).to(q.dtype)[_distances(width, q.device)]
        places = _unit_vectors(height, width, q.device)
        grid = q.unflatten(1, (height, width))
        by_row = torch.einsum("gijhd,ikd->gijhk", grid, by_rows).flatten(1, 2)
        by_column = torch.einsum("gijhd,jkd->gijhk", grid, by_columns).flatten(1, 2)
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
        within = self.bytes_at_a_place(itemsize) * self.places
        return itemsize * self.spec.q_size + within // self.spec.side**2

    @property
    def places(self) -> int:
        """The number of places of all windows of a picture of `side` times `side` patches."""
        return (-(-self.spec.side // self.spec.width) * self.spec.width) ** 2

    def bytes_at_a_place(self, itemsize: int) -> int:
        """Bytes kept per place in the order of windows."""
        spec = self.spec
        heads, wide = spec.num_attention_heads, spec.head_dim + 2 * spec.width
        return itemsize * (self.qkv_proj.in_features + 6 * spec.q_size + 2 * heads * wide) + 4 * heads

    def more_bytes(self, patches: int, places: int, axes: int, itemsize: int) -> int:
        """Bytes kept for pictures in addition to `activation_bytes` of their patches.

        Args:
            places: of all windows.
            axes: the rows and columns of its picture for each patch, summed.
        """
        spec = self.spec
        if spec.window is None:
            return 2 * itemsize * spec.num_attention_heads * (axes - 2 * spec.side * patches)
        return self.bytes_at_a_place(itemsize) * (places - patches * self.places // spec.side**2)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"heads={spec.num_attention_heads}, head_dim={spec.head_dim}, window={spec.window}"


def _resized(table: Tensor, size: int) -> Tensor:
    """A table of distances [N, dim] for an axis of `size` places, [2 * size - 1, dim]; interpolated in at
    least float32.
    """
    if len(table) == 2 * size - 1:
        return table
    with torch.autocast(table.device.type, enabled=False):
        return F.interpolate(at_least_float32(table).T[None], 2 * size - 1, mode="linear")[0].T


@cached_tensors(64)
def _windows(
    height: int, width: int, merge: int, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The patch at each place of each window of `rows` times `columns`, [windows, rows * columns], height *
    width where there is none; and the place of each patch among all places, [height * width].
    """
    blocks = torch.arange(height * width, device="cpu").view(height // merge, width // merge, merge, merge)
    raster = blocks.permute(0, 2, 1, 3).reshape(height, width)  # the number of the patch at a row and column
    down, right = -(-height // rows), -(-width // columns)
    padded = torch.full((down * rows, right * columns), height * width, device="cpu")
    padded[:height, :width] = raster
    windows = padded.view(down, rows, right, columns).transpose(1, 2).reshape(-1, rows * columns)
    places = windows.flatten().argsort(stable=True)[: height * width]
    return windows.to(device), places.to(device)


@cached_tensors(64)
def _distances(size: int, device: torch.device) -> Tensor:
    """The row of a table of distances for each pair of places along an axis, [size, size]."""
    axis = torch.arange(size, device="cpu")
    return (axis[:, None] - axis + size - 1).to(device)


@cached_tensors(64)
def _unit_vectors(height: int, width: int, device: torch.device) -> Tensor:
    """The row and the column of each place as unit vectors, [height * width, height + width]."""
    rows, columns = (torch.eye(size, device="cpu") for size in (height, width))
    return torch.cat([rows.repeat_interleave(width, 0), columns.repeat(height, 1)], 1).to(device)
