"""Rules of stage 2 for whole library functions: `digitize` and `searchsorted`, and `unique` around a lookup."""

from __future__ import annotations

from typing import Any

import numpy as np

from recom_jax import compat, ir, templates
from recom_jax.detect import Detector
from recom_jax.detect_rules import convert
from recom_jax.detect_values import Refuse, Val, dtype_name
from recom_jax.shape_solver import proofs
from recom_jax.shape_solver.dims import DimLike
from recom_jax.subgraph import repeated, unique_inverse

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
    count = d.sizes.of(bounds_atom.aval.shape[0])
    bounds = d.val(bounds_atom)
    load = bounds.expr
    if not isinstance(load, ir.Load) or load.strides != (1,) or count == 0:
        raise Refuse("boundaries that are computed")
    values = d.value_of.get(id(load.var))
    if values is None or load.var is not bounds_atom:
        if found.function == "digitize" or found.method == "sort" or load.dtype != e.dtype:
            raise Refuse("a search whose boundaries are not constant")
        mode = "compare_all" if found.method == "compare_all" else "scan"
        return Val(
            x.shape,
            convert(
                d,
                d.pool.search("int32", e, load.var, load.offset, bounds.shape[0], found.side, mode),
                out_dtype,
            ),
        )
    array = np.asarray(values)
    if str(array.dtype) != e.dtype:
        raise Refuse("a search in boundaries of another type")
    descending = found.function == "digitize" and not bool(array[-1] >= array[0])
    expr = constant_search(
        d,
        e,
        np.ascontiguousarray(array[::-1]) if descending else array,
        None if descending else bounds_atom,
        found,
    )
    if descending:
        assert isinstance(count, int)  # a constant array's
        expr = d.pool.op("sub", "int32", d.pool.const("int32", count), expr)
    return Val(x.shape, convert(d, expr, out_dtype))


def constant_search(
    d: Detector, x: ir.Expr, array: np.ndarray[Any, Any], var: Any, found: templates.Search
) -> ir.Expr:
    """The index of `x` among a constant array's values; `var` is the array's variable (None: a new one)."""
    if ir.is_float(x.dtype) and proofs.has_subnormals(array):
        # XLA compares with denormals flushed to zero, but folds constants without: which of the two a
        # boundary meets depends on the method and the version.
        raise Refuse("a search in subnormal boundaries")
    if proofs.sorted_ascending(array):
        grid = None if "uniform-bucketize" in d.disabled else proofs.uniform_grid(array)
        if grid is not None and ir.is_float(x.dtype):
            start, step, count = grid
            e = d.pool.search(
                "int32", x, None, 0, count, found.side, "uniform", (float(start), float(step))
            )
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


_LENGTHS = ("int32", "uint32", "int64", "uint64")  # narrower ones wrap in ways of their own


def repeated_arange(d: Detector, eqn: Any) -> Val | None:
    """``jnp.repeat(jnp.arange(n), lengths, total_repeat_length=t)``: the bag that each position belongs to.

    It is one less than the number of bags that start at the position or before it. A start is the sum of the
    lengths before it, which a difference of row splits makes a split again.
    """
    array = eqn.invars[0]
    if isinstance(array, compat.Literal) or not _is_arange(d, array):
        return None
    found = repeated(d.made_by(), eqn, _LENGTHS)
    positions = eqn.outvars[0].aval.shape[0]
    if found is None or (isinstance(positions, int) and positions > np.iinfo("int32").max):
        return None  # a symbolic number of positions is checked at the call
    if "repeat-to-search" in d.disabled:
        raise Refuse("rewrite repeat-to-search is disabled")
    lengths = d.val(found[1])
    splits = _splits(lengths.expr)
    mode, load = ("lengths", lengths.expr) if splits is None else ("splits", splits)
    if not isinstance(load, ir.Load) or load.strides != (1,):
        load = d.one(d.opaque(found[1]))
        assert isinstance(load, ir.Load)
    total = d.literal_dim(positions)
    e = d.pool.search(
        "int32",
        d.pool.affine(load.dtype, 0, (1,)),
        load.var,
        load.offset,
        lengths.shape[0],
        "right",
        mode,
        total=total,
    )
    d.note(e, "repeat-to-search")
    seg = d.pool.op("sub", "int32", e, d.pool.const("int32", 1))
    return Val((total,), convert(d, seg, dtype_name(eqn.outvars[0].aval)))


def _is_arange(d: Detector, array: Any) -> bool:
    known = d.value_of.get(id(array))
    if known is not None:
        return str(known.dtype)[0] in "iu" and bool(
            (np.asarray(known) == np.arange(len(known))).all()
        )
    expr = d.val(array).expr
    return isinstance(expr, ir.Affine) and expr.offset == 0 and expr.strides == (1,)


def _splits(lengths: ir.Expr | None) -> ir.Load | None:
    """The row splits whose differences `lengths` are, from the first one on."""
    if not isinstance(lengths, ir.Op) or lengths.name != "sub":
        return None
    after, before = lengths.args
    if (
        isinstance(after, ir.Load)
        and isinstance(before, ir.Load)
        and after.var is before.var
        and after.strides == before.strides == (1,)
        and after.offset == before.offset + 1
    ):
        return before
    return None


def gather_of_unique(d: Detector, eqn: Any) -> Val | None:
    """``table[u][inv]`` where (u, inv) = ``jnp.unique(ids, return_inverse=True, size=n)``: ``table[ids]``."""
    operand, start = eqn.invars
    rows = None if isinstance(operand, compat.Literal) else d.known(operand)
    if (
        rows is None
        or rows.expr is None
        or not rows.takes
        or len(rows.shape) != 2
        or "unique-inverse" in d.disabled
    ):
        return None
    dims = eqn.params["dimension_numbers"]
    indices = d.val(start)
    out_rank = len(eqn.outvars[0].aval.shape)
    plain = (
        tuple(dims.offset_dims) == (out_rank - 1,)
        and tuple(dims.collapsed_slice_dims) == (0,)
        and tuple(dims.start_index_map) == (0,)
        and eqn.params["slice_sizes"] == (1, operand.aval.shape[1])
    )
    if not plain or indices.expr is None:
        return None
    inverse = {id(x.var): x for x in ir.walk(indices.expr) if isinstance(x, ir.Load)}
    read = d.made_by().get(id(operand))
    values = (
        _unwrapped(d, read[0].invars[1])
        if read is not None and read[0].primitive.name == "gather"
        else None
    )
    if len(inverse) != 1 or values is None or len(values.aval.shape) != 1:
        return None
    (inv,) = inverse.values()
    ids = unique_inverse(d.made_by(), values, inv.var)
    if ids is None:
        return None
    # The position in `inv` is the position in `ids`: both are dense, in the same order.
    where = inv.strides[: out_rank - 1]
    old = d.pool.remap(d.one(d.val(values)), 1, lambda s, o: ((s[0], 0), o))
    load = d.one(d.opaque(ids))
    assert isinstance(load, ir.Load)
    marker = d.pool.load(load.var, load.dtype, 0, (1, 0))
    replaced = _substitute(d, rows.expr, old, marker)
    if any(isinstance(x, ir.Load) and x is not marker for x in ir.walk(replaced)):
        return None

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        return (*(s * strides[0] for s in where), strides[1]), offset + inv.offset * strides[0]

    expr = d.pool.remap(replaced, 2, f)
    for x in ir.walk(expr):
        if isinstance(x, ir.Take):
            d.note(x, "unique-inverse")
    return Val((*indices.shape[:-1], rows.shape[1]), expr)


def _unwrapped(d: Detector, atom: Any) -> Any | None:
    """The variable of the ids behind start indices: broadcasts and the wrap of negative ids taken off."""
    for _ in range(8):
        made = None if isinstance(atom, compat.Literal) else d.made_by().get(id(atom))
        if made is None:
            break
        eqn = made[0]
        if eqn.primitive.name in ("broadcast_in_dim", "reshape"):
            atom = eqn.invars[0]
            continue
        if eqn.primitive.name == "select_n" and len(eqn.invars) == 3:
            pred, wrap = d.made_by().get(id(eqn.invars[0])), d.made_by().get(id(eqn.invars[2]))
            if (
                pred is not None
                and wrap is not None
                and pred[0].primitive.name == "lt"
                and wrap[0].primitive.name == "add"
                and pred[0].invars[0] is eqn.invars[1] is wrap[0].invars[0]
            ):
                atom = eqn.invars[1]
                continue
        break
    return None if isinstance(atom, compat.Literal) else atom


def _substitute(d: Detector, e: ir.Expr, old: ir.Expr, new: ir.Expr) -> ir.Expr:
    """`e` with node `old` replaced."""
    if e is old:
        return new
    return (
        d.pool.with_children(e, [_substitute(d, c, old, new) for c in e.children])
        if e.children
        else e
    )
