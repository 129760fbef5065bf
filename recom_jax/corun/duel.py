"""Plans held against one another on the device, as they will be run: the one with the fastest steps wins.

A plan is made of what stages and kernels cost one by one. What it is worth as a whole only a run of it shows: a marker
within the step costs something as well, and of many measured costs the smallest is likely to be too small.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence

from recom_jax.cache import Cache, key_of
from recom_jax.corun import runtime as rt
from recom_jax.corun.fuse import whole
from recom_jax.corun.kernels import PrepKernels
from recom_jax.corun.options import Options
from recom_jax.corun.plan import AFTER, Kernel, Plan
from recom_jax.corun.probe_stream import Beside, Probed, Run, mean
from recom_jax.corun.units import schedule_of

ROUNDS = 3


def rivals(plan: Plan, probed: Probed, options: Options) -> list[Plan]:
    """The plan, and everything as one kernel: at the step's beginning, where it was cheapest, and behind."""
    allowed = [
        b
        for b in sorted(probed.beside, key=lambda b: (b.lost_us, b.took_us))
        if options.min_share <= b.share <= options.max_share
    ]
    singles = [b for b in allowed if b.stage == 0][:2] + [b for b in allowed if b.stage > 0][:1]
    behind = Beside(len(plan.stages), 1.0, probed.alone_us, probed.alone_us)
    made = [plan]
    for b in (*singles, behind):
        one = single(plan, b)
        if all(_runs(one) != _runs(p) for p in made):
            made.append(one)
    return made


def _runs(plan: Plan) -> list[tuple[object, ...]]:
    return [(k.stage, k.share, k.pieces) for k in plan.kernels]


def single(plan: Plan, b: Beside) -> Plan:
    """The plan with everything as one kernel."""
    stage = AFTER if b.stage == len(plan.stages) else plan.stages[b.stage].name
    pieces = tuple((s.name, 0.0, 1.0) for s in plan.segments)
    work = whole(plan.segments)
    kernel = Kernel("k0.0", 0, stage, 0, b.share, pieces, work, 0.0, b.took_us)
    return dataclasses.replace(plan, kernels=(kernel,) if pieces else ())


def duel(
    plans: Sequence[Plan],
    kernels: PrepKernels,
    alone_us: float,
    run: Run,
    cache: Cache | None = None,
    key: str = "",
) -> Plan:
    """The plan with which steps follow one another fastest, its times those that were measured.

    Args:
      alone_us: of everything as one kernel; run: trains some steps with a schedule, timed by events.
      cache, key: where the result is kept.
    """
    found = [schedule_of(p, kernels) for p in plans]
    schedules = [s for s in found if s is not None]
    key = key_of("duel 3", key, repr(schedules))
    kept = None if cache is None else cache.get("probe", key)
    try:
        bare_us, periods = json.loads(kept) if kept is not None else (0.0, [])
    except ValueError:
        periods = []
    if len(periods) != len(schedules):
        bare_us, periods = measured(schedules, run)
        if cache is not None:
            cache.put("probe", key, json.dumps([bare_us, periods]).encode())
    won = min(range(len(plans)), key=lambda k: periods[k])
    return dataclasses.replace(
        plans[won],
        ideal_us=bare_us,
        sequential_us=bare_us + alone_us,
        predicted_us=max(bare_us, periods[won]),
    )


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs, one after the other: microseconds from one step's beginning to the next one's.

    Attributes:
      bare_us: with nothing beside the step; period_us: with a schedule.
    """

    bare_us: float
    period_us: float


def pairs(schedule: rt.Schedule, run: Run, rounds: int) -> list[Pair]:
    """What steps take with nothing beside them and with a schedule, in turns that change places."""
    made = []
    for k in range(rounds):
        seen: dict[str, float] = {}
        for name in ("bare", "planned") if k % 2 else ("planned", "bare"):
            seen[name] = mean(run(_bare if name == "bare" else lambda _: schedule).periods)
        made.append(Pair(seen["bare"], seen["planned"]))
    return made


def loss(found: Sequence[Pair]) -> float:
    """What kernels cost the step, in parts of it: the median over rounds."""
    return statistics.median(p.period_us / p.bare_us for p in found) - 1


def _bare(kernels: PrepKernels) -> rt.Schedule:
    return rt.whole(kernels, rt.ONCE)


def measured(schedules: Sequence[rt.Schedule], run: Run) -> tuple[float, list[float]]:
    """Microseconds from step to step with nothing beside it, and with each schedule: medians of interleaved runs."""
    seen: list[list[float]] = [[] for _ in schedules]
    bare: list[float] = []
    for _ in range(ROUNDS):
        bare.append(mean(run(_bare).periods))
        for times, schedule in zip(seen, schedules, strict=True):
            times.append(mean(run(lambda _, schedule=schedule: schedule).periods))  # type: ignore[misc]
    return statistics.median(bare), [statistics.median(times) for times in seen]
