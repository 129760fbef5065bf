"""Sizes of a trace with symbolic dimensions (`jax.export`), as dimensions of the shape solver.

A dimension variable becomes an *open* symbol of the trace's `Unifier`, and an expression of variables a polynomial:
equal polynomials are equal sizes in every call. Each variable also has an example value, which orders things and
weighs costs; whatever must hold in every call is decided on polynomials and bounds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from recom_jax import compat
from recom_jax.shape_solver.dims import DimLike, floordiv, mod
from recom_jax.shape_solver.interval import Bounds, bounds_of
from recom_jax.shape_solver.unify import Unifier

# Examples are large, prime and far apart, so that different sizes have different examples.
_EXAMPLES = (1009, 1543, 2087, 2657, 3217, 3793, 4357, 4931, 5501, 6079)
_TRIES = 400


class Sizes:
    """JAX's sizes -> dimensions. One per analysis; numbers pass through unchanged.

    Attributes:
      bounds: of the open symbols, as JAX knows them.
    """

    def __init__(self, unifier: Unifier) -> None:
        self.unifier = unifier
        self.bounds: Bounds = {}
        self._known: dict[Any, DimLike] = {}
        self._variables: dict[str, DimLike] = {}
        self._examples: dict[str, int] = {}

    def of(self, dim: Any) -> DimLike:
        """The dimension of a size: an int, or a polynomial in open symbols."""
        if not compat.is_symbolic(dim):
            return int(dim)
        found = self._known.get(dim)
        if found is None:
            found = self._known[dim] = self._sum(dim)
        return found

    def shape(self, shape: Any) -> tuple[DimLike, ...]:
        return tuple(map(self.of, shape))

    def example(self, shape: Any) -> tuple[int, ...]:
        """The example of a shape; the shape itself where nothing is symbolic."""
        return tuple(self.unifier.value(self.of(n)) for n in shape)

    def never_negative(self, d: DimLike) -> bool:
        """Whether a size is proven to be at least 0 in every call."""
        low = bounds_of(self.unifier.known(d), self.bounds)[0]
        return low is not None and low >= 0

    def _sum(self, dim: Any) -> DimLike:
        out: DimLike = 0
        for coef, factors in compat.dim_terms(dim):
            term: DimLike = coef
            for factor, exponent in factors:
                value = self._factor(dim, factor)
                for _ in range(exponent):
                    term = term * value
            out = out + term
        return out

    def _factor(self, dim: Any, factor: Any) -> DimLike:
        if isinstance(factor, str):
            return self._variable(dim, factor)
        operation, operands = factor
        a, b = (self.of(x) for x in map(_number, operands))
        if operation == "floordiv":
            return floordiv(a, b)
        if operation == "mod":
            return mod(a, b)
        name = f"{operation}({a}, {b})"
        if name not in self._variables:  # no arithmetic of ours: read where a shape has it
            pick = max if operation == "max" else min
            value = pick(self.unifier.value(a), self.unifier.value(b))
            made = self.unifier.fresh(operation, max(value, 0), open=True)
            self._variables[name] = made
            self.bounds[str(made)] = _extreme(
                operation, *(bounds_of(x, self.bounds) for x in (a, b))
            )
        return self._variables[name]

    def _variable(self, dim: Any, name: str) -> DimLike:
        if name not in self._variables:
            if name not in self._examples:
                self._examples |= _examples(dim, name, self._examples)
            made = self.unifier.fresh(name, self._examples[name], open=True)
            self._variables[name] = made
            variable = compat.dim_variable(dim, name)
            low, high = compat.dim_bounds(variable) if compat.is_symbolic(variable) else (1, None)
            self.bounds[str(made)] = max(low or 1, 1), high
        return self._variables[name]


def _number(dim: Any) -> Any:
    """An operand of an operation as JAX keeps it: a number may be an expression without variables."""
    if not compat.is_symbolic(dim):
        return dim
    terms = compat.dim_terms(dim)
    return terms[0][0] if len(terms) == 1 and not terms[0][1] else dim


def _extreme(operation: str, a: Any, b: Any) -> Any:
    """Bounds of a maximum or minimum."""
    pick = max if operation == "max" else min
    low, high = ((x, y) for x, y in zip(a, b, strict=True))

    def end(pair: Any, known_alone: bool) -> int | None:
        numbers = [x for x in pair if x is not None]
        if len(numbers) == 2 or (numbers and known_alone):
            return int(pick(numbers))
        return None

    return end(low, operation == "max"), end(high, operation == "min")


# ---- example sizes ---------------------------------------------------------------------------------------------


def _examples(dim: Any, name: str, taken: Mapping[str, int]) -> dict[str, int]:
    """A value for `name`, and with the first variable for all that constraints mention.

    Where none is found that satisfies the constraints any will do: an example is no fact.
    """
    constraints = [(eq, _tree(diff)) for eq, diff in compat.dim_constraints(dim)]
    names = sorted({n for _, t in constraints for n in _names(t)} - set(taken))
    free = [p for p in _EXAMPLES if p not in taken.values()]
    made = {name: free[0] if free else 6701 + 2 * len(taken)}
    if not names:
        return made
    names = names if name in names else [*names, name]
    limits = {n: _limits(dim, n) for n in names}
    candidate = made
    for candidate in itertools.islice(_candidates(names, limits, constraints), _TRIES):
        full = {**taken, **candidate}
        if all(_holds(eq, t, full) for eq, t in constraints):
            break
    return candidate


def _candidates(
    names: list[str], limits: Mapping[str, tuple[int, int | None]], constraints: Any
) -> Iterator[dict[str, int]]:
    """Multiples of the numbers in the constraints first, then anything within the limits."""
    rng = random.Random(7)
    divisors = {abs(x) for _, t in constraints for x in _constants(t) if 1 < abs(x) <= 1024}
    step = math.lcm(*divisors) if divisors else 1
    step = step if step <= 1 << 20 else 1
    for attempt in itertools.count():
        out = {}
        for n in names:
            low, high = limits[n]
            value = step * rng.choice(_EXAMPLES) if attempt % 2 == 0 else rng.randint(2, 4000)
            if high is not None and value > high:
                value = rng.randint(max(low, min(2, high)), high)
            out[n] = max(value, low)
        for eq, t in constraints:  # b == 2*c decides b
            if eq and isinstance(t, list):
                _settle(t, out)
        yield out


def _settle(tree: Any, values: dict[str, int]) -> None:
    """Makes ``name - rest == 0`` true by what it says of `name`, where it says it so plainly."""
    for coef, factors in tree:
        if (
            abs(coef) == 1
            and len(factors) == 1
            and factors[0][1] == 1
            and isinstance(factors[0][0], str)
        ):
            name = factors[0][0]
            rest = [t for t in tree if t[1] != factors]
            if name not in _names(rest):
                values[name] = -_value(rest, values) * coef
                return


def _limits(dim: Any, name: str) -> tuple[int, int | None]:
    variable = compat.dim_variable(dim, name)
    if not compat.is_symbolic(variable):
        return int(variable), int(variable)
    low, high = compat.dim_bounds(variable)
    return max(low or 1, 1), high


def _tree(dim: Any) -> Any:
    """An int, or a list of (coefficient, [(factor, exponent)]) with trees in the place of operands."""
    if not compat.is_symbolic(dim):
        return int(dim)
    return [
        (c, [(f if isinstance(f, str) else (f[0], tuple(map(_tree, f[1]))), n) for f, n in factors])
        for c, factors in compat.dim_terms(dim)
    ]


def _names(tree: Any) -> set[str]:
    if isinstance(tree, int):
        return set()
    found: set[str] = set()
    for _, factors in tree:
        for f, _ in factors:
            found |= {f} if isinstance(f, str) else set().union(*map(_names, f[1]))
    return found


def _constants(tree: Any) -> set[int]:
    if isinstance(tree, int):
        return {tree}
    found: set[int] = set()
    for c, factors in tree:
        found.add(c)
        for f, _ in factors:
            if not isinstance(f, str):
                found |= set().union(*map(_constants, f[1]))
    return found


def _value(tree: Any, values: Mapping[str, int]) -> int:
    if isinstance(tree, int):
        return tree
    total = 0
    for c, factors in tree:
        for f, n in factors:
            if isinstance(f, str):
                c *= values[f] ** n
            else:
                a, b = (_value(x, values) for x in f[1])
                c *= _OPERATIONS[f[0]](a, b) ** n
        total += c
    return total


_OPERATIONS: dict[str, Any] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
}


def _holds(equality: bool, tree: Any, values: Mapping[str, int]) -> bool:
    try:
        found = _value(tree, values)
    except (ZeroDivisionError, KeyError):
        return False
    return found == 0 if equality else found >= 0
