"""Which dimensions are the same size, recorded by provenance and never guessed from values.

Each (operand, axis) and each literal size gets its own symbol, together with the value it has in
the trace at hand. Symbols become one only where an equation demanded it; two batches that happen to
agree stay apart. The known values serve to refuse wrong equalities, not to find new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from .dims import Dim, Poly, evaluate, substitute, symbol, symbols
from .solver import isolate, solve

_Equation: TypeAlias = tuple[Dim, Dim]


class ShapeConflict(ValueError):
    """Two dimensions were declared equal although their sizes differ."""

    def __init__(self, a: Dim, b: Dim, a_value: int, b_value: int) -> None:
        super().__init__(f"dimension {a} (= {a_value}) cannot equal {b} (= {b_value})")
        self.dims = a, b
        self.values = a_value, b_value


class Unifier:
    """Union-find over symbols, with the equalities that it cannot express queued for the solver.

    Equalities between symbols, or of a symbol with a number, are settled at once. Any other (``u ==
    s - 1``, ``u == 2*s``) waits until the next :meth:`resolve` or :meth:`finish`, and all that wait
    are solved together, one solve for each group that shares symbols.
    """

    __slots__ = (
        "_const",
        "_id",
        "_literal",
        "_names",
        "_open",
        "_parent",
        "_pending",
        "_polys",
        "_residual",
        "_resolved",
        "_solved",
        "_values",
        "journal",
    )

    def __init__(self) -> None:
        self._id: dict[str, int] = {}
        self._names: list[str] = []
        self._polys: list[Poly] = []
        self._parent: list[int] = []
        self._literal: list[bool] = []
        self._values: dict[str, int] = {}
        self._open: set[str] = set()
        self._const: dict[int, int] = {}  # root -> number
        self._solved: dict[int, Dim] = {}  # root -> polynomial of other symbols
        self._pending: list[_Equation] = []
        self._resolved: dict[Poly, Dim] = {}  # of polynomials, as long as nothing is learned
        self.journal: list[tuple[object, ...]] | None = None  # what is being recorded (`twins`)
        self._residual: dict[
            int, list[_Equation]
        ] = {}  # root -> equations that mention it, unsolved

    def fresh(self, hint: str, value: int, *, literal: bool = False, open: bool = False) -> Poly:
        """A new symbol named after ``hint``, of size ``value`` in this trace.

        ``literal`` marks a size written in the program, which yields to operands' symbols as name
        of a class. ``open`` marks one that the trace leaves open (`jax.export`): ``value`` is then
        an example, and proves nothing. Raises ValueError for a negative size.
        """
        if value < 0:
            raise ValueError(f"size {hint} = {value} is negative")
        name, n = hint, 1
        while name in self._id:
            name, n = f"{hint}_{len(self._names) + n - 1}", n + 1
        poly = symbol(name)
        self._id[name] = len(self._names)
        self._parent.append(len(self._names))
        self._names.append(name)
        self._polys.append(poly)
        self._literal.append(literal)
        self._values[name] = int(value)
        if open:
            self._open.add(name)
        if self.journal is not None:
            self.journal.append(("fresh", poly, hint, value, literal))
        return poly

    def next_serial(self) -> int:
        """The number that the name of the next symbol will have."""
        return len(self._names)

    def value(self, d: Dim) -> int:
        """The size of ``d`` in this trace. Raises KeyError for a symbol that is not of this
        unifier."""
        if isinstance(d, int):
            return d
        return self._values[d.name] if d.name is not None else evaluate(d, self._values)

    def known(self, d: Dim) -> Dim:
        """``d`` as this trace knows it: its number, or a polynomial in the symbols left open.

        Two sizes are equal in every call the trace stands for if this is equal; of an open size
        nothing else may be concluded from its `value`.
        """
        if not self._open or isinstance(d, int):
            return self.value(d)
        d = self.resolve(d)
        closed: dict[str, Dim] = {n: self._values[n] for n in symbols(d) if n not in self._open}
        return substitute(d, closed) if closed else d

    def unify(self, a: Dim, b: Dim) -> None:
        """Record that ``a`` and ``b`` are equal. Raises :class:`ShapeConflict` if their values
        differ."""
        if a is b:
            return
        if self._open and self.known(a) != self.known(b):
            return  # JAX may know why they are equal; here an example would be no proof
        av, bv = self.value(a), self.value(b)
        if av != bv:
            raise ShapeConflict(a, b, av, bv)
        if self.journal is not None:
            self.journal.append(("unify", a, b))
        ra, rb = self._root_of(a), self._root_of(b)
        if ra is not None and rb is not None:
            if ra != rb:
                self._merge(ra, rb)
        elif ra is not None and isinstance(b, int):
            self._set_const(ra, b)
        elif rb is not None and isinstance(a, int):
            self._set_const(rb, a)
        elif a != b:
            self._pending.append((a, b))

    def pin(self, d: Dim) -> None:
        """Make ``d`` the number it is in this trace: for sizes the program is compiled for (table
        rows)."""
        self.unify(d, self.value(d))

    def resolve(self, d: Dim) -> Dim:
        """The canonical form of ``d``: representatives, numbers and solved symbols put in their
        place.

        Two dimensions are known to be equal when they resolve to the same thing. KeyError as in
        `value`.
        """
        if isinstance(d, int):
            return d
        if self.journal is not None:
            self.journal.append(("resolve", d))
        if self._pending:
            self.finish()
        if d.name is not None:
            return self._canon_root(self._find(self._id[d.name]))
        found = self._resolved.get(d)
        if found is None:
            found = self._resolved[d] = self._canon(d)
        return found

    def finish(self) -> None:
        """Solve every queued equality now."""
        while self._pending:
            equations, self._pending = self._pending, []
            hard = []
            for a, b in equations:
                a, b = self._canon(a), self._canon(b)
                if a != b:
                    found = isolate(a - b, self._rank)
                    if found is None:
                        hard.append((a, b))
                    else:
                        self._record(*found)
            if hard:
                hard = [(self._canon(a), self._canon(b)) for a, b in hard]
                for group in _groups(self._with_residual(hard)):
                    self._solve(group)

    def _rank(self, name: str) -> tuple[bool, int]:
        index = self._id[name]
        return self._literal[index], index

    def _solve(self, group: list[_Equation]) -> None:
        names = {n for a, b in group for n in symbols(a) | symbols(b)}
        solver = solve(group, None, sorted(names, key=self._rank))
        for name, value in solver.solution.items():
            self._record(name, value)
        for p in solver.residual:
            for n in symbols(p):
                self._residual.setdefault(self._id[n], []).append((p, 0))

    def _record(self, name: str, value: Dim) -> None:
        root = self._id[name]
        if isinstance(value, int):
            self._const[root] = value
        elif value.name is not None:
            self._parent[root] = self._id[value.name]
        else:
            self._solved[root] = value
        self._touch(root)

    def _with_residual(self, equations: list[_Equation]) -> list[_Equation]:
        """``equations`` and the unsolved older ones that they touch, directly or through each
        other."""
        if not self._residual:
            return equations
        out, seen = list(equations), set(equations)
        work = list(equations)
        while work:
            a, b = work.pop()
            for n in symbols(a) | symbols(b):
                for p, q in self._residual.pop(self._id[n], ()):
                    again = self._canon(p), self._canon(q)
                    if again not in seen:
                        seen.add(again)
                        out.append(again)
                        work.append(again)
        return [(a, b) for a, b in out if a != b]

    def _canon(self, d: Dim) -> Dim:
        if isinstance(d, int):
            return d
        if d.name is not None:
            return self._canon_root(self._find(self._id[d.name]))
        changed: dict[str, Dim] = {}
        for n in symbols(d):
            got = self._canon_root(self._find(self._id[n]))
            if not isinstance(got, Poly) or got.name != n:
                changed[n] = got
        return substitute(d, changed) if changed else d

    def _canon_root(self, root: int) -> Dim:
        if root in self._const:
            return self._const[root]
        solved = self._solved.get(root)
        if solved is None:
            return self._polys[root]
        now = self._canon(solved)
        if now is not solved:
            self._solved[root] = now  # the path compression of solved symbols
        return now

    def _find(self, i: int) -> int:
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def _root_of(self, d: Dim) -> int | None:
        if isinstance(d, int) or d.name is None:
            return None
        return self._find(self._id[d.name])

    def _merge(self, ra: int, rb: int) -> None:
        """One symbol from here on, even where what either stood for has to be solved anew."""
        if (self._literal[rb], rb) < (self._literal[ra], ra):
            ra, rb = rb, ra
        mine, theirs = self._solved.get(ra), self._solved.pop(rb, None)
        if theirs is not None:
            self._pending.append((self._polys[ra] if mine is None else mine, theirs))
        elif mine is not None:
            self._pending.append((self._polys[ra], self._solved.pop(ra)))
        value = self._const.pop(rb, None)
        self._parent[rb] = ra
        self._touch(rb)
        if value is not None:
            self._set_const(ra, value)

    def _set_const(self, root: int, value: int) -> None:
        if root in self._solved:
            self._pending.append((self._solved.pop(root), value))
        if root not in self._const:
            self._const[root] = value
            self._touch(root)

    def _touch(self, root: int) -> None:
        """A symbol changed: equations about it that had no solution may have one now."""
        self._resolved.clear()
        if root in self._residual:
            self._pending.extend(self._residual.pop(root))


def _groups(equations: Iterable[_Equation]) -> list[list[_Equation]]:
    """The equations, parted so that no two groups share a symbol."""
    home: dict[str, list[_Equation]] = {}
    for eq in equations:
        names = symbols(eq[0]) | symbols(eq[1])
        group = [eq]
        for n in names:
            other = home.get(n)
            if other is not None and other is not group:
                if len(other) > len(group):
                    group, other = other, group
                group.extend(other)
                for e in other:
                    for m in symbols(e[0]) | symbols(e[1]):
                        home[m] = group
        for n in names:
            home[n] = group
    unique = {id(g): g for g in home.values()}
    return list(unique.values())
