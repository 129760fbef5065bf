"""What twins have in common (see `twins`): slices of a jaxpr, and their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from recom_jax import compat, templates
from recom_jax.shape_solver import proofs

if TYPE_CHECKING:
    from recom_jax.detect import Detector

LEAST, LONGEST = 2, 128  # equations of a slice
LARGEST_CONSTANT = 1 << 16  # bytes; larger ones are their own twins only

_JOINS = ("concatenate", "stack")  # where columns meet: no slice goes on behind them
_FAR = 1 << 60
_TABLE = (
    "table",
)  # of a constant of which only rows are looked up: its values are looked at nowhere


def slices(jaxpr: Any) -> Iterator[Sequence[Any]]:
    """The equations in order, cut into slices: runs of which only the last one's results are read elsewhere."""
    eqns = jaxpr.eqns
    last: dict[int, int] = {}  # of each variable: the last equation that reads it
    joined: set[int] = set(map(id, jaxpr.outvars))
    for n, e in enumerate(eqns):
        if e.primitive.name in _JOINS:
            joined.update(map(id, e.invars))
        else:
            for v in e.invars:
                last[id(v)] = n
    last.update(dict.fromkeys(joined, _FAR))
    ends: list[int] = []
    for n, e in enumerate(eqns):
        read = n
        for v in e.outvars:
            at = last.get(id(v), n)
            if at > read:
                read = at
        ends.append(read)
    start = 0
    while start < len(eqns):
        open_until, end = -1, start
        for n in range(start, min(start + LONGEST, len(eqns))):
            if open_until <= n:
                end = n
            if ends[n] >= start + LONGEST:
                break
            if ends[n] > open_until:
                open_until = ends[n]
        yield eqns[start : end + 1]
        start = end + 1


class Keys:
    """Makes keys of slices, in one analysis."""

    def __init__(self, d: Detector) -> None:
        self.d = d
        self._params: dict[int, int] = {}  # by id: their number, -1 if they cannot be compared
        self._numbers: dict[Any, int] = {}
        self._same: dict[tuple[Any, ...], int] = {}
        self._literals: dict[int, Any] = {}
        self._constants: dict[int, Any] = {}
        self._bounds: dict[int, tuple[Any, ...]] = {}

    def of(self, eqns: Sequence[Any]) -> tuple[Any, tuple[Any, ...]] | None:
        """What twins have in common, and the leaves; None for a slice that has no twins."""
        d, literal = self.d, compat.Literal
        if d.forced and any(id(v) in d.forced for e in eqns for v in e.outvars):
            return None
        places: dict[int, int] = {}
        leaves: list[Any] = []
        parts: list[Any] = []
        unseen: dict[
            int, Any
        ] = {}  # by id of a constant: what has been asked of it so far, short of its values
        numbers, literals, add = self._params, self._literals, parts.append
        for e in eqns:
            number = numbers.get(id(e.params))
            if number is None:
                number = numbers[id(e.params)] = self._number(e.params)
            if number < 0:
                return None
            add(e.primitive.name)
            add(number)
            for v in e.invars:
                if v.__class__ is literal:
                    add(literals.get(id(v)) or self._literal(v))
                    continue
                place = places.get(id(v))
                if place is None:
                    if id(v) not in d.arguments:
                        return None
                    leaves.append(v)
                    place = places[id(v)] = -len(leaves)
                    parts += (v.aval.shape, getattr(v.aval, "dtype", None))
                    if id(v) in d.value_of:
                        asked = unseen[id(v)] = self._asked(e, v)
                        add(self._constant(d.value_of[id(v)]) if asked is None else asked)
                    elif id(v) in d.operands and not _is_table(e, v):
                        return None
                    if id(v) in d.operands:
                        add("read before")
                elif id(v) in unseen:
                    asked = unseen[id(v)]
                    if asked is not None and asked != self._asked(e, v):
                        unseen[id(v)] = None
                        add(self._constant(d.value_of[id(v)]))
                add(place)
            for v in e.outvars:
                places[id(v)] = len(places)
        return tuple(parts), tuple(leaves)

    def _asked(self, eqn: Any, var: Any) -> tuple[Any, ...] | None:
        """What an equation's rule asks of a constant; None: its values."""
        if _is_table(eqn, var):
            return _TABLE
        return self._boundaries(self.d.value_of[id(var)]) if _searched(eqn, var) else None

    def _literal(self, v: Any) -> Any:
        found = self._literals.get(id(v))
        if found is None:
            value = np.asarray(v.val)
            text = (v.aval.dtype, value.dtype, value.shape, value.tobytes())
            found = self._literals[id(v)] = (
                "literal",
                self._numbers.setdefault(text, len(self._numbers)),
            )
        return found

    def _number(self, params: dict[str, Any]) -> int:
        """The same number for the same parameters only; -1 where that cannot be said."""
        same = (*params, *map(id, params.values()))  # all parameters live as long as the jaxpr
        number = self._same.get(same)
        if number is None:
            found = tuple([(k, _exact(v)) for k, v in params.items()])
            try:
                number = self._numbers.setdefault(found, len(self._numbers))
            except TypeError:
                number = -1
            self._same[same] = number
        return number

    def _constant(self, value: Any) -> tuple[str, Any]:
        """What is equal for arrays of equal bytes only."""
        found = self._constants.get(id(value))
        if found is None:
            large = getattr(value, "nbytes", _FAR) > LARGEST_CONSTANT
            found = id(value) if large else np.asarray(value).tobytes()
            self._constants[id(value)] = found
        return "constant", found

    def _boundaries(self, value: Any) -> tuple[Any, ...]:
        """All that `detect_search` asks of the boundaries of a search."""
        found = self._bounds.get(id(value))
        if found is None:
            array = np.asarray(value)
            if array.ndim != 1 or not array.size or array.dtype.kind not in "iuf":
                return self._constant(value)
            found = self._bounds[id(value)] = (
                "boundaries",
                str(array.dtype),
                proofs.sorted_ascending(array),
                bool(array[-1] >= array[0]),
                proofs.has_subnormals(array),
                repr(proofs.uniform_grid(array)),
            )
        return found


def _searched(eqn: Any, var: Any) -> bool:
    """Whether an equation reads a variable as the boundaries of a search, and only so."""
    found = templates.recognise(eqn) if "jaxpr" in eqn.params else None
    return (
        found is not None
        and var is eqn.invars[found.boundaries]
        and var is not eqn.invars[found.query]
    )


def _is_table(eqn: Any, var: Any) -> bool:
    """Whether an equation looks up rows of a variable, and only that."""
    return (
        eqn.primitive.name == "gather"
        and var is eqn.invars[0]
        and var is not eqn.invars[1]
        and len(var.aval.shape) in (2, 3)
    )


def _exact(x: Any) -> Any:
    """1, 1.0 and True are equal in Python, and so are 0.0 and -0.0: not here."""
    kind = x.__class__
    if kind is str or x is None:
        return x
    if kind is int or kind is bool:
        return kind, x
    if kind is float:
        return kind, x.hex()
    if kind is tuple:
        for y in x:
            if y.__class__ is not int:
                return (kind, *map(_exact, x))
        return int, x
    if isinstance(x, (tuple, list)):
        return (kind, *map(_exact, x))
    if isinstance(x, (int, float)):
        return kind, repr(x)
    return (str(x.dtype), x.tobytes()) if isinstance(x, np.generic) else x


__all__ = ["Keys", "slices"]
