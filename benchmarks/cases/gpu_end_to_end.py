"""From numpy arrays to a ready result through `bind`, against the best form a user would write a column at a time."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from benchmarks.timing import paired_ratio
from benchmarks.workloads import make

THREADS = (1, 2, 4, 8)
BOUND_MS = 100.0
SECONDS = 1.5  # of each measurement of throughput


def run(context: Context) -> Result:
    """Models E and F with their MLPs: latency by batch size, and throughput of E by calling threads."""
    s = context.settings
    rows: list[Row] = []
    targets: list[Target] = []
    ratios: list[float] = []
    for kind in ("model_e", "model_f"):
        spec = {"kind": kind, "large_rows": s.large_rows, "scale": s.scale, "mlp": True}
        w = dataclasses.replace(make(spec), hand=None, hand_loop=None)
        for size in s.batches:
            group = f"{kind[-1].upper()} with its MLPs, numpy arrays, batch {size}"
            found = steady.measure(context, w, group, size, plain=False, views=False)
            rows += found.rows
            ours = found.of(steady.BIND, steady.NUMPY)
            ratios.append(paired_ratio(found.of(steady.TUNED, steady.NUMPY), ours))
            if kind == "model_e" and size == s.batch:
                calls = best(group, w, found, rows)
                targets.append(
                    Target(f"{group}: calls a second under {BOUND_MS:.0f} ms, tuned jit / bind",
                           calls[1] / calls[0], "<=", 1 / 4)
                )  # fmt: skip
            del found
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    targets.append(Target("bind / tuned jit, numpy arrays: geometric mean", 1 / mean, "<=", 1 / 20))
    return Result(tuple(rows), tuple(targets), {"ratios": [round(r, 1) for r in ratios]})


def best(group: str, w: Any, found: steady.Steady, rows: list[Row]) -> tuple[float, float]:
    """The most calls a second of `bind` and of tuned jit, of those numbers of threads that keep the bound."""
    tuned = jax.jit(w.tuned)
    most = []
    for name, call in (
        (steady.BIND, found.server),
        (steady.TUNED, lambda b: tuned(found.params, b)),
    ):
        jax.block_until_ready(call(found.batches[0]))
        kept = 0.0
        for threads in THREADS:
            rate, slow = throughput(call, found.batches, threads)
            note = f"99 of 100 calls within {slow:.1f} ms"
            rows.append(
                Row.single(
                    f"{group}: throughput", name, f"{threads} threads", "calls/s", [rate], note
                )
            )
            kept = max(kept, rate if slow <= BOUND_MS else 0.0)
        most.append(kept)
    return most[0], most[1]


def throughput(
    call: Callable[[Any], Any], batches: Sequence[Any], threads: int
) -> tuple[float, float]:
    """Calls a second of that many threads, and the milliseconds that 99 of 100 calls stay below."""
    times: list[list[float]] = [[] for _ in range(threads)]
    until = time.perf_counter() + SECONDS

    def work(k: int) -> None:
        n = k
        while (begun := time.perf_counter()) < until:
            jax.block_until_ready(call(batches[n % len(batches)]))
            times[k].append(time.perf_counter() - begun)
            n += 1

    pool = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    begun = time.perf_counter()
    for t in pool:
        t.start()
    for t in pool:
        t.join()
    took = time.perf_counter() - begun
    every = [t for one in times for t in one]
    return len(every) / took, float(np.percentile(every, 99)) * 1e3


__all__ = ["run"]
