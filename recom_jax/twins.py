"""Columns of equal structure are analysed once.

A model of a thousand columns holds a few kinds of them. `Twins` cuts a jaxpr into *slices*: neighbouring equations of
which only the last one's results are read elsewhere. Two slices are twins if they are the same equations (primitives,
parameters, literals) on arguments of the same shapes and dtypes and constants of the same values, as long as no
equation before them reads these arguments (constants and tables may be read before). The rules run on the first of
them, and what they did is written down: sizes named and joined, operands, reads, notes. For its twins that is done
again in other names: a `Renaming` maps variables and sizes, and expressions node by node.

So the result is what the rules would have made of each slice; `ENABLED = False` lets them (tests compare the two).
Later stages find in `ir.Pool.twins` that a result is the renamed form of another, and rename what they made of that
one (`simplify`, `emit_twins`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from recom_jax import compat, ir, templates
from recom_jax.detect_values import Part, Read, Val
from recom_jax.shape_solver import proofs
from recom_jax.shape_solver.dims import DimLike, substitute

if TYPE_CHECKING:
    from recom_jax.detect import Detector

ENABLED = True  # tests: let the rules run on every slice

LEAST, LONGEST = 2, 128  # equations of a slice
LARGEST_CONSTANT = 1 << 16  # bytes; larger ones are their own twins only

_JOINS = ("concatenate", "stack")  # where columns meet: no slice goes on behind them
_FAR = 1 << 60


class Renaming:
    """The variables and sizes of one slice in the place of another's.

    Attributes:
      variables: by the ids of those of the first slice.
      sizes: by the names of the first slice's symbols.
    """

    def __init__(self, pool: ir.Pool, variables: dict[int, Any], sizes: dict[str, DimLike]) -> None:
        self.pool, self.variables, self.sizes = pool, variables, sizes
        self.memo: dict[int, ir.Expr] = {}
        self.late: Sequence[
            tuple[Any, ...]
        ] = ()  # of the journal: what concerns values nobody asked for yet
        self.first_read = 0  # how many more reads were before this slice than before the first one

    def dim(self, d: DimLike) -> DimLike:
        if isinstance(d, int):
            return d
        return self.sizes[d.name] if d.name is not None else substitute(d, self.sizes)

    def expr(self, e: ir.Expr) -> ir.Expr:
        return self.pool.renamed(e, self.variables, self.dim, self.memo)

    def val(self, v: Val) -> Val:
        shape = tuple(map(self.dim, v.shape))
        if v.expr is not None:
            return Val(shape, self.expr(v.expr))
        return Val(shape, None, tuple(map(self._part, v.parts)))

    def _part(self, p: Part) -> Part:
        shape, strides = tuple(map(self.dim, p.shape)), tuple(map(self.dim, p.strides))
        return Part(self.expr(p.expr), shape, self.dim(p.offset), strides)

    def again(self, journal: Sequence[tuple[Any, ...]]) -> None:
        """Does what a journal of the pool's says, in these names."""
        for what, e, value in journal:
            new: Any = self.expr(e)
            if what == "note":
                self.pool.note(new, value)
            elif what == "read":
                self.pool.read(new, value + self.first_read)
            else:
                self.pool.same_reads(new, self.expr(value))  # type: ignore[arg-type]


@dataclasses.dataclass(slots=True)
class Slice:
    """The first slice of its kind, and what the rules did with it.

    Attributes:
      leaves: arguments and constants that it reads, in the order it reads them.
      fresh, joined: what was done to the unifier: symbols made, sizes made one.
      journal, late: what was done to the pool, to expressions in results and to others.
      sizes: symbols of the leaves that were operands before, and those made; order: how their names sort.
      first_read: how many reads there were before it.
      reads, others: found in it, each with the place of its equation.
      operands: variables that became operands, and whether `Detector.val` knows them as that.
      values: of the variables that it makes.
      results: values of the last equation's.
      useful: nothing was done that cannot be done again.
      twins: how many others there are.
    """

    eqns: Sequence[Any]
    leaves: tuple[Any, ...]
    fresh: tuple[tuple[str, str, int, bool], ...]
    joined: tuple[tuple[DimLike, DimLike], ...]
    journal: tuple[tuple[Any, ...], ...]
    late: tuple[tuple[Any, ...], ...]
    sizes: tuple[DimLike, ...]
    order: list[int]
    first_read: int
    reads: tuple[tuple[Read, int], ...]
    others: tuple[tuple[int, str], ...]
    operands: tuple[tuple[Any, Val, bool], ...]
    values: tuple[tuple[Any, Val], ...]
    results: tuple[tuple[int, Val], ...]
    useful: bool
    twins: int = 0


class Twins:
    """Finds twins in one analysis.

    Attributes:
      later: values that nobody asked for yet, by id of their variable.
    """

    def __init__(self, d: Detector) -> None:
        self.d = d
        self.later: dict[int, tuple[Renaming, Val]] = {}
        self._slices: dict[Any, Slice] = {}
        self._params: dict[int, int] = {}  # by id: their number, -1 if they cannot be compared
        self._numbers: dict[Any, int] = {}
        self._same: dict[tuple[Any, ...], int] = {}
        self._literals: dict[int, Any] = {}
        self._constants: dict[int, Any] = {}
        self._bounds: dict[int, tuple[Any, ...]] = {}

    def value(self, var: Any) -> Val:
        """The value of a variable inside a slice."""
        renaming, value = self.later.pop(id(var))
        late, renaming.late = renaming.late, ()
        renaming.again(late)
        return renaming.val(value)

    # ---- slices -------------------------------------------------------------------------------------------

    def slices(self, jaxpr: Any) -> Iterator[Sequence[Any]]:
        """The equations, cut into slices."""
        eqns = jaxpr.eqns
        if not ENABLED or self.d.symbolic:
            yield eqns
            return
        last: dict[int, int] = {}  # of each variable: the last equation that reads it
        joined: set[int] = set(map(id, jaxpr.outvars))
        for n, e in enumerate(eqns):
            if e.primitive.name in _JOINS:
                joined.update(map(id, e.invars))
            else:
                for v in e.invars:
                    last[id(v)] = n
        last.update(dict.fromkeys(joined, _FAR))
        ends = [max([last.get(id(v), n) for v in e.outvars], default=n) for n, e in enumerate(eqns)]
        start = 0
        while start < len(eqns):
            open_until, end = -1, start
            for n in range(start, min(start + LONGEST, len(eqns))):
                if open_until <= n:
                    end = n
                if ends[n] >= start + LONGEST:
                    break
                open_until = max(open_until, ends[n])
            yield eqns[start : end + 1]
            start = end + 1

    def run(self, eqns: Sequence[Any]) -> None:
        """Applies the rules to a slice, or renames what they did with its twin."""
        found = self._key(eqns) if LEAST <= len(eqns) <= LONGEST else None
        if found is None:
            self.d.step(eqns)
            return
        key, leaves = found
        first = self._slices.get(key)
        if first is not None and not first.useful:
            self.d.step(eqns)
        elif first is None or not self._again(first, eqns, leaves):
            self._slices[key] = self._record(eqns, leaves)

    # ---- keys ---------------------------------------------------------------------------------------------

    def _key(self, eqns: Sequence[Any]) -> tuple[Any, tuple[Any, ...]] | None:
        """What twins have in common, and the leaves; None for a slice that has no twins."""
        d, literal = self.d, compat.Literal
        if d.forced and any(id(v) in d.forced for e in eqns for v in e.outvars):
            return None
        places: dict[int, int] = {}
        leaves: list[Any] = []
        parts: list[Any] = []
        bounds: dict[int, Any] = {}  # constants that searches alone have read so far, by id
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
                        if _searched(e, v):
                            bounds[id(v)] = v
                            add(self._boundaries(d.value_of[id(v)]))
                        else:
                            add(self._constant(d.value_of[id(v)]))
                    elif id(v) in d.operands and not _is_table(e, v):
                        return None
                    if id(v) in d.operands:
                        add("read before")
                elif (
                    bounds and id(v) in bounds and not _searched(e, v)
                ):  # its values count after all
                    add(self._constant(d.value_of[id(bounds.pop(id(v)))]))
                add(place)
            for v in e.outvars:
                places[id(v)] = len(places)
        return tuple(parts), tuple(leaves)

    def _literal(self, v: Any) -> Any:
        found = self._literals.get(id(v))
        if found is None:
            value = np.asarray(v.val)
            text = (str(v.aval.dtype), str(value.dtype), value.shape, value.tobytes())
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

    def _old(self, leaves: Sequence[Any]) -> list[DimLike]:
        """The sizes of leaves that were read before."""
        found = self.d.operands
        return [n for v in leaves if id(v) in found for n in found[id(v)].shape]

    # ---- the first of its kind ----------------------------------------------------------------------------

    def _record(self, eqns: Sequence[Any], leaves: tuple[Any, ...]) -> Slice:
        d = self.d
        reads, others, extra = len(d.reads), len(d.others), len(d.extra_consts)
        operands, old = len(d.operands), self._old(leaves)
        journal: list[tuple[Any, ...]] = []
        d.pool.journal = d.unifier.journal = journal
        try:
            d.step(eqns)
        finally:
            d.pool.journal = d.unifier.journal = None
        row = {id(e): n for n, e in enumerate(eqns)}
        made = [v for e in eqns for v in e.outvars]
        variables = {id(v): v for v in (*leaves, *made)}
        new = list(itertools.islice(reversed(d.operands.items()), len(d.operands) - operands))[::-1]
        found = [*((r.eqn, "") for r in d.reads[reads:]), *d.others[others:]]
        useful = (
            all(id(e) in row for e, _ in found)
            and all(id(r.table) in variables for r in d.reads[reads:])
            and len(d.extra_consts) == extra
            and all(x[0] != "resolve" for x in journal)
            and all(not isinstance(n, int) and n.name is not None for n in old)
        )
        sizes = [*old, *(x[1] for x in journal if x[0] == "fresh")]
        values = [(v, d.env[id(v)]) for v in made if id(v) in d.env]
        results = [(k, d.env[id(v)]) for k, v in enumerate(eqns[-1].outvars) if id(v) in d.env]
        takes = {id(x[1]): x[1] for x in journal if x[0] in ("read", "same_reads")}
        done = [x for x in journal if x[0] == "note"]
        done += [("read", t, n) for k, t in takes.items() for n in sorted(d.pool.origins[k])]
        useful &= all(n >= reads for k in takes for n in d.pool.origins[k])
        seen: set[int] = set()
        for v in (*(v for _, v in results), *(v for _, v in new)):
            for e in [v.expr] if v.expr is not None else [p.expr for p in v.parts]:
                ir.walk(e, seen)
        return Slice(
            eqns,
            leaves,
            tuple((x[1].name, *x[2:]) for x in journal if x[0] == "fresh"),
            tuple(x[1:] for x in journal if x[0] == "unify"),
            tuple(x for x in done if id(x[1]) in seen),
            tuple(x for x in done if id(x[1]) not in seen),
            tuple(sizes) if useful else (),
            _order([str(n) for n in sizes]),
            reads,
            tuple((r, row[id(r.eqn)]) for r in d.reads[reads:]) if useful else (),
            tuple((row[id(e)], why) for e, why in d.others[others:]) if useful else (),
            tuple((variables[k], v, k in d.env) for k, v in new),
            tuple(values),
            tuple(results),
            useful,
        )

    # ---- its twins ----------------------------------------------------------------------------------------

    def _again(self, first: Slice, eqns: Sequence[Any], leaves: tuple[Any, ...]) -> bool:
        """What was done with `first`, done with its twin; False, and nothing is, where names would sort differently."""
        d = self.d
        old = self._old(leaves)
        serial = d.unifier.next_serial()
        names = [str(n) for n in old]
        names += [f"{x[1]}_{n}" for n, x in enumerate(first.fresh, serial)]
        if _order(names) != first.order:
            return False
        variables = {id(a): b for a, b in zip(first.leaves, leaves, strict=True)}
        for a, b in zip(first.eqns, eqns, strict=True):
            for v, w in zip(a.outvars, b.outvars, strict=True):
                variables[id(v)] = w
        sizes: dict[str, DimLike] = {str(a): b for a, b in zip(first.sizes, old, strict=False)}
        renaming = Renaming(d.pool, variables, sizes)
        for name, hint, size, literal in first.fresh:
            sizes[name] = d.unifier.fresh(hint, size, literal=literal)
        for one, other in first.joined:
            d.unifier.unify(renaming.dim(one), renaming.dim(other))
        renaming.first_read = len(d.reads) - first.first_read
        renaming.again(first.journal)
        renaming.late = first.late
        for var, value, known in first.operands:
            new = renaming.val(value)
            d.operands[id(variables[id(var)])] = new
            if known:
                d.env[id(variables[id(var)])] = new
        for r, row in first.reads:
            d.reads.append(Read(variables[id(r.table)], eqns[row], r.reason))
        d.others += [(eqns[row], why) for row, why in first.others]
        for var, value in first.values:
            self.later[id(variables[id(var)])] = renaming, value
        for k, value in first.results:
            var = eqns[-1].outvars[k]
            self.later.pop(id(var))
            made = d.env[id(var)] = renaming.val(value)
            if made.expr is not None and value.expr is not None:
                d.pool.twins[id(made.expr)] = value.expr, renaming
        if not first.twins:  # alone, it is not worth a renaming to itself
            own = {k: v for e in first.eqns for k, v in ((id(v), v) for v in e.outvars)}
            itself = Renaming(
                d.pool,
                {**own, **{id(v): v for v in first.leaves}},
                {str(n): n for n in first.sizes},
            )
            for _, value in first.results:
                if value.expr is not None:
                    d.pool.twins[id(value.expr)] = value.expr, itself
        first.twins += 1
        return True


def _searched(eqn: Any, var: Any) -> bool:
    """Whether an equation reads a variable as the boundaries of a search, and only so."""
    found = templates.recognise(eqn) if "jaxpr" in eqn.params else None
    return (
        found is not None
        and var is eqn.invars[found.boundaries]
        and var is not eqn.invars[found.query]
    )


def _is_table(eqn: Any, var: Any) -> bool:
    return eqn.primitive.name == "gather" and var is eqn.invars[0] and var is not eqn.invars[1]


def _order(names: Sequence[str]) -> list[int]:
    """How the names sort. Where terms are sorted by name, those of twins are sorted alike."""
    return sorted(range(len(names)), key=names.__getitem__)


def _exact(x: Any) -> Any:
    """1, 1.0 and True are equal in Python, and so are 0.0 and -0.0: not here."""
    if isinstance(x, float):
        return "float", x.hex()
    if isinstance(x, (bool, int)):
        return type(x), x
    if isinstance(x, np.generic):
        return str(x.dtype), x.tobytes()
    return (type(x), *map(_exact, x)) if isinstance(x, (tuple, list)) else x


__all__ = ["Renaming", "Twins"]
