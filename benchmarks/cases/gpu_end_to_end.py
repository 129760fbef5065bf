"""From numpy arrays to a ready result through `bind`, against the best form a user would write a column at a time."""

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import steady
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row, Target
from benchmarks.timing import paired_ratio
from benchmarks.workloads import make

THREADS = (1, 2, 4, 8)
BOUND_MS = 100.0
SECONDS = 1.0  # of each measurement of throughput


def pieces(settings: Settings, kind: str) -> dict[str, Piece]:
    """Model E or F with its MLPs, a piece a batch size."""
    return {
        f"batch {size}": functools.partial(_piece, kind=kind, size=size)
        for size in settings.batches
    }


def _piece(context: Context, kind: str, size: int) -> Result:
    """Latency at a batch size; at the promises' own, throughput by calling threads as well."""
    s = context.settings
    spec = {"kind": kind, "large_rows": s.large_rows, "scale": s.scale, "mlp": True}
    w = dataclasses.replace(make(spec), hand=None, hand_loop=None)
    group = f"{kind[-1].upper()} with its MLPs, numpy arrays, batch {size}"
    found = steady.measure(context, w, group, size, plain=False, views=False)
    ours = found.of(steady.BIND, steady.NUMPY)
    ratio = paired_ratio(found.of(steady.TUNED, steady.NUMPY), ours)
    rows, targets = list(found.rows), []
    if size == s.batch:
        targets = throughputs(context, group, w, found, rows)
    facts = {"ratios": {str(size): round(ratio, 2)}, "timed while others compiled": not found.quiet}
    return Result(tuple(rows), tuple(targets), facts)


def finish(settings: Settings, parts: Mapping[str, Result], kind: str) -> Result:
    """The geometric mean over all batch sizes, once all of them are there."""
    ratios = {k: v for part in parts.values() for k, v in part.facts["ratios"].items()}
    if len(ratios) < len(settings.batches):
        return Result()
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    each = ", ".join(f"{n}: {r:.1f}" for n, r in sorted(ratios.items(), key=lambda x: int(x[0])))
    name = f"model {kind[-1].upper()}: bind / tuned jit, numpy arrays: geometric mean"
    how = f"tuned jit / bind by batch size: {each}; mean {mean:.1f}"
    return Result((), (Target(name, 1 / mean, "<=", 1 / 20, "", how),))


def throughputs(
    context: Context, group: str, w: Any, found: steady.Steady, rows: list[Row]
) -> list[Target]:
    """Calls a second by threads, and the promise: the best of each contestant that keeps the bound.

    Where tuned jit keeps it with no number of threads, its best without the bound counts.
    """
    tuned = jax.jit(w.tuned)
    best: dict[str, tuple[float, float]] = {}
    contestants: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        (steady.BIND, found.server),
        (steady.TUNED, lambda b: tuned(found.params, b)),
    )
    for name, call in contestants:
        with context.turns.compiling():
            jax.block_until_ready(call(found.batches[0]))
        bounded = unbounded = 0.0
        with context.turns.timed():
            for threads in THREADS:
                rate, slow = throughput(call, found.batches, threads)
                note = f"99 of 100 calls within {slow:.1f} ms"
                inputs = f"{threads} threads"
                rows.append(
                    Row.single(f"{group}: throughput", name, inputs, "calls/s", [rate], note)
                )
                unbounded = max(unbounded, rate)
                bounded = max(bounded, rate if slow <= BOUND_MS else 0.0)
        best[name] = bounded, unbounded
    theirs, how = best[steady.TUNED][0], f"{' '.join(map(str, THREADS))} threads, the best of them"
    if not theirs:
        theirs, how = best[steady.TUNED][1], f"{how}; tuned jit keeps no bound, its best counts"
    ours = best[steady.BIND][0]
    ratio = theirs / ours if ours else math.inf
    name = f"{group}: calls a second under {BOUND_MS:.0f} ms, tuned jit / bind"
    return [Target(name, ratio, "<=", 1 / 4, "", how)]


def throughput(
    call: Callable[[Any], Any], batches: Sequence[Any], threads: int
) -> tuple[float, float]:
    """Calls a second of that many threads, and the milliseconds that 99 of 100 calls stay below.

    Raises what a call raises, in any thread.
    """
    times: list[list[float]] = [[] for _ in range(threads)]
    until = time.perf_counter() + SECONDS

    def work(k: int) -> None:
        n = k
        while not times[k] or time.perf_counter() < until:  # each thread once at least
            begun = time.perf_counter()
            jax.block_until_ready(call(batches[n % len(batches)]))
            times[k].append(time.perf_counter() - begun)
            n += 1

    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, k) for k in range(threads)]:
            done.result()  # raises what a call raised
    took = time.perf_counter() - begun
    every = [t for one in times for t in one]
    return len(every) / took, float(np.percentile(every, 99)) * 1e3


__all__ = ["finish", "pieces"]
