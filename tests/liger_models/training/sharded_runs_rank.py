"""One rank of test_sharded_runs.py: training runs one after the other.

Run as `python sharded_runs_rank.py FOLDER`, with RANK and WORLD_SIZE set; reads FOLDER/runs.json: of each run
its settings, the step in which the second rank is told to stop (0: none), and how many ranks a node has.
Writes FOLDER/outcomes{rank}.json: of each run the records, or how it was stopped.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from liger_models.training import TrainConfig, TrainingInterrupted, train
from liger_models.training.loop import Run

update = Run._update


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    outcomes = []
    for options, stop_at, node in json.loads((folder / "runs.json").read_text()):
        os.environ["LOCAL_WORLD_SIZE"] = str(node)
        options |= {key: tuple(options[key]) for key in ("data", "eval_data")}
        Run._update = stopping_at(stop_at if rank == 1 else 0)
        try:
            outcomes.append(train(TrainConfig(**options)).records)
        except TrainingInterrupted as stop:
            outcomes.append(str(stop))
    (folder / f"outcomes{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def stopping_at(step):
    def stopping(self, rate):
        if self.progress.step + 1 == step:  # which all ranks hear of in the next one
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, rate)

    return stopping


if __name__ == "__main__":
    main(Path(sys.argv[1]))
