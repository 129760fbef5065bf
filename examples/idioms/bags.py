"""Bags: several ids an example, their rows combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from examples.idioms.idiom import Arrays, Idiom, Made, Size


def _sum(table: Any, ids: Any) -> tuple[Any, Any]:
    mask = ids >= 0
    rows = table[jnp.where(mask, ids, 0)]
    return jnp.where(mask[..., None], rows, 0).sum(1), mask


def _maximum(table: Any, ids: Any) -> Any:
    total, mask = _sum(table, ids)
    return total / jnp.maximum(mask.sum(1, keepdims=True), 1)


def _clip(table: Any, ids: Any) -> Any:
    total, mask = _sum(table, ids)
    return total / jnp.clip(mask.sum(1, keepdims=True), 1, None)


def _where_inside(table: Any, ids: Any) -> Any:
    total, mask = _sum(table, ids)
    count = mask.sum(1, keepdims=True)
    return total / jnp.where(count == 0, 1, count)


def _where_outside(table: Any, ids: Any) -> Any:
    total, mask = _sum(table, ids)
    count = mask.sum(1, keepdims=True)
    return jnp.where(count > 0, total / count, 0)


def _epsilon(table: Any, ids: Any) -> Any:
    total, mask = _sum(table, ids)
    return total / (mask.astype(jnp.float32).sum(1, keepdims=True) + 1e-8)


def _plain(table: Any, ids: Any) -> Any:
    total, mask = _sum(table, ids)
    return total / mask.sum(1, keepdims=True)


def _mean_where(table: Any, ids: Any) -> Any:
    mask = ids >= 0
    return jnp.mean(table[jnp.where(mask, ids, 0)], axis=1, where=mask[..., None])


def _weights(table: Any, ids: Any) -> Any:
    mask = (ids >= 0).astype(jnp.float32)
    weights = mask / jnp.maximum(mask.sum(1, keepdims=True), 1.0)
    return jnp.einsum("bld,bl->bd", table[jnp.maximum(ids, 0)], weights)


def _nan_to_num(table: Any, ids: Any) -> Any:
    return jnp.nan_to_num(_plain(table, ids))


def _double_where(table: Any, ids: Any) -> Any:
    total, mask = _sum(table, ids)
    count = mask.sum(1, keepdims=True)
    some = count > 0
    return jnp.where(some, total / jnp.where(some, count, 1), 0.0)


def _reciprocal(table: Any, ids: Any) -> Any:
    total, mask = _sum(table, ids)
    return total * (1.0 / jnp.maximum(mask.sum(1, keepdims=True), 1))


GUARDS: dict[str, Callable[[Any, Any], Any]] = {
    "maximum": _maximum,
    "clip": _clip,
    "where_inside": _where_inside,
    "where_outside": _where_outside,
    "epsilon": _epsilon,
    "unguarded": _plain,
    "jnp_mean_where": _mean_where,
    "weights": _weights,
    "nan_to_num": _nan_to_num,
    "double_where": _double_where,
    "reciprocal": _reciprocal,
}
"""How the mean of an empty bag is kept from dividing by zero."""


def _mean(guard: Callable[[Any, Any], Any]) -> Idiom:
    def make(s: Size) -> Made:
        a = Arrays(s)
        return guard, (a.table(), a.padded(s.batch, s.length))

    return Idiom(make)


def multi_hot_sum(s: Size) -> Made:
    """A multi-hot vector, each id counted, times a table."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        return jax.nn.one_hot(ids, s.rows).sum(1) @ table

    return fn, (a.table(), a.padded(s.batch, s.length))


def multi_hot_max(s: Size) -> Made:
    """A multi-hot vector of zeros and ones, times a table."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        return jax.nn.one_hot(ids, s.rows).max(1) @ table

    return fn, (a.table(), a.padded(s.batch, s.length))


def multi_hot_weighted(s: Size) -> Made:
    """A vector of weights at the ids, times a table."""
    a = Arrays(s)

    def fn(table: Any, ids: Any, weights: Any) -> Any:
        return (jax.nn.one_hot(ids, s.rows) * weights[..., None]).sum(1) @ table

    return fn, (a.table(), a.padded(s.batch, s.length), a.floats(s.batch, s.length, high=1.0))


def multi_hot_masked(s: Size) -> Made:
    """A multi-hot vector of the ids that are there, by a mask, times a table."""
    a = Arrays(s)

    def fn(table: Any, ids: Any, mask: Any) -> Any:
        return (jax.nn.one_hot(ids, s.rows) * mask[..., None]).sum(1) @ table

    ids = a.ids(s.batch, s.length)
    return fn, (a.table(), ids, ids % 3 > 0)


def bcoo(s: Size) -> Made:
    """A sparse matrix of weights (coordinates) times a table."""
    a = Arrays(s)

    def fn(table: Any, weights: Any, where: Any) -> Any:
        return sparse.BCOO((weights, where), shape=(s.batch, s.rows)) @ table

    n = s.batch * s.length
    bags = np.repeat(np.arange(s.batch, dtype=np.int32), s.length)
    return fn, (a.table(), a.floats(n, high=1.0), np.stack([bags, a.ids(n)], -1))


def bcsr(s: Size) -> Made:
    """A sparse matrix of weights (compressed rows) times a table."""
    a = Arrays(s)

    def fn(table: Any, weights: Any, ids: Any, splits: Any) -> Any:
        return sparse.BCSR((weights, ids, splits), shape=(s.batch, s.rows)) @ table

    n = s.batch * s.length
    splits = np.arange(0, n + 1, s.length, dtype=np.int32)
    return fn, (a.table(), a.floats(n, high=1.0), a.ids(n), splits)


def segments(s: Size) -> Made:
    """Jagged bags by segment ids, as sums and maxima."""
    a = Arrays(s)

    def fn(table: Any, ids: Any, bags: Any) -> Any:
        rows = jnp.take(table, ids, axis=0)
        return jax.ops.segment_sum(rows, bags, s.batch), jax.ops.segment_max(rows, bags, s.batch)

    n = s.batch * s.length
    return fn, (a.table(), a.ids(n), np.sort(a.ids(n, rows=s.batch)))


def lengths(s: Size) -> Made:
    """Jagged bags by their lengths."""
    a = Arrays(s)

    def fn(table: Any, ids: Any, counts: Any) -> Any:
        bags = jnp.repeat(jnp.arange(s.batch), counts, total_repeat_length=ids.shape[0])
        return jax.ops.segment_sum(table[ids], bags, s.batch)

    counts = np.full(s.batch, s.length, np.int32)
    counts[::2] -= 1
    counts[1::2] += 1
    return fn, (a.table(), a.ids(int(counts.sum())), counts)


def weighted(s: Size) -> Made:
    """A weight an id, by einsum."""
    a = Arrays(s)

    def fn(table: Any, ids: Any, weights: Any) -> Any:
        return jnp.einsum("bld,bl->bd", table[ids], weights)

    return fn, (a.table(), a.ids(s.batch, s.length), a.floats(s.batch, s.length, high=1.0))


def square_root(s: Size) -> Made:
    """Weighted, over the root of the sum of squared weights."""
    a = Arrays(s)

    def fn(table: Any, ids: Any, weights: Any) -> Any:
        total = (table[ids] * weights[..., None]).sum(1)
        return total / jnp.sqrt((weights**2).sum(1, keepdims=True))

    return fn, (a.table(), a.ids(s.batch, s.length), a.floats(s.batch, s.length, low=0.1, high=1.0))


def masked_max(s: Size) -> Made:
    """The largest of each feature over the ids that are there."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        rows = jnp.where((ids >= 0)[..., None], table[jnp.maximum(ids, 0)], -jnp.inf)
        return rows.max(1)

    return fn, (a.table(), a.padded(s.batch, s.length))


def every_field_a_bag(s: Size) -> Made:
    """A padded bag for each field, each with a table of its own."""
    a = Arrays(s)

    def fn(tables: Any, ids: Any) -> Any:
        return jnp.concatenate([_maximum(t, ids[:, k]) for k, t in enumerate(tables)], -1)

    fields = min(s.fields, 8)
    ids = np.stack([a.padded(s.batch, s.length) for _ in range(fields)], 1)
    return fn, ([a.table() for _ in range(fields)], ids)


BAGS: dict[str, Idiom] = {
    **{f"mean_{name}": _mean(guard) for name, guard in GUARDS.items()},
    **{
        f.__name__: Idiom(f)
        for f in (
            multi_hot_sum, multi_hot_max, multi_hot_weighted, multi_hot_masked, bcoo, bcsr, segments, lengths, weighted,
            square_root, masked_max, every_field_a_bag,
        )
    },
}  # fmt: skip
