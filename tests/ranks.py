"""Tests of several processes: the ranks of one group are runs of one program, which lies beside its test.

found = run_ranks(RANK, tmp_path, "fsdp")                 # in test_NAME.py, RANK being NAME_rank.py

def results(folder, rank, ranks, wrapper): ...            # in NAME_rank.py
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    program: Path,
    folder: Path,
    *arguments: str,
    ranks: int = 2,
    backend: str = "gloo",
    seconds: float = 120,
) -> list[Any]:
    """What the program's `results` gave for each rank. Fails with all complaints, if one rank does."""
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(program), backend, str(folder), *arguments],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        complaints = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, complaints
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def _be_a_rank(program: str, backend: str, folder: Path, *arguments: str) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    dist.init_process_group(backend, init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    results = runpy.run_path(program)["results"]
    torch.save(results(folder, rank, ranks, *arguments), folder / f"rank{rank}.pt")
    # What outlives its process group waits for ever now and then: what `results` made is gone by now.
    dist.destroy_process_group()


if __name__ == "__main__":
    program, backend, folder, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(program).parent)  # not this folder, in which names are those of packages
    _be_a_rank(program, backend, Path(folder), *arguments)
