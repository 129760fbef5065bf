"""Expressions of the IR for tests: short names to build them, and their values under XLA's semantics by numpy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from recom_jax import ir
from recom_jax.detect_values import Output, Val
from recom_jax.simplify import NAMES, simplify


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
        return self.pool.op(
            name, "bool" if name in ("eq", "ne", "lt", "le", "gt", "ge") else dtype, *made
        )

    def where(self, pred: ir.Expr, on_true: Any, on_false: Any) -> ir.Expr:
        dtype = next(a.dtype for a in (on_true, on_false) if isinstance(a, ir.Expr))
        t, f = (a if isinstance(a, ir.Expr) else self.c(a, dtype) for a in (on_true, on_false))
        return self.pool.op("select", dtype, pred, f, t)

    def to(self, dtype: str, e: ir.Expr) -> ir.Expr:
        return self.pool.op("convert", dtype, e)

    def take(
        self,
        idx: ir.Expr,
        rows: int = 10,
        mode: str = "clip",
        dtype: str = "float32",
        one_hot: bool = False,
    ) -> ir.Expr:
        fill = float("nan") if mode == "fill" else 0
        return self.pool.take(
            "t",
            dtype,
            idx=idx,
            rows=rows,
            row_stride=8,
            base=0,
            cols=(0, 1),
            row_shift=(0, 0),
            mode=mode,
            fill=fill,
            one_hot=one_hot,
        )

    def wrap(self, i: ir.Expr, rows: int) -> ir.Expr:
        return self.where(self.op("lt", i, 0), self.op("add", i, rows), i)

    def mod(self, x: ir.Expr, c: int) -> ir.Expr:
        r = self.op("rem", x, c)
        return self.where(self.op("lt", r, 0), self.op("add", r, c), r)

    def floor_div(self, x: ir.Expr, c: int) -> ir.Expr:
        q = self.op("div", x, c)
        uneven = self.op(
            "and", self.op("ne", self.op("sign", x), 1), self.op("ne", self.op("rem", x, c), 0)
        )
        return self.where(uneven, self.op("sub", q, 1), q)

    def rewritten(
        self,
        e: ir.Expr,
        only: str | None = None,
        without: str | None = None,
        constants: dict[int, Any] | None = None,
    ) -> ir.Expr:
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
        rows = env["t"][: e.rows, 0]
        idx = np.asarray(_evaluate(e.idx, env, memo)).astype(
            object if e.idx.dtype == "uint64" else np.int64
        )
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
        return getattr(
            np,
            {
                "eq": "equal",
                "ne": "not_equal",
                "lt": "less",
                "le": "less_equal",
                "gt": "greater",
                "ge": "greater_equal",
            }[e.name],
        )(*args)
    if e.name in ("and", "or", "xor", "not"):
        return getattr(
            np,
            {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "invert"}[
                e.name
            ],
        )(*args)
    if ir.is_float(of):
        return {
            "add": np.add,
            "mul": np.multiply,
            "div": np.divide,
            "max": np.maximum,
            "min": np.minimum,
        }[e.name](*args).astype(e.dtype)
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
        "add": x + y,
        "sub": x - y,
        "mul": x * y,
        "max": np.maximum(x, y),
        "min": np.minimum(x, y),
        "neg": -x,
        "abs": np.abs(x),
        "sign": np.sign(x),
        "div": np.where(y == 0, -1, q),
        "rem": np.where(y == 0, x, r),
        "shl": np.where(out_of, 0, x << s),
        "shr_l": np.where(out_of, 0, (x & mask) >> s),
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
ODD_FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 3.0, np.nan, np.inf, -np.inf, 1e-3, 16777217.0, 65504.0],
    np.float32,
)
TABLE = np.concatenate([ODD_FLOATS, np.arange(20, dtype=np.float32)])[:, None]


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
    return np.where(
        r.random(n) < 0.5, near.astype(dtype), np.where(r.random(n) < 0.5, anything, ends)
    )


def free_variables(e: ir.Expr) -> dict[str, str]:
    return {str(x.var): x.dtype for x in ir.walk(e) if isinstance(x, ir.Load)}
