"""The stream runtime without a GPU: generated kernels run as C++, and what is enqueued runs in any order that streams
and events allow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recom_jax import corun, ffi
from recom_jax import preprocess as pp
from recom_jax.corun import calls, kernels, pipeline, runtime
from recom_jax.corun.report import STREAM_MODES
from recom_jax.errors import PipelineError, PreprocessError
from tests import corun_emulation, cuda_emulation
from tests.helpers import cpu_only

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
    cpu_only("tests/gpu runs the stream itself"),
]

SEEDS = iter(range(1 << 30))


def make(k: kernels.PrepKernels, /, **plan: Any) -> Any:
    address = corun_emulation.address(k.source)
    return ffi.extension().CorunRuntime.simulated(seed=next(SEEDS), kernel=address, **plan)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_emulated", (make, 4))
    monkeypatch.setattr(calls, "_emulated", True)


def prep(raw: Any) -> Any:
    ids = pp.sigrid_hash(pp.fill_null(raw["C"], -1), salt=1, max_value=50)
    return {"ids": pp.pad(pp.firstx(ids, 2), 3), "x": pp.clamp(raw["x"], 0.0, 1.0)}


def raw_batch(seed: int, rows: int = 20) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, rows)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = rng.integers(-(1 << 62), 1 << 62, int(splits[-1]))
    there = rng.random(len(ids)) > 0.2
    return {
        "C": pp.Jagged(pp.Nullable(ids, there), splits),
        "x": rng.normal(size=rows).astype(np.float32),
    }


@functools.partial(jax.jit, donate_argnums=0)
def step(state: Any, batch: Any) -> Any:
    there = batch["ids"] >= 0
    rows = jnp.where(there[..., None], state["table"][batch["ids"]], 0)
    rows = corun.stage(rows, "look up")
    loss = jnp.sum(corun.stage(rows.sum((1, 2)) * batch["x"], "sum"))
    change = loss / (100 + jnp.abs(loss))  # bounded, so that long runs stay finite
    table = state["table"].at[jnp.where(there, batch["ids"], 0)].add(change)
    return {"table": table}, {"loss": loss, "x": batch["x"]}


def start() -> Any:
    return {"table": jnp.arange(100.0).reshape(50, 2)}


def losses(pipe: corun.Pipeline, batches: Any) -> list[float]:
    return [float(m["loss"]) for _, m in pipe.run(start(), batches)]


def collect(pipe: corun.Pipeline, batches: Any, found: list[float]) -> None:
    """As `losses`; keeps what came before an exception."""
    for _, m in pipe.run(start(), batches):
        found.append(float(m["loss"]))


def one_by_one(batches: Any) -> list[float]:
    """What the run must be equal to: `prep` by plain JAX, then the step."""
    state, found = start(), []
    for raw in batches:
        state, m = step(state, jax.jit(prep)(pp.columns(raw)))
        found.append(float(m["loss"]))
    return found


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_run_equals_one_after_the_other(slots: int) -> None:
    batches = [raw_batch(k) for k in range(12)]
    pipe = corun.Pipeline(prep, step, options=corun.Options(slots=slots))
    assert losses(pipe, batches) == one_by_one(batches)
    assert pipe.runtime == "stream"
    assert losses(pipe, batches) == one_by_one(batches)  # slots are used again


def test_lists_that_are_long_in_turns_need_few_programs() -> None:
    def lists(n: int) -> pp.Jagged:
        return pp.Jagged(np.arange(4 * n), np.arange(0, 4 * n + 1, n).astype(np.int32))

    def two(raw: Any) -> Any:
        return {"a": pp.pad(raw["a"], 300, -1), "b": pp.pad(raw["b"], 300, -1), "c": raw["c"]}

    pipe = corun.Pipeline(two, step)
    engine = pipe.make_engine(2, pipe.schedule_of)
    for a, b in [(2, 2), (200, 2), (2, 200), (200, 200), (2, 2), (150, 20)]:
        raw = pp.columns({"a": lists(a), "b": lists(b), "c": np.zeros(4, np.float32)})
        made = engine.prepare(raw)
        for name in "ab":
            np.testing.assert_array_equal(made[name], pp.pad(raw[name], 300, -1))
    assert len(engine._programs) == 3  # short, one long, both long
    other = pp.columns({"a": lists(2), "b": lists(2), "c": np.zeros(4, np.int32)})
    engine.prepare(other)  # other dtypes are another program, of its own size
    assert engine._programs[-1].shapes.kinds[0][1] == (80,)
    engine.close()


@pytest.mark.parametrize("ahead", [1, 3])
def test_kernels_that_run_once_leave_their_batch(ahead: int) -> None:
    """To time steps with nothing beside them: places keep the batch, and the step still trains on it."""
    pipe = corun.Pipeline(prep, step, options=corun.Options(steps_in_flight=ahead))
    engine = pipe.make_engine(2, lambda k: runtime.whole(k, runtime.ONCE), profile=True)
    program, leaves = engine.program(pp.columns(raw_batch(0)))
    state, found = start(), []
    for _ in range(40):
        state, m = engine.steps(state, program.runtime, program.runtime.pack(leaves))
        found.append(float(m["loss"]))
    assert found == one_by_one([raw_batch(0)] * 40)
    assert engine.stats()["launched"] == 2 + ahead  # one for each place
    times = engine.times()
    assert len(times.periods) > 20 and min(times.periods) > 0
    taken = times.kernels[0][1]
    assert all(taken[:2]) and not any(taken[2 + ahead :])
    engine.close()


def test_a_plan_is_made_of_the_kernels_and_executed() -> None:
    batches = [raw_batch(k) for k in range(24)]
    pipe = corun.Pipeline(prep, step, options=corun.Options(probe=True, profile=True))
    plan = pipe.make_plan(start(), batches[0])
    assert [s.name for s in plan.stages] == ["look up", "sum", "rest"]
    assert losses(pipe, batches) == one_by_one(batches)
    report = pipe.report()
    assert report.runtime == "stream" and report.late[1] == 24 * len(plan.kernels)
    assert {k[0] for k in report.kernels} == {k.name for k in plan.kernels}
    assert all(measured > 0 for _, _, measured in report.kernels)
    assert "missed their stage" in str(report) and "prepared by: stream" in str(report)


def test_measure_compares_all_orders_bit_for_bit() -> None:
    batches = [raw_batch(k) for k in range(6)]
    pipe = corun.Pipeline(prep, step)
    report = corun.measure(pipe, start, batches, rounds=1)
    assert [name for name, _ in report.baselines] == list(STREAM_MODES)


def test_growing_lists_and_a_smaller_last_batch() -> None:
    batches = [raw_batch(0), raw_batch(1, 20), raw_batch(2), raw_batch(3, 11)]
    rng = np.random.default_rng(9)
    longer = pp.Jagged(rng.integers(0, 1 << 40, 200), np.arange(0, 201, 10).astype(np.int32))
    there = pp.Nullable(longer.values, np.ones(200, bool))
    batches.insert(2, {"C": pp.Jagged(there, longer.row_splits), "x": batches[0]["x"]})
    pipe = corun.Pipeline(prep, step)
    assert losses(pipe, batches) == one_by_one(batches)
    with pytest.raises(PipelineError, match="has 11 rows"):
        losses(corun.Pipeline(prep, step, options=corun.Options(last="error")), batches)


def test_prepare_gives_what_a_run_trains_on() -> None:
    pipe = corun.Pipeline(prep, step)
    made, want = pipe.prepare(raw_batch(5)), jax.jit(prep)(pp.columns(raw_batch(5)))
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_leaving_a_run_and_going_on() -> None:
    batches = [raw_batch(k) for k in range(9)]
    want = one_by_one(batches)
    pipe = corun.Pipeline(prep, step, options=corun.Options(slots=3))
    stream, state, found = iter(batches), start(), []
    for made, m in pipe.run(state, stream):
        state = made
        found.append(float(m["loss"]))
        if pipe.position == 4:
            break
    for made, m in pipe.run(state, stream):
        state = made
        found.append(float(m["loss"]))
    assert found == want and pipe.position == 9


def test_what_the_iterator_raises_is_raised_behind_the_batches_before() -> None:
    def stream() -> Iterator[Any]:
        yield from [raw_batch(0), raw_batch(1)]
        raise OSError("disk on fire")

    pipe, found = corun.Pipeline(prep, step), []
    with pytest.raises(OSError, match="on fire"):
        collect(pipe, stream(), found)
    assert found == one_by_one([raw_batch(0), raw_batch(1)])
    assert losses(pipe, [raw_batch(0)]) == found[:1]  # and the pipeline goes on


def test_a_bad_batch_is_raised_where_it_is_needed() -> None:
    bad = {**raw_batch(1), "x": np.zeros(3, np.float32)}
    pipe, found = corun.Pipeline(prep, step), []
    with pytest.raises(PreprocessError, match="length"):
        collect(pipe, [raw_batch(0), bad, raw_batch(2)], found)
    assert len(found) == 1


def test_a_step_that_raises_leaves_the_pipeline_usable() -> None:
    def failing(state: Any, batch: Any) -> Any:
        if "table" not in state:
            raise KeyError("table")
        return step(state, batch)

    pipe = corun.Pipeline(prep, jax.jit(failing))
    with pytest.raises(KeyError, match="table"):
        list(pipe.run({"no table": jnp.zeros(3)}, [raw_batch(k) for k in range(5)]))
    assert losses(pipe, [raw_batch(0)]) == one_by_one([raw_batch(0)])


def test_a_program_without_kernels_runs_by_xla() -> None:
    def whole(raw: Any) -> Any:
        return {**prep(raw), "x": pp.z_score(raw["x"])}

    batches = [raw_batch(k, 70) for k in range(4)]
    pipe = corun.Pipeline(whole, step)
    with pytest.warns(RuntimeWarning, match="preprocessing runs by XLA"):
        found = losses(pipe, batches)
    assert "over the rows of a batch" in pipe.runtime and "over the rows" in str(pipe.report())
    state, want = start(), []
    for raw in batches:
        state, m = step(state, jax.jit(whole)(pp.columns(raw)))
        want.append(float(m["loss"]))
    assert found == want
    with pytest.raises(PipelineError, match="no kernels for this preprocessing program"):
        losses(corun.Pipeline(whole, step, options=corun.Options(runtime="stream")), batches)


def test_a_state_may_change_its_structure() -> None:
    """A step compiled for one state serves no other."""

    def counting(state: Any, batch: Any) -> Any:
        made, m = step({"table": state["table"]}, batch)
        return {**made, "count": state.get("count", 0) + 1}, m

    pipe = corun.Pipeline(prep, counting)
    batches = [raw_batch(k) for k in range(3)]
    assert losses(pipe, batches) == one_by_one(batches)


# ---- the native runtime ------------------------------------------------------------------------------------------


def native(
    mode: int = runtime.PLAN,
    slots: int = 2,
    seed: int = 0,
    stages: Any = ("a", "b"),
    timed: bool = True,
    profile: bool = False,
) -> Any:
    """One kernel a stage, each adding up a part of two results. timed: markers tell the host."""
    k = kernels.compile_prep(
        lambda r: {"a": r["n"] + 1, "b": r["n"] * 2}, {"n": np.zeros(64, np.int32)}
    )
    launches = [
        runtime.Launch(f"k{n}", n, 0.1, ((0, a, b), (1, a, b)))
        for n, (a, b) in enumerate([(0.0, 0.25), (0.25, 0.5), (0.5, 1.0)])
    ]

    def seeded(k: kernels.PrepKernels, /, **plan: Any) -> Any:
        address = corun_emulation.address(k.source)
        return ffi.extension().CorunRuntime.simulated(seed=seed, kernel=address, **plan)

    schedule = runtime.Schedule(mode, tuple(launches), stages, timed)
    return runtime.PrepRuntime(k, schedule, slots, seeded, 4, profile)


def taken(r: Any, slot: int) -> tuple[Any, Callable[[], None]]:
    """Takes a batch into fresh arrays; what waits for them."""
    a, b = np.zeros(64, np.int32), np.zeros(64, np.int32)
    r.native.take(slot, [(a.ctypes.data, a.nbytes), (b.ctypes.data, b.nbytes)])
    return (a, b), r.native.finish


@pytest.mark.parametrize("mode", [runtime.PLAN, runtime.EAGER, runtime.SEQUENTIAL])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("timed", [False, True])
def test_slots_are_never_mixed_up(mode: int, seed: int, timed: bool) -> None:
    """Batches pass through two slots while nothing has run yet: only events keep them apart. Markers come in any order,
    or not, and so does what follows a step's dispatch."""
    r, rng = native(mode, seed=seed, timed=timed), np.random.default_rng(seed)
    data = [rng.integers(-1000, 1000, 64).astype(np.int32) for _ in range(20)]
    waiting: list[int] = []
    results = []
    for k in range(len(data) + 1):
        if k < len(data):
            waiting.append(r.pack([data[k]]))
        if k:
            results.append(taken(r, waiting.pop(0))[0])
            for name in rng.permutation(["a", "b", "other"])[: rng.integers(0, 4)]:
                (r.native.mark if timed else r.native.ended)(str(name))
            if rng.random() < 0.8:  # else the step failed
                r.native.dispatched()
    r.native.finish()
    for x, (a, b) in zip(data, results, strict=True):
        np.testing.assert_array_equal(a, x + 1)
        np.testing.assert_array_equal(b, x * 2)
    assert r.native.stats["launched"] == 3 * len(data)
    r.close()


def test_kernels_start_with_their_stages() -> None:
    r = native()
    first, second = r.pack([np.arange(64, dtype=np.int32)]), r.pack([np.ones(64, np.int32)])
    assert r.native.stats["launched"] == 0  # no step runs yet
    taken(r, first)
    assert (r.native.stats["launched"], r.native.stats["late"]) == (
        4,
        3,
    )  # all of the first, one of the second
    r.native.mark("a")
    assert r.native.stats["launched"] == 5
    r.native.mark("a")  # ended already
    r.native.mark("unheard of")
    assert (r.native.stats["launched"], r.native.stats["unknown_marks"]) == (5, 2)
    r.native.mark("b")
    assert r.native.stats["launched"] == 6
    (a, _), finish = taken(r, second)
    finish()
    assert (a == 2).all() and r.native.stats["late"] == 3
    r.close()


@pytest.mark.parametrize("seed", range(8))
def test_kernels_wait_for_the_markers_of_the_step_that_runs(seed: int) -> None:
    """They are enqueued at once, and the step runs whenever: a clock counts what has run."""
    r, filler = native(seed=seed, timed=False, profile=True), 40
    waiting, results = [r.pack([np.full(64, k, np.int32)]) for k in range(2)], []
    for k in range(30):
        made, finish = taken(r, waiting.pop(0))
        results.append(made)
        assert r.native.stats["launched"] == 3 * (k + 1) + 1  # those of the first stage
        for name in ("a", "b"):
            for _ in range(filler):
                r.native.ended("another")
            r.native.ended(name)
        r.native.dispatched()
        assert r.native.stats["launched"] == 3 * (k + 2)
        if k % 5 == 4:  # the device catches up with the host
            finish()
        waiting.append(r.pack([np.full(64, k + 2, np.int32)]))
    assert r.native.stats["late"] == 3 and r.native.stats["marks"] == 0
    r.native.finish()
    for k, (a, b) in enumerate(results):
        assert (a == k + 1).all() and (b == 2 * k).all()
    for slot in waiting:
        r.native.abandon(slot)
    rows = np.array(r.native.times)  # kernels, stages, leads, step, period
    assert len(rows) > 10 and (rows[:, 3:5] == -1).all()
    # A kernel of the second stage begins behind the first marker of the step before its own.
    leads, periods = rows[1:, 5:8], rows[:-1, -1]
    assert (periods > 2 * filler).all()
    assert (leads[:, 1] < periods - filler).all() and (leads[:, 2] < periods - 2 * filler).all()
    assert (leads > 0).all() and (leads[:, 0] > filler).any()
    r.close()


def test_a_marker_that_never_comes_holds_nothing_up() -> None:
    """XLA left it out, or another step ran: kernels start early, and nobody waits for ever."""
    for seed in range(4):
        r = native(seed=seed, timed=False)
        first, second = (r.pack([np.full(64, k, np.int32)]) for k in range(2))
        taken(r, first)
        r.native.ended("b")  # "a" never
        r.native.dispatched()
        assert r.native.stats["launched"] == 6
        (a, _), finish = taken(r, second)
        finish()
        assert (a == 2).all() and r.native.stats["late"] == 3
        r.native.dispatched()
        r.close()
        r.native.dispatched()  # nothing is left to do


def test_a_step_that_was_not_dispatched_starts_no_kernels() -> None:
    r = native(timed=False)
    first, second = (r.pack([np.full(64, k, np.int32)]) for k in range(2))
    r.native.dispatched()  # none has begun
    taken(r, first)
    assert r.native.stats["launched"] == 4
    (a, _), finish = taken(r, second)  # the next step takes its batch all the same
    finish()
    assert (a == 2).all() and r.native.stats["late"] == 3 + 2
    r.close()


def test_a_batch_that_comes_late_catches_up() -> None:
    r = native()
    taken(r, r.pack([np.zeros(64, np.int32)]))
    r.native.mark("a")
    slot = r.pack([np.ones(64, np.int32)])
    assert r.native.stats["launched"] == 3 + 2  # those of the stages that have begun
    (a, _), finish = taken(r, slot)
    finish()
    assert (a == 2).all() and r.native.stats["late"] == 3 + 1
    r.close()
    r = native(timed=False)
    taken(r, r.pack([np.zeros(64, np.int32)]))
    r.native.ended("a")
    r.native.dispatched()
    slot = r.pack([np.ones(64, np.int32)])
    assert r.native.stats["launched"] == 6  # behind all markers, those that have passed too
    (a, _), finish = taken(r, slot)
    finish()
    assert (a == 2).all() and r.native.stats["late"] == 3
    r.close()


def test_batches_are_taken_in_order() -> None:
    r = native()
    first, second = (r.pack([np.full(64, k, np.int32)]) for k in range(2))
    with pytest.raises(RuntimeError, match="not the next one"):
        taken(r, second)
    r.native.abandon(first)
    (a, _), finish = taken(r, second)
    finish()
    assert (a == 2).all()
    r.close()
    with pytest.raises(RuntimeError, match="closed"):
        r.native.acquire()


def test_an_abandoned_slot_is_used_again() -> None:
    """Its kernels may be under way: what comes next waits for them."""
    for seed in range(6):
        r = native(seed=seed)
        taken(r, r.pack([np.zeros(64, np.int32)]))
        r.native.abandon(r.pack([np.full(64, 9, np.int32)]))
        kept = [r.pack([np.full(64, k, np.int32)]) for k in (1, 2)]
        found = [taken(r, slot)[0] for slot in kept]
        r.native.finish()
        assert [(int(a[0]), int(b[-1])) for a, b in found] == [(2, 2), (3, 4)]
        r.close()


def test_a_step_needs_a_batch_of_its_pipeline() -> None:
    r = native()
    token = jnp.zeros(16, jnp.uint8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no batch of a pipeline"):
        jax.block_until_ready(jax.jit(lambda t: runtime.take_batch(r.kernels, t))(token))
    r.close()


def test_memory_is_known_before_it_is_taken() -> None:
    r = native(slots=3)
    host, device = runtime.ring_bytes(r.kernels, 3)
    assert r.native.stats["host_bytes"] == host
    tiles = r.native.stats["device_bytes"] - device
    assert 0 <= tiles < 1000
    r.close()


def test_bad_plans_are_refused() -> None:
    k = native().kernels
    make_bad = functools.partial(
        ffi.extension().CorunRuntime.simulated, seed=0, kernel=0, slots=1, ahead=1, in_bytes=256, results=[(0, 4)],
        tiles=b"", words=k.words, consts=b"", stages=[], mode=0, profile=False, in_graphs=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="tiles are not there"):
        make_bad(kernels=[(0, 1, 1, 0)])
    with pytest.raises(ValueError, match="at least one slot"):
        make_bad(kernels=[], slots=0)
    r = make_bad(kernels=[])
    with pytest.raises(ValueError, match="outside its slot"):
        r.pack(r.acquire(), [(0, 512, 0)], 1)


def test_options_say_what_runs_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_emulated", None)
    pipe = corun.Pipeline(prep, step, options=corun.Options(runtime="stream"))
    with pytest.raises(PipelineError, match="needs a CUDA device"):
        losses(pipe, [raw_batch(0)])
    pipe = corun.Pipeline(prep, step)
    assert losses(pipe, [raw_batch(0)]) and pipe.runtime == "threads"
    monkeypatch.setattr(pipeline, "_emulated", (make, 4))
    mesh = jax.make_mesh((1,), ("x",))
    pipe = corun.Pipeline(prep, step, mesh, corun.Options(runtime="stream"))
    with pytest.raises(PipelineError, match="over a mesh the stream runtime needs specs"):
        losses(pipe, [raw_batch(0)])


def test_a_batch_is_taken_under_no_transformation() -> None:
    kinds = (jax.core.ShapedArray((3,), np.dtype(np.float32)),)
    with pytest.raises(PipelineError, match="under no transformation"):
        jax.vmap(lambda t: calls.take_p.bind(t, kinds=kinds))(np.zeros((2, 16), np.uint8))


def test_a_step_that_is_not_jitted_is_called_each_time() -> None:
    """Traced, what it does in Python would be done once."""
    seen = []

    def logged(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        seen.append(float(metrics["loss"]))
        return state, metrics

    batches = [raw_batch(k) for k in range(3)]
    pipe = corun.Pipeline(prep, logged)
    found = losses(pipe, batches)
    assert found == seen and len(seen) == 3
    assert pipe.runtime == "threads: train_step is not jitted (jax.jit it)"
    jitted = corun.Pipeline(prep, step)
    assert losses(jitted, batches) == found and jitted.runtime == "stream"
