"""Stage 4: every rewrite by its printed form, by numbers, by brute force or random input, and where it must not fire.

`CASES` holds, for each name of `simplify.NAMES`: an expression and its form after that rewrite alone; expressions it
must leave alone; and a model that needs it. Expressions are evaluated by numpy under XLA's semantics (`evaluate`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from recom_jax import ir, pipeline, trace
from recom_jax.detect import Output, Val
from recom_jax.simplify import CONTEXT_REWRITES, DETECTION_REWRITES, NAMES, RULES, simplify
from recom_jax.simplify.facts import Facts
from tests.helpers import Bag, check, ids, table

# ---- expressions -------------------------------------------------------------------------------------------------


class Build:
    """Short names for expressions over one axis: variables ``%x`` (int32 unless said), constants, operations."""

    def __init__(self) -> None:
        self.pool = ir.Pool()

    def var(self, name: str, dtype: str = "int32") -> ir.Expr:
        return self.pool.load(name, dtype, 0, (1, 0))

    def c(self, value: Any, dtype: str = "int32") -> ir.Expr:
        return self.pool.const(dtype, value)

    def op(self, name: str, *args: Any) -> ir.Expr:
        dtype = next(a.dtype for a in args if isinstance(a, ir.Expr))
        made = [a if isinstance(a, ir.Expr) else self.c(a, dtype) for a in args]
        return self.pool.op(name, "bool" if name in ("eq", "ne", "lt", "le", "gt", "ge") else dtype, *made)

    def where(self, pred: ir.Expr, on_true: Any, on_false: Any) -> ir.Expr:
        dtype = next(a.dtype for a in (on_true, on_false) if isinstance(a, ir.Expr))
        t, f = (a if isinstance(a, ir.Expr) else self.c(a, dtype) for a in (on_true, on_false))
        return self.pool.op("select", dtype, pred, f, t)

    def to(self, dtype: str, e: ir.Expr) -> ir.Expr:
        return self.pool.op("convert", dtype, e)

    def take(self, idx: ir.Expr, rows: int = 10, mode: str = "clip", dtype: str = "float32",
             one_hot: bool = False) -> ir.Expr:
        fill = float("nan") if mode == "fill" else 0
        return self.pool.take("t", dtype, idx=idx, rows=rows, row_stride=8, base=0, cols=(0, 1), row_shift=(0, 0),
                              mode=mode, fill=fill, one_hot=one_hot)

    def wrap(self, i: ir.Expr, rows: int) -> ir.Expr:
        return self.where(self.op("lt", i, 0), self.op("add", i, rows), i)

    def mod(self, x: ir.Expr, c: int) -> ir.Expr:
        r = self.op("rem", x, c)
        return self.where(self.op("lt", r, 0), self.op("add", r, c), r)

    def floor_div(self, x: ir.Expr, c: int) -> ir.Expr:
        q = self.op("div", x, c)
        uneven = self.op("and", self.op("ne", self.op("sign", x), 1), self.op("ne", self.op("rem", x, c), 0))
        return self.where(uneven, self.op("sub", q, 1), q)

    def rewritten(self, e: ir.Expr, only: str | None = None, without: str | None = None,
                  constants: dict[int, Any] | None = None) -> ir.Expr:
        off = frozenset() if only is None else NAMES - {only}
        off |= frozenset() if without is None else {without}
        out = Output(None, Val((4, 8), e), 0)
        value = simplify(self.pool, [out], constants or {}, off).outputs[0].val
        assert value.expr is not None
        return value.expr


# ---- their values under XLA's semantics --------------------------------------------------------------------------


def evaluate(e: ir.Expr, env: dict[str, np.ndarray[Any, Any]]) -> Any:
    """`e` for arrays of inputs; a lookup reads column 0 of ``env["t"]``."""
    with np.errstate(all="ignore"):
        return _evaluate(e, env, {})


def _evaluate(e: ir.Expr, env: dict[str, Any], memo: dict[int, Any]) -> Any:
    if id(e) in memo:
        return memo[id(e)]
    if isinstance(e, ir.Const):
        out = np.asarray(e.value).astype(e.dtype)
    elif isinstance(e, ir.Load):
        out = env[e.var]
    elif isinstance(e, ir.Take):
        rows = env["t"][:e.rows, 0]
        idx = np.asarray(_evaluate(e.idx, env, memo)).astype(object if e.idx.dtype == "uint64" else np.int64)
        out = np.resize(rows, e.rows)[np.clip(idx, 0, e.rows - 1).astype(np.int64)]
        if e.mode == "fill":
            out = np.where((idx >= 0) & (idx < e.rows), out, np.asarray(e.fill, e.dtype))
    else:
        assert isinstance(e, ir.Op)
        out = _apply(e, [_evaluate(a, env, memo) for a in e.args])
    memo[id(e)] = out
    return out


def _apply(e: ir.Op, args: Sequence[Any]) -> Any:
    of = e.args[0].dtype
    if e.name == "select":
        return np.where(args[0], args[2], args[1])
    if e.name == "convert":
        return args[0] != 0 if e.dtype == "bool" else args[0].astype(e.dtype)
    if e.name in ("eq", "ne", "lt", "le", "gt", "ge"):
        return getattr(np, {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
                            "ge": "greater_equal"}[e.name])(*args)
    if e.name in ("and", "or", "xor", "not"):
        return getattr(np, {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "invert"}[e.name])(
            *args)
    if ir.is_float(of):
        return {"add": np.add, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum}[e.name](
            *args).astype(e.dtype)
    bits = np.dtype(of).itemsize * 8
    wide = [np.asarray(a).astype(np.int64) for a in args]
    x, y = wide[0], wide[-1]
    out_of = (y < 0) | (y >= bits)
    s = np.where(out_of, 0, y)
    safe = np.where(y == 0, 1, y)
    q = np.where((x < 0) == (safe < 0), np.abs(x) // np.abs(safe), -(np.abs(x) // np.abs(safe)))
    r = np.where(x < 0, -(np.abs(x) % np.abs(safe)), np.abs(x) % np.abs(safe))
    mask = (1 << bits) - 1
    return {
        "add": x + y, "sub": x - y, "mul": x * y, "max": np.maximum(x, y), "min": np.minimum(x, y), "neg": -x,
        "abs": np.abs(x), "sign": np.sign(x), "div": np.where(y == 0, -1, q), "rem": np.where(y == 0, x, r),
        "shl": np.where(out_of, 0, x << s), "shr_l": np.where(out_of, 0, (x & mask) >> s),
        "shr_a": np.where(out_of, -(x < 0).astype(np.int64), x >> s),
    }[e.name].astype(of)


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.broadcast_arrays(a, b)
    if a.dtype != b.dtype:
        return False
    if a.dtype.kind != "f":
        return bool((a == b).all())
    nan = np.isnan(a) & np.isnan(b)
    return bool((nan | ((a == b) & (np.signbit(a) == np.signbit(b)))).all())


EVERY_INT8 = np.arange(-128, 128, dtype=np.int8)
PAIRS = tuple(a.reshape(-1) for a in np.meshgrid(EVERY_INT8, EVERY_INT8))
ODD_FLOATS = np.array([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 3.0, np.nan, np.inf, -np.inf, 1e-3, 16777217.0, 65504.0], np.float32)
TABLE = np.concatenate([ODD_FLOATS, np.arange(20, dtype=np.float32)])[:, None]

# ---- the cases ---------------------------------------------------------------------------------------------------

Make = Callable[[Build], ir.Expr]


@dataclasses.dataclass(frozen=True)
class Case:
    """What one rewrite does.

    Attributes:
      before: (expression, how it prints, how it prints after this rewrite alone).
      never: expressions the rewrite must leave as they are.
      model: a function and its arguments whose columns the rewrite helps; `pooled` is the bag's length.
    """

    before: tuple[tuple[Make, str, str], ...]
    never: tuple[Make, ...]
    model: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    pooled: int = 0


T = table(100, 8)
T64 = table(64, 8)


def odd_ids() -> Any:
    return ids((6, 5), 100, odd=True)


def masked(t: Any, i: Any, mask: Any, rows: Any = None) -> Any:
    return jnp.where(mask[..., None], t[i] if rows is None else rows, 0).sum(1)


CASES: dict[str, Case] = {
    "fold-constants": Case(
        before=((lambda b: b.op("add", b.var("x"), b.op("mul", b.c(3), 4)), "add(%x(0;1,0), mul(3, 4))", "add(%x(0;1,0), 12)"),
                (lambda b: b.op("lt", b.op("and", b.var("x"), 7), 8), "lt(and(%x(0;1,0), 7), 8)", "True"),
                (lambda b: b.to("bfloat16", b.c(3)), "convert<bfloat16>(3)", "3.0")),
        never=(lambda b: b.op("lt", b.op("and", b.var("x"), 7), 7),
               lambda b: b.to("bfloat16", b.c(257)),  # not a bfloat16
               lambda b: b.op("add", b.c(1.5, "float32"), b.c(1.5, "float32"))),  # XLA's business
        model=lambda t, x: t[(x & 63) + (3 * 12)], args=lambda: (T, odd_ids())),
    "drop-negative-wrap": Case(
        before=((lambda b: b.wrap(b.op("and", b.var("x"), 7), 10),
                 "select(lt(and(%x(0;1,0), 7), 0), and(%x(0;1,0), 7), add(and(%x(0;1,0), 7), 10))", "and(%x(0;1,0), 7)"),),
        never=(lambda b: b.wrap(b.var("x"), 10), lambda b: b.wrap(b.op("rem", b.var("x"), 10), 10),
               lambda b: b.wrap(b.op("abs", b.var("x")), 10)),  # the least integer stays negative
        model=lambda t, x: t[x & 63], args=lambda: (T, odd_ids())),
    "select-of-constant": Case(
        before=((lambda b: b.where(b.c(True, "bool"), b.var("x"), b.var("y")), "select(True, %y(0;1,0), %x(0;1,0))",
                 "%x(0;1,0)"),
                (lambda b: b.where(b.var("m", "bool"), b.var("x"), b.var("x")), "select(%m(0;1,0), %x(0;1,0), %x(0;1,0))",
                 "%x(0;1,0)")),
        never=(lambda b: b.where(b.var("m", "bool"), b.var("x"), b.var("y")),),
        model=lambda t, x: t[jnp.where(x > 3, jnp.where((x & 3) < 4, x & 63, 7), x & 63)], args=lambda: (T, odd_ids())),
    "identity-arithmetic": Case(
        before=((lambda b: b.op("mul", b.op("add", b.var("x"), 0), 1), "mul(add(%x(0;1,0), 0), 1)", "%x(0;1,0)"),
                (lambda b: b.op("and", b.var("x"), -1), "and(%x(0;1,0), -1)", "%x(0;1,0)"),
                (lambda b: b.op("and", b.var("x", "uint8"), 255), "and(%x(0;1,0), 255)", "%x(0;1,0)"),
                (lambda b: b.op("ne", b.var("m", "bool"), False), "ne(%m(0;1,0), False)", "%m(0;1,0)"),
                (lambda b: b.op("eq", b.var("m", "bool"), False), "eq(%m(0;1,0), False)", "not(%m(0;1,0))"),
                (lambda b: b.op("not", b.op("not", b.var("m", "bool"))), "not(not(%m(0;1,0)))", "%m(0;1,0)"),
                (lambda b: b.op("not", b.op("le", b.var("x"), 3)), "not(le(%x(0;1,0), 3))", "gt(%x(0;1,0), 3)")),
        never=(lambda b: b.op("add", b.var("x", "float32"), 0.0),  # -0.0 + 0.0 is 0.0
               lambda b: b.op("not", b.op("lt", b.var("f", "float32"), 0.0)), lambda b: b.op("not", b.var("x")),
               lambda b: b.op("sub", b.c(0), b.var("x")), lambda b: b.op("div", b.c(1), b.var("x")),
               lambda b: b.op("shl", b.c(0), b.var("x")), lambda b: b.op("and", b.var("x", "uint8"), 127)),
        model=lambda t, x: t[(x + 0) * 1], args=lambda: (T, odd_ids())),
    "unit-weight": Case(
        before=((lambda b: b.op("mul", b.take(b.var("x")), 1.0), "mul(%t[%x(0;1,0); clip](0;0,1), 1.0)",
                 "%t[%x(0;1,0); clip](0;0,1)"),
                (lambda b: b.op("div", b.take(b.var("x")), 1.0), "div(%t[%x(0;1,0); clip](0;0,1), 1.0)",
                 "%t[%x(0;1,0); clip](0;0,1)")),
        never=(lambda b: b.op("mul", b.take(b.var("x")), -1.0), lambda b: b.op("mul", b.take(b.var("x")), b.var("w", "float32")),
               lambda b: b.op("div", b.c(1.0, "float32"), b.var("w", "float32"))),
        model=lambda t, x: (t[x] * np.ones((6, 5, 1), np.float32)).sum(1), args=lambda: (T, odd_ids()), pooled=5),
    "implied-predicate": Case(
        before=((lambda b: b.op("and", b.op("lt", b.var("x"), 0), b.op("ne", b.var("x"), 0)),
                 "and(lt(%x(0;1,0), 0), ne(%x(0;1,0), 0))", "lt(%x(0;1,0), 0)"),
                (lambda b: b.op("and", b.op("gt", b.var("x"), 5), b.op("lt", b.var("x"), 3)),
                 "and(gt(%x(0;1,0), 5), lt(%x(0;1,0), 3))", "False"),
                (lambda b: b.op("or", b.op("ge", b.var("x"), 5), b.op("lt", b.var("x"), 7)),
                 "or(ge(%x(0;1,0), 5), lt(%x(0;1,0), 7))", "True"),
                (lambda b: b.op("or", b.op("ge", b.var("x"), 5), b.op("ge", b.var("x"), 7)),
                 "or(ge(%x(0;1,0), 5), ge(%x(0;1,0), 7))", "ge(%x(0;1,0), 5)")),
        never=(lambda b: b.op("and", b.op("ge", b.var("x"), 0), b.op("ne", b.var("x"), 0)),
               lambda b: b.op("and", b.op("lt", b.var("f", "float32"), 0.0), b.op("ne", b.var("f", "float32"), 0.0)),
               lambda b: b.op("and", b.op("lt", b.var("x"), 0), b.op("ne", b.var("y"), 0))),
        model=lambda t, x: t[x % 100], args=lambda: (T, odd_ids())),
    "drop-clamp": Case(
        before=((lambda b: b.op("max", b.op("min", b.op("and", b.var("x"), 7), 9), 0), "max(min(and(%x(0;1,0), 7), 9), 0)",
                 "and(%x(0;1,0), 7)"),
                (lambda b: b.op("max", b.to("float32", b.op("and", b.var("x"), 7)), -1.0),
                 "max(convert<float32>(and(%x(0;1,0), 7)), -1.0)", "convert<float32>(and(%x(0;1,0), 7))")),
        never=(lambda b: b.op("max", b.op("and", b.var("x"), 7), 1), lambda b: b.op("min", b.op("and", b.var("x"), 7), 6),
               lambda b: b.op("max", b.to("float32", b.op("and", b.var("x"), 7)), 0.0),  # which zero it is
               lambda b: b.op("max", b.var("f", "float32"), float("nan")),
               lambda b: b.op("max", b.op("abs", b.var("x")), 0)),
        model=lambda t, x: jnp.take(t, jnp.clip(x & 63, 0, 120), axis=0), args=lambda: (T, odd_ids())),
    "mod-power-of-two": Case(
        before=((lambda b: b.mod(b.var("x"), 8), "select(lt(rem(%x(0;1,0), 8), 0), rem(%x(0;1,0), 8), add(rem(%x(0;1,0), 8), 8))",
                 "and(%x(0;1,0), 7)"),),
        never=(lambda b: b.mod(b.var("x"), 12), lambda b: b.mod(b.var("x"), 1), lambda b: b.mod(b.var("x"), -8),
               lambda b: b.where(b.op("lt", b.op("rem", b.var("x"), 8), 0), b.op("add", b.op("rem", b.var("x"), 8), 16),
                                 b.op("rem", b.var("x"), 8))),
        model=lambda t, x: t[x % 64], args=lambda: (T64, odd_ids())),
    "rem-power-of-two": Case(
        before=((lambda b: b.op("rem", b.var("x", "uint8"), 64), "rem(%x(0;1,0), 64)", "and(%x(0;1,0), 63)"),
                (lambda b: b.op("rem", b.op("max", b.var("x"), 0), 64), "rem(max(%x(0;1,0), 0), 64)",
                 "and(max(%x(0;1,0), 0), 63)")),
        never=(lambda b: b.op("rem", b.var("x"), 64), lambda b: b.op("rem", b.var("x", "uint8"), 63),
               lambda b: b.op("rem", b.var("x", "uint8"), 0), lambda b: b.op("rem", b.c(64), b.var("x"))),
        model=lambda t, x: t[x.astype(jnp.uint32) % 64], args=lambda: (T64, odd_ids())),
    "div-power-of-two": Case(
        before=((lambda b: b.op("div", b.var("x", "uint8"), 16), "div(%x(0;1,0), 16)", "shr_l(%x(0;1,0), 4)"),),
        never=(lambda b: b.op("div", b.var("x"), 16), lambda b: b.op("div", b.var("x", "uint8"), 12),
               lambda b: b.op("div", b.var("f", "float32"), 16.0), lambda b: b.op("div", b.c(16), b.var("x"))),
        model=lambda t, x: t[x.astype(jnp.uint8) // 4], args=lambda: (T64, odd_ids())),
    "floor-div-power-of-two": Case(
        before=((lambda b: b.floor_div(b.var("x"), 8),
                 "select(and(ne(sign(%x(0;1,0)), 1), ne(rem(%x(0;1,0), 8), 0)), div(%x(0;1,0), 8), sub(div(%x(0;1,0), 8), 1))",
                 "shr_a(%x(0;1,0), 3)"),),
        never=(lambda b: b.floor_div(b.var("x"), 10), lambda b: b.floor_div(b.var("x"), -8),
               lambda b: b.floor_div(b.var("x", "uint8"), 8)),
        model=lambda t, x: t[x // 4], args=lambda: (T, odd_ids())),
    "merge-masks": Case(
        before=((lambda b: b.where(b.var("m", "bool"), b.where(b.var("n", "bool"), b.var("x"), 0), 0),
                 "select(%m(0;1,0), 0, select(%n(0;1,0), 0, %x(0;1,0)))", "select(and(%m(0;1,0), %n(0;1,0)), 0, %x(0;1,0))"),
                (lambda b: b.where(b.var("m", "bool"), 0, b.where(b.var("n", "bool"), 0, b.var("x"))),
                 "select(%m(0;1,0), select(%n(0;1,0), %x(0;1,0), 0), 0)", "select(or(%m(0;1,0), %n(0;1,0)), %x(0;1,0), 0)")),
        never=(lambda b: b.where(b.var("m", "bool"), b.where(b.var("n", "bool"), b.var("x"), 0), 1),
               lambda b: b.where(b.var("m", "bool"), b.where(b.var("n", "bool"), b.var("f", "float32"), 0.0), -0.0),
               lambda b: b.where(b.var("m", "bool"), b.where(b.var("n", "bool"), b.var("x"), b.var("y")), b.var("y"))),
        model=lambda t, x: masked(t, x, x >= 0, jnp.where((x < 50)[..., None], t[x], 0)), args=lambda: (T, odd_ids()), pooled=5),
    "mask-first": Case(
        before=((lambda b: b.where(b.op("eq", b.var("x"), 3), 0.0, b.take(b.var("x"))),
                 "select(eq(%x(0;1,0), 3), %t[%x(0;1,0); clip](0;0,1), 0.0)", "select(ne(%x(0;1,0), 3), 0.0, %t[%x(0;1,0); clip](0;0,1))"),
                (lambda b: b.where(b.op("not", b.var("m", "bool")), 0.0, b.take(b.var("x"))),
                 "select(not(%m(0;1,0)), %t[%x(0;1,0); clip](0;0,1), 0.0)", "select(%m(0;1,0), 0.0, %t[%x(0;1,0); clip](0;0,1))"),
                (lambda b: b.where(b.op("lt", b.var("f", "float32"), 3.0), 0.0, b.take(b.var("x"))),  # NaN stays on its side
                 "select(lt(%f(0;1,0), 3.0), %t[%x(0;1,0); clip](0;0,1), 0.0)",
                 "select(not(lt(%f(0;1,0), 3.0)), 0.0, %t[%x(0;1,0); clip](0;0,1))")),
        never=(lambda b: b.where(b.op("eq", b.var("x"), 3), 0, b.var("x")),
               lambda b: b.where(b.op("eq", b.var("x"), 3), b.take(b.var("x")), 0.0)),
        model=lambda t, x: jnp.where((x == 0)[..., None], 0, t[x]).sum(1), args=lambda: (T, odd_ids()), pooled=5),
    "weight-under-mask": Case(
        before=((lambda b: b.op("mul", b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0), b.to("float32", b.var("n", "bool"))),
                 "mul(select(%m(0;1,0), 0.0, %t[%x(0;1,0); clip](0;0,1)), convert<float32>(%n(0;1,0)))",
                 "select(%m(0;1,0), 0.0, mul(%t[%x(0;1,0); clip](0;0,1), convert<float32>(%n(0;1,0))))"),),
        never=(lambda b: b.op("mul", b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0), b.var("w", "float32")),
               lambda b: b.op("mul", b.where(b.var("m", "bool"), b.take(b.var("x")), -0.0), b.to("float32", b.var("n", "bool"))),
               lambda b: b.op("mul", b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0), -2.0),
               lambda b: b.op("mul", b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0), float("inf")),
               lambda b: b.op("mul", b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0), b.to("float32", b.var("x")))),
        model=lambda t, x: (jnp.where((x > 0)[..., None], t[x], 0) * (x > 0)[..., None]).sum(1), args=lambda: (T, odd_ids()), pooled=5),
    "convert-under-mask": Case(
        before=((lambda b: b.to("float32", b.where(b.var("m", "bool"), b.take(b.var("x"), dtype="bfloat16"), 0.0)),
                 "convert<float32>(select(%m(0;1,0), 0.0, %t[%x(0;1,0); clip](0;0,1)))",
                 "select(%m(0;1,0), 0.0, convert<float32>(%t[%x(0;1,0); clip](0;0,1)))"),),
        never=(lambda b: b.to("float32", b.where(b.var("m", "bool"), b.take(b.var("x"), dtype="bfloat16"), 1.0)),
               lambda b: b.to("float32", b.where(b.var("m", "bool"), b.take(b.var("x"), dtype="bfloat16"), -0.0)),
               lambda b: b.to("int32", b.where(b.var("m", "bool"), b.take(b.var("x"), dtype="float32"), 0.0))),
        model=lambda t, x: masked(t.astype(jnp.bfloat16), x, x > 0).astype(jnp.float32), args=lambda: (T, odd_ids()), pooled=600),
    "compose-converts": Case(
        before=((lambda b: b.to("int32", b.to("int64", b.var("x"))), "convert<int32>(convert<int64>(%x(0;1,0)))", "%x(0;1,0)"),
                (lambda b: b.to("float32", b.to("int32", b.var("m", "bool"))), "convert<float32>(convert<int32>(%m(0;1,0)))",
                 "convert<float32>(%m(0;1,0))")),
        never=(lambda b: b.to("int32", b.to("int8", b.var("x"))), lambda b: b.to("int32", b.to("uint32", b.var("x"))),
               lambda b: b.to("int32", b.to("float32", b.var("x"))), lambda b: b.to("int8", b.to("uint8", b.var("x", "int8"))),
               lambda b: b.to("bool", b.to("int8", b.var("x")))),
        model=lambda t, x: t[x.astype(jnp.uint8).astype(jnp.int32).astype(jnp.uint16) + 1], args=lambda: (T, odd_ids())),
    "drop-fill": Case(
        before=((lambda b: b.take(b.op("and", b.var("x"), 7), mode="fill"), "%t[and(%x(0;1,0), 7); fill nan](0;0,1)",
                 "%t[and(%x(0;1,0), 7); clip](0;0,1)"),),
        never=(lambda b: b.take(b.op("and", b.var("x"), 15), mode="fill"), lambda b: b.take(b.var("x"), mode="fill"),
               lambda b: b.take(b.op("and", b.var("x"), 7), rows=0, mode="fill"),
               lambda b: b.take(b.op("and", b.var("x"), 7), mode="fill", one_hot=True)),
        model=lambda t, x: jnp.take(t, x & 63, axis=0), args=lambda: (T, odd_ids())),
    "clamp-into-lookup": Case(
        before=((lambda b: b.take(b.op("min", b.op("max", b.var("x"), 0), 9)), "%t[min(max(%x(0;1,0), 0), 9); clip](0;0,1)",
                 "%t[%x(0;1,0); clip](0;0,1)"),
                (lambda b: b.take(b.op("max", b.var("x"), -4)), "%t[max(%x(0;1,0), -4); clip](0;0,1)", "%t[%x(0;1,0); clip](0;0,1)")),
        never=(lambda b: b.take(b.op("min", b.var("x"), 8)), lambda b: b.take(b.op("max", b.var("x"), 1)),
               lambda b: b.take(b.op("min", b.op("max", b.var("x"), 0), 9), mode="fill"),
               lambda b: b.take(b.op("min", b.var("x", "int8"), 100), rows=300),  # 299 is no int8
               lambda b: b.take(b.op("max", b.var("x"), 0), rows=0)),
        model=lambda t, x: t[jnp.clip(x, 0, 99)], args=lambda: (T, odd_ids())),
    "index-as-is": Case(
        before=((lambda b: b.take(b.to("int64", b.var("x"))), "%t[convert<int64>(%x(0;1,0)); clip](0;0,1)", "%t[%x(0;1,0); clip](0;0,1)"),
                (lambda b: b.take(b.to("int8", b.op("and", b.var("x"), 127))), "%t[convert<int8>(and(%x(0;1,0), 127)); clip](0;0,1)",
                 "%t[and(%x(0;1,0), 127); clip](0;0,1)")),
        never=(lambda b: b.take(b.to("int8", b.var("x"))), lambda b: b.take(b.to("uint32", b.var("x"))),
               lambda b: b.take(b.to("int32", b.var("x", "uint32"))), lambda b: b.take(b.to("int8", b.op("and", b.var("x"), 128))),
               lambda b: b.take(b.to("int32", b.var("m", "bool"))), lambda b: b.take(b.to("int32", b.var("f", "float32")))),
        model=lambda t, x: jnp.take(t, (x & 63).astype(jnp.int8), axis=0, mode="clip"), args=lambda: (T, odd_ids())),
}

MASK = "ge(%x(0;1,0), 0)"
CONTEXT_CASES: dict[str, Case] = {
    "masked-lookup": Case(
        before=((lambda b: b.where(b.op("ge", b.var("x"), 0), b.take(b.where(b.op("ge", b.var("x"), 0), b.var("x"), 3)), 0.0),
                 f"select({MASK}, 0.0, %t[select({MASK}, 3, %x(0;1,0)); clip](0;0,1))",
                 f"select({MASK}, 0.0, %t[%x(0;1,0); clip](0;0,1))"),
                (lambda b: b.where(b.var("m", "bool"), b.take(b.op("rem", b.where(b.var("m", "bool"), b.var("x"), 3), 10), mode="fill"), 0.0),
                 "select(%m(0;1,0), 0.0, %t[rem(select(%m(0;1,0), 3, %x(0;1,0)), 10); fill nan](0;0,1))",
                 "select(%m(0;1,0), 0.0, %t[rem(%x(0;1,0), 10); fill nan](0;0,1))"),
                (lambda b: b.where(b.var("m", "bool"), 0.0, b.take(b.where(b.var("m", "bool"), 3, b.var("x")))),
                 "select(%m(0;1,0), %t[select(%m(0;1,0), %x(0;1,0), 3); clip](0;0,1), 0.0)",
                 "select(%m(0;1,0), %t[%x(0;1,0); clip](0;0,1), 0.0)")),
        never=(lambda b: b.where(b.var("m", "bool"), b.take(b.where(b.var("n", "bool"), b.var("x"), 3)), 0.0),
               lambda b: b.where(b.op("or", b.var("m", "bool"), b.var("n", "bool")), b.take(b.where(b.var("m", "bool"), b.var("x"), 3)), 0.0),
               lambda b: b.op("mul", b.take(b.where(b.var("m", "bool"), b.var("x"), 3)), b.to("float32", b.var("m", "bool"))),
               # another index space: inside the bag the mask is no longer the one outside
               lambda b: b.where(b.var("m", "bool"), b.pool.reduce("sum", b.take(b.where(b.var("m", "bool"), b.var("x"), 3)), (2,), 0.0), 0.0)),
        model=lambda t, x: masked(t, jnp.where(x > 0, x, 0) % 37, x > 0), args=lambda: (T, odd_ids()), pooled=5),
    "facts-under-mask": Case(
        before=((lambda b: b.where(b.op("ge", b.var("x"), 0), b.take(b.wrap(b.var("x"), 10)), 0.0),
                 f"select({MASK}, 0.0, %t[select(lt(%x(0;1,0), 0), %x(0;1,0), add(%x(0;1,0), 10)); clip](0;0,1))",
                 f"select({MASK}, 0.0, %t[%x(0;1,0); clip](0;0,1))"),),
        never=(lambda b: b.where(b.op("ge", b.var("x"), -2), b.take(b.wrap(b.var("x"), 10)), 0.0),
               lambda b: b.where(b.op("ge", b.var("y"), 0), b.take(b.wrap(b.var("x"), 10)), 0.0),
               lambda b: b.where(b.op("ge", b.var("x", "uint8"), 1), b.take(b.wrap(b.to("int8", b.var("x", "uint8")), 10)), 0.0),
               lambda b: b.where(b.op("ge", b.var("f", "float32"), 0.0), b.op("max", b.var("f", "float32"), -1.0), 0.0)),
        model=lambda t, x: masked(t, x, x >= 0), args=lambda: (T, odd_ids()), pooled=5),
}
# What a context makes possible is done by rules: these stay on in the tests of contexts.
HELPERS = frozenset(("fold-constants", "select-of-constant", "drop-negative-wrap"))
ALL = {**CASES, **CONTEXT_CASES}


def alone(b: Build, name: str, e: ir.Expr) -> ir.Expr:
    """`e` after this rewrite alone (a context with the rules that use it)."""
    if name in RULES:
        return b.rewritten(e, only=name)
    out = Output(None, Val((4, 8), e), 0)
    off = (NAMES - {name}) - HELPERS
    value = simplify(b.pool, [out], {}, frozenset(off)).outputs[0].val
    assert value.expr is not None
    return value.expr


def test_every_rewrite_has_its_case() -> None:
    assert set(CASES) == set(RULES)
    assert set(CONTEXT_CASES) == set(CONTEXT_REWRITES)
    assert frozenset(ALL) | frozenset(DETECTION_REWRITES) == NAMES
    assert all(r.why and r.apply.__doc__ or name == "select-of-constant" for name, r in RULES.items())


# ---- 1: the printed form ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALL))
def test_printed_form(name: str) -> None:
    for make, before, after in ALL[name].before:
        b = Build()
        e = make(b)
        assert str(e) == before
        assert str(alone(b, name, e)) == after


# ---- 2: the numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALL))
def test_numbers_with_and_without(name: str) -> None:
    case = ALL[name]
    args = case.args()
    bound = Bag(case.pooled) if case.pooled else None
    report = check(case.model, *args, bound=bound)
    assert all(name in c.rewrites for c in report.columns), report.to_text(None)
    report = check(case.model, *args, bound=bound, options=recom_jax.Options(disable=(name,), verify=True))
    assert all(name not in c.rewrites for c in report.columns)


# ---- 3: every int8, odd floats, random constants ---------------------------------------------------------------


def inputs(dtype: str, rng: random.Random, n: int) -> np.ndarray[Any, Any]:
    """n values of a dtype: extremes, values near zero, any."""
    r = np.random.default_rng(rng.randrange(1 << 30))
    if dtype == "bool":
        return r.integers(0, 2, n).astype(bool)
    if dtype in ("float32", "bfloat16", "float16"):
        return r.choice(ODD_FLOATS, n)
    info = np.iinfo(dtype)
    near = r.integers(max(-20, info.min), min(info.max, 130) + 1, n)
    anything = r.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    ends = r.choice(np.array([info.min, info.min + 1, info.max, info.max - 1, 0], dtype), n)
    return np.where(r.random(n) < 0.5, near.astype(dtype), np.where(r.random(n) < 0.5, anything, ends))


def free_variables(e: ir.Expr) -> dict[str, str]:
    return {str(x.var): x.dtype for x in ir.walk(e) if isinstance(x, ir.Load)}


@pytest.mark.parametrize("name", sorted(ALL))
@given(seed=st.integers(0, 1 << 30))
def test_property_same_values(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for make in (*(m for m, _, _ in ALL[name].before), *ALL[name].never):
        b = Build()
        e = make(b)
        if any(isinstance(x, (ir.Reduce,)) or (isinstance(x, ir.Take) and x.rows == 0) or x.dtype == "bfloat16"
               for x in ir.walk(e)):
            continue
        env = {v: inputs(d, rng, 500) for v, d in free_variables(e).items()}
        want = evaluate(e, {**env, "t": TABLE})
        assert same_bits(evaluate(alone(b, name, e), {**env, "t": TABLE}), want), str(e)
        assert same_bits(evaluate(b.rewritten(e), {**env, "t": TABLE}), want), str(e)


def _masks(b: Build, x: ir.Expr, c: int) -> list[ir.Expr]:
    return [b.op(cmp, x, c) for cmp in ("lt", "le", "gt", "ge", "eq", "ne")]


INTEGER_SHAPES: dict[str, Callable[[Build, ir.Expr, ir.Expr, int], list[ir.Expr]]] = {
    "drop-negative-wrap": lambda b, x, y, c: [b.wrap(b.op("and", x, c), 10), b.wrap(b.op("max", x, c), 10),
                                              b.wrap(b.op("shr_a", x, c), 10)],
    "fold-constants": lambda b, x, y, c: [b.op(o, b.op("and", x, 3), c) for o in ("lt", "add", "shl", "shr_l", "rem", "div")],
    "select-of-constant": lambda b, x, y, c: [b.where(m, x, y) for m in _masks(b, b.op("and", x, 7), c)],
    "identity-arithmetic": lambda b, x, y, c: [
        b.op(o, *args) for o in ("add", "sub", "mul", "div", "and", "or", "xor", "shl", "shr_l", "shr_a")
        for args in ((x, c), (b.c(c, "int8"), x))],
    "implied-predicate": lambda b, x, y, c: [
        b.op(o, m, n) for o in ("and", "or") for m in _masks(b, x, c) for n in _masks(b, x, 3)],
    "drop-clamp": lambda b, x, y, c: [b.op(o, b.op("and", x, 15), c) for o in ("max", "min")] + [
        b.op("max", b.op("min", b.op("rem", x, 7), c), -7)],
    "mod-power-of-two": lambda b, x, y, c: [b.mod(x, c)],
    "rem-power-of-two": lambda b, x, y, c: [b.op("rem", x, c), b.op("rem", b.op("max", x, 0), c)],
    "div-power-of-two": lambda b, x, y, c: [b.op("div", x, c), b.op("div", b.op("max", x, 0), c)],
    "floor-div-power-of-two": lambda b, x, y, c: [b.floor_div(x, c), b.floor_div(b.op("max", x, 0), c)],
    "merge-masks": lambda b, x, y, c: [b.where(b.op("lt", x, c), b.where(b.op("gt", y, c), x, c), c),
                                       b.where(b.op("lt", x, c), c, b.where(b.op("gt", y, c), c, x))],
    "compose-converts": lambda b, x, y, c: [
        b.to(d, b.to(e, v)) for v in (x, b.op("and", x, c)) for d in ("int8", "int32", "uint8") for e in ("int16", "uint8", "int8", "uint32")],
    "drop-fill": lambda b, x, y, c: [b.take(b.op("and", x, c), mode="fill"), b.take(b.op("max", x, c), mode="fill")],
    "clamp-into-lookup": lambda b, x, y, c: [
        b.take(e, rows=r) for r in (1, 10) for e in (b.op("max", x, c), b.op("min", x, c), b.op("max", b.op("min", x, 9), c))],
    "index-as-is": lambda b, x, y, c: [b.take(b.to(d, v)) for d in ("int32", "uint8", "uint32") for v in (x, b.op("and", x, c))],
    "masked-lookup": lambda b, x, y, c: [
        b.where(m, b.take(b.op("add", b.where(m, x, 3), y)), 0.0) for m in _masks(b, x, c)] + [
        b.where(b.op("and", m, b.op("gt", y, 0)), b.where(m, x, y), y) for m in _masks(b, x, c)],
    "facts-under-mask": lambda b, x, y, c: [
        b.where(m, t, f) for o in ("sign", "neg") for m in _masks(b, b.op(o, x), c) for t, f in ((b.mod(x, 10), x), (x, b.floor_div(x, 7)))]
    + [b.where(m, b.wrap(b.op("rem", x, 10), 10), 0) for m in _masks(b, x, c)],
}


@pytest.mark.parametrize("name", sorted(INTEGER_SHAPES))
def test_every_int8(name: str) -> None:
    """Every value of int8 (two variables: all pairs), for constants at and around every boundary."""
    for c in (-128, -127, -8, -1, 0, 1, 2, 3, 4, 7, 8, 9, 10, 64, 127):
        b = Build()
        x, y = b.var("x", "int8"), b.var("y", "int8")
        for e in INTEGER_SHAPES[name](b, x, y, c):
            two = len(free_variables(e)) == 2
            env = {"x": PAIRS[0] if two else EVERY_INT8, "y": PAIRS[1], "t": TABLE}
            want = evaluate(e, env)
            after = alone(b, name, e)
            if after is not e:
                assert same_bits(evaluate(after, env), want), (str(e), str(after))
            after = b.rewritten(e)
            if after is not e:
                assert same_bits(evaluate(after, env), want), (str(e), str(after))


def random_expression(b: Build, rng: random.Random, depth: int, dtype: str = "int8") -> ir.Expr:
    """Any mix of operations over int8 variables, with masks inside masks."""
    if dtype == "bool":
        if depth and rng.random() < 0.4:
            name = rng.choice(("and", "or", "not", "eq", "ne"))
            n = 1 if name == "not" else 2
            return b.op(name, *(random_expression(b, rng, depth - 1, "bool") for _ in range(n)))
        name = rng.choice(("lt", "le", "gt", "ge", "eq", "ne"))
        return b.op(name, random_expression(b, rng, min(depth, 1)), rng.choice((random_expression(b, rng, 0), rng.randrange(-3, 4))))
    if depth == 0 or rng.random() < 0.1:
        return rng.choice((b.var("x", "int8"), b.var("y", "int8"), b.c(rng.choice((0, 1, -1, 2, 4, 8, 127, -128, 5)), "int8")))
    roll = rng.random()
    if roll < 0.4:
        return b.where(random_expression(b, rng, depth - 1, "bool"), random_expression(b, rng, depth - 1),
                       random_expression(b, rng, depth - 1))
    if roll < 0.5:
        return b.to("int8", b.to(rng.choice(("int16", "uint8", "int32")), random_expression(b, rng, depth - 1)))
    if roll < 0.6:
        return rng.choice((b.mod, b.floor_div))(random_expression(b, rng, depth - 1), rng.choice((2, 3, 8)))
    if roll < 0.7:
        return b.op(rng.choice(("sign", "abs", "neg")), random_expression(b, rng, depth - 1))
    name = rng.choice(("add", "sub", "mul", "div", "rem", "max", "min", "and", "or", "xor", "shl", "shr_l", "shr_a"))
    return b.op(name, random_expression(b, rng, depth - 1), random_expression(b, rng, depth - 1))


@given(seed=st.integers(0, 1 << 30))
def test_property_all_rewrites_together(seed: int) -> None:
    """Random programs, each over all pairs of int8."""
    rng = random.Random(seed)
    for _ in range(5):
        b = Build()
        e = random_expression(b, rng, 4)
        env = {"x": PAIRS[0], "y": PAIRS[1], "t": TABLE}
        if rng.random() < 0.5:
            e = b.where(random_expression(b, rng, 2, "bool"), b.take(e, mode=rng.choice(("clip", "fill"))), 0.0)
        want = evaluate(e, env)
        for off in ((), (rng.choice(sorted(NAMES)),)):
            out = simplify(b.pool, [Output(None, Val((4, 8), e), 0)], {}, frozenset(off)).outputs[0].val.expr
            assert out is not None
            assert same_bits(evaluate(out, env), want), (str(e), str(out))
            again = simplify(b.pool, [Output(None, Val((4, 8), out), 0)], {}, frozenset(off)).outputs[0].val.expr
            assert again is not None
            assert same_bits(evaluate(again, env), want)


# ---- 4: where it must not fire ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALL))
def test_does_not_fire(name: str) -> None:
    for make in ALL[name].never:
        b = Build()
        e = make(b)
        assert alone(b, name, e) is e, str(e)


def test_contradicting_masks_do_not_confuse() -> None:
    """A branch that is never taken has no facts worth having, and none that break anything."""
    b = Build()
    x = b.var("x", "int8")
    never = b.op("lt", x, -128)
    for mask in (b.op("and", b.op("gt", x, 5), b.op("lt", x, 3)), never, b.op("and", b.op("eq", x, 5), b.op("eq", x, 6))):
        e = b.where(mask, b.op("rem", x, 3), x)
        out = b.rewritten(e)
        assert same_bits(evaluate(out, {"x": EVERY_INT8}), evaluate(e, {"x": EVERY_INT8}))


def test_context_facts_are_sound_for_every_int8() -> None:
    """Where a mask holds, each fact its context claims contains the value."""
    for c in (-128, -1, 0, 1, 5, 127):
        for cmp, f in itertools.product(("lt", "le", "gt", "ge", "eq", "ne"), ("self", "sign", "wide")):
            b = Build()
            x = b.var("x", "int8")
            v = {"self": x, "sign": b.op("sign", x), "wide": b.to("int16", x)}[f]
            mask = b.op(cmp, v, c)
            held = evaluate(mask, {"x": EVERY_INT8})
            facts = Facts({})
            for truth, e in itertools.product((True, False), (x, v, b.mod(x, 10), b.op("abs", x))):
                fact = facts.assuming(mask, truth, e).of(e)
                values = np.broadcast_to(evaluate(e, {"x": EVERY_INT8}), held.shape)[held == truth]
                assert all(fact.contains(int(k)) for k in values), (str(mask), truth, str(e), fact)


# ---- what other stages do --------------------------------------------------------------------------------------


def compiled(fn: Callable[..., Any], *args: Any, disable: tuple[str, ...] = ()) -> pipeline.Compiled:
    traced = trace.trace(fn, args, tuple(f"a{k}" for k in range(len(args))))
    return pipeline.compile_jaxpr(traced, recom_jax.Options(disable=disable, verify=True))


def printed(c: pipeline.Compiled, monkeypatch: pytest.MonkeyPatch) -> str:
    """The simplified form with variables numbered as they appear."""
    names: dict[int, int] = {}
    monkeypatch.setattr(ir, "name_of", lambda v: f"%{names.setdefault(id(v), len(names))}")
    return str(c.simplified)


def ops(c: pipeline.Compiled) -> list[str]:
    """Every instruction of the first call's classes, in order, bodies included."""
    return [line.split()[0] for k in c.calls[0][1].program.classes for line in str(k).splitlines()[1:]]


def unique_ids(t: Any, i: Any) -> Any:
    u, inverse = jnp.unique(i, return_inverse=True, size=7)
    return t[u][inverse]


DETECTED = [
    ("one-hot-to-lookup", lambda t, i: jax.nn.one_hot(i, 100) @ t, "%0[%1(0;1,0); fill 0.0, one_hot](0;0,1)", None),
    ("cast-after-gather", lambda t, i: t.astype(jnp.bfloat16)[i & 63],
     "convert<bfloat16>(%0[and(%1(0;1,0), 63); clip](0;0,1))", None),
    ("uniform-bucketize", lambda t, i: t[jnp.digitize(i.astype(jnp.float32), np.arange(0, 50, 5, dtype=np.float32))],
     "%0[search.uniform.right(convert<float32>(%1(0;1,0)), 0.0+k*5.0, n=10); clip](0;0,1)",
     "%0[search.sorted.right(convert<float32>(%2(0;1,0)), %1, n=10); clip](0;0,1)"),
    ("merge-searches", lambda t, i: t[jnp.digitize(i.astype(jnp.float32), np.array([1, 2, 4, 9.5], np.float32))],
     "%0[search.sorted.right(convert<float32>(%2(0;1,0)), %1, n=4); clip](0;0,1)",
     "%0[search.scan.right(convert<float32>(%2(0;1,0)), %1, n=4); clip](0;0,1)"),
    ("unique-inverse", unique_ids, "%0[select(lt(%1(0;1,0), 0), %1(0;1,0), add(%1(0;1,0), 100)); clip](0;0,1)", None),
]


def test_every_detection_rewrite_is_here() -> None:
    assert {name for name, *_ in DETECTED} == set(DETECTION_REWRITES)


@pytest.mark.parametrize(("name", "fn", "on", "off"), DETECTED, ids=[name for name, *_ in DETECTED])
def test_detection_rewrite(name: str, fn: Any, on: str, off: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed form and numbers with and without; without it the column stays in XLA or keeps the general form."""
    args = (T, ids((7,), 100, odd=True))
    bound = Bag(100) if name == "one-hot-to-lookup" else None
    assert printed(compiled(fn, *args), monkeypatch) == on
    report = check(fn, *args, bound=bound)
    assert name in report.columns[0].rewrites
    if off is not None:
        assert printed(compiled(fn, *args, disable=(name,)), monkeypatch) == off
    check(fn, *args, bound=bound, options=recom_jax.Options(disable=(name,), verify=True), calls=None,
          fused=None if off is not None or name == "unique-inverse" else 0, leaves_gather=name == "unique-inverse", leaves_while=True)


@given(bounds=st.lists(st.integers(-6, 6), min_size=1, max_size=7), step=st.sampled_from([1.0, 0.1, 0.25, 1e-7]),
       right=st.booleans(), method=st.sampled_from(["scan", "compare_all", "sort"]))
def test_property_searches(bounds: list[int], step: float, right: bool, method: str) -> None:
    """Any constant boundaries (sorted or not, repeated, uniform or nearly so), any method, odd queries."""
    edges = np.array(bounds, np.float32) * np.float32(step)
    x = np.concatenate([ODD_FLOATS, edges, np.nextafter(edges, np.inf), np.nextafter(edges, -np.inf)]).astype(np.float32)

    def fn(t: Any, x: Any) -> Any:
        return t[jnp.searchsorted(edges, x, side="right" if right else "left", method=method)]

    check(fn, table(len(bounds) + 1, 3), jnp.asarray(x), fused=None if method != "sort" else int(
        (np.diff(edges) >= 0).all()), calls=None, leaves_while=True, leaves_gather=True)


@given(rows=st.integers(1, 6), values=st.lists(st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -2.0]), min_size=12, max_size=12),
       keys=st.lists(st.integers(-2, 7), min_size=1, max_size=5))
def test_property_one_hot(rows: int, values: list[float], keys: list[int]) -> None:
    """NaN and infinity anywhere in the table are seen, as in the product."""
    t = jnp.asarray(np.array(values, np.float32).reshape(6, 2)[:rows])
    check(lambda t, i: jax.nn.one_hot(i, rows, dtype=jnp.float32) @ t, t, jnp.asarray(keys, jnp.int32), bound=Bag(rows))


@given(dtype=st.sampled_from(["bfloat16", "float16", "int8", "float32"]), keys=st.lists(st.integers(-3, 120), min_size=1, max_size=6))
def test_property_cast_after_gather(dtype: str, keys: list[int]) -> None:
    t = jnp.asarray(np.where(np.abs(T) > 100, np.nan, T))
    check(lambda t, i: t.astype(dtype)[i], t, jnp.asarray(keys, jnp.int32))


def test_detection_rewrites_do_not_fire(monkeypatch: pytest.MonkeyPatch) -> None:
    i = ids((7,), 100, odd=True)
    x = i.astype(jnp.float32)
    # 0.1 * k is no exact grid; unsorted and NaN boundaries keep their probe sequence.
    for edges, mode in ((np.float32(0.1) * np.arange(9, dtype=np.float32), "sorted"), (np.array([3, 1, 2], np.float32), "scan"),
                        (np.array([1, np.nan, 2], np.float32), "scan")):
        text = printed(compiled(lambda t, x, e=edges: t[jnp.searchsorted(e, x)], T, x), monkeypatch)
        assert f"search.{mode}" in text
    text = printed(compiled(lambda t, i: t[i], T, i), monkeypatch)
    assert "convert" not in text


def test_views_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reshapes, transposes, broadcasts and slices of ids leave nothing but strides."""
    def fn(t: Any, x: Any) -> Any:
        y = jnp.transpose(x[:, ::-1].reshape(6, 5, 1), (1, 0, 2))[1:4]
        return t[jnp.broadcast_to(y, (3, 6, 2)).reshape(3, 6, 2) & 63]

    c = compiled(fn, T, odd_ids())
    assert printed(c, monkeypatch).count("%1(") == 1
    assert "select" not in printed(c, monkeypatch)
    assert ops(c).count("load") == 1
    check(fn, T, odd_ids())


def mean_bag(t: Any, x: Any) -> Any:
    m = x >= 0
    rows = jnp.where(m[..., None], jnp.take(t, jnp.where(m, x % 100, 0), axis=0), 0.0)
    return rows.sum(1) / jnp.maximum(m.sum(1, keepdims=True), 1)


def test_count_of_a_mean_comes_from_the_same_pass() -> None:
    c = compiled(mean_bag, T, odd_ids())
    assert ops(c).count("region") == 1
    assert ops(c).count("pool") == 1
    assert ops(c).count("acc") == 1
    check(mean_bag, T, odd_ids(), bound=Bag(5))


def test_a_masked_bag_is_index_predicate_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wrap, no clamp, no select, no fill is left of a masked bag with hashed ids."""
    for fn in (mean_bag,
               lambda t, x: masked(t, jnp.where(x >= 0, x, 0) % 100, x >= 0),
               lambda t, x: masked(t, jnp.where(x < 0, 0, x % 100), ~(x < 0)),
               lambda t, x: jnp.where((x < 0)[..., None], 0, jnp.take(t, jnp.where(x < 0, 0, x) % 100, axis=0)).sum(1)):
        c = compiled(fn, T, odd_ids())
        got = ops(c)
        region = got[got.index("region") + 1:got.index("pool") + 1]
        assert [k for k in region if k not in ("load", "const")] == ["binary", "index", "binary", "predicate", "pool"], got
        assert "fill" not in printed(c, monkeypatch)
        check(fn, T, odd_ids(), bound=Bag(5))


def test_mod_keeps_within_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """x % rows needs neither wrap nor fill, whatever the sign of x; x % (rows + 1) needs both."""
    c = compiled(lambda t, x: jnp.take(t, x % 100, axis=0), T, odd_ids())
    assert printed(c, monkeypatch) == ("%0[select(lt(rem(%1(0;5,1,0), 100), 0), rem(%1(0;5,1,0), 100), "
                                       "add(rem(%1(0;5,1,0), 100), 100)); clip](0;0,0,1)").replace("(0;5,1,0)", "(0;in_1,1,0)")
    c = compiled(lambda t, x: jnp.take(t, x % 101, axis=0), T, odd_ids())
    assert "fill nan" in printed(c, monkeypatch)


def test_ids_are_computed_once_across_columns() -> None:
    """Five tables read with the same hashed id: one column of code, one multiplication."""
    def fn(ts: Any, x: Any) -> Any:
        i = ((x.astype(jnp.uint32) * jnp.uint32(2654435769)) >> 16) % 100
        return jnp.concatenate([t[i] for t in ts], axis=-1)

    c = compiled(fn, [table(100, 8, seed=k) for k in range(5)], ids((9,), 1000))
    assert len(c.calls[0][1].program.columns) == 1
    got = [line for k in c.calls[0][1].program.classes for line in str(k).splitlines()]
    assert sum(" mul " in line for line in got) == 1
    assert sum(" index " in line for line in got) == 1
    assert sum(" take " in line for line in got) == 5
    check(fn, [table(100, 8, seed=k) for k in range(5)], ids((9,), 1000), columns=5)


def test_equal_chains_written_twice_are_one() -> None:
    def fn(t: Any, u: Any, x: Any) -> Any:
        return jnp.concatenate([t[(x * 7) % 100], u[(x * 7) % 100]], axis=-1)

    c = compiled(fn, T, table(100, 4), odd_ids()[:, 0])
    assert len(c.calls[0][1].program.columns) == 1
    assert ops(c).count("index") == 1
    check(fn, T, table(100, 4), odd_ids()[:, 0], columns=2)


def test_a_deep_sum_of_lookups() -> None:
    """A sum of hundreds of lookups is cut into several calls, not refused and not too deep for Python."""
    def fn(ts: Any, x: Any) -> Any:
        total = jnp.zeros((4, 1))
        for k in range(250):
            total = total + ts[k % 3][x + k % 7]
        return total

    check(fn, [table(20, 1, seed=k) for k in range(3)], ids((4,), 20), calls=None, bound=Bag(250, magnitude=np.float32(2000)))


@pytest.mark.parametrize("rows", [1, 2])
def test_small_tables(rows: int) -> None:
    """Clip and fill keep what XLA makes of them (JAX refuses to read a table without rows)."""
    t = table(rows, 3)
    for mode in ("fill", "clip"):
        check(lambda t, x, mode=mode: jnp.take(t, jnp.clip(x & 3, 0, max(rows - 1, 0)), axis=0, mode=mode), t, odd_ids(), calls=None,
              fused=None)
