"""`Report.to_html`: the report as one self-contained page: stages, a picture of the results, columns, code."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from recom_jax.explain_page import SCRIPT, STYLE
from recom_jax.explain_picture import colour, legend, picture

if TYPE_CHECKING:
    from recom_jax.explain import ColumnReport, Report

HEADINGS = (
    "column", "status", "reason", "combiner", "rows", "dim", "dtype", "table bytes", "class", "rewrites", "facts",
    "source", "row number",
)  # fmt: skip
NUMBERS = ("rows", "dim", "table bytes")
STAGES = {
    "trace": "the function as a flat jaxpr",
    "detect": "columns found by dataflow",
    "simplify": "rewrites proven from facts",
    "schedule": "equal columns share code",
    "encode": "words for the kernel",
    "splice": "the calls put in place",
}
SHOWN = 60_000  # characters of a block of code


def render(report: Report) -> str:
    """The page's text. Needs nothing but itself: no network, no other file."""
    calls = f"{report.num_custom_calls} custom call{'' if report.num_custom_calls == 1 else 's'}"
    title = f"{report.function}: {report.num_fused} of {report.num_columns} embedding columns fused into {calls}"
    parts = [
        f"<h1>{_e(title)}</h1>",
        f'<p class="soft">{sum(map(len, report.classes))} classes of code; tables of '
        f"{_size(sum(_tables(report).values()))} in all.</p>",
        _stages(report),
        _picture(report),
        _columns(report),
        _others(report),
        _code(report),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{_e(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


_e = html.escape


def _size(n: int) -> str:
    value, unit = float(n), "bytes"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"


def _tables(report: Report) -> dict[str, int]:
    return {c.table: c.bytes for c in report.columns}


def _stages(report: Report) -> str:
    if not report.stages:
        return ""
    cards, texts = [], []
    for k, s in enumerate(report.stages, 1):
        lines = "".join(
            f"<li><span>{_e(label)}</span><span>{_e(n)}</span></li>" for label, n in s.counts[:6]
        )
        more = f"<li><span>and {len(s.counts) - 6} more</span></li>" if len(s.counts) > 6 else ""
        cards.append(
            f'<div class="stage"><b>{k}. {_e(s.name)}</b><small>{STAGES.get(s.name, "")}</small>'
            f"<ol>{lines}{more}</ol></div>"
        )
        rest = "\n".join(f"{label}: {n}" for label, n in s.counts) if more else ""
        texts.append(
            f"<details><summary>{_e(s.name)}</summary>{_pre(rest)}{_pre(s.text)}</details>"
        )
    return (
        f'<h2>Stages</h2><div class="stages">{"".join(cards)}</div>'
        f"<details><summary>What each stage printed</summary>{''.join(texts)}</details>"
    )


def _picture(report: Report) -> str:
    drawn = picture(report)
    if not drawn:
        return ""
    n = len(report.results)
    shapes = ", ".join(f"{list(r.shape)} {r.dtype}" for r in report.results[:4])
    said = f"{n:,} result{'' if n == 1 else 's'} of the fused calls: {shapes}{', ...' if n > 4 else ''}."
    if any(r.interleaved for r in report.results):
        said += " Parts that lie between one another in memory are drawn one after the other."
    if report.num_fused < report.num_columns:
        said += f" Not in the picture, as XLA computes them: {report.num_columns - report.num_fused:,} of the columns."
    return (
        f"<h2>Where columns land</h2><p>{_e(said)} One sample's share, element by element; a colour is a class of "
        f"code. Click a piece to see its column, a class to see its columns.</p>"
        f'<div class="keys">{legend(report)}</div><div class="picture">{drawn}</div>'
    )


def _columns(report: Report) -> str:
    if not report.columns:
        return "<p>No table is read along its rows: nothing to fuse, the function runs as plain JAX.</p>"
    head = "".join(
        f"<th{' class=num' if h in NUMBERS else ''}><button>{_e(h)}</button></th>" for h in HEADINGS
    )
    xla = report.num_columns - report.num_fused
    chips = "".join(
        f'<button class="chip" data-status="{status}" aria-pressed="{str(not status).lower()}">{text} '
        f"<small>{n:,}</small></button>"
        for status, text, n in (
            ("", "all", report.num_columns),
            ("fused", "fused", report.num_fused),
            ("xla", "left to XLA", xla),
        )
    )
    rows = "".join(_row(k, c) for k, c in enumerate(report.columns))
    n = report.num_columns
    return (
        f'<h2>Columns</h2><div class="tools"><input id="find" type="search" aria-label="search" '
        f'placeholder="search: words anywhere in a row ( / )">{chips}'
        f'<span id="count" class="soft" role="status">{n} of {n} columns</span></div>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<p id="none" class="soft" hidden>No column fits. Esc shows all again.</p>'
    )


def _row(number: int, c: ColumnReport) -> str:
    folder, _, file = c.source.rpartition("/")
    swatch = f'<i style="background:{colour(c.classes[0])}"></i>' if c.classes else ""
    cells = (
        f'<td class="name code">{_e(c.name)}</td><td class="status">{_e(c.status)}</td>'
        f"<td{' class=mid' if c.reason else ''}>{_e(c.reason)}</td><td class='whole'>{_e(c.combiner)}</td>"
        f'<td class="num" data-v="{c.rows}">{c.rows:,}</td><td class="num" data-v="{c.dim}">{c.dim}</td>'
        f'<td class="whole">{_e(c.dtype)}</td><td class="num" data-v="{c.bytes}">{_size(c.bytes)}</td>'
        f'<td class="num">{swatch}{_e(" ".join(c.classes))}</td>'
        f'<td class="mid">{_e(", ".join(c.rewrites))}</td><td class="mid">{_e(c.facts)}</td>'
        f'<td class="whole" title="{_e(folder)}">{_e(file)}</td><td class="ids code"><div>{_e(c.ids)}</div></td>'
    )
    return f'<tr class="{_e(c.status)}" data-n="{number}" data-classes="{" ".join(c.classes)}">{cells}</tr>'


def _others(report: Report) -> str:
    if not report.others:
        return ""
    seen = dict.fromkeys(report.others)
    items = "".join(f"<li>{_e(line)}: {_e(why)}</li>" for line, why in list(seen)[:100])
    return f"<h2>Gathers that are no embedding columns</h2><ul>{items}</ul>"


def _code(report: Report) -> str:
    if not report.source:
        return ""
    cuda = report.cuda_source()
    kernels = f"<details><summary>As CUDA</summary>{_pre(cuda)}</details>" if cuda else ""
    return (
        "<h2>Generated code</h2><p>The programs that the fused calls run (docs/program_format.md). The values of a "
        f"class's first three columns are shown.</p>{_pre(report.source)}{kernels}"
    )


def _pre(text: str) -> str:
    if not text:
        return ""
    cut = f"\n... and {len(text) - SHOWN:,} more characters" if len(text) > SHOWN else ""
    return f"<pre>{_e(text[:SHOWN])}{cut}</pre>"
