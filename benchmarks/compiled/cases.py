"""Operations at the sizes of real models, forward and backward, on the meta device.

Tiles depend on the size of a row, and of experts on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import liger_models.kernels as kernels
from liger_models.kernels.activations.gated_linear import gated_linear
from liger_models.kernels.attention.choose_compressed import choose_compressed
from liger_models.kernels.attention.compressed_keys import CompressedKeys
from liger_models.kernels.attention.compressed_keys import compressed_attention as attend_compressed
from liger_models.kernels.attention.visible_keys import KeyRanges
from liger_models.kernels.experts._expert_float8 import float8_rows_product
from liger_models.kernels.experts._expert_order import sort_by_expert
from liger_models.kernels.float8.eight_bits import gated_eight_bits, gated_from_eight_bits
from liger_models.kernels.float8.quantize import casts_to_float8, quantize_columns, turned
from liger_models.kernels.streams.gated_streams import added_to_streams, gated_mean
from liger_models.kernels.streams.streams import mixed_streams, summed_streams, weighted_streams

BF16, F32 = torch.bfloat16, torch.float32
TOKENS, VOCAB = 4096, 128256
SEGMENTS = 1 << 14  # tokens of a document that recurrent layers divide into segments


def operand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype).requires_grad_()


def backward(*results: Tensor) -> None:
    torch.autograd.backward(results, [torch.empty_like(result) for result in results])


def norms(width, cast="llama", dtype=BF16):
    x, weight = operand(TOKENS, width, dtype=dtype), operand(width, dtype=dtype)
    backward(kernels.rms_norm(x, weight, cast=cast))
    backward(*kernels.add_rms_norm(x, operand(TOKENS, width, dtype=dtype), weight, cast=cast))


def layer_norm(width, dtype=BF16):
    x, weight, bias = (operand(*shape, dtype=dtype) for shape in ((TOKENS, width), (width,), (width,)))
    backward(kernels.layer_norm(x, weight, bias))
    backward(*kernels.add_layer_norm(x, operand(TOKENS, width, dtype=dtype), weight, bias))


def rotary(heads, kv_heads, head_dim, turned=None, interleaved=False):
    tables = [torch.empty(TOKENS, (turned or head_dim) // 2) for _ in range(2)]
    qkv = operand(TOKENS, (heads + 2 * kv_heads) * head_dim)
    backward(*kernels.split_rotary_qkv(qkv, *tables, heads, kv_heads, head_dim, interleaved))
    q, k = operand(TOKENS, heads, head_dim), operand(TOKENS, kv_heads, head_dim)
    backward(*kernels.rotary(q, k, *tables, interleaved))


def qk_norm(heads, kv_heads, head_dim, turned=None, weights=True, per_head=True, **options):
    tables = [torch.empty(TOKENS, (turned or head_dim) // 2) for _ in range(2)]
    qkv = operand(TOKENS, (heads + 2 * kv_heads) * head_dim)
    widths = [head_dim * (1 if per_head else count) for count in (heads, kv_heads)]
    pair = [operand(width) if weights else None for width in widths]
    options |= {"eps": 1e-6, "per_head": per_head}
    backward(*kernels.split_norm_rotary_qkv(qkv, *pair, *tables, heads, kv_heads, head_dim, **options))


def embedding(rows=32768, width=4096):
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    for dtype in (BF16, F32):
        backward(kernels.embedding(ids, operand(rows, width, dtype=dtype)))


def gated(width):
    backward(kernels.swiglu(operand(TOKENS, 2 * width)))
    backward(gated_linear(operand(TOKENS, 2 * width), operand(128, width), None, "silu"))
    for approximate in ("tanh", "none"):
        backward(kernels.geglu(operand(TOKENS, 2 * width), approximate=approximate))
    for plus_one in (False, True):
        backward(kernels.clamped_swiglu(operand(TOKENS, 2 * width), plus_one=plus_one))
    for activation in ("silu", "gelu_tanh", "gelu"):
        backward(gated_eight_bits(operand(TOKENS, 2 * width), activation)[0])
    backward(kernels.capped_swiglu(operand(TOKENS, 2 * width)))
    backward(kernels.sparse_gated(operand(TOKENS, 2 * width), "gelu_tanh", 1.6448536))
    backward(kernels.sigmoid_gated(operand(TOKENS, width), operand(TOKENS, width)))
    backward(gated_linear(operand(TOKENS, width), operand(128, width), None, "relu2"))
    backward(kernels.relu2(operand(TOKENS, width)))
    backward(kernels.relu2_gated(operand(TOKENS, 2 * width)))
    numbers = operand(1), operand(1), torch.tensor(0.5), torch.tensor(-1e-6)
    backward(kernels.xielu(operand(TOKENS, width), *numbers))


def float8(width):
    for one_scale in (False, True):
        kernels.quantize(operand(TOKENS, width), by_columns=True, one_scale=one_scale)
    rows, _ = kernels.quantize(operand(TOKENS, width))
    quantize_columns(rows.values, rows.scales)
    turned(rows)
    y, codes, scales = gated_eight_bits(operand(TOKENS, 2 * width), "silu", float8=True, float8_gradient=True)
    backward(y)
    gated_from_eight_bits(codes, scales, "silu", BF16, float8=True)
    x, weight = operand(TOKENS, width), operand(width)
    backward(*kernels.add_rms_norm(x, operand(TOKENS, width), weight, float8=True, float8_gradient=True))


def decoding(rows, columns):
    """Half bytes with exponents, or with two scales; and float8 in blocks."""
    codes, table = torch.empty(1, rows, columns // 2, dtype=torch.uint8), torch.empty(1, 16)
    scale = torch.empty(1, rows, columns // 16, dtype=torch.float8_e4m3fn)
    exponents = torch.empty(1, rows, columns // 32, dtype=torch.float8_e8m0fnu)
    sizes, second = (rows, columns), torch.empty(1)
    kernels.decode_codes(codes, exponents, sizes, (1, 32), "low half first", BF16, table=table)
    two = {"table": table, "second": second, "divides": True}
    kernels.decode_codes(codes, scale, sizes, (1, 16), "low half first", BF16, **two)
    eights, blocks = (
        torch.empty(1, rows, columns, dtype=torch.uint8),
        torch.empty(1, -(-rows // 128), -(-columns // 128)),
    )
    kernels.decode_codes(eights, blocks, sizes, (128, 128), "float8", BF16)


def decoding_groups(rows, columns):
    """Integers with a scale and a zero for each group of 128 columns, which need not be in order."""
    groups = {
        "groups": torch.empty(1, columns, dtype=torch.int32),
        "zero": torch.empty(1, rows, columns // 128),
    }
    scale, factor = torch.empty(1, rows, columns // 128, dtype=BF16), 0.5
    for numbers, width in (("int4", columns // 2), ("int8", columns), ("biased int8", columns)):
        codes = torch.empty(1, rows, width, dtype=torch.uint8)
        kernels.decode_codes(codes, scale, (rows, columns), (1, 128), numbers, BF16, **groups)
        kernels.decode_codes(codes, scale, (rows, columns), (1, 128), numbers, BF16, factor=factor)


def ternary(width, outputs):
    """With several parts of a weight, and in the dtype of autocast."""
    for dtype, other in ((BF16, None), (F32, BF16)):
        kernels.round_inputs(operand(TOKENS, width, dtype=dtype), other)
        kernels.round_weights(operand(outputs, width, dtype=dtype), (outputs // 2, outputs // 2), other)


def gated_norm(channels, group, gate_first=False, **options):
    weight = operand(channels if gate_first else group)
    x, gate = operand(TOKENS, channels), operand(TOKENS, channels)
    backward(kernels.gated_rms_norm(x, gate, weight, group_size=group, gate_first=gate_first, **options))


def gated_delta_rule(key_heads, heads, key, value, least=0):
    tokens = max(TOKENS, least)
    q, k = (operand(tokens, key_heads, key) for _ in range(2))
    gates = operand(tokens, heads), operand(tokens, heads), operand(heads), operand(heads)
    backward(*kernels.gated_delta_rule(q, k, operand(tokens, heads, value), *gates))


def channel_delta_rule(heads, width, least=0, **options):
    tokens = max(TOKENS, least)
    q, k, v, f = (operand(tokens, heads, width) for _ in range(4))
    gates = operand(tokens, heads), operand(heads), operand(heads, width)
    backward(*kernels.channel_delta_rule(q, k, v, f, *gates, **options))


def ssd(heads, head_dim, groups, state, least=0):
    tokens = max(TOKENS, least)
    x, dt = operand(tokens, heads, head_dim), operand(tokens, heads)
    B, C = (operand(tokens, groups, state) for _ in range(2))
    backward(*kernels.ssd(x, dt, B, C, *(operand(heads) for _ in range(3))))


def short_conv(channels, taps, activation, biased=False):
    x, weight, bias = operand(TOKENS, channels), operand(channels, taps), operand(channels)
    documents = torch.tensor([0, TOKENS])
    backward(
        kernels.short_conv(x, weight, bias if biased else None, activation=activation, cu_seqlens=documents)
    )


def selective_scan(channels, width, dtype=BF16):
    x, dt = (operand(TOKENS, channels, dtype=dtype) for _ in range(2))
    by_state = (operand(TOKENS, width, dtype=dtype) for _ in range(2))
    parameters = operand(channels, width, dtype=F32), *by_state, *(operand(channels),) * 2
    backward(*kernels.selective_scan(x, dt, *parameters))


def rg_lru(heads, width, dtype=BF16):
    x, gates = operand(TOKENS, heads, width, dtype=dtype), operand(heads, TOKENS, 2, width, dtype=dtype)
    parameters = operand(heads, 2, width, dtype=dtype), operand(heads * width, dtype=dtype)
    backward(*kernels.rg_lru(x, gates.transpose(0, 1), *parameters))


def gated_short_conv(channels, taps):
    bounds = kernels.document_bounds(torch.tensor([0, TOKENS]), TOKENS)
    backward(kernels.gated_short_conv(operand(TOKENS, 3 * channels), operand(channels, taps), bounds=bounds))


def softmax():
    for width in (8, 128, 4096, 16384, VOCAB):
        backward(kernels.softmax(operand(TOKENS, width)))


def cross_entropy(**options):
    labels = torch.arange(TOKENS)
    backward(kernels.cross_entropy(operand(TOKENS, VOCAB), labels, **options))
    backward(2 * kernels.linear_cross_entropy(hidden(), head(), labels, num_valid=TOKENS, **options))


def log_probs(**options):
    labels, everything = torch.arange(TOKENS), {"entropy": True, "top1": True, "log_sum_sq_probs": True}
    for wanted in ({}, {"entropy": True}, everything):
        known: dict[str, Any] = {"num_valid": TOKENS}
        scores = kernels.linear_log_probs(hidden(), head(), labels, **wanted, **known, **options)
        backward(*(score for score in scores[:2] if score is not None))
        known["coefficients"] = torch.ones(TOKENS)
        scores = kernels.linear_log_probs(hidden(), head(), labels, **wanted, **known, **options)
        backward(scores.weighted_sum)


def divergences():
    for divergence in (kernels.kl_div, kernels.generalized_jsd, kernels.total_variation):
        backward(divergence(operand(TOKENS, VOCAB), operand(TOKENS, VOCAB).detach()))
    teacher = hidden().detach(), head().detach()
    for divergence in (kernels.linear_kl, kernels.linear_jsd, kernels.linear_cosine_distillation):
        backward(divergence(hidden(), head(), *teacher))


def hidden() -> Tensor:
    return operand(TOKENS, 2048)


def head() -> Tensor:
    return operand(VOCAB, 2048)


def ranges(of_queries: int, of_keys: int, marked: bool = False) -> KeyRanges:
    """Bounds of attention over several ranges of keys: numbers of rows, and whether tokens have marks."""
    rows = (torch.empty(count, TOKENS, dtype=torch.int32) for count in (of_queries, of_keys))
    return KeyRanges(*rows, torch.empty(TOKENS, dtype=torch.int32) if marked else None)


def routing(num_experts, top_k, corrected=False, **options):
    """The choice of experts, and weights of an earlier choice."""
    options["correction_bias"] = torch.empty(num_experts) if corrected else None
    logits = operand(TOKENS, num_experts)
    backward(kernels.route(logits, top_k, **options)[0])
    given = torch.empty(TOKENS, top_k, dtype=torch.int32)
    backward(kernels.route(logits, top_k, experts=given, **options)[0])


def experts(
    tokens, hidden_size, intermediate_size, num_experts, top_k, dtype=BF16, biases=False, rank=0, **how
):
    rows = intermediate_size if how.get("activation") == "relu2" else 2 * intermediate_size
    router = torch.rand(tokens, num_experts).topk(top_k)
    gate_up = operand(num_experts, rows, hidden_size, dtype=dtype)
    down = operand(num_experts, hidden_size, intermediate_size, dtype=dtype)
    x = operand(tokens, hidden_size, dtype=dtype)
    rest = []
    if biases:
        widths = rows, hidden_size
        rest = [kernels.ClampedSwiGLU(), *(operand(num_experts, width, dtype=dtype) for width in widths)]
    if rank:
        gate_up, down = gate_up.detach(), down.detach()
        how["gate_up_paths"], how["down_paths"] = (
            [
                kernels.ExpertPath(
                    operand(rank * num_experts, matrices.shape[2], dtype=F32),
                    operand(matrices.shape[1], rank * num_experts, dtype=F32),
                    2.0,
                )
            ]
            for matrices in (gate_up, down)
        )
    backward(kernels.moe_experts(x, router.values, router.indices.int(), gate_up, down, *rest, **how))


def shared_experts(tokens, hidden_size, intermediate_size, num_experts, top_k):
    """Experts that two ranks share: rows in windows, computed while others are exchanged."""

    def nothing(*_):
        return None

    own = tokens // 2
    waiting = dict.fromkeys(("fill", "arrive", "leave", "leave_weights"), nothing)
    rows = {
        "own_rows": lambda: operand(own, hidden_size).detach(),
        "parts": lambda: operand(1, own, hidden_size).detach(),
    }
    exchange = SimpleNamespace(own=own, ranks=2, overlaps=False, divisor=2, **waiting, **rows)
    experts(tokens, hidden_size, intermediate_size, num_experts, top_k, exchange=exchange)


def float8_experts(tokens, hidden_size, intermediate_size, num_experts, top_k):
    """The products of quantised operands, forward and for the gradients of their inputs."""
    order = sort_by_expert(torch.rand(tokens, num_experts).topk(top_k).indices.int(), num_experts)
    gate_up = torch.empty(num_experts, 2 * intermediate_size, hidden_size, dtype=BF16)
    down = torch.empty(num_experts, hidden_size, intermediate_size, dtype=BF16)
    x = torch.empty(tokens, hidden_size, dtype=BF16)
    if not casts_to_float8(x):
        return
    rows = [torch.empty(tokens * top_k, n, dtype=BF16) for n in (intermediate_size, 2 * intermediate_size)]
    float8_rows_product(x, gate_up, order, transposed=True, gather=True)
    float8_rows_product(rows[0], down, order, transposed=True)
    float8_rows_product(x, down, order, transposed=False, gather=True)
    float8_rows_product(rows[1], gate_up, order, transposed=False)


def optimizer(weights, moments, dtype=BF16, size=1 << 16):
    residue = {"compensated": torch.empty(size, dtype=BF16), "master": torch.empty(size, dtype=torch.int16)}
    state = torch.empty(size, dtype=moments), torch.empty(size, dtype=moments), torch.ones(())
    kept = residue.get(weights) if dtype == BF16 else None
    tensors = kernels.AdamWTensors(
        torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype), *state, kept, 0
    )
    kernels.adamw([tensors], kernels.AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.1, weights, 0), torch.ones(()))
    kernels.sum_of_squares([tensors.gradient])


def attention(heads, kv_heads, head_dim, value_dim=None, sinks=False, dtype=BF16, **options):
    q, k = (operand(TOKENS, count, head_dim, dtype=dtype) for count in (heads, kv_heads))
    v = operand(TOKENS, kv_heads, value_dim or head_dim, dtype=dtype)
    if "bounds" not in options:
        options["bounds"] = torch.empty(2, TOKENS, dtype=torch.int32)
    options["sinks"] = operand(heads, dtype=dtype) if sinks else None
    backward(kernels.attention(q, k, v, **options))


def chosen_keys(heads, head_dim, top_k):
    """Of a document whose scores fit registers, and of a longer one."""
    for tokens in (TOKENS, max(TOKENS, 1 << 16)):
        q, k = operand(tokens, heads, head_dim), operand(tokens, head_dim)
        kernels.choose_keys(q, k, torch.empty(tokens, heads), top_k, scale=1.0, longest=tokens)


def streams(width, count, iterations, dtype=BF16):
    """A connection to residual streams, and their sum at the end of a model."""
    for rows, factors in ((count * (count + 2), 3) if iterations else (2 * count, 2), (count, 1)):
        shapes = (TOKENS, count * width), (rows, count * width), (rows,), (factors,)
        x, *weights = (operand(*shape, dtype=dtype) for shape in shapes)
        found = weighted_streams(x, *weights, count=count, iterations=iterations, eps=1e-6, norm_eps=1e-6)
        backward(found[0] if factors == 1 else mixed_streams(x, *found))


def gated_streams(width, count, dtype=BF16):
    """A connection to residual streams with gates by channel."""
    x, logits, weights = (
        operand(TOKENS, size, dtype=dtype) for size in (count * width, count * width, count)
    )
    backward(added_to_streams(x, gated_mean(logits, x, count), weights))


def altup(width, count, dtype=BF16):
    """The prediction of one of several streams, and the correction of all."""
    x, change, own = (operand(TOKENS, n * width, dtype=dtype) for n in (count, 1, 1))
    weights, mixture = operand(TOKENS, count, dtype=dtype), operand(TOKENS, count, count, dtype=F32)
    backward(summed_streams(x, mixture[..., 0]), mixed_streams(x, change, weights, mixture, own))


def compressed_attention(heads, head_dim, window, rate, top_k=None, dtype=BF16):
    """Attention to a window and to compressed keys of one document, of which `top_k` are chosen, or all."""
    count = TOKENS // rate if rate else 0
    numbers, seen = torch.empty(count, dtype=torch.int64), torch.empty(TOKENS, 2, dtype=torch.int64)
    places = CompressedKeys([0, TOKENS], rate, numbers, numbers, numbers, seen[:, :1].contiguous(), seen)
    chosen = None
    if top_k is not None:
        index = operand(TOKENS, 64, 128), operand(count, 128), torch.empty(TOKENS, 64)
        chosen = choose_compressed(*index, places, top_k, scale=1.0)
    q, keys = operand(TOKENS, heads, head_dim, dtype=dtype), operand(TOKENS, head_dim, dtype=dtype)
    compressed, sinks = operand(count, head_dim, dtype=dtype), operand(heads)
    options = {"scale": 1.0, "window": window, "chosen": chosen}
    backward(attend_compressed(q, keys, compressed, sinks, places, **options))


CASES: dict[str, Callable[[], None]] = {
    "float8, 4096": lambda: float8(4096),
    "decoding, gpt-oss": lambda: decoding(5760, 2880),
    "decoding integers in groups": lambda: decoding_groups(4096, 4096),
    "ternary, BitNet 2B": lambda: ternary(2560, 13824),
    "ternary, 32768": lambda: ternary(32768, 4096),
    "norms, 2048": lambda: norms(2048),
    "norms, 4096": lambda: norms(4096),
    "norms, 8192": lambda: norms(8192),
    "norms, 16384": lambda: norms(16384),  # LLaMA 3.1 405B
    "norms, 5376": lambda: norms(5376),
    "norms in float32, 4096": lambda: norms(4096, dtype=F32),
    "norms in float32, 300": lambda: norms(300, dtype=F32),
    "norms in float32, 1": lambda: norms(1, dtype=F32),
    "norms, 20480": lambda: norms(20480),
    "norms, gemma, 3584": lambda: norms(3584, "gemma"),
    "layer norm, 4096": lambda: layer_norm(4096),
    "layer norm, 12288": lambda: layer_norm(12288),
    "layer norm in float32, 4096": lambda: layer_norm(4096, dtype=F32),
    "layer norm in float32, 5": lambda: layer_norm(5, dtype=F32),
    "rotary, LLaMA 8B": lambda: rotary(32, 8, 128),
    "rotary, Qwen 2.5 0.5B": lambda: rotary(14, 2, 64),
    "rotary, Phi 2": lambda: rotary(32, 32, 80, 32),
    "rotary, GLM 4 9B": lambda: rotary(32, 2, 128, 64, interleaved=True),
    "q/k norm, Qwen 3 8B": lambda: qk_norm(32, 8, 128),
    "q/k norm, Qwen 3 14B": lambda: qk_norm(40, 8, 128),
    "q/k norm, Gemma 3 12B": lambda: qk_norm(16, 8, 256, offset=1.0, cast="gemma"),
    "q/k norm, Gemma 3 27B": lambda: qk_norm(32, 16, 128, offset=1.0, cast="gemma"),
    "q/k norm, GLM 4.5": lambda: qk_norm(96, 8, 128, 64),
    "q/k norm, Hunyuan 7B": lambda: qk_norm(32, 8, 128, norm_first=False),
    "q/k norm, Llama 4": lambda: qk_norm(40, 8, 128, weights=False, norm_first=False, interleaved=True),
    "q/k norm, OLMo 2 7B": lambda: qk_norm(32, 32, 128, per_head=False, cast="float32"),
    "q/k norm, OLMo 2 13B": lambda: qk_norm(40, 40, 128, per_head=False, cast="float32"),
    "q/k norm, OLMo 2 32B": lambda: qk_norm(40, 8, 128, per_head=False, cast="float32"),
    "q/k norm, MiniMax M2": lambda: qk_norm(48, 8, 128, 64, per_head=False),
    "gated norm, Qwen 3 Next": lambda: gated_norm(4096, 128),
    "gated norm, Kimi Linear": lambda: gated_norm(4096, 128, activation="sigmoid", cast="float32"),
    "gated norm, Nemotron H": lambda: gated_norm(8192, 1024, gate_first=True),
    "gated norm, Granite 4": lambda: gated_norm(8192, 8192, gate_first=True),
    "short convolution, Qwen 3 Next": lambda: short_conv(8192, 4, "silu"),
    "short convolution, Mamba 2": lambda: short_conv(5376, 4, "silu", biased=True),
    "short convolution, LFM 2": lambda: gated_short_conv(2048, 3),
    "short convolution, LFM 3": lambda: gated_short_conv(2048, 7),
    "gated delta rule, Qwen 3 Next": lambda: gated_delta_rule(16, 32, 128, 128),
    "gated delta rule, OLMo hybrid": lambda: gated_delta_rule(30, 30, 96, 192),
    "gated delta rule in segments, Qwen 3 Next": lambda: gated_delta_rule(16, 32, 128, 128, SEGMENTS),
    "channel delta rule, Kimi Linear": lambda: channel_delta_rule(32, 128),
    "channel delta rule in segments, Kimi Linear": lambda: channel_delta_rule(32, 128, SEGMENTS),
    "channel delta rule, Ling 3": lambda: channel_delta_rule(32, 128, lower_bound=-5.0),
    "selective scan, Falcon Mamba 7B": lambda: selective_scan(8192, 16),
    "selective scan, Mamba 2.8B in float32": lambda: selective_scan(5120, 16, F32),
    "selective scan, states of 64": lambda: selective_scan(1024, 64),
    "RG-LRU, RecurrentGemma 9B": lambda: rg_lru(16, 256),
    "RG-LRU, RecurrentGemma 2B in float32": lambda: rg_lru(10, 256, F32),
    "SSD, Granite 4": lambda: ssd(128, 64, 1, 128),
    "SSD in segments, Granite 4": lambda: ssd(128, 64, 1, 128, SEGMENTS),
    "SSD, Nemotron H": lambda: ssd(128, 64, 8, 128),
    "SSD, Nemotron 3 Nano 4B": lambda: ssd(96, 80, 8, 128),
    "SSD, Falcon H1 34B": lambda: ssd(32, 128, 2, 256),
    "gated activations": lambda: gated(14336),
    "embedding": embedding,
    "softmax": softmax,
    "cross entropy": cross_entropy,
    "cross entropy, Gemma 2": lambda: cross_entropy(softcap=30.0),
    "cross entropy, smoothing and z-loss": lambda: cross_entropy(label_smoothing=0.1, z_loss=1e-4),
    "log-probabilities": log_probs,
    "log-probabilities, Gemma 2": lambda: log_probs(softcap=30.0),
    "divergences": divergences,
    "attention, LLaMA 8B": lambda: attention(32, 8, 128),
    "attention, BLOOM": lambda: attention(32, 32, 128, slopes=torch.empty(32)),
    "attention, a tree, LLaMA 8B": lambda: attention(32, 8, 128, bounds=ranges(4, 6)),
    "attention, Gemma 2 9B": lambda: attention(16, 8, 256, window=4096, softcap=50.0),
    "attention, DeepSeek V3": lambda: attention(128, 128, 192, 128),
    "attention to chosen keys, DeepSeek V3.2": lambda: attention(
        128, 128, 192, 128, chosen=torch.ones(TOKENS, 256, dtype=torch.int32)
    ),
    "attention to chosen blocks, MiniMax M3": lambda: attention(
        64, 4, 128, chosen=kernels.ChosenBlocks(torch.ones(TOKENS, 4, 1, dtype=torch.int32), 128)
    ),
    "chosen blocks, MiniMax M3": lambda: kernels.choose_blocks(
        operand(TOKENS, 4, 128), operand(TOKENS, 128), 16, size=128, local=1, longest=TOKENS
    ),
    "chosen keys, DeepSeek V3.2": lambda: chosen_keys(64, 128, 8),
    "streams, DeepSeek V4": lambda: streams(4096, 4, 20),
    "streams, Gemma 3n": lambda: altup(2048, 4),
    "streams that stay apart, Hunyuan 4": lambda: streams(2816, 4, 0),
    "streams, Qwen4": lambda: gated_streams(2048, 4),
    "attention to chosen compressed keys, DeepSeek V4": lambda: compressed_attention(64, 512, 128, 4, 512),
    "attention to compressed keys, DeepSeek V4": lambda: compressed_attention(64, 512, 128, 128),
    "attention to compressed keys in float32": lambda: compressed_attention(64, 512, 128, 128, dtype=F32),
    "attention, Gemma 4": lambda: attention(8, 2, 512),
    "attention, heads of 64": lambda: attention(32, 8, 64),
    "attention, heads of 80": lambda: attention(32, 32, 80),
    "attention, heads of 96": lambda: attention(32, 8, 96),
    "attention, SigLIP": lambda: attention(16, 16, 72, bounds=ranges(2, 2)),
    "attention, heads of 80, an encoder's": lambda: attention(16, 16, 80, bounds=ranges(2, 2)),
    "attention, Gemma 3 with images": lambda: attention(8, 4, 256, bounds=ranges(2, 2)),
    "attention, Molmo 2 with images": lambda: attention(32, 8, 128, bounds=ranges(2, 2, marked=True)),
    "attention in float32, heads of 64": lambda: attention(32, 8, 64, dtype=F32),
    "attention in float32, heads of 96": lambda: attention(32, 8, 96, dtype=F32),
    "attention in float32, heads of 256": lambda: attention(8, 4, 256, dtype=F32),
    "attention, gpt-oss 20B": lambda: attention(64, 8, 64, window=128, sinks=True),
    "AdamW, plain": lambda: optimizer("plain", BF16),
    "AdamW, stochastic": lambda: optimizer("stochastic", BF16),
    "AdamW, compensated": lambda: optimizer("compensated", BF16),
    "AdamW, master": lambda: optimizer("master", BF16),
    "AdamW, master, float32 moments": lambda: optimizer("master", F32),
    "AdamW, float32": lambda: optimizer("plain", F32, F32),
    "routing, Qwen 3 30B": lambda: routing(128, 8),
    "routing, DeepSeek V2": lambda: routing(
        160, 6, renormalize=False, num_groups=8, top_groups=3, group_score="max"
    ),
    "routing, DeepSeek V3": lambda: routing(256, 8, True, score="sigmoid", num_groups=8, top_groups=4),
    "routing, DeepSeek V4": lambda: routing(256, 6, True, score="sqrt_softplus"),
    "routing, A.X K2": lambda: routing(
        256, 8, True, score="sigmoid", num_groups=8, top_groups=4, group_score="top_2_else_0"
    ),
    "routing, Kolibri 1": lambda: routing(384, 6, True, score="sigmoid", correct_logits=True),
    "experts, Qwen 3 30B": lambda: experts(2048, 2048, 768, 128, 8),
    "experts in float8, Qwen 3 30B": lambda: float8_experts(16384, 2048, 768, 128, 8),
    "experts with paths of rank 16, Qwen 3 30B": lambda: experts(2048, 2048, 768, 128, 8, rank=16),
    "experts with paths of rank 128, gpt-oss 20B": lambda: experts(512, 2880, 2880, 32, 4, rank=128),
    "experts on two ranks, Qwen 3 30B": lambda: shared_experts(4096, 2048, 768, 64, 8),
    "experts, Mixtral 8x7B": lambda: experts(512, 4096, 14336, 8, 2),
    "experts, Qwen 3 Next 80B": lambda: experts(2048, 2048, 512, 512, 10),
    "experts, gpt-oss 20B": lambda: experts(2048, 2880, 2880, 32, 4, biases=True),
    "experts, Llama 4 Scout": lambda: experts(512, 5120, 8192, 16, 1, weighted="inputs"),
    "experts, Nemotron 3 Nano": lambda: experts(2048, 2688, 1856, 128, 6, activation="relu2"),
    "experts in float32, few rows": lambda: experts(64, 256, 128, 8, 2, F32),
    "experts in float32, many rows": lambda: experts(2048, 256, 128, 8, 2, F32),
}
