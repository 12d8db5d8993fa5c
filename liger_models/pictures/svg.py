"""SVG elements, and a chart of bars.

bars("Peak memory", {"lean": {"weights": 15.0, "activations": 4.2}}, "GiB", limit=("H100", 75.1))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d")
INK, GREY, PAPER = "#222222", "#767676", "#ffffff"
ROW = 26  # height of a bar with its gap
LEFT, WIDTH = 90, 460  # of the bars


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK, size: int = 12) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}">'
        f"{inside}</rect>"
    )


def line(x: float, y: float, to_x: float, to_y: float, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{GREY}" fill="none"{dashes}/>'


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole picture on white paper, so that it can be read on a dark page, too."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        'font-family="sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        box(0, 0, width, height, PAPER),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def bars(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    unit: str,
    limit: tuple[str, float] | None = None,
) -> str:
    """Stacked horizontal bars, one per row, with a legend of their parts and an optional limit."""
    parts, height = stacked(title, rows, unit, limit)
    return picture(LEFT + WIDTH + 90, height, title, parts)


def stacked(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    unit: str,
    limit: tuple[str, float] | None = None,
    top: float = 0,
) -> tuple[list[str], float]:
    """Elements of the bars of `bars` below the height `top`, and the height where they end."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    colours = dict(zip(names, COLOURS, strict=False))
    longest = max([sum(row.values()) for row in rows.values()] + ([limit[1]] if limit else []))
    scale = WIDTH / (longest or 1)
    made = [text(12, top + 22, title, size=14)]
    y = top + 40
    if len(names) > 1:
        x: float = LEFT
        for name in names:
            made += [box(x, y - 9, 10, 10, colours[name]), text(x + 15, y, name)]
            x += 30 + 7 * len(name)
        y += 14
    first = y
    for label, row in rows.items():
        made.append(text(LEFT - 8, y + 14, label, "end"))
        x = LEFT
        for name, value in row.items():
            if value:
                width = value * scale
                made.append(box(x, y, width, ROW - 7, colours[name], f"{name}: {value:.3g} {unit}"))
                x += width
        made.append(text(x + 6, y + 14, f"{sum(row.values()):.3g} {unit}"))
        y += ROW
    if limit:
        x = LEFT + limit[1] * scale
        made += [line(x, first - 4, x, y, dashed=True), text(x, y + 12, limit[0], "middle", GREY)]
        y += 14
    return made, y + 8
