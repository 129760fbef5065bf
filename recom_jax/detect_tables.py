"""Rules of stage 2 for table reads and bags: gather, dynamic_slice, one-hot products, segment reductions.

A table is an argument or a constant of rank 2 (rank 3 where stacked), read along its row axis; or elementwise
from one, in which case the arithmetic moves behind the lookup. Whatever looks like a table read and is not
understood is recorded with a reason, for `explain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recom_jax import compat, ir, templates
from recom_jax.detect import Detector, Read, Refuse, Shape, Val, dtype_name
from recom_jax.detect_rules import Rule, convert, identity_of, reduce_axes
from recom_jax.shape_solver import proofs
from recom_jax.shape_solver.dims import DimLike

# (name, dtype, constant arguments) applied to the looked-up rows, innermost first.
Chain = tuple[ir.Expr, ...]


def base_table(d: Detector, atom: Any) -> tuple[Any, ir.Expr] | None:
    """The argument or constant a table is, or is elementwise from, and the expression over it."""
    if isinstance(atom, compat.Literal) or len(atom.aval.shape) not in (2, 3):
        return None
    try:
        v = d.val(atom)
    except Refuse:
        return None
    if v.expr is None:
        return None
    loads = [x for x in ir.walk(v.expr) if not isinstance(x, (ir.Op, ir.Const))]
    if len(loads) != 1 or not isinstance(loads[0], ir.Load):
        return None
    load = loads[0]
    if id(load.var) not in d.arguments or load.var.aval.shape != atom.aval.shape:
        return None
    return load.var, v.expr


def _rows_expr(d: Detector, table_expr: ir.Expr, take: ir.Expr) -> ir.Expr:
    """The table's elementwise arithmetic applied to looked-up rows (gather, then cast)."""
    if isinstance(table_expr, ir.Load):
        return take
    if "cast-after-gather" in d.disabled:
        raise Refuse("rewrite cast-after-gather is disabled")
    d.note(take, "cast-after-gather")

    def rebuild(e: ir.Expr) -> ir.Expr:
        if isinstance(e, ir.Load):
            return take
        if isinstance(e, ir.Op) and e.name == "convert":
            return convert(d, rebuild(e.args[0]), e.dtype)
        if isinstance(e, ir.Op):
            if ir.is_float(e.dtype) and e.name in ("add", "sub", "div") and len(ir.Op.__mro__) and any(
                    a.arith for a in e.args):
                raise Refuse("a table computed by a chain of float arithmetic")
            return d.pool.op(e.name, e.dtype, *map(rebuild, e.args), exact=e.exact, arith=e.arith)
        return e

    return rebuild(table_expr)


def _make_take(d: Detector, eqn: Any, table: Any, table_expr: ir.Expr, idx: ir.Expr, *, rows: int, width: int,
               base: int, cols: ir.Strides, shift: ir.Strides, mode: str, fill: Any, one_hot: bool = False) -> ir.Expr:
    for axis in d.val(table).shape:
        d.unifier.pin(axis)
    take = d.pool.take(table, dtype_name(table.aval), idx=idx, rows=rows, row_stride=width, base=base, cols=cols,
                       row_shift=shift, mode=mode, fill=fill, one_hot=one_hot)
    if one_hot:
        d.note(take, "one-hot-to-lookup")
    d.pool.origins.setdefault(id(take), set()).add(len(d.reads))
    d.reads.append(Read(table, eqn, take, ""))
    return _rows_expr(d, table_expr, take)


def _exact_index(d: Detector, atom: Any) -> Val:
    """The ids: by the program itself when that is bit-exact, else as XLA computes them."""
    v = d.val(atom)
    if v.expr is not None and not v.expr.exact and not d.options.fast_ids:
        return d.opaque(atom)
    if v.expr is None and not all(p.expr.exact for p in v.parts) and not d.options.fast_ids:
        return d.opaque(atom)
    if v.takes:
        return d.opaque(atom)  # ids that come out of a lookup: the next call reads them
    return v


def _index_component(d: Detector, indices: Val, k: int, rank: int | None = None,
                     axes: Sequence[int] | None = None) -> ir.Expr:
    """Component k of start indices [..., n] as an expression over `rank` axes, its own leading ones at `axes`."""
    own = len(indices.shape) - 1
    size, places = (own, range(own)) if rank is None or axes is None else (rank, axes)

    def place(strides: ir.Strides) -> ir.Strides:
        out: list[DimLike] = [0] * size
        for s, axis in zip(strides, places, strict=False):
            out[axis] = s
        return tuple(out)

    if indices.expr is None:
        value = d.unifier.value
        for p in indices.parts:
            if value(p.offset) == k and all(value(n) == value(m) for n, m in zip(p.shape[:-1], indices.shape[:-1],
                                                                                 strict=True)) and p.shape[-1] == 1:
                return d.pool.remap(p.expr, own + 1, lambda s, o: (place(s[:own]), o))
        raise Refuse("start indices put together in an unusual way")
    return d.pool.remap(indices.expr, own + 1, lambda s, o: (place(s[:own]), o + s[own] * k if k else o))


def _gather(d: Detector, eqn: Any) -> Val | None:
    operand, start = eqn.invars
    found = base_table(d, operand)
    if found is None:
        return None
    table, table_expr = found
    p = eqn.params
    dims, sizes = p["dimension_numbers"], tuple(int(n) for n in p["slice_sizes"])
    shape_t = operand.aval.shape
    batch = tuple(getattr(dims, "operand_batching_dims", ()))
    start_batch = tuple(getattr(dims, "start_indices_batching_dims", ()))
    every = len(shape_t) == 3 and not batch and sizes[0] == shape_t[0] and 0 not in dims.collapsed_slice_dims
    if len(shape_t) == 3 and batch != (0,) and not every:
        raise Refuse("a rank-3 table that is not read along a batch of tables")
    row_axis = len(shape_t) - 2
    if row_axis not in dims.start_index_map:
        raise Refuse("the table is not read along its rows")
    if sizes[row_axis] != 1:
        raise Refuse("a gather of several rows at once")
    if sizes[-1] != shape_t[-1] and len(shape_t) == 3:
        raise Refuse("a gather of part of a stacked table's row")
    indices = _exact_index(d, start)
    out_rank = len(eqn.outvars[0].aval.shape)
    batch_axes = [k for k in range(out_rank) if k not in dims.offset_dims]
    idx = _index_component(d, indices, dims.start_index_map.index(row_axis), out_rank, batch_axes)
    base = 0
    if row_axis + 1 in dims.start_index_map:
        column = _index_component(d, indices, dims.start_index_map.index(row_axis + 1))
        if not isinstance(column, ir.Const):
            raise Refuse("a gather at a computed column")
        base = min(max(int(column.value), 0), int(shape_t[-1]) - sizes[-1])

    # Offset axes are the operand's axes that are neither collapsed nor batched, in order.
    gone = set(dims.collapsed_slice_dims) | set(batch)
    offset_of = dict(zip([k for k in range(len(shape_t)) if k not in gone], dims.offset_dims, strict=True))
    if row_axis + 1 not in offset_of:
        if sizes[-1] != 1:
            raise Refuse("a gather without an embedding axis")
        raise Refuse("a gather of single elements")
    feature = offset_of[row_axis + 1]
    shape: list[DimLike] = [1] * out_rank
    for k, axis in enumerate(batch_axes):
        shape[axis] = indices.shape[k]
    shape[feature] = sizes[-1]  # a table's sizes are fixed numbers: they are facts of its class
    cols = tuple(int(k == feature) for k in range(out_rank))
    # Stacked tables: table t's rows start at t * rows, for the table of this element or for every table.
    tables = batch_axes[start_batch[0]] if batch else offset_of[0] if every else None
    if every:
        shape[offset_of[0]] = int(shape_t[0])
    shift = tuple(int(shape_t[1]) if k == tables else 0 for k in range(out_rank))
    mode = str(p["mode"]).rsplit(".", 1)[-1].lower()
    if "fill" in mode:
        mode, fill = "fill", _fill_value(p["fill_value"], operand.aval.dtype)
    elif "clip" in mode or "promise" in mode:
        mode, fill = "clip", 0  # XLA clamps what was promised and is not so
    else:
        raise Refuse(f"gather mode {mode}")
    if not isinstance(table_expr, ir.Load) and mode == "fill":
        fill = _unconverted_fill(fill, table_expr)
    expr = _make_take(d, eqn, table, table_expr, idx, rows=int(shape_t[row_axis]), width=int(shape_t[-1]), base=base,
                      cols=cols, shift=shift, mode=mode, fill=fill)
    return Val(tuple(shape), expr)


def _fill_value(value: Any, dtype: Any) -> Any:
    """lax.gather's defaults: NaN, the smallest signed integer, the largest unsigned one, True."""
    if value is not None:
        return np.asarray(value).item()
    name = str(dtype)
    if ir.is_float(name):
        return float("nan")
    if name == "bool":
        return True
    info = np.iinfo(name)
    return int(info.max if name.startswith("u") else info.min)


def _unconverted_fill(fill: Any, table_expr: ir.Expr) -> Any:
    """A fill value in the table's own dtype that the table's arithmetic turns into `fill`, if it is NaN or 0."""
    only_casts = all(isinstance(x, ir.Load) or (isinstance(x, ir.Op) and x.name == "convert")
                     for x in ir.walk(table_expr))
    loads = [x for x in ir.walk(table_expr) if isinstance(x, ir.Load)]
    if only_casts and ir.is_float(loads[0].dtype) and isinstance(fill, float) and (fill != fill or fill == 0):
        return fill
    if only_casts and fill == 0:
        return 0
    raise Refuse("a table computed from another, read with a fill value")


def _dynamic_slice(d: Detector, eqn: Any) -> Val | None:
    operand, *starts = eqn.invars
    found = base_table(d, operand)
    if found is None or len(operand.aval.shape) != 2:
        return None
    table, table_expr = found
    rows, width = (int(n) for n in operand.aval.shape)
    sizes = tuple(int(n) for n in eqn.params["slice_sizes"])
    if sizes != (1, width):
        raise Refuse("a slice of several rows at once")
    idx_val = _exact_index(d, starts[0]) if not isinstance(starts[0], compat.Literal) else d.val(starts[0])
    idx = d.pool.remap(d.one(idx_val), 0, lambda s, o: ((0, 0), o))
    expr = _make_take(d, eqn, table, table_expr, idx, rows=rows, width=width, base=0, cols=(0, 1), shift=(0, 0),
                      mode="clip", fill=0)
    return Val((1, width), expr)


# ---- one-hot -------------------------------------------------------------------------------------------------


def _one_hot_ids(e: ir.Expr, axis: int) -> ir.Expr | None:
    """`ids` where `e` is ``convert(eq(ids, iota over axis))``, else None."""
    if not (isinstance(e, ir.Op) and e.name == "convert"):
        return None
    eq = e.args[0]
    if not (isinstance(eq, ir.Op) and eq.name == "eq"):
        return None
    memo: dict[int, frozenset[int]] = {}
    for ids, iota in (eq.args, eq.args[::-1]):
        if isinstance(iota, ir.Affine) and iota.offset == 0 and all(
                s == int(k == axis) for k, s in enumerate(iota.strides)) and axis not in ir.depends(ids, memo):
            return ids
    return None


def _dot_general(d: Detector, eqn: Any) -> Val | None:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = eqn.invars
    found = base_table(d, rhs) if not lb and tuple(rc) == (0,) and len(lc) == 1 else None
    if found is not None and len(rhs.aval.shape) == 2:
        one_hot = _one_hot_product(d, eqn, lhs, int(lc[0]), *found)
        if one_hot is not None:
            return one_hot
    return _weighted_bag(d, eqn)


def _one_hot_product(d: Detector, eqn: Any, lhs: Any, contract: int, table: Any, table_expr: ir.Expr) -> Val | None:
    try:
        left = d.val(lhs)
    except Refuse:
        return None
    if left.expr is None or left.takes:
        return None
    pooled = left.expr if isinstance(left.expr, ir.Reduce) and left.expr.kind == "sum" else None
    ids = _one_hot_ids(pooled.arg if pooled is not None else left.expr, contract)
    if ids is None:
        return None
    if "one-hot-to-lookup" in d.disabled:
        raise Refuse("rewrite one-hot-to-lookup is disabled")
    if not ids.exact and not d.options.fast_ids:
        raise Refuse("one-hot ids that pass through float arithmetic")
    dtype = dtype_name(eqn.outvars[0].aval)
    if not isinstance(table_expr, ir.Load) or dtype != table_expr.dtype or not ir.is_float(dtype):
        raise Refuse("a one-hot product that changes the dtype")
    rows, width = (int(n) for n in table.aval.shape)
    rank = len(left.shape)
    extra = len(pooled.sizes) if pooled is not None else 0
    total = rank + extra
    keep = [k for k in range(total) if k != contract]

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        # free axes, the embedding axis, then the axes being pooled
        free = [strides[k] for k in keep]
        return (*free[:rank - 1], 0, *free[rank - 1:]), offset

    if ir.is_float(ids.dtype):
        raise Refuse("one-hot of float ids")
    idx = d.pool.remap(ids, total, f)
    expr = _make_take(d, eqn, table, table_expr, idx, rows=rows, width=width, base=0,
                      cols=tuple(int(k == rank - 1) for k in range(total)), shift=(0,) * total, mode="fill", fill=0.0,
                      one_hot=True)
    if pooled is not None:
        expr = d.pool.reduce("sum", expr, pooled.sizes, 0.0)
    shape: Shape = (*(left.shape[k] for k in range(rank) if k != contract), width)
    return Val(shape, expr)


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
    if not (dtype == rows.expr.dtype == weights.expr.dtype) or not ir.is_float(dtype) or ir.is_16bit(dtype):
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

_SCATTER = {"scatter-add": "sum", "scatter_add": "sum", "scatter-max": "max", "scatter_max": "max",
            "scatter-min": "min", "scatter_min": "min"}


def _scatter(d: Detector, eqn: Any) -> Val | None:
    """``segment_sum`` and kin: a scatter of rows into a fresh buffer of identities."""
    operand, start, updates = eqn.invars
    kind = _SCATTER[eqn.primitive.name]
    dims, mode = eqn.params["dimension_numbers"], str(eqn.params["mode"])
    rank = len(updates.aval.shape)
    if rank not in (1, 2) or tuple(dims.inserted_window_dims) != (0,) or tuple(
            dims.scatter_dims_to_operand_dims) != (0,) or tuple(dims.update_window_dims) != tuple(range(1, rank)):
        return None
    if getattr(dims, "operand_batching_dims", ()) or len(start.aval.shape) != 2:
        return None
    try:
        into, data, index = d.val(operand), d.val(updates), _exact_index(d, start)
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
    seg1 = _index_component(d, index, 0)
    seg = d.pool.remap(seg1, 1, lambda s, o: ((s[0], *((0,) * (rank - 1))), o))
    if any(isinstance(x, (ir.Reduce, ir.SegReduce)) for x in ir.walk(seg)):
        seg_var = d.opaque(start)
        seg = d.pool.remap(_index_component(d, seg_var, 0), 1, lambda s, o: ((s[0], *((0,) * (rank - 1))), o))
    total = data.shape[0]
    d.unifier.unify(total, index.shape[0])
    if rank == 2:
        d.unifier.unify(data.shape[1], into.shape[1])
    shape = (into.shape[0], *data.shape[1:])
    bag = (1, *((0,) * (rank - 1)))
    feature = tuple(int(k == 1) for k in range(rank))
    return Val(shape, d.pool.seg_reduce(kind, dtype, data.expr, seg, total, bag, 0, feature, identity_of(kind, dtype)))


# ---- search --------------------------------------------------------------------------------------------------


def search(d: Detector, eqn: Any) -> Val | None:
    """``jnp.digitize`` and ``jnp.searchsorted``: a bucketize."""
    found = templates.recognise(eqn)
    if found is None:
        return None
    bounds_atom, query_atom = eqn.invars[found.boundaries], eqn.invars[found.query]
    x = d.val(query_atom)
    e = d.one(x)
    if not e.exact and not d.options.fast_ids:
        x = d.opaque(query_atom)
        e = d.one(x)
    if isinstance(bounds_atom, compat.Literal) or ir.is_16bit(e.dtype) or e.dtype == "bool":
        raise Refuse("a search in values of an unusual type")
    out_dtype = dtype_name(eqn.outvars[0].aval)
    count = int(bounds_atom.aval.shape[0])
    bounds = d.val(bounds_atom)
    load = bounds.expr
    if not isinstance(load, ir.Load) or load.strides != (1,) or count == 0:
        raise Refuse("boundaries that are computed")
    values = d.value_of.get(id(load.var))
    if values is None or load.var is not bounds_atom:
        if found.function == "digitize" or found.method == "sort" or load.dtype != e.dtype:
            raise Refuse("a search whose boundaries are not constant")
        mode = "compare_all" if found.method == "compare_all" else "scan"
        return Val(x.shape, convert(d, d.pool.search("int32", e, load.var, load.offset, bounds.shape[0], found.side,
                                                     mode), out_dtype))
    array = np.asarray(values)
    if str(array.dtype) != e.dtype:
        raise Refuse("a search in boundaries of another type")
    descending = found.function == "digitize" and not bool(array[-1] >= array[0])
    expr = _constant_search(d, e, np.ascontiguousarray(array[::-1]) if descending else array,
                            None if descending else bounds_atom, found)
    if descending:
        expr = d.pool.op("sub", "int32", d.pool.const("int32", count), expr)
    return Val(x.shape, convert(d, expr, out_dtype))


def _constant_search(d: Detector, x: ir.Expr, array: np.ndarray[Any, Any], var: Any, found: templates.Search) -> ir.Expr:
    if proofs.sorted_ascending(array):
        grid = None if "uniform-bucketize" in d.disabled else proofs.uniform_grid(array)
        if grid is not None and ir.is_float(x.dtype):
            start, step, count = grid
            e = d.pool.search("int32", x, None, 0, count, found.side, "uniform", (float(start), float(step)))
            d.note(e, "uniform-bucketize")
            return e
        mode = "sorted"
    elif found.method == "sort":
        raise Refuse("a search by sorting in boundaries that are not ascending")
    else:
        mode = "compare_all" if found.method == "compare_all" else "scan"
    if "merge-searches" in d.disabled and mode == "sorted":
        mode = "compare_all" if found.method == "compare_all" else "scan"
    if var is None:
        import jax

        aval = jax.core.ShapedArray(array.shape, array.dtype)
        var = compat.fresh_var(aval)
        d.extra_consts.append((var, array))
        d.value_of[id(var)] = array
    e = d.pool.search("int32", x, var, 0, array.shape[0], found.side, mode)
    if mode == "sorted":
        d.note(e, "merge-searches")
    return e


# ---- what is not fused -----------------------------------------------------------------------------------------


def refused_read(d: Detector, eqn: Any, reason: str | None) -> None:
    """Records a table read that stays in XLA, if the equation is one, and reads inside loops and branches."""
    if eqn.primitive.name in ("gather", "dynamic_slice"):
        found = base_table(d, eqn.invars[0])
        if found is not None:
            d.reads.append(Read(found[0], eqn, None, reason or "this form of read is not understood"))
        elif len(getattr(eqn.invars[0].aval, "shape", ())) == 1 and id(eqn.invars[0]) in d.arguments:
            return  # a read of single numbers is no embedding column
    elif reason is not None and eqn.primitive.name == "dot_general":
        found = base_table(d, eqn.invars[1])
        if found is not None and "one-hot" in reason:
            d.reads.append(Read(found[0], eqn, None, reason))
    else:
        for name, inner, table in _inner_reads(d, eqn):
            d.reads.append(Read(table, inner, None, reason or f"the lookup is inside {name}"))


def _inner_reads(d: Detector, eqn: Any) -> list[tuple[str, Any, Any]]:
    """Table reads in the bodies of an equation: (construct, inner equation, table argument)."""
    if eqn.primitive.name in ("jit", "pjit") and templates.recognise(eqn) is not None:
        return []
    found = []
    tables = [v for v in eqn.invars if not isinstance(v, compat.Literal) and base_table(d, v) is not None]
    if tables:
        def look(jaxpr: Any) -> None:
            for e in jaxpr.eqns:
                if e.primitive.name in ("gather", "dynamic_slice"):
                    aval = e.invars[0].aval
                    same = [t for t in tables if t.aval.shape == aval.shape and t.aval.dtype == aval.dtype]
                    if same:
                        found.append((eqn.primitive.name, e, same[0]))
                for sub in compat.sub_jaxprs(e):
                    look(sub)

        for sub in compat.sub_jaxprs(eqn):
            look(sub)
    return found


TABLE_RULES: dict[str, Rule] = {
    "gather": _gather, "dynamic_slice": _dynamic_slice, "dot_general": _dot_general,
    **dict.fromkeys(_SCATTER, _scatter),
}
