"""Raw batches from numpy and pyarrow, programs from tables, and preprocessing fused with the columns it feeds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

import recom_jax
from recom_jax import preprocess as pp
from recom_jax.preprocess.ingest import ladder
from tests import cuda_emulation
from tests.helpers import check
from tests.test_preprocess import RAW, sigrid

pytestmark = pytest.mark.once

# ---- raw batches -------------------------------------------------------------------------------------------------


def test_columns_of_numpy() -> None:
    raw = {
        "ids": RAW, "small": np.arange(len(RAW), dtype=np.int16), "x": np.ones(len(RAW)), "flag": RAW > 0,
        "text": np.array(["hello"] * len(RAW)), "masked": np.ma.masked_less(RAW, 0),
    }  # fmt: skip
    made = pp.columns(raw)
    np.testing.assert_array_equal(made["ids"].to_numpy(), RAW)
    assert made["small"].dtype == np.int16 and made["x"].dtype == np.float32
    assert made["text"].to_numpy()[0] == 13009744463427800296
    np.testing.assert_array_equal(made["masked"].valid, RAW >= 0)
    assert jax.jit(lambda c: c)(made)["ids"].to_numpy().tolist() == RAW.tolist()


def test_columns_of_arrow() -> None:
    lists = [[2**40, None], None, [], [5]]
    table = pa.table({
        "i": pa.array([1, None, 2**63 - 1, -5], pa.int64()),
        "f": pa.array([1.5, None, float("nan"), 2], pa.float32()),
        "b": pa.array([True, None, False, True]),
        "l": pa.array(lists, pa.list_(pa.int64())),
        "s": pa.array([["a"], ["hello", "a"], [], None], pa.list_(pa.string())),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int32(), 2)),
    })  # fmt: skip
    chunks = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    for rows in (table, table.to_batches()[0], table.slice(0, 4), chunks):
        made = pp.columns(rows)
        assert made["i"].values.to_numpy()[[0, 2, 3]].tolist() == [1, 2**63 - 1, -5]
        assert made["i"].valid.tolist() == [True, False, True, True]
        np.testing.assert_array_equal(made["f"].values[[0, 2, 3]], np.float32([1.5, np.nan, 2]))
        assert made["b"].values.dtype == np.bool_
        assert made["l"].to_lists() == lists and made["l"].capacity == 64
        assert made["s"].to_lists()[1] == [13009744463427800296, 12917804110809363939]
        assert made["fixed"].to_lists() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    part = pp.columns(table.slice(2))
    assert part["l"].to_lists() == lists[2:] and part["fixed"].to_lists() == [[5, 6], [7, 8]]
    assert part["i"].values.to_numpy().tolist() == [2**63 - 1, -5]
    empty = pp.columns(table.slice(4))
    assert empty["l"].to_lists() == [] and empty["i"].shape == (0,) and empty["s"].rows == 0
    assert jax.tree.structure(empty) == jax.tree.structure(made)  # no null is no other structure


@pytest.mark.once
def test_capacities_are_few() -> None:
    sizes = [ladder(n) for n in range(1, 5000)]
    assert all(n <= s <= 1.25 * n for n, s in zip(range(1, 5000), sizes, strict=True))
    assert len(set(sizes)) < 50


@pytest.mark.once
def test_lists_of_host_arrays_get_one_of_few_capacities() -> None:
    shapes = set()
    for n in range(65, 80):
        made = pp.columns({"l": pp.Jagged(pp.Nullable(np.arange(n), np.ones(n, bool)), [0, n])})[
            "l"
        ]
        shapes.add(made.capacity)
        assert (
            made.to_lists() == [list(range(n))]
            and pp.columns({"l": made})["l"].capacity == made.capacity
        )
    assert shapes == {80}


@pytest.mark.once
@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.null(), pa.decimal128(5)])
def test_arrow_types_without_numbers(kind: Any) -> None:
    with pytest.raises(TypeError, match="column 'a'"):
        pp.columns({"a": pa.array([None], kind)})


# ---- programs ----------------------------------------------------------------------------------------------------

TABLE: dict[str, Any] = {
    "x": ["I1", ("fill_null", {"value": 0.5}), ("logit", 1e-3)],
    "C1": {"input": "C1", "ops": [{"op": "firstx", "n": 2}, ["sigrid_hash", 1, 1000]]},
    "padded": ["@C1", ("pad", 2)],
    "raw": "I1",
    "shared": {"input": ["C1", "C2"], "ops": ["id_overlap_count"]},
}


def test_program() -> None:
    ids = pa.list_(pa.int64())
    schema = pa.schema([("I1", pa.float32()), ("C1", ids), ("C2", ids)])
    program = pp.program(TABLE, schema=schema)
    raw = pp.columns({
        "I1": pa.array([0.25, None], pa.float32()),
        "C1": pa.array([[2**40, 7, 9], [3]]),
        "C2": pa.array([[1], [2]]),
    })  # fmt: skip
    eager, jitted = program(raw), jax.jit(program)(raw)
    hashed = [[sigrid(2**40, 1, 1000), sigrid(7, 1, 1000)], [sigrid(3, 1, 1000)]]
    for made in (eager, jitted):
        assert made["C1"].to_lists() == hashed
        assert np.asarray(made["padded"]).tolist() == [hashed[0], [hashed[1][0], -1]]
        np.testing.assert_allclose(made["x"], np.log([1 / 3, 1]), rtol=1e-6)
        assert made["shared"].values.tolist() == [0, 0]
    assert program.counts["sigrid_hash"] == 1 and program.inputs == ("I1", "C1", "C2")
    assert "sigrid_hash(C1:1.firstx, salt=1, max_value=1000)" in str(program)
    assert program == pp.program(TABLE) and hash(program) == hash(pp.program(TABLE))


@pytest.mark.once
def test_a_cross_in_a_table() -> None:
    cross = {
        "input": ["a", "b", "a"],
        "ops": [{"op": "hashed_cross", "num_buckets": 50}, ["clamp", 0, 9]],
    }
    program = pp.program({"c": cross})
    raw = {"a": jnp.arange(4), "b": jnp.arange(4) * 7}
    want = np.minimum(pp.hashed_cross(raw["a"], raw["b"], raw["a"], num_buckets=50), 9)
    np.testing.assert_array_equal(program(raw)["c"], want)
    with pytest.raises(ValueError, match="num_buckets"):
        pp.program({"c": {"input": ["a", "b"], "ops": ["hashed_cross"]}})


@pytest.mark.once
@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"a": ["I1", "no_such"]}, "no operator is named 'no_such'"),
        ({"a": ["I1", ("clamp", 1)]}, "clamp: missing a required argument"),
        ({"a": ["I1", ("clamp", {"low": 1})]}, "clamp"),
        ({"a": ["@b", "log1p"], "b": ["@a", "log1p"]}, "need each other"),
        ({"a": ["@c", "log1p"]}, "no output has that name"),
        ({"a": {"in": "x"}}, "input and ops"),
        ({"a": {"input": ["x", "y"]}}, "no operator that joins"),
        ({"a": 5}, "not 5"),
    ],
)
def test_program_errors(table: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pp.program(table)


@pytest.mark.once
def test_program_names_columns_that_are_missing() -> None:
    with pytest.raises(ValueError, match="the schema has"):
        pp.program(TABLE, schema=["I1"])
    with pytest.raises(ValueError, match="reads column 'I1'"):
        pp.program({"a": ["I1", "log1p"]})({})
    with pytest.raises(ValueError, match="output 'a': clamp: lo is 2 and hi 1; lo must not exceed"):
        pp.program({"a": ["I1", ("clamp", 2, 1)]})


# ---- fused with the columns that it feeds ------------------------------------------------------------------------

TABLES = {
    n: np.random.default_rng(len(n)).normal(size=(1000, 4)).astype(np.float32)
    for n in ("a", "bb", "ccc")
}


@pytest.mark.parametrize("size", [1000, 100_000, 10**9 + 7])
def test_hash_and_lookup_are_one_call(size: int) -> None:
    def model(t: Any, raw: Any) -> Any:
        ids = pp.sigrid_hash(pp.fill_null(raw["C1"], 0), salt=1, max_value=size)
        return jnp.take(t["a"], ids % 1000, axis=0)

    raw = pp.columns({"C1": pa.array([None, *RAW.tolist()], pa.int64())})
    check(model, TABLES, raw, columns=1)
    text = recom_jax.optimize(model).lower(TABLES, raw).as_text()
    assert "stablehlo." in text and "stablehlo.multiply" not in text  # no arithmetic is left


def test_lists_bins_and_classes_feed_fused_columns() -> None:
    def model(t: Any, raw: Any) -> Any:
        ids = pp.sigrid_hash(pp.pad(pp.firstx(raw["L"], 3), 3, 0), salt=1, max_value=1000)
        there = jnp.arange(3) < pp.firstx(raw["L"], 3).lengths[:, None]
        bag = jnp.where(there[..., None], t["a"][ids], 0).sum(1)
        one = jnp.take(t["bb"], pp.bucketize(raw["x"], [0, 0.5, 1, 1.5]), axis=0)
        two = jnp.take(t["ccc"], pp.onehot_class(raw["x"], 0, 2, 9), axis=0)
        return bag, one, two

    raw = {
        "L": pp.Jagged(pp.Int64(RAW[:20]), [0, 3, 3, 9, 20]),
        "x": jnp.array([0.0, 0.3, np.nan, 2.0]),
    }
    check(model, TABLES, raw, columns=3, bound=1e-5, leaves_gather=True)


def test_a_program_without_tables_is_one_call_on_request() -> None:
    def prep(raw: Any) -> Any:
        ids = [pp.sigrid_hash(pp.fill_null(raw["C1"], -1), k, 10**6 + k) for k in range(3)]
        wide = pp.sigrid_hash(raw["C1"], 1, 2**40)
        return ids, wide, pp.onehot_class(raw["x"], 0, 1, 9), pp.logit(raw["x"], 1e-3)

    options = recom_jax.Options(fuse_values=True, verify=True)
    fused = recom_jax.optimize(prep, options=options)
    for size in (1, 50):
        raw = {
            "C1": pp.Nullable(RAW[:size], RAW[:size] > 0),
            "x": jnp.linspace(-1, 2, size).at[0].set(jnp.nan),
        }
        got, want = fused(raw), jax.jit(prep)(raw)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
    text = fused.lower(raw).as_text()
    assert text.count("custom_call @recom_fused_v1") == 1 and "stablehlo.shift_left" not in text
    assert "stablehlo.log" in text  # not exact in every context: XLA's
    assert "recom_fused" not in recom_jax.optimize(prep).lower(raw).as_text()


@pytest.mark.once
@pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing()))
def test_generated_cuda_computes_the_same_ids() -> None:
    """The kernel's text, executed by the emulation: with a lookup behind the hash, and as a program without tables."""

    def ids(raw: Any) -> Any:
        near = pp.sigrid_hash(pp.fill_null(raw["C1"], -1), 3, 997)
        far = pp.sigrid_hash(raw["C1"].values, -5, 10**9 + 7)
        return {"near": near, "far": far, "bin": pp.onehot_class(raw["x"], 0, 1, 9)}

    def rows(raw: Any) -> Any:
        made = ids(raw)
        return [jnp.take(raw["t"], made[k] % 997, axis=0) for k in ("near", "far")]

    table = np.random.default_rng(0).normal(size=(997, 4)).astype(np.float32)
    raw = {"C1": pp.Nullable(RAW, RAW > 0), "x": jnp.linspace(-1, 2, len(RAW)), "t": table}
    for fn, options in ((rows, {}), (ids, {"fuse_values": True})):
        got = cuda_emulation.compiled(fn, raw, **options).run(cuda_emulation.emulate)
        jax.tree.map(np.testing.assert_array_equal, got, jax.jit(fn)(raw))
