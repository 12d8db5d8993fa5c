"""Main loop of the processes of the job pool, in which jobs are compiled or measured (`pool.py`)."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks.training import step
from benchmarks.training.peer import in_one_line

BROKEN, PREPARED = "failed", "prepared"
UNUSED = "unused"  # key of a note of a process that has done nothing

# Modules of the peers.
THEIRS = {
    "transformers": ("transformers.models.auto.modeling_auto", "transformers.modeling_utils"),
    "liger_kernel.transformers": ("liger_kernel.transformers",),
}


def work(pipe: Any, device: str, peers: Sequence[str], shared: bool = False) -> None:
    """Main loop of the process: reports that it is ready, then processes jobs until the pipe is closed. A
    `shared` one first does what every job does on its device.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pipe is closed then
    import torch

    import liger_models.models.loading  # noqa: F401

    _import_peers(peers)
    on = torch.device("cuda:0" if device == "cuda" else device)
    if shared and on.type == "cuda":
        with contextlib.suppress(RuntimeError):  # if no memory is left, the job says so
            _open(on)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send("ready")
            job, ahead, together = pipe.recv()
            if lacks := step.lacks(job):
                pipe.send({"note": lacks, UNUSED: True})
                continue
            turn = functools.partial(_wait_for_turn, pipe if together else None, on) if shared else None
            try:
                if on.type == "cuda":
                    torch.cuda.set_device(on)
                result = step.compile_ahead(job, on) if ahead else step.measure(job, on, turn)
            except Exception as error:
                if not ahead:  # otherwise it is retried
                    message = f"{job.model} {job.provider}: {traceback.format_exc()[-6000:]}"
                    print(message, file=sys.stderr, flush=True)
                result = {"note": f"{BROKEN}: {type(error).__name__}: {in_one_line(error)}"}
            pipe.send(result)


def _open(device: Any) -> None:
    """Create the context of a GPU and load its libraries, which takes as long as to build a model; frees the
    memory that this takes.
    """
    import torch

    torch.cuda.set_device(device)
    x = torch.ones(1, 2, 64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    (out @ x).sum().backward()
    torch.cuda.synchronize(device)
    del x, out
    with contextlib.suppress(AttributeError):
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _wait_for_turn(pipe: Any, device: Any) -> None:
    """Give back memory that is not needed between steps, and wait until no other process uses the device;
    without a pipe none does.
    """
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    if pipe is not None:
        pipe.send(PREPARED)
        pipe.recv()


def _import_peers(names: Sequence[str]) -> None:
    """Import the peers, which takes seconds unless the process is a fork; jobs report missing ones."""
    importlib.import_module("benchmarks.training.imports")
    for name in names:
        with contextlib.suppress(ImportError):
            for module in THEIRS[name]:
                importlib.import_module(module)
            if name == "transformers":
                importlib.import_module(name).logging.set_verbosity_error()
