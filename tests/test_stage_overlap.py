"""A call is on its way while its batch is still being packed: nothing stale, nothing half, no endless wait."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from test_serve import MODEL, PLAIN, fill, make_batch, make_params, model

import recom_jax
from recom_jax import _recom, pack, stage
from recom_jax.errors import BatchError, BatchTypeError, DeletedError

pytestmark = pytest.mark.usefixtures("short_collections")

ROWS = 20_000  # 720 KB: 11 chunks, large enough to be packed while the call is dispatched
PIECE = 128 << 10


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stage, "_emulated", True)
    monkeypatch.setattr(stage.target_of((None, False)), "threads", 4)
    _recom.set_stage_piece(PIECE)
    yield
    _recom.set_pack_delay(0)
    _recom.set_pack_fault(-1)
    _recom.set_stage_delay(0)
    _recom.set_stage_piece(stage.PIECE_BYTES)
    stage._drain(flights())


@pytest.fixture(scope="module")
def params() -> Any:
    return make_params()


@pytest.fixture
def serve(params: Any) -> Any:
    return MODEL.bind(params)


def flights() -> stage.Flights:
    return stage._flights(jax.devices()[0])


def same(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-6, atol=1e-6)


def wiped(batch: Any) -> None:
    for x in batch.values():
        x[...] = 0


def ring_of(serve: Any) -> Any:
    (plan,) = serve._core.by_types.values()
    return serve._core.staging.ring(plan.layout)


# ---- what the caller sees --------------------------------------------------------------------------------------


def test_a_slow_pack_is_read_piece_by_piece(serve: Any, params: Any) -> None:
    want = np.asarray(PLAIN(params, make_batch(ROWS)))
    serve(make_batch(ROWS))
    _recom.set_pack_delay(1000)
    before = recom_jax.stats()
    for _ in range(5):
        batch = make_batch(ROWS)
        out = serve(batch)
        wiped(batch)  # the call has returned: its arrays are the caller's again
        same(out, want)
    after = recom_jax.stats()
    assert after["cuda_staged_copies"] - before["cuda_staged_copies"] == 5
    assert after["cuda_staged_pieces"] - before["cuda_staged_pieces"] >= 10


def test_a_slow_device_copies_what_was_packed(serve: Any, params: Any) -> None:
    want = np.asarray(PLAIN(params, make_batch(ROWS)))
    serve(make_batch(ROWS))
    _recom.set_stage_delay(3000)
    outs = []
    for _ in range(12):  # more than slots
        batch = make_batch(ROWS)
        outs.append(serve(batch))
        wiped(batch)
    for out in outs:
        same(out, want)


def test_leaves_of_other_types_and_strides(params: Any) -> None:
    serve = MODEL.bind(params)
    batch = make_batch(ROWS)
    want = np.asarray(PLAIN(params, batch))
    odd = {
        "a": batch["a"].astype(np.int64),
        "b": np.asfortranarray(batch["b"]),
        "x": np.repeat(batch["x"].astype(np.float64), 2, axis=0)[::2],
    }
    _recom.set_pack_delay(200)
    same(serve(odd), want)
    same(serve(odd), want)


@pytest.mark.parametrize("chunk", [0, 3, 10])
def test_a_copy_that_fails_fails_the_call(serve: Any, params: Any, chunk: int) -> None:
    batch = make_batch(ROWS)
    want = np.asarray(PLAIN(params, batch))
    same(serve(batch), want)
    _recom.set_pack_fault(chunk)
    for _ in range(20):  # more than slots: a failed one is free again
        with pytest.raises(Exception, match="a copy failed"):
            jax.block_until_ready(serve(batch))
    _recom.set_pack_fault(-1)
    stage._drain(flights())
    gc.collect()
    for _ in range(20):
        same(serve(batch), want)
    stage._drain(flights())
    assert ring_of(serve).n_free == ring_of(serve).n_slots


def test_a_bad_batch_begins_nothing(serve: Any, params: Any) -> None:
    batch = make_batch(ROWS)
    same(serve(batch), PLAIN(params, batch))
    stage._drain(flights())
    copies = recom_jax.stats()["cuda_staged_copies"]
    _recom.set_pack_fault(0)  # nothing may be copied at all
    with pytest.raises(BatchTypeError, match=r"batch\['x'\]"):
        serve({**batch, "x": "no"})
    with pytest.raises((BatchError, TypeError, ValueError)):
        serve({**batch, "x": batch["x"][: ROWS // 2]})
    assert recom_jax.stats()["cuda_staged_copies"] == copies
    assert ring_of(serve).n_free == ring_of(serve).n_slots


def test_a_call_that_raises_reads_nothing_afterwards(
    serve: Any, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(ROWS)
    want = np.asarray(PLAIN(params, batch))
    same(serve(batch), want)
    (plan,) = serve._core.by_types.values()
    call = plan.call

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of luck")

    _recom.set_pack_delay(1000)
    object.__setattr__(plan, "call", broken)
    begun = []
    begin = pack.Staging.begin
    monkeypatch.setattr(
        pack.Staging, "begin", lambda *a, **k: begun.append(begin(*a, **k)) or begun[-1]
    )
    for _ in range(12):
        with pytest.raises(RuntimeError, match="out of luck"):
            serve(batch)
        assert begun.pop().packing is None  # joined
    object.__setattr__(plan, "call", call)
    same(serve(batch), want)


def test_weights_that_are_gone(params: Any) -> None:
    mine = make_params(7)
    serve = MODEL.bind(mine)
    batch = make_batch(ROWS)
    serve(batch)
    mine["big"].delete()
    _recom.set_pack_delay(500)
    for _ in range(12):
        with pytest.raises(DeletedError, match=r"params\['big'\]"):
            serve(batch)
    serve.update(make_params(8))
    same(serve(batch), PLAIN(make_params(8), batch))


def test_a_server_dropped_while_its_call_runs(params: Any) -> None:
    batch = make_batch(ROWS)
    want = np.asarray(PLAIN(params, batch))
    _recom.set_pack_delay(300)
    _recom.set_stage_delay(5000)
    outs = []
    for _ in range(3):
        serve = MODEL.bind(params)
        outs.append(serve(batch))
        del serve
        gc.collect()
    for out in outs:
        same(out, want)


def test_sixteen_threads_and_one_slot(params: Any) -> None:
    options = recom_jax.Options(ring_slots=1, lease_timeout_s=60.0)
    serve = recom_jax.optimize(model, options=options).bind(params)
    sizes = (9, ROWS, ROWS + 1)
    batches = [make_batch(n, seed) for n in sizes for seed in range(2)]
    wants = [np.asarray(PLAIN(params, b)) for b in batches]
    for b in batches:
        serve(b)
    _recom.set_pack_delay(100)
    _recom.set_stage_delay(200)
    bad: list[Any] = []

    def work(k: int) -> None:
        try:
            for n in range(6):
                which = (k + n) % len(batches)
                mine = {name: x.copy() for name, x in batches[which].items()}
                if n % 3 == 0:
                    views = serve.input_views(mine)
                    out = serve(fill(views, mine))
                    del views
                else:
                    out = serve(mine)
                wiped(mine)
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


# ---- the pack itself -------------------------------------------------------------------------------------------


def begin(leaves: Any, threads: int = 4, slots: int = 1) -> tuple[Any, Any, Any]:
    """(the ring, the slot's bytes, what is under way)."""
    layout = pack.layout_of([pack.LeafSpec.of(x) for x in leaves])
    ring = pack.SlotRing(layout, slots)
    slot = ring.try_acquire()
    data, packing = pack.Packer(layout).begin(slot, leaves, threads)
    assert slot.state == "in_flight"
    return ring, data, packing


def leaf(data: Any, ring: Any, i: int) -> Any:
    layout = ring.layout
    got = data[layout.offset(i) :][: layout.entry_bytes(i)].view(layout.dtype(i))
    return got.reshape(layout.shape(i))


@pytest.mark.parametrize("threads", [2, 3, 8, 64])
def test_begun_and_joined(threads: int) -> None:
    rng = np.random.default_rng(threads)
    leaves = [
        *(rng.integers(0, 1 << 30, 700, dtype=np.int32) for _ in range(300)),
        np.empty((0, 3), np.int32),
        rng.standard_normal((90_000, 2)).astype(np.float32),
        rng.integers(0, 255, (3, 70_001), dtype=np.uint8).T,
        np.array(7, np.int16),
    ]
    for _ in range(5):
        ring, data, packing = begin(leaves, threads)
        packing.join()
        packing.join()  # again: nothing
        for i, x in enumerate(leaves):
            np.testing.assert_array_equal(leaf(data, ring, i), x)


def test_small_batches_are_packed_at_once() -> None:
    ring, data, packing = begin([np.arange(100)])
    assert packing is None
    np.testing.assert_array_equal(leaf(data, ring, 0), np.arange(100))


def test_a_pack_that_nobody_joins_keeps_what_it_reads() -> None:
    _recom.set_pack_delay(500)
    want = np.arange(400_000, dtype=np.int32)
    leaves = [want.copy(), want[::-1].copy()]
    ring, data, packing = begin(leaves)
    del leaves  # the list may go, and what was in it
    junk = [np.full(400_000, 7, np.int32) for _ in range(4)]
    del data
    assert ring.try_acquire() is None  # the slot is still written
    begun = time.perf_counter()
    del packing
    assert time.perf_counter() - begun < 60
    slot = ring.try_acquire()
    np.testing.assert_array_equal(slot.view(0), want)
    np.testing.assert_array_equal(slot.view(1), want[::-1])
    assert len(junk) == 4


def test_a_lease_that_does_not_fit_stays_one() -> None:
    leaves = [np.zeros(300_000, np.int32)]
    layout = pack.layout_of([pack.LeafSpec.of(x) for x in leaves])
    slot = pack.SlotRing(layout, 1).try_acquire()
    packer = pack.Packer(layout)
    assert packer.begin(slot, [np.zeros(3, np.int32)], 4) == 0
    assert slot.state == "leased"
    _, packing = packer.begin(slot, leaves, 4)
    packing.join()
    with pytest.raises(RuntimeError, match="needs a leased slot"):
        packer.begin(slot, leaves, 4)


def test_a_token_s_call_before_all_is_packed(params: Any) -> None:
    """The handler runs while helpers copy, and copies itself what they have not taken."""
    target = stage.target_of((None, False))
    want = np.arange(600_000, dtype=np.int32)
    layout = pack.layout_of([pack.LeafSpec.of(want)])
    ring, packer = pack.SlotRing(layout, 2), pack.Packer(layout)
    copy = jax.jit(lambda t: stage.copy_slot(t, layout.total_bytes))
    _recom.set_pack_delay(1000)
    for threads in (2, 8):
        slot = ring.try_acquire()
        token = target.token(slot)
        data, packing = packer.begin(slot, [want], threads, token.address)
        got, done = copy(token.array)
        np.testing.assert_array_equal(
            np.asarray(got)[layout.offset(0) :][: want.nbytes].view(np.int32), want
        )
        packing.join()
        jax.block_until_ready(done)
        del slot, data, packing


def test_helpers_that_look_out_for_the_next_batch(params: Any) -> None:
    options = recom_jax.Options(spin_us=300, ring_slots=2)
    serve = recom_jax.optimize(model, options=options).bind(params)
    batches = [make_batch(ROWS, seed) for seed in range(3)]
    wants = [np.asarray(PLAIN(params, b)) for b in batches]
    for k in range(12):
        same(serve(batches[k % 3]), wants[k % 3])
        same(serve(fill(serve.input_views(batches[k % 3]), batches[k % 3])), wants[k % 3])
    with pytest.raises(recom_jax.OptionError, match="spin_us"):
        recom_jax.Options(spin_us=-1)


@pytest.mark.parametrize("rows", [ROWS, 130_000])  # 0.7 MB, for a helper; 4.7 MB, for the caller
def test_a_lease_is_copied_at_once(rows: int, serve: Any, params: Any) -> None:
    batches = [{k: np.roll(v, n, 0) for k, v in make_batch(rows).items()} for n in range(4)]
    serve(batches[0])
    for batch in (*batches, *batches):
        same(serve(fill(serve.input_views(batch), batch)), PLAIN(params, batch))
    (plan,) = serve._core.by_types.values()
    slot = serve._acquire(plan)
    token = stage.target_of((None, False)).token(slot)
    issued = slot.upload(token.address, 0)
    assert (issued is None) == (rows != ROWS)
    if issued is not None:
        issued.join()
    assert np.asarray(token.array).tobytes() == slot.array().tobytes()
