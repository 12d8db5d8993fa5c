"""Kernels against other libraries: correctness, distance from the machine's limit, and memory.

A provider's outputs and gradients are first compared with the truth; wrong ones are not timed. Percentages
are relative to the run's own measurement of a large plain copy, by the fewest bytes that must move, or of a
matrix product, by FLOP. The tables also show what a copy of as many bytes reaches, which is less for few
bytes. On a GPU each provider has its own process, with its own limits: libraries that ran before may change
torch's choices.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import ROOT
from benchmarks.ahead import compile_ahead, jobs_of
from benchmarks.bound import Bound, Wrong, check
from benchmarks.measure import Ceilings, Meter, Timing
from benchmarks.operations import CPU_PROVIDERS, REGISTRY, Case, Operation, Provider, Unavailable
from benchmarks.operations.core import Cost, Tensors
from benchmarks.picture import draw
from benchmarks.report import machine, publish
from benchmarks.row import ROWS, Row, read_rows, write_rows
from benchmarks.tables import markdown

SUMMARY = "kernels against liger-kernel, torch.compile and eager PyTorch: correctness, time, memory"
_PROVIDER_SECONDS = 60.0  # per case: compiling, checking and timing
_LAUNCH_CALLS = 8  # at most a thousand kernels fit into the queue
ALL_PROVIDERS = tuple(dict.fromkeys(name for operation in REGISTRY.values() for name in operation.providers))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = ", ".join(REGISTRY)
    parser.add_argument(
        "--op", action="append", metavar="OP", help=f"repeatable; a name or a pattern, 'linear_*': {listed}"
    )
    parser.add_argument(
        "--provider", action="append", choices=ALL_PROVIDERS, help="repeatable; default: all of them"
    )
    parser.add_argument(
        "--shape", action="append", help="repeatable, such as 32768x4096; default: the table's"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one shape per operation, fewer repeats")
    parser.add_argument("--compiled", action="store_true", help="do not compile in advance")
    parser.add_argument(
        "--minutes", type=float, default=7, help="time limit; the rest becomes notes (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    device, dtype = device_of(args.device), getattr(torch, args.dtype)
    try:
        operations = matching(args.op)
        work = [
            (operation, shape) for operation in operations for shape in shapes_of(operation, args, device)
        ]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    asked = args.provider or ALL_PROVIDERS
    providers = [name for name in asked if any(name in operation.providers for operation in operations)]
    if not providers:
        print(f"none of these operations is measured with {', '.join(asked)}", file=sys.stderr)
        return 2
    if device.type == "cuda" and not args.compiled:
        small = [(operation.name, operation.small) for operation in operations if operation.small is not None]
        called = [*((operation.name, shape) for operation, shape in work), *small]
        print(compile_ahead(jobs_of(called, providers), dtype, device), file=sys.stderr, flush=True)
    if device.type == "cuda" and len(providers) > 1:
        rows, ceilings = measure_apart(args, providers, started)
    else:
        rows, ceilings = _measure(args, work, providers, device, started)
    order = {(operation.name, shape): number for number, (operation, shape) in enumerate(work)}
    rows.sort(key=lambda row: (_place(order, row), REGISTRY[row.operation].providers.index(row.provider)))
    title = machine(device, "liger-kernel", "trl")
    publish(args.out, "ops", markdown(rows, title, ceilings, args.dtype), [row.record() for row in rows])
    write_rows(Path(args.out) / ROWS, rows, ceilings)
    note = draw(rows, title, ceilings, f"{args.out}/ops.png")
    print(f"\n{note}\n{time.monotonic() - started:.0f} s in all")
    return 1 if any(row.failed and row.provider == "ours" for row in rows) else 0


def _place(order: Mapping[tuple[str, tuple[int, ...]], int], row: Row) -> int:
    """Position of the operation and shape in the table; launches, with their other shape, come last."""
    return order.get((row.operation, tuple(map(int, row.shape.split("x")))), len(order))


def _measure(
    args: argparse.Namespace,
    work: Sequence[tuple[Operation, tuple[int, ...]]],
    providers: Sequence[str],
    device: torch.device,
    started: float,
) -> tuple[list[Row], Ceilings]:
    """All of it in this process."""
    if device.type == "cuda":
        gc.collect()
        gc.freeze()  # imports are permanent: exclude them from each provider's collection
    meter = Meter(device, args.quick)
    ceilings = meter.ceilings()
    session = Session(meter, ceilings, getattr(torch, args.dtype), providers, started, 60 * args.minutes)
    rows: list[Row] = []
    for operation, shape in work:
        rows += session.measure(operation, shape)
    # Launches come last: the processes that compile for torch.compile keep the host busy until then.
    for operation in dict.fromkeys(operation for operation, _ in work):
        if device.type == "cuda" and operation.small is not None:
            timed = [row for row in rows if row.operation == operation.name and row.training is not None]
            rows += session.measure_launches(operation, list(dict.fromkeys(row.provider for row in timed)))
    return rows, ceilings


def measure_apart(
    args: argparse.Namespace, providers: Sequence[str], started: float
) -> tuple[list[Row], Ceilings]:
    """Measure each provider in its own process, one after another; the limits are the first one's."""
    rows: list[Row] = []
    ceilings: list[Ceilings] = []
    for number, provider in enumerate(providers):
        left = args.minutes - (time.monotonic() - started) / 60
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks", "ops", "--provider", provider, "--out", folder]
            for name in ("op", "shape"):
                command += [f"--{name}={value}" for value in getattr(args, name) or ()]
            command += ["--compiled", "--dtype", args.dtype, "--device", args.device]
            command += ["--quick"] * args.quick
            command += ["--minutes", str(max(0.0, left / (len(providers) - number)))]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
            file = Path(folder) / ROWS
            if not file.is_file():
                print(f"{provider}: the process ended with exit code {done.returncode}", file=sys.stderr)
                continue
            found, own = read_rows(file)
            rows += found
            ceilings.append(own)
    if not ceilings:
        raise RuntimeError("no provider could be measured")
    return rows, ceilings[0]


def device_of(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def matching(patterns: Sequence[str] | None) -> list[Operation]:
    """Operations matching these names or patterns, in the table's order. ValueError for one without a
    match."""
    for pattern in patterns or ():
        if not fnmatch.filter(REGISTRY, pattern):
            raise ValueError(f"no operation matches {pattern!r}; expected {', '.join(REGISTRY)}")
    return [
        operation
        for name, operation in REGISTRY.items()
        if patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def shapes_of(operation: Operation, args: argparse.Namespace, device: torch.device) -> list[tuple[int, ...]]:
    """The table's shapes, or --shape's; ValueError for a wrong number of dimensions."""
    if args.shape:
        return [_parse_shape(shape, operation) for shape in args.shape]
    if device.type != "cuda":
        return [operation.tiny]
    return list(operation.shapes[:1] if args.quick else operation.shapes)


def _parse_shape(text: str, operation: Operation) -> tuple[int, ...]:
    sizes = text.split("x")
    if len(sizes) != len(operation.tiny) or not all(size.isdecimal() and int(size) for size in sizes):
        example = "x".join(map(str, operation.shapes[0]))
        raise ValueError(
            f"found --shape {text} for {operation.name}; expected {operation.dims}, such as {example}. "
            "Name the operations that the shape is for with --op"
        )
    return tuple(map(int, sizes))


class Session:
    """State shared by all measurements of a run."""

    def __init__(
        self,
        meter: Meter,
        ceilings: Ceilings,
        dtype: torch.dtype,
        providers: Sequence[str],
        started: float,
        seconds: float,
    ):
        self.meter, self.ceilings, self.dtype, self.providers = meter, ceilings, dtype, providers
        self.started, self.seconds = started, seconds

    def measure(self, operation: Operation, shape: tuple[int, ...]) -> list[Row]:
        rows = [_row(operation, shape, name) for name in operation.providers if name in self.providers]
        if not rows or self._time_is_up(rows, 0.9):  # the rest is for launches
            return rows
        torch.manual_seed(0)
        expected = None
        with _notes(*rows):
            case = operation.build(shape, self.dtype, self.meter.device)
            expected = case.truth()
            self._set_copies(rows, case)
        for row in rows:
            if expected is not None:
                with _notes(row), at_most(_PROVIDER_SECONDS):
                    self._measure_provider(row, case, expected)
            self._report(row)
            self._clear()
        return rows

    def measure_launches(self, operation: Operation, providers: Sequence[str]) -> list[Row]:
        """Host time of a call with few tokens."""
        assert operation.small is not None
        rows = [_row(operation, operation.small, name) for name in providers]
        if not rows or self._time_is_up(rows, 1.0):
            return rows
        case = operation.build(operation.small, self.dtype, self.meter.device)
        forward: dict[str, Callable[[], object]] = {}
        training: dict[str, Callable[[], object]] = {}
        for row in rows:
            with _notes(row):
                bound = Bound(case, case.provider(row.provider), _LAUNCH_CALLS)
                bound.train_all()
                training[row.provider] = bound.train_all
                if case.forward is not None:
                    forward[row.provider] = bound.forward_all
        forward_us, training_us = (
            self.meter.launch_microseconds(batches, _LAUNCH_CALLS) for batches in (forward, training)
        )
        for row in rows:
            row.forward_launch_us = forward_us.get(row.provider)
            row.training_launch_us = training_us.get(row.provider)
            self._report(row)
        return rows

    def _measure_provider(self, row: Row, case: Case, expected: Tensors) -> None:
        if not self.meter.cuda and row.provider not in CPU_PROVIDERS:
            raise Unavailable("measured on a GPU only")
        provider = case.provider(row.provider)
        bound = Bound(case, provider)
        row.error = check(bound.results(), expected, self.dtype)
        altered = bound.altered()
        row.note = "; ".join(part for part in (provider.note, altered and "overwrites its operands") if part)
        self._time(row, case, provider, altered)

    def _time(self, row: Row, case: Case, provider: Provider, altered: bool) -> None:
        copies = self.meter.copies(sum(t.nbytes for t in (*case.leaves, *case.upstream)))
        bound = Bound(case, provider, copies)
        bound.train()  # has run with other tensors before; now the allocator has its memory
        row.peak_bytes = self.meter.peak_bytes(bound.train)

        def measured(call: Callable[[int], Tensors], cost: Cost) -> tuple[Timing, float, float | None]:
            restore = bound.restore if altered else None
            timing = self.meter.time(call, copies, restore, sustained=bool(cost.flops))
            share = cost.milliseconds(self.ceilings) / timing.median
            return timing, share, cost.flops / timing.median / 1e9 if cost.flops else None

        row.training, row.training_ceiling, row.tflops = measured(bound.train, case.training)
        if case.forward is not None:
            row.forward, row.forward_ceiling, row.forward_tflops = measured(bound.forward, case.forward)

    def _set_copies(self, rows: list[Row], case: Case) -> None:
        """Time of copies of as many bytes, where memory is the limit."""
        if case.training.flops:
            return
        forward_bytes = 0 if case.forward is None else case.forward.bytes
        forward_ms = self.meter.copy_milliseconds(forward_bytes) if forward_bytes else 0.0
        training_ms = forward_ms + self.meter.copy_milliseconds(case.training.bytes - forward_bytes)
        for row in rows:
            row.training_copy = case.training.milliseconds(self.ceilings) / training_ms
            if case.forward is not None:
                row.forward_copy = case.forward.milliseconds(self.ceilings) / forward_ms

    def _time_is_up(self, rows: list[Row], share: float) -> bool:
        up = time.monotonic() - self.started > share * self.seconds
        for row in rows if up else ():
            row.note = f"skipped: the {self.seconds / 60:g} minutes are over"
            self._report(row)
        return up

    def _report(self, row: Row) -> None:
        took = f"{row.training.median:.3f} ms" if row.training else row.note
        if row.training_launch_us is not None:
            took = f"{row.training_launch_us:.0f} us to launch"
        seconds = time.monotonic() - self.started
        line = f"[{seconds:4.0f} s] {row.operation} {row.shape} {row.provider}: {took}"
        print(line, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        """Collect cycles with memory that a failed provider may have left."""
        if self.meter.cuda:
            gc.collect()
            torch.cuda.empty_cache()


def _row(operation: Operation, shape: tuple[int, ...], provider: str) -> Row:
    return Row(operation.name, operation.group, "x".join(map(str, shape)), provider)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer, such as an endless compilation."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"stopped after {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def _notes(*rows: Row) -> Iterator[None]:
    """Turn a missing or failing provider into a note."""
    try:
        yield
    except Exception as error:
        missing = isinstance(error, Unavailable | ImportError | AttributeError)
        for row in rows:
            row.note = _note(error)
            row.failed = not missing or (row.provider == "ours" and not isinstance(error, Unavailable))


def _note(error: Exception) -> str:
    if isinstance(error, Unavailable | Wrong | TimeoutError):
        return str(error)
    if isinstance(error, ImportError | AttributeError):
        return f"not available: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
