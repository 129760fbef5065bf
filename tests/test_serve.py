"""bind, update, warmup, leases, and serving inside a trace; plain JAX is the oracle."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import _recom
from recom_jax.errors import (
    BatchError,
    BatchTypeError,
    BindError,
    BindTypeError,
    DeletedError,
    LeaseError,
)
from tests.helpers import cpu_only

pytestmark = pytest.mark.usefixtures("short_collections")


def model(params: Any, batch: Any) -> Any:
    """Two small tables, a large one, a weight that only XLA reads."""
    a = jnp.take(params["a"], batch["a"], axis=0)
    b = jnp.sum(jnp.take(params["b"], batch["b"], axis=0), axis=1)
    big = jnp.take(params["big"], batch["a"] % 7, axis=0)
    return jnp.concatenate([a, b, big, batch["x"] * params["w"]], axis=1)


def make_params(seed: int = 0, big: int = 70_000) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (50, 4), "b": (30, 8), "big": (big, 4), "w": (3,)}
    return {k: jnp.asarray(rng.standard_normal(s, dtype=np.float32)) for k, s in shapes.items()}


def make_batch(size: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([seed, size])
    return {
        "a": rng.integers(0, 50, size).astype(np.int32),
        "b": rng.integers(-3, 33, (size, 5)).astype(np.int32),
        "x": rng.standard_normal((size, 3), dtype=np.float32),
    }


def equal(x: Any, y: Any) -> None:
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.weak_type == b.weak_type
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-6, atol=1e-6
        )


PLAIN = jax.jit(model)
MODEL = recom_jax.optimize(model, options=recom_jax.Options(verify=True))


@pytest.fixture(scope="module")
def params() -> Any:
    return make_params()


@pytest.fixture(scope="module")
def serve(params: Any) -> Any:
    return MODEL.bind(params)


# ---- calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 7, 50])
def test_equals_plain(serve: Any, params: Any, size: int) -> None:
    batch = make_batch(size)
    for _ in range(3):
        equal(serve(batch), PLAIN(params, batch))


def test_a_new_batch_size_prepares_no_program(serve: Any, params: Any) -> None:
    serve(make_batch(11))
    before = recom_jax.stats()["programs_prepared"]
    for size in (12, 13, 64):
        equal(serve(make_batch(size)), PLAIN(params, make_batch(size)))
    assert recom_jax.stats()["programs_prepared"] == before


@cpu_only("launches are counted, not calls")
def test_one_fused_call_reads_the_packs(serve: Any) -> None:
    before = recom_jax.stats()
    jax.block_until_ready(serve(make_batch(50)))
    after = recom_jax.stats()
    assert after["calls"] - before["calls"] == 1


def _leaves(size: int = 6) -> dict[str, Any]:
    x = np.arange(size * 4, dtype=np.float32).reshape(size, 4) - 7
    return {
        "strided": x[:, ::2],
        "fortran": np.asfortranarray(x),
        "reversed": x[::-1],
        "transposed": x.T[:4].T,
        "i64": np.arange(size, dtype=np.int64) + (1 << 32),
        "f64": np.full((size, 2), 1 / 3),
        "u64": np.arange(size, dtype=np.uint64) - 3,
        "bool": np.arange(size) % 2 == 0,
        "f16": np.float16(x),
        "bf16": x.astype(jnp.bfloat16),
        "i8": np.int8(np.arange(size) - 3),
        "u16": np.arange(size, dtype=np.uint16),
        "int": 3,
        "float": 0.5,
        "flag": True,
        "np": np.float32(2.5),
        "zero_d": np.array(4, np.int32),
        "jax": jnp.arange(size),
        "weak": jnp.asarray(1.5),
        "rank5": np.ones((size, 1, 1, 1, 2), np.float32),
        "none": None,
    }


@pytest.mark.parametrize("only", [*_leaves(), None])
def test_leaf_kinds(only: str | None) -> None:
    def fn(table: Any, batch: Any) -> Any:
        bf = jnp.ones(3, jnp.bfloat16)
        other = [
            v * bf[0] if v.dtype != bool else v
            for v in map(jnp.asarray, jax.tree.leaves(batch["rest"]))
        ]
        return jnp.take(table, batch["ids"], axis=0), other

    rest = _leaves() if only is None else {only: _leaves()[only]}
    table = jnp.arange(40, dtype=jnp.float32).reshape(10, 4)
    batch = {"ids": np.array([1, -1, 9, 12, 0, 3]), "rest": rest}
    serve = recom_jax.optimize(fn).bind(table)
    for _ in range(2):
        equal(serve(batch), jax.jit(fn)(table, batch))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int16, np.uint8])
def test_ids_convert_as_jit_converts(dtype: Any) -> None:
    table = jnp.arange(1000, dtype=jnp.float32).reshape(250, 4)
    ids = np.array([0, 1, 249, 250, 255]).astype(dtype)
    if dtype is np.int64:
        ids = np.concatenate([ids, [1 << 32, (1 << 32) + 5, -(1 << 40) - 1]])
    fn = lambda t, i: jnp.take(t, i, axis=0)  # noqa: E731
    equal(recom_jax.optimize(fn).bind(table)(ids), jax.jit(fn)(table, ids))


def test_types_may_alternate(params: Any) -> None:
    fn = lambda p, b: jnp.take(p["a"], b["a"], axis=0) * b["s"]  # noqa: E731
    serve = recom_jax.optimize(fn).bind(params)
    ids = np.array([1, 2, 3], np.int32)
    for s in (
        2,
        2.5,
        True,
        np.float32(3),
        np.array(2, np.int32),
        jnp.float32(3),
        jnp.bfloat16(3),
        2,
        1.5,
    ) * 2:
        equal(serve({"a": ids, "s": s}), jax.jit(fn)(params, {"a": ids, "s": s}))
        equal(serve({"a": jnp.asarray(ids), "s": s}), jax.jit(fn)(params, {"a": ids, "s": s}))


def test_structures(params: Any) -> None:
    def fn(a: Any, b: Any, ids: Any, mode: str, *rest: Any, scale: Any = 1.0) -> Any:
        out = jnp.take(a, ids, axis=0)
        return {
            "y": (out if mode == "id" else -out) * scale,
            "rest": [jnp.take(b, r, axis=0) for r in rest],
        }

    ids = np.array([1, 2], np.int32)
    opt = recom_jax.optimize(fn, static_argnames="mode")
    serve = opt.bind(params["a"], params["b"])
    plain = jax.jit(fn, static_argnames="mode")
    for args, kw in [
        ((ids, "id"), {}),
        ((ids, "neg"), {}),
        ((ids, "id", ids), {}),
        ((ids, "id", ids, ids), {"scale": 2}),
        ((ids,), {"mode": "neg", "scale": np.float32(2)}),
        ((), {"ids": ids, "mode": "id"}),
    ]:
        for _ in range(2):
            equal(serve(*args, **kw), plain(params["a"], params["b"], *args, **kw))
    serve.warmup([4])
    static_first = recom_jax.optimize(
        lambda k, t, i: jnp.take(t, i, axis=0) * k, static_argnums=0
    ).bind(3, params["a"])
    equal(static_first(ids), jnp.take(params["a"], ids, axis=0) * 3)


def test_bound_scalars_stay_weak() -> None:
    fn = lambda t, s, i: jnp.take(t, i, axis=0) * s  # noqa: E731
    table, ids = jnp.ones((4, 2), jnp.bfloat16), np.array([1, 2])
    equal(recom_jax.optimize(fn).bind(table, 0.3)(ids), jax.jit(fn)(table, 0.3, ids))


# ---- memory --------------------------------------------------------------------------------------------------


def test_cost_is_what_is_allocated(params: Any) -> None:
    gc.collect()
    start = _recom.live_pack_bytes()
    serve = MODEL.bind(params)
    batch = make_batch(33)
    cost = serve.cost(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))
    assert _recom.live_pack_bytes() == start
    # 50 * 16 + 30 * 32 + 3 * 4 bytes; on a CPU in whole pages, with a header
    assert cost.arena == (4096 if jax.default_backend() == "cpu" else 2112)
    assert cost.shared == params["big"].nbytes
    assert f"{cost.arena:,}" in str(cost)
    # On a GPU the arena is on the device: of this kind are the slots alone.
    taken = cost.total - (0 if jax.default_backend() == "cpu" else cost.arena)
    serve(batch)
    assert _recom.live_pack_bytes() - start == taken
    assert serve.cost(batch) == cost
    for _ in range(20):
        serve(batch)
    assert _recom.live_pack_bytes() - start == taken


def test_large_tables_are_not_copied(params: Any) -> None:
    serve = MODEL.bind(params)
    serve(make_batch(5))
    assert serve._weights.leaves[2] is params["big"]
    assert sum(x.nbytes for x in serve._weights.arenas.values()) < params["big"].nbytes / 100


def test_numpy_params_are_copied() -> None:
    host = {k: np.array(v) for k, v in make_params().items()}
    serve = MODEL.bind(host)
    batch = make_batch(9)
    want = np.asarray(PLAIN(make_params(), batch))
    for x in host.values():
        x[...] = 0
    np.testing.assert_allclose(np.asarray(serve(batch)), want, rtol=2e-6, atol=1e-6)


def test_inputs_may_change_after_the_call(serve: Any, params: Any) -> None:
    batch = make_batch(40)
    want = PLAIN(params, make_batch(40))
    for _ in range(20):
        out = serve(batch)
        batch["a"][...] = 0
        batch["x"][...] = np.nan
        equal(out, want)
        batch = make_batch(40)


# ---- update --------------------------------------------------------------------------------------------------


def test_update() -> None:
    old, new = make_params(0), make_params(1)
    serve, batch = MODEL.bind(old), make_batch(21)
    equal(serve(batch), PLAIN(old, batch))
    before = recom_jax.stats()
    serve.update(new)
    equal(serve(batch), PLAIN(new, batch))
    after = recom_jax.stats()
    assert after["traces"] == before["traces"]
    assert after["programs_prepared"] == before["programs_prepared"]


def test_a_bad_update_changes_nothing() -> None:
    old = make_params(0)
    serve, batch = MODEL.bind(old), make_batch(21)
    serve(batch)
    bad: list[tuple[Any, type, str]] = [
        (
            ({**make_params(1), "a": jnp.zeros((51, 4))},),
            BindError,
            r"params\['a'\].*float32\[51, 4\].*\[50, 4\]",
        ),
        (
            ({**make_params(1), "b": jnp.zeros((30, 8), jnp.bfloat16)},),
            BindError,
            r"params\['b'\].*bfloat16",
        ),
        (({"a": old["a"]},), BindError, "structure"),
        (({**make_params(1), "w": "no"},), BindTypeError, r"params\['w'\].*str"),
        ((), BindTypeError, "1 bound argument"),
        ((old, old), BindTypeError, "1 bound argument"),
    ]
    for args, kind, text in bad:
        with pytest.raises(kind, match=text):
            serve.update(*args)
        equal(serve(batch), PLAIN(old, batch))


def test_old_weights_are_freed() -> None:
    gc.collect()
    start = _recom.live_pack_bytes()
    serve, batch = MODEL.bind(make_params(0)), make_batch(21)
    jax.block_until_ready(serve(batch))
    big = weakref.ref(serve._weights.leaves[2])
    held = _recom.live_pack_bytes()
    for seed in range(1, 4):
        serve.update(make_params(seed))
        jax.block_until_ready(serve(batch))
    gc.collect()
    assert big() is None
    assert _recom.live_pack_bytes() == held
    del serve
    gc.collect()
    assert _recom.live_pack_bytes() == start


def test_update_under_load() -> None:
    versions = [make_params(k) for k in range(3)]
    batches = [make_batch(n) for n in (3, 17)]
    wants = [[np.asarray(PLAIN(v, b)) for v in versions] for b in batches]
    serve = MODEL.bind(versions[0])
    stop, bad = threading.Event(), []

    def work(k: int) -> None:
        try:
            while not stop.is_set():
                out = np.asarray(serve(batches[k % 2]))
                if not any(
                    np.allclose(out, w, rtol=2e-6, atol=1e-6, equal_nan=True) for w in wants[k % 2]
                ):
                    bad.append(out)
        except Exception as why:  # pragma: no cover - reported below
            bad.append(why)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(8)]
    for t in threads:
        t.start()
    for k in range(60):
        serve.update(versions[k % 3])
    stop.set()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert not bad


# ---- deleted and donated -------------------------------------------------------------------------------------


def test_deleted_bound_array() -> None:
    params = make_params()
    serve = MODEL.bind(params)
    serve(make_batch(4))
    jax.jit(lambda x: x + 1, donate_argnums=0)(params["big"])
    if not params["big"].is_deleted():
        params["big"].delete()
    with pytest.raises(
        RuntimeError, match=r"bound argument params\['big'\] of model.*donated"
    ) as caught:
        serve(make_batch(4))
    assert isinstance(caught.value, DeletedError)
    with pytest.raises(DeletedError, match=r"params\['big'\]"):
        MODEL.bind(params)
    serve.update(make_params(2))
    equal(serve(make_batch(4)), PLAIN(make_params(2), make_batch(4)))


# ---- leases --------------------------------------------------------------------------------------------------


def fill(views: Any, batch: Any) -> Any:
    for v, b in zip(jax.tree.leaves(views), jax.tree.leaves(batch), strict=True):
        v[...] = b
    return views


def test_lease(serve: Any, params: Any) -> None:
    batch = make_batch(19)
    views = serve.input_views(batch)
    assert jax.tree.structure(views) == jax.tree.structure(batch)
    assert all(
        v.shape == b.shape and v.dtype == b.dtype
        for v, b in zip(views.values(), batch.values(), strict=True)
    )
    packed = recom_jax.stats()["bytes_packed"]
    equal(serve(fill(views, batch)), PLAIN(params, batch))
    assert recom_jax.stats()["bytes_packed"] == packed
    for v in views.values():
        with pytest.raises(ValueError, match="read-only"):
            v[...] = 0
    with pytest.raises(LeaseError, match="served already"):
        serve(views)


def test_a_lease_survives_mistakes(serve: Any, params: Any) -> None:
    batch = make_batch(19)
    views = fill(serve.input_views(batch), batch)
    cases: list[tuple[Any, type, str]] = [
        (
            {**views, "a": np.zeros(20, np.int32)},
            BatchError,
            r"batch\['a'\].*int32\[19\].*int32\[20\]",
        ),
        (
            {**views, "a": np.zeros(19, np.float32)},
            BatchTypeError,
            r"batch\['a'\].*int32\[19\].*float32\[19\]",
        ),
        ({**views, "x": [views["x"]] * 2}, BatchError, r"batch\['x'\].*was given list"),
        ({**views, "x": "no"}, BatchTypeError, r"batch\['x'\].*str"),
        ({k: views[k] for k in "ab"}, BatchError, "structure"),
        ({**views, "c": views["a"]}, BatchError, "structure"),
    ]
    for wrong, kind, text in cases:
        with pytest.raises(kind, match=text):
            serve(wrong)
    equal(serve(views), PLAIN(params, batch))


def test_replaced_leaves_are_copied_in(serve: Any, params: Any) -> None:
    batch, other = make_batch(19), make_batch(19, seed=1)
    views = fill(serve.input_views(batch), batch)
    mixed = {**views, "a": other["a"]}
    equal(serve(mixed), PLAIN(params, {**batch, "a": other["a"]}))
    swapped = fill(serve.input_views({"a": batch["a"], "b": batch["b"], "x": batch["x"]}), batch)
    swapped["x"] = swapped["x"][::-1]  # a view of the slot, not in its place
    equal(serve(swapped), PLAIN(params, {**batch, "x": batch["x"][::-1]}))


def test_leases_block_and_time_out(params: Any) -> None:
    serve = recom_jax.optimize(model, options=recom_jax.Options(lease_timeout_s=0.5)).bind(params)
    batch = make_batch(23)
    leases = [serve.input_views(batch) for _ in range(8)]
    with pytest.raises(
        LeaseError, match=r"no staging slot became free.*8 are leased.*drop the views"
    ):
        serve.input_views(batch)
    threading.Timer(0.1, leases.clear).start()
    views = serve.input_views(batch)
    equal(serve(fill(views, batch)), PLAIN(params, batch))


def test_a_dropped_lease_is_free_again(serve: Any) -> None:
    batch = make_batch(24)
    for _ in range(40):
        serve.input_views(batch)


def test_a_lease_with_leaves_passed_directly() -> None:
    fn = lambda t, b: (jnp.take(t, b["i"], axis=0) * b["s"], b["r5"] + 1)  # noqa: E731
    table = jnp.arange(12.0).reshape(6, 2)
    serve = recom_jax.optimize(fn).bind(table)
    batch = {"i": np.array([1, 5], np.int32), "s": 2.5, "r5": np.ones((2, 1, 1, 1, 1), np.float32)}
    views = serve.input_views(batch)
    assert views["s"] == 2.5
    views["i"][...], views["r5"][...] = batch["i"], batch["r5"]
    with pytest.raises(BatchTypeError, match=r"\['s'\].*float.*int"):
        serve({**views, "s": 2})
    equal(serve(views), jax.jit(fn)(table, batch))


def test_two_threads_serve_one_lease(serve: Any) -> None:
    batch = make_batch(19)
    for _ in range(20):
        views = fill(serve.input_views(batch), batch)
        outcomes: list[Any] = []

        def work(views: Any = views, outcomes: Any = outcomes) -> None:
            try:
                outcomes.append(jax.block_until_ready(serve(views)) is not None)
            except LeaseError:
                outcomes.append(LeaseError)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert sorted(map(str, outcomes)) == sorted(map(str, [True, LeaseError, LeaseError]))


# ---- warmup --------------------------------------------------------------------------------------------------


def test_warmup(params: Any) -> None:
    serve = MODEL.bind(params)
    with pytest.raises(BatchError, match="no batch was seen yet"):
        serve.warmup([1])
    serve.warmup(
        [0, 1, 6], jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(3))
    )
    traces = recom_jax.stats()["traces"]
    for size in (0, 1, 6):
        equal(serve(make_batch(size)), PLAIN(params, make_batch(size)))
    assert recom_jax.stats()["traces"] == traces
    serve.warmup([2])
    for bad in (-1, 1.5, True, "3"):
        with pytest.raises(BatchError, match="batch size"):
            serve.warmup([1, bad])
    with pytest.raises(recom_jax.errors.BatchTypeError, match="a batch size or several, not None"):
        serve.warmup(None)
    traces = recom_jax.stats()["traces"]
    serve.warmup(size for size in (3, 4))  # read once
    assert recom_jax.stats()["traces"] == traces + 2


def test_a_static_argument_that_cannot_be_hashed_is_named() -> None:
    @functools.partial(recom_jax.optimize, static_argnames="k")
    def model(table: Any, ids: Any, k: Any = 2) -> Any:
        return table[ids] * len(k)

    serve = model.bind(np.ones((5, 2), np.float32))
    ids = np.arange(3)
    np.testing.assert_array_equal(serve(ids, (1, 2)), np.full((3, 2), 2))
    for bad in ([1, 2], np.arange(2), (1, np.arange(2))):
        for call in (serve, serve.fetch, serve.input_views):
            with pytest.raises(
                BatchError, match=r"static argument k of model cannot be hashed: unhash"
            ):
                call(ids, bad)
            with pytest.raises(
                BatchError, match=r"static argument k of model cannot be hashed: unhash"
            ):
                call(ids, k=bad)


# ---- inside a trace ------------------------------------------------------------------------------------------


def constants(lowered: Any) -> int:
    """Bytes of the longest line of text: a constant's data would be there."""
    return max(map(len, lowered.as_text().splitlines()))


@pytest.mark.parametrize("wrap", ["closure", "direct", "argument"])
@cpu_only("a kernel is part of the text whose length is asked")
def test_jit_takes_operands(params: Any, wrap: str) -> None:
    serve = MODEL.bind(params)
    batch = jax.tree.map(jnp.asarray, make_batch(13))
    args: Any = (batch,)
    if wrap == "closure":
        fn = jax.jit(lambda b: serve(b) * 2)
    elif wrap == "direct":
        fn = jax.jit(lambda b: 2 * jax.jit(serve)(b))
    else:
        fn, args = jax.jit(lambda s, b: s(b) * 2), (serve, batch)
        serve(batch)
    text = fn.lower(*args).as_text()
    assert "70000x4xf32" in text.split("func.func public @main")[1].split("->")[0]
    assert "recom_fused" in text
    assert 'dense<"' not in text
    assert len(text) < 30_000
    equal(fn(*args), PLAIN(params, batch) * 2)
    serve.update(make_params(5))
    equal(fn(*args), PLAIN(make_params(5), batch) * 2)
    equal(fn.lower(*args).compile()(*args), PLAIN(make_params(5), batch) * 2)


def test_transformations(params: Any) -> None:
    serve = MODEL.bind(params)
    batch = jax.tree.map(jnp.asarray, make_batch(6))
    loss = lambda f: lambda x: jnp.sum(f({**batch, "x": x}) ** 2)  # noqa: E731
    plain = lambda b: model(params, b)  # noqa: E731
    many = jax.tree.map(lambda *x: jnp.stack(x), make_batch(6), make_batch(6, 1))
    for f in (
        lambda g: jax.grad(loss(g))(batch["x"]),
        lambda g: jax.jit(jax.grad(loss(g)))(batch["x"]),
        lambda g: jax.jvp(loss(g), (batch["x"],), (batch["x"],)),
        lambda g: jax.vmap(g)(many),
        lambda g: jax.jit(jax.vmap(g))(many),
        lambda g: jax.vmap(jax.jit(g))(many),
        lambda g: jax.lax.map(g, many),
        lambda g: jax.jit(lambda m: jax.lax.map(g, m))(many),
        lambda g: jax.lax.cond(True, g, g, batch),
        lambda g: jax.checkpoint(g)(batch),
        lambda g: jax.jit(lambda b: g(b) + g(b))(batch),
        lambda g: jax.jit(lambda: g(make_batch(6)))(),
        lambda g: jax.linearize(loss(g), batch["x"])[1](batch["x"]),
    ):
        got, want = f(serve), f(plain)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_bind_inside_a_trace(params: Any) -> None:
    batch = make_batch(6)
    equal(jax.jit(lambda p, b: MODEL.bind(p)(b))(params, batch), PLAIN(params, batch))
    loss = lambda f: lambda p: jnp.sum(f(p, batch) ** 2)  # noqa: E731
    got = jax.grad(loss(lambda p, b: MODEL.bind(p)(b)))(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        got,
        jax.grad(loss(model))(params),
    )
    serve = MODEL.bind(params)
    with pytest.raises(BindError, match="update inside a trace"):
        jax.jit(serve.update)(params)


def test_the_server_is_a_pytree(params: Any) -> None:
    serve, batch = MODEL.bind(params), make_batch(6)
    fn = jax.jit(lambda s, b: s(b))
    equal(fn(serve, batch), PLAIN(params, batch))  # no arena yet
    serve(batch)
    equal(fn(serve, batch), PLAIN(params, batch))
    equal(fn(serve, make_batch(7)), PLAIN(params, make_batch(7)))
    copy = jax.tree.map(lambda x: x, serve)
    equal(copy(batch), PLAIN(params, batch))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(serve))


def test_export_says_what_to_do(params: Any) -> None:
    serve, batch = MODEL.bind(params), make_batch(6)
    with pytest.raises(BindError, match=r"jax.export.export\(jax.jit\(model\)\)"):
        jax.export.export(jax.jit(lambda b: serve(b)))(batch)


def test_export_with_the_server_as_argument(params: Any) -> None:
    serve, batch = MODEL.bind(params), make_batch(6)
    exported = jax.export.export(
        jax.jit(lambda s, b: s(b)),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("recom_fused_v1")],
    )(serve, batch)
    equal(exported.call(serve, batch), PLAIN(params, batch))


def test_shard_map(params: Any) -> None:
    serve, batch = MODEL.bind(params), make_batch(6)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    fn = jax.jit(jax.shard_map(lambda b: serve(b), mesh=mesh, in_specs=spec, out_specs=spec))
    equal(fn(batch), PLAIN(params, batch))
    assert 'dense<"' not in fn.lower(batch).as_text()


def test_x64_may_be_switched(params: Any) -> None:
    fn = lambda p, b: jnp.take(p["a"], b["i"], axis=0) * b["x"][:, None]  # noqa: E731
    serve, plain = recom_jax.optimize(fn).bind(params), jax.jit(fn)
    batch = {"i": np.array([1, 2, 55], np.int64), "x": np.array([1.0, 2.0, 1 / 3])}
    for on in (False, True, False, True):
        with jax.enable_x64(on):
            equal(serve(batch), plain(params, batch))


def test_traced_calls_while_weights_change(params: Any) -> None:
    versions = [make_params(k) for k in range(2)]
    batch = make_batch(5)
    wants = [np.asarray(PLAIN(v, batch)) for v in versions]
    serve = MODEL.bind(versions[0])
    fn, bad = jax.jit(lambda b: serve(b)), []
    fn(batch)

    def work() -> None:
        try:
            for _ in range(100):
                out = np.asarray(fn(batch))
                if not any(
                    np.allclose(out, w, rtol=2e-6, atol=1e-6, equal_nan=True) for w in wants
                ):
                    bad.append(out)
        except Exception as why:
            bad.append(why)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for t in threads:
        t.start()
    for k in range(40):
        serve.update(versions[k % 2])
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert not bad
