"""Callbacks: user code that a run calls in its first process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from liger_models.convert.errors import ConfigError, TrainingError, abbreviate
from liger_models.training.checkpoints.saving import Saver
from liger_models.training.processes.watch import Watch
from liger_models.training.processes.world import World
from liger_models.training.random_numbers import random_states


class Callback:
    """Base class of callbacks, to be passed to `train`; methods that are not overridden do nothing.

    If a method returns True, the run stops after the current step and exports its model as usual. An error in
    a method ends the run, and `train` raises it; the run can resume from its newest checkpoint. Random
    numbers drawn here do not change the run's. Of several processes only the first calls; the others wait.
    """

    def on_step(self, metrics: dict[str, Any]) -> bool | None:
        """Called after every step with its record in metrics.jsonl, except for `time`."""
        return None

    def on_evaluation(self, metrics: dict[str, Any]) -> bool | None:
        """Called after every evaluation, before `on_step` of its step, with `step`, `eval_loss` and the
        objective's other metrics. Step 0 is the model before training, for which `on_step` is not called.
        """
        return None

    def on_save(self, folder: Path) -> bool | None:
        """Called when a folder has been written: checkpoint-N, best, final or merged.

        Checkpoints are written while the run goes on, so this may be called some steps later, but always
        before the next one is written.
        """
        return None


class Callbacks:
    """The callbacks of a run.

    Attributes:
        stop: whether one of them has asked the run to stop.

    Raises:
        ConfigError: one of them is not a `Callback`.
    """

    def __init__(self, callbacks: Iterable[Callback], world: World, watch: Watch) -> None:
        if not isinstance(callbacks, Iterable):
            raise ConfigError(f"callbacks is {abbreviate(callbacks)}; expected a list of them")
        self.all, self.world, self.watch = tuple(callbacks), world, watch
        self.stop = False
        self._saved: list[Path] = []
        for callback in self.all:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"a callback is {callback!r:.100}; expected an instance of a subclass of "
                    "liger_models.Callback"
                )

    def recorded(self, record: dict[str, Any], saver: Saver) -> None:
        """Report a step, its evaluation, and the folders written since the last call."""

        def call(callback: Callback) -> bool:
            stop = False
            if "eval_loss" in record:
                named = {k: v for k, v in record.items() if k == "step" or k.startswith("eval_")}
                stop |= bool(callback.on_evaluation(named))
            if "loss" in record:
                stop |= bool(callback.on_step(dict(record)))
            return stop

        self._call(call, saver)

    def writing(self, folder: Path) -> None:
        """Record a folder that the saver is writing or has written."""
        self._saved.append(folder)

    def written(self, saver: Saver) -> None:
        """Report the recorded folders that are complete."""
        self._call(lambda callback: False, saver)

    def _call(self, call: Callable[[Callback], bool], saver: Saver) -> None:
        if not self.all:
            self._saved = []
            return
        self.watch.suspend_deadline("callbacks")
        put_back, python = random_states(self.world.device), random.getstate()
        try:
            self.stop |= self.world.once(lambda: self._call_here(call, saver))
        finally:
            put_back()
            random.setstate(python)
        if not self.world.main:
            self._saved = []

    def _call_here(self, call: Callable[[Callback], bool], saver: Saver) -> bool:
        saved = self._saved if saver.idle else []
        self._saved = [] if saver.idle else self._saved
        stop = False
        for callback in self.all:
            try:
                for folder in saved:
                    stop |= bool(callback.on_save(folder))
                stop |= call(callback)
            except Exception as error:
                if self.world.size == 1:
                    raise
                # The others may not be able to load its class.
                raise TrainingError(f"the callback {type(callback).__name__} failed: {error!r}") from error
        return stop
