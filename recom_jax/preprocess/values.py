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
from recom_jax.preprocess.words import Words

Column: TypeAlias = Any
"""An array, `Int64`, `Nullable` or `Jagged`; numpy arrays and lists where a column is made from host data."""


@jax.tree_util.register_pytree_node_class
class Int64:
    """64-bit integers as two uint32 arrays, `hi` and `lo`, of one shape. A pytree.

    ``Int64(x)`` splits host integers (a numpy array of any integer type, a list, an int) without loss;
    ``Int64(hi, lo)`` takes words as they are. `to_numpy` (or ``np.asarray``) joins them again.

    Raises:
      PreprocessTypeError: `x` is not made of integers, or is a JAX array of 32 bits whose upper half is gone already.
      PreprocessError: an integer does not fit 64 bits; words of different shapes.
    """

    hi: Any
    lo: Any
    unsigned: bool

    def __init__(self, x: Any, lo: Any = None, *, unsigned: bool | None = None) -> None:
        if lo is not None:
            if np.shape(x) != np.shape(lo):
                raise PreprocessError(
                    f"Int64: the words have shapes {np.shape(x)} and {np.shape(lo)}; they must be equal"
                )
            self.hi, self.lo, self.unsigned = x, lo, bool(unsigned)
            return
        if isinstance(x, jax.Array):
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise PreprocessTypeError(f"Int64 is made of integers, not of {x.dtype}")
            made = words.of_array(x)
            self.hi, self.lo = made
            self.unsigned = bool(jnp.issubdtype(x.dtype, jnp.unsignedinteger))
            return
        host = _host_integers(x)
        self.unsigned = host.dtype.kind == "u" and host.dtype.itemsize == 8
        bits = host.astype(np.uint64 if self.unsigned else np.int64).view(np.uint64)
        self.hi, self.lo = (bits >> np.uint64(32)).astype(np.uint32), bits.astype(np.uint32)
        if unsigned is not None:
            self.unsigned = unsigned

    @classmethod
    def from_numpy(cls, x: Any) -> Int64:
        """As ``Int64(x)``."""
        return cls(x)

    def to_numpy(self) -> np.ndarray:
        """int64 (or uint64) numpy array; waits for the values."""
        high: np.ndarray = np.asarray(self.hi).astype(np.uint64) << np.uint64(32)
        bits: np.ndarray = high | np.asarray(self.lo)
        return bits if self.unsigned else bits.view(np.int64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        made = self.to_numpy()
        return made if dtype is None else made.astype(dtype)

    @property
    def words(self) -> Words:
        return Words(self.hi, self.lo)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.lo))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint64 if self.unsigned else np.int64)

    def astype(self, dtype: Any) -> Any:
        """As numpy converts: integers wrap, floats round to nearest. 64-bit dtypes give a JAX array with x64 only."""
        return cast_words(self, dtype)

    def reshape(self, *shape: Any) -> Int64:
        return self._map(lambda a: a.reshape(*shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Int64:
        return self._map(lambda a: a[index])

    def _map(self, f: Callable[[Any], Any]) -> Int64:
        return Int64(f(self.hi), f(self.lo), unsigned=self.unsigned)

    def tree_flatten(self) -> tuple[tuple[Any, Any], bool]:
        return (self.hi, self.lo), self.unsigned

    @classmethod
    def tree_unflatten(cls, unsigned: bool, children: Any) -> Int64:
        made = object.__new__(cls)  # JAX puts placeholders in: nothing to check
        made.hi, made.lo = children
        made.unsigned = unsigned
        return made

    def __repr__(self) -> str:
        return f"Int64(shape={self.shape}{', unsigned' if self.unsigned else ''})"


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
        if isinstance(self.valid, list):
            object.__setattr__(self, "valid", np.asarray(self.valid, bool))
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
        if isinstance(self.valid, list):
            object.__setattr__(self, "valid", np.asarray(self.valid, bool))
        if self.valid is not None and np.ndim(splits) == 1:
            have, want = np.shape(self.valid), (np.shape(self.row_splits)[0] - 1,)
            if have != want and None not in (have, want):
                raise PreprocessError(f"Jagged: valid has shape {have}, the rows {want}")

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
    """A column as operators see it: host data becomes arrays, and 64-bit integers `Int64` where JAX lacks them."""
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
    host = np.asarray(x)
    if host.dtype == object and host.size and all(isinstance(v, int) for v in host.flat):
        host = _host_integers(host)
    if host.dtype.kind not in "biuf":
        raise PreprocessTypeError(
            f"a column holds numbers, not {host.dtype}; make ids of strings with fingerprint64"
        )
    if host.dtype.kind in "iu" and host.dtype.itemsize == 8 and not x64():
        return Int64(host)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype))


def x64() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


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


def cast_words(x: Int64, dtype: Any) -> Any:
    wanted = np.dtype(dtype)
    if wanted == np.bool_:
        return (x.hi | x.lo) != 0
    if wanted.kind in "iu":
        if wanted.itemsize < 8:
            return jnp.asarray(x.lo).astype(wanted)
        if not x64():
            return Int64(x.hi, x.lo, unsigned=wanted.kind == "u")
        bits = jnp.asarray(x.hi).astype(jnp.uint64) << np.uint64(32) | jnp.asarray(x.lo)
        return bits.astype(wanted)
    if wanted.itemsize == 8 and x64():
        return cast_words(x, np.uint64 if x.unsigned else np.int64).astype(wanted)
    return words.to_float32(x.words, not x.unsigned).astype(jax.dtypes.canonicalize_dtype(wanted))


def _host_integers(x: Any) -> np.ndarray:
    host = np.asarray(x)
    if host.dtype == object and all(isinstance(v, int) for v in host.flat):
        flat = [int(v) for v in host.flat]
        if (
            min(flat) >= -(1 << 63)
            and max(flat) < 1 << 64
            and (min(flat) >= 0 or max(flat) < 1 << 63)
        ):
            return np.array(flat, np.int64 if max(flat) < 1 << 63 else np.uint64).reshape(
                host.shape
            )
        raise PreprocessError("Int64: an integer does not fit 64 bits")
    if host.dtype.kind not in "iub" and host.size:
        raise PreprocessTypeError(f"Int64 is made of integers, not of {host.dtype}")
    return (
        host.astype(np.int64)
        if host.dtype.kind not in "iu"
        else np.ascontiguousarray(host).reshape(host.shape)
    )
