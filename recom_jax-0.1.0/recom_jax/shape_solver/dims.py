"""Dimensions: what a size of an array is while its program is being analysed.

A dimension is an ``int`` or a :class:`Poly` over named symbols. This module is the public face: the
arithmetic lives in ``poly``, the functions that walk a dimension live here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .poly import (
    Atom,
    Dim,
    DimLike,
    FloorDiv,
    Mono,
    Poly,
    atom_dim,
    exact_div,
    floordiv,
    from_sorted,
    from_terms,
    split,
    symbol,
    terms_of,
)

__all__ = [
    "Atom",
    "Dim",
    "DimLike",
    "FloorDiv",
    "Mono",
    "Poly",
    "atom_dim",
    "atoms",
    "evaluate",
    "exact_div",
    "floordiv",
    "from_sorted",
    "from_sympy",
    "from_terms",
    "mod",
    "product",
    "split",
    "substitute",
    "symbol",
    "symbols",
    "terms_of",
    "to_sympy",
    "total",
]

_NONE: frozenset[str] = frozenset()


def mod(a: Dim, b: Dim) -> Dim:
    """``a - b*floor(a / b)``: Python's modulus, with the sign of ``b``."""
    return a % b


def total(dims: Iterable[Dim]) -> Dim:
    """The sum of all ``dims``, 0 for none: in one pass, where ``sum`` makes every partial sum."""
    acc: dict[Mono, int] = {}
    for d in dims:
        for mono, coef in terms_of(d):
            acc[mono] = acc.get(mono, 0) + coef
    return from_terms(acc)


def product(dims: Iterable[Dim]) -> Dim:
    """The product of all ``dims``; 1 for none. Exact: element counts never wrap (RECom fault 7)."""
    const = 1
    out: Dim | None = None
    for d in dims:
        if isinstance(d, int):
            const *= d
        else:
            out = d if out is None else out * d
    return const if out is None else out * const


def symbols(a: Dim) -> frozenset[str]:
    """The names of the symbols in ``a``, those inside floor divisions included."""
    if isinstance(a, int):
        return _NONE
    found = a._symbols
    if found is None:
        if a.name is not None:
            found = frozenset((a.name,))
        else:
            names: set[str] = set()
            for mono, _ in a.terms:
                for atom, _ in mono:
                    if isinstance(atom, str):
                        names.add(atom)
                    else:
                        names |= symbols(atom.num) | symbols(atom.den)
            found = frozenset(names)
        object.__setattr__(a, "_symbols", found)
    return found


def atoms(a: Dim) -> frozenset[Atom]:
    """The outermost unknowns of ``a``: its symbols, and its floor divisions taken whole."""
    if isinstance(a, int):
        return frozenset()
    return frozenset(atom for mono, _ in a.terms for atom, _ in mono)


def evaluate(a: Dim, env: Mapping[str, int]) -> int:
    """The value of ``a`` where each symbol has the size ``env`` gives it; divisions floor.

    Raises KeyError with the symbol's name when ``env`` lacks it, ZeroDivisionError when a divisor
    is 0.
    """
    if isinstance(a, int):
        return a
    if a.name is not None:
        return env[a.name]
    total = 0
    for mono, coef in a.terms:
        for atom, exp in mono:
            if isinstance(atom, str):
                value = env[atom]
            else:
                value = evaluate(atom.num, env) // evaluate(atom.den, env)
            coef *= value if exp == 1 else value**exp
        total += coef
    return total


def substitute(a: Dim, mapping: Mapping[str, Dim]) -> Dim:
    """``a`` with every symbol named in ``mapping`` replaced at once, in canonical form.

    Raises ZeroDivisionError when a divisor becomes the constant 0.
    """
    if isinstance(a, int):
        return a
    if a.name is not None:
        return mapping.get(a.name, a)
    if mapping.keys().isdisjoint(symbols(a)):
        return a
    acc: dict[Mono, int] = {}
    for mono, coef in a.terms:
        term: Dim = coef
        for atom, exp in mono:
            if isinstance(atom, str):
                value = mapping.get(atom)
                if value is None:
                    value = symbol(atom)
            else:
                value = floordiv(substitute(atom.num, mapping), substitute(atom.den, mapping))
            for _ in range(exp):
                term = term * value
        for m, c in terms_of(term):
            acc[m] = acc.get(m, 0) + c
    return from_terms(acc)


def to_sympy(a: Dim) -> Any:
    """``a`` as a sympy expression over nonnegative integer symbols, divisions as ``sympy.floor``.

    Loads sympy; nothing on the tracing path calls it.
    """
    from .algebra import to_sympy as convert

    return convert(a)


def from_sympy(expr: Any) -> Dim:
    """The dimension that a sympy expression denotes: the inverse of :func:`to_sympy`.

    Raises ValueError for what is not an integer polynomial with floor divisions (a half, a root).
    """
    from .algebra import from_sympy as convert

    return convert(expr)
