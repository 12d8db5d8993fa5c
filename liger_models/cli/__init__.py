"""`liger-models`, the command line: a module per command, with `add_parser(subparsers)` and `run(args)`.

May import everything, but command modules import nothing heavy before `run`, so that `--help` is fast.
Nothing imports it.
"""

import argparse
import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from liger_models import __version__
from liger_models.convert.errors import LigerModelsError

COMMANDS = (
    *("list", "init", "inspect", "plan", "verify", "look", "tokenize", "train"),
    *("export", "merge", "generate", "chat", "bench", "card"),
)
# Options of TRL, Axolotl and others whose names here are not similar.
OF_OTHERS = {
    "--learning-rate": "--lr",
    "--num-train-epochs": "--epochs",
    "--num-epochs": "--epochs",
    "--max-steps": "--steps",
    "--per-device-train-batch-size": "--batch-size",
    "--micro-batch-size": "--batch-size",
    "--gradient-accumulation-steps": "--gradient-accumulation",
    "--max-length": "--seq-len",
    "--max-seq-length": "--seq-len",
    "--sequence-len": "--seq-len",
    "--warmup-steps": "--warmup",
    "--warmup-ratio": "--warmup",
    "--lr-scheduler-type": "--schedule",
    "--max-grad-norm": "--clip",
    "--gradient-checkpointing": "--activation-memory",
    "--load-in-4bit": "--quantize",
    "--use-peft": "--lora",
    "--lora-r": "--lora",
    "--val-set-size": "--eval-fraction",
    "--report-to": "--log",
    "--output-dir": "--output",
    "--dataset": "--data",
    "--dataset-name": "--data",
    "--resume-from-checkpoint": "--resume",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments without the program's name; default: `sys.argv[1:]`.

    Returns:
        0 for success, 1 if the command ran and its check failed, 2 if it could not run (one line on stderr
        says why; `--debug` shows the traceback), 130 if it was interrupted.
    """
    parser = build_parser()
    args, others = parser.parse_known_args(argv)
    if others and args.command != "bench":
        args.parser.error(f"unrecognized arguments: {' '.join(others)}")
    args.others = others  # forwarded by `bench`
    try:
        with warnings.catch_warnings():
            # torch's complaint, when it is imported, about a package that nothing here needs.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            return args.run(args) or 0
    except KeyboardInterrupt:
        print(f"liger-models {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`| head`) closed it: not a failure, and Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (LigerModelsError, OSError) as error:
        if args.debug:
            raise
        print(f"liger-models {args.command}: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Takes options by their whole names only. A usage error is two lines: the error, with the nearest names
    of unknown options and values, and how to get help.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else [*args]
        if all(action.dest != "config" for action in self._actions):
            return super().parse_known_args(args, namespace)
        file = importlib.import_module("liger_models.cli.shared.config_file")
        try:
            values = file.parse_with_config(self, self._words)
        except LigerModelsError as error:
            self.error(str(error))
        parsed, others = super().parse_known_args(args, namespace)
        file.drop_overridden(self, parsed, values)
        return parsed, others

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), [*map(str, action.choices or ())], n=1)
            error.message += f"; the nearest is {near[0]}" if near else ""
            raise

    def error(self, message: str) -> NoReturn:
        for word in dict.fromkeys(word.partition("=")[0] for word in self._words):
            known = self._option_string_actions
            other = OF_OTHERS.get(word.replace("_", "-"))
            near = [other] if other in known else difflib.get_close_matches(word, known, n=1)
            near = near if word.startswith("--") else []
            if near and word not in known:
                message += f"; {word} is not an option, the nearest is {near[0]}"
        self.exit(2, f"{self.prog}: error: {message}\nSee `{self.prog} --help`.\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="liger-models",
        usage="liger-models COMMAND [--help] ...",
        description="Train, inspect, convert and run language models.",
    )
    parser.add_argument("--version", action="version", version=f"liger_models {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands", prog="liger-models"
    )
    for name in COMMANDS:
        module = importlib.import_module(f"liger_models.cli.{name}")
        module.add_parser(subparsers)
        command = subparsers.choices[name]
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run, parser=command)
        purpose = (command.description or "").removeprefix(f"`liger-models {name}`: ")  # of a docstring
        command.description = purpose[:1].upper() + purpose[1:]
    return parser
