"""Stage 4 in whole models: the rewrites of detection, and what a column is in the end (views, masks, shared ids)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from recom_jax import ir, pipeline, trace
from recom_jax.simplify import DETECTION_REWRITES
from tests.expressions import ODD_FLOATS
from tests.helpers import Bag, check, ids, table
from tests.simplify_cases import T, masked, odd_ids


def compiled(
    fn: Callable[..., Any], *args: Any, disable: tuple[str, ...] = ()
) -> pipeline.Compiled:
    traced = trace.trace(fn, args, tuple(f"a{k}" for k in range(len(args))))
    return pipeline.compile_jaxpr(traced, recom_jax.Options(disable=disable, verify=True))


def printed(c: pipeline.Compiled) -> str:
    """The simplified form with variables numbered as they appear."""
    with ir.numbered():
        return str(c.simplified)


def ops(c: pipeline.Compiled) -> list[str]:
    """Every instruction of the first call's classes, in order, bodies included."""
    return [
        line.split()[0] for k in c.calls[0][1].program.classes for line in str(k).splitlines()[1:]
    ]


def unique_ids(t: Any, i: Any) -> Any:
    u, inverse = jnp.unique(i, return_inverse=True, size=7)
    return t[u][inverse]


DETECTED = [
    (
        "one-hot-to-lookup",
        lambda t, i: jax.nn.one_hot(i, 100) @ t,
        "%0[%1(0;1,0); fill 0.0, one_hot](0;0,1)",
        None,
    ),
    (
        "cast-after-gather",
        lambda t, i: t.astype(jnp.bfloat16)[i & 63],
        "convert<bfloat16>(%0[and(%1(0;1,0), 63); clip](0;0,1))",
        None,
    ),
    (
        "uniform-bucketize",
        lambda t, i: t[jnp.digitize(i.astype(jnp.float32), np.arange(0, 50, 5, dtype=np.float32))],
        "%0[search.uniform.right(convert<float32>(%1(0;1,0)), 0.0+k*5.0, n=10); clip](0;0,1)",
        "%0[search.sorted.right(convert<float32>(%2(0;1,0)), %1, n=10); clip](0;0,1)",
    ),
    (
        "merge-searches",
        lambda t, i: t[jnp.digitize(i.astype(jnp.float32), np.array([1, 2, 4, 9.5], np.float32))],
        "%0[search.sorted.right(convert<float32>(%2(0;1,0)), %1, n=4); clip](0;0,1)",
        "%0[search.scan.right(convert<float32>(%2(0;1,0)), %1, n=4); clip](0;0,1)",
    ),
    (
        "comparisons-to-search",
        lambda t, i: t[(i[:, None] >= np.array([1, 2, 4, 9], np.int32)).sum(-1)],
        "%0[search.sorted.right(%2(0;1,0), %1, n=4); clip](0;0,1)",
        "%0[select(lt(sum[in_1](convert<int32>(ge(%1(0;1,0,0), %2(0;0,0,1)))), 0), "
        "sum[in_1](convert<int32>(ge(%1(0;1,0,0), %2(0;0,0,1)))), "
        "add(sum[in_1](convert<int32>(ge(%1(0;1,0,0), %2(0;0,0,1)))), 100)); clip](0;0,1)",
    ),
    (
        "unique-inverse",
        unique_ids,
        "%0[select(lt(%1(0;1,0), 0), %1(0;1,0), add(%1(0;1,0), 100)); clip](0;0,1)",
        None,
    ),
]


def test_every_detection_rewrite_is_here() -> None:
    elsewhere = {"repeat-to-search"}  # tests/test_repeat.py
    assert {name for name, *_ in DETECTED} | elsewhere == set(DETECTION_REWRITES)


@pytest.mark.parametrize(("name", "fn", "on", "off"), DETECTED, ids=[name for name, *_ in DETECTED])
def test_detection_rewrite(name: str, fn: Any, on: str, off: str | None) -> None:
    """Printed form and numbers with and without; without it the column stays in XLA or keeps the general form."""
    args = (T, ids((7,), 100, odd=True))
    bound = Bag(100) if name == "one-hot-to-lookup" else None
    assert printed(compiled(fn, *args)) == on
    report = check(fn, *args, bound=bound)
    assert name in report.columns[0].rewrites
    if off is not None:
        assert printed(compiled(fn, *args, disable=(name,))) == off
    check(
        fn,
        *args,
        bound=bound,
        options=recom_jax.Options(disable=(name,), verify=True),
        calls=None,
        fused=None if off is not None or name == "unique-inverse" else 0,
        leaves_gather=name == "unique-inverse",
        leaves_while=True,
    )


@given(
    bounds=st.lists(st.integers(-6, 6), min_size=1, max_size=7),
    step=st.sampled_from([1.0, 0.1, 0.25, 1e-7]),
    right=st.booleans(),
    method=st.sampled_from(["scan", "compare_all", "sort"]),
)
def test_property_searches(bounds: list[int], step: float, right: bool, method: str) -> None:
    """Any constant boundaries (sorted or not, repeated, uniform or nearly so), any method, odd queries."""
    edges = np.array(bounds, np.float32) * np.float32(step)
    x = np.concatenate(
        [ODD_FLOATS, edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)]
    ).astype(np.float32)

    def fn(t: Any, x: Any) -> Any:
        return t[jnp.searchsorted(edges, x, side="right" if right else "left", method=method)]

    check(
        fn,
        table(len(bounds) + 1, 3),
        jnp.asarray(x),
        calls=None,
        leaves_while=True,
        leaves_gather=True,
    )


@given(
    rows=st.integers(1, 6),
    values=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -2.0]), min_size=12, max_size=12
    ),
    keys=st.lists(st.integers(-2, 7), min_size=1, max_size=5),
)
def test_property_one_hot(rows: int, values: list[float], keys: list[int]) -> None:
    """NaN and infinity anywhere in the table are seen, as in the product."""
    t = jnp.asarray(np.array(values, np.float32).reshape(6, 2)[:rows])
    check(
        lambda t, i: jax.nn.one_hot(i, rows, dtype=jnp.float32) @ t,
        t,
        jnp.asarray(keys, jnp.int32),
        bound=Bag(rows),
    )


@given(
    dtype=st.sampled_from(["bfloat16", "float16", "int8", "float32"]),
    keys=st.lists(st.integers(-3, 120), min_size=1, max_size=6),
)
def test_property_cast_after_gather(dtype: str, keys: list[int]) -> None:
    t = jnp.asarray(np.where(np.abs(T) > 100, np.nan, T))
    check(lambda t, i: t.astype(dtype)[i], t, jnp.asarray(keys, jnp.int32))


def test_detection_rewrites_do_not_fire() -> None:
    i = ids((7,), 100, odd=True)
    x = i.astype(jnp.float32)
    # 0.1 * k is no exact grid; unsorted and NaN boundaries keep their probe sequence.
    for edges, mode in (
        (np.float32(0.1) * np.arange(9, dtype=np.float32), "sorted"),
        (np.array([3, 1, 2], np.float32), "scan"),
        (np.array([1, np.nan, 2], np.float32), "scan"),
    ):
        text = printed(compiled(lambda t, x, e=edges: t[jnp.searchsorted(e, x)], T, x))
        assert f"search.{mode}" in text
    text = printed(compiled(lambda t, i: t[i], T, i))
    assert "convert" not in text


def test_views_compose() -> None:
    """Reshapes, transposes, broadcasts and slices of ids leave nothing but strides."""

    def fn(t: Any, x: Any) -> Any:
        y = jnp.transpose(x[:, ::-1].reshape(6, 5, 1), (1, 0, 2))[1:4]
        return t[jnp.broadcast_to(y, (3, 6, 2)).reshape(3, 6, 2) & 63]

    c = compiled(fn, T, odd_ids())
    assert printed(c).count("%1(") == 1
    assert "select" not in printed(c)
    assert ops(c).count("load") == 1
    check(fn, T, odd_ids())


def mean_bag(t: Any, x: Any) -> Any:
    m = x >= 0
    rows = jnp.where(m[..., None], jnp.take(t, jnp.where(m, x % 100, 0), axis=0), 0.0)
    return rows.sum(1) / jnp.maximum(m.sum(1, keepdims=True), 1)


def test_count_of_a_mean_comes_from_the_same_pass() -> None:
    c = compiled(mean_bag, T, odd_ids())
    assert ops(c).count("region") == 1
    assert ops(c).count("pool") == 1
    assert ops(c).count("acc") == 1
    check(mean_bag, T, odd_ids(), bound=Bag(5))


def test_a_masked_bag_is_index_predicate_pool() -> None:
    """No wrap, no clamp, no select, no fill is left of a masked bag with hashed ids."""
    for fn in (
        mean_bag,
        lambda t, x: masked(t, jnp.where(x >= 0, x, 0) % 100, x >= 0),
        lambda t, x: masked(t, jnp.where(x < 0, 0, x % 100), ~(x < 0)),
        lambda t, x: jnp.where(
            (x < 0)[..., None], 0, jnp.take(t, jnp.where(x < 0, 0, x) % 100, axis=0)
        ).sum(1),
    ):
        c = compiled(fn, T, odd_ids())
        got = ops(c)
        region = got[got.index("region") + 1 : got.index("pool") + 1]
        assert [k for k in region if k not in ("load", "const")] == [
            "binary",
            "index",
            "binary",
            "predicate",
            "pool",
        ], got
        assert "fill" not in printed(c)
        check(fn, T, odd_ids(), bound=Bag(5))


def test_mod_keeps_within_the_table() -> None:
    """x % rows needs neither wrap nor fill, whatever the sign of x; x % (rows + 1) needs both."""
    c = compiled(lambda t, x: jnp.take(t, x % 100, axis=0), T, odd_ids())
    assert printed(c) == (
        "%0[select(lt(rem(%1(0;5,1,0), 100), 0), rem(%1(0;5,1,0), 100), "
        "add(rem(%1(0;5,1,0), 100), 100)); clip](0;0,0,1)"
    ).replace("(0;5,1,0)", "(0;in_1,1,0)")
    c = compiled(lambda t, x: jnp.take(t, x % 101, axis=0), T, odd_ids())
    assert "fill nan" in printed(c)


def test_ids_are_computed_once_across_columns() -> None:
    """Five tables read with the same hashed id: one column of code, one multiplication."""

    def fn(ts: Any, x: Any) -> Any:
        i = ((x.astype(jnp.uint32) * jnp.uint32(2654435769)) >> 16) % 100
        return jnp.concatenate([t[i] for t in ts], axis=-1)

    c = compiled(fn, [table(100, 8, seed=k) for k in range(5)], ids((9,), 1000))
    assert len(c.calls[0][1].program.columns) == 1
    got = [line for k in c.calls[0][1].program.classes for line in str(k).splitlines()]
    assert sum(" mul " in line for line in got) == 1
    assert sum(" index " in line for line in got) == 1
    assert sum(" take " in line for line in got) == 5
    check(fn, [table(100, 8, seed=k) for k in range(5)], ids((9,), 1000), columns=5)


def test_equal_chains_written_twice_are_one() -> None:
    def fn(t: Any, u: Any, x: Any) -> Any:
        return jnp.concatenate([t[(x * 7) % 100], u[(x * 7) % 100]], axis=-1)

    c = compiled(fn, T, table(100, 4), odd_ids()[:, 0])
    assert len(c.calls[0][1].program.columns) == 1
    assert ops(c).count("index") == 1
    check(fn, T, table(100, 4), odd_ids()[:, 0], columns=2)


def test_a_deep_sum_of_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of hundreds of lookups is not refused, nor too deep for Python, nor analysed once for each of its steps."""
    seen = []
    monkeypatch.setattr(
        pipeline, "detect", lambda *args, real=pipeline.detect: seen.append(args) or real(*args)
    )

    def fn(ts: Any, x: Any) -> Any:
        total = jnp.zeros((4, 1))
        for k in range(250):
            total = total + ts[k % 3][x + k % 7]
        return total

    check(
        fn,
        [table(20, 1, seed=k) for k in range(3)],
        ids((4,), 20),
        columns=250,
        bound=Bag(250, magnitude=np.float32(2000)),
    )
    assert len(seen) <= 2 * 2  # the call, and the report


@pytest.mark.parametrize("rows", [1, 2])
def test_small_tables(rows: int) -> None:
    """Clip and fill keep what XLA makes of them (JAX refuses to read a table without rows)."""
    t = table(rows, 3)
    for mode in ("fill", "clip"):
        check(
            lambda t, x, mode=mode: jnp.take(
                t, jnp.clip(x & 3, 0, max(rows - 1, 0)), axis=0, mode=mode
            ),
            t,
            odd_ids(),
            calls=None,
            fused=None,
        )
