"""How the fields of records are found: accepted forms, renamed columns, and other tools' forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from liger_models.convert.errors import ConfigError, DataError
from liger_models.training.data.reading import alpaca
from liger_models.training.data.reading.sharegpt import CONVERSATIONS, SYSTEM, with_messages

FORMS = ("text", "prompt/completion", "messages")
PAIRS = "prompt/chosen/rejected"
LABELLED = "prompt/completion/label"
PROMPT = "prompt"  # whose other fields go to reward functions
IMAGES = "images"  # a field next to messages
VIDEOS = "videos"  # a field of other tools
TOOLS, OPTIONS = "tools", "chat_template_kwargs"  # fields next to messages
Columns = tuple[tuple[str, str], ...]


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in JSON's words."""
    kinds = {str: "a string", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return "null" if value is None else kinds.get(type(value), "an object")


def parse_columns(text: str | None) -> Columns:
    """Parse `field=column,field=column`.

    Raises:
        ConfigError: another form, or a field or column twice.
    """
    pairs = tuple(tuple(part.split("=", 1)) for part in (text or "").split(",") if part)
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ConfigError(
            f"columns is {text!r}; expected field=column, as in prompt=question,completion=answer"
        )
    for side in zip(*pairs, strict=True):
        if twice := [name for name, count in Counter(side).items() if count > 1]:
            raise ConfigError(f"columns is {text!r}, which names {twice[0]!r} twice")
    return tuple((field, column) for field, column in pairs)


@dataclass(frozen=True)
class Schema:
    """Accepted forms of records, and where their fields are.

    Attributes:
        forms: accepted forms; with `columns`, only those that have all the fields named.
        columns: (field, column) of fields with another name in the data.
        chat: whether Alpaca records become messages; else a prompt and a completion.

    Raises:
        ConfigError: no form has the fields of `columns`.
    """

    forms: tuple[str, ...] = FORMS
    columns: Columns = ()
    chat: bool = True

    def __post_init__(self) -> None:
        own = {field for field, _ in self.columns} - _BESIDE - set(_ALPACA)
        fitting = tuple(form for form in self.forms if form == PROMPT or own <= set(form.split("/")))
        if not fitting:
            raise ConfigError(
                f"columns names {', '.join(sorted(own))}; expected fields of one of {', '.join(self.forms)}"
            )
        object.__setattr__(self, "forms", fitting)

    def fields(self) -> set[str]:
        """Names in the data of the fields that records may have."""
        own = {key for form in self.forms for key in form.split("/")} | _BESIDE
        own |= set(_ALPACA) if self._takes_alpaca() else set()
        renamed = dict(self.columns)
        return {renamed.get(field, field) for field in own}

    def standard(self, where: str, fields: dict[str, Any], counts: Counter[str]) -> dict[str, Any]:
        """Rename columns, and convert Alpaca and ShareGPT records. Raises DataError."""
        if self.columns:
            fields = self._renamed(where, fields)
        key = "messages" if "messages" in self.forms else "prompt"
        named = {key for form in self.forms for key in form.split("/")}
        if CONVERSATIONS in fields and key not in fields and key in named:
            counts["records of ShareGPT's form (conversations), read as messages"] += 1
            return with_messages(where, fields, key)
        if self._takes_alpaca() and alpaca.is_alpaca(fields) and not (named - {"text"}) & fields.keys():
            if "text" in fields:  # the same record as one text
                counts["fields 'text' left aside"] += 1
                fields = {name: value for name, value in fields.items() if name != "text"}
            to = "messages" if self.chat else "prompt and completion"
            counts[f"records of Alpaca's form (instruction, input, output), read as {to}"] += 1
            return alpaca.from_alpaca(where, fields, self.chat)
        return fields

    def expected(self, found: Iterable[str]) -> str:
        """Describe the accepted forms, with advice for the fields that were found."""
        of_these = "exactly one of " if len(self.forms) > 1 else ""
        return f"{of_these}{', '.join(self.forms)}{self.advice(found)}"

    def advice(self, found: Iterable[str]) -> str:
        """Advice on a record with fields of well-known names that the accepted forms do not have."""
        there = set(found)
        known = [pair for pair in _SEEN_AS_PAIRS if there.issuperset(pair)]
        if known and "prompt/completion" in self.forms:
            return f" (or --columns prompt={known[0][0]},completion={known[0][1]})"
        if there >= {"chosen", "rejected"} and PAIRS not in self.forms:
            return " (pairs are for --objective dpo, orpo, simpo or reward)"
        if "messages" in self.forms and (lists := [name for name in _SEEN_AS_MESSAGES if name in there]):
            return f" (or --columns messages={lists[0]})"
        return ""

    def _takes_alpaca(self) -> bool:
        return ("messages" if self.chat else "prompt/completion") in self.forms

    def _renamed(self, where: str, fields: dict[str, Any]) -> dict[str, Any]:
        fields = dict(fields)
        found = ", ".join(map(repr, fields)) or "no fields"
        taken = {}
        for field, column in self.columns:
            if column not in fields:
                raise DataError(f"{where}: there is no column {column!r} for {field!r}; found {found}")
            taken[field] = fields.pop(column)
        return {**fields, **taken}


_ALPACA = (alpaca.INSTRUCTION, alpaca.INPUT, alpaca.OUTPUT, alpaca.HISTORY)
_BESIDE = {IMAGES, VIDEOS, TOOLS, OPTIONS, CONVERSATIONS, SYSTEM}
_SEEN_AS_MESSAGES = ("conversation", "dialog", "dialogue", "chat", "turns")
_SEEN_AS_PAIRS = (
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("instruction", "response"),
    ("problem", "solution"),
    ("input", "output"),
)
