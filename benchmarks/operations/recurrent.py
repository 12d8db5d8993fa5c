"""Operations of recurrent mixers: the short convolution, the scans, the delta rules, the gated RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.operations.core import EPS, Cost, near_one, normal, operation, standard_case, wide
from liger_models import kernels
from liger_models.kernels.recurrent.channel_delta_rule import channel_delta_rule_plain
from liger_models.kernels.recurrent.gated_delta_rule import gated_delta_rule_plain
from liger_models.kernels.recurrent.rg_lru import rg_lru_plain
from liger_models.kernels.recurrent.state_spaces.selective_scan import selective_scan_plain
from liger_models.kernels.recurrent.state_spaces.ssd import NO_LIMIT, ssd_plain

TAPS, HEAD_DIM, STATE = 4, 128, 16


@operation("short_conv", "tokens x channels", ((16384, 8192),), tiny=(32, 16), small=(512, 8192))
def _short_conv(shape, dtype, device):
    """Width 4 with SiLU over one document, as in Qwen3-Next."""
    x, dy = normal(shape, dtype, device), normal(shape, dtype, device)

    def eager(x, weight):
        padded = F.pad(x.T[None], (TAPS - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], groups=len(weight)))[0].T

    return standard_case(
        (x, normal((shape[1], TAPS), dtype, device)),
        (dy,),
        ours=lambda x, weight: kernels.short_conv(x, weight, activation="silu"),
        liger=None,
        eager=eager,
        # Forward: x in, y out. Backward: x and dy in, dx out.
        forward=Cost(2 * x.nbytes),
        training=Cost(5 * x.nbytes),
    )


@operation("gated_short_conv", "tokens x channels", ((16384, 2048),), tiny=(32, 16), small=(512, 2048))
def _gated_short_conv(shape, dtype, device):
    """Width 3 between two gates over one document, as in LFM2."""
    tokens, channels = shape
    x, dy = normal((tokens, 3 * channels), dtype, device), normal(shape, dtype, device)

    def eager(x, weight):
        before, after, u = x.chunk(3, dim=-1)
        padded = F.pad((before * u).T[None], (2, 0))
        return after * F.conv1d(padded, weight[:, None], groups=len(weight))[0].T

    return standard_case(
        (x, normal((channels, 3), dtype, device)),
        (dy,),
        ours=kernels.gated_short_conv,
        liger=None,
        eager=eager,
        # Forward: x in, y out. Backward: x and dy in, dx out.
        forward=Cost(x.nbytes + dy.nbytes),
        training=Cost(3 * x.nbytes + 2 * dy.nbytes),
    )


@operation("gated_rms_norm", "tokens x channels", ((16384, 4096),), tiny=(32, 256), small=(512, 4096))
def _gated_rms_norm(shape, dtype, device):
    """Norm before gate, over heads of 128, as in Qwen3-Next."""
    x, gate, dy = (normal(shape, dtype, device) for _ in range(3))

    def eager(x, gate, weight):
        heads = wide(x).unflatten(-1, (-1, HEAD_DIM))
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS)
        scaled = wide(weight * normed.to(x.dtype)).flatten(-2)
        return (scaled * F.silu(wide(gate))).to(x.dtype)

    return standard_case(
        (x, gate, near_one(HEAD_DIM, dtype, device)),
        (dy,),
        ours=lambda x, gate, weight: kernels.gated_rms_norm(x, gate, weight, EPS, group_size=HEAD_DIM),
        liger=None,
        eager=eager,
        # Forward: x and gate in, y out. Backward: x, gate and dy in, two gradients out.
        forward=Cost(3 * x.nbytes),
        training=Cost(8 * x.nbytes),
    )


@operation(
    "gated_delta_rule", "tokens x value heads", ((2048, 32),), tiny=(16, 2), providers=("ours", "eager")
)
def _gated_delta_rule(shape, dtype, device):
    """Heads of 128, two value heads a key head, one document. Eager goes token by token."""
    tokens, heads = shape
    q, k = (normal((tokens, heads // 2, HEAD_DIM), dtype, device) for _ in range(2))
    v, do = (normal((tokens, heads, HEAD_DIM), dtype, device) for _ in range(2))
    a, b = (normal((tokens, heads), dtype, device) for _ in range(2))
    A_log, dt_bias = (normal((heads,), torch.float32, device) for _ in range(2))
    return standard_case(
        (q, k, v, a, b, A_log, dt_bias),
        (do,),
        ours=lambda *operands: kernels.gated_delta_rule(*operands)[0],
        liger=None,
        eager=lambda *operands: gated_delta_rule_plain(*operands)[0],
        # Products of a chunk of 64 tokens and a head: forward 5.9 MFLOP a token for 32 heads, backward 15.9.
        forward=Cost(flops=tokens * heads * 184_000),
        training=Cost(flops=tokens * heads * 681_000),
    )


@operation("channel_delta_rule", "tokens x heads", ((2048, 32),), tiny=(16, 2), providers=("ours", "eager"))
def _channel_delta_rule(shape, dtype, device):
    """Heads of 128, one document, as in Kimi-Linear. Eager goes token by token."""
    tokens, heads = shape
    q, k, v, f, do = (normal((tokens, heads, HEAD_DIM), dtype, device) for _ in range(5))
    b = normal((tokens, heads), dtype, device)
    A_log, dt_bias = (normal(size, torch.float32, device) for size in ((heads,), (heads, HEAD_DIM)))
    return standard_case(
        (q, k, v, f, b, A_log, dt_bias),
        (do,),
        ours=lambda *operands: kernels.channel_delta_rule(*operands)[0],
        liger=None,
        eager=lambda *operands: channel_delta_rule_plain(*operands)[0],
        # As in the gated delta rule, but products over pairs of tokens count six times.
        forward=Cost(flops=tokens * heads * 430_000),
        training=Cost(flops=tokens * heads * 1_150_000),
    )


@operation(
    "rg_lru",
    "tokens x channels",
    ((16384, 4096),),
    tiny=(16, 4),
    providers=("ours", "eager"),
)
def _rg_lru(shape, dtype, device):
    """Heads of 256, as in RecurrentGemma 9B; documents of 4096 tokens. Eager runs blocks of 16 tokens side by
    side.
    """
    tokens, channels = shape
    width = min(256, channels)
    x, dh = (normal((tokens, channels // width, width), dtype, device) for _ in range(2))
    gates = normal((channels // width, tokens, 2, width), dtype, device).transpose(0, 1)
    bias = normal((channels // width, 2, width), dtype, device)
    decay = normal((channels,), dtype, device)
    documents = torch.arange(0, tokens + 1, min(tokens, 4096), device=device)
    return standard_case(
        (x, gates, bias, decay),
        (dh,),
        ours=lambda *operands: kernels.rg_lru(*operands, cu_seqlens=documents)[0],
        liger=None,
        eager=lambda *operands: rg_lru_plain(*operands, cu_seqlens=documents)[0],
        # Forward: x and gates in, h out. Backward: these and dh in, three gradients out.
        forward=Cost(4 * x.nbytes),
        training=Cost(11 * x.nbytes),
    )


@operation(
    "selective_scan",
    "tokens x channels",
    ((2048, 4096),),
    tiny=(16, 4),
    providers=("ours", "eager"),
)
def _selective_scan(shape, dtype, device):
    """States of 16, one document, as in Falcon-Mamba. Eager runs blocks of 16 tokens side by side."""
    tokens, channels = shape
    x, dt, dy = (normal(shape, dtype, device) for _ in range(3))
    B, C = (normal((tokens, STATE), dtype, device) for _ in range(2))
    A_log = normal((channels, STATE), torch.float32, device)
    D, dt_bias = (normal((channels,), torch.float32, device) for _ in range(2))
    return standard_case(
        (x, dt, A_log, B, C, D, dt_bias),
        (dy,),
        ours=lambda *operands: kernels.selective_scan(*operands)[0],
        liger=None,
        eager=lambda *operands: selective_scan_plain(*operands)[0],
        # Forward: x and dt in, y out. Backward: x, dt and dy in, two gradients out. Exponentials take longer.
        forward=Cost(3 * x.nbytes),
        training=Cost(8 * x.nbytes),
    )


@operation(
    "ssd", "tokens x heads", ((16384, 128),), tiny=(80, 2), providers=("ours", "eager"), small=(2048, 16)
)
def _ssd(shape, dtype, device):
    """Heads of 64 and states of 128, eight groups, one document, as in Nemotron-H. Eager has chunks of 64."""
    tokens, heads = shape
    groups = min(8, heads)
    x, dy = (normal((tokens, heads, 64), dtype, device) for _ in range(2))
    B, C = (normal((tokens, groups, 128), dtype, device) for _ in range(2))
    dt = normal((tokens, heads), dtype, device)
    by_head = (normal((heads,), torch.float32, device) for _ in range(3))
    return standard_case(
        (x, dt, B, C, *by_head),
        (dy,),
        ours=lambda *operands: kernels.ssd(*operands)[0],
        liger=None,
        eager=lambda *operands: ssd_plain(*operands, None, None, NO_LIMIT)[0],
        # Products of a chunk of 64 tokens and a head: 57,000 operations a token forward, 115,000 backward.
        forward=Cost(flops=tokens * heads * 57_000),
        training=Cost(flops=tokens * heads * 172_000),
    )
