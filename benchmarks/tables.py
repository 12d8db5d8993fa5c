"""The Markdown report of `ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.measure import Ceilings
from benchmarks.report import markdown_table
from benchmarks.row import Row


def markdown(rows: Sequence[Row], title: str, ceilings: Ceilings, dtype: str) -> str:
    """Tables with one line per operation and shape, and one column per provider."""
    parts = [
        f"{title}; {dtype}. Copy {ceilings.copy / 1e12:.2f} TB/s, bfloat16 matrix product "
        f"{ceilings.matmul / 1e12:.0f} TFLOP/s.",
        _tables(
            "Forward: milliseconds, fraction of the limit; fraction reached by a copy of as many bytes",
            rows,
            _forward_cell,
            ("a copy", lambda row: _percent(row.forward_copy)),
        ),
        _tables(
            "Forward and backward: milliseconds, fraction of the limit, peak memory excluding operands",
            rows,
            _training_cell,
        ),
        _tables(
            "A batch of 1 x 512 tokens: host microseconds per call, forward; forward and backward",
            rows,
            _launch_cell,
        ),
        _tables("Largest relative error of an output or a gradient", rows, _error_cell),
        _remarks(rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _tables(
    heading: str,
    rows: Sequence[Row],
    cell: Callable[[Row], str],
    case_column: tuple[str, Callable[[Row], str]] | None = None,
) -> str:
    """One table for all operations with the same providers; empty if all cells are.

    Columns that depend only on the case come last, in tables where they have values.
    """
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row.operation, row.shape), {})[row.provider] = row
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for case, by_provider in cases.items():
        cells = [cell(row) for row in by_provider.values()]
        if any(cells):
            first = next(iter(by_provider.values()))
            header, of_case = (case_column[0], case_column[1](first)) if case_column else ("", "")
            last = {header: of_case} if of_case else {}
            lines = tables.setdefault((*by_provider, *last), [])
            lines.append([*case, *(text or "-" for text in cells), *last.values()])
    written = [markdown_table(["operation", "shape", *columns], lines) for columns, lines in tables.items()]
    return "\n\n".join([heading, *written]) if written else ""


def _forward_cell(row: Row) -> str:
    if row.forward is None:
        return ""
    return f"{row.forward.median:.3f}, {_percent(row.forward_ceiling)}{_rate(row.forward_tflops)}"


def _training_cell(row: Row) -> str:
    if row.training is None:
        return "fails" if row.failed else ""
    memory = f", {row.peak_bytes / 2**20:.0f} MiB" if row.peak_bytes is not None else ""
    return f"{row.training.median:.3f}, {_percent(row.training_ceiling)}{_rate(row.tflops)}{memory}"


def _launch_cell(row: Row) -> str:
    if row.training_launch_us is None:
        return ""
    forward = f"{row.forward_launch_us:.0f}; " if row.forward_launch_us is not None else ""
    return f"{forward}{row.training_launch_us:.0f}"


def _error_cell(row: Row) -> str:
    return f"{row.error:.1e}" if row.error is not None else ""


def _remarks(rows: Sequence[Row]) -> str:
    """Each note once, with its operations."""
    notes: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.note:
            notes.setdefault((row.provider, row.note), {})[row.operation] = None
    return "\n".join(f"- {who}: {note} ({', '.join(where)})" for (who, note), where in notes.items())


def _rate(tflops: float | None) -> str:
    return "" if tflops is None else f" ({tflops:.0f} TFLOP/s)"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}%"
