"""JAX's debugging switches and promises: what they do to a plain function they do to an optimized one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import recom_jax
from tests.helpers import VERIFY, Bag, assert_same, check, ids, table

ROWS, DIM = 9, 4
T = table(ROWS, DIM)
I = ids((4, 3), ROWS)  # noqa: E741


@contextlib.contextmanager
def switched(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def model(t: Any, i: Any, w: Any) -> Any:
    """Lookups and bags of every kind; no NaN."""
    rows = jnp.where((i >= 0)[..., None], t[jnp.maximum(i, 0)], 0)
    bags = jnp.repeat(jnp.arange(4), 3)
    return {
        "take": jnp.take(t, i, axis=0, mode="clip"),
        "mean": rows.sum(1) / jnp.maximum((i >= 0).sum(1, keepdims=True), 1),
        "weighted": jnp.einsum("bld,bl->bd", t[i], w),
        "max": t[i].max(1),
        "jagged": jax.ops.segment_sum(t[i.reshape(-1)], bags, 4),
        "one_hot": jax.nn.one_hot(i, ROWS).sum(1) @ t,
    }


def loss(results: Any) -> Any:
    return sum(x.sum() for x in jax.tree.leaves(results))


W = jnp.asarray(np.linspace(0.1, 1, 12, dtype=np.float32).reshape(4, 3))
BOUND = 1e-4


@pytest.mark.parametrize(
    ("switch", "value"),
    [("jax_debug_nans", True), ("jax_debug_infs", True), ("jax_enable_checks", True),
     ("jax_numpy_rank_promotion", "raise")],
)  # fmt: skip
def test_a_clean_model_under_a_switch(switch: str, value: Any) -> None:
    plain = jax.jit(model)(T, I, W)
    with switched(switch, value):
        ours = recom_jax.optimize(model, options=VERIFY)
        assert_same(ours(T, I, W), plain, BOUND)
        assert ours.explain(T, I, W).num_fused == 6
        if switch == "jax_numpy_rank_promotion":
            grad = jax.jit(jax.grad(lambda t: loss(ours(t, I, W))))(T)
            batched = jax.jit(jax.vmap(ours, (None, 0, None)))(T, I[None], W)
            assert_same(grad, jax.jit(jax.grad(lambda t: loss(model(t, I, W))))(T), BOUND)
            assert_same(jax.tree.map(lambda x: x[0], batched), plain, BOUND)


NANS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a row outside": ("jax_debug_nans", lambda t, i: jnp.take(t, i, axis=0)),
    "behind the lookup": ("jax_debug_nans", lambda t, i: jnp.log(t.at[i].get(mode="clip") - 100)),
    "an infinity": ("jax_debug_infs", lambda t, i: 1 / (t.at[i].get(mode="clip") * 0)),
}


@pytest.mark.parametrize("name", NANS)
def test_nan_and_inf_are_found_where_plain_jax_finds_them(name: str) -> None:
    switch, fn = NANS[name]
    odd = jnp.asarray([0, ROWS, 2], jnp.int32)
    with switched(switch, True), warnings.catch_warnings():
        with pytest.raises(FloatingPointError) as plain:
            jax.jit(fn)(T, odd)
        ours = recom_jax.optimize(fn, options=VERIFY)
        with pytest.raises(FloatingPointError) as found:
            ours(T, odd)
    assert isinstance(found.value, recom_jax.RecomError)
    assert str(plain.value) in str(found.value)
    assert "test_configurations.py" in str(found.value)


def _bag_of_nothing(t: Any, i: Any) -> Any:
    there = i >= 0
    rows = jnp.where(there[..., None], t[jnp.maximum(i, 0)], 0)
    return rows.sum(1) / there.sum(1, keepdims=True)


CHECKED: dict[str, tuple[Any, Callable[..., Any], Any, str | None]] = {
    "a row outside": (checkify.index_checks, lambda t, i: t[i], [[0, ROWS]], "out-of-bounds"),
    "a row outside, all checks": (checkify.all_checks, lambda t, i: t[i], [[0, ROWS]], "out-of-"),
    "rows that are there": (checkify.index_checks, lambda t, i: t[i], [[0, ROWS - 1]], None),
    "a mean of nothing": (checkify.float_checks, _bag_of_nothing, [[1, 2], [-1, -1]], "div"),
    "means": (checkify.automatic_checks, _bag_of_nothing, [[1, 2], [3, -1]], None),
    "nothing asked for": (checkify.user_checks, lambda t, i: t[i], [[0, ROWS]], None),
}


@pytest.mark.parametrize("name", CHECKED)
def test_checkify_finds_what_it_finds_in_plain_jax(name: str) -> None:
    errors, fn, values, text = CHECKED[name]
    i = jnp.asarray(values, jnp.int32)
    ours = recom_jax.optimize(fn, options=VERIFY)
    ours(T, i), jax.jit(ours)(T, i)  # traced and cached before anybody asks for checks
    serve = ours.bind(T)
    ways: dict[str, Callable[[Any], Any]] = {
        "call": lambda f: jax.jit(checkify.checkify(f, errors=errors))(T, i),
        "of jit": lambda f: checkify.checkify(jax.jit(f), errors=errors)(T, i),
        "of vmap": lambda f: checkify.checkify(jax.vmap(f, (None, 0)), errors=errors)(T, i[None]),
        "serve": lambda f: checkify.checkify(serve if f is ours else f, errors=errors)(
            *([i] if f is ours else [T, i])
        ),
    }  # fmt: skip
    for way, run in ways.items():
        (error, got), (plain, want) = run(ours), run(fn)
        assert_same(got, want, BOUND)
        assert error.get() == plain.get() or (text and error.get() and plain.get()), way
        assert (error.get() is None) == (text is None), (way, error.get())
        assert text is None or text in error.get()
    fused = (
        "recom_fused_v1" in jax.jit(checkify.checkify(ours, errors=errors)).lower(T, i).as_text()
    )
    assert fused == (name == "nothing asked for")


def test_without_jit_the_function_runs_as_it_is() -> None:
    """`jax.disable_jit` is for debuggers and prints: values are concrete inside."""
    seen: list[Any] = []

    @recom_jax.optimize
    def fn(t: Any, i: Any) -> Any:
        seen.append(np.asarray(i).tolist())
        return t[i]

    with jax.disable_jit():
        np.testing.assert_array_equal(fn(T, I[0]), T[I[0]])
    assert seen == [I[0].tolist()]


def test_promises_that_are_kept_and_broken() -> None:
    """Sorted and unique are promises; XLA's CPU code does not use them, and neither do we."""

    def promised(t: Any, i: Any, s: Any) -> Any:
        return {
            "sorted": t.at[i].get(indices_are_sorted=True, mode="clip"),
            "unique": t.at[i].get(unique_indices=True, mode="fill"),
            "take": jnp.take(t, i, axis=0, indices_are_sorted=True, unique_indices=True),
            "bags": jax.ops.segment_sum(t[i], s, 5, indices_are_sorted=True),
            "largest": jax.ops.segment_max(t[i], s, 5, indices_are_sorted=True),
        }

    bound = {"sorted": None, "unique": None, "take": None, "bags": 1e-4, "largest": 0.0}
    for i in (jnp.arange(9), jnp.arange(9)[::-1]):
        check(promised, T, i, i // 2, columns=5, bound=bound)


SPLITS = [[0, 2, 2, 6], [2, 2, 4, 6], [0, 0, 0, 0], [6, 6, 6, 6], [1, 3, 3, 5], [0, 7, 8, 9]]


@pytest.mark.parametrize("kind", ["sum", "max", "min", "mean", "sqrtn"])
def test_splits_that_do_not_start_at_0_or_end_at_the_end(kind: str) -> None:
    def fn(t: Any, i: Any, o: Any) -> Any:
        bag = jnp.searchsorted(o, jnp.arange(6, dtype=o.dtype), side="right") - 1
        rows = t[i]
        if kind in ("max", "min"):
            return getattr(jax.ops, f"segment_{kind}")(rows, bag, 3)
        total = jax.ops.segment_sum(rows, bag, 3)
        count = jax.ops.segment_sum(jnp.ones(6), bag, 3)[:, None]
        return {"sum": total, "mean": total / count, "sqrtn": total / jnp.sqrt(count)}[kind]

    ours, plain = recom_jax.optimize(fn, options=VERIFY), jax.jit(fn)
    for splits in SPLITS:
        args = T, jnp.arange(6, dtype=jnp.int32), jnp.asarray(splits, jnp.int32)
        assert_same(
            ours(*args), plain(*args), Bag(6).tolerance(fn, args) if kind == "sum" else 1e-4
        )
    assert ours.explain(*args).num_fused == 1


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("int8", -128), ("uint8", 255), ("int32", 7), ("bool", True), ("bool", False), ("bfloat16", 1.0078125),
     ("float32", np.inf), ("float32", -np.inf), ("float32", -0.0), ("float16", 65504.0)],
)  # fmt: skip
def test_fill_values(dtype: str, fill: Any) -> None:
    t = table(ROWS, 3, dtype) if dtype != "bool" else T[:, :3] > 0
    odd = jnp.asarray([0, -1, ROWS, -ROWS - 1, 2**31 - 1, -(2**31)], jnp.int32)
    check(
        lambda t, i: (t.at[i].get(mode="fill", fill_value=fill), jnp.take(t, i, axis=0)),
        t,
        odd,
        columns=2,
    )


def test_weak_types_of_what_scales_rows() -> None:
    """A Python number scales rows without widening them; an array of its own dtype does not."""

    def fn(t: Any, i: Any, x: Any) -> Any:
        return t[i] * x, t[i].sum(1) * x, t[i] * 2

    for dtype, x in (("bfloat16", 2), ("int8", 2), ("float32", jnp.asarray(2, jnp.int8))):
        bound = 0.1 if dtype == "bfloat16" else BOUND
        check(fn, T.astype(dtype), I, x, columns=3, bound=bound)
