"""What the report's page is dressed in: its style sheet and its script. Both are inline: no network, no other file."""

STYLE = """
:root { --ink: #1c2330; --soft: #5b6675; --line: #e0e5ec; --back: #fff; --panel: #f4f6f9; --mark: #1f6feb;
  --warn: #fff4e0; --bad: #9a4a00; --good: #1a7f37; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b4; --line: #303844; --back: #14181e; --panel: #1d232b; --mark: #6cb0ff;
    --warn: #3a2b12; --bad: #ffb86b; --good: #62d17f; } }
* { box-sizing: border-box; }
body { font: 14px/1.45 system-ui, "Liberation Sans", sans-serif; margin: 0 auto; padding: 1.5rem 2rem 4rem;
  max-width: 110rem; color: var(--ink); background: var(--back); }
h1 { font-size: 1.35rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; max-width: 60rem; }
.soft, small { color: var(--soft); }
.stages { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .6rem; }
.stage { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.stage b { display: block; margin-bottom: .2rem; }
.stage ol { list-style: none; margin: 0; padding: 0; }
.stage li { display: flex; justify-content: space-between; gap: .6rem; font-size: 12px; }
.stage li span:last-child { font-variant-numeric: tabular-nums; }
details { margin: .4rem 0; }
summary { cursor: pointer; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .8rem; overflow: auto;
  max-height: 32rem; font: 12px/1.4 ui-monospace, "Liberation Mono", monospace; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); text-anchor: end; }
svg rect { cursor: pointer; }
svg rect:hover, svg rect.on { stroke: var(--ink); stroke-width: 2; }
svg.some rect:not(.on) { opacity: .22; }
.keys { display: flex; flex-wrap: wrap; gap: .3rem; margin: .4rem 0; }
.key { display: inline-flex; align-items: center; gap: .4rem; }
.key i { width: .8rem; height: .8rem; border-radius: 2px; display: inline-block; }
button { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line); border-radius: 4px;
  padding: .15rem .5rem; cursor: pointer; }
button[aria-pressed=true] { border-color: var(--mark); color: var(--mark); }
span.key { padding: .15rem .5rem; border: 1px solid transparent; }
.tools { position: sticky; top: 0; z-index: 2; background: var(--back); padding: .5rem 0; display: flex;
  flex-wrap: wrap; gap: .4rem; align-items: center; }
input { font: inherit; color: inherit; background: var(--back); padding: .3rem .6rem; width: min(26rem, 100%);
  border: 1px solid var(--line); border-radius: 4px; }
.wide { overflow: auto; max-height: max(85vh, 20rem); border: 1px solid var(--line); border-radius: 6px; }
.picture { overflow-x: auto; }
.picture svg { min-width: 55rem; }
th { position: sticky; top: 0; z-index: 1; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--panel); white-space: nowrap; padding: 0; }
th button { width: 100%; text-align: inherit; border: 0; background: none; font-weight: 600; padding: .35rem .5rem; }
th[aria-sort] button { color: var(--mark); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
td { font-size: 13px; overflow-wrap: anywhere; min-width: 3.5rem; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.code { font: 12px/1.5 ui-monospace, "Liberation Mono", monospace; }
td.name { min-width: 11rem; }
td.mid { min-width: 9.5rem; }
td.whole { white-space: nowrap; }
td.ids { min-width: 15rem; max-width: 26rem; }
td.ids div { max-height: 3em; overflow: hidden; cursor: zoom-in; }
td.ids div.open { max-height: none; cursor: zoom-out; }
td i { width: .7rem; height: .7rem; border-radius: 2px; display: inline-block; margin-right: .3rem; }
tr.xla td { background: var(--warn); }
tr.on td { box-shadow: inset 0 2px var(--mark), inset 0 -2px var(--mark); }
.fused .status { color: var(--good); } .xla .status { color: var(--bad); font-weight: 600; }
#none { padding: 1rem; }
@media print { .tools, .keys { display: none; } th { position: static; } pre, .wide { max-height: none; } }
"""

SCRIPT = """
'use strict';
const $ = (q, e = document) => [...e.querySelectorAll(q)];
const body = document.querySelector('tbody'), find = document.querySelector('#find');
const rows = body ? [...body.rows] : [], svg = document.querySelector('svg');
const texts = new Map(rows.map(r => [r, r.textContent.toLowerCase()]));
const byNumber = new Map(rows.map(r => [r.dataset.n, r]));
let status = '', group = '';

function show() {
  const words = find.value.toLowerCase().split(/\\s+/).filter(Boolean), on = new Set();
  for (const r of rows) {
    const fits = words.every(w => texts.get(r).includes(w)) && (!status || r.classList.contains(status))
      && (!group || r.dataset.classes.split(' ').includes(group));
    r.hidden = !fits;
    if (fits) on.add(r.dataset.n);
  }
  document.querySelector('#count').textContent = `${on.size} of ${rows.length} columns`;
  document.querySelector('#none').hidden = on.size > 0;
  if (!svg) return;
  svg.classList.toggle('some', on.size < rows.length);
  for (const x of $('rect', svg))
    x.classList.toggle('on', on.size < rows.length && x.dataset.c.split(' ').some(n => on.has(n)));
}

function press(buttons, chosen) {
  for (const b of buttons) b.setAttribute('aria-pressed', b === chosen);
}

if (body) {
  find.addEventListener('input', show);
  const chips = $('.chip'), keys = $('button.key');
  for (const b of chips) b.addEventListener('click', () => { status = b.dataset.status; press(chips, b); show(); });
  for (const b of keys) b.addEventListener('click', () => {
    group = group === b.dataset.class ? '' : b.dataset.class;
    press(keys, group ? b : null);
    show();
  });
  const heads = $('th');
  heads.forEach((th, k) => th.querySelector('button').addEventListener('click', () => {
    const up = th.getAttribute('aria-sort') !== 'ascending';
    for (const t of heads) t.removeAttribute('aria-sort');
    th.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const key = r => { const c = r.cells[k]; return 'v' in c.dataset ? Number(c.dataset.v) : c.textContent; };
    const order = (a, b) => typeof a === 'number' ? a - b : a.localeCompare(b, undefined, { numeric: true });
    rows.sort((a, b) => (up ? 1 : -1) * order(key(a), key(b)) || a.dataset.n - b.dataset.n);
    body.append(...rows);
  }));
  body.addEventListener('click', e => {
    const d = e.target.closest('td.ids div');
    if (d) d.classList.toggle('open');
  });
  body.addEventListener('mouseover', e => mark(e.target.closest('tr')));
  body.addEventListener('mouseleave', () => mark(null));
  document.addEventListener('keydown', e => {
    if (e.key === '/' && document.activeElement !== find) { e.preventDefault(); find.focus(); }
    if (e.key === 'Escape') all();
  });
}

function all() {
  find.value = status = group = '';
  press($('.chip'), $('.chip')[0]);
  press($('button.key'), null);
  show();
}

function mark(row) {
  if (!svg || svg.classList.contains('some')) return;
  for (const x of $('rect.on', svg)) x.classList.remove('on');
  if (row) for (const x of $('rect', svg)) if (x.dataset.c.split(' ').includes(row.dataset.n)) x.classList.add('on');
}

if (svg) svg.addEventListener('click', e => {
  const n = (e.target.dataset.c || '').split(' ')[0], row = byNumber.get(n);
  if (!row) return;
  for (const r of $('tr.on')) r.classList.remove('on');
  if (row.hidden) all();
  row.classList.add('on');
  row.scrollIntoView({ block: 'center' });
});
"""

__all__ = ["SCRIPT", "STYLE"]
