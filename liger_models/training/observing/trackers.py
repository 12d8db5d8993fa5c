"""Export of metrics to TensorBoard, Weights & Biases, Trackio and MLflow, each by its own client.

They receive the numbers of metrics.jsonl, step by step. All are optional; requesting one that is not
installed fails before anything is loaded. Servers, projects and accounts are taken from each client's own
environment variables.
"""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from liger_models.convert.errors import ConfigError


class Tracker(ABC):
    """Receives records of numbers; a context manager that ends the record.

    Args:
        folder: the run's output folder.
        config: the run's settings.
        resumed_step: the last step that counts, if the run resumes.
    """

    @abstractmethod
    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int | None) -> None: ...

    @staticmethod
    def client() -> Any:
        """Import the client, if there is one; raises ImportError if it is not installed."""
        return None

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
    """Parse names such as "tensorboard,wandb"; all of these must be installed.

    Raises:
        ConfigError: an unknown name, or a package that is not installed.
    """
    found = tuple(dict.fromkeys(map(str.strip, names.split(",")))) if names else ()
    for name in found:
        if name not in TRACKERS:
            raise ConfigError(f"log is {names!r}; expected any of {', '.join(TRACKERS)}, separated by commas")
        try:
            TRACKERS[name].client()
        except ImportError as error:
            raise ConfigError(
                f"log needs {name}, which is not installed ({error}): pip install {name}; metrics.jsonl "
                "and metrics.csv are written without it"
            ) from error
    return found


def open_trackers(
    names: Iterable[str], folder: Path, config: dict[str, Any], resumed_step: int | None
) -> Iterator[Tracker]:
    """Open the trackers of a run with output folder `folder`, one at a time.

    Raises:
        ConfigError: a client refuses, for want of an account or a server, say.
    """
    for name in names:
        try:
            tracker = TRACKERS[name](folder, config, resumed_step)
        except Exception as error:  # any client's
            raise ConfigError(f"log: {name} cannot start a run ({type(error).__name__}: {error})") from error
        yield tracker


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
        self.writer = self.client().SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    @staticmethod
    def client() -> Any:
        from torch.utils import tensorboard

        return tensorboard

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class Continued(Tracker):
    """A tracker whose client appends to a run and cannot take steps back. A resumed run continues the same
    one, where steps that it repeats keep their first values.

    Attributes:
        last: file with the last step that the client has.
    """

    last: Path

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if step > self._seen:
            self._write(step, numbers)
            replaced = self.last.with_name(f".{self.last.name}.new")
            replaced.write_text(str(step), encoding="utf-8")
            os.replace(replaced, self.last)

    @cached_property
    def _seen(self) -> int:
        written = self.last.read_text(encoding="utf-8") if self.last.is_file() else ""
        return int(written) if written.isdecimal() else -1

    @abstractmethod
    def _write(self, step: int, numbers: dict[str, float]) -> None:
        """Record the numbers of a new step."""

    def _begin(self, file: Path, resumed_step: int | None) -> str | None:
        """The tracker's run that a resumed run continues, whose name is in `file`; None for a new one."""
        self.last = file.with_name(f"{file.name}_step")
        earlier = _identity(file, resumed_step)
        if earlier is None:
            self.last.unlink(missing_ok=True)
        return earlier


class WeightsAndBiases(Continued):
    """A run of the project "liger_models", or of WANDB_PROJECT, with the settings as its config."""

    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        identity = folder / "wandb" / "liger_models_run"
        identity.parent.mkdir(exist_ok=True)
        self.run = self.client().init(
            project=os.environ.get("WANDB_PROJECT", "liger_models"),
            name=folder.name,
            dir=str(folder),
            config=config,
            id=self._begin(identity, resumed_step) or _new_identity(identity),
            resume="allow",
        )

    @staticmethod
    def client() -> Any:
        import wandb

        return wandb

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=1) if failed else self.run.finish()


class Trackio(Continued):
    """A run of the project "liger_models", or of TRACKIO_PROJECT, with the settings as its config."""

    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        file = folder / "trackio_run"
        earlier = self._begin(file, resumed_step)
        # Trackio knows a run by its name.
        self.run = self.client().init(
            project=os.environ.get("TRACKIO_PROJECT", "liger_models"),
            name=f"{folder.name}-{(earlier or _new_identity(file))[:6]}",
            config=config,
            resume="allow" if earlier else "never",
        )

    @staticmethod
    def client() -> Any:
        import trackio

        return trackio

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish()


class MLflow(Continued):
    """A run of the experiment "liger_models", or of MLFLOW_EXPERIMENT_NAME, with the settings as its
    parameters.
    """

    def __init__(self, folder: Path, config: dict[str, Any], resumed_step: int | None) -> None:
        mlflow = self.client()
        # A client of this run's own: the module's functions act on a run of the process.
        self.mlflow, self.runs = mlflow, mlflow.MlflowClient()
        file = folder / "mlflow_run"
        if earlier := self._begin(file, resumed_step):
            self.run_id = earlier
            self.runs.update_run(earlier, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "liger_models")
        experiment = self.runs.get_experiment_by_name(name)
        number = self.runs.create_experiment(name) if experiment is None else experiment.experiment_id
        self.run_id = self.runs.create_run(number, run_name=folder.name).info.run_id
        file.write_text(self.run_id, encoding="utf-8")
        settings = [mlflow.entities.Param(key, str(value)[:500]) for key, value in config.items()]
        for first in range(0, len(settings), 100):  # the most that a server takes at once
            self.runs.log_batch(self.run_id, params=settings[first : first + 100])

    @staticmethod
    def client() -> Any:
        import mlflow
        import mlflow.entities

        return mlflow

    def _write(self, step: int, numbers: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self.mlflow.entities.Metric(name, value, now, step) for name, value in numbers.items()]
        self.runs.log_batch(self.run_id, metrics=metrics)

    def close(self, failed: bool) -> None:
        self.runs.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")


def _identity(file: Path, resumed_step: int | None) -> str | None:
    """The tracker's run that a resumed run continues."""
    return file.read_text(encoding="utf-8") if resumed_step is not None and file.is_file() else None


def _new_identity(file: Path) -> str:
    identity = hashlib.sha256(os.urandom(16)).hexdigest()[:16]
    file.write_text(identity, encoding="utf-8")
    return identity


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}
