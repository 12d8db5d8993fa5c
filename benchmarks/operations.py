"""The operations that are measured: what they compute, who computes it, and the fewest bytes that must move.

A `Case` is one operation at one shape: random leaves (what autograd differentiates), upstream gradients, and
the providers. All providers of a case compute the same function of the same leaves. The truth is the eager
function in float64, or for losses over a vocabulary in chunks of tokens.

Bytes count every operand once per pass, however a provider computes: an operand that the forward and the
backward pass both need is read twice, since a model's other layers come between. Weights of norms, labels and
rotary tables are small beside the rest and are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = tuple[Tensor, ...]
PROVIDERS = ("ours", "liger-kernel", "torch.compile", "eager")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
EPS = 1e-6
# Of logits. Were it smaller, the gradient would be little more than -1 at the labels, and an error in the
# softmax would not show.
LOGIT_SCALE = 3.0


def _same(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Provider:
    """run(*leaves) gives the outputs. A provider that wants its operands in another layout has `leaves`,
    which makes them from the case's (untimed), and `gradients`, which brings their gradients back (for the
    check only).
    """

    run: Callable[..., Tensors]
    leaves: Callable[[Tensors], Tensors] = _same
    gradients: Callable[[Tensors], Tensors] = _same
    note: str = ""


@dataclass
class Case:
    leaves: Tensors
    upstream: Tensors
    eager: Callable[..., Tensors]
    ours: Callable[[], Provider]
    liger: Callable[[], Provider]
    training_bytes: int
    forward_bytes: int | None = None  # None: the forward pass alone is not measured
    flops: int | None = None  # of forward and backward; the ceiling is then the matrix product
    plain: Callable[..., Tensors] | None = None  # for float64, where `eager` cannot run in it
    truth: Callable[[], Tensors] | None = None  # outputs, then gradients; None: from `plain` or `eager`

    def provider(self, name: str) -> Provider:
        """Raises ImportError where the provider is not installed, AttributeError where it lacks the
        operation.
        """
        if name == "ours":
            return self.ours()
        if name == "liger-kernel":
            return self.liger()
        if name == "torch.compile":
            torch._dynamo.reset()
            return Provider(torch.compile(self.eager, dynamic=False))
        return Provider(self.eager)

    def expected(self) -> Tensors:
        """The true outputs, then the true gradients, in float32 at least."""
        if self.truth is not None:
            return self.truth()
        leaves = tuple(leaf.detach().double().requires_grad_() for leaf in self.leaves)
        outputs = (self.plain or self.eager)(*leaves)
        gradients = torch.autograd.grad(outputs, leaves, tuple(g.double() for g in self.upstream))
        return tuple(t.detach().float() for t in (*outputs, *gradients))


@dataclass(frozen=True)
class Operation:
    """`shapes` are measured, the first of them with --quick. `small` is a batch of 1 x 512 tokens, for the
    cost of a launch; None where the device takes longer than the host. `tiny` is for a CPU.
    """

    name: str
    dims: str
    build: Callable[[tuple[int, ...], torch.dtype, torch.device], Case]
    shapes: tuple[tuple[int, ...], ...]
    tiny: tuple[int, ...]
    small: tuple[int, ...] | None = None


REGISTRY: dict[str, Operation] = {}


def operation(name: str, dims: str, shapes, tiny, small=None, **options):
    def enter(build):
        REGISTRY[name] = Operation(name, dims, partial(build, **options), shapes, tiny, small)
        return build

    return enter


NORM_SHAPES = {
    "shapes": ((32768, 4096), (8192, 2048), (32768, 8192)),
    "tiny": (64, 256),
    "small": (512, 4096),
}


@operation("rms_norm", "tokens x hidden", **NORM_SHAPES)
def _rms_norm_case(shape, dtype, device):
    x, weight, dy = (
        _normal(shape, dtype, device),
        _near_one(shape[-1], dtype, device),
        _normal(shape, dtype, device),
    )

    def ours():
        from liger_models.kernels import rms_norm

        return Provider(lambda x, weight: (rms_norm(x, weight, EPS),))

    def liger():
        function = _liger("LigerRMSNormFunction")
        return Provider(lambda x, weight: (function.apply(x, weight, EPS),))

    # Forward: x in, y out. Backward: x and dy in, dx out.
    return Case((x, weight), (dy,), _rms_norm, ours, liger, 5 * x.nbytes, 2 * x.nbytes)


@operation("add_rms_norm", "tokens x hidden", **NORM_SHAPES)
def _add_rms_norm_case(shape, dtype, device):
    x, residual, dy, dtotal = (_normal(shape, dtype, device) for _ in range(4))
    weight = _near_one(shape[-1], dtype, device)

    def eager(x, residual, weight):
        total = x + residual
        return *_rms_norm(total, weight), total

    def ours():
        from liger_models.kernels import add_rms_norm

        return Provider(lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS))

    def liger():
        function = _liger("LigerFusedAddRMSNormFunction")
        return Provider(lambda x, residual, weight: function.apply(x, residual, weight, EPS))

    # Forward: x and residual in, y and total out. Backward: dy, dtotal and total in, one gradient out.
    return Case(
        (x, residual, weight),
        (dy, dtotal),
        eager,
        ours,
        liger,
        training_bytes=8 * x.nbytes,
        forward_bytes=4 * x.nbytes,
    )


@operation(
    "layer_norm",
    "tokens x hidden",
    ((32768, 8192), (8192, 4096), (8192, 1024)),
    tiny=(64, 256),
    small=(512, 4096),
)
def _layer_norm_case(shape, dtype, device):
    x, dy = _normal(shape, dtype, device), _normal(shape, dtype, device)
    weight, bias = _near_one(shape[-1], dtype, device), _normal(shape[-1:], dtype, device)

    def ours():
        from liger_models.kernels import layer_norm

        return Provider(lambda x, weight, bias: (layer_norm(x, weight, bias, EPS),))

    def liger():
        function = _liger("LigerLayerNormFunction")
        return Provider(lambda x, weight, bias: (function.apply(x, weight, bias, EPS),))

    def eager(x, weight, bias):
        return (F.layer_norm(x, x.shape[-1:], weight, bias, EPS),)

    return Case((x, weight, bias), (dy,), eager, ours, liger, 5 * x.nbytes, 2 * x.nbytes)


ROTARY_SHAPES = {"shapes": ((8, 4096),), "tiny": (2, 32), "small": (1, 512)}


@operation("rotary_qkv", "batch x seq", **ROTARY_SHAPES)
def _rotary_qkv_case(shape, dtype, device):
    """Queries, keys and values packed, as one projection gives them."""
    batch, seq = shape
    tokens, heads = batch * seq, HEADS + 2 * KV_HEADS
    qkv = _normal((tokens, heads * HEAD_DIM), dtype, device)
    upstream = tuple(_normal((tokens, n, HEAD_DIM), dtype, device) for n in (HEADS, KV_HEADS, KV_HEADS))
    half_cos, half_sin, cos, sin = _rotary_tables(seq, dtype, device)

    def split(turn, qkv):
        q, k, v = qkv.view(batch, seq, heads, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], 2)
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2), cos.to(qkv.dtype), sin.to(qkv.dtype))
        return q.transpose(1, 2).flatten(0, 1), k.transpose(1, 2).flatten(0, 1), v.flatten(0, 1)

    def ours():
        from liger_models.kernels import split_rotary_qkv

        tables = half_cos.repeat(batch, 1), half_sin.repeat(batch, 1)
        return Provider(lambda qkv: split_rotary_qkv(qkv, *tables, HEADS, KV_HEADS, HEAD_DIM, inplace=True))

    def liger():
        function = _liger("LigerRopeFunction")
        return Provider(partial(split, function.apply))

    # Forward: queries and keys in and out. Backward: the gradients of all three in, the packed gradient out.
    token_bytes = tokens * HEAD_DIM * qkv.itemsize
    forward = 2 * (HEADS + KV_HEADS) * token_bytes
    return Case(
        (qkv,), upstream, partial(split, _turn), ours, liger, forward + 2 * heads * token_bytes, forward
    )


@operation("rotary", "batch x seq", **ROTARY_SHAPES)
def _rotary_case(shape, dtype, device):
    """Queries and keys apart, as separate projections give them."""
    batch, seq = shape
    q, dq = (_normal((batch, seq, HEADS, HEAD_DIM), dtype, device) for _ in range(2))
    k, dk = (_normal((batch, seq, KV_HEADS, HEAD_DIM), dtype, device) for _ in range(2))
    half_cos, half_sin, cos, sin = _rotary_tables(seq, dtype, device)

    def heads_first(turn, q, k):
        q, k = turn(q.transpose(1, 2), k.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype))
        return q.transpose(1, 2), k.transpose(1, 2)

    def ours():
        from liger_models.kernels import rotary

        return Provider(lambda q, k: rotary(q, k, half_cos, half_sin))

    def liger():
        function = _liger("LigerRopeFunction")
        return Provider(partial(heads_first, function.apply))

    forward = 2 * (q.nbytes + k.nbytes)
    return Case((q, k), (dq, dk), partial(heads_first, _turn), ours, liger, 2 * forward, forward)


GATED_SHAPES = {"shapes": ((32768, 14336),), "tiny": (64, 256), "small": (512, 14336)}


@operation("geglu", "tokens x intermediate", **GATED_SHAPES, name_of_peer="LigerGELUMulFunction")
@operation("swiglu", "tokens x intermediate", **GATED_SHAPES, name_of_peer="LigerSiLUMulFunction")
def _gated_case(shape, dtype, device, name_of_peer):
    """Gate and up packed, as one projection gives them; liger-kernel's take them apart."""
    tokens, width = shape
    gate_up, dy = _normal((tokens, 2 * width), dtype, device), _normal(shape, dtype, device)
    silu = name_of_peer == "LigerSiLUMulFunction"

    def eager(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return ((F.silu(gate) if silu else F.gelu(gate, approximate="tanh")) * up,)

    def ours():
        from liger_models import kernels

        function = kernels.swiglu if silu else kernels.geglu
        return Provider(lambda gate_up: (function(gate_up),))

    def liger():
        function = _liger(name_of_peer)
        return Provider(
            lambda gate, up: (function.apply(gate, up),),
            leaves=lambda packed: tuple(part.contiguous() for part in packed[0].chunk(2, -1)),
            gradients=lambda parts: (torch.cat(parts, -1),),
        )

    # Forward: gate and up in, the product out. Backward: gate, up and dy in, two gradients out.
    return Case((gate_up,), (dy,), eager, ours, liger, 8 * dy.nbytes, 3 * dy.nbytes)


@operation("cross_entropy", "tokens x vocabulary", ((8192, 128256),), tiny=(64, 1000), small=(512, 128256))
def _cross_entropy_case(shape, dtype, device):
    logits = _normal(shape, dtype, device, scale=LOGIT_SCALE)
    labels = torch.randint(shape[1], shape[:1], device=device)

    def eager(logits):
        return (F.cross_entropy(_wide(logits), labels),)

    def ours():
        from liger_models.kernels import cross_entropy

        return Provider(lambda logits: (cross_entropy(logits, labels),))

    def liger():
        function = _liger("LigerCrossEntropyFunction")
        return Provider(lambda logits: (function.apply(logits, labels, None)[0],))

    # The logits in, the logits in again, their gradient out.
    return Case(
        (logits,),
        (torch.ones((), device=device),),
        eager,
        ours,
        liger,
        training_bytes=3 * logits.nbytes,
        truth=lambda: _truth_in_chunks(lambda rows: rows, logits, (), labels, torch.float64),
    )


HEAD_SHAPES = {"shapes": ((8192, 4096, 128256), (32768, 4096, 128256)), "tiny": (64, 32, 1000)}


@operation(
    "linear_cross_entropy_75_ignored",
    "tokens x hidden x vocabulary",
    HEAD_SHAPES["shapes"][:1],
    HEAD_SHAPES["tiny"],
    ignored=0.75,
)
@operation("linear_cross_entropy", "tokens x hidden x vocabulary", **HEAD_SHAPES)
def _linear_cross_entropy_case(shape, dtype, device, ignored=0.0):
    tokens, hidden, vocab = shape
    x, weight = (
        _normal((tokens, hidden), dtype, device),
        _normal((vocab, hidden), dtype, device, LOGIT_SCALE * hidden**-0.5),
    )
    labels = torch.randint(vocab, (tokens,), device=device)
    labels[torch.randperm(tokens, device=device)[: int(ignored * tokens)]] = -100
    valid = tokens - int(ignored * tokens)

    def eager(x, weight):
        return (F.cross_entropy(_wide(F.linear(x, weight)), labels),)

    def ours():
        from liger_models.kernels import linear_cross_entropy

        return Provider(lambda x, weight: (linear_cross_entropy(x, weight, labels, num_valid=valid),))

    def liger():
        function = _liger("LigerFusedLinearCrossEntropyFunction")
        return Provider(lambda x, weight: (function.apply(x, weight, labels)[0],))

    return Case(
        (x, weight),
        (torch.ones((), device=device),),
        eager,
        ours,
        liger,
        training_bytes=2 * (x.nbytes + weight.nbytes),
        flops=6 * valid * hidden * vocab,  # three products
        truth=lambda: _truth_in_chunks(F.linear, x, (weight,), labels, torch.float32),
    )


@operation(
    "moe_experts",
    "tokens x hidden x intermediate x experts x top k",
    ((32768, 2048, 768, 128, 8),),  # Qwen3-30B-A3B
    tiny=(64, 32, 16, 4, 2),
)
def _moe_experts_case(shape, dtype, device):
    """The experts' products and their weighted sum, the routing given."""
    tokens, hidden, intermediate, num_experts, top_k = shape
    experts = torch.rand(tokens, num_experts, device=device).topk(top_k).indices
    x, dy = _normal((tokens, hidden), dtype, device), _normal((tokens, hidden), dtype, device)
    weights = torch.rand(tokens, top_k, device=device)
    gate_up = _normal((num_experts, 2 * intermediate, hidden), dtype, device, hidden**-0.5)
    down = _normal((num_experts, hidden, intermediate), dtype, device, intermediate**-0.5)

    def plain(x, weights, gate_up, down):
        y = torch.zeros_like(x)
        for e in range(num_experts):
            token, slot = torch.where(experts == e)
            gate, up = F.linear(x[token], gate_up[e]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, down[e])
            y = y.index_add(0, token, weights[token, slot, None] * rows)
        return (y,)

    def grouped(x, weights, gate_up, down):
        """As transformers does it: rows sorted by expert, and torch's grouped product."""
        order = experts.flatten().argsort()
        counts = torch.histc(experts.flatten().float(), num_experts, 0, num_experts - 1)
        ends = counts.cumsum(0).int()
        gate, up = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        rows = (rows * weights.flatten()[order, None]).to(x.dtype)
        return (rows[order.argsort()].view(tokens, top_k, hidden).sum(1),)

    def ours():
        from liger_models.kernels import moe_experts

        return Provider(lambda x, w, gate_up, down: (moe_experts(x, w, experts, gate_up, down),))

    def liger():
        function = _liger("LigerFusedMoEFunction")
        chosen = experts.int()
        return Provider(
            lambda x, w, gate_up, down: (function.apply(x, gate_up, down, chosen, w),),
            note=f"LIGER_FUSED_MOE_AUTOTUNE={os.environ['LIGER_FUSED_MOE_AUTOTUNE']}",
        )

    return Case(
        (x, weights, gate_up, down),
        (dy,),
        grouped,
        ours,
        liger,
        training_bytes=2 * (x.nbytes + dy.nbytes + gate_up.nbytes + down.nbytes),
        flops=3 * 6 * tokens * top_k * intermediate * hidden,  # three products by three matrices
        plain=plain,
    )


def _liger(name: str) -> Any:
    # The autotuning of its experts takes minutes; it is asked for when the package is first imported.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    from liger_kernel import ops

    return getattr(ops, name)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rms_norm(x: Tensor, weight: Tensor) -> Tensors:
    wide = _wide(x)
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype),)


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, heads, S, D] turned as transformers does; cos and sin [1, S, D]."""

    def rotate_half(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def _rotary_tables(seq: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """cos and sin [S, D/2] in float32, as ours takes them, and [1, S, D], as transformers and liger-kernel
    do. All hold the same numbers, rounded to `dtype`, so that all turn by the same angles.
    """
    frequencies = 500_000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
    angles = torch.arange(seq, device=device)[:, None] * frequencies  # [S, D/2]
    cos, sin = angles.cos().to(dtype).float(), angles.sin().to(dtype).float()
    return cos, sin, torch.cat([cos, cos], -1)[None].to(dtype), torch.cat([sin, sin], -1)[None].to(dtype)


def _normal(shape, dtype, device, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=scale)


def _near_one(width: int, dtype, device) -> Tensor:
    return torch.empty(width, dtype=dtype, device=device).normal_(1.0, 0.1)


def _truth_in_chunks(
    logits_of: Callable[..., Tensor], rows: Tensor, shared: Tensors, labels: Tensor, dtype: torch.dtype
) -> Tensors:
    """The mean loss of logits_of(rows, *shared), and its gradients, from 2,048 rows at a time."""
    valid = int((labels >= 0).sum())
    shared = tuple(t.detach().to(dtype).requires_grad_() for t in shared)
    total = torch.zeros((), dtype=dtype, device=rows.device)
    drows = torch.empty_like(rows, dtype=torch.float32)
    dshared = [torch.zeros_like(t) for t in shared]
    for part in torch.arange(len(rows), device=rows.device).split(2048):
        chunk = rows[part].detach().to(dtype).requires_grad_()
        loss = F.cross_entropy(logits_of(chunk, *shared), labels[part], reduction="sum") / valid
        dchunk, *dparts = torch.autograd.grad(loss, (chunk, *shared))
        total += loss.detach()
        drows[part] = dchunk.float()
        for sum_, d in zip(dshared, dparts, strict=True):
            sum_ += d
    return total.float(), drows, *(d.float() for d in dshared)
