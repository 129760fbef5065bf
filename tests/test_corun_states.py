"""Pipelines over odd states, and what happens between runs: errors, other iterators, restarts, garbage collection."""

from __future__ import annotations

import gc
import itertools
import pathlib
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recom_jax import compat, corun, ffi
from recom_jax import preprocess as pp
from recom_jax.corun import calls, pipeline
from recom_jax.corun.mesh import on_mesh
from tests import corun_emulation, cuda_emulation
from tests.helpers import cpu_only
from tests.test_corun import numbers, prep, raws, start, step, threads

pytestmark = [pytest.mark.once, cpu_only("the stream runtime is emulated here")]
SEEDS = iter(range(1 << 30))


@pytest.fixture(params=["threads", "stream"])
def runtime(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test on threads, and on the stream runtime as tests have it without a GPU."""
    if request.param == "stream":
        if cuda_emulation.missing() is not None:
            pytest.skip(str(cuda_emulation.missing()))

        def make(k: Any, /, **plan: Any) -> Any:
            address = corun_emulation.address(k.source)
            return ffi.extension().CorunRuntime.simulated(seed=next(SEEDS), kernel=address, **plan)

        monkeypatch.setattr(pipeline, "_emulated", (make, 4))
        monkeypatch.setattr(calls, "_emulated", True)
    return str(request.param)


# ---- states --------------------------------------------------------------------------------------------------------


@jax.jit
def noisy(state: Any, batch: Any) -> tuple[Any, Any]:
    key, now = jax.random.split(state["key"])
    table = state["table"].at[batch["ids"]].add(state["rate"] * jax.random.uniform(now))
    return {**state, "key": key, "table": table}, {
        "loss": table.sum(),
        "number": batch["number"][0],
    }


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_state_may_hold_random_keys_and_python_numbers(
    runtime: str, probe: bool, impl: str
) -> None:
    def fresh() -> Any:
        return {"key": jax.random.key(0, impl=impl), "table": jnp.zeros(50), "rate": 0.1}

    pipe = corun.Pipeline(prep, noisy, options=corun.Options(probe=probe))
    state, want = fresh(), []
    for raw in raws(4):
        state, m = noisy(state, jax.jit(prep)(pp.columns(raw)))
        want.append(float(m["loss"]))
    assert [float(m["loss"]) for _, m in pipe.run(fresh(), raws(4))] == want
    assert pipe.runtime == runtime
    assert pipe.make_plan(fresh(), raws(1)[0]).predicted_us > 0
    assert [float(m["loss"]) for _, m in pipe.run(fresh(), raws(4))] == want


def test_python_numbers_of_a_state_stay_weak(runtime: str) -> None:
    """Float32 instead, the rate would make the carry of the loop float32, and the plan could not be made."""

    @jax.jit
    def scanned(state: Any, batch: Any) -> tuple[Any, Any]:
        def body(w: Any, x: Any) -> tuple[Any, Any]:
            return w - state["rate"] * x.astype(w.dtype), None

        made = jax.lax.scan(body, state["w"], batch["x"])[0]
        return {**state, "w": made}, {"number": batch["number"][0], "w": made}

    pipe = corun.Pipeline(prep, scanned)
    state = {"w": jnp.zeros((), jnp.bfloat16), "rate": 0.1}
    assert numbers(pipe.run(state, raws(3))) == [0, 1, 2]
    assert pipe.runtime == runtime and pipe.plan.predicted_us > 0


# ---- between runs --------------------------------------------------------------------------------------------------


def test_a_batch_that_is_none_is_not_lost() -> None:
    """As one that preprocessing refuses: the next run over the same iterator begins with it."""
    batches: list[Any] = raws(5)
    good, batches[2] = batches[2], {}
    stream = iter(batches)
    pipe = corun.Pipeline(prep, step)
    for bad, message in (({}, "no columns"), ({"id": 3}, "column 'id'"), (3, "not int")):
        batches[2] = bad
        with pytest.raises(TypeError, match=message):
            numbers(pipe.run(start(), stream))
        assert pipe.position == 2
        batches[2] = good
        stream = itertools.chain(batches)
        pipe = corun.Pipeline(prep, step)
    batches[2] = bad
    got: list[int] = []
    with pytest.raises(TypeError):
        got.extend(int(m["number"]) for _, m in pipe.run(start(), stream))
    with pytest.raises(TypeError, match="not int"):
        numbers(pipe.run(start(), stream))
    assert got == [0, 1] and pipe.position == 2


@pytest.mark.parametrize("last", ["drop", "error"])
def test_a_restart_knows_the_size_of_the_first_batch(last: Any) -> None:
    batches = raws(3, last=5)
    pipe = corun.Pipeline(prep, step, options=corun.Options(last=last))
    if last == "drop":
        assert numbers(pipe.run(start(), batches)) == [0, 1] and pipe.position == 2
        assert numbers(pipe.run(start(), batches, start=2)) == []
        assert numbers(pipe.run(start(), raws(2), start=1)) == [1]
    else:
        with pytest.raises(RuntimeError, match=r"last batch \(number 2\) has 5 rows"):
            numbers(pipe.run(start(), batches, start=2))


def test_other_iterators_in_between_lose_nothing(runtime: str) -> None:
    pipe = corun.Pipeline(prep, step, options=corun.Options(slots=4))
    one, other = iter(raws(10)), iter(raws(8))
    got: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(3):
        for k, stream in enumerate((one, other)):
            run = pipe.run(start(), stream)
            got[k] += [int(m["number"]) for _, m in itertools.islice(run, 2)]
            run.close()
            assert pipe.position == len(got[k])
            assert numbers(pipe.run(start(), raws(2))) == [0, 1]  # an evaluation, over a list
    assert got == {0: [0, 1, 2, 3, 4, 5], 1: [0, 1, 2, 3, 4, 5]}
    assert numbers(pipe.run(start(), one)) == [6, 7, 8, 9]
    assert numbers(pipe.run(start(), other)) == [6, 7]
    assert pipe.runtime == runtime


class _Box:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self, run: Any) -> None:
        self.run, self.me = run, self


@pytest.mark.parametrize("where", ["iterator", "prep"])
def test_a_run_may_be_collected_by_threads_of_its_own(
    runtime: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, done = threading.Event(), threading.Event()
    failed: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", failed.append)

    def collect() -> None:
        if go.wait(20):
            gc.collect()
            done.set()

    def source() -> Iterator[Any]:
        for k, raw in enumerate(raws(10)):
            if where == "iterator" and k == 4 and not done.is_set():
                collect()
            yield raw

    class Column:
        """An array that is made when it is asked for, on the thread that prepares."""

        def __init__(self, of: Any, last: bool) -> None:
            self.of, self.last = of, last

        def __len__(self) -> int:
            return len(self.of)

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            if self.last and not done.is_set():
                collect()
            return self.of

    def lazy() -> Iterator[Any]:
        for k, raw in enumerate(source()):
            yield {**raw, "x": Column(raw["x"], where == "prep" and k == 4)}

    stream = lazy()
    pipe = corun.Pipeline(prep, step, options=corun.Options(slots=3, copy=False))
    gc.collect()
    gc.disable()
    try:
        box = _Box(pipe.run(start(), stream))
        assert [int(next(box.run)[1]["number"]) for _ in range(3)] == [0, 1, 2]
        del box
        go.set()
        assert done.wait(20)
        end = time.monotonic() + 20
        while threads() and time.monotonic() < end:
            time.sleep(0.01)
        assert not threads() and not failed
    finally:
        gc.enable()
    assert numbers(pipe.run(start(), stream)) == list(range(3, 10))
    assert pipe.runtime == runtime


def test_what_a_reader_reads_that_was_left_behind_stays_out_of_the_next_run(runtime: str) -> None:
    release = threading.Event()

    def source() -> Iterator[Any]:
        yield raws(1)[0]
        release.wait(20)
        yield raws(2)[1]

    pipe = corun.Pipeline(prep, step, options=corun.Options(close_timeout_s=0.05, slots=3))
    run = pipe.run(start(), source())
    next(run)
    with pytest.warns(RuntimeWarning, match="still reads"):
        run.close()
    got = []
    for _, m in pipe.run(start(), raws(6)):
        got.append(int(m["number"]))
        if len(got) == 2:
            release.set()
            time.sleep(0.2)
    assert got == list(range(6)) and pipe.runtime == runtime
    assert numbers(pipe.run(start(), raws(6))) == list(range(6))


def test_a_last_batch_that_a_mesh_cannot_split_is_named() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("d",))
    with pytest.raises(RuntimeError, match=r"dimension 0 of \(5,\) into 8 parts.*last='drop'"):
        on_mesh({"x": jnp.ones(5)}, mesh, jax.sharding.PartitionSpec("d"))


# ---- settings of the thread that trains ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_settings_of_a_block_hold_for_preprocessing(runtime: str, workers: int) -> None:
    """JAX keeps what `with` sets by thread; preprocessing runs on others."""

    def wide(raw: Any) -> Any:
        seen.add((jax.config.jax_numpy_dtype_promotion, jax.config.jax_default_matmul_precision))
        return {"x": raw["x"] * 3, "id": pp.hash_bucket(raw["id"], 1 << 40)}

    seen: set[Any] = set()
    raw = {"x": np.linspace(0, 1, 8), "id": np.arange(8) + 2**60}
    passed = jax.jit(lambda s, b: (s, b))
    pipe = corun.Pipeline(wide, passed, options=corun.Options(workers=workers))
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.default_matmul_precision("highest"),
    ):
        want = pipe.prepare(raw)
        got = [b for _, b in pipe.run((), [raw] * 3)]
        report = corun.measure(pipe, tuple, [raw] * 2, rounds=1)
    assert want["x"].dtype == np.float64 and report.baselines
    for b in got:
        assert jax.tree.structure(b) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, b, want)
        assert b["x"].dtype == np.float64 and b["id"].dtype == np.int64
    assert seen == {("strict", "highest")} and pipe.runtime == runtime
    outside = [b for _, b in pipe.run((), [raw] * 2)]
    assert outside[0]["x"].dtype == np.float32 and isinstance(outside[0]["id"], pp.Int64)


@pytest.mark.parametrize("old", [False, True], ids=["set_mesh", "with mesh"])
def test_a_mesh_of_a_block_holds_for_preprocessing(runtime: str, old: bool) -> None:
    def placed(raw: Any) -> Any:
        where = (
            compat._mesh.thread_resources.env.physical_mesh
            if old
            else jax.sharding.get_abstract_mesh()
        )
        seen.add(where.axis_names)
        spec = jax.sharding.PartitionSpec("d")
        return {"x": jax.lax.with_sharding_constraint(raw["x"] * 3, spec)}

    seen: set[Any] = set()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    pipe = corun.Pipeline(placed, jax.jit(lambda s, b: (s, b)), options=corun.Options(workers=2))
    with mesh if old else jax.set_mesh(mesh):
        got = [np.asarray(b["x"]) for _, b in pipe.run((), [{"x": np.ones(8, np.float32)}] * 3)]
    assert len(got) == 3 and all((x == 3).all() for x in got)
    assert seen == {("d",)}
    assert pipe.runtime.startswith("threads")  # a constraint is XLA's
    # No mesh stays behind in the threads of the next run.
    plain = corun.Pipeline(lambda raw: {"x": raw["x"] + 1}, jax.jit(lambda s, b: (s, b)))
    (last,) = [b for _, b in plain.run((), [{"x": np.ones(8, np.float32)}])]
    assert (np.asarray(last["x"]) == 2).all()


def test_a_pipeline_may_feed_another(runtime: str) -> None:
    """Its iterator, on a thread of the other's, ends before it is run again."""
    inner, outer = corun.Pipeline(prep, step), corun.Pipeline(prep, step)

    def source() -> Iterator[Any]:
        for raw in raws(6):
            for _ in range(3):
                assert numbers(inner.run(start(), raws(3))) == [0, 1, 2]
            yield raw

    assert numbers(outer.run(start(), source())) == list(range(6))
    assert inner.runtime == outer.runtime == runtime


OPEN_AT_EXIT = """
import jax, numpy as np
from recom_jax import corun
def source():
    while True:
        yield {"x": np.ones(4, np.float32)}
pipe = corun.Pipeline(lambda raw: raw, jax.jit(lambda s, b: (s, b)))
run = pipe.run((), source())
next(run)
print("left open")
"""


def test_a_run_that_is_open_at_exit_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPEN_AT_EXIT],
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "left open\n", "")


def test_ctrl_c_while_it_waits_for_a_step_leaves_state_and_position_together() -> None:
    """The caller's state is that of the step before: the batch is trained on again, with it."""
    interrupts = iter([False, False, True, False, False, True])

    class Late:
        def block_until_ready(self) -> Late:
            if next(interrupts, False):
                raise KeyboardInterrupt
            return self

    def counting(state: int, batch: Any) -> tuple[int, Any]:
        assert int(batch["number"][0]) == state  # each batch follows on the state before it
        return state + 1, Late()

    stream, states = iter(raws(9)), [0]
    pipe = corun.Pipeline(prep, counting)
    for want in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            states.extend(s for s, _ in pipe.run(states[-1], stream))
        assert pipe.position == states[-1] == want and not threads()
    states.extend(s for s, _ in pipe.run(states[-1], stream))
    assert pipe.position == 9 and states == list(range(10))


def test_what_a_slow_iterator_reads_at_last_is_not_lost() -> None:
    waits, release = threading.Event(), threading.Event()

    def source() -> Iterator[Any]:
        for k, raw in enumerate(raws(8)):
            if k == 4:
                waits.set()
                release.wait(20)
            yield raw

    class Safe:
        """An iterator that two threads may use, as one that reads from a queue."""

        def __init__(self) -> None:
            self.inner, self.lock = source(), threading.Lock()

        def __iter__(self) -> Safe:
            return self

        def __next__(self) -> Any:
            with self.lock:
                return next(self.inner)

    stream = Safe()
    pipe = corun.Pipeline(prep, step, options=corun.Options(close_timeout_s=0.05, slots=4))
    run = pipe.run(start(), stream)
    got = [int(next(run)[1]["number"]) for _ in range(2)]
    assert waits.wait(20)
    with pytest.warns(RuntimeWarning, match="still reads"):
        run.close()
    assert pipe.position == 2
    release.set()
    while threads():
        time.sleep(0.01)
    assert [*got, *numbers(pipe.run(start(), stream))] == list(range(8))


def test_an_interrupt_as_a_run_begins_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = iter(raws(4))
    pipe = corun.Pipeline(prep, step)
    begin = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        begin(self)
        if self.name.endswith("reader"):
            raise KeyboardInterrupt

    for name, broken in (("start", interrupted), ("__init__", None)):
        run = pipe.run(start(), stream)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, name, broken)
            with pytest.raises((KeyboardInterrupt, TypeError)):
                numbers(run)
        assert not threads()
    assert numbers(pipe.run(start(), stream)) == [0, 1, 2, 3]


# ---- odd programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["inside", "closed over"])
def test_preprocessing_may_draw_random_numbers(runtime: str, where: str) -> None:
    """Kernels cannot: XLA does."""
    known = jax.random.key(3)

    def masked(raw: Any) -> Any:
        key = known if where == "closed over" else jax.random.key(3)
        return {"x": jnp.where(jax.random.bernoulli(key, 0.5, raw["x"].shape), raw["x"], 0)}

    pipe = corun.Pipeline(masked, jax.jit(lambda s, b: (s, b)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = [b["x"] for _, b in pipe.run((), raws(3))]
    for raw, x in zip(raws(3), got, strict=True):
        np.testing.assert_array_equal(x, jax.jit(masked)(raw)["x"])
    assert pipe.runtime == ("threads" if runtime == "threads" else "threads: values of key<fry>")


def test_metrics_may_be_deleted(runtime: str) -> None:
    """Or donated to what sums them up, while their step is in flight."""
    pipe = corun.Pipeline(prep, step)
    for _ in range(2):
        for _, m in pipe.run(start(), raws(6)):
            for x in jax.tree.leaves(m):
                x.delete()
        assert pipe.position == 6 and pipe.runtime == runtime


class Skipping(list[Any]):
    """Skips as tf.data and Hugging Face datasets do: into a new one."""

    def skip(self, n: int) -> Skipping:
        return Skipping(self[n:])


def test_a_skip_may_return_what_is_left() -> None:
    pipe = corun.Pipeline(prep, step)
    batches = Skipping(raws(6))
    for _ in range(2):
        assert numbers(pipe.run(start(), batches, start=4)) == [4, 5] and pipe.position == 6


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_kernels_pad_as_operators_do(runtime: str, dtype: Any) -> None:
    lists = pp.Jagged(np.array([1, 2, 3], dtype), np.array([0, 2, 2, 3], np.int32))
    value = 7 if dtype == np.int32 else -1
    pipe = corun.Pipeline(lambda raw: pp.pad(raw["l"], 3, value), jax.jit(lambda s, b: (s, b)))
    for _, b in pipe.run((), [{"l": lists}] * 2):
        np.testing.assert_array_equal(b, pp.pad(lists, 3, value))
    assert pipe.runtime == runtime
    wrong = corun.Pipeline(lambda raw: pp.pad(raw["l"], 3, 0.5), jax.jit(lambda s, b: (s, b)))
    with pytest.raises(ValueError, match=r"pad: 0\.5 is not a number"):
        list(wrong.run((), [{"l": lists}]))
