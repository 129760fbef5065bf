"""`Server.fetch`: results as numpy arrays, delivered to a slot's own host memory on a GPU (here emulated)."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_serve import MODEL, PLAIN, fill, make_batch, make_params, model

import recom_jax
from recom_jax import _recom, ffi, stage
from recom_jax.errors import BatchTypeError, LeaseError, RecomError
from recom_jax.options import Options


@pytest.fixture(params=["as on a GPU", "as on a CPU"], autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stage, "_emulated", request.param == "as on a GPU")
    yield
    _recom.set_stage_delay(0)


def staged() -> bool:
    return stage.is_staged(jax.local_devices()[0])


@pytest.fixture
def params() -> Any:
    return make_params()


@pytest.fixture
def serve(params: Any) -> Any:
    return MODEL.bind(params)


def same(got: Any, want: Any) -> None:
    """Numpy arrays, with the bits of another call of the same server."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(a) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == np.asarray(b).tobytes()


# ---- the same numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 7, 50])
def test_equals_a_call(serve: Any, params: Any, size: int) -> None:
    for seed in range(3):
        batch = make_batch(size, seed)
        got = serve.fetch(batch)
        same(got, serve(batch))
        np.testing.assert_allclose(got, PLAIN(params, batch), rtol=2e-6, atol=1e-6)


@given(
    size=st.integers(0, 30),
    leased=st.booleans(),
    on_device=st.sets(st.sampled_from(["a", "b", "x"])),
    seed=st.integers(0, 9),
)
def test_any_batch(size: int, leased: bool, on_device: set[str], seed: int) -> None:
    serve = SERVERS.setdefault(stage._emulated, MODEL.bind(make_params()))
    batch = make_batch(size, seed)
    given_ = {k: jnp.asarray(v) if k in on_device else v for k, v in batch.items()}
    if leased:
        given_ = fill(serve.input_views(given_), given_) if not on_device else given_
    same(serve.fetch(given_), serve(batch))


SERVERS: dict[bool, Any] = {}


def many_results(params: Any, batch: Any) -> Any:
    rows = model(params, batch)
    return {
        "rows": rows,
        "half": rows.astype(jnp.bfloat16),
        "none": None,
        "pair": (batch["a"].sum(), (rows > 0).astype(jnp.int8)[:, :3]),
        "empty": rows[:0],
        "complex": rows[:, 0] + 1j,
        "any": (batch["b"] > 0).any(1),
    }


def test_results_of_every_kind(params: Any) -> None:
    serve = recom_jax.optimize(many_results).bind(params)
    for size in (5, 0, 64):
        same(serve.fetch(make_batch(size)), serve(make_batch(size)))


def test_what_numpy_cannot_hold_is_left_to_jax(params: Any) -> None:
    small = recom_jax.optimize(lambda p, b: (model(p, b) * 2).astype(jnp.float8_e4m3fn)).bind(
        params
    )
    same(small.fetch(make_batch(5)), small(make_batch(5)))
    assert all(p.delivered == -1 for ps in small._core.plans.values() for p in ps)

    def with_key(params: Any, batch: Any) -> Any:
        return model(params, batch), jax.random.key(batch["a"][0])

    serve = recom_jax.optimize(with_key).bind(params)
    got, want = serve.fetch(make_batch(5)), serve(make_batch(5))
    np.testing.assert_array_equal(got[0], want[0])
    assert (jax.random.key_data(got[1]) == jax.random.key_data(want[1])).all()


def test_results_are_the_callers(serve: Any) -> None:
    """No later call writes them."""
    first = [serve.fetch(make_batch(8, seed)) for seed in range(12)]
    kept = [x.copy() for x in first]
    for seed in range(20):
        serve.fetch(make_batch(8, 100 + seed))
    for got, want in zip(first, kept, strict=True):
        np.testing.assert_array_equal(got, want)


def test_new_weights(serve: Any) -> None:
    batch, new = make_batch(9), make_params(1)
    before = serve.fetch(batch)
    serve.update(new)
    after = serve.fetch(batch)
    np.testing.assert_allclose(after, PLAIN(new, batch), rtol=2e-6, atol=1e-6)
    assert not np.array_equal(before, after)


def test_in_buckets(params: Any) -> None:
    serve = recom_jax.optimize(model, options=Options(batch_buckets=(4, 16))).bind(params)
    for size in (1, 3, 9):
        got = serve.fetch(make_batch(size))
        assert type(got) is np.ndarray
        np.testing.assert_allclose(got, PLAIN(params, make_batch(size)), rtol=2e-6, atol=1e-6)


def test_arguments_of_all_kinds(params: Any) -> None:
    def scaled(params: Any, batch: Any, by: float, *, flip: bool) -> Any:
        rows = model(params, batch) * by
        return rows[::-1] if flip else rows

    serve = recom_jax.optimize(scaled, static_argnames="flip").bind(params)
    for flip in (True, False):
        same(serve.fetch(make_batch(6), 2.0, flip=flip), serve(make_batch(6), 2.0, flip=flip))


# ---- how -----------------------------------------------------------------------------------------------------


def test_the_program_ends_by_delivering(serve: Any, params: Any) -> None:
    serve(make_batch(12))
    (plan,) = (p for ps in serve._core.plans.values() for p in ps)
    if plan.target is None:
        assert plan.delivered == -1
        return
    token = np.zeros(plan.layout.total_bytes, np.uint8)
    jaxpr = jax.make_jaxpr(plan.body)(token, *serve._bound(plan)).jaxpr
    last = jaxpr.eqns[-1]
    assert last.params["target_name"] == ffi.DELIVER
    assert last.invars[0] is jaxpr.invars[0] and last.invars[2] is jaxpr.outvars[0]
    assert last.outvars[0] is jaxpr.outvars[1]  # what the slot is kept until
    assert plan.delivered == PLAIN(params, make_batch(12)).nbytes


def test_its_memory_is_known_before(serve: Any, params: Any) -> None:
    want = PLAIN(params, make_batch(12)).nbytes if staged() else 0
    cost = serve.cost(make_batch(12))
    assert cost.fetch_slot == want
    assert (f"results for `fetch` to {want:,} page-locked bytes a slot" in str(cost)) == staged()


def test_one_program_for_both(serve: Any) -> None:
    """`warmup` warms up both."""
    serve.warmup([17], make_batch(3))
    before = recom_jax.stats()["traces"]
    (plan,) = (p for ps in serve._core.plans.values() for p in ps)
    compiled = plan.call._cache_size()
    same(serve.fetch(make_batch(17)), serve(make_batch(17)))
    assert recom_jax.stats()["traces"] == before and plan.call._cache_size() == compiled


def test_a_slot_is_free_at_once(params: Any) -> None:
    serve = recom_jax.optimize(model, options=Options(ring_slots=1, lease_timeout_s=0.2)).bind(
        params
    )
    for seed in range(20):
        serve.fetch(make_batch(5, seed))
        if staged():
            (plan,) = (p for ps in serve._core.plans.values() for p in ps)
            assert serve._core.staging.ring(plan.layout).n_free == 1


def test_a_call_does_not_deliver(serve: Any) -> None:
    """What nobody asked for is not copied, neither before nor after a fetch of the same slot."""
    if not staged():
        pytest.skip("nothing is staged")
    serve.fetch(make_batch(4))
    (plan,) = (p for ps in serve._core.plans.values() for p in ps)
    slot = serve._acquire(plan)  # the one that was given back last
    delivery = plan.target.token(slot).delivery
    slot.release()
    del slot
    jax.block_until_ready(serve(make_batch(4)))
    assert delivery.copied is True  # by the fetch
    with pytest.raises(ValueError, match="results of -1"):
        delivery.take([np.empty(1)])


def test_many_threads(serve: Any) -> None:
    want = {seed: np.asarray(serve(make_batch(6, seed))) for seed in range(8)}
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for k in range(40):
            got = (
                serve.fetch(make_batch(6, seed))
                if k % 3
                else np.asarray(serve(make_batch(6, seed)))
            )
            if got.tobytes() != want[seed].tobytes():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---- what goes wrong -----------------------------------------------------------------------------------------


def test_inside_a_trace(serve: Any) -> None:
    with pytest.raises(RecomError, match=r"model.fetch inside a trace: .* Call the server itself"):
        jax.jit(lambda b: serve.fetch(b))(make_batch(3))


def test_bad_batches(serve: Any) -> None:
    with pytest.raises(BatchTypeError, match="argument batch"):
        serve.fetch(make_batch(3) | {"a": "three"})
    views = fill(serve.input_views(make_batch(3)), make_batch(3))
    serve.fetch(views)
    with pytest.raises(LeaseError, match="served already"):
        serve.fetch(views)


def failing(times: int) -> Callable[..., Any]:
    """A function of the host that fails from its second call on."""
    calls = iter(range(10**6))

    def look(x: Any) -> Any:
        if next(calls) >= times:
            raise ValueError("the seventh table is missing")
        return x

    return look


def test_a_call_that_fails(params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the call's own, nothing hangs, and slots come back."""
    look = failing(1)
    # A log that is kept would hold the errors, their tracebacks the slots.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)

    def looks(params: Any, batch: Any) -> Any:
        rows = model(params, batch)
        kind = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        return jax.pure_callback(look, kind, rows)

    serve = recom_jax.optimize(looks).bind(params)
    serve.fetch(make_batch(4))
    for _ in range(3):
        with pytest.raises(Exception, match="the seventh table is missing"):
            serve.fetch(make_batch(4))
    (plan,) = (p for ps in serve._core.plans.values() for p in ps)
    ring = serve._core.staging.ring(plan.layout)
    for _ in range(100):
        gc.collect()
        if plan.target is not None:
            plan.target.flights.sweep()
        if ring.n_free == ring.n_slots:
            break
        time.sleep(0.05)
    assert ring.n_free == ring.n_slots


def test_an_interrupted_wait(params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends it; what the call still reads stays until it has ended; later calls are right."""
    if not staged():
        pytest.skip("nothing is staged")
    serve = recom_jax.optimize(model, options=Options(ring_slots=2)).bind(params)
    serve(make_batch(4))

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(stage, "await_results", interrupted)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                serve.fetch(make_batch(4))
    for seed in range(6):
        same(serve.fetch(make_batch(4, seed)), serve(make_batch(4, seed)))


def test_a_wait_of_many_looks(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LOOK_US", 100)
    _recom.set_stage_delay(3000)
    for seed in range(3):
        same(serve.fetch(make_batch(4, seed)), serve(make_batch(4, seed)))


def test_a_delivery_says_when() -> None:
    delivery = _recom.delivery
    with pytest.raises(RuntimeError, match="no staging slot"):
        delivery(12345, 64)
    if not staged():
        return
    serve = MODEL.bind(make_params())
    serve(make_batch(4))
    (plan,) = (p for ps in serve._core.plans.values() for p in ps)
    slot = serve._acquire(plan)
    d = plan.target.token(slot).delivery
    d.begin(plan.delivered, plan.target.ordinal)
    begun = time.monotonic()
    assert not d.wait(2000, 0) and not d.copied  # nobody delivers
    assert 0.002 <= time.monotonic() - begun < 1.0
    with pytest.raises(ValueError, match="take"):
        d.take([np.empty(plan.kinds[0].shape, plan.kinds[0].dtype)])
    d.cancel()
    slot.release()
