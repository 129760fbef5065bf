"""Fused calls that read a slot's token, emulated on the CPU: no copy of the batch but what XLA itself reads."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recom_jax
from recom_jax import _recom, ffi, lowering, pack, stage
from recom_jax.bound import Plan
from recom_jax.cuda import nvrtc
from recom_jax.errors import CudaError
from tests.helpers import cpu_only

pytestmark = cpu_only("the emulated device is the CPU")
COLUMNS = 6


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stage, "_emulated", True)
    yield
    _recom.set_stage_delay(0)


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tables = {
        f"t{k}": jnp.asarray(rng.standard_normal((30, 4), np.float32)) for k in range(COLUMNS)
    }
    return {**tables, "w": jnp.asarray(rng.standard_normal((3, 2), np.float32))}


def batch_of(size: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([seed, size])
    ids = {f"t{k}": rng.integers(0, 30, size, np.int32) for k in range(COLUMNS)}
    return {**ids, "x": rng.standard_normal((size, 3), dtype=np.float32)}


def model_reading(names: tuple[str, ...], dense: bool) -> Callable[[Any, Any], Any]:
    """Six columns; XLA reads the leaves of these names, too, and the dense one if asked for."""

    def model(params: Any, batch: Any) -> Any:
        rows = [jnp.take(params[f"t{k}"], batch[f"t{k}"], axis=0) for k in range(COLUMNS)]
        rest = [jnp.cumsum(batch[name])[:, None].astype(jnp.float32) for name in names]
        if dense:
            rest.append(batch["x"] @ params["w"])
        return jnp.concatenate(rows, axis=1), rest

    return model


def served(model: Callable[[Any, Any], Any], batch: Any) -> tuple[Any, Plan]:
    server = recom_jax.optimize(model).bind(parameters())
    close(server(batch), model(parameters(), batch))
    (plans,) = server._core.plans.values()
    return server, plans[0]


def close(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


def printed(server: Any, plan: Plan) -> Any:
    token = np.zeros(plan.layout.total_bytes, np.uint8)
    return jax.make_jaxpr(plan.call)(token, *server._bound(plan))


def eqns_of(jaxpr: Any, name: str) -> list[Any]:
    (inner,) = (e.params["jaxpr"].jaxpr for e in jaxpr.jaxpr.eqns)
    return [e for e in inner.eqns if e.primitive.name == name]


def calls_of(jaxpr: Any, target: str) -> list[Any]:
    return [e for e in eqns_of(jaxpr, "ffi_call") if e.params["target_name"] == target]


def test_the_fused_call_reads_the_token() -> None:
    batch = batch_of(16)
    server, plan = served(model_reading((), dense=True), batch)
    jaxpr = printed(server, plan)
    (fused,) = eqns_of(jaxpr, "recom_fused")
    hand, copy = sorted(
        calls_of(jaxpr, ffi.STAGE), key=lambda e: -dict(e.params["attributes"])["whole"]
    )
    at = plan.names.index("batch['x']")
    begin = plan.layout.offset(plan.packed.index(at))
    assert dict(hand.params["attributes"])["begin"] == begin
    assert hand.outvars[0].aval.shape == (16 * 3 * 4,)  # what XLA reads, no byte more
    assert server.cost(batch).staging_copy == plan.layout.total_bytes + 16 * 3 * 4
    call = fused.params["call"]
    read = fused.invars[: call.n_physical]
    assert call.alone and fused.invars[0] is hand.invars[0]  # the token itself
    assert hand.outvars[1] in read  # after the wait
    assert copy.outvars[0] in fused.invars[call.n_physical :]  # of a fallback alone
    text = jax.jit(plan.call).lower(
        np.zeros(plan.layout.total_bytes, np.uint8), *server._bound(plan)
    ).compile().as_text()  # fmt: skip
    assert text.count(f'custom_call_target="{ffi.STAGE}"') == 1


def test_a_batch_that_xla_reads_is_copied_whole() -> None:
    names = tuple(f"t{k}" for k in range(COLUMNS))
    server, plan = served(model_reading(names, dense=False), batch_of(400))
    jaxpr = printed(server, plan)
    (fused,) = eqns_of(jaxpr, "recom_fused")
    (copy,) = calls_of(jaxpr, ffi.STAGE)
    assert not fused.params["call"].alone
    assert fused.invars[0] is copy.outvars[0]
    assert dict(copy.params["attributes"])["whole"] == 0


@given(
    size=st.integers(0, 40),
    names=st.sets(st.sampled_from([f"t{k}" for k in range(COLUMNS)]), max_size=3),
    dense=st.booleans(),
    leased=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_leaves_may_be_read_by_xla(
    size: int, names: set[str], dense: bool, leased: bool
) -> None:
    was, stage._emulated = stage._emulated, True
    try:
        model = model_reading(tuple(sorted(names)), dense)
        server, _ = served(model, batch_of(size))
        for seed in range(3):
            batch = batch_of(size, seed)
            given_ = batch
            if leased:
                given_ = server.input_views(batch)
                for name, view in given_.items():
                    view[...] = batch[name]
            close(server(given_), model(parameters(), batch))
    finally:
        stage._emulated = was


def test_a_fallback_reads_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the fused call cannot be lowered after all: XLA may read an operand whenever it likes."""
    monkeypatch.setattr(lowering, "is_partitioned", lambda ctx: True)
    server, plan = served(model_reading((), dense=True), batch_of(16))
    _recom.set_stage_delay(500)
    for seed in range(6):
        batch = batch_of(16, seed)
        close(server(batch), model_reading((), dense=True)(parameters(), batch))
    token = np.zeros(plan.layout.total_bytes, np.uint8)
    assert ffi.FUSED not in jax.jit(plan.body).lower(token, *server._bound(plan)).as_text()
    (fused,) = eqns_of(printed(server, plan), "recom_fused")
    call = fused.params["call"]
    token = fused.invars[0]
    asked: list[Any] = []
    values = [
        object() if v is token else np.zeros(v.aval.shape, v.aval.dtype) for v in fused.invars
    ]
    monkeypatch.setattr(pack, "unpack", lambda p, layout, i, part=None: asked.append(p) or np.zeros(
        layout.shape(i), layout.dtype(i)))  # fmt: skip
    call.fallback(*values)
    assert asked and not any(p is values[0] for p in asked)


def test_on_a_gpu_it_is_a_call_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Outside CUDA graphs, with a key in the place of comparing launch and layout."""
    try:
        nvrtc.version()
    except CudaError as why:
        pytest.skip(str(why))
    monkeypatch.setenv("RECOM_CACHE_DIR", str(tmp_path))
    keys = []
    for size in (16, 17):
        server, plan = served(model_reading((), dense=True), batch_of(size))
        token = np.zeros(plan.layout.total_bytes, np.uint8)
        traced = jax.jit(plan.body).trace(token, *server._bound(plan))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert f"@{ffi.FUSED}" not in text
        (call,) = re.findall(rf"custom_call @{ffi.ALONE}\(%arg0, .*", text)
        assert "ptx = " in call and "layout = " in call
        keys += re.findall(r'key = "([0-9a-f]{64})"', call)
    assert len(set(keys)) == 2  # other places


def slot_of(leaf: Any) -> Any:
    layout = pack.layout_of([pack.LeafSpec.of(leaf)])
    slot = pack.SlotRing(layout, 2).acquire()
    assert pack.Packer(layout).pack_into(slot, [leaf]) < 0
    return slot


def test_a_token_is_filled_where_nobody_has_uploaded() -> None:
    slot = slot_of(np.arange(4, dtype=np.int32))
    token = stage.target_of((None, False)).token(slot)
    nbytes, begin = slot.layout.total_bytes, slot.layout.offset(0)
    hand = jax.jit(lambda t: stage.hand_slot(t, nbytes, (begin, begin + 16)))
    part, _ = jax.block_until_ready(hand(token.array))
    np.testing.assert_array_equal(np.asarray(part).view(np.int32), np.arange(4))
    np.testing.assert_array_equal(np.asarray(token.array), slot.array())


def test_nothing_is_copied_where_xla_reads_nothing() -> None:
    slot = slot_of(np.arange(4, dtype=np.int32))
    token = stage.target_of((None, False)).token(slot)
    slot.upload(token.address)
    hand = jax.jit(lambda t: stage.hand_slot(t, slot.layout.total_bytes, (0, 0)))
    part, done = jax.block_until_ready(hand(token.array))
    assert (part.shape, done.shape) == ((0,), ())


@pytest.mark.parametrize(("nbytes", "part"), [(0, (0, 2 << 20)), (0, (-1, 3)), (-1, (0, 3))])
def test_a_part_outside_its_slot_is_an_error(nbytes: int, part: tuple[int, int]) -> None:
    slot = slot_of(np.arange(4, dtype=np.int32))
    token = stage.target_of((None, False)).token(slot)
    total = slot.layout.total_bytes + nbytes
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"a part outside its slot|the slot holds"):
        jax.block_until_ready(jax.jit(lambda t: stage.hand_slot(t, total, part))(token.array))
