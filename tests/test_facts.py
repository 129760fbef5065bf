"""Every rule for value facts against brute force: whatever an operation yields, the fact must
contain."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from recom_jax.shape_solver.fact import dtype_of, round_down, round_to, round_up
from recom_jax.shape_solver.facts import RULES, Fact, apply
from recom_jax.shape_solver.proofs import MAX_GRID, sorted_ascending, uniform_grid

pytestmark = pytest.mark.once

Array = np.ndarray[Any, Any]

# --------------------------------------------------------------------------- integers, exhaustively


def wrap(t: Any, values: Array) -> Array:
    return ((values - int(t.lo)) & ((1 << t.bits) - 1)) + int(t.lo)


def trunc_div(t: Any, x: Array, y: Array) -> Array:
    safe = np.where(y == 0, 1, y)
    q = np.abs(x) // np.abs(safe)
    q = np.where((x < 0) == (safe < 0), q, -q)
    return wrap(t, np.where(y == 0, -1, q))


def trunc_rem(t: Any, x: Array, y: Array) -> Array:
    safe = np.where(y == 0, 1, y)
    r = np.abs(x) % np.abs(safe)
    return np.where(y == 0, x, np.where(x < 0, -r, r))


def amount(t: Any, y: Array) -> tuple[Array, Array]:
    outside = (y < 0) | (y >= t.bits)
    return outside, np.where(outside, 0, y)


def shl(t: Any, x: Array, y: Array) -> Array:
    outside, s = amount(t, y)
    return np.where(outside, 0, wrap(t, x << s))


def shr_l(t: Any, x: Array, y: Array) -> Array:
    outside, s = amount(t, y)
    return np.where(outside, 0, wrap(t, (x & ((1 << t.bits) - 1)) >> s))


def shr_a(t: Any, x: Array, y: Array) -> Array:
    outside, s = amount(t, y)
    signed = np.where(x >= 1 << (t.bits - 1), x - (1 << t.bits), x)
    return wrap(t, signed >> np.where(outside, t.bits - 1, s))


BINARY: dict[str, Callable[[Any, Array, Array], Array]] = {
    "add": lambda t, x, y: wrap(t, x + y),
    "sub": lambda t, x, y: wrap(t, x - y),
    "mul": lambda t, x, y: wrap(t, x * y),
    "div": trunc_div,
    "rem": trunc_rem,
    "max": lambda t, x, y: np.maximum(x, y),
    "min": lambda t, x, y: np.minimum(x, y),
    "and": lambda t, x, y: x & y,
    "or": lambda t, x, y: x | y,
    "xor": lambda t, x, y: x ^ y,
    "shl": shl,
    "shr_l": shr_l,
    "shr_a": shr_a,
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
UNARY: dict[str, Callable[[Any, Array], Array]] = {
    "neg": lambda t, x: wrap(t, -x),
    "abs": lambda t, x: wrap(t, np.abs(x)),
    "sign": lambda t, x: np.sign(x),
    "not": lambda t, x: wrap(t, ~x),
    "popcnt": lambda t, x: sum((x >> i) & 1 for i in range(t.bits)),
    "clz": lambda t, x: t.bits - np.ceil(np.log2((x & ((1 << t.bits) - 1)) + 1.0)).astype(np.int64),
}
LAX: dict[str, Callable[..., Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "shl": lax.shift_left,
    "shr_l": lax.shift_right_logical,
    "shr_a": lax.shift_right_arithmetic,
    "neg": lax.neg,
    "abs": lax.abs,
    "sign": lax.sign,
    "not": lax.bitwise_not,
    "popcnt": lax.population_count,
    "clz": lax.clz,
}


def axis(dtype: str) -> Array:
    t = dtype_of(dtype)
    return np.arange(int(t.lo), int(t.hi) + 1)


def intervals(dtype: str, count: int, seed: int) -> list[tuple[int, int]]:
    """Index pairs into ``axis(dtype)``: narrow, wide, at the edges and around zero."""
    rng = random.Random(seed)
    n = len(axis(dtype))
    zero = int(-dtype_of(dtype).lo)
    edges = [0, 1, zero - 1, zero, zero + 1, n // 2 - 1, n // 2, n - 2, n - 1]
    out = [(0, n - 1)]
    while len(out) < count:
        kind = rng.randrange(4)
        a = rng.choice(edges) if kind == 0 else rng.randrange(n)
        b = (
            rng.choice(edges)
            if kind == 1
            else a + rng.randrange(5)
            if kind == 2
            else rng.randrange(n)
        )
        a, b = min(a, b), max(a, b)
        if a >= 0 and b < n:
            out.append((a, b))
    return out


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_written_out_semantics_are_xlas(dtype: str) -> None:
    t, values = dtype_of(dtype), axis(dtype)
    x, y = np.meshgrid(values, values, indexing="ij")

    @jax.jit
    def run(a: Any, b: Any) -> dict[str, Any]:
        two = {op: LAX[op](a, b) for op in BINARY}
        return two | {op: LAX[op](a) for op in UNARY if op != "abs" or t.kind == "int"}

    got = run(jnp.asarray(x.astype(dtype)), jnp.asarray(y.astype(dtype)))
    for op, out in got.items():
        want = BINARY[op](t, x, y) if op in BINARY else UNARY[op](t, x)
        np.testing.assert_array_equal(np.asarray(out).astype(np.int64), want, err_msg=op)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("op", [*BINARY, *COMPARE])
def test_binary_integer_rules(op: str, dtype: str) -> None:
    t, values = dtype_of(dtype), axis(dtype)
    x, y = np.meshgrid(values, values, indexing="ij")
    out = "bool" if op in COMPARE else dtype
    table = COMPARE[op](x, y).astype(np.int64) if op in COMPARE else BINARY[op](t, x, y)
    count = 5000
    for (a, b), (c, d) in zip(intervals(dtype, count, 1), intervals(dtype, count, 2), strict=True):
        f = Fact(dtype, int(values[a]), int(values[b]), True, True)
        g = Fact(dtype, int(values[c]), int(values[d]), True, True)
        got = apply(op, out, f, g)
        part = table[a : b + 1, c : d + 1]
        assert got.dtype == out
        assert got.lo <= part.min(), (op, f, g, got)
        assert part.max() <= got.hi, (op, f, g, got)
        least = dtype_of(out)
        assert least.lo <= got.lo <= got.hi <= least.hi
        if a == b and c == d:
            assert got.lo == got.hi, f"{op} of constants is a constant: {f} {g} {got}"
        if op in ("max", "min", *COMPARE):  # nothing is lost
            assert (got.lo, got.hi) == (part.min(), part.max()), (op, f, g, got)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("op", UNARY)
def test_unary_integer_rules(op: str, dtype: str) -> None:
    t, values = dtype_of(dtype), axis(dtype)
    table = UNARY[op](t, values)
    for a in range(len(values)):
        for b in range(a, len(values), 1 if a % 16 == 0 else 7):
            got = apply(op, dtype, Fact(dtype, int(values[a]), int(values[b]), True, True))
            part = table[a : b + 1]
            assert got.lo <= part.min(), (op, values[a], values[b], got)
            assert part.max() <= got.hi, (op, values[a], values[b], got)


@pytest.mark.parametrize("op", ["and", "or", "xor", "max", "min", "mul", "add", "eq", "lt", "not"])
def test_bool_rules(op: str) -> None:
    facts = [Fact.const("bool", False), Fact.const("bool", True), Fact.top("bool")]
    for f in facts:
        if op == "not":
            got = apply(op, "bool", f)
            assert {got.contains(not v) for v in (0, 1) if f.contains(v)} == {True}
            continue
        for g in facts:
            got = apply(op, "bool", f, g)
            for x in (0, 1):
                for y in (0, 1):
                    if f.contains(x) and g.contains(y):
                        want = {"and": x & y, "mul": x & y, "min": x & y, "xor": x ^ y}.get(
                            op, x | y
                        )
                        want = int(x == y) if op == "eq" else int(x < y) if op == "lt" else want
                        assert got.contains(want), (op, f, g, got)


@pytest.mark.parametrize("source", ["int8", "uint8"])
@pytest.mark.parametrize(
    "target", ["int8", "uint8", "int16", "int4", "uint4", "bool", "float16", "bfloat16"]
)
def test_convert_between_integers(source: str, target: str) -> None:
    values, t = axis(source), dtype_of(target)
    table = values if t.kind == "float" else (values != 0) if target == "bool" else wrap(t, values)
    if target == "bfloat16":
        table = np.array([round_to(float(v), t) for v in values])
    for a, b in intervals(source, 1500, 3):
        got = apply("convert", target, Fact(source, int(values[a]), int(values[b]), True, True))
        part = table[a : b + 1]
        assert got.lo <= part.min() <= part.max() <= got.hi, (values[a], values[b], got)
        assert got.integral
        assert got.nan_free


# ----------------------------------------------------------------------- what precision is relied
# on


def ints(lo: int, hi: int, dtype: str = "int32") -> Fact:
    return Fact(dtype, lo, hi, True, True)


def test_clip_gives_the_clip_interval() -> None:
    x = Fact.top("int64")
    low = apply("max", "int64", x, Fact.const("int64", 0))
    assert apply("min", "int64", low, Fact.const("int64", 99)) == ints(0, 99, "int64")


def test_floor_mod_of_jax_numpy_is_in_range() -> None:
    """jnp.mod(x, 100): rem, then add the divisor where the signs differ."""
    x, n = Fact.top("int32"), Fact.const("int32", 100)
    r = apply("rem", "int32", x, n)
    assert r == ints(-99, 99)
    positive = apply(
        "select", "int32", Fact.top("bool"), ints(0, 99), apply("add", "int32", ints(-99, -1), n)
    )
    assert positive == ints(0, 99)


def test_mask_shift_and_unsigned_hash() -> None:
    top = Fact.top("uint32")
    assert apply("and", "int32", Fact.top("int32"), ints(1023, 1023)) == ints(0, 1023)
    assert apply("shr_l", "uint32", top, Fact.const("uint32", 20)) == ints(0, 4095, "uint32")
    hashed = apply(
        "xor", "uint32", apply("mul", "uint32", top, Fact.const("uint32", 2654435761)), top
    )
    assert apply("rem", "uint32", hashed, Fact.const("uint32", 1000)) == ints(0, 999, "uint32")
    assert apply("convert", "int32", ints(0, 999, "uint32")) == ints(0, 999)


def test_negative_index_fixup_disappears() -> None:
    """x < 0 ? x + n : x, for an x known to be in range."""
    x, n = ints(0, 9), Fact.const("int32", 10)
    pred = apply("lt", "bool", x, Fact.const("int32", 0))
    assert pred == Fact.const("bool", False)
    assert apply("select", "int32", pred, x, apply("add", "int32", x, n)) == x


def test_search_range_includes_both_ends() -> None:
    """RECom fault 4: the bucket of a value past the last of N boundaries is N."""
    assert apply("search", "int32", n=5) == ints(0, 5)
    boundaries = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    for x in (-1.0, 2.0, 9.0, math.inf):
        assert apply("search", "int32", n=5).contains(np.searchsorted(boundaries, x, side="right"))


def test_affine_and_iota() -> None:
    assert apply("iota", "int32", n=10) == ints(0, 9)
    assert apply("iota", "int8", n=1000) == Fact.top("int8")
    assert apply("affine", "int32", ints(0, 9), scale=-3, offset=5) == ints(-22, 5)
    assert apply("affine", "int8", ints(0, 9, "int8"), scale=100, offset=0) == Fact.top("int8")


def test_select_of_several_cases() -> None:
    cases = ints(0, 1), ints(5, 6), ints(9, 9)
    assert apply("select", "int32", ints(1, 2), *cases) == ints(5, 9)
    assert apply("select", "int32", Fact.top("int32"), *cases) == ints(0, 9)
    assert apply("select", "int32", Fact.const("bool", True), *cases[:2]) == ints(5, 6)


def test_unknown_operation_and_dtype_are_top() -> None:
    assert apply("erf_inv", "float32", Fact.top("float32")) == Fact.top("float32")
    assert apply("add", "complex64", Fact.top("complex64"), Fact.top("complex64")).hi == math.inf
    assert apply("add", "int32", ints(0, 1), ints(0, 1, "int64")) == Fact.top("int32")
    assert not Fact.top("key<fry>").nan_free
    with pytest.raises(ValueError, match="join"):
        ints(0, 1).join(ints(0, 1, "int64"))
    with pytest.raises(ValueError, match="not a value"):
        Fact.const("int8", 128)


def test_facts_of_arrays() -> None:
    assert Fact.of_array(np.array([3, -2], np.int16)) == ints(-2, 3, "int16")
    assert Fact.of_array(np.array([True])) == Fact.const("bool", True)
    assert Fact.of_array(np.array([1.0, np.nan, 3.0], np.float32)) == Fact(
        "float32", 1.0, 3.0, True, False
    )
    assert Fact.of_array(np.array([0.5, np.inf], np.float16)) == Fact(
        "float16", 0.5, np.inf, False, True
    )
    assert not Fact.of_array(np.array([np.nan])).nan_free
    bf16 = np.asarray(jnp.asarray([1.0, 2.5], jnp.bfloat16))
    assert Fact.of_array(bf16) == Fact("bfloat16", 1.0, 2.5, False, True)
    assert Fact.of_array(np.array([2**64 - 1], np.uint64)).hi == 2**64 - 1
    assert Fact.of_array(np.zeros((0, 4), np.float32)).nan_free
    assert Fact.of_array(np.asarray(jnp.asarray([-8, 7], jnp.int4))) == ints(-8, 7, "int4")


# --------------------------------------------------------------------------------------------
# floats

FLOAT_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    **COMPARE,
}


def round_half_away(x: Array) -> Array:
    whole = np.trunc(x)
    with np.errstate(all="ignore"):
        return np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), whole).astype(x.dtype)


FLOAT_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round_even": np.rint,
    "round_away": round_half_away,
    "sqrt": np.sqrt,
    "is_finite": np.isfinite,
}


def flush(x: Array) -> Array:
    if x.dtype.kind != "f":
        return x
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, x.dtype.type(0), x)


def pool(dtype: Any, seed: int) -> Array:
    """A sorted pool of numbers, special ones above all."""
    info = np.finfo(dtype)
    tiny, sub, eps, big = info.tiny, info.smallest_subnormal, info.eps, info.max
    positive = [
        0.0,
        sub,
        3 * sub,
        tiny,
        2 * tiny,
        tiny - sub,
        eps,
        1 - eps / 2,
        1.0,
        1 + eps,
        0.1,
        0.5,
    ]
    positive += [
        1.5,
        2.0,
        2.5,
        3.0,
        7.0,
        10.0,
        1 / eps,
        2 / eps + 2,
        big,
        big / 2,
        np.inf,
        100.5,
        33.0,
    ]
    rng = np.random.default_rng(seed)
    values = np.array([*positive, *(-np.array(positive))]).astype(dtype)
    more = (rng.normal(size=20) * np.exp(rng.normal(size=20) * 4)).astype(dtype)
    return np.sort(np.concatenate([values, more]))


def check(got: Fact, values: Array, what: object) -> None:
    flat = np.ravel(values)
    number = flat[~np.isnan(flat)] if flat.dtype.kind == "f" else flat
    if number.size < flat.size:
        assert not got.nan_free, (what, got)
    if number.size:
        assert got.lo <= number.min(), (what, got, number.min())
        assert number.max() <= got.hi, (what, got, number.max())
        if got.integral:
            assert (np.trunc(number) == number).all(), (what, got)


def parts(dtype: str, count: int, seed: int) -> list[tuple[Array, Fact]]:
    values, rng = pool(dtype, 7), random.Random(seed)
    out = []
    for _ in range(count):
        a = rng.randrange(len(values))
        b = a if rng.random() < 0.2 else min(len(values) - 1, a + rng.randrange(1, 12) ** 2 // 2)
        part = values[a : b + 1]
        if rng.random() < 0.25:
            part = part[np.trunc(part) == part]
            if not part.size:
                continue
        if rng.random() < 0.15:
            part = np.append(part, np.array(np.nan, dtype))
        out.append((part, Fact.of_array(part)))
    return out


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", FLOAT_BINARY)
def test_binary_float_rules(op: str, dtype: str) -> None:
    fn, out = FLOAT_BINARY[op], "bool" if op in COMPARE else dtype
    with np.errstate(all="ignore"):
        for (x, f), (y, g) in zip(parts(dtype, 2000, 1), parts(dtype, 2000, 2), strict=False):
            got = apply(op, out, f, g)
            assert got.dtype == out
            grid = x[:, None], y[None, :]
            check(got, fn(*grid), (op, f, g))
            check(got, flush(fn(*map(flush, grid))), (op, "flushed", f, g))
            if dtype != "float64" and op not in ("rem", *COMPARE):  # kept in a wider type
                wide = fn(*(v.astype(np.float64) for v in grid))
                if not got.integral or op != "div":
                    check(got, wide, (op, "wide", f, g))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", FLOAT_UNARY)
def test_unary_float_rules(op: str, dtype: str) -> None:
    fn, out = FLOAT_UNARY[op], "bool" if op == "is_finite" else dtype
    with np.errstate(all="ignore"):
        for x, f in parts(dtype, 1500, 3):
            got = apply(op, out, f)
            check(got, fn(x), (op, f))
            check(got, flush(fn(flush(x))), (op, "flushed", f))


@pytest.mark.parametrize("op", FLOAT_UNARY)
def test_unary_rules_on_every_half(op: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = np.sort(every[~np.isnan(every)])
    rng = random.Random(5)
    with np.errstate(all="ignore"):
        table = FLOAT_UNARY[op](every)
        for _ in range(150):
            a = rng.randrange(len(every))
            b = min(len(every), a + 1 + int(2 ** rng.uniform(0, 16)))
            got = apply(op, "bool" if op == "is_finite" else "float16", Fact.of_array(every[a:b]))
            check(got, table[a:b], (op, every[a], every[b - 1]))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_exact_results_are_contained(op: str, dtype: str) -> None:
    """A fused multiply-add, or a wider intermediate, keeps digits that rounding drops."""
    rng = np.random.default_rng(11)
    exactly = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": operator.truediv,
    }
    scale = np.exp2(rng.integers(-6, 7, (2, 400)))
    for a, b in (rng.normal(size=(2, 400)) * scale).astype(dtype).T.tolist():
        got = apply(op, dtype, Fact.const(dtype, a), Fact.const(dtype, b))
        want = exactly[op](Fraction(a), Fraction(b))
        assert Fraction(got.lo) <= want <= Fraction(got.hi)
        if abs(want) >= dtype_of(dtype).tiny:  # and no wider than it has to be
            assert (got.lo == got.hi) == (Fraction(got.lo) == want)
            assert got.hi - got.lo <= 2 * np.spacing(np.array(abs(float(want)), dtype))


WIDTHS = {"float16": 16, "float32": 32, "float64": 64}


@st.composite
def float_case(draw: Any) -> tuple[str, float, Fact, float, Fact]:
    """A dtype, and twice a number with a fact that contains it."""
    dtype = draw(st.sampled_from(["float16", "float32"]))
    out: list[Any] = []
    for _ in range(2):
        number = st.floats(width=WIDTHS[dtype], allow_nan=False)
        near = st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1.0, float(np.finfo(dtype).tiny)])
        some = draw(st.lists(number | near, min_size=1, max_size=3))
        value = draw(st.sampled_from([*some, *some, math.nan]))
        members = np.array([*some, value] if draw(st.booleans()) or value != value else some, dtype)
        out += [value, Fact.of_array(members)]
    return dtype, out[0], out[1], out[2], out[3]


@given(float_case(), st.sampled_from(sorted(FLOAT_BINARY)))
@settings(max_examples=600, deadline=None)
def test_binary_float_rules_by_hypothesis(
    case: tuple[str, float, Fact, float, Fact], op: str
) -> None:
    dtype, x, f, y, g = case
    a, b = np.array([x], dtype), np.array([y], dtype)
    with np.errstate(all="ignore"):
        got = apply(op, "bool" if op in COMPARE else dtype, f, g)
        check(got, FLOAT_BINARY[op](a, b), (op, f, g))
        check(got, flush(FLOAT_BINARY[op](flush(a), flush(b))), (op, f, g))


@given(
    float_case(),
    st.sampled_from(["float16", "float32", "float64", "bool", "int8", "uint8", "int64"]),
)
@settings(max_examples=400, deadline=None)
def test_convert_from_floats(case: tuple[str, float, Fact, float, Fact], target: str) -> None:
    dtype, x, f, _, _ = case
    got = apply("convert", target, f)
    t = dtype_of(target)
    if t.kind == "float":
        with np.errstate(all="ignore"):
            check(got, np.array([x], dtype).astype(target), (f, target))
    elif target == "bool":
        assert got.contains(x != 0)
    else:
        want = 0 if x != x else t.lo if x <= t.lo else t.hi if x >= t.hi else int(x)
        assert got.contains(want), (f, got, want)


@pytest.mark.parametrize("target", ["int8", "uint8", "int32", "uint32"])
def test_float_to_integer_saturates_in_xla(target: str) -> None:
    values = np.array(
        [np.nan, np.inf, -np.inf, 1e20, -1e20, 300.7, -300.7, 1.9, -1.9, 127.5, -0.5], np.float32
    )
    got = jax.jit(lambda v: lax.convert_element_type(v, target))(values)
    t = dtype_of(target)
    want = [
        0
        if v != v
        else int(min(max(v, t.lo), t.hi))
        if math.isinf(v)
        else int(min(max(int(v), t.lo), t.hi))
        for v in values.tolist()
    ]
    assert np.asarray(got).tolist() == want


@given(st.floats(allow_nan=False, width=64), st.sampled_from(["float16", "float32"]))
@settings(max_examples=300, deadline=None)
def test_rounding_to_a_dtype(value: float, dtype: str) -> None:
    t = dtype_of(dtype)
    lo, hi = round_down(value, t), round_up(value, t)
    assert lo <= value <= hi
    with np.errstate(all="ignore"):
        nearest = np.array(value).astype(dtype)
        assert round_to(value, t) == float(nearest)
        assert float(np.array(lo).astype(dtype)) == lo
        assert float(np.array(hi).astype(dtype)) == hi
        assert lo == hi or np.nextafter(np.array(lo, dtype), np.array(np.inf, dtype)) == hi


@pytest.mark.parametrize(
    "value", [1.0, 1 + 2**-8, 1 + 2**-7 + 2**-8, 3.3e38, 3.4e38, 1e-39, 1e-41, -2.7]
)
def test_bfloat16_rounding(value: float) -> None:
    assert round_to(value, dtype_of("bfloat16")) == float(np.asarray(value, jnp.bfloat16.dtype))


def test_nan_only_matters_where_it_changes_the_answer() -> None:
    maybe = Fact("float32", 0.0, 1.0, False, False)
    five = Fact.const("float32", 5.0)
    assert apply("lt", "bool", five, maybe) == Fact.const("bool", False)  # also for NaN
    assert apply("lt", "bool", maybe, five) == Fact.top("bool")
    assert apply("ne", "bool", maybe, five) == Fact.const("bool", True)
    assert apply("eq", "bool", maybe, five) == Fact.const("bool", False)
    assert apply("max", "float32", maybe, five) == Fact("float32", 5.0, 5.0, False, False)


def test_denormals_may_be_flushed() -> None:
    """XLA's CPU backend compares a denormal as 0, so 1e-40 > 0 is not a fact."""
    small = Fact.const("float32", 1e-40)
    assert apply("gt", "bool", small, Fact.const("float32", 0.0)) == Fact.top("bool")
    assert apply("convert", "bool", small) == Fact.top("bool")


# --------------------------------------------------------------------------------------------
# proofs


def test_sorted_ascending() -> None:
    assert sorted_ascending(np.array([1.0, 1.0, 2.0], np.float32))
    assert sorted_ascending(np.array([], np.float32))
    assert sorted_ascending(np.array([-np.inf, -0.0, 0.0, np.inf]))
    assert sorted_ascending(np.asarray([1, 2, 2], jnp.bfloat16.dtype))
    assert sorted_ascending(np.array([1, 2**63], np.uint64))
    assert not sorted_ascending(np.array([2, 1]))
    assert not sorted_ascending(np.array([np.nan]))
    assert not sorted_ascending(np.array([1.0, np.nan]))
    assert not sorted_ascending(np.array([[1.0]]))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, jnp.bfloat16.dtype])
def test_uniform_grids_are_found(dtype: Any) -> None:
    assert uniform_grid((np.arange(9) * 0.25 - 1).astype(dtype)) == (-1.0, 0.25, 9)
    assert uniform_grid(np.array([0, 1, 2]).astype(dtype)) == (0.0, 1.0, 3)
    off = (np.arange(9) * 0.25 - 1).astype(dtype)
    off[4] = np.nextafter(np.float32(off[4]) + np.float32(0.01), np.float32(1)).astype(dtype)
    assert uniform_grid(off) is None


def test_uniform_grid_refuses() -> None:
    f32 = np.float32
    assert uniform_grid(np.array([0, 0.1, 0.2, 0.3], f32)) is None  # not evenly spaced once rounded
    assert uniform_grid(np.array([1.0], f32)) is None
    assert uniform_grid(np.array([1.0, 1.0], f32)) is None
    assert uniform_grid(np.array([2.0, 1.0], f32)) is None
    assert uniform_grid(np.array([0.0, np.nan], f32)) is None
    assert uniform_grid(np.array([0.0, np.inf], f32)) is None
    assert uniform_grid(np.array([0, 1, 2], np.int32)) is None
    assert uniform_grid(np.array([0, 1e-40, 2e-40], f32)) is None  # denormals
    assert uniform_grid(np.arange(MAX_GRID + 1, dtype=np.float64)) is None
    assert uniform_grid(np.arange(4096).astype(np.float16)) is None  # 2049 is no half


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_uniform_grid_must_hold_twice(dtype: Any) -> None:
    one = dtype(1)
    step = np.nextafter(one, dtype(2))
    computed = np.array([1e-30, 1, 2], dtype)  # reproduced by rounding, not evenly spaced
    assert bool((np.arange(3, dtype=dtype) * one + computed[0] == computed).all())
    assert uniform_grid(computed) is None
    spaced = np.array([-2 * step, -step, 0, step], dtype)  # evenly spaced, but 3*step rounds
    assert bool((np.diff(spaced) == step).all())
    assert uniform_grid(spaced) is None


def test_fault_3_small_steps_survive() -> None:
    """RECom printed boundaries with six decimals, so that 1e-7 became 0."""
    step = np.float32(2.0**-24)
    assert uniform_grid(np.arange(1000, dtype=np.float32) * step) == (0.0, 2.0**-24, 1000)
    tenth = np.array([0.0, 1e-7], np.float32)
    assert uniform_grid(tenth) == (0.0, float(tenth[1]), 2)


@given(st.floats(-100, 100, width=32), st.floats(2**-10, 10, width=32), st.integers(2, 200))
@settings(max_examples=400, deadline=None)
def test_uniform_grid_reproduces_the_boundaries(start: float, step: float, n: int) -> None:
    grid = np.float32(start) + np.arange(n, dtype=np.float32) * np.float32(step)
    got = uniform_grid(grid)
    if got is not None:
        again = np.float32(got[0]) + np.arange(n, dtype=np.float32) * np.float32(got[1])
        np.testing.assert_array_equal(again, grid)
        assert [got[0] + k * got[1] for k in range(n)] == grid.astype(np.float64).tolist()


def test_every_rule_is_here() -> None:
    tested = {
        *BINARY,
        *COMPARE,
        *UNARY,
        *FLOAT_UNARY,
        "select",
        "convert",
        "search",
        "iota",
        "affine",
    }
    assert set(RULES) == tested
