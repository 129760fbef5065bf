"""`Report.to_html`: the report as one self-contained page: a sortable, searchable table and the programs' text."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recom_jax.explain import Report

_FIELDS = (
    "name",
    "status",
    "combiner",
    "rows",
    "dim",
    "dtype",
    "rewrites",
    "source",
    "reason",
    "ids",
)

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #1c2330; }
input { font: inherit; padding: .35rem .6rem; width: 24rem; border: 1px solid #b8c0cc; border-radius: 4px; }
table { border-collapse: collapse; margin-top: 1rem; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #e3e7ed; vertical-align: top; }
th { cursor: pointer; position: sticky; top: 0; background: #f4f6f9; user-select: none; }
td.num { text-align: right; font-variant-numeric: tabular-nums; }
td.code { font-family: ui-monospace, monospace; font-size: 12px; word-break: break-all; max-width: 28rem; }
tr.xla td { background: #fff5e6; }
pre { background: #f4f6f9; padding: 1rem; overflow: auto; max-height: 40rem; font-size: 12px; }
"""

_SCRIPT = """
const body = document.querySelector('tbody'), rows = [...body.rows], find = document.querySelector('input');
const count = document.querySelector('#count');
find.addEventListener('input', () => {
  const words = find.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const r of rows) {
    const text = r.textContent.toLowerCase();
    r.hidden = !words.every(w => text.includes(w));
    shown += !r.hidden;
  }
  count.textContent = `${shown} of ${rows.length}`;
});
document.querySelectorAll('th').forEach((th, k) => th.addEventListener('click', () => {
  const up = th.dataset.up !== '1';
  document.querySelectorAll('th').forEach(t => delete t.dataset.up);
  th.dataset.up = up ? '1' : '0';
  const key = r => { const t = r.cells[k].textContent.replace(/,/g, ''); return isNaN(t) || !t ? t : Number(t); };
  rows.sort((a, b) => { const x = key(a), y = key(b); return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1); });
  body.append(...rows);
}));
"""


def render(report: Report) -> str:
    """The page's text. Needs nothing but itself: no network, no other file."""
    e = html.escape
    body = []
    for c in report.columns:
        values = [
            c.name,
            c.status,
            c.combiner,
            f"{c.rows:,}",
            str(c.dim),
            c.dtype,
            ", ".join(c.rewrites),
            c.source,
            c.reason,
            c.ids,
        ]
        kinds = ["", "", "", "num", "num", "", "", "code", "", "code"]
        cells = "".join(
            f'<td class="{k}">{e(v)}</td>' if k else f"<td>{e(v)}</td>"
            for v, k in zip(values, kinds, strict=True)
        )
        body.append(f'<tr class="{c.status}">{cells}</tr>')
    calls = f"{report.num_custom_calls} custom call{'' if report.num_custom_calls == 1 else 's'}"
    head = "".join(f"<th>{e(f)}</th>" for f in _FIELDS)
    title = f"{report.function}: {report.num_fused} of {report.num_columns} embedding columns fused into {calls}"
    n = len(report.columns)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{e(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{e(title)}</h1>"
        f"<p><input type='search' placeholder='search: words anywhere in a row' aria-label='search'> "
        f"<span id='count'>{n} of {n}</span> &middot; click a heading to sort</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        f"<h2>Programs</h2><pre>{e(report.source)}</pre><script>{_SCRIPT}</script></body></html>\n"
    )
