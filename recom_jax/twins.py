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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recom_jax import ir
from recom_jax.detect_values import Read, Val
from recom_jax.renaming import Renaming
from recom_jax.shape_solver.dims import DimLike
from recom_jax.twins_keys import LEAST, LONGEST, Keys, slices

if TYPE_CHECKING:
    from recom_jax.detect import Detector

ENABLED = True  # tests: let the rules run on every slice


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """What the rules did with a slice, as it was noted.

    Attributes:
      old: sizes of leaves that were operands before.
      before, after: how many reads, other gathers and new constants there were.
      operands: id of each new one, its value, and whether `Detector.val` knows it as that.
      values: of each variable made.
    """

    eqns: Sequence[Any]
    leaves: tuple[Any, ...]
    journal: list[tuple[Any, ...]]
    old: list[DimLike]
    before: tuple[int, int, int]
    after: tuple[int, int, int]
    operands: list[tuple[int, Val, bool]]
    values: list[Val | None]


@dataclasses.dataclass(slots=True)
class Slice:
    """The first slice of its kind, and what the rules did with it.

    Attributes:
      leaves: arguments and constants that it reads, in the order it reads them.
      useful: nothing was done that cannot be done again.
      fresh, joined: what was done to the unifier: symbols made, sizes made one.
      journal, late: what was done to the pool, to expressions in results and to others.
      sizes: symbols of the leaves that were operands before, and those made; order: how their names sort.
      first_read: how many reads there were before it.
      reads, others: found in it, each with the place of its equation.
      operands: variables that became operands, and whether `Detector.val` knows them as that.
      outs: ids of the variables that it makes. values: of those, by their places.
      results: values of the last equation's.
      twins: how many others there are.
    """

    eqns: Sequence[Any]
    leaves: tuple[Any, ...]
    useful: bool
    fresh: tuple[tuple[str, str, int, bool], ...] = ()
    joined: tuple[tuple[DimLike, DimLike], ...] = ()
    journal: tuple[tuple[Any, ...], ...] = ()
    late: tuple[tuple[Any, ...], ...] = ()
    sizes: tuple[DimLike, ...] = ()
    order: list[int] = dataclasses.field(default_factory=list)
    first_read: int = 0
    reads: tuple[tuple[Read, int], ...] = ()
    others: tuple[tuple[int, str], ...] = ()
    operands: tuple[tuple[Any, Val, bool], ...] = ()
    outs: tuple[int, ...] = ()
    values: tuple[tuple[int, Val], ...] = ()
    results: tuple[tuple[int, Val], ...] = ()
    twins: int = 0


class Twins:
    """Finds twins in one analysis.

    Attributes:
      later: values that nobody asked for yet, by id of their variable.
    """

    def __init__(self, d: Detector) -> None:
        self.d = d
        self.later: dict[int, tuple[Renaming, Val]] = {}
        self._slices: dict[Any, _Record | Slice] = {}
        self._keys = Keys(d)

    @property
    def first(self) -> list[Slice]:
        """The slices that have twins, or could have."""
        return [s for s in self._slices.values() if isinstance(s, Slice)]

    def value(self, var: Any) -> Val:
        """The value of a variable inside a slice."""
        renaming, value = self.later.pop(id(var))
        late, renaming.late = renaming.late, ()
        renaming.again(late)
        return renaming.val(value)

    def run(self, jaxpr: Any) -> None:
        """Applies the rules to the equations of a jaxpr, in order."""
        if not ENABLED or self.d.symbolic:
            self.d.step(jaxpr.eqns)
            return
        for eqns in slices(jaxpr):
            self._slice(eqns)

    def _slice(self, eqns: Sequence[Any]) -> None:
        """Applies the rules to a slice, or renames what they did with its twin."""
        found = self._keys.of(eqns) if LEAST <= len(eqns) <= LONGEST else None
        if found is None:
            self.d.step(eqns)
            return
        key, leaves = found
        first = self._slices.get(key)
        if isinstance(first, _Record):
            first = self._slices[key] = self._first(first)
        if first is not None and not first.useful:
            self.d.step(eqns)
        elif first is None or not self._again(first, eqns, leaves):
            self._slices[key] = self._record(eqns, leaves)

    def _old(self, leaves: Sequence[Any]) -> list[DimLike]:
        """The sizes of leaves that were read before."""
        found = self.d.operands
        return [n for v in leaves if id(v) in found for n in found[id(v)].shape]

    # ---- the first of its kind ----------------------------------------------------------------------------

    def _record(self, eqns: Sequence[Any], leaves: tuple[Any, ...]) -> _Record:
        """Lets the rules run, and notes what they do: most of it is looked at only if there is a twin."""
        d = self.d
        before = len(d.reads), len(d.others), len(d.extra_consts)
        operands, old = len(d.operands), self._old(leaves)
        journal: list[tuple[Any, ...]] = []
        d.pool.journal = d.unifier.journal = journal
        try:
            d.step(eqns)
        finally:
            d.pool.journal = d.unifier.journal = None
        made = [v for e in eqns for v in e.outvars]
        new = list(itertools.islice(reversed(d.operands.items()), len(d.operands) - operands))[::-1]
        return _Record(
            eqns,
            leaves,
            journal,
            old,
            before,
            (len(d.reads), len(d.others), len(d.extra_consts)),
            [(k, v, k in d.env) for k, v in new],
            [d.env.get(id(v)) for v in made],
        )

    def _first(self, r: _Record) -> Slice:
        """A slice that has a twin."""
        d = self.d
        reads, others = d.reads[r.before[0] : r.after[0]], d.others[r.before[1] : r.after[1]]
        row = {id(e): n for n, e in enumerate(r.eqns)}
        made = [v for e in r.eqns for v in e.outvars]
        variables = {id(v): v for v in (*r.leaves, *made)}
        takes = {id(x[1]): x[1] for x in r.journal if x[0] in ("read", "same_reads")}
        numbers = {k: sorted(d.pool.origins[k]) for k in takes}
        useful = (
            all(id(e) in row for e in (*(x.eqn for x in reads), *(e for e, _ in others)))
            and all(id(x.table) in variables for x in reads)
            and r.before[2] == r.after[2]
            and all(x[0] != "resolve" for x in r.journal)
            and all(not isinstance(n, int) and n.name is not None for n in r.old)
            and all(n >= r.before[0] for ns in numbers.values() for n in ns)
        )
        if not useful:
            return Slice(r.eqns, r.leaves, useful=False)
        sizes = [*r.old, *(x[1] for x in r.journal if x[0] == "fresh")]
        last = len(made) - len(r.eqns[-1].outvars)
        values = [(k, v) for k, v in enumerate(r.values) if v is not None]
        results = [(k - last, v) for k, v in values if k >= last]
        done = [x for x in r.journal if x[0] == "note"]
        done += [("read", takes[k], n) for k, ns in numbers.items() for n in ns if n < r.after[0]]
        seen: set[int] = set()
        for v in (*(v for _, v in results), *(v for _, v, _ in r.operands)):
            for e in [v.expr] if v.expr is not None else [p.expr for p in v.parts]:
                ir.walk(e, seen)
        return Slice(
            r.eqns,
            r.leaves,
            useful=True,
            fresh=tuple((x[1].name, *x[2:]) for x in r.journal if x[0] == "fresh"),
            joined=tuple(x[1:] for x in r.journal if x[0] == "unify"),
            journal=tuple(x for x in done if id(x[1]) in seen),
            late=tuple(x for x in done if id(x[1]) not in seen),
            sizes=tuple(sizes),
            order=_order([str(n) for n in sizes]),
            first_read=r.before[0],
            reads=tuple((x, row[id(x.eqn)]) for x in reads),
            others=tuple((row[id(e)], why) for e, why in others),
            operands=tuple((variables[k], v, known) for k, v, known in r.operands),
            outs=tuple(map(id, made)),
            values=tuple(values),
            results=tuple(results),
        )

    # ---- its twins ----------------------------------------------------------------------------------------

    def _again(self, first: Slice, eqns: Sequence[Any], leaves: tuple[Any, ...]) -> bool:
        """What was done with `first`, done with its twin; False, and nothing is, where names would sort differently."""
        d = self.d
        old = self._old(leaves)
        serial = d.unifier.next_serial()
        names = [str(n) if isinstance(n, int) else n.name or str(n) for n in old]
        names += [f"{x[1]}_{n}" for n, x in enumerate(first.fresh, serial)]
        if _order(names) != first.order:
            return False
        outs = [v for e in eqns for v in e.outvars]
        variables = dict(zip(first.outs, outs, strict=True))
        variables.update(zip(map(id, first.leaves), leaves, strict=True))
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
        for place, value in first.values:
            self.later[id(outs[place])] = renaming, value
        for k, value in first.results:
            var = eqns[-1].outvars[k]
            self.later.pop(id(var))
            made = d.env[id(var)] = renaming.val(value)
            if made.expr is not None and value.expr is not None:
                d.pool.twins[id(made.expr)] = value.expr, renaming
        if not first.twins:  # alone, it is not worth a renaming to itself
            own = [v for e in first.eqns for v in e.outvars]
            itself = Renaming(
                d.pool,
                {id(v): v for v in (*own, *first.leaves)},
                {str(n): n for n in first.sizes},
            )
            for _, value in first.results:
                if value.expr is not None:
                    d.pool.twins[id(value.expr)] = value.expr, itself
        first.twins += 1
        return True


def _order(names: Sequence[str]) -> list[int]:
    """How the names sort. Where terms are sorted by name, those of twins are sorted alike."""
    return sorted(range(len(names)), key=names.__getitem__)


__all__ = ["Slice", "Twins"]
