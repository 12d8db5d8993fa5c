"""Several answers to one prompt, computing the prompt's hidden states only once.

    batch = shared_prompts([(prompt, [answer, answer]), ...], by_rank=True)
    scores = model.score(**batch)
    rows = batch.rows(scores.log_probs)          # [answers, longest]: rows [chosen, rejected]
    chosen, rejected = sequence_log_probs(rows).chunk(2)

A prompt x and its answers y_1 .. y_n are one row of documents; all but the first continue the first
(layers/sequences/tree.py):

    x_1 .. x_(m-1) | x_m y_1 | x_m y_2 | ...        m - 1 + n + sum |y_i| tokens, not n m + sum |y_i|

log p(y_ij | x, y_i1 .. y_i(j-1)) is thus predicted by the token before y_ij, as in separate sequences, and
scores and gradients equal those of the sequences (x, y_i), summed over the answers for the prompt's tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from liger_models.layers.sequences.documents import IGNORE_INDEX


def shared_prompts(
    items: Iterable[tuple[Sequence[int] | Tensor, Sequence[Sequence[int] | Tensor]]], by_rank: bool = False
) -> SharedPrompts:
    """One batch of prompts and their answers.

    Args:
        items: (prompt, answers), token ids each; include an answer's end token if the model should learn to
            stop there. Answers may be empty.
        by_rank: order of the answers' rows: the first of every prompt, then the second of every prompt and so
            on, as preference losses expect ([chosen, rejected]). Default: the given order, all answers to a
            prompt together, as for groups of samples.

    Raises:
        ValueError: no item, tensors that are not [length], a prompt without a token or without an answer, or,
            with `by_rank`, prompts with different numbers of answers.
    """
    given = [(_ids(prompt), [_ids(answer) for answer in answers]) for prompt, answers in items]
    if not given or not all(prompt and answers for prompt, answers in given):
        raise ValueError("expected prompts of at least one token, each with at least one answer")
    counts = sorted({len(answers) for _, answers in given})
    if by_rank and len(counts) > 1:
        raise ValueError(
            f"by_rank: prompts have from {counts[0]} to {counts[-1]} answers; expected the same number each"
        )
    documents: list[list[int]] = []
    labels, parents, answered = [], [], []
    for prompt, answers in given:
        documents.append(prompt[:-1])
        labels += [IGNORE_INDEX] * (len(prompt) - 1)
        parents += [-1] + [len(documents) - 1] * len(answers)
        for answer in answers:
            answered.append(len(documents))
            documents.append(prompt[-1:] + answer)
            labels += [IGNORE_INDEX, *answer]
    if by_rank:
        answered = [answered[i] for rank in range(counts[0]) for i in range(rank, len(answered), counts[0])]
    bounds = [0, *itertools.accumulate(map(len, documents))]
    inputs = {
        "input_ids": torch.tensor([[*itertools.chain(*documents)]]),
        "labels": torch.tensor([labels]),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "parents": torch.tensor(parents, dtype=torch.int32),
    }
    return SharedPrompts(inputs, [(bounds[i], len(documents[i]) - 1) for i in answered])


class SharedPrompts(Mapping[str, Tensor]):
    """Keyword arguments of `model.score(**batch)` and `model(**batch)`: input_ids and labels [1, T],
    cu_seqlens and parents, which may stay on the CPU.

    Attributes:
        answers: for each row of `rows`, the token before its first one, and its length.
        counted: [answers, longest] bool, marks the positions of `rows` with a label.
    """

    def __init__(self, inputs: Mapping[str, Tensor], answers: Sequence[tuple[int, int]]):
        self._inputs, self.answers = dict(inputs), list(answers)
        device = self._inputs["input_ids"].device
        starts, lengths = torch.tensor(self.answers, device="cpu").unbind(1)
        place = torch.arange(int(lengths.max()), device="cpu")
        counted = place < lengths[:, None]
        # The score of an answer's first token is at the start of its document.
        self._places = torch.where(counted, starts[:, None] + place, 0).to(device)
        self.counted = counted.to(device)

    def to(self, device: torch.device | str) -> SharedPrompts:
        """Copy with ids and labels on that device; boundaries stay on the CPU, where they are read."""
        moved = {name: self._inputs[name].to(device) for name in ("input_ids", "labels")}
        return SharedPrompts(self._inputs | moved, self.answers)

    def rows(self, scores: Tensor) -> Tensor:
        """Answers' rows of scores [1, T - 1], or [1, T] for labels that were already shifted: [answers,
        longest], zero past each end.
        """
        total = self._inputs["input_ids"].shape[1]
        if scores.dim() != 2 or len(scores) != 1 or scores.shape[1] not in (total, total - 1):
            raise ValueError(f"found scores {list(scores.shape)}; expected [1, {total - 1}] or [1, {total}]")
        return scores[0][self._places].where(self.counted, 0)

    def coefficients(self, rows: Tensor) -> Tensor:
        """`coefficients` for `model.score`, [1, T - 1], from rows [answers, longest]."""
        if rows.shape != self.counted.shape:
            raise ValueError(f"found rows {list(rows.shape)}; expected {list(self.counted.shape)}")
        places, total = self._places.flatten(), self._inputs["input_ids"].shape[1]
        return rows.new_zeros(total - 1).index_add(0, places, rows.where(self.counted, 0).flatten())[None]

    def __getitem__(self, name: str) -> Tensor:
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


def _ids(tokens: Sequence[int] | Tensor) -> list[int]:
    if isinstance(tokens, Tensor) and tokens.dim() != 1:
        raise ValueError(
            f"found tokens {list(tokens.shape)}; expected the ids of one prompt or answer, [length]"
        )
    return tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
