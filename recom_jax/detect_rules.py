"""Rules of stage 2, keyed by primitive: elementwise arithmetic, movement, reductions.

A rule takes the detector and an equation and returns the value of its output (a list for several outputs),
None where the value is best left to XLA, or raises `Refuse` with the reason `explain` shows. What a rule
returns must equal what XLA computes: `exact` bit for bit (ids and masks need it), else within the bound of
a pooled sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recom_jax import ir
from recom_jax.detect import Detector, Part, Refuse, Shape, Val, dtype_name, row_major
from recom_jax.shape_solver.dims import DimLike, exact_div, product

Rule = Callable[[Detector, Any], "Val | list[Val | None] | None"]

BINARY = {
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div", "rem": "rem", "max": "max",
    "min": "min", "and": "and", "or": "or", "xor": "xor", "shift_left": "shl", "shift_right_logical": "shr_l",
    "shift_right_arithmetic": "shr_a", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}
UNARY = {
    "neg": "neg", "abs": "abs", "sign": "sign", "not": "not", "floor": "floor", "ceil": "ceil", "sqrt": "sqrt",
    "is_finite": "is_finite", "population_count": "popcnt", "clz": "clz",
}
ARITHMETIC = frozenset(("add", "sub", "mul", "div", "sqrt"))
SAFE_16BIT = frozenset(("max", "min", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "is_finite"))


def elementwise(d: Detector, name: str, dtype: str, args: Sequence[ir.Expr]) -> ir.Expr:
    """One arithmetic operation, with the two questions that decide exactness.

    A product that feeds a sum may be contracted to a fused multiply-add by XLA, or not, by context; division
    by a constant may become a multiplication. On ids such values are inexact (XLA then computes the id);
    on looked-up rows that are not pooled the operation is refused.
    """
    of = args[0].dtype
    if any(ir.is_16bit(a.dtype) for a in args) and name not in SAFE_16BIT:
        raise Refuse(f"{of} arithmetic: XLA may keep or drop intermediate precision")
    exact, arith = True, False
    if ir.is_float(of) and name in ARITHMETIC:
        arith = True
        exact = not any(a.arith for a in args)
        looked_up = any(a.takes for a in args)
        if name in ("add", "sub") and looked_up and any(_is_product(a) for a in args):
            raise Refuse("a multiply-add that XLA may contract")
        if name == "div" and isinstance(args[1], ir.Const) and not _power_of_two(args[1].value):
            exact = False
            if looked_up and not _pooled(args[0]):
                raise Refuse("division by a constant, which XLA turns into a multiplication")
        if name == "sqrt" and looked_up:
            raise Refuse("sqrt of looked-up values")
    elif ir.is_float(of) and name in ("max", "min", "neg", "abs"):
        arith = any(a.arith for a in args)
    elif ir.is_float(of) and name == "rem":
        exact = False
    return d.pool.op(name, dtype, *args, exact=exact, arith=arith)


def _is_product(e: ir.Expr) -> bool:
    return isinstance(e, ir.Op) and e.name in ("mul", "neg", "select") and any(
        e.name == "mul" or _is_product(a) for a in e.args)


def _power_of_two(value: float) -> bool:
    import math

    return value != 0 and math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


def _pooled(e: ir.Expr) -> bool:
    return any(isinstance(x, (ir.Reduce, ir.SegReduce)) and x.takes for x in ir.walk(e))


def _nary(d: Detector, eqn: Any, name: str) -> Val:
    vals = [d.val(v) for v in eqn.invars]
    shape = d.join([v.shape for v in vals])
    args = [d.spread(v, shape) for v in vals]
    return Val(shape, elementwise(d, name, dtype_name(eqn.outvars[0].aval), args))


def _named(name: str) -> Rule:
    return lambda d, eqn: _nary(d, eqn, name)


def _select_n(d: Detector, eqn: Any) -> Val:
    if len(eqn.invars) != 3:
        raise Refuse("select_n with more than two cases")
    vals = [d.val(v) for v in eqn.invars]
    if vals[0].expr is not None and vals[0].expr.dtype != "bool":
        raise Refuse("select_n on integers")
    shape = d.join([v.shape for v in vals])
    if not vals[0].takes and d.one(vals[0]).exact is False and (vals[1].takes or vals[2].takes):
        vals[0] = d.opaque(eqn.invars[0])  # a mask must be XLA's own, like an id
        shape = d.join([v.shape for v in vals])
    pred, on_false, on_true = (d.spread(v, shape) for v in vals)
    arith = on_false.arith or on_true.arith
    return Val(shape, d.pool.op("select", on_true.dtype, pred, on_false, on_true, arith=arith))


def _clamp(d: Detector, eqn: Any) -> Val:
    low, x, high = (d.val(v) for v in eqn.invars)
    shape = d.join([low.shape, x.shape, high.shape])
    lo, mid, hi = (d.spread(v, shape) for v in (low, x, high))
    return Val(shape, d.pool.op("min", mid.dtype, d.pool.op("max", mid.dtype, mid, lo, arith=mid.arith), hi,
                                arith=mid.arith))


def convert(d: Detector, e: ir.Expr, dtype: str) -> ir.Expr:
    if e.dtype == dtype:
        return e
    if isinstance(e, ir.Const) and not ir.is_16bit(dtype):
        return _convert_const(d, e, dtype)
    widening = ir.is_float(e.dtype) and ir.is_float(dtype)
    return d.pool.op("convert", dtype, e, arith=e.arith and widening)


def _convert_const(d: Detector, e: ir.Const, dtype: str) -> ir.Expr:
    import numpy as np

    if ir.is_float(e.dtype) and not ir.is_float(dtype) and dtype != "bool":
        return d.pool.op("convert", dtype, e)  # saturation is the interpreter's business
    with np.errstate(all="ignore"):
        return d.pool.const(dtype, np.asarray(e.value, e.dtype).astype(dtype).item())


def _convert_rule(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    return Val(v.shape, convert(d, d.one(v), dtype_name(eqn.outvars[0].aval)))


def _bitcast(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    e, dtype = d.one(v), dtype_name(eqn.outvars[0].aval)
    if eqn.invars[0].aval.shape != eqn.outvars[0].aval.shape or "bool" in (dtype, e.dtype):
        raise Refuse("a bitcast that changes the shape")
    if ir.is_16bit(e.dtype) or ir.is_16bit(dtype):
        raise Refuse("a bitcast of 16-bit floats")
    return Val(v.shape, d.pool.op("bitcast", dtype, e))


def _integer_pow(d: Detector, eqn: Any) -> Val:
    power = eqn.params.get("y", 2)
    if power not in (1, 2):
        raise Refuse(f"integer_pow with exponent {power}")
    v = d.val(eqn.invars[0])
    e = d.one(v)
    return v if power == 1 else Val(v.shape, elementwise(d, "mul", e.dtype, [e, e]))


def _round(d: Detector, eqn: Any) -> Val:
    even = "EVEN" in str(eqn.params["rounding_method"]) or int(eqn.params["rounding_method"]) == 1
    v = d.val(eqn.invars[0])
    e = d.one(v)
    return Val(v.shape, elementwise(d, "round_even" if even else "round_away", e.dtype, [e]))


def _identity(d: Detector, eqn: Any) -> Val:
    return d.val(eqn.invars[0])


# ---- movement ------------------------------------------------------------------------------------------------


def _remap(d: Detector, v: Val, shape: Shape, f: ir.Remap) -> Val:
    return Val(shape, d.pool.remap(d.one(v), len(v.shape), f))


def _broadcast_in_dim(d: Detector, eqn: Any) -> Val:
    if len(eqn.invars) != 1:
        raise Refuse("a broadcast to a dynamic shape")
    v = d.val(eqn.invars[0])
    where = [int(k) for k in eqn.params["broadcast_dimensions"]]
    sizes = eqn.outvars[0].aval.shape
    old = eqn.invars[0].aval.shape
    shape: list[DimLike | None] = [None] * len(sizes)
    keeps = []
    for k, axis in enumerate(where):
        if old[k] == sizes[axis]:
            shape[axis] = v.shape[k]
            keeps.append((k, axis))
    new = tuple(d.literal_dim(n) if s is None else s for s, n in zip(shape, sizes, strict=True))

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        out: list[DimLike] = [0] * len(sizes)
        for k, axis in keeps:
            out[axis] = strides[k]
        return tuple(out), offset

    return _remap(d, v, new, f)


def _transpose(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    perm = eqn.params["permutation"]
    if v.expr is None:
        raise Refuse("a transposed concatenation")
    return _remap(d, v, tuple(v.shape[k] for k in perm), lambda s, o: (tuple(s[k] for k in perm), o))


def _squeeze(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    rank = len(v.shape)
    gone = {k % rank for k in eqn.params["dimensions"]}
    keep = [k for k in range(rank) if k not in gone]
    if v.expr is None:
        return reshape(d, v, tuple(v.shape[k] for k in keep))
    return _remap(d, v, tuple(v.shape[k] for k in keep), lambda s, o: (tuple(s[k] for k in keep), o))


def _expand_dims(d: Detector, eqn: Any) -> Val:
    return _reshape(d, eqn)


def _slice(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    p = eqn.params
    steps = p["strides"] or (1,) * len(v.shape)
    old = eqn.invars[0].aval.shape
    sizes = eqn.outvars[0].aval.shape
    shape = tuple(
        v.shape[k] if sizes[k] == old[k] else
        v.shape[k] - int(p["start_indices"][k]) if p["limit_indices"][k] == old[k] and steps[k] == 1 and old[k] > 1
        else d.literal_dim(sizes[k])
        for k in range(len(old)))
    starts = p["start_indices"]

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        for k, s in enumerate(strides):
            offset = offset + s * int(starts[k])
        return tuple(s * int(n) for s, n in zip(strides, steps, strict=True)), offset

    return _remap(d, v, shape, f)


def _rev(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    axes = set(eqn.params["dimensions"])

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        for k in axes:
            offset = offset + strides[k] * (v.shape[k] - 1)
        return tuple(-s if k in axes else s for k, s in enumerate(strides)), offset

    return _remap(d, v, v.shape, f)


def _split(d: Detector, eqn: Any) -> list[Val | None]:
    v = d.val(eqn.invars[0])
    axis, out, start = eqn.params["axis"], [], 0
    for size in eqn.params["sizes"]:
        shape = tuple(d.literal_dim(size) if k == axis else s for k, s in enumerate(v.shape))

        def f(strides: ir.Strides, offset: DimLike, at: int = start) -> tuple[ir.Strides, DimLike]:
            return strides, offset + strides[axis] * at

        out.append(_remap(d, v, shape, f))
        start += int(size)
    return list(out)


def _iota(d: Detector, eqn: Any) -> Val:
    dtype = dtype_name(eqn.outvars[0].aval)
    if ir.is_float(dtype):
        raise Refuse("a float iota")
    axis = eqn.params["dimension"]
    shape = tuple(d.literal_dim(n) for n in eqn.outvars[0].aval.shape)
    return Val(shape, d.pool.affine(dtype, 0, tuple(int(k == axis) for k in range(len(shape)))))


def _reshape(d: Detector, eqn: Any) -> Val:
    if eqn.params.get("dimensions") is not None:
        raise Refuse("a reshape in another order")
    v = d.val(eqn.invars[0])
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if 0 in old:
        raise Refuse("a reshape of an empty array")
    return reshape(d, v, _new_shape(d, v.shape, old, new))


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Splits two shapes of equal size into the shortest runs of axes with equal products."""
    out, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        a = old[i] if i < len(old) else 1
        b = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while a != b:
            if a < b and i < len(old):
                a *= old[i]
                i += 1
            elif j < len(new):
                b *= new[j]
                j += 1
            else:
                a *= old[i]
                i += 1
        out.append((range(i0, i), range(j0, j)))
    return out


def _new_shape(d: Detector, dims: Shape, old: Sequence[int], new: Sequence[int]) -> Shape:
    """Names the sizes of a reshape's result by provenance where a factor is recognisable."""
    shape: list[DimLike] = []
    if 0 in old:
        return tuple(d.literal_dim(n) for n in new)
    for olds, news in _groups(old, new):
        whole = product([dims[k] for k in olds])
        real = [j for j in news if new[j] != 1]
        if len(real) == 1:
            shape += [whole if j == real[0] else 1 for j in news]
            continue
        left = whole
        named: dict[int, DimLike] = {}
        for j in reversed(real[1:]):
            # A trailing factor: one of the merged axes, or a literal that divides.
            for k in reversed(olds):
                rest = exact_div(left, dims[k]) if old[k] == new[j] and not isinstance(dims[k], int) else None
                if rest is not None:
                    named[j], left = dims[k], rest
                    break
            else:
                rest = exact_div(left, int(new[j]))
                if rest is None:
                    break
                named[j], left = int(new[j]), rest
        if len(named) == len(real) - 1 and real:
            named[real[0]] = left
        for j in news:
            shape.append(1 if new[j] == 1 else named.get(j, 0) or d.literal_dim(new[j]))
    return tuple(shape)


def reshape(d: Detector, v: Val, shape: Shape) -> Val:
    """A reshape: by strides where they merge, else (for lookups) as an assembly in the same memory."""
    if v.expr is None:
        return Val(shape, None, v.parts)
    try:
        return _remap(d, v, shape, _merge_and_split(d, v.shape, shape))
    except ir.NotAffine:
        if not v.takes:
            raise
        return Val(shape, None, (Part(v.expr, v.shape, 0, row_major(v.shape)),))


def _merge_and_split(d: Detector, old: Shape, new: Shape) -> ir.Remap:
    value = d.unifier.value
    groups = _groups([value(s) for s in old], [value(s) for s in new])

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        out: list[DimLike] = []
        for olds, news in groups:
            real = [k for k in olds if not (isinstance(old[k], int) and old[k] == 1)]
            step: DimLike = strides[real[-1]] if real else 0
            for k, nxt in zip(real, real[1:], strict=False):
                want = strides[nxt] * old[nxt]
                if strides[k] != want and d.unifier.resolve(strides[k] - want) != 0:
                    raise ir.NotAffine("a reshape that merges axes which are not adjacent in memory")
            sizes = [new[j] for j in news]
            for n in range(len(sizes)):
                out.append(step * product(sizes[n + 1:]))
        return tuple(out), offset

    return f


# ---- concatenations ------------------------------------------------------------------------------------------


def _concatenate(d: Detector, eqn: Any) -> Val:
    vals = [d.val(v) for v in eqn.invars]
    axis = eqn.params["dimension"]
    shapes = [tuple(0 if k == axis else s for k, s in enumerate(v.shape)) for v in vals]
    common = d.join(shapes)
    width: DimLike = 0
    starts = []
    for v in vals:
        starts.append(width)
        width = width + v.shape[axis]
    shape = tuple(width if k == axis else s for k, s in enumerate(common))
    strides = row_major(shape)
    parts: list[Part] = []
    for v, start in zip(vals, starts, strict=True):
        if v.expr is not None:
            parts.append(Part(v.expr, v.shape, start * strides[axis], strides))
        else:
            parts += [_move(d, p, v.shape, strides, start * strides[axis]) for p in v.parts]
    return Val(shape, None, tuple(parts))


def _stack(d: Detector, eqn: Any) -> Val:
    vals = [d.val(v) for v in eqn.invars]
    axis = eqn.params["axis"]
    common = d.join([v.shape for v in vals])
    shape = (*common[:axis], len(vals), *common[axis:])
    strides = row_major(shape)
    inner = (*strides[:axis], *strides[axis + 1:])
    parts: list[Part] = []
    for k, v in enumerate(vals):
        if v.expr is None:
            parts += [_move(d, p, v.shape, inner, strides[axis] * k) for p in v.parts]
        else:
            parts.append(Part(v.expr, v.shape, strides[axis] * k, inner))
    return Val(shape, None, tuple(parts))


def _move(d: Detector, p: Part, shape: Shape, strides: ir.Strides, start: DimLike) -> Part:
    """Moves a part of a dense buffer of `shape` into one with other strides.

    Every stride is decomposed into steps along the buffer's axes; that is right only while no part runs
    over the end of an axis, which is checked on this trace's sizes.
    """
    from recom_jax.shape_solver.dims import split

    dense = row_major(shape)
    value = d.unifier.value

    def decompose(step: DimLike) -> list[DimLike]:
        out: list[DimLike] = []
        for k, unit in enumerate(dense):
            if value(shape[k]) <= 1:
                out.append(0)
                continue
            q, step = split(step, unit)
            out.append(q)
        if step != 0:
            raise Refuse("a part that does not keep its place when concatenated again")
        return out

    steps = [decompose(s) for s in p.strides]
    base = decompose(p.offset)
    for k in range(len(shape)):
        last = value(base[k]) + sum(
            (value(n) - 1) * value(s[k]) for n, s in zip(p.shape, steps, strict=True) if value(n) > 0)
        if value(shape[k]) > 1 and last >= value(shape[k]) and all(value(n) > 0 for n in p.shape):
            raise Refuse("a part that spans rows of a concatenation")

    def weigh(q: Sequence[DimLike]) -> DimLike:
        total: DimLike = 0
        for a, b in zip(q, strides, strict=True):
            total = total + a * b
        return total

    return Part(p.expr, p.shape, start + weigh(base), tuple(weigh(s) for s in steps))


# ---- reductions ----------------------------------------------------------------------------------------------

_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "max",
               "reduce_and": "min"}


def identity_of(kind: str, dtype: str) -> Any:
    """What a reduction starts from."""
    import numpy as np

    if kind == "sum":
        return 0.0 if ir.is_float(dtype) else 0
    if ir.is_float(dtype):
        return float("-inf") if kind == "max" else float("inf")
    if dtype == "bool":
        return kind == "min"
    info = np.iinfo(dtype)
    return int(info.min if kind == "max" else info.max)


def _reduce(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    rank = len(v.shape)
    return reduce_axes(d, v, [k % rank for k in eqn.params["axes"]], _REDUCTIONS[eqn.primitive.name])


def reduce_axes(d: Detector, v: Val, axes: Sequence[int], kind: str) -> Val:
    e, rank = d.one(v), len(v.shape)
    keep = [k for k in range(rank) if k not in set(axes)]
    if kind == "sum" and e.dtype == "bool":
        raise Refuse("a sum of booleans")
    if ir.is_16bit(e.dtype) and not e.takes and kind == "sum":
        raise Refuse(f"a {e.dtype} sum that is not a bag")
    if _feature_axes(e) & set(axes):
        raise Refuse("a reduction over the embedding dimension")
    memo: dict[int, frozenset[int]] = {}
    for x in ir.walk(e):
        if isinstance(x, (ir.Reduce, ir.SegReduce)) and x is not e and ir.depends(x, memo) & set(axes):
            raise Refuse("a reduction inside a reduction")
    if isinstance(e, ir.SegReduce):
        raise Refuse("a reduction over bags")
    order = [*keep, *axes]
    moved = d.pool.remap(e, rank, lambda s, o: (tuple(s[k] for k in order), o))
    sizes = tuple(v.shape[k] for k in axes)
    shape = tuple(v.shape[k] for k in keep)
    if isinstance(moved, ir.Reduce):
        if moved.kind != kind:
            raise Refuse("a reduction of another reduction")
        return Val(shape, d.pool.reduce(kind, moved.arg, (*sizes, *moved.sizes), identity_of(kind, e.dtype)))
    return Val(shape, d.pool.reduce(kind, moved, sizes, identity_of(kind, e.dtype)))


def _feature_axes(e: ir.Expr) -> set[int]:
    return {k for x in ir.walk(e) if isinstance(x, ir.Take) for k, s in enumerate(x.cols) if s != 0} | {
        k for x in ir.walk(e) if isinstance(x, ir.SegReduce) for k, s in enumerate(x.feature) if s != 0}


def _call(d: Detector, eqn: Any) -> Val | None:
    """A jit call that stayed a call: `digitize` or `searchsorted` (see templates)."""
    from recom_jax.detect_search import search

    return search(d, eqn)


RULES: dict[str, Rule] = {
    **{prim: _named(name) for prim, name in BINARY.items()},
    **{prim: _named(name) for prim, name in UNARY.items()},
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "select_n": _select_n, "clamp": _clamp, "convert_element_type": _convert_rule,
    "bitcast_convert_type": _bitcast, "integer_pow": _integer_pow, "square": _integer_pow, "round": _round,
    "copy": _identity, "copy_p": _identity, "stop_gradient": _identity,
    "pvary": _identity, "pcast": _identity,
    "broadcast_in_dim": _broadcast_in_dim, "transpose": _transpose, "squeeze": _squeeze,
    "expand_dims": _expand_dims, "slice": _slice, "rev": _rev, "split": _split, "iota": _iota,
    "reshape": _reshape, "concatenate": _concatenate, "stack": _stack, "jit": _call, "pjit": _call,
}
