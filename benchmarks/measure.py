"""Time, memory and the machine's limits.

GPUs run asynchronously, so calls are timed by device events. Short calls are queued in groups while the
device pauses, so that they run back to back and exclude the host's launch overhead, which is measured
separately (`launch_microseconds`). Inputs rotate through copies that exceed the L2 cache several times, and a
round's results stay alive, so that no call finds its data in the cache.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_GROUP_MS = 0.5  # events cost about a microsecond: a group this long hides them
_MAX_GROUP = 20  # calls; the queue of launches holds about a thousand kernels


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: list[float]) -> Timing:
        samples = sorted(samples)
        last = len(samples) - 1
        return Timing(statistics.median(samples), samples[round(0.1 * last)], samples[round(0.9 * last)])


@dataclass(frozen=True)
class Ceilings:
    """Limits reached on this machine in this run: bytes per second, read plus written, and FLOP per
    second."""

    copy: float
    matmul: float


class Meter:
    """Measures calls on one device. `call(i)` runs on the i-th copy of the inputs and returns its results."""

    def __init__(self, device: torch.device, quick: bool = False):
        self.device, self.cuda = device, device.type == "cuda"
        # Milliseconds to measure, with the minimum and maximum number of groups of calls.
        self.total_ms, self.min_groups, self.max_groups = (20.0, 3, 5) if quick else (60.0, 5, 25)
        self.ahead_ms, self.sustained_ms = (100.0, 200.0) if quick else (250.0, 350.0)
        self._copy_ms: dict[int, float] = {}
        if self.cuda:
            self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._scratch = torch.ones(4 * self.l2_bytes // 4, device=device)
            torch.cuda._sleep(1000)
            self._sleep_cycles_per_ms = 1.0
            self._sleep_cycles_per_ms = 10_000_000 / self._elapsed_ms(lambda: torch.cuda._sleep(10_000_000))

    def copies(self, num_bytes: int) -> int:
        """Number of input copies that exceed the cache four times."""
        return min(32, -(-4 * self.l2_bytes // max(num_bytes, 1))) if self.cuda else 1

    def time(
        self,
        call: Callable[[int], object],
        copies: int = 1,
        restore: Callable[[], None] | None = None,
        sustained: bool = False,
    ) -> Timing:
        """Time `call`, which has run before, for a bounded time: 60 ms, or five calls that take longer.

        `restore` resets inputs that the call overwrites: untimed, between groups. `sustained` is for matrix
        products, which the power limit slows down within 0.2 s: 0.25 s of untimed calls precede 0.35 s of
        timed ones.
        """
        alive: deque[object] = deque(maxlen=copies - 1)
        estimate, host_ms = self._estimate(call, alive)
        group = max(1, min(_MAX_GROUP, round(_GROUP_MS / estimate)))
        rounds = max(self.min_groups, min(self.max_groups, round(self.total_ms / (group * estimate))))
        if sustained and self.cuda:
            rounds = max(self.min_groups, round(self.sustained_ms / (group * estimate)))
            for _ in range(round(self.ahead_ms / estimate)):
                alive.append(call(0))
        samples, position = [], 0
        for _ in range(rounds):
            if restore is not None:
                restore()

            def calls(start: int = position) -> None:
                for i in range(start, start + group):
                    alive.append(call(i % copies))

            # A call longer than its launches keeps the queue full by itself.
            pause_ms = 0.1 + 1.5 * host_ms * group if host_ms > 0.5 * estimate else 0.0
            samples.append(self._elapsed_ms(calls, pause_ms) / group)
            position += group
        return Timing.of(samples)

    def copy_milliseconds(self, num_bytes: int) -> float:
        """Time of torch's copy_ of half of `num_bytes`, which reads and writes that many in total: the limit
        of a small kernel, since starting and ending one takes a few microseconds.
        """
        if num_bytes not in self._copy_ms:
            copies, count = self.copies(num_bytes), max(num_bytes // 4, 1)
            sources = [torch.ones(count, dtype=torch.bfloat16, device=self.device) for _ in range(copies)]
            targets = [torch.empty_like(source) for source in sources]
            self._copy_ms[num_bytes] = self.time(lambda i: targets[i].copy_(sources[i]), copies).median
        return self._copy_ms[num_bytes]

    def launch_microseconds(
        self, batches: Mapping[str, Callable[[], object]], calls: int, turns: int = 24
    ) -> dict[str, float]:
        """Host time per call for each batch of `calls`, with an idle device: the lower quartile of `turns`
        turns.

        A batch starts with an empty queue and is too short to fill it, so the host does not wait for the
        device unless a call synchronises. The batches alternate, so that temporary slowdowns of the host
        affect all of them, and each first runs once untimed. Disturbances only add time: the lower quartile
        is reproducible, the median less so.
        """
        times: dict[str, list[float]] = {name: [] for name in batches}
        gc.collect()
        gc.disable()
        try:
            for turn in range(turns + 2):  # the first calls of a kernel look up and fill caches
                for name, batch in batches.items():
                    batch()
                    self._wait()
                    start = time.perf_counter()
                    batch()
                    taken = time.perf_counter() - start
                    if turn >= 2:
                        times[name].append(1e6 * taken / calls)
        finally:
            gc.enable()
        self._wait()
        return {name: sorted(taken)[turns // 4] for name, taken in times.items()}

    def peak_bytes(self, call: Callable[[int], object]) -> int | None:
        """Peak memory of a call in addition to its inputs, including results and gradients. None on a CPU."""
        if not self.cuda:
            return None
        self._wait()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call(0)
        self._wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    def ceilings(self) -> Ceilings:
        """Measure a copy of 2 GiB (64 MiB on a CPU), and a bfloat16 matrix product of random numbers of size
        8192^3 (128^3).
        """
        count, side = (1 << 30, 8192) if self.cuda else (1 << 25, 128)
        source = torch.ones(count, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        copy = self.time(lambda i: target.copy_(source))
        a, b = (torch.randn(side, side, device=self.device).bfloat16() for _ in range(2))
        matmul = self.time(lambda i: a @ b, sustained=True)
        return Ceilings(4e3 * count / copy.median, 2e3 * side**3 / matmul.median)

    def _estimate(self, call: Callable[[int], object], alive: deque[object]) -> tuple[float, float]:
        """Milliseconds of a call on the device, and of its launch on the host."""
        alive.append(call(0))
        self._wait()
        host = time.perf_counter()
        alive.append(call(0))
        host_ms = 1e3 * (time.perf_counter() - host)

        def calls() -> None:
            for _ in range(2):
                alive.append(call(0))

        return max(self._elapsed_ms(calls, 2 * host_ms) / 2, 1e-3), host_ms

    def _elapsed_ms(self, calls: Callable[[], object], pause_ms: float = 0.0) -> float:
        if not self.cuda:
            start = time.perf_counter()
            calls()
            return 1e3 * (time.perf_counter() - start)
        self._scratch.sum()  # leaves the cache full of something else
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if pause_ms:
            torch.cuda._sleep(int(min(pause_ms, 50.0) * self._sleep_cycles_per_ms))
        start.record()
        calls()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
