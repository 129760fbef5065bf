"""Operators that work on each element by itself. Lists take them element by element; null in, null out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess import words
from recom_jax.preprocess.int64 import Int64
from recom_jax.preprocess.operator import need_number, operator
from recom_jax.preprocess.values import (
    Column,
    Jagged,
    is_integer,
    map_values,
    take_apart,
)

Borders = Any  # a sequence of numbers; a tuple once checked

# ---- bucketize -----------------------------------------------------------------------------------------------


def _check_bucketize(borders: Borders, right: Any) -> None:
    if not isinstance(borders, tuple) or not borders:
        raise PreprocessError("bucketize: borders is a sequence of at least one number")
    for b in borders:
        need_number("bucketize", borders=b)
        if math.isnan(b):
            raise PreprocessError("bucketize: a border is NaN")
    if any(a > b for a, b in itertools.pairwise(borders)):
        raise PreprocessError("bucketize: borders are not sorted; they must not descend")
    if right and any(a == b for a, b in zip(borders, borders[2:], strict=False)):
        raise PreprocessError("bucketize: a border stands more than twice")


@operator(check=_check_bucketize)
def bucketize(x: Column, borders: Borders, right: bool = True) -> Column:
    """The bin of each number among sorted borders.

    Args:
      x: numbers, dense (B,) or lists.
      borders: n numbers that never descend. They are compared exactly: with floats as the nearest number of the
        column's dtype that decides alike, with integers as integers. (XLA takes subnormal floats for 0.)
      right: True (TorchArrow): bins (lo, hi]; a border may stand twice, and equality then has a bin of its own.
        False (``numpy.digitize``, Keras, NVTabular): bins [lo, hi).

    Returns:
      int32 in [0, n]; nulls stay null. NaN is in bin 0 with ``right=True`` (as in TorchArrow's binary search), and in
      bin n with ``right=False`` (as in numpy).

    Raises:
      PreprocessError: no borders, borders that descend or hold NaN, or (``right=True``) one more than twice.
    """

    def bins(v: Any) -> Any:
        if isinstance(v, Int64):
            return _bins_of_words(v, borders, right)
        v = jnp.asarray(v)
        if is_integer(v):
            return _bins_of_integers(v, borders, right)
        return _bins_of_floats(v, borders, right)

    return map_values(x, bins)


def _twice(borders: tuple[float, ...]) -> list[float]:
    return [a for a, b in itertools.pairwise(borders) if a == b]


def _rounded(borders: Any, dtype: Any, up: bool) -> np.ndarray:
    """The least numbers of `dtype` that are >= the borders (`up`), or the largest <= them."""
    kind = np.dtype(dtype)
    made = []
    for b in borders:
        with np.errstate(over="ignore"):
            near = kind.type(b)
        if up and float(near) < b:
            near = np.nextafter(near, kind.type(np.inf))
        if not up and float(near) > b:
            near = np.nextafter(near, kind.type(-np.inf))
        made.append(near)
    return np.array(made, kind)


def _bins_of_floats(v: jax.Array, borders: tuple[float, ...], right: bool) -> jax.Array:
    if v.dtype not in (jnp.float32, jnp.float64):
        v = v.astype(jnp.float32)  # exact
    if not right:  # b <= v, for the least b of the dtype that is no smaller than the border
        found = jnp.searchsorted(_rounded(borders, v.dtype, up=True), v, side="right")
        return found.astype(jnp.int32)
    below = _rounded(borders, v.dtype, up=False)  # border < v if and only if below < v
    found = jnp.searchsorted(below, v, side="left").astype(jnp.int32)
    for b in _twice(borders):
        if float(v.dtype.type(b)) == b:
            found = found + (v == v.dtype.type(b)).astype(jnp.int32)
    return jnp.where(v != v, 0, found)


def _whole_borders(borders: tuple[float, ...], right: bool) -> list[int | None]:
    """Integers c with: border < v (or <=, unless `right`) if and only if c <= v. None: never (infinity)."""
    made: list[int | None] = []
    for b in borders:
        if b == math.inf:
            made.append(None)
        elif b == -math.inf:
            made.append(-(1 << 70))
        else:
            made.append(math.floor(b) + 1 if right else math.ceil(b))
    return made


def _bins_of_integers(v: jax.Array, borders: tuple[float, ...], right: bool) -> jax.Array:
    if v.dtype == jnp.bool_:
        v = v.astype(jnp.int32)
    info = np.iinfo(v.dtype)
    least, most = int(info.min), int(info.max)
    whole = [c for c in _whole_borders(borders, right) if c is not None and c <= most]
    always = sum(c <= least for c in whole)
    rest = np.array([c for c in whole if c > least], v.dtype)
    found: jax.Array = jnp.zeros(v.shape, jnp.int32)
    if len(rest):
        found = jnp.searchsorted(rest, v, side="right").astype(jnp.int32)
    for b in _twice(borders) if right else []:
        if b == b // 1 and least <= b <= most:
            found = found + (v == v.dtype.type(int(b))).astype(jnp.int32)
    return jnp.add(found, jnp.int32(always))


def _bins_of_words(v: Int64, borders: tuple[float, ...], right: bool) -> jax.Array:
    low = 0 if v.unsigned else -(1 << 63)
    high = (1 << 64) - 1 if v.unsigned else (1 << 63) - 1
    less = words.less if v.unsigned else words.less_signed
    found: jax.Array = jnp.zeros(v.shape, jnp.int32)
    always = 0
    for c in _whole_borders(borders, right):
        if c is None or c > high:
            continue
        if c <= low:
            always += 1
        else:
            found = found + (~less(v.words, words.constant(c))).astype(jnp.int32)
    for b in _twice(borders) if right else []:
        if math.isfinite(b) and b == b // 1 and low <= b <= high:
            found = found + words.equal(v.words, words.constant(int(b))).astype(jnp.int32)
    return jnp.add(found, jnp.int32(always))


# ---- nulls, ranges, types ------------------------------------------------------------------------------------


def _check_clamp(lo: Any, hi: Any) -> None:
    need_number("clamp", lo=lo, hi=hi)
    if not lo <= hi:
        raise PreprocessError(f"clamp: lo is {lo} and hi {hi}; lo must not exceed hi")


@operator(check=_check_clamp)
def clamp(x: Column, lo: float, hi: float) -> Column:
    """``min(max(x, lo), hi)`` of the column's own dtype; NaN stays NaN.

    Raises:
      PreprocessError: ``lo > hi`` (or NaN), or a bound that an integer column cannot have.
    """

    def clamped(v: Any) -> Any:
        if isinstance(v, Int64):
            low, high = (_bound("clamp", b, v.dtype) for b in (lo, hi))
            less = words.less if v.unsigned else words.less_signed
            w = v.words
            w = words.select(less(w, words.constant(low)), words.constant(low), w)
            w = words.select(less(words.constant(high), w), words.constant(high), w)
            return Int64(*w, unsigned=v.unsigned)
        v = jnp.asarray(v)
        if is_integer(v):
            low, high = (_bound("clamp", b, v.dtype) for b in (lo, hi))
            return jnp.clip(v, v.dtype.type(low), v.dtype.type(high))
        return jnp.clip(v, lo, hi)

    return map_values(x, clamped)


def _bound(name: str, value: float, dtype: Any) -> int:
    """A bound of an integer column, inside its range."""
    if value in (math.inf, -math.inf):
        value = 1 << 70 if value > 0 else -(1 << 70)
    if value != int(value):
        raise PreprocessError(
            f"{name}: {value} is no bound of a column of {dtype}; cast the column first"
        )
    if dtype == np.bool_:
        raise PreprocessTypeError(f"{name} takes numbers, not bool; cast first")
    info = np.iinfo(dtype)
    return min(max(int(value), int(info.min)), int(info.max))


def _check_fill(value: Any, nan: Any) -> None:
    if not isinstance(value, bool):
        need_number("fill_null", value=value)


@operator(check=_check_fill)
def fill_null(x: Column, value: float, nan: bool = False) -> Column:
    """Replaces nulls: null elements of a dense column or of lists. The result has no null elements.

    Args:
      value: a number of the column's dtype.
      nan: replace NaN as well.

    A list that is null itself stays null (its elements don't exist); `fill_null_lists` makes it a list.

    Raises:
      PreprocessError: `value` is no number of the column's dtype (1.5 in a column of integers, 300 in int8).
    """
    if isinstance(x, Jagged):
        return x.replace(_filled(x.values, value, nan))
    return _filled(x, value, nan)


def _filled(x: Any, value: float, nan: bool) -> Any:
    values, valid = take_apart(x)
    if isinstance(values, Int64):
        number = words.constant(exact("fill_null", value, values.dtype))
        if valid is None:
            return values
        w = words.select(valid, values.words, number)
        return Int64(*w, unsigned=values.unsigned)
    values = jnp.asarray(values)
    fill: Any = value
    if jnp.issubdtype(values.dtype, jnp.integer):
        fill = values.dtype.type(exact("fill_null", value, values.dtype))
    if valid is not None:
        there = jnp.reshape(
            jnp.asarray(valid), (*np.shape(valid), *(1,) * (values.ndim - np.ndim(valid)))
        )
        values = jnp.where(there, values, fill).astype(values.dtype)
    if nan and not is_integer(values):
        values = jnp.where(jnp.isnan(values), fill, values).astype(values.dtype)
    return values


def exact(name: str, value: float, dtype: Any) -> int:
    info = np.iinfo(dtype)
    if not math.isfinite(value) or value != int(value) or not info.min <= value <= info.max:
        raise PreprocessError(f"{name}: {value} is not a number of the column's type {dtype}")
    return int(value)


def _check_cast(dtype: Any) -> None:
    try:
        kind = np.dtype(dtype)
    except TypeError as why:
        raise PreprocessTypeError(f"cast: {dtype!r} is no dtype") from why
    if kind.kind not in "biuf" and str(kind) != "bfloat16":
        raise PreprocessTypeError(f"cast: a column cannot be made of {kind}")


@operator(check=_check_cast)
def cast(x: Column, dtype: Any) -> Column:
    """Another dtype. Floats to integers round towards zero, stop at the ends of the range, and NaN is 0; integers to
    integers wrap; anything to bool is ``x != 0``. 64-bit integers are `Int64` where JAX lacks them."""
    wanted = np.dtype(dtype)

    def converted(v: Any) -> Any:
        if isinstance(v, Int64):
            return v.astype(wanted)
        v = jnp.asarray(v)
        if wanted == np.bool_:
            return v != 0
        wide = wanted.kind in "iu" and wanted.itemsize == 8
        if wide and jax.dtypes.canonicalize_dtype(wanted) != wanted:
            if not is_integer(v):
                raise PreprocessTypeError(
                    "cast: floats become 64-bit integers with jax_enable_x64 only; cast to int32"
                )
            return Int64(*words.of_array(v), unsigned=wanted.kind == "u")
        kind = jax.dtypes.canonicalize_dtype(wanted)
        if not is_integer(v) and kind.kind in "iu":
            # Narrow types saturate, too, through a wider one.
            v = v if v.dtype.itemsize >= 4 else v.astype(jnp.float32)  # exact; holds all ends
            info = np.iinfo(kind)
            whole = jnp.trunc(jnp.where(jnp.isnan(v), 0, v))
            made = jnp.clip(whole, float(info.min), _largest_below(v.dtype, int(info.max)))
            most = kind.type(info.max)
            return jnp.where(whole > float(info.max), most, made.astype(kind)).astype(kind)
        return v.astype(kind)

    return map_values(x, converted)


def _largest_below(dtype: Any, most: int) -> float:
    """The largest number of float32 or float64 that is at most `most`."""
    near = np.dtype(dtype).type(most)
    return float(near if int(near) <= most else np.nextafter(near, np.dtype(dtype).type(0)))


__all__ = ["bucketize", "cast", "clamp", "fill_null"]
