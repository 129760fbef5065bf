"""Columns of equal structure are analysed once: everything that is made of a model is what it is without that."""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from recom_jax import explain, ir, pipeline, trace, twins
from recom_jax.detect import Detector
from tests.helpers import ids, table
from tests.test_random_programs import arguments, build

VERIFY = recom_jax.Options(verify=True)


def traced(fn: Callable[..., Any], *args: Any) -> trace.Traced:
    leaves, tree = jax.tree_util.tree_flatten(args)

    def flat(*leaves: Any) -> Any:
        return jax.tree_util.tree_leaves(fn(*jax.tree_util.tree_unflatten(tree, leaves)))

    return trace.trace(flat, leaves, tuple(f"a{k}" for k in range(len(leaves))))


def forms(t: trace.Traced, options: recom_jax.Options, enabled: bool) -> dict[str, Any]:
    """All that a user can see of what the stages make of a trace."""
    was, twins.ENABLED = twins.ENABLED, enabled
    try:
        made = pipeline.compile_jaxpr(t, options)
        report = explain.report_of(made, "model")
    finally:
        twins.ENABLED = was
    for out in (*made.detected.outputs, *made.simplified.outputs):
        parts = [out.val.expr] if out.val.expr is not None else [p.expr for p in out.val.parts]
        assert all(reads(made.detected.pool, e) for e in parts)
    with ir.numbered():
        texts = {
            "detected": str(made.detected),
            "simplified": str(made.simplified),
            "programs": [str(s) for _, s, _ in made.calls],
            "spliced": re.sub(r"0x[0-9a-f]+", "", str(made.jaxpr)),
        }
    fields = ("columns", "source", "classes", "others", "stages", "results", "programs", "digests")
    return {
        **texts,
        "report": str(report),
        **{f: getattr(report, f) for f in fields},
        "rows": sorted(map(str, made.simplified.rows.values())),
        "applied": sorted(made.simplified.applied.values()),
        "forced": sorted(made.forced.values()),
    }


def reads(pool: ir.Pool, e: ir.Expr) -> bool:
    """Whether the pool, which asks an expression's twin, knows what is read, each variable once."""
    nodes = ir.walk(e)
    want = [x.var for x in nodes if isinstance(x, (ir.Load, ir.Search)) and x.var is not None]
    want += [x.table for x in nodes if isinstance(x, ir.Take)]
    found = [id(v) for v in pool.leaves(e)]
    return len(found) == len(set(found)) and set(found) == set(map(id, want))


def same(t: trace.Traced, options: recom_jax.Options = VERIFY) -> None:
    shared, each = forms(t, options, True), forms(t, options, False)
    for name, want in each.items():
        assert shared[name] == want, name


def kinds(t: trace.Traced) -> tuple[int, int]:
    """How many kinds of slices there are, and how many slices are renamed forms of others, at least."""
    d = Detector(t.jaxpr, VERIFY, {})
    d.run()
    return len(d.twins._slices), sum(s.twins for s in d.twins.first)


def found(t: trace.Traced) -> int:
    return kinds(t)[1]


def copies(seeds: Sequence[int], n: int, order: int, batch: int = 4) -> trace.Traced:
    """A model of `n` copies of each of some random columns, each copy with arguments of its own."""
    made = [build([s], s) for s in seeds]
    places = [(k, c) for k in range(len(made)) for c in range(n)]
    random.Random(order).shuffle(places)

    def model(params: Any, batches: Any) -> Any:
        outs = {(k, c): made[k].fn(params[k][c], batches[k][c]) for k, c in places}
        arrays = [x for x in jax.tree_util.tree_leaves(outs) if x.ndim == 2 and x.shape[0] == batch]
        return outs, jnp.concatenate(arrays, 1) if arrays else ()

    params = [[m.params] * n for m in made]
    batches = [[arguments(batch, c) for c in range(n)] for _ in made]
    return traced(model, params, batches)


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
    st.integers(0, 99),
    st.sampled_from((1, 3, 4)),
)
def test_random_columns(seeds: list[int], order: int, batch: int) -> None:
    same(copies(seeds, 4, order, batch))


def test_most_copies_are_not_analysed() -> None:
    assert found(copies(range(12), 5, 0)) >= 30


# ---- a model of each kind of column ------------------------------------------------------------------------------


def bag(items: Any, x: Any) -> Any:
    mask = x >= 0
    rows = jnp.where(mask[..., None], jnp.take(items, jnp.where(mask, x, 0) % 50, axis=0), 0)
    return rows.sum(axis=1) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def bucket(items: Any, x: Any, bins: Any) -> Any:
    return items[jnp.digitize(x, bins)]


def columns(n: int = 12, batch: int = 6) -> tuple[Any, Any]:
    """Bags and buckets: lengths, rows and boundaries in common or not."""
    shared = np.array([0.0, 1.5, 7.0], np.float32)
    params = {
        "bags": [table(50 + k // 6, 4 + 4 * (k % 2)) for k in range(n)],
        "buckets": [table(4, 8) for _ in range(n)],
    }
    data = {
        "bags": [ids((batch, 3 + k // 9), 60, odd=True) for k in range(n)],
        "buckets": [jnp.linspace(-3, 9 + k, batch) for k in range(n)],
    }

    def model(p: Any, b: Any) -> Any:
        out = [bag(t, x) for t, x in zip(p["bags"], b["bags"], strict=True)]
        for k, (t, x) in enumerate(zip(p["buckets"], b["buckets"], strict=True)):
            own = shared if k % 3 else np.array([0.0, 1.5, 7.0 + k], np.float32)
            out.append(bucket(t, x, own))
        return jnp.concatenate(out, 1)

    return model, (params, data)


def test_columns() -> None:
    model, args = columns()
    t = traced(model, *args)
    assert found(t) >= 12
    same(t)
    got = recom_jax.optimize(model, options=VERIFY)(*args)
    np.testing.assert_allclose(got, jax.jit(model)(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["masked-lookup", "merge-searches", "uniform-bucketize", "drop-fill"])  # fmt: skip
def test_columns_without_a_rewrite(name: str) -> None:
    model, args = columns()
    same(traced(model, *args), recom_jax.Options(verify=True, disable=(name,)))


def test_shared_arguments() -> None:
    """Tables and features that several columns read, also through casts; an inner value that is read later."""
    tables = [table(50, 8) for _ in range(3)]
    features = [ids((5, 3), 60, odd=True) for _ in range(3)]

    def model(tables: Any, features: Any) -> Any:
        out = [bag(t, x) for t in tables for x in features]
        hashed = [x % 7 for x in features]
        out += [t[h].sum(1) for t in tables for h in hashed]
        out += [t.astype(jnp.bfloat16)[x[:, 0]].astype(jnp.float32) for t in tables for x in features]  # fmt: skip
        return jnp.concatenate(out, 1), [h + 1 for h in hashed]

    t = traced(model, tables, features)
    same(t)
    assert found(t) >= 1


def test_constants() -> None:
    """Tables among them share columns whatever they hold; boundaries whatever a search does not ask; others do not."""
    r = np.random.default_rng(3)
    n, x = 9, [jnp.linspace(-1, 5, 6) + k for k in range(9)]
    tables = [jnp.asarray(r.normal(size=(5, 4)), jnp.float32) for _ in range(n)]
    bins = [np.sort(r.normal(size=4)).astype(np.float32) for _ in range(n)]
    offsets = [np.arange(6, dtype=np.int32) * k for k in range(n)]
    bins[4][1] = 1e-40  # subnormal: XLA's

    def model(x: Any) -> Any:
        zipped = zip(tables, bins, x, offsets, strict=True)
        searched = [t[jnp.digitize(y, b)] for t, b, y, _ in zipped]
        added = [
            t[(y.astype(jnp.int32) + o) % 5] for t, y, o in zip(tables, x, offsets, strict=True)
        ]
        both = [
            jnp.asarray(b)[jnp.digitize(y, b) - 1][:, None] for b, y in zip(bins, x, strict=True)
        ]
        return jnp.concatenate([*searched, *added, *both], 1)

    t = traced(model, x)
    same(t)
    assert found(t) >= 4
    got = recom_jax.optimize(model, options=VERIFY)(x)
    np.testing.assert_array_equal(got, jax.jit(model)(x))


def test_what_is_refused_is_refused_alike() -> None:
    tables, features = [table(50, 8) for _ in range(4)], [jnp.linspace(0, 1, 5) for _ in range(4)]
    ints = [ids((5,), 50) for _ in range(4)]

    def model(tables: Any, features: Any, ints: Any) -> Any:
        out = []
        for t, x, i in zip(tables, features, ints, strict=True):
            out.append(t[(jnp.exp(x) * 3).astype(jnp.int32)])  # ids that XLA computes
            out.append(jax.lax.map(lambda k, t=t: t[k], i))  # a lookup inside a loop
            out.append(t.T[:, i].T)  # not along rows
            out.append(jnp.sqrt(t[i]))
            out.append((t * 2)[i])
        return jnp.concatenate(out, 1)

    same(traced(model, tables, features, ints))


def test_literals_tell_slices_apart() -> None:
    """Equal to Python, not to a program: -0.0 and 0.0, 1 and True."""
    tables, features = [table(9, 4) for _ in range(6)], [ids((5,), 12, odd=True) for _ in range(6)]
    fills = (0.0, -0.0, 1.0, 0.0, -0.0, 1.0)

    def model(tables: Any, features: Any) -> Any:
        zipped = zip(tables, features, fills, strict=True)
        return jnp.concatenate(
            [t.at[x].get(mode="fill", fill_value=fill) for t, x, fill in zipped], 1
        )

    t = traced(model, tables, features)
    assert kinds(t)[0] == 3 and found(t) >= 2
    same(t)


def main() -> None:
    """A long run: python -m tests.test_twins --models 500 --seed 1."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args()
    renamed = 0
    for k in range(given_.models):
        r = random.Random(given_.seed * 10**6 + k)
        seeds = [r.randrange(10**6) for _ in range(6)]
        t = copies(seeds, 4, k, r.choice((1, 2, 3, 4, 9)))
        try:
            same(t)
        except AssertionError as why:
            sys.exit(f"model {k}, columns {seeds}: {str(why)[:2000]}")
        renamed += found(t)
    print(f"{given_.models} models, {renamed} slices renamed: no difference")


if __name__ == "__main__":
    main()
