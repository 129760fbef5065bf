"""Honest baselines: the same work in four orders, interleaved, and the losses compared."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat
from recom_jax.corun import measure_stream
from recom_jax.corun.pipeline import Pipeline
from recom_jax.corun.report import CORUN, IDEAL, SEQUENTIAL, SIDE, STREAM_MODES, Report
from recom_jax.errors import PipelineError


def measure(
    pipe: Pipeline,
    make_state: Callable[[], Any],
    raw_batches: Sequence[Any],
    *,
    rounds: int = 3,
    modes: Sequence[str] | None = None,
    rtol: float = 0.0,
) -> Report:
    """Times a pipeline's steps in each mode, in turns, and keeps the figures for its `report`.

    "no preprocessing": inputs prepared beforehand. "sequential": prepared by the thread that trains, between steps.
    "side stream": prepared by another thread, begun with the step before, and nothing planned. "co-run": the pipeline.

    On a GPU these are orders of the same kernels ("sequential": in front of the step, on its stream; "side stream":
    as soon as a raw batch is there, and nothing planned), and there are more: "sequential, unfused" has a kernel for
    each part of a result, "co-run without schedule" and "without fusion" show what those give.

    Args:
      make_state: makes the first state, afresh (a step may donate it).
      raw_batches: a list of raw batches; each mode trains on all of them in each round.
      rounds: how many times each mode runs, after one that is not counted.
      modes: which; default: all that there are.
      rtol: how far metrics may be apart, relative to the largest of a leaf: 0, unless the step itself gives other bits
        each time it runs, as sums by atomics do.

    Returns:
      `pipe.report()`.

    Raises:
      PipelineError: the metrics of two modes differ in a bit, or there are fewer than two batches.
    """
    if len(raw_batches) < 2:
        raise PipelineError("measure: at least two batches are needed")
    made = {id(raw): pipe.prepare(raw) for raw in {id(raw): raw for raw in raw_batches}.values()}
    prepared = [made[id(raw)] for raw in raw_batches]
    runs: dict[str, Callable[[], tuple[float, Any]]] = {
        IDEAL: lambda: _ideal(pipe, make_state(), prepared),
        SEQUENTIAL: lambda: _sequential(pipe, make_state(), raw_batches),
        SIDE: lambda: _side(pipe, make_state(), raw_batches),
        CORUN: lambda: _corun(pipe, make_state(), raw_batches),
    }
    if pipe.streams(raw_batches[0]):
        runs = _streamed(pipe, make_state, raw_batches, prepared)
    modes = tuple(runs) if modes is None else modes
    first: Any = None
    times: dict[str, list[float]] = {m: [] for m in modes}
    for k in range(rounds + 1):
        for mode in modes:
            seconds, metrics = runs[mode]()
            first = metrics if first is None else first
            if not _same(first, metrics, rtol):
                raise PipelineError(
                    f"measure: the metrics of {mode!r} differ from those of {modes[0]!r}; rtol allows for steps that "
                    "give other bits each time"
                )
            if k:
                times[mode].append(seconds)
    pipe.keep_baselines(times)
    return pipe.report()


def _streamed(
    pipe: Pipeline,
    make_state: Callable[[], Any],
    raws: Sequence[Any],
    prepared: Sequence[Any],
) -> dict[str, Callable[[], tuple[float, Any]]]:
    ahead = pipe.options.steps_in_flight
    kinds = measure_stream.schedules(pipe.schedule_of, pipe.options.max_share)
    engines = {m: pipe.make_engine(pipe.options.slots, kinds[m], False) for m in kinds}

    def of(run: measure_stream.Run) -> tuple[float, Any]:
        return run.step_s, run.metrics

    def mode(name: str) -> Callable[[], tuple[float, Any]]:
        if name == IDEAL:
            return lambda: of(measure_stream.ideal(pipe.train_step, make_state(), prepared, ahead))
        engine = engines[name]
        return lambda: of(measure_stream.on(engine, pipe.ingest, make_state(), raws, ahead))

    return {name: mode(name) for name in STREAM_MODES}


def _same(a: Any, b: Any, rtol: float) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(_close(np.asarray(x), np.asarray(y), rtol) for x, y in pairs)


def _close(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], rtol: float) -> bool:
    if np.array_equal(x, y, equal_nan=True):
        return True
    if not rtol or not np.isfinite(x).all() or not np.isfinite(y).all():
        return False
    return bool(np.abs(x - y).max() <= rtol * np.abs(x).max())


def _timed(begun: float, state: Any, metrics: list[Any]) -> tuple[float, Any]:
    jax.block_until_ready((state, metrics))
    return (time.perf_counter() - begun) / len(metrics), metrics


def _ideal(pipe: Pipeline, state: Any, prepared: Sequence[Any]) -> tuple[float, Any]:
    jax.block_until_ready(state)
    begun, metrics = time.perf_counter(), []
    for batch in prepared:
        state, m = pipe.train_step(state, batch)
        metrics.append(jax.block_until_ready(m))
    return _timed(begun, state, metrics)


def _sequential(pipe: Pipeline, state: Any, raws: Sequence[Any]) -> tuple[float, Any]:
    jax.block_until_ready(state)
    begun, metrics = time.perf_counter(), []
    for raw in raws:
        state, m = pipe.train_step(state, pipe.prepare(raw))
        metrics.append(jax.block_until_ready(m))
    return _timed(begun, state, metrics)


def _side(pipe: Pipeline, state: Any, raws: Sequence[Any]) -> tuple[float, Any]:
    jax.block_until_ready(state)
    begun, metrics = time.perf_counter(), []
    settings = compat.thread_settings()
    with concurrent.futures.ThreadPoolExecutor(1, initializer=settings) as pool:
        coming = pool.submit(pipe.prepare, raws[0])
        for k in range(len(raws)):
            batch = coming.result()
            if k + 1 < len(raws):
                coming = pool.submit(pipe.prepare, raws[k + 1])
            state, m = pipe.train_step(state, batch)
            metrics.append(jax.block_until_ready(m))
    return _timed(begun, state, metrics)


def _corun(pipe: Pipeline, state: Any, raws: Sequence[Any]) -> tuple[float, Any]:
    jax.block_until_ready(state)
    begun, metrics = time.perf_counter(), []
    for made, m in pipe.run(state, list(raws)):
        state = made
        metrics.append(m)
    return _timed(begun, state, metrics)
