"""Tokenization of text, and rendering of conversations, from a Hugging Face tokenizer's files.

Reads tokenizer.json (the `tokenizers` format); bos and eos from tokenizer_config.json (if it lacks
added_tokens_decoder, first from special_tokens_map.json), else from config.json or generation_config.json;
the chat template (chat_template.py) from chat_template.jinja, else from chat_template.json, as in older
processors, else from tokenizer_config.json; and additional named templates.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_models.convert.checkpoints.hub import CHAT_TEMPLATES
from liger_models.convert.errors import DataError, abbreviate
from liger_models.convert.json_file import read_json
from liger_models.images.processor import FILES as PROCESSOR_FILES
from liger_models.images.spans import tokens_within
from liger_models.training.text.chat_template import NOTHING, ChatTemplate, Rendering

# Files of a tokenizer, copied to every checkpoint that a run writes.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    # The processor of vision-language models.
    *PROCESSOR_FILES,
)

NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

BLOCKS = 8  # of a long text, encoded in parallel
SEAM = 16  # tokens compared on each side of a joint


class TextTokenizer:
    """The tokenizer in `folder`.

    Attributes: `vocab_size` (largest id + 1), `bos_id` and `eos_id` (None if no file specifies them),
    `special_ids`, of all special tokens, and `added_ids`, of tokens added to the vocabulary. Raises DataError
    for a missing or unreadable tokenizer.json.
    """

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer

        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                f"{self.folder} holds no tokenizer.json; pass a folder with one (a tokenizer with only "
                "tokenizer.model can be converted by transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        try:
            self.backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises plain Exception
            raise DataError(f"{path} cannot be read as a tokenizer: {error}") from error
        self.backend.no_truncation()  # truncation and padding would silently drop or add tokens
        self.backend.no_padding()
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._config = self._json("tokenizer_config.json")
        if "added_tokens_decoder" not in self._config:
            # An older folder, where transformers prefers this file to the config.
            self._config |= self._json("special_tokens_map.json")
        self.bos_id = self._special("bos_token")
        self.eos_id = self._special("eos_token")
        self.pad_id = self._special("pad_token")
        added = self.backend.get_added_tokens_decoder()
        named = {index for index in (self.bos_id, self.eos_id) if index is not None}
        self._templates: dict[str, ChatTemplate] = {}
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(named.union(index for index, token in added.items() if token.special))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, including special tokens that the tokenizer adds itself (usually bos)."""
        return self.backend.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts)]

    def encode_blocks(self, blocks: Iterable[str], overlap: int) -> Iterator[list[int]]:
        """Ids of a text too long to be encoded at once, in parts.

        Each block but the first begins with the last `overlap` characters of the previous one. Two encodings
        are joined within the overlap, at a place where `SEAM` tokens on both sides agree. This gives the ids
        of the whole text if tokens depend only on their neighbourhood. Raises DataError if there is no such
        place.
        """
        before: tuple[list[int], list[int]] | None = None
        length = first = 0
        waiting = iter(blocks)
        while batch := list(itertools.islice(waiting, BLOCKS)):
            for text, encoding in zip(batch, self.backend.encode_batch(batch), strict=True):
                now = encoding.ids, [end for _, end in encoding.offsets]
                if before:
                    stop, then = self._seam(before, now, length - overlap, overlap)
                    yield before[0][first:stop]
                    first = then
                before, length = now, len(text)
        if before:
            yield before[0][first:]

    def _seam(
        self, one: tuple[list[int], list[int]], other: tuple[list[int], list[int]], shift: int, overlap: int
    ) -> tuple[int, int]:
        """(i, j) such that one[:i] continues with other[j:]. `shift` is the offset of `other` in `one`'s
        text."""
        places = {end - shift: i for i, end in enumerate(one[1]) if end > shift}
        ends = other[1]
        inside = range(SEAM, bisect.bisect_right(ends, overlap, hi=len(ends) - 1) - SEAM)
        for j in sorted(inside, key=lambda j: abs(ends[j] - overlap // 2)):
            i = places.get(ends[j], 0)
            if i >= SEAM and one[0][i - SEAM : i + SEAM] == other[0][j - SEAM : j + SEAM]:
                return i, j
        raise DataError(
            f"the tokenizer in {self.folder} cannot tokenize a long text in parts, since tokens depend on "
            "the whole text; split the text into documents"
        )

    def encode_spans(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[tuple[int, int]]],
        *,
        add_special_tokens: bool,
    ) -> list[tuple[list[int], list[bool]]]:
        """Ids of each text, and which of them are in one of its half-open character `spans`."""
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [
            (encoding.ids, tokens_within(encoding.offsets, mine))
            for encoding, mine in zip(encodings, spans, strict=True)
        ]

    def digest(self) -> str:
        """Digest of everything that determines a record's ids."""
        template, older = self.folder / "chat_template.jinja", self._json("chat_template.json")
        said = older.get("chat_template") or self._config.get("chat_template")
        parts: list[Any] = [
            hashlib.sha256((self.folder / "tokenizer.json").read_bytes()).hexdigest(),
            [self.bos_id, self.eos_id, *(self._config.get(key) for key in NAMED_TOKENS)],
            self._config.get("extra_special_tokens"),
            template.read_bytes().hex() if template.is_file() else said,
            [[path.name, path.read_bytes().hex()] for path in self._more_templates()],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def ends(self, of_model: int | list[int] | None) -> list[int]:
        """Ids that end generation: the model's `eos_token_id`, which may include ends of turns, and the end
        of a document."""
        named = of_model if isinstance(of_model, list) else [of_model]
        return sorted({end for end in (*named, self.eos_id) if end is not None})

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode(list(ids))

    def render(
        self, messages: list[dict[str, Any]], given: int = 0, options: Mapping[str, Any] = NOTHING
    ) -> Rendering:
        """Render a conversation, with the answers after the first `given` messages. `options` are further
        template variables, such as `tools`. Raises DataError as `ChatTemplate` does.
        """
        return self._template(options).render(messages, given, options)

    def render_question(self, messages: list[dict[str, Any]]) -> str:
        """Render a conversation up to the assistant's next answer. Raises DataError as `render` does."""
        return self._template(NOTHING).question(messages, NOTHING)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._sources.get("default"))

    def _template(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The default template, or the one for tools if there are tools and such a template."""
        with_tools = bool(options.get("tools")) and "tool_use" in self._sources
        name = "tool_use" if with_tools else "default"
        if name not in self._templates:
            source = self._sources.get(name)
            if not source:
                raise DataError(
                    f"`messages` need a chat template and the tokenizer in {self.folder} has none; use the "
                    "tokenizer of a chat model, add chat_template.jinja to the folder (docs/data.md has "
                    "one), or use plain text (prompt/completion records; --raw in `generate`)"
                )
            self._templates[name] = ChatTemplate(source, self._special_tokens(), self.folder)
        return self._templates[name]

    @functools.cached_property
    def _sources(self) -> dict[str, str]:
        """Chat templates by name; most tokenizers have only "default"."""
        file = self.folder / "chat_template.jinja"
        try:
            source: Any
            if file.is_file():
                source = file.read_text(encoding="utf-8")
            else:
                older = self._json("chat_template.json").get("chat_template")
                source = older or self._config.get("chat_template")
            named = {entry["name"]: entry["template"] for entry in source} if isinstance(source, list) else {}
            more = {path.stem: path.read_text(encoding="utf-8") for path in self._more_templates()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the chat template of {self.folder} cannot be read ({type(error).__name__}: {error}); "
                "expected text, or a list of objects with name and template"
            ) from error
        sources = (named if isinstance(source, list) else {"default": source} if source else {}) | more
        for found in sources.values():
            if not isinstance(found, str):
                raise DataError(
                    f"the chat template of {self.folder} is {abbreviate(found)}, expected text; correct "
                    "tokenizer_config.json"
                )
        return sources

    def _more_templates(self) -> list[Path]:
        return sorted((self.folder / CHAT_TEMPLATES).glob("*.jinja"))

    def _special_tokens(self) -> dict[str, str]:
        """Special tokens by name, for templates."""
        extra = self._config.get("extra_special_tokens")
        named = {key: self._name(key) for key in NAMED_TOKENS}
        named |= (
            {key: name for key, name in extra.items() if isinstance(name, str)}
            if isinstance(extra, dict)
            else {}
        )
        return {"bos_token": "", "eos_token": "", **{key: name for key, name in named.items() if name}}

    def _name(self, key: str) -> str | None:
        value = self._config.get(key)
        name = value.get("content") if isinstance(value, dict) else value
        if name is not None and not isinstance(name, str):
            raise DataError(
                f"{self.folder / 'tokenizer_config.json'}: {key} is {abbreviate(value)}, expected a token"
            )
        return name

    def _special(self, key: str) -> int | None:
        name = self._name(key)
        if name is not None and (found := self.backend.token_to_id(name)) is not None:
            return found
        for file in ("config.json", "generation_config.json"):
            value = self._json(file).get(f"{key}_id")
            first = value[0] if isinstance(value, list) and value else value
            if first is not None:
                if type(first) is not int:
                    raise DataError(
                        f"{self.folder / file}: {key}_id is {abbreviate(value)}, expected a number"
                    )
                return first
        return None

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        return read_json(path, DataError)
