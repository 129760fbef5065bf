"""Sparse training: dense gradients and optimizers on the rows that were read, no bit changed elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from recom_jax import sparse, sparse_sums
from recom_jax.sparse_lookup import MODES, positions

pytestmark = pytest.mark.once

ROWS, DIM = 7, 3
RULES: dict[str, Any] = {
    "sgd": sparse.Sgd(0.1),
    "adagrad": sparse.Adagrad(0.1),
    "rowwise": sparse.RowwiseAdagrad(0.1),
}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def row_of(i: int, rows: int, mode: str) -> int | None:
    """The row that an id updates, as the docs have it; None: none."""
    if mode == "clip":
        return min(max(i, 0), rows - 1)
    if mode == "wrap":
        return i % rows
    if mode == "fill" and -rows <= i < 0:
        return i + rows
    return i if 0 <= i < rows else None


def oracle(name: str, table: Any, state: Any, ids: Any, grads: Any, mode: str, lr: float) -> Any:
    """The update in float64, a row at a time."""
    table = np.array(table, np.float64)
    state = None if name == "sgd" else np.array(state, np.float64)
    sums: dict[int, Any] = {}
    for i, g in zip(ids.reshape(-1).tolist(), grads.reshape(ids.size, table.shape[1]), strict=True):
        row = row_of(i, len(table), mode) if table.size else None
        if row is not None:
            sums[row] = sums.get(row, 0) + g.astype(np.float64)
    for row, g in sums.items():
        if name == "sgd":
            table[row] -= lr * g
        elif name == "adagrad":
            state[row] += g * g
            live = state[row] != 0
            root = np.sqrt(np.where(live, state[row] + 1e-7, 1))
            table[row] -= lr * np.where(live, g / root, 0 * g)
        else:
            state[row] += np.mean(g * g)
            if state[row] != 0:
                table[row] -= lr * g / (np.sqrt(state[row]) + 1e-8)
    return table, state, sorted(sums)


def made(seed: int, n: int, rows: int = ROWS, low: int = -20, high: int = 20) -> Any:
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.normal(size=(rows, DIM)), jnp.float32)
    ids = rng.integers(low, high, n).astype(np.int32)
    return table, ids, rng.normal(size=(n, DIM)).astype(np.float32)


def update(name: str, table: Any, state: Any, ids: Any, grads: Any, mode: str) -> Any:
    if name == "sgd":
        return sparse.sgd(table, ids, grads, 0.1, mode=mode), None
    function = sparse.adagrad if name == "adagrad" else sparse.rowwise_adagrad
    return function(table, state, ids, grads, 0.1, mode=mode)


UPDATE = jax.jit(update, static_argnums=(0, 5))


def check(name: str, table: Any, ids: Any, grads: Any, mode: str, rtol: float = 2e-5) -> None:
    rule = RULES[name]
    state = rule.init(table)
    new, moved = UPDATE(name, table, state, ids, grads, mode)
    want, squares, touched = oracle(name, table, state, ids, grads, mode, 0.1)
    assert new.dtype == table.dtype and new.shape == table.shape
    np.testing.assert_allclose(np.asarray(new, np.float64), want, rtol=rtol, atol=rtol)
    others = np.setdiff1d(np.arange(len(table)), touched)
    assert same_bits(np.asarray(new)[others], np.asarray(table)[others])
    if moved is not None:
        assert moved.dtype == jnp.promote_types(table.dtype, jnp.float32)
        np.testing.assert_allclose(np.asarray(moved), squares, rtol=1e-5, atol=1e-6)
        assert same_bits(np.asarray(moved)[others], np.asarray(state)[others])


# ---- ids -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fill", "clip", "wrap"])
def test_an_id_updates_the_row_that_the_gradient_of_the_lookup_has(mode: str) -> None:
    ids = np.array([-20, -8, -7, -1, 0, 3, 3, 6, 7, 8, 99, -(2**31), 2**31 - 1], np.int32)
    cotangents = np.arange(1.0, 1 + ids.size, dtype=np.float32)
    table = jnp.zeros((ROWS, 1))
    dense = jax.grad(lambda t: jnp.sum(jnp.take(t, ids, axis=0, mode=mode)[:, 0] * cotangents))(
        table
    )
    where = positions(jnp.asarray(ids), ROWS, mode)
    ours = jnp.zeros(ROWS).at[where].add(cotangents, mode="drop")
    np.testing.assert_array_equal(ours, dense[:, 0])
    assert [row_of(i, ROWS, mode) for i in ids.tolist()] == [
        None if i == ROWS else i for i in where.tolist()
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_ids_of_every_type(mode: str, dtype: str) -> None:
    info = np.iinfo(dtype)
    ids = np.array([info.min, info.max, 0, 5, 126, info.max - 1], dtype)
    for rows in (7, 1000):
        want = [row_of(int(i), rows, mode) for i in ids]
        found = jax.jit(positions, static_argnums=(1, 2))(ids, rows, mode).tolist()
        assert [None if i == rows else i for i in found] == want
    table = np.arange(1, rows + 1, dtype=np.float32)[:, None]
    read = np.asarray(sparse.rows(table, ids, sparse.Lookup(mode)))[:, 0]
    missing = 0 if mode == "zero" else np.nan
    np.testing.assert_array_equal(read, [missing if i is None else i + 1 for i in want])


def test_64_bit_ids() -> None:
    with jax.enable_x64(True):
        ids = jnp.array([2**40, -(2**40), 2**32 + 1, 1, -1], jnp.int64)
        assert positions(ids, ROWS, "fill").tolist() == [7, 7, 7, 1, 6]
        table = jnp.ones((ROWS, 1), jnp.float64)
        new = sparse.sgd(table, ids, jnp.ones((5, 1)), 0.5)
        assert new.dtype == jnp.float64 and new[:, 0].tolist() == [1, 0.5, 1, 1, 1, 1, 0.5]
        unsigned = jnp.array([2**64 - 1, 3], jnp.uint64)
        assert positions(unsigned, ROWS, "fill").tolist() == [7, 3]
        assert positions(unsigned, ROWS, "wrap").tolist() == [(2**64 - 1) % 7, 3]


# ---- sums ----------------------------------------------------------------------------------------------------


def test_combine() -> None:
    combine = jax.jit(sparse.combine, static_argnums=2)
    ids, sums = combine(jnp.array([3, 1, 3, 3]), jnp.arange(8.0).reshape(4, 2), 9)
    assert ids.tolist() == [1, 3, 9, 9]
    assert sums.tolist() == [[2, 3], [10, 13], [0, 0], [0, 0]]
    assert combine(jnp.zeros(0, jnp.int32), jnp.zeros((0, 2)), 9)[0].shape == (0,)
    _, sums = combine(jnp.zeros(1000, jnp.int32), jnp.ones((1000, 1), jnp.bfloat16), 4)
    assert sums.dtype == jnp.float32 and sums[0, 0] == 1000


@pytest.mark.once
@pytest.mark.parametrize("num_rows", [50, 2**22 - 1, 2**22, 2**31 - 2])
def test_combine_of_small_and_large_tables(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    ids = rng.choice([0, 3, num_rows - 1, num_rows, -1], 1024).astype(np.int32)
    grads = rng.integers(-9, 9, (1024, 2)).astype(np.float32)
    once, sums = jax.jit(sparse.combine, static_argnums=2)(ids, grads, num_rows)
    assert once.tolist() == [0, 3, num_rows - 1] + [num_rows] * 1021
    for row, total in zip([0, 3, num_rows - 1], np.asarray(sums), strict=False):
        assert total.tolist() == grads[ids == row].sum(0).tolist()


def test_sums_have_the_bits_of_the_dense_gradient_on_a_cpu() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("sums are made pairwise elsewhere")
    table, ids, grads = made(0, 400)
    dense = jax.jit(jax.grad(lambda t: jnp.sum(jnp.take(t, ids, axis=0, mode="clip") * grads)))(
        table
    )
    where, sums = jax.jit(sparse.combine, static_argnums=2)(
        jnp.clip(jnp.asarray(ids), 0, ROWS - 1), jnp.asarray(grads), ROWS
    )
    assert same_bits(np.asarray(sums)[: len(set(where.tolist()) - {ROWS})], np.asarray(dense))


@pytest.mark.once
@pytest.mark.parametrize("size", [0, 1, 2, 64])
def test_pairwise_sums(size: int) -> None:
    rng = np.random.default_rng(size)
    ids = np.sort(rng.integers(0, 6, size))
    grads = rng.normal(size=(size, 2)).astype(np.float32)
    first = np.r_[[True] * min(size, 1), ids[1:] != ids[:-1]].astype(bool)
    run = jnp.asarray(np.cumsum(first) - 1, jnp.int32)
    args = (jnp.asarray(grads), run, jnp.asarray(first))
    pairwise, in_order = (jax.jit(f) for f in (sparse_sums.pairwise, sparse_sums.in_order))
    np.testing.assert_allclose(pairwise(*args), in_order(*args), rtol=1e-5, atol=1e-6)
    if size > 3:
        grads[ids == ids[1]] = np.nan
        sums = np.asarray(pairwise(jnp.asarray(grads), *args[1:]))
        assert np.isnan(sums).any(1).tolist() == [k == run[1] for k in range(size)]


# ---- updates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@given(data=st.data())
def test_updates_equal_the_formula(name: str, data: Any) -> None:
    n = data.draw(st.sampled_from([0, 1, 30]))
    rows = data.draw(st.sampled_from([1, ROWS]))
    wanted = st.one_of(st.integers(-2, rows + 1), st.integers(-(2**31), 2**31 - 1))
    ids = np.array(data.draw(st.lists(wanted, min_size=n, max_size=n)), np.int32)
    mode = data.draw(st.sampled_from(MODES))
    table, _, grads = made(data.draw(st.integers(0, 99)), n, rows)
    grads *= np.float32(data.draw(st.sampled_from([0.0, 1.0, 1e3])))
    check(name, table, ids, grads, mode)


@pytest.mark.once
@pytest.mark.parametrize("name", RULES)
def test_odd_shapes(name: str) -> None:
    table, ids, grads = made(1, 6)
    check(name, table, ids.reshape(2, 3), grads.reshape(2, 3, DIM), "fill")
    check(name, table[:0], ids, grads, "fill")  # no rows
    check(name, table, ids[:0], grads[:0], "fill")  # no ids
    check(name, table[:, :0], ids, grads[:, :0], "wrap")  # no columns
    check(name, table, np.full(6, -1, np.int32), grads, "zero")  # padding alone


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in RULES), ("sgd", "float16")]
)
def test_16_bit_tables_are_rounded_once(name: str, dtype: str) -> None:
    table, ids, grads = made(2, 40)
    table = table.astype(dtype)
    check(name, table, ids, grads, "wrap", rtol=float(jnp.finfo(dtype).eps))
    if name == "sgd":  # 300 steps of less than half an ulp together: 300 roundings would lose them
        one = jnp.ones((1, 1), dtype)
        new = sparse.sgd(one, jnp.zeros(300, jnp.int32), jnp.full((300, 1), 1e-3, dtype), 1.0)
        np.testing.assert_allclose(np.asarray(new, np.float32), 0.7, rtol=1e-2)


def test_other_rows_of_a_bfloat16_table_keep_every_bit() -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 2)  # every number and every NaN
    table = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    new = jax.jit(sparse.sgd)(table, jnp.array([5]), jnp.ones((1, 2), jnp.bfloat16), 0.5)
    changed = np.asarray(jax.lax.bitcast_convert_type(new, jnp.uint16)) != bits
    assert np.flatnonzero(changed.any(1)).tolist() == [5]


@pytest.mark.once
@pytest.mark.parametrize("name", RULES)
def test_nan_and_infinity_stay_in_their_row(name: str) -> None:
    table, _, grads = made(3, 4)
    ids = np.array([1, 2, 1, 4], np.int32)
    grads[2, 0], grads[3, 1] = np.nan, np.inf
    start = RULES[name].init(table)
    tables, _ = jax.jit(RULES[name].update)(table, start, sparse.RowGrads(ids, grads))
    odd = ~np.isfinite(np.asarray(tables)).all(1)
    assert odd[1] and odd.tolist() == [k in (1, 4) for k in range(ROWS)]
    assert same_bits(np.asarray(tables)[[0, 3, 5, 6]], np.asarray(table)[[0, 3, 5, 6]])


@pytest.mark.once
def test_zero_state_and_zero_gradient_move_nothing() -> None:
    table, ids, _ = made(4, 5, low=0, high=ROWS)
    zero = np.zeros((5, DIM), np.float32)
    for function, shape in (
        (sparse.rowwise_adagrad, (ROWS,)),
        (sparse.adagrad, (ROWS, DIM)),
    ):
        one = jax.jit(function, static_argnames="eps")
        new, _ = one(table, jnp.zeros(shape), ids, zero, 0.1, eps=0.0)
        assert same_bits(np.asarray(new), np.asarray(table))


@pytest.mark.once
@pytest.mark.parametrize("name", ["sgd", "rowwise"])
def test_vmap_over_stacked_tables(name: str) -> None:
    parts = [made(k, 9) for k in range(3)]
    table, ids, grads = (jnp.stack([jnp.asarray(p[k]) for p in parts]) for k in range(3))
    rule = RULES[name]

    @jax.jit
    def one(t: Any, i: Any, g: Any) -> Any:
        return rule.update(t, rule.init(t), sparse.RowGrads(i, g))[0]

    new = jax.vmap(lambda t, i, g: one(t, positions(i, ROWS, "wrap"), g))(table, ids, grads)
    for k, (t, i, g) in enumerate(parts):
        want = one(t, positions(jnp.asarray(i), ROWS, "wrap"), jnp.asarray(g))
        np.testing.assert_allclose(new[k], want, rtol=1e-6)


@pytest.mark.once
def test_numpy_arrays_and_stacked_bfloat16_tables() -> None:
    table, ids, grads = made(11, 5)
    for rule in RULES.values():
        parts = (np.asarray(table), rule.init(table))
        new, state = rule.update(*jax.tree.map(np.asarray, parts), sparse.RowGrads(ids, grads))
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves((new, state)))
    tables = jnp.ones((2, 3, 1), jnp.bfloat16)
    new = jax.vmap(lambda t, i, g: sparse.sgd(t, i, g, 0.5))(
        tables, jnp.array([[1, 1], [9, -1]]), jnp.ones((2, 2, 1))
    )
    assert new[..., 0].tolist() == [[1, 0, 1], [1, 1, 0.5]]


def test_a_step_exports_with_a_symbolic_batch() -> None:
    table, rule = jnp.ones((50, 2)), sparse.Adagrad(0.1)
    run = sparse.value_and_grad(lambda rows, _, y: jnp.sum(rows * y))

    def step(table: Any, state: Any, ids: Any, y: Any) -> Any:
        return rule.update(table, state, run(table, ids, (), y)[1][0])

    (b,) = jax.export.symbolic_shape("b")
    shapes = (jax.ShapeDtypeStruct((b,), jnp.int32), jax.ShapeDtypeStruct((b, 1), jnp.float32))
    exported = jax.export.export(jax.jit(step))(table, rule.init(table), *shapes)
    args = (table, rule.init(table), jnp.array([1, 1, 3]), jnp.ones((3, 1)))
    for ours, want in zip(exported.call(*args), step(*args), strict=True):
        np.testing.assert_array_equal(ours, want)


def test_on_a_gpu_sums_are_made_pairwise() -> None:
    args = (jnp.zeros(4, jnp.int32), jnp.zeros((4, 2)))
    lowered = {
        platform: jax.jit(sparse.combine, static_argnums=2)
        .trace(*args, 9)
        .lower(lowering_platforms=(platform,))
        .as_text()
        for platform in ("cpu", "cuda")
    }
    assert "stablehlo.while" in lowered["cuda"] and "stablehlo.while" not in lowered["cpu"]


@pytest.mark.parametrize(
    ("name", "mode"), [("sgd", "fill"), ("adagrad", "fill"), ("adagrad", "clip")]
)
def test_equals_optax_on_the_dense_gradient(name: str, mode: str) -> None:
    optax = pytest.importorskip("optax")
    table, _, _ = made(5, 1)
    rng = np.random.default_rng(6)
    dense_rule = optax.sgd(0.1) if name == "sgd" else optax.adagrad(0.1)
    ours_state, dense, dense_state = RULES[name].init(table), table, dense_rule.init(table)
    ours, start, step = table, table, jax.jit(RULES[name].update)
    touched: set[int | None] = set()
    for _ in range(5):
        ids = rng.integers(-2, 3, 8).astype(np.int32)
        weights = rng.normal(size=(8, DIM)).astype(np.float32)
        touched |= {row_of(i, ROWS, mode) for i in ids.tolist()}

        def loss(t: Any, ids: Any = ids, weights: Any = weights) -> Any:
            return jnp.sum(jnp.tanh(jnp.take(t, ids, axis=0, mode=mode)) * weights)

        updates, dense_state = dense_rule.update(jax.grad(loss)(dense), dense_state, dense)
        dense = optax.apply_updates(dense, updates)
        run = sparse.value_and_grad(
            lambda rows, w: jnp.sum(jnp.tanh(rows) * w), sparse.Lookup(mode)
        )
        _, (grads, _) = run(ours, ids, weights)
        ours, ours_state = step(ours, ours_state, grads)
    np.testing.assert_allclose(ours, dense, rtol=1e-5, atol=1e-6)
    others = [k for k in range(ROWS) if k not in touched]
    assert others and same_bits(np.asarray(ours)[others], np.asarray(start)[others])


# ---- lookups and gradients -----------------------------------------------------------------------------------


def model() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(7)
    tables = {
        "user": jnp.asarray(rng.normal(size=(11, 4)), jnp.float32),
        "item": jnp.asarray(rng.normal(size=(9, 4)), jnp.float32),
    }
    ids = {
        "user": rng.integers(-3, 14, 6).astype(np.int32),
        "item": {
            "seen": rng.integers(-2, 9, (6, 5)).astype(np.int32),
            "bought": rng.integers(-2, 12, (6, 2)).astype(np.int32),
        },
    }
    return tables, ids, {"w": jnp.asarray(rng.normal(size=4), jnp.float32)}


def bag(table: Any, ids: Any, mean: bool) -> Any:
    there = (ids >= 0) & (ids < len(table))
    rows = jnp.where(there[..., None], jnp.take(table, jnp.where(there, ids, 0), axis=0), 0).sum(1)
    return rows / jnp.maximum(there.sum(1, keepdims=True), 1) if mean else rows


def head(rows: Any, params: Any, scale: float) -> Any:
    joined = rows["user"] * params["w"] + jnp.tanh(rows["item"]["seen"]) * rows["item"]["bought"]
    return jnp.nansum(jnp.sin(joined)) * scale, joined


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_value_and_grad_is_that_of_the_dense_loss(combiner: str) -> None:
    tables, ids, params = model()

    def dense(tables: Any, params: Any) -> Any:
        rows = {
            "user": jnp.take(tables["user"], ids["user"], axis=0, mode="wrap"),
            "item": {k: bag(tables["item"], v, combiner == "mean") for k, v in ids["item"].items()},
        }
        return head(rows, params, 2.0)

    (want, _), (d_tables, d_params) = jax.jit(jax.value_and_grad(dense, (0, 1), has_aux=True))(
        tables, params
    )
    lookup = {"user": sparse.Lookup("wrap"), "item": sparse.Lookup("zero", combiner)}
    run = jax.jit(sparse.value_and_grad(head, lookup, has_aux=True))
    (value, joined), (grads, d_ours) = run(tables, ids, params, scale=2.0)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert joined.shape == (6, 4)
    np.testing.assert_allclose(d_ours["w"], d_params["w"], rtol=1e-5)
    assert grads["user"].ids.shape == (6,) and grads["item"].grads.shape == (6 * 7, 4)
    for name, table in tables.items():
        made = jnp.zeros_like(table).at[grads[name].ids].add(grads[name].grads, mode="drop")
        np.testing.assert_allclose(made, d_tables[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_those_of_take(mode: str) -> None:
    table, ids, _ = made(8, 12)
    ids = ids.reshape(3, 4)
    one, pooled = (sparse.rows([table], [ids], sparse.Lookup(mode, c))[0] for c in (None, "mean"))
    there = (ids >= 0) & (ids < ROWS)
    want = jnp.take(table, ids, axis=0, mode="fill" if mode == "zero" else mode)
    if mode == "zero":
        want = jnp.where(there[..., None], want, 0)
    assert same_bits(np.asarray(one), np.asarray(want))
    count = np.maximum(there.sum(1), 1)[:, None] if mode == "zero" else 4
    np.testing.assert_allclose(pooled, want.sum(1) / count, rtol=1e-5, atol=1e-6)


def test_reads_are_one_fused_call() -> None:
    tables, ids, _ = model()
    lookup = {"user": sparse.Lookup(), "item": sparse.Lookup("zero", "sum")}
    text = jax.jit(lambda t, i: sparse.rows(t, i, lookup)).lower(tables, ids).as_text()
    assert text.count("@recom_fused_v1") == 1 and "gather" not in text


def test_empty_batch_and_nothing_to_train() -> None:
    tables, ids, _ = model()
    none = jax.tree.map(lambda i: i[:0], ids)
    lookup = {"user": sparse.Lookup(), "item": sparse.Lookup("zero", "mean")}
    value, (grads, left) = sparse.value_and_grad(
        lambda rows, _: sum(jnp.sum(r) for r in jax.tree.leaves(rows)), lookup
    )(tables, none, ())
    assert value == 0 and left == () and grads["item"].ids.shape == (0,)
    for rule in RULES.values():
        new, _ = jax.jit(rule.update)(tables, rule.init(tables), grads)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), new, tables)
    _, (grads, _) = sparse.value_and_grad(lambda rows, p: p)({}, {}, 1.0)
    assert grads == {}
    _, (grads, _) = sparse.value_and_grad(lambda rows, p: p)([tables["user"]], [()], 1.0)
    assert grads[0].grads.shape == (0, 4)  # a table that no feature reads


@pytest.mark.once
def test_a_rate_may_change_from_step_to_step() -> None:
    table, ids, grads = made(9, 5)
    step = jax.jit(
        lambda t, lr: sparse.Sgd(lr).update(t, (), sparse.RowGrads(ids % ROWS, grads))[0]
    )
    np.testing.assert_allclose(
        step(table, 0.5), sparse.sgd(table, ids % ROWS, grads, 0.5), rtol=1e-6
    )
    assert same_bits(np.asarray(step(table, 0.0)), np.asarray(table))


# ---- nothing as large as a table -----------------------------------------------------------------------------


IN_PLACE = {"scatter", "scatter-add", "jit", "pjit"}


def wide_equations(jaxpr: Any, size: int) -> set[str]:
    """Primitives that make an array of `size` rows."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= wide_equations(inner, size)
        if any(size in getattr(v.aval, "shape", ()) for v in eqn.outvars):
            found.add(eqn.primitive.name)
    return found


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in RULES), ("rowwise", "float16")]
)
def test_no_gradient_and_no_copy_is_as_large_as_a_table(name: str, dtype: str) -> None:
    size = 50_021
    rule = RULES[name]
    tables = [jnp.ones((size, 4), dtype)] * 2
    lookup = [sparse.Lookup(), sparse.Lookup("zero", "sum")]
    ids = [jnp.zeros(8, jnp.int32), jnp.zeros((8, 3), jnp.int32)]

    def step(tables: Any, state: Any, ids: Any) -> Any:
        run = sparse.value_and_grad(
            lambda rows, _: jnp.sum(rows[0] * rows[1]).astype(float), lookup
        )
        value, (grads, _) = run(tables, ids, ())
        return *rule.update(tables, state, grads), value

    args = jax.eval_shape(lambda: (tables, rule.init(tables), ids))
    made_by = wide_equations(jax.make_jaxpr(step)(*args).jaxpr, size)
    assert made_by <= IN_PLACE, made_by
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    text = compiled.as_text()
    assert not re.search(rf" = \w+\[{size}[\],]\S* (copy|broadcast)\(", text)
    if dtype == "float32":
        made_by = set(re.findall(rf" = \w+\[{size}[\],]\S* ([\w-]+)\(", text))
        assert made_by <= {"parameter", "scatter", "fusion"}, made_by
    assert compiled.memory_analysis().temp_size_in_bytes < size


# ---- errors --------------------------------------------------------------------------------------------------


@pytest.mark.once
def test_errors_are_ours_and_name_what_is_wrong() -> None:
    table, ids, grads = made(10, 4)
    good = sparse.RowGrads(jnp.asarray(ids), jnp.asarray(grads))
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: sparse.Lookup("drop"), ValueError, "fill, clip, wrap or zero, not 'drop'"),
        (lambda: sparse.Lookup(combiner="max"), ValueError, "None, 'sum' or 'mean', not 'max'"),
        (
            lambda: sparse.rows({"a": table[0]}, {"a": ids}),
            ValueError,
            r"tables\['a'\] has the shape",
        ),
        (
            lambda: sparse.rows({"a": table.astype(int)}, {"a": ids}),
            TypeError,
            r"tables\['a'\] is an array",
        ),
        (lambda: sparse.rows({"a": table}, {"b": ids}), ValueError, "ids: expected the structure"),
        (lambda: sparse.rows([table], [grads]), TypeError, r"the ids of tables\[0\] are integers"),
        (lambda: sparse.rows([table], ["x"]), TypeError, r"the ids of tables\[0\] are integers"),
        (lambda: sparse.rows([table], [ids], ["sum"]), TypeError, r"lookup of tables\[0\] is"),
        (
            lambda: sparse.rows([table], [1], sparse.Lookup("fill", "sum")),
            ValueError,
            "a scalar has",
        ),
        (lambda: sparse.row_grads([table], [ids], [grads[:1]]), ValueError, "gradients of tables"),
        (
            lambda: sparse.row_grads([table], [ids], grads),
            ValueError,
            "the rows' gradients: expected",
        ),
        (lambda: sparse.value_and_grad(3), TypeError, "not a int"),  # type: ignore[arg-type]
        (lambda: sparse.sgd(table, ids, grads[:2], 0.1), ValueError, "row_grads has shape"),
        (lambda: sparse.sgd(table, grads, grads, 0.1), TypeError, "ids are integers"),
        (lambda: sparse.sgd(table, ids, ids, 0.1), TypeError, "row_grads are floats"),
        (lambda: sparse.sgd(table, ids, grads, jnp.ones(2)), ValueError, "lr is a scalar"),
        (lambda: sparse.sgd(table, ids, grads, 0.1, mode="x"), ValueError, "the mode of a sparse"),
        (
            lambda: sparse.adagrad(table, table[0], ids, grads, 0.1),
            ValueError,
            "squares is float32",
        ),
        (lambda: sparse.rowwise_adagrad(table, table, ids, grads, 0.1), ValueError, "moments is"),
        (lambda: sparse.Sgd(0.1).update([table], [()], [grads]), TypeError, "takes the RowGrads"),
        (
            lambda: sparse.Sgd(0.1).update([table], [()], good),
            ValueError,
            "the gradients: expected",
        ),
        (lambda: positions(jnp.asarray(ids), 2**31, "fill"), ValueError, "needs int64 ids"),
    ]
    for call, builtin, text in wrong:
        with pytest.raises(recom_jax.RecomError, match=text) as caught:
            call()
        assert isinstance(caught.value, builtin), text
