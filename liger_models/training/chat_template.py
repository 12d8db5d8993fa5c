"""Conversations as a chat template writes them, and which of it the assistant says.

A template is a program in Jinja's language that comes with a tokenizer. It gets what transformers'
`apply_chat_template` gives it: `messages`, `tools`, `documents`, `add_generation_prompt` and the names of the
special tokens.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from liger_models.convert.errors import DataError
from liger_models.spans import Span

Message = dict[str, Any]

# Names of what the assistant thinks, in data and in templates: the first is the one that most of these read.
REASONING = ("reasoning_content", "thinking", "reasoning")
NOTHING: Mapping[str, Any] = {}  # that a template reads beside messages
OWN_NAMES = ("messages", "add_generation_prompt")  # which no record may give
BEGIN, END = "\ufdd0", "\ufdd1"  # no characters: Unicode keeps them for the inside of programs
_TAG = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")
_TAIL = 20  # characters by which a text is found


class ChatTemplate:
    """A chat template.

    Args:
        source: its program.
        tokens: the names of the special tokens, as `bos_token`.
        where: the folder of its tokenizer, for messages.

    Raises:
        DataError: it is not valid, or jinja2 is missing.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: object) -> None:
        self.tokens, self.where = tokens, where
        self.says_what_is_said = bool(_TAG.search(source))
        environment = _environment()
        self._marks: list[str] = environment.generation_marks
        try:
            self._program = environment.from_string(source)
        except Exception as error:  # constants are computed as it is read
            raise DataError(f"the chat template of {where} is not valid: {error}") from error

    def render(
        self, messages: list[Message], given: int, options: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        """A conversation, and the character spans of what the assistant says in it behind the first `given`
        messages.

        A template that marks them, with `{% generation %}`, is believed. In others a turn is found by
        rendering the conversation up to it: it begins where the prefix with the generation prompt ends, and
        ends where the prefix with the turn does. That is precisely what a model sees and must continue when
        it is used, and it includes the end-of-turn token.

        Raises:
            DataError: the template refuses the conversation, or it changes earlier turns when later ones
                come, so that no prefix of the text is a prefix of the conversation.
        """
        text = self._write(messages, options, False)
        if _is_written_otherwise(messages, text):
            messages = [_as_text(message) for message in messages]
            text = self._write(messages, options, False)
        if self.says_what_is_said:
            return text, self._marked(messages, given, options, text)
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant" or i < given:
                continue
            before = self._write(messages[:i], options, True)
            through = self._write(messages[: i + 1], options, False)
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    f"the chat template of {self.where} renders message {i} differently when later "
                    "messages follow, or when it is to come, so what the assistant said cannot be told "
                    "apart; give one example for each assistant turn, or a template that marks it with "
                    "{% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(through)))
        return text, spans

    def question(self, messages: list[Message], options: Mapping[str, Any]) -> str:
        """A conversation up to where the assistant is to answer. Raises DataError as `render` does."""
        return self._write(messages, options, True)

    def _marked(
        self, messages: list[Message], given: int, options: Mapping[str, Any], text: str
    ) -> list[Span]:
        spans = self._all_marked(messages, options, text)
        if not any(message.get("role") == "assistant" for message in messages[:given]):
            return spans
        before = self._write(messages[:given], options, False)
        earlier = self._all_marked(messages[:given], options, before)
        if spans[: len(earlier)] != earlier or any(before[a:b] != text[a:b] for a, b in earlier):
            raise DataError(
                f"the chat template of {self.where} renders what the assistant says in the prompt "
                "differently when an answer follows, so that the two cannot be told apart; leave earlier "
                "answers out"
            )
        return spans[len(earlier) :]

    def _all_marked(self, messages: list[Message], options: Mapping[str, Any], text: str) -> list[Span]:
        self._marks[:] = BEGIN, END
        try:
            pieces = re.split(f"([{BEGIN}{END}])", self._write(messages, options, False))
        finally:
            self._marks[:] = "", ""
        written, marks = pieces[::2], pieces[1::2]
        if "".join(written) != text or marks != [BEGIN, END] * (len(marks) // 2):
            raise DataError(
                f"the chat template of {self.where} marks with {{% generation %}} what it then changes, or "
                "marks within marks, so what the assistant said cannot be told apart; let the tags enclose "
                "text as it is written"
            )
        ends = list(itertools.accumulate(map(len, written)))
        return list(zip(ends[::2], ends[1::2], strict=False))  # the last piece ends the text

    def _write(self, messages: list[Message], options: Mapping[str, Any], add_generation_prompt: bool) -> str:
        given = {**self.tokens, "tools": None, "documents": None, **options}
        try:
            return self._program.render(
                given,
                messages=list(map(_with_reasoning, messages)),
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it may divide by zero, or fill the memory
            raise DataError(
                f"the chat template of {self.where} refuses the conversation "
                f"({type(error).__name__}: {error})"
            ) from error


def _with_reasoning(message: Message) -> Message:
    """What is thought stands under each name that templates read: under another it would be lost."""
    thought = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _texts(message: Message) -> list[str]:
    """Of a message whose content is a list of text alone, the parts."""
    parts = message.get("content")
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
    ):
        return []
    return [part["text"] for part in parts]


def _is_written_otherwise(messages: list[Message], text: str) -> bool:
    """Whether a template that expects text has been given a list: it passes over it, or writes it as Python
    does.
    """
    return any(
        str(message["content"]) in text or any(part.strip()[-_TAIL:] not in text for part in texts)
        for message in messages
        if (texts := _texts(message))
    )


def _as_text(message: Message) -> Message:
    texts = _texts(message)
    return {**message, "content": "".join(texts)} if texts else message


def _environment() -> Any:
    """What templates run in: a sandbox, since they are data from elsewhere."""
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise DataError(
            "`messages` need the jinja2 package for the chat template: pip install jinja2"
        ) from error

    class GenerationTags(Extension):
        """`{% generation %}...{% endgeneration %}`, which transformers has added to the language."""

        tags = {"generation"}  # noqa: RUF012 (as its base class has it)

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            environment.extend(generation_marks=["", ""])

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

        def _enclosed(self, caller: Any) -> str:
            begin, end = self.environment.generation_marks  # type: ignore[attr-defined]
            return begin + caller() + end

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # Some write today's date into the system prompt; a run resumed tomorrow must see the same tokens, so
    # "today" is the day that Llama's own templates fall back to.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTags]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
    return environment
