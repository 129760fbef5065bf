"""`Options.batch_buckets`: one compilation a bucket, results as without, and only where rows are proven apart."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from examples import recom_models
from recom_jax import compat, rowwise
from recom_jax.errors import BucketError, OptionError
from recom_jax.trace import trace
from tests.helpers import VERIFY, assert_same, cpu_only, table

TABLE = table(50, 8)
OPTIONS = dataclasses.replace(VERIFY, batch_buckets=(32, 8))
COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: COMPILED.append(event) if "backend_compile" in event else None
)


@pytest.fixture
def compiled() -> list[str]:
    COMPILED.clear()
    return COMPILED


def ids(*shape: int) -> Any:
    return np.random.default_rng(shape).integers(-3, 53, shape).astype(np.int32)


def floats(*shape: int) -> Any:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


# ---- proofs ----------------------------------------------------------------------------------------------------------


def rnn(t: Any, i: Any) -> Any:
    x = jnp.swapaxes(t[i], 0, 1)
    return jax.lax.scan(lambda c, y: (jnp.tanh(c + y), c), jnp.zeros((i.shape[0], 8)), x)


def while_rows(t: Any, i: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda k, x: x * 2 + k, t[i])


@jax.custom_vjp
def twice(x: Any) -> Any:
    return x * 2


twice.defvjp(lambda x: (twice(x), None), lambda _, g: (g * 2,))

# Name: (function of a table and ids of [batch, 3], for each result (axis, rows a sample) or None).
ROWWISE: dict[str, tuple[Callable[..., Any], Any]] = {
    "lookup": (lambda t, i: t[i], (0, 1)),
    "bag": (lambda t, i: t[i].mean(1), (0, 1)),
    "flat and back": (lambda t, i: t[i.reshape(-1)].reshape(*i.shape, 8), (0, 1)),
    "flat": (lambda t, i: t[i.reshape(-1)], (0, 3)),
    "transposed": (lambda t, i: t[i].T, (2, 1)),
    "one column": (lambda t, i: t[i[:, 1]], (0, 1)),
    "columns": (lambda t, i: jnp.concatenate([t[i[:, 0]], t[i[:, 1:]].sum(1)], 1), (0, 1)),
    "stack": (lambda t, i: jnp.stack([t[i[:, 0]], t[i[:, 1]]], 0), (1, 1)),
    "softmax": (lambda t, i: jax.nn.softmax(t[i], axis=-1), (0, 1)),
    "sort": (lambda t, i: jnp.sort(t[i], axis=1), (0, 1)),
    "running sum": (lambda t, i: jnp.cumsum(t[i], axis=1), (0, 1)),
    "top": (lambda t, i: jax.lax.top_k(t[i], 2)[0], (0, 1)),
    "pairs": (lambda t, i: jnp.einsum("bld,bmd->blm", t[i], t[i]), (0, 1)),
    "dense": (lambda t, i: t[i].reshape(-1, 24) @ jnp.ones((24, 4)), (0, 1)),
    "dense on the left": (lambda t, i: jnp.ones((4, 24)) @ t[i].reshape(-1, 24).T, (1, 1)),
    "digitize": (
        lambda t, i: t[jnp.digitize(i.astype(jnp.float32), jnp.asarray([0.0, 9.0]))],
        (0, 1),
    ),
    "relu": (lambda t, i: jax.nn.relu(twice(t[i])), (0, 1)),
    "remat": (lambda t, i: jax.checkpoint(lambda x: jnp.sin(x) * 2)(t[i]), (0, 1)),
    "vmap": (lambda t, i: jax.vmap(lambda j: t[j].sum(0))(i), (0, 1)),
    "positions": (lambda t, i: t[i] * jnp.arange(i.shape[0])[:, None, None], (0, 1)),
    "own row": (lambda t, i: jnp.take_along_axis(t[i][:, 0], i % 8, axis=1), (0, 1)),
    "scan over time": (lambda t, i: rnn(t, i)[1], (1, 1)),
    "a loop": (while_rows, (0, 1)),
    "a branch": (lambda t, i: jax.lax.cond(t[0, 0] > 0, lambda: t[i], lambda: -t[i]), (0, 1)),
    "padding": (lambda t, i: jnp.pad(t[i], ((0, 0), (1, 0), (0, 0))), (0, 1)),
    "bits": (lambda t, i: jax.lax.bitcast_convert_type(t[i], jnp.uint8), (0, 1)),
    "of the table alone": (lambda t, i: t.sum(0), None),
}
MIXED: dict[str, tuple[Callable[..., Any], str]] = {
    "mean over the batch": (lambda t, i: t[i].mean(0), "reduce_sum over the batch"),
    "batch norm": (lambda t, i: t[i] - t[i].mean(0), "reduce_sum over the batch"),
    "softmax over the batch": (lambda t, i: jax.nn.softmax(t[i], axis=0), "reduce_max over"),
    "running sum": (lambda t, i: jnp.cumsum(t[i], axis=0), "cumsum along the batch"),
    "sort": (lambda t, i: jnp.sort(t[i], axis=0), "sort along the batch"),
    "shifted": (lambda t, i: t[i[1:]], "a lookup of rows of the batch|slice of the batch"),
    "reversed": (lambda t, i: t[jnp.flip(i, 0)], "rev along the batch"),
    "other rows": (lambda t, i: t[i][i % i.shape[0]], "the number batch|other rows"),
    "the size": (lambda t, i: t[i] / i.shape[0], "the number batch"),
    "all pairs": (lambda t, i: t[i[:, 0]] @ t[i[:, 0]].T, "different axes"),
    "a sum of products": (lambda t, i: t[i[:, 0]].T @ t[i[:, 0]], "sums over the batch"),
    "joined": (lambda t, i: jnp.concatenate([t[i], t[i]], 0), "concatenation along the batch"),
    "folded": (lambda t, i: t[i].transpose(1, 0, 2).reshape(-1, 8), "reshape of the batch axis"),
    "a scan": (lambda t, i: jax.lax.scan(lambda c, y: (c + y, c), t[:3], t[i])[1], "a loop over"),
    "a loop by the batch": (
        lambda t, i: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1.0, t[i] * 0 + 1),
        "the end depends|whose end depends|reduce_sum over",
    ),
    "random numbers": (
        lambda t, i: t[i[:, 0]] * jax.random.uniform(jax.random.key(0), (i.shape[0], 1)),
        "does not know",
    ),
    "gradient": (lambda t, i: jax.grad(lambda t: (t[i] ** 2).sum())(t), "scatter"),
    "outer": (lambda t, i: i[:, None, 0] * i[None, :, 0], "axis|axes"),
    "inside a loop": (
        lambda t, i: jax.lax.fori_loop(0, 2, lambda k, x: x - x.mean(0), t[i]),
        "over the batch",
    ),
    "inside a branch": (
        lambda t, i: jax.lax.cond(t[0, 0] > 0, lambda: t[i], lambda: t[i] + t[i].sum(0)),
        "over the batch",
    ),
}


def state_of(fn: Callable[..., Any]) -> Any:
    (b,) = jax.export.symbolic_shape("batch")
    types = [jax.ShapeDtypeStruct(TABLE.shape, TABLE.dtype), jax.ShapeDtypeStruct((b, 3), "int32")]
    jaxpr = compat.open_jaxpr(trace(fn, types, ("t", "i")).jaxpr)
    (state,) = rowwise.states(jaxpr, b, [None, rowwise.Rows(0)])
    return state


@pytest.mark.parametrize("name", ROWWISE)
def test_rows_that_stay_apart(name: str) -> None:
    """The proof, and that it is true: other rows behind change none in front."""
    fn, where = ROWWISE[name]
    state = state_of(fn)
    assert state == (None if where is None else rowwise.Rows(*where)), state
    one, other = ids(7, 3), ids(7, 3)
    other[4:] = 0
    made = [np.asarray(jax.jit(fn)(TABLE, x)) for x in (one, other)]
    if where is not None:
        made = [x[(slice(None),) * where[0] + (slice(4 * where[1]),)] for x in made]
    assert np.array_equal(*made, equal_nan=True)


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_mix(name: str) -> None:
    fn, why = MIXED[name]
    state = state_of(fn)
    assert isinstance(state, rowwise.MixesRows) and re.search(why, str(state)), state
    assert __file__ in str(state)


def test_a_side_effect_sees_rows() -> None:
    def fn(t: Any, i: Any) -> Any:
        jax.debug.print("{}", i)
        return t[i]

    with pytest.raises(rowwise.MixesRows, match="side effect"):
        state_of(fn)
    with pytest.raises(BucketError, match=r"fn has .* whose side effect would see more rows"):
        recom_jax.optimize(fn, options=OPTIONS)(TABLE, ids(3, 3))


# ---- calls -----------------------------------------------------------------------------------------------------------

SIZES = [3, 8, 1, 0, 17, 5, 32, 9, 40, 2, 64, 31]


@cpu_only("each new size compiles its slice")
def test_one_compilation_a_bucket(compiled: list[str]) -> None:
    """Sizes in any order; the largest bucket's multiples stand for what is larger."""
    model = recom_models.model_e(large_rows=64, scale=0.005)
    params = model.init(0)
    fn = recom_jax.optimize(model.forward, options=OPTIONS)
    batches = [model.batch(n, seed=n) for n in SIZES]
    compiled.clear()
    fn(params, batches[0])
    prepared = recom_jax.stats()["programs_prepared"]
    results = [fn(params, b) for b in batches]
    assert len(compiled) == 3  # 8, 32 and 64
    assert recom_jax.stats()["programs_prepared"] == prepared
    for n, b, got in zip(SIZES, batches, results, strict=True):
        assert isinstance(got, jax.Array) and got.shape == (n,)
        if n in (0, 1, 5, 40):
            assert_same(got, jax.jit(model.forward)(params, b), 1e-5)


def test_programs_of_all_sizes_are_one() -> None:
    """Without buckets XLA compiles for every size; what is ours is prepared once."""
    model = recom_models.model_e(large_rows=64, scale=0.005)
    params = model.init(0)
    fn = recom_jax.optimize(model.columns, options=VERIFY)
    fn.explain(params, model.batch(7))
    before = recom_jax.stats()["programs_prepared"]
    sizes = [1, 8192, 2, 0, 100, 4096, 33]
    random.Random(3).shuffle(sizes)
    for n in sizes:
        fn.explain(params, model.batch(n))
    assert recom_jax.stats()["programs_prepared"] == before


ONE_PROGRAM: dict[str, Callable[..., Any]] = {
    "bags": lambda t, b: t[b["i"]].mean(1),
    "flat and back": lambda t, b: t[b["i"].reshape(-1)].reshape(*b["i"].shape, 8).sum(1),
    "one more axis": lambda t, b: t[b["k"]][:, None].reshape(-1, 8).T,
    "stack": lambda t, b: jnp.stack([t[b["k"]], t[b["i"][:, 0]]], 1).reshape(-1, 16),
    "segments": lambda t, b: jax.ops.segment_sum(t[b["v"]], b["v"], b["k"].shape[0]),
    "lengths": lambda t, b: jax.ops.segment_sum(
        t[b["v"]],
        jnp.repeat(jnp.arange(b["k"].shape[0]), b["n"], total_repeat_length=9),
        b["k"].shape[0],
    ),
    "column of a matrix": lambda t, b: (
        t[jnp.digitize(b["x"][:, 1], jnp.asarray([3.0, 1.0, 0.0]))].T
    ),
}


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_one_row_is_a_batch_as_any(name: str) -> None:
    fn = recom_jax.optimize(ONE_PROGRAM[name], options=VERIFY)
    made = set()
    for n in (7, 1, 33, 3, 8):
        batch = {
            "i": ids(n, 3),
            "k": ids(n),
            "v": ids(9),
            "n": np.full(n, 2, np.int32),
            "x": floats(n, 2),
        }
        made.add(str(fn.explain(TABLE, batch).programs))
        if n < 4:
            assert_same(fn(TABLE, batch), jax.jit(ONE_PROGRAM[name])(TABLE, batch), 1e-4)
    assert len(made) == 1


def everything(t: Any, batch: Any, scale: Any = 1.0) -> Any:
    rows = t[batch["i"]]
    return {
        "rows": rows * scale,
        "flat": rows.reshape(-1, 8),
        "last": rows.sum(1).T,
        "table": t.sum(0),
        "ints": (batch["i"] + batch["k"][:, None], batch["x"]),
    }


def batch_of(n: int) -> Any:
    return {"i": ids(n, 3), "k": np.arange(n, dtype=np.int8), "x": floats(n)}


@pytest.mark.parametrize("n", [0, 1, 8, 33])
def test_results_of_every_kind(n: int) -> None:
    """Rows along any axis, several rows a sample, none; numpy and device arrays; keywords and scalars."""
    fn = recom_jax.optimize(everything, options=dataclasses.replace(OPTIONS, batch_argnums=(1,)))
    batch = batch_of(n)
    want = jax.jit(everything)(TABLE, batch, 2.0)
    assert_same(fn(TABLE, batch, 2.0), want, 1e-5)
    assert_same(fn(TABLE, scale=2.0, batch=jax.tree.map(jnp.asarray, batch)), want, 1e-5)
    server = recom_jax.optimize(everything, options=OPTIONS).bind(TABLE)
    assert_same(server(batch), jax.jit(everything)(TABLE, batch), 1e-5)


def test_the_caller_s_arrays_are_not_written() -> None:
    fn = recom_jax.optimize(lambda t, i: (t[i], i + 1), options=OPTIONS)
    given = ids(5, 3)
    copy = given.copy()
    rows, more = fn(TABLE, given)
    assert (given == copy).all()
    given[:] = 0
    assert_same(more, jnp.asarray(copy + 1))
    assert rows.shape == (5, 3, 8)


def test_inside_a_trace_nothing_is_padded() -> None:
    fn = recom_jax.optimize(lambda t, i: t[i].mean(0), options=OPTIONS)  # not row by row
    assert_same(jax.jit(fn)(TABLE, ids(3, 3)), TABLE[ids(3, 3)].mean(0), 1e-5)
    assert fn.explain(TABLE, ids(3, 3)).num_fused == 1


@cpu_only("each new size compiles its slice")
def test_servers(compiled: list[str]) -> None:
    """All that is not bound is the batch. A lease is served at the size it was taken for."""

    def two(t: Any, i: Any, w: Any) -> Any:
        return (t[i] * w[..., None]).sum(1)

    server = recom_jax.optimize(two, options=OPTIONS).bind(TABLE)
    server.warmup((8, 32), ids(4, 3), floats(4, 3))
    warm = len(compiled)
    for n in (1, 30, 3, 0, 8, 17):
        got = server(ids(n, 3), floats(n, 3))
        assert len(compiled) == warm
        assert_same(got, two(TABLE, ids(n, 3), floats(n, 3)), 1e-4)
        compiled.clear()
        warm = 0
    views = server.input_views(ids(5, 3), floats(5, 3))
    views[0][:], views[1][:] = ids(5, 3), floats(5, 3)
    assert_same(server(*views), two(TABLE, ids(5, 3), floats(5, 3)), 1e-4)


def test_random_keys_are_rows_too() -> None:
    """A batch of keys: rows as any other, though numpy has no such type."""

    def model(t: Any, keys: Any) -> Any:
        return t[:3].sum(0) + jnp.zeros(keys.shape)[:, None], keys

    fn = recom_jax.optimize(model, options=OPTIONS)
    keys = jax.random.split(jax.random.key(1), 5)
    rows, out = fn(TABLE, keys)
    assert rows.shape == (5, 8) and (jax.random.key_data(out) == jax.random.key_data(keys)).all()


def test_threads() -> None:
    fn = recom_jax.optimize(lambda t, i: t[i].sum(1), options=OPTIONS)
    wrong: list[Any] = []

    def serve(seed: int) -> None:
        for n in random.Random(seed).sample(range(1, 33), 6):
            if not np.array_equal(fn(TABLE, ids(n, 3)), jnp.asarray(fn(TABLE, ids(n, 3)))):
                wrong.append(n)
            if fn(TABLE, ids(n, 3)).shape != (n, 8):
                wrong.append(n)

    threads = [threading.Thread(target=serve, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuses(fn: Callable[..., Any], *args: Any, match: str, **more: Any) -> None:
    with pytest.raises(BucketError, match=match):
        recom_jax.optimize(fn, options=dataclasses.replace(OPTIONS, **more))(*args)


def test_what_is_refused() -> None:
    def model(t: Any, batch: Any) -> Any:
        return {"rows": t[batch["i"]], "all": t[batch["i"]].mean(0)}

    refuses(
        model,
        TABLE,
        {"i": ids(8)},
        match=r"result\['all'\] of model is not computed row by row \(reduce_sum over the batch at .*"
        r"test_buckets.py:\d+\); call it without buckets",
    )
    refuses(
        lambda t, b: t[b["i"]] + b["w"].sum(),
        TABLE,
        {"i": ids(3), "w": floats(4)},
        match=r"b\['i'\] of <lambda> has 3 rows and argument b\['w'\] has 4",
    )
    refuses(lambda t, i, w: t[i] * w[:, None], TABLE, ids(3), floats(3), match="batch_argnums")
    refuses(lambda t, s: t * s, TABLE, 2.0, match="no arrays in its batch argument")
    refuses(lambda t: t, TABLE, match="3 arguments|argument", batch_argnums=(-3,))
    refuses(
        lambda t, i: t[i] if i.shape[0] < 9 else t[i] * 2,
        TABLE,
        ids(3),
        match="cannot be traced for all batch sizes at once",
    )
    server = recom_jax.optimize(
        lambda t, i: t[i], options=dataclasses.replace(OPTIONS, batch_argnums=(0,))
    ).bind(TABLE)
    with pytest.raises(BucketError, match="names an argument that is bound"):
        server(ids(3))


def test_a_size_that_is_treated_apart() -> None:
    """Python code that asks for one row: a trace for all sizes does not see its answer."""

    def model(t: Any, i: Any) -> Any:
        return t[i[0]] if i.shape[0] == 1 else t[i]

    fn = recom_jax.optimize(model, options=OPTIONS)
    assert fn(TABLE, ids(3)).shape == (3, 8)
    with pytest.raises(BucketError, match=r"float32\[8\] at a batch of 1, where .*32\[1, 8\]"):
        fn(TABLE, ids(1))


def test_jax_s_own_errors_stay(compiled: list[str]) -> None:
    fn = recom_jax.optimize(lambda t, i: t[i], options=OPTIONS)
    fn(TABLE, ids(3))
    with pytest.raises(TypeError):
        fn(TABLE)
    with pytest.raises(TypeError):
        fn(TABLE, "text")
    with pytest.raises(TypeError):
        fn(TABLE, np.array(["a", "b"]))


@pytest.mark.once
@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"batch_buckets": (0, 8)}, "at least 1"),
        ({"batch_buckets": 8}, "a tuple of integers"),
        ({"batch_buckets": ("8",)}, "a tuple of integers"),
        ({"batch_argnums": (1.5,)}, "a tuple of integers"),
    ],
)
def test_options(given: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        recom_jax.Options(**given)
    assert recom_jax.Options(batch_buckets=[64, 8, 8]).batch_buckets == (8, 64)
