"""What is known about every element of an array, in the array's own dtype.

A fact is a claim that must hold of every element under XLA's semantics, on any backend: float
intervals therefore admit results rounded to the dtype, results kept in a wider type (XLA may), and
denormals flushed to zero (XLA's CPU backend does). NaN is outside the interval and has its own
flag.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Number: TypeAlias = int | float
INF = math.inf


class DType(NamedTuple):
    """A dtype as the rules see it. ``other`` (complex, keys, float8) takes part in no arithmetic
    here."""

    name: str
    kind: Literal["bool", "int", "uint", "float", "other"]
    bits: int
    lo: Number
    hi: Number
    precision: int
    """Significand bits of a float, the hidden one included; 0 for the rest."""
    tiny: float
    """Smallest normal float."""


_FLOATS = {
    "float16": (16, 11, -14),
    "bfloat16": (16, 8, -126),
    "float32": (32, 24, -126),
    "float64": (64, 53, -1022),
}


@cache
def dtype_of(name: str) -> DType:
    """The properties of a dtype by its numpy name."""
    if name == "bool":
        return DType(name, "bool", 1, 0, 1, 0, 0.0)
    if name in _FLOATS:
        bits, precision, emin = _FLOATS[name]
        return DType(name, "float", bits, -INF, INF, precision, math.ldexp(1.0, emin))
    found = re.fullmatch(r"(u?)int(\d+)", name)
    if found is None:
        return DType(name, "other", 0, -INF, INF, 0, 0.0)
    bits = int(found[2])
    if found[1]:
        return DType(name, "uint", bits, 0, (1 << bits) - 1, 0, 0.0)
    return DType(name, "int", bits, -(1 << bits - 1), (1 << bits - 1) - 1, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Fact:
    """Every element is NaN (unless ``nan_free``) or in ``[lo, hi]``, and a whole number if
    ``integral``.

    Infinities count as whole, as ``floor`` leaves them as they are. The bounds are ints for bool
    and integer dtypes, floats otherwise; bool's are 0 and 1. ``integral`` and ``nan_free`` are
    always true of bool and integer dtypes. An array without elements satisfies every fact.
    """

    dtype: str
    lo: Number
    hi: Number
    integral: bool
    nan_free: bool

    @staticmethod
    def top(dtype: str) -> Fact:
        """What is known of an array of which nothing is known."""
        return _top(dtype)

    @staticmethod
    def const(dtype: str, value: Any) -> Fact:
        """Every element is ``value``, which must be one of the dtype's (a float is rounded to it).

        Raises ValueError for an integer that the dtype does not hold.
        """
        t = dtype_of(dtype)
        if t.kind == "bool":
            return _fact(dtype, int(bool(value)), int(bool(value)))
        if t.kind in ("int", "uint"):
            value = int(value)
            if not t.lo <= value <= t.hi:
                raise ValueError(f"{value} is not a value of {dtype}")
            return _fact(dtype, value, value)
        if t.kind == "other":
            return _top(dtype)
        value = round_to(float(value), t)
        if value != value:
            return Fact(dtype, 0.0, 0.0, True, False)
        return Fact(dtype, value, value, is_whole(value), True)

    @staticmethod
    def of_array(array: np.ndarray[Any, Any]) -> Fact:
        """The tightest fact of this array's elements: one pass over it, whatever its size."""
        name = array.dtype.name
        t = dtype_of(name)
        if t.kind == "other":
            return _top(name)
        if array.size == 0:
            return Fact.const(name, 0)
        if t.kind != "float":
            if array.dtype.kind not in "biu":  # the int4 of ml_dtypes
                array = array.astype(np.int64)
            return _fact(name, int(array.min()), int(array.max()))
        if array.dtype.kind != "f":  # the bfloat16 of ml_dtypes
            array = array.astype(np.float32)
        lo = float(array.min())
        nan_free = lo == lo
        if not nan_free:
            array = array[~np.isnan(array)]
            if array.size == 0:
                return Fact(name, 0.0, 0.0, True, False)
            lo = float(array.min())
        whole = bool((np.trunc(array) == array).all())
        return Fact(name, lo, float(array.max()), whole, nan_free)

    @property
    def is_const(self) -> bool:
        """Whether all elements are one known number (0.0 and -0.0 being one)."""
        return self.lo == self.hi and self.nan_free

    def contains(self, value: Any) -> bool:
        """Whether an element may be ``value``."""
        if value != value:
            return not self.nan_free
        return bool(self.lo <= value <= self.hi) and (not self.integral or is_whole(float(value)))

    def join(self, other: Fact) -> Fact:
        """The strongest fact here that both imply. Raises ValueError for two different dtypes."""
        if self.dtype != other.dtype:
            raise ValueError(f"cannot join facts of {self.dtype} and {other.dtype}")
        return Fact(
            self.dtype,
            min(self.lo, other.lo),
            max(self.hi, other.hi),
            self.integral and other.integral,
            self.nan_free and other.nan_free,
        )


def _fact(dtype: str, lo: Number, hi: Number) -> Fact:
    return Fact(dtype, lo, hi, True, True)


@cache
def _top(dtype: str) -> Fact:
    t = dtype_of(dtype)
    exact = t.kind not in ("float", "other")
    return Fact(dtype, t.lo, t.hi, exact, exact)


def is_whole(value: Number) -> bool:
    """Whether a number is whole; infinities are, NaN is not."""
    return (
        isinstance(value, int)
        or math.isinf(value)
        or (value == value and value == math.trunc(value))
    )


def int_fact(t: DType, lo: Number, hi: Number) -> Fact:
    """The fact of exact integer results in [lo, hi] after they wrap into the dtype."""
    low, high, least = int(lo), int(hi), int(t.lo)
    if low >= least and high <= t.hi:
        return Fact(t.name, low, high, True, True)
    turn = (low - least) >> t.bits
    if turn == (high - least) >> t.bits:  # all of it wraps by the same number of turns
        shift = turn << t.bits
        return Fact(t.name, low - shift, high - shift, True, True)
    return _top(t.name)


def round_down(value: float, t: DType) -> float:
    """The greatest number of the float dtype at or below ``value`` (a double)."""
    if t.precision == 53 or value == 0 or math.isinf(value) or value != value:
        return value
    biggest = largest(t)
    if abs(value) >= biggest:
        return biggest if value > 0 else value if value == -biggest else -INF
    unit = max(math.frexp(value)[1], math.frexp(t.tiny)[1]) - t.precision
    return math.ldexp(math.floor(math.ldexp(value, -unit)), unit)


def round_up(value: float, t: DType) -> float:
    """The least number of the float dtype at or above ``value`` (a double)."""
    return -round_down(-value, t)


def round_to(value: float, t: DType) -> float:
    """``value`` rounded to nearest, ties to even, in the float dtype."""
    if t.precision == 53 or value == 0 or math.isinf(value) or value != value:
        return value
    if abs(value) > 2 * largest(t):
        return math.copysign(INF, value)
    unit = max(math.frexp(value)[1], math.frexp(t.tiny)[1]) - t.precision
    out = math.ldexp(round(math.ldexp(value, -unit)), unit)
    return math.copysign(INF, out) if abs(out) > largest(t) else math.copysign(out, value)


@cache
def largest(t: DType) -> float:
    """The greatest finite number of a float dtype."""
    top = -math.frexp(t.tiny)[1] + 3
    return math.ldexp(1.0 - math.ldexp(1.0, -t.precision), top)
