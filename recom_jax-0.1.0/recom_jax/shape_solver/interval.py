"""Interval reasoning about dimensions: what range a polynomial has when its symbols have theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .dims import Atom, Dim, FloorDiv, Mono, substitute, symbol, symbols, terms_of

Bound: TypeAlias = tuple[int | None, int | None]
Bounds: TypeAlias = dict[str, Bound]
"""Symbol to (lowest, highest), None for unbounded. A symbol that is absent is a size: (0, None)."""

_SIZE: Bound = (0, None)


def bounds_of(a: Dim, bounds: Bounds) -> Bound:
    """An interval that holds every value of ``a`` for symbols within ``bounds`` (sound, not always
    tight)."""
    if isinstance(a, int):
        return a, a
    if a.name is not None:
        return bounds.get(a.name, _SIZE)
    plain = _sum_bounds(a, bounds)
    # Measured from their lower bounds the symbols are nonnegative, so that s*s - s is seen to be so
    # too.
    shifts: dict[str, Dim] = {}
    moved = dict(bounds)
    for name in symbols(a):
        lo, hi = bounds.get(name, _SIZE)
        if lo:
            shifts[name] = symbol(name) + lo
            moved[name] = 0, None if hi is None else hi - lo
    return _meet(plain, _sum_bounds(substitute(a, shifts), moved)) if shifts else plain


def tighten(constraints: Sequence[tuple[Dim, int | None, int | None]], bounds: Bounds) -> bool:
    """Narrow ``bounds`` by ``lo <= poly <= hi`` for each constraint; False when they cannot all
    hold.

    A few sweeps only: every narrowing is sound on its own, so stopping early loses precision and no
    more.
    """
    for _ in range(4):
        changed = False
        for poly, lo, hi in constraints:
            got = bounds_of(poly, bounds)
            if _empty(_meet(got, (lo, hi))):
                return False
            for mono, coef in terms_of(poly):
                if len(mono) != 1 or mono[0][1] != 1 or not isinstance(mono[0][0], str):
                    continue
                name = mono[0][0]
                rest = poly - coef * symbol(name)
                if name in symbols(rest):
                    continue
                old = bounds.get(name, _SIZE)
                new = _meet(old, _solve_linear(coef, bounds_of(rest, bounds), lo, hi))
                if _empty(new):
                    return False
                if new != old:
                    bounds[name] = new
                    changed = True
        if not changed:
            break
    return True


def _solve_linear(coef: int, rest: Bound, lo: int | None, hi: int | None) -> Bound:
    """The interval of x where ``lo <= coef*x + rest <= hi`` is possible."""
    low = None if lo is None or rest[1] is None else lo - rest[1]  # coef*x >= low
    high = None if hi is None or rest[0] is None else hi - rest[0]  # coef*x <= high
    if coef < 0:
        low, high, coef = None if high is None else -high, None if low is None else -low, -coef
    return None if low is None else -(-low // coef), None if high is None else high // coef


def _meet(a: Bound, b: Bound) -> Bound:
    lo = b[0] if a[0] is None else a[0] if b[0] is None else max(a[0], b[0])
    hi = b[1] if a[1] is None else a[1] if b[1] is None else min(a[1], b[1])
    return lo, hi


def _empty(a: Bound) -> bool:
    return a[0] is not None and a[1] is not None and a[0] > a[1]


def _sum_bounds(a: Dim, bounds: Bounds) -> Bound:
    lo: int | None = 0
    hi: int | None = 0
    for mono, coef in terms_of(a):
        tlo, thi = _scale(_mono_bounds(mono, bounds), coef)
        lo = None if lo is None or tlo is None else lo + tlo
        hi = None if hi is None or thi is None else hi + thi
    return lo, hi


def _scale(a: Bound, coef: int) -> Bound:
    lo, hi = (None if x is None else x * coef for x in a)
    return (lo, hi) if coef >= 0 else (hi, lo)


def _mono_bounds(mono: Mono, bounds: Bounds) -> Bound:
    out: Bound = (1, 1)
    for atom, exp in mono:
        one = _atom_bounds(atom, bounds)
        power = one
        for _ in range(exp - 1):
            power = _mul(power, one)
        if exp % 2 == 0 and (power[0] is None or power[0] < 0):
            power = 0, power[1]
        out = _mul(out, power)
    return out


def _mul(a: Bound, b: Bound) -> Bound:
    if a[0] is not None and a[0] >= 0 and b[0] is not None and b[0] >= 0:
        zero = a[1] == 0 or b[1] == 0
        return a[0] * b[0], 0 if zero else None if a[1] is None or b[1] is None else a[1] * b[1]
    if a[0] is None or a[1] is None or b[0] is None or b[1] is None:
        return (0, 0) if a == (0, 0) or b == (0, 0) else (None, None)
    corners = [x * y for x in (a[0], a[1]) for y in (b[0], b[1])]
    return min(corners), max(corners)


def _atom_bounds(atom: Atom, bounds: Bounds) -> Bound:
    if not isinstance(atom, FloorDiv):
        return bounds.get(atom, _SIZE)
    num, den = bounds_of(atom.num, bounds), bounds_of(atom.den, bounds)
    if den[0] is None or den[0] < 0:
        return None, None
    least = max(den[0], 1)  # where the divisor is 0 the division has no value to bound
    lo: int | None
    hi: int | None
    if num[0] is None:
        lo = None
    elif num[0] < 0:
        lo = num[0] // least
    else:
        lo = 0 if den[1] is None else num[0] // max(den[1], 1)
    if num[1] is None:
        hi = None
    elif num[1] >= 0:
        hi = num[1] // least
    else:
        hi = -1 if den[1] is None else num[1] // max(den[1], 1)
    return lo, hi
