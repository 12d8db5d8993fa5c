"""Alternative forms of messages: chat templates differ in the forms that they read, and ignore others.

content       text, or a list of parts; with tool calls also null or empty text
arguments     of a call: an object, or its JSON text
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from liger_models.training.text.answers import CALLS, CONTENT, Message, texts_of
from liger_models.training.text.origins import Traced

_TAIL = 20  # characters to search for


def forms_of(messages: list[Message]) -> Iterator[list[Message]]:
    """The messages as given, then in other forms. Null content first becomes empty text, since some templates
    would write the word "None".
    """
    seen: list[list[Message]] = []
    for arguments in (_as_it_is, _with_arguments_as_text):
        for content in (_with_empty_content, _with_null_content, _as_text, _as_parts):
            form = [arguments(content(message)) for message in messages]
            if form not in seen:
                seen.append(form)
                yield form


def passed_over(messages: list[Message], text: Traced) -> int:
    """Number of contents and calls that a template drops, or writes as a Python list."""
    written = {source for _, (source, _, _) in text.runs}
    count = 0
    for number, message in enumerate(messages):
        content = message.get(CONTENT)
        count += bool(message.get(CALLS)) and (number, CALLS) not in written
        if isinstance(content, str):
            count += bool(content.strip()) and (number, CONTENT) not in written
        elif texts := texts_of(message):
            count += str(content) in text or any(part.strip()[-_TAIL:] not in text for part in texts)
    return count


def _as_it_is(message: Message) -> Message:
    return message


def _with_empty_content(message: Message) -> Message:
    return {**message, CONTENT: ""} if message.get(CALLS) and message.get(CONTENT, 0) is None else message


def _with_null_content(message: Message) -> Message:
    return {**message, CONTENT: None} if message.get(CALLS) and message.get(CONTENT) == "" else message


def _as_text(message: Message) -> Message:
    texts = texts_of(message)
    return {**_with_empty_content(message), **({CONTENT: "".join(texts)} if texts else {})}


def _as_parts(message: Message) -> Message:
    message = _with_empty_content(message)
    content = message.get(CONTENT)
    if not isinstance(content, str):
        return message
    return {**message, CONTENT: [{"type": "text", "text": content}]}


def _with_arguments_as_text(message: Message) -> Message:
    calls = message.get(CALLS)
    if not isinstance(calls, list):
        return message
    return {**message, CALLS: [_as_text_within(call) for call in calls]}


def _as_text_within(call: Any) -> Any:
    """The call, or its function, with arguments as text."""
    if not isinstance(call, dict):
        return call
    changed = dict(call)
    if isinstance(call.get("function"), dict):
        changed["function"] = _as_text_within(call["function"])
    if isinstance(call.get("arguments"), dict):
        changed["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    return changed
