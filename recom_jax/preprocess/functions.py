"""Operators on numbers: logarithms and powers, classes, lookups, statistics. Null in, null out."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess import words
from recom_jax.preprocess.dense import exact
from recom_jax.preprocess.int64 import Int64
from recom_jax.preprocess.operator import need_at_least, need_integer, need_number, operator
from recom_jax.preprocess.values import (
    Column,
    Jagged,
    as_float,
    map_values,
    put_together,
    take_apart,
    words_of,
)

# ---- functions -----------------------------------------------------------------------------------------------


def _check_logit(eps: Any) -> None:
    if eps is None:
        return
    need_number("logit", eps=eps)
    if not 0 <= eps <= 0.5:
        raise PreprocessError(f"logit: eps lies in [0, 0.5], not {eps}")


@operator(check=_check_logit)
def logit(x: Column, eps: float | None = None) -> Column:
    """``ln(p / (1 - p))`` of ``p = clip(x, eps, 1 - eps)``, in the column's float dtype (integers: float32).

    Computed from the smaller of p and 1 - p (their difference from 1/2 is exact), so that it is right to a few units
    in the last place near 1/2 as well. Without `eps`, numbers outside [0, 1] give NaN. NaN stays NaN.
    """

    def of(v: Any) -> jax.Array:
        kept = as_float(v)
        p = _wide(kept)
        if eps is not None:
            one = p.dtype.type(1)
            p = jnp.clip(p, p.dtype.type(eps), one - p.dtype.type(eps))
        if not eps:
            p = jnp.where(p == 0, 0, p)  # -0 too
        low = p < 0.5
        small = jnp.where(low, p, 1 - p)
        size = jnp.log1p((1 - 2 * small) / small)
        return jnp.where(low, -size, size).astype(kept.dtype)

    return map_values(x, of)


@operator(check=lambda lmbda: need_number("boxcox", lmbda=lmbda))
def boxcox(x: Column, lmbda: float) -> Column:
    """``(x ** lmbda - 1) / lmbda`` where x > 0 (``ln x`` for lmbda 0), x itself elsewhere; NaN stays NaN.

    The column's float dtype (integers: float32). Near 1 it goes through the exponential series, which keeps the digits
    that the difference would lose.
    """
    power = float(lmbda)

    def of(v: Any) -> jax.Array:
        kept, v = as_float(v), _wide(as_float(v))
        positive = v > 0
        base = jnp.where(positive, v, 1)
        log = jnp.log(base)
        if power == 0:
            made = log
        else:
            number = v.dtype.type(power)
            near = jnp.abs(number * log) < 0.4
            made = jnp.where(near, _expm1_small(number * log), base**number - 1) / number
        return jnp.where(positive, made, v).astype(kept.dtype)

    return map_values(x, of)


def _wide(v: jax.Array) -> jax.Array:
    """16-bit floats as float32: functions are computed there and rounded once."""
    return v if v.dtype.itemsize >= 4 else v.astype(jnp.float32)


def _expm1_small(y: jax.Array) -> jax.Array:
    """``exp(y) - 1`` for small y by its series (XLA's own is off by 5 units in the last place)."""
    rest = jnp.full_like(y, 1 / math.factorial(13))
    for k in range(12, 1, -1):
        rest = rest * y + y.dtype.type(1 / math.factorial(k))
    return y + y * y * rest


@operator()
def log1p(x: Column) -> Column:
    """``ln(1 + x)``; below -1 NaN, at -1 minus infinity. The column's float dtype (integers: float32)."""
    return map_values(x, lambda v: jnp.log1p(_wide(as_float(v))).astype(as_float(v).dtype))


def _check_onehot(low: Any, high: Any, n: Any) -> None:
    need_at_least("onehot", 1, n=n)
    need_number("onehot", low=low, high=high)
    if not low < high or not math.isfinite(high - low):
        raise PreprocessError(f"onehot: low is {low} and high {high}; low must be below high")


@operator(check=_check_onehot)
def onehot_class(x: Column, low: float, high: float, n: int) -> Column:
    """The class ``int((x - low) / ((high - low) / n))`` in float32 arithmetic, int32; out of range (NaN too): 0."""
    starts = _class_starts(float(low), float(high), n)

    def of(v: Any) -> jax.Array:
        v = as_float(v).astype(jnp.float32)
        found = jnp.searchsorted(starts, v, side="right").astype(jnp.int32)
        return jnp.where((found >= n) | (v != v), 0, found)

    return map_values(x, of)


@operator(check=_check_onehot)
def onehot(x: Column, low: float, high: float, n: int) -> Column:
    """Classes of equal width, one-hot: 1 at class ``int((x - low) / ((high - low) / n))``, which is 0 out of range.

    Args:
      x: numbers, dense (B,) or lists.
      low, high: the range; n: how many classes it is cut into.

    Returns:
      float32 (B, n) (`Jagged` of (capacity, n) for lists); nulls stay null, and are rows of zeros. `onehot_class` gives
      the classes themselves.
    """
    made = onehot_class(x, low, high, n)

    def spread(part: Any) -> Any:
        values, valid = take_apart(part)
        hot = values[..., None] == jnp.arange(n, dtype=jnp.int32)
        if valid is not None:
            hot = hot & jnp.asarray(valid)[..., None]
        return put_together(hot.astype(jnp.float32), valid)

    return made.replace(spread(made.values)) if isinstance(made, Jagged) else spread(made)


@functools.lru_cache(maxsize=1024)
def _class_starts(low: float, high: float, n: int) -> np.ndarray:
    """The least float32 of each class 1 to n: the formula never descends, so bisection over the floats finds them."""
    one = np.float32
    step = one((high - low) / n)
    if not step > 0:
        raise PreprocessError("onehot: classes are too narrow for float32")

    def to_float(k: np.ndarray) -> np.ndarray:  # the k-th float from 0, k signed: order is kept
        bits = np.where(k < 0, np.int64(1 << 31) - k, k).astype(np.uint32)
        return bits.view(np.float32)

    end = int(np.array(np.inf, np.float32).view(np.uint32))
    wanted = np.arange(1, n + 1, dtype=np.int64)
    a, b = np.full(n, -end, np.int64), np.full(n, end, np.int64)  # class(a) < wanted <= class(b)
    with np.errstate(all="ignore"):
        while (b - a > 1).any():
            m = (a + b) // 2
            reached = (to_float(m) - one(low)) / step >= wanted
            a, b = np.where(reached, a, m), np.where(reached, m, b)
    starts = to_float(b)
    # Comparisons may take subnormal numbers for 0: such a class starts there.
    return np.where(np.abs(starts) < np.finfo(np.float32).tiny, one(0), starts)


def _check_mapid(default: Any) -> None:
    need_integer("mapid", default=default)


@operator(columns=2, check=_check_mapid)
def mapid(ids: Column, mapping: Any, default: int = 0) -> Column:
    """``mapping[id]``, or `default` for ids outside [0, len(mapping)) on either side.

    Args:
      ids: integers, dense (B,) or lists.
      mapping: (n,) numbers: an array or a sequence; may be traced.
      default: a number of the mapping's dtype.

    Returns:
      Elements of the mapping's dtype; nulls stay null.
    """
    table, unset = take_apart(mapping)
    if (
        unset is not None
        or isinstance(mapping, Jagged)
        or len(np.shape(getattr(table, "lo", table))) != 1
    ):
        raise PreprocessTypeError("mapid: mapping is one number for each id, without nulls")
    size = int(np.shape(getattr(table, "lo", table))[0])
    if size >= 1 << 31:
        raise PreprocessError(f"mapid: a mapping of {size} ids; at most 2**31 - 1 fit")

    def of(v: Any) -> Any:
        w = words_of(v, "mapid")
        inside = (w.hi == 0) & (w.lo < words.u32(size))
        rows = jnp.where(inside, w.lo, 0).astype(jnp.int32)
        if isinstance(table, Int64):
            if not size:
                return Int64(np.full(v.shape, default, np.int64))
            found = Int64(_read(table.hi, rows), _read(table.lo, rows), unsigned=table.unsigned)
            number = words.constant(exact("mapid", default, table.dtype))
            return Int64(*words.select(inside, found.words, number), unsigned=table.unsigned)
        dtype = jnp.asarray(table).dtype
        fill = dtype.type(
            exact("mapid", default, dtype) if jnp.issubdtype(dtype, jnp.integer) else default
        )
        if not size:
            return jnp.full(w.lo.shape, fill)
        return jnp.where(inside, _read(table, rows), fill)

    return map_values(ids, of)


def _read(table: Any, rows: jax.Array) -> jax.Array:
    """``table[rows]`` as rows of a table of width 1, which the fusion compiler knows as a lookup."""
    return jnp.take(jnp.reshape(table, (-1, 1)), rows, axis=0, mode="clip")[:, 0]


# ---- statistics of the column --------------------------------------------------------------------------------


def _statistics(x: Column, name: str) -> tuple[jax.Array, Any]:
    if isinstance(x, Jagged):
        raise PreprocessTypeError(f"{name} takes a dense column, not lists")
    values, valid = take_apart(x)
    return as_float(values), valid


@operator()
def scale_to_0_1(x: Column) -> Column:
    """``(x - min) / (max - min)`` with the column's own smallest and largest number; a constant column: ``sigmoid(x)``.

    Nulls don't count and stay null; NaN makes the whole column NaN. The statistics are those of the batch.
    """
    v, valid = _statistics(x, "scale_to_0_1")
    there = jnp.ones(v.shape, bool) if valid is None else jnp.asarray(valid)
    low = jnp.min(jnp.where(there, v, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(there, v, -jnp.inf), initial=-jnp.inf)
    scaled = (v - low) / jnp.where(low == high, 1, high - low)
    return put_together(jnp.where(low == high, jax.nn.sigmoid(v), scaled).astype(v.dtype), valid)


@operator(check=lambda ddof: need_at_least("z_score", 0, ddof=ddof))
def z_score(x: Column, ddof: int = 0) -> Column:
    """``(x - mean) / std`` with the column's own mean and standard deviation; a constant column is unchanged.

    Args:
      ddof: 0: the deviation of the population; 1: of a sample.

    Nulls don't count and stay null; NaN makes the whole column NaN. The statistics are those of the batch.
    """
    v, valid = _statistics(x, "z_score")
    there = jnp.ones(v.shape, bool) if valid is None else jnp.asarray(valid)
    count = jnp.sum(there)
    low = jnp.min(jnp.where(there, v, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(there, v, -jnp.inf), initial=-jnp.inf)
    mean = jnp.sum(jnp.where(there, v, 0)) / jnp.maximum(count, 1)
    spread = jnp.sum(jnp.where(there, (v - mean) ** 2, 0)) / jnp.maximum(count - ddof, 1)
    same = low >= high  # no number, or one
    scaled = (v - mean) / jnp.sqrt(jnp.where(same, 1, spread))
    return put_together(jnp.where(same, v, scaled).astype(v.dtype), valid)


__all__ = ["boxcox", "log1p", "logit", "mapid", "onehot", "onehot_class", "scale_to_0_1", "z_score"]
