"""Rendering of conversations with a chat template, and the spans written by the assistant.

A chat template is a Jinja program that comes with a tokenizer. It receives the variables of transformers'
`apply_chat_template`: `messages`, `tools`, `documents`, `add_generation_prompt` and the names of the special
tokens.

A conversation is rendered once, as a whole, with strings that record their origins (origins.py). An answer is
the template's output in its loop iteration for an assistant message, starting at the end of the generation
prompt, which is never trained on. After the last message, the rest of the output belongs to the answer,
unless it also precedes a generation prompt. Templates with `{% generation %}` tags define answers themselves.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from liger_models.convert.errors import DataError
from liger_models.images.spans import Span
from liger_models.training.text.answers import (
    CALLS,
    CONTENT,
    REASONING,
    Message,
    Piece,
    answers_of,
    dropped_of,
    end_of_given,
    joined,
    pieces_of,
    says_something,
    with_reasoning,
)
from liger_models.training.text.message_forms import forms_of, passed_over
from liger_models.training.text.origins import LOST, SEVERAL, Trace, Traced
from liger_models.training.text.template_program import environment, tracing_environment

NOTHING: Mapping[str, Any] = {}  # other variables of a template
OWN_NAMES = ("messages", "add_generation_prompt")  # records cannot set these
_TAG = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


class Rendering(NamedTuple):
    """A conversation as text.

    Attributes:
        text: the result of transformers' apply_chat_template.
        spans: characters that are trained on.
        dropped: contents of trained answers that the template left out, each "reasoning", "tool calls" or
            "text".
    """

    text: str
    spans: list[Span]
    dropped: list[str]


def merged(renderings: Iterable[Rendering]) -> list[Rendering]:
    """Drop renderings that are a prefix of the next one, which then trains both."""
    kept: list[Rendering] = []
    for one in renderings:
        if kept and one.text.startswith(kept[-1].text):
            before = kept.pop()
            one = Rendering(one.text, [*before.spans, *one.spans], [*before.dropped, *one.dropped])
        kept.append(one)
    return kept


class ChatTemplate:
    """A chat template.

    Args:
        source: the template's source.
        tokens: names of the special tokens, such as `bos_token`.
        where: the tokenizer's folder, for error messages.

    Raises:
        DataError: an invalid template, or jinja2 is missing.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: object) -> None:
        self.tokens, self.where = tokens, where
        self.marks_answers = bool(_TAG.search(source))
        self._tracing = tracing_environment()
        self._lock = threading.Lock()  # guards the tracing environment
        try:
            self._plain = environment().from_string(source)
            self._traced = self._tracing.from_string(source)
        except Exception as error:
            raise DataError(f"the chat template of {where} is not valid: {error}") from error

    def render(self, messages: list[Message], given: int, options: Mapping[str, Any]) -> Rendering:
        """Render a conversation, with the answers after the first `given` messages.

        If the template ignores the form of content or arguments, other forms are tried (message_forms.py).

        Raises:
            DataError: the template rejects the conversation, or an answer cannot be traced through it.
        """
        with self._lock:
            messages, text = self._readable(messages, options)
            pieces, plain = list(pieces_of(text)), str.__str__(text)
            if self.marks_answers:
                spans = list(self._marked(messages, given, pieces))
            else:
                self._check_origins(messages, plain, pieces, options)
                answers = (number for number in answers_of(messages) if number >= given)
                spans = [span for n in answers for span in self._turn(messages, n, plain, pieces, options)]
        return Rendering(plain, joined(spans), list(dropped_of(messages, given, text)))

    def question(self, messages: list[Message], options: Mapping[str, Any]) -> str:
        """Render a conversation up to the assistant's next answer. Raises DataError as `render` does."""
        with self._lock, contextlib.suppress(DataError):
            return str.__str__(self._readable(messages, options, add_generation_prompt=True)[1])
        return self._write(self._plain, messages, options, True)  # origins are needed only for the form

    # ------------------------------------------------------------------------------------------ rendering

    def _readable(
        self, messages: list[Message], options: Mapping[str, Any], add_generation_prompt: bool = False
    ) -> tuple[list[Message], Traced]:
        """Return the messages in the form from which the template drops the least, and their text."""
        found: tuple[list[Message], Traced] | None = None
        least, failure = 0, None
        for form in forms_of(messages):
            try:
                plain = self._write(self._plain, form, options, add_generation_prompt)
            except DataError as error:
                failure = failure or error
                continue
            try:
                traced = self._trace(form, options, add_generation_prompt)
            except DataError as error:
                raise self._lost("fails when origins of characters are traced") from error
            if plain != str.__str__(traced):
                raise self._lost("renders different text when origins of characters are traced")
            missing = passed_over(form, traced)
            if found is None or missing < least:
                found, least = (form, traced), missing
            if not least:
                break
        if found is None:
            assert failure is not None
            raise failure
        return found

    def _trace(
        self,
        messages: list[Message],
        options: Mapping[str, Any],
        add_generation_prompt: bool = False,
        with_origins: bool = True,
    ) -> Traced:
        """Text with its origins, or only with places in the loop over the messages."""
        messages = list(map(with_reasoning, messages))
        trace = Trace(answers=answers_of(messages))
        if with_origins:
            messages = [_with_origins(trace, number, message) for number, message in enumerate(messages)]
        trace.hold(messages)
        self._tracing.trace = trace
        text = self._write(self._traced, messages, options, add_generation_prompt)
        assert isinstance(text, Traced)
        return text

    def _write(
        self, program: Any, messages: list[Message], options: Mapping[str, Any], add_generation_prompt: bool
    ) -> str:
        program.environment.limits.begin()
        given = {**self.tokens, "tools": None, "documents": None, **options}
        try:
            text: str = program.render(
                given,
                messages=list(map(with_reasoning, messages)) if program is self._plain else messages,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it may divide by zero, or fill the memory
            raise DataError(
                f"the chat template of {self.where} rejects the conversation "
                f"({type(error).__name__}: {error})"
            ) from error
        return text

    def _lost(self, what: str) -> DataError:
        return DataError(
            f"the chat template of {self.where} {what}, so the assistant's text cannot be identified; "
            "enclose that text in {% generation %} and {% endgeneration %}"
        )

    # -------------------------------------------------------------------------------------------- answers

    def _turn(
        self,
        messages: list[Message],
        number: int,
        text: str,
        pieces: list[Piece],
        options: Mapping[str, Any],
    ) -> Iterator[Span]:
        """Spans of an answer to train on."""
        own = [piece for piece in pieces if piece.place == number]
        if not own:
            return  # the template ignores the message
        said = [k for k, piece in enumerate(own) if _is_said(piece, number)]
        if not said and says_something(messages[number]):
            return  # do not train an end token without the text that it ends
        first = said[0] if said else len(own)
        others = [k for k, piece in enumerate(own) if piece.source and not _is_said(piece, number)]
        if others and others[-1] > first:
            other, field = own[others[-1]].source
            raise self._lost(
                f"writes the {field} of message {other} within the assistant's text of message {number}"
            )
        turn = "".join(text[piece.start : piece.stop] for piece in own)
        before = sum(piece.stop - piece.start for piece in own[:first])
        skip = end_of_given(turn, before, self._given(messages, number, options))
        if not skip and before:  # a header that is omitted here, as after a tool result, is still one
            skip = end_of_given(turn, before, self._given(messages[:0], 0, options))
        if others:
            skip = max(skip, sum(piece.stop - piece.start for piece in own[: others[-1] + 1]))
        yield from self._stop(messages, number, text, own, options)
        for piece in own:
            length = piece.stop - piece.start
            if skip < length:
                yield piece.start + skip, piece.stop
            skip = max(0, skip - length)
        if number == len(messages) - 1:
            end = max(piece.stop for piece in pieces if piece.place is not None)
            rest = text[end:]
            if rest and rest not in self._tail(messages, options):
                yield end, len(text)

    def _stop(
        self,
        messages: list[Message],
        number: int,
        text: str,
        own: list[Piece],
        options: Mapping[str, Any],
    ) -> Iterator[Span]:
        """End-of-call token for templates that write it with the tool's result, as Gemma 4's: their addition
        to the call if nothing follows.
        """
        if not messages[number].get(CALLS) or number == len(messages) - 1:
            return
        end = own[0].stop
        for piece in own:
            end = piece.stop if piece.start == end else end
        turn = text[own[0].start : end]
        try:
            alone = self._trace(messages[: number + 1], options)
        except DataError:  # a template may refuse a conversation without a result
            return
        last = "".join(alone[piece.start : piece.stop] for piece in pieces_of(alone) if piece.place == number)
        added = last.removeprefix(turn)
        if added and len(added) < len(last) and text.startswith(added, end):
            yield end, end + len(added)

    def _given(self, messages: list[Message], number: int, options: Mapping[str, Any]) -> str:
        """Generation prompt of an answer. A template may reject the preceding messages alone."""
        asked: list[Any] = ["?", [{"type": "text", "text": "?"}]]
        failure: DataError | None = None
        for question in (
            *(messages[:stop] for stop in (number, number + 1) if messages[:stop]),
            *([{"role": "user", "content": content}] for content in asked),
        ):
            try:
                return self._tail(question, options)
            except DataError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _tail(self, messages: list[Message], options: Mapping[str, Any]) -> str:
        """The template's output after the last message and before an answer."""
        for with_origins in (False, True):  # needed if the template collects text first
            text = self._trace(messages, options, add_generation_prompt=True, with_origins=with_origins)
            written = [piece.stop for piece in pieces_of(text) if piece.place is not None]
            if written:
                return str.__str__(text)[max(written) :]
        raise self._lost("has no loop over the messages")

    def _marked(self, messages: list[Message], given: int, pieces: list[Piece]) -> Iterator[Span]:
        """Spans that the template marks after the first `given` messages."""
        earlier = bool(answers_of(messages[:given]))
        for piece in pieces:
            if not piece.marked:
                continue
            if earlier and piece.place is None:
                raise DataError(
                    f"the chat template of {self.where} marks answers outside of a loop over the messages, "
                    "so earlier answers cannot be excluded; remove them from the prompt"
                )
            if not earlier or (piece.place is not None and piece.place >= given):
                yield piece.start, piece.stop

    def _check_origins(
        self, messages: list[Message], text: str, pieces: list[Piece], options: Mapping[str, Any]
    ) -> None:
        """Raise DataError if an answer was rendered but its origin or place is unknown."""
        for number in answers_of(messages):
            mine = [piece for piece in pieces if piece.source and piece.source[0] == number]
            mixed = [piece for piece in mine if piece.source[1].startswith(LOST)]
            if mixed:
                name = mixed[0].source[1].removeprefix(LOST).strip()
                raise self._lost(f"mixes message {number}, of the assistant, with other text in {name!r}")
            for field in (CONTENT, REASONING[0]):
                places = {piece.place for piece in mine if piece.source[1] in (field, SEVERAL)}
                if places and number not in places:
                    raise self._lost(
                        f"writes message {number}, of the assistant, outside of its iteration in a loop over "
                        "the messages"
                    )
                value = with_reasoning(messages[number]).get(field)
                if places or not isinstance(value, str) or not value.strip():
                    continue
                template = "".join(text[piece.start : piece.stop] for piece in pieces if not piece.source)
                if value.strip() in template:  # a coincidence, or a lost origin
                    names = REASONING if field in REASONING else (field,)
                    other = [*messages]
                    other[number] = {**messages[number], **dict.fromkeys(names, value + value)}
                    if self._write(self._plain, other, options, False) != text:
                        raise self._lost(
                            f"writes message {number}, of the assistant, in a way that cannot be traced"
                        )


def _is_said(piece: Piece, number: int) -> bool:
    """Whether this is text of this answer; some messages carry tool results."""
    return bool(piece.source) and piece.source[0] == number and piece.source[1] != "tool_responses"


def _with_origins(trace: Trace, number: int, message: Message) -> Message:
    def traced(value: Any, field: str) -> Any:
        if isinstance(value, str):
            return trace.of(value, (number, field))
        if isinstance(value, dict):
            return {key: traced(item, field) for key, item in value.items()}
        return [traced(item, field) for item in value] if isinstance(value, list) else value

    return {
        key: value if key == "role" else traced(value, REASONING[0] if key in REASONING else key)
        for key, value in message.items()
    }
