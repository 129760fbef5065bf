"""Options(tune=True) without a GPU: the search with a made-up timer, what is kept, and where it is used."""

from __future__ import annotations

import dataclasses
import functools
import struct
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import _recom, lowering, pipeline
from recom_jax.cache import Cache
from recom_jax.cuda import codegen, kernel, nvrtc, tune
from recom_jax.cuda.text import Schedule
from recom_jax.errors import CudaError
from tests import cuda_emulation
from tests.helpers import cpu_only, ids, table

DEFAULT = codegen.DEFAULT

# ---- the search ------------------------------------------------------------------------------------------------


def fake(times: dict[str, float], base: float = 10.0) -> tuple[tune.Timer, list[Schedule]]:
    """A timer: `base` ms, changed by what a schedule's "field=value" adds; and what it was asked for."""
    asked: list[Schedule] = []

    def timer(s: Schedule) -> float | None:
        asked.append(s)
        added = [
            times[k]
            for f in dataclasses.fields(s)
            if (k := f"{f.name}={getattr(s, f.name)}") in times
        ]
        return None if any(x != x for x in added) else base + sum(added)

    return timer, asked


def test_the_best_of_every_axis() -> None:
    timer, asked = fake(
        {"flight=8": -1, "blocks=5": -2, "blocks=4": -1, "run=256": 3, "tiles=8": -0.5}
    )
    found = tune.search(tune.AXES, timer)
    assert found.schedule == Schedule(flight=8, blocks=5, tiles=8)
    assert (found.before, found.after) == (10.0, 6.5)
    assert asked[0] == DEFAULT
    assert found.tried == 1 + sum(len(v) for _, v in tune.AXES)


def test_the_untuned_wins_ties() -> None:
    timer, _ = fake({})
    assert tune.search(tune.AXES, timer) == tune.Found(
        DEFAULT, 10.0, 10.0, 1 + sum(len(v) for _, v in tune.AXES)
    )


def test_less_than_the_margin_is_noise() -> None:
    timer, _ = fake({"flight=2": -0.1})
    assert tune.search(tune.AXES, timer).schedule == DEFAULT
    timer, _ = fake({"flight=2": -0.3})
    assert tune.search(tune.AXES, timer).schedule == Schedule(flight=2)


def test_a_lucky_first_time_loses_the_duel() -> None:
    seen: set[Schedule] = set()

    def timer(s: Schedule) -> float:
        first = s not in seen
        seen.add(s)
        return 5.0 if s.flight == 8 and first else 10.0

    found = tune.search(tune.AXES[:1], timer)
    assert found == tune.Found(DEFAULT, 10.0, 10.0, 3)


def test_what_cannot_run_is_left_out() -> None:
    nan = float("nan")
    timer, _ = fake({"flight=2": nan, "blocks=6": nan, "blocks=3": -4})
    assert tune.search(tune.AXES, timer).schedule == Schedule(blocks=3)
    with pytest.raises(RuntimeError, match="untuned"):
        tune.search(tune.AXES, lambda _: None)


# ---- candidates ------------------------------------------------------------------------------------------------


def rows(items: Any, x: Any) -> Any:
    return items[x % 50]


def summed(items: Any, x: Any) -> Any:
    return items[x % 50].sum(1)


def jagged(how: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    def fn(items: Any, x: Any, segments: Any) -> Any:
        return how(items[x % 50], segments, num_segments=9, indices_are_sorted=True)

    return fn


def splits(n: int, bags: int = 9) -> Any:
    return jnp.sort(jnp.asarray(np.random.default_rng(n).integers(0, bags, n).astype(np.int32)))


JAGGED = (table(50, 8), ids((60,), 50), splits(60))


def program_of(fn: Any, *args: Any) -> Any:
    made = cuda_emulation.compiled(fn, *args)
    (program,) = made.programs
    return program


@pytest.mark.parametrize(
    ("fn", "args", "names"),
    [
        (rows, (table(50, 8), ids((6,), 50)), "blocks run tiles"),
        (summed, (table(50, 8), ids((6, 3), 50)), "flight blocks run tiles"),
        (jagged(jax.ops.segment_sum), JAGGED, "flight blocks run tiles"),
        (jagged(jax.ops.segment_max), JAGGED, "flight blocks slices run tiles"),
    ],
    ids=["rows", "bags", "sum", "max"],
)
def test_only_what_keeps_every_bit_is_tried(fn: Any, args: Any, names: str) -> None:
    axes = tune.axes_of(program_of(fn, *args))
    assert [name for name, _ in axes] == names.split()


SCHEDULES = [
    Schedule(flight=8),
    Schedule(flight=2, blocks=0, run=512, tiles=8),
    Schedule(run=64, tiles=32),
]


@pytest.mark.once
@pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing()))
@pytest.mark.parametrize("how", ["sum", "max"])
def test_schedules_change_no_bit(how: str) -> None:
    """One program of jagged bags, dense bags and adjacent narrow columns, by each kind of schedule."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 40, 9)
    values = ids((int(lengths.sum()),), 50, seed=1)
    segments = jnp.asarray(np.repeat(np.arange(9), lengths).astype(np.int32))
    combine = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max}[how]

    def fn(a: Any) -> Any:
        items, narrow, x, m, x1, x2 = a
        return {
            "jagged": combine(items[x % 50], segments, num_segments=9, indices_are_sorted=True),
            "side": jnp.concatenate([narrow[x1 % 30], narrow[x2 % 30], items[m % 50].sum(1)], 1),
        }

    args = (
        table(50, 24), table(30, 4, seed=2), values,
        ids((70, 13), 50, seed=3), ids((70,), 30, seed=4), ids((70,), 30, seed=5),
    )  # fmt: skip
    made = cuda_emulation.compiled(fn, args)
    run = functools.partial(cuda_emulation.emulate)
    want = made.run(functools.partial(run, options=cuda_emulation.Options(sms=8)))
    schedules = [
        *SCHEDULES,
        *([Schedule(slices=1000), Schedule(slices=4000)] if how == "max" else []),
    ]
    for schedule in schedules:
        got = made.run(
            functools.partial(run, options=cuda_emulation.Options(sms=8, schedule=schedule))
        )
        for k, x in want.items():
            np.testing.assert_array_equal(
                np.asarray(got[k]).view(np.uint32), np.asarray(x).view(np.uint32)
            )


def test_the_plan_does_as_the_schedule_says() -> None:
    program = program_of(summed, table(50, 8), ids((16384, 30), 50))
    tiles = {}
    for schedule in (DEFAULT, Schedule(tiles=32), Schedule(tiles=2)):
        tiles[schedule.tiles] = len(plan(program, codegen.generate(program, schedule).launch))
    assert tiles[2] < tiles[0] < tiles[32]


def plan(program: Any, launch: bytes) -> bytes:
    types = _recom.constants()["dtype"]
    layout = np.array([0, -1, 0, 1, -1, 0], np.int64)
    shapes = {"float32": [50, 8], "int32": [16384, 30]}
    made = _recom.cuda_plan(
        recom_jax.cpu.encode(program).words,
        launch,
        layout,
        [(types[d], shapes[d]) for d, _ in program.operands],
        [(types["float32"], [16384, 8])],
        4,
        32,
    )
    (one,) = made["launches"]
    return bytes(one["tiles"])


def test_launch_words_of_a_schedule() -> None:
    program = program_of(summed, table(50, 8), ids((16384, 30), 50))
    untuned = codegen.generate(program).launch
    assert codegen.generate(program, Schedule(flight=2)).launch == untuned  # the text alone
    tuned = codegen.generate(program, Schedule(slices=2000, run=256, tiles=8)).launch
    words = struct.unpack(f"<{len(tuned) // 8}q", tuned)
    assert words[1] == 2
    assert words[4:7] == (2000, 256, 8)
    for at, value in ((4, -1), (5, 1 << 20), (6, 1 << 40), (1, 3)):
        bad = [*words]
        bad[at] = value
        with pytest.raises(ValueError, match="recom"):
            plan(program, struct.pack(f"<{len(bad)}q", *bad))
    with pytest.raises(ValueError, match="recom"):
        plan(program, tuned[: 5 * 8])


# ---- calls -----------------------------------------------------------------------------------------------------


def model(params: Any, batch: Any) -> Any:
    items, ages = params
    dense = jnp.where((batch["m"] >= 0)[..., None], items[batch["m"] % 50], 0).sum(1)
    return jnp.concatenate([ages[batch["x"] % 6], dense], axis=1)


PARAMS = (table(50, 8), table(6, 4))


def make_batch(n: int = 6) -> dict[str, Any]:
    return {"x": np.asarray(ids((n,), 6)), "m": np.asarray(ids((n, 3), 50))}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("RECOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(lowering, "_WARNED", set())
    monkeypatch.setattr(tune, "_FOUND", {})


def options() -> recom_jax.Options:
    return recom_jax.Options(tune=True, verify=True)


@cpu_only("schedules are tried")
def test_on_a_cpu_it_says_that_it_changes_nothing() -> None:
    fn = recom_jax.optimize(model, options=options())
    batch = make_batch()
    with pytest.warns(
        RuntimeWarning, match=r"tune=True.* NVIDIA GPUs.* run on cpu.* changes nothing"
    ):
        out = fn(PARAMS, batch)
    np.testing.assert_array_equal(out, jax.jit(model)(PARAMS, batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn(PARAMS, make_batch(7))  # once
        jax.jit(fn)(PARAMS, make_batch(8))
        fn.explain(PARAMS, make_batch(9))
    serve = recom_jax.optimize(model, options=options()).bind(PARAMS)
    np.testing.assert_array_equal(serve(batch), out)


class Gpu:
    """A CPU that passes for a GPU in `tune`: its timer likes flights of 8."""

    def __init__(self) -> None:
        self.timed: list[tuple[Any, ...]] = []

    def make_timer(self, program: Any, encoded: Any, operands: Any, *_: Any) -> tune.Timer:
        self.timed.append(tuple(np.asarray(x) for x in operands))
        return lambda s: 4.0 if s.flight == 8 else 5.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    try:
        nvrtc.version()
    except CudaError as why:
        pytest.skip(str(why))
    made = Gpu()
    monkeypatch.setattr(kernel, "_MADE", type(kernel._MADE)())
    monkeypatch.setattr(tune, "is_cuda", lambda _: True)
    monkeypatch.setattr(tune, "make_timer", made.make_timer)
    return made


def lowered(fn: Any, *args: Any, monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """The schedules of kernels that lowering a call for CUDA asks for."""
    asked: list[Schedule] = []
    real = kernel.kernel_for

    def spy(*a: Any, schedule: Schedule = DEFAULT, **kw: Any) -> Any:
        asked.append(schedule)
        return real(*a, schedule=schedule, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "kernel_for", spy)
        jax.jit(lambda *a: fn(*a)).trace(*args).lower(lowering_platforms=("cuda",))
    return asked


def test_the_first_call_with_values_measures(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = recom_jax.optimize(model, options=options())
    batch = make_batch()
    want = np.asarray(jax.jit(model)(PARAMS, batch))
    assert lowered(fn, PARAMS, batch, monkeypatch=monkeypatch) == [DEFAULT, DEFAULT]
    assert gpu.timed == []  # traced: nothing to measure on
    before = pipeline.counters().get("schedules_tuned", 0)
    for _ in range(3):
        np.testing.assert_array_equal(fn(PARAMS, batch), want)
    assert len(gpu.timed) == 1
    assert pipeline.counters()["schedules_tuned"] == before + 1
    given = [x.shape for x in gpu.timed[0]]
    assert sorted(given) == sorted([(50, 8), (6, 4), (6,), (6, 3)])
    assert any(np.array_equal(x, batch["m"]) for x in gpu.timed[0])  # the batch itself
    tuned = [DEFAULT, Schedule(flight=8)]
    assert lowered(fn, PARAMS, batch, monkeypatch=monkeypatch) == tuned
    # Another process: the disk knows; other shapes: nobody does.
    monkeypatch.setattr(tune, "_FOUND", {})
    assert lowered(fn, PARAMS, batch, monkeypatch=monkeypatch) == tuned
    assert lowered(fn, PARAMS, make_batch(7), monkeypatch=monkeypatch) == [DEFAULT, DEFAULT]
    # Without the option it plays no part.
    plain = recom_jax.optimize(model, options=recom_jax.Options(verify=True))
    assert lowered(plain, PARAMS, batch, monkeypatch=monkeypatch) == [DEFAULT]


def test_a_server_measures_real_batches_alone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = recom_jax.optimize(model, options=options()).bind(PARAMS)
    serve.warmup(5, make_batch(5))
    serve.cost(make_batch(4))
    assert gpu.timed == []
    batch = make_batch(6)
    np.testing.assert_array_equal(serve(batch), jax.jit(model)(PARAMS, batch))
    assert len(gpu.timed) == 1
    # What was found for separate arrays holds for packs of them, and the other way round.
    recom_jax.optimize(model, options=options())(PARAMS, batch)
    assert len(gpu.timed) == 1
    views = serve.input_views(make_batch(8))
    for name, view in views.items():
        view[...] = make_batch(8)[name]
    np.testing.assert_array_equal(serve(views), jax.jit(model)(PARAMS, make_batch(8)))
    assert len(gpu.timed) == 2


def test_a_failure_costs_the_tuning_alone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise CudaError("no device any more")

    monkeypatch.setattr(tune, "make_timer", broken)
    fn = recom_jax.optimize(model, options=options())
    with pytest.warns(RuntimeWarning, match="measured nothing.*no device any more"):
        out = fn(PARAMS, make_batch())
    np.testing.assert_array_equal(out, jax.jit(model)(PARAMS, make_batch()))


@pytest.mark.once
@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[1]", b'{"flight": 8}', b'{"flight":3,"blocks":4,"slices":0,"run":0,"tiles":0}'],
)
def test_what_the_disk_says_is_not_trusted(data: bytes) -> None:
    cache = Cache.of(options())
    assert cache.put("schedule", "a" * 64, data)
    assert tune.recall("a" * 64, options()) is None


@pytest.mark.once
def test_kept_and_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tune.Found(Schedule(flight=2, blocks=5, run=256), 2.0, 1.5, 9)
    tune.remember("b" * 64, found, options())
    monkeypatch.setattr(tune, "_FOUND", {})
    assert tune.recall("b" * 64, options()) == found.schedule
    off = recom_jax.Options(tune=True, cache_dir="off")
    monkeypatch.setattr(tune, "_FOUND", {})
    assert tune.recall("b" * 64, off) is None
