"""Where results meet: concatenations of any kind, sharing, several calls, and programs that are used again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import VERIFY, Bag, assert_same, check, ids, run, table

import recom_jax
from recom_jax import ir, optimize
from recom_jax.detect import detect
from recom_jax.trace import trace

ROWS, DIM, B = 9, 4, 6


def tables(n: int, dim: int = DIM) -> list[jax.Array]:
    return [table(ROWS, dim, seed=k) for k in range(n)]


def batch(n: int, size: int = B) -> jax.Array:
    return jnp.stack([ids(size, ROWS, seed=k, odd=True) for k in range(n)], 1)


JOINS = {
    "concat": lambda e: jnp.concatenate(e, -1),
    "concat_rows": lambda e: jnp.concatenate(e, 0),
    "hstack": lambda e: jnp.hstack(e),
    "vstack": lambda e: jnp.vstack(e),
    "stack_first": lambda e: jnp.stack(e, 0),
    "stack": lambda e: jnp.stack(e, 1),
    "stack_last": lambda e: jnp.stack(e, 2),
    "array": lambda e: jnp.array(e),
    "nested": lambda e: jnp.concatenate(
        [jnp.concatenate(e[:2], -1), jnp.concatenate(e[2:], -1)], -1
    ),
    "nested_rows": lambda e: jnp.concatenate(
        [jnp.concatenate(e[:2], -1), jnp.concatenate(e[2:4], -1)], 0
    ),
    "flattened": lambda e: jnp.stack(e, 1).reshape(e[0].shape[0], -1),
    "one_dimension": lambda e: jnp.concatenate([x.reshape(-1) for x in e]),
    "ravel": lambda e: jnp.concatenate(e, -1).ravel(),
    "transposed_parts": lambda e: jnp.concatenate([x.T for x in e], 0),
    "transposed": lambda e: jnp.concatenate(e, -1).T,
    "expand_concat": lambda e: jnp.concatenate([x[:, None] for x in e], 1),
    "twice": lambda e: jnp.concatenate([e[0], e[1], e[0], e[0]], -1),
    "nowhere": lambda e: tuple(e),
    "dictionary": lambda e: {"a": e[0], "rest": list(e[1:])},
    "slices": lambda e: jnp.concatenate([x[:, 1:3] for x in e], -1),
    "slice_of_concat": lambda e: jnp.concatenate(e, -1)[:, 2:9],
    "split_again": lambda e: jnp.split(jnp.concatenate(e, -1), 2, -1),
    "rows_of_concat": lambda e: jnp.concatenate(e, -1)[::2],
    "broadcast": lambda e: jnp.broadcast_to(e[0][:, None], (e[0].shape[0], 3, DIM)),
    "padded": lambda e: jnp.pad(e[0], ((0, 0), (1, 2))),
    "two_readers": lambda e: (jnp.concatenate(e, -1), jnp.stack(e, 1).sum(1), e[0] * 2.0),
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(name: str) -> None:
    def model(ts: Any, x: Any) -> Any:
        return JOINS[name]([jnp.take(t, x[:, k], axis=0) for k, t in enumerate(ts)])

    check(
        model,
        tables(5),
        batch(5),
        columns=None,
        bound=1e-5 if name == "two_readers" else None,
        fused={"twice": 2, "broadcast": 1, "padded": 1, "nested_rows": 4}.get(name),
    )


def test_concatenated_with_dense_features() -> None:
    def model(ts: Any, x: Any, dense: Any) -> Any:
        e = [t[x[:, k]] for k, t in enumerate(ts)]
        one = jnp.concatenate([dense, *e], -1)
        two = jnp.concatenate([e[0], dense * 2.0, e[1], jnp.ones((x.shape[0], 1)), e[2]], -1)
        return (
            one,
            two,
            jnp.stack(e, 1).reshape(x.shape[0], -1),
            jnp.concatenate([jnp.log1p(dense), e[0]], -1),
        )

    check(model, tables(3), batch(3), jnp.arange(18.0).reshape(6, 3), columns=3)


def test_widths_and_dtypes_that_differ() -> None:
    ts = [table(ROWS, d, seed=d) for d in (1, 3, 8, 16, 17, 2)]
    check(
        lambda ts, x: jnp.concatenate([t[x[:, k]] for k, t in enumerate(ts)], -1),
        ts,
        batch(6),
        columns=6,
    )
    half = [t.astype(jnp.bfloat16) for t in ts]
    check(
        lambda ts, x: jnp.concatenate([t[x[:, k]] for k, t in enumerate(ts)], -1),
        half,
        batch(6),
        columns=6,
    )
    check(
        lambda ts, x: jnp.concatenate(
            [t[x[:, k]].astype(jnp.float32) for k, t in enumerate(ts)], -1
        ),
        half,
        batch(6),
        columns=6,
    )


def test_bags_and_lookups_in_one_concatenation() -> None:
    i, j = ids((B, 5), ROWS), ids(B, ROWS, seed=1, odd=True)
    seg, flat = jnp.asarray(np.sort(np.arange(20) % B).astype(np.int32)), ids(20, ROWS, seed=2)

    def model(ts: Any, i: Any, j: Any, flat: Any, seg: Any) -> Any:
        return jnp.concatenate(
            [
                ts[0][j],
                ts[1][i].sum(1),
                ts[2][i].mean(1),
                ts[3][i].max(1),
                jax.ops.segment_sum(ts[4][flat], seg, 6),
                (ts[5][i] * (i > 2)[..., None]).sum(1)
                / jnp.maximum((i > 2).sum(1, keepdims=True), 1),
            ],
            -1,
        )

    check(model, tables(6), i, j, flat, seg, columns=6, bound=1e-4)


def test_same_ids_for_several_tables() -> None:
    def model(ts: Any, i: Any, x: Any) -> Any:
        h = (x.astype(jnp.uint32) * jnp.uint32(2654435761)) % jnp.uint32(ROWS)
        return (
            jnp.concatenate([t[i] for t in ts], -1),
            jnp.concatenate([t[h] for t in ts], -1),
            jnp.concatenate([t[x[:, None] % jnp.array([3, 5])].sum(1) for t in ts], -1),
        )

    ts = [table(ROWS, d, seed=d) for d in range(1, 12)]
    check(model, ts, ids(B, ROWS, odd=True), ids(B, ROWS, seed=1, odd=True), columns=33, bound=1e-4)


def test_one_column_used_many_times() -> None:
    def model(t: Any, i: Any, w: Any) -> Any:
        e = t[i]
        return e @ w, jax.nn.relu(e), e.sum(), jnp.concatenate([e, e], -1), e[0], i, e.shape[0]

    check(
        model, table(ROWS, DIM), ids(B, ROWS, odd=False), jnp.ones((DIM, 2)), columns=1, bound=1e-4
    )


def test_equal_reads_are_counted_as_written() -> None:
    report = check(
        lambda t, i: jnp.concatenate([t[i], t[i], t[i + 1]], -1),
        table(ROWS, DIM),
        ids(B, ROWS),
        columns=3,
    )
    assert len({c.name for c in report.columns}) == 3


@pytest.mark.parametrize("depth", [2, 4])
def test_lookups_that_depend_on_lookups(depth: int) -> None:
    """A table of ids of the next table: one call a level."""
    nxt = ids((ROWS, 1), ROWS, seed=5)

    def model(t: Any, nxt: Any, i: Any) -> Any:
        out = [t[i]]
        for _ in range(depth - 1):
            i = nxt[i][:, 0]
            out.append(t[i])
        return jnp.concatenate(out, -1)

    check(model, table(ROWS, DIM), nxt, ids(B, ROWS), columns=2 * depth - 1, calls=None)


def test_levels_with_other_work_between_them() -> None:
    def model(ts: Any, i: Any, w: Any) -> Any:
        first = ts[0][i]
        picked = jnp.argmax(first @ w, -1)
        second = jnp.concatenate([ts[1][picked], ts[2][i]], -1)
        return second, ts[3][(second.sum(-1) > 0).astype(jnp.int32)], first

    check(model, tables(4), ids(B, ROWS), jnp.eye(DIM), columns=4, calls=3)


def test_attention_over_a_history_like_din() -> None:
    def model(t: Any, history: Any, target: Any, mask: Any) -> Any:
        e, q = t[history], t[target]
        scores = jnp.where(mask, jnp.einsum("bld,bd->bl", e, q), -1e9)
        return (jax.nn.softmax(scores, -1)[..., None] * e).sum(1), q

    h = ids((B, 7), ROWS)
    check(
        model, table(ROWS, DIM), h, ids(B, ROWS, seed=1), h > 1, columns=2, bound=1e-4, calls=None
    )


def test_dot_interaction_like_dlrm() -> None:
    def model(ts: Any, x: Any, dense: Any) -> Any:
        z = jnp.stack([dense, *[t[x[:, k]] for k, t in enumerate(ts)]], 1)
        d = z @ z.transpose(0, 2, 1)
        a, b = jnp.triu_indices(z.shape[1], 1)
        return jnp.concatenate([dense, d[:, a, b]], -1)

    check(
        model,
        tables(4),
        batch(4) % ROWS,
        jnp.ones((B, DIM)),
        columns=4,
        bound=1e-3,
        leaves_gather=True,
    )


def test_columns_in_loops_and_branches_stay_in_xla_others_fuse() -> None:
    def model(t: Any, u: Any, i: Any) -> Any:
        scanned, _ = jax.lax.scan(lambda c, k: (c + t[k], None), jnp.zeros(DIM), i)
        looped = jax.lax.fori_loop(0, 3, lambda k, a: a + t[i + k], jnp.zeros((B, DIM)))
        either = jax.lax.cond(i[0] > 3, lambda: t[i], lambda: jnp.zeros((B, DIM)))
        while_ = jax.lax.while_loop(
            lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] + t[s[0]]), (0, jnp.zeros(DIM))
        )[1]
        mapped = jax.lax.map(lambda k: t[k].sum(0), i.reshape(2, 3))
        return {"a": scanned, "b": looped, "c": either, "d": while_, "e": mapped, "fused": u[i]}

    t, u, i = table(ROWS, DIM), table(ROWS, DIM, seed=1), ids(B, ROWS)
    got, report = run(model, t, u, i)
    assert_same(got, jax.jit(model)(t, u, i), 1e-4)
    by_table: dict[str, list[Any]] = {}
    for c in report.columns:
        by_table.setdefault(c.table, []).append(c)
    assert [c.status for c in by_table["u"]] == ["fused"]
    assert len(by_table["t"]) >= 4
    assert all(c.status == "xla" and c.reason for c in by_table["t"]), report
    assert any("scan" in c.reason for c in by_table["t"]), report
    assert any("cond" in c.reason for c in by_table["t"]), report
    assert any("while" in c.reason for c in by_table["t"]), report


def test_results_that_are_not_used_or_are_arguments() -> None:
    def model(t: Any, i: Any) -> Any:
        _ = t[i + 1]
        return t[i], i, t, 3, None, jnp.zeros(2)

    check(model, table(ROWS, DIM), ids(B, ROWS), columns=1)


def test_reports_name_places_and_kinds() -> None:
    def model(params: Any, i: Any) -> Any:
        return (
            params["user"][i[:, 0]],
            (params["item"][i] * 2.0).sum(1),
            params["item"][i + 1].mean(1),
        )

    report = check(
        model,
        {"user": table(ROWS, DIM), "item": table(ROWS, DIM, seed=1)},
        ids((B, 3), ROWS),
        bound=1e-4,
    )
    assert [c.table for c in report.columns] == [
        "params['user']",
        "params['item']",
        "params['item']",
    ]
    assert [c.combiner for c in report.columns] == ["none", "weighted sum", "mean"]
    assert all("test_layout.py" in c.source for c in report.columns)


# ---- programs that are used again ---------------------------------------------------------------------------------


def prepared() -> int:
    return recom_jax.stats()["programs_prepared"]


def _reusable(ts: Any, i: Any, x: Any, j: Any) -> Any:
    return jnp.concatenate(
        [
            jnp.take(ts[0], jnp.clip(i, 0, ROWS - 1), axis=0),
            ts[1][jnp.digitize(x, np.arange(3.0, dtype=np.float32))],
            ts[2][j].sum(1),
            ts[3][j % 5].mean(1),
            jnp.stack([ts[0][i], ts[1][i]], 1).reshape(i.shape[0], -1),
        ],
        -1,
    )


def test_any_batch_size_is_one_program() -> None:
    ts = tables(4)
    optimized = recom_jax.optimize(_reusable, options=VERIFY)
    counts = []
    for size in (1, 2, 3, 7, 8, 33):
        args = ts, ids(size, ROWS, odd=True), jnp.linspace(-1, 4, size), ids((size, 5), ROWS)
        before = prepared()
        got = optimized(*args)
        counts.append(prepared() - before)
        # Reference compiles are what costs time: by numpy for the lookups of most sizes.
        if size in (1, 3, 33):
            assert_same(got, jax.jit(_reusable)(*args), 1e-5)
        else:
            pooled = np.asarray(ts[2])[np.asarray(args[3])].sum(1)
            np.testing.assert_allclose(got[:, 8:12], pooled, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(
                got[:, :4], np.asarray(ts[0])[np.clip(np.asarray(args[1]), 0, ROWS - 1)]
            )
    assert sum(counts) - counts[0] <= 1, counts  # batch 1 may be a program of its own
    assert sum(counts[2:]) == 0, counts


def _square(t: Any, j: Any, w: Any) -> Any:
    return {
        "sum": t[j].sum(1),
        "weighted": jnp.einsum("blh,bl->bh", t[j], w),
        "rows": t[j].reshape(j.shape[0], -1),
        "transposed": t[j.T].sum(0),
        "concat": jnp.concatenate([t[j[:, 0]], t[j[:, 1]], w], -1),
    }


@pytest.mark.parametrize("first", [(4, 4, 4), (9, 9, 9), (4, 9, 4)])
def test_sizes_that_are_equal_by_chance(first: tuple[int, int, int]) -> None:
    """B = L = D traced first; other sizes must not be misread as those."""
    optimized = recom_jax.optimize(_square, options=VERIFY)
    rows, length, dim = first
    before = None
    for b, n in ((rows, length), (rows + 3, length), (2, length), (length, length)):
        args = table(9, dim), ids((b, n), 9), jnp.ones((b, n)) / 3
        assert_same(optimized(*args), jax.jit(_square)(*args), 1e-4)
        before = prepared() if before is None else before
    assert prepared() == before


def test_jagged_totals_share_a_program() -> None:
    def model(t: Any, f: Any, s: Any, like: Any) -> Any:
        return jax.ops.segment_sum(t[f], s, like.shape[0])

    optimized = recom_jax.optimize(model, options=VERIFY)
    before = None
    for total, bags in ((12, 4), (12, 12), (5, 4), (40, 7), (4, 4)):
        rng = np.random.default_rng(total)
        args = (
            table(ROWS, 4),
            ids(total, ROWS),
            jnp.asarray(np.sort(rng.integers(0, bags, total)).astype(np.int32)),
            jnp.zeros(bags),
        )
        assert_same(optimized(*args), jax.jit(model)(*args), 1e-4)
        before = prepared() if before is None else before
    # `num_segments` is a number in the program, which no operand's shape gives but the result's.
    assert prepared() == before


def test_tables_of_equal_shape_are_one_class() -> None:
    report = check(
        lambda ts, x: jnp.concatenate([t[x[:, k]] for k, t in enumerate(ts)], -1),
        tables(12),
        batch(12),
        columns=12,
    )
    assert sum(map(len, report.classes)) == 1, report.classes


def test_a_reused_program_reads_its_own_tables() -> None:
    optimized = recom_jax.optimize(lambda t, i: t[i], options=VERIFY)
    i = ids(B, ROWS)
    for seed in range(3):
        t = table(ROWS, DIM, seed=seed)
        assert_same(optimized(t, i), t[i])


def test_sums_over_two_axes_within_the_bound() -> None:
    check(
        lambda t, i: (t[i].sum((1, 2)), t[i].sum(1).sum(1)),
        table(ROWS, DIM),
        ids((B, 3, 2), ROWS),
        bound=Bag(6),
        columns=None,
    )


def test_reshapes_of_an_empty_batch() -> None:
    def model(t: Any, i: Any, x: Any) -> Any:
        return (
            jnp.concatenate([t[i].reshape(-1), (x * 2.0).reshape(-1)]),
            t[jnp.array([1, 2])],
            x.reshape(5, -1),
            t[i].reshape(-1, 2),
        )

    check(model, table(ROWS, DIM), ids(0, ROWS), jnp.zeros((0, 5)), columns=1)


def test_a_second_pass_over_positions_finds_no_stale_registers() -> None:
    """Two regions in a column: what the first computed per position is gone in the second."""

    def model(ts: Any, i: Any) -> Any:
        mask = i > 2
        return jnp.concatenate(
            [ts[0][i].sum(1), ts[1][i].sum(1) / jnp.maximum(mask.sum(1, keepdims=True), 1)], -1
        )

    check(model, tables(2), ids((B, 5), ROWS), columns=2, bound=1e-4)


# ---- bags beside their own rows ----------------------------------------------------------------------------------

BESIDE: dict[str, tuple[Any, int]] = {
    "centred": (lambda t, i: t[i] - t[i].mean(1, keepdims=True), 2),
    "scaled": (
        lambda t, i: (t[i] - t[i].min(1, keepdims=True)) / (t[i].max(1, keepdims=True) + 9.0),
        3,
    ),
    "softmax": (lambda t, i: jax.nn.softmax(t[i], axis=1), 2),
    "weights": (lambda t, i: t[i] * ((i > 2) / (i > 2).sum(1, keepdims=True))[..., None], 1),
    "jagged": (
        lambda t, i: (
            t[i] + jax.ops.segment_sum(t[i.ravel()], jnp.arange(60) // 10, 6)[:, None]
        ),
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_bags_beside_rows_are_made_once_a_bag(name: str) -> None:
    """As one value they would be added up again at each position."""
    fn, outputs = BESIDE[name]
    args = table(9, 4), ids((6, 10), 9)
    assert_same(optimize(fn, options=VERIFY)(*args), jax.jit(fn)(*args), 1e-4)
    found, _ = detect(trace(fn, args, ("t", "i")).jaxpr, VERIFY)
    for out in found.outputs:
        bags = [e for e in ir.walk(out.val.expr) if isinstance(e, (ir.Reduce, ir.SegReduce))]
        assert not bags or out.var.aval.shape[1] != 10, out
    assert len(found.outputs) == outputs, found


def test_bags_that_are_divided_by_a_count_stay_one_value() -> None:
    fn = lambda t, i: (t[i].sum(1) / jnp.maximum((i > 2).sum(1, keepdims=True), 1)).T  # noqa: E731
    args = table(9, 4), ids((6, 10), 9)
    found, _ = detect(trace(fn, args, ("t", "i")).jaxpr, VERIFY)
    (out,) = found.outputs
    assert sum(isinstance(e, ir.Reduce) for e in ir.walk(out.val.expr)) == 2
