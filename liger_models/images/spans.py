"""Mapping from character spans of a text to its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""Half-open range of characters."""


def tokens_within(offsets: Iterable[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens have a character in one of the spans, given each token's characters [start, end).

    A token that crosses a span's end belongs to the span: some tokens include the following white space,
    end-of-turn tokens among them. Byte-level tokenizers report a token's leading space, and tokens of only
    spaces, as empty; these belong where they end.
    """
    return [
        any(begin < end and (start < stop if start < end else end <= stop) for begin, stop in spans)
        for start, end in offsets
    ]
