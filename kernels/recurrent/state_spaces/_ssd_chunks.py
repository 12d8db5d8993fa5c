"""The scan of Mamba 2 on chunks of C = 64 tokens.

In a chunk of one head, with the state S [P, N] at its start, G the running sum of g = -exp(A_log) d, and rows
i, j of its tokens:

    W[i, j] = exp(G_i - G_j) C_i . B_j        for i >= j, else 0
    Y       = W (d X) + exp(G) C S^T + D X
    S'      = exp(G_C) S + (exp(G_C - G) d X)^T B

and backward, with dS' from the next chunk, dV the gradient of d X, and R the gradient of C B^T:

    dV      = W^T dY + exp(G_C - G) B dS'^T
    R       = exp(G_i - G_j) (dY (d X)^T)     for i >= j, else 0; summed over the heads of a group
    dC      = R B + sum over heads of exp(G) dY S
    dB      = R^T C + sum over heads of (exp(G_C - G) d X) dS'
    dS      = exp(G_C) dS' + (exp(G) dY)^T C

The kernels (`_ssd_kernels.py`); only states and pass depend on other chunks (`_ssd_states.py`):

    prepare        d and G, by chunk
    scores         C B^T, by chunk and group
    states         Y, by segment and in order over its chunks, with S in registers
    pass           S and dS' of every chunk, likewise; in the backward pass
    group_grads    dB and dC, by chunk and group, over the heads
    head_grads     dX, dG and the gradient of d, by chunk and head
    gate_grads     the gradients of dt, dt_bias and A_log, by chunk

S and dS' of all chunks together are larger than X: with N = 128, four times as large. The backward pass goes
through slices of the heads, one after another, whose S and dS' take no more memory than X.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    ceil_div,
    next_power_of_2,
    num_sms,
    on_device_of,
    once_differentiable,
    shared_memory,
)
from liger_models.kernels._gpu import gpu_of
from liger_models.kernels._split_columns import place_of, room_for
from liger_models.kernels.recurrent._chunk_table import (
    CHUNK,
    ChunkTable,
    product_precision,
    with_whole_heads,
)
from liger_models.kernels.recurrent._states import Boundaries, save, saved
from liger_models.kernels.recurrent.state_spaces._ssd_grad_kernels import (
    gate_grads_kernel,
    group_grads_kernel,
    head_grads_kernel,
    tiled_head_grads_kernel,
)
from liger_models.kernels.recurrent.state_spaces._ssd_kernels import (
    prepare_kernel,
    scores_kernel,
    states_kernel,
)
from liger_models.kernels.recurrent.state_spaces._ssd_states import (
    TILE,
    Operands,
    block_of_channels,
    boundary_states,
    pass_states,
    tiles_to_copy,
    with_gradients,
)

WIDEST = 256  # maximum of P and N
LEAST_SLICE = 2**25  # bytes that S and dS' of a slice may take, even if X takes less
_HEADS = 32  # heads per program of the first kernel
_TOGETHER = 16  # heads per program of the last kernel where it has tiles


class SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, B, C, A_log, D, dt_bias, state, table, dt_limit):
        x, B, C = (with_whole_heads(tensor) for tensor in (x, B, C))
        A_log, D, dt_bias = (tensor.contiguous() for tensor in (A_log, D, dt_bias))
        state = None if state is None else state.float().contiguous()
        ctx.table, ctx.limit = table, (dt_limit[0], float("inf") if dt_limit[1] is None else dt_limit[1])
        ctx.place = place_of(dt)
        ctx.set_materialize_grads(False)
        documents = table.first_segments.shape[0]
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        final = torch.empty(documents, *x.shape[1:], B.shape[2], dtype=torch.float32, device=x.device)
        with on_device_of(x):
            gates = _prepare(dt, A_log, dt_bias, table, ctx.limit)
            between = _run(Operands(x, B, C, D, gates, state), table, y, final)
        save(ctx, (x, dt, B, C, A_log, D, dt_bias, state), between)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal):
        (x, dt, B, C, A_log, D, dt_bias, state), between = saved(ctx)
        table, (tokens, heads) = ctx.table, x.shape[:2]
        dy = torch.zeros_like(x) if dy is None else with_whole_heads(dy)
        dfinal = None if dfinal is None else dfinal.float().contiguous()
        dstate = None if state is None else torch.empty_like(state)
        ddt = room_for(dt, ctx.place)
        # Adjacent, as x, B and C may be: then nothing needs to be copied for the gradient of the whole.
        sizes = x.shape[1] * x.shape[2], *[B.shape[1] * B.shape[2]] * 2
        whole = torch.empty(tokens, sum(sizes), dtype=x.dtype, device=x.device).split(sizes, 1)
        dx, dB, dC = (part.unflatten(1, like.shape[1:]) for part, like in zip(whole, (x, B, C), strict=True))
        sums = torch.zeros(table.ranges.shape[1], 3, heads, dtype=torch.float32, device=x.device)
        with on_device_of(x):
            gates = _prepare(dt, A_log, dt_bias, table, ctx.limit)
            dgates = torch.empty_like(gates)
            own = Operands(x, B, C, D, gates, state, dy, dfinal)
            if tokens:
                _operand_grads(own, table, between, dx, dB, dC, dgates, sums, dstate)
                _gate_grads(dt, A_log, dt_bias, gates, dgates, ddt, sums, table, ctx.limit)
            elif dstate is not None:
                dstate.copy_(torch.zeros_like(dstate) if dfinal is None else dfinal)
        dA_log, dbias, dD = sums.sum(0)
        return (
            *(dx, ddt, dB, dC),
            *(dA_log.to(A_log.dtype), dD.to(D.dtype), dbias.to(dt_bias.dtype)),
            *(dstate, None, None),
        )


def _slices(x: Tensor, B: Tensor, chunks: int) -> int:
    """Number of slices of the heads in the backward pass."""
    heads, groups = x.shape[1], B.shape[1]
    states = 2 * chunks * heads * x.shape[2] * B.shape[2] * x.element_size()
    most = max(ceil_div(states, max(x.numel() * x.element_size(), LEAST_SLICE)), 1)
    for count in range(min(most, heads), 0, -1):
        if heads % count == 0 and (groups % count == 0 or count % groups == 0):
            return count
    return 1


def _parts(heads: int, programs: int, x: Tensor) -> int:
    """Number of programs that share the heads of a group in a chunk, so that all multiprocessors work."""
    parts = 1
    while heads % (2 * parts) == 0 and heads > 2 * parts and programs * parts < num_sms(x):
        parts *= 2
    return parts


def _prepare(
    dt: Tensor, A_log: Tensor, dt_bias: Tensor, table: ChunkTable, limit: tuple[float, float]
) -> Tensor:
    """d and G: [2, heads, T]."""
    (tokens, heads), chunks = dt.shape, table.ranges.shape[1]
    gates = torch.empty(2, heads, tokens, dtype=torch.float32, device=dt.device)
    if tokens:
        block = min(_HEADS, next_power_of_2(heads))
        prepare_kernel[(chunks, ceil_div(heads, block))](
            dt,
            A_log,
            dt_bias,
            gates,
            table.ranges,
            *dt.stride(),
            tokens,
            chunks,
            heads,
            *limit,
            BLOCK_HEADS=block,
            num_warps=4,
        )
    return gates


def _run(own: Operands, table: ChunkTable, y: Tensor, final: Tensor) -> Boundaries | None:
    """Write y and the final states of all heads; return the states at the boundaries of segments."""
    x, B, C = own.x, own.B, own.C
    (tokens, heads, width), N = x.shape, B.shape[2]
    count = table.segments.shape[1]
    if not count:
        return None
    between = boundary_states(own, table)
    groups, chunks = B.shape[1], table.ranges.shape[1]
    scores = torch.empty(chunks, groups, CHUNK, CHUNK, dtype=torch.float32, device=x.device)
    scores_kernel[(chunks, groups)](
        B,
        C,
        table.ranges,
        scores,
        B.stride(0),
        C.stride(0),
        chunks,
        N=N,
        BLOCK_N=block_of_channels(N),
        PRECISION=product_precision(x.dtype),
        num_warps=4,
    )
    states_kernel[(ceil_div(width, TILE), heads, count)](
        x,
        B,
        C,
        own.D,
        own.gates,
        table.cu_seqlens,
        table.segments,
        own.state,
        None if between is None else between.states,
        scores,
        y,
        final,
        *(own.pass_tiles[0], *own.pass_tiles[2:]),
        *own.strides,
        tokens,
        heads,
        count,
        BLOCK_P=TILE,
        BLOCK_N=block_of_channels(N),
        **own.sizes,
        **own.options["states"],
    )
    return between


def _operand_grads(
    own: Operands,
    table: ChunkTable,
    between: Boundaries | None,
    dx: Tensor,
    dB: Tensor,
    dC: Tensor,
    dgates: Tensor,
    sums: Tensor,
    dstate: Tensor | None,
) -> None:
    """Write dx, dB, dC, dG and dd [2, heads, T], each chunk's dD, and the gradient of the initial states."""
    x, dy = own.x, own.dy
    assert dy is not None
    (tokens, heads, width), (groups, N) = x.shape, own.B.shape[1:]
    chunks = table.ranges.shape[1]
    count = _slices(x, own.B, chunks)
    held, shared = heads // count, heads // max(count, groups)  # heads of a slice, and of a group in it
    parts = _parts(shared, chunks * held // shared, x)
    sums_of_parts, (to_B, to_C) = None, (dB, dC)
    if parts > 1 or count > groups:
        sums_of_parts = torch.empty(2, parts, tokens, groups, N, dtype=torch.float32, device=x.device)
        to_B, to_C = sums_of_parts
    states = torch.empty(2, chunks, held, width, N, dtype=x.dtype, device=x.device)
    boundaries = None if between is None else with_gradients(own, table, between)
    write = _chunk_grads(own, table, (states, dx, to_B, to_C, dgates, sums), held, shared, parts)
    for first in range(0, heads, held):
        pass_states(own, table, boundaries, None, states, dstate, first, directions=2)
        write(first)
    if sums_of_parts is not None:
        for whole, some in zip((dB, dC), sums_of_parts, strict=True):
            whole.copy_(some[0] if parts == 1 else some.sum(0))


def _chunk_grads(
    own: Operands,
    table: ChunkTable,
    tensors: tuple[Any, ...],
    held: int,
    shared: int,
    parts: int,
) -> Callable[[int], None]:
    """Return a function that writes what `_operand_grads` does, for `held` heads from the given one on,
    `shared` of each group.
    """
    states, dx, to_B, to_C, dgates, sums = tensors
    dy, (tokens, heads), (groups, N) = own.dy, own.x.shape[:2], own.B.shape[1:]
    assert dy is not None
    chunks = table.ranges.shape[1]
    strides, numbers = (*own.strides, dy.stride(0)), (tokens, heads, chunks)
    sizes = {**own.sizes, "BLOCK_P": TILE, "BLOCK_N": block_of_channels(N), "held": held}
    # Data-centre Blackwell's tensor memory is too small for products with all of 256 channels.
    tensor_memory = gpu_of(own.x).capability[0] == 10
    columns = min(sizes["BLOCK_N"], 128 if tensor_memory else 256)
    group = partial(
        group_grads_kernel[(chunks, held // shared * parts, ceil_div(N, columns))],
        *(own.x, own.B, own.C, dy, own.gates, table.ranges),
        *(states, to_B, to_C),
        *(*strides, to_B.stride(-3), *numbers),
        SHARED=shared,
        PARTS=parts,
        **sizes | {"BLOCK_N": columns},
        **own.options["group"],
    )
    of_heads = []
    tiles = tiles_to_copy(own.x, own.B, own.C, dy, states.view(-1, 1, N))
    tiled = None not in tiles
    if tiled:
        together = math.gcd(shared, _TOGETHER)
        tiled_head = partial(
            tiled_head_grads_kernel[(chunks * held // together,)],
            *(own.D, own.gates, table.ranges, dx, dgates, sums),
            *(*tiles, dx.stride(0), *numbers),
            **sizes | {"BLOCK_N": TILE, "SHARED": together},
            num_warps=4,
        )
        of_heads.append(tiled_head)
    if not (tiled and table.full):
        count = table.first_segments.shape[0] if tiled else chunks
        head = partial(
            head_grads_kernel[(count * held,)],
            *(own.x, own.B, own.C, own.D, dy, own.gates),
            *(table.ranges, table.cu_seqlens, table.segments, table.first_segments),
            *(states, dx, dgates, sums),
            *(*strides, dx.stride(0), *numbers),
            segment_count=table.segments.shape[1],
            **sizes | _head_tile(own),
            TENSOR_MEMORY=tensor_memory,
            LAST=tiled,
            SEGMENT=table.segment,
            MOST=table.most,
        )
        of_heads.append(head)

    def write(first: int) -> None:
        group(first_head=first, ADD=first % (heads // groups) > 0)
        for launch in of_heads:
            launch(first_head=first)

    return write


def _head_tile(own: Operands) -> dict[str, int]:
    """Columns, channels and launch options of a tile of `head_grads_kernel`."""
    block, options = block_of_channels(own.B.shape[2]), own.options["head"]
    if gpu_of(own.x).family in ("a100", "desktop") and own.x.element_size() == 2:
        # ptxas spills two tiles of columns, which are unrolled, and wide ones of states: up to 16 KB a thread
        columns = 2 * TILE if own.x.shape[2] > TILE else TILE
        return {**options, "BLOCK_P": columns, "BLOCK_N": min(block, 64), "num_warps": 8, "maxnreg": 255}
    return {**options, "BLOCK_N": min(block, 256 if shared_memory(own.x) >= 96 * 1024 else 128)}


def _gate_grads(
    dt: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    gates: Tensor,
    dgates: Tensor,
    ddt: Tensor,
    sums: Tensor,
    table: ChunkTable,
    limit: tuple[float, float],
) -> None:
    """Write ddt, and each chunk's sums for dA_log and ddt_bias."""
    (tokens, heads), chunks = dt.shape, table.ranges.shape[1]
    block = min(_HEADS, next_power_of_2(heads))
    gate_grads_kernel[(chunks, ceil_div(heads, block))](
        dt,
        A_log,
        dt_bias,
        gates,
        dgates,
        table.ranges,
        ddt,
        sums,
        *dt.stride(),
        ddt.stride(0),
        tokens,
        chunks,
        heads,
        *limit,
        BLOCK_HEADS=block,
        num_warps=4,
    )
