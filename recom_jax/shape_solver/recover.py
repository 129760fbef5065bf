"""How the sizes that a launch needs are computed from the shapes of its operands and results.

This is the one place that decides it, and its answer is data: a straight line of operations that
C++ or CUDA text, or :meth:`Recovery.evaluate`, follows without further thought. All operations are
on exact integers (64 bits in emitted code, never 32: RECom fault 7).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .dims import Atom, Dim, Poly, atom_dim, atoms, terms_of

SourceKind: TypeAlias = Literal["operand", "result"]
Source: TypeAlias = tuple[SourceKind, int, int, Dim]
OpKind: TypeAlias = Literal["const", "operand_axis", "result_axis", "add", "sub", "mul", "floordiv"]


class Unrecoverable(LookupError):
    """A dimension that no combination of the given shapes yields."""

    def __init__(self, dim: Dim, missing: Atom) -> None:
        super().__init__(f"cannot compute dimension {dim}: no shape gives {missing}")
        self.dim = dim


@dataclass(frozen=True, slots=True)
class DimOp:
    """One step. ``const``: the number ``a``. ``operand_axis``, ``result_axis``: axis ``b`` of array
    ``a``.

    Otherwise ``a`` and ``b`` are the positions of earlier steps; ``floordiv`` rounds down.
    """

    kind: OpKind
    a: int
    b: int


class Recovery:
    """The steps, in an order in which each may be computed, and where each needed dimension ends
    up."""

    __slots__ = ("_where", "ops")
    ops: tuple[DimOp, ...]

    def __init__(self, ops: Sequence[DimOp], where: dict[Dim, int]) -> None:
        self.ops = tuple(ops)
        self._where = where

    def index_of(self, dim: Dim) -> int:
        """The position in ``ops`` of the step whose value is ``dim``. KeyError if it was not
        needed."""
        return self._where[dim]

    def evaluate(
        self, operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]] = ()
    ) -> list[int]:
        """The value of every step, for these shapes. IndexError when a shape that is read is
        missing."""
        out: list[int] = []
        for op in self.ops:
            if op.kind == "const":
                out.append(op.a)
            elif op.kind == "operand_axis":
                out.append(int(operand_shapes[op.a][op.b]))
            elif op.kind == "result_axis":
                out.append(int(result_shapes[op.a][op.b]))
            elif op.kind == "add":
                out.append(out[op.a] + out[op.b])
            elif op.kind == "sub":
                out.append(out[op.a] - out[op.b])
            elif op.kind == "mul":
                out.append(out[op.a] * out[op.b])
            else:
                out.append(out[op.a] // out[op.b])
        return out


def recover(needed: Sequence[Dim], sources: Sequence[Source]) -> Recovery:
    """How to compute each of ``needed`` from ``sources``, the dimensions that shapes hold at run
    time.

    A symbol is read where a shape is that bare symbol, operands before results; failing that it is
    solved for from a shape that is linear in it with a number as coefficient, and whose other
    symbols are known. Raises :class:`Unrecoverable`, naming the dimension, when some symbol of it
    is found in neither way.
    """
    builder = _Builder(sources)
    where = {dim: builder.emit(dim, dim) for dim in needed}
    return Recovery(builder.ops, where)


def unrecoverable(needed: Iterable[Dim], sources: Sequence[Source]) -> dict[Dim, Unrecoverable]:
    """Those of ``needed`` for which :func:`recover` would raise, and what it would raise."""
    builder = _Builder(sources)
    found: dict[Dim, Unrecoverable] = {}
    for dim in needed:
        try:
            builder.emit(dim, dim)
        except Unrecoverable as why:
            found[dim] = why
    return found


class _Builder:
    def __init__(self, sources: Sequence[Source]) -> None:
        self.ops: list[DimOp] = []
        self._seen: dict[DimOp, int] = {}
        self._memo: dict[Dim, int] = {}
        self._axes: dict[Poly, DimOp] = {}
        self._plan: dict[Atom, tuple[Poly, Dim, int]] | None = None
        for wanted in ("operand", "result"):
            for kind, index, axis, value in sources:
                if kind == wanted and isinstance(value, Poly) and value not in self._axes:
                    op: OpKind = "operand_axis" if kind == "operand" else "result_axis"
                    self._axes[value] = DimOp(op, index, axis)

    def emit(self, dim: Dim, asked: Dim) -> int:
        """The step that computes ``dim``; ``asked`` is the dimension to name if it cannot be."""
        done = self._memo.get(dim)
        if done is None:
            done = self._memo[dim] = self._build(dim, asked)
        return done

    def _add(self, kind: OpKind, a: int, b: int) -> int:
        if kind in ("add", "mul") and a > b:
            a, b = b, a
        return self._op(DimOp(kind, a, b))

    def _op(self, op: DimOp) -> int:
        at = self._seen.get(op)
        if at is None:
            at = self._seen[op] = len(self.ops)
            self.ops.append(op)
        return at

    def _build(self, dim: Dim, asked: Dim) -> int:
        if isinstance(dim, int):
            return self._op(DimOp("const", dim, 0))
        axis = self._axes.get(dim)
        if axis is not None:
            return self._op(axis)
        mono, coef = dim.terms[0]
        if len(dim.terms) == 1 and coef == 1 and len(mono) == 1 and mono[0][1] == 1:
            return self._atom(mono[0][0], asked)
        total: int | None = None
        # A term with a positive coefficient first, so that no step is a bare negation.
        for mono, coef in sorted(dim.terms, key=lambda t: t[1] < 0):
            term: int | None = None
            for atom, exp in mono:
                factor = self.emit(atom_dim(atom), asked)
                for _ in range(exp):
                    term = factor if term is None else self._add("mul", term, factor)
            size = abs(coef) if total is not None else coef
            if term is None:
                term = self.emit(size, asked)
            elif size != 1:
                term = self._add("mul", term, self.emit(size, asked))
            if total is None:
                total = term
            else:
                total = self._add("sub" if coef < 0 else "add", total, term)
        assert total is not None
        return total

    def _atom(self, atom: Atom, asked: Dim) -> int:
        if self._plan is None:
            self._plan = _linear_plan(self._axes)
        plan = self._plan.get(atom)
        if plan is not None:
            value, rest, coef = plan
            left = self.emit(value, asked)
            if not isinstance(rest, int) or rest:
                left = self._add("sub", left, self.emit(rest, asked))
            if coef < 0:
                left = self._add("sub", self.emit(0, asked), left)
            return (
                left if abs(coef) == 1 else self._add("floordiv", left, self.emit(abs(coef), asked))
            )
        if isinstance(atom, str):
            raise Unrecoverable(asked, atom)
        return self._add("floordiv", self.emit(atom.num, asked), self.emit(atom.den, asked))


def _linear_plan(axes: dict[Poly, DimOp]) -> dict[Atom, tuple[Poly, Dim, int]]:
    """For each atom that is no shape itself: a shape ``coef*atom + rest`` whose ``rest`` is
    known."""
    known: set[Atom] = set()
    for value in axes:
        mono, coef = value.terms[0]
        if len(value.terms) == 1 and coef == 1 and len(mono) == 1 and mono[0][1] == 1:
            known.add(mono[0][0])
    plan: dict[Atom, tuple[Poly, Dim, int]] = {}
    users: dict[Atom, list[Poly]] = {}
    ready = list(reversed(axes))
    for value in axes:
        for atom in atoms(value):
            users.setdefault(atom, []).append(value)
    while ready:
        value = ready.pop()
        missing = [atom for atom in atoms(value) if atom not in known]
        if len(missing) != 1:
            continue
        (atom,) = missing
        coef = dict(terms_of(value)).get(((atom, 1),), 0)
        rest = value - coef * atom_dim(atom)
        if coef and atom not in atoms(rest):
            known.add(atom)
            plan[atom] = value, rest, coef
            ready.extend(users[atom])
    return plan
