"""Grouped matrix products over rows sorted by expert: one weight and one weight gradient per expert.

    rows_product:    C[r] = A[r] @ B[e(r)] + bias[e(r)]         r: a row, e(r): its expert
                            + t[r] @ L[e(r)]                    a low-rank path (`_expert_paths.py`), if any
    weight_product:  D[e] = sum over the rows r of e of P[r]^T Q[r]

Rows are sorted by expert (`_expert_order.py`). Rows per expert are known on the device only, and launches do
not wait for them: grids have the most programs that any distribution needs, or as many as run at once.

Tiles are loaded through tensor descriptors, by TMA on Hopper (elsewhere Triton turns them into ordinary
loads). Out-of-range elements read as zero, so odd widths need no masks. A program of rows_product computes
one tile after another in a single flattened loop, so that the next tile's first blocks load while this one is
stored. On an H200 at Qwen3-30B-A3B's shapes that saved 12% on the product with the shortest sums (768), 9% on
the gathered one, and 3% on the other two, reaching 560 to 595 TFLOP/s at the power limit; at gpt-oss's shapes
2% to 5%. Fusing the activation into the first product was slower than running it afterwards (3.19 ms against
2.77 + 0.31), since the larger tile needs the registers. Gathering A's rows by pointer is cheaper than a
gathered copy. In weight_product, with rows as the inner dimension, it costs 40%: copy first.

For many bfloat16 rows on a Hopper GPU, torch's grouped product (CUTLASS) computes the weight gradient: in
profiles of Mixtral's step it took 64 ms against 74 for our kernel. A whole step gains at most 1%, since the
power limit slows down both. Elsewhere it requires aligned memory, or loops over groups and synchronises the
device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_models.kernels._dispatch import (
    ROCM,
    ceil_div,
    jit,
    next_power_of_2,
    num_sms,
    on_device_of,
    shared_memory,
    tl,
)
from liger_models.kernels._gpu import gpu_of, on_gpu
from liger_models.kernels.experts._expert_order import ExpertOrder


def rows_product(
    a: Tensor,
    b: Tensor,
    order: ExpertOrder,
    *,
    transposed: bool,
    gather: bool = False,
    bias: Tensor | None = None,
    path: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    shared_device: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """C [R, N], C[r] = A[r] @ B[e(r)] + bias[e(r)] + t[r] @ L[e(r)], accumulated in float32 and rounded once.

    a: [R, K] in row order; or [T, K] in token order, with `gather`. Inner stride one.
    b: [E, K, N], or [E, N, K] if `transposed`; inner stride one. bias: [E, N] or None, contiguous.
    path: t [R, P], contiguous, and L [E, P, N], inner stride one; P a power of two of at least 16.
    out: C; only the rows of the order's tiles are written.
    shared_device: a collective holds some multiprocessors, so programs must be many and short.
    scales: of a and b in e4m3, float32: [R, 1], or [T, 1] with `gather`, and [E, N]; contiguous. C is then
        in bfloat16, and sums have the precision of the GPU's float8 units.
    """
    inner, width = (b.shape[2], b.shape[1]) if transposed else (b.shape[1], b.shape[2])
    a_scales, b_scales = scales or (None, None)
    dtype = a.dtype if scales is None else torch.bfloat16
    c = a.new_empty(order.num_rows, width, dtype=dtype) if out is None else out
    if not c.numel():
        return c
    block_m = order.block
    block_n, block_k, num_warps, num_stages, programs = _rows_config(block_m, inner, width, a)
    programs *= _SHORT if shared_device else 1
    rank = 0 if path is None else path[0].shape[1]
    if rank > 64 and a.element_size() == 2 and gpu_of(a).capability[0] == 8:
        block_n, block_k, num_warps = min(block_n, 64), 64, 8  # without TMA, a path's blocks fill registers
    block_rank = min(32, max(16, rank))
    t, low = (None, None) if path is None else path
    most_tiles = order.tile_expert.numel() * ceil_div(width, block_n)
    with on_device_of(a):
        _rows_kernel[(min(most_tiles, programs * num_sms(a)),)](
            a if gather else _descriptor(a, [block_m, block_k]),
            _descriptor(b, [1, block_n, block_k] if transposed else [1, block_k, block_n]),
            bias,
            None if t is None else _descriptor(t, [block_m, block_rank]),
            None if low is None else _descriptor(low, [1, block_rank, block_n]),
            a_scales,
            b_scales,
            c,
            order.tile_expert,
            order.tile_row,
            order.num_tiles,
            order.offsets,
            order.order,
            a.stride(0),
            inner,
            width,
            TOKENS=order.top_k if gather else 0,
            TRANSPOSED=transposed,
            EVEN_K=inner % block_k == 0,
            RANK=rank,
            BLOCK_RANK=block_rank,
            # Triton 3.6 cannot keep the totals of two products in Blackwell's tensor memory then.
            FLATTEN=rank == 0 or gpu_of(a).capability[0] != 10,
            PRECISION=precision_of(a.dtype),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return c


def weight_product(p: Tensor, q: Tensor, order: ExpertOrder, add_to: Tensor | None = None) -> Tensor:
    """D [E, M, N], D[e] = sum of P[r]^T Q[r] over e's rows, accumulated in float32 and rounded once; zero
    without rows. With `add_to`, which is D of other rows, their sum in its memory.

    p [R, M] and q [R, N] in row order, with an inner stride of one.
    """
    num_experts, height, width = order.offsets.numel() - 1, p.shape[1], q.shape[1]
    if not height * width * order.num_rows:
        return p.new_zeros(num_experts, height, width) if add_to is None else add_to
    if add_to is None and _library_is_faster(p, q, num_experts):
        return F.grouped_mm(p.t(), q, offs=order.offsets[1:])
    d = p.new_empty(num_experts, height, width) if add_to is None else add_to
    block_m, block_n, block_k, num_warps, num_stages = _weight_config(width, num_experts, p)
    programs = num_experts * ceil_div(height, block_m) * ceil_div(width, block_n)
    if add_to is not None:  # of a later window, which usually has no rows
        programs = min(programs, 2 * num_sms(p))
    with on_device_of(p):
        _weight_kernel[(programs,)](
            _descriptor(p, [block_k, block_m]),
            _descriptor(q, [block_k, block_n]),
            d,
            order.offsets,
            num_experts,
            height,
            width,
            *d.stride()[:2],
            ADD=add_to is not None,
            PRECISION=precision_of(p.dtype),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return d


_SHORT = 8  # times as many programs as run at once: a late one delays a launch by an eighth of it


def _descriptor(x: Tensor, block: list[int]):
    """Tensor descriptor of x, or of a copy if x's start or strides are not multiples of 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    step = 16 // x.element_size()
    if x.data_ptr() % 16 or any(stride % step for stride in x.stride()[:-1]):
        padded = x.new_empty(*x.shape[:-1], ceil_div(x.shape[-1], step) * step)
        x = padded[..., : x.shape[-1]].copy_(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def _rows_config(block_m: int, inner: int, width: int, a: Tensor) -> tuple[int, int, int, int, int]:
    """Block of columns, block of the inner dimension, warps, stages, programs per multiprocessor."""
    if a.dtype == torch.float8_e4m3fn:
        if not _has_data_centre_memory(a):
            return 128, 64, 8, 3, 1
        return (256, 128, 8, 4, 1) if block_m == 128 else (128, 128, 4, 3, 2)
    if a.dtype == torch.float32:
        # Exact products run outside the tensor cores: larger tiles would not fit the registers.
        return (64, 32, 4, 2, 2) if precision_of(a.dtype) == "tf32" else (64, 16, 8, 2, 2)
    if width <= 64:  # of a low-rank path: bound by reading A
        narrow = max(16, next_power_of_2(width))
        return (narrow, 128, 4, 3, 2) if _has_data_centre_memory(a) else (narrow, 64, 4, 3, 1)
    family = gpu_of(a).family
    if family == "a100":  # by the compiler's reports, as for desktop GPUs: four warps spill
        return 128, 64, 8, 3, 1
    if family == "rdna":
        return 64, 32, 8, 2, 2
    if not _has_data_centre_memory(a):
        return 128, 32, 8 if family == "desktop" else 4, 3, 2
    if inner % 64 or width % 16:
        return 128, 64, 8, 3, 1  # partial rows need registers
    if block_m < 128 or width <= 128 or shared_memory(a) < 227 * 1024:
        return 128, 64, 4, 3, 2
    return 256, 64, 8, 4, 1


def _weight_config(width: int, num_experts: int, p: Tensor) -> tuple[int, int, int, int, int]:
    """Blocks of rows, columns and the inner dimension of D, warps, stages."""
    if p.dtype == torch.float32:
        return (64, 64, 32, 4, 2) if precision_of(p.dtype) == "tf32" else (64, 64, 16, 8, 2)
    # If writing D takes as long as the product, small tiles let the two overlap.
    if _few_rows(p, num_experts) or width <= 128 or not _has_data_centre_memory(p):
        return 64, 128, 32, 4, 4
    return 128, 256, 64, 8, 3


def rows_class(num_rows: int, num_experts: int) -> int:
    """A number that decides, with the shapes of the matrices, which kernels run for so many rows."""
    return sum(num_rows > each * num_experts for each in (0, 64, _FEW))


def _few_rows(p: Tensor, num_experts: int) -> bool:
    """Whether writing D takes as long as the product."""
    return len(p) <= _FEW * num_experts


def _library_is_faster(p: Tensor, q: Tensor, num_experts: int) -> bool:
    """Whether torch's grouped product is a single launch here, and faster than ours.

    It takes fewer than 1,024 groups, and memory whose start and strides are multiples of 16 bytes, to which
    it pads D's rows.
    """
    if not on_gpu(p) or p.dtype != torch.bfloat16 or gpu_of(p).capability != (9, 0):
        return False
    aligned = all(x.data_ptr() % 16 == x.stride(0) % 8 == x.shape[1] % 8 == 0 for x in (p, q))
    return aligned and num_experts < 1024 and not _few_rows(p, num_experts)


def _has_data_centre_memory(x: Tensor) -> bool:
    """Whether x's GPU has a data-centre GPU's shared memory (160 KB), not a desktop GPU's (99 KB)."""
    return shared_memory(x) >= 160 * 1024


def precision_of(dtype: torch.dtype) -> str:
    """Precision of float32 products: exact or TF32, following torch.backends.cuda.matmul as torch does. Few
    of AMD's GPUs have TF32: there it is exact.
    """
    rounded = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if rounded and not ROCM else "ieee"


_FEW = 768  # rows of an expert


@jit
def _in_bands(program, height, width):
    """Traverse a grid of height x width in bands of 8 rows, so that programs share operands in L2."""
    band = program // (8 * width)
    rows = tl.minimum(height - band * 8, 8)
    inside = program % (8 * width)
    return band * 8 + inside % rows, inside // rows


@jit
def _rows_kernel(
    a,
    b,
    bias,
    t,
    low,
    a_scales,
    b_scales,
    c,
    tile_expert,
    tile_row,
    num_tiles,
    offsets,
    order,
    a_stride,
    inner,
    width,
    TOKENS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles, blocks_n = tl.load(num_tiles), tl.cdiv(width, BLOCK_N)
    # If flattened into one loop, the pipeline spans tiles.
    for program in tl.range(tl.program_id(0), tiles * blocks_n, tl.num_programs(0), flatten=FLATTEN):
        tile, n = _in_bands(program, tiles, blocks_n)
        expert = tl.load(tile_expert + tile)
        first_row = tl.load(tile_row + tile)
        row = first_row + tl.arange(0, BLOCK_M)
        row_mask = row < tl.load(offsets + expert + 1)
        column = n * BLOCK_N
        if TOKENS:
            # Rows of the next expert load the first token instead and are not stored.
            source = tl.load(order + row, row_mask, 0) // TOKENS
            k = tl.arange(0, BLOCK_K)
            a_tile = a + source.to(tl.int64)[:, None] * a_stride + k[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, inner, BLOCK_K):
            if not TOKENS:
                a_block = a.load([first_row, first])
            elif EVEN_K:
                a_block = tl.load(a_tile + first)
            else:
                a_block = tl.load(a_tile + first, (k < inner - first)[None, :], 0.0)
            if TRANSPOSED:
                b_block = b.load([expert, column, first]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b_block = b.load([expert, first, column]).reshape(BLOCK_K, BLOCK_N)
            total = tl.dot(a_block, b_block, total, input_precision=PRECISION)
        for i in tl.static_range(0, RANK, BLOCK_RANK):
            low_block = low.load([expert, i, column]).reshape(BLOCK_RANK, BLOCK_N)
            total = tl.dot(t.load([first_row, i]), low_block, total, input_precision=PRECISION)
        columns = column + tl.arange(0, BLOCK_N)
        if a_scales is not None:
            if TOKENS:
                factor = tl.load(a_scales + source)
            else:
                factor = tl.load(a_scales + row, row_mask, 0.0)
            of_columns = tl.load(b_scales + expert.to(tl.int64) * width + columns, columns < width, 0.0)
            total = total * factor[:, None] * of_columns[None, :]
        if bias is not None:
            shift = tl.load(bias + expert.to(tl.int64) * width + columns, columns < width, 0.0)
            total += shift.to(tl.float32)[None, :]
        c_tile = c + row.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(c_tile, total.to(c.dtype.element_ty), row_mask[:, None] & (columns < width)[None, :])


@jit
def _weight_kernel(
    p,
    q,
    d,
    offsets,
    num_experts,
    height,
    width,
    expert_stride,
    row_stride,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks_m, blocks_n = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    tiles = blocks_m * blocks_n
    if ADD:
        for program in range(tl.program_id(0), num_experts * tiles, tl.num_programs(0)):
            expert = program // tiles
            start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
            if start < end:
                m, n = _in_bands(program % tiles, blocks_m, blocks_n)
                at = expert, m, n, start, end, height, width, expert_stride, row_stride
                _weight_tile(p, q, d, at, ADD, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        expert = tl.program_id(0) // tiles
        start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        m, n = _in_bands(tl.program_id(0) % tiles, blocks_m, blocks_n)
        at = expert, m, n, start, end, height, width, expert_stride, row_stride
        _weight_tile(p, q, d, at, ADD, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)


@jit
def _weight_tile(
    p,
    q,
    d,
    at,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, m, n, start, end, height, width, expert_stride, row_stride = at
    whole = start + (end - start) // BLOCK_K * BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, whole, BLOCK_K):
        p_block = p.load([first, m * BLOCK_M])
        q_block = q.load([first, n * BLOCK_N])
        total = tl.dot(p_block.T, q_block, total, input_precision=PRECISION)
    if whole < end:  # the last rows; mask the next expert's, which may hold nan
        mask = (whole + tl.arange(0, BLOCK_K) < end)[:, None]
        p_block = tl.where(mask, p.load([whole, m * BLOCK_M]), 0.0)
        q_block = tl.where(mask, q.load([whole, n * BLOCK_N]), 0.0)
        total = tl.dot(p_block.T, q_block, total, input_precision=PRECISION)
    i = m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = n * BLOCK_N + tl.arange(0, BLOCK_N)
    d_tile = d + expert.to(tl.int64) * expert_stride + i.to(tl.int64)[:, None] * row_stride + j[None, :]
    mask = (i < height)[:, None] & (j < width)[None, :]
    if ADD:
        total += tl.load(d_tile, mask, 0.0).to(tl.float32)
    tl.store(d_tile, total.to(d.dtype.element_ty), mask)
