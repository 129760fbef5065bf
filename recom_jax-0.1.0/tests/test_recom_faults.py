"""The faults of RECom and RecFlex, one test each, by their number in the list of what not to repeat."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from recom_jax import cpu, ffi, pack, pipeline, trace
from recom_jax.shape_solver.dims import evaluate, symbol
from recom_jax.shape_solver.recover import recover
from recom_jax.shape_solver.unify import Unifier
from tests.helpers import Bag, assert_same, check, ids, table


def compiled(fn: Any, *args: Any) -> pipeline.Compiled:
    return pipeline.compile_jaxpr(
        trace.trace(fn, args, tuple(f"a{k}" for k in range(len(args)))),
        recom_jax.Options(verify=True),
    )


@pytest.mark.parametrize("mode", ["fill", "clip", "wrap", None])
def test_1_negative_ids_are_not_read_out_of_bounds(mode: str | None) -> None:
    """The filter of invalid ids was always true."""
    i = jnp.asarray([-1, 0, -2, -50, -51, 49, 50, 2**31 - 1, -(2**31)], jnp.int32)
    t = table(50, 8)
    check(lambda t, i: jnp.take(t, i, axis=0, mode=mode) if mode else t[i], t, i)
    bag = jnp.stack([i, i[::-1]])

    def masked(t: Any, i: Any) -> Any:
        return jnp.where(
            (i >= 0)[..., None], jnp.take(t, i, axis=0, mode=mode) if mode else t[i], 0
        ).sum(1)

    check(masked, t, bag, bound=Bag(9))


@pytest.mark.parametrize("dim", [1, 8, 20, 21, 32, 64, 100])
def test_2_the_mean_of_an_empty_bag_is_no_nan(dim: int) -> None:
    """With a dim above 20 it was."""
    i = jnp.asarray([[-1, -1, -1], [3, -1, -1], [1, 2, 3]], jnp.int32)

    def mean(t: Any, i: Any) -> Any:
        m = i >= 0
        return jnp.where(m[..., None], t[jnp.where(m, i, 0)], 0).sum(1) / jnp.maximum(
            m.sum(1, keepdims=True), 1
        )

    t = table(9, dim)
    check(mean, t, i, bound=Bag(3))
    got = np.asarray(recom_jax.optimize(mean)(t, i))
    assert (got[0] == 0).all()
    assert np.isfinite(got).all()

    def jagged(t: Any, values: Any, seg: Any) -> Any:
        total = jax.ops.segment_sum(t[values], seg, num_segments=4)
        count = jax.ops.segment_sum(jnp.ones_like(values), seg, num_segments=4)
        return total / jnp.maximum(count, 1)[:, None]

    check(jagged, t, jnp.asarray([1, 2, 3]), jnp.asarray([0, 0, 2]), bound=Bag(3))


def test_3_boundaries_keep_every_bit() -> None:
    """They were printed with 6 decimals: 1e-7 became 0."""
    edges = np.array([1e-30, 1e-7, 1.0000001, 16777216.0, 3.4e38], np.float32)
    x = np.concatenate(
        [
            edges,
            np.nextafter(edges, np.float32(np.inf)),
            np.nextafter(edges, np.float32(-np.inf)),
            [0.0, 5e-8],
        ]
    )
    check(
        lambda t, x: t[jnp.digitize(x, edges)],
        table(6, 4),
        jnp.asarray(x.astype(np.float32)),
        leaves_while=False,
    )


@pytest.mark.parametrize(
    "edges", [np.arange(0, 500, 5), np.array([1, 2, 4, 8])], ids=["uniform", "search"]
)
def test_4_the_last_bucket_exists(edges: Any) -> None:
    """The range of a bucketize was taken as [0, N) instead of [0, N]: a value above all boundaries is row N."""
    edges = edges.astype(np.float32)
    x = jnp.asarray(
        [float(edges[-1]), float(edges[-1]) + 1, np.inf, np.nan, -np.inf, float(edges[0])],
        jnp.float32,
    )
    t = table(len(edges) + 1, 4)
    check(lambda t, x: t[jnp.digitize(x, edges)], t, x)
    check(
        lambda t, x: t[jnp.digitize(x, edges)], t[:-1], x
    )  # a row too few: what brackets make of it
    check(lambda t, x: jnp.take(t, jnp.digitize(x, edges), axis=0), t[:-1], x)  # ... and take: NaN


def test_5_one_input_of_two_columns() -> None:
    """The second column got the wrong data."""
    t, u, x = table(50, 8), table(30, 4), ids((7,), 50, odd=True)
    check(
        lambda t, u, x: jnp.concatenate([t[x], u[x % 30], t[x // 2], u[(x * 3) % 30]], axis=1),
        t,
        u,
        x,
        columns=4,
    )


def test_6_sizes_that_are_multiples_and_constants() -> None:
    """2*x == y was solved as x == y, symbol = constant never worked, halves were printed as integer division of C."""
    u = Unifier()
    n = u.fresh("n", 6)
    y = u.fresh("y", 12)
    u.unify(n * 2, y)
    assert u.resolve(y - n * 2) == 0
    assert u.resolve(y - n) != 0
    c = u.fresh("c", 5)
    u.unify(c, 5)
    assert u.resolve(c) == 5
    a = symbol("a")
    r = recover([a], [("operand", 0, 0, a * 2)])
    assert [evaluate(r.evaluate([(k,)], [])[r.index_of(a)], {}) for k in (0, 2, 14)] == [0, 1, 7]

    def pairs(t: Any, x: Any, y: Any) -> Any:
        both = t[x].reshape(y.shape[0], -1)
        return jnp.concatenate([both, t[y]], axis=1)

    f = recom_jax.optimize(pairs)
    t = table(40, 4)
    for k in (1, 2, 3, 5, 8):
        args = (t, ids((2 * k,), 40, seed=k), ids((k,), 40))
        assert_same(f(*args), jax.jit(pairs)(*args))
    assert f.explain(*args).num_fused == 2


def test_7_offsets_beyond_32_bits() -> None:
    """A 2^27 x 32 table had "0 bytes". The kernel runs here on a table of 2^27 x 17 bytes that takes no memory."""
    big = jax.ShapeDtypeStruct((2**27, 32), jnp.float32)
    (c,) = (
        recom_jax.optimize(lambda t, i: t[i])
        .explain(big, jax.ShapeDtypeStruct((4,), jnp.int32))
        .columns
    )
    assert (c.status, c.rows) == ("fused", 2**27)
    rows = 2**27
    i = np.array([rows - 1, 0, rows - 2, 126_322_568, 2**30], np.int32)
    ((_, scheduled, encoded),) = compiled(
        lambda t, i: t[i],
        jax.ShapeDtypeStruct((rows, 17), jnp.int8),
        jax.ShapeDtypeStruct((5,), jnp.int32),
    ).calls
    virtual = np.zeros((rows, 17), np.int8)  # pages of zeros: only those read or written exist
    assert virtual.nbytes > 2**31
    for k in i[:-1]:
        virtual[k] = np.arange(17) + int(k) % 50
    operands = [i if v.aval.dtype == np.int32 else virtual for v in scheduled.operands]
    out = np.full((5, 17), -7, np.int8)
    ffi.extension().run_program(encoded.words, np.array([0, -1, 1, -1]), operands, [out], 1)
    assert (out == virtual[np.clip(i, 0, rows - 1)]).all()


@pytest.mark.parametrize("size", [1, 3, 7, 33])
def test_8_packed_inputs_are_aligned(size: int) -> None:
    """An odd batch of 4- and 8-byte types faulted."""
    with jax.enable_x64(True):
        batch: dict[str, Any] = {
            "a": np.arange(size, dtype=np.int8),
            "b": np.arange(size, dtype=np.int64),
            "c": np.arange(size, dtype=np.int32) % 5,
            "d": np.linspace(0, 9, size),
            "e": (np.arange(size) % 2).astype(bool),
            "f": np.linspace(0, 9, size, dtype=np.float32),
        }
        specs = [pack.LeafSpec.of(v) for v in batch.values()]
        layout = pack.layout_of(specs, list(batch))
        assert all(int(k) % 64 == 0 for k in layout.offsets)

        def model(t: Any, b: Any) -> Any:
            i = (
                b["a"]
                + b["b"]
                + b["c"]
                + jnp.digitize(b["d"], np.arange(0.0, 9.0))
                + b["e"]
                + b["f"].astype(jnp.int32)
            )
            return t[i]

        t = table(64, 8)
        serve = recom_jax.optimize(model).bind(t)
        assert_same(serve(batch), jax.jit(model)(t, batch))


def test_9_one_column_costs_no_other() -> None:
    """One column that failed to compile cost all columns the kernel."""

    def fn(tables: Any, x: Any) -> Any:
        bad = jax.lax.fori_loop(0, 2, lambda k, c: c + tables[0][x + k], jnp.zeros((7, 8)))
        worse = tables[1][x][:, ::3]
        return bad, worse, [t[x] for t in tables[2:]]

    tables = [table(50, 8, seed=k) for k in range(6)]
    report = check(
        fn,
        tables,
        ids((7,), 48),
        columns=6,
        fused=5,
        calls=1,
        leaves_gather=True,
        leaves_while=True,
    )
    assert [c.table for c in report.columns if c.status == "xla"] == ["tables[0]"]


@pytest.mark.parametrize(
    ("fn", "columns"),
    [
        (lambda t, x: t[x].reshape(7, -1), 1),  # fixed multi-hot
        (lambda t, x: t[x].sum(1), 1),
        (lambda t, x: t[x[:, 0]] + t[x[:, 1]] + t[x[:, 2]], 3),  # three ways converge
        (lambda t, x: jnp.concatenate([t[x[:, 0]], t[x[:, 1]]], axis=0), 2),  # along the batch
        (lambda t, x: jnp.stack([t[x[:, 0]], t[x[:, 1]]], axis=1), 2),
        (lambda t, x: jnp.concatenate([t[x], t[x + 1]], axis=1), 2),  # along the bag
        (lambda t, x: t[x[:, 0]], 1),  # a single table
    ],
    ids=["multi-hot", "multi-hot sum", "three ways", "axis 0", "stack", "axis 1 of 3", "single"],
)
def test_10_shapes_of_models(fn: Any, columns: int) -> None:
    """Given up or broken there."""
    check(fn, table(50, 8), ids((7, 3), 50, odd=True), columns=columns, bound=Bag(3))


def test_11_constant_tables_cost_nothing() -> None:
    """Every element of a constant became a symbol: frozen tables exploded the solver."""
    frozen = [np.asarray(table(5000, 16, seed=k)) for k in range(40)]
    edges = np.linspace(0, 1, 2000, dtype=np.float32) ** 2

    def fn(x: Any, y: Any) -> Any:
        return jnp.concatenate(
            [*(jnp.asarray(t)[x] for t in frozen), jnp.asarray(frozen[0])[jnp.digitize(y, edges)]],
            axis=1,
        )

    start = time.perf_counter()
    c = compiled(fn, ids((6,), 5000), jnp.linspace(-1, 2, 6))
    assert time.perf_counter() - start < 20
    ((_, scheduled, _),) = c.calls
    assert len(scheduled.program.dims) <= 4
    check(fn, ids((6,), 5000), jnp.linspace(-1, 2, 6), columns=41)


def test_12_programs_are_keyed_on_what_they_are() -> None:
    """The cache key lacked the toolchain, and there was no lock. Here equal programs are equal bytes, the version of
    the format among them, and threads may compile at once."""
    t = table(50, 8)
    one, two = (compiled(lambda t, i: t[i] * 2.0, t, ids((n,), 50)).calls[0] for n in (4, 9))
    assert one[2].digest == two[2].digest
    other = compiled(lambda t, i: t[i] * 3.0, t, ids((4,), 50)).calls[0]
    assert other[2].digest != one[2].digest
    words = (
        np.frombuffer(one[2].words, np.int64)
        if isinstance(one[2].words, bytes)
        else np.asarray(one[2].words).view(np.int64)
    )
    constants = ffi.extension().constants()
    assert int(words[1]) == constants["magic"]["VERSION"]
    assert cpu.encode(one[1].program).digest == one[2].digest

    def work(n: int) -> Any:
        def fn(t: Any, i: Any) -> Any:
            return (t[i] * 1.5).sum(1)

        return recom_jax.optimize(fn)(t, ids((n, 3), 50))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(work, [5, 6, 5, 6, 7, 7, 5, 6]))
    for n, out in zip([5, 6, 5, 6, 7, 7, 5, 6], got, strict=True):
        assert_same(out, jax.jit(lambda t, i: (t[i] * 1.5).sum(1))(t, ids((n, 3), 50)), 1e-4)


@given(data=st.data())
def test_13_outputs_are_compared(data: st.DataObject) -> None:
    """There were no tests. Here: any mix of columns against plain JAX."""
    n, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    kinds = data.draw(
        st.lists(
            st.sampled_from(["one", "mod", "sum", "mean", "max", "bucket", "hash"]),
            min_size=1,
            max_size=6,
        )
    )
    tables = [
        table(data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 4, 8, 24])), seed=k)
        for k in range(len(kinds))
    ]
    x = ids((n, length), 40, seed=data.draw(st.integers(0, 99)), odd=True)

    def column(kind: str, t: Any, x: Any) -> Any:
        first, rows, mask = x[:, 0], t.shape[0], x >= 0
        if kind in ("sum", "mean", "max"):
            e = t[jnp.where(mask, x, 0) % rows]
            if kind == "max":
                return e.max(1)
            total = jnp.where(mask[..., None], e, 0).sum(1)
            return total if kind == "sum" else total / jnp.maximum(mask.sum(1, keepdims=True), 1)
        if kind == "bucket":
            return t[jnp.digitize(first.astype(jnp.float32), np.arange(0, 40, 4, dtype=np.float32))]
        if kind == "hash":
            return t[((first.astype(jnp.uint32) * jnp.uint32(2654435769)) >> 7) % rows]
        return t[first % rows] if kind == "mod" else jnp.take(t, first, axis=0)

    def fn(tables: Any, x: Any) -> Any:
        return jnp.concatenate(
            [column(k, t, x) for k, t in zip(kinds, tables, strict=True)], axis=1
        )

    check(fn, tables, x, columns=len(kinds), bound=Bag(length))


# ---- RecFlex -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_recflex_empty_rows_are_written(kind: str) -> None:
    """Rows of empty bags were never written: the output held what memory held before."""
    t = table(50, 8)
    seg = jnp.asarray([1, 1, 5], jnp.int32)
    reduce = jax.ops.segment_sum if kind == "sum" else jax.ops.segment_max

    def fn(t: Any, i: Any, seg: Any) -> Any:
        return reduce(t[i], seg, num_segments=9)

    check(fn, t, jnp.asarray([3, 4, 5]), seg, bound=Bag(2))
    nothing = jnp.zeros(0, jnp.int32)
    assert_same(recom_jax.optimize(fn)(t, nothing, nothing), jax.jit(fn)(t, nothing, nothing))
    ((_, scheduled, encoded),) = compiled(fn, t, jnp.asarray([3, 4, 5]), seg).calls
    values = {
        id(v): a
        for v, a in zip(
            compiled_inputs(scheduled),
            (np.asarray(t), np.array([3, 4, 5], np.int32), np.asarray(seg)),
            strict=True,
        )
    }
    out = np.full((9, 8), np.nan, np.float32)  # memory that somebody else has used
    binding = np.array([x for k in range(len(scheduled.operands)) for x in (k, -1)])
    ffi.extension().run_program(
        encoded.words, binding, [values[id(v)] for v in scheduled.operands], [out], 1
    )
    assert not np.isnan(out).any()
    assert (out[0] == (0 if kind == "sum" else -np.inf)).all()


def compiled_inputs(scheduled: Any) -> list[Any]:
    """The call's operands in the order (table, ids, segments): told apart by type and rank, then by use."""
    tables = [v for v in scheduled.operands if len(v.aval.shape) == 2]
    rest = [v for v in scheduled.operands if len(v.aval.shape) == 1]
    # The program loads segment ids first: JREGION needs them for every position.
    return [*tables, *reversed(rest)]


def test_recflex_no_thread_per_feature() -> None:
    """One host thread a feature and batch. Here a call starts no thread of Python's, however many columns it has."""
    tables = [table(20, 4, seed=k) for k in range(60)]

    def fn(tables: Any, x: Any) -> Any:
        return jnp.concatenate([t[x + k % 3] for k, t in enumerate(tables)], axis=1)

    f = recom_jax.optimize(fn)
    x = ids((5,), 20)
    f(tables, x)
    before = threading.active_count()
    for _ in range(20):
        f(tables, x).block_until_ready()
    assert threading.active_count() == before
    assert f.explain(tables, x).num_custom_calls == 1
