"""The capacity probe on a GPU: the user's own kernels beside the user's own step, timed by device events.

One run in front of the step times kernels alone: each class of code (a tile by itself, on few processors and on all),
parts drawn at random, and others that nothing is fitted to (how far the model is off). A run without kernels times the
step's stages. Then everything is run beside each stage in turn, with several shares of the device: what the step loses
to it is what the stage does not leave free. All times are the device's, by events: how busy the host is does not show.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax.cache import Cache, key_of
from recom_jax.corun import runtime as rt
from recom_jax.corun.alone import SHARES, ClassCost, alone, fitted
from recom_jax.corun.cost import Device
from recom_jax.corun.kernels import PrepKernels
from recom_jax.corun.plan import Choice, Stage
from recom_jax.corun.probe import REST, cut, donated_inputs, key_of_step
from recom_jax.corun.stream import Engine, Times
from recom_jax.corun.units import every_row, kernel_us
from recom_jax.options import Options as CompilerOptions
from recom_jax.trace import flatten

BESIDE = (0.5, 0.25, 0.125, 0.0625)
SETTLING_S, MOST_SETTLING = 0.7, 6  # seconds, and runs
SHORT = 0.02  # of a step: stages that are over at once
STEPS = 60  # of a run; the ring of samples drops the last ones
WARM = 10

Run = Callable[[Callable[[PrepKernels], rt.Schedule]], Times]


@dataclasses.dataclass(frozen=True)
class Beside:
    """Everything as one kernel beside a stage: what it took, and what the step lost to it, in microseconds."""

    stage: int
    share: float
    took_us: float
    lost_us: float


@dataclasses.dataclass(frozen=True)
class Probed:
    """What was measured on this device for a program and a step.

    Attributes:
      stages: the step's, with what each leaves free; device: the cost model's constants; classes: and those of code.
      parts: (share, predicted, measured microseconds) of kernels that nothing was fitted to.
      beside: everything beside each stage, with each share.
      alone_us: all of the program in one kernel, with the whole device; step_us: the step; period_us: from one step
        to the next, with nothing beside them.
    """

    stages: tuple[Stage, ...]
    device: Device
    classes: tuple[ClassCost, ...]
    parts: tuple[tuple[float, float, float], ...]
    beside: tuple[Beside, ...]
    alone_us: float
    step_us: float
    period_us: float

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Probed:
        d = json.loads(raw)
        return cls(
            tuple(Stage.from_json(s) for s in d["stages"]),
            Device(**d["device"] | {"filled": tuple(map(tuple, d["device"]["filled"]))}),
            tuple(ClassCost(**c) for c in d["classes"]),
            tuple((float(s), float(p), float(m)) for s, p, m in d["parts"]),
            tuple(Beside(**b) for b in d["beside"]),
            d["alone_us"],
            d["step_us"],
            d["period_us"],
        )

    @property
    def errors(self) -> tuple[float, ...]:
        """Of those predictions, relative to what was measured."""
        return tuple((p - m) / m for _, p, m in self.parts)

    @property
    def within_tenth(self) -> float:
        """The part of held-out kernels that was predicted within 10%."""
        return sum(abs(e) <= 0.1 for e in self.errors) / max(1, len(self.errors))


def made_up_state(like: Any) -> Any:
    """A state of these shapes, made on the device: small floats, small integers, all-true masks."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def floats(key: Any, shape: Any, dtype: Any) -> Any:
        return (0.1 * jax.random.uniform(key, shape)).astype(dtype)

    def leaf(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return floats(jax.random.key(0), tuple(x.shape), np.dtype(x.dtype))
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys
            return jnp.zeros(x.shape, x.dtype)
        return jnp.ones(x.shape, x.dtype)

    return jax.tree.map(leaf, like)


def copied(state: Any) -> Any:
    """A copy of a state on the device, for a step that donates it; None if there are shapes alone, or no arrays any
    more."""
    for x in jax.tree.leaves(state):
        if isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and x.is_deleted()):
            return None
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else jnp.array(x), state)


def run_steps(engine: Engine, columns: Any, state: Any, steps: int = STEPS) -> Times:
    """Trains on one raw batch over and over (the host packs it once)."""
    program, leaves = engine.program(columns)
    native = program.runtime.native
    slots = [program.runtime.pack(leaves) for _ in range(engine.slots)]
    ahead: collections.deque[int] = collections.deque(slots)
    flying: collections.deque[Any] = collections.deque()
    for k in range(steps + engine.slots):
        state, metrics = engine.steps(state, program.runtime, ahead.popleft())
        flying.append(metrics)
        if len(flying) > 2:
            jax.block_until_ready(flying.popleft())
        if k < steps:
            slot = native.acquire()  # its memory holds the batch already
            native.commit(slot)
            ahead.append(slot)
    jax.block_until_ready((state, list(flying)))
    return engine.times()


def median(values: Sequence[float]) -> float:
    """Microseconds of the milliseconds that were seen, without the first ones; NaN if there are none."""
    late = values[WARM:] or values
    return 1e3 * statistics.median(late) if late else math.nan


def mean(values: Sequence[float]) -> float:
    """The same, a mean without the lowest and highest twentieth.

    Steps beside kernels take one of two times, as processors are given to one or the other first: the median is one.
    """
    late = sorted(values[WARM:] or values)
    cut = len(late) // 20
    return 1e3 * statistics.fmean(late[cut : len(late) - cut]) if late else math.nan


def _in_stage(
    kernels: PrepKernels, stage: int, share: float, names: tuple[str, ...]
) -> rt.Schedule:
    """Everything in one kernel, beside one stage."""
    launches = rt.whole(kernels, rt.PLAN, share).launches
    launches = tuple(dataclasses.replace(x, stage=stage) for x in launches)
    return rt.Schedule(rt.PLAN, launches, names, timed=True)


def left_free(stage: Stage, k: int, found: Sequence[Beside], whole_us: float) -> Stage:
    """A stage with what it leaves free, for each share; by itself it is used as costs the step least."""
    mine = sorted((b for b in found if b.stage == k), key=lambda b: (b.lost_us, b.took_us))
    if not mine or whole_us <= 0:
        return stage
    made = [
        Choice(b.share, min(1.0, whole_us / b.took_us), max(0.0, b.lost_us / whole_us))
        for b in mine
    ]
    best = made[0] if made[0].cost < 1 else dataclasses.replace(made[0], free=0.0)
    return dataclasses.replace(stage.taking(best), choices=tuple(made))


def stages_of(bare: Times, names: Sequence[str]) -> list[Stage]:
    """How long the step's stages take, with nothing known of what they leave free."""
    ends = [median(values) for _, values in bare.stages]
    step_us = max([median(bare.steps), *(e for e in ends if not math.isnan(e))])
    stages, before = [], 0.0
    for name, end in zip((*names, REST), (*ends, step_us), strict=True):
        end = before if math.isnan(end) else max(before, end)
        stages.append(Stage(name, end - before, 0.0, 0.0))
        before = end
    return stages


def beside_stages(run: Run, names: Sequence[str]) -> tuple[Times, tuple[Beside, ...]]:
    """A run with nothing beside the step, and what everything beside each stage, with each share, costs it.

    A device may be faster at first: by 3%, for half a second on an H200. So some runs are not looked at, and the others
    are held against the runs with nothing beside the step in front of and behind each stage's. A stage that is over at
    once is left out: what starts with it runs beside the next one.
    """

    def bare() -> Times:
        return run(
            lambda k: dataclasses.replace(rt.whole(k, rt.ONCE), stages=tuple(names), timed=True)
        )

    begun, runs = time.perf_counter(), 0
    while runs < 2 or (runs < MOST_SETTLING and time.perf_counter() - begun < SETTLING_S):
        bare()
        runs += 1
    around, found = [bare()], []
    stages = stages_of(around[0], names)
    short_us = SHORT * sum(s.duration_us for s in stages)
    for k in range(len(names) + 1):
        if k and stages[k].duration_us < short_us:
            continue
        seen = []
        for share in BESIDE:
            schedule = functools.partial(_in_stage, stage=k, share=share, names=tuple(names))
            seen.append((share, run(schedule)))
        around.append(bare())
        period_us = statistics.fmean(mean(t.periods) for t in around[-2:])
        for share, t in seen:
            took_us = mean(t.kernels[0][1])
            if took_us > 0:
                found.append(Beside(k, share, took_us, mean(t.periods) - period_us))
    return around[-1], tuple(found)


def probe(
    run: Run,
    names: Sequence[str],
    processors: int,
    cache: Cache | None = None,
    key: str = "",
) -> Probed:
    """Measures a program's kernels and a step.

    Args:
      run: trains some steps with a schedule, timed by events.
      names: the step's markers, in order; processors: the device's.
      cache, key: where it is kept.
    """
    kept = None if cache is None else cache.get("probe", key)
    if kept is not None:
        try:
            return Probed.from_json(kept)
        except (ValueError, TypeError, KeyError):  # of another version
            pass
    drawn: list[Any] = []

    def first(kernels: PrepKernels) -> rt.Schedule:
        schedule, fits, parts = alone(kernels)
        drawn.append((kernels, fits, parts))
        return schedule

    times = run(first)
    kernels, fits, parts = drawn[0]
    took = {name: median(values) for name, values in times.kernels}
    device, classes = fitted(kernels, took, processors, fits)
    costs = {c.cls: c for c in classes}
    held_out = tuple(
        (share, kernel_us(kernels, costs, device, every_row(units), share), took[f"part {k}"])
        for k, (units, share) in enumerate(parts)
    )
    whole_us = took[f"share {SHARES[0]}"]
    bare, found = beside_stages(run, names)
    stages = stages_of(bare, names)
    made = Probed(
        tuple(left_free(s, k, found, whole_us) for k, s in enumerate(stages)),
        device,
        classes,
        held_out,
        found,
        whole_us,
        sum(s.duration_us for s in stages),
        mean(bare.periods),
    )
    if cache is not None:
        cache.put("probe", key, made.to_json())
    return made


class Prober:
    """Measures a user's step beside a program's kernels.

    Args:
      step: the user's; state: shapes and dtypes of its state.
      columns: a raw batch, as columns; engine_of: makes an engine that times kernels, with a schedule.
      processors: the device's.

    Attributes:
      values: the state that each run begins with a copy of; without it, it is made up.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], Any],
        state: Any,
        kernels: PrepKernels,
        columns: Any,
        engine_of: Callable[[Callable[[PrepKernels], rt.Schedule]], Engine],
        processors: int,
        values: Any = None,
    ) -> None:
        inner = getattr(step, "__wrapped__", step)
        batch = rt.batch_like(kernels)
        closed = flatten(jax.make_jaxpr(inner)(state, batch), keep_fused=True)
        self.names = [part.name for part in cut(closed) if part.name != REST]
        donated = donated_inputs(step, state, batch)
        own = key_of("probe 10", kernels.source, kernels.words)
        self.key = key_of_step(closed, donated, 0) + own
        self.cache = Cache.of(CompilerOptions())
        self.values, self._like = values, state
        self.columns, self._engine_of = columns, engine_of
        self._processors = processors

    def run(self, schedule: Callable[[PrepKernels], rt.Schedule]) -> Times:
        """Trains some steps with a schedule, from the same state each time: numbers that grow change times, too."""
        state = None if self.values is None else copied(self.values)
        if state is None:
            state = made_up_state(self._like)
        engine = self._engine_of(schedule)
        try:
            return run_steps(engine, self.columns, state)
        finally:
            engine.close()

    def probed(self) -> Probed:
        """What the device leaves free beside the step, from the cache or measured now."""
        return probe(self.run, self.names, self._processors, self.cache, self.key)
