"""Rules of stage 2 for table reads and bags: gather, dynamic_slice, one-hot products, segment reductions.

A table is an argument or a constant of rank 2 (rank 3 where stacked), read along its row axis; or elementwise
from one, in which case the arithmetic moves behind the lookup. Whatever looks like a table read and is not
understood is recorded with a reason, for `explain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recom_jax import compat, ir
from recom_jax.detect import Detector, Rule
from recom_jax.detect_rules import convert
from recom_jax.detect_search import gather_of_unique, repeated_arange
from recom_jax.detect_symbolic import sliced
from recom_jax.detect_values import Read, Refuse, Val, dtype_name, row_major
from recom_jax.row_arithmetic import context_free_divisor
from recom_jax.shape_solver.dims import DimLike

NOT_ROWS = "the table is not read along its rows"

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
    if isinstance(v.expr, ir.Load) and v.expr.var is atom and id(atom) in d.arguments:
        return atom, v.expr  # read as it is
    loads = [x for x in ir.walk(v.expr) if not isinstance(x, (ir.Op, ir.Const))]
    if len(loads) != 1 or not isinstance(loads[0], ir.Load):
        return None
    load = loads[0]
    if id(load.var) not in d.arguments or load.var.aval.shape != atom.aval.shape:
        return None
    if load.offset != 0 or load.strides != row_major(d.val(load.var).shape):
        return None  # transposed, reversed: its rows do not lie where the argument's do
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
            if ir.is_float(e.dtype) and e.name in ("add", "sub", "mul", "div"):
                if any(a.arith for a in e.args):
                    raise Refuse("a table computed by a chain of float arithmetic")
                if e.name == "div" and not context_free_divisor(d, e.args[1]):
                    raise Refuse("a table divided by what XLA may multiply it by the inverse of")
            return d.pool.op(e.name, e.dtype, *map(rebuild, e.args), exact=e.exact, arith=e.arith)
        return e

    return rebuild(table_expr)


def make_take(
    d: Detector,
    eqn: Any,
    table: Any,
    table_expr: ir.Expr,
    idx: ir.Expr,
    *,
    rows: int,
    width: int,
    base: int,
    cols: ir.Strides,
    shift: ir.Strides,
    mode: str,
    fill: Any,
    one_hot: bool = False,
) -> ir.Expr:
    for axis in d.val(table).shape:
        d.unifier.pin(axis)
    take = d.pool.take(
        table,
        dtype_name(table.aval),
        idx=idx,
        rows=rows,
        row_stride=width,
        base=base,
        cols=cols,
        row_shift=shift,
        mode=mode,
        fill=fill,
        one_hot=one_hot,
    )
    if one_hot:
        d.note(take, "one-hot-to-lookup")
    d.pool.read(take, len(d.reads))
    d.reads.append(Read(table, eqn, ""))
    return _rows_expr(d, table_expr, take)


def exact_index(d: Detector, atom: Any) -> Val:
    """The ids: by the program itself when that is bit-exact, else as XLA computes them."""
    v = d.val(atom)
    if v.expr is not None and not v.expr.exact and not d.options.fast_ids:
        return d.opaque(atom)
    if v.expr is None and not all(p.expr.exact for p in v.parts) and not d.options.fast_ids:
        return d.opaque(atom)
    if v.takes:
        return d.opaque(atom)  # ids that come out of a lookup: the next call reads them
    return v


def index_component(
    d: Detector, indices: Val, k: int, rank: int | None = None, axes: Sequence[int] | None = None
) -> ir.Expr:
    """Component k of start indices [..., n] as an expression over `rank` axes, its own leading ones at `axes`."""
    own = len(indices.shape) - 1
    size, places = (own, range(own)) if rank is None or axes is None else (rank, axes)

    def place(strides: ir.Strides) -> ir.Strides:
        out: list[DimLike] = [0] * size
        for s, axis in zip(strides, places, strict=False):
            out[axis] = s
        return tuple(out)

    if indices.expr is None:
        for p in indices.parts:
            if (
                d.same(p.offset, k)
                and all(d.same(n, m) for n, m in zip(p.shape[:-1], indices.shape[:-1], strict=True))
                and p.shape[-1] == 1
            ):
                return d.pool.remap(p.expr, own + 1, lambda s, o: (place(s[:own]), o))
        raise Refuse("start indices put together in an unusual way")
    return d.pool.remap(
        indices.expr, own + 1, lambda s, o: (place(s[:own]), o + s[own] * k if k else o)
    )


def _gather(d: Detector, eqn: Any) -> Val | None:
    operand, start = eqn.invars
    if d.symbolic:
        slice_of = sliced(d, eqn)
        if slice_of is not None:
            return slice_of
    found = base_table(d, operand)
    if found is None:
        return repeated_arange(d, eqn) if len(operand.aval.shape) == 1 else gather_of_unique(d, eqn)
    table, table_expr = found
    if any(map(compat.is_symbolic, operand.aval.shape)):
        raise Refuse("a table of symbolic size")
    p = eqn.params
    dims, sizes = p["dimension_numbers"], tuple(int(n) for n in p["slice_sizes"])
    shape_t = operand.aval.shape
    batch = tuple(getattr(dims, "operand_batching_dims", ()))
    start_batch = tuple(getattr(dims, "start_indices_batching_dims", ()))
    every = (
        len(shape_t) == 3
        and not batch
        and sizes[0] == shape_t[0]
        and 0 not in dims.collapsed_slice_dims
    )
    if len(shape_t) == 3 and batch != (0,) and not every:
        raise Refuse("a rank-3 table that is not read along a batch of tables")
    row_axis = len(shape_t) - 2
    if row_axis not in dims.start_index_map:
        raise Refuse(NOT_ROWS)
    if sizes[row_axis] != 1:
        raise Refuse("a gather of several rows at once")
    if sizes[-1] != shape_t[-1] and len(shape_t) == 3:
        raise Refuse("a gather of part of a stacked table's row")
    indices = exact_index(d, start)
    out_rank = len(eqn.outvars[0].aval.shape)
    batch_axes = [k for k in range(out_rank) if k not in dims.offset_dims]
    idx = index_component(d, indices, dims.start_index_map.index(row_axis), out_rank, batch_axes)
    base = 0
    clips = "fill" not in str(p["mode"]).lower()
    if row_axis + 1 in dims.start_index_map and not (clips and sizes[-1] == shape_t[-1]):
        from recom_jax.simplify.facts import Facts

        column = Facts({}).of(index_component(d, indices, dims.start_index_map.index(row_axis + 1)))
        if not column.is_const:
            raise Refuse("a gather at a computed column")
        base = min(max(int(column.lo), 0), int(shape_t[-1]) - sizes[-1])
        if not clips and base != column.lo:
            raise Refuse("a gather outside the table's columns")
    if row_axis != 0 and 0 in dims.start_index_map:
        raise Refuse("a gather that also chooses the table")

    # Offset axes are the operand's axes that are neither collapsed nor batched, in order.
    gone = set(dims.collapsed_slice_dims) | set(batch)
    offset_of = dict(
        zip([k for k in range(len(shape_t)) if k not in gone], dims.offset_dims, strict=True)
    )
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
        idx = _narrowed(d, idx, shape_t)
    elif "clip" in mode or "promise" in mode:
        mode, fill = "clip", 0  # XLA clamps what was promised and is not so
    else:
        raise Refuse(f"gather mode {mode}")
    if not isinstance(table_expr, ir.Load) and mode == "fill":
        fill = _unconverted_fill(fill, table_expr)
    expr = make_take(
        d,
        eqn,
        table,
        table_expr,
        idx,
        rows=int(shape_t[row_axis]),
        width=int(shape_t[-1]),
        base=base,
        cols=cols,
        shift=shift,
        mode=mode,
        fill=fill,
    )
    return Val(tuple(shape), expr)


def _narrowed(d: Detector, idx: ir.Expr, shape: Sequence[int]) -> ir.Expr:
    """The ids whose bounds a filling gather checks: JAX casts them first, so 2^32 + 1 reads row 1.

    To int32, wherever every axis of the table fits one (`jax._src.lax.slicing._gather_fill`). A clipping gather
    compares ids as they are.
    """
    narrow = idx.dtype in ("int64", "uint64") and max(shape) < 2**31
    return convert(d, idx, "int32") if narrow else idx


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
    only_casts = all(
        isinstance(x, ir.Load) or (isinstance(x, ir.Op) and x.name == "convert")
        for x in ir.walk(table_expr)
    )
    loads = [x for x in ir.walk(table_expr) if isinstance(x, ir.Load)]
    if (
        only_casts
        and ir.is_float(loads[0].dtype)
        and isinstance(fill, float)
        and (fill != fill or fill == 0)
    ):
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
        if sizes[0] == rows:  # of a column, as of a matrix of ids in a loop over its positions
            raise Refuse(NOT_ROWS)
        if sizes[0] == 1:
            raise Refuse("a slice of part of a row")
        raise Refuse("a slice of several rows at once")
    idx_val = (
        exact_index(d, starts[0]) if not isinstance(starts[0], compat.Literal) else d.val(starts[0])
    )
    idx = d.pool.remap(d.one(idx_val), 0, lambda s, o: ((0, 0), o))
    expr = make_take(
        d,
        eqn,
        table,
        table_expr,
        idx,
        rows=rows,
        width=width,
        base=0,
        cols=(0, 1),
        shift=(0, 0),
        mode="clip",
        fill=0,
    )
    return Val((1, width), expr)


TABLE_RULES: dict[str, Rule] = {
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
}
