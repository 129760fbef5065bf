"""What sparse updates are made of: sums of the gradients of a row, and changes of rows in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from recom_jax.errors import ArgumentError, SparseError
from recom_jax.sparse_lookup import as_ids, check_mode, check_table, positions, wide


def combine(ids: jax.Array, grads: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Adds up the gradients of equal ids: sorted by id, then summed segment by segment.

    On a CPU each sum is made in the order of `ids`, as the dense gradient's is; elsewhere pairwise. Neither depends on
    how threads run.

    Args:
      ids: integers [N] in [0, num_rows); others stand for none.
      grads: floats [N, D].

    Returns:
      (ids [N], sums [N, D]): each id once, ascending; what is not used has the id `num_rows` at the end. Sums of 16-bit
      floats are float32.
    """
    ids, grads = jnp.asarray(ids), jnp.asarray(grads)
    size = ids.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)
    ids = jnp.where((ids < 0) | (ids > num_rows), num_rows, ids)
    ids, order = _in_id_order(ids, place, num_rows)
    grads = grads.astype(wide(grads.dtype)).at[order].get(mode="promise_in_bounds")
    first = (place == 0) | (ids != jnp.concatenate([ids[:1], ids[:-1]]))
    run = jnp.cumsum(first.astype(jnp.int32)) - 1
    once = jnp.full(size, num_rows, ids.dtype).at[run].set(ids, indices_are_sorted=True)
    sums = jax.lax.platform_dependent(grads, run, first, cpu=in_order, default=pairwise)
    return once, sums


def summed(table: Any, ids: Any, grads: Any, mode: str) -> tuple[jax.Array, jax.Array]:
    """(rows [N], sums [N, D]): each row once, then the number of rows for none."""
    check_table("table", table)
    check_mode(mode)
    ids = as_ids("ids", ids)
    size, width = table.shape
    if not jnp.issubdtype(jnp.asarray(grads).dtype, jnp.floating):
        raise ArgumentError(f"row_grads are floats, not {jnp.asarray(grads).dtype}")
    if jnp.shape(grads) != (*ids.shape, width):
        raise SparseError(
            f"row_grads has shape {(*ids.shape, width)}, a row for each id, not {jnp.shape(grads)}"
        )
    flat = jnp.asarray(grads).astype(wide(table.dtype)).reshape(ids.size, width)
    return combine(positions(ids, size, mode).reshape(-1), flat, size)


def _in_id_order(ids: jax.Array, place: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """(ids, places), sorted by id and then place."""
    size = ids.shape[0]
    if not isinstance(size, int) or size == 0 or size * (num_rows + 1) > 2**32:
        ids, place = jax.lax.sort((ids, place), num_keys=1, is_stable=True)
        return ids, place
    # One number for both: a CPU sorts plain numbers several times faster than pairs.
    keys = jax.lax.sort(ids.astype(jnp.uint32) * jnp.uint32(size) + place.astype(jnp.uint32))
    return (keys // size).astype(ids.dtype), (keys % size).astype(place.dtype)


def in_order(grads: jax.Array, run: jax.Array, first: jax.Array) -> jax.Array:
    """Sums [N, D] of runs, one after the other: a CPU's scatter goes in the order of its updates."""
    del first
    return jax.ops.segment_sum(grads, run, grads.shape[0], indices_are_sorted=True)


def pairwise(grads: jax.Array, run: jax.Array, first: jax.Array) -> jax.Array:
    """The same without atomic additions: after step k each element holds the sum of the 2**k before it, in its run.

    Hillis and Steele, Data parallel algorithms, CACM 29, 1986, with segments. As many passes as the longest run needs.
    """
    size = grads.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    begin = jax.lax.cummax(jnp.where(first, place, 0))
    longest = jnp.max(place - begin, initial=0)

    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] <= longest

    def add(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        step, sums = carry
        there = place - step >= begin
        before = sums.at[jnp.where(there, place - step, 0)].get(mode="clip")
        return 2 * step, sums + jnp.where(there[:, None], before, 0)

    _, sums = jax.lax.while_loop(more, add, (jnp.int32(1), grads))
    last = jnp.concatenate([first[1:], jnp.ones_like(first[:1])])
    return jnp.zeros_like(grads).at[jnp.where(last, run, size)].set(sums, mode="drop")


def scatter_add(array: jax.Array, where: jax.Array, values: jax.Array) -> jax.Array:
    """Adds to the rows of `array` that `where` names, each once. Rows behind the end are none."""
    return jnp.asarray(array).at[where].add(values, mode="drop", indices_are_sorted=True)


def subtract(table: jax.Array, where: jax.Array, change: jax.Array) -> jax.Array:
    """``table[where] -= change``, in the wider type of the two, rounded once."""
    if change.dtype == table.dtype:
        return scatter_add(table, where, -change)
    table = jnp.asarray(table)
    old = table.at[where].get(mode="fill", fill_value=0).astype(change.dtype)
    # Without the barrier a compiler may read the table inside the update, and so need a copy of it.
    new = jax.lax.optimization_barrier((old - change).astype(table.dtype))
    if table.dtype == jnp.bfloat16:
        made: jax.Array = jax.lax.platform_dependent(
            table, where, new, cpu=set_bits, default=set_rows
        )
        return made
    return set_rows(table, where, new)


def set_rows(table: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
    return table.at[where].set(new, mode="drop", indices_are_sorted=True)


def set_bits(table: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
    """`set_rows` for bfloat16 on a CPU. XLA would scatter into a float32 copy; this copy keeps bits and is half."""
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    bits = set_rows(bits, where, jax.lax.bitcast_convert_type(new, jnp.uint16))
    return jax.lax.bitcast_convert_type(bits, table.dtype)


def scalar(lr: Any, dtype: Any) -> jax.Array:
    if jnp.ndim(lr) != 0:
        raise SparseError(f"lr is a scalar, not of shape {jnp.shape(lr)}")
    return jnp.asarray(lr, dtype)


def check_state(name: str, state: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if jnp.shape(state) != shape or getattr(state, "dtype", None) != dtype:
        have = f"{getattr(state, 'dtype', type(state).__name__)}{list(jnp.shape(state))}"
        raise SparseError(f"{name} is {jnp.dtype(dtype)}{list(shape)} for this table, not {have}")
