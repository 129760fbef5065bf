"""What raw columns are: arrays, 64-bit pairs, nullable columns, lists. All are pytrees of JAX (or numpy) arrays.

x                                       # an array (B,): no nulls
pp.Int64(numpy int64 array)             # 64-bit integers, also where jax_enable_x64 is off
pp.Nullable(values, valid)              # null where valid is False
pp.Jagged(values, row_splits)           # one list per row: values[row_splits[i]:row_splits[i + 1]]
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax import compat
from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess import words
from recom_jax.preprocess.int64 import Int64, host_integers, x64
from recom_jax.preprocess.words import Words

Column: TypeAlias = Any
"""An array, `Int64`, `Nullable` or `Jagged`; numpy arrays and lists where a column is made from host data."""


@dataclasses.dataclass(frozen=True, eq=False)
class Nullable:
    """A column with nulls: `values` (B,) (an array or `Int64`), `valid` (B,) bool. What stands in a null is never used.

    Host values become columns: 64-bit numpy integers `Int64` where JAX lacks them.
    """

    values: Any
    valid: Any

    def __post_init__(self) -> None:
        if isinstance(self.values, (list, np.ndarray)):
            object.__setattr__(self, "values", column(self.values))
        object.__setattr__(self, "valid", _mask(self.valid))
        _same_length("Nullable: values and valid", self.values, self.valid)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.valid))

    def __len__(self) -> int:
        return self.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Jagged:
    """One list per row.

    Attributes:
      values: (capacity,) array, `Int64` or `Nullable` (null elements). Row i is
        ``values[row_splits[i]:row_splits[i + 1]]``; what lies behind ``row_splits[-1]`` is padding of any value.
      row_splits: (B + 1,) int32, from 0, never descending, at most capacity.
      valid: (B,) bool, False where the whole list is null; None: no list is.

    Host values become columns: 64-bit numpy integers `Int64` where JAX lacks them.

    Raises:
      PreprocessError: row_splits that are no splits of these values, as far as they are known (not traced).
    """

    values: Any
    row_splits: Any
    valid: Any = None

    def __post_init__(self) -> None:
        splits = self.row_splits
        if isinstance(self.values, (list, np.ndarray)):
            object.__setattr__(self, "values", column(self.values))
        if isinstance(splits, (list, tuple, np.ndarray)):
            checked = check_splits(np.asarray(splits), length(self.values))
            object.__setattr__(self, "row_splits", checked)
        elif isinstance(splits, jax.Array) and not compat.is_tracer(splits):
            check_splits(np.asarray(splits), length(self.values))
        object.__setattr__(self, "valid", _mask(self.valid))
        if self.valid is not None and np.ndim(splits) == 1:
            have, want = np.shape(self.valid), (np.shape(self.row_splits)[0] - 1,)
            if have != want and None not in (have, want):
                raise PreprocessError(f"Jagged: valid has shape {have}, the rows {want}")

    @classmethod
    def from_lists(cls, lists: Any) -> Jagged:
        """A list column of Python lists: None for a null list or a null element. The inverse of `to_lists`."""
        flat = [v for row in lists for v in (() if row is None else row)]
        splits = np.cumsum([0, *(0 if row is None else len(row) for row in lists)])
        there = np.array([row is not None for row in lists], bool)
        values = np.array(flat, object if None in flat else None) if flat else np.zeros(0, np.int32)
        return cls(column(values), splits, None if there.all() else there)

    @property
    def rows(self) -> int:
        return int(np.shape(self.row_splits)[0]) - 1

    @property
    def capacity(self) -> int:
        return length(self.values)

    @property
    def lengths(self) -> jax.Array:
        """(B,) int32."""
        return jnp.diff(jnp.asarray(self.row_splits))

    def __len__(self) -> int:
        return self.rows

    def segment_ids(self) -> jax.Array:
        """(capacity,) int32: the row of each value, B for padding (which `jax.ops.segment_sum` then drops)."""
        padding = jnp.reshape(self.capacity - jnp.asarray(self.row_splits)[-1], (1,))
        return jnp.repeat(
            jnp.arange(self.rows + 1, dtype=jnp.int32),
            jnp.concatenate([self.lengths, padding.astype(self.lengths.dtype)]),
            total_repeat_length=self.capacity,
        )

    def replace(self, values: Any) -> Jagged:
        """The same lists of other values, one for one."""
        made: Jagged = _unchecked(Jagged, (values, self.row_splits, self.valid))
        return made

    def to_lists(self) -> list[Any]:
        """Python lists, None for null lists and null elements; waits for the values."""
        values, valid = take_apart(self.values)
        host = np.asarray(values).tolist()
        if valid is not None:
            host = [v if ok else None for v, ok in zip(host, np.asarray(valid), strict=True)]
        splits = np.asarray(self.row_splits)
        rows = [host[a:b] for a, b in itertools.pairwise(splits)]
        if self.valid is None:
            return rows
        return [r if ok else None for r, ok in zip(rows, np.asarray(self.valid), strict=True)]


def _mask(valid: Any) -> Any:
    """Validity as bool: masks of bytes are false at 0 alone."""
    if isinstance(valid, (list, tuple)):
        return np.asarray(valid, bool)
    if isinstance(valid, (np.ndarray, jax.Array)) and valid.dtype != bool:
        return valid.astype(bool)
    return valid


def check_splits(splits: np.ndarray, capacity: int) -> np.ndarray:
    """Known row splits as int32; errors name what is wrong."""
    if splits.ndim != 1 or not len(splits) or splits.dtype.kind not in "iu":
        raise PreprocessError(
            f"row_splits is one integer more than there are rows, not {splits.dtype}{list(splits.shape)}"
        )
    if splits[0] != 0 or (np.diff(splits.astype(np.int64)) < 0).any():
        raise PreprocessError("row_splits starts at 0 and never descends")
    if splits[-1] > capacity:
        raise PreprocessError(
            f"length mismatch: row_splits ends at {splits[-1]}, there are {capacity} values"
        )
    return splits.astype(np.int32)


def _unchecked(cls: Any, fields: Any) -> Any:
    """An instance of a dataclass without its checks: JAX puts placeholders into pytrees."""
    made = object.__new__(cls)
    for field, value in zip(dataclasses.fields(cls), fields, strict=True):
        object.__setattr__(made, field.name, value)
    return made


def _register(cls: Any) -> None:
    names = [f.name for f in dataclasses.fields(cls)]
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda x: ([(jax.tree_util.GetAttrKey(n), getattr(x, n)) for n in names], None),
        lambda _, children: _unchecked(cls, children),
        lambda x: ([getattr(x, n) for n in names], None),
    )


_register(Nullable)
_register(Jagged)


def length(x: Any) -> int:
    """Rows of a column."""
    if isinstance(x, Jagged):
        return x.rows
    if isinstance(x, Nullable):
        return length(x.valid)
    shape = x.shape if hasattr(x, "shape") else np.shape(x)
    if len(shape) < 1:
        raise PreprocessTypeError("a column has a leading axis of rows; a scalar has none")
    return int(shape[0])


def _same_length(what: str, a: Any, b: Any) -> None:
    a, b = (getattr(v, "shape", None) for v in (a, b))
    if isinstance(a, tuple) and isinstance(b, tuple) and a[:1] != b[:1]:
        raise PreprocessError(f"length mismatch: {what} have shapes {a} and {b}")


def same_rows(operator: str, *columns: Column) -> None:
    """Raises unless all columns have equally many rows."""
    sizes = [length(c) for c in columns]
    if len(set(sizes)) > 1:
        raise PreprocessError(
            f"length mismatch: {operator} takes columns of equally many rows, these have {sizes}"
        )


def column(x: Any) -> Column:
    """A column as operators see it: host data becomes arrays, None a null, 64-bit integers `Int64` (x64 off)."""
    if isinstance(x, (Int64, jax.Array)) or compat.is_tracer(x):
        return x
    if isinstance(x, Nullable):
        return Nullable(column(x.values), x.valid)
    if isinstance(x, Jagged):
        return x.replace(column(x.values))
    if type(x).__module__.partition(".")[0] == "pyarrow":
        from recom_jax.preprocess.ingest import from_arrow

        return from_arrow(x)
    if isinstance(x, np.ma.MaskedArray):
        return Nullable(column(np.asarray(x.filled(0))), ~np.ma.getmaskarray(x))
    try:
        host = np.asarray(x)
    except ValueError as why:
        raise PreprocessTypeError(
            f"a column holds one number a row, or equally many: {why}; preprocess.Jagged.from_lists makes a column of "
            "lists of any length"
        ) from why
    if host.dtype == object and is_numbers(host):
        there = np.array([v is not None for v in host.flat]).reshape(host.shape)
        filled = [0 if v is None else v for v in host.flat]
        whole = all(isinstance(v, int) for v in filled)
        made = host_integers(np.array(filled, object)) if whole else np.array(filled, np.float64)
        values = column(made.reshape(host.shape))
        return values if there.all() else Nullable(values, there)
    if host.dtype.kind not in "biuf" and not jnp.issubdtype(host.dtype, jnp.floating):
        raise PreprocessTypeError(
            f"a column holds numbers, not {host.dtype}; make ids of strings with fingerprint64"
        )
    if host.dtype.kind in "iu" and host.dtype.itemsize == 8 and not x64():
        return Int64(host)
    kind: Any = np.float64 if host.dtype.char == "g" else host.dtype.newbyteorder("=")
    return host.astype(jax.dtypes.canonicalize_dtype(kind), copy=False)


def is_numbers(host: np.ndarray) -> bool:
    """Whether an array of Python objects holds numbers and nulls alone."""
    return bool(host.size) and all(_is_number(v) for v in host.flat)


def _is_number(x: Any) -> bool:
    return x is None or isinstance(x, (int, float, np.integer, np.floating))


def take_apart(x: Column) -> tuple[Any, Any]:
    """Values and validity (None: no nulls) of a column without lists."""
    return (x.values, x.valid) if isinstance(x, Nullable) else (x, None)


def put_together(values: Any, valid: Any) -> Column:
    return values if valid is None else Nullable(values, valid)


def both(a: Any, b: Any) -> Any:
    """Valid where both are; None is valid everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return jnp.logical_and(a, b)


def map_values(x: Column, f: Callable[[Any], Any]) -> Column:
    """`f` on the elements of a column, nulls kept: null in, null out."""
    if isinstance(x, Jagged):
        return x.replace(map_values(x.values, f))
    if isinstance(x, Nullable):
        return Nullable(f(x.values), x.valid)
    return f(x)


def is_integer(x: Any) -> bool:
    return isinstance(x, Int64) or bool(
        jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
    )


def as_float(x: Any) -> jax.Array:
    """Elements in floating point: integers become float32, floats stay what they are."""
    if isinstance(x, Int64):
        return words.to_float32(x.words, not x.unsigned)
    v: jax.Array = jnp.asarray(x)
    return v if jnp.issubdtype(v.dtype, jnp.floating) else v.astype(jnp.float32)


def words_of(x: Any, operator: str) -> Words:
    """Elements as 64-bit words."""
    if isinstance(x, Int64):
        return x.words
    x = jnp.asarray(x)
    if not is_integer(x):
        raise PreprocessTypeError(f"{operator} takes integers, not {x.dtype}; cast first")
    return words.of_array(x)


def from_words(w: Words, limit: int) -> Any:
    """Numbers in [0, limit): int32 where they fit, else 64 bits (`Int64` where JAX lacks them)."""
    if limit <= 1 << 31:
        return w.lo.astype(jnp.int32)
    made = Int64(w.hi, w.lo)
    return made.astype(jnp.int64) if x64() else made
