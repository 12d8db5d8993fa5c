"""Process groups with one process per GPU that run `main(task, folder)` of a module and write results to
files.

with started("benchmarks.parallel", task, folder, 2) as processes: ...     # here
if __name__ == "__main__": be_a_rank(_main)                                # in the module
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.training.peer import in_one_line

Processes = Sequence[subprocess.Popen[bytes]]


@contextlib.contextmanager
def started(module: str, task: Any, folder: Path, processes: int) -> Iterator[Processes]:
    """Processes that are killed at the end. `folder` is for them only."""
    # Expandable segments avoid fragmentation; the same for every provider.
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    command = [sys.executable, "-m", module, json.dumps(task), str(folder)]
    ranks = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(i), "LOCAL_RANK": str(i)}, stdout=sys.stderr, cwd=ROOT
        )
        for i in range(processes)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()


def result(path: Path, ranks: Processes, end: float) -> dict[str, Any]:
    """Result that the ranks write to a file, or a note with the reason why there is none.

    Args:
        end: deadline, by time.monotonic().
    """
    while time.monotonic() < end:
        codes = [rank.poll() for rank in ranks]
        if path.exists():
            return json.loads(path.read_text())
        if notes := list(path.parent.glob("note*.json")):  # the processes may never end
            return {"note": json.loads(notes[0].read_text())}
        if any(codes) or None not in codes:
            ended = ", ".join(f"process {rank} with {code}" for rank, code in enumerate(codes))
            return {"note": f"failed: ended: {ended}"}
        time.sleep(0.1)
    return {"note": "stopped: time limit"}


def write(path: Path, found: Any) -> None:
    """Write atomically."""
    unready = path.with_suffix(".unready")
    unready.write_text(json.dumps(found))
    unready.rename(path)


def be_a_rank(main: Callable[[Any, Path], None]) -> None:
    import torch.distributed as dist

    task, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    try:
        main(task, folder)
    except Exception as error:
        memory = isinstance(error, torch.OutOfMemoryError)
        note = "out of memory" if memory else f"failed: {type(error).__name__}: {in_one_line(error)}"
        write(folder / f"note{rank}.json", note)
        raise
    dist.destroy_process_group()
