"""Job pool: each job is measured in its own process, one at a time per device, on all devices in parallel.

Libraries that ran before may have changed torch's choices, or transformers' model, so no process measures two
jobs. The next process imports while a job runs. On a GPU everything is compiled before anything is timed, on
all cores in parallel; a compiling process serves many jobs, but none after a job for which liger-kernel
patched more of a model. Failed jobs and timeouts become notes.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import ROOT
from benchmarks.training.peer import in_one_line
from benchmarks.training.step import Job, Result

# A GPU's context does not survive a fork.
_SPAWN = multiprocessing.get_context("spawn")
_MOST_AT_ONCE = 14  # compiling on one GPU: each takes half a GiB of it, and a core
_SECONDS_AHEAD = 120.0  # per job
_SECONDS_TO_COMPILE = 90.0  # more per job under torch.compile
_RESERVE = 3  # processes that import ahead on a GPU: a job is often shorter than its imports
_BROKEN = "failed"

Group = Sequence[Job]


def measure_all(
    groups: Sequence[Group],
    devices: Sequence[str],
    time_limit: float,
    ahead: bool,
    within: float = math.inf,
) -> Iterator[tuple[Job, Result]]:
    """Yield every job with its result when ready.

    Args:
        groups: jobs to be compared, which are measured on the same device in order.
        devices: such as cuda:0; each measures one job at a time.
        time_limit: seconds per job; jobs under torch.compile have more.
        ahead: compile everything before measuring.
        within: seconds for all jobs; unfinished ones get a note.
    """
    end = time.monotonic() + within
    # Expandable segments avoid fragmentation; the same for every provider.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # One tile size for each of liger-kernel's expert products: timing all of them takes minutes.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    jobs = [job for group in groups for job in group]
    peers = ["transformers"] * any(not job.ours for job in jobs)
    peers += ["liger_kernel.transformers"] * any("liger" in job.options for job in jobs)
    workers = [Worker(device, peers, once=True) for device in devices]  # they import meanwhile
    if ahead:
        # FlexAttention takes minutes to compile, which all others would wait for.
        patient = math.isinf(within)
        ready = (job for group in groups for job in group if patient or "flex_attention" not in job.options)
        compiling = [[job] for job in ready if job.compiles]
        compiling.sort(key=lambda group: _longest_first(group[0]))
        at_once = max(1, min(_MOST_AT_ONCE, (len(os.sched_getaffinity(0)) - 1) // len(devices)))
        helpers = [Worker(device, peers) for _ in range(at_once) for device in devices][: len(compiling)]
        work = _each(compiling, helpers, _SECONDS_AHEAD, end, ahead=True)
        for _ in _with_bar(work, compiling, "compiling"):
            pass
    yield from _with_bar(_each(groups, workers, time_limit, end, ahead=False), groups, "measuring")


def _changes(job: Job) -> int:
    """Sort key: the parts of transformers that liger-kernel patches for this job."""
    leaves_experts = bool(job.options & {"grouped_mm", "batched_mm", "loop"})
    return ("liger" in job.options) * (2 - leaves_experts)


def _longest_first(job: Job) -> tuple[bool, int, bool]:
    return not job.under_compile, _changes(job), "flex_attention" not in job.options


def _with_bar(results: Iterator[Any], groups: Sequence[Group], name: str) -> Iterator[Any]:
    total = sum(map(len, groups))
    with tqdm(results, total=total, desc=name, unit="job", file=sys.stderr, mininterval=2.0) as bar:
        for job, result in bar:
            bar.set_postfix_str(f"{job.model} {job.provider}")
            yield job, result


def _each(
    groups: Sequence[Group], workers: Sequence[Worker], time_limit: float, end: float, ahead: bool
) -> Iterator[tuple[Job, Result]]:
    """One thread per worker, until the deadline `end`."""
    waiting: queue.SimpleQueue[Group] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, Result]] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)

    def serve(worker: Worker) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                group = waiting.get_nowait()
                for number, job in enumerate(group, 1):
                    left, last = end - time.monotonic(), number == len(group) and waiting.empty()
                    late = {"note": "no time was left for it"}
                    limit = min(time_limit, left)
                    done.put((job, worker.do(job, limit, ahead, last) if left > 0 else late))
        worker.close()

    for worker in workers:
        threading.Thread(target=serve, args=(worker,), daemon=True).start()
    for _ in range(sum(map(len, groups))):
        yield done.get()


class Worker:
    """A process with one device, replaced when it becomes unusable, or with `once` after each job."""

    def __init__(self, device: str, peers: Sequence[str], once: bool = False) -> None:
        self._arguments, self._once = (device, peers), once
        self._reserve = _RESERVE if device.startswith("cuda") else 1
        self._next: list[tuple[Any, Any]] = []
        self._begin()

    def do(self, job: Job, time_limit: float, ahead: bool, last: bool = False) -> Result:
        """Result of a job, or a note if the process fails or is stopped. No replacement is started after the
        `last` job.
        """
        model_type, changes = job.config["model_type"], _changes(job)
        time_limit += _SECONDS_TO_COMPILE * job.under_compile
        used = self._once and bool(self._changed)
        if used or (not job.ours and self._changed.get(model_type, 0) > changes):
            self._begin_anew()
        self._changed[model_type] = max(changes, self._changed.get(model_type, 0))
        try:
            self._pipe.recv()  # it has imported
            self._pipe.send((job, ahead))
            while self._once and not last and len(self._next) < self._reserve:
                self._next.append(self._start())
            if not self._pipe.poll(time_limit):
                self._begin_anew()
                return {"note": f"stopped after {time_limit:.3g} s"}
            result = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            exit_code = self._process.exitcode
            self._begin_anew()
            return {"note": f"{_BROKEN}: the process ended with exit code {exit_code}"}
        if result.get("note", "").startswith(_BROKEN):
            self._begin_anew()  # an error may leave the GPU context unusable
        return result

    def end(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Stop the process and its successor."""
        self.end()
        for process, _ in self._next:
            process.kill()

    def _start(self) -> tuple[Any, Any]:
        pipe, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_work, args=(theirs, *self._arguments), daemon=True)
        process.start()
        theirs.close()
        return process, pipe

    def _begin(self) -> None:
        self._changed: dict[str, int] = {}  # by liger-kernel, of transformers' models
        self._process, self._pipe = self._next.pop(0) if self._next else self._start()

    def _begin_anew(self) -> None:
        self.end()
        self._begin()


def _work(pipe: Any, device: str, peers: Sequence[str]) -> None:
    """Main loop of the process: reports that it is ready, then processes jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pipe is closed then
    import torch

    import liger_models.models.loading  # noqa: F401
    from benchmarks.training import step

    _import_peers(peers)
    on = torch.device("cuda:0" if device == "cuda" else device)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send("ready")
            job, ahead = pipe.recv()
            try:
                if on.type == "cuda":
                    torch.cuda.set_device(on)
                result = step.compile_ahead(job, on) if ahead else step.measure(job, on)
            except Exception as error:
                if not ahead:  # otherwise it is retried
                    message = f"{job.model} {job.provider}: {traceback.format_exc()[-6000:]}"
                    print(message, file=sys.stderr, flush=True)
                result = {"note": f"{_BROKEN}: {type(error).__name__}: {in_one_line(error)}"}
            pipe.send(result)


def _import_peers(names: Sequence[str]) -> None:
    """Import the peers, which takes seconds; jobs report missing ones. transformers looks for a package
    called kernels, which must not be ours in the checkout: installed packages come first.
    """
    sys.path.sort(key=lambda path: Path(path or ".").resolve() == ROOT)
    for name in names:
        with contextlib.suppress(ImportError):
            peer = importlib.import_module(name)
            if name == "transformers":
                peer.logging.set_verbosity_error()
                from transformers import AutoModelForCausalLM  # noqa: F401
