"""Exact integer polynomials over named sizes: the representation behind ``dims``.

A dimension is an ``int`` or a :class:`Poly`. Two dimensions are equal as Python objects exactly
when their canonical forms are the same polynomial, so equality and hashing need no solver and no
sympy: the tracer compares dimensions several hundred thousand times for a wide model. What a
polynomial alone cannot decide (equalities recorded between symbols, bounds) belongs to ``unify``
and ``solver``.

Integer division that does not come out exactly is kept as an opaque atom (:class:`FloorDiv`), never
turned into a fraction: an earlier system printed a half as C integer division (RECom fault 6).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import Any, TypeAlias, Union

Atom: TypeAlias = Union[str, "FloorDiv"]
Mono: TypeAlias = tuple[tuple[Atom, int], ...]
Terms: TypeAlias = tuple[tuple[Mono, int], ...]
Dim: TypeAlias = Union[int, "Poly"]
DimLike: TypeAlias = Dim

_set = object.__setattr__


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """The integer ``floor(num / den)`` as an indivisible unknown with structure.

    Made only by :func:`floordiv`, which first folds everything that can be folded, so two atoms
    that are structurally the same are the same integer.
    """

    num: Dim
    den: Dim
    text: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _set(self, "text", f"({_paren(self.num)} // {_paren(self.den)})")

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class Poly:
    """A canonical, never constant polynomial with integer coefficients.

    ``terms`` holds ``(monomial, coefficient)`` in canonical order, where a monomial is a sorted
    tuple of ``(atom, exponent)`` and ``()`` is the constant one. ``name`` is the symbol's name when
    the polynomial is that bare symbol, else None; it exists so that the union-find's fast path is
    one attribute read. Arithmetic returns an ``int`` whenever the result is constant.
    """

    __slots__ = ("_hash", "_symbols", "name", "terms")
    terms: Terms
    name: str | None
    _hash: int | None
    _symbols: frozenset[str] | None

    def __init__(self, terms: Terms) -> None:
        name = None
        if len(terms) == 1:
            mono, coef = terms[0]
            if coef == 1 and len(mono) == 1 and mono[0][1] == 1 and isinstance(mono[0][0], str):
                name = mono[0][0]
        _set(self, "terms", terms)
        _set(self, "name", name)
        _set(self, "_hash", None)
        _set(self, "_symbols", None)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Poly is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return Poly, (self.terms,)

    def __hash__(self) -> int:
        found = self._hash
        if found is None:
            found = hash(self.terms)
            _set(self, "_hash", found)
        return found

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Poly) and self.terms == other.terms

    def __add__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            if not other:
                return self
            terms = self.terms  # the constant one comes last
            if terms[-1][0]:
                return Poly((*terms, ((), other)))
            other += terms[-1][1]
            return Poly((*terms[:-1], ((), other)) if other else terms[:-1])
        if not isinstance(other, Poly):
            return NotImplemented
        if len(other.terms) == 1:
            return from_sorted(_insert(self.terms, other.terms[0]))
        if len(self.terms) == 1:
            return from_sorted(_insert(other.terms, self.terms[0]))
        acc = dict(self.terms)
        for mono, coef in other.terms:
            acc[mono] = acc.get(mono, 0) + coef
        return from_terms(acc)

    __radd__ = __add__

    def __neg__(self) -> Poly:
        return Poly(tuple([(mono, -coef) for mono, coef in self.terms]))

    def __sub__(self, other: Dim) -> Dim:
        if not isinstance(other, int | Poly):
            return NotImplemented
        return self + (-other)

    def __rsub__(self, other: int) -> Dim:
        return (-self) + other

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            if not other:
                return 0
            return Poly(tuple([(mono, coef * other) for mono, coef in self.terms]))
        if not isinstance(other, Poly):
            return NotImplemented
        if len(self.terms) == len(other.terms) == 1:
            (mono, coef), (mono2, coef2) = self.terms[0], other.terms[0]
            return Poly(((_mul_mono(mono, mono2), coef * coef2),))
        acc: dict[Mono, int] = {}
        for mono, coef in self.terms:
            for mono2, coef2 in other.terms:
                both = _mul_mono(mono, mono2)
                acc[both] = acc.get(both, 0) + coef * coef2
        return from_terms(acc)

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: int) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return self - other * floordiv(self, other)

    def __rmod__(self, other: int) -> Dim:
        return other - self * floordiv(other, self)

    def __str__(self) -> str:
        out = ""
        for mono, coef in self.terms:
            parts = [str(a) if e == 1 else f"{a}**{e}" for a, e in mono]
            if abs(coef) != 1 or not parts:
                parts.append(str(abs(coef)))
            sign = ("-" if coef < 0 else "") if not out else (" - " if coef < 0 else " + ")
            out += sign + "*".join(parts)
        return out

    __repr__ = __str__


@lru_cache(maxsize=1 << 17)
def symbol(name: str) -> Poly:
    """The polynomial that is the bare symbol ``name``."""
    return Poly(((((name, 1),), 1),))


def atom_dim(atom: Atom) -> Poly:
    """The polynomial that is this one atom."""
    return symbol(atom) if isinstance(atom, str) else Poly(((((atom, 1),), 1),))


def _paren(a: Dim) -> str:
    text = str(a)
    return (
        text if (isinstance(a, int) and a >= 0) or (isinstance(a, Poly) and a.name) else f"({text})"
    )


def _atom_key(pair: tuple[Atom, int]) -> tuple[int, str]:
    atom = pair[0]
    return (0, atom) if isinstance(atom, str) else (1, atom.text)


def _term_key(term: tuple[Mono, int]) -> tuple[int, tuple[tuple[int, str, int], ...]]:
    degree, keys = 0, []
    for pair in term[0]:
        degree -= pair[1]
        keys.append((*_atom_key(pair), -pair[1]))
    return degree, tuple(keys)


def _insert(terms: Terms, term: tuple[Mono, int]) -> Terms:
    """``terms`` and one more. Sums grow term by term (offsets of a concatenation), so no sorting
    anew."""
    at = bisect_left(terms, _term_key(term), key=_term_key)
    if at == len(terms) or terms[at][0] != term[0]:
        return (*terms[:at], term, *terms[at:])
    coef = terms[at][1] + term[1]
    return (
        (*terms[:at], (term[0], coef), *terms[at + 1 :]) if coef else terms[:at] + terms[at + 1 :]
    )


def _mul_mono(a: Mono, b: Mono) -> Mono:
    if not a:
        return b
    if not b:
        return a
    acc = dict(a)
    for atom, exp in b:
        acc[atom] = acc.get(atom, 0) + exp
    return tuple(sorted(acc.items(), key=_atom_key))


def from_terms(acc: Mapping[Mono, int]) -> Dim:
    """The canonical dimension with these coefficients (zero ones dropped, a constant becomes an
    int)."""
    terms = [t for t in acc.items() if t[1]]
    if len(terms) > 1:
        terms.sort(key=_term_key)
    return from_sorted(tuple(terms))


def from_sorted(terms: Terms) -> Dim:
    """The dimension with these terms, which must be in canonical order and without zeros."""
    if not terms:
        return 0
    return terms[0][1] if not terms[0][0] else Poly(terms)


def terms_of(a: Dim) -> Terms:
    """The terms of ``a``, an int being its constant term."""
    if isinstance(a, Poly):
        return a.terms
    return (((), a),) if a else ()


def _div_mono(a: Mono, b: Mono) -> Mono | None:
    if not b:
        return a
    acc = dict(a)
    for atom, exp in b:
        left = acc.get(atom, 0) - exp
        if left < 0:
            return None
        if left:
            acc[atom] = left
        else:
            del acc[atom]
    return tuple(acc.items())


def _long_division(a: Dim, d: Poly) -> tuple[Dim, Dim]:
    """Quotient and remainder over the integers, under a graded lexicographic monomial order."""
    atoms = sorted(
        {p for x in (a, d) for m, _ in terms_of(x) for p in ((at, 0) for at, _ in m)}, key=_atom_key
    )

    def key(mono: Mono) -> tuple[int, ...]:
        exps = dict(mono)
        vector = [exps.get(at, 0) for at, _ in atoms]
        return (sum(vector), *vector)

    lead, lead_coef = max(d.terms, key=lambda t: key(t[0]))
    rest = dict(terms_of(a))
    quotient: dict[Mono, int] = {}
    remainder: dict[Mono, int] = {}
    while rest:
        mono = max(rest, key=key)
        coef = rest[mono]
        ratio = _div_mono(mono, lead) if coef % lead_coef == 0 else None
        if ratio is None:
            remainder[mono] = rest.pop(mono)
            continue
        q = coef // lead_coef
        quotient[ratio] = quotient.get(ratio, 0) + q
        for m, c in d.terms:
            both = _mul_mono(m, ratio)
            left = rest.get(both, 0) - c * q
            if left:
                rest[both] = left
            else:
                rest.pop(both, None)
    return from_terms(quotient), from_terms(remainder)


def exact_div(a: Dim, b: Dim) -> Dim | None:
    """The dimension ``q`` with ``a == q * b`` as polynomials, or None where that is not provable.

    A common factor that may be zero cancels: ``exact_div(8*s, s)`` is 8, the value of the quotient
    wherever the quotient is defined. Raises ZeroDivisionError when ``b`` is the constant 0.
    """
    if isinstance(b, int):
        if isinstance(a, int):
            return None if a % b else a // b
        if b == 1:
            return a
        if any(c % b for _, c in a.terms):
            return None
        return Poly(tuple((m, c // b) for m, c in a.terms))
    if isinstance(a, int):
        return None if a else 0
    if a == b:
        return 1
    q, r = _long_division(a, b)
    return None if isinstance(r, Poly) or r else q


def split(a: Dim, d: Dim) -> tuple[Dim, Dim]:
    """``(q, r)`` with ``a == q*d + r`` identically, ``r`` holding the terms that ``d`` does not
    divide.

    For two ints this is ``divmod``. Raises ZeroDivisionError when ``d`` is the constant 0.
    """
    if isinstance(d, int):
        if isinstance(a, int):
            return divmod(a, d)
        quotient = {m: c // d for m, c in a.terms if c % d == 0}
        rest = {m: c for m, c in a.terms if c % d}
        return from_terms(quotient), from_terms(rest)
    if isinstance(a, int):
        return 0, a
    q, r = _long_division(a, d)
    if len(d.terms) > 1 and len(terms_of(r)) >= len(a.terms):
        return 0, a  # s over s + 1 would become 1 and a remainder of -1: true, but no simpler
    return q, r


def floordiv(a: Dim, b: Dim) -> Dim:
    """``floor(a / b)``: folded as far as polynomials allow, the rest as one :class:`FloorDiv` atom.

    Common factors cancel as in :func:`exact_div`. Raises ZeroDivisionError for the constant 0.
    """
    if isinstance(b, int):
        if isinstance(a, int):
            return a // b
        return _floordiv_int(a, b) if b > 0 else _floordiv_int(-a, -b)
    q, r = split(a, b)
    if isinstance(r, int) and r == 0:
        return q
    ratio = exact_div(b, r) if isinstance(r, Poly) else None
    if ratio is not None:
        return q + floordiv(1, ratio)
    common = gcd(*(c for _, c in terms_of(r)), *(c for _, c in b.terms))
    if b.terms[0][1] < 0:
        common = -common
    shared = _common_mono([m for m, _ in (*terms_of(r), *b.terms)])
    if common != 1 or shared:
        num, den = _cancel(r, common, shared), _cancel(b, common, shared)
        return q + floordiv(num, den)
    return q + atom_dim(FloorDiv(r, b))


def _common_mono(monos: list[Mono]) -> Mono:
    shared = dict(monos[0])
    for mono in monos[1:]:
        if not shared:
            break
        exps = dict(mono)
        shared = {at: min(e, exps[at]) for at, e in shared.items() if at in exps}
    return tuple(shared.items())


def _cancel(a: Dim, common: int, shared: Mono) -> Dim:
    return from_terms({_div_mono(m, shared) or (): c // common for m, c in terms_of(a)})


def _floordiv_int(a: Poly, d: int) -> Dim:
    """``a // d`` for positive d: whole multiples leave the floor, a common factor cancels."""
    whole: dict[Mono, int] = {}
    rest: dict[Mono, int] = {}
    for mono, coef in a.terms:
        q = coef // d if not mono or coef >= 0 else -(-coef // d)
        whole[mono], rest[mono] = q, coef - q * d
    common = gcd(d, *(c for m, c in rest.items() if m))
    if common > 1:  # floor((g*p + c) / (g*d)) == floor((p + floor(c/g)) / d)
        rest, d = {m: c // common for m, c in rest.items()}, d // common
    num, out = from_terms(rest), from_terms(whole)
    if isinstance(num, int):
        return out + num // d
    mono, coef = num.terms[0]
    if len(num.terms) == 1 and coef == 1 and len(mono) == 1 and isinstance(mono[0][0], FloorDiv):
        inner = mono[0][0]
        if mono[0][1] == 1:  # floor(floor(p / q) / d) == floor(p / (q*d)) for positive d
            return out + floordiv(inner.num, inner.den * d)
    return out + (num if d == 1 else atom_dim(FloorDiv(num, d)))
