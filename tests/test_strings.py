"""Strings to ids: published values, every kind of array, odd strings, nulls, and TensorFlow as the oracle."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import recom_jax
from recom_jax.errors import ArgumentError, StringError
from recom_jax.strings import fingerprint64, hash_bucket, split_hash_bucket

pytestmark = pytest.mark.once

ODD = [
    "",
    "a",
    "ab",
    "é",
    "日本",
    "😀🎉",
    "nul\0inside",
    "end\0",
    "\0",
    "x" * 300,
    "ß" * 33,
    "a" * 64,
    "b" * 65,
]
PLAIN = [s for s in ODD if not s.endswith("\0")]  # what arrays of S and U can hold


def test_published_values() -> None:
    # Guava's FarmHashFingerprint64, BigQuery's FARM_FINGERPRINT and TensorFlow's to_hash_bucket_fast document these.
    guava = {
        "test": 8581389452482819506,
        "test" * 8: -4196240717365766262,
        "test" * 64: 3500507768004279527,
    }
    bigquery = {
        "1footrue": -1541654101129638711,
        "2applefalse": 2794438866806483259,
        "3true": -4880158226897771312,
    }
    for text, value in (guava | bigquery).items():
        assert int(fingerprint64(text)) == value % 2**64, text
    assert hash_bucket(["Hello", "TensorFlow", "2.x"], 3).tolist() == [0, 2, 2]


# What TensorFlow 2.21's tf.strings.to_hash_bucket_fast([PREFIXES[:n] for n in LENGTHS], 2**31 - 1) returns; and the sum
# over all lengths 0 to 300 of (length + 1) * id.
LENGTHS = [0, 3, 4, 8, 16, 17, 32, 33, 64, 65, 128, 129, 300]
EXPECTED = [
    1699943623, 243465334, 1417740816, 1484913058, 2051616282, 855103842, 1336835946, 1399403898, 1786224767, 567263283,
    1495126328, 1983998771, 858056216,
]  # fmt: skip
CHECKSUM = 46362532893522
PREFIXES = "".join(chr(33 + i * 7 % 90) for i in range(300))


def test_every_length_as_tensorflow_made_it() -> None:
    """All code paths, without TensorFlow: one number over the lengths 0 to 300."""
    ids = hash_bucket([PREFIXES[:n] for n in range(301)], 2**31 - 1)
    assert ids[LENGTHS].tolist() == EXPECTED
    assert int((ids.astype(np.int64) * np.arange(1, 302)).sum()) == CHECKSUM


def arrays(strings: list[str | None]) -> dict[str, Any]:
    """Every kind of array that can hold them all."""
    coded = [None if s is None else s.encode() for s in strings]
    made: dict[str, Any] = {
        "list": list(strings),
        "tuple of bytes": tuple(coded),
        "object": np.array(strings, object),
        "object, every other": np.array([x for s in strings for x in (s, "-")], object)[::2],
        "string": pa.array(strings, pa.string()),
        "large_string": pa.array(strings, pa.large_string()),
        "string_view": pa.array(strings, pa.string_view()),
        "binary": pa.array(coded, pa.binary()),
        "large_binary": pa.array(coded, pa.large_binary()),
        "binary_view": pa.array(coded, pa.binary_view()),
        "slice": pa.array(["-", None, "--", *strings, "-"])[3 : 3 + len(strings)],
        "dictionary": pa.array(strings).dictionary_encode(),
        "slice of a dictionary": pa.array(["-", *strings]).dictionary_encode()[1:],
        "dictionary of binary": pa.array(coded, pa.binary()).dictionary_encode(),
        "chunked": pa.chunked_array([strings[:2], [], strings[2:]], pa.string()),
        "StringDType": np.array(strings, np.dtypes.StringDType(na_object=None)),
    }
    if None in strings:
        return made | {
            "null in a dictionary": pa.DictionaryArray.from_arrays(np.arange(len(strings)), pa.array(strings)),
            "NaN": np.array([np.nan if s is None else s for s in strings], object),
            "StringDType of NaN": np.array(
                [np.nan if s is None else s for s in strings], np.dtypes.StringDType(na_object=np.nan)
            ),
            "masked": np.ma.array(["?" if s is None else s for s in strings], mask=[s is None for s in strings]),
        }  # fmt: skip
    wide = np.array(strings, np.str_)
    return made | {"StringDType without missing": np.array(strings, np.dtypes.StringDType())} | (
        {} if wide.tolist() != list(strings) else {
            "U": wide,
            "U of the other byte order": wide.astype(wide.dtype.newbyteorder("S")),
            "U with gaps": np.stack([wide, wide], 1)[:, 0],
            "S": np.array(coded, np.bytes_),
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "strings", [ODD, PLAIN, ["only"], [], PLAIN * 2000], ids=["odd", "plain", "one", "none", "many"]
)
def test_every_kind_of_array(strings: list[str]) -> None:
    each = {s: (int(fingerprint64([s])[0]), int(hash_bucket([s], 1000)[0])) for s in set(strings)}
    prints = np.array([each[s][0] for s in strings], np.uint64)
    ids = np.array([each[s][1] for s in strings], np.int32)
    for name, array in arrays(strings).items():
        got, numbers = fingerprint64(array), hash_bucket(array, 1000)
        assert got.dtype == np.uint64 and numbers.dtype == np.int32, name
        np.testing.assert_array_equal(got, prints, name)
        np.testing.assert_array_equal(numbers, ids, name)
        values, splits = split_hash_bucket(array, 1000, "no such token")
        np.testing.assert_array_equal(values, ids, name)
        np.testing.assert_array_equal(splits, np.arange(len(ids) + 1), name)


def test_nulls() -> None:
    strings = ["a", "b", None, "c,d", None]
    for name, array in arrays(strings).items():
        for call in (fingerprint64, lambda x: hash_bucket(x, 7), lambda x: split_hash_bucket(x, 7)):
            with pytest.raises(StringError, match="string 2 is null"):
                call(array)
        filled = ["a", "b", "?", "c,d", "?"]
        np.testing.assert_array_equal(fingerprint64(array, nulls="?"), fingerprint64(filled), name)
        np.testing.assert_array_equal(
            hash_bucket(array, 7, nulls=b"?"), hash_bucket(filled, 7), name
        )
        assert (hash_bucket(array, 7, nulls=-1)[[2, 4]] == -1).all(), name
        assert fingerprint64(array, nulls=2**64 - 1)[2] == 2**64 - 1, name
        values, splits = split_hash_bucket(array, 7, nulls=())
        assert splits.tolist() == [0, 1, 2, 2, 4, 4], name
        np.testing.assert_array_equal(values, hash_bucket(["a", "b", "c", "d"], 7), name)
        assert split_hash_bucket(array, 7, nulls="x,y")[1].tolist() == [0, 1, 2, 4, 6, 8], name
    assert fingerprint64(pa.nulls(3), nulls=5).tolist() == [5, 5, 5]
    fixed = pa.array([b"ab", None, b"c\0"], pa.binary(2))
    assert hash_bucket(fixed, 9, nulls=-1).tolist() == [
        *hash_bucket([b"ab"], 9),
        -1,
        *hash_bucket([b"c\0"], 9),
    ]
    # A missing value that is a str is that str, as numpy says.
    text = np.array(["a", "gone"], np.dtypes.StringDType(na_object="gone"))
    np.testing.assert_array_equal(fingerprint64(text), fingerprint64(["a", "gone"]))


def test_shapes_are_kept() -> None:
    square = np.array([["a", "b"], ["c", "d"]])
    assert hash_bucket(square, 10).shape == (2, 2)
    np.testing.assert_array_equal(hash_bucket(square.T, 10), hash_bucket(square, 10).T)
    np.testing.assert_array_equal(hash_bucket(square.tolist(), 10), hash_bucket(square, 10))
    assert fingerprint64("a").shape == () and fingerprint64(np.empty((3, 0), "S4")).shape == (3, 0)
    assert hash_bucket(["x"], 1).tolist() == [0]
    assert hash_bucket(["x"], 2**31)[0] == int(fingerprint64(["x"])[0]) % 2**31
    assert hash_bucket(pa.chunked_array([], pa.string()), 3).shape == (0,)


def tokens(text: str, delimiter: str, skip: bool) -> list[str]:
    return [t for t in text.split(delimiter) if t or not skip]


@pytest.mark.parametrize("delimiter", [",", "ab", "é", "\0"])
@pytest.mark.parametrize("skip", [False, True])
def test_split_is_pythons(delimiter: str, skip: bool) -> None:
    rng = np.random.default_rng(3)
    pieces = ["", "a", "b", "ab", "aab", "é", "日本", "x" * 70, delimiter, delimiter * 2]
    lists = ["".join(rng.choice(pieces, rng.integers(0, 8))) for _ in range(5000)] + ["", delimiter]
    expected = [tokens(s, delimiter, skip) for s in lists]
    flat = hash_bucket([t for row in expected for t in row], 1000)
    for array in (
        lists,
        pa.array(lists),
        pa.array(lists).dictionary_encode(),
        pa.chunked_array([lists[:7], lists[7:]]),
    ):
        values, splits = split_hash_bucket(array, 1000, delimiter, skip_empty=skip)
        np.testing.assert_array_equal(values, flat)
        np.testing.assert_array_equal(np.diff(splits), [len(row) for row in expected])
    assert values.dtype == splits.dtype == np.int32
    padded = split_hash_bucket(
        lists, 1000, delimiter.encode(), length=3, truncate=True, skip_empty=skip, pad=-7
    )
    rows = [flat[a:b][:3].tolist() for a, b in itertools.pairwise(splits)]
    assert padded.tolist() == [row + [-7] * (3 - len(row)) for row in rows]
    longest = max(map(len, expected))
    assert (split_hash_bucket(lists, 1000, delimiter, length=longest, skip_empty=skip) >= -1).all()
    first = next(k for k, row in enumerate(expected) if len(row) == longest)
    with pytest.raises(
        StringError, match=rf"string {first} is a list of more than length={longest - 1}"
    ):
        split_hash_bucket(
            pa.chunked_array([lists[:2], lists[2:]]),
            9,
            delimiter,
            length=longest - 1,
            skip_empty=skip,
        )


def test_no_lists() -> None:
    values, splits = split_hash_bucket([], 5)
    assert values.shape == (0,) and splits.tolist() == [0]
    assert split_hash_bucket([], 5, length=4).shape == (0, 4)
    assert split_hash_bucket(["a", ""], 5, length=0, truncate=True).shape == (2, 0)
    assert split_hash_bucket(["", ""], 5, skip_empty=True)[1].tolist() == [0, 0, 0]


def test_wrong_arguments() -> None:
    for buckets in (0, -1, 2**31 + 1):
        with pytest.raises(StringError, match="buckets is at least 1"):
            hash_bucket(["a"], buckets)
    for wrong in (1.5, True, "3", None):
        with pytest.raises(ArgumentError, match="buckets is an integer"):
            hash_bucket(["a"], wrong)
    assert hash_bucket(["a"], np.int64(5)).shape == (1,)
    for wrong, text in (
        (np.arange(3), "array of int64"), (np.zeros(2), "float64"), (pa.array([1]), "int64"),
        ([1], "string 0 is a int"),
        (["a", ["b"]], "string 1 is a list"), (["a", object()], "string 1 is a object"), ({"a"}, "a set"),
        (pa.array([1]).dictionary_encode(), "int64"), (pa.chunked_array([], pa.int32()), "int32"), (3, "int64"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=text):
            fingerprint64(wrong)
    for text in ("\ud800", "a\udfff"):
        for array in ([text], np.array(["ok", text])[1:], np.array([text], object)):
            with pytest.raises(StringError, match="string 0 has no UTF-8 form"):
                fingerprint64(array)
    many = ["é"] * 5000
    many[4321] = many[4900] = "\udc00"
    with pytest.raises(StringError, match="string 4321 has no UTF-8"):
        split_hash_bucket(many, 10)
    with pytest.raises(StringError, match="delimiter is empty"):
        split_hash_bucket(["a"], 5, "")
    with pytest.raises(ArgumentError, match="delimiter is a str"):
        split_hash_bucket(["a"], 5, 3)  # type: ignore[call-overload]
    with pytest.raises(StringError, match=r"one-dimensional.*\(1, 1\)"):
        split_hash_bucket([["a"]], 5)
    with pytest.raises(ArgumentError, match="nulls of lists"):
        split_hash_bucket(["a"], 5, nulls=0)  # type: ignore[call-overload]
    with pytest.raises(StringError, match="nulls is at least"):
        hash_bucket(["a"], 5, nulls=2**40)
    with pytest.raises(StringError, match="nulls has no UTF-8"):
        hash_bucket(["a"], 5, nulls="\ud800")
    with pytest.raises(StringError, match="length is at least 0"):
        split_hash_bucket(["a"], 5, length=-1)
    with pytest.raises(StringError, match="threads is at least 1"):
        hash_bucket(["a"], 5, threads=0)
    assert issubclass(StringError, ValueError) and recom_jax.strings.hash_bucket is hash_bucket


def test_damaged_arrow_arrays() -> None:
    offsets = pa.py_buffer(np.array([0, 2, 1, 3], np.int32))
    broken = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    with pytest.raises(StringError, match="damaged"):
        fingerprint64(broken)


def test_threads_agree_and_objects_may_change_meanwhile() -> None:
    """Several callers, several threads each, and another that replaces entries: each result is one of the two."""
    n = 60_000
    array = np.array([f"old {k}" for k in range(n)], object)
    before, after = fingerprint64(array), fingerprint64([f"new {k}" for k in range(n)])
    wrong: list[int] = []

    def call() -> None:
        for _ in range(3):
            got = fingerprint64(array, threads=4)
            wrong.append(int(((got != before) & (got != after)).sum()))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for t in callers:
        t.start()
    for k in range(n):
        array[k] = f"new {k}"
    for t in callers:
        t.join()
    assert wrong == [0] * 12
    np.testing.assert_array_equal(fingerprint64(array, threads=1), after)


def test_against_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    rng = np.random.default_rng(0)
    strings = [rng.bytes(n) for n in range(301) for _ in range(10)]
    strings += [s.encode() for s in ODD] + [b"a,b", b"", b",", b"x,,y", "é,日本,".encode()]
    for buckets in (1, 2, 1000, 2**31 - 1):
        expected = tf.strings.to_hash_bucket_fast(strings, buckets).numpy()
        for array in (strings, pa.array(strings, pa.binary())):
            np.testing.assert_array_equal(hash_bucket(array, buckets), expected)
    raw = tf.fingerprint(tf.io.decode_raw(tf.constant(["x" * 40, "y" * 40]), tf.uint8)).numpy()
    np.testing.assert_array_equal(fingerprint64(["x" * 40, "y" * 40]), raw.view(np.uint64)[:, 0])
    ragged = tf.strings.split(strings, ",")
    values, splits = split_hash_bucket(strings, 1000, ",")
    np.testing.assert_array_equal(splits, ragged.row_splits.numpy())
    np.testing.assert_array_equal(
        values, tf.strings.to_hash_bucket_fast(ragged.values, 1000).numpy()
    )
