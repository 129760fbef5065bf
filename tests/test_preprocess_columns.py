"""Columns as they come: arrays of other machines and other libraries, masks of bytes, lists that are none."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from recom_jax import corun
from recom_jax import preprocess as pp
from recom_jax.corun.prep import Room
from recom_jax.preprocess.ingest import snapshot

pytestmark = pytest.mark.once


def test_arrays_in_another_byte_order() -> None:
    """JAX takes them for arrays in this machine's order where it has compiled for such."""
    x, ids = np.arange(4, dtype=np.float32), np.array([1, 2**40, -5, 7])
    splits = np.array([0, 1, 1, 4, 4], np.int32)

    def swapped(a: Any) -> Any:
        return a.astype(a.dtype.newbyteorder(">"))

    def columns(make: Any) -> Any:
        return {
            "x": make(x),
            "n": pp.Nullable(make(x), np.ones(4, bool)),
            "l": pp.Jagged(make(x), make(splits)),
            "ids": make(ids),
        }

    run = jax.jit(lambda raw: {name: pp.cast(c, np.float32) for name, c in raw.items()})
    want = run(pp.columns(columns(lambda a: a)))
    got = run(pp.columns(columns(swapped)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert pp.bucketize(x, [1, 2]).tolist() == pp.bucketize(swapped(x), [1, 2]).tolist()
    pipe = corun.Pipeline(lambda raw: raw["x"], lambda s, b: (s, b))
    for _, m in pipe.run((), [{"x": x}, {"x": swapped(x)}]):
        np.testing.assert_array_equal(m, x)


def test_other_floats() -> None:
    x = np.array([0.25, 1.5, -2.0])
    for dtype in (np.longdouble, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16):
        made = pp.columns({"x": x.astype(dtype)})
        assert pp.clamp(made["x"], -1, 1).tolist() == [0.25, 1.0, -1.0]
        assert pp.bucketize(made["x"], [0.0, 1.0]).tolist() == [1, 2, 0]
    assert pp.columns({"x": x.astype(ml_dtypes.bfloat16)})["x"].dtype == jnp.bfloat16


def test_masks_of_bytes_are_masks() -> None:
    """Zero is False, whatever the other numbers are."""
    bytes_ = np.array([1, 2, 0], np.uint8)
    for make in (np.asarray, jnp.asarray, list):
        valid = make(bytes_)
        elements = pp.Jagged(pp.Nullable(np.array([5, 6, 7]), valid), [0, 2, 3])
        other = pp.Jagged(np.array([5, 6, 7]), [0, 2, 3])
        assert pp.pad(elements, 2).to_numpy().tolist() == [[5, 6], [-1, -1]]
        assert np.asarray(pp.id_overlap_count(elements, other).valid).tolist() == [True, False]
        assert pp.to_lists(pp.Nullable(np.array([5, 6, 7]), valid)).to_lists() == [[5], [6], []]
        rows = pp.Jagged(np.array([5, 6, 7]), [0, 1, 2, 3], valid)
        assert rows.to_lists() == [[5], [6], None] == pp.firstx(rows, 1).to_lists()
    assert jax.jit(lambda v: pp.Nullable(v, v).valid)(jnp.arange(2)).dtype == bool


def test_numbers_as_python_objects_are_numbers() -> None:
    made = pp.columns(
        {"i": np.array([1, None, 2**62], object), "f": np.array([0.5, 1, None], object)}
    )
    assert made["i"].values.to_numpy().tolist() == [1, 0, 2**62]
    assert np.asarray(made["f"].valid).tolist() == [True, True, False]
    assert made["f"].values.tolist()[:2] == [0.5, 1.0]


def test_lists_that_are_none_are_named() -> None:
    with pytest.raises(TypeError, match="column 'a': lists of lists"):
        pp.columns({"a": pa.array([[[1], [2, 3]], []])})
    with pytest.raises(TypeError, match=r"column 'a': .*Jagged.from_lists"):
        pp.columns({"a": [[1, 2], [3]]})
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(ValueError, match=r"two columns .* 'a'"):
        pp.columns(twice)


def test_snapshots_are_of_any_memory_that_may_be_written() -> None:
    class Tensor:
        """As other libraries have them: memory that numpy shares."""

        def __init__(self, of: Any) -> None:
            self.of = of

        def __len__(self) -> int:
            return len(self.of)

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return self.of

    buffer = np.zeros(3, np.float32)
    raw = {"t": Tensor(buffer), "l": [1, 2, 3], "m": memoryview(buffer)}
    kept = snapshot(raw)
    buffer[:] = 7
    raw["l"][0] = 9  # type: ignore[index]
    made = pp.columns(kept)
    assert made["t"].tolist() == [0, 0, 0] and np.asarray(made["l"]).tolist() == [1, 2, 3]
    assert np.asarray(made["m"]).tolist() == [0, 0, 0]
    words = {"w": Tensor(np.array(["a", "hello"], object))}  # a series of strings
    for batch in (words, snapshot(words)):
        made = pp.columns(batch)
        assert made["w"].to_numpy().tolist() == [12917804110809363939, 13009744463427800296]


def test_lists_that_belong_together_get_room_together() -> None:
    """Ids and their scores, while another thread makes more room for both."""
    room = Room()

    def batch(n: int) -> dict[str, Any]:
        splits = np.array([0, n], np.int32)
        return {k: pp.Jagged(np.zeros(n, np.float32), splits) for k in ("ids", "scores")}

    class Slow(dict[str, Any]):
        def items(self) -> Any:
            for k, item in enumerate(super().items()):
                if k:
                    other = threading.Thread(target=room, args=(batch(1000),))
                    other.start()
                    other.join(0.2)
                yield item

    room(batch(64))
    made = room(Slow(batch(64)))
    assert made["ids"].capacity == made["scores"].capacity


def test_the_logit_of_minus_zero_is_that_of_zero() -> None:
    x = np.array([0.0, -0.0, 1.0, -1e-30], np.float32)
    for eps in (None, 0.0):
        got = np.asarray(pp.logit(x, eps))
        assert got[:3].tolist() == [-np.inf, -np.inf, np.inf]


def test_casts_of_short_floats_stop_at_the_ends_of_the_range() -> None:
    half = np.array([60000, np.inf, -np.inf, np.nan, -3.7, 40000], np.float16)
    assert pp.cast(half, np.uint16).tolist() == [60000, 65535, 0, 0, 0, 40000]
    assert pp.cast(half, np.int16).tolist() == [32767, 32767, -32768, 0, -3, 32767]
    most, least = 2**31 - 1, -(2**31)
    assert pp.cast(half, np.int32).tolist() == [60000, most, least, 0, -3, 40000]
    brain = jnp.array([1e6, 3e38, -3e38, np.nan, 100.5, 70000], jnp.bfloat16)
    assert pp.cast(brain, np.int32).tolist() == [999424, most, least, 0, 100, 70144]
    assert pp.cast(brain, np.uint8).tolist() == [255, 255, 0, 0, 100, 255]


def test_borders_keep_every_bit() -> None:
    """numpy makes float64 of integers of both signs, and of integers beside floats."""
    x = np.array([2**64 - 1, 2**63, 2**53 + 1, 5], np.uint64)
    assert pp.bucketize(x, [9.5, 2**64 - 6]).tolist() == [2, 1, 1, 0]
    assert pp.bucketize(x, [-1, 2**53, 2**63]).tolist() == [3, 2, 2, 1]
    assert pp.bucketize(x, (np.float32(0.5), jnp.int32(5), 2**53)).tolist() == [3, 3, 3, 1]
    program = pp.program({"b": ["x", ("bucketize", [-1, 2**53, 2**63])]})
    assert program(pp.columns({"x": x}))["b"].tolist() == [3, 2, 2, 1]
    with pytest.raises(TypeError, match="borders is a number"):
        pp.bucketize(x, [[1, 2], [3, 4]])


@pytest.mark.parametrize(("setting", "x64"), [("strict", True), ("rank", False)])
def test_operators_work_where_users_forbid_promotion(setting: str, x64: bool) -> None:
    def everything(raw: Any) -> Any:
        ids, lists, x, n = raw["id"], raw["l"], raw["x"], raw["n"]
        scores = raw["s"]
        return [
            pp.sigrid_hash(lists, 1, 100), pp.sigrid_hash(ids, 1, 1 << 40), pp.hash_bucket(ids, 77),
            pp.hashed_cross(ids, ids, num_buckets=100), pp.bucketize(x, [0.1, 0.2, 0.2]),
            pp.bucketize(ids, [1, 2**41, 2**41]), pp.bucketize(raw["i8"], [1, 2, 2]), pp.clamp(ids, 0, 5),
            pp.clamp(x, 0, 0.5), pp.fill_null(n, 0), pp.fill_null(n, 0.5, nan=True), pp.fill_null(lists, 3),
            pp.cast(ids, np.float32), pp.cast(ids, np.int64), pp.cast(x, np.int8), pp.cast(raw["i8"], np.uint64),
            pp.logit(x, 0.01), pp.logit(raw["i8"]), pp.boxcox(x, 0.5), pp.boxcox(ids, 0), pp.log1p(x),
            pp.onehot(x, 0, 1, 4), pp.onehot_class(lists, 0, 9, 3), pp.mapid(ids, np.float32([1, 2])),
            pp.mapid(ids, [3, 4], 1), pp.mapid(lists, np.arange(3)), pp.scale_to_0_1(n), pp.z_score(n),
            pp.z_score(ids, 1), pp.firstx(lists, 1),
            pp.ngram(lists, 2), pp.pad(lists, 2), pp.pad(scores, 3), pp.to_lists(n),
            pp.fill_null_lists(lists), pp.id_overlap_count(lists, lists), pp.has_id_overlap(lists, lists),
            pp.get_jaccard_similarity(lists, lists), pp.get_max_count(lists, lists),
            pp.get_cosine_similarity(lists, scores, lists, scores), pp.get_score_sum(lists, scores, lists, scores),
            pp.get_score_min(lists, lists, scores), pp.get_score_max(lists, lists, scores),
            lists.segment_ids(), lists.lengths,
        ]  # fmt: skip

    def run() -> Any:
        valid = np.array([1, 0, 1, 1, 1], bool)
        raw = pp.columns({
            "id": np.arange(5) * 2**40,
            "i8": np.arange(5, dtype=np.int8),
            "x": np.linspace(0, 1, 5).astype(np.float32),
            "n": pp.Nullable(np.float32([1, 2, np.nan, 4, 5]), valid),
            "l": pp.Jagged(pp.Nullable(np.arange(6) * 2**33, np.arange(6) != 1), [0, 2, 2, 4, 5, 6], valid),
            "s": pp.Jagged(np.linspace(-1, 1, 6), [0, 2, 2, 4, 5, 6]),
        })  # fmt: skip
        return jax.tree.map(np.asarray, jax.tree.leaves(jax.jit(everything)(raw)))

    with jax.enable_x64(x64):
        want = run()
        promotion = jax.numpy_dtype_promotion, jax.numpy_rank_promotion
        with promotion[0]("strict") if setting == "strict" else promotion[1]("raise"):
            got = run()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_pad_puts_behind_is_a_number_of_the_column() -> None:
    def lists(dtype: Any) -> pp.Jagged:
        return pp.Jagged(np.array([1, 2, 3], dtype), [0, 2, 2, 3])

    for dtype, value in [(np.int32, 0.5), (np.int64, 0.5), (np.uint8, -1), (np.int32, 2**40), (np.int64, 2**63),
                         (np.int16, np.nan)]:  # fmt: skip
        with pytest.raises(ValueError, match=f"pad: .* type {np.dtype(dtype)}"):
            pp.pad(lists(dtype), 2, value)
    assert pp.pad(lists(np.int32), 2, 7.0).tolist() == [[1, 2], [7, 7], [3, 7]]
    assert pp.pad(lists(np.float32), 1, 0.5).tolist() == [[1], [0.5], [3]]
    for x64 in (False, True):  # "no fingerprint"
        with jax.enable_x64(x64):
            made = np.asarray(pp.pad(lists(np.uint64), 2))
            assert made.tolist() == [[1, 2], [2**64 - 1] * 2, [3, 2**64 - 1]]
            made = np.asarray(pp.pad(lists(np.uint64), 1, 2**63))
            assert made.tolist() == [[1], [2**63], [3]]
