"""Raw batches (dicts of numpy or pyarrow arrays, record batches) as columns, on the host and without loss.

The structure of what comes out depends on the types alone, never on the values, so that one compiled program serves
every batch: pyarrow columns are always `Nullable`, and lists get a capacity from a short ladder of sizes.
"""

from __future__ import annotations

import array
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from recom_jax import compat
from recom_jax import strings as text
from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess.int64 import Int64
from recom_jax.preprocess.values import (
    Column,
    Jagged,
    Nullable,
    column,
    is_numbers,
    length,
)


def columns(raw: Any, *, min_capacity: int = 64) -> dict[str, Column]:
    """A raw batch as columns that a jitted program takes.

    Args:
      raw: a mapping of names to numpy arrays, `Int64`, `Nullable`, `Jagged`, pyarrow arrays or JAX arrays; or a pyarrow
        Table or RecordBatch.
      min_capacity: the least capacity of lists made from pyarrow lists or host arrays.

    Returns:
      Name -> column: arrays as they are (numpy's 64-bit integers as `Int64` with x64 off), strings as fingerprints
      (`fingerprint64`), pyarrow columns `Nullable`, pyarrow lists `Jagged`.

    Raises:
      PreprocessError: columns of different lengths.
      PreprocessTypeError: `raw` is no batch, or a column holds neither numbers nor strings.
    """
    if hasattr(raw, "schema") and hasattr(raw, "column"):  # a pyarrow Table or RecordBatch
        names = raw.schema.names
        raw = {name: raw.column(k) for k, name in enumerate(names)}
        if len(raw) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise PreprocessError(f"a raw batch has two columns of the name {twice!r}")
    if not isinstance(raw, Mapping):
        raise PreprocessTypeError(
            f"a raw batch is a mapping of names to columns, or a pyarrow Table or RecordBatch, not {type(raw).__name__}"
        )
    made: dict[str, Column] = {}
    for name, x in raw.items():
        try:
            made[name] = _column(x, min_capacity)
        except PreprocessError as why:
            raise type(why)(f"column {name!r}: {why}") from why
    sizes = {name: length(x) for name, x in made.items()}
    if len(set(sizes.values())) > 1:
        raise PreprocessError(f"length mismatch: the columns of a batch have {sizes} rows")
    return made


def rows_of(raw: Any) -> int:
    """Rows of a raw batch, without converting it."""
    if hasattr(raw, "num_rows"):
        return int(raw.num_rows)
    if isinstance(raw, Mapping):
        if not raw:
            raise PreprocessTypeError("a raw batch has no columns; it needs at least one")
        name, x = next(iter(raw.items()))
        try:
            return length(x) if isinstance(x, (Jagged, Nullable, Int64)) else len(x)
        except TypeError as why:
            raise PreprocessTypeError(
                f"column {name!r}: a column has a leading axis of rows; {x!r:.80} has none"
            ) from why
    raise PreprocessTypeError(
        f"a raw batch is a mapping of names to columns, or a pyarrow Table or RecordBatch, not {type(raw).__name__}"
    )


def snapshot(raw: Any) -> Any:
    """A raw batch that nobody writes to: memory is copied but for pyarrow's and JAX's, which are never changed."""
    if not isinstance(raw, Mapping):
        return raw
    return {name: _copied(x) for name, x in raw.items()}


def _copied(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, (Int64, Nullable, Jagged)):
        return jax.tree.map(lambda a: a.copy() if isinstance(a, np.ndarray) else a, x)
    if isinstance(x, list):
        return list(x)
    if is_arrow(x) or isinstance(x, jax.Array):
        return x
    if hasattr(x, "__array__") or isinstance(x, (memoryview, bytearray, array.array)):
        return np.array(np.asarray(x))  # `asarray` may share memory, whatever it was asked for
    return x


def _is_column(x: Any, min_capacity: int) -> bool:
    """Whether `_column` would return `x` as it is: told quickly, as a batch may have hundreds of columns."""
    inner = x.values if isinstance(x, Jagged) else x
    values = inner.values if isinstance(inner, Nullable) else inner
    if isinstance(values, Int64):
        values = values.lo
    if type(values) is not np.ndarray or values.dtype.kind not in "biuf" or values.itemsize >= 8:
        return False
    if not values.dtype.isnative:
        return False
    if not isinstance(x, Jagged):
        return True
    n = len(values)
    return type(x.row_splits) is np.ndarray and ladder(n, min_capacity) == n


def _column(x: Any, min_capacity: int) -> Column:
    if _is_column(x, min_capacity):
        return x
    if is_arrow(x):
        return from_arrow(x, min_capacity=min_capacity)
    if isinstance(x, jax.Array) or compat.is_tracer(x):
        return x
    if hasattr(x, "__array__") and not isinstance(x, (np.ndarray, Int64)):
        x = np.asarray(x)  # a tensor or a series: its strings are strings, too
    text_like = isinstance(x, np.ndarray) and x.dtype.kind in "USO"
    if text_like and not (x.dtype == object and is_numbers(x)):
        from recom_jax.preprocess.hashing import fingerprint64

        return fingerprint64(x)
    made = column(x)
    if isinstance(made, Jagged) and all(isinstance(a, np.ndarray) for a in jax.tree.leaves(made)):
        made = made.replace(padded(made.values, ladder(made.capacity, min_capacity)))
    return made


def is_arrow(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "pyarrow"


def ladder(size: int, least: int = 1) -> int:
    """`size` rounded up to 1, 1.25, 1.5 or 1.75 times a power of two: few shapes, at most a quarter of padding."""
    size = max(size, least, 1)
    if size <= 4:
        return size
    step = 1 << (size - 1).bit_length() - 3
    return -(-size // step) * step


def from_arrow(x: Any, *, min_capacity: int = 64) -> Column:
    """A pyarrow array (or chunked array) as a column: `Nullable`, or `Jagged` for lists; strings as fingerprints."""
    import pyarrow as pa

    x = _one_chunk(x)
    kind = x.type
    if pa.types.is_dictionary(kind):
        return from_arrow(x.dictionary_decode(), min_capacity=min_capacity)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        splits, inner, valid = _lists(x)
        values = from_arrow(inner)
        if isinstance(values, Jagged):
            raise PreprocessTypeError(f"lists of lists ({kind}); flatten the inner ones first")
        return Jagged(padded(values, ladder(len(inner), min_capacity)), splits, valid)
    if _is_text(kind):
        return fingerprint_arrow(x, None)
    if pa.types.is_null(kind):
        raise PreprocessTypeError(
            "a pyarrow column without a type (all null); give the schema a type"
        )
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not numeric:
        raise PreprocessTypeError(
            f"a pyarrow column holds numbers, strings or lists of them, not {kind}; cast it"
        )
    valid = np.asarray(x.is_valid().to_numpy(zero_copy_only=False), bool)
    filled = x if valid.all() else x.fill_null(False if pa.types.is_boolean(kind) else 0)
    return Nullable(column(np.asarray(filled.to_numpy(zero_copy_only=False))), valid)


def fingerprint_arrow(x: Any, threads: int | None) -> Column:
    """`fingerprint64` of a pyarrow array of strings, or of lists of strings."""
    import pyarrow as pa

    x = _one_chunk(x)
    kind = x.type.value_type if pa.types.is_dictionary(x.type) else x.type
    if not _is_text(kind):
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return from_arrow(x)
        raise PreprocessTypeError(f"fingerprint64: a pyarrow column of {x.type} holds no strings")
    valid = np.asarray(x.is_valid().to_numpy(zero_copy_only=False), bool)
    return Nullable(Int64(text.fingerprint64(x, nulls=0, threads=threads)), valid)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    t = pa.types
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind)
                or t.is_string_view(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind))  # fmt: skip


def _one_chunk(x: Any) -> Any:
    import pyarrow as pa

    if isinstance(x, pa.ChunkedArray):
        return x.chunk(0) if x.num_chunks == 1 else x.combine_chunks()
    if not isinstance(x, pa.Array):
        raise PreprocessTypeError(f"a column is a pyarrow array, not {type(x).__name__}")
    return x


def _lists(x: Any) -> tuple[np.ndarray, Any, np.ndarray]:
    """Row splits from 0, the values they speak of, and validity, of a pyarrow list array (which may be a slice)."""
    import pyarrow as pa

    valid = np.asarray(x.is_valid().to_numpy(zero_copy_only=False), bool)
    if pa.types.is_fixed_size_list(x.type):
        splits = np.arange(len(x) + 1, dtype=np.int64) * x.type.list_size
        inner = x.values.slice(x.offset * x.type.list_size, len(x) * x.type.list_size)
    else:
        at = x.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        at = at if len(at) else np.zeros(1, np.int64)
        inner, splits = x.values.slice(at[0], at[-1] - at[0]), at - at[0]
    if splits[-1] >= 1 << 31:
        raise PreprocessError("lists of 2**31 values or more in one batch; use smaller batches")
    return splits.astype(np.int32), inner, valid


def padded(x: Any, capacity: int) -> Any:
    """Values of lists, on the host, with zeros behind them up to a capacity."""

    def grow(a: Any) -> np.ndarray:
        host = np.asarray(a)
        if len(host) == capacity:
            return host
        return np.concatenate([host, np.zeros((capacity - len(host), *host.shape[1:]), host.dtype)])

    return jax.tree.map(grow, x)


__all__ = ["columns", "from_arrow"]
