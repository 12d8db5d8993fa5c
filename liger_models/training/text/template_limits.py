"""Limits on the time and memory of chat templates, which are untrusted programs.

Without signals or another process, so the limits hold in every thread and on every platform. Processor time
is checked in every loop iteration, call and filter. Sizes are computed before anything of that size is
created.
"""

from __future__ import annotations

import functools
import re
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SECONDS = 60.0  # processor time per rendering
LONGEST = 1 << 25  # characters of a text, or entries of a list including nested ones
LARGEST = 1 << 20  # number passed to a function: a width or a count
DEEPEST = 64  # spaces of indented JSON
BITS = 1 << 16  # size of a number

# Filters that read only a list's top-level entries.
_STRUCTURAL = {
    *("length", "count", "list", "first", "last", "map", "select", "reject", "selectattr", "rejectattr"),
    *("batch", "slice", "reverse", "groupby", "items", "default", "d", "attr", "random", "join"),
    *("sum", "min", "max"),
}
# Methods and filters of text that make nothing longer than it is, whatever they are given.
_NEVER_LONGER = {
    *("strip", "lstrip", "rstrip", "trim", "startswith", "endswith", "split", "rsplit", "splitlines"),
    *("partition", "rpartition", "removeprefix", "removesuffix", "find", "rfind", "count", "length"),
}
_SEQUENCES, _CONTAINERS = (str, list, tuple), (list, tuple, dict)
_WIDTH = re.compile(r"\d{6,}")


class LimitError(Exception):
    """A template exceeds a limit."""


class Limits:
    """Limits of an environment's templates; call `begin` before each rendering."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def begin(self) -> None:
        self._of_thread.end = time.thread_time() + SECONDS
        self._of_thread.not_before = time.perf_counter() + SECONDS

    def tick(self, value: Any = True) -> Any:
        """Return the value while there is time.

        Raises:
            LimitError: time is up.
        """
        # A thread's own time goes no faster than this clock, which costs a tenth to read.
        if time.perf_counter() > getattr(self._of_thread, "not_before", float("inf")):
            left = self._of_thread.end - time.thread_time()
            if left < 0:
                raise LimitError(f"it ran for more than {SECONDS:g} s of processor time")
            self._of_thread.not_before = time.perf_counter() + left
        return value

    def size(self, count: int) -> None:
        """Raise LimitError if a text or a list would be too large."""
        if count > LONGEST:
            raise LimitError(f"it makes a text or a list of more than {LONGEST:,} characters")

    def measured(self, texts: Iterable[str]) -> Iterator[str]:
        """Check texts that will be joined, one by one."""
        total = 0
        for text in texts:
            total += len(text)
            self.size(total)
            yield text

    def made(self, value: Any) -> Any:
        """Check a new list or dict that will be read completely, by `str` or a comparison."""
        self.size(_expanded(value, {}))
        return value

    def operation(self, operator: str, left: Any, right: Any) -> None:
        """Raise LimitError if an operation's result would be too large."""
        if operator == "+":
            if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
                self.size(len(left) + len(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._bits(left.bit_length() * max(0, right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            self._bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, _SEQUENCES) and isinstance(count, int):
                    self.size(len(text) * max(0, count))
        elif operator == "%" and isinstance(left, str):
            self.call("%", [left, right], {})

    def call(self, name: str, values: Any, named: dict[str, Any]) -> None:
        """Raise LimitError if a function's result would be too large, given its arguments."""
        self.tick()
        if name in _NEVER_LONGER and isinstance(values[0], str):
            return
        given = [*values[1:], *named.values()]
        given += [one for value in given if isinstance(value, tuple) for one in value]
        numbers = [abs(value) for value in given if isinstance(value, int)]
        number, most = max(numbers, default=0), DEEPEST if name == "tojson" else LARGEST
        if number > most and name != "safe_range":  # it has a limit of its own
            raise LimitError(f"it calls {name!r} with the number {number}")
        text = values[0] if values else None
        if isinstance(text, str):
            self.size(self._length(name, text, given, number))
            return
        if isinstance(text, _CONTAINERS) and name not in _STRUCTURAL:
            self.made(text)
        if name == "join" and isinstance(text, list | tuple):
            between = len(str(given[0])) if given else 0
            self.size(sum(_expanded(one, {}) + between for one in text))

    def _length(self, name: str, text: str, given: list[Any], number: int) -> int:
        """Upper bound of the characters of a function's result."""
        texts = [value for value in given if isinstance(value, str)]
        longest = max(map(len, texts), default=0)
        if name in ("format", "format_map", "%"):
            if width := _WIDTH.search(text):
                raise LimitError(f"it calls {name!r} with a width of {width[0]}")
            values = [LARGEST * ("*" in text), *(_expanded(value, {}) for value in given)]
            return len(text) + (text.count("%") + text.count("{")) * max(values)
        if name == "replace" and len(texts) > 1:
            return len(text) + text.count(texts[0]) * len(texts[1])
        if name in ("expandtabs", "indent"):
            places = text.count("\n") + text.count("\t") + 1
            return len(text) + places * max(number, longest, 8)
        if name == "join":
            pieces = given[0] if given and isinstance(given[0], list | tuple) else ()
            return sum(_expanded(one, {}) + len(text) for one in pieces) + longest * (len(text) + 1)
        if name == "wordwrap":
            return len(text) * (longest + 1)
        if name == "translate":
            tables = [value for value in given if isinstance(value, dict)]
            return len(text) * max((_expanded(one, {}) for t in tables for one in t.values()), default=1)
        return 0

    def result(self, value: Any) -> Any:
        """Check a function's result; items of an iterator are counted as they are produced."""
        if isinstance(value, str):
            self.size(len(value))
        elif isinstance(value, list):
            self.size(sum(map(_shallow, value)))
        return map(self.tick, value) if isinstance(value, types.GeneratorType) else value

    def filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter to enforce the limits."""
        first = int(hasattr(function, "jinja_pass_arg"))  # the environment or context precedes the value

        @functools.wraps(function)
        def limited(*values: Any, **named: Any) -> Any:
            self.call(name, values[first:], named)
            return self.result(function(*values, **named))

        return limited

    def _bits(self, count: int) -> None:
        if count > BITS:
            raise LimitError(f"it computes a number of more than {BITS:,} bits")


def _shallow(value: Any) -> int:
    return len(value) if isinstance(value, str) else 1


def _expanded(value: Any, known: dict[int, int]) -> int:
    """Characters and entries of a value written out in full: shared parts count each time."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, list | tuple | dict):
        return 1
    if id(value) not in known:
        known[id(value)] = 0  # str stops at cycles
        items = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_expanded(item, known) for item in items)
    return known[id(value)]


@functools.cache
def limited_environment() -> Any:
    """Class of sandboxed environments that enforce `limits`."""
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    def checked(node: Any, name: str) -> Any:
        return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)

    class Checks(NodeTransformer):
        """Adds checks to every iteration and macro, and to new lists and dicts."""

        def visit_body(self, node: Any) -> Any:
            self.generic_visit(node)
            tick = checked(nodes.Const(True).set_lineno(node.lineno), "tick")
            node.body = [nodes.ExprStmt(tick).set_lineno(node.lineno), *node.body]
            if getattr(node, "test", None) is not None:
                node.test = nodes.And(tick, node.test).set_lineno(node.lineno)
            return node

        visit_For = visit_Macro = visit_CallBlock = visit_body

        def visit_container(self, node: Any) -> Any:
            self.generic_visit(node)
            return node if getattr(node, "ctx", "load") != "load" else checked(node, "made")

        visit_List = visit_Tuple = visit_Dict = visit_container

    class Generator(CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:
            self.write("environment.concat(map(environment.written, (")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write(")))")

    class Limited(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        intercepted_binops = frozenset({"*", "**", "+", "%"})
        limits: Limits

        def __init__(self, **options: Any) -> None:
            super().__init__(
                optimized=False, **options
            )  # it would compute constants while compiling a template
            self.limits = Limits()
            self.globals.pop("lipsum", None)

        def written(self, value: Any) -> str:
            """str, with a check of everything that a list or a dict contains."""
            return str(self.limits.made(value) if isinstance(value, _CONTAINERS) else value)

        def limit_filters(self) -> None:
            """Wrap all filters; call this after they are registered."""
            for name, function in list(self.filters.items()):
                self.filters[name] = self.limits.filter(name, function)
            self.filters |= {"tick": self.limits.tick, "made": self.limits.made}

        def _generate(self, source: Any, *arguments: Any, **options: Any) -> str:
            return super()._generate(Checks().visit(source), *arguments, **options)

        def concat(self, items: Iterable[str]) -> str:  # type: ignore[override]
            return "".join(self.limits.measured(items))

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            def limited(*values: Any, **named: Any) -> str:
                self.limits.call(value.__name__, [value.__self__, *values], named)
                return wrapped(*values, **named)

            return limited

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            self.limits.operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *values: Any, **named: Any) -> Any:
            own = getattr(function, "__self__", None)
            name = getattr(function, "__name__", type(function).__name__)
            self.limits.call(name, [own, *values], named)
            return self.limits.result(super().call(context, function, *values, **named))

    return Limited
