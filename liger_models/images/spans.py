"""Which tokens of a text stand in given spans of its characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""Half-open, of characters."""


def tokens_within(offsets: Iterable[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens have a character in one of the spans, by the characters [start, end) of each.

    A token that stands in a span and goes on behind it belongs to it: some take the white space behind them,
    and ends of turns are among these. Byte-level tokenizers report a token's leading space, and
    all of a token that is only spaces, as empty: such a token belongs where it ends.
    """
    return [
        any(begin < end and (start < stop if start < end else end <= stop) for begin, stop in spans)
        for start, end in offsets
    ]
