"""Operators on lists. Sizes of results must be known when a program is traced, so a result has a *capacity*: what lies
behind its last row is padding (zeros)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess import words
from recom_jax.preprocess.dense import exact
from recom_jax.preprocess.int64 import Int64
from recom_jax.preprocess.operator import need_at_least, need_number, operator
from recom_jax.preprocess.values import (
    Column,
    Jagged,
    Nullable,
    both,
    put_together,
    take_apart,
)


def lists_of(name: str, x: Any) -> Jagged:
    if not isinstance(x, Jagged):
        raise PreprocessTypeError(f"{name} takes lists (preprocess.Jagged), not a dense column")
    return x


def gather(x: Any, places: jax.Array, there: jax.Array) -> Any:
    """Elements at `places`, zeros where not `there`."""
    values, valid = take_apart(x)

    def read(a: Any) -> jax.Array:
        a = jnp.asarray(a)
        if not a.shape[0]:
            return jnp.zeros((*places.shape, *a.shape[1:]), a.dtype)
        found = a.at[places].get(mode="clip")
        mask = there.reshape((*there.shape, *(1,) * (found.ndim - there.ndim)))
        return jnp.where(mask, found, jnp.zeros((), a.dtype))

    if isinstance(values, Int64):
        made: Any = Int64(read(values.hi), read(values.lo), unsigned=values.unsigned)
    else:
        made = read(values)
    return put_together(made, None if valid is None else read(valid))


def splits_of(lengths: jax.Array) -> jax.Array:
    """(B + 1,) int32 from (B,) lengths."""
    ends = jnp.cumsum(lengths.astype(jnp.int32), dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])


def live_lengths(x: Jagged) -> jax.Array:
    """(B,) int32 lengths; a null list has none."""
    lengths = x.lengths.astype(jnp.int32)
    return lengths if x.valid is None else jnp.where(jnp.asarray(x.valid), lengths, 0)


def rows_of(splits: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The row of each of `capacity` places (int32), and whether it lies in one."""
    rows = splits.shape[0] - 1
    lengths = jnp.concatenate([jnp.diff(splits), capacity - splits[-1:]])
    row = jnp.repeat(jnp.arange(rows + 1, dtype=jnp.int32), lengths, total_repeat_length=capacity)
    return jnp.minimum(row, max(rows - 1, 0)), row < rows


@operator(check=lambda n: need_at_least("firstx", 0, n=n))
def firstx(x: Column, n: int) -> Column:
    """The first ``min(n, len)`` values of each list; null lists stay null.

    Returns:
      `Jagged` of capacity ``min(capacity, B * n)``.
    """
    x = lists_of("firstx", x)
    splits = splits_of(jnp.minimum(live_lengths(x), n))
    capacity = min(x.capacity, x.rows * n)
    row, there = rows_of(splits, capacity)
    places = jnp.asarray(x.row_splits)[row] + jnp.arange(capacity, dtype=jnp.int32) - splits[row]
    return Jagged(gather(x.values, places, there), splits, x.valid)


@operator(check=lambda n: need_at_least("ngram", 1, n=n))
def ngram(x: Column, n: int) -> Column:
    """All windows of ``m = min(n, len)`` values of each list, one after the other: ``(len - m + 1) * m`` values.

    Returns:
      `Jagged` of capacity ``capacity * n``; null lists stay null.

    Raises:
      PreprocessError: the result would have 2**31 values or more.
    """
    x = lists_of("ngram", x)
    capacity = x.capacity * n
    if capacity >= 1 << 31:
        raise PreprocessError(
            f"ngram: {x.capacity} values in windows of {n} are too many for 32-bit row splits"
        )
    lengths = live_lengths(x)
    width = jnp.minimum(lengths, n)
    splits = splits_of((lengths - width + 1) * width)
    row, there = rows_of(splits, capacity)
    at = jnp.arange(capacity, dtype=jnp.int32) - splits[row]
    m = jnp.maximum(width[row] if x.rows else jnp.zeros_like(row), 1)
    places = jnp.asarray(x.row_splits)[row] + at // m + at % m
    return Jagged(gather(x.values, places, there), splits, x.valid)


@operator()
def fill_null_lists(x: Column) -> Column:
    """Null lists become empty lists."""
    x = lists_of("fill_null_lists", x)
    if x.valid is None:
        return x
    splits = splits_of(live_lengths(x))
    row, there = rows_of(splits, x.capacity)
    places = jnp.asarray(x.row_splits)[row] + jnp.arange(x.capacity, dtype=jnp.int32) - splits[row]
    return Jagged(gather(x.values, places, there), splits)


def _check_pad(n: Any, value: Any) -> None:
    need_at_least("pad", 0, n=n)
    need_number("pad", value=value)


@operator(check=_check_pad)
def pad(x: Column, n: int, value: float = -1) -> Column:
    """Lists as rows of `n`: the first n values, `value` behind them, in null elements and in null lists.

    Returns:
      (B, n) of the elements' dtype (`Int64` for such elements). As ids, -1 is what models take for "no id"; in a column
      of unsigned 64-bit integers it has all bits set.

    Raises:
      PreprocessError: `value` is no number of the elements' integer type.
    """
    x = lists_of("pad", x)
    at = jnp.arange(n, dtype=jnp.int32)
    there = at[None, :] < live_lengths(x)[:, None]
    places = jnp.asarray(x.row_splits)[:-1, None] + at[None, :]
    found, valid = take_apart(gather(x.values, places, there))
    keep = there if valid is None else there & valid
    if isinstance(found, Int64):
        number = words.constant(pad_number(value, found.dtype))
        return Int64(
            jnp.where(keep, found.hi, number.hi),
            jnp.where(keep, found.lo, number.lo),
            unsigned=found.unsigned,
        )
    behind = pad_number(value, found.dtype) if is_whole(found) else value
    return jnp.where(keep, found, jnp.asarray(behind, found.dtype))


def is_whole(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.integer))


def pad_number(value: float, dtype: Any) -> int:
    """What `pad` puts into a column of this integer type."""
    if value == -1 and np.dtype(dtype) == np.uint64:
        return (1 << 64) - 1
    return exact("pad", value, dtype)


@operator()
def to_lists(x: Column) -> Column:
    """A dense column (B,) as lists of one element; a null as the empty list (of capacity B)."""
    if isinstance(x, Jagged):
        return x
    values, valid = take_apart(x)
    rows = int(np.shape(getattr(values, "lo", values))[0])
    if valid is None:
        return Jagged(values, jnp.arange(rows + 1, dtype=jnp.int32))
    splits = splits_of(jnp.asarray(valid).astype(jnp.int32))
    row, there = rows_of(splits, rows)
    return Jagged(gather(values, row, there), splits)


def row_validity(*columns: Jagged) -> Any:
    """(B,) bool, or None: a row of several list columns is null if any list of it is null or has a null element."""
    valid: Any = None
    for x in columns:
        valid = both(valid, x.valid)
        if isinstance(x.values, Nullable):
            bad = jax.ops.segment_sum(
                (~jnp.asarray(x.values.valid)).astype(jnp.int32), x.segment_ids(), x.rows
            )
            valid = both(valid, bad == 0)
    return valid


__all__ = ["fill_null_lists", "firstx", "ngram", "pad", "to_lists"]
