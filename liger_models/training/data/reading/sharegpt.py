"""Conversion of ShareGPT conversations to messages.

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}], "system": ...}

A function_call turn holds the call as JSON, {"name": ..., "arguments": {...}}, or a list of calls; an
observation or tool turn holds the result.
"""

from __future__ import annotations

import json
from typing import Any

from liger_models.convert.errors import DataError, abbreviate

CONVERSATIONS, SYSTEM = "conversations", "system"  # fields
FUNCTION_CALL = "function_call"
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    FUNCTION_CALL: "assistant",
    "observation": "tool",
    "tool": "tool",
}


def messages_from(where: str, turns: Any, name: str = CONVERSATIONS) -> Any:
    """Convert turns with "from" and "value" to messages with "role" and "content"; return all else unchanged.

    Raises:
        DataError: turns of both forms, an unknown role, or a call that is not JSON; starts with `where`.
    """
    if isinstance(turns, dict) and "from" in turns:  # a single answer
        turns = [turns]
    if not isinstance(turns, list) or not any(isinstance(turn, dict) and "from" in turn for turn in turns):
        return turns
    return [_message(where, f"turn {number} of {name!r}", turn) for number, turn in enumerate(turns)]


def with_messages(where: str, fields: dict[str, Any], key: str) -> dict[str, Any]:
    """Move the messages in "conversations" and "system" of a record to `key`."""
    fields = dict(fields)
    messages = messages_from(where, fields.pop(CONVERSATIONS))
    if not isinstance(messages, list):
        raise DataError(f"{where}: {CONVERSATIONS!r} is {abbreviate(messages)}; expected a list of turns")
    system = fields.pop(SYSTEM, None)
    if system:
        if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
            raise DataError(f"{where}: there are a {SYSTEM!r} field and a system turn; expected one of them")
        messages = [{"role": "system", "content": system}, *messages]
    return {key: messages, **fields}


def _message(where: str, place: str, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn or "role" in turn:
        raise DataError(
            f"{where}: {place} is {abbreviate(turn)}; expected an object with 'from' and 'value', as the "
            "others"
        )
    name, value = turn["from"], turn["value"]
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise DataError(f"{where}: {place} is from {abbreviate(name)}; expected one of {', '.join(ROLES)}")
    if name != FUNCTION_CALL:
        return {"role": role, "content": value}
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {place} is a {FUNCTION_CALL} that is not JSON: {error}") from error
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(
            f"{where}: {place} is the {FUNCTION_CALL} {abbreviate(value)}; expected an object with 'name' "
            "and 'arguments', or a list of them"
        )
    functions = [{"arguments": {}, **call} for call in calls]
    called = [{"type": "function", "function": function} for function in functions]
    return {"role": role, "content": "", "tool_calls": called}
