"""Operations under test, each with its eager PyTorch counterpart and the shapes of its operands.

test_contract.py and test_contract_on_a_gpu.py test the contract that they have in common. memory_check.py
runs them under a memory checker. A new operation adds one entry.
"""

import torch
import torch.nn.functional as F
from eager_operations import (
    eager_capped_cross_entropy,
    eager_capped_swiglu,
    eager_clamped_swiglu,
    eager_cross_entropy,
    eager_gated_norm,
    eager_gated_short_conv,
    eager_jsd,
    eager_kl,
    eager_rg_lru,
    eager_rms_norm,
    eager_selective_scan,
    eager_short_conv,
    eager_sparse_geglu,
    eager_split,
    eager_split_norm,
    eager_split_norm_last,
    eager_turn,
    eager_xielu,
    halves,
    labels_of,
    log_probs_of,
    wide,
)
from operation_runs import Operation, documents_of
from product_operations import WITH_PRODUCTS

from liger_models.kernels import (
    add_layer_norm,
    add_rms_norm,
    capped_swiglu,
    clamped_swiglu,
    cross_entropy,
    document_bounds,
    gated_rms_norm,
    gated_short_conv,
    geglu,
    generalized_jsd,
    kl_div,
    layer_norm,
    log_probs,
    relu2,
    relu2_gated,
    rg_lru,
    rms_norm,
    rotary,
    selective_scan,
    short_conv,
    sigmoid_gated,
    softmax,
    sparse_gated,
    split_norm_rotary_qkv,
    split_rotary_qkv,
    swiglu,
    total_variation,
    xielu,
)


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
    "rg_lru": Operation(
        # A call is limited in its segments of documents.
        lambda *operands: rg_lru(*operands, cu_seqlens=documents_of(operands[0], short=512))[0],
        eager_rg_lru,
        lambda rows, width: [(rows, 2, width), (rows, 2, 2, width), (2, 2, width), (2 * width,)],
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
    "clamped_swiglu_alone": Operation(
        lambda x: clamped_swiglu(x, alpha=1.3, limit=0.8, plus_one=False),
        lambda x: eager_clamped_swiglu(x, 1.3, 0.8, 0),
        lambda rows, width: [(rows, 2 * width)],
    ),
    "sigmoid_gated": Operation(
        sigmoid_gated, lambda g, u: g.sigmoid() * u, lambda rows, width: [(rows, width), (rows, width)]
    ),
    "relu2_gated": Operation(
        relu2_gated,
        lambda x: F.relu(halves(x)[0]).square() * halves(x)[1],
        lambda rows, width: [(rows, 2 * width)],
    ),
    "capped_swiglu": Operation(
        lambda x: capped_swiglu(x, limit=0.8),
        lambda x: eager_capped_swiglu(x, 0.8),
        lambda rows, width: [(rows, 2 * width)],
    ),
    "sparse_gated": Operation(
        lambda x: sparse_gated(x, "gelu_tanh", 0.5),
        lambda x: eager_sparse_geglu(x, 0.5),
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


EVERYTHING = OPERATIONS | LOSSES | WITH_PRODUCTS


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
