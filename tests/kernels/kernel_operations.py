"""Operations under test, each with its eager PyTorch counterpart and the shapes of its operands.

test_contract.py and test_contract_on_a_gpu.py test the contract that they have in common. memory_check.py
runs them under a memory checker. A new operation adds one entry.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from eager_operations import (
    eager_attention,
    eager_capped_cross_entropy,
    eager_clamped_experts,
    eager_clamped_swiglu,
    eager_cross_entropy,
    eager_experts,
    eager_experts_of_weighted,
    eager_gated_norm,
    eager_gated_short_conv,
    eager_jsd,
    eager_kl,
    eager_log_probs,
    eager_plain_experts,
    eager_rms_norm,
    eager_route,
    eager_selective_scan,
    eager_short_conv,
    eager_split,
    eager_split_norm,
    eager_split_norm_last,
    eager_turn,
    eager_xielu,
    experts_of,
    halves,
    labels_of,
    log_probs_of,
    logits_of,
    wide,
)
from moe_problem import folded
from torch import Tensor

from liger_models.kernels import (
    ClampedSwiGLU,
    ExpertPath,
    add_layer_norm,
    add_rms_norm,
    attention,
    clamped_swiglu,
    cross_entropy,
    document_bounds,
    gated_rms_norm,
    gated_short_conv,
    geglu,
    generalized_jsd,
    kl_div,
    layer_norm,
    linear_cosine_distillation,
    linear_cross_entropy,
    linear_jsd,
    linear_kl,
    linear_log_probs,
    log_probs,
    moe_experts,
    relu2,
    rms_norm,
    rotary,
    route,
    selective_scan,
    short_conv,
    softmax,
    split_norm_rotary_qkv,
    split_rotary_qkv,
    swiglu,
    total_variation,
    xielu,
)


@dataclass
class Operation:
    run: Callable  # on the tensors of `shapes`; returns a tensor or a tuple of tensors
    eager: Callable  # the same in plain PyTorch, as a model that uses no kernels computes it in its own dtype
    shapes: Callable[[int, int], list[tuple[int, ...]]]  # operands' shapes, given rows and width
    tables: int = 0  # number of operands at the end that are constants: rotary tables, or a teacher
    widest: int = 2**31  # largest supported width, such as 256 for a head


def beta_and_eps(x):
    return x.new_full((), 0.5), x.new_full((), -1e-6)  # made so that a CUDA graph can capture it


def norm_shapes(rows, width):
    return [(rows, width), (width,)]


def qkv_shapes(rows, width):  # five heads of at least two elements, about two thirds rotated
    half = (width + 1) // 3 + (width < 2)
    return [(rows, 5 * max(width, 2)), (rows, half), (rows, half)]


def qkv_norm_shapes(rows, width, q_heads=1, k_heads=1):  # number of heads with weights of their own
    qkv, *tables = qkv_shapes(rows, width)
    return [qkv, (q_heads * max(width, 2),), (k_heads * max(width, 2),), *tables]


def batch_shapes(rows, width):  # two sequences that share tables
    half = (width + 1) // 3 + (width < 2)
    return [(2, rows, 3, max(width, 2)), (2, rows, 1, max(width, 2)), (rows, half), (rows, half)]


OPERATIONS = {
    "rms_norm": Operation(
        lambda x, w: rms_norm(x, w, 1e-5, 0.0, "llama"),
        lambda x, w: eager_rms_norm(x, w, 1e-5, 0.0, "llama"),
        norm_shapes,
    ),
    "rms_norm_gemma": Operation(
        lambda x, w: rms_norm(x, w, 1e-5, 1.0, "gemma"),
        lambda x, w: eager_rms_norm(x, w, 1e-5, 1.0, "gemma"),
        norm_shapes,
    ),
    "rms_norm_unscaled": Operation(
        lambda x: rms_norm(x, None),
        lambda x: eager_rms_norm(
            x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device), 1e-6, 0.0, "llama"
        ),
        lambda rows, width: [(rows, width)],
    ),
    "add_rms_norm": Operation(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5, 0.0, "float32"),
        lambda x, r, w: (eager_rms_norm(x + r, w, 1e-5, 0.0, "float32"), x + r),
        lambda rows, width: [(rows, width), (rows, width), (width,)],
    ),
    "layer_norm": Operation(
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        lambda rows, width: [(rows, width), (width,), (width,)],
    ),
    "add_layer_norm": Operation(
        lambda x, r, w, b: add_layer_norm(x, r, w, b, 1e-5),
        lambda x, r, w, b: (F.layer_norm(x + r, w.shape, w, b, 1e-5), x + r),
        lambda rows, width: [(rows, width), (rows, width), (width,), (width,)],
    ),
    "layer_norm_unbiased": Operation(
        lambda x, w: layer_norm(x, w, None, 1e-5, 1.0),
        lambda x, w: F.layer_norm(x, w.shape, w + 1.0, None, 1e-5),
        norm_shapes,
    ),
    "gated_rms_norm": Operation(
        lambda x, g, w: gated_rms_norm(x, g, w, 1e-5, group_size=len(w)),
        lambda x, g, w: eager_gated_norm(x, g, w, F.silu, gate_first=False),
        lambda rows, width: [(rows, 3 * width), (rows, 3 * width), (width,)],
        widest=16384,
    ),
    "gated_rms_norm_gate_first": Operation(
        lambda x, g, w: gated_rms_norm(x, g, w, 1e-5, group_size=len(w) // 2, gate_first=True),
        lambda x, g, w: eager_gated_norm(x, g, w, F.silu, gate_first=True),
        lambda rows, width: [(rows, 2 * width), (rows, 2 * width), (2 * width,)],
        widest=16384,
    ),
    "gated_rms_norm_sigmoid": Operation(
        lambda x, g, w: gated_rms_norm(
            x, g, w, 1e-5, group_size=len(w), activation="sigmoid", cast="float32"
        ),
        lambda x, g, w: eager_gated_norm(x, g, w, torch.sigmoid, gate_first=False, cast="float32"),
        lambda rows, width: [(rows, 2 * width), (rows, 2 * width), (width,)],
        widest=16384,
    ),
    "short_conv": Operation(
        lambda x, w, b: short_conv(x, w, b, activation="silu", cu_seqlens=documents_of(x)),
        lambda x, w, b: F.silu(eager_short_conv(x, w, b)),
        lambda rows, width: [(rows, width), (width, 4), (width,)],
    ),
    "short_conv_linear": Operation(
        lambda x, w: short_conv(x, w, cu_seqlens=documents_of(x)),
        lambda x, w: eager_short_conv(x, w, None),
        lambda rows, width: [(rows, width), (width, 3)],
    ),
    "selective_scan": Operation(
        lambda *operands: selective_scan(*operands, cu_seqlens=documents_of(operands[0]))[0],
        eager_selective_scan,
        lambda rows, width: [
            *[(rows, width), (rows, width), (width, 3)],
            *[(rows, 3), (rows, 3), (width,), (width,)],
        ],
    ),
    "gated_short_conv": Operation(
        lambda x, w, b: gated_short_conv(x, w, b, bounds=document_bounds(documents_of(x), len(x))),
        eager_gated_short_conv,
        lambda rows, width: [(rows, 3 * width), (width, 3), (width,)],
    ),
    "split_rotary_qkv": Operation(
        lambda qkv, c, s: split_rotary_qkv(qkv, c, s, 3, 1, qkv.shape[1] // 5),
        lambda qkv, c, s: eager_split(qkv, c, s, False),
        qkv_shapes,
        tables=2,
        widest=256,
    ),
    "split_rotary_qkv_interleaved": Operation(
        lambda qkv, c, s: split_rotary_qkv(qkv, c, s, 3, 1, qkv.shape[1] // 5, interleaved=True),
        lambda qkv, c, s: eager_split(qkv, c, s, True),
        qkv_shapes,
        tables=2,
        widest=256,
    ),
    "split_rotary_qkv_inplace": Operation(
        # The operation overwrites the product, so no operand is modified here either.
        lambda qkv, c, s: split_rotary_qkv(qkv * 1, c, s, 3, 1, qkv.shape[1] // 5, inplace=True),
        lambda qkv, c, s: eager_split(qkv, c, s, False),
        qkv_shapes,
        tables=2,
        widest=256,
    ),
    "split_norm_rotary_qkv": Operation(
        lambda qkv, q, k, c, s: split_norm_rotary_qkv(qkv, q, k, c, s, 3, 1, qkv.shape[1] // 5, eps=1e-5),
        lambda qkv, q, k, c, s: eager_split_norm(qkv, q, k, c, s, True, 0.0, "llama"),
        qkv_norm_shapes,
        tables=2,
        widest=256,
    ),
    "split_norm_rotary_qkv_all_heads": Operation(
        lambda qkv, q, k, c, s: split_norm_rotary_qkv(
            qkv, q, k, c, s, 3, 1, qkv.shape[1] // 5, eps=1e-5, offset=1.0, cast="gemma", per_head=False
        ),
        lambda qkv, q, k, c, s: eager_split_norm(qkv, q, k, c, s, False, 1.0, "gemma"),
        lambda rows, width: qkv_norm_shapes(rows, width, 3, 1),
        tables=2,
        widest=256,
    ),
    "split_norm_rotary_qkv_norm_last": Operation(
        lambda qkv, c, s: split_norm_rotary_qkv(
            qkv, None, None, c, s, 3, 1, qkv.shape[1] // 5, eps=1e-5, norm_first=False, interleaved=True
        ),
        eager_split_norm_last,
        qkv_shapes,
        tables=2,
        widest=256,
    ),
    "rotary": Operation(
        lambda q, k, c, s: rotary(q, k, c, s),
        lambda q, k, c, s: (eager_turn(q, c, s, False), eager_turn(k, c, s, False)),
        batch_shapes,
        tables=2,
        widest=256,
    ),
    "swiglu": Operation(
        swiglu,
        lambda x: F.silu(halves(x)[0]) * halves(x)[1],
        lambda rows, width: [(rows, 2 * width)],
    ),
    "swiglu_separate": Operation(
        swiglu, lambda g, u: F.silu(g) * u, lambda rows, width: [(rows, width), (rows, width)]
    ),
    "geglu_tanh": Operation(
        geglu,
        lambda x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1],
        lambda rows, width: [(rows, 2 * width)],
    ),
    "geglu_exact": Operation(
        lambda g, u: geglu(g, u, approximate="none"),
        lambda g, u: F.gelu(g) * u,
        lambda rows, width: [(rows, width), (rows, width)],
    ),
    "clamped_swiglu": Operation(
        lambda x: clamped_swiglu(x, alpha=1.3, limit=0.8),
        lambda x: eager_clamped_swiglu(x, 1.3, 0.8),
        lambda rows, width: [(rows, 2 * width)],
    ),
    "xielu": Operation(
        lambda x, p, n: xielu(x, p, n, *beta_and_eps(x)),
        lambda x, p, n: eager_xielu(x, p, n, *beta_and_eps(x)),
        lambda rows, width: [(rows, width), (1,), (1,)],
    ),
    "relu2": Operation(relu2, lambda x: F.relu(x).square(), lambda rows, width: [(rows, width)]),
    "softmax": Operation(softmax, lambda x: x.softmax(-1), lambda rows, width: [(rows, width)]),
}


# Losses of logits [T, V]. Their own files test the accuracy on a GPU.
LOSSES = {
    "cross_entropy": Operation(
        lambda x: cross_entropy(x, labels_of(x, x.shape[1]), reduction="none"),
        eager_cross_entropy,
        lambda rows, width: [(rows, width)],
    ),
    "cross_entropy_capped": Operation(
        lambda x: cross_entropy(
            x, labels_of(x, x.shape[1]), reduction="none", softcap=2.0, label_smoothing=0.1, z_loss=0.01
        ),
        lambda x: eager_capped_cross_entropy(x, 2.0, 0.1, 0.01),
        lambda rows, width: [(rows, width)],
    ),
    "log_probs": Operation(
        lambda x: log_probs(x, labels_of(x, x.shape[1]), entropy=True)[:2],
        lambda x: log_probs_of(labels_of(x, x.shape[1]), wide(x)),
        lambda rows, width: [(rows, width)],
    ),
    "kl_div": Operation(
        lambda x, teacher: kl_div(x, teacher, reduction="none"),
        eager_kl,
        lambda rows, width: [(rows, width), (rows, width)],
        tables=1,
    ),
    "generalized_jsd": Operation(
        lambda x, teacher: generalized_jsd(x, teacher, beta=0.3, reduction="none"),
        lambda x, teacher: eager_jsd(x, teacher, 0.3),
        lambda rows, width: [(rows, width), (rows, width)],
        tables=1,
    ),
    "total_variation": Operation(
        lambda x, teacher: total_variation(x, teacher, reduction="none"),
        lambda x, teacher: (wide(x).softmax(-1) - wide(teacher).softmax(-1)).abs().sum(-1) / 2,
        lambda rows, width: [(rows, width), (rows, width)],
        tables=1,
    ),
}


def documents_of(x):
    """Boundaries of documents of four tokens; the last may be shorter."""
    return torch.arange(0, len(x) + 5, 4, device=x.device).clamp(max=len(x))


def coefficients_of(x):
    """Coefficients [T] of both signs, each computed from its own row of x [T, ...]."""
    last = wide(x.detach()[:, -1])
    return torch.full_like(last, 1.75).masked_fill(last > 0, -0.5)


VOCAB, EXPERTS, INTERMEDIATE = 37, 5, 6


def linear_shapes(rows, width):
    return [(rows, width), (VOCAB, width)]


def teacher_shapes(rows, width):  # the teacher's layer is narrower
    return [*linear_shapes(rows, width), (rows, max(1, width // 2)), (VOCAB, max(1, width // 2))]


def distilled(divergence):
    return lambda x, w, *teacher: divergence(x, w, *(t.to(x.dtype) for t in teacher), reduction="none")


def eager_distilled(divergence):
    return lambda x, w, *teacher: divergence(logits_of(x, w), logits_of(*(t.to(x.dtype) for t in teacher)))


WITH_PRODUCTS = {
    "linear_cross_entropy": Operation(
        lambda x, w: linear_cross_entropy(x, w, labels_of(x, VOCAB), reduction="none"),
        lambda x, w: F.cross_entropy(logits_of(x, w), labels_of(x, VOCAB), reduction="none"),
        linear_shapes,
    ),
    "linear_cross_entropy_summed": Operation(
        lambda x, w: linear_cross_entropy(x, w, labels_of(x, VOCAB), reduction="sum"),
        lambda x, w: F.cross_entropy(logits_of(x, w), labels_of(x, VOCAB), reduction="sum"),
        linear_shapes,
    ),
    "linear_log_probs": Operation(
        lambda x, w: linear_log_probs(x, w, labels_of(x, VOCAB), entropy=True)[:2],
        eager_log_probs,
        linear_shapes,
    ),
    "linear_log_probs_weighted": Operation(
        lambda x, w: (
            linear_log_probs(x, w, labels_of(x, VOCAB), coefficients=coefficients_of(x)).weighted_sum
        ),
        lambda x, w: (coefficients_of(x) * eager_log_probs(x, w)[0]).sum(),
        linear_shapes,
    ),
    "linear_kl": Operation(distilled(linear_kl), eager_distilled(eager_kl), teacher_shapes, tables=2),
    "linear_jsd": Operation(
        distilled(linear_jsd),
        eager_distilled(lambda student, teacher: eager_jsd(student, teacher, 0.5)),
        teacher_shapes,
        tables=2,
    ),
    "linear_cosine_distillation": Operation(
        distilled(linear_cosine_distillation),
        eager_distilled(lambda student, teacher: 1 - F.cosine_similarity(student, teacher)),
        teacher_shapes,
        tables=2,
    ),
    "moe_experts": Operation(
        lambda x, weights, *experts: moe_experts(x, weights, experts_of(weights, EXPERTS), *experts),
        eager_experts,
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, 2 * INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
        ],
    ),
    "moe_experts_of_weighted": Operation(
        lambda x, weights, *experts: moe_experts(
            x, weights, experts_of(weights, EXPERTS), *experts, weighted="inputs"
        ),
        eager_experts_of_weighted,
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, 2 * INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
        ],
    ),
    "moe_experts_with_paths": Operation(
        lambda x, weights, gate_up, down, *ab: moe_experts(
            *(x, weights, experts_of(weights, EXPERTS), gate_up, down),
            gate_up_paths=[ExpertPath(*ab[:2], 2.0)],
            down_paths=[ExpertPath(*ab[2:], 0.5)],
        ),
        lambda x, weights, gate_up, down, *ab: eager_experts(
            x, weights, folded(gate_up, [(*ab[:2], 2.0)]), folded(down, [(*ab[2:], 0.5)])
        ),
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, 2 * INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
            (3 * EXPERTS, width),
            (2 * INTERMEDIATE, 3 * EXPERTS),
            (5 * EXPERTS, INTERMEDIATE),
            (width, 5 * EXPERTS),
        ],
    ),
    "moe_experts_without_gates": Operation(
        lambda x, weights, *experts: moe_experts(x, weights, experts_of(weights, EXPERTS), *experts, "relu2"),
        eager_plain_experts,
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
        ],
    ),
    "moe_experts_biased": Operation(
        lambda x, weights, gate_up, down, *biases: moe_experts(
            x, weights, experts_of(weights, EXPERTS), gate_up, down, ClampedSwiGLU(1.3, 0.8), *biases
        ),
        lambda *operands: eager_clamped_experts(*operands, 1.3, 0.8),
        lambda rows, width: [
            (rows, width),
            (rows, 2),
            (EXPERTS, 2 * INTERMEDIATE, width),
            (EXPERTS, width, INTERMEDIATE),
            (EXPERTS, 2 * INTERMEDIATE),
            (EXPERTS, width),
        ],
    ),
    "attention": Operation(
        lambda q, k, v, sinks: attention(
            q, k, v, cu_seqlens=documents_of(q), window=3, softcap=2.0, sinks=sinks
        ),
        eager_attention,
        lambda rows, width: [(rows, 4, width), (rows, 2, width), (rows, 2, width), (4,)],
        widest=256,
    ),
    "attention_narrow_values": Operation(
        lambda q, k, v, sinks: attention(
            q, k, v, cu_seqlens=documents_of(q), window=3, softcap=2.0, sinks=sinks
        ),
        eager_attention,
        lambda rows, width: [(rows, 4, width), (rows, 2, width), (rows, 2, (width + 1) // 2), (4,)],
        widest=512,
    ),
    "route": Operation(
        lambda x: route(x, min(2, x.shape[1]))[0], eager_route, lambda rows, width: [(rows, width)]
    ),
}

EVERYTHING = OPERATIONS | LOSSES | WITH_PRODUCTS


def make_inputs(op: Operation, rows: int, width: int, dtype=torch.float32, device="cpu") -> list[Tensor]:
    shapes = op.shapes(rows, width)
    operands = len(shapes) - op.tables
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes[:operands]]
    return inputs + [torch.randn(shape, device=device) for shape in shapes[operands:]]


def outputs_of(function, inputs) -> tuple[Tensor, ...]:
    outputs = function(*inputs)
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def run_with_gradients(function, inputs, gradients=None, **options):
    """Outputs, the gradients of all operands that require one, and the upstream gradients."""
    outputs = outputs_of(function, inputs)
    if gradients is None:
        gradients = [torch.randn_like(output) for output in outputs]
    needed = [x for x in inputs if x.requires_grad]
    return outputs, torch.autograd.grad(outputs, needed, gradients, **options), gradients


def in_float64(tensors) -> list[Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]


def copies(tensors) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def assert_same(op, results, again) -> None:
    """Assert equal bits, or equality up to rounding where matrix products may be summed in a different order.

    In float32, sums have up to 256 products; in half precision, the error is little more than the rounding of
    the result.
    """
    for a, b in zip(results, again, strict=True):
        assert a.dtype == b.dtype
        if any(op is other for other in WITH_PRODUCTS.values()):
            largest = b.abs().max().item() if b.numel() else 0.0
            roundings = 256 if a.dtype == torch.float32 else 16
            torch.testing.assert_close(a, b, rtol=0, atol=roundings * torch.finfo(a.dtype).eps * largest)
        else:
            assert torch.equal(a, b)


def transposed(x):
    if x.dim() == 0:
        return x.detach().clone()
    return x.detach().mT.contiguous().mT if x.dim() > 1 else torch.stack([x.detach(), x.detach()], -1)[:, 0]


def cut_from_wider(x):
    if x.dim() == 0:
        return x.detach().clone()
    return torch.cat([x.detach(), torch.randn_like(x)], -1)[..., : x.shape[-1]]


def shifted(x):  # memory that is not aligned to 16 bytes
    return torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape)


LAYOUTS = (transposed, cut_from_wider, shifted)
