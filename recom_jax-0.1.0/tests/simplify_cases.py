"""What each rewrite of stage 4 does and does not do: the tables behind test_simplify.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from recom_jax import ir
from tests.expressions import Build
from tests.helpers import ids, table

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
        before=(
            (
                lambda b: b.op("add", b.var("x"), b.op("mul", b.c(3), 4)),
                "add(%x(0;1,0), mul(3, 4))",
                "add(%x(0;1,0), 12)",
            ),
            (
                lambda b: b.op("lt", b.op("and", b.var("x"), 7), 8),
                "lt(and(%x(0;1,0), 7), 8)",
                "True",
            ),
            (lambda b: b.to("bfloat16", b.c(3)), "convert<bfloat16>(3)", "3.0"),
        ),
        never=(
            lambda b: b.op("lt", b.op("and", b.var("x"), 7), 7),
            lambda b: b.to("bfloat16", b.c(257)),  # not a bfloat16
            lambda b: b.op("add", b.c(1.5, "float32"), b.c(1.5, "float32")),
        ),  # XLA's business
        model=lambda t, x: t[(x & 63) + (3 * 12)],
        args=lambda: (T, odd_ids()),
    ),
    "drop-negative-wrap": Case(
        before=(
            (
                lambda b: b.wrap(b.op("and", b.var("x"), 7), 10),
                "select(lt(and(%x(0;1,0), 7), 0), and(%x(0;1,0), 7), add(and(%x(0;1,0), 7), 10))",
                "and(%x(0;1,0), 7)",
            ),
        ),
        never=(
            lambda b: b.wrap(b.var("x"), 10),
            lambda b: b.wrap(b.op("rem", b.var("x"), 10), 10),
            lambda b: b.wrap(b.op("abs", b.var("x")), 10),
        ),  # the least integer stays negative
        model=lambda t, x: t[x & 63],
        args=lambda: (T, odd_ids()),
    ),
    "select-of-constant": Case(
        before=(
            (
                lambda b: b.where(b.c(True, "bool"), b.var("x"), b.var("y")),
                "select(True, %y(0;1,0), %x(0;1,0))",
                "%x(0;1,0)",
            ),
            (
                lambda b: b.where(b.var("m", "bool"), b.var("x"), b.var("x")),
                "select(%m(0;1,0), %x(0;1,0), %x(0;1,0))",
                "%x(0;1,0)",
            ),
        ),
        never=(lambda b: b.where(b.var("m", "bool"), b.var("x"), b.var("y")),),
        model=lambda t, x: t[jnp.where(x > 3, jnp.where((x & 3) < 4, x & 63, 7), x & 63)],
        args=lambda: (T, odd_ids()),
    ),
    "identity-arithmetic": Case(
        before=(
            (
                lambda b: b.op("mul", b.op("add", b.var("x"), 0), 1),
                "mul(add(%x(0;1,0), 0), 1)",
                "%x(0;1,0)",
            ),
            (lambda b: b.op("and", b.var("x"), -1), "and(%x(0;1,0), -1)", "%x(0;1,0)"),
            (lambda b: b.op("and", b.var("x", "uint8"), 255), "and(%x(0;1,0), 255)", "%x(0;1,0)"),
            (lambda b: b.op("ne", b.var("m", "bool"), False), "ne(%m(0;1,0), False)", "%m(0;1,0)"),
            (
                lambda b: b.op("eq", b.var("m", "bool"), False),
                "eq(%m(0;1,0), False)",
                "not(%m(0;1,0))",
            ),
            (
                lambda b: b.op("not", b.op("not", b.var("m", "bool"))),
                "not(not(%m(0;1,0)))",
                "%m(0;1,0)",
            ),
            (
                lambda b: b.op("not", b.op("le", b.var("x"), 3)),
                "not(le(%x(0;1,0), 3))",
                "gt(%x(0;1,0), 3)",
            ),
        ),
        never=(
            lambda b: b.op("add", b.var("x", "float32"), 0.0),  # -0.0 + 0.0 is 0.0
            lambda b: b.op("not", b.op("lt", b.var("f", "float32"), 0.0)),
            lambda b: b.op("not", b.var("x")),
            lambda b: b.op("sub", b.c(0), b.var("x")),
            lambda b: b.op("div", b.c(1), b.var("x")),
            lambda b: b.op("shl", b.c(0), b.var("x")),
            lambda b: b.op("and", b.var("x", "uint8"), 127),
        ),
        model=lambda t, x: t[(x + 0) * 1],
        args=lambda: (T, odd_ids()),
    ),
    "unit-weight": Case(
        before=(
            (
                lambda b: b.op("mul", b.take(b.var("x")), 1.0),
                "mul(%t[%x(0;1,0); clip](0;0,1), 1.0)",
                "%t[%x(0;1,0); clip](0;0,1)",
            ),
            (
                lambda b: b.op("div", b.take(b.var("x")), 1.0),
                "div(%t[%x(0;1,0); clip](0;0,1), 1.0)",
                "%t[%x(0;1,0); clip](0;0,1)",
            ),
        ),
        never=(
            lambda b: b.op("mul", b.take(b.var("x")), -1.0),
            lambda b: b.op("mul", b.take(b.var("x")), b.var("w", "float32")),
            lambda b: b.op("div", b.c(1.0, "float32"), b.var("w", "float32")),
        ),
        model=lambda t, x: (t[x] * np.ones((6, 5, 1), np.float32)).sum(1),
        args=lambda: (T, odd_ids()),
        pooled=5,
    ),
    "implied-predicate": Case(
        before=(
            (
                lambda b: b.op("and", b.op("lt", b.var("x"), 0), b.op("ne", b.var("x"), 0)),
                "and(lt(%x(0;1,0), 0), ne(%x(0;1,0), 0))",
                "lt(%x(0;1,0), 0)",
            ),
            (
                lambda b: b.op("and", b.op("gt", b.var("x"), 5), b.op("lt", b.var("x"), 3)),
                "and(gt(%x(0;1,0), 5), lt(%x(0;1,0), 3))",
                "False",
            ),
            (
                lambda b: b.op("or", b.op("ge", b.var("x"), 5), b.op("lt", b.var("x"), 7)),
                "or(ge(%x(0;1,0), 5), lt(%x(0;1,0), 7))",
                "True",
            ),
            (
                lambda b: b.op("or", b.op("ge", b.var("x"), 5), b.op("ge", b.var("x"), 7)),
                "or(ge(%x(0;1,0), 5), ge(%x(0;1,0), 7))",
                "ge(%x(0;1,0), 5)",
            ),
        ),
        never=(
            lambda b: b.op("and", b.op("ge", b.var("x"), 0), b.op("ne", b.var("x"), 0)),
            lambda b: b.op(
                "and",
                b.op("lt", b.var("f", "float32"), 0.0),
                b.op("ne", b.var("f", "float32"), 0.0),
            ),
            lambda b: b.op("and", b.op("lt", b.var("x"), 0), b.op("ne", b.var("y"), 0)),
        ),
        model=lambda t, x: t[x % 100],
        args=lambda: (T, odd_ids()),
    ),
    "drop-clamp": Case(
        before=(
            (
                lambda b: b.op("max", b.op("min", b.op("and", b.var("x"), 7), 9), 0),
                "max(min(and(%x(0;1,0), 7), 9), 0)",
                "and(%x(0;1,0), 7)",
            ),
            (
                lambda b: b.op("max", b.to("float32", b.op("and", b.var("x"), 7)), -1.0),
                "max(convert<float32>(and(%x(0;1,0), 7)), -1.0)",
                "convert<float32>(and(%x(0;1,0), 7))",
            ),
        ),
        never=(
            lambda b: b.op("max", b.op("and", b.var("x"), 7), 1),
            lambda b: b.op("min", b.op("and", b.var("x"), 7), 6),
            lambda b: b.op(
                "max", b.to("float32", b.op("and", b.var("x"), 7)), 0.0
            ),  # which zero it is
            lambda b: b.op("max", b.var("f", "float32"), float("nan")),
            lambda b: b.op("max", b.op("abs", b.var("x")), 0),
        ),
        model=lambda t, x: jnp.take(t, jnp.clip(x & 63, 0, 120), axis=0),
        args=lambda: (T, odd_ids()),
    ),
    "mod-power-of-two": Case(
        before=(
            (
                lambda b: b.mod(b.var("x"), 8),
                "select(lt(rem(%x(0;1,0), 8), 0), rem(%x(0;1,0), 8), add(rem(%x(0;1,0), 8), 8))",
                "and(%x(0;1,0), 7)",
            ),
        ),
        never=(
            lambda b: b.mod(b.var("x"), 12),
            lambda b: b.mod(b.var("x"), 1),
            lambda b: b.mod(b.var("x"), -8),
            lambda b: b.where(
                b.op("lt", b.op("rem", b.var("x"), 8), 0),
                b.op("add", b.op("rem", b.var("x"), 8), 16),
                b.op("rem", b.var("x"), 8),
            ),
        ),
        model=lambda t, x: t[x % 64],
        args=lambda: (T64, odd_ids()),
    ),
    "rem-power-of-two": Case(
        before=(
            (
                lambda b: b.op("rem", b.var("x", "uint8"), 64),
                "rem(%x(0;1,0), 64)",
                "and(%x(0;1,0), 63)",
            ),
            (
                lambda b: b.op("rem", b.op("max", b.var("x"), 0), 64),
                "rem(max(%x(0;1,0), 0), 64)",
                "and(max(%x(0;1,0), 0), 63)",
            ),
        ),
        never=(
            lambda b: b.op("rem", b.var("x"), 64),
            lambda b: b.op("rem", b.var("x", "uint8"), 63),
            lambda b: b.op("rem", b.var("x", "uint8"), 0),
            lambda b: b.op("rem", b.c(64), b.var("x")),
        ),
        model=lambda t, x: t[x.astype(jnp.uint32) % 64],
        args=lambda: (T64, odd_ids()),
    ),
    "div-power-of-two": Case(
        before=(
            (
                lambda b: b.op("div", b.var("x", "uint8"), 16),
                "div(%x(0;1,0), 16)",
                "shr_l(%x(0;1,0), 4)",
            ),
        ),
        never=(
            lambda b: b.op("div", b.var("x"), 16),
            lambda b: b.op("div", b.var("x", "uint8"), 12),
            lambda b: b.op("div", b.var("f", "float32"), 16.0),
            lambda b: b.op("div", b.c(16), b.var("x")),
        ),
        model=lambda t, x: t[x.astype(jnp.uint8) // 4],
        args=lambda: (T64, odd_ids()),
    ),
    "floor-div-power-of-two": Case(
        before=(
            (
                lambda b: b.floor_div(b.var("x"), 8),
                "select(and(ne(sign(%x(0;1,0)), 1), ne(rem(%x(0;1,0), 8), 0)), div(%x(0;1,0), 8), "
                "sub(div(%x(0;1,0), 8), 1))",
                "shr_a(%x(0;1,0), 3)",
            ),
        ),
        never=(
            lambda b: b.floor_div(b.var("x"), 10),
            lambda b: b.floor_div(b.var("x"), -8),
            lambda b: b.floor_div(b.var("x", "uint8"), 8),
        ),
        model=lambda t, x: t[x // 4],
        args=lambda: (T, odd_ids()),
    ),
    "merge-masks": Case(
        before=(
            (
                lambda b: b.where(
                    b.var("m", "bool"), b.where(b.var("n", "bool"), b.var("x"), 0), 0
                ),
                "select(%m(0;1,0), 0, select(%n(0;1,0), 0, %x(0;1,0)))",
                "select(and(%m(0;1,0), %n(0;1,0)), 0, %x(0;1,0))",
            ),
            (
                lambda b: b.where(
                    b.var("m", "bool"), 0, b.where(b.var("n", "bool"), 0, b.var("x"))
                ),
                "select(%m(0;1,0), select(%n(0;1,0), %x(0;1,0), 0), 0)",
                "select(or(%m(0;1,0), %n(0;1,0)), %x(0;1,0), 0)",
            ),
        ),
        never=(
            lambda b: b.where(b.var("m", "bool"), b.where(b.var("n", "bool"), b.var("x"), 0), 1),
            lambda b: b.where(
                b.var("m", "bool"), b.where(b.var("n", "bool"), b.var("f", "float32"), 0.0), -0.0
            ),
            lambda b: b.where(
                b.var("m", "bool"), b.where(b.var("n", "bool"), b.var("x"), b.var("y")), b.var("y")
            ),
        ),
        model=lambda t, x: masked(t, x, x >= 0, jnp.where((x < 50)[..., None], t[x], 0)),
        args=lambda: (T, odd_ids()),
        pooled=5,
    ),
    "mask-first": Case(
        before=(
            (
                lambda b: b.where(b.op("eq", b.var("x"), 3), 0.0, b.take(b.var("x"))),
                "select(eq(%x(0;1,0), 3), %t[%x(0;1,0); clip](0;0,1), 0.0)",
                "select(ne(%x(0;1,0), 3), 0.0, %t[%x(0;1,0); clip](0;0,1))",
            ),
            (
                lambda b: b.where(b.op("not", b.var("m", "bool")), 0.0, b.take(b.var("x"))),
                "select(not(%m(0;1,0)), %t[%x(0;1,0); clip](0;0,1), 0.0)",
                "select(%m(0;1,0), 0.0, %t[%x(0;1,0); clip](0;0,1))",
            ),
            (
                lambda b: b.where(
                    b.op("lt", b.var("f", "float32"), 3.0), 0.0, b.take(b.var("x"))
                ),  # NaN stays on its side
                "select(lt(%f(0;1,0), 3.0), %t[%x(0;1,0); clip](0;0,1), 0.0)",
                "select(not(lt(%f(0;1,0), 3.0)), 0.0, %t[%x(0;1,0); clip](0;0,1))",
            ),
        ),
        never=(
            lambda b: b.where(b.op("eq", b.var("x"), 3), 0, b.var("x")),
            lambda b: b.where(b.op("eq", b.var("x"), 3), b.take(b.var("x")), 0.0),
        ),
        model=lambda t, x: jnp.where((x == 0)[..., None], 0, t[x]).sum(1),
        args=lambda: (T, odd_ids()),
        pooled=5,
    ),
    "weight-under-mask": Case(
        before=(
            (
                lambda b: b.op(
                    "mul",
                    b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0),
                    b.to("float32", b.var("n", "bool")),
                ),
                "mul(select(%m(0;1,0), 0.0, %t[%x(0;1,0); clip](0;0,1)), convert<float32>(%n(0;1,0)))",
                "select(%m(0;1,0), 0.0, mul(%t[%x(0;1,0); clip](0;0,1), convert<float32>(%n(0;1,0))))",
            ),
        ),
        never=(
            lambda b: b.op(
                "mul", b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0), b.var("w", "float32")
            ),
            lambda b: b.op(
                "mul",
                b.where(b.var("m", "bool"), b.take(b.var("x")), -0.0),
                b.to("float32", b.var("n", "bool")),
            ),
            lambda b: b.op("mul", b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0), -2.0),
            lambda b: b.op(
                "mul", b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0), float("inf")
            ),
            lambda b: b.op(
                "mul",
                b.where(b.var("m", "bool"), b.take(b.var("x")), 0.0),
                b.to("float32", b.var("x")),
            ),
        ),
        model=lambda t, x: (jnp.where((x > 0)[..., None], t[x], 0) * (x > 0)[..., None]).sum(1),
        args=lambda: (T, odd_ids()),
        pooled=5,
    ),
    "convert-under-mask": Case(
        before=(
            (
                lambda b: b.to(
                    "float32",
                    b.where(b.var("m", "bool"), b.take(b.var("x"), dtype="bfloat16"), 0.0),
                ),
                "convert<float32>(select(%m(0;1,0), 0.0, %t[%x(0;1,0); clip](0;0,1)))",
                "select(%m(0;1,0), 0.0, convert<float32>(%t[%x(0;1,0); clip](0;0,1)))",
            ),
        ),
        never=(
            lambda b: b.to(
                "float32", b.where(b.var("m", "bool"), b.take(b.var("x"), dtype="bfloat16"), 1.0)
            ),
            lambda b: b.to(
                "float32", b.where(b.var("m", "bool"), b.take(b.var("x"), dtype="bfloat16"), -0.0)
            ),
            lambda b: b.to(
                "int32", b.where(b.var("m", "bool"), b.take(b.var("x"), dtype="float32"), 0.0)
            ),
        ),
        model=lambda t, x: masked(t.astype(jnp.bfloat16), x, x > 0).astype(jnp.float32),
        args=lambda: (T, odd_ids()),
        pooled=600,
    ),
    "compose-converts": Case(
        before=(
            (
                lambda b: b.to("int32", b.to("int64", b.var("x"))),
                "convert<int32>(convert<int64>(%x(0;1,0)))",
                "%x(0;1,0)",
            ),
            (
                lambda b: b.to("float32", b.to("int32", b.var("m", "bool"))),
                "convert<float32>(convert<int32>(%m(0;1,0)))",
                "convert<float32>(%m(0;1,0))",
            ),
        ),
        never=(
            lambda b: b.to("int32", b.to("int8", b.var("x"))),
            lambda b: b.to("int32", b.to("uint32", b.var("x"))),
            lambda b: b.to("int32", b.to("float32", b.var("x"))),
            lambda b: b.to("int8", b.to("uint8", b.var("x", "int8"))),
            lambda b: b.to("bool", b.to("int8", b.var("x"))),
        ),
        model=lambda t, x: t[x.astype(jnp.uint8).astype(jnp.int32).astype(jnp.uint16) + 1],
        args=lambda: (T, odd_ids()),
    ),
    "drop-fill": Case(
        before=(
            (
                lambda b: b.take(b.op("and", b.var("x"), 7), mode="fill"),
                "%t[and(%x(0;1,0), 7); fill nan](0;0,1)",
                "%t[and(%x(0;1,0), 7); clip](0;0,1)",
            ),
        ),
        never=(
            lambda b: b.take(b.op("and", b.var("x"), 15), mode="fill"),
            lambda b: b.take(b.var("x"), mode="fill"),
            lambda b: b.take(b.op("and", b.var("x"), 7), rows=0, mode="fill"),
            lambda b: b.take(b.op("and", b.var("x"), 7), mode="fill", one_hot=True),
        ),
        model=lambda t, x: jnp.take(t, x & 63, axis=0),
        args=lambda: (T, odd_ids()),
    ),
    "clamp-into-lookup": Case(
        before=(
            (
                lambda b: b.take(b.op("min", b.op("max", b.var("x"), 0), 9)),
                "%t[min(max(%x(0;1,0), 0), 9); clip](0;0,1)",
                "%t[%x(0;1,0); clip](0;0,1)",
            ),
            (
                lambda b: b.take(b.op("max", b.var("x"), -4)),
                "%t[max(%x(0;1,0), -4); clip](0;0,1)",
                "%t[%x(0;1,0); clip](0;0,1)",
            ),
        ),
        never=(
            lambda b: b.take(b.op("min", b.var("x"), 8)),
            lambda b: b.take(b.op("max", b.var("x"), 1)),
            lambda b: b.take(b.op("min", b.op("max", b.var("x"), 0), 9), mode="fill"),
            lambda b: b.take(b.op("min", b.var("x", "int8"), 100), rows=300),  # 299 is no int8
            lambda b: b.take(b.op("max", b.var("x"), 0), rows=0),
        ),
        model=lambda t, x: t[jnp.clip(x, 0, 99)],
        args=lambda: (T, odd_ids()),
    ),
    "index-as-is": Case(
        before=(
            (
                lambda b: b.take(b.to("int64", b.var("x"))),
                "%t[convert<int64>(%x(0;1,0)); clip](0;0,1)",
                "%t[%x(0;1,0); clip](0;0,1)",
            ),
            (
                lambda b: b.take(b.to("int8", b.op("and", b.var("x"), 127))),
                "%t[convert<int8>(and(%x(0;1,0), 127)); clip](0;0,1)",
                "%t[and(%x(0;1,0), 127); clip](0;0,1)",
            ),
        ),
        never=(
            lambda b: b.take(b.to("int8", b.var("x"))),
            lambda b: b.take(b.to("uint32", b.var("x"))),
            lambda b: b.take(b.to("int32", b.var("x", "uint32"))),
            lambda b: b.take(b.to("int8", b.op("and", b.var("x"), 128))),
            lambda b: b.take(b.to("int32", b.var("m", "bool"))),
            lambda b: b.take(b.to("int32", b.var("f", "float32"))),
        ),
        model=lambda t, x: jnp.take(t, (x & 63).astype(jnp.int8), axis=0, mode="clip"),
        args=lambda: (T, odd_ids()),
    ),
}

MASK = "ge(%x(0;1,0), 0)"
CONTEXT_CASES: dict[str, Case] = {
    "masked-lookup": Case(
        before=(
            (
                lambda b: b.where(
                    b.op("ge", b.var("x"), 0),
                    b.take(b.where(b.op("ge", b.var("x"), 0), b.var("x"), 3)),
                    0.0,
                ),
                f"select({MASK}, 0.0, %t[select({MASK}, 3, %x(0;1,0)); clip](0;0,1))",
                f"select({MASK}, 0.0, %t[%x(0;1,0); clip](0;0,1))",
            ),
            (
                lambda b: b.where(
                    b.var("m", "bool"),
                    b.take(
                        b.op("rem", b.where(b.var("m", "bool"), b.var("x"), 3), 10), mode="fill"
                    ),
                    0.0,
                ),
                "select(%m(0;1,0), 0.0, %t[rem(select(%m(0;1,0), 3, %x(0;1,0)), 10); fill nan](0;0,1))",
                "select(%m(0;1,0), 0.0, %t[rem(%x(0;1,0), 10); fill nan](0;0,1))",
            ),
            (
                lambda b: b.where(
                    b.var("m", "bool"), 0.0, b.take(b.where(b.var("m", "bool"), 3, b.var("x")))
                ),
                "select(%m(0;1,0), %t[select(%m(0;1,0), %x(0;1,0), 3); clip](0;0,1), 0.0)",
                "select(%m(0;1,0), %t[%x(0;1,0); clip](0;0,1), 0.0)",
            ),
        ),
        never=(
            lambda b: b.where(
                b.var("m", "bool"), b.take(b.where(b.var("n", "bool"), b.var("x"), 3)), 0.0
            ),
            lambda b: b.where(
                b.op("or", b.var("m", "bool"), b.var("n", "bool")),
                b.take(b.where(b.var("m", "bool"), b.var("x"), 3)),
                0.0,
            ),
            lambda b: b.op(
                "mul",
                b.take(b.where(b.var("m", "bool"), b.var("x"), 3)),
                b.to("float32", b.var("m", "bool")),
            ),
            # another index space: inside the bag the mask is no longer the one outside
            lambda b: b.where(
                b.var("m", "bool"),
                b.pool.reduce("sum", b.take(b.where(b.var("m", "bool"), b.var("x"), 3)), (2,), 0.0),
                0.0,
            ),
        ),
        model=lambda t, x: masked(t, jnp.where(x > 0, x, 0) % 37, x > 0),
        args=lambda: (T, odd_ids()),
        pooled=5,
    ),
    "facts-under-mask": Case(
        before=(
            (
                lambda b: b.where(b.op("ge", b.var("x"), 0), b.take(b.wrap(b.var("x"), 10)), 0.0),
                f"select({MASK}, 0.0, %t[select(lt(%x(0;1,0), 0), %x(0;1,0), add(%x(0;1,0), 10)); clip](0;0,1))",
                f"select({MASK}, 0.0, %t[%x(0;1,0); clip](0;0,1))",
            ),
        ),
        never=(
            lambda b: b.where(b.op("ge", b.var("x"), -2), b.take(b.wrap(b.var("x"), 10)), 0.0),
            lambda b: b.where(b.op("ge", b.var("y"), 0), b.take(b.wrap(b.var("x"), 10)), 0.0),
            lambda b: b.where(
                b.op("ge", b.var("x", "uint8"), 1),
                b.take(b.wrap(b.to("int8", b.var("x", "uint8")), 10)),
                0.0,
            ),
            lambda b: b.where(
                b.op("ge", b.var("f", "float32"), 0.0),
                b.op("max", b.var("f", "float32"), -1.0),
                0.0,
            ),
        ),
        model=lambda t, x: masked(t, x, x >= 0),
        args=lambda: (T, odd_ids()),
        pooled=5,
    ),
}
# What a context makes possible is done by rules: these stay on in the tests of contexts.
HELPERS = frozenset(("fold-constants", "select-of-constant", "drop-negative-wrap"))
ALL = {**CASES, **CONTEXT_CASES}
