"""Plot of the kernels: how close ours and the peers come to the machine's limit.

Forward and backward together. Left: memory-bound kernels, as a fraction of a large copy's bandwidth, with a
line at the speed of copies of as many bytes. Right: kernels bound by matrix products, in TFLOP/s. Ours is a
bar, a peer a mark on or beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure import Ceilings
from benchmarks.row import Row

_OURS = "#d1495b"
_PEERS = {  # colour and mark
    "liger-kernel": ("#1f4e79", "D"),
    "torch.compile": ("#5fa8d3", "o"),
    "eager": ("#8a8a8a", "X"),
    "SDPA": ("#2a9d8f", "s"),
    "FlexAttention": ("#e9a03b", "^"),
    "varlen": ("#7b5ea7", "v"),
    "flash-attn-4": ("#b5838d", "P"),
}


_COPY = {"color": "black", "marker": "|", "markeredgewidth": 2}


def draw(rows: Sequence[Row], title: str, ceilings: Ceilings, path: str) -> str:
    """Write the PNG; returns a status message."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row.training is not None]
    if not timed:
        return "no plot: nothing was timed"
    memory = _cases([row for row in timed if row.tflops is None])
    products = _cases([row for row in timed if row.tflops is not None])
    height = 1.9 + 0.36 * max(len(memory), len(products))
    figure, axes = pyplot.subplots(1, 2, figsize=(14, height), layout="constrained")
    _panel(
        axes[0],
        {case: {who: 100 * row.training_ceiling for who, row in by.items()} for case, by in memory.items()},
        "Bound by memory: % of the bandwidth of a large copy",
        100,
        f"a large copy, {ceilings.copy / 1e12:.2f} TB/s",
        "%",
        [100 * (next(iter(by.values())).training_copy or 0.0) for by in memory.values()],
    )
    _panel(
        axes[1],
        {case: {who: row.tflops for who, row in by.items()} for case, by in products.items()},
        "Bound by matrix products: TFLOP/s",
        ceilings.matmul / 1e12,
        f"a bfloat16 product, {ceilings.matmul / 1e12:.0f}",
        "",
    )
    heading = "Forward and backward pass: ours as bars, the others as marks, longer is better"
    figure.suptitle(f"{heading}\n{title}", fontsize=11)
    shown = {row.provider for row in timed}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_OURS)]
    for who in (names := [who for who in _PEERS if who in shown]):
        colour, mark = _PEERS[who]
        handles.append(pyplot.Line2D([], [], color=colour, marker=mark, markersize=8, linestyle=""))
    if memory:
        handles.append(pyplot.Line2D([], [], **_COPY, markersize=14, linestyle=""))
        names.append("copies of as many bytes")
    figure.legend(handles, ["ours", *names], loc="outside lower center", ncols=8, frameon=False, fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"picture: {path}"


def _cases(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows by case, with its label as the name, and by provider."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        label = f"{row.operation.replace('_', ' ')}  {row.shape}"
        cases.setdefault(label, {})[row.provider] = row
    return cases


def _panel(
    axis,
    cases: dict[str, dict[str, float]],
    heading: str,
    limit: float,
    limit_name: str,
    unit: str,
    copies: Sequence[float] = (),
):
    if not cases:
        axis.set_visible(False)
        return
    for y, by_provider in enumerate(cases.values()):
        ours = by_provider.get("ours")
        if ours is not None:
            axis.barh(y, ours, 0.62, color=_OURS, zorder=2)
            # In a column of its own, so that no mark covers it.
            axis.text(
                1.2 * limit,
                y,
                f"{ours:.0f}{unit}",
                ha="right",
                va="center",
                fontsize=10,
                fontweight="bold",
                color=_OURS,
            )
        for who, (colour, mark) in reversed(_PEERS.items()):  # the first one on top
            if who in by_provider:
                axis.plot(
                    by_provider[who],
                    y,
                    mark,
                    color=colour,
                    markersize=8,
                    markeredgecolor="white",
                    markeredgewidth=1,
                    zorder=3,
                    clip_on=False,
                )
    for y, reached in enumerate(copies):
        if reached:
            axis.plot(reached, y, **_COPY, markersize=19, zorder=2.5)
    axis.axvline(limit, color="black", linewidth=1.2, linestyle="--", zorder=1)
    axis.text(limit, -0.75, limit_name, ha="center", va="bottom", fontsize=9)
    axis.set_title(heading, fontsize=12, pad=20, loc="left")
    axis.set_xlim(0, 1.08 * limit)
    axis.set_ylim(len(cases) - 0.4, -0.7)
    axis.set_yticks(range(len(cases)), list(cases), fontsize=10)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#e3e3e3", zorder=0)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
