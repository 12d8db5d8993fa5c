"""Recurrent layers over documents that continue others (layers/sequences/tree.py).

    prompt | answer | answer       both answers start from the state after the prompt

A document continued from its first k tokens only is cut there into segments. Segments run in rounds: first
those that continue nothing, then their continuations, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from liger_models.layers.sequences.tree import Tree

States = tuple[Tensor, ...]
Run = Callable[[list[Tensor], Tensor, States | None], tuple[Tensor, States]]
"""`run(operands, cu_seqlens, states)` gives the output of some tokens, and the states after each segment."""


def over_branches(tree: Tree, operands: list[Tensor], run: Run) -> Tensor:
    """Return the output of all tokens [T, ...], from operands [T, ...] of all tokens."""
    rounds = _rounds(tree)
    outputs: list[Tensor] = []
    order: list[Tensor] = []
    collected: States = ()
    for segments in rounds:
        tokens = torch.cat([torch.arange(first, end) for first, end, _ in segments]).to(tree.device)
        lengths = torch.tensor([0, *(end - first for first, end, _ in segments)])
        bounds = lengths.cumsum(0, dtype=torch.int32).to(tree.device)
        before: States | None = None
        if collected:
            continued = torch.tensor([parent for *_, parent in segments], device=tree.device)
            before = tuple(states[continued] for states in collected)
        output, after = run([operand[tokens] for operand in operands], bounds, before)
        outputs.append(output)
        order.append(tokens)
        collected = tuple(map(torch.cat, zip(collected, after, strict=True))) if collected else after
    place = torch.empty_like(together := torch.cat(order))
    place[together] = torch.arange(len(together), device=tree.device)
    return torch.cat(outputs)[place]


def _rounds(tree: Tree) -> list[list[tuple[int, int, int]]]:
    """List (first token, end, index of the segment it continues, -1 for none) of all segments, by round.
    Segments are numbered in this order.
    """
    cuts: dict[int, set[int]] = {}  # tokens before each continuation, by document; its ends excluded
    for parent, before in zip(tree.parents, tree.before, strict=True):
        if parent >= 0 and 0 < before < tree.bounds[parent + 1] - tree.bounds[parent]:
            cuts.setdefault(parent, set()).add(before)
    by_round: list[list[tuple[int, int, tuple[int, int] | None]]] = []
    depth: dict[tuple[int, int], int] = {}  # round of each segment, by document and end

    def add(first: int, end: int, continued: tuple[int, int] | None, name: tuple[int, int]) -> None:
        round = 0 if continued is None else depth[continued] + 1
        depth[name] = round
        by_round.extend([] for _ in range(round + 1 - len(by_round)))
        by_round[round].append((first, end, continued))
        names.setdefault(round, []).append(name)

    names: dict[int, list[tuple[int, int]]] = {}
    for document, (parent, before) in enumerate(zip(tree.parents, tree.before, strict=True)):
        first, end = tree.bounds[document], tree.bounds[document + 1]
        continued = (parent, before) if parent >= 0 and before else None
        for cut in [*sorted(cuts.get(document, ())), end - first]:
            add(first, tree.bounds[document] + cut, continued, (document, cut))
            first, continued = tree.bounds[document] + cut, (document, cut)
    ordered = [name for round in range(len(by_round)) for name in names[round]]
    numbers = {name: number for number, name in enumerate(ordered)}
    return [
        [(first, end, -1 if continued is None else numbers[continued]) for first, end, continued in segments]
        for segments in by_round
    ]
