"""Watchdog: if a process dies or hangs, the others exit and name it.

A process blocked in a collective cannot be reached, and waits for many minutes. A thread in each process
therefore writes its status to a torch.distributed store every two seconds, with the number of marks that its
main thread has passed, in the same order everywhere, and reads the others':

| state of a process        | reaction of the others                                            |
|---------------------------|-------------------------------------------------------------------|
| raised an error           | exit with its message, unless they exit by themselves             |
| silent for `SILENCE` s    | exit: it is dead, or stopped                                      |
| no mark for `patience` s, |                                                                   |
| like all the others       | exit, and name the processes with the fewest marks                |

They exit at once, with exit code 2: checkpoints are complete at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from liger_models.convert.errors import TrainingError
from liger_models.training.processes.world import World

INTERVAL = 2.0
SILENCE = 30.0
GRACE = 10.0  # for a process that found an error itself to exit in order
EXIT_CODE = 2


@dataclass
class _Status:
    """Status of a process."""

    beat: int = 0
    marks: int = 0
    where: str = "loads"
    timed: bool = False
    error: str | None = None
    done: bool = False


class Watch:
    """Watches the processes of a run while entered; does nothing for a single process.

    Args:
        world: all processes enter together.
        patience: seconds in which a main thread must pass a mark.
    """

    def __init__(self, world: World, patience: float) -> None:
        self._world, self._patience = world, patience
        self._mine = _Status()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._first_is_done = False  # its store ends with it

    def __enter__(self) -> Watch:
        if self._world.size > 1:
            self._store = self._world.once_and_all(_serve, _join)
            self._report()
            self._world.barrier()
            # When each of the others last changed its status, by this process's clock.
            self._seen = {rank: (-1, time.monotonic()) for rank in range(self._world.size)}
            self._moved = (-1, time.monotonic())
            self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        reason = None
        if isinstance(error, RuntimeError):  # such as a failed collective
            reason = self._find_dead_peer()
        with self._lock:
            self._mine.done = True
            if error is not None:
                self._mine.error = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._report()
        self._ended.set()
        self._thread.join()
        if self._world.main:  # its store ends with it
            self._wait_for_others()
        if reason is not None:
            raise TrainingError(f"process {self._world.rank} exits: {reason}") from error

    def mark(self, where: str) -> None:
        """Record that the main thread has reached this place; all processes pass the same ones."""
        with self._lock:
            self._mine.marks += 1
            self._mine.where, self._mine.timed = where, True

    def suspend_deadline(self, where: str) -> None:
        """Suspend the deadline until the next mark."""
        with self._lock:
            self._mine.marks += 1
            self._mine.where, self._mine.timed = where, False

    def _report(self) -> None:
        with self._lock:
            self._mine.beat += 1
            text = json.dumps(asdict(self._mine))
        self._store.set(str(self._world.rank), text)

    def _read(self) -> dict[int, _Status]:
        ranks = range(self._world.size)
        statuses = self._store.multi_get([str(rank) for rank in ranks])
        return {rank: _Status(**json.loads(text)) for rank, text in zip(ranks, statuses, strict=True)}

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            reason = self._find_problem()
            if reason is not None and not self._ended.wait(GRACE if "ended" in reason else 0):
                print(f"process {self._world.rank} exits: {reason}", file=sys.stderr, flush=True)
                os._exit(EXIT_CODE)

    def _find_problem(self) -> str | None:
        """Reason why this process should exit, or None."""
        try:
            self._report()
            statuses = self._read()
        except RuntimeError as error:
            if not self._first_is_done:
                return f"process 0 is dead or stopped: its store does not answer ({_first_line(error)})"
            statuses = {self._world.rank: self._mine}  # the store is gone: watch only this process
        else:
            self._first_is_done = statuses[0].done
        now = time.monotonic()
        for rank, other in statuses.items():
            if other.error is not None and rank != self._world.rank:
                return f"process {rank} ended ({other.error})"
            beat, since = self._seen[rank]
            if other.beat != beat or other.done:
                self._seen[rank] = (other.beat, now)
            elif now - since > SILENCE:
                return f"process {rank} is dead or stopped: it was silent for {now - since:.0f} s"
        total = sum(other.marks for other in statuses.values())
        at_work = {rank: other for rank, other in statuses.items() if not other.done}
        if total != self._moved[0] or not all(other.timed for other in at_work.values()):
            self._moved = (total, now)
        elif now - self._moved[1] > self._patience:
            return self._describe_hang(at_work)
        return None

    def _describe_hang(self, statuses: dict[int, _Status]) -> str:
        least = min(other.marks for other in statuses.values())
        slowest = [rank for rank, other in statuses.items() if other.marks == least]
        where = statuses[slowest[0]].where
        if len(slowest) == self._world.size:
            return f"no process made progress for {self._patience:g} s; all are at: {where}"
        names = ", ".join(map(str, slowest))
        return f"process {names} has been stuck for {self._patience:g} s at: {where}; the others wait for it"

    def _find_dead_peer(self) -> str | None:
        """After an error of this process: check whether another one is dead."""
        end = time.monotonic() + SILENCE + 2 * INTERVAL
        first = None
        while time.monotonic() < end:
            reason = self._find_problem()
            if reason is not None:
                return reason
            with contextlib.suppress(RuntimeError):
                statuses = self._read()
                first = first or statuses
                alive = all(o.beat > first[r].beat for r, o in statuses.items() if r != self._world.rank)
                if alive or all(other.done for other in statuses.values()):
                    return None
            time.sleep(INTERVAL / 4)
        return None

    def _wait_for_others(self) -> None:
        """Wait until all are done, or have had time to read this process's last status."""
        end = time.monotonic() + GRACE + 2 * INTERVAL
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and not all(other.done for other in self._read().values()):
                time.sleep(INTERVAL / 20)


def _serve() -> tuple[dist.TCPStore, tuple[str, int]]:
    """In the first process: the store and its address."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    timeout = timedelta(seconds=SILENCE)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, (host, store.port)


def _join(place: tuple[str, int]) -> dist.TCPStore:
    return dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=SILENCE))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
