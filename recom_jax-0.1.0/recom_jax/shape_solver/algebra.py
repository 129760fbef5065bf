"""What is asked of sympy: factors, ideal membership, and translation. The only module that loads
it.

Loading takes half a second and every call milliseconds, so nothing on the tracing path comes here
for the usual equalities; ``stats`` counts the calls so that a test can hold that down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, reduce
from importlib import import_module
from typing import Any

from .dims import Atom, Dim, Poly, atom_dim, floordiv, from_terms, substitute, symbol, terms_of

stats: Counter[str] = Counter()
"""How often each costly thing ran in this process: "solve" (cache misses) and "sympy" (calls into
it)."""


def _sympy(count: bool = True) -> Any:
    stats["sympy"] += count
    return import_module("sympy")


def to_sympy(a: Dim) -> Any:
    """See :func:`recom_jax.shape_solver.dims.to_sympy`."""
    sympy = _sympy()
    if isinstance(a, int):
        return sympy.Integer(a)
    total = sympy.Integer(0)
    for mono, coef in a.terms:
        term = sympy.Integer(coef)
        for atom, exp in mono:
            if isinstance(atom, str):
                base = sympy.Symbol(atom, integer=True, nonnegative=True)
            else:
                base = sympy.floor(to_sympy(atom.num) / to_sympy(atom.den), evaluate=False)
            term *= base**exp
        total += term
    return total


def from_sympy(expr: Any) -> Dim:
    """See :func:`recom_jax.shape_solver.dims.from_sympy`."""
    sympy = _sympy()
    expr = sympy.sympify(expr)
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return symbol(expr.name)
    if expr.is_Add:
        return reduce(lambda a, b: a + b, (from_sympy(arg) for arg in expr.args))
    if expr.is_Mul:
        return reduce(lambda a, b: a * b, (from_sympy(arg) for arg in expr.args))
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        base = from_sympy(expr.base)
        return reduce(lambda a, b: a * b, [base] * int(expr.exp))
    if isinstance(expr, sympy.floor | sympy.ceiling):
        num, den = (from_sympy(part) for part in sympy.fraction(sympy.together(expr.args[0])))
        return floordiv(num, den) if isinstance(expr, sympy.floor) else -floordiv(-num, den)
    if isinstance(expr, sympy.Mod):
        num, den = from_sympy(expr.args[0]), from_sympy(expr.args[1])
        return num - den * floordiv(num, den)
    raise ValueError(f"not an integer polynomial with floor divisions: {expr}")


def _to_opaque(p: Dim, names: dict[Any, Atom]) -> Any:
    """``p`` for sympy with every atom, floor divisions too, as one plain symbol recorded in
    ``names``."""
    sympy = _sympy(count=False)
    total = sympy.Integer(0)
    for mono, coef in terms_of(p):
        term = sympy.Integer(coef)
        for atom, exp in mono:
            sym = sympy.Symbol(atom if isinstance(atom, str) else f"<{atom.text}>")
            names[sym] = atom
            term *= sym**exp
        total += term
    return total


def _from_opaque(expr: Any, names: Mapping[Any, Atom]) -> Dim:
    sympy = _sympy(count=False)
    poly = sympy.Poly(expr, *names)
    total: Dim = 0
    for exps, coef in poly.terms():
        term: Dim = int(coef)
        for sym, exp in zip(poly.gens, exps, strict=True):
            for _ in range(exp):
                term = term * atom_dim(names[sym])
        total = total + term
    return total


def rename_atoms(p: Dim, names: Mapping[Atom, str]) -> Dim:
    """``p`` with every outermost unknown, floor divisions taken whole, called as ``names`` says."""
    return from_terms({tuple(sorted((names[at], e) for at, e in m)): c for m, c in terms_of(p)})


def factors(p: Poly) -> list[Dim]:
    """The distinct irreducible factors of ``p`` over the rationals, without constant ones."""
    names: dict[Atom, str] = {}
    for mono, _ in p.terms:
        for atom, _ in mono:
            names.setdefault(atom, f"a{len(names):03}")
    back = {name: atom_dim(atom) for atom, name in names.items()}
    canonical = rename_atoms(p, names)
    assert isinstance(canonical, Poly)
    return [substitute(f, back) for f in _factors(canonical)]


@lru_cache(maxsize=4096)
def _factors(p: Poly) -> tuple[Dim, ...]:
    sympy = _sympy()
    names: dict[Any, Atom] = {}
    return tuple(_from_opaque(f, names) for f, _ in sympy.factor_list(_to_opaque(p, names))[1])


@lru_cache(maxsize=4096)
def in_ideal(p: Dim, residual: tuple[Dim, ...]) -> bool | None:
    """Whether ``residual == 0`` forces ``p == 0`` (True), excludes it (False), or neither is
    shown."""
    sympy = _sympy()
    names: dict[Any, Atom] = {}
    exprs = [_to_opaque(r, names) for r in residual]
    target = _to_opaque(p, names)
    gens = sorted(names, key=str)
    basis = sympy.groebner(exprs, *gens, order="grevlex")
    if basis.contains(target):
        return True
    if sympy.groebner([*exprs, target], *gens, order="grevlex").exprs == [1]:
        return False
    return None
