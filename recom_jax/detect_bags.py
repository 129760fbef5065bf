"""Rules of stage 2 for bags and products: one-hot products, weighted sums, segment reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from recom_jax import compat, ir
from recom_jax.detect import Detector, Rule
from recom_jax.detect_rules import elementwise, identity_of, reduce_axes
from recom_jax.detect_tables import base_table, exact_index, index_component, make_take
from recom_jax.detect_values import Refuse, Shape, Val, dtype_name
from recom_jax.shape_solver.dims import DimLike

# ---- one-hot -------------------------------------------------------------------------------------------------


def _class_ids(e: ir.Expr, axis: int) -> ir.Expr | None:
    """`ids` where `e` is ``eq(ids, iota over axis)``, else None."""
    if not (isinstance(e, ir.Op) and e.name == "eq"):
        return None
    for ids, iota in (e.args, e.args[::-1]):
        if (
            isinstance(iota, ir.Affine)
            and iota.offset == 0
            and all(s == int(k == axis) for k, s in enumerate(iota.strides))
            and axis not in ir.depends(ids, {})
        ):
            return ids
    return None


Masked = tuple[ir.Expr, tuple[ir.Expr, ...]]
"""Ids, and the masks that must hold for them to count."""


def _classes(e: ir.Expr, axis: int) -> Masked | None:
    """``ids == iota``, alone or with masks."""
    ids = _class_ids(e, axis)
    if ids is not None:
        return ids, ()
    if isinstance(e, ir.Op) and e.name == "and":
        for a, b in (e.args, e.args[::-1]):
            found = _classes(a, axis)
            if found is not None:
                return found[0], (*found[1], b)
    return None


def _one_hot(e: ir.Expr, axis: int) -> Masked | None:
    """The ids whose one-hot vectors along `axis` an expression is, and the masks they are under."""
    if not isinstance(e, ir.Op):
        return None
    if e.name == "convert":
        of = e.args[0]
        return _classes(of, axis) if of.dtype == "bool" else _one_hot(of, axis)
    if e.name == "mul":
        for a, b in (e.args, e.args[::-1]):
            inner = _one_hot(a, axis)
            if inner is not None and _is_mask(b):
                return inner[0], (*inner[1], b.children[0])
        return None
    if e.name != "select" or not (isinstance(e.args[1], ir.Const) and e.args[1].value == 0):
        return None
    pred, _, kept = e.args
    found = _classes(pred, axis)
    if found is None:  # where(mask, one_hot(ids), 0)
        inner = _one_hot(kept, axis)
        return None if inner is None else (inner[0], (*inner[1], pred))
    if isinstance(kept, ir.Const) and kept.value == 1:
        return found
    if _is_mask(kept):
        return found[0], (*found[1], kept.children[0])  # one_hot(ids) * mask
    return None


def _is_mask(e: ir.Expr) -> bool:
    """Whether a number is a boolean converted."""
    return isinstance(e, ir.Op) and e.name == "convert" and e.args[0].dtype == "bool"


def _one_hot_ids(d: Detector, e: ir.Expr, axis: int) -> ir.Expr | None:
    """The ids of one-hot vectors; where a mask is false the id is -1, which no class has."""
    found = _one_hot(e, axis)
    if found is None or not found[1]:
        return None if found is None else found[0]
    ids, masks = found
    if not ids.dtype.startswith("int"):
        return None
    if any(axis in ir.depends(m, {}) or not m.exact for m in masks):
        return None
    mask = masks[0]
    for m in masks[1:]:
        mask = d.pool.op("and", "bool", mask, m)
    return d.pool.op("select", ids.dtype, mask, d.pool.const(ids.dtype, -1), ids)


def _refuse_other_one_hot(e: ir.Expr, axis: int) -> None:
    """Names what a product with classes is, where it is no lookup: a reader of `explain` looks for it."""
    classes = [x for x in ir.walk(e) if isinstance(x, ir.Op) and x.name == "eq"]
    if not any(_class_ids(x, axis) is not None for x in classes):
        return
    if isinstance(e, ir.Reduce) and e.kind != "sum":
        raise Refuse("a one-hot product that takes each id once")
    raise Refuse("a weighted one-hot product")


def _dot_general(d: Detector, eqn: Any) -> Val | None:
    (lc, rc), (lb, _) = eqn.params["dimension_numbers"]
    lhs, rhs = eqn.invars
    found = base_table(d, rhs) if not lb and tuple(rc) == (0,) and len(lc) == 1 else None
    if found is not None and len(rhs.aval.shape) == 2:
        one_hot = _one_hot_product(d, eqn, lhs, int(lc[0]), *found)
        if one_hot is not None:
            return one_hot
    return _scaled_rows(d, eqn) or _weighted_bag(d, eqn)


def _one_hot_product(
    d: Detector, eqn: Any, lhs: Any, contract: int, table: Any, table_expr: ir.Expr
) -> Val | None:
    try:
        left = d.val(lhs)
    except Refuse:
        return None
    if left.expr is None or left.takes:
        return None
    pooled = left.expr if isinstance(left.expr, ir.Reduce) and left.expr.kind == "sum" else None
    ids = _one_hot_ids(d, pooled.arg if pooled is not None else left.expr, contract)
    if ids is None:
        _refuse_other_one_hot(left.expr, contract)
        return None
    if "one-hot-to-lookup" in d.disabled:
        raise Refuse("rewrite one-hot-to-lookup is disabled")
    if not ids.exact and not d.options.fast_ids:
        raise Refuse("one-hot ids that pass through float arithmetic")
    dtype = dtype_name(eqn.outvars[0].aval)
    if not isinstance(table_expr, ir.Load) or dtype != table_expr.dtype or not ir.is_float(dtype):
        raise Refuse("a one-hot product that changes the dtype")
    if any(map(compat.is_symbolic, table.aval.shape)):
        raise Refuse("a one-hot product with a table of symbolic size")
    rows, width = (int(n) for n in table.aval.shape)
    rank = len(left.shape)
    extra = len(pooled.sizes) if pooled is not None else 0
    total = rank + extra
    keep = [k for k in range(total) if k != contract]

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        # free axes, the embedding axis, then the axes being pooled
        free = [strides[k] for k in keep]
        return (*free[: rank - 1], 0, *free[rank - 1 :]), offset

    if ir.is_float(ids.dtype):
        raise Refuse("one-hot of float ids")
    if rows - 1 > np.iinfo(ids.dtype).max:  # the iota wraps round, and an id meets several classes
        raise Refuse(f"one-hot of more classes than {ids.dtype} ids can name")
    idx = d.pool.remap(ids, total, f)
    expr = make_take(
        d,
        eqn,
        table,
        table_expr,
        idx,
        rows=rows,
        width=width,
        base=0,
        cols=tuple(int(k == rank - 1) for k in range(total)),
        shift=(0,) * total,
        mode="fill",
        fill=0.0,
        one_hot=True,
    )
    if pooled is not None:
        expr = d.pool.reduce("sum", expr, pooled.sizes, 0.0)
    shape: Shape = (*(left.shape[k] for k in range(rank) if k != contract), width)
    return Val(shape, expr)


def _scaled_rows(d: Detector, eqn: Any) -> Val | None:
    """A product without a sum: ``rows[n, d] * weights[n]``, as products of sparse matrices have it."""
    (lc, _), (lb, rb) = eqn.params["dimension_numbers"]
    if lc or (tuple(lb), tuple(rb)) != ((0,), (0,)):
        return None
    if [len(v.aval.shape) for v in eqn.invars] != [1, 2]:
        return None
    try:
        weights, rows = (d.val(v) for v in eqn.invars)
    except Refuse:
        return None
    dtype = dtype_name(eqn.outvars[0].aval)
    if weights.expr is None or rows.expr is None or not rows.takes or weights.takes:
        return None
    if not (dtype == rows.expr.dtype == weights.expr.dtype) or ir.is_16bit(dtype):
        return None
    d.unifier.unify(rows.shape[0], weights.shape[0])
    spread = d.pool.remap(weights.expr, 1, lambda s, o: ((s[0], 0), o))
    return Val(rows.shape, elementwise(d, "mul", dtype, [spread, rows.expr]))


def _weighted_bag(d: Detector, eqn: Any) -> Val | None:
    """``einsum('blh,bl->bh')``: rows times one weight each, summed over the bag."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    try:
        vals = [d.val(v) for v in eqn.invars]
    except Refuse:
        return None
    if sum(bool(v.takes) for v in vals) != 1 or len(lc) != 1:
        return None
    swap = bool(vals[1].takes)
    rows, weights = (vals[1], vals[0]) if swap else (vals[0], vals[1])
    (c_r, c_w), (b_r, b_w) = ((rc, lc), (rb, lb)) if swap else ((lc, rc), (lb, rb))
    if len(weights.shape) != len(b_w) + 1 or rows.expr is None or weights.expr is None:
        return None
    dtype = dtype_name(eqn.outvars[0].aval)
    if (
        not (dtype == rows.expr.dtype == weights.expr.dtype)
        or not ir.is_float(dtype)
        or ir.is_16bit(dtype)
    ):
        return None
    free = [k for k in range(len(rows.shape)) if k not in b_r and k != c_r[0]]
    rank = len(b_r) + len(free) + 1
    order = [*b_r, *free, c_r[0]]
    moved = d.pool.remap(rows.expr, len(rows.shape), lambda s, o: (tuple(s[k] for k in order), o))

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        out: list[DimLike] = [0] * rank
        for k, axis in enumerate(b_w):
            out[k] = strides[axis]
        out[-1] = strides[c_w[0]]
        return tuple(out), offset

    for a, b in zip((*b_r, c_r[0]), (*b_w, c_w[0]), strict=True):
        d.unifier.unify(rows.shape[a], weights.shape[b])
    spread = d.pool.remap(weights.expr, len(weights.shape), f)
    product = d.pool.op("mul", dtype, moved, spread, arith=True, exact=False)
    shape = tuple(rows.shape[k] for k in order)
    return reduce_axes(d, Val(shape, product), [rank - 1], "sum")


# ---- jagged bags ---------------------------------------------------------------------------------------------

_SCATTER = {
    "scatter-add": "sum",
    "scatter_add": "sum",
    "scatter-max": "max",
    "scatter_max": "max",
    "scatter-min": "min",
    "scatter_min": "min",
}


def _scatter(d: Detector, eqn: Any) -> Val | None:
    """``segment_sum`` and kin: a scatter of rows into a fresh buffer of identities."""
    operand, start, updates = eqn.invars
    kind = _SCATTER[eqn.primitive.name]
    dims, mode = eqn.params["dimension_numbers"], str(eqn.params["mode"])
    rank = len(updates.aval.shape)
    if (
        rank not in (1, 2)
        or tuple(dims.inserted_window_dims) != (0,)
        or tuple(dims.scatter_dims_to_operand_dims) != (0,)
        or tuple(dims.update_window_dims) != tuple(range(1, rank))
    ):
        return None
    if getattr(dims, "operand_batching_dims", ()) or len(start.aval.shape) != 2:
        return None
    try:
        into, data, index = d.val(operand), d.val(updates), exact_index(d, start)
    except Refuse:
        return None
    dtype = dtype_name(eqn.outvars[0].aval)
    if not isinstance(into.expr, ir.Const) or into.expr.value != identity_of(kind, dtype):
        return None
    if "CLIP" in mode.upper():
        raise Refuse("a scatter that clips its segment ids")
    if data.expr is None or data.expr.dtype != dtype or dtype == "bool":
        return None
    if any(isinstance(x, (ir.Reduce, ir.SegReduce)) for x in ir.walk(data.expr)):
        raise Refuse("a jagged bag of bags")
    seg1 = index_component(d, index, 0)
    seg = d.pool.remap(seg1, 1, lambda s, o: ((s[0], *((0,) * (rank - 1))), o))
    if any(isinstance(x, (ir.Reduce, ir.SegReduce)) for x in ir.walk(seg)):
        seg_var = d.opaque(start)
        seg = d.pool.remap(
            index_component(d, seg_var, 0), 1, lambda s, o: ((s[0], *((0,) * (rank - 1))), o)
        )
    total = data.shape[0]
    d.unifier.unify(total, index.shape[0])
    if rank == 2:
        d.unifier.unify(data.shape[1], into.shape[1])
    bags = into.shape[0]
    if isinstance(bags, int) and not d.symbolic:  # one bag: as many as in any other trace
        bags = d.unifier.fresh("n", bags, literal=True)
    shape = (bags, *data.shape[1:])
    bag = (1, *((0,) * (rank - 1)))
    feature = tuple(int(k == 1) for k in range(rank))
    return Val(
        shape,
        d.pool.seg_reduce(
            kind, dtype, data.expr, seg, total, bag, 0, feature, identity_of(kind, dtype)
        ),
    )


BAG_RULES: dict[str, Rule] = {"dot_general": _dot_general, **dict.fromkeys(_SCATTER, _scatter)}
