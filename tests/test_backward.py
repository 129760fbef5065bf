"""The fused backward: gradients of tables as one custom call, against the derivative of the plain function."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from helpers import EPS, VERIFY, assert_same, cpu_only, ids, table

import recom_jax
from recom_jax import _recom, gate, ir
from recom_jax.backward import Pullback, pullback
from recom_jax.detect import detect
from recom_jax.linear import linear
from recom_jax.row_sums import row_sums
from recom_jax.simplify import simplify
from recom_jax.trace import trace
from tests.random_columns import BATCHES, arguments
from tests.random_models import build

ROWS, DIM, B, L = 9, 4, 6, 3
SEG = np.array([0, 0, 5, -1, 3, 3, 6, 3, 1, 1, 4, 4, 2, 2, 2, 0, 0, 7], np.int32)  # some of no bag
ALWAYS = dataclasses.replace(VERIFY, always_fuse=True)
optimize = functools.partial(recom_jax.optimize, options=VERIFY)


def jagged(rows: Any, seg: Any, weight: Any = None) -> Any:
    if weight is not None:
        rows = rows * weight[:, None]
    return jax.ops.segment_sum(rows, seg, B)


def padded_mean(t: Any, i: Any) -> Any:
    there = i >= 0
    total = jnp.where(there[..., None], t[jnp.where(there, i, 0)], 0).sum(1)
    return total / jnp.maximum(there.sum(1, keepdims=True), 1)


# Functions of (table [9, 4], ids [6, 3], weights [6, 3]) that are linear in the table.
LINEAR: dict[str, Callable[..., Any]] = {
    "index": lambda t, i, w: t[i],
    "take": lambda t, i, w: jnp.take(t, i, axis=0),
    "clip": lambda t, i, w: jnp.take(t, i, axis=0, mode="clip"),
    "wrap": lambda t, i, w: jnp.take(t, i, axis=0, mode="wrap"),
    "fill": lambda t, i, w: t.at[i].get(mode="fill", fill_value=7.0),
    "no_negative": lambda t, i, w: t.at[i].get(mode="fill", wrap_negative_indices=False),
    "clipped_ids": lambda t, i, w: t[jnp.clip(i, 0, ROWS - 1)],
    "slice": lambda t, i, w: jax.lax.dynamic_slice(t, (i[0, 0], 0), (1, DIM)),
    "column_slice": lambda t, i, w: t[i[:, 0]][:, 1:3],
    "sum": lambda t, i, w: t[i].sum(1),
    "sum_twice": lambda t, i, w: t[jnp.stack([i, i % 4], 1)].sum((1, 2)),
    "mean": lambda t, i, w: t[i].mean(1),
    "padded_mean": lambda t, i, w: padded_mean(t, i),
    "guarded_mean": lambda t, i, w: jnp.where(
        (i > 4).any(1, keepdims=True),
        jnp.where((i > 4)[..., None], t[i], 0).sum(1) / (i > 4).sum(1, keepdims=True),
        0.0,
    ),
    "masked_product": lambda t, i, w: (t[i] * (i > 2)[..., None]).sum(1),
    "weighted": lambda t, i, w: jnp.einsum("blh,bl->bh", t[i], w),
    "weighted_mean": lambda t, i, w: (t[i] * w[..., None]).sum(1) / w.sum(1, keepdims=True),
    "difference": lambda t, i, w: t[i[:, 0]] - t[i[:, 1]],
    "segment_sum": lambda t, i, w: jagged(t[i.reshape(-1)], SEG),
    "segment_weights": lambda t, i, w: jagged(t[i.reshape(-1)], SEG, w.reshape(-1)),
    "segment_mean": lambda t, i, w: (
        jagged(t[i.reshape(-1)], SEG)
        / jnp.maximum(jax.ops.segment_sum(jnp.ones(B * L), SEG, B), 1)[:, None]
    ),
    "concatenation": lambda t, i, w: jnp.concatenate([t[i[:, 0]], w, t[i].sum(1), t[i[:, 0]]], -1),
    "transposed": lambda t, i, w: jnp.concatenate([t[i[:, 0]], t[i].sum(1)], -1).T,
    "stack": lambda t, i, w: jnp.stack([t[i[:, 0]], t[i[:, 2]]], 1),
    "bucket": lambda t, i, w: t[jnp.digitize(w[:, 0], np.array([-1.0, 0.0, 0.5]))],
}
ODD_IDS = ids((B, L), ROWS, odd=True)


def arrays(dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    w = np.random.default_rng(1).normal(size=(B, L)).astype(np.float32)
    return table(ROWS, DIM, dtype), ODD_IDS, jnp.asarray(w)


def pulled(f: Any, t: Any, *rest: Any, ct: Any = None) -> Any:
    """The gradient of the table; the cotangent is of ordinary numbers, or `ct` of the result."""

    def run(t: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda t: f(t, *rest), t)
        rng = np.random.default_rng(5)
        given = jnp.asarray(rng.normal(size=out.shape), out.dtype) if ct is None else ct(out)
        return pull(given)[0]

    jitted = jax.jit(run)
    return jitted, jitted(t, *rest)


def bound(plain: Any, t: Any, i: Any, w: Any, eps: float = EPS) -> Any:
    """2 * n * eps * sum |w * g| for a row that n gradients are added to."""
    _, size = pulled(plain, jnp.abs(t), i, jnp.abs(w), ct=lambda out: jnp.full_like(out, 4.0))
    return 2 * (B * L + 6) * eps * np.abs(np.asarray(size, np.float64)) + 1e-37


def is_fused(f: Any, *args: Any) -> bool:
    """Whether the gradient is one equation of ours; and on a CPU, where XLA is slower, one custom call."""
    found = "recom_row_sums" in str(jax.make_jaxpr(f)(*args))
    text = jax.jit(f).lower(*args).as_text()
    assert ("recom_row_sums_v1" in text) == (found and jax.default_backend() == "cpu")
    return found


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_equal_plain_ones_and_their_bits_repeat(name: str) -> None:
    plain, args = LINEAR[name], arrays()
    f, got = pulled(optimize(plain), *args)
    assert is_fused(f, *args)
    assert_same(got, pulled(plain, *args)[1], bound(plain, *args))
    again = np.asarray(f(*args)).tobytes()
    assert jax.default_backend() != "cpu" or all(
        np.asarray(f(*args)).tobytes() == again for _ in range(3)
    )


@pytest.mark.parametrize("name", ["padded_mean", "weighted", "stack"])
def test_every_derivative_has_the_same_numbers(name: str) -> None:
    """jvp, linearize, vjp, grad of grad, and products with the Hessian in both orders, fused forward under all."""
    plain, (t, i, w) = LINEAR[name], arrays()
    i, v = jnp.clip(i, -ROWS, ROWS - 1), jnp.sin(t)  # nothing is NaN, and sin is a fair loss
    make: dict[str, Any] = {
        "jvp": lambda f: jax.jvp(lambda t: f(t, i, w), (t,), (v,)),
        "linearize": lambda f: jax.linearize(lambda t: f(t, i, w), t)[1](v),
        "grad": lambda f: jax.grad(lambda t: jnp.sin(f(t, i, w)).sum())(t),
        "hvp": lambda f: jax.jvp(jax.grad(lambda t: jnp.sin(f(t, i, w)).sum()), (t,), (v,))[1],
        "reverse_hvp": lambda f: jax.grad(
            lambda t: jax.jvp(lambda t: jnp.sin(f(t, i, w)).sum(), (t,), (v,))[1]
        )(t),
        "grad_of_grad": lambda f: jax.grad(
            lambda t: (jax.grad(lambda t: jnp.sin(f(t, i, w)).sum())(t) ** 2).sum()
        )(t),
        "by_weights": lambda f: jax.grad(
            lambda w: (jax.grad(lambda t: jnp.sin(f(t, i, w)).sum())(t) * v).sum()
        )(w),
        "mapped": lambda f: jax.vmap(jax.grad(lambda t, i: jnp.sin(f(t, i, w)).sum()), (None, 0))(
            t, jnp.stack([i, i % 3])
        ),
        "batch_of_tangents": lambda f: jax.vmap(
            lambda v: jax.jvp(lambda t: f(t, i, w), (t,), (v,))[1]
        )(jnp.stack([t, v])),
    }
    if name != "weighted":
        del make["by_weights"]
    for what, transform in make.items():
        got = jax.jit(lambda transform=transform: transform(optimize(plain)))
        want = jax.jit(lambda transform=transform: transform(plain))()
        scale = jax.tree.map(lambda x: 1e-5 * float(jnp.abs(x).max(initial=1.0)), want)
        try:
            assert_same(got(), want, scale)
        except AssertionError as why:
            raise AssertionError(f"{what}: {why}") from why
        assert "recom_fused_v1" in got.lower().as_text(), what


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "max": (lambda t, i, w: t[i].max(1), "reduce_max"),
    "relu": (lambda t, i, w: jnp.maximum(t[i[:, 0]], 0.0), "max"),
    "stopped": (
        lambda t, i, w: jnp.concatenate([jax.lax.stop_gradient(t[i[:, 0]]), t[i].sum(1)], 1),
        "stop_gradient",
    ),
    "one_hot": (lambda t, i, w: jax.nn.one_hot(i[:, 0], ROWS) @ t, "one-hot"),
    "rounded": (lambda t, i, w: t.astype(jnp.bfloat16)[i].astype(jnp.float32), "rounding"),
    "column_weights": (
        lambda t, i, w: (t[i] * jnp.concatenate([w[0], w[0, :1]])).sum(1),
        "each column",
    ),
    "product": (lambda t, i, w: (t[i] * t[i % 5]).sum(1), "product of rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_linear_is_differentiated_as_written(name: str) -> None:
    plain, reason = REFUSED[name]
    args = arrays()
    f, got = pulled(optimize(plain), *args)
    assert not is_fused(f, *args)
    assert_same(got, pulled(plain, *args)[1], 1e-2 if name == "rounded" else 1e-3)
    (report,) = optimize(plain).explain(*args).gradients
    assert report.status == "xla" and reason in report.reason, report


@cpu_only("gradients are left to XLA's scatter")
def test_each_table_goes_its_own_way() -> None:
    """One table of a call is linear, one is not, one does not move; weights get their gradient, too."""

    def plain(t: Any, u: Any, still: Any, w: Any, i: Any) -> Any:
        bag = jnp.einsum("blh,bl->bh", t[i], w)
        return jnp.concatenate([bag, u[i].max(1), still[i[:, 0]], t[i[:, 1]]], -1)

    args = (*(table(ROWS, DIM, seed=k) for k in range(3)), arrays()[2], ids((B, L), ROWS))

    def run(f: Any) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 3)))

    f = optimize(plain)
    assert_same(run(f)(*args), run(plain)(*args), 1e-4)
    assert is_fused(run(f), *args)
    report = f.explain(*args).gradients
    assert [(g.table, g.status) for g in report] == [
        ("t", "fused"),
        ("u", "xla"),
        ("still", "fused"),
    ]
    for options, on_gpu in ((VERIFY, gate.SCATTER), (ALWAYS, "")):
        found = recom_jax.optimize(plain, options=options).explain(*args).gradients_on("cuda")
        assert [g.reason for g in found] == [on_gpu, report[1].reason, on_gpu]
    on_tpu = f.explain(*args).gradients_on("tpu")
    assert [g.status for g in on_tpu] == ["xla"] * 3
    assert on_tpu[0].reason == "on tpu the backward pass is JAX's own"
    assert on_tpu[1] == report[1]
    with jax.default_device("cpu"):
        assert f.explain(*args).gradients == report
    (call,) = (e.params["call"] for e in compiled(plain, *args).eqns if "call" in e.params)
    avals = [v.aval for v in call.closed.jaxpr.invars]
    moving = [k for k, v in enumerate(avals) if v.shape == (ROWS, DIM)]
    found = pullback(call, moving)
    assert isinstance(found, Pullback) and len(found.tables) == 2
    assert pullback(call, moving) is found, "analysed once"


def compiled(fn: Any, *args: Any) -> Any:
    from recom_jax import pipeline

    return pipeline.compile_jaxpr(trace(fn, args, ("",) * len(args)), VERIFY).jaxpr.jaxpr


# ---- odd inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["take", "masked_product", "padded_mean", "segment_sum"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_cotangent_spoils_its_own_rows(name: str, value: float) -> None:
    """Where the plain gradient is NaN or infinite, ours is, and nowhere else."""
    plain, args = LINEAR[name], arrays()

    def ct(out: Any) -> Any:
        return jnp.ones_like(out).at[2].set(value)

    got, want = (pulled(f, *args, ct=ct)[1] for f in (optimize(plain), plain))
    assert_same(got, want, 1e-4)
    assert 0 < int(jnp.isfinite(got).sum()) < got.size


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["take", "weighted", "segment_weights"])
def test_16_bit_tables_are_summed_in_float32(kind: str, name: str) -> None:
    """Within the dtype's rounding of the gradient in float32 (plain JAX adds in 16 bits)."""
    plain, (t, i, w) = LINEAR[name], arrays(kind)

    def low(t: Any, i: Any, w: Any) -> Any:
        return plain(t.astype(t.dtype), i, w).astype(jnp.float32)

    _, got = pulled(optimize(low), t, i, w)
    _, want = pulled(low, t.astype(jnp.float32), i, w)
    assert got.dtype == t.dtype
    eps = float(jnp.finfo(kind).eps)
    size = bound(plain, t.astype(jnp.float32), i, w, eps) / (B * L)
    assert_same(got.astype(jnp.float32), want, size + eps * np.abs(np.asarray(want)))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_tables_are_differentiated_as_written(kind: str) -> None:
    t, i, _ = arrays(kind)
    u = table(ROWS, DIM)

    def plain(u: Any, t: Any) -> Any:
        return jnp.take(u, i, axis=0).sum(1) + t[i].astype(jnp.float32).sum(1)

    f, got = pulled(optimize(plain), u, t)
    assert is_fused(f, u, t), "the other table's is"
    assert_same(got, pulled(plain, u, t)[1], 1e-4)
    swapped, got = pulled(optimize(lambda t, u: plain(u, t)), t, u)
    assert not is_fused(swapped, t, u)
    want = pulled(lambda t, u: plain(u, t), t, u)[1]
    assert_same(got.astype(jnp.float32), want.astype(jnp.float32))
    report = optimize(plain).explain(u, t).gradients_on("cpu")
    assert {g.table: g.reason for g in report} == {"u": "", "t": "a table of 8-bit floats"}


def test_doubles_and_wide_ids() -> None:
    with jax.enable_x64(True):
        t = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, DIM)))
        for dtype in (np.int64, np.uint64, np.int8):
            i = ids((B, L), ROWS, dtype=dtype, odd=True)
            for mode in ("fill", "clip"):

                def plain(t: Any, i: Any, mode: str = mode) -> Any:
                    return jnp.take(t, i, axis=0, mode=mode).sum(1)

                f, got = pulled(optimize(plain), t, i)
                assert_same(got, pulled(plain, t, i)[1], 1e-12)
                assert got.dtype == np.float64 and is_fused(f, t, i)
        narrow = t.astype(jnp.float32)
        f, got = pulled(optimize(lambda t, i: t[i].astype(jnp.float64).sum(1)), narrow, i % 5)
        assert is_fused(f, narrow, i % 5) and got.dtype == np.float32


@pytest.mark.parametrize("shape", [(0, L), (B, 0), (0, 0), (1, 1)])
def test_empty_batches_and_bags(shape: tuple[int, int]) -> None:
    t, i = table(ROWS, DIM), jnp.zeros(shape, jnp.int32)
    for plain in (
        lambda t, i: t[i].sum(1),
        lambda t, i: t[i],
        lambda t, i: jnp.take(t, i, axis=0).mean(1),
    ):
        assert_same(pulled(optimize(plain), t, i)[1], pulled(plain, t, i)[1], 1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, DIM), (3, 1), (1000, 33)])
def test_tables_of_every_shape(shape: tuple[int, int]) -> None:
    t, i = table(*shape), ids((200, L), shape[0], odd=True)

    def plain(t: Any, i: Any) -> Any:
        return jnp.concatenate([t[i].sum(1), jnp.take(t, i[:, 0], axis=0)], -1)

    got, want = pulled(optimize(plain), t, i)[1], pulled(plain, t, i)[1]
    assert_same(got, want, 2 * 800 * EPS * 800)


def test_stacked_tables_under_vmap() -> None:
    tables, i = jnp.stack([table(ROWS, DIM, seed=k) for k in range(3)]), ids((3, B), ROWS, odd=True)

    def plain(t: Any, i: Any) -> Any:
        return jax.vmap(lambda t, i: jnp.take(t, i, axis=0))(t, i)

    f, got = pulled(optimize(plain), tables, i)
    assert_same(got, pulled(plain, tables, i)[1], 1e-5)
    assert is_fused(f, tables, i)


def test_a_loss_without_the_table_and_results_without_a_cotangent() -> None:
    def plain(t: Any, i: Any) -> Any:
        return t[i[:, 0]], t[i].sum(1), i.sum()

    t, i = table(ROWS, DIM), ids((B, L), ROWS)
    for pick in (lambda a, b, c: a.sum(), lambda a, b, c: (b**2).sum(), lambda a, b, c: 1.0 * c):
        got, want = (
            jax.jit(jax.grad(lambda t, f=f, pick=pick: pick(*f(t, i))))(t)
            for f in (optimize(plain), plain)
        )
        assert_same(got, want, 1e-4)


def test_linear_transpose_of_an_optimized_function() -> None:
    i = ids((B, L), ROWS)
    t = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
    for f in (lambda t: t[i].sum(1), lambda t: jax.vmap(lambda k: t[k].sum(0))(i)):
        got, want = (jax.linear_transpose(g, t)(jnp.ones((B, DIM)))[0] for g in (optimize(f), f))
        assert_same(got, want, 1e-5)


def test_exported_gradients() -> None:
    t, i, w = arrays()
    for name in ("weighted", "concatenation"):
        f, want = pulled(optimize(LINEAR[name]), t, i, w)
        made = jax.export.export(f)(t, i, w)
        assert ("recom_row_sums_v1" in made.mlir_module()) == (jax.default_backend() == "cpu")
        again = jax.export.deserialize(made.serialize())
        assert_same(again.call(t, i, w), want)
    # With a symbolic batch the derivative is the original columns', and right.
    f, want = pulled(optimize(lambda t, i: t[i].sum(1)), t, i)
    (b,) = jax.export.symbolic_shape("b")
    shapes = jax.ShapeDtypeStruct(t.shape, t.dtype), jax.ShapeDtypeStruct((b, L), i.dtype)
    loss = jax.jit(jax.grad(lambda t, i: (optimize(lambda t, i: t[i].sum(1))(t, i) ** 2).sum()))
    made = jax.export.export(loss)(*shapes)
    assert "recom_row_sums_v1" not in made.mlir_module()
    assert_same(made.call(t, i), loss(t, i), 1e-3)


# ---- random models -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6),
    st.integers(0, 2**16),
    st.sampled_from([b for b in BATCHES if b]),
)
@settings(max_examples=max(settings.default.max_examples // 2, 3))
def test_gradients_of_random_models(seeds: list[int], layout: int, batch: int) -> None:
    compare(seeds, layout, batch)


def compare(seeds: list[int], layout: int, batch: int) -> None:
    """Gradients by the float tables of a random model: every column is weighted by a random cotangent."""
    model = build(seeds, layout)
    b = jax.tree.map(jnp.asarray, arguments(batch, layout))
    floats = {k: jnp.asarray(v) for k, v in model.params.items() if "float" in str(v.dtype)}
    rest = {k: jnp.asarray(v) for k, v in model.params.items() if k not in floats}
    rng = np.random.default_rng(layout)
    shapes = jax.eval_shape(model.fn, model.params, b)
    cts = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes)

    def run(f: Any, b: Any, cts: Any) -> Any:
        return jax.jit(lambda p: jax.vjp(lambda p: f({**p, **rest}, b), p)[1](cts)[0])(floats)

    got = run(optimize(model.fn), b, cts)
    want = run(model.fn, b, cts)
    signless = {k: jnp.abs(v) if k[0] in "WV" or k == "x1" else v for k, v in b.items()}
    size = run(model.fn, signless, jax.tree.map(jnp.abs, cts))

    def most(k: str) -> Any:
        eps = 2e-5 if floats[k].dtype == jnp.float32 else 0.1  # plain JAX adds in 16 bits
        return eps * (1 + np.abs(np.float64(size[k])) + np.abs(np.float64(want[k])))

    try:
        assert_same(got, want, {k: most(k) for k in floats})
    except AssertionError as why:
        raise AssertionError(f"{seeds=} {layout=} {batch=}\n{why}\n{model.source}") from why


# ---- printed form, threads, malformed descriptions -----------------------------------------------------------------


def example() -> tuple[Any, Any, Any]:
    def fn(t: Any, i: Any, w: Any) -> Any:
        bag = jnp.einsum("blh,bl->bh", jnp.take(t, i, axis=0, mode="clip"), w)
        return jnp.concatenate([bag / 2.0, t[i[:, 0]]], -1)

    args = arrays()
    traced = trace(fn, args, ("t", "i", "w"))
    detected, _ = detect(traced.jaxpr, VERIFY)
    disabled = VERIFY.disabled | {"clamp-into-lookup"}
    simple = simplify(detected.pool, detected.outputs, detected.value_of, disabled)
    found = linear(detected, simple.outputs, [traced.jaxpr.jaxpr.invars[0]])
    return found, row_sums(detected, found, VERIFY), args


@pytest.mark.once
def test_printed_form() -> None:
    found, sums, _ = example()
    with ir.numbered():
        lines = str(found).splitlines()
    index = "select(lt(%2(0;in_1,0), 0), %2(0;in_1,0), add(%2(0;in_1,0), 9))"
    assert lines == [
        "%1[max(min(%2(0;in_1,1,0), 8), 0)](0; 4) += result 0 @0 strides (8,) for in*in_1 items; "
        "weight %0(0;in_5,1,0); divisor 2.0",
        f"%1[select(and(ge({index}, 0), lt({index}, 9)), -1, {index})](0; 4) += "
        "result 0 @4 strides (8,) for in items",
    ]
    assert str(sums).startswith(f"{len(sums.words)} words of sums; numbers:\nprogram: 2 operands")


@pytest.mark.once
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 500])
def test_sums_do_not_depend_on_threads(kind: str, rows: int) -> None:
    """20,000 ids of three lookups in one table: the same bits on 1, 2, 5 and 16 threads, and numpy's sums."""
    rng = np.random.default_rng(0)
    n, width = 10_000, 8

    def fn(t: Any, i: Any, j: Any) -> Any:
        return jnp.concatenate([t[i], t[j].sum(1), t[i % 7]], -1)

    with jax.enable_x64(kind == "float64"):
        t = jnp.asarray(rng.normal(size=(rows, width)), kind)
        i = rng.zipf(1.3, n).astype(np.int32) % rows
        j = rng.integers(-rows, rows, (n, 2)).astype(np.int32)
        traced = trace(fn, (t, i, j), ("t", "i", "j"))
        detected, _ = detect(traced.jaxpr, VERIFY)
        found = linear(detected, detected.outputs, [traced.jaxpr.jaxpr.invars[0]])
        sums = row_sums(detected, found, VERIFY)
    ct = rng.normal(size=(n, 3 * width)).astype(t.dtype)
    args = {id(v): a for v, a in zip(traced.jaxpr.jaxpr.invars[1:], (i, j), strict=True)}
    operands = [args[id(v)] for v in sums.numbers.operands]
    binding = np.array([x for k in range(len(operands)) for x in (k, -1)], np.int64)
    results = []
    for threads in (1, 2, 5, 16):
        out = np.full(t.shape, 77, t.dtype)
        _recom.run_row_sums(
            sums.encoded.words, binding, sums.words, [*operands, ct], [out], threads
        )
        results.append(out.tobytes())
    assert len(set(results)) == 1
    want = np.zeros(t.shape)
    wide = ct.astype(np.float64)
    for k, part in ((i, wide[:, :width]), (i % 7 % rows, wide[:, 2 * width :])):
        np.add.at(want, k, part)
    for column in range(2):
        np.add.at(want, j[:, column], wide[:, width : 2 * width])
    eps = float(jnp.finfo(kind).eps)
    tolerance = 4 * eps * np.abs(want) + (1e-3 if kind == "float32" else 1e-9)
    assert (np.abs(out.astype(np.float64) - want) <= tolerance).all()


@pytest.mark.once
@pytest.mark.parametrize("width", [1, 4, 5, 8, 32])
def test_bags_added_at_once_and_item_by_item_have_the_same_bits(width: int) -> None:
    """One thread goes through the bags in their order, many deal the items out by their rows."""
    rng = np.random.default_rng(width)
    rows, n = 500, 4000

    def fn(t: Any, i: Any, w: Any, s: Any, there: Any) -> Any:
        pooled = (jnp.where((i != 3)[..., None], t[i], 0) * w[..., None]).sum(1) * s[:, None]
        return jnp.concatenate([jnp.where(there[:, None], pooled, 0), t[i[:, 0]]], -1)

    t = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)
    i = (rng.zipf(1.2, (n, 3)) % (rows + 20) - 10).astype(np.int32)
    w, s = rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=n).astype(np.float32)
    args = (t, i, w, s, rng.random(n) < 0.7)
    traced = trace(fn, args, ("t", "i", "w", "s", "there"))
    detected, _ = detect(traced.jaxpr, VERIFY)
    found = linear(detected, detected.outputs, [traced.jaxpr.jaxpr.invars[0]])
    assert {(x.weight is None, x.scale is None, x.there is None) for x in found.terms} == {
        (False, False, False),
        (True, True, True),
    }
    sums = row_sums(detected, found, VERIFY)
    known = {id(v): a for v, a in zip(traced.jaxpr.jaxpr.invars, args, strict=True)}
    operands = [known[id(v)] for v in sums.numbers.operands]
    binding = np.array([x for k in range(len(operands)) for x in (k, -1)], np.int64)
    ct = rng.normal(size=(n, 2 * width)).astype(np.float32)
    made = []
    for threads in (1, 16):
        out = np.full(t.shape, 77, np.float32)
        _recom.run_row_sums(
            sums.encoded.words, binding, sums.words, [*operands, ct], [out], threads
        )
        made.append(out)
    np.testing.assert_array_equal(made[0].view(np.int32), made[1].view(np.int32))
    want = jax.vjp(lambda t: fn(t, *args[1:]), t)[1](jnp.asarray(ct))[0]
    np.testing.assert_allclose(made[0], want, rtol=1e-4, atol=2e-3)


@pytest.mark.once
def test_malformed_descriptions_are_refused() -> None:
    """Any word changed: an error that says so, or a sum that stays inside its buffers."""
    _, sums, (t, i, w) = example()
    by_shape = {np.shape(x): np.asarray(x) for x in (i, w)}
    operands = [
        np.asarray(i) if str(v.aval.dtype) == "int32" else by_shape[np.shape(w)]
        for v in sums.numbers.operands
    ]
    binding = np.array([x for k in range(len(operands)) for x in (k, -1)], np.int64)
    ct, out = np.ones((B, 2 * DIM), np.float32), np.zeros(t.shape, np.float32)

    def run(words: Any) -> None:
        _recom.run_row_sums(sums.encoded.words, binding, words, [*operands, ct], [out], 2)

    run(sums.words)
    r = random.Random(0)
    messages: list[str] = []
    odd = (-1, 0, 1, 3, 7, 100, -5, 2**31, 2**40, -(2**62), 2**63 - 1)
    for _ in range(3000):
        words = sums.words.copy()
        for _ in range(r.choice((1, 1, 2))):
            words[r.randrange(len(words))] = r.choice(odd)
        try:
            run(words)
        except ValueError as why:
            messages.append(str(why))
    assert all(
        m.startswith(("recom row sums: ", "recom program: ", "recom call: ")) for m in messages
    ), messages
    assert len(messages) > 2000
    for cut in (0, 1, 5, len(sums.words) - 1):
        with pytest.raises(ValueError, match="recom"):
            run(sums.words[:cut])
    with pytest.raises(ValueError, match="version"):
        run(np.concatenate([sums.words[:1], [99], sums.words[2:]]))
