"""One rank of test_sharded_runs.py: training runs one after the other.

Reads FOLDER/runs.json: of each run its settings, the step in which the second rank is told to stop (0: none),
and how many ranks a node has. Gives of each run the records, or how it was stopped.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from liger_models.training import TrainConfig, TrainingInterrupted, train
from liger_models.training.loop import Run

update = Run._update


def results(folder: Path, rank: int, ranks: int) -> list[Any]:
    outcomes: list[Any] = []
    for options, stop_at, node in json.loads((folder / "runs.json").read_text()):
        os.environ["LOCAL_WORLD_SIZE"] = str(node)
        options |= {key: tuple(options[key]) for key in ("data", "eval_data", "train_only")}
        torch.use_deterministic_algorithms(options["device"] == "cuda", warn_only=True)
        Run._update = stopping_at(stop_at if rank == 1 else 0)
        try:
            outcomes.append(train(TrainConfig(**options)).records)
        except TrainingInterrupted as stop:
            outcomes.append(str(stop))
    return outcomes


def stopping_at(step):
    def stopping(self, rate):
        if self.progress.step + 1 == step:  # which all ranks hear of in the next one
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, rate)

    return stopping
