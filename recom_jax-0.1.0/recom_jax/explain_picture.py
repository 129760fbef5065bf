"""The report's picture: how columns land in what the fused calls return, as inline SVG."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recom_jax.explain import Report
    from recom_jax.explain_stages import Place, Result

WIDTH, LINE, BAR, LINES = 1200, 22, 15, 40
FEW = 12  # results that each have lines of their own
MARGIN = 64  # for the number of a line's first element
# Told apart by hue and lightness; classes beyond them begin again.
COLOURS = (
    "#4477aa", "#ee8866", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#994455", "#88aa22", "#7766cc", "#ddaa33",
    "#44bb99", "#bb5588",
)  # fmt: skip
OTHER = "#b3bac5"


def colour(cls: str) -> str:
    """The colour of a class of code, "call.class"."""
    call, _, number = cls.partition(".")
    return COLOURS[(int(number) + 5 * int(call)) % len(COLOURS)] if number else OTHER


def picture(report: Report) -> str:
    """The SVG; "" if nothing is fused. Each result is a strip, cut into lines; a column is a piece of it."""
    if not report.results:
        return ""
    total = sum(r.width for r in report.results)
    largest = max(r.width for r in report.results)
    per_line = max(1, -(-total // LINES), min(largest, 1024))
    few = len(report.results) <= FEW
    shapes: list[str] = []
    line = at = 0  # where the next result begins
    for r in report.results:
        if at and (few or at + r.width > per_line):
            line, at = line + 1, 0
        for down in range(-(-(at + r.width) // per_line) if few else 0):
            y = (line + down) * LINE + BAR - 3
            shapes.append(f'<text x="{MARGIN - 8}" y="{y}">{down * per_line:,}</text>')
        for p in r.places:
            for down, x, width in _pieces(at + p.start, p.width, per_line):
                shapes.append(_rect(report, r, p, line + down, x, width, WIDTH / per_line))
        line, at = line + (at + r.width) // per_line, (at + r.width) % per_line
        at += -(-per_line // 200) if at else 0  # a gap
    height = (line + (at > 0)) * LINE
    return (
        f'<svg viewBox="0 0 {WIDTH + MARGIN} {height}" role="img" '
        f'aria-label="columns in the results of the fused calls">{"".join(shapes)}</svg>'
    )


def legend(report: Report) -> str:
    """A button for each class of code: shows its columns."""
    counts: dict[str, int] = {}
    for c in report.columns:
        for cls in c.classes:
            counts[cls] = counts.get(cls, 0) + 1
    order = sorted(counts, key=lambda c: tuple(map(int, c.split("."))))
    made = [
        f'<button class="key" data-class="{cls}"><i style="background:{colour(cls)}"></i>class {cls}'
        f" <small>{counts[cls]:,}</small></button>"
        for cls in order
    ]
    if any(not p.columns for r in report.results for p in r.places):
        made.append(f'<span class="key"><i style="background:{OTHER}"></i>no lookup</span>')
    return "".join(made)


def _pieces(start: int, width: int, per_line: int) -> Iterator[tuple[int, int, int]]:
    """(line, x, width) of a run of elements, cut where lines end."""
    while width > 0:
        x = start % per_line
        w = min(width, per_line - x)
        yield start // per_line, x, w
        start, width = start + w, width - w


def _rect(report: Report, r: Result, p: Place, line: int, x: int, width: int, scale: float) -> str:
    cls = next((c for k in p.columns for c in report.columns[k].classes), "")
    names = ", ".join(report.columns[k].name for k in p.columns[:3]) or "values without a lookup"
    more = f" and {len(p.columns) - 3} more" if len(p.columns) > 3 else ""
    what = f"{names}{more}: {p.start}..{p.start + p.width - 1} of {list(r.shape)} {r.dtype}"
    drawn = max(width * scale - (0.6 if width * scale > 2 else 0), 0.4)
    return (
        f'<rect x="{MARGIN + x * scale:.2f}" y="{line * LINE}" width="{drawn:.2f}" height="{BAR}" '
        f'fill="{colour(cls)}" data-c="{" ".join(map(str, p.columns))}"><title>{html.escape(what)}</title></rect>'
    )


__all__ = ["colour", "legend", "picture"]
