"""Jobs measured by processes of their own, one at a time on a device and all devices at once.

A process measures the jobs of one model, one after the other; the next one imports while it measures. What
liger-kernel changes in transformers stays changed, so a job with it is followed by none without it. A job
that breaks down or takes too long ends its process and becomes a note; the others go on in a new one. On a
GPU everything is compiled before anything is timed, on all cores at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.training.step import Job, Result

# A GPU's context does not survive a fork.
_SPAWN = multiprocessing.get_context("spawn")
_MOST_AT_ONCE = 14  # that compile on one GPU: each takes half a GiB of it, and a core
_SECONDS_AHEAD = 120.0  # for one job
_BROKEN = "failed"

Group = Sequence[Job]


def measure_all(
    groups: Sequence[Group], devices: Sequence[str], time_limit: float, ahead: bool
) -> Iterator[tuple[Job, Result]]:
    """Every job with its result, as they come.

    Args:
        groups: jobs that one process may measure: those of one model.
        devices: such as cuda:0; each measures one job at a time.
        time_limit: seconds for a job.
        ahead: compile what the jobs need before any is measured.
    """
    # Growing segments waste no memory between blocks; for every provider alike.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # One tile size for each of liger-kernel's products of experts: to time them all takes minutes.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    if ahead:
        jobs = [[job] for group in groups for job in group if job.compiles]
        jobs.sort(key=lambda group: (_changes(group[0]), _longest_first(group[0])))
        at_once = max(1, min(_MOST_AT_ONCE, (len(os.sched_getaffinity(0)) - 1) // len(devices)))
        work = _each(jobs, list(devices) * at_once, _SECONDS_AHEAD, ahead=True)
        for _ in _with_bar(work, jobs, "compiling"):
            pass
    ordered = [sorted(group, key=_changes) for group in groups]
    yield from _with_bar(_each(ordered, devices, time_limit, ahead=False), groups, "measuring")


def _changes(job: Job) -> int:
    """How much of transformers liger-kernel changes for this job: the least first."""
    leaves_experts = bool(job.options & {"grouped_mm", "batched_mm", "loop"})
    return ("liger" in job.options) * (2 - leaves_experts)


def _longest_first(job: Job) -> int:
    return next(i for i, has in enumerate(("compile", "flex_attention", "")) if has in job.provider)


def _with_bar(results: Iterator[Any], groups: Sequence[Group], name: str) -> Iterator[Any]:
    total = sum(map(len, groups))
    with tqdm(results, total=total, desc=name, unit="job", file=sys.stderr, mininterval=2.0) as bar:
        for job, result in bar:
            bar.set_postfix_str(f"{job.model} {job.provider}")
            yield job, result


def _each(
    groups: Sequence[Group], devices: Sequence[str], time_limit: float, ahead: bool
) -> Iterator[tuple[Job, Result]]:
    """One thread for each entry of `devices`, which may name a device several times."""
    waiting: queue.SimpleQueue[Group] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, Result]] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)
    for device in devices[: len(groups)]:
        arguments = (device, waiting, done, time_limit, ahead)
        threading.Thread(target=_serve, args=arguments, daemon=True).start()
    for _ in range(sum(map(len, groups))):
        yield done.get()


def _serve(
    device: str, waiting: queue.SimpleQueue, done: queue.SimpleQueue, time_limit: float, ahead: bool
) -> None:
    """Work through groups of jobs until none is left."""
    worker = Worker(device)
    while True:
        try:
            group = waiting.get_nowait()
        except queue.Empty:
            return worker.end()
        # Nothing is measured while something is compiled: one process will do.
        following = None if ahead or waiting.empty() else Worker(device)  # imports meanwhile
        for job in group:
            result = worker.do(job, time_limit, ahead)
            done.put((job, result))
            if not worker.alive:
                worker = Worker(device)
        if following is not None:
            worker.end()
            worker = following


class Worker:
    """A process with one device."""

    def __init__(self, device: str) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_work, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()
        self.alive = True

    def do(self, job: Job, time_limit: float, ahead: bool) -> Result:
        """A job's result; where the process breaks down or has to be stopped, a note, and it is not alive."""
        try:
            self._pipe.recv()  # it has imported
            self._pipe.send((job, ahead))
            if not self._pipe.poll(time_limit):
                self.end()
                return {"note": f"stopped after {time_limit:.0f} s"}
            result = self._pipe.recv()
        except (EOFError, OSError):
            self.end()
            return {"note": f"{_BROKEN}: the process ended with exit code {self._process.exitcode}"}
        if result.get("note", "").startswith(_BROKEN):
            self.end()  # after an error a GPU's context may be of no use
        return result

    def end(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.join()


def _work(pipe: Any, device: str) -> None:
    """In the process: says that it is ready, takes a job, gives a result, until the pipe is closed."""
    import torch

    from benchmarks.training import step

    _import_peers()
    on = torch.device(device)
    while True:
        pipe.send("ready")
        try:
            job, ahead = pipe.recv()
        except EOFError:
            return
        try:
            if on.type == "cuda":
                torch.cuda.set_device(on)
            result = step.compile_ahead(job, on) if ahead else step.measure(job, on)
        except Exception as error:
            if not ahead:  # else it comes again
                told = f"{job.model} {job.provider}: {traceback.format_exc()[-1500:]}"
                print(told, file=sys.stderr, flush=True)
            first = (str(error).strip().splitlines() or ["no message"])[0]
            result = {"note": f"{_BROKEN}: {type(error).__name__}: {first[:160]}"}
        pipe.send(result)


def _import_peers() -> None:
    """They take seconds; without them their jobs say so."""
    with contextlib.suppress(ImportError):
        import transformers

        transformers.logging.set_verbosity_error()
        from transformers import AutoModelForCausalLM  # noqa: F401
    with contextlib.suppress(ImportError):
        import liger_kernel.transformers  # noqa: F401
