"""Facts about values and the rules that carry them through XLA's operations.

``apply`` is the entry: a rule is a pure function of facts, so each is tested alone, by brute force.
An operation without a rule yields the top of its dtype, which is always sound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import float_rules, int_rules
from .fact import DType, Fact, dtype_of, int_fact

__all__ = ["RULES", "Fact", "affine", "apply", "convert", "iota", "search", "select"]

_TRUE = Fact("bool", 1, 1, True, True)
_FALSE = Fact("bool", 0, 0, True, True)


def _typed(
    on_int: Callable[..., Fact] | None, on_float: Callable[..., Fact] | None, on_bool: bool = True
) -> Callable[..., Fact]:
    """One rule from those per kind of operand; None, or facts of differing dtypes, yield the
    top."""

    def rule(out_dtype: str, *facts: Fact) -> Fact:
        name = facts[0].dtype
        kind = dtype_of(name).kind
        op = on_float if kind == "float" else on_int
        if op is None or kind == "other" or (kind == "bool" and not on_bool):
            return Fact.top(out_dtype)
        if any(f.dtype != name for f in facts):
            return Fact.top(out_dtype)
        got = op(dtype_of(name), *facts)
        return got if got.dtype == out_dtype else Fact.top(out_dtype)

    return rule


def _compare(decide: Callable[[Fact, Fact], bool | None], unordered: bool) -> Callable[..., Fact]:
    """A comparison: ``decide`` speaks for numbers, ``unordered`` is the answer when one is NaN."""

    def rule(out_dtype: str, a: Fact, b: Fact) -> Fact:
        t = dtype_of(a.dtype)
        if t.kind == "other" or a.dtype != b.dtype or out_dtype != "bool":
            return Fact.top(out_dtype)
        if t.kind == "float":
            a, b = float_rules.flushed(t, a), float_rules.flushed(t, b)
        known = decide(a, b)
        if known is None or (known != unordered and not (a.nan_free and b.nan_free)):
            return Fact.top("bool")
        return _TRUE if known else _FALSE

    return rule


def _eq(a: Fact, b: Fact) -> bool | None:
    if a.hi < b.lo or b.hi < a.lo:
        return False
    return True if a.lo == a.hi == b.lo == b.hi else None


def _ne(a: Fact, b: Fact) -> bool | None:
    known = _eq(a, b)
    return None if known is None else not known


def _lt(a: Fact, b: Fact) -> bool | None:
    return True if a.hi < b.lo else False if a.lo >= b.hi else None


def _le(a: Fact, b: Fact) -> bool | None:
    return True if a.hi <= b.lo else False if a.lo > b.hi else None


def select(out_dtype: str, pred: Fact, *cases: Fact) -> Fact:
    """XLA's select_n: ``cases[pred]``; for a bool, ``select(dtype, pred, on_false, on_true)``."""
    # select_n is undefined for an index outside the cases, so nothing is concluded from such a one.
    lo, hi = (int(pred.lo), int(pred.hi))
    if not 0 <= lo <= hi < len(cases):
        lo, hi = 0, len(cases) - 1
    out = cases[lo]
    for case in cases[lo + 1 : hi + 1]:
        out = out.join(case)
    return out if out.dtype == out_dtype else Fact.top(out_dtype)


def convert(out_dtype: str, a: Fact) -> Fact:
    """convert_element_type: integers wrap, floats round, float to integer saturates with NaN as
    0."""
    if a.dtype == out_dtype:
        return a
    t, source = dtype_of(out_dtype), dtype_of(a.dtype)
    if t.kind == "other" or source.kind == "other":
        return Fact.top(out_dtype)
    if t.kind == "bool":
        return RULES["ne"]("bool", a, Fact.const(a.dtype, 0))  # NaN differs from 0, so it is true
    if t.kind == "float":
        return float_rules.to_float(t, a)
    return float_rules.to_int(t, a) if source.kind == "float" else int_fact(t, a.lo, a.hi)


def search(out_dtype: str, n: int) -> Fact:
    """A position among ``n`` sorted boundaries: from 0 to ``n``, both included (RECom fault 4)."""
    return _range(dtype_of(out_dtype), 0, n)


def iota(out_dtype: str, n: int) -> Fact:
    """The positions along an axis of length ``n``: from 0 to ``n - 1``."""
    return _range(dtype_of(out_dtype), 0, max(n - 1, 0))


def _range(t: DType, lo: int, hi: int) -> Fact:
    if t.kind == "other":
        return Fact.top(t.name)
    return (
        float_rules.to_float(t, Fact("int64", lo, hi, True, True))
        if t.kind == "float"
        else int_fact(t, lo, hi)
    )


def affine(out_dtype: str, a: Fact, scale: Any, offset: Any) -> Fact:
    """``a*scale + offset`` in the dtype of ``a``, for two constants of that dtype."""
    scaled = RULES["mul"](a.dtype, a, Fact.const(a.dtype, scale))
    return RULES["add"](out_dtype, scaled, Fact.const(a.dtype, offset))


def _same(t: DType, a: Fact) -> Fact:
    return a


RULES: dict[str, Callable[..., Fact]] = {
    "add": _typed(int_rules.add, float_rules.add, on_bool=False),
    "sub": _typed(int_rules.sub, float_rules.sub, on_bool=False),
    "mul": _typed(int_rules.mul, float_rules.mul),
    "div": _typed(int_rules.div, float_rules.div, on_bool=False),
    "rem": _typed(int_rules.rem, float_rules.rem, on_bool=False),
    "max": _typed(int_rules.maximum, float_rules.maximum),
    "min": _typed(int_rules.minimum, float_rules.minimum),
    "and": _typed(int_rules.and_, None),
    "or": _typed(int_rules.or_, None),
    "xor": _typed(int_rules.xor, None),
    "not": _typed(int_rules.not_, None),
    "shl": _typed(int_rules.shl, None, on_bool=False),
    "shr_l": _typed(int_rules.shr_l, None, on_bool=False),
    "shr_a": _typed(int_rules.shr_a, None, on_bool=False),
    "popcnt": _typed(int_rules.popcnt, None, on_bool=False),
    "clz": _typed(int_rules.clz, None, on_bool=False),
    "neg": _typed(int_rules.neg, float_rules.neg, on_bool=False),
    "abs": _typed(int_rules.absolute, float_rules.absolute, on_bool=False),
    "sign": _typed(int_rules.sign, float_rules.sign, on_bool=False),
    "floor": _typed(None, float_rules.floor),
    "ceil": _typed(None, float_rules.ceil),
    "round_even": _typed(None, float_rules.round_even),
    "round_away": _typed(None, float_rules.round_away),
    "sqrt": _typed(None, float_rules.sqrt),
    "is_finite": _typed(None, float_rules.is_finite),
    "eq": _compare(_eq, False),
    "ne": _compare(_ne, True),
    "lt": _compare(_lt, False),
    "le": _compare(_le, False),
    "gt": _compare(lambda a, b: _lt(b, a), False),
    "ge": _compare(lambda a, b: _le(b, a), False),
    "select": select,
    "convert": convert,
    "search": search,
    "iota": iota,
    "affine": affine,
}
"""Rule by operation name: ``rule(out_dtype, *facts, **attrs)``. Shift amounts have the operand's
dtype."""


def apply(op: str, out_dtype: str, *facts: Fact, **attrs: Any) -> Fact:
    """What holds of ``op``'s result of dtype ``out_dtype``, given what holds of its operands.

    The top of the dtype for an unknown operation, or one whose operands have dtypes it has no rule
    for. TypeError for a wrong number of operands.
    """
    rule = RULES.get(op)
    return Fact.top(out_dtype) if rule is None else rule(out_dtype, *facts, **attrs)
