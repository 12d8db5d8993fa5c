"""Ranks as children of one process, which has imported what they need once, before it has any thread."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = 240  # seconds


def run_ranks(main: Callable[[Path, int, int], None], folder: Path, ranks: int) -> None:
    """`main(folder, rank, ranks)` in so many processes, in a process group; ends this one if one fails."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=_rank, args=(main, folder, rank, ranks), daemon=True) for rank in range(ranks)
    ]
    for child in children:
        child.start()
    began = time.monotonic()
    while any(child.is_alive() for child in children) and time.monotonic() < began + PATIENCE:
        if any(child.exitcode for child in children):
            break
        time.sleep(0.05)
    if codes := [child.exitcode for child in children if child.exitcode != 0]:
        for child in children:
            child.kill()
        sys.exit(f"ranks have ended with {codes} (None: at work for {PATIENCE} s)")


def _rank(main: Callable[[Path, int, int], None], folder: Path, rank: int, ranks: int) -> None:
    # They meet in a file: a port that was free a moment ago may be another test's by now.
    meeting = (folder / f"meeting{ranks}").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    main(folder, rank, ranks)  # what outlives its process group waits for ever now and then
    dist.destroy_process_group()
