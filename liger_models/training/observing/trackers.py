"""Export of metrics to TensorBoard and Weights & Biases.

They receive the records of metrics.jsonl, step by step. Both are optional; requesting one that is not
installed fails before anything is loaded.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from liger_models.convert.errors import ConfigError


class Tracker(ABC):
    """Receives records of numbers; a context manager that ends the record."""

    @abstractmethod
    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Record the numbers of a step, by name."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """End the record of a run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None)


def parse_trackers(names: str | None) -> tuple[str, ...]:
    """Parse names such as "tensorboard,wandb".

    Raises:
        ConfigError: an unknown name, or a package that is not installed.
    """
    found = tuple(dict.fromkeys(names.split(","))) if names else ()
    for name in found:
        if name not in TRACKERS:
            raise ConfigError(f"log is {names!r}; expected any of {', '.join(TRACKERS)}, separated by commas")
        try:
            _IMPORTS[name]()
        except ImportError as error:
            raise ConfigError(
                f"log needs {name}, which is not installed ({error}): pip install {name}; metrics.jsonl "
                "and metrics.csv are written without it"
            ) from error
    return found


def open_trackers(
    names: Iterable[str], folder: Path, config: dict[str, Any], resumed_step: int | None
) -> Iterator[Tracker]:
    """Open the trackers of a run with output folder `folder`, one at a time."""
    for name in names:
        yield TRACKERS[name](folder, config, resumed_step)


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


class TensorBoard(Tracker):
    """Event files in `folder`/tensorboard. When a run resumes, later steps are removed."""

    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        purge = None if resumed_step is None else resumed_step + 1
        self.writer = _import_tensorboard().SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases(Tracker):
    """A run of the project "liger_models", or of WANDB_PROJECT, with the settings as its config. A resumed
    run continues the same W&B run; repeated steps keep their first values, which are identical.
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
