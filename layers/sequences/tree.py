"""Documents that continue others, so that a prompt is computed once for several answers.

    row       | prompt        | answer 1 | answer 2 | prompt        | answer 1 | ...
    parents     -1              0          0          -1              3
    positions   0 1 2 ... n-1   n n+1 ..   n n+1 ..   0 1 2 ... m-1   m m+1 ..

The tokens of an answer attend as if the row were only its prompt and this answer; the gradients of the prompt
are summed over its answers. Windows and chunks count positions. Images of a prompt are encoded once, and
their tokens may all attend to one another. A document predicts only its own tokens: for a prompt to predict
the first token of each answer, each answer begins with a copy of the prompt's last token, which the prompt
leaves out (liger_models/losses/shared_prompts.py).

A document may continue only the first k tokens of its parent, such as conversations that differ from some
turn on. `parents` is then [2, documents], with k in the second row:

    row       | conversation       | branch at k | branch at j <= k |
    parents     -1, 0                0, k          0, j
    positions   0 1 2 ... n-1        k k+1 ..      j j+1 ..
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.errors import DataError
from liger_models.kernels import KeyRanges, tree_ranges
from liger_models.kernels._copies import to_device
from liger_models.kernels.invariant.mode import is_batch_invariant
from liger_models.layers.sequences.part import Part
from liger_models.layers.specs import (
    AttentionSpec,
    CrossAttentionSpec,
    DifferentialAttentionSpec,
    LatentAttentionSpec,
    ModelSpec,
    RecurrentSpec,
    SharedAttentionSpec,
)


@dataclass(frozen=True, eq=False)
class Tree(Part):
    """The packed documents of a row, some of which continue others.

    Attributes:
        bounds: [n + 1], the boundaries of the documents.
        parents: [n], the number of the document that each continues, or -1.
        before: [n], how many tokens of its parent each document continues.
        device: the device of the tensors that it makes.
    """

    bounds: list[int]
    parents: list[int]
    before: list[int]
    device: torch.device

    @classmethod
    def of(cls, bounds: list[int], parents: Sequence[int] | Tensor, device: torch.device) -> Tree:
        """Build a tree from `parents`: the parent of each document, [n], or [2, n] with a second row, the
        number of the parent's tokens that the document continues.

        Raises:
            DataError: a document comes before its parent, or is not adjacent to it or to its other
                continuations; a parent has a parent; or a document continues more tokens than its parent
                has, or than the document before it continues.
        """
        given = (
            parents if isinstance(parents, Tensor) else torch.tensor(parents, dtype=torch.int64, device="cpu")
        )
        numbers: list[int] = (given if given.dim() == 1 else given[0]).tolist()
        _check(numbers, len(bounds) - 1)
        lengths = [end - first for first, end in itertools.pairwise(bounds)]
        before = [0 if parent < 0 else lengths[parent] for parent in numbers]
        if given.dim() == 2:
            shared: list[int] = given[1].tolist()
            _check_shared(numbers, shared, before)
            before = shared
        return cls(bounds, numbers, before, device)

    @property
    def longest(self) -> int:
        """The length of the longest document, with what it continues."""
        lengths = (end - first for first, end in itertools.pairwise(self.bounds))
        return max(map(sum, zip(lengths, self.before, strict=True)))

    def key_ranges(self, window: int | None, chunk: int | None, spans: Tensor | None = None) -> KeyRanges:
        """The ranges of visible keys (`kernels.tree_ranges`), made once for all layers that are alike."""
        longest = self._once("longest", lambda: self.longest)
        window, chunk = (None if limit is None or limit >= longest else limit for limit in (window, chunk))
        where = self.bounds, self.parents, self.device
        alike = window, chunk, spans is not None
        return self._once(alike, lambda: tree_ranges(*where, window, chunk, spans, self.before))

    def position_ids(self) -> Tensor:
        """[T]; positions of a document follow the last token that it continues."""
        first = [before - start for before, start in zip(self.before, self.bounds, strict=False)]
        lengths = [end - start for start, end in itertools.pairwise(self.bounds)]
        both = to_device(torch.tensor([first, lengths], device="cpu"), self.device)
        total = self.bounds[-1]
        return torch.arange(total, device=self.device) + both[0].repeat_interleave(both[1], output_size=total)

    def continued(self) -> Tensor:
        """The range of tokens that each token's document continues, [2, T]; 0 and 0 if it continues none."""
        ends = [
            (0, 0) if parent < 0 else (self.bounds[parent], self.bounds[parent] + before)
            for parent, before in zip(self.parents, self.before, strict=True)
        ]
        lengths = [end - first for first, end in itertools.pairwise(self.bounds)]
        table = to_device(torch.tensor([*zip(*ends, strict=True), lengths], device="cpu"), self.device)
        return table[:2].repeat_interleave(table[2], dim=1, output_size=self.bounds[-1])


def check_tree(spec: ModelSpec, vision_inputs: Any) -> None:
    """
    Raises:
        DataError: the model, or a call with its images, does not support documents that continue others.
    """
    if is_batch_invariant():
        raise DataError(
            "batch_invariant() does not support documents that continue others (shared prompts); pass "
            "separate sequences"
        )
    kinds = AttentionSpec | SharedAttentionSpec | LatentAttentionSpec | DifferentialAttentionSpec
    others = CrossAttentionSpec | RecurrentSpec
    for i, block in enumerate(spec.blocks):
        if unknown := [
            type(mixer).__name__ for mixer in block.mixers if not isinstance(mixer, kinds | others)
        ]:
            raise DataError(
                f"layer {i} mixes tokens by {unknown[0]}, which does not support documents that continue "
                "others: pass each answer with its prompt as a document of its own, without parents"
            )
        if block.ngrams is not None:
            raise DataError(
                f"layer {i} adds embeddings of n-grams, which documents that continue others do not "
                "support: pass each answer with its prompt as a document of its own, without parents"
            )
        if any(getattr(mixer, "slopes", None) for mixer in block.mixers):
            raise DataError(
                f"layer {i} weighs tokens by their distance in the batch (ALiBi), which is wrong for "
                "documents that continue others: pass each answer with its prompt as a document of its "
                "own, without parents"
            )
    if spec.is_bidirectional:
        raise DataError(
            "in this model all tokens of a document attend to one another, and none can continue another: "
            "pass each answer with its prompt as a document of its own, without parents"
        )
    spans = None if vision_inputs is None else getattr(spec.vision, "spans", None)
    if spans == "prefix" and (vision_inputs.pictures is not None or vision_inputs.kinds is not None):
        raise DataError(
            "in this model all tokens of a prompt attend to one another, including the last one, which "
            "the documents that continue it repeat: pass each answer with its prompt as a document of its "
            "own, without parents"
        )


def _check(parents: list[int], documents: int) -> None:
    if len(parents) != documents:
        raise DataError(f"parents has {len(parents)} entries, and cu_seqlens bounds {documents} documents")
    root = -1  # the last document that continues none: the only one that the next may continue
    for number, parent in enumerate(parents):
        if parent == -1:
            root = number
        elif parent != root:
            allowed = "-1, it continues none" if root < 0 else f"-1, it continues none, or {root}"
            raise DataError(
                f"parents says that document {number} continues document {parent}; expected {allowed}: the "
                "documents that continue another follow it directly, and none continues them"
            )


def _check_shared(parents: list[int], shared: list[int], most: list[int]) -> None:
    previous = -1  # the parent of the document before
    for number, (parent, taken) in enumerate(zip(parents, shared, strict=True)):
        limit = min(most[number], shared[number - 1]) if parent == previous else most[number]
        if not 0 <= taken <= limit:
            raise DataError(
                f"parents says that document {number} continues {taken} tokens of document {parent}; "
                f"expected 0 to {limit}: no more than that document has, in descending order"
            )
        previous = parent if parent >= 0 else -2
