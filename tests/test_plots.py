"""docs/performance.md and its plots: up to date with the results; what becomes of which rows. No pixel is compared."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from benchmarks import plots, record, report
from benchmarks.plots import Chart
from benchmarks.record import Result, Row, Target

pytestmark = pytest.mark.once


def result(rows: list[Row], targets: tuple[Target, ...] = (), **changed: Any) -> dict[str, Any]:
    """A made-up result with these rows."""
    facts = changed.pop("facts", {})
    data = {
        "case": "scaling",
        "title": "Made up",
        "date": "2026-01-02T03:04:05",
        "settings": {"quick": False},
        "machine": {"cpu": "Some CPU", "cores": 2},
    }
    return {**data, **record.to_json(Result(tuple(rows), targets, facts)), **changed}


def row(
    group: str, contestant: str, value: float, inputs: str = "numpy arrays", unit: str = "ms"
) -> Row:
    return Row(group, contestant, inputs, unit, value, value * 0.9, value * 1.1, 5)


def only(data: dict[str, Any]) -> Chart:
    (chart,) = plots.case_charts(data)
    return chart


def test_the_page_and_its_plots_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    status = report.main(["--check"])
    assert status == 0, capsys.readouterr().out


def test_every_plot_is_on_the_page() -> None:
    made = [c for some in plots.charts(report.load(report.RESULTS)).values() for c in some]
    assert len({c.file for c in made}) == len(made) >= 5
    page = report.DOCUMENT.read_text()
    for c in made:
        assert f"](plots/{c.file})" in page
    assert page.count("](plots/") == len(made)


def test_groups_that_differ_in_one_number_become_lines() -> None:
    rows = [
        row(f"{n:,} bucketize columns, batch 256", name, n / 100 * k)
        for n in (3000, 10, 300)
        for k, name in ((1, "recom_jax bind"), (9, "jax.jit"))
        if n < 1000 or k == 1
    ]
    chart = only(result(rows))
    assert (chart.x, chart.unit, chart.panels) == ("bucketize columns", "ms", ())
    assert {x.label: x.points for x in chart.lines} == {
        "recom_jax bind, numpy arrays": ((10, 0.1), (300, 3), (3000, 30)),
        "jax.jit, numpy arrays": ((10, 0.9), (300, 27)),
    }
    assert [x.ours for x in chart.lines] == [True, False]


def test_batch_sizes_become_lines() -> None:
    rows = [row(f"Model E, batch {b}", "jax.jit", b) for b in (32, 256, 2048)]
    assert only(result(rows)).x == "batch size"
    assert len(only(result(rows[:2])).panels) == 2  # two sizes are no line


def test_two_kinds_of_groups_become_two_plots() -> None:
    rows = [row(f"{n:,} columns, batch 256", "ours", n) for n in (100, 1000, 10_000)]
    rows += [row(f"Model E, batch {b}", "ours", b) for b in (1, 256, 8192)]
    columns, batches = plots.case_charts(result(rows))
    assert (columns.x, batches.x) == ("columns", "batch size")
    assert columns.file != batches.file
    assert [x for x, _ in batches.lines[0].points] == [1, 256, 8192]
    assert only(result(rows[:-1])).panels  # two sizes are no line, so all are bars


def test_throughput_is_over_threads() -> None:
    rows = [row("E, batch 256", "jax.jit", 2.0)]
    rows += [
        row("E, batch 256: throughput", "recom_jax bind", 100.0 * n, f"{n} threads", "calls/s")
        for n in (1, 2, 4, 8)
    ]
    latency, calls = plots.case_charts(result(rows, case="gpu_model_e"))
    assert (latency.file, calls.file) == (
        "gpu_model_e.some-cpu.svg",
        "gpu_model_e.some-cpu.calls-s.svg",
    )
    assert latency.panels
    assert calls.lines[0].points == ((1, 100), (2, 200), (4, 400), (8, 800))


def test_promises_and_floors_stand_at_their_bars() -> None:
    group = "RecFlex A, batch 512: kernel"
    rows = [row(group, "fused kernel", 207.0, unit="us"), row(group, "torch", 900.0, unit="us")]
    data = result(
        rows, (Target(group, 207.0, "<=", 200, "us"),), facts={"recflex_A_floor_us": 31.5}
    )
    (panel,) = only(data).panels
    assert [b.limit for b in panel.bars] == [200, None]
    assert [b.ours for b in panel.bars] == [True, False]
    assert panel.floor == 31.5
    (panel,) = only({**data, "facts": {"floors_us": {group: 40.0}}}).panels
    assert panel.floor == 40.0


def test_what_has_no_plot() -> None:
    rows = [row("any", "jax.jit", 1.0)]
    assert not list(plots.case_charts(result(rows, case="idioms")))
    assert not list(plots.case_charts(result(rows, settings={"quick": True})))
    assert not list(plots.case_charts(result([])))


def test_equal_names_are_told_apart() -> None:
    rows = [row("any", "jax.jit", 1.0)]
    groups = [[result(rows)], [result(rows, date="2026-01-03T00:00:00")]]
    names = [c.name for some in plots.charts(groups).values() for c in some]
    assert names == ["scaling.some-cpu", "scaling.some-cpu-2"]


@pytest.mark.parametrize("lines", [False, True])
def test_files_follow_the_data(lines: bool, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.draw import draw

    sizes = (32, 256, 2048) if lines else (32, 256)
    chart = only(result([row(f"E & F, batch {b}", "jax.jit", b * 100.0) for b in sizes]))
    assert plots.stale([chart], tmp_path) == [chart.file]
    (tmp_path / "left.svg").write_text("<svg/>")
    plots.write([chart], tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [chart.file]
    assert plots.described(tmp_path / chart.file) == chart.json()
    assert not plots.stale([chart], tmp_path)
    assert plots.stale([dataclasses.replace(chart, title="Another")], tmp_path) == [chart.file]
    draw(chart, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / chart.file).read_bytes()
    assert (tmp_path / chart.file).stat().st_size < 100_000


def test_floors_of_a_small_model() -> None:
    """Counted by hand: each row in use, the ids and the results, once."""
    from benchmarks.cases.gpu import recom_bytes
    from examples.recom_models import Column, RecomModel

    bucket = Column("b", "bucket", 101, 8, np.linspace(0, 500, 100).astype(np.float32))
    pooled = Column("s", "sparse", 10, 8)
    batch = {
        "b": np.array([1.0, 1.5, 400.0], np.float32),  # two rows
        "s": np.array([[3, 13, -1], [23, 4, -1], [-1, -1, -1]], np.int32),  # rows 3 and 4
    }
    model = RecomModel("small", (bucket, pooled), top=())
    want = (2 * 32 + 12 + 3 * 32) + (2 * 32 + 36 + 3 * 32)
    assert recom_bytes(model, batch) == want
