"""Operations on operands that fill most of the largest GPUs, 288 GB, on the meta device; check_offsets.py
runs them. Import it after `imitate`.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch

import liger_models.kernels as kernels
from benchmarks.compiled import cases
from benchmarks.compiled.cases import BF16, backward, operand

# Rows of 4096 elements in 16 bits take 128 GiB. There are fewer tokens, and still more than 2^31 elements,
# for operations on many slices of rows, one after another, and where a kernel loads numbers of chunks or
# tiles and multiplies them by their sizes in 32 bits: index_ranges.py takes them for numbers of tokens.
TOKENS = 1 << 24
FEWER = {
    **dict.fromkeys(("entropy", "log-probabilities", "divergences", "chosen"), 1 << 17),
    "delta rule": (1 << 20) - (1 << 15),  # times 32 heads of 128
    "experts": 1 << 20,
}


def tokens_of(case: str) -> int:
    return min((tokens for word, tokens in FEWER.items() if word in case), default=TOKENS)


def routing() -> None:
    for groups in ({}, {"num_groups": 8, "top_groups": 4}):
        backward(kernels.route(operand(cases.TOKENS, 512), 8, **groups)[0])


def logits(rows: int) -> None:
    """Losses of logits that the caller made, and of a head of 2^33 numbers, whose gradient is scaled."""
    labels, vocab = torch.empty(rows, dtype=torch.int64), 1 << 18
    backward(kernels.log_probs(operand(rows, vocab), labels, entropy=True)[0])
    backward(kernels.cross_entropy(operand(rows, vocab), labels))
    backward(kernels.kl_div(operand(rows, vocab), operand(rows, vocab).detach()))
    head, few = operand(1 << 20, 8192), labels[:4096]
    backward(2 * kernels.linear_cross_entropy(operand(4096, 8192), head, few, num_valid=4096))


def divided_experts(tokens: int) -> None:
    """Experts of two ranks."""
    chosen = torch.empty(tokens, 8, dtype=torch.int32)
    given = {"own": 4 * tokens, "ranks": 2, "overlaps": False, "divisor": 2, "num_rows": lambda: 4 * tokens}
    waits = {"arrive": lambda: None, "leave": lambda rows: None, "leave_weights": lambda dweights: None}
    rows = {"own_rows": lambda: operand(tokens, 7168).detach(), "fill": lambda: None}
    rows["parts"] = lambda: operand(1, tokens, 7168).detach()
    stacks = operand(64, 2 * 2048, 7168), operand(64, 7168, 2048)
    x, weights, exchange = (
        operand(tokens, 7168),
        torch.empty(tokens, 8),
        SimpleNamespace(**given, **waits, **rows),
    )
    backward(kernels.moe_experts(x, weights, chosen, *stacks, exchange=exchange))


DEEPSEEK = 1 << 20, 7168, 2048, 256, 8  # tokens, hidden and intermediate size, experts, and those of a token

CASES: dict[str, Callable[[], None]] = {
    "routing": routing,
    "logits": lambda: logits(1 << 18),
    "experts of two ranks": lambda: divided_experts(1 << 20),
    "experts of DeepSeek V3": lambda: cases.experts(*DEEPSEEK),
    "experts with few rows": lambda: cases.experts(1 << 11, *DEEPSEEK[1:]),
    "experts with weighted inputs": lambda: cases.experts(*DEEPSEEK, weighted="inputs"),
    "experts with biases": lambda: cases.experts(*DEEPSEEK, biases=True),
    "experts with paths": lambda: cases.experts(*DEEPSEEK, rank=64),
    "experts in float8": lambda: cases.float8_experts(*DEEPSEEK),
    "decoding of 2^34 numbers": lambda: cases.decoding(1 << 18, 1 << 16),
    "embedding of 2^33 numbers": lambda: cases.embedding(1 << 20, 8192),
    "AdamW of 2^36 numbers": lambda: cases.optimizer("master", BF16, size=1 << 36),
    **cases.CASES,
}
