"""JSON objects from files that others wrote, read without guessing."""

import json
import os
from pathlib import Path
from typing import Any

from liger_models.convert.errors import CheckpointError, LigerModelsError
from liger_models.convert.regular_file import open_regular

Error = type[LigerModelsError]


def read_json(path: Path, error: Error = CheckpointError) -> dict[str, Any]:
    """The JSON object in a regular file.

    Raises:
        CheckpointError, or the `error` asked for: it cannot be read, or as `parse_json`.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            text = file.read()
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror}); expected a JSON file") from problem
    return parse_json(text, f"{path}:", error)


def parse_json(text: bytes, what: str, error: Error = CheckpointError) -> dict[str, Any]:
    """A JSON object in UTF-8, without a byte order mark, that names no key twice; `what` begins the message.

    Raises:
        CheckpointError, or the `error` asked for: it is something else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in pairs:
            if name in out:
                raise error(f"{what} names {name!r} twice")
            out[name] = value
        return out

    try:
        # json.loads guesses the encoding of bytes, and takes UTF-16 and 32, which other readers refuse.
        parsed = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} is not valid JSON ({problem}); download it again") from problem
    if not isinstance(parsed, dict):
        raise error(f"{what} must be a JSON object, found {type(parsed).__name__}")
    if rb"\u" in text:  # only so can half of a pair stand in UTF-8
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError as problem:
            raise error(f"{what} holds half of a surrogate pair, which no text can") from problem
    return parsed
