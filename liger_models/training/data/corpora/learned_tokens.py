"""Special tokens of a corpus, by their role in training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LAST = 3  # final tokens: a newline often follows the end-of-turn token


class LearnedTokens:
    """Special tokens of documents.

    Attributes:
        seen: special and added tokens that occur.
        last: tokens that end an example's last trained answer.
        within: tokens trained inside an answer, such as the end of reasoning.
    """

    def __init__(
        self, seen: Iterable[int] = (), last: Iterable[int] = (), within: Iterable[int] = ()
    ) -> None:
        self.seen, self.last, self.within = set(seen), set(last), set(within)

    def note(
        self,
        ids: list[int],
        trained: bytes,
        special: frozenset[int],
        whole: bool,
        added: frozenset[int] = frozenset(),
    ) -> None:
        """Add a document; `whole` if it is an example with an answer."""
        self.seen |= (special | added).intersection(ids)
        if not whole:
            return
        marks, stop, ends = trained + b"\0", 0, []
        while stop := marks.find(b"\1\0", stop) + 1:
            start = marks.rfind(b"\0", 0, stop) + 1
            body = max(start, stop - LAST)
            self.within |= special.intersection(ids[start:body])
            ends = [token for token in ids[body:stop] if token in special]
        self.last.update(ends[-1:])

    def ends(self) -> list[int]:
        """Return the tokens that only occur at the end of answers."""
        return sorted(self.last - self.within)

    def __or__(self, other: LearnedTokens) -> LearnedTokens:
        return LearnedTokens(self.seen | other.seen, self.last | other.last, self.within | other.within)

    def to_dict(self) -> dict[str, Any]:
        return {"seen": sorted(self.seen), "last": sorted(self.last), "within": sorted(self.within)}
