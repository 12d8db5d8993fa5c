"""Jinja environments for chat templates, set up as transformers' own; one also traces the origins of text.

Their classes are in template_classes.py, which imports jinja2. jinja2 itself is not modified.
"""

from __future__ import annotations

import datetime
import importlib
import json
from typing import Any

from liger_models.convert.errors import DataError


def environment() -> Any:
    """An environment configured as in transformers' chat templates."""
    return _completed(_classes().PlainEnvironment)


def tracing_environment() -> Any:
    """The same, with traced strings. Set `trace` before each rendering."""
    return _completed(_classes().TracingEnvironment)


def _classes() -> Any:
    """The module of the classes, which are jinja2's.

    Raises:
        DataError: without jinja2.
    """
    try:
        importlib.import_module("jinja2")
    except ImportError as error:
        raise DataError(
            "`messages` need the jinja2 package for the chat template: pip install jinja2"
        ) from error
    from liger_models.training.text import template_classes

    return template_classes


def _completed(kind: Any) -> Any:
    made = kind(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", kind.generation])
    # Some templates write today's date into the system prompt; a resumed run must see the same tokens, so
    # "today" is the fallback date of Llama's templates.
    made.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
    made.globals["raise_exception"] = _raise_exception
    made.filters["tojson"] = _to_json
    made.ready()
    made.limit_filters()
    return made


def _raise_exception(message: str) -> None:
    raise _classes().TemplateError(message)


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
