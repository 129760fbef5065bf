"""The pipeline's runtime: the same results as one after the other, order, bounds, errors, shutdown, restart."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

import recom_jax
from recom_jax import corun
from recom_jax import preprocess as pp
from recom_jax.corun import ring
from recom_jax.corun.report import Report, Sample
from tests.helpers import cpu_only

ROWS = 16


def raws(n: int, rows: int = ROWS, last: int | None = None) -> list[dict[str, Any]]:
    made = []
    for k in range(n):
        size = last if last is not None and k == n - 1 else rows
        rng = np.random.default_rng(k)
        made.append(
            {
                "id": rng.integers(-(2**62), 2**62, size),
                "x": rng.random(size, np.float32),
                "number": np.full(size, k, np.int32),
            }
        )
    return made


def prep(raw: Any) -> Any:
    ids = pp.sigrid_hash(raw["id"], 1, 50)
    return {"ids": ids, "x": pp.logit(raw["x"], 1e-3), "number": raw["number"]}


@jax.jit
def step(state: Any, batch: Any) -> tuple[Any, Any]:
    # Eighths, whose sums are exact: a GPU adds what falls on one row in any order.
    table = state["table"].at[batch["ids"]].add(jnp.round(batch["x"] * 8) / 8)
    metrics = {"loss": table.sum(), "number": batch["number"][0], "rows": batch["x"].shape[0]}
    return {"table": table, "steps": state["steps"] + 1}, metrics


def start() -> Any:
    return {"table": jnp.zeros(50), "steps": jnp.int32(0)}


def one_after_the_other(batches: list[Any]) -> list[Any]:
    state, out, made = start(), [], jax.jit(prep)
    for raw in batches:
        state, m = step(state, made(pp.columns(raw)))
        out.append(jax.tree.map(np.asarray, m))
    return out


def numbers(run: Any) -> list[int]:
    return [int(m["number"]) for _, m in run]


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("recom-corun")}


@pytest.mark.parametrize(
    "options",
    [{}, {"slots": 1}, {"slots": 5, "workers": 3}, {"fused": True}, {"steps_in_flight": 1}],
)
def test_losses_are_those_of_one_after_the_other(options: Any) -> None:
    batches = raws(9, last=5)
    pipe = corun.Pipeline(prep, step, options=corun.Options(**options))
    got = [jax.tree.map(np.asarray, m) for _, m in pipe.run(start(), iter(batches))]
    want = one_after_the_other(batches)
    assert [g["number"] for g in got] == list(range(9))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g["loss"], w["loss"])
    assert pipe.position == 9 and not threads()


def test_donated_state_and_pyarrow_batches() -> None:
    program = pp.program(
        {
            "ids": ["id", ("sigrid_hash", 1, 50), ("fill_null", 0)],
            "x": ["x", ("fill_null", 0.5)],
            "number": ["n", ("fill_null", 0)],
        }
    )

    def batch(k: int) -> Any:
        ids, x = pa.array([k, None, 2**60]), pa.array([0.5, None, 1.0], pa.float32())
        return pa.record_batch({"id": ids, "x": x, "n": pa.array([k] * 3, pa.int32())})

    batches = [batch(k) for k in range(4)]
    donating = jax.jit(step, donate_argnums=0)
    pipe = corun.Pipeline(program, donating)
    assert numbers(pipe.run(start(), batches)) == [0, 1, 2, 3]


def test_an_iterator_may_reuse_its_buffers() -> None:
    buffer = {k: v.copy() for k, v in raws(1)[0].items()}
    nullable = pp.Nullable(np.zeros(ROWS, np.float32), np.ones(ROWS, bool))

    def source() -> Iterator[Any]:
        for raw in raws(8):
            for name, values in raw.items():
                buffer[name][:] = values
            nullable.values[:] = raw["x"]
            yield {**buffer, "x": nullable}

    def slow(raw: Any) -> Any:
        return prep({**raw, "x": pp.fill_null(raw["x"], 0)})

    pipe = corun.Pipeline(slow, step, options=corun.Options(slots=4, workers=2))
    losses = [float(m["loss"]) for _, m in pipe.run(start(), source())]
    assert losses == [float(w["loss"]) for w in one_after_the_other(raws(8))]


def test_read_ahead_is_bounded() -> None:
    read, most, done = [0], [0], [0]

    def source() -> Iterator[Any]:
        for raw in raws(20):
            read[0] += 1
            most[0] = max(most[0], read[0] - done[0])
            yield raw

    for slots in (1, 3):
        read[0] = most[0] = done[0] = 0
        pipe = corun.Pipeline(prep, step, options=corun.Options(slots=slots, workers=2))
        for _ in pipe.run(start(), source()):
            done[0] += 1
            time.sleep(0.002)
        assert most[0] <= slots + 1  # the step's own batch counts until the loop body has seen it
        assert read[0] == 20


def test_prep_runs_beside_the_step() -> None:
    inside = threading.Event()
    seen = []

    def slow_step(state: Any, batch: Any) -> tuple[Any, Any]:
        number = int(batch["number"][0])
        if number == 0:
            seen.append(
                inside.wait(20)
            )  # until the second batch is being prepared, on another thread
        return state, {"number": number}

    def source() -> Iterator[Any]:
        yield raws(1)[0]
        inside.set()
        yield from raws(3)[1:]

    assert numbers(corun.Pipeline(prep, slow_step).run(start(), source())) == [0, 1, 2]
    assert seen == [True]


@pytest.mark.parametrize("at", [0, 3])
def test_errors_of_the_input_come_where_their_batch_was_due(at: int) -> None:
    def source() -> Iterator[Any]:
        yield from raws(at)
        raise OSError("disk gone")

    pipe = corun.Pipeline(prep, step)
    got: list[int] = []
    with pytest.raises(OSError, match="disk gone"):
        got.extend(int(m["number"]) for _, m in pipe.run(start(), source()))
    assert got == list(range(at)) and pipe.position == at and not threads()


def test_errors_of_prep_come_where_their_batch_was_due_and_lose_nothing() -> None:
    batches = raws(6)
    batches[3]["id"] = batches[3]["id"].astype(np.float32)
    mended = threading.Event()

    def picky(raw: Any) -> Any:
        return prep({**raw, "id": pp.cast(raw["id"], np.int32)} if mended.is_set() else raw)

    stream = iter(batches)
    pipe = corun.Pipeline(picky, step, options=corun.Options(slots=4, workers=2))
    got: list[tuple[Any, int]] = []
    with pytest.raises(TypeError, match="sigrid_hash takes integers") as caught:
        got.extend((s, int(m["number"])) for s, m in pipe.run(start(), stream))
    assert "while batch 3 was prepared" in "".join(caught.value.__notes__)
    assert [n for _, n in got] == [0, 1, 2] and pipe.position == 3 and not threads()
    mended.set()  # the same iterator goes on
    assert numbers(pipe.run(got[-1][0], stream)) == [3, 4, 5]


@cpu_only("the stream runtime compiles the step once")
def test_errors_of_the_step_leave_its_batch_untrained() -> None:
    calls = itertools.count()

    def failing(state: Any, batch: Any) -> tuple[Any, Any]:
        if next(calls) == 2:
            raise FloatingPointError("step 2")
        return step(state, batch)

    stream = iter(raws(5))
    pipe = corun.Pipeline(prep, failing)
    with pytest.raises(FloatingPointError, match="step 2"):
        numbers(pipe.run(start(), stream))
    assert pipe.position == 2
    assert numbers(pipe.run(start(), stream)) == [2, 3, 4]


@pytest.mark.parametrize("how", ["close", "throw", "drop"])
def test_leaving_early_is_clean_and_loses_nothing(how: str) -> None:
    stream = iter(raws(12))
    pipe = corun.Pipeline(prep, step, options=corun.Options(slots=4, workers=2))
    run = pipe.run(start(), stream)
    assert [int(next(run)[1]["number"]) for _ in range(3)] == [0, 1, 2]
    if how == "close":
        run.close()
    elif how == "throw":
        with pytest.raises(KeyboardInterrupt):
            run.throw(KeyboardInterrupt())
    else:
        del run
    assert pipe.position == 3 and not threads()
    assert numbers(pipe.run(start(), stream)) == list(range(3, 12))


@cpu_only("XLA's scatter adds in any order")
def test_restart_from_a_position_gives_the_same_stream() -> None:
    batches = raws(8)
    want = one_after_the_other(batches)
    pipe = corun.Pipeline(prep, step)
    state: Any = start()
    for made, _ in itertools.islice(pipe.run(state, batches), 3):
        state = made
    saved = jax.tree.map(np.asarray, state), pipe.position
    again = corun.Pipeline(prep, step)
    losses = [float(m["loss"]) for _, m in again.run(saved[0], batches, start=saved[1])]
    assert losses == [float(w["loss"]) for w in want[3:]] and again.position == 8

    class Seekable(list[Any]):
        skipped = 0

        def skip(self, n: int) -> None:
            self.skipped = n
            del self[:n]

    seekable = Seekable(batches)
    assert (
        numbers(again.run(saved[0], seekable, start=3)) == [3, 4, 5, 6, 7] and seekable.skipped == 3
    )
    with pytest.raises(RuntimeError, match="ends after 8 batches"):
        numbers(again.run(start(), batches, start=9))
    with pytest.raises(RuntimeError, match="at least 0"):
        numbers(again.run(start(), batches, start=-1))


def test_last_batch() -> None:
    def run(last: Any, batches: Any) -> list[int]:
        return [
            int(m["rows"])
            for _, m in corun.Pipeline(prep, step, options=corun.Options(last=last)).run(
                start(), batches
            )
        ]

    short = raws(3, last=5)
    assert run("keep", short) == [16, 16, 5]
    assert run("drop", short) == [16, 16]
    with pytest.raises(
        recom_jax.errors.PipelineError, match=r"the last batch \(number 2\) has 5 rows"
    ):
        run("error", short)
    middle = [*short, raws(1)[0]]
    for last in ("drop", "error"):
        with pytest.raises(recom_jax.errors.PipelineError, match="batch 2 has 5 rows"):
            run(last, middle)
    with pytest.raises(recom_jax.errors.PipelineError, match="has 20 rows"):
        run("drop", [*raws(2), raws(1, rows=20)[0]])
    assert run("keep", middle) == [16, 16, 5, 16]
    assert run("keep", []) == []
    for last in ("keep", "drop", "error"):
        assert run(last, raws(1)) == [16]


@pytest.mark.once
def test_wrong_use() -> None:
    pipe = corun.Pipeline(prep, step)
    with pytest.raises(RuntimeError, match="no plan yet"):
        _ = pipe.plan
    run = pipe.run(start(), raws(4))
    next(run)
    with pytest.raises(RuntimeError, match="is running"):
        next(pipe.run(start(), raws(4)))
    run.close()
    with pytest.raises(RuntimeError, match="prep is a function"):
        corun.Pipeline(3, step)  # type: ignore[arg-type]
    for bad in (
        {"slots": 0},
        {"workers": 1.5},
        {"last": "no"},
        {"min_share": 0.0},
        {"gpus": 0},
        {"close_timeout_s": -1},
    ):
        with pytest.raises(ValueError, match=r"corun\.Options"):
            corun.Options(**bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a raw batch is a mapping"):
        next(pipe.run(start(), [3]))
    with pytest.raises(RuntimeError, match="no name for a stage"):
        corun.stage(jnp.ones(2), "")


@pytest.mark.once
def test_an_iterator_that_hangs_is_left_behind_with_a_warning() -> None:
    release = threading.Event()

    def source() -> Iterator[Any]:
        yield raws(1)[0]
        release.wait(30)

    pipe = corun.Pipeline(prep, step, options=corun.Options(close_timeout_s=0.05))
    run = pipe.run(start(), source())
    next(run)
    with pytest.warns(RuntimeWarning, match="still reads"):
        run.close()
    release.set()


@pytest.mark.once
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
def test_ctrl_c_while_it_waits_for_input() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # test runners may ignore it
    release = threading.Event()

    def source() -> Iterator[Any]:
        yield raws(1)[0]
        release.wait(30)

    pipe = corun.Pipeline(prep, step, options=corun.Options(close_timeout_s=0.05))
    run = pipe.run(start(), source())
    next(run)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.warns(RuntimeWarning, match="still reads"), pytest.raises(KeyboardInterrupt):
            next(run)
    finally:
        signal.signal(signal.SIGINT, before)
        release.set()
    assert pipe.position == 1
    assert numbers(pipe.run(start(), raws(2))) == [0, 1]


def test_a_prediction_is_held_against_the_mean_of_all_steps() -> None:
    """Where each third batch comes late, most steps don't wait at all."""
    late = [Sample(w, 1e-3, 0.0, 0.0) for _ in range(10) for w in (0.0, 0.0, 6e-3)]
    report = Report.of([Sample(9.0, 9.0, 0.0, 0.0), *late], {}, 3e-3)
    assert report.step_s == 1e-3 and report.wait_s == 0
    assert report.period_s is not None and 2.7e-3 < report.period_s <= 3e-3
    assert report.prediction_error is not None and abs(report.prediction_error) < 0.1
    assert "from step to step, mean" in str(report)
    assert Report.of([], {}, 3e-3).prediction_error is None


@cpu_only("the stream runtime has more baselines")
def test_report_and_measure() -> None:
    pipe = corun.Pipeline(prep, step)
    assert "not measured" in str(pipe.report())
    assert numbers(pipe.run(start(), raws(4))) == [0, 1, 2, 3]
    report = pipe.report()
    assert report.steps == 3 and report.step_s is not None and report.prep_s is not None
    report = corun.measure(pipe, start, raws(4), rounds=2)
    assert [name for name, _ in report.baselines] == [
        "no preprocessing",
        "sequential",
        "side stream",
        "co-run",
    ]
    assert all(seconds > 0 for _, seconds in report.baselines)
    assert "x ideal" in str(report)
    assert pipe.plan.predicted_us > 0
    assert pipe.report().prediction_error is not None


def test_mesh_places_batches() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    pipe = corun.Pipeline(prep, step, mesh=mesh)
    assert numbers(pipe.run(start(), raws(3))) == [0, 1, 2]
    assert pipe.plan.gpus == 1


# ---- markers -----------------------------------------------------------------------------------------------------


def test_markers_change_nothing() -> None:
    def f(x: Any, marked: bool) -> Any:
        h = jnp.sin(x) * 2
        if marked:
            h = corun.stage({"h": h, "n": jnp.arange(3)}, "first")["h"]
        return (h**2).sum()

    x = jnp.arange(4.0)
    transforms = (
        jax.jit,
        jax.grad,
        lambda g: jax.jit(jax.grad(g)),
        lambda g: jax.jit(jax.hessian(g)),
    )
    for make in transforms:
        plain, marked = (make(lambda v, m=m: f(v, m)) for m in (False, True))
        np.testing.assert_array_equal(plain(x), marked(x))
    plain, marked = (jax.vmap(lambda v, m=m: f(v, m)) for m in (False, True))  # type: ignore[misc]
    np.testing.assert_array_equal(plain(x[None] * 3), marked(x[None] * 3))
    text = str(jax.make_jaxpr(jax.grad(lambda v: f(v, True)))(x))
    assert "first:bwd" in text


def test_lists_of_about_the_same_length_share_a_compiled_program() -> None:
    """Their capacities are on both sides of a step of the ladder."""
    traced = []

    def counting(raw: Any) -> Any:
        traced.append(raw["C"].capacity)
        return {"n": pp.pad(raw["C"], 2), "x": raw["x"]}

    def batch(n: int) -> Any:
        splits = np.linspace(0, n, 5).astype(np.int32)
        return {"C": pp.Jagged(np.arange(n, dtype=np.int32), splits), "x": np.zeros(4, np.float32)}

    lengths = [1000, 1030, 1020, 990, 1085]
    pipe = corun.Pipeline(counting, lambda s, b: (s, b), options=corun.Options(runtime="threads"))
    got = [np.asarray(b["n"]) for _, b in pipe.run((), [batch(n) for n in lengths])]
    assert len(set(traced)) == 1
    for n, rows in zip(lengths, got, strict=True):
        want = pp.pad(pp.columns(batch(n))["C"], 2)
        np.testing.assert_array_equal(rows, want)
    pipe.prepare(batch(4000))
    assert len(set(traced)) == 2


def test_a_reader_is_woken_when_half_of_the_places_are_free() -> None:
    places, taken = ring.Places(4), queue.SimpleQueue[int]()

    def read() -> None:
        for k in range(7):
            places.acquire()
            taken.put(k)

    reader = threading.Thread(target=read)
    reader.start()
    assert [taken.get(timeout=10) for _ in range(4)] == [0, 1, 2, 3]
    while not places._waits:
        time.sleep(0.001)
    places.release()
    assert taken.empty() and places._waits
    places.release()
    assert [taken.get(timeout=10) for _ in range(2)] == [4, 5]
    places.close()
    assert taken.get(timeout=10) == 6
    reader.join()
