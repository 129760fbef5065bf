"""Draws the charts of `benchmarks.plots` with matplotlib; the same data gives the same file."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.plots import Chart, Panel

OURS, OTHERS, PROMISE, FLOOR = "#1f6fb2", "#b0b7bf", "#c0392b", "#333333"
SHADES = ("#1f6fb2", "#59a1d8", "#0b3d66", "#7a9cc0")  # lines of ours
GREYS = ("#444444", "#888888", "#b08d57", "#7d9471", "#a77")
SETTINGS: Any = {
    "svg.hashsalt": "recom_jax",  # names inside the file are the same each time
    "svg.fonttype": "none",  # text stays text
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
PLAIN_NUMBERS = FuncFormatter(lambda x, _: f"{x:,.4g}" if x < 1000 else f"{x:,.0f}")


def draw(chart: Chart, path: pathlib.Path) -> None:
    """Writes the chart to `path`; its ending names the type (svg, png)."""
    with matplotlib.rc_context(SETTINGS):
        figure = _bars(chart) if chart.panels else _lines(chart)
        figure.suptitle(chart.title, fontsize=10, x=0.01, ha="left")
        about = {"Date": None, "Description": chart.json()} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=about)


def _bars(chart: Chart) -> Figure:
    heights = [len(p.bars) + 1.4 for p in chart.panels]
    figure = Figure(figsize=(9, 0.55 + 0.19 * sum(heights)), layout="constrained")
    made: Any = figure.subplots(
        len(heights), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    for axes, panel in zip(made[:, 0], chart.panels, strict=True):
        _panel(axes, panel, chart.logarithmic)
    last = made[-1, 0]
    last.set_xlabel(
        f"{chart.unit}{', logarithmic' if chart.logarithmic else ''}{_legend(chart.panels)}"
    )
    return figure


def _legend(panels: Sequence[Panel]) -> str:
    text = ""
    if any(b.high > b.low for p in panels for b in p.bars):
        text += "; thin line: 10th to 90th percentile, or the range"
    if any(b.limit is not None for p in panels for b in p.bars):
        text += "; red mark: the promise"
    if any(p.floor is not None for p in panels):
        text += "; dashed: bytes / bandwidth"
    return text


def _panel(axes: Any, panel: Panel, logarithmic: bool) -> None:
    at = list(range(len(panel.bars)))
    values = [b.value for b in panel.bars]
    errors = [
        [max(b.value - b.low, 0) for b in panel.bars],
        [max(b.high - b.value, 0) for b in panel.bars],
    ]
    axes.barh(at, values, 0.7, color=[OURS if b.ours else OTHERS for b in panel.bars], xerr=errors,
              error_kw={"elinewidth": 0.7, "ecolor": "#222222"})  # fmt: skip
    for k, b in enumerate(panel.bars):
        axes.annotate(f"{b.value:,.3g}" if b.value < 1000 else f"{b.value:,.0f}", (max(b.high, b.value), k),
                      xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)  # fmt: skip
        if b.limit is not None:
            axes.plot([b.limit, b.limit], [k - 0.45, k + 0.45], color=PROMISE, linewidth=2)
    if panel.floor is not None:
        axes.axvline(panel.floor, color=FLOOR, linewidth=0.8, linestyle="--")
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
    axes.margins(x=0.08)
    axes.set_yticks(at, [b.label for b in panel.bars])
    axes.set_ylim(len(at) - 0.4, -0.6)
    axes.set_title(panel.title, fontsize=8, loc="left", pad=2)


def _lines(chart: Chart) -> Figure:
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes: Any = figure.subplots()
    drawn = {True: 0, False: 0}
    for line in chart.lines:
        shades = SHADES if line.ours else GREYS
        color = shades[drawn[line.ours] % len(shades)]
        style = ("-", "--", ":", "-.")[drawn[line.ours] // len(shades) % 4]
        drawn[line.ours] += 1
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, style, color=color, marker="o", markersize=3, label=line.label,
                  linewidth=2 if line.ours else 1.2)  # fmt: skip
    places = sorted({x for line in chart.lines for x, _ in line.points})
    if places[0] > 0 and places[-1] >= 8 * places[0]:
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{x:,.0f}" for x in places])
        axes.minorticks_off()
    if chart.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.unit)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure
