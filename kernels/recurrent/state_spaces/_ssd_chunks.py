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

The kernels (`_ssd_kernels.py`); only states and pass depend on other chunks:

    prepare        d and G, by chunk
    scores         C B^T, by chunk and group
    states         Y, by segment and in order over its chunks, with S in registers
    pass           S and dS' of every chunk, likewise; in the backward pass
    group_grads    dB and dC, by chunk and group, over the heads
    head_grads     dX, dG and the gradient of d, by chunk and head
    gate_grads     the gradients of dt, dt_bias and A_log, by chunk

S and dS' of all chunks together are larger than X: with N = 128, four times as large. The backward pass goes
through slices of the heads, one after another, whose S and dS' take no more memory than X.

Documents are divided into segments as in `_states.py`. The state after a segment is the state before it times
one factor, plus the segment's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_models.kernels._dispatch import (
    ceil_div,
    next_power_of_2,
    num_sms,
    on_device_of,
    once_differentiable,
)
from liger_models.kernels.recurrent._chunk_table import (
    CHUNK,
    NARROWEST,
    ChunkTable,
    product_precision,
    with_whole_heads,
)
from liger_models.kernels.recurrent._state_kernels import decayed_boundaries_kernel
from liger_models.kernels.recurrent.state_spaces._ssd_kernels import (
    gate_grads_kernel,
    group_grads_kernel,
    head_grads_kernel,
    pass_kernel,
    prepare_kernel,
    scores_kernel,
    states_kernel,
)

WIDEST = 256  # maximum of P and N
LEAST_SLICE = 2**25  # bytes that S and dS' of a slice may take, even if X takes less
_HEADS = 32  # heads per program of the first kernel
_TILE = 64  # rows of a state per tile
_SETTINGS = {"states": (8, 2), "pass": (8, 3), "group": (8, 2), "head": (4, 1)}  # warps and stages of kernels


class _Slice(NamedTuple):
    """Some heads in a row: whole groups, or a part of one."""

    x: Tensor  # [T, heads, P]
    B: Tensor  # [T, groups, N]
    C: Tensor
    D: Tensor  # [heads]
    gates: Tensor  # d and G: [2, heads, T]
    state: Tensor | None  # [documents, heads, P, N], a view of contiguous states of all heads

    @property
    def sizes(self) -> dict[str, Any]:
        """Constants of the kernels."""
        heads, width = self.x.shape[1:]
        return {
            "PER_GROUP": heads // self.B.shape[1],
            "P": width,
            "N": self.B.shape[2],
            "PRECISION": product_precision(self.x.dtype),
        }


class SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, B, C, A_log, D, dt_bias, state, table, dt_limit):
        x, B, C = (with_whole_heads(tensor) for tensor in (x, B, C))
        A_log, D, dt_bias = (tensor.contiguous() for tensor in (A_log, D, dt_bias))
        state = None if state is None else state.float().contiguous()
        ctx.save_for_backward(x, dt, B, C, A_log, D, dt_bias, state)
        ctx.table, ctx.limit = table, (dt_limit[0], float("inf") if dt_limit[1] is None else dt_limit[1])
        ctx.set_materialize_grads(False)
        documents = len(table.first_segments)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        final = torch.empty(documents, *x.shape[1:], B.shape[2], dtype=torch.float32, device=x.device)
        with on_device_of(x):
            gates = _prepare(dt, A_log, dt_bias, table, ctx.limit)
            _run(_Slice(x, B, C, D, gates, state), table, y, final)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal):
        x, dt, B, C, A_log, D, dt_bias, state = ctx.saved_tensors
        table, (tokens, heads) = ctx.table, x.shape[:2]
        groups, chunks = B.shape[1], table.ranges.shape[1]
        dy = torch.zeros_like(x) if dy is None else with_whole_heads(dy)
        dfinal = None if dfinal is None else dfinal.float().contiguous()
        dstate = None if state is None else torch.empty_like(state)
        empty: dict[str, Any] = {"device": x.device, "memory_format": torch.contiguous_format}
        dx, ddt = torch.empty_like(x, **empty), torch.empty_like(dt, **empty)
        count = _slices(x, B, chunks)
        parts = _parts(heads // max(count, groups), chunks * max(groups // count, 1), x)
        whole = parts == 1 and count <= groups
        shape = (parts, tokens, groups, B.shape[2])
        dB, dC = (
            torch.empty(shape, dtype=x.dtype if whole else torch.float32, device=x.device) for _ in range(2)
        )
        sums = torch.zeros(chunks, 3, heads, dtype=torch.float32, device=x.device)
        with on_device_of(x):
            gates = _prepare(dt, A_log, dt_bias, table, ctx.limit)
            dgates = torch.empty(2, heads, tokens, dtype=torch.float32, device=x.device)
            for nth in range(count if tokens else 0):
                some = slice(nth * heads // count, (nth + 1) * heads // count)
                of = slice(nth * groups // count, max(nth * groups // count + 1, (nth + 1) * groups // count))
                own = _Slice(
                    *(x[:, some], B[:, of], C[:, of], D[some], gates[:, some]), _of_heads(state, some)
                )
                _slice_backward(
                    own,
                    dy[:, some],
                    _of_heads(dfinal, some),
                    _of_heads(dstate, some),
                    dx[:, some],
                    dB[:, :, of],
                    dC[:, :, of],
                    dgates[:, some],
                    sums[:, 2, some],
                    table,
                    parts,
                    add=count > groups and nth % (count // groups) > 0,
                )
            if tokens:
                _gate_grads(dt, A_log, dt_bias, gates, dgates, ddt, sums, table, ctx.limit)
            elif dstate is not None:
                dstate.copy_(torch.zeros_like(dstate) if dfinal is None else dfinal)
        dA_log, dbias, dD = sums.sum(0)
        dB, dC = (tensor[0] if parts == 1 else tensor.sum(0) for tensor in (dB, dC))
        return (
            *(dx, ddt, dB.to(x.dtype), dC.to(x.dtype)),
            *(dA_log.to(A_log.dtype), dD.to(D.dtype), dbias.to(dt_bias.dtype)),
            *(dstate, None, None),
        )


def _of_heads(states: Tensor | None, some: slice) -> Tensor | None:
    return None if states is None else states[:, some]


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


def _block_of_channels(N: int) -> int:
    return max(NARROWEST, next_power_of_2(N))


def _options(kernel: str, N: int) -> dict[str, int]:
    """Launch options; states wider than 128 leave no shared memory to load ahead."""
    warps, stages = _SETTINGS[kernel] if N <= 128 or kernel == "pass" else (8, 1)
    return {"num_warps": warps, "num_stages": stages}


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
            gates[0],
            gates[1],
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


def _run(own: _Slice, table: ChunkTable, y: Tensor, final: Tensor) -> None:
    """Write y and the final states of all heads."""
    x, B, C = own.x, own.B, own.C
    (tokens, heads, width), N = x.shape, B.shape[2]
    count = table.segments.shape[1]
    if not count:
        return
    boundaries = _boundaries(own, None, table, None, directions=1)
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
        BLOCK_N=_block_of_channels(N),
        PRECISION=product_precision(x.dtype),
        num_warps=4,
    )
    states_kernel[(ceil_div(width, _TILE), heads, count)](
        x,
        B,
        C,
        own.D,
        own.gates[0],
        own.gates[1],
        table.cu_seqlens,
        table.segments,
        own.state,
        boundaries,
        scores,
        y,
        final,
        x.stride(0),
        B.stride(0),
        C.stride(0),
        final.stride(0),
        tokens,
        heads,
        count,
        BLOCK_P=_TILE,
        BLOCK_N=_block_of_channels(N),
        **own.sizes,
        **_options("states", N),
    )


def _slice_backward(
    own: _Slice,
    dy: Tensor,
    dfinal: Tensor | None,
    dstate: Tensor | None,
    dx: Tensor,
    dB: Tensor,
    dC: Tensor,
    dgates: Tensor,
    dskips: Tensor,
    table: ChunkTable,
    parts: int,
    add: bool,
) -> None:
    """Write the gradients of a slice of the heads: dG and dd to `dgates` [2, heads, T], each chunk's dD to
    `dskips`; dB and dC [parts, T, groups, N] by part of each group's heads, added to what is there if `add`.
    """
    x, B, C = own.x, own.B, own.C
    (tokens, heads, width), N = x.shape, B.shape[2]
    chunks, programs = table.ranges.shape[1], B.shape[1] * parts
    states = torch.empty(2, chunks, heads, width, N, dtype=x.dtype, device=x.device)
    boundaries = _boundaries(own, dy, table, dfinal, directions=2)
    _pass(own, dy, table, dfinal, boundaries, None, states, dstate, directions=2, local=False)
    sizes = {**own.sizes, "BLOCK_P": _TILE, "BLOCK_N": _block_of_channels(N)}
    strides = x.stride(0), B.stride(0), C.stride(0), dy.stride(0)
    group_grads_kernel[(chunks, programs)](
        x,
        B,
        C,
        dy,
        own.gates[0],
        own.gates[1],
        table.ranges,
        states,
        dB,
        dC,
        *strides,
        dB.stride(1),
        dC.stride(1),
        tokens,
        heads,
        chunks,
        PARTS=parts,
        ADD=add,
        **sizes,
        **_options("group", N),
    )
    head_grads_kernel[(chunks * heads,)](
        x,
        B,
        C,
        own.D,
        dy,
        own.gates[0],
        own.gates[1],
        table.ranges,
        states,
        dx,
        dgates[0],
        dgates[1],
        dskips,
        *strides,
        dx.stride(0),
        dskips.stride(0),
        tokens,
        heads,
        chunks,
        **sizes,
        **_options("head", N),
    )


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
        gates[0],
        dgates[0],
        dgates[1],
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


def _boundaries(
    own: _Slice,
    dy: Tensor | None,
    table: ChunkTable,
    dfinal: Tensor | None,
    *,
    directions: int,
) -> Tensor | None:
    """The states between a document's segments, and with two directions their gradients: [directions,
    boundaries, heads, P, N] float32. None if there are no such segments.
    """
    if not table.boundaries:
        return None
    heads, (width, N) = own.x.shape[1], (own.x.shape[2], own.B.shape[2])
    like: dict[str, Any] = {"dtype": torch.float32, "device": own.x.device}
    boundaries = torch.empty(directions, table.boundaries, heads, width, N, **like)
    transfers = torch.empty(table.boundaries, heads, **like)
    _pass(own, dy, table, dfinal, boundaries, transfers, None, None, directions=directions, local=True)
    size, block = width * N, 1024
    decayed_boundaries_kernel[(directions * ceil_div(size, block), heads, len(table.first_segments))](
        boundaries,
        transfers,
        table.cu_seqlens,
        table.first_segments,
        table.boundaries,
        heads,
        size,
        SEGMENT=table.segment,
        BLOCK=block,
        num_warps=4,
    )
    return boundaries


def _pass(
    own: _Slice,
    dy: Tensor | None,
    table: ChunkTable,
    dfinal: Tensor | None,
    boundaries: Tensor | None,
    transfers: Tensor | None,
    states: Tensor | None,
    dstate: Tensor | None,
    *,
    directions: int,
    local: bool,
) -> None:
    """Launch `pass_kernel`: with one direction, for the states alone."""
    x, B, C = own.x, own.B, own.C
    (tokens, heads, width), N = x.shape, B.shape[2]
    count = table.segments.shape[1]
    dy = x if dy is None else dy  # not read
    given = next((tensor for tensor in (own.state, dfinal, dstate) if tensor is not None), None)
    block = min(_block_of_channels(N), 128)
    pass_kernel[(directions * ceil_div(width, _TILE) * ceil_div(N, block), heads, count)](
        x,
        B,
        C,
        dy,
        own.gates[0],
        own.gates[1],
        table.cu_seqlens,
        table.segments,
        own.state,
        dfinal,
        boundaries,
        transfers,
        states,
        dstate,
        x.stride(0),
        B.stride(0),
        C.stride(0),
        dy.stride(0),
        0 if given is None else given.stride(0),
        tokens,
        heads,
        table.ranges.shape[1],
        table.boundaries,
        count,
        BLOCK_P=_TILE,
        BLOCK_N=block,
        **own.sizes,
        LOCAL=local,
        **_options("pass", N),
    )
