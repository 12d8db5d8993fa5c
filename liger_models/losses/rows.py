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


def check_sequences(**values: Tensor | None) -> None:
    """Check numbers of sequences, which broadcasting would pair with those of others.

    Raises:
        ValueError: they are not all [N].
    """
    shapes = {name: list(value.shape) for name, value in values.items() if value is not None}
    if len({*map(tuple, shapes.values())}) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"found {found}; expected one number a sequence, [N] each: of scores of tokens, "
            "`sequence_log_probs`; of a classifier's logits [N, 1], `logits[:, 0]`"
        )


def check_tokens(log_probs: Tensor, **others: Tensor | None) -> None:
    """Check numbers of tokens [N, seq], or of others what is named so, [N] or [N, 1] for one a sequence.

    Raises:
        ValueError: a shape that does not fit.
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
                f"found scores {list(shape)} and {name} {found}; expected scores of tokens, [N, seq], and "
                f"{name} {expected}"
            )


def mean_of(losses: Tensor, num_items: Tensor | int | float | None) -> Tensor:
    """The mean of losses [N], or their sum over `num_items`.

    Raises:
        ValueError: the mean of none.
    """
    if num_items is None and not len(losses):
        raise ValueError("found no sequence, of which there is no mean; expected one at least, or num_items")
    return losses.mean() if num_items is None else losses.sum() / num_items
