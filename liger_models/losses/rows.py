"""Conversion of token scores to sequence scores, the inputs of preference losses.

    scores = model.score(input_ids, labels, attention_mask=mask)                  # rows [chosen, rejected]
    chosen, rejected = sequence_log_probs(scores.log_probs).chunk(2)
    loss = dpo_loss(chosen, rejected, *reference, beta=0.1).loss

All inputs are float32. Reference scores, and other inputs that are not trained, have no gradient.

Scores [batch, seq] are zero where there is no label, so a sequence's log-probability is its row's sum. Packed
documents are converted to rows first. Losses are means over this process's items (data parallelism then
averages over processes), or, with `num_items`, sums divided by that count. For the exact mean over a step
with uneven parts, pass num_items = the step's items on all ranks / the number of ranks.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def rows_of_documents(scores: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Packed scores as rows: [1, T] or [1, T - 1] of n documents -> [n, longest], zero past each end.

    cu_seqlens [n + 1] holds the documents' bounds in the T tokens. A document's last position, which predicts
    nothing, is kept as zero.

    Raises:
        ValueError: incompatible shapes.
    """
    bounds = cu_seqlens.tolist()
    if scores.dim() != 2 or len(scores) != 1 or scores.shape[1] not in (bounds[-1], bounds[-1] - 1):
        raise ValueError(
            f"scores have shape {list(scores.shape)}; expected [1, {bounds[-1]}], the documents' number of "
            f"tokens, or one less"
        )
    documents = scores[0].split_with_sizes(_lengths(bounds, scores.shape[1]))
    return torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)


def _lengths(bounds: list[int], total: int) -> list[int]:
    ends = [min(bound, total) for bound in bounds]
    return [end - start for start, end in itertools.pairwise(ends)]


def sequence_log_probs(
    log_probs: Tensor, counted: Tensor | None = None, desensitized: float | None = None
) -> Tensor:
    """Log-probability of each sequence, [batch, seq] -> [batch].

    counted [batch, seq] marks positions with a label; only `desensitized` needs it. `desensitized`, a number
    in [0, 1], requires rows [chosen, rejected] of 2 n: in a pair's longer sequence, tokens past the length of
    the shorter one are weighted by it (LD-DPO: Liu et al., 2024, arXiv:2409.06411).

    Raises:
        ValueError: a number outside [0, 1], an odd number of rows, or no `counted`.
    """
    if desensitized is None:
        return log_probs.sum(1)
    if not 0.0 <= desensitized <= 1.0 or len(log_probs) % 2 or counted is None:
        raise ValueError(
            f"found desensitized={desensitized}, {len(log_probs)} rows and counted "
            f"{'missing' if counted is None else 'given'}; expected a number from 0 to 1, as many chosen as "
            "rejected rows, and counted"
        )
    place = counted.cumsum(1)
    shorter = place[:, -1].unflatten(0, (2, -1)).amin(0).repeat(2)
    return log_probs.where(place <= shorter.unsqueeze(1), desensitized * log_probs).sum(1)


def check_sequences(**values: Tensor | None) -> None:
    """Check that all values are per sequence, since broadcasting would silently mix others.

    Raises:
        ValueError: they are not all [N].
    """
    shapes = {name: list(value.shape) for name, value in values.items() if value is not None}
    if len({*map(tuple, shapes.values())}) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"found {found}; expected one number per sequence, [N] each: for token scores, use "
            "`sequence_log_probs`; for a classifier's logits [N, 1], `logits[:, 0]`"
        )


def check_tokens(log_probs: Tensor, **others: Tensor | None) -> None:
    """Check values per token, [N, seq]; some arguments may also be per sequence, [N] or [N, 1].

    Raises:
        ValueError: incompatible shapes.
    """
    shape = tuple(log_probs.shape)
    fit = {"advantages": (shape, shape[:1]), "sampler_ratio": (shape, (*shape[:1], 1))}
    fit["kept"] = fit["sampler_ratio"]
    for name, other in others.items():
        allowed = fit.get(name, (shape,))
        if len(shape) != 2 or (other is not None and tuple(other.shape) not in allowed):
            found = None if other is None else list(other.shape)
            expected = " or ".join(str(list(one)) for one in allowed)
            raise ValueError(
                f"found scores {list(shape)} and {name} {found}; expected token scores, [N, seq], and "
                f"{name} {expected}"
            )


def mean_of(losses: Tensor, num_items: Tensor | int | float | None) -> Tensor:
    """Mean of losses [N], or their sum divided by `num_items`.

    Raises:
        ValueError: the mean of no losses.
    """
    if num_items is None and not len(losses):
        raise ValueError("found no sequence to average over; expected at least one, or num_items")
    return losses.mean() if num_items is None else losses.sum() / num_items
