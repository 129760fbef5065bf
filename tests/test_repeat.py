"""Jagged bags by `jnp.repeat(jnp.arange(n), lengths, total_repeat_length=t)`; plain JAX is the oracle."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import trace
from tests.helpers import VERIFY, Bag, assert_same, check, ids, run, table
from tests.test_pipeline import stages

ROWS, DIM = 13, 4
DTYPES = ("int32", "uint32", "int64", "uint64")
Model = Callable[..., Any]


def by_splits(t: Any, ids: Any, splits: Any) -> Any:
    size = splits.shape[0] - 1
    seg = jnp.repeat(jnp.arange(size), jnp.diff(splits), total_repeat_length=ids.shape[0])
    return jax.ops.segment_sum(t[ids], seg, size)


def by_lengths(t: Any, ids: Any, lengths: Any) -> Any:
    size = lengths.shape[0]
    seg = jnp.repeat(jnp.arange(size), lengths, total_repeat_length=ids.shape[0])
    return jax.ops.segment_sum(t[ids], seg, size)


# ---- printed forms -----------------------------------------------------------------------------------------------


def test_splits_are_searched() -> None:
    text = stages(by_splits, table(ROWS, DIM), ids(9, ROWS), jnp.zeros(6, jnp.int32))
    seg = r"sub\(search\.splits\.right\(iota\(0;1,0\), %2, n=in - 1, total=\w+\), 1\)"
    assert re.search(seg, text["detect"]), text["detect"]
    assert "0 equations left to XLA" in text["detect"]
    assert "search SPLITS RIGHT" in text["program0"]


def test_lengths_are_searched() -> None:
    text = stages(by_lengths, table(ROWS, DIM), ids(9, ROWS), jnp.zeros(5, jnp.int32))
    assert re.search(r"search\.lengths\.right\(iota\(0;1,0\), %2, n=in, total", text["detect"])
    assert "0 equations left to XLA" in text["detect"]
    assert "search LENGTHS RIGHT" in text["program0"]


def test_one_program_for_all_sizes() -> None:
    def program(bags: int, total: int) -> str:
        return stages(
            by_splits, table(ROWS, DIM), ids(total, ROWS), jnp.zeros(bags + 1, jnp.int32)
        )["program0"]

    assert program(5, 9) == program(8, 8) == program(3, 1009) == program(1009, 3)


def test_explain_names_the_rewrite() -> None:
    args = table(ROWS, DIM), ids(9, ROWS), jnp.arange(6)
    _, report = run(by_splits, *args)
    assert report.columns[0].rewrites == ("repeat-to-search",)
    options = recom_jax.Options(verify=True, disable=("repeat-to-search",))
    got, report = run(by_splits, *args, options=options)
    assert report.columns[0].rewrites == ()
    assert "search" not in report.source
    assert_same(got, jax.jit(by_splits)(*args), Bag(9).tolerance(by_splits, args))


def test_hundreds_of_columns_need_one_trace_of_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    from recom_jax import subgraph

    seen = []
    monkeypatch.setattr(
        trace, "flatten", lambda closed, real=trace.flatten: seen.append(closed) or real(closed)
    )
    subgraph._repeat.cache_clear()

    def model(t: Any, values: Any, splits: Any) -> Any:
        return jnp.concatenate([by_splits(t, *c) for c in zip(values, splits, strict=True)], 1)

    values = [ids(5 + k, ROWS) for k in range(6)]
    stages(model, table(ROWS, DIM), values, [jnp.zeros(4, jnp.int32)] * 6)
    assert len(seen) == 2  # the model, and the reference


# ---- numbers -----------------------------------------------------------------------------------------------------


# (bags, positions). Every pair with a dtype is a compilation: each dtype meets two usual sizes and one at the edge.
USUAL, EDGE = ((2, 3), (5, 12), (7, 600)), ((1, 1), (1, 6), (4, 1))


def sizes_of(kind: str, dtype: str) -> tuple[tuple[int, int], ...]:
    k = DTYPES.index(dtype) + (kind == "splits")
    return USUAL[k % 3], USUAL[(k + 1) % 3], EDGE[k % 3]


@functools.cache
def bags_of_positions(kind: str, dtype: str, bags: int, total: int) -> tuple[Model, Model]:
    """What `jnp.repeat` gives, fused and plain: bag numbers, as a lookup of their own rows and in jagged bags."""

    def model(rows: Any, data: Any, at: Any) -> Any:
        lengths = jnp.diff(at) if kind == "splits" else at
        size = lengths.shape[0]
        seg = jnp.repeat(jnp.arange(size), lengths, total_repeat_length=total)
        count = jax.ops.segment_sum(jnp.ones(total, jnp.int32), seg, size)
        return rows[seg], jax.ops.segment_max(data[jnp.arange(total)], seg, size), count

    fused = recom_jax.optimize(model, options=VERIFY)
    if total > 1 and bags > 1:
        rows, data = table(bags, DIM, jnp.int32), table(total, DIM)
        report = fused.explain(rows, data, jnp.zeros(bags + (kind == "splits"), dtype))
        assert f"search {kind.upper()} RIGHT" in report.source
        assert report.num_fused == report.num_columns == 2
    return fused, jax.jit(model)


def test_every_size_is_met() -> None:
    for kind in ("splits", "lengths"):
        assert {s for d in DTYPES for s in sizes_of(kind, d)} == {*USUAL, *EDGE}


@pytest.mark.once
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    kind=st.sampled_from(["splits", "lengths"]),
    dtype=st.sampled_from(DTYPES),
    which=st.integers(0, 2),
    data=st.data(),
)
def test_equals_repeat(kind: str, dtype: str, which: int, data: Any) -> None:
    """Any numbers: splits that descend, start anywhere, end before or behind the last position, that wrap."""
    bags, total = sizes_of(kind, dtype)[which]
    with jax.enable_x64(True):
        info = np.iinfo(dtype)
        near = st.integers(max(-total - 3, int(info.min)), total + 3)
        corner = st.sampled_from([info.min, info.max, info.max // 2, (info.max >> 31) + 1, 0])
        numbers = st.lists(
            near if data.draw(st.booleans()) else near | corner | st.integers(info.min, info.max),
            min_size=bags + (kind == "splits"),
            max_size=bags + (kind == "splits"),
        )
        at = [int(n) for n in data.draw(numbers)]
        if data.draw(st.booleans()):
            at = sorted(at) if kind == "splits" else [abs(n) % (total + 1) for n in at]
        fused, plain = bags_of_positions(kind, dtype, bags, total)
        rows = np.arange(bags, dtype=np.int32)[:, None] * np.ones((1, DIM), np.int32)
        args = jnp.asarray(rows), table(total, DIM), jnp.asarray(np.array(at, dtype))
        assert_same(fused(*args), plain(*args))


@pytest.mark.parametrize("shape", ["no_positions", "no_bags", "one_bag", "scalar_lengths"])
def test_sizes_at_the_edge(shape: str) -> None:
    def scalar(t: Any, i: Any, n: Any) -> Any:
        seg = jnp.repeat(jnp.arange(4), n, total_repeat_length=i.shape[0])
        return jax.ops.segment_sum(t[i], seg, 4)

    args: dict[str, tuple[Model, Any, Any]] = {
        "no_positions": (by_splits, ids(0, ROWS), jnp.zeros(4, jnp.int32)),
        "no_bags": (by_splits, ids(0, ROWS), jnp.zeros(1, jnp.int32)),
        "one_bag": (by_splits, ids(5, ROWS), jnp.array([0, 3])),
        "scalar_lengths": (scalar, ids(9, ROWS), jnp.int32(2)),
    }
    model, *rest = args[shape]
    t = table(ROWS, DIM)
    got, _ = run(model, t, *rest)
    assert_same(got, jax.jit(model)(t, *rest), 1e-4)


MADE: dict[str, Model] = {
    "slices": lambda n, s, w: s[1:] - s[:-1],
    "a_row_of_splits": lambda n, s, w: jnp.diff(jnp.stack([s, s * 2])[0]),
    "an_argument's_row": lambda n, s, w: jnp.diff(w[1]),
    "an_argument's_column": lambda n, s, w: jnp.diff(w[:, 1]),
    "lengths_of_a_row": lambda n, s, w: w[1, 1:],
    "computed": lambda n, s, w: jnp.maximum(n, 1),
    "counted": lambda n, s, w: (w > 3).sum(0)[1:],
    "every_other": lambda n, s, w: s[1::2],
    "cast_splits": lambda n, s, w: jnp.diff(s.astype(jnp.uint32)),
    "descending": lambda n, s, w: s[:-1] - s[1:],
    "two_splits": lambda n, s, w: w[0, 1:] - s[:-1],
}


@pytest.mark.parametrize("name", MADE)
def test_where_lengths_come_from(name: str) -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 5, 6).astype(np.int32)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    wide = rng.integers(0, 6, (7, 7)).astype(np.int32)
    wide[1], wide[:, 1] = np.sort(wide[1]), np.sort(wide[:, 1])

    def model(t: Any, i: Any, n: Any, s: Any, w: Any) -> Any:
        given = MADE[name](n, s, w)
        seg = jnp.repeat(
            jnp.arange(given.shape[0], dtype=jnp.int16), given, total_repeat_length=i.shape[0]
        )
        return jax.ops.segment_sum(t[i], seg, 7)

    args = table(ROWS, DIM), ids(int(splits[-1]), ROWS), lengths, splits, wide
    report = check(model, *args, columns=1, bound=Bag(40), leaves_gather=True)
    split = name in ("slices", "a_row_of_splits", "an_argument's_row")
    assert ("search SPLITS" if split else "search LENGTHS") in report.source


def test_constants_and_numpy_aranges() -> None:
    splits = np.array([0, 2, 2, 6, 9], np.int32)

    def model(t: Any, i: Any, n: Any) -> Any:
        a = jnp.repeat(np.arange(4), n, total_repeat_length=9)
        b = jnp.repeat(jnp.arange(4), np.diff(splits), total_repeat_length=9)
        return jax.ops.segment_sum(t[i], a, 4), jax.ops.segment_sum(t[i], b, 4)

    report = check(
        model, table(ROWS, DIM), ids(9, ROWS), jnp.array([1, 0, 5, 3]), columns=2, bound=Bag(9)
    )
    assert report.source.count("search LENGTHS") == 1  # the other one is a constant array


# ---- where it must not fire --------------------------------------------------------------------------------------

BAGS, TOTAL = 5, 11


def almost(n: Any, *, one: int = 1, first: int = 0, shift: int = 1, minus: int = 1) -> Any:
    """`jnp.repeat` spelled out, with its numbers open."""
    starts = jnp.cumsum(jnp.roll(n, shift).at[0].set(first))
    marks = jnp.zeros(TOTAL, jnp.int32).at[starts].add(one)
    return jnp.take(jnp.arange(BAGS), jnp.cumsum(marks) - minus)


OTHERS: dict[str, Model] = {
    "another_array": lambda n: jnp.repeat(jnp.arange(BAGS) * 2 % 5, n, total_repeat_length=TOTAL),
    "from_one": lambda n: jnp.repeat(jnp.arange(1, BAGS + 1), n, total_repeat_length=TOTAL),
    "backwards": lambda n: jnp.repeat(jnp.arange(BAGS)[::-1], n, total_repeat_length=TOTAL),
    "the_lengths": lambda n: jnp.repeat(n, n, total_repeat_length=TOTAL),
    "int8": lambda n: jnp.repeat(jnp.arange(BAGS), n.astype(jnp.int8), total_repeat_length=TOTAL),
    "uint16": lambda n: jnp.repeat(
        jnp.arange(BAGS), n.astype(jnp.uint16), total_repeat_length=TOTAL
    ),
    "twos": functools.partial(almost, one=2),
    "from_the_second": functools.partial(almost, first=1),
    "shifted": functools.partial(almost, shift=2),
    "not_shifted": functools.partial(almost, shift=0),
    "less": functools.partial(almost, minus=2),
    "vmap": lambda n: jax.vmap(
        lambda m: jnp.repeat(jnp.arange(BAGS), m, total_repeat_length=TOTAL)
    )(jnp.stack([n, n + 1]))[1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_leaves_others_alone(name: str) -> None:
    def model(t: Any, i: Any, n: Any) -> Any:
        return jax.ops.segment_sum(t[i], OTHERS[name](n), BAGS)

    args = table(ROWS, DIM), ids(TOTAL, ROWS), jnp.array([1, 4, 0, 2, 4])
    report = check(
        model, *args, columns=1, calls=None, bound=Bag(TOTAL), leaves_gather=True, leaves_while=True
    )
    assert "search" not in report.source
    fused, plain = recom_jax.optimize(model, options=VERIFY), jax.jit(model)
    for lengths in ([3, 0, 0, 9, 1], [-2, 5, 1, -7, 30]):
        others = (*args[:2], jnp.array(lengths))
        assert_same(fused(*others), plain(*others), Bag(TOTAL).tolerance(model, others))


def test_repeat_spelled_out_is_the_same_thing() -> None:
    """`almost` with its defaults: the test above fails for its numbers, not for its form."""

    def model(t: Any, i: Any, n: Any) -> Any:
        return jax.ops.segment_sum(t[i], almost(n), BAGS)

    args = table(ROWS, DIM), ids(TOTAL, ROWS), jnp.array([1, 4, 0, 2, 4])
    report = check(model, *args, columns=1, bound=Bag(TOTAL))
    assert "search LENGTHS" in report.source
