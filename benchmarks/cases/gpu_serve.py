"""Model E with its MLPs, served from 1,001 numpy arrays to a ready result.

A server calls one thing again and again, so contestants take turns in blocks: 50 calls in a row, of which every one is
timed and counted, the first ones too. What is slow makes fewer: its block ends once its calls took 150 ms. Rows that
say *alternating* come from a second pass, in which each call follows another contestant's and finds that one's data
in the caches.

A result is ready where it was computed, on the device (`bind`), or in numpy arrays on the host: by `Server.fetch`, and
by `np.asarray` of what a call returns.

Views are filled in three ways: by the calling thread just before each call; by another thread of Python while the call
before runs; and several leases at a time, before the first of them is served. Filling is timed in one row alone.

What a thread does between two calls slows the second one down, as its caches hold something else: so ordinary arrays
come as they were found, from memory, and *written before each call*, a thousand of them from Python, as views are.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import steady
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row, Target
from benchmarks.timing import Block, Contestant, paired_ratio
from benchmarks.workloads import Batch, make

# Milliseconds at most, by batch size: through bind, and through input_views.
LIMITS = {256: (0.45, 0.35), 2048: (0.80, 0.70)}
AHEAD = 4  # leases
BESIDE = "input_views, filled by another thread"
FILLED_AHEAD = f"input_views, {AHEAD} filled ahead"
FETCH, ASARRAY = "recom_jax bind, fetch", "recom_jax bind, np.asarray"
WRITTEN = "numpy arrays, written before each call"
ALTERNATING = "alternating call by call"
# Whose second pass is shown: the others are of no interest there.
SHOWN = (
    (FETCH, steady.NUMPY),
    (FETCH, steady.VIEWS),
    (steady.BIND, steady.NUMPY),
    (steady.BIND, steady.VIEWS),
    (steady.HAND, steady.STACKED),
    (steady.HAND_LOOP, steady.STACKED),
)


def pieces(settings: Settings) -> dict[str, Piece]:
    """A piece a batch size."""
    return {f"batch {size}": functools.partial(_piece, size=size) for size in LIMITS}


def _piece(context: Context, size: int) -> Result:
    s = context.settings
    w = make({"kind": "model_e", "large_rows": s.large_rows, "scale": s.scale, "mlp": True})
    if (
        size > 256
    ):  # XLA compiles its comparisons for a minute, and it is slower than the search loop
        w = dataclasses.replace(w, hand=None)
    group = f"model E with its MLPs, batch {size}"
    calls = 4 if s.quick else Block().calls
    found = steady.measure(
        context, w, group, size, plain=False, tuned=False, block=Block(calls), more=further
    )
    rows = [*found.rows, *_alternating(group, found)]
    bind = found.of(steady.BIND, steady.NUMPY)
    forms = {
        name: found.of(name, steady.STACKED)
        for name in (steady.HAND, steady.HAND_LOOP)
        if f"{name} / {steady.STACKED}" in found.samples
    }
    best = min(forms, key=lambda name: forms[name].median)
    bound, views = LIMITS[size]
    how = f"the faster of {len(forms)} forms: {best.removeprefix('jax.jit, ')}"
    targets = (
        Target(f"{group}: numpy arrays through bind", bind.median, "<=", bound, "ms"),
        *(
            Target(f"{group}: through {name}", found.of(steady.BIND, name).median, "<=", views, "ms")
            for name in (steady.VIEWS, FILLED_AHEAD)
        ),
        *(
            Target(f"{group}: {name} through fetch, results on the host", found.of(FETCH, name).median,
                   "<=", most, "ms")
            for name, most in ((steady.NUMPY, bound), (steady.VIEWS, views))
        ),
        Target(f"{group}: bind / hand-batched jit given stacked inputs",
               paired_ratio(bind, forms[best]), "<", 1, "", how),
    )  # fmt: skip
    return Result(tuple(rows), targets, {"timed while others compiled": not found.quiet})


def _alternating(group: str, found: steady.Steady) -> Iterator[Row]:
    for name, inputs in SHOWN:
        samples = found.alternating.get(f"{name} / {inputs}")
        if samples is not None:
            contestant = Contestant(name, f"{inputs}, {ALTERNATING}", _none, _none)
            yield Row.of(group, contestant, samples)


def _none(_: Any) -> None:
    return None


def further(batches: list[Batch], server: Any) -> list[Contestant]:
    """Results on the host, and leases that are filled elsewhere or earlier."""

    def numpy(k: int) -> Any:
        return batches[k % len(batches)]

    def lease(k: int) -> Any:
        return steady.fill(server.input_views(numpy(k)), numpy(k))

    sets = [{name: np.empty_like(x) for name, x in batches[0].items()} for _ in range(AHEAD)]

    def written(k: int) -> Any:
        return steady.fill(sets[k % AHEAD], numpy(k))

    found = [
        Contestant(FETCH, steady.NUMPY, numpy, server.fetch, "results on the host"),
        Contestant(FETCH, steady.VIEWS, lease, server.fetch, "results on the host, filling not timed"),
        Contestant(FETCH, WRITTEN, written, server.fetch, "results on the host, writing not timed"),
        Contestant(steady.BIND, WRITTEN, written, server, "writing not timed"),
        Contestant(ASARRAY, steady.NUMPY, numpy, lambda b: np.asarray(server(b)), "results on the host"),
    ]  # fmt: skip
    for inputs, way in ((BESIDE, Beside(lease)), (FILLED_AHEAD, Ahead(lease))):
        note = "filling not timed"
        found.append(Contestant(steady.BIND, inputs, way.prepare, server, note, way.turn))
    return found


# ---- leases that are filled elsewhere or earlier ---------------------------------------------------------------------


class Beside:
    """While a call runs, another thread fills the lease of the next."""

    def __init__(self, lease: Callable[[int], Any]) -> None:
        self._lease = lease
        self._pool: concurrent.futures.Executor | None = None
        self._next: concurrent.futures.Future[Any] | None = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as self._pool:
                yield
        finally:
            self._pool = self._next = None

    def prepare(self, k: int) -> Any:
        if self._pool is None:
            return self._lease(k)
        views = (self._next or self._pool.submit(self._lease, k)).result()
        self._next = self._pool.submit(self._lease, k + 1)
        return views


class Ahead:
    """A few leases are filled, then served one after the other."""

    def __init__(self, lease: Callable[[int], Any]) -> None:
        self._lease = lease
        self._filled: deque[Any] = deque()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._filled.clear()  # the others need the slots

    def prepare(self, k: int) -> Any:
        if not self._filled:
            self._filled.extend(self._lease(k + i) for i in range(AHEAD))
        return self._filled.popleft()


__all__ = ["pieces"]
