"""How facts of floats go through XLA's operations, soundly under rounding, NaN and flushed
denormals.

Assumes that add, subtract, multiply, divide and square root are within the IEEE rounding of the
exact result (or the exact result itself, as in a fused multiply-add or a wider intermediate).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from .fact import INF, DType, Fact, dtype_of, is_whole, round_down, round_up

_Op = Callable[[float, float], float]
_EXACT = float(1 << 53)


def flushed(t: DType, f: Fact) -> Fact:
    """``f``, admitting 0 where a denormal is admitted: what an operation that flushes may read or
    write."""
    lo = 0.0 if 0 < f.lo < t.tiny else f.lo
    hi = 0.0 if -t.tiny < f.hi < 0 else f.hi
    return f if lo == f.lo and hi == f.hi else Fact(t.name, lo, hi, f.integral, f.nan_free)


def result(t: DType, lo: float, hi: float, integral: bool, nan_free: bool) -> Fact:
    """The fact of results between two doubles that bound the exact ones, however they are
    rounded."""
    return flushed(t, Fact(t.name, round_down(lo, t), round_up(hi, t), integral, nan_free))


def infinite(f: Fact) -> bool:
    """Whether an element may be infinite."""
    return f.lo == -INF or f.hi == INF


def _has_zero(f: Fact) -> bool:
    return f.lo <= 0 <= f.hi


def _between(found: list[tuple[float, bool]]) -> tuple[float, float]:
    """The least and greatest of (double, was it exact), each an ulp wider where it was not."""
    lo = min(v if exact else math.nextafter(v, -INF) for v, exact in found)
    hi = max(v if exact else math.nextafter(v, INF) for v, exact in found)
    return lo, hi


def _sum(x: float, y: float) -> tuple[float, bool]:
    s = x + y
    if math.isinf(s):
        return s, math.isinf(x) or math.isinf(y)
    back = s - x
    return s, (x - (s - back)) + (y - back) == 0


def _product(x: float, y: float) -> tuple[float, bool]:
    if x == 0 or y == 0:
        return 0.0, True  # also where the other is infinite: the limit of what is not NaN
    p = x * y
    if math.isinf(p):
        return p, math.isinf(x) or math.isinf(y)
    if abs(p) < _EXACT and is_whole(x) and is_whole(y):
        return p, True
    return p, Fraction(x) * Fraction(y) == Fraction(p)


def _quotient(x: float, y: float) -> tuple[float, bool]:
    q = x / y
    if math.isinf(q) or math.isinf(x) or math.isinf(y):
        return q, math.isinf(x) or math.isinf(y)
    return q, Fraction(q) * Fraction(y) == Fraction(x)


def add(t: DType, a: Fact, b: Fact) -> Fact:
    """a + b; NaN where opposite infinities meet."""
    a, b = flushed(t, a), flushed(t, b)
    clash = (a.lo == -INF and b.hi == INF) or (a.hi == INF and b.lo == -INF)
    ends = [_sum(a.lo, b.lo), _sum(a.hi, b.hi)]
    if any(v != v for v, _ in ends):
        return Fact(t.name, -INF, INF, a.integral and b.integral, False)
    lo, hi = _between(ends[:1])[0], _between(ends[1:])[1]
    return result(t, lo, hi, a.integral and b.integral, a.nan_free and b.nan_free and not clash)


def sub(t: DType, a: Fact, b: Fact) -> Fact:
    """a - b; NaN where equal infinities meet."""
    return add(t, a, neg(t, b))


def mul(t: DType, a: Fact, b: Fact) -> Fact:
    """a * b; NaN where 0 meets an infinity."""
    a, b = flushed(t, a), flushed(t, b)
    clash = (_has_zero(a) and infinite(b)) or (_has_zero(b) and infinite(a))
    lo, hi = _between([_product(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)])
    return result(t, lo, hi, a.integral and b.integral, a.nan_free and b.nan_free and not clash)


def div(t: DType, a: Fact, b: Fact) -> Fact:
    """a / b; NaN for 0/0 and inf/inf; a divisor that may be 0 (of either sign) leaves no bound."""
    a, b = flushed(t, a), flushed(t, b)
    both = infinite(a) and infinite(b)
    nan_free = a.nan_free and b.nan_free and not both and not (_has_zero(a) and _has_zero(b))
    if both or _has_zero(b):
        return Fact(t.name, -INF, INF, False, nan_free)
    found = [_quotient(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo, hi = _between(found)
    one = a.lo == a.hi and b.lo == b.hi and found[0][1]
    whole = (one and is_whole(found[0][0])) or (a.integral and b.lo == b.hi and abs(b.lo) == 1)
    return result(t, lo, hi, whole, nan_free)


def rem(t: DType, a: Fact, b: Fact) -> Fact:
    """C's fmod: the sign of a; NaN for an infinite a or a zero b."""
    a, b = flushed(t, a), flushed(t, b)
    nan_free = a.nan_free and b.nan_free and not infinite(a) and not _has_zero(b)
    integral = a.integral and b.integral
    if not _has_zero(b):
        least = min(abs(b.lo), abs(b.hi))
        if -least < a.lo and a.hi < least:
            return Fact(t.name, a.lo, a.hi, a.integral, nan_free)
    most = max(abs(b.lo), abs(b.hi))
    if integral and 1 <= most < _EXACT:
        most -= 1
    lo = max(a.lo, -most) if a.lo < 0 else 0.0
    hi = min(a.hi, most) if a.hi > 0 else 0.0
    return result(t, lo, hi, integral, nan_free)


def maximum(t: DType, a: Fact, b: Fact) -> Fact:
    """The greater; NaN if either is."""
    nan_free = a.nan_free and b.nan_free
    f = Fact(t.name, max(a.lo, b.lo), max(a.hi, b.hi), a.integral and b.integral, nan_free)
    return flushed(t, f)


def minimum(t: DType, a: Fact, b: Fact) -> Fact:
    """The lesser; NaN if either is."""
    nan_free = a.nan_free and b.nan_free
    f = Fact(t.name, min(a.lo, b.lo), min(a.hi, b.hi), a.integral and b.integral, nan_free)
    return flushed(t, f)


def neg(t: DType, a: Fact) -> Fact:
    """-a."""
    a = flushed(t, a)
    return Fact(t.name, -a.hi, -a.lo, a.integral, a.nan_free)


def absolute(t: DType, a: Fact) -> Fact:
    """|a|."""
    a = flushed(t, a)
    ends = abs(a.lo), abs(a.hi)
    return Fact(t.name, 0.0 if _has_zero(a) else min(ends), max(ends), a.integral, a.nan_free)


def sign(t: DType, a: Fact) -> Fact:
    """-1, 0 or 1, NaN for NaN."""
    a = flushed(t, a)
    return Fact(
        t.name, float((a.lo > 0) - (a.lo < 0)), float((a.hi > 0) - (a.hi < 0)), True, a.nan_free
    )


def _stepwise(op: Callable[[float], float]) -> Callable[[DType, Fact], Fact]:
    """The rule of a monotone map onto the whole numbers, exact in every dtype."""

    def rule(t: DType, a: Fact) -> Fact:
        a = flushed(t, a)
        lo, hi = (v if math.isinf(v) else float(op(v)) for v in (a.lo, a.hi))
        return Fact(t.name, lo, hi, True, a.nan_free)

    return rule


def _round_away(x: float) -> float:
    whole = math.trunc(x)
    return float(whole + (1 if x > 0 else -1)) if abs(x - whole) >= 0.5 else float(whole)


floor = _stepwise(math.floor)
ceil = _stepwise(math.ceil)
round_even = _stepwise(round)
round_away = _stepwise(_round_away)


def sqrt(t: DType, a: Fact) -> Fact:
    """The square root; NaN below 0 (the root of -0.0 is -0.0)."""
    a = flushed(t, a)
    nan_free = a.nan_free and a.lo >= 0
    if a.hi < 0:
        return Fact(t.name, 0.0, 0.0, True, False)
    found = []
    for v in (max(a.lo, 0.0), a.hi):
        root = math.sqrt(v)
        found.append((root, math.isinf(root) or Fraction(root) ** 2 == Fraction(v)))
    lo, hi = _between(found[:1])[0], _between(found[1:])[1]
    return result(t, max(lo, 0.0), hi, lo == hi and is_whole(lo), nan_free)


def is_finite(t: DType, a: Fact) -> Fact:
    """Neither infinite nor NaN, as a bool."""
    if a.lo == a.hi and math.isinf(a.lo):
        return Fact("bool", 0, 0, True, True)
    if a.nan_free and not infinite(a):
        return Fact("bool", 1, 1, True, True)
    return Fact.top("bool")


def to_float(t: DType, a: Fact) -> Fact:
    """Any real fact as one of the float dtype; a number that does not fit becomes infinite."""
    source = dtype_of(a.dtype)
    if source.kind == "float":
        a = flushed(source, a)
        return result(t, a.lo, a.hi, a.integral, a.nan_free)
    lo, hi = float(a.lo), float(a.hi)  # to the nearest double, so step out where that was inexact
    lo = lo if lo <= a.lo else math.nextafter(lo, -INF)
    hi = hi if hi >= a.hi else math.nextafter(hi, INF)
    return result(t, lo, hi, True, True)


def to_int(t: DType, a: Fact) -> Fact:
    """Rounded toward zero and saturated; NaN becomes 0."""
    ends = []
    for v in (a.lo, a.hi):
        ends.append(
            int(min(max(v, t.lo), t.hi)) if math.isinf(v) else int(min(max(int(v), t.lo), t.hi))
        )
    lo, hi = ends
    if not a.nan_free:
        lo, hi = min(lo, 0), max(hi, 0)
    return Fact(t.name, lo, hi, True, True)
