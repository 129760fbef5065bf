"""Preprocessing kernels: generated code, run as C++, equals plain JAX; what has no rule is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import rap_plans
from recom_jax import preprocess as pp
from recom_jax.corun import kernels, runtime, symbols
from recom_jax.corun.symbols import Unsupported
from recom_jax.preprocess import hashing
from tests import corun_emulation, cuda_emulation

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]

Prep = Callable[[Any], Any]


def columns(rows: int, seed: int = 0) -> dict[str, Any]:
    """Columns of all kinds with odd values among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows).astype(np.float32) * 3
    ids = rng.integers(-(1 << 63), (1 << 63) - 1, rows)
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 2.0, 3e38], np.float32)[:rows]
    x[: len(odd)] = odd
    ids[: min(rows, 3)] = [-(1 << 63), (1 << 63) - 1, 0][:rows]

    def lists(values: Callable[[int], Any], null: bool) -> pp.Jagged:
        lengths = rng.integers(0, 6, rows) * (rng.random(rows) > 0.3)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        n = int(splits[-1])
        there = rng.random(rows) > 0.2 if null else None
        return pp.Jagged(pp.Nullable(values(n), rng.random(n) > 0.2), splits, there)

    return pp.columns(
        {
            "x": x,
            "null": pp.Nullable(x[::-1].copy(), rng.random(rows) > 0.3),
            "small": rng.integers(-5, 9, rows).astype(np.int32),
            "byte": rng.integers(0, 255, rows).astype(np.uint8),
            "flag": rng.random(rows) > 0.5,
            "id": pp.Int64(ids),
            "ids": lists(lambda n: rng.integers(-(1 << 62), 1 << 62, n), False),
            "words": lists(lambda n: rng.integers(-3, 60, n).astype(np.int32), True),
        }
    )


def exact(raw: Any) -> Any:
    """Operators whose results are the same bits everywhere."""
    hashed = pp.sigrid_hash(raw["ids"], 3, 1000)
    words = pp.clamp(raw["words"], 0, 50)
    return {
        "hash": pp.sigrid_hash(raw["id"], salt=2, max_value=77),
        "hash of int32": pp.sigrid_hash(raw["small"], salt=-3, max_value=1 << 31),
        "hash of bytes": pp.sigrid_hash(raw["byte"], salt=(1 << 62) + 1, max_value=1),
        "hash of nulls": pp.sigrid_hash(pp.Nullable(raw["id"], raw["null"].valid), 5, 99991),
        "wide": pp.sigrid_hash(raw["id"], salt=2, max_value=1 << 40),
        "bucket": pp.hash_bucket(raw["id"], 13),
        "bins": pp.bucketize(raw["x"], [-1.0, 0.0, 0.0, 2.5]),
        "many bins": pp.bucketize(raw["x"], [k / 2 for k in range(-20, 20)], right=False),
        "bins of bytes": pp.bucketize(raw["byte"], [3.0, 100.0]),
        "bins of ids": pp.bucketize(raw["id"], [-5.0, 1e9]),
        "clamp": pp.clamp(raw["x"], -1.0, 1.0),
        "cast": pp.cast(raw["x"], np.int32),
        "as byte": pp.cast(raw["x"], np.uint8),
        "filled": pp.fill_null(raw["null"], 2.5, nan=True),
        "null": raw["null"],
        "class": pp.onehot(raw["small"], 0.0, 8.0, 4),
        "map": pp.mapid(raw["small"], tuple(range(10, 16)), default=-7),
        "first": pp.pad(pp.firstx(hashed, 2), 3),
        "grams": pp.pad(pp.cast(pp.ngram(words, 3), np.int32), 5, -9),
        "twice": pp.pad(pp.ngram(pp.firstx(words, 4), 2), 4),
        "whole": pp.pad(pp.fill_null_lists(words), 2),
        "pairs": pp.pad(raw["ids"], 2, -1),
        "flags": jnp.where(raw["flag"], raw["small"], ~raw["small"]),
        "sides": jnp.stack([raw["small"], raw["small"] * 2], axis=1)[:, ::1],
        "sum": jnp.stack([raw["small"], raw["small"] + 1, raw["small"] % 3], 1).sum(1),
        "turned": jnp.reshape(jnp.stack([raw["small"], raw["small"] - 1], 1).T, (2, -1)),
        "constant": jnp.arange(6, dtype=jnp.float32),
    }


def near(raw: Any) -> Any:
    """Operators of logarithms and powers."""
    x = pp.fill_null(raw["null"], 0.5)
    return {
        "logit": pp.logit(x, eps=1e-6),
        "log1p": pp.log1p(pp.clamp(x, 0.0, 100.0)),
        "boxcox": pp.boxcox(x, 0.5),
        "boxcox 0": pp.boxcox(x, 0.0),
        "own": jnp.exp(-jnp.abs(x)) + jax.nn.sigmoid(x) + jnp.tanh(x) + jnp.sqrt(jnp.abs(x)),
    }


def compare(prep: Prep, raw: Any, check: Callable[[Any, Any], None]) -> kernels.PrepKernels:
    made = kernels.compile_prep(prep, raw)
    got = corun_emulation.run(made, jax.tree.leaves(raw))
    want = jax.jit(prep)(raw)
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    assert jax.tree.structure(want) == made.out_tree
    for (path, w), g in zip(paths, got, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), path
        try:
            check(g, np.asarray(w))
        except AssertionError as why:
            raise AssertionError(f"{jax.tree_util.keystr(path)}: {why}") from None
    return made


@pytest.mark.parametrize("rows", [0, 40])
def test_exact_operators(rows: int) -> None:
    compare(exact, columns(rows, rows), np.testing.assert_array_equal)


def test_operators_of_logarithms() -> None:
    compare(near, columns(300), lambda g, w: np.testing.assert_array_max_ulp(g, w, 8))


@pytest.mark.parametrize("number", [0, 2])
def test_plans_of_rap(number: int) -> None:
    plan = rap_plans.plan(number, shrink=13, rows=50)
    raw = pp.columns(plan.raw_batch(33))

    def check(g: Any, w: Any) -> None:
        if g.dtype == np.float32:
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(g, w)

    made = compare(plan.prep, raw, check)
    assert len({u.cls for u in made.units}) <= 12  # code is shared


_MODS = """
extern "C" void mods(const unsigned long long* x, int n, unsigned d, unsigned long long inverse, int* out) {
  for (int k = 0; k < n; ++k) out[k] = recom_cuda::floor_mod(x[k], d, inverse);
}
"""


def test_remainders_without_a_division() -> None:
    """Of all kinds of divisors, at multiples of them and at the ends of the range, signed."""
    source = kernels.compile_prep(exact, columns(4)).source + _MODS
    library, rng = corun_emulation.library(source), np.random.default_rng(0)
    two = 1 << 31
    some = [1, 2, 3, 7, 77, 99991, 0x10000, 3 << 29, two // 2 + 1, two - 19, two - 2, two - 1, two]
    for d in [*some, *rng.integers(1, two, 200).tolist()]:
        near = [k * d + e for k in (1, 2, (1 << 63) // d, ((1 << 64) - 1) // d) for e in (-1, 0, 1)]
        ends = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 2, (1 << 64) - 1]
        ends += [
            (a << 62) + (b << 31) + c for a in range(4) for b in (0, two - 1) for c in (0, two - 1)
        ]
        drawn = rng.integers(0, 1 << 64, 100, np.uint64).tolist()
        x = np.array([v % (1 << 64) for v in (*near, *ends, *drawn)], np.uint64)
        want = [int(v) % d for v in x.view(np.int64)]
        given = ctypes.c_void_p(x.ctypes.data), len(x), ctypes.c_uint(d)
        out = np.full(len(x), -1, np.int32)
        to = ctypes.c_void_p(out.ctypes.data)
        library.mods(*given, ctypes.c_ulonglong(((1 << 64) - 1) // d), to)
        np.testing.assert_array_equal(out, want, err_msg=str(d))


def test_any_cut_gives_the_same_results() -> None:
    raw = columns(40, 40)
    made = kernels.compile_prep(exact, raw)
    leaves, n = jax.tree.leaves(raw), len(made.units)
    whole = corun_emulation.run(made, leaves)
    rng = np.random.default_rng(0)
    for blocks in (1, 5, 400):
        at = {k: [0.0, *sorted(rng.random(2)), 1.0] for k in range(n)}
        pieces = [(k, a, b) for k in range(n) for a, b in zip(at[k], at[k][1:], strict=False)]
        order = [pieces[k] for k in rng.permutation(len(pieces))]
        for a, b in zip(
            whole, corun_emulation.run(made, leaves, made.tiles(order), blocks), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_tiles_come_in_the_order_of_rows() -> None:
    """What lies side by side in a result is written at about the same time, whatever unit it is of."""

    def prep(r: Any) -> Any:
        wide = [r["x"][:, None] + k * jnp.arange(3, dtype=jnp.int32) for k in range(4)]
        return {"wide": jnp.stack(wide, 1), "x": r["x"]}

    made = kernels.compile_prep(prep, {"x": np.zeros(5000, np.int32)})
    inner = {u.words: u.inner for u in made.units}
    assert len(inner) == len(made.units) and set(inner.values()) == {1, 3}
    pieces = [(k, a, b) for k in range(len(made.units)) for a, b in ((0.5, 1.0), (0.0, 0.5))]
    tiles = made.tiles(pieces)
    rows = tiles["first"] // [inner[w] for w in tiles["words"]]
    assert (np.diff(rows) >= 0).all() and len(set(tiles["words"][:5])) == 5
    for u in made.units:
        mine = tiles[tiles["words"] == u.words]
        assert mine["count"].sum() == u.rows * u.inner
    assert made.tiles([]).shape == (0,)
    # However many blocks take them in turns, none gets one unit's alone.
    long = kernels.compile_prep(
        lambda r: {"a": r["x"] + 1, "b": r["x"] * 2}, {"x": np.zeros(60 * kernels.TILE, np.int32)}
    )
    second = long.tiles([(0, 0.0, 1.0), (1, 0.0, 1.0)])["cls"] == long.units[1].cls
    for blocks in (2, 4, 6):
        for b in range(blocks):
            assert 0.2 < second[b::blocks].mean() < 0.8


def test_tiles_that_are_left_out_write_nothing() -> None:
    raw = columns(40)
    made = kernels.compile_prep(lambda r: {"a": r["small"] + 1, "b": r["small"] + 2}, raw)
    a, b = corun_emulation.run(
        made, jax.tree.leaves(raw), made.tiles([(0, 0.0, 0.5), (1, 0.25, 1.0)])
    )
    small = np.asarray(raw["small"])
    np.testing.assert_array_equal(a[:20], small[:20] + 1)
    np.testing.assert_array_equal(b[10:], small[10:] + 2)
    assert (a[20:].view(np.uint32) == 0xA5A5A5A5).all() and (
        b[:10].view(np.uint32) == 0xA5A5A5A5
    ).all()


def test_lists_may_be_shorter_than_the_capacity() -> None:
    raw = columns(40, 40)
    like = runtime.like_with(raw, runtime.roomy(runtime.capacities_of(raw)))
    assert like["ids"].values.valid.shape[0] > raw["ids"].capacity
    made = kernels.compile_prep(exact, like)
    got = corun_emulation.run(made, jax.tree.leaves(raw))
    own = kernels.compile_prep(exact, raw)
    for g, w in zip(got, corun_emulation.run(own, jax.tree.leaves(raw)), strict=True):
        np.testing.assert_array_equal(g, w)


REFUSED: dict[str, Prep] = {
    "over the rows": lambda r: pp.z_score(r["x"]),
    "places of a list column": lambda r: pp.firstx(r["ids"], 2),
    "operation sort": lambda r: jnp.sort(r["x"]),
    "operation cumsum": lambda r: jnp.cumsum(r["small"]),
    "float16": lambda r: r["x"].astype(jnp.float16),
    "other than rows": lambda r: jnp.take_along_axis(
        jnp.stack([r["small"], r["small"]], 1), jnp.abs(r["small"])[:, None] % 2, axis=1
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_rule_is_refused(why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        kernels.compile_prep(REFUSED[why], columns(100))


def test_operators_are_traced_as_ever_afterwards() -> None:
    raw = columns(20)
    before = str(jax.make_jaxpr(exact)(raw))
    kernels.compile_prep(exact, raw)
    assert str(jax.make_jaxpr(exact)(raw)) == before


def test_a_hash_is_traced_once_for_each_kind_of_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced only to learn its shape: thousands of hashes would take a minute."""
    traced: list[Any] = []
    mix = hashing.twang_mix64
    monkeypatch.setattr(hashing, "twang_mix64", lambda k: traced.append(k) or mix(k))

    def prep(raw: Any) -> Any:
        made = {}
        for k in range(1, 8):
            x = raw["a"]
            for n in range(k):
                x = pp.sigrid_hash(x, n, 100 * k + n)
            made[str(k)] = x
        wide = pp.sigrid_hash(raw["b"], 1, 1 << 40)  # is traced, as words
        return {"a": made, "b": pp.sigrid_hash(wide, 2, 1 << 31)}

    raw = pp.columns({"a": np.arange(40) << 30, "b": np.arange(40)})
    kernels.compile_prep(prep, raw)
    assert len(traced) == 3  # of 64 bits, of 32 bits, and the wide one
    compare(prep, raw, np.testing.assert_array_equal)


def test_a_call_within_a_jitted_function_is_traced_once_for_both() -> None:
    inner = jax.jit(lambda r: pp.pad(pp.firstx(r["words"], 2), 3))
    raw = columns(20)
    compare(lambda r: inner(r), raw, np.testing.assert_array_equal)
    np.testing.assert_array_equal(inner(raw), pp.pad(pp.firstx(raw["words"], 2), 3))


def test_what_is_the_same_in_each_turn_of_a_loop_is_computed_once() -> None:
    w = symbols.Writer({})
    total = w.declare(np.float32, "0")
    with w.loop(3) as k:
        x = w.value(np.float32, "load(p)")
        same = w.declare(np.int32, "0")
        with w.block(f"if ({x} > 0) {{"):
            w.line(f"{same} = 1;")
        other = w.declare(np.int32, "0")
        with w.block(f"if ({k} > 0) {{"):
            w.line(f"{other} = {same};")
        w.line(f"{total} = {total} + {w.value(np.int32, f'{same} * {k} + {other}')};")
    head, loop = w.text().split("for (")
    assert head.splitlines() == [
        "f32 r0 = 0;", "const f32 v2 = load(p);", "i32 r3 = 0;", "if (v2 > 0) {", "r3 = 1;", "}",
    ]  # fmt: skip
    assert "i32 r4 = 0;" in loop and "r4 = r3;" in loop and "r0 = r0 + v5;" in loop
    assert w.operations == 1 + 3


def test_a_loop_that_never_runs_reads_nothing() -> None:
    w = symbols.Writer({})
    with w.loop(0):
        w.value(np.float32, "load(p)")
    assert w.text().startswith("for (")


def test_a_mean_over_classes_searches_once() -> None:
    def prep(raw: Any) -> Any:
        return {"m": jnp.stack([pp.onehot(raw["x"], 0.0, 2.0, n).mean(1) for n in (4, 16, 32)], 1)}

    x = np.array([-1, 0, 0.5, 1.999, 2, 7, np.nan, 1e30], np.float32)
    made = kernels.compile_prep(prep, {"x": x})
    code = made.source[made.source.index("void class_0") :]
    searched = next(c for c in code.split("__device__") if "while (" in c)
    assert searched.index("while (") < searched.index("for (int k")
    (got,) = corun_emulation.run(made, [x])
    np.testing.assert_array_equal(got, jax.jit(prep)({"x": x})["m"])


@pytest.mark.parametrize("before", [2, 3])
def test_no_variable_has_the_name_of_a_type(before: int) -> None:
    """A place named i32 would hide the type from the lines behind it."""
    x = jnp.arange(40)

    def prep(raw: Any) -> Any:
        at = raw["n"]
        for k in range(before):
            at = at + k
        for _ in range(12):
            at = x[at % 40] + 1
        return {"at": at}

    n = np.arange(5, dtype=np.int32)
    made = kernels.compile_prep(prep, {"n": n})
    (got,) = corun_emulation.run(made, [n])
    np.testing.assert_array_equal(got, jax.jit(prep)({"n": n})["at"])
