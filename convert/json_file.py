"""Strict reading of JSON objects from untrusted files."""

import json
import os
from pathlib import Path
from typing import Any

from liger_models.convert.errors import CheckpointError, LigerModelsError
from liger_models.convert.regular_file import open_regular

Error = type[LigerModelsError]


def read_json(path: Path, error: Error = CheckpointError) -> dict[str, Any]:
    """Read the JSON object in a regular file.

    Raises:
        CheckpointError, or the given `error`: the file cannot be read, or as for `parse_json`.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            text = file.read()
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror}); expected a JSON file") from problem
    return parse_json(text, f"{path}:", error)


def parse_json(text: bytes, what: str, error: Error = CheckpointError) -> dict[str, Any]:
    """Parse a JSON object in UTF-8, without byte order mark or duplicate keys; `what` begins the error
    message.

    Raises:
        CheckpointError, or the given `error`: invalid text.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in pairs:
            if name in out:
                raise error(f"{what} names {name!r} twice")
            out[name] = value
        return out

    try:
        # json.loads guesses the encoding of bytes, and accepts UTF-16 and 32, which other readers reject.
        parsed = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} is not valid JSON ({problem}); download it again") from problem
    if not isinstance(parsed, dict):
        raise error(f"{what} must be a JSON object, found {type(parsed).__name__}")
    if rb"\u" in text:  # only escapes can produce a lone surrogate in UTF-8
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError as problem:
            raise error(f"{what} holds half of a surrogate pair, which is not valid text") from problem
    return parsed
