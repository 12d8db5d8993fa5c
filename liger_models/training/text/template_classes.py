"""Classes of jinja2 environments for chat templates: one renders as transformers does, the other also traces
the origins of text.

Both are sandboxes, since templates are untrusted. The second differs wherever text would lose the origin that
`Traced` carries (origins.py): where output is joined, where plain strings meet traced ones, and in filters,
which may call any Python function. It also tracks the message of the current loop iteration.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.runtime import LoopContext
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Namespace

from liger_models.training.text.origins import Trace, Traced, braces, has_traced, join, percent
from liger_models.training.text.template_limits import limited_environment

__all__ = ["PlainEnvironment", "TemplateError", "TracingEnvironment"]

Limited = limited_environment()
_OF_DICT = frozenset(dir(dict))
_SAFE_OF_STR = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
_OF_LOOP = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))


class GenerationTags(Extension):
    """`{% generation %}...{% endgeneration %}`, transformers' extension of the language."""

    tags = {"generation"}  # noqa: RUF012 (as its base class has it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Any) -> str:
        return caller()


class Marking(GenerationTags):
    """Marks the text between the tags in the trace."""

    def _enclosed(self, caller: Any) -> str:
        return self.environment.trace.mark(caller())  # type: ignore[attr-defined]


class DirectEnvironment(Limited):  # type: ignore[misc, valid-type]
    """Attribute lookup on messages and text without raising and catching errors first."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str or kind is Traced) and attribute in _SAFE_OF_STR:
            return getattr(obj, attribute)
        if kind is LoopContext and attribute in _OF_LOOP:
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            with contextlib.suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class PlainEnvironment(DirectEnvironment):
    """Renders as transformers does."""

    generation = GenerationTags

    def ready(self) -> None:
        self.finalize = self.written


class Generator(CodeGenerator):
    """Generates code that notifies the trace of loops and output."""

    def visit_For(self, node: Any, frame: Any) -> None:
        names = [name.name for name in node.target.find_all(nodes.Name)] or [node.target.name]
        load = [nodes.Name(name, "load") for name in names]
        hooks = [_trace_call("enter", load)]
        chosen = {
            (item.node.name, item.arg.name)
            for item in _items_within(node.body)
            if isinstance(item.node, nodes.Name) and isinstance(item.arg, nodes.Name)
        }
        for items, number in sorted(chosen):  # {% for i in range(n) %}...{{ messages[i] }}
            if number in names and items not in names:
                pair = [nodes.Name(items, "load"), nodes.Name(number, "load")]
                hooks.append(_trace_call("enter_item", pair))
        for hook in hooks:
            hook.set_lineno(node.lineno)
        node.body = [*hooks, *node.body]
        self.writeline("environment.trace.begin_loop()")
        super().visit_For(node, frame)
        self.writeline("environment.trace.end_loop()")

    def visit_Call(self, node: Any, frame: Any, **options: Any) -> None:  # type: ignore[override]
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            return super().visit_Call(node, frame, **options)
        self.write(f"environment.trace.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def visit_Concat(self, node: Any, frame: Any) -> None:
        self.write("environment.concat(map(environment.finalize, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def buffer(self, frame: Any) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.buffer()")


def _trace_call(name: str, arguments: list[Any]) -> Any:
    return nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None))


def _items_within(body: list[Any]) -> Iterable[Any]:
    return (item for child in body for item in child.find_all(nodes.Getitem))


class Buffer(list):  # type: ignore[type-arg]
    """Output of a macro or a block; origins are recorded when it is written."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def append(self, text: str) -> None:
        super().append(self.trace.text(text, self.trace.here(text)))

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)


class TracingEnvironment(DirectEnvironment):
    """Renders traced strings, whose characters keep their origins."""

    generation = Marking
    code_generator_class = Generator
    trace = Trace()

    def ready(self) -> None:
        self.finalize = self._written
        for name, function in list(self.filters.items()):
            self.filters[name] = self._keeping(name, function)
        self.filters |= {
            "join": self._join,
            "replace": self._replace,
            "format": self._format,
            "safe": self._written,  # autoescaping is off
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        known = type(obj) is Traced and attr in Traced.__slots__  # invisible to templates
        return not known and super().is_safe_attribute(obj, attr, value)

    def concat(self, items: Iterable[str]) -> str:  # type: ignore[override]
        return self.trace.join(self.limits.measured(items))

    def buffer(self) -> Buffer:
        return Buffer(self.trace)

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return value if type(value) is Traced else str(value)
        text = self.written(value)
        if isinstance(value, list | dict) and has_traced(value):
            return self.trace.made_of(text, value, "as text")
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self.limits.operation(operator, left, right)
            return percent(self.trace, left, right) if has_traced([left, right]) else left % right
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *values: Any, **named: Any) -> Any:
        own = getattr(function, "__self__", None)
        if type(own) is str and isinstance(function, types.BuiltinMethodType) and has_traced([values, named]):
            function = getattr(self.trace.text(own, self.trace.here(own)), function.__name__)
        result = super().call(context, function, *values, **named)
        if type(result) is str and result:
            name = getattr(function, "__name__", type(function).__name__)
            return self.trace.made_of(result, [own, values, named], name)
        return result

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template, of_map = value.__self__, value.__name__ == "format_map"

        def written(*values: Any, **named: Any) -> str:
            self.limits.call(value.__name__, [template, *values], named)
            if of_map:
                (named,), values = values, ()
            return braces(self.trace, template, values, named, SandboxedFormatter(self))

        return written

    def _keeping(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that its text keeps the origin of its input."""

        @functools.wraps(function)
        def kept(*values: Any, **named: Any) -> Any:
            result = function(*values, **named)
            if isinstance(result, str) and type(result) is not Traced and result:
                return self.trace.made_of(result, [values, named], name)
            return result

        return kept

    def _join(self, value: Any, d: str = "", attribute: Any = None) -> str:
        chosen = value if attribute is None else map(make_attrgetter(self, attribute), value)
        return join(self.trace, self._written(d), map(self._written, chosen))

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text = self._written(s)
        text = self.trace.text(text, self.trace.here(text))
        return text.replace(self._written(old), self._written(new), -1 if count is None else count)

    def _format(self, value: Any, *values: Any, **named: Any) -> str:
        return percent(self.trace, self._written(value), named or values)
