"""Properties of constant arrays that must be proven on every element before a rewrite may rely on
them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .fact import dtype_of

MAX_GRID = 1 << 20
"""The most boundaries of a grid whose index arithmetic finds: the guess is then off by little
enough for the emitted search to repair it by stepping."""


def sorted_ascending(array: np.ndarray[Any, Any]) -> bool:
    """Whether a vector has no NaN and never decreases. False for what is not a vector."""
    if array.ndim != 1:
        return False
    if array.dtype.kind not in "biuf":
        if dtype_of(array.dtype.name).kind == "other":
            return False
        array = array.astype(np.float32)
    if not bool((array[:-1] <= array[1:]).all()):  # NaN among others is such a place
        return False
    return array.size != 1 or not (array.dtype.kind == "f" and bool(np.isnan(array[0])))


def has_subnormals(array: np.ndarray[Any, Any]) -> bool:
    """Whether a float vector holds a denormal number. False for any other dtype."""
    if array.dtype == np.float32:
        size = np.ascontiguousarray(array).view(np.uint32) & np.uint32(0x7FFFFFFF)
        return bool((size - np.uint32(1) < np.uint32(0x7FFFFF)).any())  # 0 wraps round
    t = dtype_of(array.dtype.name)
    if t.kind != "float":
        return False
    wide = array.astype(np.float64)
    return bool(((wide != 0) & (np.abs(wide) < t.tiny)).any())


def uniform_grid(array: np.ndarray[Any, Any]) -> tuple[float, float, int] | None:
    """``(start, step, n)`` when a float vector is exactly ``start + k*step``, k = 0 .. n-1, else
    None.

    Exactly means twice: as real numbers, and as the target computes it, one multiplication and one
    addition each rounded to the array's dtype. Read off the bits, never off decimals (RECom fault
    3). The step is positive; no number involved is denormal, as backends differ in whether those
    are kept; and ``n`` is at most :data:`MAX_GRID`.
    """
    t = dtype_of(array.dtype.name)
    if array.ndim != 1 or t.kind != "float" or not 2 <= array.size <= MAX_GRID:
        return None
    a, b, c = (float(x) for x in array[[0, 1, min(2, array.size - 1)]])
    if array.size > 2 and b - a != c - b:  # as most are not: seen without a look at the others
        return None
    wide = array.astype(np.float64)
    if not bool(np.isfinite(wide).all()):
        return None
    with np.errstate(all="ignore"):
        steps, exact = _difference(wide[1:], wide[:-1])
        start, step, n = float(wide[0]), float(steps[0]), int(array.size)
        # All differences being one number without error, every boundary is start + k*step by
        # induction.
        if not (step >= t.tiny and exact and bool((steps == step).all())):
            return None
        if has_subnormals(array):
            return None
        own = array.dtype.type(step)
        k = np.arange(n)
        counts = k.astype(array.dtype)
        if float(own) != step or not bool((counts.astype(np.float64) == k).all()):
            return None
        again = counts * own + array[0]
    if again.dtype != array.dtype or not bool((again == array).all()):
        return None
    return start, step, n


def _difference(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], bool]:
    """a - b in doubles, and whether every difference is exact (Knuth's error term is 0)."""
    d = a - b
    back = d - a
    error = (a - (d - back)) - (b + back)
    return d, bool((error == 0).all())
