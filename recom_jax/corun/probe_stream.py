"""The capacity probe on a GPU: the user's own kernels beside the user's own step, timed by device events.

One run in front of the step times kernels alone: each class of code (what an element costs), everything with each
share of the device (what a share is worth), and parts drawn at random that nothing is fitted to (how far the model is
off). It times the step's stages as well. Then everything is run beside each stage in turn: what that takes longer
than alone, and what the step loses, is what the stage does not leave free.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax.cache import Cache, key_of
from recom_jax.corun import runtime as rt
from recom_jax.corun.kernels import PrepKernels
from recom_jax.corun.plan import Device, Stage
from recom_jax.corun.probe import REST, cut, donated_inputs, key_of_step
from recom_jax.corun.stream import Engine, Times
from recom_jax.options import Options as CompilerOptions
from recom_jax.trace import flatten

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
BESIDE = (0.25, 0.0625)
PARTS = 12
STEPS = 40  # of a run; the ring of samples drops the last ones
WARM = 6


@dataclasses.dataclass(frozen=True)
class Probed:
    """What was measured on this device for a program and a step.

    Attributes:
      stages: the step's, with what each leaves free; device: the cost model's constants.
      rates: (class of code, microseconds of an element of it on the whole device).
      parts: (share, predicted, measured microseconds) of kernels that nothing was fitted to.
      alone_us: all of the program in one kernel, with the whole device; step_us: the step.
    """

    stages: tuple[Stage, ...]
    device: Device
    rates: tuple[tuple[int, float], ...]
    parts: tuple[tuple[float, float, float], ...]
    alone_us: float
    step_us: float

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Probed:
        d = json.loads(raw)
        return cls(
            tuple(Stage(**s) for s in d["stages"]),
            Device(**d["device"]),
            tuple((int(k), float(v)) for k, v in d["rates"]),
            tuple((float(s), float(p), float(m)) for s, p, m in d["parts"]),
            d["alone_us"],
            d["step_us"],
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
        return jnp.ones(x.shape, x.dtype)

    return jax.tree.map(leaf, like)


def run_steps(engine: Engine, columns: Any, state: Any, steps: int = STEPS) -> tuple[Times, Any]:
    """Trains on one raw batch over and over (the host packs it once): the times, and the state."""
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
    return engine.times(), state


def median(values: Sequence[float]) -> float:
    """Microseconds of the milliseconds that were seen, without the first ones; NaN if there are none."""
    late = values[WARM:] or values
    return 1e3 * statistics.median(late) if late else math.nan


def alone(
    kernels: PrepKernels, names: Sequence[str], seed: int = 0
) -> tuple[rt.Schedule, list[tuple[tuple[int, ...], float]]]:
    """The schedule of the run in front of the step, and the (units, share) of its random parts."""
    n = len(kernels.units)
    everything = tuple((k, 0.0, 1.0) for k in range(n))
    launches = [rt.Launch(f"share {s}", 0, s, everything) for s in SHARES]
    classes = sorted({u.cls for u in kernels.units})
    for c in classes:
        pieces = tuple((k, 0.0, 1.0) for k, u in enumerate(kernels.units) if u.cls == c)
        launches.append(rt.Launch(f"class {c}", 0, 1.0, pieces))
    rng = np.random.default_rng(seed)
    parts: list[tuple[tuple[int, ...], float]] = []
    for k in range(PARTS):
        size = int(rng.integers(max(1, n // 4), n + 1))
        units = tuple(sorted(int(u) for u in rng.choice(n, size, replace=False)))
        share = float(SHARES[int(rng.integers(len(SHARES)))])
        parts.append((units, share))
        launches.append(rt.Launch(f"part {k}", 0, share, tuple((u, 0.0, 1.0) for u in units)))
    return rt.Schedule(rt.SEQUENTIAL, tuple(launches), tuple(names)), parts


def fitted(
    kernels: PrepKernels, took: dict[str, float], parts: Sequence[tuple[tuple[int, ...], float]]
) -> tuple[Device, dict[int, float], tuple[tuple[float, float, float], ...]]:
    """The cost model of what kernels took alone, in microseconds: constants, rates of classes, and the parts' times."""
    elements: dict[int, int] = collections.Counter()
    for u in kernels.units:
        elements[u.cls] += u.rows * u.inner
    whole_us = took[f"share {SHARES[0]}"]
    launch = min(min(took[f"class {c}"] for c in elements), 0.5 * whole_us)
    rates = {c: max(0.0, took[f"class {c}"] - launch) / n for c, n in elements.items()}
    total = sum(rates[c] * n for c, n in elements.items())
    if total > 0:  # classes run one after the other fill the device less well than together
        rates = {c: r * max(0.0, whole_us - launch) / total for c, r in rates.items()}
    work = max(whole_us - launch, 1e-9)
    gains = [work / max(took[f"share {s}"] - launch, 1e-9) / s for s in SHARES[1:]]
    device = Device(launch, max(1.0, statistics.median(gains)))
    held_out = []
    for k, (units, share) in enumerate(parts):
        found = took[f"part {k}"]
        mine = sum(
            rates[kernels.units[u].cls] * kernels.units[u].rows * kernels.units[u].inner
            for u in units
        )
        predicted = launch + mine / min(1.0, share * device.bandwidth_gain)
        held_out.append((share, predicted, found))
    return device, rates, tuple(held_out)


def _in_stage(
    kernels: PrepKernels, stage: int, share: float, names: tuple[str, ...]
) -> rt.Schedule:
    """Everything in one kernel, beside one stage."""
    launches = rt.whole(kernels, rt.PLAN, share).launches
    return rt.Schedule(rt.PLAN, tuple(dataclasses.replace(x, stage=stage) for x in launches), names)


def probe(
    engine_of: Callable[[Callable[[PrepKernels], rt.Schedule]], Engine],
    columns: Any,
    state: Any,
    names: Sequence[str],
    cache: Cache | None = None,
    key: str = "",
) -> Probed:
    """Measures a program's kernels and a step.

    Args:
      engine_of: makes an engine that times kernels, with a schedule.
      columns: a raw batch as columns; state: shapes and dtypes of the step's state.
      names: the step's markers, in order.
      cache, key: where it is kept.
    """
    kept = None if cache is None else cache.get("probe", key)
    if kept is not None:
        try:
            return Probed.from_json(kept)
        except (ValueError, TypeError, KeyError):  # of another version
            pass
    drawn: list[Any] = []
    trained = made_up_state(state)

    def first(kernels: PrepKernels) -> rt.Schedule:
        schedule, parts = alone(kernels, names)
        drawn.append((kernels, parts))
        return schedule

    def run(schedule: Callable[[PrepKernels], rt.Schedule]) -> Times:
        nonlocal trained
        engine = engine_of(schedule)
        try:
            times, trained = run_steps(engine, columns, trained)
            return times
        finally:
            engine.close()

    times = run(first)
    kernels, parts = drawn[0]
    took = {name: median(values) for name, values in times.kernels}
    device, rates, held_out = fitted(kernels, took, parts)
    whole_us = took[f"share {SHARES[0]}"]
    ends = [median(values) for _, values in times.stages]
    step_us = max([median(times.steps), *(e for e in ends if not math.isnan(e))])
    stages, before = [], 0.0
    for k, name in enumerate((*names, REST)):
        end = (
            step_us
            if k == len(names)
            else (before if math.isnan(ends[k]) else max(before, ends[k]))
        )
        stages.append((name, end - before))
        before = end
    free = []
    for k in range(len(stages)):
        best = 0.0
        for share in BESIDE:
            beside = run(functools.partial(_in_stage, stage=k, share=share, names=tuple(names)))
            took_us, lost = median(beside.kernels[0][1]), median(beside.steps) - step_us
            if not (math.isnan(took_us) or math.isnan(lost)) and took_us > 0:
                best = max(best, whole_us / took_us - max(0.0, lost) / max(whole_us, 1e-9))
        free.append(min(1.0, max(0.0, best)))
    made = Probed(
        tuple(Stage(n, us, f, f) for (n, us), f in zip(stages, free, strict=True)),
        device,
        tuple(sorted(rates.items())),
        held_out,
        whole_us,
        step_us,
    )
    if cache is not None:
        cache.put("probe", key, made.to_json())
    return made


def probe_step(
    step: Callable[[Any, Any], Any],
    state: Any,
    kernels: PrepKernels,
    columns: Any,
    engine_of: Callable[[Callable[[PrepKernels], rt.Schedule]], Engine],
) -> Probed:
    """What a device leaves free beside a step, from the cache or measured now.

    Args:
      state: shapes and dtypes; columns: a raw batch, as columns; engine_of: as for `probe`.
    """
    inner = getattr(step, "__wrapped__", step)
    batch = rt.batch_like(kernels)
    closed = flatten(jax.make_jaxpr(inner)(state, batch), keep_fused=True)
    names = [part.name for part in cut(closed) if part.name != REST]
    donated = donated_inputs(step, state, batch)
    key = key_of_step(closed, donated, 0) + key_of(kernels.source, kernels.words)
    cache = Cache.of(CompilerOptions())
    return probe(engine_of, columns, state, names, cache, key)
