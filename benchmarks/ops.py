"""Kernels beside their peers: is each right, how near to the machine's limit is it, what memory does it take.

A provider's outputs and gradients are compared with the truth first; one that is wrong is not timed.
Percentages are of what the same run reached with a plain copy, by the fewest bytes that must move, or with a
matrix product, by FLOP.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure import Ceilings, Meter, Timing
from benchmarks.operations import PROVIDERS, REGISTRY, Case, Operation, Provider, Tensors
from benchmarks.picture import draw
from benchmarks.report import machine, markdown_table, publish

SUMMARY = "kernels beside liger-kernel, torch.compile and eager PyTorch: correctness, time, memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = ", ".join(REGISTRY)
    parser.add_argument("--op", action="append", choices=REGISTRY, metavar="OP", help=f"repeatable: {listed}")
    parser.add_argument(
        "--provider", action="append", choices=PROVIDERS, help="repeatable; default: all of them"
    )
    parser.add_argument(
        "--shape", action="append", help="repeatable, such as 32768x4096; default: the table's"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one shape an operation, fewer repeats")


def run(args: argparse.Namespace) -> int:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    started = time.monotonic()
    meter = Meter(device, args.quick)
    ceilings = meter.ceilings()
    rows: list[Row] = []
    operations = [REGISTRY[name] for name in args.op or REGISTRY]
    for operation in operations:
        for shape in _shapes(operation, args, device):
            rows += _measure_case(operation, shape, dtype, args.provider or PROVIDERS, meter, ceilings)
    # Launches come last: the processes that compile for torch.compile keep the host busy until then.
    for operation in operations:
        if device.type == "cuda" and operation.small is not None:
            timed = [row for row in rows if row.operation == operation.name and row.training is not None]
            providers = dict.fromkeys(row.provider for row in timed)
            rows += _measure_launches(operation, list(providers), dtype, meter)
    if not rows:
        print(f"no operation has a shape like {', '.join(args.shape)}", file=sys.stderr)
        return 2
    title = machine(device, "liger-kernel")
    publish(args.out, "ops", _markdown(rows, title, ceilings, args.dtype), [row.record() for row in rows])
    note = draw(rows, title, ceilings, f"{args.out}/ops.png")
    print(f"\n{note}\n{time.monotonic() - started:.0f} s in all")
    return 1 if any(row.failed and row.provider == "ours" for row in rows) else 0


@dataclass
class Row:
    """One provider of one operation at one shape."""

    operation: str
    shape: str
    provider: str
    note: str = ""
    failed: bool = False
    error: float | None = None  # the largest relative error of an output or a gradient
    forward: Timing | None = None
    training: Timing | None = None
    forward_ceiling: float | None = None  # share of the ceiling, 0 to 1 and a little beyond
    training_ceiling: float | None = None
    tflops: float | None = None
    peak_bytes: int | None = None
    forward_launch_us: float | None = None
    training_launch_us: float | None = None

    def record(self) -> dict[str, object]:
        record: dict[str, object] = dict(vars(self))
        for name in ("forward", "training"):
            timing = record.pop(name)
            for part in ("median", "low", "high"):
                record[f"{name}_ms_{part}"] = getattr(timing, part, None)
        return record


def _shapes(operation: Operation, args: argparse.Namespace, device: torch.device) -> list[tuple[int, ...]]:
    if args.shape:
        shapes = [tuple(int(size) for size in shape.split("x")) for shape in args.shape]
        return [shape for shape in shapes if len(shape) == len(operation.tiny)]
    if device.type != "cuda":
        return [operation.tiny]
    return list(operation.shapes[:1] if args.quick else operation.shapes)


def _measure_case(
    operation: Operation, shape, dtype: torch.dtype, providers, meter: Meter, ceilings: Ceilings
) -> list[Row]:
    torch.manual_seed(0)
    case = operation.build(shape, dtype, meter.device)
    expected = case.expected()
    rows = []
    for name in providers:
        row = Row(operation.name, "x".join(map(str, shape)), name)
        rows.append(row)
        with _notes(row):
            provider = _available(case, name, meter.device)
            altered = _check(row, case, provider, expected, dtype)
            _time(row, case, provider, altered, meter, ceilings)
        took = f"{row.training.median:.3f} ms" if row.training else row.note
        print(f"{row.operation} {row.shape} {name}: {took}", file=sys.stderr, flush=True)
        if meter.cuda:  # a failed provider may have left cycles that hold memory
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def _measure_launches(operation: Operation, providers: list[str], dtype, meter: Meter) -> list[Row]:
    """The host's time for a call with few tokens."""
    assert operation.small is not None
    case = operation.build(operation.small, dtype, meter.device)
    rows = []
    for name in providers:
        row = Row(operation.name, "x".join(map(str, operation.small)), name)
        rows.append(row)
        with _notes(row):
            bound = _Bound(case, case.provider(name), 1)
            for _ in range(3):
                bound.train(0)
            row.training_launch_us = meter.launch_microseconds(bound.train)
            if case.forward_bytes is not None:
                row.forward_launch_us = meter.launch_microseconds(bound.forward)
    return rows


@contextmanager
def _notes(row: Row) -> Iterator[None]:
    """A peer that is missing, or fails, must not end the run."""
    try:
        yield
    except _Unavailable as reason:
        row.note = str(reason)
    except (ImportError, AttributeError) as error:
        row.note = f"not available: {error}"
        row.failed = row.provider == "ours"
    except torch.OutOfMemoryError:
        row.note, row.failed = "out of memory", True
    except Exception as error:
        row.note, row.failed = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}", True


class _Unavailable(Exception):
    pass


def _available(case: Case, name: str, device: torch.device) -> Provider:
    if device.type != "cuda" and name in ("liger-kernel", "torch.compile"):
        raise _Unavailable("measured on a GPU only")
    return case.provider(name)


class _Bound:
    """A provider with copies of a case's leaves and upstream gradients."""

    def __init__(self, case: Case, provider: Provider, copies: int):
        self.provider = provider
        self.pristine = (*provider.leaves(tuple(t.detach() for t in case.leaves)), *case.upstream)
        self.sets = [tuple(t.clone() for t in self.pristine) for _ in range(copies)]
        self.num_leaves = len(self.pristine) - len(case.upstream)
        for tensors in self.sets:
            for leaf in tensors[: self.num_leaves]:
                leaf.requires_grad_()

    def forward(self, i: int) -> Tensors:
        return self.provider.run(*self.sets[i][: self.num_leaves])

    def train(self, i: int) -> Tensors:
        outputs = self.forward(i)
        leaves, upstream = self.sets[i][: self.num_leaves], self.sets[i][self.num_leaves :]
        return (*(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, upstream))

    @torch.no_grad()
    def restore(self) -> None:
        for tensors in self.sets:
            for tensor, pristine in zip(tensors, self.pristine, strict=True):
                tensor.copy_(pristine)

    def altered(self) -> bool:
        pairs = zip(self.sets[0], self.pristine, strict=True)
        return not all(torch.equal(tensor, pristine) for tensor, pristine in pairs)


def _check(row: Row, case: Case, provider: Provider, expected: Tensors, dtype: torch.dtype) -> bool:
    """Compare with the truth; returns whether the provider overwrites its operands.

    Values of unit roundoff eps / 2 that pass through a few roundings differ from the truth by less than eps
    in the mean square; four times that still is not a wrong function.
    """
    limit = max(4 * torch.finfo(dtype).eps, 1e-5)
    bound = _Bound(case, provider, 1)
    outputs = bound.forward(0)
    found = [output.detach().clone() for output in outputs]
    leaves, upstream = bound.sets[0][: bound.num_leaves], bound.sets[0][bound.num_leaves :]
    found += provider.gradients(torch.autograd.grad(outputs, leaves, upstream))
    row.error = max(_relative_error(a, b) for a, b in zip(found, expected, strict=True))
    if not row.error <= limit:  # also if it is nan
        raise ValueError(f"wrong: relative error {row.error:.1e}, expected at most {limit:.1e}")
    altered = bound.altered()
    row.note = "; ".join(part for part in (provider.note, altered and "overwrites its operands") if part)
    return altered


def _relative_error(found: Tensor, true: Tensor) -> float:
    difference = torch.linalg.vector_norm(found.float() - true)
    return (difference / torch.linalg.vector_norm(true)).item()


def _time(row: Row, case: Case, provider: Provider, altered: bool, meter: Meter, ceilings: Ceilings) -> None:
    copies = meter.copies(sum(t.nbytes for t in (*case.leaves, *case.upstream)))
    bound = _Bound(case, provider, copies)
    bound.train(0)  # compiles, and chooses configurations
    restore = bound.restore if altered else None
    row.peak_bytes = meter.peak_bytes(bound.train)
    row.training = meter.time(bound.train, copies, restore, sustained=case.flops is not None)
    if case.flops is not None:
        row.tflops = case.flops / row.training.median / 1e9
        row.training_ceiling = 1e12 * row.tflops / ceilings.matmul
    else:
        row.training_ceiling = 1e3 * case.training_bytes / row.training.median / ceilings.copy
    if case.forward_bytes is not None:
        row.forward = meter.time(bound.forward, copies, restore)
        row.forward_ceiling = 1e3 * case.forward_bytes / row.forward.median / ceilings.copy


def _markdown(rows: list[Row], title: str, ceilings: Ceilings, dtype: str) -> str:
    providers = list(dict.fromkeys(row.provider for row in rows))
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row.operation, row.shape), {})[row.provider] = row

    def table(columns: str, cell) -> str:
        lines = []
        for case, by_provider in cases.items():
            cells = [cell(by_provider[p]) if p in by_provider else "" for p in providers]
            if any(cells):
                lines.append([*case, *(text or "-" for text in cells)])
        return f"{columns}\n\n{markdown_table(['operation', 'shape', *providers], lines)}" if lines else ""

    parts = [
        f"{title}; {dtype}. Copy {ceilings.copy / 1e12:.2f} TB/s, bfloat16 matrix product "
        f"{ceilings.matmul / 1e12:.0f} TFLOP/s.",
        table("Forward: milliseconds, share of the copy bandwidth", _forward_cell),
        table(
            "Forward and backward: milliseconds, share of the ceiling, peak memory beside the operands",
            _training_cell,
        ),
        table(
            "A batch of 1 x 512 tokens: microseconds of the host for a call, forward; forward and backward",
            _launch_cell,
        ),
        table("Largest relative error of an output or a gradient", _error_cell),
        _remarks(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _forward_cell(row: Row) -> str:
    return f"{row.forward.median:.3f}, {_percent(row.forward_ceiling)}" if row.forward else ""


def _training_cell(row: Row) -> str:
    if row.training is None:
        return "fails" if row.failed else ""
    rate = f" ({row.tflops:.0f} TFLOP/s)" if row.tflops is not None else ""
    memory = f", {row.peak_bytes / 2**20:.0f} MiB" if row.peak_bytes is not None else ""
    return f"{row.training.median:.3f}, {_percent(row.training_ceiling)}{rate}{memory}"


def _launch_cell(row: Row) -> str:
    if row.training_launch_us is None:
        return ""
    forward = f"{row.forward_launch_us:.0f}; " if row.forward_launch_us is not None else ""
    return f"{forward}{row.training_launch_us:.0f}"


def _error_cell(row: Row) -> str:
    return f"{row.error:.1e}" if row.error is not None else ""


def _remarks(rows: list[Row]) -> str:
    """Each note once, with the operations that it holds for."""
    notes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note:
            operations = notes.setdefault((row.provider, row.note), [])
            if row.operation not in operations:
                operations.append(row.operation)
    return "\n".join(f"- {who}: {note} ({', '.join(where)})" for (who, note), where in notes.items())


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"
