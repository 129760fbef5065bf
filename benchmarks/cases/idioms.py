"""Each idiom of `examples.idioms` at the size of a serving batch: optimized against plain jit, interleaved.

The promise is that no idiom is slower for being optimized. Idioms without a call run plain JAX's own program:
what differs there is the machine, so they are measured but promise nothing. An idiom whose library is absent is
left out by name.
"""

import dataclasses
import functools
import importlib.util
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import recom_jax
from benchmarks import steady
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row, Target
from benchmarks.timing import Contestant, Plan, interleave, paired_ratio
from examples.idioms import ALL, REAL, SMALL

LIMIT = 1.05
PIECES = 8
# Rows of tables that one-hot products multiply whole: with more, plain JAX takes seconds.
DEAREST = 2_000
# One table for the rows of all fields.
BY_FIELD = ("offsets", "fm", "deepfm", "wide_and_deep", "xdeepfm", "dcn")
MULTIPLIED = ("multi_hot_", "buckets_to_one_hot", "thresholds_", "haiku_one_hot")


def run(context: Context) -> Result:
    """All of them, one after the other."""
    found = measure(context, list(ALL)[:: 15 if context.settings.quick else 1])
    targets, facts = _judged(found.facts["ratios"], "Idioms")
    return Result(found.rows, targets, {**facts, **found.facts})


def pieces(settings: Settings) -> dict[str, Piece]:
    """On a GPU: each piece takes every `PIECES`-th, as neighbours need like times."""
    names = list(ALL)[:: 15 if settings.quick else 1]
    return {
        f"{k + 1} of {PIECES}": functools.partial(measure, names=names[k::PIECES])
        for k in range(min(PIECES, len(names)))
    }


def finish(settings: Settings, parts: Mapping[str, Result]) -> Result:
    """What the pieces that are there say together."""
    ratios = {k: v for part in parts.values() for k, v in part.facts["ratios"].items()}
    return Result((), *_judged(ratios, "CUDA: idioms"))


def _judged(ratios: Mapping[str, float], title: str) -> tuple[tuple[Target, ...], dict[str, Any]]:
    """The promise, and how much faster the idioms are that have a call."""
    worst = max(ratios, key=ratios.__getitem__)
    target = Target(f"{title}: the slowest fused one beside plain jit", ratios[worst], "<=", LIMIT,
                    measured=f"{worst}: median of the rounds' ratios")  # fmt: skip
    median = statistics.median(1 / r for r in ratios.values())
    said = f"{median:.2f} (of {len(ratios)} idioms with a call)"
    return (target,), {"median speed-up over plain jit": said}


def measure(context: Context, names: Sequence[str]) -> Result:
    """Rows of these idioms; `ratios` by name, of those with a call."""
    s = context.settings
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    left_out: list[str] = []
    for name in names:
        idiom = ALL[name]
        if idiom.needs and importlib.util.find_spec(idiom.needs) is None:
            left_out.append(name)
            continue
        size = SMALL if s.quick else dataclasses.replace(REAL, batch=s.batch)
        if not s.quick and name.startswith(MULTIPLIED):
            size = dataclasses.replace(size, rows=DEAREST)
        if not s.quick and name in BY_FIELD:
            size = dataclasses.replace(size, rows=size.rows // 10)
        with context.turns.compiling(), context.progress.step(name):
            fn, args = idiom.make(size)
            args = jax.block_until_ready(jax.device_put(args))
            optimized = recom_jax.optimize(fn)
            report = optimized.explain(*args)
            ways = {steady.OURS: optimized, steady.PLAIN: jax.jit(fn)}
            runners = [_contestant(way, f, args) for way, f in ways.items()]
            first = {c.key: _first(c) for c in runners}
            _same(name, *(c.call(None) for c in runners))
        with context.turns.timed():
            samples = interleave(runners, _plan(s.plan, runners[1]))
        ratio = round(paired_ratio(*(samples[c.key] for c in runners)), 3)
        if report.num_custom_calls:
            ratios[name] = ratio
        reasons = ", ".join(sorted({c.reason for c in report.columns if c.reason}))
        fused = f"{report.num_fused} of {report.num_columns} fused"
        notes = {steady.OURS: f"{ratio:.2f} of plain; {fused}{f' ({reasons})' if reasons else ''}"}
        for c in runners:
            named = dataclasses.replace(c, name=f"{name}: {c.name}", note=notes.get(c.name, ""))
            rows.append(Row.of(f"idioms, batch {size.batch}", named, samples[c.key], first_s=first[c.key]))  # fmt: skip
    return Result(tuple(rows), (), {"left out": ", ".join(left_out) or "none", "ratios": ratios})


def _contestant(name: str, fn: Any, args: Any) -> Contestant:
    return Contestant(name, steady.DEVICE, lambda k: None, lambda _: fn(*args))


def _first(c: Contestant) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(c.call(None))
    return time.perf_counter() - begun


def _plan(plan: Plan, plain: Contestant) -> Plan:
    """More calls a round where a call takes microseconds; a few seconds for each idiom."""
    begun = time.perf_counter()
    jax.block_until_ready(plain.call(None))
    seconds = max(time.perf_counter() - begun, 1e-5)
    burst = min(max(int(2e-3 / seconds), plan.burst), 50)
    return dataclasses.replace(plan, burst=burst, seconds=min(plan.seconds, 5.0))


def _same(name: str, ours: Any, plain: Any) -> None:
    """Raises RuntimeError where the two compute something else."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.where(np.isfinite(y), y, 0)
        bound = 2e-2 * max(float(np.abs(finite).max(initial=0)), 1e-6)
        if not np.allclose(x, y, rtol=2e-2, atol=bound, equal_nan=True):
            raise RuntimeError(f"{name}: optimized and plain differ")
