"""The benchmarks' machinery: what is written, rendered and compared. Never how long something took."""

import contextlib
import dataclasses
import gc
import json
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks import compare, driver, machine, pieces, record, rejoin, report, steady
from benchmarks.cases import ALL, columns_e, gpu_profile, gpu_serve
from benchmarks.context import Context, Settings
from benchmarks.record import Result, Row, Target
from benchmarks.timing import (
    Block,
    Contestant,
    Plan,
    Samples,
    interleave,
    paired_difference,
    paired_ratio,
    still,
)
from benchmarks.turns import Turns

pytestmark = pytest.mark.once

QUICK = dataclasses.replace(Settings.tiny(), plan=Plan(rounds=2, burst=1, least_rounds=1))


def result_file(path: pathlib.Path, factor: float = 1.0, **changed: Any) -> pathlib.Path:
    """A made-up result whose first row is `factor` times as slow."""
    rows = (
        Row("table", "ours", "numpy arrays", "ms", 2.0 * factor, 1.9 * factor, 2.1 * factor, 50),
        Row("table", "jax.jit", "numpy arrays", "ms", 10.0, 9.5, 10.5, 50, first_s=60.0),
        Row.single("table: first", "ours", "device arrays", "s", [4.0, 4.2, 4.1]),
    )
    value = 2.0 * factor / 10
    targets = (Target("ours / jax.jit", value, "<=", 1 / 4), Target("gathers | left", 3, "==", 0))
    data = {
        "schema": record.SCHEMA, "case": "columns_e", "title": "Made up", "date": "2026-01-02T03:04:05",
        "minutes": 1.5, "settings": dataclasses.asdict(QUICK), "machine": machine.machine(),
        "versions": machine.versions(), "git": {"commit": "0123456789abcdef", "modified": True},
        "load_before": [0.1, 0.2, 0.3], "load_after": [], **record.to_json(Result(rows, targets)),
    }  # fmt: skip
    record.write(path, data | changed)
    return path


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The result file of the main case, run with a tiny model."""
    return driver.run_case("columns_e", QUICK, tmp_path_factory.mktemp("results"))


def test_quick_run_writes_valid_json(quick: pathlib.Path) -> None:
    data = json.loads(quick.read_text())
    assert (data["schema"], data["case"]) == (record.SCHEMA, "columns_e")
    assert data["machine"]["cores"] >= 1
    assert set(data["versions"]) >= {"python", "jax", "jaxlib", "numpy", "recom_jax"}
    rows = record.rows_of(data)
    assert len({r.key for r in rows}) == len(rows)
    for r in rows:
        assert 0 < r.p10 <= r.median <= r.p90
        assert r.count == QUICK.plan.rounds * QUICK.plan.burst
    names = {r.contestant for r in rows}
    assert names == {
        steady.OURS,
        steady.BIND,
        steady.EMPTY,
        steady.HAND,
        steady.HAND_LOOP,
        steady.TUNED,
        steady.PLAIN,
    }


def test_quick_run_meets_the_targets_that_no_clock_decides(quick: pathlib.Path) -> None:
    targets = {t.name: t for t in record.targets_of(record.read(quick))}
    exact = [t for name, t in targets.items() if " / " not in name and t.unit != "ms"]
    assert len(exact) >= 6
    assert [t for t in exact if not t.passed] == []


def test_report_renders_the_quick_run(quick: pathlib.Path, tmp_path: pathlib.Path) -> None:
    page = tmp_path / "performance.md"
    assert report.main(["--results", str(quick.parent), "--out", str(page)]) == 0
    text = page.read_text()
    assert "numbers mean nothing" in text
    assert "| recom_jax bind | input_views |" in text
    assert report.main(["--results", str(quick.parent), "--out", str(page), "--check"]) == 0
    page.write_text(text + "edited")
    assert report.main(["--results", str(quick.parent), "--out", str(page), "--check"]) == 1


def test_results_are_skipped_only_with_the_same_settings(quick: pathlib.Path) -> None:
    assert quick == driver.path_of(quick.parent, "columns_e")
    assert driver.is_done(quick, QUICK)
    assert not driver.is_done(quick, dataclasses.replace(QUICK, batch=QUICK.batch + 1))
    assert not driver.is_done(quick.with_name("none.json"), QUICK)


def test_report_calls_a_miss_a_miss(tmp_path: pathlib.Path) -> None:
    result_file(tmp_path / "a.json")
    text = report.render(report.load(tmp_path))
    assert "1 of 2 targets met, 1 missed" in text
    assert "| ours / jax.jit | at most 1/4 | 0.2 | pass |" in text
    assert "| gathers \\| left | 0 | 3 | **MISS** |" in text
    for line in text.splitlines():
        if line.startswith("| ours | numpy"):
            assert " 5 |" in line  # 10 ms / 2 ms


def test_report_takes_the_newest_result_of_a_case(tmp_path: pathlib.Path) -> None:
    result_file(tmp_path / "b.json", date="2026-03-01T00:00:00", title="Newer")
    result_file(tmp_path / "c.json", date="2026-02-01T00:00:00", title="Older")
    text = report.render(report.load(tmp_path))
    assert "Newer" in text
    assert "Older" not in text


def test_report_of_nothing(tmp_path: pathlib.Path) -> None:
    assert "Nothing was measured yet" in report.render(report.load(tmp_path))


def test_compare_finds_a_slowdown(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = result_file(tmp_path / "old.json"), result_file(tmp_path / "new.json", 1.5)
    assert compare.main([str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert "WORSE   table: ours, numpy arrays: 2 -> 3 ms (1.50 x)" in out
    assert "MISSED  ours / jax.jit" in out
    assert "jax.jit, numpy" not in out
    assert compare.main([str(new), str(old)]) == 0
    assert "better  table: ours" in capsys.readouterr().out


def test_compare_is_silent_within_noise(tmp_path: pathlib.Path) -> None:
    old, new = result_file(tmp_path / "old.json"), result_file(tmp_path / "new.json", 1.04)
    assert compare.changes(record.read(old), record.read(new)) == []
    assert compare.main([str(old), str(new)]) == 0


def test_compare_names_rows_that_are_gone(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = result_file(tmp_path / "old.json"), tmp_path / "new.json"
    data = record.read(old)
    record.write(new, data | {"rows": data["rows"][1:]})
    assert compare.main([str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "GONE    table: ours, numpy arrays: is not in the new file" in out
    assert "2 rows compared, 0 worse" in out


def test_compare_of_folders_takes_the_newest_of_each_case(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file(tmp_path / "old" / "a.json")
    result_file(tmp_path / "new" / "a.json", date="2026-02-01T00:00:00")
    result_file(tmp_path / "new" / "b.json", 2.0, date="2026-03-01T00:00:00")
    result_file(tmp_path / "new" / "c.json", 2.0, case="another")
    assert compare.main([str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert (
        "3 rows compared, 2 worse" in capsys.readouterr().out
    )  # the row, and the target it misses


def test_compare_says_where_machines_differ(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = result_file(tmp_path / "old.json")
    new = result_file(tmp_path / "new.json", machine=machine.machine() | {"cores": 999})
    assert compare.main([str(old), str(new)]) == 0
    assert "the files differ in machine: cores" in capsys.readouterr().out


def test_machines_of_one_kind_have_one_key() -> None:
    """What the system keeps back of the memory, and how it is called, differs from loan to loan."""
    here, versions = machine.machine() | {"memory_gib": 125.8, "os": "x"}, machine.versions()
    key = machine.key(here, versions)
    assert key == machine.key(here | {"memory_gib": 125.9, "os": "y"}, versions)
    assert key == machine.key(here, versions | {"compiler": "another build"})
    assert machine.whole_gib(here) == 126
    others: tuple[dict[str, Any], ...] = (
        {"memory_gib": 251.8}, {"memory_gib": None}, {"cpu": "z"}, {"cores": 99}, {"gpu": "z"},
    )  # fmt: skip
    assert len({key, *(machine.key(here | o, versions) for o in others)}) == len(others) + 1
    for name in ("python", "jax", "jaxlib", "numpy", "recom_jax", "isa"):
        assert key != machine.key(here, versions | {name: "0"})


def test_report_has_one_section_for_machines_of_one_kind(tmp_path: pathlib.Path) -> None:
    for k, gib in enumerate((125.8, 125.9, 251.8)):
        where = machine.machine() | {"memory_gib": gib, "os": f"system {k}"}
        result_file(tmp_path / f"{k}.json", case=("micro", "scaling", "micro")[k], machine=where)
    text = report.render(report.load(tmp_path))
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert ["126 GiB" in t for t in titles] == [True, False] and "252 GiB" in titles[1]
    assert "125.9 or 125.8 GiB" in text or "125.8 or 125.9 GiB" in text
    assert "system 0 or system 1." in text


def test_compare_refuses_what_is_no_result(tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert compare.main([str(other), str(other)]) == 2


def test_interleaved_turns_and_statistics() -> None:
    seen: list[tuple[str, int]] = []

    def contestant(name: str) -> Contestant:
        return Contestant(name, "x", lambda k: k, lambda k: seen.append((name, k)))

    found = interleave([contestant("a"), contestant("b")], Plan(rounds=3, burst=2))
    assert {k: [len(r) for r in v.rounds] for k, v in found.items()} == {
        "a / x": [2, 2, 2],
        "b / x": [2, 2, 2],
    }
    assert [k for name, k in seen if name == "a"] == list(range(9))  # one call a turn isn't timed
    assert [k for name, k in seen if name == "b"] == list(range(9))
    a, b = Samples(((3.0,), (30.0,), (6.0,))), Samples(((1.0,), (10.0,), (3.0,)))
    assert paired_difference(a, b) == 3.0
    assert paired_ratio(a, b) == 3.0
    assert (a.median, a.percentile(0), a.percentile(100)) == (6.0, 3.0, 30.0)


def test_every_call_of_a_block_counts() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    quick = Contestant("quick", "x", lambda k: k, lambda k: seen.append("call"), turn=turn)
    slow = Contestant("slow", "x", lambda k: k, lambda k: time.sleep(2e-3))
    found = interleave([quick, slow], Plan(rounds=2), block=Block(7, ms=3.0))
    assert seen == ["begin", *["call"] * 7, "end"] * 2
    assert [len(r) for r in found["quick / x"].rounds] == [7, 7]
    assert all(len(r) <= 2 for r in found["slow / x"].rounds)  # of 2 ms at least each


def test_the_collector_stands_still_once() -> None:
    """Inside another one, nothing is collected or frozen again; in the end it does what it did."""
    walked: list[str] = []
    few = 10_000  # of its own, Python freezes some hundred

    def seen(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and gc.get_freeze_count() < few:
            walked.append("everything")

    gc.callbacks.append(seen)
    try:
        with still():
            assert not gc.isenabled() and gc.get_freeze_count() > few and len(walked) == 1
            interleave([Contestant("a", "x", lambda k: k, lambda k: k)], Plan(rounds=3))
            assert not gc.isenabled() and gc.get_freeze_count() > few and len(walked) == 1
    finally:
        gc.callbacks.remove(seen)
    assert gc.isenabled() and gc.get_freeze_count() < few
    with pytest.raises(ZeroDivisionError), still():
        raise ZeroDivisionError
    assert gc.isenabled() and gc.get_freeze_count() < few


def test_leases_filled_elsewhere_are_those_asked_for() -> None:
    taken: list[int] = []

    def lease(k: int) -> int:
        if k == 8:
            raise ValueError("no such batch")
        taken.append(k)
        return k

    beside = gpu_serve.Beside(lease)
    assert beside.prepare(1) == 1  # outside a turn, too
    with beside.turn():
        assert [beside.prepare(k) for k in (3, 4, 5)] == [3, 4, 5]
    assert taken == [1, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="no such batch"), beside.turn():
        beside.prepare(8)
    ahead = gpu_serve.Ahead(lease)
    for begin in (10, 20):  # what is left over is not served in the next turn
        with ahead.turn():
            n = gpu_serve.AHEAD + 1
            assert [ahead.prepare(begin + k) for k in range(n)] == list(range(begin, begin + n))


def test_a_wrong_contestant_is_refused() -> None:
    good = np.ones((2, 3), np.float32)
    assert steady.compare({"a": good + 1e-5}, good)["a"] == pytest.approx(1e-5, rel=0.1)
    with pytest.raises(RuntimeError, match="b computes something else"):
        steady.compare({"b": good + 1}, good)


def test_counts_of_a_lowered_module() -> None:
    text = '%1 = stablehlo.custom_call @recom_fused_v1(%a)\n%2 = "stablehlo.gather"(%b)\nstablehlo.while'
    counts = columns_e.lowered_counts(text)
    assert (counts["custom_call"], counts["gather"], counts["while"], counts["sort"]) == (
        1,
        1,
        1,
        0,
    )


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert driver.main(["nonsense"]) == 2
    assert driver.main(["--list", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().err
    assert all(case.name in text for case in ALL)
    args = driver.parser().parse_args(["micro", "--quick", "--batches", "3", "4", "--rounds", "2"])
    assert driver.settings_of(args).batches == (3, 4)
    again = driver.parser().parse_args(driver.command_of(args, "micro", tmp_path)[3:])
    assert driver.settings_of(again) == driver.settings_of(args)


def test_a_case_in_pieces_goes_on(tmp_path: pathlib.Path) -> None:
    settings = dataclasses.replace(QUICK, batches=(8, 16))
    only = pieces.Beside(only=("batch 8",))
    path = driver.run_case("gpu_model_f", settings, tmp_path, beside=only)
    assert record.read(path)["facts"]["missing"] == "batch 16"
    assert not driver.is_done(path, settings)
    assert not [t for t in record.targets_of(record.read(path)) if "geometric" in t.name]

    kept = {n: pieces.path_of(tmp_path / "kept", "gpu_model_f", f"batch {n}") for n in (8, 16)}
    data = record.read(kept[8])
    data["facts"]["ratios"] = {"16": data["facts"]["ratios"]["8"]}
    record.write(kept[16], data)
    before = kept[8].read_bytes()
    driver.run_case("gpu_model_f", settings, tmp_path)
    assert kept[8].read_bytes() == before  # not measured again
    assert driver.is_done(path, settings)
    assert [t for t in record.targets_of(record.read(path)) if "geometric" in t.name]
    assert len(record.rows_of(record.read(path))) == 2 * len(data["rows"])

    with pytest.raises(RuntimeError, match="no piece 'batch 9', but batch 8, batch 16"):
        driver.run_case("gpu_model_f", settings, tmp_path, beside=pieces.Beside(only=("batch 9",)))
    assert pieces.read(kept[8], dataclasses.replace(settings, batch=99)) is None


def test_kept_pieces_are_joined_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pieces of machines of one kind make one result, others one of their own; values are what they were."""
    assert rejoin.main(["gpu_model_f", "--out", str(tmp_path)]) == 2
    settings = dataclasses.replace(QUICK, batches=(8, 16))
    here = machine.machine() | {"memory_gib": 125.8}
    for k, (piece, gib) in enumerate((("batch 8", 125.8), ("batch 16", 125.9), ("batch 8", 9.0))):
        row = Row(piece, "ours", "numpy arrays", "ms", 1.0 + k, 0.5, 4.0, 50)
        where = here | {"memory_gib": gib}
        key = machine.key(where, machine.versions())
        path = tmp_path / "kept" / f"gpu_model_f.{'-'.join(piece.split())}.{key}.json"
        facts = {"ratios": {piece.split()[1]: 20.0 + k}}
        made = record.to_json(Result((row,), (), facts))
        result_file(path, machine=where, piece=piece, settings=dataclasses.asdict(settings),
                    case="gpu_model_f", date=f"2026-01-0{k + 1}", **made)  # fmt: skip
    capsys.readouterr()
    assert rejoin.main(["gpu_model_f", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("missing batch 16") == 1
    whole = record.read(tmp_path / f"gpu_model_f.{machine.key(here, machine.versions())}.json")
    assert [(r["group"], r["median"]) for r in whole["rows"]] == [
        ("batch 8", 1.0),
        ("batch 16", 2.0),
    ]
    assert (whole["date"], whole["minutes"]) == ("2026-01-02", 3.0)
    assert "missing" not in whole["facts"] and len(whole["targets"]) == 1


def test_pieces_run_in_the_order_that_is_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(pieces, "_spawn", lambda case, todo, *rest: ran.extend(todo) or {})
    every = dict.fromkeys("abcd", lambda context: Result((), (), {}))
    for only, want in ((("c", "a", "c"), "ca"), (None, "abcd")):
        ran.clear()
        with pytest.raises(RuntimeError, match="no piece was measured"):
            pieces.run(
                "x", every, None, Context(Settings.tiny(), tmp_path), pieces.Beside(only=only)
            )
        assert "".join(ran) == want


def test_pieces_that_do_not_end_are_ended(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match=r"no piece was measured.*not begun"):
        driver.run_case("gpu_model_e", QUICK, tmp_path, beside=pieces.Beside(seconds=0.0))


def test_timed_parts_take_turns(tmp_path: pathlib.Path) -> None:
    """A timed part waits for compilers and for other timed parts; its patience with compilers ends."""
    quick, slow = Turns(tmp_path, patience=0.0), Turns(tmp_path)
    seen: list[str] = []
    with quick.timed() as quiet:
        assert quiet
    with quick.compiling(), quick.compiling(), quick.timed() as quiet:  # side by side
        assert not quiet

    def timed() -> None:
        with slow.timed() as quiet:
            seen.append(f"timed, quiet {quiet}")

    with slow.compiling():
        thread = threading.Thread(target=timed)
        thread.start()
        thread.join(0.3)
        seen.append("compiled")
    thread.join(30)
    assert seen == ["compiled", "timed, quiet True"]
    with Turns().timed() as quiet, Turns().compiling():
        assert quiet


def test_first_calls_are_kept_with_compiled_code(tmp_path: pathlib.Path) -> None:
    context = Context(QUICK, tmp_path, compiled=tmp_path / "compiled")
    assert context.first_call("slow", 1.5) == 1.5
    assert context.first_call("slow", 40.0) == 40.0
    assert context.first_call("slow", 2.5) == 40.0  # XLA's code came from the folder
    assert Context(QUICK, tmp_path).first_call("slow", 2.5) == 2.5


def test_what_nsight_compute_prints() -> None:
    text = """==PROF== Connected to process 7
e: tables in 3.0 s
"ID","Section Name","Metric Name","Metric Unit","Metric Value"
"0","GPU Speed Of Light Throughput","Duration","us","1,053.50"
"0","GPU Speed Of Light Throughput","L2 Cache Throughput","%","61.5"
"0","Command line profiler metrics","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","inst","1.0"
"0","Command line profiler metrics","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","inst","3.0"
"0","Occupancy","Note","",""
"""
    rows, numbers = gpu_profile.rows_of("model", gpu_profile.metrics(text))
    assert numbers == "duration 1053.5 us"
    assert [(r.contestant, r.median) for r in rows] == [
        ("second-level cache, of its peak", 61.5),
        ("barrier", 75.0),
        ("wait", 25.0),
    ]
    with pytest.raises(RuntimeError, match=r"measured nothing.*ERR_NVGPUCTRPERM"):
        gpu_profile.metrics("==PROF== x\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")


def test_plans_beside_training_are_summed_up_in_a_table() -> None:
    def row(contestant: str, ms: float) -> dict[str, Any]:
        made = Row.single("RAP plan 2", contestant, "numpy arrays", "ms", [ms])
        return dataclasses.asdict(made)

    modes = [("no preprocessing", 2.0), ("sequential, unfused", 5.0), ("co-run", 2.5)]
    rows = [row(*mode) for mode in modes]
    made = report.corun_table([{"case": "gpu_corun_2_4096", "rows": rows}])
    assert made[2].startswith("| RAP plan 2 | 2 | 5 |") and made[2].endswith(
        "| 1.50 | 1.250 | 2.00 |"
    )
    assert not report.corun_table([{"case": "sparse", "rows": rows}])
    assert not report.corun_table([{"case": "gpu_corun_2_4096", "rows": rows[:2]}])
    page = f"before\n{report.TABLE}\nold\n{report.TABLE_END}\nafter\n"
    new = report.with_tables(page, [[{"case": "gpu_corun_2_4096", "rows": rows}]])
    assert new == page.replace("old\n", "\n".join(made))
    assert "Nothing was measured yet." in report.with_tables(page, [])
    assert report.with_tables("no marks", [[]]) == "no marks"
