"""Expressions of one part of a program in the names of another that is like it (see `twins`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recom_jax import ir
from recom_jax.detect_values import Part, Val
from recom_jax.shape_solver.dims import DimLike, substitute

Dim = Callable[[DimLike], DimLike]


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
        return renamed(self.pool, e, self.variables, self.dim, self.memo)

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


def renamed(
    pool: ir.Pool, e: ir.Expr, variables: Mapping[int, Any], dim: Dim, memo: dict[int, ir.Expr]
) -> ir.Expr:
    """`e` of other variables and sizes, node by node; notes and origins are the caller's business.

    Args:
      variables: by the ids of those in `e`.
    """
    found = memo.get(id(e))
    if found is not None:
        return found
    new: ir.Expr
    if isinstance(e, ir.Op):
        args = tuple([renamed(pool, a, variables, dim, memo) for a in e.args])
        key = (e.name, e.dtype, tuple(map(id, args)), e.exact, e.arith)
        new = pool.intern(ir.Op, key, e.dtype, e.exact, e.arith, e.takes, e.name, args)
    elif isinstance(e, ir.Const):
        return e
    elif isinstance(e, ir.Load):
        new = pool.load(variables[id(e.var)], e.dtype, dim(e.offset), _dims(e.strides, dim))
    elif isinstance(e, ir.Affine):
        new = pool.affine(e.dtype, dim(e.offset), _dims(e.strides, dim))
    elif isinstance(e, ir.Take):
        new = pool.take(
            variables[id(e.table)],
            e.dtype,
            idx=renamed(pool, e.idx, variables, dim, memo),
            rows=e.rows,
            row_stride=e.row_stride,
            base=e.base,
            cols=_dims(e.cols, dim),
            row_shift=_dims(e.row_shift, dim),
            mode=e.mode,
            fill=e.fill,
            one_hot=e.one_hot,
        )
    elif isinstance(e, ir.Search):
        x = renamed(pool, e.x, variables, dim, memo)
        var = None if e.var is None else variables[id(e.var)]
        total = None if e.total is None else dim(e.total)
        new = pool.search(
            e.dtype, x, var, dim(e.offset), dim(e.count), e.side, e.mode, e.grid, total
        )
    elif isinstance(e, ir.Reduce):
        arg = renamed(pool, e.arg, variables, dim, memo)
        new = pool.reduce(e.kind, arg, _dims(e.sizes, dim), e.init)
    else:
        assert isinstance(e, ir.SegReduce)
        new = pool.seg_reduce(
            e.kind,
            e.dtype,
            renamed(pool, e.data, variables, dim, memo),
            renamed(pool, e.seg, variables, dim, memo),
            dim(e.total),
            _dims(e.bag, dim),
            dim(e.bag_offset),
            _dims(e.feature, dim),
            e.init,
        )
    memo[id(e)] = new
    return new


def _dims(strides: ir.Strides, dim: Dim) -> ir.Strides:
    for s in strides:
        if s.__class__ is not int:
            break
    else:
        return strides
    return tuple([s if s.__class__ is int else dim(s) for s in strides])


__all__ = ["Renaming"]
