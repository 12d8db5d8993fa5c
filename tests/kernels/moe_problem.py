"""Operands of the layer of experts, its formula written out, and a helper that runs either with gradients."""

import torch
import torch.nn.functional as F

from liger_models.kernels import CappedSwiGLU, ClampedSwiGLU

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def formula(
    x,
    weights,
    experts,
    gate_up,
    down,
    activation="silu",
    gate_up_bias=None,
    down_bias=None,
    weighted="outputs",
):
    """The layer of experts, with a copy of the experts' matrices for every token."""
    experts = experts.long()
    into = torch.einsum("tk,th->tkh", weights if weighted == "inputs" else torch.ones_like(weights), x)
    weights = torch.ones_like(weights) if weighted == "inputs" else weights
    h = torch.einsum("tkoh,tkh->tko", gate_up[experts], into)
    h = h if gate_up_bias is None else h + gate_up_bias[experts]
    if activation == "relu2":
        gate, up = h, None
    else:
        gate, up = h.chunk(2, -1)
    if up is None:
        product = gate.relu().square()
    elif isinstance(activation, ClampedSwiGLU):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        product = (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    elif isinstance(activation, CappedSwiGLU):
        limit = activation.limit
        product = F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    else:
        product = ACTIVATIONS[activation](gate) * up
    rows = torch.einsum("tkhi,tki->tkh", down[experts], product)
    return torch.einsum("tk,tkh->th", weights, rows if down_bias is None else rows + down_bias[experts])


def weighing_inputs(function):
    return lambda *inputs: function(*inputs, weighted="inputs")


def without_gates(function):
    """`function` with plain experts, of operands with gates: the first half of each expert's rows is up."""

    def run(x, weights, experts, gate_up, down, **options):
        return function(x, weights, experts, gate_up[:, : down.shape[2]], down, "relu2", **options)

    return run


CLAMPED = ClampedSwiGLU(alpha=1.3, limit=0.8)  # a third of all gates and half of all ups exceed the limit


def with_biases(function):
    """`function` with a clamped activation, of operands that end with the two biases."""
    return lambda *inputs: function(*inputs[:-2], CLAMPED, *inputs[-2:])


def operands(
    tokens,
    hidden,
    inner,
    num_experts,
    top_k,
    favourite=None,
    dtype=torch.float32,
    device="cpu",
    biases=False,
):
    """x, weights, experts, gate_up, down and, if wanted, biases. Floating-point ones require gradients."""
    logits = torch.randn(tokens, num_experts, device=device)
    if favourite is not None:
        logits[:, favourite] += 100
    experts = logits.topk(top_k).indices.int()
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weights = torch.randn(tokens, top_k, device=device)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner, device=device) / inner**0.5).to(dtype)
    found = [x, weights, experts, gate_up, down]
    if biases:
        found += [torch.randn(num_experts, width, device=device).to(dtype) for width in (2 * inner, hidden)]
    return [t.requires_grad_(t.is_floating_point()) for t in found]


def run(function, inputs, upstream, **options):
    """Result, and the gradients of all operands except the experts."""
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    y = function(*inputs, **options)
    floating = [t for t in inputs if t.is_floating_point()]
    return [y.detach(), *torch.autograd.grad(y, floating, upstream.to(y.dtype))]


def doubled(inputs):
    return [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs
    ]


def paths_of(matrices, *ranks, dtype=None):
    """Random a and b of a path for each rank, as large as the matrices, so that no term hides another."""
    num_experts, outputs, inputs = matrices.shape
    found = []
    for rank in ranks:
        a = torch.randn(num_experts * rank, inputs, device=matrices.device) / inputs**0.5
        b = torch.randn(outputs, rank * num_experts, device=matrices.device) / rank**0.5
        found += [x.to(dtype or matrices.dtype).requires_grad_() for x in (a, b)]
    return found


def folded(matrices, paths):
    """W + s B A, with the axes of PEFT's files."""
    for a, b, scale in paths:
        a = a.unflatten(0, (len(matrices), -1)).to(matrices.dtype)  # [E, r, inputs]
        b = b.unflatten(1, (-1, len(matrices))).to(matrices.dtype)  # [outputs, r, E]
        matrices = matrices + scale * torch.einsum("ore,eri->eoi", b, a)
    return matrices
