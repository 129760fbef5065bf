"""Expressions that `linear` makes: numbers of rows and factors, and results as functions of tangents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recom_jax import ir
from recom_jax.detect_values import Val


def row_of(pool: ir.Pool, t: ir.Take, drops: bool, masks: Sequence[ir.Expr]) -> ir.Expr:
    """The number of the row as int32, -1 where no row gets a gradient; `drops`: of ids outside."""
    e = t.idx
    if e.dtype == "bool":
        e = pool.op("convert", "int32", e)
    info = np.iinfo(e.dtype)

    def number(value: int) -> ir.Expr:
        return pool.const(e.dtype, value)

    none = pool.const("int32", -1)
    if t.rows == 0:
        return none
    inside: list[ir.Expr] = []
    if not drops:
        if t.rows - 1 < info.max:
            e = pool.op("min", e.dtype, e, number(t.rows - 1))
        if info.min < 0:
            e = pool.op("max", e.dtype, e, number(0))
    else:
        if info.min < 0:
            inside.append(pool.op("ge", "bool", e, number(0)))
        if t.rows - 1 < info.max:
            inside.append(pool.op("lt", "bool", e, number(t.rows)))
    out = as_int32(pool, e)
    if any(x != 0 for x in t.row_shift):
        out = pool.op("add", "int32", out, pool.affine("int32", 0, t.row_shift))
    there = all_of(pool, (*inside, *masks))
    return out if there is None else pool.op("select", "int32", there, none, out)


def as_int32(pool: ir.Pool, e: ir.Expr) -> ir.Expr:
    """An id or a bag's number as int32. Bags that do not fit are none; ids that do not fit are handled before."""
    if e.dtype == "int32":
        return e
    info = np.iinfo(e.dtype) if e.dtype != "bool" else None
    out = pool.op("convert", "int32", e)
    if info is None or info.max < 2**31:
        return out
    fits = [pool.op("lt", "bool", e, pool.const(e.dtype, 2**31 - 1))]
    if info.min < 0:
        fits.append(pool.op("ge", "bool", e, pool.const(e.dtype, 0)))
    return pool.op("select", "int32", all_of(pool, fits) or out, pool.const("int32", -1), out)


def product(pool: ir.Pool, factors: Sequence[ir.Expr]) -> ir.Expr | None:
    """The factors' product in the widest of their types, float32 at least."""
    if not factors:
        return None
    dtype = "float64" if any(f.dtype == "float64" for f in factors) else "float32"
    wide = [f if f.dtype == dtype else pool.op("convert", dtype, f) for f in factors]
    out = wide[0]
    for f in wide[1:]:
        out = pool.op("mul", dtype, out, f)
    return out


def all_of(pool: ir.Pool, masks: Sequence[ir.Expr]) -> ir.Expr | None:
    """All masks hold; None: there are none."""
    out: ir.Expr | None = None
    for m in masks:
        out = m if out is None else pool.op("and", "bool", out, m)
    return out


class Mover:
    """A result as a function of tangents: the tables' terms alone, fills 0."""

    def __init__(self, pool: ir.Pool, tables: set[int]) -> None:
        self.pool, self.tables = pool, tables
        self.memo: dict[int, ir.Expr | None] = {}

    def value(self, v: Val) -> Val:
        return v.map(self.root)

    def root(self, e: ir.Expr) -> ir.Expr:
        return self.move(e) or self.pool.const(e.dtype, 0.0)

    def move(self, e: ir.Expr) -> ir.Expr | None:
        """None: 0."""
        if id(e) not in self.memo:
            self.memo[id(e)] = self._move(e) if e.takes else None
        return self.memo[id(e)]

    def _move(self, e: ir.Expr) -> ir.Expr | None:
        pool = self.pool
        if isinstance(e, ir.Take):
            return pool.retake(e, fill=0.0) if id(e.table) in self.tables else None
        if isinstance(e, ir.Reduce):
            arg = self.move(e.arg)
            return None if arg is None else pool.reduce(e.kind, arg, e.sizes, 0.0)
        if isinstance(e, ir.SegReduce):
            data = self.move(e.data)
            fields = (e.total, e.bag, e.bag_offset, e.feature, 0.0)
            return None if data is None else pool.seg_reduce(e.kind, e.dtype, data, e.seg, *fields)
        if not isinstance(e, ir.Op):
            return None
        moved = [self.move(a) for a in e.args]
        if all(m is None for m in moved):
            return None
        if e.name in ("add", "sub") and None in moved:
            only = moved[0] or moved[1]
            assert only is not None
            return only if e.name == "add" or moved[1] is None else pool.op("neg", e.dtype, only)
        zero = pool.const(e.dtype, 0.0)
        args = [
            m if m is not None else (zero if e.name == "select" and k else a)
            for k, (m, a) in enumerate(zip(moved, e.args, strict=True))
        ]
        return pool.op(e.name, e.dtype, *args, exact=e.exact, arith=e.arith)
