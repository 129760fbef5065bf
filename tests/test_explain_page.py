"""The report as a page: whole, self-contained, true; and what its script does when it is clicked and searched."""

from __future__ import annotations

import base64
import collections
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax.explain_stages import Place
from tests.helpers import ids, table

pytestmark = pytest.mark.once

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")  # fmt: skip
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1400,1000",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
I1, I2 = ids((6,), 40), ids((6, 5), 40)
WIDE = 300  # columns of the page that the browser opens


def model(tables: Any, batch: Any) -> Any:
    """Columns of two classes, one that stays in XLA, and values without a lookup."""
    out = [jnp.take(t, batch["ids"] % 40, axis=0, mode="clip") for t in tables[2:]]
    mask = batch["bag"] >= 0
    rows = jnp.where(mask[..., None], tables[0][jnp.where(mask, batch["bag"], 0)], 0)
    out += [rows.sum(1), batch["dense"]]
    loop = jax.lax.scan(lambda c, k: (c + tables[1][k], None), jnp.zeros(4), batch["ids"])[0]
    return jnp.concatenate(out, axis=1), loop


def explain(n: int) -> recom_jax.Report:
    tables = [np.zeros((40 + k, 4), np.float32) for k in range(n)]
    batch = {"ids": I1, "bag": I2, "dense": np.zeros((6, 3), np.float32)}
    report = recom_jax.optimize(model).explain(tables, batch)
    assert isinstance(report, recom_jax.Report)
    return report


@pytest.fixture(scope="module")
def report() -> recom_jax.Report:
    return explain(8)


@pytest.fixture(scope="module")
def big() -> recom_jax.Report:
    return explain(WIDE)


class Page(html.parser.HTMLParser):
    """Collects elements, and checks that every tag is closed."""

    VOID = ("meta", "input", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: dict[str, list[dict[str, str]]] = collections.defaultdict(list)
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag].append({k: v or "" for k, v in attrs})
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# ---- what is on it -------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_needs_nothing_else(
    report: recom_jax.Report, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "page.html"
    text = report.to_html(path)
    assert path.read_text(encoding="utf-8") == text == report.to_html()
    page = Page(text)
    assert not re.search(r"https?://|@import|url\(", text)
    assert not any("src" in a or "href" in a for tag in page.found.values() for a in tag)
    assert text.startswith("<!doctype html>")
    with pytest.raises(OSError, match="nowhere"):
        report.to_html(tmp_path / "nowhere" / "page.html")


def test_every_column_has_a_row(report: recom_jax.Report) -> None:
    text = report.to_html()
    rows = re.findall(r'<tr class="(\w+)" data-n="(\d+)" data-classes="([^"]*)">(.*?)</tr>', text)
    assert [(status, int(n)) for status, n, _, _ in rows] == [
        (c.status, k) for k, c in enumerate(report.columns)
    ]
    for (_, _, classes, cells), c in zip(rows, report.columns, strict=True):
        assert classes.split() == list(c.classes)
        shown = re.sub(r"<[^>]*>", "\n", cells)
        for what in (c.name, c.reason, c.combiner, c.facts, f"{c.rows:,}", *c.rewrites):
            assert what.replace("'", "&#x27;").replace(">", "&gt;") in shown
        assert c.source.rsplit("/", 1)[-1] in shown


def test_the_source_on_the_page(report: recom_jax.Report) -> None:
    text = report.to_html()
    assert "class 0:" in text and "pool 0 SUM" in text  # the program
    assert ("__global__ void" in text) == bool(report.cuda_source())
    assert "cond" not in report.columns[-1].reason and "scan" in report.columns[-1].reason


def test_text_of_the_user_is_escaped() -> None:
    def f(t: Any, i: Any) -> Any:
        return t["<b>&'\"</script>"][i]

    f.__name__ = "<script>alert(1)</script>"
    text = recom_jax.optimize(f).explain({"<b>&'\"</script>": table(40, 4)}, I1).to_html()
    page = Page(text)
    assert len(page.found["script"]) == 1 and text.count("<script>") == 1
    assert len(page.found["b"]) == 6  # the stages' names


def test_a_model_without_columns() -> None:
    page = recom_jax.optimize(lambda x: x + 1).explain(I1).to_html()
    assert "nothing to fuse" in page
    Page(page)


# ---- facts, classes, stages ----------------------------------------------------------------------------------------


def test_facts_and_classes(report: recom_jax.Report) -> None:
    single = [c for c in report.columns if c.combiner == "none"]
    assert {c.facts for c in single} == {"row 0..39, always in the table"}
    assert len({c.classes for c in single}) == 1
    (bag,) = [c for c in report.columns if c.combiner == "sum"]
    assert bag.classes != single[0].classes
    assert bag.bytes == 40 * 4 * 4
    (loop,) = [c for c in report.columns if c.status == "xla"]
    assert (loop.facts, loop.classes) == ("", ())
    for c in report.columns:
        for name in c.classes:
            call, cls = map(int, name.split("."))
            assert cls < len(report.classes[call])


@pytest.mark.parametrize(
    ("fact", "fn"),
    [
        ("any int32, else filled with nan", lambda t, i: jnp.take(t, i, axis=0)),
        ("any int32, else the nearest row", lambda t, i: t.at[i].get(mode="clip")),
        ("row 0..39, always in the table", lambda t, i: t[i % 40]),
        ("row 3, always in the table", lambda t, i: t[i * 0 + 3]),
        ("row 0..99, else filled with nan", lambda t, i: jnp.take(t, jnp.clip(i, 0, 99), axis=0)),
        ("row >= 0, else filled with nan", lambda t, i: jnp.take(t, jnp.maximum(i, 0), axis=0)),
        ("row <= 7, else the nearest row", lambda t, i: t.at[jnp.minimum(i, 7)].get(
            mode="clip", wrap_negative_indices=False)),
        ("row 0..100, else filled with nan", lambda t, i: jnp.take(
            t, jnp.digitize(i.astype(jnp.float32), np.arange(0, 100, 1.0)), axis=0)),
    ],
)  # fmt: skip
def test_facts(fact: str, fn: Any) -> None:
    (column,) = recom_jax.optimize(fn).explain(table(40, 4), I1).columns
    assert column.facts == fact


def test_stages(report: recom_jax.Report) -> None:
    assert [s.name for s in report.stages] == [
        "trace", "detect", "simplify", "schedule", "encode", "splice",
    ]  # fmt: skip
    numbers = {(s.name, label): n for s in report.stages for label, n in s.counts}
    assert numbers["detect", "table reads"] == "8"
    assert numbers["splice", "custom calls"] == "1"
    assert numbers["schedule", "classes"] == str(sum(map(len, report.classes)))
    texts = {s.name: s.text for s in report.stages}
    assert "scan" in texts["trace"] and "recom_fused" in texts["splice"]
    assert "tables[2]" in texts["detect"] and "batch['ids']" in texts["simplify"]


def test_the_page_stays_small(big: recom_jax.Report) -> None:
    """Printed forms are cut: the page is about a table of its columns."""
    assert len(big.to_html()) < 1000 * WIDE + 250_000


# ---- where columns land --------------------------------------------------------------------------------------------


def places(fn: Any, *args: Any) -> list[Any]:
    return list(recom_jax.optimize(fn).explain(*args).results)


def test_places_in_a_concatenation(report: recom_jax.Report) -> None:
    (result,) = report.results
    assert (result.shape, result.width, result.interleaved) == ((6, 31), 31, False)
    assert [(p.start, p.width) for p in result.places] == [(4 * k, 4) for k in range(7)] + [(28, 3)]
    tables = [[report.columns[c].table for c in p.columns] for p in result.places]
    assert tables == [[f"tables[{k}]"] for k in (2, 3, 4, 5, 6, 7, 0)] + [[]]


def test_places_of_other_shapes() -> None:
    t, u = table(40, 4), table(41, 4)

    def both(axis: int) -> Any:
        return places(lambda i: jnp.stack([t[i], u[i]], axis=axis), I1)

    (one,) = both(1)
    assert (one.width, one.places) == (8, (Place(0, 4, (0,)), Place(4, 4, (1,))))
    (whole,) = both(0)
    assert (whole.width, whole.places) == (48, (Place(0, 24, (0,)), Place(24, 24, (1,))))
    (mixed,) = both(2)
    assert mixed.interleaved
    assert mixed.places == (Place(0, 4, (0,)), Place(4, 4, (1,)))
    apart = places(lambda i: (t[i], u[i].sum(0)), I1)
    assert [p.columns for r in apart for p in r.places] in ([(0,), (1,)], [(1,), (0,)])
    (shared,) = places(lambda i: t[i] + u[i], I1)
    assert shared.places == (Place(0, 4, (0, 1)),)


def test_the_picture_shows_every_place_once(report: recom_jax.Report) -> None:
    page = Page(report.to_html())
    drawn = [r["data-c"] for r in page.found["rect"]]
    assert drawn == [" ".join(map(str, p.columns)) for r in report.results for p in r.places]
    scale = [float(r["width"]) for r in page.found["rect"]]
    assert scale[-1] == pytest.approx(scale[0] * 3 / 4, abs=1)


def test_many_results_share_lines() -> None:
    tables = [table(40, 4, seed=k) for k in range(60)]
    r = recom_jax.optimize(lambda ts, i: [t[i] for t in ts]).explain(tables, I1)
    page = Page(r.to_html())
    assert len(page.found["rect"]) == 60
    lines = {float(x["y"]) for x in page.found["rect"]}
    assert 10 < len(lines) <= 60


# ---- in a browser --------------------------------------------------------------------------------------------------


class Browser:
    """As much of WebDriver as the tests need."""

    def __init__(self, url: str, profile: pathlib.Path) -> None:
        self.url = url
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": BROWSER}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self.call("", {"capabilities": {"alwaysMatch": always}})
        self.url = f"{url}/{made['sessionId']}"

    def call(self, path: str, data: Any = None, method: str = "POST") -> Any:
        body = json.dumps(data or {}).encode() if method == "POST" else None
        request = urllib.request.Request(
            self.url + path, body, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script: str, *args: Any) -> Any:
        return self.call("/execute/sync", {"script": script, "args": list(args)})

    def element(self, css: str) -> str:
        (value,) = self.call("/element", {"using": "css selector", "value": css}).values()
        return f"/element/{value}"

    def click(self, css: str) -> None:
        self.call(self.element(css) + "/click")

    def type(self, css: str, text: str) -> None:
        self.call(self.element(css) + "/value", {"text": text})

    def shown(self) -> list[str]:
        """Names in the first cells of the rows that are to be seen."""
        names = self.run(
            "return [...document.querySelectorAll('tbody tr')].filter(r => r.offsetHeight)"
            ".map(r => r.cells[0].textContent)"
        )
        assert isinstance(names, list)
        return names


@pytest.fixture(scope="module")
def driver() -> Iterator[str]:
    if not BROWSER or not DRIVER:
        pytest.skip("no chromium and chromedriver here")
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        found = (re.search(r"successfully on port (\d+)", line) for line in p.stdout)
        yield f"http://127.0.0.1:{next(m[1] for m in found if m)}/session"
        p.terminate()


@pytest.fixture(scope="module")
def browser(
    driver: str, big: recom_jax.Report, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("page")
    big.to_html(folder / "page.html")
    b = Browser(driver, folder / "profile")
    b.call("/url", {"url": (folder / "page.html").as_uri()})
    yield b
    errors = b.call("/se/log", {"type": "browser"})
    b.call("", method="DELETE")
    assert not [e for e in errors if e["level"] == "SEVERE"], errors


@pytest.fixture
def page(browser: Browser) -> Browser:
    browser.run("all(); window.scrollTo(0, 0)")
    return browser


def test_searching(page: Browser) -> None:
    assert len(page.shown()) == WIDE
    page.type("#find", "tables[27] clip")
    assert page.shown() == []
    page.run("all()")
    page.type("#find", "TABLES[27] always")
    assert page.shown() == ["tables[27]"]
    assert page.run("return document.querySelector('#count').textContent") == f"1 of {WIDE} columns"
    assert page.run("return document.querySelectorAll('rect.on').length") == 1
    page.type("#find", "\ue00c")  # escape
    assert len(page.shown()) == WIDE


def test_no_column_fits(page: Browser) -> None:
    page.type("#find", "nothing like it")
    assert page.shown() == []
    assert page.run("return document.querySelector('#none').offsetHeight > 0")


def heading(name: str) -> str:
    from recom_jax.explain_html import HEADINGS

    return f"th:nth-child({HEADINGS.index(name) + 1}) button"


def test_sorting_numbers_and_text(page: Browser, big: recom_jax.Report) -> None:
    names = [c.name for c in big.columns]
    page.click(heading("rows"))
    order = sorted(range(WIDE), key=lambda k: (big.columns[k].rows, k))
    assert page.shown() == [names[k] for k in order]
    page.click(heading("rows"))
    order = sorted(range(WIDE), key=lambda k: (-big.columns[k].rows, k))
    assert page.shown() == [names[k] for k in order]
    assert page.run("return document.querySelector('th[aria-sort]').ariaSort") == "descending"
    page.click(heading("column"))  # numbers inside of names count as such
    assert page.shown() == [f"tables[{k}]" for k in range(WIDE)]
    page.click(heading("table bytes"))
    assert page.shown() == [f"tables[{k}]" for k in range(WIDE)]


def test_filters(page: Browser, big: recom_jax.Report) -> None:
    page.click(".chip[data-status=xla]")
    assert page.shown() == ["tables[1]"]
    page.click(".chip[data-status='']")
    (bag,) = [c for c in big.columns if c.combiner == "sum"]
    page.click(f"button.key[data-class='{bag.classes[0]}']")
    assert page.shown() == ["tables[0]"]
    page.click(f"button.key[data-class='{bag.classes[0]}']")
    assert len(page.shown()) == WIDE


def test_the_picture_leads_to_the_column(page: Browser, big: recom_jax.Report) -> None:
    number = next(k for k, c in enumerate(big.columns) if c.name == "tables[250]")
    page.type("#find", "tables[3]")  # it is filtered out
    page.run("document.querySelector(`rect[data-c='${arguments[0]}']`).dispatchEvent("
             "new MouseEvent('click', { bubbles: true }))", number)  # fmt: skip
    marked = "return [...document.querySelectorAll('tr.on')].map(r => r.cells[0].textContent)"
    assert page.run(marked) == ["tables[250]"]
    deadline = time.monotonic() + 10
    inside = (
        "const b = document.querySelector('tr.on').getBoundingClientRect();"
        "return b.top > 0 && b.bottom < innerHeight"
    )
    while not page.run(inside):
        assert time.monotonic() < deadline


def test_nothing_sticks_out(page: Browser, tmp_path: pathlib.Path) -> None:
    """The page does not scroll sideways, wide or narrow; and it can be looked at."""
    for width in (1400, 700):
        page.call("/window/rect", {"width": width, "height": 1000})
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), width
    page.call("/window/rect", {"width": 1400, "height": 1000})
    png = base64.b64decode(page.call("/screenshot", method="GET"))
    (tmp_path / "page.png").write_bytes(png)
    assert png[:4] == b"\x89PNG" and len(png) > 20_000
