"""Stage 5: fused results -> a `Program`: parts become columns, equal columns share a class.

Each part (an expression and its place in a result) becomes straight-line code over the tile's bags, with one
region per reduction that runs over the positions of a bag. Adjacent parts that read the same ids become one
column, so that ids are computed once. Columns are listed in the order of their place in the result, so that
neighbours in memory are neighbours in time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from recom_jax import ir
from recom_jax.detect_values import Detected, Output, Part, dtype_text, row_major
from recom_jax.emit_twins import Columns
from recom_jax.errors import EncodeError
from recom_jax.immutable import node
from recom_jax.program import DIM, IMM, ClassDef, ColumnDef, Program
from recom_jax.shape_solver.dims import DimLike, evaluate, substitute, symbols
from recom_jax.shape_solver.recover import recover, unrecoverable


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A call: the program, and which variables are its operands and results.

    Attributes:
      operands: jaxpr variables in the order of the program's virtual operands.
      outputs: the fused results, in the order of the program's results.
      lookups: for each column of the program, the ids of the `ir.Take`s in it.
    """

    program: Program
    operands: tuple[Any, ...]
    outputs: tuple[Output, ...]
    lookups: tuple[frozenset[int], ...] = ()

    def __str__(self) -> str:
        return str(self.program)


# A class, the values of its slots, and the result variable it is for.
Column = tuple[int, list[tuple[str, Any]], Any]


@node()
class Piece:
    """A part made ready: feature axis last, outer axes merged as far as every view allows."""

    expr: ir.Expr
    outer: tuple[DimLike, ...]
    width: DimLike | None
    result: int
    offset: DimLike
    strides: ir.Strides
    feature_stride: DimLike


class PartError(EncodeError):
    """Parts that the format cannot express: the result variables they belong to, and why. All that were found."""

    def __init__(self, var: Any, why: str, *others: tuple[Any, str]) -> None:
        super().__init__(why)
        self.failed = ((var, why), *others)


def schedule(detected: Detected, outputs: Sequence[Output]) -> Scheduled:
    """Makes the program of one call.

    Raises:
      PartError: parts cannot be expressed; the caller leaves their variables to XLA and detects again.
    """
    resolve = detected.unifier.resolve
    pieces: list[tuple[int, Piece]] = []
    failed: list[tuple[Any, str]] = []
    for k, out in enumerate(outputs):
        parts = out.val.parts
        if out.val.expr is not None:
            parts = (Part(out.val.expr, out.val.shape, 0, row_major(out.val.shape)),)
        for p in parts:
            try:
                piece = piece_of(detected, p, k)
            except EncodeError as why:
                failed.append((out.var, str(why)))
                break
            pieces.append((detected.unifier.value(p.offset), piece))
    if failed:
        raise PartError(*failed[0], *failed[1:])
    pieces.sort(key=lambda x: (x[1].result, x[0]))
    order: list[Any] = []
    index: dict[int, int] = {}

    def operand(var: Any) -> int:
        if id(var) not in index:
            index[id(var)] = len(order)
            order.append(var)
        return index[id(var)]

    classes: dict[ClassDef, int] = {}
    columns: list[Column] = []
    lookups = []
    code = Columns(detected.pool, resolve, operand, order, outputs, detected.value_of)
    for group in _groups(detected.pool, [p for _, p in pieces]):
        try:
            cls, values = code.column(group)
        except EncodeError as why:
            failed.append((outputs[group[0].result].var, str(why)))
            continue
        columns.append(
            (classes.setdefault(cls, len(classes)), values, outputs[group[0].result].var)
        )
        lookups.append(frozenset(id(x) for p in group for x in detected.pool.takes(p.expr)))
    if failed:
        raise PartError(*failed[0], *failed[1:])
    made = _finish(detected, outputs, order, list(classes), columns)
    return dataclasses.replace(made, lookups=tuple(lookups))


def piece_of(detected: Detected, p: Part, result: int) -> Piece:
    """A part of result number `result`, made ready. Raises EncodeError where no column can be made of it."""
    pool, resolve = detected.pool, detected.unifier.resolve
    rank = len(p.shape)
    features = _feature_axes(pool, p.expr, rank)
    if len(features) > 1:
        raise EncodeError("two embedding axes in one expression")
    feature = features.pop() if features else rank - 1
    strides = [resolve(s) for s in p.strides]
    shape = [resolve(s) for s in p.shape]
    expr = p.expr
    if rank:
        order = [k for k in range(rank) if k != feature] + [feature]
        if order != list(range(rank)):
            expr = pool.remap(expr, rank, lambda s, o: (tuple(s[k] for k in order), o))
            strides, shape = [strides[k] for k in order], [shape[k] for k in order]
    outer, width = (shape[:-1], shape[-1]) if rank else ([], None)
    steps = strides[:-1] if rank else []
    expr, outer, steps = _merge(pool, resolve, expr, outer, steps, rank)
    return Piece(
        expr,
        tuple(outer),
        width,
        result,
        resolve(p.offset),
        tuple(steps),
        strides[-1] if rank else 1,
    )


def _feature_axes(pool: ir.Pool, e: ir.Expr, rank: int) -> set[int]:
    """The axes along which rows of a table lie; at most one in what a column can be."""
    twin = pool.twins.get(id(e))
    e = e if twin is None else twin[0]  # the same in all names
    known = pool.features.get((id(e), rank))
    if known is None:
        known = pool.features[id(e), rank] = frozenset(_find_feature_axes(e, rank))
    return set(known)


def _find_feature_axes(e: ir.Expr, rank: int) -> set[int]:
    found: set[int] = set()
    for x in ir.walk(e):
        if isinstance(x, ir.Take):
            for k, s in enumerate(x.cols):
                if s != 0:
                    if s != 1:
                        raise EncodeError("a table row read with a stride")
                    found.add(k)
        elif isinstance(x, ir.SegReduce) and len(x.feature) <= rank:
            found |= {k for k, s in enumerate(x.feature) if s != 0}
        elif isinstance(x, ir.SegReduce):
            raise EncodeError("a jagged bag inside a reduction")
    # Rows inside a jagged bag have an index space of their own: (position, feature).
    inside = {id(y) for x in ir.walk(e) if isinstance(x, ir.SegReduce) for y in ir.walk(x.data)}
    if inside:
        outside = {
            k
            for x in ir.walk(e)
            if isinstance(x, ir.Take) and id(x) not in inside
            for k, s in enumerate(x.cols)
            if s != 0
        }
        found = outside | {
            k
            for x in ir.walk(e)
            if isinstance(x, ir.SegReduce)
            for k, s in enumerate(x.feature)
            if s != 0
        }
    return found


def _merge(
    pool: ir.Pool,
    resolve: Any,
    expr: ir.Expr,
    outer: list[DimLike],
    steps: list[DimLike],
    rank: int,
) -> tuple[ir.Expr, list[DimLike], list[DimLike]]:
    """Merges neighbouring outer axes where every view and the destination are contiguous across them."""
    k = len(outer) - 2
    while k >= 0:
        size = outer[k + 1]
        if resolve(steps[k] - steps[k + 1] * size) == 0:

            def f(
                s: ir.Strides, o: DimLike, k: int = k, size: DimLike = size
            ) -> tuple[ir.Strides, DimLike]:
                if s[k] != 0 or s[k + 1] != 0:
                    if resolve(s[k] - s[k + 1] * size) != 0:
                        raise ir.NotAffine
                return (*s[:k], *s[k + 1 :]), o

            try:
                expr = pool.remap(expr, rank, f)
            except ir.NotAffine:
                k -= 1
                continue
            outer = [*outer[:k], resolve(outer[k] * size), *outer[k + 2 :]]
            steps = [*steps[:k], *steps[k + 1 :]]
            rank -= 1
        k -= 1
    return expr, outer, steps


def _groups(pool: ir.Pool, pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces that read the same ids over the same bags, one column each group (in order of first piece)."""
    groups: dict[Any, list[Piece]] = {}
    for n, p in enumerate(pieces):
        takes = pool.takes(p.expr)
        trivial = not takes or isinstance(takes[0].idx, (ir.Load, ir.Const, ir.Affine))
        key = n if trivial else (p.outer, id(takes[0].idx), p.result)
        groups.setdefault(key, []).append(p)
    return [g[i : i + 8] for g in groups.values() for i in range(0, len(g), 8)]


def _finish(
    detected: Detected,
    outputs: Sequence[Output],
    order: Sequence[Any],
    classes: Sequence[ClassDef],
    columns: Sequence[Column],
) -> Scheduled:
    """Decides how every size is computed from shapes, and packs the program."""
    unifier = detected.unifier
    sources: list[Any] = []
    for k, var in enumerate(order):
        value = detected.shape_of(var)
        sources += [("operand", k, a, unifier.resolve(d)) for a, d in enumerate(value)]
    for k, out in enumerate(outputs):
        sources += [("result", k, a, unifier.resolve(d)) for a, d in enumerate(out.val.shape)]
    known = frozenset().union(*(symbols(s[3]) for s in sources)) if sources else frozenset()
    pinned: dict[str, DimLike] = {}

    def pin(d: DimLike) -> DimLike:
        for name in symbols(d) - known:
            pinned[name] = unifier.known(unifier_symbol(name))
        return substitute(d, pinned) if pinned else d

    needed: dict[DimLike, Any] = {}
    for _, values, var in columns:
        for kind, d in values:
            if kind == DIM:
                needed.setdefault(d, var)
    recovery, where = _recover(needed, pin, sources, unifier)
    made = []
    for cls, values, _ in columns:
        made.append(
            ColumnDef(cls, tuple(where[v] if kind == DIM else int(v) for kind, v in values))
        )
    program = Program(
        tuple((dtype_text(v.aval), len(v.aval.shape)) for v in order),
        tuple((dtype_text(o.var.aval), len(o.var.aval.shape)) for o in outputs),
        recovery.ops,
        tuple(classes),
        tuple(made),
    )
    check_sizes(
        program,
        [detected.sizes.example(v.aval.shape) for v in order],
        [detected.sizes.example(o.var.aval.shape) for o in outputs],
        recovery,
        where,
        unifier,
    )
    return Scheduled(program, tuple(order), tuple(outputs))


def unifier_symbol(name: str) -> DimLike:
    from recom_jax.shape_solver.dims import symbol

    return symbol(name)


def _recover(
    needed: Mapping[DimLike, Any], pin: Any, sources: Sequence[Any], unifier: Any
) -> tuple[Any, dict[DimLike, int]]:
    """How each needed size (whose values are the variables that need it) comes from shapes, and its place."""
    replaced = {d: pin(d) for d in needed}
    lost = unrecoverable(dict.fromkeys(replaced.values()), sources)
    for d, r in replaced.items():
        if r in lost:
            # No shape of the call gives this size: the program is for this size only, if there is only one.
            size = unifier.known(r)
            if not isinstance(size, int):
                why = f"the size {size} is in no shape of its call"
                raise PartError(needed[d], why) from lost[r]
            replaced[d] = size
    recovery = recover(list(dict.fromkeys(replaced.values())), sources)
    return recovery, {d: recovery.index_of(r) for d, r in replaced.items()}


def check_sizes(
    program: Program,
    operands: Sequence[Any],
    results: Sequence[Any],
    recovery: Any,
    where: dict[DimLike, int],
    unifier: Any,
) -> None:
    """The symbolic sizes, evaluated on this trace's shapes, must be this trace's sizes."""
    got = recovery.evaluate(operands, results)
    for d, k in where.items():
        if got[k] != unifier.value(d):
            raise EncodeError(
                f"size {d} is {unifier.value(d)} in this trace but is computed as {got[k]}"
            )


__all__ = ["IMM", "PartError", "Piece", "Scheduled", "evaluate", "schedule"]
