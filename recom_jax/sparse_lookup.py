"""How `sparse` reads tables, and which rows an id reads and updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax import api
from recom_jax.errors import ArgumentError, SparseError

MODES = ("fill", "clip", "wrap", "zero")
COMBINERS = (None, "sum", "mean")
FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Lookup:
    """How ids read a table.

    Attributes:
      mode: what becomes of ids outside [0, R) for a table of R rows, in lookup and update alike. As in
        `jax.numpy.take`: "fill" counts negative ids from the end, and what is then outside reads NaN and updates
        nothing; "clip" reads and updates the first or the last row; "wrap" the row ``id % R``. "zero" is for padding:
        every id outside, -1 too, reads zeros and updates nothing.
      combiner: None: a row for each id. "sum" and "mean" pool over the last axis of the ids; with mode "zero" the mean
        is over ids that are there (0 where there are none).

    Raises:
      SparseError: (a ValueError) an unknown mode or combiner.
    """

    mode: str = "fill"
    combiner: str | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if self.combiner not in COMBINERS:
            raise SparseError(f"Lookup.combiner is None, 'sum' or 'mean', not {self.combiner!r}")


@dataclasses.dataclass(frozen=True)
class Matched:
    """Arguments of a lookup, table by table. `outline`: of all tables; `shapes`: of each table's ids."""

    outline: Any
    names: tuple[str, ...]
    tables: tuple[Any, ...]
    ids: tuple[tuple[Any, ...], ...]
    shapes: tuple[Any, ...]
    lookups: tuple[Lookup, ...]


def match(tables: Any, ids: Any, lookup: Any) -> Matched:
    """The ids and the lookup of each table, checked."""
    paths, outline = jax.tree_util.tree_flatten_with_path(tables)
    names = tuple(f"tables{jax.tree_util.keystr(path)}" for path, _ in paths)
    leaves = tuple(table for _, table in paths)
    for name, table in zip(names, leaves, strict=True):
        check_table(name, table)
    if isinstance(lookup, Lookup):
        lookups = (lookup,) * len(leaves)
    else:
        lookups = tuple(subtrees(outline, lookup, "lookup"))
    groups, shapes = [], []
    parts = subtrees(outline, ids, "ids")
    for name, look, part in zip(names, lookups, parts, strict=True):
        if not isinstance(look, Lookup):
            raise ArgumentError(
                f"the lookup of {name} is a sparse.Lookup, not a {type(look).__name__}"
            )
        flat, shape = jax.tree.flatten(part)
        groups.append(tuple(as_ids(f"the ids of {name}", x) for x in flat))
        shapes.append(shape)
        if look.combiner and any(x.ndim == 0 for x in groups[-1]):
            raise SparseError(
                f"the ids of {name} are pooled over their last axis; a scalar has none"
            )
    return Matched(outline, names, leaves, tuple(groups), tuple(shapes), lookups)


def subtrees(outline: Any, tree: Any, what: str) -> list[Any]:
    """What stands in `tree` in the places of `outline`'s leaves."""
    try:
        return list(outline.flatten_up_to(tree))
    except (ValueError, TypeError) as e:
        raise SparseError(f"{what}: expected the structure {outline}: {e}") from e


def read(lookups: tuple[Lookup, ...], tables: Sequence[Any], ids: Sequence[Sequence[Any]]) -> Any:
    """For each table a list of the rows that its ids name."""
    return [
        [_read(t, i, look) for i in group]
        for look, t, group in zip(lookups, tables, ids, strict=True)
    ]


fused_read = api.optimize(read, static_argnums=0)


def _read(table: Any, ids: Any, look: Lookup) -> Any:
    size, width = table.shape
    ids = signed(ids, size, look.mode)
    if look.mode != "zero":
        made = jnp.take(table, ids, axis=0, mode=look.mode)
        count: Any = max(ids.shape[-1], 1) if look.combiner else 1
    elif size == 0:
        made, count = jnp.zeros((*ids.shape, width), table.dtype), 1
    else:
        there = (ids >= 0) & (ids < size)
        made = jnp.take(table, jnp.where(there, ids, 0), axis=0)
        made = jnp.where(there[..., None], made, 0)
        count = jnp.maximum(there.sum(-1, keepdims=True), 1) if look.combiner else 1
    if look.combiner is None:
        return made
    # 16-bit floats add up in float32, as bags do everywhere in this package.
    total = made.astype(wide(made.dtype)).sum(-2)
    return (total / count if look.combiner == "mean" else total).astype(table.dtype)


def spread(name: str, table: Any, ids: Any, grad: Any, look: Lookup) -> tuple[Any, Any]:
    """Row numbers [N] and gradients [N, D] from ids [...] and the derivative by what `read` made of them."""
    size, width = table.shape
    want = (*(ids.shape[:-1] if look.combiner else ids.shape), width)
    if jnp.shape(grad) != want:
        raise SparseError(
            f"the rows' gradients of {name} have shape {want}, as the rows had, not {jnp.shape(grad)}"
        )
    where = positions(ids, size, look.mode)
    grad = jnp.asarray(grad)
    if look.combiner:
        if look.combiner == "mean":
            there = (where < size).sum(-1) if look.mode == "zero" else ids.shape[-1]
            count = jnp.maximum(there, 1).astype(wide(grad.dtype))
            grad = grad.astype(count.dtype) / count[..., None]
        grad = jnp.broadcast_to(grad[..., None, :], (*ids.shape, width))
    return where.reshape(-1), grad.reshape(ids.size, width)


def signed(ids: Any, size: int, mode: str) -> Any:
    """Ids as int32, or int64 if they have 64 bits, that mean the same: JAX counts narrow ones in their own type."""
    kind = np.dtype(ids.dtype)
    to, bits = (np.int64, 63) if kind.itemsize == 8 else (np.int32, 31)
    if size >= 2**bits:
        raise SparseError(f"a table of {size} rows needs int64 ids (jax_enable_x64), not {kind}")
    if np.issubdtype(kind, np.unsignedinteger) and kind.itemsize >= 4:
        top = jnp.asarray(size, kind)
        ids = ids % jnp.maximum(top, 1) if mode == "wrap" else jnp.minimum(ids, top)
    return ids.astype(to)


def positions(ids: Any, size: int, mode: str) -> Any:
    """The row that each id updates, `size` for none: where `jax.grad` of the lookup would add its gradient."""
    ids = signed(ids, size, mode)
    if size == 0:
        return jnp.zeros_like(ids)
    if mode == "clip":
        return jnp.clip(ids, 0, size - 1)
    if mode == "wrap":
        return jnp.mod(ids, size)
    if mode == "fill":
        ids = jnp.where(ids < 0, ids + size, ids)
    return jnp.where((ids < 0) | (ids >= size), size, ids)


def wide(dtype: Any) -> Any:
    """In what sums are made: float32 for 16-bit floats, else the type itself."""
    return jnp.promote_types(dtype, jnp.float32)


# ---- checks --------------------------------------------------------------------------------------------------


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise SparseError(f"the mode of a sparse lookup is fill, clip, wrap or zero, not {mode!r}")


def check_table(name: str, table: Any) -> None:
    dtype = getattr(table, "dtype", None)
    if dtype is None or str(dtype) not in FLOATS:
        kind = type(table).__name__ if dtype is None else str(dtype)
        raise ArgumentError(f"{name} is an array [rows, dim] of {', '.join(FLOATS)}, not {kind}")
    if len(table.shape) != 2:
        raise SparseError(f"{name} has the shape [rows, dim], not {tuple(table.shape)}")


def as_ids(name: str, ids: Any) -> jax.Array:
    if getattr(ids, "dtype", None) is None and not isinstance(ids, (int, list, tuple)):
        raise ArgumentError(f"{name} are integers, not a {type(ids).__name__}")
    made = jnp.asarray(ids)
    if not jnp.issubdtype(made.dtype, jnp.integer):
        raise ArgumentError(f"{name} are integers, not {made.dtype}")
    return made
