"""Products that are bags: one-hot vectors under masks, and sparse matrices. Printed form, numbers, property, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import sparse

import recom_jax
from recom_jax import ir
from recom_jax.detect import detect
from recom_jax.trace import trace
from tests.helpers import VERIFY, assert_same, check, table

ROWS, DIM, BATCH, LENGTH = 20, 4, 3, 5
BOUND = 1e-4


def printed(fn: Callable[..., Any], *args: Any) -> str:
    """The expression of the one fused result, variables numbered."""
    traced = trace(fn, args, tuple(map(str, range(len(args)))))
    found, _ = detect(traced.jaxpr, VERIFY)
    (out,) = found.outputs
    with ir.numbered():
        return str(out.val.expr)


# ---- one-hot vectors under a mask ------------------------------------------------------------------------------------

MASKED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "times": lambda t, i, m: (jax.nn.one_hot(i, ROWS) * m[..., None]).sum(1) @ t,
    "times a float mask": lambda t, i, m: (
        (jax.nn.one_hot(i, ROWS) * m.astype(jnp.float32)[..., None]).sum(1) @ t
    ),
    "where": lambda t, i, m: jnp.where(m[..., None], jax.nn.one_hot(i, ROWS), 0).sum(1) @ t,
    "and": lambda t, i, m: (
        ((i[..., None] == jnp.arange(ROWS)) & m[..., None]).astype(jnp.float32).sum(1) @ t
    ),
    "where of numbers": lambda t, i, m: (
        jnp.where((i[..., None] == jnp.arange(ROWS)) & m[..., None], 1.0, 0.0).sum(1) @ t
    ),
    "where of integers": lambda t, i, m: (
        jnp.where(jnp.where(m, i, -7)[..., None] == jnp.arange(ROWS), 1, 0).astype(t.dtype) @ t
    ),
    "twice": lambda t, i, m: (
        (jnp.where((i > 0)[..., None], jax.nn.one_hot(i, ROWS), 0) * m[..., None]).sum(1) @ t
    ),
    "unpooled": lambda t, i, m: jnp.where(m[..., None], jax.nn.one_hot(i, ROWS), 0) @ t,
}


def case(data: st.DataObject) -> tuple[Any, Any, Any]:
    draw = data.draw
    some = st.sampled_from([-(2**31), -1, 0, 1, ROWS - 1, ROWS, 2**31 - 1])
    ids = draw(st.lists(some, min_size=BATCH * LENGTH, max_size=BATCH * LENGTH))
    mask = draw(st.lists(st.booleans(), min_size=BATCH * LENGTH, max_size=BATCH * LENGTH))
    t = np.array(table(ROWS, DIM))
    for value in (np.nan, np.inf):
        if draw(st.booleans()):
            t[draw(st.integers(0, ROWS - 1)), draw(st.integers(0, DIM - 1))] = value
    return t, np.array(ids, np.int32).reshape(BATCH, LENGTH), np.array(mask).reshape(BATCH, LENGTH)


def test_printed_form_of_a_masked_one_hot_product() -> None:
    args = table(ROWS, DIM), jnp.zeros((BATCH, LENGTH), jnp.int32), jnp.ones((BATCH, LENGTH), bool)
    assert printed(MASKED["where"], *args) == (
        "sum[in_1](%0[select(%1(0;in_1,0,1), -1, %2(0;in_3,0,1)); fill 0.0, one_hot](0;0,1,0))"
    )


OPTIMIZED = {name: recom_jax.optimize(fn, options=VERIFY) for name, fn in MASKED.items()}
PLAIN = {name: jax.jit(fn) for name, fn in MASKED.items()}


@pytest.mark.parametrize("name", MASKED)
@given(data=st.data())
def test_masked_one_hot_products(name: str, data: st.DataObject) -> None:
    args = case(data)
    assert_same(OPTIMIZED[name](*args), PLAIN[name](*args), BOUND)
    report = OPTIMIZED[name].explain(*args)
    assert (report.num_fused, report.num_custom_calls) == (1, 1)
    assert report.columns[0].rewrites[:1] == ("one-hot-to-lookup",)


NOT_MASKED: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "weights": (
        lambda t, i, m: (jax.nn.one_hot(i, ROWS) * (m * 0.5)[..., None]).sum(1) @ t,
        "a weighted one-hot product",
    ),
    "each id once": (
        lambda t, i, m: jax.nn.one_hot(i, ROWS).max(1) @ t,
        "a one-hot product that takes each id once",
    ),
    "another constant": (
        lambda t, i, m: jnp.where(m[..., None], jax.nn.one_hot(i, ROWS), 2).sum(1) @ t,
        "a weighted one-hot product",
    ),
    "a mask of classes": (
        lambda t, i, m: jnp.where(jnp.arange(ROWS) > 3, jax.nn.one_hot(i, ROWS), 0).sum(1) @ t,
        "a weighted one-hot product",
    ),
    "ids without a -1": (
        lambda t, i, m: (
            jnp.where(m[..., None], jax.nn.one_hot(i.astype(jnp.uint8), ROWS), 0).sum(1) @ t
        ),
        "a weighted one-hot product",
    ),
}


@pytest.mark.parametrize("name", NOT_MASKED)
def test_must_not_be_a_lookup(name: str) -> None:
    fn, reason = NOT_MASKED[name]
    ids = jnp.asarray([[0, 3, 3, 19, -1], [20, 1, 2, 2, 2], [5, 5, 5, 5, 5]], jnp.int32)
    report = check(
        fn, table(ROWS, DIM), ids, ids % 2 == 0, columns=1, fused=0, calls=0, bound=BOUND
    )
    assert report.columns[0].reason == reason


# ---- sparse matrices -------------------------------------------------------------------------------------------------


def bcoo(t: Any, weights: Any, where: Any) -> Any:
    return sparse.BCOO((weights, where), shape=(BATCH, ROWS)) @ t


OPTIMIZED_BCOO = recom_jax.optimize(bcoo, options=VERIFY)


def test_printed_form_of_a_sparse_product() -> None:
    n = 7
    t, w = table(ROWS, DIM), jnp.ones(n)
    text = printed(bcoo, t, w, jnp.zeros((n, 2), jnp.int32))
    assert text.startswith("segment_sum(mul(%0(0;1,0), %1[") and "fill 0](" in text


@given(data=st.data())
def test_bcoo_with_padding_and_duplicates(data: st.DataObject) -> None:
    """Coordinates outside the matrix are padding; equal ones are added; negative ones count from the end."""
    n = 9
    some = st.sampled_from([0, 0, 1, 2, BATCH, ROWS - 1, ROWS, -1, -ROWS - 1, 2**31 - 1])
    where = data.draw(st.lists(some, min_size=2 * n, max_size=2 * n))
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, np.nan]), min_size=n, max_size=n))  # fmt: skip
    args = table(ROWS, DIM), np.array(weights, np.float32), np.array(where, np.int32).reshape(n, 2)
    assert_same(OPTIMIZED_BCOO(*args), jax.jit(bcoo)(*args), BOUND)
    assert OPTIMIZED_BCOO.explain(*args).num_fused == 1


def test_compressed_rows_are_left_to_jax() -> None:
    def bcsr(t: Any, weights: Any, ids: Any, splits: Any) -> Any:
        return sparse.BCSR((weights, ids, splits), shape=(BATCH, ROWS)) @ t

    args = table(ROWS, DIM), jnp.ones(9), jnp.arange(9) % 7, jnp.asarray([1, 3, 3, 8], jnp.int32)
    report = check(bcsr, *args, columns=1, fused=0, calls=0)
    assert "a kernel of its own" in report.columns[0].reason


def test_combiners_of_a_sparse_multi_hot_matrix() -> None:
    """Mean and sqrtn divide by what the matrix holds, duplicates included."""
    where = jnp.asarray([[0, 3], [0, 3], [1, 7], [2, 5], [2, 5], [2, 6]], jnp.int32)

    def model(t: Any, w: Any) -> Any:
        m = sparse.BCOO((w, where), shape=(BATCH, ROWS))
        total = jax.ops.segment_sum(w, where[:, 0], BATCH)[:, None]
        squares = jax.ops.segment_sum(w * w, where[:, 0], BATCH)[:, None]
        return (m @ t) / total, (m @ t) / jnp.sqrt(squares)

    check(model, table(ROWS, DIM), jnp.ones(6), columns=2, bound=BOUND)


def test_sparse_products_that_are_no_bags() -> None:
    where = jnp.zeros((6, 2), jnp.int32)
    t, w = table(ROWS, DIM), jnp.ones(6)

    def batched(t: Any, w: Any) -> Any:
        return sparse.BCOO((w[None], where[None]), shape=(1, BATCH, ROWS)) @ t

    report = check(batched, t, w, columns=1, fused=0, calls=0, leaves_gather=True)
    assert "a batch of sparse matrices" in report.columns[0].reason

    def cast(t: Any, w: Any) -> Any:
        return sparse.BCOO((w, where), shape=(BATCH, ROWS)) @ t.astype(jnp.float32)

    check(cast, t.astype(jnp.bfloat16), w, columns=1, bound=BOUND)

    def computed(t: Any, w: Any) -> Any:
        return sparse.BCOO((w, where), shape=(BATCH, ROWS)) @ (t @ t.T)[:, :DIM]

    def vector(t: Any, w: Any) -> Any:
        return sparse.BCOO((w, where), shape=(BATCH, ROWS)) @ t[:, 0]

    for fn in (computed, vector):
        check(fn, t, w, columns=0, calls=0, bound=BOUND, leaves_gather=True)


def test_shuffles_of_columns_are_no_columns() -> None:
    """A gather along the other axis of a matrix reads no rows: it is neither counted nor fused."""

    def model(t: Any, ids: Any) -> Any:
        return t[ids[:, jnp.array([2, 0])]]

    ids = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    check(model, table(ROWS, DIM), ids, columns=1, leaves_gather=True)
