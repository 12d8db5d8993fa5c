"""Conversion of Alpaca records to messages, or to a prompt and a completion.

    {"instruction": ..., "input": ..., "output": ...}

"system" and "history", a list of [question, answer], may be added. With a chat template, a record becomes a
user's message (the instruction, an empty line, the input) and an answer. Without one, it becomes the prompt
text that Stanford Alpaca was trained with, and a completion.
"""

from __future__ import annotations

from typing import Any

from liger_models.convert.errors import DataError, abbreviate

INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"  # fields
_SYSTEM = "system"
_BEGINS = "Below is an instruction that describes a task"
_ALONE = f"{_BEGINS}. Write a response that appropriately completes the request."
_WITH_INPUT = (
    f"{_BEGINS}, paired with an input that provides further context. Write a response that appropriately "
    "completes the request."
)


def is_alpaca(fields: dict[str, Any]) -> bool:
    return INSTRUCTION in fields and OUTPUT in fields


def from_alpaca(where: str, fields: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Replace the Alpaca fields by "messages", or without `chat` by "prompt" and "completion".

    Raises:
        DataError: a field of the wrong type, or a system prompt or a history without `chat`; starts with
            `where`.
    """
    fields = dict(fields)
    instruction, output = (_text(where, fields, name) for name in (INSTRUCTION, OUTPUT))
    given = _text(where, fields, INPUT) if fields.get(INPUT) else ""
    fields.pop(INPUT, None)
    system, history = fields.pop(_SYSTEM, None), fields.pop(HISTORY, None)
    if not chat:
        if system or history:
            raise DataError(
                f"{where}: an Alpaca record with {_SYSTEM!r} or {HISTORY!r} needs a chat template, and the "
                "tokenizer has none; use the tokenizer of a chat model"
            )
        parts = [_WITH_INPUT if given else _ALONE, f"### Instruction:\n{instruction}"]
        parts += [f"### Input:\n{given}"] if given else []
        return {**fields, "prompt": "\n\n".join([*parts, "### Response:\n"]), "completion": output}
    turns = history or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise DataError(f"{where}: {HISTORY!r} is {abbreviate(turns)}; expected a list of [question, answer]")
    said = [*turns, ["\n\n".join(filter(None, [instruction, given])), output]]
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in said:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {**fields, "messages": messages}


def _text(where: str, fields: dict[str, Any], name: str) -> str:
    value = fields.pop(name)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name!r} is {abbreviate(value)}; expected a string")
    return value
