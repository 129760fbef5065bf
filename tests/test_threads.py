"""Sixteen threads, mixed batch sizes, every way in: right results, no deadlock, flat memory."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import _recom

pytestmark = pytest.mark.usefixtures("short_collections")

THREADS, CALLS = 16, 60
SIZES = (1, 2, 5, 16, 33)


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def model(params: Any, batch: Any) -> Any:
    cols = [
        jnp.sum(jnp.take(t, batch[f"c{k}"], axis=0, mode="clip"), axis=1)
        for k, t in enumerate(params)
    ]
    return jnp.concatenate([*cols, batch["dense"]], axis=1)


PARAMS = [
    jnp.asarray(np.random.default_rng(k).standard_normal((40 + k, 4), dtype=np.float32))
    for k in range(6)
]


def make_batch(size: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([size, seed])
    batch = {f"c{k}": rng.integers(0, 40, (size, 3)).astype(np.int32) for k in range(6)}
    return {**batch, "dense": rng.standard_normal((size, 5), dtype=np.float32)}


@pytest.fixture(scope="module")
def cases() -> list[tuple[Any, Any]]:
    plain = jax.jit(model)
    batches = [make_batch(n, s) for n in SIZES for s in range(3)]
    return [(b, np.asarray(plain(PARAMS, b))) for b in batches]


def run(work: Callable[[int, int], None], threads: int = THREADS, calls: int = CALLS) -> None:
    """Calls ``work(thread, call)`` from all threads; fails on the first exception, or if they hang."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(threads)

    def loop(k: int) -> None:
        try:
            barrier.wait(60)
            for n in range(calls):
                if errors:
                    return
                work(k, n)
        except BaseException as why:
            errors.append(why)

    pool = [threading.Thread(target=loop, args=(k,), daemon=True) for k in range(threads)]
    for t in pool:
        t.start()
    end = time.monotonic() + 240
    for t in pool:
        t.join(max(0.0, end - time.monotonic()))
    assert not any(t.is_alive() for t in pool), "deadlock"
    if errors:
        raise errors[0]


def check(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("way", ["call", "bind", "views", "traced", "mixed"])
def test_threads(cases: Any, way: str) -> None:
    optimized = recom_jax.optimize(model)
    serve = optimized.bind(PARAMS)
    traced = jax.jit(lambda b: serve(b))

    def call(k: int, n: int, how: str) -> None:
        batch, want = cases[(k * 7 + n * 3) % len(cases)]
        if how == "call":
            check(optimized(PARAMS, batch), want)
        elif how == "bind":
            check(serve(batch), want)
        elif how == "traced":
            check(traced(batch), want)
        else:
            views = serve.input_views(batch)
            for name, value in batch.items():
                views[name][...] = value
            check(serve(views), want)

    ways = ["call", "bind", "views", "traced"]
    run(lambda k, n: call(k, n, ways[(k + n) % 4] if way == "mixed" else way))
    gc.collect()
    held = _recom.live_pack_bytes()
    run(lambda k, n: call(k, n, ways[(k + n) % 4] if way == "mixed" else way), calls=10)
    gc.collect()
    assert _recom.live_pack_bytes() == held


def test_first_calls_at_once(cases: Any) -> None:
    """Tracing, compiling, packing the arena: all threads begin together, nobody went before."""
    for _ in range(2):
        serve = recom_jax.optimize(lambda p, b: model(p, b)).bind(PARAMS)
        run(
            lambda k, n, serve=serve: check(
                serve(cases[k % len(cases)][0]), cases[k % len(cases)][1]
            ),
            calls=1,
        )


def test_results_outlive_their_slots(cases: Any) -> None:
    """Results are read late, after the slots of their inputs were reused many times."""
    serve = recom_jax.optimize(model).bind(PARAMS)

    def work(k: int, n: int) -> None:
        mine = [cases[(k + n + j) % len(cases)] for j in range(8)]
        outs = [serve(batch) for batch, _ in mine]
        for out, (_, want) in zip(outs, mine, strict=True):
            check(out, want)

    run(work, threads=8, calls=20)


def test_inputs_are_overwritten_at_once(cases: Any) -> None:
    """The caller may reuse its own arrays as soon as the call returns."""
    serve = recom_jax.optimize(model).bind(PARAMS)

    def work(k: int, n: int) -> None:
        batch, want = cases[(k + n) % len(cases)]
        own = {name: value.copy() for name, value in batch.items()}
        out = serve(own)
        for value in own.values():
            value[...] = 17
        check(out, want)

    run(work, threads=8, calls=40)


def test_more_threads_than_slots(cases: Any) -> None:
    serve = recom_jax.optimize(model, options=recom_jax.Options(ring_slots=2)).bind(PARAMS)

    def work(k: int, n: int) -> None:
        batch, want = cases[(k + n) % len(cases)]
        if n % 2:
            check(serve(batch), want)
            return
        views = serve.input_views(batch)
        for name, value in batch.items():
            views[name][...] = value
        check(serve(views), want)

    run(work, calls=20)


def test_batches_that_several_threads_compute() -> None:
    """Large enough for XLA's pool to help with a call, while others' calls run and slots come round again."""
    rng = np.random.default_rng(0)
    few = []
    for _ in range(3):
        batch = {f"c{k}": rng.integers(0, 40, (9000, 3)).astype(np.int32) for k in range(6)}
        batch["dense"] = rng.standard_normal((9000, 5), dtype=np.float32)
        few.append((batch, np.asarray(jax.jit(model)(PARAMS, batch))))
    serve = recom_jax.optimize(model).bind(PARAMS)

    def work(k: int, n: int) -> None:
        batch, want = few[(k + n) % 3]
        check(serve(batch), want)

    run(work, threads=8, calls=12)


def test_different_models_at_once(cases: Any) -> None:
    def work(k: int, n: int) -> None:
        scale = float(k)
        serve = recom_jax.optimize(lambda p, b: model(p, b) * scale).bind(PARAMS)
        batch, want = cases[k % len(cases)]
        check(serve(batch), want * np.float32(scale))

    run(work, threads=6, calls=2)


def test_numpy_and_device_leaves_at_once(cases: Any) -> None:
    serve = recom_jax.optimize(model).bind(PARAMS)
    few = [
        (b, {k: jnp.asarray(v) if k < "c3" else v for k, v in b.items()}, w) for b, w in cases[:4]
    ]

    def work(k: int, n: int) -> None:
        host, device, want = few[(k + n) % 4]
        check(serve(host if n % 2 else device), want)

    run(work, calls=30)
