"""The rewrites, tabled by name. Each says which facts make it sound; each leaves alone what it cannot prove."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from recom_jax import ir
from recom_jax.shape_solver.fact import dtype_of, round_to
from recom_jax.simplify.facts import Facts


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """A rewrite of one node.

    Attributes:
      ops: names of operations, or class names of the IR, it looks at.
      apply: (pool, facts, node) -> a node equal to it wherever the facts hold, or None.
      why: the facts it needs.
    """

    ops: tuple[str, ...]
    apply: Callable[[ir.Pool, Facts, Any], ir.Expr | None]
    why: str


# ---- what nodes are ------------------------------------------------------------------------------------------


def _is(e: ir.Expr, value: int) -> bool:
    return isinstance(e, ir.Const) and bool(e.value == value)


def _op(e: ir.Expr, *names: str) -> bool:
    return isinstance(e, ir.Op) and e.name in names


def _integer(dtype: str) -> bool:
    return dtype_of(dtype).kind in ("int", "uint")


def _log2(e: ir.Expr) -> int | None:
    """k where `e` is the integer constant 2**k, k > 0."""
    if (
        not isinstance(e, ir.Const)
        or not _integer(e.dtype)
        or e.value < 2
        or e.value & (e.value - 1)
    ):
        return None
    return int(e.value).bit_length() - 1


def _zero(e: ir.Expr) -> bool:
    """The constant 0 or +0.0."""
    return isinstance(e, ir.Const) and e.value == 0 and math.copysign(1, e.value) > 0


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _opposite(pool: ir.Pool, pred: ir.Expr) -> ir.Expr | None:
    """``not pred`` in one operation, where there is one (of floats NaN would change sides)."""
    if isinstance(pred, ir.Op) and pred.name == "not":
        return pred.args[0]
    if isinstance(pred, ir.Op) and pred.name in _OPPOSITE and not ir.is_float(pred.args[0].dtype):
        return pool.op(_OPPOSITE[pred.name], "bool", *pred.args)
    return None


def _keeps_values(facts: Facts, x: ir.Expr) -> ir.Expr | None:
    """What an integer conversion converts, where no value of it changes."""
    if not (isinstance(x, ir.Op) and x.name == "convert" and _integer(x.dtype)):
        return None
    a, t = x.args[0], dtype_of(x.dtype)
    if a.dtype != "bool" and not _integer(a.dtype):
        return None
    f = facts.of(a)
    return a if t.lo <= f.lo and f.hi <= t.hi else None


# ---- constants -----------------------------------------------------------------------------------------------


def _fold(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """An integer or boolean expression without lookups that can only have one value; a float of a whole constant."""
    if e.takes:
        return None
    if ir.is_float(e.dtype):
        a = e.args[0]
        if e.name != "convert" or not isinstance(a, ir.Const) or not _integer(a.dtype):
            return None
        value = float(a.value)
        return (
            pool.const(e.dtype, value)
            if value == a.value == round_to(value, dtype_of(e.dtype))
            else None
        )
    f = facts.of(e)
    return (
        pool.const(e.dtype, bool(f.lo) if e.dtype == "bool" else int(f.lo)) if f.is_const else None
    )


def _const_select(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    pred, on_false, on_true = e.args
    f = facts.of(pred)
    if f.is_const:
        return on_true if f.lo else on_false
    return on_true if on_true is on_false else None


def _identity(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """x + 0, x - 0, x * 1, x / 1, x & -1, x | 0, x ^ 0, x << 0 on integers; b == True, b != False, not of one."""
    if e.name == "not":
        return _opposite(pool, e.args[0])
    a, b = e.args
    if e.name in ("eq", "ne"):
        for x, c in ((a, b), (b, a)):
            if isinstance(c, ir.Const) and c.dtype == "bool":
                return x if c.value is (e.name == "eq") else pool.op("not", "bool", x)
        return None
    if ir.is_float(e.dtype):
        return None
    for x, c in ((a, b), (b, a)):
        if e.name in ("add", "or", "xor") and _is(c, 0):
            return x
        if e.name == "mul" and _is(c, 1):
            return x
        if e.name == "and" and _is(
            c, -1 if dtype_of(e.dtype).kind == "int" else int(dtype_of(e.dtype).hi)
        ):
            return x
    if (_is(b, 0) and e.name in ("sub", "shl", "shr_l", "shr_a")) or (
        _is(b, 1) and e.name == "div"
    ):
        return a
    return None


def _unit_weight(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """x * 1.0 = x / 1.0 = x, bit for bit (XLA drops it too)."""
    if not ir.is_float(e.dtype):
        return None
    a, b = e.args
    for x, w in ((a, b), (b, a)) if e.name == "mul" else ((a, b),):
        f = facts.of(w)
        if f.is_const and f.lo == 1:
            return x
    return None


# ---- masks ---------------------------------------------------------------------------------------------------


def _implied(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """p & q = p where p implies q; p & q = False where they exclude each other; likewise for or."""
    if e.dtype != "bool" or e.takes:
        return None
    both = e.name == "and"
    for p, q in (e.args, e.args[::-1]):
        f = facts.assuming(p, both, q).of(q)
        if f.is_const:
            return p if bool(f.lo) is both else pool.const("bool", not both)
    return None


def _merge_masks(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """where(m, where(n, x, c), c) = where(m & n, x, c), and where(m, c, where(n, c, x)) likewise."""
    pred, on_false, on_true = e.args
    for mine, other, name, k in ((on_false, on_true, "and", 1), (on_true, on_false, "or", 2)):
        if (
            isinstance(mine, ir.Const)
            and isinstance(other, ir.Op)
            and other.name == "select"
            and other.args[k] is mine
        ):
            both = pool.op(name, "bool", pred, other.args[0])
            args = (mine, other.args[2]) if k == 1 else (other.args[1], mine)
            return pool.op("select", e.dtype, both, *args, exact=e.exact, arith=e.arith)
    return None


def _mask_first(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """where(pad, c, rows) = where(not pad, rows, c): the form a bag takes as a predicate."""
    pred, on_false, on_true = e.args
    if not isinstance(on_true, ir.Const) or not on_false.takes:
        return None
    mask = _opposite(pool, pred) or pool.op("not", "bool", pred)
    return pool.op("select", e.dtype, mask, on_true, on_false, exact=e.exact, arith=e.arith)


def _weight_under_mask(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """where(m, x, 0) * w = where(m, x * w, 0) where 0 * w is +0.0: w is a finite number without a sign."""
    for rows, w in (e.args, e.args[::-1]):
        if not (ir.is_float(e.dtype) and rows.takes and not w.takes and _op(rows, "select")):
            continue
        pred, on_false, on_true = rows.children
        f = facts.of(w)
        from_integer = _op(w, "convert") and not ir.is_float(w.children[0].dtype)
        unsigned = from_integer or (isinstance(w, ir.Const) and w.value > 0)
        if _zero(on_false) and unsigned and f.nan_free and f.lo >= 0 and math.isfinite(f.hi):
            product = pool.op("mul", e.dtype, on_true, w, exact=e.exact, arith=True)
            return pool.op("select", e.dtype, pred, on_false, product, exact=e.exact, arith=True)
    return None


def _convert_under_mask(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """float32(where(m, rows, 0)) = where(m, float32(rows), 0)."""
    a = e.args[0]
    if not (e.takes and _op(a, "select") and ir.is_float(e.dtype) and ir.is_float(a.dtype)):
        return None
    pred, on_false, on_true = a.children
    if not _zero(on_false) or not on_true.takes:
        return None
    rows = pool.op("convert", e.dtype, on_true, exact=e.exact, arith=e.arith)
    return pool.op(
        "select", e.dtype, pred, pool.const(e.dtype, 0.0), rows, exact=e.exact, arith=e.arith
    )


# ---- arithmetic of ids ---------------------------------------------------------------------------------------


def _clamp(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """max(x, c) = x where x >= c is known; min likewise. Both pass NaN on, so a float may be NaN."""
    for a, b in (e.args, e.args[::-1]):
        if not isinstance(b, ir.Const) or a.takes:
            continue
        fa, fb = facts.of(a), facts.of(b)
        if not fb.nan_free or (ir.is_float(a.dtype) and fb.lo == 0):
            continue  # max(-0.0, 0.0) may be either zero
        if e.name == "max" and fa.lo >= fb.hi:
            return a
        if e.name == "min" and fa.hi <= fb.lo:
            return a
    return None


def _negative_wrap(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """select(i < 0, i, i + rows): numpy's negative ids, where the interval shows there are none."""
    pred, on_false, on_true = e.args
    if not (isinstance(on_true, ir.Op) and on_true.name == "add" and on_false in on_true.args):
        return None
    never = _op(pred, "lt") and pred.children[0] is on_false and _is(pred.children[1], 0)
    if not (never or (isinstance(pred, ir.Const) and pred.value is False)):
        return None
    return on_false if _integer(e.dtype) and (not never or facts.of(on_false).lo >= 0) else None


def _rem_power(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """rem(x, 2**k) = x & (2**k - 1) for x >= 0."""
    x, c = e.args
    if _log2(c) is None or facts.of(x).lo < 0:
        return None
    assert isinstance(c, ir.Const)
    return pool.op("and", e.dtype, x, pool.const(e.dtype, c.value - 1), exact=e.exact)


def _mod_power(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """jnp.mod(x, 2**k) = select(r < 0, r, r + 2**k) with r = rem(x, 2**k): x & (2**k - 1), x of any sign."""
    pred, r, wrapped = e.args
    if not (
        isinstance(r, ir.Op)
        and r.name == "rem"
        and isinstance(wrapped, ir.Op)
        and wrapped.name == "add"
    ):
        return None
    x, c = r.args
    if _log2(c) is None or set(map(id, wrapped.args)) != {id(r), id(c)}:
        return None
    if not (_op(pred, "lt") and pred.children[0] is r and _is(pred.children[1], 0)):
        return None
    assert isinstance(c, ir.Const)
    return pool.op("and", e.dtype, x, pool.const(e.dtype, c.value - 1), exact=e.exact)


def _div_power(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """div(x, 2**k) = x >> k for x >= 0."""
    k = _log2(e.args[1])
    if k is None or facts.of(e.args[0]).lo < 0:
        return None
    return pool.op("shr_l", e.dtype, e.args[0], pool.const(e.dtype, k), exact=e.exact)


def _floor_div_power(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """x // 2**k = select(sign(x) != 1 and rem(x, 2**k) != 0, q, q - 1) with q = div(x, 2**k): x >> k, signed."""
    pred, q, less = e.args
    if not (isinstance(q, ir.Op) and q.name == "div" and _op(pred, "and") and _op(less, "sub")):
        return None
    x, c = q.args
    k = _log2(c)
    if (
        k is None
        or dtype_of(e.dtype).kind != "int"
        or less.children[0] is not q
        or not _is(less.children[1], 1)
    ):
        return None
    wanted = [
        pool.op("ne", "bool", pool.op("sign", e.dtype, x), pool.const(e.dtype, 1)),
        pool.op("ne", "bool", pool.op("rem", e.dtype, x, c), pool.const(e.dtype, 0)),
    ]
    if set(map(id, pred.children)) != set(map(id, wanted)):
        return None
    return pool.op("shr_a", e.dtype, x, pool.const(e.dtype, k), exact=e.exact)


def _compose_converts(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """A conversion of an integer conversion that lost nothing."""
    inner = _keeps_values(facts, e.args[0])
    if inner is None or e.dtype == "bool" or ir.is_16bit(e.dtype):
        return None
    return inner if inner.dtype == e.dtype else pool.op("convert", e.dtype, inner)


# ---- lookups -------------------------------------------------------------------------------------------------


def _drop_fill(pool: ir.Pool, facts: Facts, e: ir.Take) -> ir.Expr | None:
    """No row number can be out of range: the fill value goes, and with it the test."""
    if e.mode != "fill" or e.one_hot or e.rows == 0:
        return None
    f = facts.of(e.idx)
    if f.lo < 0 or f.hi >= e.rows:
        return None
    return pool.retake(e, mode="clip", fill=0)


def _clamp_into_lookup(pool: ir.Pool, facts: Facts, e: ir.Take) -> ir.Expr | None:
    """A bound at or beyond [0, rows - 1] in front of a lookup that clips anyway."""
    x = e.idx
    if e.mode != "clip" or e.rows == 0 or not isinstance(x, ir.Op) or x.name not in ("max", "min"):
        return None
    for a, b in (x.args, x.args[::-1]):
        if isinstance(b, ir.Const) and (b.value <= 0 if x.name == "max" else b.value >= e.rows - 1):
            return pool.retake(e, idx=a)
    return None


def _index_as_is(pool: ir.Pool, facts: Facts, e: ir.Take) -> ir.Expr | None:
    """An integer conversion of the row number that keeps every value."""
    a = _keeps_values(facts, e.idx)
    return None if a is None or a.dtype == "bool" else pool.retake(e, idx=a)


_FOLDED = (
    "add",
    "sub",
    "mul",
    "div",
    "rem",
    "max",
    "min",
    "and",
    "or",
    "xor",
    "shl",
    "shr_l",
    "shr_a",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "not",
    "neg",
    "abs",
    "sign",
    "convert",
    "select",
)
_NEUTRAL = (
    "add",
    "sub",
    "mul",
    "div",
    "and",
    "or",
    "xor",
    "shl",
    "shr_l",
    "shr_a",
    "eq",
    "ne",
    "not",
)

RULES: dict[str, Rewrite] = {
    "fold-constants": Rewrite(
        _FOLDED, _fold, "the interval of an integer or boolean is one number"
    ),
    "drop-negative-wrap": Rewrite(("select",), _negative_wrap, "the id's interval is not negative"),
    "select-of-constant": Rewrite(
        ("select",), _const_select, "the predicate is constant, or both cases are one"
    ),
    "identity-arithmetic": Rewrite(_NEUTRAL, _identity, "a neutral integer or boolean constant"),
    "unit-weight": Rewrite(("mul", "div"), _unit_weight, "the weight is the constant 1"),
    "implied-predicate": Rewrite(("and", "or"), _implied, "one predicate decides the other"),
    "drop-clamp": Rewrite(("max", "min"), _clamp, "the operand's interval lies within the bound"),
    "mod-power-of-two": Rewrite(("select",), _mod_power, "the divisor is a constant power of two"),
    "rem-power-of-two": Rewrite(
        ("rem",), _rem_power, "a power of two; the dividend is not negative"
    ),
    "div-power-of-two": Rewrite(
        ("div",), _div_power, "a power of two; the dividend is not negative"
    ),
    "floor-div-power-of-two": Rewrite(
        ("select",), _floor_div_power, "the divisor is a constant power of two"
    ),
    "merge-masks": Rewrite(("select",), _merge_masks, "both filters put the same constant"),
    "mask-first": Rewrite(("select",), _mask_first, "the case that holds no lookup is a constant"),
    "weight-under-mask": Rewrite(
        ("mul",), _weight_under_mask, "the weight is finite, not negative, not -0.0"
    ),
    "convert-under-mask": Rewrite(
        ("convert",), _convert_under_mask, "masked-out rows are the constant 0"
    ),
    "compose-converts": Rewrite(
        ("convert",), _compose_converts, "the inner conversion keeps every value"
    ),
    "drop-fill": Rewrite(("Take",), _drop_fill, "the row number's interval lies in the table"),
    "clamp-into-lookup": Rewrite(
        ("Take",), _clamp_into_lookup, "the lookup clips to the same bounds"
    ),
    "index-as-is": Rewrite(
        ("Take",), _index_as_is, "the conversion keeps every value of the row number"
    ),
}
