"""The CPU interpreter (csrc/) against numpy and jax.lax, one instruction at a time."""

import concurrent.futures
import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from recom_jax import _recom

pytestmark = pytest.mark.once

K = _recom.constants()
OPC, SK, DK = K["opcode"], K["slot_kind"], K["dim_kind"]
SUM, MAX, MIN, PROD = (K["kind"][n] for n in ("SUM", "MAX", "MIN", "PROD"))
NUMPY = {
    "PRED": np.bool_,
    "S8": np.int8,
    "S16": np.int16,
    "S32": np.int32,
    "S64": np.int64,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
}
DT = {k: K["dtype"][np.dtype(v).name] for k, v in NUMPY.items()}
NAME_OF = {np.dtype(v): k for k, v in NUMPY.items()}
INTS = ["S8", "S16", "S32", "S64", "U8", "U16", "U32", "U64"]
FLOATS = ["F32", "F64"]
HALVES = ["F16", "BF16"]


@pytest.fixture(autouse=True)
def x64_on_a_cpu():
    """What it is compared with runs on a CPU, too: a GPU's square root and denormals are others."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


def bits(value, dtype):
    """An immediate: the value's bits in the low bytes of a word."""
    raw = np.asarray(value).astype(NUMPY[dtype]).tobytes()
    return int(np.frombuffer(raw + bytes(8 - len(raw)), np.int64)[0])


class Builder:
    """One class with one column, unless told otherwise. Values become slots as they are met."""

    def __init__(self, operands, results, outer):
        self.operands, self.results = list(operands), list(results)
        self.dims, self.kinds, self.values, self.regs, self.code = [], [], [], [], []
        self.outer = [self.size(n) for n in outer]

    def slot(self, kind, value):
        self.kinds.append(SK[kind])
        self.values.append(value)
        return len(self.kinds) - 1

    def imm(self, value):
        return self.slot("IMM", value)

    def size(self, n):
        """A dim slot. `n` is a number, or (dim kind, a, b)."""
        kind, a, b = ("const", n, 0) if isinstance(n, (int, np.integer)) else n
        self.dims.append((DK[kind], int(a), int(b)))
        return self.slot("DIM", len(self.dims) - 1)

    def reg(self, dtype, width=None, pos=False):
        self.regs.append((int(pos), DT[dtype], -1 if width is None else self.size(width)))
        return len(self.regs) - 1

    def emit(self, name, *fields, code=None):
        words = [f for x in fields for f in (x if isinstance(x, (list, tuple)) else [x])]
        (self.code if code is None else code).extend([OPC[name], len(words) + 2, *words])

    def strides(self, values):
        return [len(values), *[self.size(s) for s in values]]

    def load(self, dst, operand, strides, offset=0, code=None):
        self.emit(
            "LOAD",
            dst,
            self.slot("OPERAND", operand),
            self.size(offset),
            self.strides(strides),
            code=code,
        )

    def store(self, src, result, strides, offset=0, feature=1):
        self.emit(
            "STORE",
            src,
            self.slot("RESULT", result),
            self.size(offset),
            self.strides(strides),
            self.size(feature),
        )

    def take(self, dst, idx, table, stride, base=0, fill=0, flags=0, code=None):
        self.emit(
            "TAKE",
            flags,
            dst,
            idx,
            self.slot("OPERAND", table),
            self.size(base),
            self.size(stride),
            self.imm(fill),
            code=code,
        )

    def pool(
        self, kind, dst, idx, table, stride, weight=-1, base=0, fill=0, init=0, flags=0, code=None
    ):
        self.emit(
            "POOL",
            flags,
            kind,
            dst,
            idx,
            weight,
            self.slot("OPERAND", table),
            self.size(base),
            self.size(stride),
            self.imm(fill),
            self.imm(init),
            code=code,
        )

    def region(self, sizes, body):
        self.emit("REGION", self.strides(sizes), len(body), body)

    def jregion(self, total, seg, body):
        self.emit("JREGION", self.size(total), seg, len(body), body)

    def encode(self, columns=None):
        types = [(DT[NAME_OF[np.dtype(a.dtype)]], np.ndim(a)) for a in self.operands]
        outs = [(DT[NAME_OF[np.dtype(a.dtype)]], np.ndim(a)) for a in self.results]
        columns = [self.values] if columns is None else columns
        words = [w for pair in types + outs + self.dims for w in pair]
        words += [len(self.kinds), *self.kinds, len(self.regs), *[w for r in self.regs for w in r]]
        words += [len(self.outer), *self.outer, len(self.code), *self.code]
        for c in columns:
            words += [0, *c]
        head = [
            K["magic"]["PROGRAM_MAGIC"],
            K["magic"]["VERSION"],
            len(words) + 8,
            len(self.dims),
            len(types),
            len(outs),
            1,
            len(columns),
        ]
        return np.array(head + words, np.int64).tobytes()

    def run(self, threads=2, program=None):
        binding = np.array([w for i in range(len(self.operands)) for w in (i, -1)], np.int64)
        _recom.run_program(program or self.encode(), binding, self.operands, self.results, threads)
        return self.results


def same(got, want):
    """Equal bits, except that any NaN equals any NaN."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    if got.dtype.kind in "fV" or got.dtype == ml_dtypes.bfloat16:
        g, w = got.astype(np.float64), want.astype(np.float64)
        ok = (np.isnan(g) & np.isnan(w)) | ((g == w) & (np.signbit(g) == np.signbit(w)))
    else:
        ok = got == want
    assert ok.all(), (np.argwhere(~ok)[:5], got[~ok][:5], want[~ok][:5])


EDGES = {
    "float": [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        1e10,
        -1e10,
        3e38,
        -3e38,
        1e-30,
        np.inf,
        -np.inf,
        np.nan,
        127.5,
        128.0,
        255.9,
        2.0**31,
        2.0**32,
        2.0**63,
        -(2.0**63),
        2.0**64,
        7.0,
        3.25,
    ],
    "int": [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, -1, -2, -3, -7, -8, -100],
}


def edge_values(dtype):
    t = np.dtype(NUMPY[dtype])
    if dtype == "PRED":
        return np.array([False, True, True, False])
    if dtype in INTS:
        info = np.iinfo(t)
        vals = [v for v in EDGES["int"] if info.min <= v <= info.max]
        return np.array([*vals, info.min, info.min + 1, info.max, info.max - 1], t)
    with np.errstate(all="ignore"):
        return np.array(EDGES["float"], np.float64).astype(t)


def pairs(dtype):
    v = edge_values(dtype)
    return np.repeat(v, len(v)), np.tile(v, len(v))


def elementwise(op, sub, dst, *inputs, imm=None):
    """out = op(*inputs); with `imm` the last input is that constant."""
    out = np.zeros(len(inputs[0]), NUMPY[dst])
    b = Builder(inputs, [out], [("operand_axis", 0, 0)])
    regs = []
    for k, x in enumerate(inputs):
        regs.append(b.reg(NAME_OF[x.dtype]))
        b.load(regs[-1], k, [1])
    if imm is not None:
        c = b.reg(NAME_OF[inputs[0].dtype])
        b.emit("CONST", c, b.imm(bits(imm, NAME_OF[inputs[0].dtype])))
        regs.append(c)
    d = b.reg(dst)
    b.emit(op, *([sub] if sub is not None else []), d, *regs)
    b.store(d, 0, [1])
    return b.run()[0]


def flush(a):
    """Denormals as zero: XLA's threads flush them, run_program's do not."""
    if a.dtype.kind != "f":
        return a
    return np.where(np.abs(a) < np.finfo(a.dtype).tiny, np.copysign(a.dtype.type(0), a), a)


LAX_UNARY = {
    "neg": jax.lax.neg,
    "abs": jax.lax.abs,
    "sign": jax.lax.sign,
    "not": jax.lax.bitwise_not,
    "floor": jax.lax.floor,
    "ceil": jax.lax.ceil,
    "round_even": lambda x: jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN),
    "round_away": lambda x: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO),
    "sqrt": jax.lax.sqrt,
    "is_finite": jax.lax.is_finite,
    "popcnt": jax.lax.population_count,
    "clz": jax.lax.clz,
}
LAX_BINARY = {
    "add": jax.lax.add,
    "sub": jax.lax.sub,
    "mul": jax.lax.mul,
    "div": jax.lax.div,
    "rem": jax.lax.rem,
    "max": jax.lax.max,
    "min": jax.lax.min,
    "and": jax.lax.bitwise_and,
    "or": jax.lax.bitwise_or,
    "xor": jax.lax.bitwise_xor,
    "shl": jax.lax.shift_left,
    "shr_l": jax.lax.shift_right_logical,
    "shr_a": jax.lax.shift_right_arithmetic,
    "eq": jax.lax.eq,
    "ne": jax.lax.ne,
    "lt": jax.lax.lt,
    "le": jax.lax.le,
    "gt": jax.lax.gt,
    "ge": jax.lax.ge,
}


def supported(table, name, dtype):
    if dtype == "PRED":
        return name in ("not", "and", "or", "xor", "max", "min", "eq", "ne", "lt", "le", "gt", "ge")
    if name == "abs" and dtype.startswith("U"):
        return False  # JAX has none
    if name in ("not", "popcnt", "clz", "and", "or", "xor", "shl", "shr_l", "shr_a"):
        return dtype in INTS
    if name in ("floor", "ceil", "round_even", "round_away", "sqrt", "is_finite"):
        return dtype in FLOATS
    return True


@pytest.mark.parametrize("dtype", ["PRED", *INTS, *FLOATS])
def test_unary(dtype):
    x = edge_values(dtype)
    ops = {n: f for n, f in LAX_UNARY.items() if supported(LAX_UNARY, n, dtype)}
    for name, want in jax.jit(lambda v: {n: f(v) for n, f in ops.items()})(x).items():
        want = np.asarray(want)
        same(elementwise("UNARY", K["unary"][name], NAME_OF[want.dtype], x), want)


@pytest.mark.parametrize("dtype", ["PRED", *INTS, *FLOATS])
def test_binary(dtype):
    x, y = pairs(dtype)
    ops = {n: f for n, f in LAX_BINARY.items() if supported(LAX_BINARY, n, dtype)}
    for name, want in jax.jit(lambda a, b: {n: f(a, b) for n, f in ops.items()})(x, y).items():
        want = np.asarray(want)
        out = NAME_OF[want.dtype]
        same(flush(elementwise("BINARY", K["binary"][name], out, x, y)), want)
        # The path for constants on the right must agree with the general one.
        for c in edge_values(dtype):
            sel = (y == c) | ((y != y) & (c != c))
            sel &= np.signbit(y) == np.signbit(c) if dtype in FLOATS else True
            same(flush(elementwise("BINARY", K["binary"][name], out, x[sel], imm=c)), want[sel])


def test_hash_rem():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.integers(0, 2**32, 5000), [0, 2**32 - 1, 2**31]]).astype(np.uint32)
    for c in [1, 2, 3, 7, 1000, 65536, 999983, 2**31, 2**31 + 1, 2**32 - 1]:
        same(elementwise("BINARY", K["binary"]["rem"], "U32", x, imm=c), x % np.uint32(c))


def test_signed_hash_rem():
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**31), 2**31, 5000)
    x = np.concatenate([x, [0, 1, -1, 2**31 - 1, -(2**31)], np.arange(-1000, 1000) * 9973]).astype(
        np.int32
    )
    for c in [1, 2, 3, 7, 1000, 9973, 65536, 999983, 2**31 - 1, -(2**31), -1, -7, -9973, 1 - 2**31]:
        want = np.fmod(x.astype(np.int64), c).astype(np.int32)  # the sign of x, as lax.rem has it
        same(elementwise("BINARY", K["binary"]["rem"], "S32", x, imm=c), want)
    same(elementwise("BINARY", K["binary"]["rem"], "S32", x, imm=0), x)


@pytest.mark.parametrize("src", ["PRED", *INTS, "F16", "BF16", *FLOATS])
def test_convert(src):
    x = edge_values(src)
    wanted = jax.jit(lambda v: {t: jax.lax.convert_element_type(v, NUMPY[t]) for t in NUMPY})(x)
    for dst, want in wanted.items():
        same(elementwise("CONVERT", None, dst, x), np.asarray(want))


def test_half_round_trip():
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    rng = np.random.default_rng(1)
    f = rng.integers(0, 2**32, 200000, dtype=np.uint32).view(np.float32)
    f = np.concatenate([f, np.float32([65519.9, 65520, 65504, 2**-14, 2**-24, 2**-25, 3 * 2**-26])])
    for half in HALVES:
        h = every.view(NUMPY[half])
        same(elementwise("CONVERT", None, "F32", h), h.astype(np.float32))
        with np.errstate(all="ignore"):
            same(elementwise("CONVERT", None, half, f), f.astype(NUMPY[half]))


def test_select_bitcast_predicate_affine():
    p = np.array([True, False, True])
    a, b_ = np.float32([1, 2, np.nan]), np.float32([4, 5, 6])
    same(elementwise("SELECT", None, "F32", p, a, b_), np.where(p, b_, a))
    same(elementwise("BITCAST", None, "U32", a), a.view(np.uint32))
    out = np.zeros((3, 5), np.int32)
    b = Builder([], [out], [3, 5])
    r = b.reg("S32")
    b.emit("AFFINE", r, b.size(-7), b.strides([2, -3]))
    b.store(r, 0, [5, 1])
    b.run()
    same(out, (-7 + 2 * np.arange(3)[:, None] - 3 * np.arange(5)).astype(np.int32))


def test_index_and_predicate():
    for dtype in INTS:
        x = edge_values(dtype)
        mask = np.arange(len(x)) % 3 > 0
        for mode in ("CLIP", "FILL"):
            for rows in (0, 1, 7, 2**40):
                out = np.zeros(len(x), np.int64)
                b = Builder([x, mask], [out], [len(x)])
                rx, rm, ri, rp = b.reg(dtype), b.reg("PRED"), b.reg("S64"), b.reg("S64")
                b.load(rx, 0, [1])
                b.load(rm, 1, [1])
                b.emit("INDEX", K["index_mode"][mode], ri, rx, b.size(rows))
                b.emit("PREDICATE", rp, ri, rm)
                b.store(rp, 0, [1])
                b.run()
                py = [int(v) for v in x]
                if mode == "CLIP":
                    want = [min(max(v, 0), rows - 1) for v in py] if rows else [-1] * len(py)
                else:
                    want = [v if 0 <= v < rows else -1 for v in py]
                same(out, np.where(mask, np.array(want, np.int64), -2))


# ---- searches ----------------------------------------------------------------------------------


def search(mode, side, x, bounds, total=None):
    out = np.zeros(len(x), np.int32)
    b = Builder([x, bounds], [out], [len(x)])
    rx, rs = b.reg(NAME_OF[x.dtype]), b.reg("S32")
    b.load(rx, 0, [1])
    b.emit(
        "SEARCH",
        K["search_mode"][mode],
        K["side"][side.upper()],
        rs,
        rx,
        b.slot("OPERAND", 1),
        b.size(0),
        b.size(len(bounds)),
        [] if total is None else b.size(total),
    )
    b.store(rs, 0, [1])
    return b.run()[0]


def starts(mode, bounds, total):
    """As the format says, in Python's own numbers."""
    t, at = np.iinfo(bounds.dtype), []
    for k in range(len(bounds)):
        n = sum(map(int, bounds[:k])) if mode == "LENGTHS" else int(bounds[k]) - int(bounds[0])
        n = (n - int(t.min)) % 2**t.bits + int(t.min)
        n += total if n < 0 else 0
        n = (n + 2**31) % 2**32 - 2**31
        at += [n] if 0 <= n < total else []
    return at


@pytest.mark.parametrize("mode", ["SPLITS", "LENGTHS"])
@pytest.mark.parametrize("dtype", ["S32", "U32", "S64", "U64"])
def test_search_among_bags(mode, dtype):
    rng = np.random.default_rng(4)
    edges = edge_values(dtype)
    for n in (0, 1, 2, 7, 200):
        for total in (0, 1, 50, 700):
            steps = rng.integers(0, 2 * total // max(n, 1) + 1, n)
            cases = [
                steps if mode == "LENGTHS" else np.cumsum(steps),
                rng.integers(-total - 1 if dtype[0] == "S" else 0, total + 2, n),
                rng.choice(edges, n),
            ]
            for bounds in (c.astype(NUMPY[dtype]) for c in cases):
                at = starts(mode, bounds, total)
                for x in (
                    np.arange(total + 3),
                    np.arange(total + 3)[::-1],
                    rng.integers(0, total + 1, 9),
                    edges,
                ):
                    x = x.astype(NUMPY[dtype])
                    if not len(x):
                        continue
                    for side, before in (
                        ("left", lambda a, q: a < q),
                        ("right", lambda a, q: a <= q),
                    ):
                        want = [sum(before(a, int(q)) for a in at) for q in x]
                        same(search(mode, side, x, bounds, total), np.array(want, np.int32))


@pytest.mark.parametrize("dtype", ["F32", "S16", "U8", "PRED"])
def test_a_search_among_bags_needs_wide_integers(dtype):
    values = np.zeros(3, NUMPY[dtype])
    with pytest.raises(ValueError, match="search on this dtype"):
        search("SPLITS", "right", values, values, 5)


def test_a_search_among_bags_checks_its_call():
    x = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="a bad number of positions"):
        search("LENGTHS", "right", x, x, -1)
    with pytest.raises(ValueError, match="a bad number of positions"):
        search("SPLITS", "right", x, x, 2**31)
    with pytest.raises(ValueError, match="instruction longer than its fields"):
        search("SORTED", "right", x, x, 5)
    with pytest.raises(ValueError, match="truncated"):
        search("SPLITS", "right", x, x)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", ["F32", "F64", "S32", "U8", "U64"])
def test_search(dtype, side):
    rng = np.random.default_rng(2)
    x = np.concatenate([edge_values(dtype), rng.integers(0, 100, 150).astype(NUMPY[dtype])])
    cases = []
    for n in (0, 1, 3, 8, 100):
        v = rng.choice(x, n)
        clean = np.sort(v[~np.isnan(v)] if dtype in FLOATS else v)
        cases += [("SCAN", "scan", v), ("SORTED", "scan", clean), ("SCAN", "scan", np.sort(v))]
        cases += [("COMPARE_ALL", "compare_all", v)] if n else []

    @jax.jit
    def oracle(q, bounds):
        return [
            jnp.searchsorted(b, q, side=side, method=c[1])
            for c, b in zip(cases, bounds, strict=True)
        ]

    for (mode, _, bounds), want in zip(cases, oracle(x, [c[2] for c in cases]), strict=True):
        same(search(mode, side, x, bounds), np.asarray(want).astype(np.int32))


@pytest.mark.parametrize("side", ["left", "right"])
def test_search_uniform(side):
    rng = np.random.default_rng(3)
    cases = [
        ("F32", 0, 5, 100),
        ("F32", -3.5, 0.25, 1000),
        ("F32", 0, 2.0**-140, 50),
        ("F32", 1, 1, 0),
        ("F32", -(2.0**127), 2.0**124, 15),
        ("F32", 2.0**22, 0.5, 8000),
        ("F64", -1, 2.0**-30, 300),
        ("S32", -(2**31), 2**24, 255),
        ("S8", -128, 3, 85),
        ("U64", 0, 2**60, 15),
        ("S64", -5, 7, 9),
    ]
    for dtype, start, step, n in cases:
        t = NUMPY[dtype]
        bounds = np.array(
            [start + k * step for k in range(n)], np.float64 if dtype in FLOATS else object
        ).astype(t)
        x = np.concatenate([edge_values(dtype), bounds[:200], bounds[-200:]])
        if dtype in FLOATS:
            near = bounds[rng.integers(0, n, 300)] if n else bounds
            x = np.concatenate(
                [
                    x,
                    np.nextafter(near, t(np.inf)),
                    np.nextafter(near, t(-np.inf)),
                    t([np.finfo(t).max, np.finfo(t).min]),
                ]
            )
        out = np.zeros(len(x), np.int32)
        b = Builder([x], [out], [len(x)])
        rx, rs = b.reg(dtype), b.reg("S32")
        b.load(rx, 0, [1])
        b.emit(
            "SEARCH_UNIFORM",
            K["side"][side.upper()],
            rs,
            rx,
            b.imm(bits(start, dtype)),
            b.imm(bits(step, dtype)),
            b.size(n),
        )
        b.store(rs, 0, [1])
        b.run()
        same(out, np.searchsorted(bounds, x, side=side).astype(np.int32))


# ---- lookups -----------------------------------------------------------------------------------


def lookup(
    idx,
    table,
    width,
    fill=np.nan,
    dst=None,
    flags=0,
    rows=None,
    mode="FILL",
    out_dtype=None,
    threads=2,
):
    dst = dst or NAME_OF[table.dtype]
    out = np.zeros((len(idx), width), NUMPY[out_dtype or dst])
    b = Builder([idx, table], [out], [("operand_axis", 0, 0)])
    rx, ri, rr = b.reg(NAME_OF[idx.dtype]), b.reg("S64"), b.reg(dst, width)
    b.load(rx, 0, [1])
    b.emit("INDEX", K["index_mode"][mode], ri, rx, b.size(len(table) if rows is None else rows))
    b.take(rr, ri, 1, width, fill=bits(fill, dst), flags=flags)
    b.store(rr, 0, [width])
    return b.run(threads)[0]


@pytest.mark.parametrize("dtype", list(NUMPY))
def test_take(dtype):
    rng = np.random.default_rng(4)
    idx = rng.integers(-2, 40, 777).astype(np.int32)
    for width in (0, 1, 2, 3, 4, 5, 8, 16, 31, 32, 64, 128, 130):
        table = rng.integers(0, 2 if dtype == "PRED" else 100, (37, width)).astype(NUMPY[dtype])
        fill = np.array(1).astype(NUMPY[dtype])
        got = lookup(idx, table, width, fill=fill)
        inside = (idx >= 0) & (idx < 37)
        same(got, np.where(inside[:, None], table[np.clip(idx, 0, 36)], fill))
        if dtype in HALVES:
            wide = np.where(
                inside[:, None], table.astype(np.float32)[np.clip(idx, 0, 36)], np.float32(1)
            )
            same(lookup(idx, table, width, fill=fill, dst="F32"), wide)
            same(
                lookup(idx, table, width, fill=fill, dst="F32", out_dtype=dtype),
                wide.astype(table.dtype),
            )


def test_index_outside_its_table_is_an_error():
    table = np.zeros((5, 8), np.float32)
    with pytest.raises(ValueError, match="outside its table"):
        lookup(np.int32([0, 7]), table, 8, rows=100)
    ok = lookup(np.int32([0, 3]), np.zeros((0, 8), np.float32), 8)
    assert np.isnan(ok).all()


def one_hot_oracle(ids, table, mask=None):
    hot = (ids[..., None] == np.arange(len(table))).astype(np.float32)
    return np.asarray(jax.jit(lambda h, t: jnp.matmul(h, t, precision="highest"))(hot, table))


def test_one_hot_take():
    rng = np.random.default_rng(5)
    ids = rng.integers(-1, 12, 50).astype(np.int32)
    for poison in ((), (3,), (3, 7)):
        table = rng.normal(size=(11, 6)).astype(np.float32)
        table[1, 1] = -0.0
        for r in poison:
            table[r, r % 6] = [np.inf, np.nan][r % 2]
        got = lookup(ids, table, 6, fill=0, flags=K["flag"]["ONE_HOT"])
        want = one_hot_oracle(ids, table)
        np.testing.assert_array_equal(got, want)
        assert not np.signbit(got[got == 0]).any()


def test_one_hot_pool():
    rng = np.random.default_rng(6)
    ids = rng.integers(-1, 9, (40, 5)).astype(np.int32)
    for poison in ((), (2,), (2, 5)):
        table = rng.integers(-5, 5, (8, 3)).astype(np.float32)
        for r in poison:
            table[r, r % 3] = [np.inf, np.nan][r % 2]
        hot = (ids[..., None] == np.arange(8)).sum(1).astype(np.float32)
        with np.errstate(all="ignore"):
            want = np.asarray(
                [
                    [
                        np.float32(0)
                        + sum(np.float32(h * t) for h, t in zip(row, col, strict=True))
                        for col in table.T
                    ]
                    for row in hot
                ],
                np.float32,
            )
        np.testing.assert_array_equal(pool(ids, table, SUM, flags=K["flag"]["ONE_HOT"]), want)


def pool(
    ids,
    table,
    kind,
    weight=None,
    fill=0,
    init=0,
    dst=None,
    mask=None,
    flags=0,
    mode="FILL",
    threads=2,
    acc=False,
):
    dst = dst or NAME_OF[table.dtype]
    bags, per_bag = ids.shape
    width = table.shape[1]
    out = np.zeros((bags, width), NUMPY[dst])
    operands = [ids, table] + [x for x in (weight, mask) if x is not None]
    b = Builder(operands, [out], [("operand_axis", 0, 0)])
    body = []
    rx, ri, rr = b.reg(NAME_OF[ids.dtype], pos=True), b.reg("S64", pos=True), b.reg(dst, width)
    b.load(rx, 0, [per_bag, 1], code=body)
    b.emit("INDEX", K["index_mode"][mode], ri, rx, b.size(len(table)), code=body)
    rw = -1
    if weight is not None:
        rw = b.reg(dst, pos=True)
        b.load(rw, 2, [per_bag, 1], code=body)
    if mask is not None:
        rm, rp = b.reg("PRED", pos=True), b.reg("S64", pos=True)
        b.load(rm, len(operands) - 1, [per_bag, 1], code=body)
        b.emit("PREDICATE", rp, ri, rm, code=body)
        ri = rp
    if acc:
        row = b.reg(dst, width, pos=True)
        b.take(row, ri, 1, width, fill=bits(fill, dst), code=body)
        b.emit("ACC", kind, rr, row, b.imm(bits(init, dst)), code=body)
    else:
        b.pool(
            kind,
            rr,
            ri,
            1,
            width,
            weight=rw,
            fill=bits(fill, dst),
            init=bits(init, dst),
            flags=flags,
            code=body,
        )
    b.region([("operand_axis", 0, 1)], body)
    b.store(rr, 0, [width])
    return b.run(threads)[0]


def pool_oracle(ids, table, kind, weight=None, fill=0, init=0, dst=None, mask=None):
    t = NUMPY[dst] if dst else table.dtype.type
    bags, per_bag = ids.shape
    out = np.full((bags, table.shape[1]), np.array(init).astype(t))
    wide = table.astype(t)
    op = {SUM: np.add, MAX: np.maximum, MIN: np.minimum, PROD: np.multiply}[kind]
    with np.errstate(all="ignore"):
        for p in range(per_bag):
            i = ids[:, p]
            inside = (i >= 0) & (i < len(table))
            row = np.where(
                inside[:, None], wide[np.clip(i, 0, len(table) - 1)], np.array(fill).astype(t)
            )
            if weight is not None:
                row = (row * weight[:, p, None]).astype(t)
            new = op(out, row).astype(t)
            out = new if mask is None else np.where(mask[:, p, None], new, out)
    return out


@pytest.mark.parametrize("kind", [SUM, MAX, MIN, PROD])
@pytest.mark.parametrize("dtype", ["F32", "F64", "S32", "S8", "U64", "F16", "BF16"])
def test_pool(dtype, kind):
    rng = np.random.default_rng(7)
    dst = "F32" if dtype in HALVES else dtype
    for width, bags, per_bag in (
        (1, 3, 4),
        (3, 50, 10),
        (4, 9, 1),
        (8, 300, 10),
        (12, 5, 600),
        (32, 20, 7),
        (64, 5, 5),
        (100, 5, 5),
        (128, 7, 3),
        (300, 3, 1100),
        (8, 4, 0),
        (0, 3, 2),
    ):
        table = rng.integers(0, 4, (19, width)).astype(NUMPY[dtype])
        if dtype in FLOATS and width > 1:
            table[3, 1] = np.nan
        ids = rng.integers(-2, 22, (bags, per_bag)).astype(np.int32)
        weight = rng.integers(0, 3, ids.shape).astype(NUMPY[dst])
        mask = rng.random(ids.shape) < 0.7
        for kw in ({}, {"weight": weight, "fill": 1}, {"mask": mask, "init": 1, "fill": 2}):
            same(
                pool(ids, table, kind, dst=dst, **kw), pool_oracle(ids, table, kind, dst=dst, **kw)
            )
    table = rng.integers(0, 4, (19, 6)).astype(NUMPY[dtype])
    if dtype not in HALVES:
        ids = rng.integers(-2, 22, (20, 6)).astype(np.int32)
        same(pool(ids, table, kind, acc=True), pool_oracle(ids, table, kind))


def jagged(seg, ids, table, bags, kind=SUM, threads=2, weight=None):
    width = table.shape[1]
    out = np.zeros((bags, width), table.dtype)
    count = np.zeros(bags, np.int32)
    operands = [seg, ids, table] + ([weight] if weight is not None else [])
    b = Builder(operands, [out, count], [("result_axis", 0, 0)])
    body = []
    rs, rx, ri, one = (
        b.reg(NAME_OF[seg.dtype], pos=True),
        b.reg("S32", pos=True),
        b.reg("S64", pos=True),
        b.reg("S32", pos=True),
    )
    rr, rc = b.reg(NAME_OF[table.dtype], width), b.reg("S32")
    b.load(rs, 0, [1], code=body)
    b.load(rx, 1, [1], code=body)
    b.emit("INDEX", 0, ri, rx, b.size(len(table)), code=body)
    rw = -1
    if weight is not None:
        rw = b.reg(NAME_OF[table.dtype], pos=True)
        b.load(rw, 3, [1], code=body)
    b.pool(kind, rr, ri, 2, width, weight=rw, code=body)
    b.emit("CONST", one, b.imm(1), code=body)
    b.emit("ACC", SUM, rc, one, b.imm(0), code=body)
    b.jregion(("operand_axis", 0, 0), rs, body)
    b.store(rr, 0, [width])
    b.store(rc, 1, [1])
    b.run(threads)
    return out, count


@pytest.mark.parametrize("seg_dtype", ["S32", "S8", "U8", "U64", "S64"])
def test_jagged(seg_dtype):
    rng = np.random.default_rng(8)
    table = rng.normal(size=(30, 8)).astype(np.float32)
    low = 0 if seg_dtype[0] == "U" else -3
    for total, bags in ((0, 5), (1, 1), (700, 20), (5000, 100), (3000, 700), (40, 0)):
        for order in (np.sort, lambda s: s):
            seg = order(rng.integers(low, min(bags + 4, 120), total)).astype(NUMPY[seg_dtype])
            ids = rng.integers(-5, 40, total).astype(np.int32)
            weight = rng.normal(size=total).astype(np.float32)
            want, n = np.zeros((bags, 8), np.float32), np.zeros(bags, np.int32)
            for p in range(total):
                if 0 <= int(seg[p]) < bags:
                    want[int(seg[p])] += table[min(max(ids[p], 0), 29)] * weight[p]
                    n[int(seg[p])] += 1
            got, count = jagged(seg, ids, table, bags, weight=weight)
            same(got, want)
            same(count, n)


# ---- shapes, strides, spreading ----------------------------------------------------------------


def test_strides_expand_and_spread():
    rng = np.random.default_rng(9)
    x = rng.normal(size=(6, 5, 7)).astype(np.float32)
    out = np.zeros((5, 9, 6), np.float32)
    b = Builder([x], [out], [5, 6])
    # out[j, 2 + k, i] = x[i, 4 - j, k] / sum_k x[i, 4 - j, k], through rows and a spread scalar.
    row, total, res = b.reg("F32", 7), b.reg("F32"), b.reg("F32", 7)
    b.load(row, 0, [-7, 35, 1], offset=28)
    body = []
    px, pt, pd = b.reg("F32", pos=True), b.reg("F32", pos=True), b.reg("F32", pos=True)
    b.load(px, 0, [-7, 35, 1], offset=28, code=body)
    b.emit("ACC", SUM, total, px, b.imm(0), code=body)
    b.region([7], body)
    b.emit("BINARY", K["binary"]["div"], res, row, total)
    b.store(res, 0, [54, 1], offset=12, feature=6)
    # And a second region that reads the first one's result per position.
    body2, most = [], b.reg("F32")
    p2 = b.reg("F32", pos=True)
    b.load(p2, 0, [-7, 35, 1], offset=28, code=body2)
    b.emit("EXPAND", pt, total, code=body2)
    b.emit("BINARY", K["binary"]["sub"], pd, p2, pt, code=body2)
    b.emit("ACC", MAX, most, pd, b.imm(bits(-np.inf, "F32")), code=body2)
    b.region([7], body2)
    b.store(most, 0, [54, 1])
    b.run()
    flipped = x[:, ::-1, :].transpose(1, 0, 2)
    sums = np.zeros((5, 6), np.float32)
    for k in range(7):
        sums += flipped[..., k]
    same(out[:, 2:, :], (flipped / sums[..., None]).transpose(0, 2, 1))
    same(out[:, 0, :], (flipped - sums[..., None]).max(-1))


def test_accesses_outside_buffers_are_errors():
    x = np.zeros(10, np.float32)
    for n, stride, offset in (
        (11, 1, 0),
        (10, 1, 1),
        (2, 2**62, 0),
        (2, -1, 0),
        (3, -(2**62), 9),
        (1, 1, -1),
        (1, 1, 10),
        (2**40, 2**40, 0),
    ):
        for store in (False, True):
            b = Builder([x], [x.copy()], [n])
            r = b.reg("F32")
            b.load(r, 0, [0 if store else stride], offset=0 if store else offset)
            b.store(r, 0, [stride if store else 0], offset=offset if store else 0)
            with pytest.raises(ValueError):
                b.run()


def test_no_operands_no_bags():
    out = np.zeros((), np.float32)
    b = Builder([], [out], [])
    r = b.reg("F32")
    b.emit("CONST", r, b.imm(bits(2.5, "F32")))
    b.store(r, 0, [])
    assert b.run()[0] == 2.5
    b = Builder([], [out], [0, 3])
    r = b.reg("F32")
    b.emit("CONST", r, b.imm(bits(1, "F32")))
    b.store(r, 0, [10**6, 10**9])
    assert b.run()[0] == 2.5


def test_pack_binding():
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    ids = np.int32([2, 0, 5])
    out = np.zeros((3, 4), np.float32)
    b = Builder([ids, table], [out], [3])
    rx, ri, rr = b.reg("S32"), b.reg("S64"), b.reg("F32", 4)
    b.load(rx, 0, [1])
    b.emit("INDEX", 0, ri, rx, b.size(3))
    b.take(rr, ri, 1, 4)
    b.store(rr, 0, [4])
    program = b.encode()

    def pack(
        offset=192, n_bytes=48, rank=2, dims=(3, 4), magic=K["magic"]["PACK_MAGIC"], total=256
    ):
        words = np.zeros(32, np.int64)
        words[:4] = magic, 1, total, 0
        words[4:11] = offset, n_bytes, rank, *dims, *[0] * (4 - len(dims))
        raw = np.zeros(256 + 64, np.uint8)
        raw = raw[-raw.ctypes.data % 64 :][:256]
        raw[:] = words.view(np.uint8)
        raw[192:240] = table.reshape(-1).view(np.uint8)
        return raw

    _recom.run_program(program, np.array([0, -1, 1, 0]), [ids, pack()], [out], 1)
    same(out, table[[2, 0, 2]])
    for bad in (
        {"offset": 100},
        {"offset": 256},
        {"offset": -64},
        {"n_bytes": 64},
        {"rank": 3},
        {"dims": (4, 4)},
        {"dims": (-3, -4)},
        {"magic": 1},
        {"total": 1000},
        {"rank": 9},
        {"dims": (2**62, 2**62)},
    ):
        with pytest.raises(ValueError):
            _recom.run_program(program, np.array([0, -1, 1, 0]), [ids, pack(**bad)], [out], 1)
    for binding in ([0, -1, 1, 1], [0, -1, 2, 0], [0, -1, 1, -2], [0, -1], [0, 0, 1, 0]):
        with pytest.raises(ValueError):
            _recom.run_program(program, np.array(binding), [ids, pack()], [out], 1)


# ---- hostile programs, threads, XLA ------------------------------------------------------------


def samples():
    """(program, operands, results) that between them use most instructions."""
    made = []
    run = Builder.run

    def keep(self, threads=2, program=None):
        made.append((self.encode(), self.operands, self.results))
        return run(self, threads, program)

    Builder.run = keep
    try:
        rng = np.random.default_rng(10)
        ids = rng.integers(-1, 9, (6, 5)).astype(np.int32)
        table = rng.normal(size=(8, 4)).astype(np.float32)
        pool(ids, table, SUM, mask=ids > 3)
        pool(ids, table, MAX, weight=np.ones((6, 5), np.float32), acc=False)
        pool(ids, table, SUM, acc=True)
        lookup(ids[:, 0].copy(), table, 4, flags=1)
        jagged(np.int32([0, 0, 2, 9]), np.int32([1, 2, 3, 4]), table, 3)
        search("SCAN", "left", np.float32([1, 2, 3]), np.float32([1, 5, 7]))
        search("SORTED", "right", np.float32([1, 2, 3]), np.float32([1, 5, 7]))
        elementwise("BINARY", 0, "S32", np.int32([1, 2]), np.int32([3, 4]))
        test_strides_expand_and_spread()
        test_search_uniform("left")
    finally:
        Builder.run = run
    return made


def test_truncated_programs():
    for program, _, _ in samples()[:6]:
        for n in range(0, len(program), 8):
            with pytest.raises(ValueError):
                _recom.validate(program[:n])
        with pytest.raises(ValueError):
            _recom.validate(program + bytes(8))
        _recom.validate(program)


def test_wrong_buffers():
    program, operands, results = samples()[3]
    binding = np.array([0, -1, 1, -1])
    for ops, res in (
        ([operands[0]], results),
        (operands[::-1], results),
        (operands, []),
        ([operands[0], operands[1].astype(np.float64)], results),
        (operands, [results[0][:1].copy()]),
        ([operands[0], operands[1][0]], results),
    ):
        with pytest.raises(ValueError):
            _recom.run_program(program, binding, ops, res, 1)


def test_little_work_wakes_nobody():
    rng = np.random.default_rng(12)
    table = rng.normal(size=(500, 16)).astype(np.float32)

    def chunks(bags):
        ids = rng.integers(0, 500, (bags, 10)).astype(np.int32)
        before = _recom.program_stats()["chunks_run"]
        pool(ids, table, SUM, threads=2)
        return _recom.program_stats()["chunks_run"] - before

    assert chunks(256) == 1
    assert chunks(8192) > 1


def test_threads_and_concurrent_calls():
    rng = np.random.default_rng(11)
    table = rng.normal(size=(500, 8)).astype(np.float32)
    ids = [rng.integers(-1, 510, (n, 10)).astype(np.int32) for n in (1, 64, 1000, 3000)]
    want = [pool(i, table, SUM, threads=1) for i in ids]

    def work(k):
        for n in range(10):
            j = (k + n) % len(ids)
            same(pool(ids[j], table, SUM, threads=1 + n % 5), want[j])

    with concurrent.futures.ThreadPoolExecutor(8) as pool_of_threads:
        list(pool_of_threads.map(work, range(8)))


def test_through_xla():
    for name, capsule in _recom.handlers().items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    table = np.random.default_rng(12).normal(size=(101, 8)).astype(np.float32)

    def program():
        b = Builder([np.int32([0]), table], [table], [("operand_axis", 0, 0)])
        rx, ri, rr = b.reg("S32"), b.reg("S64"), b.reg("F32", 8)
        b.load(rx, 0, [1])
        b.emit("INDEX", 0, ri, rx, b.size(101))
        b.take(rr, ri, 1, 8)
        b.store(rr, 0, [8])
        return b.encode()

    def call(ids, words):
        digest = hashlib.sha256(words).hexdigest()
        out = jax.ShapeDtypeStruct((ids.shape[0], 8), jnp.float32)
        return jax.ffi.ffi_call("recom_fused_v1", out)(
            ids, table, program=words, hash=digest, binding=np.array([0, -1, 1, -1], np.int64)
        )

    words = program()
    f = jax.jit(lambda ids: call(ids * 2, words) + 1)
    for n in (0, 1, 7, 5000):
        ids = np.arange(n, dtype=np.int32) % 50
        same(f(ids), table[ids * 2] + 1)
    with pytest.raises(Exception, match="recom program"):
        jax.jit(lambda ids: call(ids, words[:-8]))(np.int32([1])).block_until_ready()
    empty = jax.ffi.ffi_call("recom_empty_v1", jax.ShapeDtypeStruct((3,), jnp.float32))
    assert jax.jit(empty)(table).shape == (3,)
