"""Run every operation forward and backward at small odd sizes; test_memory.py does so under a memory checker.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --padding 1024 python tests/kernels/memory_check.py

Without its cache, PyTorch gives each tensor its own allocation, so the checker detects accesses outside of
it.
"""

import functools
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from kernel_operations import EVERYTHING
from operation_runs import make_inputs, run_with_gradients

from liger_models.kernels import (
    AdamWSettings,
    AdamWTensors,
    adamw,
    attention,
    channel_delta_rule,
    choose_blocks,
    choose_keys,
    decode_codes,
    document_bounds,
    embedding,
    gated_delta_rule,
    gated_rms_norm,
    moe_experts,
    quantize,
    round_inputs,
    round_weights,
    ssd,
    sum_of_squares,
)
from liger_models.kernels.attention.choose_compressed import choose_compressed
from liger_models.kernels.attention.compressed_keys import compressed_attention, compressed_keys
from liger_models.kernels.experts._expert_float8 import stack_by_columns
from liger_models.kernels.float8.eight_bits import gated_eight_bits, gated_from_eight_bits
from liger_models.kernels.float8.quantize import turned
from liger_models.kernels.recurrent import _chunk_table
from liger_models.kernels.streams.gated_streams import added_to_streams, gated_mean
from liger_models.kernels.streams.streams import mixed_streams, summed_streams, weighted_streams

# Rows that do not fill a tile, with a width that no block size divides.
SHAPE = (5, 37)

# Too wide for registers: other kernels, or other loops of the same kernels, run.
WIDE_SHAPE = (3, 20_001)
WIDE = ("add_rms_norm", "layer_norm", "swiglu", "softmax", "cross_entropy", "kl_div")


def run_everything(device: str) -> None:
    for name, op in EVERYTHING.items():
        for rows, width in [SHAPE, WIDE_SHAPE] if name in WIDE else [SHAPE]:
            run_with_gradients(op.run, make_inputs(op, rows, width, torch.bfloat16, device))
    pass_a_state(device, 68, 72)
    pass_a_state(device, 64, 64)  # tiles of the copy engine
    with mock.patch.object(_chunk_table, "SEGMENT", 64):  # so that the last document has two segments
        pass_a_state(device, 12, 20)
    take_a_step(device)
    quantize(torch.randn(SHAPE, device=device), by_columns=True)
    keep_eight_bits(device)
    attend_to_chosen_keys(device)
    attend_to_compressed_keys(device)
    mix_streams(device)
    weight = torch.randn(9, 37, device=device).requires_grad_()
    embedding(torch.randint(9, (67,), device=device), weight).sum().backward()
    normalise_wide_groups(device)
    decode_bits(device)
    for width in (37, 20_001):
        round_inputs(torch.randn(5, width, device=device, dtype=torch.bfloat16))
    round_weights(torch.randn(5, 37, device=device), (3, 2))
    exchange_rows(device)


def pass_a_state(device: str, key: int, value: int) -> None:
    """Run the rules with states, on documents that fill no chunk and heads that fill no tile."""
    documents = torch.tensor([0, 1, 67], device=device)
    values = [(67, 2, value)]
    for rule, shapes in (
        (gated_delta_rule, [(67, 1, key)] * 2 + values + [(67, 2)] * 2 + [(2,)] * 2),
        (channel_delta_rule, [(67, 2, key)] * 2 + values + [(67, 2, key), (67, 2), (2,), (2, key)]),
        (ssd, [*values, (67, 2)] + [(67, 1, key)] * 2 + [(2,)] * 3),
    ):
        inputs = [
            torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes
        ]
        run_with_gradients(functools.partial(rule, cu_seqlens=documents), inputs)


def decode_bits(device: str) -> None:
    """Decode matrices whose last blocks and last bytes are cut off."""
    codes = torch.randint(0, 256, (3, 13, 17), dtype=torch.uint8, device=device)
    scale, table = torch.rand(3, 13, 3, device=device), torch.randn(1, 16, device=device)
    decode_codes(codes, scale, (13, 33), (1, 16), "low half first", torch.bfloat16, table=table)


def keep_eight_bits(device: str) -> None:
    """Run the gated product that keeps 8 bits, and turn copies by rows, stacks by columns, at
    widths that fill no tile.
    """
    gate_up = torch.randn(5, 2 * 80, device=device, dtype=torch.bfloat16).requires_grad_()
    product, codes, scales = gated_eight_bits(gate_up, "silu", float8=True, float8_gradient=True)
    product.backward(torch.randn_like(product))
    gated_from_eight_bits(codes, scales, "silu", torch.bfloat16, float8=True)
    stack_by_columns(torch.randn(3, 21, 48, device=device, dtype=torch.bfloat16))
    turned(quantize(torch.randn(21, 48, device=device, dtype=torch.bfloat16))[0])


def attend_to_chosen_keys(device: str) -> None:
    """Choose keys and attend to them, in documents that fill no tile and no word."""
    bounds = document_bounds(torch.tensor([0, 1, 67], device=device), 67)
    q, k, v = (torch.randn(67, 2, size, device=device).requires_grad_() for size in (12, 12, 20))
    weights = torch.randn(67, 2, device=device)
    chosen = choose_keys(q, k[:, 0], weights, 5, scale=1.0, longest=66, bounds=bounds)
    attention(q, k, v, bounds=bounds, chosen=chosen).sum().backward()
    blocks = choose_blocks(q, k[:, 0], 3, size=7, local=1, longest=66, bounds=bounds)
    attention(q, k, v, bounds=bounds, chosen=blocks).sum().backward()


def attend_to_compressed_keys(device: str) -> None:
    """Attend to a window and to chosen compressed keys, in documents that fill no tile."""
    places = compressed_keys((0, 1, 67), 4, torch.device(device))
    shapes = (67, 3, 20), (67, 20), (len(places.first), 20), (3,)
    operands = (torch.randn(shape, device=device).requires_grad_() for shape in shapes)
    index = (torch.randn(shape, device=device) for shape in ((67, 2, 16), (len(places.first), 16), (67, 2)))
    chosen = choose_compressed(*index, places, 5, scale=1.0)
    compressed_attention(*operands, places, scale=1.0, window=9, chosen=chosen).sum().backward()


def mix_streams(device: str) -> None:
    """Weigh, sum and mix three residual streams of a width that fills no tile."""
    shapes = (5, 3 * 37), (15, 3 * 37), (15,), (3,)
    streams, *weights = (torch.randn(shape, device=device).requires_grad_() for shape in shapes)
    summed, *mixing = weighted_streams(streams, *weights, count=3, iterations=2, eps=1e-2, norm_eps=1e-3)
    logits, shares = (torch.randn(shape, device=device).requires_grad_() for shape in ((5, 3 * 37), (5, 3)))
    added_to_streams(streams, gated_mean(logits, streams, 3), shares).sum().backward()
    mixed = mixed_streams(streams, summed, *mixing, summed)
    (mixed.sum() + summed_streams(streams, mixing[0]).sum()).backward()


def normalise_wide_groups(device: str) -> None:
    """Take the gradients of groups that are too wide for registers."""
    x, gate = (torch.randn(3, 4099, device=device).requires_grad_() for _ in range(2))
    weight = torch.randn(4099, device=device).requires_grad_()
    gated_rms_norm(x, gate, weight, 1e-5, group_size=4099).sum().backward()


def exchange_rows(device: str) -> None:
    """Run the experts' products in two launches, one for the first tokens, and in two windows."""
    x, gate_up, down = (
        torch.randn(shape, device=device).requires_grad_() for shape in ((67, 12), (3, 40, 12), (3, 12, 20))
    )
    experts = torch.randint(3, (67, 2), dtype=torch.int32, device=device)
    exchange = SimpleNamespace(
        own=29,
        ranks=2,
        overlaps=False,
        divisor=2,
        num_rows=experts.numel,
        arrive=lambda: None,
        leave=lambda rows: None,
        own_rows=lambda: torch.zeros(29, 12, device=device),
        fill=lambda: None,
        parts=lambda: torch.zeros(1, 29, 12, device=device),
        leave_weights=lambda dweights: None,
    )
    weights = torch.rand(67, 2, device=device)
    moe_experts(x, weights, experts, gate_up, down, exchange=exchange).sum().backward()


def take_a_step(device: str) -> None:
    """Run an optimizer step for every way to keep the rounding error of weights."""
    size = 5003  # more than a block of random bits, divisible by no block size
    weight, gradient, first, second = torch.randn(4, size, device=device, dtype=torch.bfloat16)
    residue = torch.zeros(size, device=device, dtype=torch.int16)
    step = torch.ones((), device=device)
    settings = AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, "master", 7)
    adamw([AdamWTensors(weight, gradient, first, second.square(), step, residue, 0)], settings)
    sum_of_squares([gradient])


if __name__ == "__main__":
    run_everything(sys.argv[1] if len(sys.argv) > 1 else "cuda")
