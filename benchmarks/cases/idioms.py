"""Each idiom of `examples.idioms` at the size of a serving batch: optimized against plain jit, interleaved.

The promise is that no idiom is slower for being optimized. Idioms without a call run plain JAX's own program:
what differs there is the machine, so they are measured but promise nothing. An idiom whose library is absent is
left out by name.

On a GPU a call of a few microseconds' work takes some sixty: it is handed from thread to thread, and how soon each of
them wakes decides more than what is called. A contestant may be slow in that way, 60 microseconds instead of 38 to
dispatch, for as long as its process lives, and fast in the next one: single calls of the same machine code took 0.87 of
plain jit's time in one process, 1.16 and 1.48 in others. So each idiom is measured in several fresh processes, and the
median over them of single calls is judged: what one who waits for each result feels. Calls in a row, of which the last
alone is waited for, are measured beside them. They wait for nobody in between, but it is the dispatch itself that is
slow at times: they differ as much from process to process, and so do calls that are polled until the result is there.
"""

import dataclasses
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import recom_jax
from benchmarks import steady
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row, Target
from benchmarks.timing import Contestant, Plan, Samples, interleave, paired_ratio, still
from examples.idioms import ALL, REAL, SMALL

LIMIT = 1.05
GROUPS = 4  # of idioms: a piece measures one of them in a process of its own
# Rows of tables that one-hot products multiply whole: with more, plain JAX takes seconds.
DEAREST = 2_000
# One table for the rows of all fields.
BY_FIELD = ("offsets", "fm", "deepfm", "wide_and_deep", "xdeepfm", "dcn")
MULTIPLIED = ("multi_hot_", "buckets_to_one_hot", "thresholds_", "haiku_one_hot")
# From the 33rd call in flight on, XLA holds the caller back until one has ended.
CHAIN = 30
# All idioms in several processes take a bit over a minute of a lent machine, and most of that to compile.
ROUNDS, CHAINS, LEAST, WAY_S, BURST_S = 15, 8, 3, 0.06, 6e-4
PASSES = 2  # over all idioms of a piece: a way to be slow may last for a while
SINGLE, CHAINED = "single calls", f"{CHAIN} calls in a row"
TITLES = {
    SINGLE: f"{SINGLE} (judged: the median over processes)",
    CHAINED: f"{CHAINED}, the last one waited for (not judged)",
}
UNIT = "of plain jit"


@dataclasses.dataclass(frozen=True)
class Ready:
    """An idiom whose contestants, ours and plain JAX's, are compiled and agree.

    `fused`: what became of its columns. `has_call`: whether anything did.
    """

    name: str
    ways: tuple[Contestant, Contestant]
    first_s: Mapping[str, float]
    fused: str
    has_call: bool


def run(context: Context) -> Result:
    """All of them, one after the other, by single calls: there is nobody to wait for."""
    parts = [measure(context, [name], (SINGLE,)) for name in _names(context.settings)]
    facts = {key: _merged(parts, key) for key in (SINGLE, "has call", "not installed")}
    target, said = _judged(facts, SINGLE, "Idioms", "median of the rounds' ratios")
    return Result(tuple(r for part in parts for r in part.rows), (target,), {**facts, **said})


def pieces(settings: Settings) -> dict[str, Piece]:
    """On a GPU: a group of idioms in a process. Each group comes once before one comes again."""
    names = _names(settings)
    groups = range(min(GROUPS, len(names)))  # every fourth one each, as neighbours need like times
    return {
        f"{k + 1} of {GROUPS} run {n + 1}": functools.partial(
            measure, names=names[k::GROUPS], ways=tuple(TITLES), process=n
        )
        for n in range(settings.processes)
        for k in groups
    }


def combine(parts: Mapping[str, Result]) -> dict[str, Result]:
    """One part of each group: medians over the processes that measured it."""
    groups: dict[str, list[Result]] = {}
    for name, part in parts.items():
        groups.setdefault(name.partition(" run ")[0], []).append(part)
    return {name: combined(found) for name, found in groups.items()}


def combined(found: Sequence[Result]) -> Result:
    """Rows of ratios, whose range is that over the processes, then of times; each process' ratio in the facts."""
    rows: list[Row] = []
    facts: dict[str, Any] = {k: _merged(found, k) for k in ("fused", "has call", "not installed")}
    group = found[0].rows[0].group
    for way, title in TITLES.items():
        ratios: dict[str, list[float]] = {}
        for part in found:
            for name, ratio in part.facts[way].items():
                ratios.setdefault(name, []).append(ratio)
        for name, each in ratios.items():
            note = facts["fused"][name]
            beside = f"{group}, beside plain jit: {title}"
            rows.append(Row.single(beside, name, steady.DEVICE, UNIT, each, note))
        facts[way] = ratios
    same: dict[str, list[Row]] = {}
    for r in (r for part in found for r in part.rows):
        same.setdefault(r.key, []).append(r)
    rows += map(_median_row, same.values())
    for key in ("timed while others compiled", "measured at"):
        each_says = (str(part.facts[key]) for part in found if key in part.facts)
        facts[key] = ", ".join(dict.fromkeys(each_says))
    return Result(tuple(rows), (), facts)


def _median_row(rows: Sequence[Row]) -> Row:
    """One row of the same row from several processes: of each number the median over them."""
    first = [r.first_s for r in rows if r.first_s is not None]
    return dataclasses.replace(
        rows[0],
        median=statistics.median(r.median for r in rows),
        p10=statistics.median(r.p10 for r in rows),
        p90=statistics.median(r.p90 for r in rows),
        count=sum(r.count for r in rows),
        first_s=statistics.median(first) if first else None,
    )


def finish(settings: Settings, parts: Mapping[str, Result]) -> Result:
    """What the groups that are there say together: single calls are judged."""
    found = list(parts.values())
    calls = _merged(found, "has call")
    medians: dict[str, dict[str, float]] = {}
    for way in TITLES:
        medians[way] = {n: statistics.median(r) for n, r in _merged(found, way).items()}
    facts = {**medians, "has call": calls, "not installed": _merged(found, "not installed")}
    target, said = _judged(facts, SINGLE, "CUDA: idioms", f"{SINGLE}, median over processes")
    in_a_row = {n: r for n, r in medians[CHAINED].items() if calls[n]}
    slowest = max(in_a_row, key=in_a_row.__getitem__)
    each = _merged(found, CHAINED)[slowest]
    said[f"slowest of {CHAINED}"] = (
        f"{slowest}, {in_a_row[slowest]:.2f} ({min(each):.2f} to {max(each):.2f} in {len(each)} processes)"
    )
    return Result((), (target,), said)


def _merged(parts: Sequence[Result], key: str) -> dict[str, Any]:
    return {k: v for part in parts for k, v in part.facts[key].items()}


def _judged(
    facts: Mapping[str, Mapping[str, Any]], way: str, title: str, how: str
) -> tuple[Target, dict[str, Any]]:
    """The promise, and how much faster the idioms are that have a call."""
    ratios = {n: r for n, r in facts[way].items() if facts["has call"][n]}
    worst = max(ratios, key=ratios.__getitem__)
    target = Target(f"{title}: the slowest fused one beside plain jit", ratios[worst], "<=", LIMIT,
                    measured=f"{worst}: {how}")  # fmt: skip
    median = statistics.median(1 / r for r in ratios.values())
    said = f"{median:.2f} (of {len(ratios)} idioms with a call)"
    left_out = ", ".join(facts["not installed"]) or "none"
    return target, {"median speed-up over plain jit": said, "left out": left_out}


def _names(settings: Settings) -> list[str]:
    return list(ALL)[:: 15 if settings.quick else 1]


def measure(
    context: Context, names: Sequence[str], ways: Sequence[str], process: int = 0
) -> Result:
    """Times of these idioms by each way of calling; the facts hold ratios by way and name.

    All are compiled before any is timed: pieces that run beside one another compile side by side. In every other
    process plain JAX comes first.
    """
    s = context.settings
    absent = {n: p for n in names if (p := ALL[n].needs) and importlib.util.find_spec(p) is None}
    with context.turns.compiling(), context.progress.step(", ".join(names)):
        ready = [_ready(s, n, bool(process % 2)) for n in names if n not in absent]
    alone = len(ways) == 1
    turns = [
        (idiom, way) for idiom in ready for way in ways if way == SINGLE or idiom.has_call
    ]  # without a call the promise is silent, and some take milliseconds
    samples: dict[tuple[str, str], Mapping[str, Samples]] = {}
    with still(), context.turns.timed() as quiet:
        for number, (idiom, way) in enumerate(turns * (1 if alone else PASSES)):
            plan = _plan(s.plan, idiom.ways[1]) if alone else _short(s.plan, idiom.ways[1], way)
            found = _timed(idiom.ways, way, plan, process + number)
            before = samples.get((idiom.name, way))
            samples[idiom.name, way] = (
                {k: before[k].then(v) for k, v in found.items()} if before else found
            )
    rows: list[Row] = []
    ratios: dict[str, dict[str, float]] = {way: {} for way in ways}
    for idiom, way in turns:
        times = samples[idiom.name, way]
        ratio = round(paired_ratio(*(times[c.key] for c in idiom.ways)), 3)
        ratios[way][idiom.name] = ratio
        inputs = steady.DEVICE if alone else f"{steady.DEVICE}, {way}"
        note = f"{ratio:.2f} of plain; {idiom.fused}" if alone else ""
        rows += _rows(f"idioms, batch {s.batch}", idiom, inputs, times, note)
    facts = {
        **ratios,
        "fused": {i.name: i.fused for i in ready},
        "has call": {i.name: i.has_call for i in ready},
        "not installed": absent,
        "timed while others compiled": not quiet,
    }
    return Result(tuple(rows), (), facts)


def _ready(settings: Settings, name: str, plain_first: bool) -> Ready:
    size = SMALL if settings.quick else dataclasses.replace(REAL, batch=settings.batch)
    if not settings.quick and name.startswith(MULTIPLIED):
        size = dataclasses.replace(size, rows=DEAREST)
    if not settings.quick and name in BY_FIELD:
        size = dataclasses.replace(size, rows=size.rows // 10)
    fn, args = ALL[name].make(size)
    args = jax.block_until_ready(jax.device_put(args))
    optimized = recom_jax.optimize(fn)
    report = optimized.explain(*args)
    ours, plain = (
        _contestant(steady.OURS, optimized, args),
        _contestant(steady.PLAIN, jax.jit(fn), args),
    )
    first = {c.key: _first(c) for c in ((plain, ours) if plain_first else (ours, plain))}
    _same(name, ours.call(None), plain.call(None))
    reasons = ", ".join(sorted({c.reason for c in report.columns if c.reason}))
    fused = f"{report.num_fused} of {report.num_columns} fused{f' ({reasons})' if reasons else ''}"
    return Ready(name, (ours, plain), first, fused, bool(report.num_custom_calls))


def _contestant(name: str, fn: Callable[..., Any], args: Any) -> Contestant:
    return Contestant(name, steady.DEVICE, lambda k: None, lambda _: fn(*args))


def _first(c: Contestant) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(c.call(None))
    return time.perf_counter() - begun


def _timed(ways: Sequence[Contestant], way: str, plan: Plan, seed: int) -> Mapping[str, Samples]:
    """Milliseconds a call."""
    if way == SINGLE:
        return interleave(ways, plan, seed=seed)
    found = interleave([_chained(c) for c in ways], plan, seed=seed)
    return {key: samples.divided(CHAIN) for key, samples in found.items()}


def _chained(c: Contestant) -> Contestant:
    """Calls in a row: the device ends them in their order, so that the last one's result is the last."""

    def call(argument: Any) -> Any:
        for _ in range(CHAIN - 1):
            c.call(argument)
        return c.call(argument)

    return dataclasses.replace(c, call=call)


def _plan(plan: Plan, plain: Contestant) -> Plan:
    """More calls a round where a call takes microseconds; a few seconds for each idiom."""
    burst = min(max(int(2e-3 / _seconds(plain)), plan.burst), 50)
    return dataclasses.replace(plan, burst=burst, seconds=min(plan.seconds, 5.0))


def _short(plan: Plan, plain: Contestant, way: str) -> Plan:
    """Of one pass on a GPU: few rounds where a call takes milliseconds."""
    burst = 1 if way == CHAINED else min(max(int(BURST_S / _seconds(plain)), plan.burst), 50)
    return Plan(
        rounds=min(plan.rounds, CHAINS if way == CHAINED else ROUNDS),
        burst=burst,
        seconds=min(plan.seconds, WAY_S),
        least_rounds=min(plan.least_rounds, LEAST),
    )


def _seconds(c: Contestant) -> float:
    """Of a call, about."""
    return max(min(_first(c) for _ in range(3)), 1e-5)


def _rows(
    group: str, idiom: Ready, inputs: str, samples: Mapping[str, Samples], note: str = ""
) -> list[Row]:
    """Ours, with the note, and plain JAX's."""
    notes = (note, "")
    named = [
        dataclasses.replace(c, name=f"{idiom.name}: {c.name}", inputs=inputs, note=n)
        for c, n in zip(idiom.ways, notes, strict=True)
    ]
    return [
        Row.of(group, n, samples[c.key], first_s=idiom.first_s[c.key])
        for n, c in zip(named, idiom.ways, strict=True)
    ]


def _same(name: str, ours: Any, plain: Any) -> None:
    """Raises RuntimeError where the two compute something else."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        finite = np.where(np.isfinite(y), y, 0)
        bound = 2e-2 * max(float(np.abs(finite).max(initial=0)), 1e-6)
        if not np.allclose(x, y, rtol=2e-2, atol=bound, equal_nan=True):
            raise RuntimeError(f"{name}: optimized and plain differ")
