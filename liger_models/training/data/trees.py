"""Examples with a common beginning as one document that holds the beginning once.

    document    last example ............ | branch a ...      | branch b ...
    tokens      t_0 t_1 ............. t_n | t_k a_1 a_2 ...   | t_j b_1 ...

A branch at k is the example t_0 .. t_(k-1) t_k a_1 a_2 ...: it starts with a copy of the last common token,
which predicts a_1, and continues the first k tokens of the document (layers/sequences/tree.py). No trained
token of an example precedes its branch, so labels equal the labels of the separate examples.

A conversation has one example for each answer. They agree with the last example up to an answer that the chat
template renders differently when more follows. An example that is a prefix of another is merged with it. A
document has the images of its last example; branches have none of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Branch(NamedTuple):
    """Tokens of an example from index `shared` on, with a trained byte for each.

    `images` are the processed `pictures`, whose tokens end before index `needed`.
    """

    ids: list[int]
    trained: bytes
    shared: int = 0
    images: bytes = b""
    pictures: int = 0
    needed: int = 0


Tree = list[Branch]  # the trunk, then branches from the longest shared part to the shortest


def trees_of(examples: Sequence[Branch], limit: int) -> list[Tree]:
    """Arrange examples as trees of at most `limit` tokens, or of a single example.

    The last example of a tree is its trunk; others are added as branches while they fit, later ones first.
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
            # The copied token takes one position.
            if shared > 1 and shared >= example.needed and total + length <= limit:
                branches.append(Branch(example.ids[shared:], example.trained[shared:], shared))
                total += length
            else:
                rest.append(example)
        trees.append([trunk, *sorted(branches, key=lambda branch: -branch.shared)])
        waiting = rest[::-1]
    return trees[::-1]


def _begins(trunk: Branch, example: Branch) -> bool:
    """Return whether an example is a prefix of the trunk, with no label trained in both."""
    twice = any(a and b for a, b in zip(trunk.trained, example.trained, strict=False))
    return trunk.ids[: len(example.ids)] == example.ids and not twice


def _either(trained: bytes, others: bytes) -> bytes:
    return bytes(a | b for a, b in itertools.zip_longest(trained, others, fillvalue=0))


def _shared(trunk: Branch, example: Branch) -> int:
    """Length of the common beginning before the example's first trained token, less one."""
    end = min(len(trunk.ids), example.trained.find(1))
    same = (n for n in range(end) if trunk.ids[n] != example.ids[n])
    return max(0, next(same, end) - 1)
