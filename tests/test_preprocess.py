"""Preprocessing operators against oracles in Python integers and numpy, written from their published formulas."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import preprocess as pp
from recom_jax.preprocess import words

pytestmark = pytest.mark.once

MASK = (1 << 64) - 1
RNG = np.random.default_rng(0)
EDGES = np.array(
    [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63)], np.int64
)
RAW = np.concatenate([EDGES, RNG.integers(-(2**63), 2**63 - 1, 40)])


def mixed(x: int) -> int:
    k = x & MASK
    k = (~k + (k << 21)) & MASK
    k ^= k >> 24
    k = (k + (k << 3) + (k << 8)) & MASK
    k ^= k >> 14
    k = (k + (k << 2) + (k << 4)) & MASK
    k ^= k >> 28
    return (k + (k << 31)) & MASK


def sigrid(x: int, salt: int, m: int) -> int:
    seed, mul = salt & MASK, 0x9DDFEA08EB382D69
    a = ((mixed(x) ^ seed) * mul) & MASK
    a ^= a >> 47
    b = ((seed ^ a) * mul) & MASK
    b ^= b >> 47
    h = (b * mul) & MASK
    return (h - (1 << 64) if h >> 63 else h) % m


def host(x: Any) -> np.ndarray:
    return np.asarray(x)


def units(got: Any, want: np.ndarray) -> float:
    """How far apart, in units in the last place of float32, of finite numbers; the others must agree."""
    made = host(got)
    assert made.dtype == np.float32
    finite = np.isfinite(want)
    np.testing.assert_array_equal(made[~finite], want[~finite].astype(np.float32))
    size = np.maximum(np.abs(want[finite]).astype(np.float32), np.finfo(np.float32).tiny)
    return float(np.max(np.abs(made[finite] - want[finite]) / np.spacing(size), initial=0))


# ---- hashing -----------------------------------------------------------------------------------------------------


def test_sigrid_hash_published_vectors() -> None:
    want = [60, 54, 54, 9, 4, 91, 11, 67, 79, 2, 25, 92, 98, 83, 66, 2]
    assert host(pp.sigrid_hash(np.arange(1, 17), 0, 100)).tolist() == want
    assert host(pp.sigrid_hash(jnp.arange(1, 17), salt=0, max_value=100)).tolist() == want
    for x, salt, m, y in (
        (10, 1, 100, 37), (-10, 5, 1000, 226), (2**62, 7, 1000000007, 609896638), (0, 0, 2**40, 262443623510)
    ):  # fmt: skip
        assert host(pp.sigrid_hash(np.array([x]), salt, m)).tolist() == [y] == [sigrid(x, salt, m)]


SIZES = (1, 3, 65537, (1 << 26) - 1, 10**9 + 7, 2**31, 2**40, 2**63 - 1)


@pytest.mark.parametrize("m", SIZES)
def test_sigrid_hash_every_size(m: int) -> None:
    salt = (m * 7919) - 10**12
    got = pp.sigrid_hash(pp.Int64(RAW), salt, m)
    assert host(got).tolist() == [sigrid(int(x), salt, m) for x in RAW]
    assert got.dtype == (np.int32 if m <= 2**31 else np.int64)


def test_jit_gives_the_same_and_int64_passes_through_it() -> None:
    f = jax.jit(lambda x: pp.sigrid_hash(x, 3, 10**12))
    assert host(f(pp.Int64(RAW))).tolist() == [sigrid(int(x), 3, 10**12) for x in RAW]
    same = jax.jit(lambda x: x)(pp.Int64(RAW))
    np.testing.assert_array_equal(same.to_numpy(), RAW)
    assert pp.Int64([2**64 - 1]).to_numpy().tolist() == [2**64 - 1]
    assert pp.Int64(RAW)[2:4].to_numpy().tolist() == [-1, 2**31 - 1]


def test_narrow_and_unsigned_inputs_are_their_numbers() -> None:
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.bool_):
        x = np.array([0, 1, 100, 77], dtype)
        x = x if dtype == np.bool_ or np.iinfo(dtype).min == 0 else np.append(x, -x)
        got = host(pp.sigrid_hash(jnp.asarray(x), 1, 9999)).tolist()
        assert got == [sigrid(int(v), 1, 9999) for v in x]
    assert host(pp.sigrid_hash(jnp.zeros(0, jnp.int32), 1, 5)).shape == (0,)


def test_hash_bucket_is_unsigned() -> None:
    x = np.concatenate([RAW.view(np.uint64), [2**64 - 1]]).astype(np.uint64)
    for m in (1, 7, 1000, 2**31 + 11, 10**15):
        assert host(pp.hash_bucket(x, m)).tolist() == [int(v) % m for v in x]
    assert host(pp.hash_bucket(np.array([-1]), 10)).tolist() == [(2**64 - 1) % 10]


def cat(a: int, b: int) -> int:
    mul = 0xC6A4A7935BD1E995
    mix = b * mul & MASK
    r = (a ^ mul ^ ((mix ^ mix >> 47) * mul & MASK)) * mul & MASK
    r = (r ^ r >> 47) * mul & MASK
    return r ^ r >> 47


def test_hashed_cross() -> None:
    a, b, c = (np.roll(RAW, k) for k in range(3))
    for columns in ((a, b), (a, b, c)):
        want = []
        for row in zip(*columns, strict=True):
            state = 0xDECAFCAFFE
            for x in row:
                state = cat(state, int(x) & MASK)
            want.append(state % 1009)
        assert host(pp.hashed_cross(*columns, num_buckets=1009)).tolist() == want
    nulls = pp.hashed_cross(pp.Nullable(a, a > 0), b, num_buckets=10)
    np.testing.assert_array_equal(nulls.valid, a > 0)


@pytest.mark.once
def test_hashed_cross_published_vector() -> None:
    """TensorFlow's own test of a cross of three strings (without buckets: mod the largest int64)."""
    parts = [pp.fingerprint64([f"batch1-FC{k}-F1"]) for k in (1, 2, 3)]
    assert host(pp.hashed_cross(*parts, num_buckets=2**63 - 1)).tolist() == [1971693436396284976]


# Of farmhash::Fingerprint64, by length: each branch of the definition, and its ends.
FINGERPRINTS = {
    "": 11160318154034397263, "a": 12917804110809363939, "hello": 13009744463427800296,
    "abcdefgh": 18368443631171807497, "0123456789abcdef": 6105018409752412263,
    "0123456789abcdefg": 12024047538191061578,
    "x" * 32: 12901576723999808517, "x" * 33: 12270365409943098935, "y" * 64: 4471793200125962424,
    "y" * 65: 13246502507848426076, "z" * 128: 5180972258444977603, "w" * 1000: 2136240263560119370,
}  # fmt: skip


def test_fingerprints_of_strings() -> None:
    import pyarrow as pa

    text = list(FINGERPRINTS)
    want = list(FINGERPRINTS.values())
    assert host(pp.fingerprint64(text)).tolist() == want
    assert host(pp.fingerprint64(np.array([t.encode() for t in text], object))).tolist() == want
    assert host(pp.fingerprint64(text, threads=3)).tolist() == want
    for kind in (
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ):
        column = pa.array([None, *text], pa.string()).cast(kind).slice(1)
        got = pp.fingerprint64(column)
        assert host(got.values).tolist() == want and got.valid.all()
    got = pp.fingerprint64(pa.chunked_array([["a"], ["hello", None]]))
    assert host(got.values)[:2].tolist() == [FINGERPRINTS["a"], FINGERPRINTS["hello"]]
    assert got.valid.tolist() == [True, True, False]
    assert host(pp.fingerprint64([])).shape == (0,)
    ids = pp.hash_bucket(pp.fingerprint64(text), 1000)
    assert host(ids).tolist() == [w % 1000 for w in want]


# ---- bucketize, ranges, nulls ------------------------------------------------------------------------------------


def lower_bound_bins(x: float, borders: list[float]) -> int:
    i = sum(b < x for b in borders)
    return i + 1 if i < len(borders) - 1 and x >= borders[i + 1] else i


def test_bucketize_published_vectors() -> None:
    borders = [0, 2, 3, 5, 500, 1000]
    assert host(pp.bucketize(jnp.arange(1, 7), borders)).tolist() == [1, 1, 2, 3, 3, 4]
    assert host(pp.bucketize(jnp.arange(1.5, 7), borders)).tolist() == [1, 2, 3, 3, 4, 4]
    assert host(pp.bucketize(jnp.array([1.5]), [1, 2, 2, 3, 3])).tolist() == [1]


BORDERS = (
    [0.5, 1, 1.5],
    [0.1, 0.1, 0.3],
    [-5.0],
    [1, 2, 2, 3, 3],
    [-math.inf, 0, math.inf],
    [-(2.0**70), 3e9, 2.0**63],
)


@pytest.mark.parametrize("borders", BORDERS, ids=str)
def test_bucketize_by_the_definition(borders: list[float]) -> None:
    near = np.nextafter(np.float32(borders)[:, None], np.float32([-np.inf, np.inf])).ravel()
    near = near[np.abs(near) >= np.finfo(np.float32).tiny]  # XLA takes subnormal numbers for 0
    x = np.array([*near, *borders, 0, -0.0, 1e30, -1e30, np.inf, -np.inf], np.float32)
    got = pp.bucketize(jnp.asarray(x), borders)
    assert got.dtype == jnp.int32
    assert host(got).tolist() == [lower_bound_bins(float(v), borders) for v in x]
    left = host(pp.bucketize(jnp.asarray(x), borders, right=False))
    assert left.tolist() == [sum(b <= float(v) for b in borders) for v in x]
    whole = np.array([-6, -5, -4, 0, 1, 2, 3, 4, 2**31 - 1, -(2**31)], np.int32)
    for column, numbers in (
        (jnp.asarray(whole), whole),
        (pp.Int64(RAW), RAW),
        (jnp.arange(9, dtype=jnp.uint8), range(9)),
    ):
        assert host(pp.bucketize(column, borders)).tolist() == [
            lower_bound_bins(int(v), borders) for v in numbers
        ]
        want = [sum(b <= int(v) for b in borders) for v in numbers]
        assert host(pp.bucketize(column, borders, right=False)).tolist() == want


def test_bucketize_nan() -> None:
    x = jnp.array([jnp.nan])
    assert host(pp.bucketize(x, [1, 2])).tolist() == [0]
    assert (
        host(pp.bucketize(x, [1, 2], right=False)).tolist()
        == np.digitize([np.nan], [1, 2]).tolist()
        == [2]
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pp.bucketize(jnp.ones(2), [2, 1]), "not sorted"),
        (lambda: pp.bucketize(jnp.ones(2), []), "at least one"),
        (lambda: pp.bucketize(jnp.ones(2), [1, 1, 1]), "more than twice"),
        (lambda: pp.bucketize(jnp.ones(2), [math.nan]), "NaN"),
        (lambda: pp.sigrid_hash(jnp.arange(2), 0, 0), "max_value"),
        (lambda: pp.sigrid_hash(jnp.arange(2), 0, 2**63), "max_value"),
        (lambda: pp.hash_bucket(jnp.arange(2), -1), "num_buckets"),
        (lambda: pp.clamp(jnp.ones(2), 2, 1), "lo must not exceed hi"),
        (lambda: pp.clamp(jnp.ones(2), math.nan, 1), "lo must not exceed hi"),
        (lambda: pp.clamp(jnp.arange(2), 0.5, 1), "cast the column"),
        (lambda: pp.fill_null(jnp.arange(2), 1.5), "not a number of the column"),
        (lambda: pp.fill_null(jnp.zeros(2, jnp.int8), 300), "not a number of the column"),
        (lambda: pp.logit(jnp.ones(2), 0.6), "eps lies"),
        (lambda: pp.onehot(jnp.ones(2), 1, 1, 3), "low must be below"),
        (lambda: pp.onehot(jnp.ones(2), 0, 1, 0), "at least 1"),
        (lambda: pp.ngram(pp.Jagged([1], [0, 1]), 0), "at least 1"),
        (lambda: pp.hashed_cross(jnp.arange(2), num_buckets=3), "at least two"),
        (lambda: pp.hashed_cross(jnp.arange(2), jnp.arange(3), num_buckets=3), "length mismatch"),
        (lambda: pp.Nullable(np.ones(2), np.ones(3, bool)), "length mismatch"),
        (lambda: pp.Jagged(np.ones(2), [0, 3]), "length mismatch"),
        (lambda: pp.Jagged(np.ones(2), [0, 2, 1]), "never descends"),
        (lambda: pp.Jagged(jnp.ones(2), jnp.array([0, 3])), "length mismatch"),
        (lambda: pp.Jagged(np.ones(2), [1, 2]), "starts at 0"),
        (lambda: pp.Jagged(np.ones(2), [0, 2], np.ones(2, bool)), "valid has shape"),
        (lambda: pp.id_overlap_count(pp.Jagged([1], [0, 1]), pp.Jagged([1], [0, 1, 1])), "length mismatch"),
        (lambda: pp.Int64([2**64]), "64 bits"),
        (lambda: pp.Int64(np.zeros(2, np.uint32), np.zeros(3, np.uint32)), "must be equal"),
        (lambda: pp.columns({"a": np.ones(2), "b": np.ones(3)}), "length mismatch"),
    ],
)  # fmt: skip
def test_errors_of_value(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        call()
    assert isinstance(caught.value, recom_jax.RecomError)


@pytest.mark.parametrize(
    "call",
    [
        lambda: pp.sigrid_hash(jnp.ones(2), 0, 5),
        lambda: pp.sigrid_hash(jnp.arange(2), 0.5, 5),
        lambda: jax.jit(lambda m: pp.sigrid_hash(jnp.arange(2), 0, m))(5),
        lambda: pp.firstx(jnp.arange(2), 3),
        lambda: pp.cast(jnp.arange(2), "no such"),
        lambda: pp.cast(jnp.arange(2), np.str_),
        lambda: pp.clamp(jnp.arange(2), "a", 3),
        lambda: pp.Int64(np.ones(2)),
        lambda: pp.Int64(jnp.ones(2)),
        lambda: pp.fingerprint64([1]),
        lambda: pp.log1p(np.array(["a"])),
        lambda: pp.scale_to_0_1(pp.Jagged([1.0], [0, 1])),
        lambda: pp.columns([1, 2]),
    ],
)
def test_errors_of_type(call: Any) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert isinstance(caught.value, recom_jax.RecomError)


def test_clamp() -> None:
    x = np.array([-3.5, 0, 2.5, np.nan, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(pp.clamp(jnp.asarray(x), -1, 2), np.clip(x, -1, 2))
    assert (
        host(pp.clamp(pp.Int64(RAW), -(2**40), 2**40)).tolist()
        == np.clip(RAW, -(2**40), 2**40).tolist()
    )
    assert host(pp.clamp(jnp.arange(5, dtype=jnp.uint8), -7, 300)).tolist() == [0, 1, 2, 3, 4]
    assert host(pp.clamp(jnp.arange(5), 2, 2)).tolist() == [2] * 5


def test_fill_null_and_null_in_null_out() -> None:
    x = pp.Nullable(np.array([1, 2, np.nan], np.float32), np.array([True, False, True]))
    np.testing.assert_array_equal(pp.fill_null(x, 7), [1, 7, np.nan])
    np.testing.assert_array_equal(pp.fill_null(x, 7, nan=True), [1, 7, 7])
    np.testing.assert_array_equal(pp.fill_null(x.values, 7), x.values)
    operators = (
        pp.log1p,
        pp.logit,
        lambda v: pp.boxcox(v, 2),
        lambda v: pp.cast(v, np.int32),
        lambda v: pp.clamp(v, 0, 1),
        lambda v: pp.bucketize(v, [1]),
        lambda v: pp.onehot(v, 0, 1, 2),
        pp.z_score,
        pp.scale_to_0_1,
    )
    for op in operators:
        np.testing.assert_array_equal(op(x).valid, x.valid)
    ids = pp.Nullable(pp.Int64(RAW), RAW > 0)
    assert host(pp.fill_null(ids, -5)).tolist() == np.where(RAW > 0, RAW, -5).tolist()
    np.testing.assert_array_equal(pp.sigrid_hash(ids, 0, 9).valid, RAW > 0)
    assert pp.onehot(x, 0, 4, 2).values.tolist() == [[1, 0], [0, 0], [1, 0]]


def test_cast() -> None:
    y = np.concatenate(
        [RAW, RNG.integers(-(2**40), 2**40, 200), [2**24 + 1, 2**24 + 3, 2**33 + 2**9]]
    )
    for dtype in (np.float32, np.int8, np.int32, np.uint16, np.uint32, np.bool_):
        np.testing.assert_array_equal(host(pp.cast(y, dtype)), y.astype(dtype))
    np.testing.assert_array_equal(
        host(pp.cast(y.view(np.uint64), np.float32)), y.view(np.uint64).astype(np.float32)
    )
    assert host(pp.cast(jnp.array([-7], jnp.int32), np.int64)).tolist() == [-7]
    x = jnp.array([1.9, -1.9, np.nan, 1e10, -1e10, np.inf, 2147483520.0], jnp.float32)
    big = 2**31 - 1
    assert host(pp.cast(x, np.int32)).tolist() == [1, -1, 0, big, -(2**31), big, 2147483520]
    assert host(pp.cast(x, np.int8)).tolist() == [1, -1, 0, 127, -128, 127, 127]
    assert host(pp.cast(x, np.uint32)).tolist() == [1, 0, 0, 2**32 - 1, 0, 2**32 - 1, 2147483520]
    assert host(pp.cast(x, bool)).tolist() == [True] * 7


# ---- functions ---------------------------------------------------------------------------------------------------


def test_functions_are_right_to_four_units() -> None:
    one = np.float32(1)
    x = np.concatenate([RNG.uniform(0, 1, 4000), 0.5 + RNG.normal(size=999) * 1e-3])
    x = np.append(x, [0, 1, np.nan, 0.5, 2, -1]).astype(np.float32)
    with np.errstate(all="ignore"):
        p = np.clip(x, np.float32(1e-6), one - np.float32(1e-6)).astype(np.float64)
        assert units(pp.logit(x, 1e-6), np.log(p / (1 - p))) <= 4
        p = x.astype(np.float64)
        assert units(pp.logit(x), np.log(p / (1 - p))) <= 4
        y = np.concatenate([np.exp(RNG.normal(size=4000) * 2), 1 + RNG.normal(size=999) * 1e-3])
        y = np.append(y, [0, -3, np.nan, np.inf]).astype(np.float32)
        z = y.astype(np.float64)
        for power in (0, 0.5, 2, -1, 3.3):
            exact = float(np.float32(power))
            made = np.log(z) if power == 0 else (z**exact - 1) / exact
            assert units(pp.boxcox(y, power), np.where(z > 0, made, z)) <= 4
        assert units(pp.log1p(y), np.log1p(z)) <= 4
    assert pp.log1p(jnp.arange(3)).dtype == jnp.float32
    assert pp.boxcox(jnp.ones(3, jnp.bfloat16), 0.5).dtype == jnp.bfloat16


def test_onehot() -> None:
    low, high, n = -1.0, 2.0, 7
    x = np.concatenate([RNG.uniform(-2, 3, 500), np.linspace(-1, 2, 50)])
    x = np.append(x, [np.nan, np.inf, -np.inf, 2, -1]).astype(np.float32)
    step = np.float32((high - low) / n)
    with np.errstate(invalid="ignore"):
        classes = np.trunc((x - np.float32(low)) / step)
    classes = np.where((classes >= 0) & (classes < n), classes, 0).astype(int)
    assert host(pp.onehot_class(x, low, high, n)).tolist() == classes.tolist()
    np.testing.assert_array_equal(pp.onehot(x, low, high, n), np.eye(n, dtype=np.float32)[classes])


def test_mapid() -> None:
    mapping = np.array([5, 6, 7], np.int32)
    want = [mapping[i] if 0 <= i < 3 else 9 for i in [0, 2, 3, -1, 2**40, -(2**63)]]
    ids = np.array([0, 2, 3, -1, 2**40, -(2**63)])
    assert host(pp.mapid(ids, mapping, 9)).tolist() == want
    assert host(pp.mapid(jnp.array([0, 2, 3, -1]), list(mapping), 9)).tolist() == want[:4]
    assert host(pp.mapid(ids, RAW[:3], -4)).tolist() == [RAW[0], RAW[2], -4, -4, -4, -4]
    assert host(pp.mapid(ids, mapping[:0], 9)).tolist() == [9] * 6
    assert host(jax.jit(lambda t, i: pp.mapid(i, t))(mapping, jnp.array([1, 7]))).tolist() == [6, 0]


def test_statistics() -> None:
    x = RNG.normal(size=100).astype(np.float32)
    np.testing.assert_allclose(pp.scale_to_0_1(x), (x - x.min()) / (x.max() - x.min()), rtol=1e-6)
    np.testing.assert_allclose(pp.z_score(x), (x - x.mean()) / x.std(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        pp.z_score(x, ddof=1), (x - x.mean()) / x.std(ddof=1), rtol=1e-4, atol=1e-6
    )
    same = np.full(5, 2.5, np.float32)
    np.testing.assert_allclose(pp.scale_to_0_1(same), 1 / (1 + np.exp(-same)), rtol=1e-6)
    np.testing.assert_array_equal(pp.z_score(same), same)
    holes = pp.Nullable(np.append(x, 1e9).astype(np.float32), np.append(np.ones(100, bool), False))
    np.testing.assert_allclose(pp.z_score(holes).values[:100], pp.z_score(x), rtol=1e-5, atol=1e-6)
    for op in (pp.scale_to_0_1, pp.z_score):
        assert np.isnan(op(np.append(x, np.float32(np.nan)))).all()
        assert op(np.zeros(0, np.float32)).shape == (0,)


# ---- lists -------------------------------------------------------------------------------------------------------

LISTS: list[Any] = [[1, 2, 3], [], [4], None, [5, None, 6, 7, 8], [9, 10]]


def jagged(lists: list[Any], padding: int = 2) -> pp.Jagged:
    flat = [v for row in lists for v in row or []]
    splits = np.cumsum([0, *(len(row or []) for row in lists)])
    values = np.array([0 if v is None else v for v in flat] + [77] * padding, np.int64) * 10**11
    known = np.array([v is not None for v in flat] + [True] * padding)
    return pp.Jagged(
        pp.Nullable(values, known), splits, np.array([row is not None for row in lists])
    )


def scaled(lists: list[Any]) -> list[Any]:
    return [None if r is None else [None if v is None else v * 10**11 for v in r] for r in lists]


@pytest.mark.once
def test_columns_of_python_values() -> None:
    assert pp.fill_null([1, None, 2**40], 7).to_numpy().tolist() == [1, 7, 2**40]
    np.testing.assert_array_equal(pp.fill_null([1.5, None], 2), [1.5, 2])
    lists = [[1, 2**40], None, [], [None, 3]]
    assert pp.Jagged.from_lists(lists).to_lists() == lists
    assert pp.Jagged.from_lists([[0.5], []]).to_lists() == [[0.5], []]
    assert pp.Jagged.from_lists([]).to_lists() == [] and pp.Jagged.from_lists(
        [None]
    ).to_lists() == [None]
    assert pp.firstx(pp.Jagged.from_lists(lists), 1).to_lists() == [[1], None, [], [None]]


@pytest.mark.parametrize("n", [0, 2, 9])
def test_firstx_and_ngram(n: int) -> None:
    x = jagged(LISTS)
    assert pp.firstx(x, n).to_lists() == scaled([None if r is None else r[:n] for r in LISTS])
    if not n:
        return
    want = []
    for row in LISTS:
        m = min(n, len(row or []))
        windows = [] if not m else [v for k in range(len(row) - m + 1) for v in row[k : k + m]]
        want.append(None if row is None else windows)
    assert pp.ngram(x, n).to_lists() == scaled(want)


def test_lists_in_odd_shapes() -> None:
    for empty in (
        pp.Jagged(np.zeros(0, np.int32), [0]),
        pp.Jagged(np.zeros(0, np.int32), [0, 0, 0]),
    ):
        assert pp.firstx(empty, 3).to_lists() == [[]] * empty.rows
        assert pp.ngram(empty, 2).to_lists() == [[]] * empty.rows
        assert pp.pad(empty, 2).tolist() == [[-1, -1]] * empty.rows
        assert pp.sigrid_hash(empty, 0, 5).to_lists() == [[]] * empty.rows
        assert pp.id_overlap_count(empty, empty).shape == (empty.rows,)
    one = pp.Jagged(np.array([3, 4], np.int32), [0, 2])
    assert pp.ngram(one, 2).to_lists() == [[3, 4]]


def test_pad_lists_and_back() -> None:
    x = jagged(LISTS)
    want = [[1, 2], [-1, -1], [4, -1], [-1, -1], [5, -1], [9, 10]]
    assert host(pp.pad(x, 2, -1)).tolist() == [
        [v if v == -1 else v * 10**11 for v in r] for r in want
    ]
    assert pp.fill_null_lists(x).to_lists() == scaled([r or [] for r in LISTS])
    filled = pp.fill_null(x, 0)
    assert filled.to_lists() == scaled([None if r is None else [v or 0 for v in r] for r in LISTS])
    dense = pp.Nullable(np.array([4, 5, 6], np.int32), np.array([True, False, True]))
    assert pp.to_lists(dense).to_lists() == [[4], [], [6]]
    assert pp.to_lists(np.array([4, 5], np.int32)).to_lists() == [[4], [5]]
    assert x.segment_ids().tolist() == [0, 0, 0, 2, 4, 4, 4, 4, 4, 5, 5, 6, 6]


PAIRS = [
    ([1, 2, 3], [1, 2, 3]), ([4, 5, 6], [0, 10]), ([7, 8, 9], [7, 10, 10]), ([10, 10, 11, 12], [10, 10, 11, 13]),
    ([1, 1, 2, 3], [1, 2, 3]), ([13], [13] * 5), ([], [1]), ([], []),
]  # fmt: skip


def test_scores_of_two_lists() -> None:
    a, b = (pp.fill_null(jagged([p[k] for p in PAIRS]), 0) for k in (0, 1))
    a, b = (pp.Jagged(v.values, v.row_splits) for v in (a, b))
    sa, sb = (
        v.replace(host(v.values).astype(np.float32) / np.float32(1e11) + k)
        for k, v in enumerate((a, b))
    )
    overlap, most, total, least, largest, cosine, jaccard = [], [], [], [], [], [], []
    for left, right in PAIRS:
        ca, cb = Counter(left), Counter(right)
        both = sorted(set(ca) & set(cb))
        count = sum((ca & cb).values())
        overlap.append(count)
        most.append(sum(max(ca[i], cb[i]) for i in both))
        scores = [float(i + 1) for i in right if i in ca]
        total.append(sum(scores))
        least.append(min(scores, default=0))
        largest.append(max(scores, default=0))
        union = len(left) + len(right) - count
        jaccard.append(count / union if union else math.nan)
        va, vb = {i: n * i for i, n in ca.items()}, {i: n * (i + 1) for i, n in cb.items()}
        norm = math.hypot(*va.values()) * math.hypot(*vb.values())
        cosine.append(sum(va[i] * vb[i] for i in both) / norm if norm else math.nan)
    made = jax.jit(
        lambda a, sa, b, sb: (
            pp.id_overlap_count(a, b),
            pp.has_id_overlap(a, b),
            pp.get_max_count(a, b),
            pp.get_score_sum(a, sa, b, sb),
            pp.get_score_min(a, b, sb),
            pp.get_score_max(a, b, sb),
            pp.get_jaccard_similarity(a, b),
            pp.get_cosine_similarity(a, sa, b, sb),
        )
    )(a, sa, b, sb)
    shared = [float(n > 0) for n in overlap]
    want = [overlap, shared, most, total, least, largest]
    assert [m.tolist() for m in made[:6]] == want
    np.testing.assert_allclose(made[6], jaccard, rtol=1e-6)
    np.testing.assert_allclose(made[7], cosine, rtol=1e-6)


@pytest.mark.once
def test_published_scores() -> None:
    ids = pp.Jagged(np.array([1, 2, 3], np.int32), [0, 3])
    first, second = (ids.replace(np.array(v, np.float32)) for v in ([1, 2, 3], [5, 4, 3]))
    np.testing.assert_allclose(
        pp.get_cosine_similarity(ids, first, ids, second), [0.831522], rtol=1e-6
    )
    nulls = jagged([[1, None], None, [2]])
    got = pp.id_overlap_count(nulls, jagged([[1, 2], [1], [2]]))
    assert got.valid.tolist() == [False, False, True] and got.values[2] == 1


def test_scores_belong_to_ids_by_row() -> None:
    """A null list on one side moves all behind it; they were paired by place."""
    ids = pp.Jagged(np.array([1, 2, 3, 4], np.int32), [0, 0, 2, 4], [False, True, True])
    scores = pp.Jagged(np.array([5, 6, 7, 8], np.float32), [0, 1, 3, 4], [False, True, True])
    right = pp.Jagged(np.array([1, 2, 3], np.int32), [0, 0, 1, 3])
    ones = right.replace(np.ones(3, np.float32))
    for made in (
        jax.jit(pp.get_cosine_similarity)(ids, scores, right, ones),
        jax.jit(pp.get_cosine_similarity)(right, ones, ids, scores),
    ):
        assert made.valid.tolist() == [False, True, True]
        np.testing.assert_allclose(made.values[1], 6 / np.hypot(6, 7), rtol=1e-6)
        assert np.isnan(made.values[2])
    fits = pp.Jagged(np.array([5, 6, 7, 8], np.float32), [0, 1, 3, 4], [False, True, True])
    ids = pp.Jagged(np.array([1, 2, 3, 0], np.int32), [0, 0, 2, 3], [False, True, True])
    for wrap in (jax.jit, lambda f: f):
        made = wrap(pp.get_score_sum)(right, ones, ids, fits)
        assert made.valid.tolist() == [False, True, True]
        np.testing.assert_array_equal(made.values[1:], [6, 8])


# ---- words -------------------------------------------------------------------------------------------------------


@pytest.mark.once
def test_words() -> None:
    x = RAW.view(np.uint64)
    w = pp.Int64(x).words
    for k in (0, 1, 3, 2**32 - 1, 2**32, 0x9DDFEA08EB382D69, MASK):
        for got, want in (
            (words.mul(w, k), [int(v) * k & MASK for v in x]),
            (words.mul_high(w, k), [int(v) * k >> 64 for v in x]),
            (words.add(w, words.constant(k)), [int(v) + k & MASK for v in x]),
            (words.sub(w, words.constant(k)), [int(v) - k & MASK for v in x]),
        ):
            assert host(pp.Int64(*got, unsigned=True)).tolist() == want
        assert words.less(w, words.constant(k)).tolist() == [int(v) < k for v in x]
    for n in (1, 7, 31, 32, 33, 63):
        assert host(pp.Int64(*words.shl(w, n), unsigned=True)).tolist() == [
            int(v) << n & MASK for v in x
        ]
        assert host(pp.Int64(*words.xor_shr(w, n), unsigned=True)).tolist() == [
            int(v) ^ int(v) >> n for v in x
        ]


X64 = """
import numpy as np
from recom_jax import preprocess as pp
from tests.test_preprocess import BORDERS, RAW, lower_bound_bins, sigrid

assert pp.sigrid_hash(RAW, 5, 2**40).dtype == np.int64
for m in (100, 2**31 + 1, 2**63 - 1):
    for column in (RAW, pp.Int64(RAW)):
        assert np.asarray(pp.sigrid_hash(column, -5, m)).tolist() == [sigrid(int(v), -5, m) for v in RAW]
for borders in BORDERS:
    assert pp.bucketize(RAW, borders).tolist() == [lower_bound_bins(int(v), borders) for v in RAW]
assert pp.columns({"a": RAW})["a"] is RAW and pp.cast(pp.Int64(RAW), np.int64).tolist() == RAW.tolist()
assert pp.clamp(RAW, -5, 2**50).tolist() == np.clip(RAW, -5, 2**50).tolist()
x = np.linspace(0.01, 0.99, 99)
np.testing.assert_allclose(pp.logit(x), np.log(x / (1 - x)), rtol=1e-13, atol=1e-15)
np.testing.assert_allclose(pp.boxcox(x, 0.3), (x**0.3 - 1) / 0.3, rtol=1e-13)
"""


@pytest.mark.once
def test_with_64_bits_enabled() -> None:
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    done = subprocess.run(
        [sys.executable, "-c", X64], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
