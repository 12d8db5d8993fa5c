"""Cross entropy of logits and from hidden states, and log-probabilities from hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations.core import (
    Case,
    Cost,
    Provider,
    Tensors,
    as_tuple,
    liger,
    normal,
    operation,
    standard_case,
    wide,
)
from benchmarks.trl import trl_module
from liger_models import kernels

# Standard deviation of the logits. If it were smaller, the gradient would be little more than -1 at the
# labels, and errors of the softmax would not show.
LOGIT_SCALE = 3.0
HEAD = "tokens x hidden x vocabulary"
HEAD_SHAPES = {"shapes": ((8192, 4096, 128256), (32768, 4096, 128256)), "tiny": (64, 32, 1000)}
ONE_HEAD = HEAD_SHAPES | {"shapes": HEAD_SHAPES["shapes"][:1]}


def head(shape, dtype, device) -> tuple[Tensor, Tensor]:
    """Hidden states [T, H] and a weight [V, H] that give logits of scale `LOGIT_SCALE`."""
    tokens, hidden, vocab = shape
    x = normal((tokens, hidden), dtype, device)
    return x, normal((vocab, hidden), dtype, device, LOGIT_SCALE * hidden**-0.5)


def truth_in_chunks(
    token_outputs: Callable[..., Tensor | Tensors],
    rows: Tensor,
    shared: Tensors,
    dtype: torch.dtype,
    upstream: Tensors | None = None,
) -> Tensors:
    """The true outputs, and their gradients for `rows` and `shared`, in `dtype`, 1,024 rows at a time.

    token_outputs(part, rows[part], *shared) returns one or several numbers per row. Without `upstream` the
    output is their sum: a loss.
    """
    shared = tuple(t.detach().to(dtype).requires_grad_() for t in shared)
    outputs: list[Tensors] = []
    drows = torch.empty_like(rows, dtype=torch.float32)
    dshared = [torch.zeros_like(t) for t in shared]
    for part in torch.arange(len(rows), device=rows.device).split(1024):
        chunk = rows[part].detach().to(dtype).requires_grad_()
        found = as_tuple(token_outputs(part, chunk, *shared))
        if upstream is None:
            found = (found[0].sum(),)
        gradients = None if upstream is None else [g[part].to(dtype) for g in upstream]
        dchunk, *dparts = torch.autograd.grad(found, (chunk, *shared), gradients)
        outputs.append(tuple(t.detach() for t in found))
        drows[part] = dchunk.float()
        for total, d in zip(dshared, dparts, strict=True):
            total += d
    join = torch.cat if upstream is not None else lambda parts: torch.stack(parts).sum()
    joined = [join(parts) for parts in zip(*outputs, strict=True)]
    return tuple(t.float() for t in (*joined, drows, *dshared))


@operation("cross_entropy", "tokens x vocabulary", ((8192, 128256),), tiny=(64, 1000), small=(512, 128256))
def _cross_entropy(shape, dtype, device):
    logits = normal(shape, dtype, device, scale=LOGIT_SCALE)
    labels = torch.randint(shape[1], shape[:1], device=device)

    def token_losses(part, logits):
        return F.cross_entropy(logits, labels[part], reduction="none") / len(labels)

    return standard_case(
        (logits,),
        (torch.ones((), device=device),),
        ours=lambda logits: kernels.cross_entropy(logits, labels),
        liger=liger("LigerCrossEntropyFunction", lambda apply, logits: apply(logits, labels, None)[0]),
        eager=lambda logits: F.cross_entropy(wide(logits), labels),
        training=Cost(3 * logits.nbytes),  # the logits in, the logits in again, their gradient out
        truth=lambda: truth_in_chunks(token_losses, logits, (), torch.float64),
    )


@operation("linear_cross_entropy_75_ignored", HEAD, **ONE_HEAD, ignored=0.75)
@operation("linear_cross_entropy", HEAD, **HEAD_SHAPES)
def _linear_cross_entropy(shape, dtype, device, ignored=0.0):
    tokens, hidden, vocab = shape
    x, weight = head(shape, dtype, device)
    labels = torch.randint(vocab, (tokens,), device=device)
    labels[torch.randperm(tokens, device=device)[: int(ignored * tokens)]] = -100
    valid = tokens - int(ignored * tokens)

    def token_losses(part, x, weight):
        return F.cross_entropy(F.linear(x, weight), labels[part], reduction="none") / valid

    return standard_case(
        (x, weight),
        (torch.ones((), device=device),),
        ours=lambda x, weight: kernels.linear_cross_entropy(x, weight, labels, num_valid=valid),
        liger=liger(
            "LigerFusedLinearCrossEntropyFunction", lambda apply, x, weight: apply(x, weight, labels)[0]
        ),
        eager=lambda x, weight: F.cross_entropy(wide(F.linear(x, weight)), labels),
        training=Cost(flops=6 * valid * hidden * vocab),  # three products: logits, dx, dweight
        truth=lambda: truth_in_chunks(token_losses, x, (weight,), torch.float32),
    )


@operation("linear_log_probs", HEAD, **ONE_HEAD, providers=("ours", "TRL", "torch.compile", "eager"))
def _linear_log_probs(shape, dtype, device) -> Case:
    """The log-probability of a token and the entropy of its distribution, both with gradients."""
    tokens, hidden, vocab = shape
    x, weight = head(shape, dtype, device)
    labels = torch.randint(vocab, (tokens,), device=device)
    upstream = tuple(normal((tokens,), torch.float32, device) for _ in range(2))

    def of_logits(logits, labels):
        log_p = wide(logits).log_softmax(-1)
        return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    def trl() -> Provider:
        """TRL's default head: tiles of 4,096 tokens and 32,768 columns, with all logits computed twice."""
        apply = trl_module("kernels.chunked_logprob").ChunkedLogProbFunction.apply
        options = (None, labels, 1.0, 32_768, None, 1.0, ("log_probs", "entropy"))
        return Provider(lambda x, weight: apply(x, weight, *options)[:2])

    case = standard_case(
        (x, weight),
        upstream,
        ours=lambda x, weight: kernels.linear_log_probs(x, weight, labels, entropy=True, num_valid=tokens)[
            :2
        ],
        liger=None,
        eager=lambda x, weight: of_logits(F.linear(x, weight), labels),
        # Three products; with more tokens than a chunk, ours computes logits twice: at most 75% then.
        training=Cost(flops=6 * tokens * hidden * vocab),
        truth=lambda: truth_in_chunks(
            lambda part, x, weight: of_logits(F.linear(x, weight), labels[part]),
            x,
            (weight,),
            torch.float32,
            upstream,
        ),
    )
    case.providers["TRL"] = trl
    return case


@operation("linear_log_probs_weighted", HEAD, **ONE_HEAD)
def _weighted_sum(shape, dtype, device):
    """A weighted sum of log-probabilities: a policy gradient on fresh samples."""
    tokens, hidden, vocab = shape
    x, weight = head(shape, dtype, device)
    labels = torch.randint(vocab, (tokens,), device=device)
    advantages = normal((tokens,), torch.float32, device)

    def token_scores(part, x, weight):
        log_p = wide(F.linear(x, weight)).log_softmax(-1)
        return advantages[part] * log_p.gather(1, labels[part, None])[:, 0]

    return standard_case(
        (x, weight),
        (torch.ones((), device=device),),
        ours=lambda x, weight: (
            kernels.linear_log_probs(
                x, weight, labels, coefficients=advantages, num_valid=tokens
            ).weighted_sum
        ),
        liger=None,
        eager=lambda x, weight: token_scores(slice(None), x, weight).sum(),
        training=Cost(flops=6 * tokens * hidden * vocab),  # three products: logits, dx, dweight
        truth=lambda: truth_in_chunks(token_scores, x, (weight,), torch.float32),
    )
