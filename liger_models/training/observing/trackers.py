"""The records of a run for programs that draw them: TensorBoard, and Weights & Biases.

They get what metrics.jsonl gets, step by step. Neither is needed for a run; who asks for one that is not
installed is told before anything is loaded.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from liger_models.convert.errors import ConfigError


class Tracker(ABC):
    """Takes records of numbers, until it is left as a context manager."""

    @abstractmethod
    def write(self, step: int, numbers: dict[str, float]) -> None:
        """The numbers of a step, by name."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """End the record of a run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None)


def parse_trackers(names: str | None) -> tuple[str, ...]:
    """The names in "tensorboard,wandb".

    Raises:
        ConfigError: one is unknown, or not installed.
    """
    found = tuple(dict.fromkeys(names.split(","))) if names else ()
    for name in found:
        if name not in TRACKERS:
            raise ConfigError(f"log is {names!r}; expected some of {', '.join(TRACKERS)}, joined by commas")
        try:
            _IMPORTS[name]()
        except ImportError as error:
            raise ConfigError(
                f"log asks for {name}, which is not installed ({error}): pip install {name}; metrics.jsonl "
                "and metrics.csv are written without it"
            ) from error
    return found


def open_trackers(
    names: Iterable[str], folder: Path, config: dict[str, Any], resumed_step: int | None
) -> Iterator[Tracker]:
    """Open the trackers of a run whose output is `folder`, one at a time."""
    for name in names:
        yield TRACKERS[name](folder, config, resumed_step)


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


class TensorBoard(Tracker):
    """Event files in `folder`/tensorboard. What follows the step that a run goes on from is taken back."""

    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        purge = None if resumed_step is None else resumed_step + 1
        self.writer = _import_tensorboard().SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases(Tracker):
    """A run of the project "liger_models", or of what WANDB_PROJECT says, with the settings as its config. A
    run that goes on is the same run there; of steps that are made again it keeps the first values, which are
    the same.
    """

    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        import os

        wandb = _import_wandb()
        identity = folder / "wandb" / "liger_models_run"
        identity.parent.mkdir(exist_ok=True)
        if resumed_step is None or not identity.is_file():
            identity.write_text(hashlib.sha256(os.urandom(16)).hexdigest()[:16], encoding="utf-8")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "liger_models"),
            name=folder.name,
            dir=str(folder),
            config=config,
            id=identity.read_text(encoding="utf-8"),
            resume="allow",
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=1) if failed else self.run.finish()


def _import_tensorboard() -> Any:
    from torch.utils import tensorboard

    return tensorboard


def _import_wandb() -> Any:
    import wandb

    return wandb


TRACKERS: dict[str, Callable[[Path, dict[str, Any], int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
_IMPORTS: dict[str, Callable[[], Any]] = {"tensorboard": _import_tensorboard, "wandb": _import_wandb}
