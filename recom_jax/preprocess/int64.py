"""64-bit integers where JAX has none: a pytree of two 32-bit words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess import words
from recom_jax.preprocess.words import Words


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
        host = host_integers(x)
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


def x64() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


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


def host_integers(x: Any) -> np.ndarray:
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
