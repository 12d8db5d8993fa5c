"""One rank of test_sharded_runs.py: a sequence of training runs.

Read FOLDER/runs.json: for each run its settings, the step at which the second rank gets a stop signal (0 for
none; below 0: the step after which a callback stops the run), and the ranks per node. The results are the
records of each run, or the message with which it stopped.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from liger_models.training import Callback, TrainConfig, TrainingInterrupted, train
from liger_models.training.loop import Run

update = Run._update


def results(folder: Path, rank: int, ranks: int) -> list[Any]:
    outcomes: list[Any] = []
    for options, stop_at, node in json.loads((folder / "runs.json").read_text()):
        os.environ["LOCAL_WORLD_SIZE"] = str(node)
        options |= {key: tuple(options[key]) for key in ("data", "eval_data", "freeze", "add_tokens")}
        torch.use_deterministic_algorithms(options["device"] == "cuda", warn_only=True)
        Run._update = stopping_at(stop_at if rank == 1 else 0)
        try:
            callbacks = [StopAfter(-stop_at)] if stop_at < 0 else []
            outcomes.append(train(TrainConfig(**options), callbacks).records)
        except TrainingInterrupted as stop:
            outcomes.append(str(stop))
    return outcomes


class StopAfter(Callback):
    def __init__(self, step):
        self.step, self.saved = step, []

    def on_step(self, metrics):
        return metrics["step"] == self.step and "checkpoint-2" in self.saved

    def on_save(self, folder):
        self.saved.append(folder.name)


def stopping_at(step):
    def stopping(self, rate):
        if self.progress.step + 1 == step:  # all ranks learn of it in the next step
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, rate)

    return stopping
