"""Faults found by using the package, each kept by a test."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from tests.helpers import check

RNG = np.random.default_rng(7)
TABLE = RNG.normal(size=(50, 8)).astype(np.float32)
IDS = RNG.integers(0, 50, (6, 5)).astype(np.int32)


def plain_model(t: Any, i: Any) -> Any:
    return t[i].sum(1)


def test_values_used_twice_in_every_step_take_linear_time() -> None:
    def model(t: Any, i: Any) -> Any:
        e, mask = t[i[:, 0]], (i[:, :1] > 3)
        for _ in range(40):  # as a tree: 2**40 nodes
            e = jnp.where(mask, e, -e)
        return e

    report = check(model, TABLE, IDS, columns=1, calls=None)
    assert "t" in str(report)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_one_hot_over_more_classes_than_the_ids_can_count(dtype: str) -> None:
    table = RNG.normal(size=(300, 4)).astype(np.float32)
    ids = jnp.asarray([0, 1, 44, 100], dtype)
    fn = recom_jax.optimize(lambda t, i: jax.nn.one_hot(i, 300) @ t)
    want = jax.jit(lambda t, i: jax.nn.one_hot(i, 300) @ t)(table, ids)
    np.testing.assert_allclose(fn(table, ids), want, rtol=1e-6)


def test_an_exported_model_serialises_without_disabled_checks() -> None:
    pytest.importorskip("flatbuffers")
    fn = recom_jax.optimize(plain_model)
    exported = jax.export.export(jax.jit(fn))(TABLE, IDS)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(TABLE, IDS), fn(TABLE, IDS))
    assert "recom_fused_v1" in exported.mlir_module()


def test_pickling_keeps_the_optimisation_or_refuses() -> None:
    fn = recom_jax.optimize(plain_model)  # not what its module calls plain_model
    again = pickle.loads(pickle.dumps(fn))
    assert isinstance(again, recom_jax.OptimizedFunction)
    np.testing.assert_array_equal(again(TABLE, IDS), fn(TABLE, IDS))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(recom_jax.optimize(lambda t, i: t[i]))


def test_an_optimized_function_inside_another_is_compiled_as_one() -> None:
    inner = recom_jax.optimize(plain_model)
    inner(TABLE, IDS)  # traced on its own first: no cache may decide the outer one's answer

    def model(t: Any, i: Any) -> Any:
        return jnp.concatenate([inner(t, i), t[i[:, 0]]], 1)

    check(model, TABLE, IDS, columns=2, calls=1, bound=5 * 1.2e-7 * 5 * float(np.abs(TABLE).max()))
    np.testing.assert_array_equal(inner(TABLE, IDS), recom_jax.optimize(plain_model)(TABLE, IDS))


def test_rows_are_looked_up_once_for_a_layer_norm() -> None:
    def model(t: Any, i: Any, p: Any) -> Any:
        e = t[i] + p
        return (e - e.mean(-1, keepdims=True)) / jnp.sqrt(e.var(-1, keepdims=True) + 1e-6)

    fn = recom_jax.optimize(model)
    args = (TABLE, IDS, np.ones((5, 8), np.float32))
    assert fn.explain(*args).num_custom_calls == 1
    np.testing.assert_allclose(fn(*args), jax.jit(model)(*args), rtol=1e-5, atol=1e-6)


def test_explain_names_gathers_that_are_no_columns() -> None:
    def model(t: Any, b: Any, i: Any) -> Any:
        return t[i[:, 0]].sum(-1) + b[i[:, 1]] + t.at[0].set(0.0)[i[:, 2]].sum(-1)

    report = recom_jax.optimize(model).explain(TABLE, np.arange(50, dtype=np.float32), IDS)
    assert report.num_columns == report.num_fused == 1
    why = [w for _, w in report.others]
    assert any("1 axis" in w for w in why)
    assert any("computed" in w for w in why)
    assert all("test_regressions.py" in line for line, _ in report.others)
    assert "No embedding column" in str(report)


def test_constant_shuffles_are_no_reads_at_all() -> None:
    def model(z: Any) -> Any:
        dots = jnp.einsum("bfd,bgd->bfg", z, z).reshape(z.shape[0], -1)
        return dots[:, np.array([1, 2, 5])]

    report = recom_jax.optimize(model).explain(np.ones((4, 3, 8), np.float32))
    assert report.num_columns == 0
    assert report.others == ()


def test_warmup_takes_one_size() -> None:
    serve = recom_jax.optimize(plain_model).bind(TABLE)
    serve.warmup(3, IDS)
    before = recom_jax.stats()["traces"]
    serve(np.ascontiguousarray(IDS[:3]))
    assert recom_jax.stats()["traces"] == before


def test_a_sum_of_one_hot_products_keeps_each_positions_nan() -> None:
    """(one_hot(ids) @ table).sum(1): 0 * inf of the positions that select another row is NaN."""
    t = jnp.arange(20.0, dtype=jnp.float32).reshape(10, 2).at[7, 0].set(jnp.inf)
    i = jnp.array([[7, 1, 2, 3], [7, 7, 7, 7]], jnp.int32)

    def fn(t: jax.Array, i: jax.Array) -> jax.Array:
        return (jax.nn.one_hot(i, 10) @ t).sum(1)

    ours = recom_jax.optimize(fn)
    np.testing.assert_array_equal(ours(t, i), jax.jit(fn)(t, i))
    assert np.isnan(ours(t, i)[0, 0]) and np.isinf(ours(t, i)[1, 0])
    assert ours.explain(t, i).num_fused == 1  # the rows; their sum is XLA's


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_missing_row_makes_extremes_nan(op: str, dtype: Any) -> None:
    """Compared with numpy: XLA's CPU code loses NaN in extremes of some shapes (docs/semantics.md)."""
    rng = np.random.default_rng(0)
    t = jnp.asarray(rng.normal(size=(13, 33)), dtype)
    ids = rng.integers(-2, 15, (33, 9)).astype(np.int32)

    def fn(t: jax.Array, ids: jax.Array) -> jax.Array:
        return getattr(jnp.take(t, ids, axis=0).astype(jnp.float32), op)(1)

    rows = np.asarray(jnp.take(t, ids, axis=0), np.float32)
    want = getattr(rows, op)(1)
    assert np.isnan(want).any() and not np.isnan(want).all()
    ours = recom_jax.optimize(fn)
    np.testing.assert_array_equal(np.asarray(ours(t, ids)), want)
    assert [c.status for c in ours.explain(t, ids).columns] == ["fused"]


@pytest.mark.parametrize("kind", ["sum", "max", "mean", "masked", "keepdims"])
def test_a_bag_of_one_is_a_lookup(kind: str) -> None:
    """It took five times as long as plain JAX; and as a sum from 0 it lost the sign of -0.0."""

    def model(t: Any, ids: Any) -> Any:
        rows = t[ids]
        if kind == "masked":
            rows = jnp.where((ids >= 2)[..., None], rows, 0)
        return {
            "sum": rows.sum,
            "max": rows.max,
            "mean": rows.mean,
            "masked": rows.sum,
            "keepdims": lambda axis: rows.sum(axis, keepdims=True),
        }[kind](1)

    t = jnp.asarray([[-0.0, 1.0], [jnp.nan, -jnp.inf], [3.0, -0.0], [5.0, 6.0]])
    for length in (1, 2) if kind == "max" else (1, 2, 0):
        ids = jnp.arange(4 * length, dtype=jnp.int32).reshape(4, length) % 5 - 1
        fused = recom_jax.optimize(model, options=recom_jax.Options(verify=True, always_fuse=True))
        got, want = fused(t, ids), jax.jit(model)(t, ids)
        np.testing.assert_array_equal(got, want)
        if length == 1:
            np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
            (column,) = fused.explain(t, ids).columns
            assert (column.status, column.combiner) == ("fused", "none"), column
