"""Examples that begin alike as one document, in which that beginning stands once.

    document    last example ............ | branch a ...      | branch b ...
    tokens      t_0 t_1 ............. t_n | t_k a_1 a_2 ...   | t_j b_1 ...

A branch at k is the example t_0 .. t_(k-1) t_k a_1 a_2 ...: it begins with a copy of the last token that both
have, which predicts a_1, and continues the first k tokens of the document (layers/sequences/tree.py). Nothing
that an example learns stands before its branch, so labels are those of the examples one by one.

The examples of a conversation, one for each answer, follow the last of them up to the answer that a chat
template writes in another way when more follows. An example that is the beginning of another is part of it.
The images of a document are those of its last example; a branch has none of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Branch(NamedTuple):
    """Tokens of an example, with a byte for each that says whether it is learned, from number `shared` on.

    `images` has what the processor gives of its `pictures`, which end before token number `needed`.
    """

    ids: list[int]
    trained: bytes
    shared: int = 0
    images: bytes = b""
    pictures: int = 0
    needed: int = 0


Tree = list[Branch]  # the first shares nothing; then those that share the most come first


def trees_of(examples: Sequence[Branch], limit: int) -> list[Tree]:
    """The examples as trees of at most `limit` tokens, or of a single example.

    The last example of a tree is whole, and of the others those branch off it that fit, later ones first.
    """
    trees: list[Tree] = []
    waiting = list(examples)
    while waiting:
        trunk, rest = waiting.pop(), []
        branches, total = [], len(trunk.ids)
        for example in reversed(waiting):
            if _begins(trunk, example):
                trunk = trunk._replace(trained=_either(trunk.trained, example.trained))
                continue
            shared = _shared(trunk, example)
            length = len(example.ids) - shared
            # One place is lost to the copy.
            if shared > 1 and shared >= example.needed and total + length <= limit:
                branches.append(Branch(example.ids[shared:], example.trained[shared:], shared))
                total += length
            else:
                rest.append(example)
        trees.append([trunk, *sorted(branches, key=lambda branch: -branch.shared)])
        waiting = rest[::-1]
    return trees[::-1]


def _begins(trunk: Branch, example: Branch) -> bool:
    """Whether the trunk begins with an example, and learns none of its labels by itself."""
    twice = any(a and b for a, b in zip(trunk.trained, example.trained, strict=False))
    return trunk.ids[: len(example.ids)] == example.ids and not twice


def _either(trained: bytes, others: bytes) -> bytes:
    return bytes(a | b for a, b in itertools.zip_longest(trained, others, fillvalue=0))


def _shared(trunk: Branch, example: Branch) -> int:
    """How many tokens of an example the trunk begins with, but for the last of them, before any that the
    example learns.
    """
    end = min(len(trunk.ids), example.trained.find(1))
    same = (n for n in range(end) if trunk.ids[n] != example.ids[n])
    return max(0, next(same, end) - 1)
