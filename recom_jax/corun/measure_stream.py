"""`measure` on a GPU: the same kernels, the same step and the same packing, in different orders.

The first steps of a run fill the ring; they are trained and not timed.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from recom_jax.corun import runtime as rt
from recom_jax.corun.device import Prepared
from recom_jax.corun.kernels import PrepKernels
from recom_jax.corun.report import (
    CORUN,
    SEQUENTIAL,
    SIDE,
    UNFUSED,
    UNPLANNED,
    UNPLANNED_UNFUSED,
)
from recom_jax.corun.ring import Ring
from recom_jax.corun.source import Source
from recom_jax.corun.stream import Engine, Streams

SKIPPED = 0.2  # of the steps, at the beginning

Schedules = dict[str, Callable[[PrepKernels], rt.Schedule]]


def split(schedule: rt.Schedule) -> rt.Schedule:
    """The schedule without fusion: a kernel for each part of a result, where the plan has its kernel."""
    launches = tuple(
        dataclasses.replace(x, name=f"{x.name}.{k}", pieces=(piece,))
        for x in schedule.launches
        for k, piece in enumerate(x.pieces)
    )
    return dataclasses.replace(schedule, launches=launches)


def schedules(planned: Callable[[PrepKernels], rt.Schedule], share: float) -> Schedules:
    """What the modes run: mode -> kernels -> schedule.

    Args:
      planned: the plan's; share: of the device, for what has no plan.
    """
    return {
        UNFUSED: lambda k: rt.unfused(k, rt.SEQUENTIAL),
        SEQUENTIAL: lambda k: rt.whole(k, rt.SEQUENTIAL),
        SIDE: lambda k: rt.whole(k, rt.EAGER),
        CORUN: planned,
        UNPLANNED: lambda k: rt.whole(k, rt.PLAN, share),
        UNPLANNED_UNFUSED: lambda k: split(planned(k)),
    }


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: seconds of a step, what the host waited for a batch in it, and the metrics of all steps."""

    step_s: float
    wait_s: float
    metrics: list[Any]


def ideal(step: Callable[[Any, Any], Any], state: Any, batches: Sequence[Any], ahead: int) -> Run:
    """Steps on prepared batches that are on the device."""
    return _timed(len(batches), ahead, state, lambda s, k: (step(s, batches[k]), 0.0))


def on(
    engine: Engine, ingest: Callable[[Any], Any], state: Any, raws: Sequence[Any], ahead: int
) -> Run:
    """Steps on raw batches, through a ring, on an engine."""
    device = Streams(engine, ingest, _unused, _unused, True)
    with Ring(Source(raws, 0, "keep"), device, engine.slots, 5.0, False) as ring:

        def step(s: Any, k: int) -> tuple[Any, float]:
            asked = time.perf_counter()
            taken = ring.take()
            assert taken is not None
            prepared: Prepared = taken[1]
            waited = time.perf_counter() - asked
            made = device.step(s, prepared.batch)
            ring.done()
            ring.trained()
            return made, waited

        return _timed(len(raws), ahead, state, step)


def _unused(*_: Any) -> Any:
    raise AssertionError("kernels were there a moment ago")


def _timed(n: int, ahead: int, state: Any, step: Callable[[Any, int], tuple[Any, float]]) -> Run:
    """Runs n steps, at most `ahead` of them unfinished.

    Timed from when one step was seen to have ended to when another was, with as many behind it: a first step after a
    pause would be timed with its dispatch, which a step that follows another hides. Runs of few steps are timed whole.
    """
    jax.block_until_ready(state)
    metrics: list[Any] = []
    flying: collections.deque[Any] = collections.deque()
    waits: list[float] = []
    seen: list[float] = []  # when each step was
    begun = time.perf_counter()
    for k in range(n):
        (state, m), waited = step(state, k)
        waits.append(waited)
        metrics.append(m)
        flying.append(m)
        if len(flying) >= ahead:
            jax.block_until_ready(flying.popleft())
            seen.append(time.perf_counter())
    jax.block_until_ready((state, metrics))
    whole_s = time.perf_counter() - begun
    skipped = max(1, round(SKIPPED * n))
    count = len(seen) - skipped
    if count < 1:
        return Run(whole_s / n, sum(waits) / n, metrics)
    return Run(
        (seen[-1] - seen[skipped - 1]) / count, sum(waits[skipped:]) / (n - skipped), metrics
    )
