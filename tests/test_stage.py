"""Serving by tokens, as on a GPU, with the copy emulated on the CPU; and the bookkeeping around it."""

from __future__ import annotations

import gc
import inspect
import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_serve
from test_serve import MODEL, PLAIN, equal, fill, make_batch, make_params

import recom_jax
from recom_jax import _recom, ffi, pack, stage
from recom_jax.errors import BatchTypeError, BindError, LeaseError
from tests.helpers import cpu_only

pytestmark = pytest.mark.usefixtures("short_collections")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stage, "_emulated", True)
    yield
    _recom.set_stage_delay(0)


@pytest.fixture
def params() -> Any:
    return make_params()


@pytest.fixture
def serve(params: Any) -> Any:
    return MODEL.bind(params)


def flights() -> stage.Flights:
    return stage._flights(jax.devices("cpu")[0])


def copies() -> int:
    return int(recom_jax.stats()["cuda_staged_copies"])


NO_CALLS = {  # that hand over a token, in tests of leases alone and of servers inside a trace
    "test_a_dropped_lease_is_free_again",
    "test_bind_inside_a_trace",
    "test_jit_takes_operands",
    "test_traced_calls_while_weights_change",
}

# ---- everything that serving promises ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "test_a_bad_update_changes_nothing",
        "test_a_dropped_lease_is_free_again",
        "test_a_lease_survives_mistakes",
        "test_a_lease_with_leaves_passed_directly",
        "test_a_new_batch_size_prepares_no_program",
        "test_bind_inside_a_trace",
        "test_bound_scalars_stay_weak",
        "test_deleted_bound_array",
        "test_inputs_may_change_after_the_call",
        "test_jit_takes_operands[closure]",
        "test_large_tables_are_not_copied",
        "test_lease",
        "test_leases_block_and_time_out",
        "test_numpy_params_are_copied",
        "test_old_weights_are_freed",
        "test_one_fused_call_reads_the_packs",
        "test_replaced_leaves_are_copied_in",
        "test_structures",
        "test_the_server_is_a_pytree",
        "test_traced_calls_while_weights_change",
        "test_two_threads_serve_one_lease",
        "test_types_may_alternate",
        "test_update",
        "test_update_under_load",
        "test_warmup",
        "test_x64_may_be_switched",
    ],
)
def test_as_without_tokens(name: str, request: pytest.FixtureRequest) -> None:
    name, _, wrap = name.rstrip("]").partition("[")
    test = getattr(test_serve, name)
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "skipif" and mark.args[0]:
            pytest.skip(mark.kwargs["reason"])
    before = copies()
    test(
        *[
            wrap if p == "wrap" else request.getfixturevalue(p)
            for p in inspect.signature(test).parameters
        ]
    )
    jax.effects_barrier()
    stage._drain(flights())
    if name not in NO_CALLS:
        assert copies() > before


@pytest.mark.parametrize("only", [*test_serve._leaves(), None])
def test_leaf_kinds(only: str | None) -> None:
    test_serve.test_leaf_kinds(only)


# ---- slots ---------------------------------------------------------------------------------------------------


@cpu_only("the emulated device is the CPU")
def test_a_call_takes_a_token(serve: Any, params: Any) -> None:
    batch = make_batch(9)
    equal(serve(batch), PLAIN(params, batch))
    (plans,) = serve._core.plans.values()
    assert plans[0].target.ordinal == -1
    nbytes = plans[0].layout.total_bytes
    text = str(jax.make_jaxpr(plans[0].call)(np.zeros(nbytes, np.uint8), *serve._bound(plans[0])))
    assert ffi.STAGE in text
    assert f"u8[{plans[0].layout.total_bytes}]" in text


def test_slots_are_not_written_while_a_call_reads_them(serve: Any, params: Any) -> None:
    batches = [make_batch(15, seed) for seed in range(12)]
    wants = [np.asarray(PLAIN(params, b)) for b in batches]
    serve(batches[0])
    _recom.set_stage_delay(2000)
    outs = [serve(b) for b in batches]  # more calls than slots
    for out, want in zip(outs, wants, strict=True):
        np.testing.assert_allclose(np.asarray(out), want, rtol=2e-6, atol=1e-6)


def test_one_slot_serves_calls_that_are_waited_for(serve: Any) -> None:
    batch = make_batch(16)
    for _ in range(20):
        jax.block_until_ready(serve(batch))
    (plans,) = serve._core.plans.values()
    ring = serve._core.staging.ring(plans[0].layout)
    assert len(ring.acquire().tokens) <= 2


def test_results_may_be_donated_or_deleted(serve: Any, params: Any) -> None:
    batch = make_batch(17)
    want = np.asarray(PLAIN(params, batch))
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    _recom.set_stage_delay(500)
    for k in range(20):
        out = serve(batch)
        if k % 2:
            out.delete()
        else:
            np.testing.assert_allclose(double(out), 2 * want, rtol=2e-6, atol=1e-5)


def test_results_are_committed_as_the_bound_arrays_are(params: Any) -> None:
    batch = make_batch(4)
    assert not MODEL.bind(params)(batch).committed
    device = jax.devices()[0]
    serve = MODEL.bind(jax.device_put(params, device))
    out = serve(batch)
    assert out.committed
    equal(out, PLAIN(params, batch))
    serve.update(jax.device_put(make_params(1), device))
    equal(serve(batch), PLAIN(make_params(1), batch))
    with pytest.raises(BindError, match="bind again"):
        serve.update(make_params(2))


def test_a_failed_call_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # What pytest keeps of JAX's log holds the frames that hold the slot.
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)

    def fn(table: Any, batch: Any) -> Any:
        return jnp.take(table, batch["i"], axis=0), jax.pure_callback(
            check, jax.ShapeDtypeStruct((), np.int32), batch["x"]
        )

    def check(x: Any) -> Any:
        if x[0] > 0:
            raise ValueError("bad batch")
        return np.int32(0)

    serve = recom_jax.optimize(fn, options=recom_jax.Options(ring_slots=2)).bind(jnp.ones((4, 2)))
    good = {"i": np.array([1, 2]), "x": np.zeros(2, np.float32)}
    jax.block_until_ready(serve(good))
    for _ in range(6):
        with pytest.raises(Exception, match="bad batch"):
            jax.block_until_ready(serve({**good, "x": np.ones(2, np.float32)}))
        jax.block_until_ready(serve(good))


def test_a_call_that_raises_at_dispatch_holds_its_slot_no_longer_than_the_device(
    serve: Any, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(18)
    serve(batch)
    (plans,) = serve._core.plans.values()
    call = plans[0].call

    def broken(*args: Any) -> Any:
        call(*args)
        raise RuntimeError("out of luck")

    object.__setattr__(plans[0], "call", broken)
    for _ in range(20):
        with pytest.raises(RuntimeError, match="out of luck"):
            serve(batch)
    object.__setattr__(plans[0], "call", call)
    equal(serve(batch), PLAIN(params, batch))


def test_many_threads() -> None:
    params = make_params()
    options = recom_jax.Options(ring_slots=3, lease_timeout_s=60.0)
    serve = recom_jax.optimize(test_serve.model, options=options).bind(params)
    batches = [make_batch(n, seed) for seed in range(4) for n in (5, 18)]
    wants = [np.asarray(PLAIN(params, b)) for b in batches]
    for b in batches:
        serve(b)
    _recom.set_stage_delay(200)
    bad: list[Any] = []

    def work(k: int) -> None:
        try:
            for n in range(25):
                which = (k + n) % len(batches)
                views = n % 3 == 0
                given = batches[which]
                if views:
                    given = fill(serve.input_views(given), given)
                out = serve(given)
                del given
                if not np.allclose(
                    np.asarray(out), wants[which], rtol=2e-6, atol=1e-6, equal_nan=True
                ):
                    bad.append((k, n))
        except Exception as why:
            bad.append(why)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
        assert not t.is_alive()
    assert not bad


def test_a_dropped_server_frees_its_memory(params: Any) -> None:
    stage._drain(flights())
    gc.collect()
    bytes_before, sources = _recom.live_pack_bytes(), recom_jax.stats()["cuda_stage_sources"]
    serve = MODEL.bind(params)
    out = serve(make_batch(40))
    assert recom_jax.stats()["cuda_stage_sources"] > sources
    jax.block_until_ready(out)
    stage._drain(flights())
    del serve, out
    gc.collect()
    assert recom_jax.stats()["cuda_stage_sources"] == sources
    assert _recom.live_pack_bytes() == bytes_before


def test_leases_of_another_server_of_the_same_batch(params: Any) -> None:
    one, two = MODEL.bind(params), MODEL.bind(make_params(1))
    batch, other = make_batch(20), make_batch(20, 1)
    one(other)
    two(other)
    keep = [one.input_views(batch) for _ in range(3)]  # slots differ from the other ring's
    views = fill(one.input_views(batch), batch)
    equal(two(views), PLAIN(make_params(1), batch))
    del keep


def test_a_lease_that_was_served_is_not_served_again(serve: Any) -> None:
    batch = make_batch(21)
    views = fill(serve.input_views(batch), batch)
    serve(views)
    with pytest.raises(LeaseError, match="served already"):
        serve(views)


def test_mismatches_are_told_as_ever(serve: Any) -> None:
    batch = make_batch(22)
    serve(batch)
    with pytest.raises(BatchTypeError, match=r"batch\['x'\].*str"):
        serve({**batch, "x": "no"})


def test_cost_names_the_device(serve: Any) -> None:
    batch = make_batch(33)
    cost = serve.cost(batch)
    assert cost.device == str(jax.devices()[0])
    (plan,) = serve._core.by_types.values()  # the token, and what XLA reads itself
    assert cost.staging_copy == plan.layout.total_bytes + plan.copied
    assert plan.copied == 0  # nothing here
    assert "page-locked" in str(cost)
    assert cost.device in str(cost)
    assert MODEL.bind(make_params()).cost(batch) == cost


# ---- the target ----------------------------------------------------------------------------------------------


def _slot() -> Any:
    leaf = np.arange(4, dtype=np.int32)
    layout = pack.layout_of([pack.LeafSpec.of(leaf)])
    slot = pack.SlotRing(layout, 2).acquire()
    assert pack.Packer(layout).pack_into(slot, [leaf]) < 0
    return slot


def test_a_token_stands_for_its_slot() -> None:
    slot = _slot()
    target = stage.target_of((None, False))
    token = target.token(slot)
    assert target.token(slot) is token
    nbytes = slot.layout.total_bytes
    copy = jax.jit(lambda t: stage.copy_slot(t, nbytes))
    got, done = copy(token.array)  # the call copies what nobody has uploaded
    np.testing.assert_array_equal(got, slot.array())
    slot.upload(token.address)
    got, done = copy(token.array)
    np.testing.assert_array_equal(got, token.array)
    assert done.shape == ()


def test_an_unknown_token_is_an_error() -> None:
    slot = _slot()
    token = stage.target_of((None, False)).token(slot).array
    nbytes = slot.layout.total_bytes
    copy = jax.jit(lambda t, n: stage.copy_slot(t, n), static_argnums=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no staging slot of this process"):
        jax.block_until_ready(copy(token + np.uint8(0), nbytes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"holds {nbytes} bytes"):
        jax.block_until_ready(copy(token, nbytes + 64))
    jax.block_until_ready(copy(token, nbytes))
    del slot  # the ring goes, and with it what its tokens stand for
    gc.collect()
    with pytest.raises(jax.errors.JaxRuntimeError, match="no staging slot of this process"):
        jax.block_until_ready(copy(token, nbytes))


# ---- flights -------------------------------------------------------------------------------------------------


class Done:
    def __init__(self, ready: bool = False, error: bool = False) -> None:
        self.ready, self.error, self.waited = ready, error, False

    def is_ready(self) -> bool:
        if self.error:
            raise RuntimeError("failed")
        return self.ready

    def block_until_ready(self) -> None:
        self.waited = True
        if self.error:
            raise RuntimeError("failed")


class Held:
    alive = 0

    def __init__(self) -> None:
        Held.alive += 1

    def __del__(self) -> None:
        Held.alive -= 1


def test_flights_let_go_in_order() -> None:
    f = stage.Flights()
    calls = [Done(True), Done(error=True), Done(), Done(True)]
    for d in calls:
        f.add(d, Held())
    assert Held.alive == 4
    f.sweep()
    assert (Held.alive, len(f)) == (2, 2)
    f.sweep()
    assert len(f) == 2
    assert f.wait()
    assert calls[2].waited
    assert Held.alive == 1
    f.sweep()
    assert (Held.alive, len(f)) == (0, 0)
    assert not f.wait()


def test_a_device_that_takes_no_work_keeps_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(token: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(stage, "_after", fail)
    f, held = stage.Flights(), object()
    f.add_failed(None, held)
    assert f._lost == [held]
    assert not f.wait()


# ---- which device --------------------------------------------------------------------------------------------


class FakeDevice:
    def __init__(self, platform: str, version: str = "") -> None:
        self.platform = platform
        self.client = type("Client", (), {"platform_version": version})()


@pytest.mark.parametrize(
    ("device", "staged"),
    [
        (FakeDevice("gpu", "PJRT C API\ncuda 13000"), True),
        (FakeDevice("cuda", "CUDA 12"), True),
        (FakeDevice("gpu", "rocm 60300"), False),
        (FakeDevice("tpu"), False),
        (FakeDevice("cpu"), False),
    ],
)
def test_only_cuda_is_staged(device: Any, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_emulated", False)
    assert stage.is_staged(device) == staged


def test_home() -> None:
    device = jax.devices()[0]
    free, bound = jnp.ones(2), jax.device_put(jnp.ones(2), device)
    assert stage.home_of([]) == (None, False)
    assert stage.home_of([free]) == (None, False)
    assert stage.home_of([free, bound]) == (device, True)
    assert stage.target_of((None, True)) is None  # over several devices
    assert stage.target_of((device, True)) is not stage.target_of((None, False))
    assert stage.target_of((device, True)) is stage.target_of((device, True))
