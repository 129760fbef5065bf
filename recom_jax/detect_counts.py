"""Bins found by comparing with every boundary: counted, or the first that is larger. Both are searches.

``(x[:, None] >= edges).sum(-1)`` counts the boundaries up to x, ``argmax(x[:, None] < edges, -1)`` is the first one
above it. In constant, ascending, NaN-free boundaries the comparisons are true up to one place, or from one place on:
a search finds the place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recom_jax import ir
from recom_jax.detect import Detector
from recom_jax.detect_rules import convert
from recom_jax.detect_search import constant_search
from recom_jax.detect_values import Refuse, Val, dtype_name
from recom_jax.shape_solver import proofs
from recom_jax.shape_solver.dims import DimLike
from recom_jax.templates import Search

NAME = "comparisons-to-search"
_FLIPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}
# Of ``x op edges`` where `edges` ascend: which side's search is the place where the truth changes.
_SIDES = {"ge": "right", "lt": "right", "gt": "left", "le": "left"}


def counted(d: Detector, eqn: Any, v: Val) -> Val | None:
    """A sum of comparisons along one axis, as a search; None for other sums."""
    e = v.expr
    if not isinstance(e, ir.Op) or e.name != "convert" or e.dtype not in ("int32", "int64"):
        return None
    of = e.args[0]
    if isinstance(of, ir.Op) and of.name == "convert" and of.dtype.startswith("int"):
        of = of.args[0]  # zeros and ones, whatever integers they were before
    found = _place(d, v, of, eqn.params["axes"])
    if found is None:
        return None
    op, x, place, count = found
    pool, zero = d.pool, d.pool.const("int32", 0)
    if op in ("lt", "le"):  # NaN is behind all boundaries, and no comparison with it is true
        place = pool.op("sub", "int32", pool.const("int32", count), place)
    elif ir.is_float(x.dtype):
        place = pool.op("select", "int32", pool.op("ne", "bool", x, x), place, zero)
    return _result(d, eqn, v, place)


def first(d: Detector, eqn: Any) -> Val | None:
    """argmax and argmin of comparisons: the first true, or false, one; the first of all where there is none."""
    v = d.val(eqn.invars[0])
    found = None if v.expr is None else _place(d, v, v.expr, eqn.params["axes"])
    wanted = ("lt", "le") if eqn.primitive.name == "argmax" else ("ge", "gt")
    if found is None or found[0] not in wanted:
        return None
    _, _, place, count = found
    pool = d.pool
    inside = pool.op("lt", "bool", place, pool.const("int32", count))
    return _result(d, eqn, v, pool.op("select", "int32", inside, pool.const("int32", 0), place))


def _place(d: Detector, v: Val, e: ir.Expr, axes: Any) -> tuple[str, ir.Expr, ir.Expr, int] | None:
    """(op, x, the search, how many boundaries) of ``x op boundaries`` along the one axis."""
    if NAME in d.disabled or len(axes) != 1:
        return None
    if isinstance(e, ir.Op) and e.name == "ne" and _is_false(e.args[1]):  # as count_nonzero has it
        e = e.args[0]
    if not isinstance(e, ir.Op) or e.name not in _FLIPPED:
        return None
    axis, rank = int(axes[0]) % len(v.shape), len(v.shape)

    def keep(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        return (*strides[:axis], *strides[axis + 1 :]), offset

    for op, (x, edges) in ((e.name, e.args), (_FLIPPED[e.name], e.args[::-1])):
        if not isinstance(edges, ir.Load) or axis in ir.depends(x, {}) or x.takes:
            continue
        array = d.value_of.get(id(edges.var))
        steps = [d.unifier.value(n) for n in edges.strides]
        if array is None or edges.offset != 0 or steps != [int(k == axis) for k in range(rank)]:
            continue
        values = np.asarray(array).reshape(-1)
        if not 0 < len(values) == d.unifier.value(v.shape[axis]):
            continue
        if not proofs.sorted_ascending(values) or str(values.dtype) != x.dtype:
            continue
        if ir.is_16bit(x.dtype) or x.dtype == "bool" or not (x.exact or d.options.fast_ids):
            continue
        x = d.pool.remap(x, rank, keep)
        var = edges.var if np.ndim(array) == 1 else None
        how = Search("searchsorted", _SIDES[op], "scan", 0, 1)
        try:
            place = constant_search(d, x, values, var, how)
        except Refuse:
            return None
        return op, x, place, len(values)
    return None


def _is_false(e: ir.Expr) -> bool:
    return isinstance(e, ir.Const) and e.value is False


def _result(d: Detector, eqn: Any, v: Val, place: ir.Expr) -> Val:
    axis = int(eqn.params["axes"][0]) % len(v.shape)
    d.note(place, NAME)
    shape = tuple(n for k, n in enumerate(v.shape) if k != axis)
    return Val(shape, convert(d, place, dtype_name(eqn.outvars[0].aval)))
