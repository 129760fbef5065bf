"""The native part of the stream runtime, by itself: slots, places, events, and kernels that start where markers stand.

On a simulated device: what is enqueued runs in any order that streams and events allow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recom_jax import ffi
from recom_jax.corun import kernels, runtime
from tests import corun_emulation, cuda_emulation
from tests.helpers import cpu_only

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
    cpu_only("tests/gpu runs the stream itself"),
]


def native(
    mode: int = runtime.PLAN,
    slots: int = 2,
    seed: int = 0,
    stages: Any = ("a", "b"),
    timed: bool = True,
    profile: bool = False,
) -> Any:
    """One kernel a stage, each adding up a part of two results. timed: markers tell the host."""
    k = kernels.compile_prep(
        lambda r: {"a": r["n"] + 1, "b": r["n"] * 2}, {"n": np.zeros(64, np.int32)}
    )
    launches = [
        runtime.Launch(f"k{n}", n, 0.1, ((0, a, b), (1, a, b)))
        for n, (a, b) in enumerate([(0.0, 0.25), (0.25, 0.5), (0.5, 1.0)])
    ]

    def seeded(k: kernels.PrepKernels, /, **plan: Any) -> Any:
        address = corun_emulation.address(k.source)
        return ffi.extension().CorunRuntime.simulated(seed=seed, kernel=address, **plan)

    schedule = runtime.Schedule(mode, tuple(launches), stages, timed)
    return runtime.PrepRuntime(k, schedule, slots, seeded, 4, profile)


def taken(r: Any, slot: int) -> tuple[Any, Callable[[], None]]:
    """Takes a batch into fresh arrays; what waits for them."""
    a, b = np.zeros(64, np.int32), np.zeros(64, np.int32)
    r.native.take(slot, [(a.ctypes.data, a.nbytes), (b.ctypes.data, b.nbytes)])
    return (a, b), r.native.finish


@pytest.mark.parametrize("mode", [runtime.PLAN, runtime.EAGER, runtime.SEQUENTIAL])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("timed", [False, True])
def test_slots_are_never_mixed_up(mode: int, seed: int, timed: bool) -> None:
    """Batches pass through two slots while nothing has run yet: only events keep them apart. Markers come in any order,
    or not, and so does what follows a step's dispatch."""
    r, rng = native(mode, seed=seed, timed=timed), np.random.default_rng(seed)
    data = [rng.integers(-1000, 1000, 64).astype(np.int32) for _ in range(20)]
    waiting: list[int] = []
    results = []
    for k in range(len(data) + 1):
        if k < len(data):
            waiting.append(r.pack([data[k]]))
        if k:
            results.append(taken(r, waiting.pop(0))[0])
            for name in rng.permutation(["a", "b", "other"])[: rng.integers(0, 4)]:
                (r.native.mark if timed else r.native.ended)(str(name))
            if rng.random() < 0.8:  # else the step failed
                r.native.dispatched()
    r.native.finish()
    for x, (a, b) in zip(data, results, strict=True):
        np.testing.assert_array_equal(a, x + 1)
        np.testing.assert_array_equal(b, x * 2)
    assert r.native.stats["launched"] == 3 * len(data)
    r.close()


def test_kernels_start_with_their_stages() -> None:
    r = native()
    first, second = r.pack([np.arange(64, dtype=np.int32)]), r.pack([np.ones(64, np.int32)])
    assert r.native.stats["launched"] == 0  # no step runs yet
    taken(r, first)
    assert (r.native.stats["launched"], r.native.stats["late"]) == (
        4,
        3,
    )  # all of the first, one of the second
    r.native.mark("a")
    assert r.native.stats["launched"] == 5
    r.native.mark("a")  # ended already
    r.native.mark("unheard of")
    assert (r.native.stats["launched"], r.native.stats["unknown_marks"]) == (5, 2)
    r.native.mark("b")
    assert r.native.stats["launched"] == 6
    (a, _), finish = taken(r, second)
    finish()
    assert (a == 2).all() and r.native.stats["late"] == 3
    r.close()


@pytest.mark.parametrize("seed", range(8))
def test_kernels_wait_for_the_markers_of_the_step_that_runs(seed: int) -> None:
    """They are enqueued at once, and the step runs whenever: a clock counts what has run."""
    r, filler = native(seed=seed, timed=False, profile=True), 40
    waiting, results = [r.pack([np.full(64, k, np.int32)]) for k in range(2)], []
    for k in range(30):
        made, finish = taken(r, waiting.pop(0))
        results.append(made)
        assert r.native.stats["launched"] == 3 * (k + 1) + 1  # those of the first stage
        for name in ("a", "b"):
            for _ in range(filler):
                r.native.ended("another")
            r.native.ended(name)
        r.native.dispatched()
        assert r.native.stats["launched"] == 3 * (k + 2)
        if k % 5 == 4:  # the device catches up with the host
            finish()
        waiting.append(r.pack([np.full(64, k + 2, np.int32)]))
    assert r.native.stats["late"] == 3 and r.native.stats["marks"] == 0
    r.native.finish()
    for k, (a, b) in enumerate(results):
        assert (a == k + 1).all() and (b == 2 * k).all()
    for slot in waiting:
        r.native.abandon(slot)
    rows = np.array(r.native.times)  # kernels, stages, leads, step, period
    assert len(rows) > 10 and (rows[:, 3:5] == -1).all()
    # A kernel of the second stage begins behind the first marker of the step before its own.
    leads, periods = rows[1:, 5:8], rows[:-1, -1]
    assert (periods > 2 * filler).all()
    assert (leads[:, 1] < periods - filler).all() and (leads[:, 2] < periods - 2 * filler).all()
    assert (leads > 0).all() and (leads[:, 0] > filler).any()
    r.close()


def test_a_marker_that_never_comes_holds_nothing_up() -> None:
    """XLA left it out, or another step ran: kernels start early, and nobody waits for ever."""
    for seed in range(4):
        r = native(seed=seed, timed=False)
        first, second = (r.pack([np.full(64, k, np.int32)]) for k in range(2))
        taken(r, first)
        r.native.ended("b")  # "a" never
        r.native.dispatched()
        assert r.native.stats["launched"] == 6
        (a, _), finish = taken(r, second)
        finish()
        assert (a == 2).all() and r.native.stats["late"] == 3
        r.native.dispatched()
        r.close()
        r.native.dispatched()  # nothing is left to do


def test_a_step_that_was_not_dispatched_starts_no_kernels() -> None:
    r = native(timed=False)
    first, second = (r.pack([np.full(64, k, np.int32)]) for k in range(2))
    r.native.dispatched()  # none has begun
    taken(r, first)
    assert r.native.stats["launched"] == 4
    (a, _), finish = taken(r, second)  # the next step takes its batch all the same
    finish()
    assert (a == 2).all() and r.native.stats["late"] == 3 + 2
    r.close()


def test_a_batch_that_comes_late_catches_up() -> None:
    r = native()
    taken(r, r.pack([np.zeros(64, np.int32)]))
    r.native.mark("a")
    slot = r.pack([np.ones(64, np.int32)])
    assert r.native.stats["launched"] == 3 + 2  # those of the stages that have begun
    (a, _), finish = taken(r, slot)
    finish()
    assert (a == 2).all() and r.native.stats["late"] == 3 + 1
    r.close()
    r = native(timed=False)
    taken(r, r.pack([np.zeros(64, np.int32)]))
    r.native.ended("a")
    r.native.dispatched()
    slot = r.pack([np.ones(64, np.int32)])
    assert r.native.stats["launched"] == 6  # behind all markers, those that have passed too
    (a, _), finish = taken(r, slot)
    finish()
    assert (a == 2).all() and r.native.stats["late"] == 3
    r.close()


def test_batches_are_taken_in_order() -> None:
    r = native()
    first, second = (r.pack([np.full(64, k, np.int32)]) for k in range(2))
    with pytest.raises(RuntimeError, match="not the next one"):
        taken(r, second)
    r.native.abandon(first)
    (a, _), finish = taken(r, second)
    finish()
    assert (a == 2).all()
    r.close()
    with pytest.raises(RuntimeError, match="closed"):
        r.native.acquire()


def test_an_abandoned_slot_is_used_again() -> None:
    """Its kernels may be under way: what comes next waits for them."""
    for seed in range(6):
        r = native(seed=seed)
        taken(r, r.pack([np.zeros(64, np.int32)]))
        r.native.abandon(r.pack([np.full(64, 9, np.int32)]))
        kept = [r.pack([np.full(64, k, np.int32)]) for k in (1, 2)]
        found = [taken(r, slot)[0] for slot in kept]
        r.native.finish()
        assert [(int(a[0]), int(b[-1])) for a, b in found] == [(2, 2), (3, 4)]
        r.close()


def test_a_step_needs_a_batch_of_its_pipeline() -> None:
    r = native()
    token = jnp.zeros(16, jnp.uint8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no batch of a pipeline"):
        jax.block_until_ready(jax.jit(lambda t: runtime.take_batch(r.kernels, t))(token))
    r.close()


def test_memory_is_known_before_it_is_taken() -> None:
    r = native(slots=3)
    host, device = runtime.ring_bytes(r.kernels, 3)
    assert r.native.stats["host_bytes"] == host
    tiles = r.native.stats["device_bytes"] - device
    assert 0 <= tiles < 1000
    r.close()


def test_bad_plans_are_refused() -> None:
    k = native().kernels
    make_bad = functools.partial(
        ffi.extension().CorunRuntime.simulated, seed=0, kernel=0, slots=1, ahead=1, in_bytes=256, results=[(0, 4)],
        tiles=b"", words=k.words, consts=b"", stages=[], mode=0, profile=False, in_graphs=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="tiles are not there"):
        make_bad(kernels=[(0, 1, 1, 0)])
    with pytest.raises(ValueError, match="at least one slot"):
        make_bad(kernels=[], slots=0)
    r = make_bad(kernels=[])
    with pytest.raises(ValueError, match="outside its slot"):
        r.pack(r.acquire(), [(0, 512, 0)], 1)
