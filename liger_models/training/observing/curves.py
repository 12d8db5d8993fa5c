"""Curves of a run, OUTPUT/loss.png: loss, metrics of the objective, learning rate and gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Points = list[tuple[float, float]]


def plot_losses(
    records: list[dict[str, Any]],
    path: Path,
    unit: str = "nats per token",
    extra: Sequence[str] = (),
    title: str = "",
) -> bool:
    """Plot a run's records over its steps as a PNG; False if matplotlib is not installed.

    The loss is on a logarithmic axis if it stays positive. Metrics whose names end alike, such as the rewards
    of chosen and rejected answers, share a panel. The last panel has the learning rate and the gradient norm.

    Args:
        records: lines of metrics.jsonl.
        unit: of the loss.
        extra: the objective's own metrics.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels = [("loss",), *_panels(extra), ("lr", "grad_norm")]
    columns = 1 if len(panels) == 2 else 2
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2 + 5.5 * columns, 0.6 + 2.9 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no global state of pyplot
    every = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    for axes, names in zip(every, panels, strict=False):
        axes.grid(alpha=0.3)
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
        if names == ("lr", "grad_norm"):
            _plot_rate_and_norm(axes, records)
        else:
            _plot_metrics(axes, records, names, unit)
    for axes in every[len(panels) :]:
        axes.remove()
    figure.suptitle(title or path.parent.name)
    figure.savefig(path)
    return True


def _panels(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Metrics by panel: `chosen_reward` and `rejected_reward` share one."""
    panels: dict[str, tuple[str, ...]] = {}
    for name in names:
        shared = name.endswith("_reward")
        key = "_reward" if shared else name
        panels[key] = (*panels.get(key, ()), name)
    return list(panels.values())


def _plot_metrics(axes: Any, records: list[dict[str, Any]], names: Sequence[str], unit: str) -> None:
    labels = [name.replace("_", " ") for name in names]
    for name, label, colour in zip(names, labels, ("tab:blue", "tab:orange"), strict=False):
        several = f"{label}, " if len(names) > 1 else ""
        if train := _points(records, name):
            axes.plot(*zip(*train, strict=True), color=colour, linewidth=1, label=f"{several}training")
        if held := _points(records, f"eval_{name}"):
            style = {"color": "black" if len(names) == 1 else colour, "marker": "o", "markersize": 4}
            axes.plot(*zip(*held, strict=True), linestyle="--", label=f"{several}held out", **style)
    points = [y for name in names for kind in (name, f"eval_{name}") for _, y in _points(records, kind)]
    if names == ("loss",):
        axes.set_ylabel(f"loss ({unit})")
        if points and min(points) > 0:
            _logarithmic(axes)
    else:
        axes.set_ylabel(labels[0] if len(names) == 1 else "reward")
    if points:
        axes.legend()


def _plot_rate_and_norm(axes: Any, records: list[dict[str, Any]]) -> None:
    rates, norms = _points(records, "lr"), _points(records, "grad_norm")
    if rates:
        axes.plot(*zip(*rates, strict=True), color="tab:green", linewidth=1)
    axes.set_ylabel("learning rate", color="tab:green")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    other = axes.twinx()
    if norms:
        other.plot(*zip(*norms, strict=True), color="tab:purple", linewidth=1)
        if min(y for _, y in norms) > 0:
            _logarithmic(other)
    other.set_ylabel("gradient norm", color="tab:purple")


def _logarithmic(axes: Any) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def _points(records: list[dict[str, Any]], name: str) -> Points:
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]
