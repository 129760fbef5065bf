"""Rules of stage 2, keyed by primitive: elementwise arithmetic and reductions (movement: `detect_movement`).

A rule takes the detector and an equation and returns the value of its output (a list for several outputs),
None where the value is best left to XLA, or raises `Refuse` with the reason `explain` shows. What a rule
returns must equal what XLA computes: `exact` bit for bit (ids and masks need it), else within the bound of
a pooled sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recom_jax import compat, ir
from recom_jax.detect import Detector, Rule
from recom_jax.detect_movement import MOVEMENT_RULES
from recom_jax.detect_symbolic import dim_as_value, is_size
from recom_jax.detect_values import Refuse, Val, dtype_name
from recom_jax.row_arithmetic import context_free_divisor, from_arithmetic, power_of_two

BINARY = {
    "add": "add",
    "add_any": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "rem": "rem",
    "max": "max",
    "min": "min",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "shift_left": "shl",
    "shift_right_logical": "shr_l",
    "shift_right_arithmetic": "shr_a",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
}
UNARY = {
    "neg": "neg",
    "abs": "abs",
    "sign": "sign",
    "not": "not",
    "floor": "floor",
    "ceil": "ceil",
    "sqrt": "sqrt",
    "is_finite": "is_finite",
    "population_count": "popcnt",
    "clz": "clz",
}
ARITHMETIC = frozenset(("add", "sub", "mul", "div", "sqrt"))
SAFE_16BIT = frozenset(
    ("max", "min", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "is_finite")
)


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
        exact = not any(a.arith or from_arithmetic(d, a, sums=True) for a in args)
        looked_up = any(a.takes for a in args)
        if name in ("add", "sub") and looked_up and any(_is_product(a) for a in args):
            raise Refuse("a multiply-add that XLA may contract")
        if name == "div" and isinstance(args[1], ir.Const) and not power_of_two(args[1].value):
            exact = False
            if looked_up and not _pooled(args[0]):
                raise Refuse("division by a constant, which XLA turns into a multiplication")
        if name == "div" and not looked_up and not context_free_divisor(d, args[1]):
            exact = False
        if name == "div" and is_size(args[1]):  # a constant once the program is compiled
            exact = False
            if looked_up and not _pooled(args[0]):
                raise Refuse("division by a size, which XLA turns into a multiplication")
        if name == "sqrt" and looked_up:
            raise Refuse("sqrt of looked-up values")
    elif ir.is_float(of) and name in ("max", "min", "neg", "abs"):
        arith = any(a.arith for a in args)
    elif ir.is_float(of) and name == "rem":
        exact = False
    return d.pool.op(name, dtype, *args, exact=exact, arith=arith)


def _is_product(e: ir.Expr) -> bool:
    return (
        isinstance(e, ir.Op)
        and e.name in ("mul", "neg", "select")
        and any(e.name == "mul" or _is_product(a) for a in e.args)
    )


def _pooled(e: ir.Expr) -> bool:
    return any(isinstance(x, (ir.Reduce, ir.SegReduce)) and x.takes for x in ir.walk(e))


def _nary(d: Detector, eqn: Any, name: str) -> Val:
    vals = [d.val(v) for v in eqn.invars]
    shape = d.join([v.shape for v in vals])
    args = [d.spread(v, shape) for v in vals]
    dtype = dtype_name(eqn.outvars[0].aval)
    if name == "mul" and ir.is_float(dtype):
        for k in (0, 1):
            pred = _mask_factor(d, eqn.invars[k], args[k], eqn.outvars[0].aval.shape)
            if pred is not None:
                zero, other = d.pool.const(dtype, 0.0), args[1 - k]
                return Val(shape, d.pool.op("select", dtype, pred, zero, other, arith=other.arith))
    return Val(shape, elementwise(d, name, dtype, args))


def _mask_factor(
    d: Detector, factor: Any, value: ir.Expr, shape: tuple[int, ...]
) -> ir.Expr | None:
    """`pred` where a factor is ``convert(pred)`` and XLA makes the product ``select(pred, x, 0)``.

    Then NaN times a false mask is 0, not NaN. XLA does so for a conversion of the product's own shape, unless
    the booleans are themselves a broadcast; seen in 0.10.2, 0.11.2 and 0.12.0.1 and kept by tests. Where only
    a reshape lies between, its choice depends on context, so the product is left to it.
    """
    if not (isinstance(value, ir.Op) and value.name == "convert" and value.args[0].dtype == "bool"):
        return None
    axes = ir.depends(value, {})
    large = {k for k, n in enumerate(shape) if isinstance(n, int) and n > 1}
    whole = axes >= large | {k for k, n in enumerate(shape) if compat.is_symbolic(n)}
    if not whole and axes >= large:
        raise Refuse(
            "a product with a mask that XLA may turn into a select"
        )  # it does so at some sizes
    made = None if isinstance(factor, compat.Literal) else d.made_by().get(id(factor))
    direct = made is not None and made[0].primitive.name == "convert_element_type"
    if whole and direct and factor.aval.shape == shape:
        return value.args[0]
    source = d.made_by().get(id(made[0].invars[0])) if direct and made is not None else None
    broadcast = source is None or source[0].primitive.name == "broadcast_in_dim"
    if whole or (direct and factor.aval.shape == shape and not broadcast):
        raise Refuse("a product with a mask that XLA may turn into a select")
    return None


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
    return Val(
        shape,
        d.pool.op(
            "min",
            mid.dtype,
            d.pool.op("max", mid.dtype, mid, lo, arith=mid.arith),
            hi,
            arith=mid.arith,
        ),
    )


def convert(d: Detector, e: ir.Expr, dtype: str) -> ir.Expr:
    if e.dtype == dtype:
        return e
    if isinstance(e, ir.Const) and not ir.is_16bit(dtype):
        return _convert_const(d, e, dtype)
    floats = ir.is_float(e.dtype) and ir.is_float(dtype)
    return d.pool.op(
        "convert", dtype, e, exact=not (floats and _rounded(e)), arith=e.arith and floats
    )


def _rounded(e: ir.Expr) -> bool:
    """Whether `e` was rounded to 16 bits or fewer: XLA for GPUs leaves that out where the value is widened again."""
    of = e.args[0].dtype if isinstance(e, ir.Op) and e.name == "convert" else "bool"
    return ir.is_16bit(e.dtype) and ir.is_float(of) and not ir.is_16bit(of)


def _convert_const(d: Detector, e: ir.Const, dtype: str) -> ir.Expr:
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


# ---- reductions ----------------------------------------------------------------------------------------------

_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "max",
    "reduce_and": "min",
}


def identity_of(kind: str, dtype: str) -> Any:
    """What a reduction starts from."""
    if kind == "sum":
        return 0.0 if ir.is_float(dtype) else 0
    if ir.is_float(dtype):
        return float("-inf") if kind == "max" else float("inf")
    if dtype == "bool":
        return kind == "min"
    info = np.iinfo(dtype)
    return int(info.min if kind == "max" else info.max)


def _reduce(d: Detector, eqn: Any) -> Val:
    from recom_jax.detect_counts import counted

    v = d.val(eqn.invars[0])
    rank = len(v.shape)
    found = counted(d, eqn, v) if eqn.primitive.name == "reduce_sum" else None
    if found is not None:
        return found
    return reduce_axes(
        d, v, [k % rank for k in eqn.params["axes"]], _REDUCTIONS[eqn.primitive.name]
    )


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
        inner = isinstance(x, (ir.Reduce, ir.SegReduce)) and x is not e
        if inner and ir.depends(x, memo) & set(axes):
            raise Refuse("a reduction inside a reduction")
        # 0 * inf of any position is NaN here; a pooled one-hot lookup stands for the product of the sum, where a
        # row that another position selects is no factor of 0.
        if isinstance(x, ir.Take) and x.one_hot and ir.depends(x, memo) & set(axes):
            raise Refuse("a reduction of one-hot products")
    if isinstance(e, ir.SegReduce):
        raise Refuse("a reduction over bags")
    shape = tuple(v.shape[k] for k in keep)
    if e.takes and not e.arith and all(d.is_one(v.shape[k]) for k in axes):
        # A bag of one row is that row: XLA reduces over no axis of size 1 either, and a lookup is quicker.
        return Val(shape, d.pool.remap(e, rank, lambda s, o: (tuple(s[k] for k in keep), o)))
    order = [*keep, *axes]
    moved = d.pool.remap(e, rank, lambda s, o: (tuple(s[k] for k in order), o))
    sizes = tuple(v.shape[k] for k in axes)
    if isinstance(moved, ir.Reduce):
        if moved.kind != kind:
            raise Refuse("a reduction of another reduction")
        return Val(
            shape,
            d.pool.reduce(kind, moved.arg, (*sizes, *moved.sizes), identity_of(kind, e.dtype)),
        )
    return Val(shape, d.pool.reduce(kind, moved, sizes, identity_of(kind, e.dtype)))


def _feature_axes(e: ir.Expr) -> set[int]:
    return {
        k for x in ir.walk(e) if isinstance(x, ir.Take) for k, s in enumerate(x.cols) if s != 0
    } | {
        k
        for x in ir.walk(e)
        if isinstance(x, ir.SegReduce)
        for k, s in enumerate(x.feature)
        if s != 0
    }


def _call(d: Detector, eqn: Any) -> Val | None:
    """A jit call that stayed a call: `digitize` or `searchsorted` (see templates)."""
    from recom_jax.detect_search import search

    return search(d, eqn)


def _first(d: Detector, eqn: Any) -> Val | None:
    from recom_jax.detect_counts import first

    return first(d, eqn)


RULES: dict[str, Rule] = {
    **{prim: _named(name) for prim, name in BINARY.items()},
    **{prim: _named(name) for prim, name in UNARY.items()},
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **MOVEMENT_RULES,
    "select_n": _select_n,
    "clamp": _clamp,
    "convert_element_type": _convert_rule,
    "bitcast_convert_type": _bitcast,
    "dim_as_value": dim_as_value,
    "integer_pow": _integer_pow,
    "square": _integer_pow,
    "round": _round,
    "argmax": _first,
    "argmin": _first,
    "copy": _identity,
    "copy_p": _identity,
    "stop_gradient": _identity,
    "pvary": _identity,
    "pcast": _identity,
    "jit": _call,
    "pjit": _call,
}
