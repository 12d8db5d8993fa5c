"""Processes that are gone, and processes that hang: the others end, and say which it was.

A process that waits in a collective for another one cannot be told anything, and waits for many minutes. So
a thread in each tells a store of torch.distributed, every two seconds, that the process lives, and how many
marks of its way its main thread has passed, which all pass in the same order; and looks at what the others
tell:

| of a process              | the others                                                        |
|---------------------------|-------------------------------------------------------------------|
| it raised an error        | end with its message, unless they end by themselves               |
| nothing for `SILENCE` s   | end: it is dead, or stopped                                       |
| no mark for `patience` s, |                                                                   |
| as of all                 | end, and name those that are the fewest marks ahead               |

"End" is the end of the process at once, with exit code 2: checkpoints are whole at any moment.
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
GRACE = 10.0  # for the orderly end of who knows of an error by himself
EXIT_CODE = 2


@dataclass
class _Told:
    """What a process tells of itself."""

    beat: int = 0
    marks: int = 0
    where: str = "loads"
    hurried: bool = False
    error: str | None = None
    done: bool = False


class Watch:
    """Watches over the processes of a run while it is entered; alone, it does nothing.

    Args:
        world: all enter it together.
        patience: seconds in which a main thread must pass a mark.
    """

    def __init__(self, world: World, patience: float) -> None:
        self._world, self._patience = world, patience
        self._mine = _Told()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._first_is_done = False  # with it its store ends

    def __enter__(self) -> Watch:
        if self._world.size > 1:
            self._store = self._world.once_and_all(_serve, _join)
            self._tell()
            self._world.barrier()
            # When each of the others last told something new, by the clock of this process.
            self._seen = {rank: (-1, time.monotonic()) for rank in range(self._world.size)}
            self._moved = (-1, time.monotonic())
            self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        reason = None
        if isinstance(error, RuntimeError):  # as of a collective that failed
            reason = self._who_is_gone()
        with self._lock:
            self._mine.done = True
            if error is not None:
                self._mine.error = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._tell()
        self._ended.set()
        self._thread.join()
        if self._world.main:  # whose end is that of the store
            self._wait_for_others()
        if reason is not None:
            raise TrainingError(f"process {self._world.rank} ends: {reason}") from error

    def mark(self, where: str) -> None:
        """The main thread has come to this place; all processes pass the same ones."""
        with self._lock:
            self._mine.marks += 1
            self._mine.where, self._mine.hurried = where, True

    def unhurried(self, where: str) -> None:
        """From here to the next mark it may take as long as it takes."""
        with self._lock:
            self._mine.marks += 1
            self._mine.where, self._mine.hurried = where, False

    def _tell(self) -> None:
        with self._lock:
            self._mine.beat += 1
            text = json.dumps(asdict(self._mine))
        self._store.set(str(self._world.rank), text)

    def _read(self) -> dict[int, _Told]:
        ranks = range(self._world.size)
        told = self._store.multi_get([str(rank) for rank in ranks])
        return {rank: _Told(**json.loads(text)) for rank, text in zip(ranks, told, strict=True)}

    def _look(self) -> None:
        while not self._ended.wait(INTERVAL):
            reason = self._judge()
            if reason is not None and not self._ended.wait(GRACE if "ended" in reason else 0):
                print(f"process {self._world.rank} ends: {reason}", file=sys.stderr, flush=True)
                os._exit(EXIT_CODE)

    def _judge(self) -> str | None:
        """Why this process should end, if it should."""
        try:
            self._tell()
            told = self._read()
        except RuntimeError as error:
            if not self._first_is_done:
                return f"process 0 is dead or stopped: its store does not answer ({_first_line(error)})"
            told = {self._world.rank: self._mine}  # who is left looks after himself
        else:
            self._first_is_done = told[0].done
        now = time.monotonic()
        for rank, other in told.items():
            if other.error is not None and rank != self._world.rank:
                return f"process {rank} ended ({other.error})"
            beat, since = self._seen[rank]
            if other.beat != beat or other.done:
                self._seen[rank] = (other.beat, now)
            elif now - since > SILENCE:
                return f"process {rank} is dead or stopped: nothing was heard of it for {now - since:.0f} s"
        total = sum(other.marks for other in told.values())
        at_work = {rank: other for rank, other in told.items() if not other.done}
        if total != self._moved[0] or not all(other.hurried for other in at_work.values()):
            self._moved = (total, now)
        elif now - self._moved[1] > self._patience:
            return self._behind(at_work)
        return None

    def _behind(self, told: dict[int, _Told]) -> str:
        least = min(other.marks for other in told.values())
        behind = [rank for rank, other in told.items() if other.marks == least]
        where = told[behind[0]].where
        if len(behind) == self._world.size:
            return f"no process has come further for {self._patience:g} s; all are at: {where}"
        names = ", ".join(map(str, behind))
        return f"process {names} hangs for {self._patience:g} s at: {where}; the others wait for it"

    def _who_is_gone(self) -> str | None:
        """After an error of this process: whether another one is gone."""
        end = time.monotonic() + SILENCE + 2 * INTERVAL
        first = None
        while time.monotonic() < end:
            reason = self._judge()
            if reason is not None:
                return reason
            with contextlib.suppress(RuntimeError):
                told = self._read()
                first = first or told
                alive = all(o.beat > first[r].beat for r, o in told.items() if r != self._world.rank)
                if alive or all(other.done for other in told.values()):
                    return None
            time.sleep(INTERVAL / 4)
        return None

    def _wait_for_others(self) -> None:
        """Until all have told that they are done, or have had the time to read what this one told."""
        end = time.monotonic() + GRACE + 2 * INTERVAL
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and not all(other.done for other in self._read().values()):
                time.sleep(INTERVAL / 20)


def _serve() -> tuple[dist.TCPStore, tuple[str, int]]:
    """In the first process: the store, and where it is."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    timeout = timedelta(seconds=SILENCE)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, (host, store.port)


def _join(place: tuple[str, int]) -> dist.TCPStore:
    return dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=SILENCE))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
