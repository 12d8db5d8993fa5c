"""Answers in a rendered conversation: pieces of text, and the assistant's part of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from liger_models.images.spans import Span
from liger_models.training.text.origins import SEVERAL, Traced

Message = dict[str, Any]

# Names of reasoning in data and templates; most templates read the first.
REASONING = ("reasoning_content", "thinking", "reasoning")
ASSISTANT = "assistant"
CONTENT, CALLS = "content", "tool_calls"
_LEXEME = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s|\w+|[^\w\s]+?")
_MARKUP = re.compile(r"</?think>|<\|channel>(?:thought)?|<channel\|>")  # marks reasoning within content


class Piece(NamedTuple):
    """Characters [start, stop) with the same origin (origins.py)."""

    start: int
    stop: int
    source: Any
    place: int | None
    marked: bool


def pieces_of(text: Traced) -> Iterator[Piece]:
    start = 0
    for length, (source, place, marked) in text.runs:
        yield Piece(start, start + length, source, place, marked)
        start += length


def answers_of(messages: Sequence[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message.get("role") == ASSISTANT]


def end_of_given(turn: str, before: int, given: str) -> int:
    """End of the generation prompt in a turn whose first `before` characters are the template's.

    A turn may begin with only part of the prompt: templates render earlier answers without the place for
    reasoning that they offer for a new one.
    """
    if turn.startswith(given):
        return len(given)
    own = turn[:before]
    if (place := own.find(given)) >= 0:
        return place + len(given)
    end = 0
    for one, other in zip(_LEXEME.findall(own), _LEXEME.findall(given), strict=False):
        if one != other:
            break
        end += len(one)
    return end


def joined(spans: Iterable[Span]) -> list[Span]:
    """Merge adjacent spans."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def says_something(message: Message) -> bool:
    texts = [message.get(CONTENT), *(message.get(name) for name in REASONING), *texts_of(message)]
    return bool(message.get(CALLS)) or any(isinstance(text, str) and text.strip() for text in texts)


def dropped_of(messages: list[Message], given: int, text: Traced) -> Iterator[str]:
    """Missing contents of answers: reasoning, tool calls or text."""
    written: Counter[tuple[int, str]] = Counter()
    for piece in pieces_of(text):
        if piece.source is not None:
            written[piece.source] += _size(str.__getitem__(text, slice(piece.start, piece.stop)))
    for number in answers_of(messages):
        message = with_reasoning(messages[number])
        if number < given or (number, SEVERAL) in written:
            continue
        content = message.get(CONTENT)
        said = content if isinstance(content, str) else "".join(texts_of(message))
        thought = message.get(REASONING[0])
        if written[number, REASONING[0]] < (_size(thought) if isinstance(thought, str) else 0):
            yield "reasoning"
        if message.get(CALLS) and not written[number, CALLS]:
            yield "tool calls"
        if written[number, CONTENT] < _size(_MARKUP.sub("", said)):
            yield "reasoning" if _MARKUP.search(said) else "text"


def _size(text: str) -> int:
    """Number of characters other than white space."""
    return sum(map(len, text.split()))


def with_reasoning(message: Message) -> Message:
    """Copy reasoning to every name that templates read, so that it is not lost."""
    thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def texts_of(message: Message) -> list[str]:
    """Texts of a message whose content is a list of text parts."""
    parts = message.get(CONTENT)
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        return []
    return [part["text"] for part in parts]
