"""Strings that record the origin of each character through all operations of str.

    run      (length, tag)
    tag      (source, place, marked)
    source   (message, field) that the text is from; None for text of the template
    place    message whose loop iteration in the template wrote this; None before writing or outside
    marked   whether it is enclosed in {% generation %}

A chat template renders its messages as such strings (template_program.py), so that answers can be located in
a single rendering of the whole conversation, whatever the template strips, splits, moves or drops.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Source = tuple[int, str]
Tag = tuple[Source | None, int | None, bool]
Run = tuple[int, Tag]

SEVERAL = "several"  # field of text made from several fields of one message
LOST = "lost"  # prefix of the field of text with mixed origins; the operation's name follows


class Trace:
    """The trace of one rendering.

    Args:
        answers: indices of the assistant's messages.

    Attributes:
        place: message of the current iteration.
    """

    def __init__(self, answers: Iterable[int] = ()) -> None:
        self.answers = set(answers)
        self.index: dict[int, int] = {}
        self.place: int | None = None
        self.outer: list[int | None] = []

    def hold(self, messages: list[Any]) -> None:
        """Register these messages as passed to the template. Ids are unique only among live objects."""
        self.kept = messages
        self.index = {id(message): number for number, message in enumerate(messages)}

    def begin_loop(self) -> None:
        self.outer.append(self.place)

    def end_loop(self) -> None:
        self.place = self.outer.pop()

    def enter(self, *values: Any) -> None:
        """Begin an iteration of a loop with these targets: a message, or something else within it."""
        outer = self.outer[-1]
        found = [self.index[id(value)] for value in values if id(value) in self.index]
        if not found and outer is None:  # copied messages
            found = [source[0] for value in values if isinstance(value, dict) for source in _sources(value)]
        self.place = found[0] if found else outer

    def enter_item(self, items: Any, number: Any) -> None:
        """Begin an iteration of a loop over the indices of items."""
        if isinstance(items, list) and isinstance(number, int) and -len(items) <= number < len(items):
            self.place = self.index.get(id(items[number]), self.place)

    def text(self, text: str, runs: list[Run]) -> Traced:
        made = str.__new__(Traced, text)
        made.runs, made.trace = runs, self
        return made

    def of(self, text: str, source: Source) -> Traced:
        """Text from a message."""
        return self.text(text, [(len(text), (source, None, False))] if text else [])

    def here(self, text: str) -> list[Run]:
        """Runs of text written at this point."""
        place = self.place
        if type(text) is not Traced:
            return [(len(text), (None, place, False))] if text else []
        if place is None or all(tag[1] is not None for _, tag in text.runs):
            return text.runs
        return [(length, tag if tag[1] is not None else (tag[0], place, tag[2])) for length, tag in text.runs]

    def join(self, items: Iterable[str]) -> Traced:
        """Concatenate items. Items of an iterator are written as they are produced."""
        texts: list[str] = []
        runs: list[Run] = []
        for item in items:
            texts.append(item)
            runs += self.here(item)
        return self.text("".join(texts), runs)

    def mark(self, text: str) -> Traced:
        """Copy marked as generated."""
        return self.text(text, [(length, (*tag[:2], True)) for length, tag in self.here(text)])

    def made_of(self, text: str, values: Any, name: str) -> str:
        """Result of an operation without its own rule, with the origin of its inputs.

        The origin is lost if template text is mixed with a message's, or several messages' texts are mixed.
        """
        same = [value for value in _leaves(values) if value.runs]
        if not text or not same:
            return text
        for value in same:
            if str.__eq__(value, text):
                return value
        tags = {tag for value in same for _, tag in value.runs}
        sources = {tag[0] for tag in tags}
        if len(same) == 1 and len(same[0]) == len(text):
            return self.text(text, same[0].runs)  # case, and the like
        if len({source and source[0] for source in sources}) > 1:
            mixed = sorted(source for source in sources if source)
            found = next((source for source in mixed if source[0] in self.answers), mixed[0])
            source: Source | None = (found[0], f"{LOST} {name}")
        else:
            source = next(iter(sources))
            if source and len(sources) > 1:
                source = (source[0], SEVERAL)
        place = next(iter(tags))[1] if len({tag[1] for tag in tags}) == 1 else self.place
        return self.text(text, [(len(text), (source, place, all(tag[2] for tag in tags)))])


class Traced(str):
    """A str with the origins of its characters. Methods that return str return such strings."""

    __slots__ = ("runs", "trace")
    runs: list[Run]
    trace: Trace

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Traced:
        if not isinstance(other, str):
            return NotImplemented
        return self.trace.text(str.__add__(self, other), self.trace.here(self) + self.trace.here(other))

    def __radd__(self, other: str) -> Traced:
        if not isinstance(other, str):
            return NotImplemented
        return self.trace.text(str.__add__(other, self), self.trace.here(other) + self.trace.here(self))

    def __mul__(self, count: Any) -> Traced:
        return self.trace.text(str.__mul__(self, count), self.runs * max(0, count))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return percent(self.trace, self, values)

    def __rmod__(self, template: str) -> str:
        return percent(self.trace, template, self)

    def __iter__(self) -> Iterator[Traced]:  # type: ignore[override]
        tags = itertools.chain.from_iterable(itertools.repeat(tag, length) for length, tag in self.runs)
        for character, tag in zip(str.__iter__(self), tags, strict=True):
            yield self.trace.text(character, [(1, tag)])

    def __getitem__(self, key: Any) -> Traced:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._cut(start, max(start, stop))
            return self.trace.join(list(self)[key])
        number = operator.index(key)
        start = number + len(self) if number < 0 else number
        if not 0 <= start < len(self):
            raise IndexError("string index out of range")
        return self._cut(start, start + 1)

    def _cut(self, start: int, stop: int) -> Traced:
        text = str.__getitem__(self, slice(start, stop))
        if len(text) == len(self):
            return self
        runs, begin = [], 0
        for length, tag in self.runs:
            end = begin + length
            if end > start and begin < stop:
                runs.append((min(end, stop) - max(begin, start), tag))
            begin = end
        return self.trace.text(text, runs)

    def strip(self, characters: str | None = None) -> Traced:  # type: ignore[override]
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> Traced:  # type: ignore[override]
        return self._cut(len(self) - len(str.lstrip(self, characters)), len(self))

    def rstrip(self, characters: str | None = None) -> Traced:  # type: ignore[override]
        return self._cut(0, len(str.rstrip(self, characters)))

    def removeprefix(self, prefix: str) -> Traced:
        return self._cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str) -> Traced:
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[Traced]:  # type: ignore[override]
        return self._parts(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list[Traced]:  # type: ignore[override]
        return self._parts(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Traced]:  # type: ignore[override]
        whole = self._parts(str.splitlines(self, True), "")
        plain = str.splitlines(self, keepends)
        return [line._cut(0, len(text)) for line, text in zip(whole, plain, strict=True)]

    def partition(self, sep: str) -> tuple[Traced, ...]:  # type: ignore[override]
        return tuple(self._parts(str.partition(self, sep), ""))

    def rpartition(self, sep: str) -> tuple[Traced, ...]:  # type: ignore[override]
        return tuple(self._parts(str.rpartition(self, sep), ""))

    def _parts(self, texts: Iterable[str], sep: str | None) -> list[Traced]:
        """Parts in order, with `sep` between them; None means white space."""
        parts, place = [], 0
        for text in texts:
            if sep is None:
                place = str.index(self, text, place)
            parts.append(self._cut(place, place + len(text)))
            place += len(text) + len(sep or "")
        return parts

    def join(self, items: Iterable[str]) -> Traced:
        return join(self.trace, self, items)

    def replace(self, old: str, new: str, count: Any = -1, /) -> Traced:  # type: ignore[override]
        if not old:
            mixed = self.trace.text(" ", [(1, (None, None, False))])
            return self.trace.made_of(str.replace(self, old, new, count), [self, new, mixed], "replace")  # type: ignore[return-value]
        return join(self.trace, new, self.split(old, count))

    def format(self, *values: Any, **named: Any) -> str:
        return braces(self.trace, self, values, named)

    def format_map(self, named: Any) -> str:  # type: ignore[override]
        return braces(self.trace, self, (), named)


def _made(name: str) -> Callable[..., str]:
    operation = getattr(str, name)

    def method(self: Traced, *values: Any, **named: Any) -> str:
        return self.trace.made_of(operation(self, *values, **named), [self, values, named], name)

    method.__name__ = name
    return method


for _name in (
    *("upper", "lower", "title", "capitalize", "casefold", "swapcase", "translate", "expandtabs"),
    *("center", "ljust", "rjust", "zfill"),
):
    setattr(Traced, _name, _made(_name))


def join(trace: Trace, separator: str, items: Iterable[str]) -> Traced:
    """Traced `separator.join(items)`."""
    pieces: list[str] = []
    for item in items:
        if not isinstance(item, str):
            raise TypeError(
                f"sequence item {len(pieces)}: expected str instance, {type(item).__name__} found"
            )
        pieces += [separator, item] if pieces else [item]
    return trace.join(pieces)


_PERCENT = re.compile(
    r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*(?:\d+|\*)?(?:\.(?:\d+|\*))?[hlL]?(?P<kind>.)", re.DOTALL
)


def percent(trace: Trace, template: str, values: Any) -> str:
    """Traced `template % values`."""
    plain = str.__mod__(template, values)
    found = list(_PERCENT.finditer(template))
    if any("*" in match[0] for match in found):
        return trace.made_of(plain, [template, values, trace.text("x", [(1, (None, None, False))])], "%")
    kept = template if isinstance(template, Traced) else trace.text(template, trace.here(template))
    waiting = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    last = 0
    for match in found:
        pieces.append(kept[last : match.start()])
        last = match.end()
        if match["kind"] == "%":
            pieces.append(kept[match.start() : match.start() + 1])
            continue
        value = values[match["key"]] if match["key"] is not None else next(waiting)
        spec = match[0] if match["key"] is None else match[0].replace(f"({match['key']})", "", 1)
        pieces.append(trace.made_of(str.__mod__(spec, (value,)), [value], "%"))
    return trace.join([*pieces, kept[last:]])


def braces(trace: Trace, template: str, values: Any, named: Any, formatter: Any = None) -> str:
    """Traced `template.format(*values, **named)`; a formatter of `string` looks up fields."""
    import string

    formatter = formatter or string.Formatter()
    pieces: list[str] = []
    number = itertools.count()
    for literal, name, spec, conversion in formatter.parse(template):
        pieces.append(literal)
        if name is None:
            continue
        if not name or name[0] in ".[":
            name = f"{next(number)}{name}"
        value = formatter.convert_field(formatter.get_field(name, values, named)[0], conversion)
        nested = braces(trace, spec, values, named, formatter) if spec else ""
        pieces.append(trace.made_of(formatter.format_field(value, str.__str__(nested)), [value], "format"))
    return trace.join(pieces)


def _leaves(value: Any) -> Iterator[Traced]:
    """Traced strings within a value."""
    if isinstance(value, Traced):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(key)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def _sources(value: Any) -> Iterator[Source]:
    return (tag[0] for leaf in _leaves(value) for _, tag in leaf.runs if tag[0])


def has_traced(value: Any) -> bool:
    return next(_leaves(value), None) is not None
