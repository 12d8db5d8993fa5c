"""One picture of the kernels: how much of the machine's limit each provider reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.measure import Ceilings

if TYPE_CHECKING:
    from benchmarks.ops import Row

_COLOURS = {"ours": "#d1495b", "liger-kernel": "#30638e", "torch.compile": "#8fb8de", "eager": "#c9c9c9"}


def draw(rows: Sequence[Row], title: str, ceilings: Ceilings, path: str) -> str:
    """Two panels of bars, forward and forward + backward, one group an operation and shape. Returns what was
    done.
    """
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    first_shapes: dict[str, str] = {}
    for row in rows:
        if row.training_ceiling is not None:
            first_shapes.setdefault(row.operation, row.shape)
    groups = list(first_shapes.items())
    providers = [name for name in _COLOURS if any(row.provider == name for row in rows)]
    share = {(row.operation, row.shape, row.provider): row for row in rows}
    figure, axes = pyplot.subplots(
        1, 2, sharey=True, figsize=(13, 1.5 + 0.62 * len(groups)), layout="constrained"
    )
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # keeps the limit's line off the number
    thickness = 0.84 / len(providers)
    for axis, field, heading in (
        (axes[0], "forward_ceiling", "forward"),
        (axes[1], "training_ceiling", "forward + backward"),
    ):
        for n, provider in enumerate(providers):
            for y, group in enumerate(groups):
                row = share.get((*group, provider))
                value = getattr(row, field) if row is not None else None
                if value is None:
                    continue
                at = y + (n - (len(providers) - 1) / 2) * thickness
                axis.barh(at, 100 * value, thickness, color=_COLOURS[provider])
                bold = "bold" if provider == "ours" else "normal"
                axis.text(
                    100 * value + 1,
                    at,
                    f"{100 * value:.0f}",
                    va="center",
                    fontsize=7,
                    fontweight=bold,
                    bbox=behind,
                )
        axis.axvline(100, color="black", linewidth=1, linestyle="--")
        axis.set_title(f"{heading}: % of the limit", fontsize=11)
        axis.set_xlim(0, 112)
        axis.set_ylim(len(groups) - 0.45, -0.55)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(
        range(len(groups)), [f"{name.replace('_', ' ')}\n{shape}" for name, shape in groups], fontsize=8
    )
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[name]) for name in providers]
    figure.legend(handles, providers, loc="outside upper center", ncols=len(providers), frameon=False)
    copy, product = f"{ceilings.copy / 1e12:.2f} TB/s", f"{ceilings.matmul / 1e12:.0f} TFLOP/s"
    limits = f"limit: a copy at {copy}; of linear cross entropy and experts a matrix product at {product}"
    figure.supxlabel(f"{title}; {limits}", fontsize=7)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return f"picture: {path}"
