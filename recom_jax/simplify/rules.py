"""The rewrites, tabled by name. Each says which facts make it sound; each leaves alone what it cannot prove."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from recom_jax import ir
from recom_jax.simplify.facts import Facts


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """A rewrite of one node.

    Attributes:
      ops: names of operations, or class names of the IR, it looks at.
      apply: (pool, facts, node) -> a node equal to it on every input, or None.
      why: the facts it needs.
    """

    ops: tuple[str, ...]
    apply: Callable[[ir.Pool, Facts, Any], ir.Expr | None]
    why: str


def _is(e: ir.Expr, value: Any) -> bool:
    return isinstance(e, ir.Const) and bool(e.value == value) and not isinstance(value, bool)


def _const_select(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    pred, on_false, on_true = e.args
    f = facts.of(pred)
    if f.is_const:
        return on_true if f.lo else on_false
    return on_true if on_true is on_false else None


def _fold(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """An integer or boolean expression without lookups that can only have one value."""
    if e.takes or ir.is_float(e.dtype):
        return None
    f = facts.of(e)
    return pool.const(e.dtype, bool(f.lo) if e.dtype == "bool" else int(f.lo)) if f.is_const else None


def _clamp(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """max(x, c) = x where x >= c is known; min likewise. NaN passes through both, so floats may be NaN."""
    for a, b in (e.args, e.args[::-1]):
        if not isinstance(b, ir.Const) or a.takes:
            continue
        fa, fb = facts.of(a), facts.of(b)
        if not fb.nan_free or (ir.is_float(a.dtype) and (fb.lo == 0 or not fa.nan_free and fa.lo > fa.hi)):
            continue  # max(-0.0, 0.0) may be either zero
        if e.name == "max" and fa.lo >= fb.hi:
            return a
        if e.name == "min" and fa.hi <= fb.lo:
            return a
    return None


def _drop_fill(pool: ir.Pool, facts: Facts, e: ir.Take) -> ir.Expr | None:
    """No row number can be out of range: the fill value goes, and with it the test."""
    if e.mode != "fill" or e.one_hot or e.rows == 0:
        return None
    f = facts.of(e.idx)
    if f.lo < 0 or f.hi >= e.rows:
        return None
    return pool.retake(e, mode="clip", fill=0)


def _clamp_into_lookup(pool: ir.Pool, facts: Facts, e: ir.Take) -> ir.Expr | None:
    """A clip to [0, rows-1] in front of a lookup that clips anyway."""
    if e.mode != "clip" or e.rows == 0:
        return None
    x = e.idx
    if isinstance(x, ir.Op) and x.name in ("max", "min"):
        for a, b in (x.args, x.args[::-1]):
            if (x.name == "max" and _is(b, 0)) or (x.name == "min" and _is(b, e.rows - 1)):
                return pool.retake(e, idx=a)
    return None


def _narrow_index(pool: ir.Pool, facts: Facts, e: ir.Take) -> ir.Expr | None:
    """An integer conversion of the row number that keeps every value."""
    x = e.idx
    if not (isinstance(x, ir.Op) and x.name == "convert") or ir.is_float(x.args[0].dtype):
        return None
    a = x.args[0]
    if a.dtype == "bool":
        return None
    if facts.of(a).lo != facts.of(x).lo or facts.of(a).hi != facts.of(x).hi:
        return None
    return pool.with_children(e, [a])


def _positive_mod(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """jnp.mod corrects rem's sign by a select; no correction where dividend and divisor are not negative.

    Matches select(and(ne(lt(r, 0), lt(c, 0)), ne(r, 0)), r, r + c) with r = rem(x, c): the general constant
    folding of the predicate covers proven signs, so only the shape with an unknown x remains to be left alone.
    """
    pred, on_false, on_true = e.args
    if not (isinstance(on_false, ir.Op) and on_false.name == "rem"):
        return None
    if not (isinstance(on_true, ir.Op) and on_true.name == "add" and on_false in on_true.args):
        return None
    r = facts.of(on_false)
    if ir.is_float(e.dtype) or r.lo < 0 or facts.of(on_false.args[1]).lo <= 0:
        return None
    # pred is true only where r and the divisor differ in sign and r != 0: nowhere.
    if isinstance(pred, ir.Op) and pred.name == "and" and any(
            isinstance(p, ir.Op) and p.name == "ne" and on_false in p.args for p in pred.args) and any(
            _sign_differs(p, on_false, on_false.args[1]) for p in pred.args):
        return on_false
    return None


def _sign_differs(p: ir.Expr, r: ir.Expr, c: ir.Expr) -> bool:
    """p is ne(lt(r, 0), lt(c, 0)), either side possibly folded."""
    if not (isinstance(p, ir.Op) and p.name == "ne"):
        return False
    return all(
        (isinstance(q, ir.Const) and q.value is False)
        or (isinstance(q, ir.Op) and q.name == "lt" and q.args[0] in (r, c) and _is(q.args[1], 0))
        for q in p.args)


def _negative_wrap(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """select(lt(i, 0), i, i + rows): numpy's negative ids, where the interval shows there are none."""
    pred, on_false, on_true = e.args
    if not (isinstance(pred, ir.Op) and pred.name == "lt" and pred.args[0] is on_false and _is(pred.args[1], 0)):
        return None
    if not (isinstance(on_true, ir.Op) and on_true.name == "add" and on_false in on_true.args):
        return None
    return on_false if facts.of(on_false).lo >= 0 else None


def _merge_masks(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """where(m, where(n, x, c), c) = where(m & n, x, c)."""
    pred, on_false, on_true = e.args
    if isinstance(on_true, ir.Op) and on_true.name == "select" and on_true.args[1] is on_false and isinstance(
            on_false, ir.Const):
        both = pool.op("and", "bool", pred, on_true.args[0])
        return pool.op("select", e.dtype, both, on_false, on_true.args[2], exact=e.exact, arith=e.arith)
    return None


def _masked_lookup(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """where(m, table[where(m, i, c)], 0) = where(m, table[i], 0): a masked-out id is never looked up.

    Sound because a masked-out position's row is not read at all: the select of a bag becomes a predicate.
    """
    pred, on_false, on_true = e.args
    if not (isinstance(on_true, ir.Take) and isinstance(on_true.idx, ir.Op) and on_true.idx.name == "select"):
        return None
    inner, _, kept = on_true.idx.args
    if inner is not pred or not isinstance(on_false, ir.Const) or on_true.one_hot:
        return None
    return pool.op("select", e.dtype, pred, on_false, pool.with_children(on_true, [kept]), exact=e.exact, arith=e.arith)


def _compose_converts(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """An integer conversion of an integer conversion that lost nothing."""
    a = e.args[0]
    if not (isinstance(a, ir.Op) and a.name == "convert"):
        return None
    inner = a.args[0]
    if any(ir.is_float(x) or x == "bool" for x in (e.dtype, a.dtype, inner.dtype)):
        return None
    fa, fi = facts.of(a), facts.of(inner)
    if (fa.lo, fa.hi) != (fi.lo, fi.hi):
        return None
    return inner if inner.dtype == e.dtype else pool.op("convert", e.dtype, inner)


def _identity(pool: ir.Pool, facts: Facts, e: ir.Op) -> ir.Expr | None:
    """x + 0, x - 0, x * 1, x & -1, x | 0, x ^ 0, x << 0 on integers."""
    if ir.is_float(e.dtype) or len(e.args) != 2:
        return None
    a, b = e.args
    if e.name in ("add", "or", "xor") and _is(a, 0):
        return b
    if e.name == "mul" and _is(a, 1):
        return b
    if _is(b, 0) and e.name in ("add", "sub", "or", "xor", "shl", "shr_l", "shr_a"):
        return a
    if _is(b, 1) and e.name in ("mul", "div"):
        return a
    return None


_INT_OPS = ("add", "sub", "mul", "div", "rem", "max", "min", "and", "or", "xor", "shl", "shr_l", "shr_a", "eq", "ne",
            "lt", "le", "gt", "ge", "not", "convert", "select")

RULES: dict[str, Rewrite] = {
    "fold-constants": Rewrite(_INT_OPS, _fold, "the interval of an integer or boolean is one number"),
    "drop-negative-wrap": Rewrite(("select",), _negative_wrap, "the id's interval is not negative"),
    "positive-mod": Rewrite(("select",), _positive_mod, "the remainder is not negative, the divisor is positive"),
    "select-of-constant": Rewrite(("select",), _const_select, "the predicate is constant, or both cases are one"),
    "drop-clamp": Rewrite(("max", "min"), _clamp, "the operand's interval lies within the bound"),
    "merge-masks": Rewrite(("select",), _merge_masks, "both filters put the same constant"),
    "masked-lookup": Rewrite(("select",), _masked_lookup, "the mask on the row is the mask on the id"),
    "identity-arithmetic": Rewrite(("add", "sub", "mul", "div", "or", "xor", "shl", "shr_l", "shr_a"), _identity,
                                   "a neutral integer constant"),
    "compose-converts": Rewrite(("convert",), _compose_converts, "the inner conversion keeps the interval"),
    "drop-fill": Rewrite(("Take",), _drop_fill, "the row number's interval lies in the table"),
    "clamp-into-lookup": Rewrite(("Take",), _clamp_into_lookup, "the lookup clips to the same bounds"),
    "index-as-is": Rewrite(("Take",), _narrow_index, "the conversion keeps every value of the row number"),
}
