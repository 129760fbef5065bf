"""The GPU's benchmark cases without a GPU: every step but the device's own runs, on tiny models."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cold, driver, machine, pieces, record, report, steady, torch_peers
from benchmarks.cases import CASES, gpu, gpu_end_to_end, gpu_recflex, gpu_scaling, idioms
from benchmarks.context import Context, Settings
from benchmarks.pieces import Beside
from benchmarks.record import Result, Row
from benchmarks.timing import Contestant, Plan, Samples
from examples.recflex import recflex
from examples.recom_models import int_hash, model_e, model_f
from recom_jax import _recom
from recom_jax.cuda import kernel, nvrtc, tune
from recom_jax.errors import CudaError

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICK = dataclasses.replace(Settings.tiny(), plan=Plan(rounds=2, burst=1, least_rounds=1))
TILE = 32


class Device:
    """Notes what is launched, and fills results with what the interpreter says."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int, int]] = []

    def time(
        self,
        image: str,
        pointers: int,
        launches: Any,
        device: int,
        calls: int,
        repeats: int,
        flush: int,
        mends: Sequence[bytes] = (),
    ) -> list[float]:
        assert not any(mends)  # nothing here has so many segment ids
        for tiles, words, buffers in launches:
            assert image and words and tiles and len(tiles) % TILE == 0
            assert all(b % 4 == 0 for b in buffers)
            self.launched.append((pointers, len(tiles) // TILE, len(buffers)))
        return [0.01 + 0.001 * k for k in range(repeats)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    try:
        nvrtc.version()
    except CudaError as why:
        pytest.skip(str(why))
    made = Device()
    info = {"devices": [{"name": "x", "sms": 132, "capability": (9, 0)}], "driver": (99, 0)}
    monkeypatch.setattr(_recom, "cuda_info", lambda: info)
    monkeypatch.setattr(_recom, "cuda_time", made.time)
    for case in (gpu, gpu_recflex):
        monkeypatch.setattr(case, "copy_bandwidth", lambda: 4.0)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    # A real one would find that the kernel's results are made up.
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(gpu_end_to_end, "SECONDS", 0.4)
    monkeypatch.setattr(tune, "AXES", (("run", (64,)), ("tiles", (8,))))
    return made


def measured(case: str, piece: str, settings: Settings = QUICK) -> Result:
    made = CASES[case].pieces
    assert made is not None
    result = made(settings)[piece](Context(settings, pathlib.Path("nowhere")))
    assert len({r.key for r in result.rows}) == len(result.rows)
    return result


@pytest.mark.parametrize(
    ("case", "piece", "rows", "targets"),
    [
        ("gpu_kernels", "e 256", 3, 1),
        ("gpu_kernels", "f 2048", 3, 1),
        ("gpu_kernels", "e 256 compare", 1, 0),
        ("gpu_recflex", "D 512", 2, 1),
        ("gpu_recflex", "D 2048", 2, 0),
        ("gpu_recflex", "mlperf 512", 2, 0),
        ("gpu_recflex", "D 512 jit", 1, 0),
        ("gpu_scaling", "columns 20", 8, 0),
        ("gpu_scaling", "batch 8", 8, 0),
        ("gpu_ablation", "e 256", 4, 0),
        ("gpu_ablation", "D 512", 4, 0),
        ("gpu_tuned", "e 256", 2, 1),
        ("gpu_serve", "batch 256", 24, 6),
        ("gpu_model_e", "batch 16", 13, 1),
        ("gpu_idioms", "2 of 4 run 1", 4, 0),
    ],
)
def test_a_piece(device: Device, case: str, piece: str, rows: int, targets: int) -> None:
    settings = dataclasses.replace(QUICK, batches=(8, 16))
    result = measured(case, piece, settings)
    if "not installed" not in str(result.facts.get("torch", "not installed")):
        rows += 2  # torch's bags
    assert (len(result.rows), len(result.targets)) == (rows, targets)
    kernels = [r for r in result.rows if "kernel" in r.group and "jit" not in r.contestant]
    assert all(5 < r.median < 30 and r.unit == "us" for r in kernels)  # of 0.01 to 0.02 ms
    assert bool(kernels) == bool(device.launched)


@pytest.mark.parametrize(
    ("piece", "processes", "limits"),
    [("model e", 4, [5.0, 2.0]), ("columns 200", 3, [25.0]), ("model e jit", 1, [])],
)
def test_first_results_are_of_fresh_processes(
    monkeypatch: pytest.MonkeyPatch, piece: str, processes: int, limits: list[float]
) -> None:
    """What is cold finds no folder, what is from disk finds the one that an earlier process filled."""
    asked: list[tuple[str, str]] = []

    def spawn(job: dict[str, Any], cache: str = "off") -> dict[str, Any]:
        asked.append((job["contestant"], "off" if cache == "off" else "a folder"))
        memory = dict.fromkeys(("before_mib", "after_mib", "peak_mib"), 1.0)
        return {**memory, "first_s": 0.1 * len(asked), "columns": 20, "from_disk": 1}

    monkeypatch.setattr(cold, "spawn", spawn)
    result = measured("gpu_first_result", piece)
    assert len(asked) == processes
    assert all((cache == "a folder") == (name == steady.AGAIN) for name, cache in asked)
    assert [t.limit for t in result.targets] == limits and all(t.passed for t in result.targets)
    assert len([r for r in result.rows if r.unit == "s"]) == len({n for n, _ in asked})


def of_idioms(process: int, **ratios: float) -> Result:
    """What a piece says of idioms, ours so many times as slow as plain jit; in a row twice that in the first one."""
    ways = {idioms.SINGLE: 1.0, idioms.CHAINED: 2.0 if process == 0 else 1.0}
    rows = [
        Row("idioms", f"{n}: {who}", f"device arrays, {way}", "ms", ms * factor, ms, 3 * ms, 40, first)
        for n, ratio in ratios.items()
        for way, factor in ways.items()
        for who, ms, first in (("ours", ratio, 5.0 + process), ("jit", 1.0, None))
    ]  # fmt: skip
    facts: dict[str, Any] = {w: {n: r * f for n, r in ratios.items()} for w, f in ways.items()}
    facts |= {
        "fused": dict.fromkeys(ratios, "1 of 1 fused"),
        "has call": {n: n != "plain" for n in ratios},
        "not installed": {},
        "timed while others compiled": process == 1,
        "measured at": "0123456789",
    }
    return Result(tuple(rows), (), facts)


def test_idioms_are_judged_by_the_median_over_processes() -> None:
    case = CASES["gpu_idioms"]
    assert case.combine is not None and case.finish is not None
    parts = {
        "1 of 4 run 1": of_idioms(0, slow=1.2, plain=9.0),
        "2 of 4 run 1": of_idioms(0, fast=0.5),
        "1 of 4 run 2": of_idioms(1, slow=1.04, plain=9.0),
        "1 of 4 run 3": of_idioms(2, slow=0.8, plain=9.0),
        "2 of 4 run 3": of_idioms(2, fast=0.4),  # process 2 is missing
    }
    every: dict[str, pieces.Piece] = dict.fromkeys(
        [*parts, "2 of 4 run 2"], lambda context: Result()
    )
    found = pieces.joined(every, parts, QUICK, case.finish, case.combine)
    assert found.facts["missing"] == "2 of 4 run 2"
    assert [(round(t.value, 3), t.passed) for t in found.targets] == [(1.04, True)]
    assert found.targets[0].measured == f"slow: {idioms.SINGLE}, median over processes"
    assert found.facts[idioms.SINGLE] == {
        "slow": [1.2, 1.04, 0.8], "plain": [9.0, 9.0, 9.0], "fast": [0.5, 0.4]
    }  # fmt: skip
    assert found.facts[f"slowest of {idioms.CHAINED}"] == "slow, 1.04 (0.80 to 2.40 in 3 processes)"
    assert found.facts["median speed-up over plain jit"] == "1.59 (of 2 idioms with a call)"
    assert found.facts["timed while others compiled"] == "False, True"
    assert (found.facts["left out"], found.facts["measured at"]) == ("none", "0123456789")

    rows = {r.key: r for r in found.rows}
    assert len(rows) == len(found.rows) == 3 * 2 + 3 * 2 * 2
    judged = next(r for r in found.rows if "(judged" in r.group and r.contestant == "slow")
    assert (judged.median, judged.p10, judged.p90, judged.count) == (1.04, 0.8, 1.2, 3)
    assert (judged.unit, judged.note) == ("of plain jit", "1 of 1 fused")
    row = rows[f"idioms | slow: ours | device arrays, {idioms.CHAINED} | ms"]
    assert (row.median, row.p10, row.count, row.first_s) == (1.04, 1.04, 120, 6.0)


def test_calls_in_a_row_are_counted_each(device: Device) -> None:
    """Every idiom has a row by each way of calling and contestant; a call's time is that of one in the row."""
    settings = dataclasses.replace(QUICK, processes=2)
    made = idioms.pieces(settings)
    assert list(made) == [f"{k} of 4 run {p}" for p in (1, 2) for k in (1, 2, 3, 4)]
    names = [n for piece in list(made.values())[:4] for n in piece.keywords["names"]]  # type: ignore[attr-defined]
    assert sorted(names) == sorted(idioms._names(settings))
    calls: list[str] = []

    def way(name: str) -> Contestant:
        return Contestant(name, "x", lambda k: k, lambda k: calls.append(name))

    plan = idioms._short(Plan(rounds=2, burst=7), way("a"), idioms.CHAINED)
    calls.clear()
    found = idioms._timed((way("a"), way("b")), idioms.CHAINED, plan, 0)
    assert calls.count("a") == calls.count("b") == 2 * 2 * idioms.CHAIN
    assert [len(r) for r in found["a / x"].rounds] == [1, 1]
    assert Samples(((6.0,), (9.0,))).divided(3).then(Samples(((1.0,),))).rounds == (
        (2.0,), (3.0,), (1.0,)
    )  # fmt: skip
    orders = set()
    for process in range(8):
        calls.clear()
        idioms._timed((way("a"), way("b")), idioms.SINGLE, plan, process)
        orders.add("".join(calls))
    assert len(orders) > 1


def test_a_case_for_gpus_is_refused_without_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(driver, "run_case", None)
    assert driver.main(["gpu_serve", "--out", str(tmp_path)]) == 2
    assert "gpu_serve: JAX has no GPU here" in capsys.readouterr().err
    assert driver.main(["gpu_serve", "--list", "--out", str(tmp_path)]) == 0


def test_all_pieces_have_a_name_of_their_own() -> None:
    for name, case in CASES.items():
        if case.pieces is not None:
            made = case.pieces(Settings())
            assert len({"-".join(piece.split()) for piece in made}) == len(made), name


def test_addresses_in_a_table_are_compared_with_several_launches(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BUCKETS", ())
    monkeypatch.setattr(gpu_scaling, "PARAMETERS", 32)
    result = measured("gpu_scaling", "columns 20")
    times = {r.contestant: r for r in result.rows if r.group.endswith("kernel")}
    assert times[gpu_scaling.SEVERAL].note.startswith("2 launch")
    assert times[gpu.FUSED].note.startswith("1 launch")
    assert {p for p, _, _ in device.launched} == {0, 32}


def test_a_peer_that_computes_something_else_fails() -> None:
    ours = np.ones((2, 3), np.float32)
    torch_peers.same("g", "torch", ours + 1e-6, ours)
    with pytest.raises(RuntimeError, match="g: torch computes something else"):
        torch_peers.same("g", "torch", ours + 1, ours)


def test_throughput_counts_every_thread_and_hides_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_end_to_end, "SECONDS", 0.0)
    seen: list[int] = []
    rate, slow = gpu_end_to_end.throughput(seen.append, [0, 1, 2], 5)
    assert sorted(seen) == [0, 0, 1, 1, 2] and rate > 0 and slow > 0

    def odd(k: int) -> None:
        if k == 2:
            raise ValueError("a batch that cannot be served")

    with pytest.raises(ValueError, match="cannot be served"):
        gpu_end_to_end.throughput(odd, [0, 1, 2], 3)


class Tensor(np.ndarray):
    """As much of torch's as the peers use."""

    def long(self) -> Any:
        return self.astype(np.int64).view(Tensor)

    def float(self) -> Any:
        return self.astype(np.float32).view(Tensor)


def bag(ids: Any, table: Any, offsets: Any = None, *, mode: str, per_sample_weights: Any = None,
        include_last_offset: bool = False) -> Any:  # fmt: skip
    assert mode == "sum"
    if offsets is None:
        assert ids.ndim == 2 and per_sample_weights.shape == ids.shape
        return (table[ids] * per_sample_weights[..., None]).sum(1)
    assert include_last_offset and ids.ndim == 1
    return np.stack([table[ids[a:b]].sum(0) for a, b in itertools.pairwise(offsets)])


def bucketize(x: Any, limits: Any, *, out_int32: bool, right: bool) -> Any:
    assert out_int32 and right  # limits[i - 1] <= x < limits[i]
    return np.digitize(x, limits).astype(np.int32)


TORCH = types.SimpleNamespace(
    from_numpy=lambda x: x.view(Tensor),
    cuda=types.SimpleNamespace(is_available=lambda: False),
    nn=types.SimpleNamespace(
        functional=types.SimpleNamespace(embedding=lambda ids, t: t[ids], embedding_bag=bag)
    ),
    bucketize=bucketize,
    where=np.where,
    cat=np.concatenate,
    no_grad=contextlib.nullcontext,
)


@pytest.mark.parametrize("make", [model_e, model_f])
def test_torchs_columns_are_the_models(make: Any) -> None:
    model = make(64, 0.02)
    params, batch = model.init(0), model.batch(9, 0)
    got = torch_peers.recom_columns(TORCH, model, params, batch)()
    torch_peers.same("g", "torch", np.asarray(got), np.asarray(model.columns(params, batch)))


@pytest.mark.parametrize("name", ["A", "D", "mlperf"])
def test_torchs_bags_are_the_models(name: str) -> None:
    model = recflex(name, scale=0.02, max_rows=300, expand="searchsorted")
    params, batch = model.init(0), model.batch(7, 0)
    tables = {f.name: torch_peers.there(TORCH, params["tables"][f.name]) for f in model.features}
    inputs = {k: torch_peers.there(TORCH, v) for k, v in batch.items()}
    got = gpu_recflex.torch_bags(TORCH, model, tables, inputs)
    torch_peers.same("g", "torch", np.asarray(got), np.asarray(model.columns(params, batch)))


def test_torchs_hash_is_the_models() -> None:
    x = np.random.default_rng(0).integers(0, 1_000_000, 1000, dtype=np.int32)
    for rows in (1, 7, 100):
        want = int_hash(jnp.asarray(x), rows)
        np.testing.assert_array_equal(torch_peers.hashed(x.astype(np.int64), rows), want)


def test_the_faster_hand_batched_form_counts(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measured("gpu_serve", "batch 256")
    stacked = [r for r in result.rows if r.inputs.endswith("stacked beforehand")]
    best = min(stacked, key=lambda r: r.median).contestant.removeprefix("jax.jit, ")
    assert result.targets[5].measured == f"the faster of 2 forms: {best}"


# ---- pieces that are ended ---------------------------------------------------------------------------------------

CHILD = """
import pathlib, subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
pathlib.Path({path!r}).write_text(str(inner.pid))
time.sleep(300)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended (it may still wait for its parent to notice)."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def wait(condition: Any, seconds: float = 30) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="no /proc")
def test_a_piece_is_ended_with_what_it_started(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pid"
    command = [sys.executable, "-c", CHILD.format(path=str(path))]
    monkeypatch.setattr(pieces, "command_of", lambda _: command)
    with pytest.raises(RuntimeError, match="ended after"):
        driver.run_case("gpu_model_e", QUICK, tmp_path, beside=Beside(seconds=10))
    assert wait(lambda: gone(int(path.read_text())))


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="no /proc")
def test_pieces_end_with_who_runs_them(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pid"
    script = textwrap.dedent(f"""
        import pathlib, sys
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks import driver, pieces
        from benchmarks.context import Settings
        child = {CHILD.format(path=str(path))!r}
        pieces.command_of = lambda _: [sys.executable, "-c", child]
        driver.run_case("gpu_model_e", Settings.tiny(), pathlib.Path({str(tmp_path)!r}))
    """)
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.DEVNULL)
    try:
        assert wait(lambda: path.exists() and path.read_text() != "", 120)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
        assert wait(lambda: gone(int(path.read_text())))
    finally:
        run.kill()


def test_no_piece_waits_for_compilers_until_it_is_ended(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def command(job: Any) -> list[str]:
        given.append(job["patience"])
        return ["false"]

    monkeypatch.setattr(pieces, "command_of", command)
    for patience in (600.0, 20.0):
        beside = Beside(seconds=100.0, patience=patience)
        with pytest.raises(RuntimeError, match="exit status 1"):
            driver.run_case("gpu_model_e", QUICK, tmp_path, beside=beside)
    assert 50 < given[0] <= 60 and given[1] == 20


def test_a_partial_result_is_rendered(device: Device, tmp_path: pathlib.Path) -> None:
    """Pieces that are missing are named, and the promises of those that are there are judged."""
    parts = {"D 512": measured("gpu_recflex", "D 512"), "e": Result()}
    joined = pieces.join(parts, ["D 256", "D 512 jit"])
    record.write(tmp_path / "x.json", {
        "schema": record.SCHEMA, "case": "gpu_recflex", "title": "T", "date": "2026-01-02T03:04:05",
        "minutes": 1.5, "settings": dataclasses.asdict(QUICK), "machine": machine.machine(),
        "versions": machine.versions(), "git": {"commit": "0123456789abcdef", "modified": False},
        "load_before": [], "load_after": [], **record.to_json(joined),
    })  # fmt: skip
    text = report.render(report.load(tmp_path))
    assert "missing D 256, D 512 jit" in text
    assert "| RecFlex D, batch 512: kernel | at most 75 us |" in text
    assert "every row in use, every input and every result moved once" in text
