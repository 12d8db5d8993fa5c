"""Tests of several processes: the ranks of one group run one program, which lies beside its test. They are
forks of one process, which has imported what the program needs.

found = run_ranks(RANK, tmp_path, "fsdp")                 # in test_NAME.py, RANK being NAME_rank.py

def results(folder, rank, ranks, wrapper): ...            # in NAME_rank.py
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Count:
    """Counts the bytes of tensors that are read from checkpoints within it."""

    def __enter__(self) -> Count:
        self.nbytes, self.true = 0, os.preadv
        os.preadv = self
        return self

    def __call__(self, *arguments: Any) -> int:
        count = self.true(*arguments)
        self.nbytes += count
        return count

    def __exit__(self, *exc: object) -> None:
        os.preadv = self.true


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
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a GPU's context would not survive a fork
    process = subprocess.Popen(
        [sys.executable, __file__, str(program), backend, str(folder), *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        complaints = process.communicate(timeout=seconds)[1]
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.wait()
    assert process.returncode == 0, complaints
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def _be_all_ranks(program: str, backend: str, folder: Path, *arguments: str) -> None:
    torch.set_num_threads(1)
    results = runpy.run_path(program)["results"]
    context = multiprocessing.get_context("fork")
    ranks = int(os.environ["WORLD_SIZE"])
    children = [
        context.Process(target=_be_a_rank, args=(results, backend, folder, rank, ranks, *arguments))
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    waiting = {child.sentinel: child for child in children}
    while waiting and not any(child.exitcode for child in children):
        for sentinel in wait(list(waiting)):
            waiting.pop(sentinel).join()
    codes = [child.exitcode for child in children]
    for child in children:  # those that wait for one that failed
        child.kill()
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


def _be_a_rank(
    results: Callable[..., Any], backend: str, folder: Path, rank: int, ranks: int, *arguments: str
) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    dist.init_process_group(backend, init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    torch.save(results(folder, rank, ranks, *arguments), folder / f"rank{rank}.pt")
    # What outlives its process group waits for ever now and then: what `results` made is gone by now.
    dist.destroy_process_group()


if __name__ == "__main__":
    program, backend, folder, *arguments = sys.argv[1:]
    # Not this folder, in which names are those of packages; but this module.
    sys.path[0] = str(Path(program).parent)
    sys.modules["ranks"] = sys.modules["__main__"]
    _be_all_ranks(program, backend, Path(folder), *arguments)
