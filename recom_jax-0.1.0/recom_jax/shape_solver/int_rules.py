"""How facts of integers and bools go through XLA's operations: wrapping, truncating, never
trapping."""

from __future__ import annotations

from .fact import DType, Fact, int_fact


def _ends(f: Fact) -> tuple[int, int]:
    return int(f.lo), int(f.hi)


def add(t: DType, a: Fact, b: Fact) -> Fact:
    """a + b, wrapping."""
    return int_fact(t, a.lo + b.lo, a.hi + b.hi)


def sub(t: DType, a: Fact, b: Fact) -> Fact:
    """a - b, wrapping."""
    return int_fact(t, a.lo - b.hi, a.hi - b.lo)


def mul(t: DType, a: Fact, b: Fact) -> Fact:
    """a * b, wrapping."""
    corners = [x * y for x in _ends(a) for y in _ends(b)]
    return int_fact(t, min(corners), max(corners))


def _trunc_div(x: int, y: int) -> int:
    q = abs(x) // abs(y)
    return q if (x < 0) == (y < 0) else -q


def div(t: DType, a: Fact, b: Fact) -> Fact:
    """a / b rounded toward zero; x / 0 is all ones; the least integer over -1 is itself."""
    (alo, ahi), (blo, bhi) = _ends(a), _ends(b)
    found: list[int] = []
    for lo, hi in ((blo, min(bhi, -1)), (max(blo, 1), bhi)):
        if lo <= hi:
            found += [_trunc_div(x, y) for x in (alo, ahi) for y in (lo, hi)]
    if found and max(found) > t.hi:  # only the least integer over -1 leaves the dtype
        found += [int(t.lo), int(t.hi)]
    if blo <= 0 <= bhi:
        found.append(-1 if t.kind == "int" else int(t.hi))
    return int_fact(t, min(found), min(max(found), t.hi))


def rem(t: DType, a: Fact, b: Fact) -> Fact:
    """a - trunc(a / b)*b: the sign of a; x rem 0 is x; the least integer rem -1 is 0."""
    (alo, ahi), (blo, bhi) = _ends(a), _ends(b)
    if blo == bhi == 0:
        return a
    zero = blo <= 0 <= bhi
    biggest = max(abs(blo), abs(bhi)) - 1
    smallest = 0 if zero else min(abs(blo), abs(bhi))
    if -smallest < alo and ahi < smallest:
        return a
    if blo == bhi and (alo >= 0 or ahi <= 0) and _trunc_div(alo, blo) == _trunc_div(ahi, blo):
        turn = _trunc_div(alo, blo) * blo
        return int_fact(t, alo - turn, ahi - turn)
    lo = max(alo, -biggest) if alo < 0 else 0
    hi = min(ahi, biggest) if ahi > 0 else 0
    return int_fact(t, min(lo, alo), max(hi, ahi)) if zero else int_fact(t, lo, hi)


def maximum(t: DType, a: Fact, b: Fact) -> Fact:
    """The greater of the two."""
    return int_fact(t, max(a.lo, b.lo), max(a.hi, b.hi))


def minimum(t: DType, a: Fact, b: Fact) -> Fact:
    """The lesser of the two."""
    return int_fact(t, min(a.lo, b.lo), min(a.hi, b.hi))


def _width(*facts: Fact) -> int:
    """The least k with every value in [-2**k, 2**k)."""
    return max(max(v, ~v).bit_length() for f in facts for v in _ends(f))


def and_(t: DType, a: Fact, b: Fact) -> Fact:
    """Bitwise and; on bools the logical one."""
    (alo, ahi), (blo, bhi) = _ends(a), _ends(b)
    if a.is_const and b.is_const:
        return int_fact(t, alo & blo, alo & blo)
    if alo >= 0 or blo >= 0:
        hi = min(h for low, h in ((alo, ahi), (blo, bhi)) if low >= 0)
        return int_fact(t, 0, hi)
    return int_fact(
        t, -(1 << _width(a, b)), max(ahi, bhi) if ahi >= 0 or bhi >= 0 else min(ahi, bhi)
    )


def or_(t: DType, a: Fact, b: Fact) -> Fact:
    """Bitwise or; on bools the logical one."""
    (alo, ahi), (blo, bhi) = _ends(a), _ends(b)
    if a.is_const and b.is_const:
        return int_fact(t, alo | blo, alo | blo)
    if alo >= 0 and blo >= 0:
        return int_fact(t, max(alo, blo), (1 << _width(a, b)) - 1)
    if ahi < 0 or bhi < 0:
        return int_fact(t, max(low for low, h in ((alo, ahi), (blo, bhi)) if h < 0), -1)
    return int_fact(t, min(alo, blo), (1 << _width(a, b)) - 1)


def xor(t: DType, a: Fact, b: Fact) -> Fact:
    """Bitwise exclusive or; on bools, difference."""
    (alo, ahi), (blo, bhi) = _ends(a), _ends(b)
    if a.is_const and b.is_const:
        return int_fact(t, alo ^ blo, alo ^ blo)
    size = 1 << _width(a, b)
    same = (alo >= 0 and blo >= 0) or (ahi < 0 and bhi < 0)
    differ = (alo >= 0 and bhi < 0) or (ahi < 0 and blo >= 0)
    return int_fact(t, 0 if same else -size, -1 if differ else size - 1)


def _amounts(t: DType, s: Fact) -> tuple[tuple[int, int] | None, bool]:
    """The shift amounts that are within the width, and whether others (negative, too great)
    occur."""
    lo, hi = _ends(s)
    inside = (max(lo, 0), min(hi, t.bits - 1))
    return inside if inside[0] <= inside[1] else None, lo < 0 or hi >= t.bits


def _hull(found: list[Fact]) -> Fact:
    out = found[0]
    for f in found[1:]:
        out = out.join(f)
    return out


def shl(t: DType, a: Fact, s: Fact) -> Fact:
    """a shifted left; 0 where the amount is negative or not below the width."""
    inside, outside = _amounts(t, s)
    found = [int_fact(t, 0, 0)] if outside else []
    if inside is not None:
        corners = [x << y for x in _ends(a) for y in inside]
        found.append(int_fact(t, min(corners), max(corners)))
    return _hull(found)


def shr_l(t: DType, a: Fact, s: Fact) -> Fact:
    """a's bits shifted right with zeros coming in; 0 for amounts as in :func:`shl`."""
    inside, outside = _amounts(t, s)
    lo, hi = _ends(a)
    found = [int_fact(t, 0, 0)] if outside else []
    if inside is not None:
        pieces = [(max(lo, 0), hi)] if hi >= 0 else []
        if lo < 0:
            pieces.append((lo + (1 << t.bits), min(hi, -1) + (1 << t.bits)))
        for low, high in pieces:
            first = inside[0]
            if first == 0:  # no shift at all: the only amount that leaves a sign bit
                found.append(int_fact(t, low, high))
                first = 1
            if first <= inside[1]:
                found.append(int_fact(t, low >> inside[1], high >> first))
    return _hull(found)


def shr_a(t: DType, a: Fact, s: Fact) -> Fact:
    """a shifted right with its sign coming in; all sign for amounts as in :func:`shl`.

    On unsigned dtypes XLA still takes the top bit for a sign.
    """
    lo, hi = _ends(a)
    inside, outside = _amounts(t, s)
    amounts = [*(inside or ()), *([t.bits - 1] if outside else [])]
    half, found = 1 << (t.bits - 1), []
    pieces = [(lo, hi)]
    if t.kind == "uint" and hi >= half:
        pieces = [(max(lo, half) - 2 * half, hi - 2 * half)] + (
            [(lo, half - 1)] if lo < half else []
        )
    for ends in pieces:
        corners = [x >> y for x in ends for y in amounts]
        found.append(int_fact(t, min(corners), max(corners)))
    return _hull(found)


def neg(t: DType, a: Fact) -> Fact:
    """-a, wrapping."""
    return int_fact(t, -a.hi, -a.lo)


def absolute(t: DType, a: Fact) -> Fact:
    """|a|; the least integer is its own."""
    lo, hi = _ends(a)
    ends = [abs(lo), abs(hi)]
    if lo == t.lo < 0:
        return a if hi == lo else Fact.top(t.name)
    return int_fact(t, 0 if lo <= 0 <= hi else min(ends), max(ends))


def sign(t: DType, a: Fact) -> Fact:
    """-1, 0 or 1."""
    lo, hi = _ends(a)
    return int_fact(t, (lo > 0) - (lo < 0), (hi > 0) - (hi < 0))


def not_(t: DType, a: Fact) -> Fact:
    """Every bit inverted; on bools, negation."""
    top = {"bool": 1, "int": -1, "uint": int(t.hi)}[t.kind]
    return int_fact(t, top - a.hi, top - a.lo)


def popcnt(t: DType, a: Fact) -> Fact:
    """How many bits are set."""
    lo, hi = _ends(a)
    mask = (1 << t.bits) - 1
    if lo == hi:
        n = (lo & mask).bit_count()
        return int_fact(t, n, n)
    if lo >= 0:
        n = hi.bit_length()
        return int_fact(t, int(lo > 0), n if hi == (1 << n) - 1 else n - 1)
    return int_fact(t, 0 if hi >= 0 else 1, t.bits)


def clz(t: DType, a: Fact) -> Fact:
    """How many leading bits are zero."""
    lo, hi = _ends(a)
    if hi < 0:
        return int_fact(t, 0, 0)
    high = t.bits - lo.bit_length() if lo >= 0 else t.bits
    return int_fact(t, 0 if lo < 0 else t.bits - hi.bit_length(), high)
