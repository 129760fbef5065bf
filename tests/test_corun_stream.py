"""The stream runtime without a GPU: generated kernels run as C++, and what is enqueued runs in any order that streams
and events allow."""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
