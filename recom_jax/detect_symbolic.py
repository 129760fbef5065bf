"""Rules of stage 2 for what only traces with symbolic dimensions (`jax.export`) hold."""

from __future__ import annotations

from typing import Any

from recom_jax import ir
from recom_jax.detect import Detector
from recom_jax.detect_values import Refuse, Val, dtype_name
from recom_jax.shape_solver.dims import DimLike


def dim_as_value(d: Detector, eqn: Any) -> Val:
    """A size as a number: what such a trace has in the place of a constant."""
    size = d.sizes.of(eqn.params["dim"])
    return Val((), d.pool.affine(dtype_name(eqn.outvars[0].aval), size, ()))


def is_size(e: ir.Expr) -> bool:
    """Whether a value is made of sizes alone: a constant once the program is compiled, but not in the trace."""
    leaves = [x for x in ir.walk(e) if not x.children]
    return any(isinstance(x, ir.Affine) for x in leaves) and all(
        isinstance(x, ir.Const) or (isinstance(x, ir.Affine) and not any(x.strides)) for x in leaves
    )


def sliced(d: Detector, eqn: Any) -> Val | None:
    """A gather that is a slice at a fixed place: what ``x[1:]`` or ``x[:, 2]`` traces to where ``x`` is symbolic."""
    operand, start = eqn.invars
    dims = eqn.params["dimension_numbers"]
    rank = len(operand.aval.shape)
    kept = [k for k in range(rank) if k not in dims.collapsed_slice_dims]
    if (
        len(start.aval.shape) != 1
        or tuple(getattr(dims, "operand_batching_dims", ()))
        or tuple(dims.offset_dims) != tuple(range(len(kept)))
    ):
        return None
    try:
        v, where = d.val(operand), d.val(start)
    except Refuse:
        return None
    starts: list[DimLike] = [0] * rank
    for k, axis in enumerate(dims.start_index_map):
        found = _component(d, where, k)
        if found is None:
            return None
        starts[axis] = found
    sizes = d.sizes.shape(eqn.params["slice_sizes"])
    for at, n, whole in zip(starts, sizes, v.shape, strict=True):  # else it is moved, or filled
        if not (d.sizes.never_negative(at) and d.sizes.never_negative(whole - at - n)):
            return None

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        for s, at in zip(strides, starts, strict=True):
            offset = offset + s * at
        return tuple(strides[k] for k in kept), offset

    return Val(tuple(sizes[k] for k in kept), d.pool.remap(d.one(v), rank, f))


def _component(d: Detector, where: Val, k: int) -> DimLike | None:
    """Number k of a vector of sizes and constants, as a size."""
    if where.expr is not None:
        return _size(where.expr)
    for p in where.parts:
        if len(p.shape) == 1 and d.same(p.offset, k) and d.is_one(p.shape[0]):
            return _size(p.expr)
    return None


def _size(e: ir.Expr) -> DimLike | None:
    if isinstance(e, ir.Const) and isinstance(e.value, int):
        return int(e.value)
    if isinstance(e, ir.Affine) and not any(e.strides):
        return e.offset
    if isinstance(e, ir.Op) and e.name == "convert" and e.dtype in ("int32", "int64"):
        return _size(e.args[0])
    return None
