"""Strings to ids on the host: JAX has no strings, so they become numbers before a batch is served.

    ids = recom_jax.strings.hash_bucket(users, 10_000)                          # int32, as `users` is shaped
    values, row_splits = recom_jax.strings.split_hash_bucket(genres, 1_000, "|")  # jagged bags
    padded = recom_jax.strings.split_hash_bucket(genres, 1_000, "|", length=5)    # int32 [n, 5], -1 pads

Ids equal those of TensorFlow's ``tf.strings.to_hash_bucket_fast`` and of feature columns made by
``categorical_column_with_hash_bucket``, so tables that were trained there can be served here.

Strings are any of: a list or a numpy array of ``str`` and ``bytes`` objects; numpy arrays of bytes (S), of str (U;
zeros at the end are padding there, as everywhere in numpy) and of ``StringDType``; pyarrow arrays and chunked
arrays of type string, binary, their large, view and fixed-size forms, and dictionaries of those; whatever else
`numpy.asarray` makes one of these (pandas). ``str`` is hashed as UTF-8. None, NaN, pandas' NA, masked entries and
Arrow's nulls are nulls: an error, unless `nulls` says what they are.

The work is done in C++ without the GIL, on several threads for long arrays.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from recom_jax import ffi
from recom_jax.errors import ArgumentError, StringError

Uint64s = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]

_PIECE = 1 << 16  # strings of a StringDType array that are Python objects at a time
_KINDS = "str, bytes, numpy object, S, U and StringDType arrays, and pyarrow string, binary and dictionary arrays"


def fingerprint64(
    strings: Any, *, nulls: str | bytes | int | None = None, threads: int | None = None
) -> Uint64s:
    """FarmHash's Fingerprint64 of each string, which TensorFlow's ``Fingerprint64`` and ``farm_hash`` are.

    Args:
      strings: see the module.
      nulls: what a null is: a string that stands for it, or its fingerprint itself; None: an error.
      threads: at most so many; None: as many as there are cores, up to 8.

    Returns:
      uint64 array, shaped as `strings`.

    Raises:
      ArgumentError (TypeError): not strings.
      StringError (ValueError): a null, or a str without UTF-8 form (a lone surrogate).
    """
    null = _null(nulls, 0, 2**64 - 1)
    value = int(null) if isinstance(null, int) else _fingerprint(null)
    prints: Uint64s = _numbers(
        strings,
        np.uint64,
        nulls is not None,
        lambda source, out: source.fingerprints(out, value, _threads(threads)),
    )
    return prints


def hash_bucket(
    strings: Any,
    buckets: int,
    *,
    nulls: str | bytes | int | None = None,
    threads: int | None = None,
) -> Int32s:
    """Each string's fingerprint modulo `buckets`: ``tf.strings.to_hash_bucket_fast`` as int32.

    Args:
      strings: see the module.
      buckets: at least 1, at most 2**31 (ids are int32).
      nulls: what a null is: a string that stands for it, or its id itself (-1, say); None: an error.
      threads: as of `fingerprint64`.

    Returns:
      int32 array of ids in [0, buckets), shaped as `strings`.

    Raises:
      ArgumentError (TypeError): not strings, or `buckets` is no integer.
      StringError (ValueError): as of `fingerprint64`; `buckets` is out of range.
    """
    n = _buckets(buckets)
    null = _null(nulls, -(2**31), 2**31 - 1)
    value = int(null) if isinstance(null, int) else _fingerprint(null) % n
    ids: Int32s = _numbers(
        strings,
        np.int32,
        nulls is not None,
        lambda source, out: source.bucket_ids(out, n, value, _threads(threads)),
    )
    return ids


@overload
def split_hash_bucket(
    strings: Any, buckets: int, delimiter: str | bytes = ..., *, length: None = None, pad: int = ...,
    truncate: bool = ..., skip_empty: bool = ..., nulls: str | bytes | tuple[()] | None = ...,
    threads: int | None = ...,
) -> tuple[Int32s, Int32s]: ...  # fmt: skip
@overload
def split_hash_bucket(
    strings: Any, buckets: int, delimiter: str | bytes = ..., *, length: int, pad: int = ...,
    truncate: bool = ..., skip_empty: bool = ..., nulls: str | bytes | tuple[()] | None = ...,
    threads: int | None = ...,
) -> Int32s: ...  # fmt: skip
def split_hash_bucket(
    strings: Any,
    buckets: int,
    delimiter: str | bytes = ",",
    *,
    length: int | None = None,
    pad: int = -1,
    truncate: bool = False,
    skip_empty: bool = False,
    nulls: str | bytes | tuple[()] | None = None,
    threads: int | None = None,
) -> tuple[Int32s, Int32s] | Int32s:
    """The ids of delimited lists: ``to_hash_bucket_fast(tf.strings.split(strings, delimiter), buckets)``.

    As with ``tf.strings.split`` and ``str.split(delimiter)``, ``"a||b"`` holds an empty token, and ``""`` is one
    empty token; `skip_empty` leaves empty tokens out, so that ``""`` is an empty list.

    Args:
      strings: one-dimensional, n of them; see the module.
      buckets: as of `hash_bucket`.
      delimiter: between tokens, one character or more.
      length: None: jagged; else lists are padded to so many ids.
      pad: the id after the last one of a padded list.
      truncate: whether a list longer than `length` loses its end; else it is an error.
      skip_empty: leaves empty tokens out.
      nulls: what a null is: a string that is split in its place, or () for an empty list; None: an error.
      threads: as of `fingerprint64`.

    Returns:
      (values int32 [total], row_splits int32 [n + 1]): list i is ``values[row_splits[i]:row_splits[i + 1]]``; or,
      with `length`, int32 [n, length].

    Raises:
      ArgumentError (TypeError): not strings; a parameter of a wrong type.
      StringError (ValueError): as of `hash_bucket`; an empty delimiter, a list that is too long, strings of
        several dimensions, more than 2**31 - 1 tokens.
    """
    n = _buckets(buckets)
    if not isinstance(delimiter, (str, bytes)):
        raise ArgumentError(f"delimiter is a str or bytes, not a {type(delimiter).__name__}")
    if not delimiter:
        raise StringError("delimiter is empty; name the characters between two tokens")
    width = None if length is None else _integer("length", length, 0, 2**31 - 1)
    filler = _integer("pad", pad, -(2**31), 2**31 - 1)
    if isinstance(nulls, int) or (isinstance(nulls, (tuple, list)) and nulls):
        raise ArgumentError(f"nulls of lists is a str, bytes or (), not {nulls!r}")
    null = None if nulls is None or isinstance(nulls, (tuple, list)) else _bytes(nulls, "nulls")
    shape, sources = _sources(strings, plain=True)
    if len(shape) != 1:
        raise StringError(
            f"lists are split of one-dimensional strings; these have shape {shape}. Use .reshape(-1)"
        )
    tokens, at = [], 0
    for source in sources:
        _check(source, at, nulls is not None)
        made = source.split(_bytes(delimiter, "delimiter"), n, skip_empty, null, _threads(threads))
        _check_text(made.bad, at)
        if width is not None and not truncate and (row := made.first_longer(width)) >= 0:
            raise StringError(
                f"string {at + row} is a list of more than length={width} tokens; raise length, or pass truncate=True"
            )
        tokens.append(made)
        at += len(made)
    if width is not None:
        padded = np.empty((at, width), np.int32)
        _each(tokens, lambda made, rows, _: made.padded(padded[rows], filler))
        return padded
    total = sum(made.total for made in tokens)
    if total > 2**31 - 1:
        raise StringError(
            f"{total} tokens do not fit int32 row splits; split fewer strings at once"
        )
    values, splits = np.empty(total, np.int32), np.zeros(at + 1, np.int32)

    def fill(made: Any, rows: slice, start: int) -> None:
        ends = splits[rows.start : rows.stop + 1]
        made.jagged(values[start : start + made.total], ends, start)

    _each(tokens, fill)
    return values, splits


# ---- inside ---------------------------------------------------------------------------------------------------


def _each(tokens: list[Any], fill: Any) -> None:
    row = start = 0
    for made in tokens:
        fill(made, slice(row, row + len(made)), start)
        row, start = row + len(made), start + made.total


def _numbers(strings: Any, dtype: Any, has_nulls: bool, fill: Any) -> Any:
    """One number a string, by `fill`(source, part of the result)."""
    shape, sources = _sources(strings)
    out, at = np.empty(shape, dtype), 0
    flat = out.reshape(-1)
    for source in sources:
        if isinstance(source, _Encoded):
            made = _numbers(source.dictionary, dtype, has_nulls, fill)
            n = len(source.indices)
            if n:
                flat[at : at + n] = made[source.indices]
        else:
            n = len(source)
            _check(source, at, has_nulls)
            _check_text(fill(source, flat[at : at + n]), at)
        at += n
    return out


def _check(source: Any, at: int, has_nulls: bool) -> None:
    if not has_nulls and (row := source.first_null) >= 0:
        raise StringError(
            f"string {at + row} is null, the first of them; say what nulls stand for, with nulls=..."
        )


def _check_text(row: int, at: int) -> None:
    if row >= 0:
        raise StringError(f"string {at + row} has no UTF-8 form: it holds a lone surrogate")


class _Encoded:
    """A dictionary array without nulls: hashed once an entry of the dictionary."""

    def __init__(self, dictionary: Any, indices: Any) -> None:
        self.dictionary, self.indices = dictionary, indices


def _sources(strings: Any, plain: bool = False) -> tuple[tuple[int, ...], Iterator[Any]]:
    """The shape of `strings`, and what reads them one after the other, in C order. `plain`: no `_Encoded`."""
    if _is_arrow(strings):
        return (len(strings),), _arrow(strings, plain)
    if isinstance(strings, np.ma.MaskedArray):
        array = np.array(strings.data, dtype=object)
        array[np.ma.getmaskarray(strings)] = None
    elif isinstance(strings, (str, bytes, list, tuple)):
        array = np.array(strings, dtype=object)  # S and U would drop zeros at the end
    else:
        array = np.asarray(strings)
    return array.shape, _numpy(array)


def _numpy(array: Any) -> Iterator[Any]:
    make = ffi.extension().StringSource
    kind = array.dtype.kind
    if kind in "SU":
        yield make.from_fixed(_contiguous(array.astype(array.dtype.newbyteorder("="), copy=False)))
    elif kind == "O":
        yield _objects(_contiguous(array), None, 0)
    elif kind == "T":
        missing = getattr(array.dtype, "na_object", None)
        flat = array.reshape(-1)
        for at in range(0, max(len(flat), 1), _PIECE):
            # A missing entry that is a str is one for numpy too.
            part = flat[at : at + _PIECE].astype(object)
            yield _objects(part, None if isinstance(missing, str) else missing, at)
    else:
        raise ArgumentError(f"expected strings ({_KINDS}), was given an array of {array.dtype}")


def _contiguous(array: Any) -> Any:
    return array if array.flags.c_contiguous else array.copy("C")  # np.require is slow


def _objects(array: Any, missing: Any, at: int) -> Any:
    source = ffi.extension().StringSource.from_objects(array, missing)
    row = source.not_a_string
    if row >= 0:
        found = array.reshape(-1)[row]
        raise ArgumentError(
            f"string {at + row} is a {type(found).__name__}, not str or bytes; convert it first, with str() say"
        )
    return source


def _is_arrow(strings: Any) -> bool:
    arrow = sys.modules.get("pyarrow")  # whoever has such an array has imported it
    return arrow is not None and isinstance(strings, (arrow.Array, arrow.ChunkedArray))


def _arrow(strings: Any, plain: bool) -> Iterator[Any]:
    import pyarrow as pa

    chunks = strings.chunks if isinstance(strings, pa.ChunkedArray) else [strings]
    for array in chunks or [pa.array([], strings.type)]:  # the type is looked at in any case
        try:
            yield from _arrow_array(array, pa, plain)
        except ArgumentError:
            raise
        except (ValueError, IndexError) as why:  # pyarrow checks nothing when it is handed buffers
            raise StringError(f"the pyarrow array is damaged: {why}") from why


def _arrow_array(array: Any, pa: Any, plain: bool) -> Iterator[Any]:
    make, kind, types = ffi.extension().StringSource, array.type, pa.types
    n, offset = len(array), array.offset
    if types.is_dictionary(kind):
        _arrow_kind(kind.value_type, kind, pa)
        if plain or array.null_count or array.dictionary.null_count:
            yield from _arrow_array(array.cast(kind.value_type), pa, plain)
        else:
            yield _Encoded(array.dictionary, array.indices.to_numpy(zero_copy_only=False))
        return
    form = _arrow_kind(kind, kind, pa)
    if form == "view":
        wide = pa.large_string() if types.is_string_view(kind) else pa.large_binary()
        yield from _arrow_array(array.cast(wide), pa, plain)
    elif form == "null":
        yield make.from_objects(np.full(n, None, object), None)
    elif form == "fixed":
        validity, data = array.buffers()
        yield make.from_arrow_fixed(
            validity if array.null_count else None, data or b"", offset, n, kind.byte_width
        )
    else:
        validity, offsets, data = array.buffers()
        yield make.from_arrow(
            validity if array.null_count else None, offsets or b"", data, offset, n, form == "large"
        )


def _arrow_kind(
    kind: Any, whole: Any, pa: Any
) -> Literal["plain", "large", "view", "fixed", "null"]:
    types = pa.types
    if types.is_string(kind) or types.is_binary(kind):
        return "plain"
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return "large"
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return "view"
    if types.is_fixed_size_binary(kind):
        return "fixed"
    if types.is_null(kind):
        return "null"
    raise ArgumentError(f"expected strings ({_KINDS}), was given a pyarrow array of {whole}")


def _fingerprint(text: bytes) -> int:
    out = np.empty(1, np.uint64)
    array = np.array([text], object)
    ffi.extension().StringSource.from_objects(array, None).fingerprints(out, 0, 1)
    return int(out[0])


def _null(nulls: str | bytes | int | None, low: int, high: int) -> bytes | int:
    if isinstance(nulls, (str, bytes)):
        return _bytes(nulls, "nulls")
    return 0 if nulls is None else _integer("nulls", nulls, low, high)


def _bytes(text: str | bytes, what: str) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as why:
        raise StringError(f"{what} has no UTF-8 form: it holds a lone surrogate") from why


def _buckets(buckets: Any) -> int:
    return _integer("buckets", buckets, 1, 2**31)


def _threads(threads: int | None) -> int:
    return 0 if threads is None else _integer("threads", threads, 1, 1024)


def _integer(what: str, value: Any, low: int, high: int) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{what} is an integer, not {value!r}") from None
    if not low <= number <= high:
        raise StringError(f"{what} is at least {low} and at most {high}, not {number}")
    return number
