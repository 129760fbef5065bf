"""Equalities between dimensions, solved over the nonnegative integers.

Elimination here is polynomial and exact; what it cannot settle (products of unknowns, roots, ideal
membership) goes to sympy through ``algebra``. Systems are memoised up to the names of their
symbols: a thousand columns of one structure are one solve.

Nothing here divides inexactly. From ``2*x == y`` comes ``y := 2*x`` and never a half (RECom fault
6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product as cartesian
from math import gcd
from typing import Any, TypeAlias

from .algebra import factors, in_ideal, rename_atoms, stats
from .dims import (
    Atom,
    Dim,
    Poly,
    atoms,
    evaluate,
    exact_div,
    from_sorted,
    from_terms,
    substitute,
    symbol,
    symbols,
    terms_of,
)
from .interval import Bound, Bounds, bounds_of, tighten

__all__ = ["Contradiction", "Equality", "Solver", "isolate", "solve", "stats"]

Rank: TypeAlias = Callable[[str], Any]
Equality: TypeAlias = tuple[Dim, Dim]

_RESIDUES = 4096


class Contradiction(ValueError):
    """The equalities have no solution in integers at or above the lower bounds."""


class _System:
    """A solved system over canonical names: what the memo keeps."""

    __slots__ = ("bounds", "residual", "solution")

    def __init__(self, equations: Sequence[Dim], bounds: Bounds, rank: Rank) -> None:
        self.bounds = bounds
        self.solution: dict[str, Dim] = {}
        self.residual: list[Dim] = []
        pending = list(equations)
        while pending:
            self._eliminate(pending, rank)
            pending = self._consequences()

    def _eliminate(self, pending: list[Dim], rank: Rank) -> None:
        # Fewest symbols first: constants and plain renamings simplify whatever comes after them.
        work = pending + self.residual
        work.sort(key=lambda p: (len(symbols(p)), len(terms_of(p)), str(p)), reverse=True)
        self.residual = []
        order: list[str] = []
        while work:
            p = _primitive(self._settled(work.pop()))
            if isinstance(p, int):
                if p:
                    raise Contradiction(f"{p} == 0")
                continue
            solved = _isolate(p, rank) or _by_factors(p, self.bounds)
            if solved is None:
                self.residual.append(p)
                continue
            name, self.solution[solved[0]] = solved
            order.append(name)
            if self.residual:
                work += [r for r in self.residual if name in symbols(r)]
                self.residual = [r for r in self.residual if name not in symbols(r)]
        for n in (*reversed(order), *self.solution):
            self.solution[n] = self._settled(self.solution[n])

    def _settled(self, p: Dim) -> Dim:
        """``p`` in unsolved symbols only: a solution may name symbols that were solved after it."""
        while not self.solution.keys().isdisjoint(symbols(p)):
            p = substitute(p, self.solution)
        return p

    def _consequences(self) -> list[Dim]:
        """Bounds that the solution implies; new equalities where they pin a symbol."""
        constraints = [
            (value, *self.bounds.get(name, (0, None))) for name, value in self.solution.items()
        ]
        constraints += [(p, 0, 0) for p in self.residual]
        if not tighten(constraints, self.bounds):
            raise Contradiction("no integers at or above the lower bounds")
        return [
            symbol(n) - lo
            for n, (lo, hi) in self.bounds.items()
            if lo is not None and lo == hi and n not in self.solution
        ]


def _primitive(p: Dim) -> Dim:
    """``p`` over the common factor of its coefficients; a Contradiction if integers rule ``p == 0``
    out."""
    if isinstance(p, int):
        return p
    const = dict(p.terms).get((), 0)
    common = gcd(*(c for m, c in p.terms if m))
    if const % common:
        raise Contradiction(f"{p} == 0: {common} does not divide {const}")
    return p if common == 1 else exact_div(p, common) or 0


def _isolate(p: Poly, rank: Rank) -> tuple[str, Dim] | None:
    """A symbol that ``p == 0`` gives as an integer polynomial of the others.

    If several, one whose value has no subtraction of symbols, and then the last in rank.
    """
    signs = [coef > 0 for mono, coef in p.terms if mono]
    ups = sum(signs)
    able: list[tuple[tuple[bool, Any], str, int]] = []
    for mono, coef in p.terms:
        if coef in (1, -1) and len(mono) == 1 and mono[0][1] == 1:
            atom = mono[0][0]
            if isinstance(atom, str):
                alone = (ups if coef > 0 else len(signs) - ups) == 1
                able.append(((alone, rank(atom)), atom, coef))
    able.sort(reverse=True)
    for _, name, coef in able:
        if _occurs_once(name, p):
            mine = ((name, 1),)
            return name, from_sorted(tuple([(m, -c * coef) for m, c in p.terms if m != mine]))
    return None


def _occurs_once(name: str, p: Poly) -> bool:
    count = 0
    for mono, _ in p.terms:
        for atom, _ in mono:
            if isinstance(atom, str):
                count += atom == name
            elif name in symbols(atom.num) or name in symbols(atom.den):
                return False
    return count == 1


def isolate(p: Dim, rank: Rank) -> tuple[str, Dim] | None:
    """What a :class:`Solver` of ``p == 0`` alone would conclude, if that is one symbol's value and
    no more.

    None where it takes the solver to tell: sizes are at least 0, so a value that falls as some
    other symbol grows says how far that one may grow. Spares the commonest equalities (``flat ==
    rows*8``) the solver.
    """
    try:
        p = _primitive(p)
    except Contradiction:
        return None
    found = None if isinstance(p, int) else _isolate(p, rank)
    if found is None or any(mono and coef < 0 for mono, coef in terms_of(found[1])):
        return None
    return found


def _by_factors(p: Poly, bounds: Bounds) -> tuple[str, Dim] | None:
    """``p == 0`` through sympy: one factor that can vanish, or one admissible integer root."""
    if all(len(m) <= 1 and (not m or m[0][1] == 1) for m, _ in p.terms):
        return None  # linear: elimination has said all that is exact
    able = []
    for f in factors(p):
        lo, hi = bounds_of(f, bounds)
        if (lo is None or lo <= 0) and (hi is None or hi >= 0):
            able.append(f)
    if not able:
        raise Contradiction(f"{p} == 0")
    free = symbols(p)
    if len(free) == 1 and atoms(p) == free:
        (name,) = free
        lo, hi = bounds.get(name, (0, None))
        roots = set()
        for f in able:
            coefs = {sum(e for _, e in m): c for m, c in terms_of(f)}
            # Of higher degree and irreducible over the rationals means no integer root.
            if max(coefs) == 1 and coefs.get(0, 0) % coefs[1] == 0:
                roots.add(-coefs.get(0, 0) // coefs[1])
        roots = {r for r in roots if (lo is None or r >= lo) and (hi is None or r <= hi)}
        if not roots:
            raise Contradiction(f"{p} == 0 has no admissible root")
        return (name, roots.pop()) if len(roots) == 1 else None
    if len(able) == 1 and isinstance(able[0], Poly) and able[0] != p:
        primitive = _primitive(able[0])
        return _isolate(primitive, str) if isinstance(primitive, Poly) else None
    return None


@lru_cache(maxsize=4096)
def _solve(
    equations: tuple[Dim, ...], bounds: tuple[tuple[str, Bound], ...], order: tuple[str, ...]
) -> _System:
    stats["solve"] += 1
    return _System(equations, dict(bounds), {n: i for i, n in enumerate(order)}.__getitem__)


class Solver:
    """What a set of equalities between sizes implies.

    ``equalities`` are pairs of dimensions; ``lower_bounds`` gives each symbol's least value, 0 for
    those it does not name; ``order`` lists symbols, those earlier being kept rather than solved
    for. Raises :class:`Contradiction` when integers at or above the bounds cannot satisfy the
    equalities (not every such system is recognised; a Solver that is built is no proof that one has
    a solution).
    """

    __slots__ = ("_bounds", "residual", "solution")
    solution: dict[str, Dim]
    """Each solved symbol as an exact integer polynomial of the unsolved ones."""
    residual: tuple[Dim, ...]
    """Polynomials that are 0 and from which no symbol could be isolated."""

    def __init__(
        self,
        equalities: Iterable[Equality],
        lower_bounds: Mapping[str, int] | None = None,
        order: Sequence[str] = (),
    ) -> None:
        polys = [p for p in (a - b for a, b in equalities) if not isinstance(p, int) or p]
        lower = lower_bounds or {}
        rank = {n: i for i, n in enumerate(order)}
        names = sorted(
            {n for p in polys for n in symbols(p)},
            key=lambda n: (rank.get(n, len(rank)), len(n), n),
        )
        canon = [f"x{i}" for i in range(len(names))]
        there: dict[str, Dim] = {n: symbol(c) for n, c in zip(names, canon, strict=True)}
        back: dict[str, Dim] = {c: symbol(n) for n, c in zip(names, canon, strict=True)}
        real = dict(zip(canon, names, strict=True))
        key = tuple(sorted({_sign(substitute(p, there)) for p in polys}, key=str))
        try:
            system = _solve(
                key, tuple((c, (lower.get(real[c], 0), None)) for c in canon), tuple(canon)
            )
        except (Contradiction, ZeroDivisionError) as err:
            said = ", ".join(f"{p} == 0" for p in polys)
            raise Contradiction(f"no sizes satisfy {said}") from err
        self.solution = {real[c]: substitute(v, back) for c, v in system.solution.items()}
        self.residual = tuple(substitute(p, back) for p in system.residual)
        self._bounds: Bounds = {n: (v, None) for n, v in lower.items()}
        self._bounds.update((real[c], b) for c, b in system.bounds.items())

    def resolve(self, a: Dim) -> Dim:
        """``a`` with the solved symbols replaced."""
        return substitute(a, self.solution)

    def bounds(self, a: Dim) -> tuple[int | None, int | None]:
        """An interval that holds every value of ``a``; None where it is unbounded on that side."""
        got = bounds_of(self.resolve(a), self._bounds)
        if isinstance(a, Poly) and a.name in self.solution:
            lo = self._bounds.get(a.name, (0, None))[0]
            if lo is not None and (got[0] is None or got[0] < lo):
                return lo, got[1]
        return got

    def equal(self, a: Dim, b: Dim) -> bool | None:
        """True when ``a == b`` follows, False when it cannot hold, None when neither is proven."""
        d = self.resolve(a - b)
        if isinstance(d, int):
            return d == 0
        lo, hi = bounds_of(d, self._bounds)
        if (lo is not None and lo > 0) or (hi is not None and hi < 0):
            return False
        try:
            _primitive(d)
        except Contradiction:
            return False
        given = self._connected(d)
        return in_ideal(d, given) if given else None

    def _connected(self, d: Dim) -> tuple[Dim, ...]:
        """The residual equations that share symbols with ``d``, directly or through each other."""
        names, rest = set(symbols(d)), list(self.residual)
        given: list[Dim] = []
        while near := [p for p in rest if not names.isdisjoint(symbols(p))]:
            given += near
            names.update(*map(symbols, near))
            rest = [p for p in rest if names.isdisjoint(symbols(p))]
        return tuple(given)

    def divisible(self, a: Dim, n: Dim) -> bool | None:
        """True when ``n`` divides ``a`` for all admissible sizes, False when for none, else None.

        Only 0 is divisible by 0.
        """
        a, n = self.resolve(a), self.resolve(n)
        if not isinstance(n, int):
            return True if exact_div(a, n) is not None else None
        if n == 0:
            return self.equal(a, 0)
        n = abs(n)
        a = _reduce_mod(a, n)
        if isinstance(a, int):
            return a % n == 0
        unknown = sorted(atoms(a), key=str)
        if n ** len(unknown) > _RESIDUES:
            return None
        given = [r for r in (_reduce_mod(p, n) for p in self.residual) if atoms(r) <= set(unknown)]
        names = [f"r{i}" for i in range(len(unknown))]
        rename: dict[Atom, str] = dict(zip(unknown, names, strict=True))
        target, *given = [rename_atoms(p, rename) for p in (a, *given)]
        seen = set()
        for values in cartesian(range(n), repeat=len(names)):
            env = dict(zip(names, values, strict=True))
            if all(evaluate(p, env) % n == 0 for p in given):
                seen.add(evaluate(target, env) % n == 0)
        return seen.pop() if len(seen) == 1 else None


def solve(
    equalities: Iterable[Equality],
    lower_bounds: Mapping[str, int] | None = None,
    order: Sequence[str] = (),
) -> Solver:
    """The :class:`Solver` of these equalities; the work is memoised up to the symbols' names."""
    return Solver(equalities, lower_bounds, order)


def _sign(p: Dim) -> Dim:
    return -p if terms_of(p)[0][1] < 0 else p


def _reduce_mod(p: Dim, n: int) -> Dim:
    return from_terms({m: c % n for m, c in terms_of(p)})
