"""Job pool: each job is measured in its own process, and timed alone on its device; all devices in parallel.

Libraries that ran before may have changed torch's choices, or transformers' model, so no process measures two
jobs. Processes are forks of one that has imported everything and never used a GPU. On a GPU everything is
compiled before anything is timed, on all cores in parallel; a compiling process serves many jobs, but none
after a job for which liger-kernel patched more of a model. If asked, several jobs build their models and take
their first steps on a device together, before each is timed in turn. Failed jobs and timeouts become notes.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.training.child import BROKEN, PREPARED, THEIRS, UNUSED, work
from benchmarks.training.step import Job, Result

_MOST_AT_ONCE = 14  # compiling on one GPU: each takes half a GiB of it, and a core
_SECONDS_AHEAD = 120.0  # per job
_SECONDS_TO_COMPILE = 90.0  # more per job under torch.compile
_PATIENT = 60.0  # seconds to compile from which on FlexAttention is compiled ahead, too
_RESERVE = 1  # processes of a worker started ahead
_STOPPED, _GO = "stopped after", "go"
NO_MEMORY, LATE = "out of memory", "no time was left for it"

# What processes are forked with, in this order.
_OURS = ("benchmarks.training.imports", "torch._inductor.compile_fx", "liger_models.models.loading")

_TUNED = {"fla", "mamba_ssm"}  # packages that time settings of their kernels in the first step

Group = Sequence[Job]


def measure_all(
    groups: Sequence[Group],
    devices: Sequence[str],
    time_limit: float,
    ahead: bool,
    within: float = math.inf,
    together: int = 1,
) -> Iterator[tuple[Job, Result]]:
    """Yield every job with its result when ready.

    Args:
        groups: jobs to be compared, which are measured on the same device in order.
        devices: such as cuda:0; each measures one job at a time.
        time_limit: seconds per job; jobs under torch.compile have more.
        ahead: compile everything before measuring, in at most a third of the seconds.
        within: seconds for all jobs; unfinished ones get a note.
        together: jobs that may prepare on a device at the same time; their models must fit together.
    """
    end = time.monotonic() + within
    _set_environment()
    jobs = [job for group in groups for job in group]
    peers = ["transformers"] * any(not job.ours for job in jobs)
    peers += ["liger_kernel.transformers"] * any("liger" in job.options for job in jobs)
    context = _context(devices, peers)
    if ahead:
        compile_all(jobs, devices, peers, context, within / 3)
    waiting, workers = _queue(groups), []
    for device in devices:
        turns, line = Turns(), _Line(waiting)
        for _ in range(together):
            workers.append((Worker(device, peers, context, turns, together > 1), line))
    yield from _with_bar(_each(workers, len(jobs), time_limit, end, ahead=False), groups, "measuring")


def compile_all(
    jobs: Sequence[Job], devices: Sequence[str], peers: Sequence[str], context: Any, within: float
) -> None:
    """Compile what these jobs run, on all cores, within so many seconds; the rest compiles when it is run."""
    end = time.monotonic() + within
    # FlexAttention takes long to compile, which all others would wait for.
    ready = (job for job in jobs if within >= _PATIENT or "flex_attention" not in job.options)
    compiling = [[job] for job in ready if job.compiles]
    compiling.sort(key=lambda group: _longest_first(group[0]))
    most = max(1, min(_MOST_AT_ONCE, (len(os.sched_getaffinity(0)) - 1) // len(devices)))
    spread = [device for _ in range(most) for device in devices][: len(compiling)]
    waiting = _queue(compiling)
    helpers = [(Worker(device, peers, context), _Line(waiting)) for device in spread]
    work = _each(helpers, len(compiling), _SECONDS_AHEAD, end, ahead=True)
    for _ in _with_bar(work, compiling, "compiling"):
        pass


def _set_environment() -> None:
    # Expandable segments avoid fragmentation; the same for every provider.
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # One tile size for each of liger-kernel's expert products: timing all of them takes minutes.
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # `is_available` makes no context


def begin_to_import() -> None:
    """Start the server of forks before the jobs are known: it imports everything meanwhile."""
    _set_environment()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_OURS, *(name for names in THEIRS.values() for name in names)])
    multiprocessing.forkserver.ensure_running()


def _context(devices: Sequence[str], peers: Sequence[str]) -> Any:
    """A server of forks that has imported everything; "spawn" if one of the imports has used a GPU, whose
    context does not survive a fork.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_OURS, *(name for peer in peers for name in THEIRS[peer])])
    if not devices[0].startswith("cuda"):
        return context
    trial = context.Process(target=_use, args=(devices[0],), daemon=True)
    trial.start()
    trial.join(_SECONDS_AHEAD)
    if trial.exitcode == 0:
        return context
    print("imports have used the GPU: each process imports for itself", file=sys.stderr, flush=True)
    return multiprocessing.get_context("spawn")


def _use(device: str) -> None:
    import torch

    torch.zeros(1, device=device)


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


class _Line:
    """The jobs of one device, from the groups that wait for any device."""

    def __init__(self, waiting: queue.SimpleQueue[Group]) -> None:
        self._waiting, self._left, self._lock = waiting, list[Job](), threading.Lock()

    def next(self) -> Job | None:
        with self._lock, contextlib.suppress(queue.Empty):
            while not self._left:
                self._left = list(self._waiting.get_nowait())
            return self._left.pop(0)
        return None


def _queue(groups: Sequence[Group]) -> queue.SimpleQueue[Group]:
    waiting: queue.SimpleQueue[Group] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)
    return waiting


def _each(
    workers: Sequence[tuple[Worker, _Line]], count: int, time_limit: float, end: float, ahead: bool
) -> Iterator[tuple[Job, Result]]:
    """One thread per worker, until the deadline `end`."""
    done: queue.SimpleQueue[tuple[Job, Result]] = queue.SimpleQueue()

    def serve(worker: Worker, line: _Line) -> None:
        while (job := line.next()) is not None:
            left = end - time.monotonic()
            result = worker.do(job, min(time_limit, left), ahead) if left > 0 else {"note": LATE}
            if left < time_limit and result.get("note", "").startswith(_STOPPED):
                result = {"note": LATE}
            done.put((job, result))
        worker.close()

    for worker, line in workers:
        threading.Thread(target=serve, args=(worker, line), daemon=True).start()
    for _ in range(count):
        yield done.get()


class Turns:
    """On one device several processes may prepare at once, but one is timed while all others rest."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._preparing, self._waiting, self._timing = 0, 0, False

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """Wait until nobody is timed, nor waits for that."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._preparing += 1
        try:
            yield
        finally:
            with self._changed:
                self._preparing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody prepares, nor is timed."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._preparing and not self._timing)
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._timing = False
                self._changed.notify_all()


class Worker:
    """A process with one device, replaced when it becomes unusable; with `turns`, after each job.

    Args:
        device: its device.
        peers: the peers that it imports.
        context: how to start it.
        turns: of the processes of this device.
        shared: prepare at the same time as others.
    """

    def __init__(
        self,
        device: str,
        peers: Sequence[str],
        context: Any = None,
        turns: Turns | None = None,
        shared: bool = False,
    ) -> None:
        self._arguments, self._context = (device, peers), context
        self._once, self._turns, self._shared = turns is not None, turns or Turns(), shared
        self._next: list[tuple[Any, Any]] = []
        self._begin()

    def do(self, job: Job, time_limit: float, ahead: bool) -> Result:
        """Result of a job, or a note if the process fails or is stopped."""
        model_type, changes = job.config["model_type"], _changes(job)
        time_limit += _SECONDS_TO_COMPILE * job.under_compile
        used = self._once and bool(self._changed)
        if used or (not job.ours and self._changed.get(model_type, 0) > changes):
            self._begin_anew()
        self._before = dict(self._changed)
        self._changed[model_type] = max(changes, self._changed.get(model_type, 0))
        if not self._shared:
            with self._turns.alone():
                return self._ask((job, ahead, False), time_limit)
        if job.options & _TUNED:
            return self._do_alone(job, ahead, time_limit)
        with self._turns.prepare():
            result = self._ask((job, ahead, True), time_limit)
            self._settle()
        if result == PREPARED:
            with self._turns.alone():
                result = self._ask(_GO, time_limit)
                self.end()  # its memory is free before the next is timed
        elif result.get("note") == NO_MEMORY:  # there may be enough without the others
            self._begin_anew()
            return self._do_alone(job, ahead, time_limit)
        return result

    def _do_alone(self, job: Job, ahead: bool, time_limit: float) -> Result:
        """Result of a job that also prepares alone."""
        with self._turns.prepare():
            self._settle()
            self._pipe.poll(_SECONDS_AHEAD)
        with self._turns.alone():
            result = self._ask((job, ahead, False), time_limit)
            if self._changed:
                self.end()
        return result

    def _ask(self, question: Any, time_limit: float) -> Any:
        """The process's answer, which is a result or `PREPARED`."""
        try:
            if question is not _GO:
                self._pipe.recv()  # it has imported
                self._start_next()
            self._pipe.send(question)
            if not self._pipe.poll(time_limit):
                self._begin_anew()
                return {"note": f"{_STOPPED} {time_limit:.3g} s"}
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            exit_code = self._process.exitcode
            self._begin_anew()
            return {"note": f"{BROKEN}: the process ended with exit code {exit_code}"}
        if answer != PREPARED and answer.get("note", "").startswith(BROKEN):
            self._begin_anew()  # an error may leave the GPU context unusable
        if answer != PREPARED and answer.pop(UNUSED, False):
            self._changed = self._before
        return answer

    def _start_next(self) -> None:
        while self._once and len(self._next) < _RESERVE:
            self._next.append(self._start())

    def _settle(self) -> None:
        """Wait until its successors are ready, so that none starts while a job is timed."""
        self._start_next()
        for _, pipe in self._next:
            pipe.poll(_SECONDS_AHEAD)

    def end(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Stop the process and its successors."""
        self.end()
        for process, _ in self._next:
            process.kill()

    def _start(self) -> tuple[Any, Any]:
        pipe, theirs = self._context.Pipe()
        arguments = (theirs, *self._arguments, self._shared)
        process = self._context.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, pipe

    def _begin(self) -> None:
        self._changed: dict[str, int] = {}  # by liger-kernel, of transformers' models
        self._process, self._pipe = self._next.pop(0) if self._next else self._start()

    def _begin_anew(self) -> None:
        self.end()
        self._begin()
