"""Stage 4: every rewrite by its printed form, by numbers, by brute force or random input, and where it must not fire.

`simplify_cases.ALL` holds, for each name of `simplify.NAMES`: an expression and its form after that rewrite alone;
expressions it must leave alone; and a model that needs it. Expressions are evaluated by numpy (`expressions.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from recom_jax import ir
from recom_jax.detect_values import Output, Val
from recom_jax.simplify import CONTEXT_REWRITES, DETECTION_REWRITES, NAMES, simplify
from recom_jax.simplify.facts import Facts
from recom_jax.simplify.rules import RULES
from tests.expressions import (
    EVERY_INT8,
    PAIRS,
    TABLE,
    Build,
    evaluate,
    free_variables,
    inputs,
    same_bits,
)
from tests.helpers import Bag, check
from tests.simplify_cases import ALL, CASES, CONTEXT_CASES, HELPERS


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
    assert all(r.why for r in RULES.values())


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
    report = check(
        case.model, *args, bound=bound, options=recom_jax.Options(disable=(name,), verify=True)
    )
    assert all(name not in c.rewrites for c in report.columns)


# ---- 3: every int8, odd floats, random constants ---------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ALL))
@given(seed=st.integers(0, 1 << 30))
def test_property_same_values(name: str, seed: int) -> None:
    rng = random.Random(seed)
    for make in (*(m for m, _, _ in ALL[name].before), *ALL[name].never):
        b = Build()
        e = make(b)
        if any(
            isinstance(x, (ir.Reduce,))
            or (isinstance(x, ir.Take) and x.rows == 0)
            or x.dtype == "bfloat16"
            for x in ir.walk(e)
        ):
            continue
        env = {v: inputs(d, rng, 500) for v, d in free_variables(e).items()}
        want = evaluate(e, {**env, "t": TABLE})
        assert same_bits(evaluate(alone(b, name, e), {**env, "t": TABLE}), want), str(e)
        assert same_bits(evaluate(b.rewritten(e), {**env, "t": TABLE}), want), str(e)


def _masks(b: Build, x: ir.Expr, c: int) -> list[ir.Expr]:
    return [b.op(cmp, x, c) for cmp in ("lt", "le", "gt", "ge", "eq", "ne")]


INTEGER_SHAPES: dict[str, Callable[[Build, ir.Expr, ir.Expr, int], list[ir.Expr]]] = {
    "drop-negative-wrap": lambda b, x, y, c: [
        b.wrap(b.op("and", x, c), 10),
        b.wrap(b.op("max", x, c), 10),
        b.wrap(b.op("shr_a", x, c), 10),
    ],
    "fold-constants": lambda b, x, y, c: [
        b.op(o, b.op("and", x, 3), c) for o in ("lt", "add", "shl", "shr_l", "rem", "div")
    ],
    "select-of-constant": lambda b, x, y, c: [
        b.where(m, x, y) for m in _masks(b, b.op("and", x, 7), c)
    ],
    "identity-arithmetic": lambda b, x, y, c: [
        b.op(o, *args)
        for o in ("add", "sub", "mul", "div", "and", "or", "xor", "shl", "shr_l", "shr_a")
        for args in ((x, c), (b.c(c, "int8"), x))
    ],
    "implied-predicate": lambda b, x, y, c: [
        b.op(o, m, n) for o in ("and", "or") for m in _masks(b, x, c) for n in _masks(b, x, 3)
    ],
    "drop-clamp": lambda b, x, y, c: (
        [b.op(o, b.op("and", x, 15), c) for o in ("max", "min")]
        + [b.op("max", b.op("min", b.op("rem", x, 7), c), -7)]
    ),
    "mod-power-of-two": lambda b, x, y, c: [b.mod(x, c)],
    "rem-power-of-two": lambda b, x, y, c: [b.op("rem", x, c), b.op("rem", b.op("max", x, 0), c)],
    "div-power-of-two": lambda b, x, y, c: [b.op("div", x, c), b.op("div", b.op("max", x, 0), c)],
    "floor-div-power-of-two": lambda b, x, y, c: [
        b.floor_div(x, c),
        b.floor_div(b.op("max", x, 0), c),
    ],
    "merge-masks": lambda b, x, y, c: [
        b.where(b.op("lt", x, c), b.where(b.op("gt", y, c), x, c), c),
        b.where(b.op("lt", x, c), c, b.where(b.op("gt", y, c), c, x)),
    ],
    "compose-converts": lambda b, x, y, c: [
        b.to(d, b.to(e, v))
        for v in (x, b.op("and", x, c))
        for d in ("int8", "int32", "uint8")
        for e in ("int16", "uint8", "int8", "uint32")
    ],
    "drop-fill": lambda b, x, y, c: [
        b.take(b.op("and", x, c), mode="fill"),
        b.take(b.op("max", x, c), mode="fill"),
    ],
    "clamp-into-lookup": lambda b, x, y, c: [
        b.take(e, rows=r)
        for r in (1, 10)
        for e in (b.op("max", x, c), b.op("min", x, c), b.op("max", b.op("min", x, 9), c))
    ],
    "index-as-is": lambda b, x, y, c: [
        b.take(b.to(d, v)) for d in ("int32", "uint8", "uint32") for v in (x, b.op("and", x, c))
    ],
    "masked-lookup": lambda b, x, y, c: (
        [b.where(m, b.take(b.op("add", b.where(m, x, 3), y)), 0.0) for m in _masks(b, x, c)]
        + [b.where(b.op("and", m, b.op("gt", y, 0)), b.where(m, x, y), y) for m in _masks(b, x, c)]
    ),
    "facts-under-mask": lambda b, x, y, c: (
        [
            b.where(m, t, f)
            for o in ("sign", "neg")
            for m in _masks(b, b.op(o, x), c)
            for t, f in ((b.mod(x, 10), x), (x, b.floor_div(x, 7)))
        ]
        + [b.where(m, b.wrap(b.op("rem", x, 10), 10), 0) for m in _masks(b, x, c)]
    ),
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
        return b.op(
            name,
            random_expression(b, rng, min(depth, 1)),
            rng.choice((random_expression(b, rng, 0), rng.randrange(-3, 4))),
        )
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(
            (
                b.var("x", "int8"),
                b.var("y", "int8"),
                b.c(rng.choice((0, 1, -1, 2, 4, 8, 127, -128, 5)), "int8"),
            )
        )
    roll = rng.random()
    if roll < 0.4:
        return b.where(
            random_expression(b, rng, depth - 1, "bool"),
            random_expression(b, rng, depth - 1),
            random_expression(b, rng, depth - 1),
        )
    if roll < 0.5:
        return b.to(
            "int8",
            b.to(rng.choice(("int16", "uint8", "int32")), random_expression(b, rng, depth - 1)),
        )
    if roll < 0.6:
        return rng.choice((b.mod, b.floor_div))(
            random_expression(b, rng, depth - 1), rng.choice((2, 3, 8))
        )
    if roll < 0.7:
        return b.op(rng.choice(("sign", "abs", "neg")), random_expression(b, rng, depth - 1))
    name = rng.choice(
        (
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
        )
    )
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
            e = b.where(
                random_expression(b, rng, 2, "bool"),
                b.take(e, mode=rng.choice(("clip", "fill"))),
                0.0,
            )
        want = evaluate(e, env)
        for off in ((), (rng.choice(sorted(NAMES)),)):
            out = (
                simplify(b.pool, [Output(None, Val((4, 8), e), 0)], {}, frozenset(off))
                .outputs[0]
                .val.expr
            )
            assert out is not None
            assert same_bits(evaluate(out, env), want), (str(e), str(out))
            again = (
                simplify(b.pool, [Output(None, Val((4, 8), out), 0)], {}, frozenset(off))
                .outputs[0]
                .val.expr
            )
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
    for mask in (
        b.op("and", b.op("gt", x, 5), b.op("lt", x, 3)),
        never,
        b.op("and", b.op("eq", x, 5), b.op("eq", x, 6)),
    ):
        e = b.where(mask, b.op("rem", x, 3), x)
        out = b.rewritten(e)
        assert same_bits(evaluate(out, {"x": EVERY_INT8}), evaluate(e, {"x": EVERY_INT8}))


def test_context_facts_are_sound_for_every_int8() -> None:
    """Where a mask holds, each fact its context claims contains the value."""
    for c in (-128, -1, 0, 1, 5, 127):
        for cmp, f in itertools.product(
            ("lt", "le", "gt", "ge", "eq", "ne"), ("self", "sign", "wide")
        ):
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
