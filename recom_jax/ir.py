"""The intermediate representation, level one: expressions over an index space.

An `Expr` is a function from an index vector to a scalar. It has no shape of its own: the variable it stands
for has one. Arrays are read through affine views (offset + sum of index * stride, in elements of a row-major
operand), so slices, transposes, broadcasts and most reshapes vanish into strides. A lookup is one more leaf:
its address is affine too, except for the row. Sizes are `shape_solver` dims: ints or polynomials in symbols.

Expressions are interned by a `Pool`: equal expressions are the same object, so common subexpressions are shared
across all columns of a model. They print themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from recom_jax.ir_nodes import (
    FLOAT8,
    Affine,
    Const,
    Expr,
    Load,
    Op,
    Reduce,
    Search,
    SegReduce,
    Strides,
    Take,
    is_16bit,
    is_float,
    name_of,
    numbered,
)
from recom_jax.shape_solver.dims import DimLike

E = TypeVar("E", bound=Expr)

# (strides, offset) -> (strides, offset) in another index space; raises NotAffine.
Remap = Callable[[Strides, DimLike], tuple[Strides, DimLike]]


class NotAffine(Exception):
    """A view that offset + sum(index * stride) cannot express; the value is then left to XLA."""


class Pool:
    """Interns expressions: the same fields give the same object."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Expr] = {}
        # id of a Take -> serial numbers of the reads it stands for (equal reads are one Take).
        self.origins: dict[int, set[int]] = {}
        # id of an expression -> names of the rewrites that detection made it by.
        self.notes: dict[int, tuple[str, ...]] = {}
        # id of an expression -> the one it is like, and what renames that one to it (see `twins`).
        self.twins: dict[int, tuple[Expr, Any]] = {}
        # What is being recorded of the notes and origins made (see `twins`).
        self.journal: list[tuple[Any, ...]] | None = None

        # (id of an expression, rank) -> the axes along which rows lie (see `schedule`).
        self.features: dict[tuple[int, int], frozenset[int]] = {}
        self._takes: dict[int, list[Take]] = {}
        self._leaves: dict[int, list[Any]] = {}

    def takes(self, e: Expr) -> list[Take]:
        """The lookups in an expression of this pool, inner ones first."""
        found = self._takes.get(id(e))
        if found is None:
            twin = self.twins.get(id(e))
            if twin is None or twin[0] is e:
                found = [x for x in walk(e) if isinstance(x, Take)]
            else:
                found = [twin[1].expr(x) for x in self.takes(twin[0])]
            self._takes[id(e)] = found
        return found

    def leaves(self, e: Expr) -> list[Any]:
        """The variables that an expression of this pool reads."""
        found = self._leaves.get(id(e))
        if found is None:
            twin = self.twins.get(id(e))
            if twin is None or twin[0] is e:
                found = _leaves(e)
            else:
                found = [twin[1].variables[id(v)] for v in self.leaves(twin[0])]
            self._leaves[id(e)] = found
        return found

    def note(self, e: Expr, names: tuple[str, ...]) -> None:
        self.notes[id(e)] = tuple(dict.fromkeys((*self.notes.get(id(e), ()), *names)))
        if self.journal is not None:
            self.journal.append(("note", e, names))

    def read(self, take: Take, number: int) -> None:
        """A lookup stands for table read `number`."""
        self.origins.setdefault(id(take), set()).add(number)
        if self.journal is not None:
            self.journal.append(("read", take, number))

    def same_reads(self, take: Take, old: Take) -> None:
        """A lookup stands for the reads of another one."""
        self.origins.setdefault(id(take), set()).update(self.origins.get(id(old), ()))
        if self.journal is not None:
            self.journal.append(("same_reads", take, old))

    def intern(self, kind: type[E], key: tuple[Any, ...], *fields: Any) -> E:
        """The expression with these fields; `key`: what tells it from others of its kind."""
        key = (kind, *key)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = kind(*fields)
        return cast(E, found)

    def load(self, var: Any, dtype: str, offset: DimLike, strides: Strides) -> Load:
        return self.intern(
            Load, (id(var), offset, strides), dtype, True, False, 0, var, offset, strides
        )

    def affine(self, dtype: str, offset: DimLike, strides: Strides) -> Affine:
        return self.intern(Affine, (dtype, offset, strides), dtype, True, False, 0, offset, strides)

    def const(self, dtype: str, value: Any) -> Const:
        return self.intern(Const, (dtype, type(value), repr(value)), dtype, True, False, 0, value)

    def op(self, name: str, dtype: str, *args: Expr, exact: bool = True, arith: bool = False) -> Op:
        exact = exact and all(a.exact for a in args)
        key = (name, dtype, tuple(map(id, args)), exact, arith)
        return self.intern(Op, key, dtype, exact, arith, sum(a.takes for a in args), name, args)

    def search(
        self,
        dtype: str,
        x: Expr,
        var: Any,
        offset: DimLike,
        count: DimLike,
        side: str,
        mode: str,
        grid: tuple[float, float] | None = None,
        total: DimLike | None = None,
    ) -> Search:
        fields = (offset, count, side, mode, grid, total)
        key = (dtype, id(x), id(var), *fields)
        return self.intern(Search, key, dtype, x.exact, False, x.takes, x, var, *fields)

    def take(
        self,
        table: Any,
        dtype: str,
        *,
        idx: Expr,
        rows: int,
        row_stride: int,
        base: int,
        cols: Strides,
        row_shift: Strides,
        mode: str,
        fill: Any,
        one_hot: bool = False,
    ) -> Take:
        fields = (rows, row_stride, base, cols, row_shift, mode)
        key = (id(table), id(idx), *fields, repr(fill), one_hot)
        return self.intern(
            Take, key, dtype, idx.exact, False, idx.takes + 1, table, idx, *fields, fill, one_hot
        )

    def retake(self, e: Take, **changes: Any) -> Take:
        """A lookup changed in some fields; it still stands for the same reads."""
        fields: dict[str, Any] = {k: getattr(e, k) for k in vars(Take)["__slots__"] if k != "table"}
        new = self.take(e.table, e.dtype, **{**fields, **changes})
        if new is not e:
            self.same_reads(new, e)
        return new

    def reduce(self, kind: str, arg: Expr, sizes: tuple[DimLike, ...], init: Any) -> Reduce:
        exact = arg.exact and (kind != "sum" or not is_float(arg.dtype))
        return self.intern(
            Reduce,
            (kind, id(arg), sizes, repr(init)),
            arg.dtype,
            exact,
            False,
            arg.takes,
            kind,
            arg,
            sizes,
            init,
        )

    def seg_reduce(
        self,
        kind: str,
        dtype: str,
        data: Expr,
        seg: Expr,
        total: DimLike,
        bag: Strides,
        bag_offset: DimLike,
        feature: Strides,
        init: Any,
    ) -> SegReduce:
        exact = data.exact and seg.exact and (kind != "sum" or not is_float(dtype))
        key = (kind, dtype, id(data), id(seg), total, bag, bag_offset, feature, repr(init))
        return self.intern(
            SegReduce,
            key,
            dtype,
            exact,
            False,
            data.takes + seg.takes,
            kind,
            data,
            seg,
            total,
            bag,
            bag_offset,
            feature,
            init,
        )

    def with_children(self, e: Expr, new: Sequence[Expr]) -> Expr:
        """`e` with other children; flags are recomputed."""
        if all(a is b for a, b in zip(e.children, new, strict=True)):
            return e
        if isinstance(e, Op):
            return self.op(e.name, e.dtype, *new, exact=e.exact, arith=e.arith)
        if isinstance(e, Search):
            fields = (e.offset, e.count, e.side, e.mode, e.grid, e.total)
            return self.search(e.dtype, new[0], e.var, *fields)
        if isinstance(e, Take):
            return self.retake(e, idx=new[0])
        if isinstance(e, Reduce):
            return self.reduce(e.kind, new[0], e.sizes, e.init)
        assert isinstance(e, SegReduce)
        return self.seg_reduce(
            e.kind, e.dtype, new[0], new[1], e.total, e.bag, e.bag_offset, e.feature, e.init
        )

    def remap(
        self, e: Expr, rank: int, f: Remap, memo: dict[tuple[int, int], Expr] | None = None
    ) -> Expr:
        """`e` in another index space: `f` rewrites the first `rank` strides of every view inside.

        Axes behind `rank` (those a surrounding `Reduce` runs over) stay, last.
        """
        memo = {} if memo is None else memo
        found = memo.get((id(e), rank))
        if found is not None:
            return found
        new: Expr
        if isinstance(e, Const):
            new = e
        elif isinstance(e, (Load, Affine)):
            strides, offset = f(e.strides[:rank], e.offset)
            strides = (*strides, *e.strides[rank:])
            new = (
                self.load(e.var, e.dtype, offset, strides)
                if isinstance(e, Load)
                else self.affine(e.dtype, offset, strides)
            )
        elif isinstance(e, Take):
            idx = self.remap(e.idx, rank, f, memo)
            cols, base = f(e.cols[:rank], e.base)
            shift, extra = f(e.row_shift[:rank], 0)
            if not isinstance(base, int) or extra != 0:
                raise NotAffine("a slice of a table's columns at a symbolic offset")
            new = self.retake(
                e,
                idx=idx,
                base=base,
                cols=(*cols, *e.cols[rank:]),
                row_shift=(*shift, *e.row_shift[rank:]),
            )
        elif isinstance(e, SegReduce):
            bag, bag_offset = f(e.bag, e.bag_offset)
            feature, extra = f(e.feature, 0)
            if extra != 0:
                raise NotAffine("a slice of a jagged bag's features")
            new = self.seg_reduce(
                e.kind, e.dtype, e.data, e.seg, e.total, bag, bag_offset, feature, e.init
            )
        else:
            new = self.with_children(e, [self.remap(c, rank, f, memo) for c in e.children])
        if id(e) in self.notes and new is not e:
            self.note(new, self.notes[id(e)])
        memo[(id(e), rank)] = new
        return new


def walk(e: Expr, seen: set[int] | None = None) -> list[Expr]:
    """Every distinct node of an expression, children first; without those in `seen`, to which they are added."""
    seen = set() if seen is None else seen
    found: list[Expr] = []
    if id(e) not in seen:
        _walk(e, seen, found)
    return found


def _walk(e: Expr, seen: set[int], found: list[Expr]) -> None:
    seen.add(id(e))
    for c in e.children:
        if id(c) not in seen:
            _walk(c, seen, found)
    found.append(e)


def _leaves(e: Expr) -> list[Any]:
    found: dict[int, Any] = {}
    for x in walk(e):
        if isinstance(x, Load):
            found[id(x.var)] = x.var
        elif isinstance(x, Take):
            found[id(x.table)] = x.table
        elif isinstance(x, Search) and x.var is not None:
            found[id(x.var)] = x.var
    return list(found.values())


def depends(e: Expr, memo: dict[int, frozenset[int]]) -> frozenset[int]:
    """The axes an expression's value depends on."""
    found = memo.get(id(e))
    if found is not None:
        return found
    if isinstance(e, (Load, Affine)):
        found = frozenset(k for k, s in enumerate(e.strides) if s != 0)
    elif isinstance(e, Take):
        found = depends(e.idx, memo) | {k for k, s in enumerate(e.cols) if s != 0}
        found |= {k for k, s in enumerate(e.row_shift) if s != 0}
    elif isinstance(e, SegReduce):
        found = frozenset(k for s in (e.bag, e.feature) for k, v in enumerate(s) if v != 0)
    elif isinstance(e, Reduce):
        inner = depends(e.arg, memo)
        rank = rank_of(e.arg)
        found = frozenset(k for k in inner if rank is None or k < rank - len(e.sizes))
    else:
        found = (
            frozenset().union(*(depends(c, memo) for c in e.children))
            if e.children
            else frozenset()
        )
    memo[id(e)] = found
    return found


def rank_of(e: Expr) -> int | None:
    """The rank of the index space, None for a constant (which fits any)."""
    if isinstance(e, (Load, Affine)):
        return len(e.strides)
    if isinstance(e, Take):
        return len(e.cols)
    if isinstance(e, SegReduce):
        return len(e.bag)
    for c in e.children:
        rank = rank_of(c)
        if rank is not None:
            return rank - len(e.sizes) if isinstance(e, Reduce) else rank
    return None


__all__ = [
    "FLOAT8",
    "Affine",
    "Const",
    "Expr",
    "Load",
    "NotAffine",
    "Op",
    "Pool",
    "Reduce",
    "Remap",
    "Search",
    "SegReduce",
    "Strides",
    "Take",
    "depends",
    "is_16bit",
    "is_float",
    "name_of",
    "numbered",
    "rank_of",
    "walk",
]
