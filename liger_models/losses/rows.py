"""Scores of tokens as scores of sequences, which preference losses are functions of.

Scores [batch, seq] are zero where there is no label, so that a sequence's log-probability is the sum of its
row. Packed documents become rows first. Losses are means: over what this process has (data parallelism then
makes the mean of the processes' means), or, given `num_items`, sums over that count. The mean over all of a
step, exact for uneven parts too, takes num_items = what the step has on all ranks / the number of ranks.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def rows_of_documents(scores: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Packed scores as rows: [1, T] or [1, T - 1] of n documents -> [n, longest], zero behind each's end.

    cu_seqlens [n + 1] holds the documents' bounds in the T tokens. A document's last place, which predicts
    nothing, stays: it is zero.

    Raises:
        ValueError: shapes that do not fit.
    """
    bounds = cu_seqlens.tolist()
    if scores.dim() != 2 or len(scores) != 1 or scores.shape[1] not in (bounds[-1], bounds[-1] - 1):
        raise ValueError(
            f"scores have shape {list(scores.shape)}; expected [1, {bounds[-1]}], as many as the documents "
            f"have tokens, or one less"
        )
    documents = scores[0].split_with_sizes(_lengths(bounds, scores.shape[1]))
    return torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)


def _lengths(bounds: list[int], total: int) -> list[int]:
    ends = [min(bound, total) for bound in bounds]
    return [end - start for start, end in itertools.pairwise(ends)]


def sequence_log_probs(
    log_probs: Tensor, counted: Tensor | None = None, desensitized: float | None = None
) -> Tensor:
    """The log-probability of each sequence, [batch, seq] -> [batch].

    counted [batch, seq] says which places have a label; only `desensitized` needs it. With that number, a, in
    [0, 1], and rows [chosen, rejected] of 2 n: of a pair's longer sequence, what is beyond the length of the
    shorter one counts a times (LD-DPO: Liu et al., 2024, arXiv:2409.06411).

    Raises:
        ValueError: a number outside [0, 1], an odd number of rows, or no `counted`.
    """
    if desensitized is None:
        return log_probs.sum(1)
    if not 0.0 <= desensitized <= 1.0 or len(log_probs) % 2 or counted is None:
        raise ValueError(
            f"found desensitized={desensitized}, {len(log_probs)} rows and counted "
            f"{'missing' if counted is None else 'given'}; expected a number from 0 to 1, rows [chosen, "
            "rejected] of as many each, and which places have a label"
        )
    place = counted.cumsum(1)
    shorter = place[:, -1].unflatten(0, (2, -1)).amin(0).repeat(2)
    return log_probs.where(place <= shorter.unsqueeze(1), desensitized * log_probs).sum(1)


def mean_of(losses: Tensor, num_items: Tensor | int | float | None) -> Tensor:
    """The mean of losses [N], or their sum over `num_items`."""
    return losses.mean() if num_items is None else losses.sum() / num_items
