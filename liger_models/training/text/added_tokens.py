"""Special tokens that a run adds to its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.hub import CHAT_TEMPLATES
from liger_models.convert.errors import DataError
from liger_models.convert.json_file import read_json
from liger_models.training.text.tokenizer import FILES, TextTokenizer

IDS_ARE_IN = ("config.json", "generation_config.json")  # of bos and eos, where no other file has them


def write_with_tokens(tokenizer: TextTokenizer, tokens: Sequence[str], folder: Path) -> TextTokenizer:
    """The tokenizer with these special tokens, written to a new folder; the same one if it has them all.

    A token of the vocabulary that is not special becomes so and keeps its id; others get the next ids.

    Raises:
        DataError: an empty token, or the tokenizer does not number new tokens from its `vocab_size`.
    """
    from tokenizers import AddedToken, Tokenizer

    if any(not token.strip() for token in tokens):
        raise DataError(f"add_tokens has an empty token: {list(tokens)}; expected text such as <|tool|>")
    known = {one.content for one in tokenizer.backend.get_added_tokens_decoder().values() if one.special}
    missing = [token for token in dict.fromkeys(tokens) if token not in known]
    if not missing:
        return tokenizer
    first = tokenizer.vocab_size
    new = [token for token in missing if tokenizer.backend.token_to_id(token) is None]
    backend = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    ids = [backend.token_to_id(token) for token in new]
    if ids != list(range(first, first + len(new))):
        raise DataError(
            f"the tokenizer in {tokenizer.folder} gives new tokens the ids {ids}; expected them to begin "
            f"at {first}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    templates = sorted((tokenizer.folder / CHAT_TEMPLATES).glob("*.jinja"))
    for name in (*FILES, *IDS_ARE_IN, *(f"{CHAT_TEMPLATES}/{path.name}" for path in templates)):
        if (tokenizer.folder / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(tokenizer.folder / name, folder / name)
    backend.save(str(folder / "tokenizer.json"))
    written = TextTokenizer(folder)
    numbered = {token: _id(written, token) for token in missing}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            _write(folder / name, _with_tokens(read_json(folder / name, DataError), numbered))
    if (folder / "added_tokens.json").is_file():
        _write(folder / "added_tokens.json", read_json(folder / "added_tokens.json", DataError) | numbered)
    return TextTokenizer(folder)


def rows_of(tokens: Sequence[str], origin: TextTokenizer, tokenizer: TextTokenizer) -> range:
    """Ids of the tokens that the tokenizer has and its origin lacks: those with new rows in a model."""
    new = [token for token in dict.fromkeys(tokens) if origin.backend.token_to_id(token) is None]
    ids = sorted(_id(tokenizer, token) for token in new)
    return range(ids[0], ids[-1] + 1) if ids else range(0)


def _id(tokenizer: TextTokenizer, token: str) -> int:
    index = tokenizer.backend.token_to_id(token)
    assert index is not None, f"{token} was added"
    return index


def _with_tokens(config: dict[str, Any], tokens: dict[str, int]) -> dict[str, Any]:
    """The content of tokenizer_config.json or special_tokens_map.json with these tokens, where it lists
    tokens. (tokenizer.json has them in any case.)
    """
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(key), list):
            config[key] = [*config[key], *(token for token in tokens if token not in config[key])]
    if isinstance(config.get("added_tokens_decoder"), dict):
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        for token, index in tokens.items():
            config["added_tokens_decoder"][str(index)] = {"content": token, **flags, "special": True}
    return config


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
