"""`--config FILE`: options of a command from a YAML or JSON file; the command line takes precedence."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = ("help", "config", "print_config", "debug")  # options of the command line only


def add_config(group: argparse._ActionsContainer, of: argparse.ArgumentParser | None = None) -> None:
    """Add --config. `of`: the parser of the command whose files these are, if it is another one; defaults of
    options that both have then come from there, and all of its settings become the argument `of_config`.
    """
    action = group.add_argument(
        "--config",
        metavar="FILE",
        help="YAML or JSON file with options by name, alone or in sections as here; options of the command "
        "line take precedence",
    )
    action.of = of  # type: ignore[attr-defined]


def parse_with_config(parser: argparse.ArgumentParser, args: Sequence[str]) -> dict[str, Any]:
    """If `args` contain --config, make the file's values the parser's defaults, and return them.

    Raises:
        ConfigError: an unknown option, one given twice, or an unusable value.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    if not any(arg == "--config" or arg.startswith("--config=") for arg in args):
        return {}
    path = finder.parse_known_args(args)[0].config

    from liger_models.training.settings_file import read_settings

    (config,) = (action for action in parser._actions if action.dest == "config")
    other: argparse.ArgumentParser | None = config.of  # type: ignore[attr-defined]
    values = _values(other or parser, path, read_settings(Path(path)))
    if other is not None:
        values = {action.dest: action.default for action in other._actions} | values
        parser.set_defaults(of_config=dict(values))
        values = {name: values[name] for name in values.keys() & {action.dest for action in parser._actions}}
    for action in parser._actions:
        if action.dest in values:
            action.required = False
            if not action.option_strings:
                action.nargs = "?"
    for group in parser._mutually_exclusive_groups:
        if any(action.dest in values for action in group._group_actions):
            group.required = False
    parser.set_defaults(**values)
    return values


def drop_overridden(
    parser: argparse.ArgumentParser, args: argparse.Namespace, values: Mapping[str, Any]
) -> None:
    """Unset a value of the file where the command line has another option of its exclusive group, such as
    --epochs in place of --steps.
    """
    for group in parser._mutually_exclusive_groups if values else ():
        names = [action.dest for action in group._group_actions]
        changed = [name for name in names if getattr(args, name) != values.get(name)]
        if changed:
            for name in set(names) - set(changed):
                setattr(args, name, None)


def _values(parser: argparse.ArgumentParser, path: str, settings: Mapping[Any, Any]) -> dict[str, Any]:
    from liger_models.convert.errors import ConfigError

    options = {action.dest: action for action in parser._actions if action.dest not in HIDDEN}
    sections = {_slug(group.title): group for group in parser._action_groups if group.title}
    values: dict[str, Any] = {}

    def take(settings: Mapping[Any, Any], section: str) -> None:
        for key, value in settings.items():
            name = str(key).replace("-", "_")
            where = f"--config {path}: {section}{key}"
            if isinstance(value, dict) and _slug(str(key)) in sections and not section:
                take(value, f"{key}.")
            elif name in values:
                raise ConfigError(f"{where} is given twice")
            elif name in options:
                if value is not None:
                    values[name] = _convert(options[name], value, where)
            else:
                near = difflib.get_close_matches(name, [*options, *sections], n=1, cutoff=0.5)
                nearest = f"; the nearest is {near[0]}" if near else f"; see `{parser.prog} --help`"
                raise ConfigError(f"{where} is not an option{nearest}")

    take(settings, "")
    return values


def _slug(title: str) -> str:
    """Name of a section: the group's title without "the" and without text in brackets."""
    words = re.sub(r"\(.*\)", "", title).lower().replace("_", " ").replace("-", " ").split()
    return "_".join(words[1:] if words[:1] == ["the"] else words)


def _convert(action: argparse.Action, value: Any, where: str) -> Any:
    """The value that the command line would give the option."""
    from liger_models.convert.errors import ConfigError

    def refuse(expected: str) -> ConfigError:
        return ConfigError(f"{where} is {value!r}; expected {expected}")

    if action.nargs == 0:
        if not isinstance(value, bool):
            raise refuse("true or false")
        return value
    if isinstance(value, bool) and action.nargs == "?" and action.option_strings:
        return action.const if value else None
    several = action.nargs == "+"
    if several:
        items = value if isinstance(value, list) else [value]
    elif isinstance(value, list):
        items = [",".join(map(str, value))]
    elif isinstance(value, dict):  # settings such as --lora's
        items = [",".join(str(k) if v is True else f"{k}={_joined(v)}" for k, v in value.items())]
    else:
        items = [value]
    if not items or any(isinstance(item, (bool, dict, list)) or item is None for item in items):
        raise refuse("values" if several else "a value")
    kind: Any = action.type or str
    try:
        converted = [kind(str(item)) for item in items]
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise refuse(str(error) if type(error) is argparse.ArgumentTypeError else kind.__name__) from error
    if action.choices is not None and any(item not in action.choices for item in converted):
        raise refuse(f"one of {', '.join(map(str, action.choices))}")
    return converted if several else converted[0]


def _joined(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
