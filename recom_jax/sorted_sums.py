"""The transpose of a call that is linear in its tables, where sums must not meet: on a GPU.

Each row of a gradient is a sum over the ids that read it. Adding them as they come needs atomic operations, whose
order, and so the bits, change from run to run. Here ids are sorted by (table, row) once for all tables. Then each
row of each gradient is a jagged bag of rows of the cotangents, and the gradients of all tables are columns of one
fused call: the kernel of the forward pass. The words of `row_sums` say what is added where.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax.cpu.encode import constants
from recom_jax.errors import EncodeError


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of a row sum (docs/program_format.md, "Row sums"), read.

    Attributes:
      wide: whether sums are made in float64. tables: (rows, elements of a row) of each.
      terms: what is added up, in order.
    """

    wide: bool
    tables: tuple[tuple[int, int], ...]
    terms: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One lookup; names are those of the format. Places are -1 for none."""

    table: int
    ct: int
    base: int
    width: int
    offset: int
    feature: int
    items: int
    bags: int
    inner: int
    row_at: int
    bag_at: int
    weight_at: int
    scale_at: int
    divisor_at: int
    there_at: int
    dims: tuple[tuple[int, int], ...]


def read(words: np.ndarray[Any, np.dtype[np.int64]]) -> Words:
    """Reads words that `row_sums` wrote.

    Raises:
      EncodeError: the tables have 2^31 rows or more together, so that a row has no number of 32 bits.
    """
    it = iter([int(w) for w in words])
    magic, version, length = next(it), next(it), next(it)
    known = constants()["magic"]
    if (magic, version, length) != (known["SUMS_MAGIC"], known["SUMS_VERSION"], len(words)):
        raise EncodeError("not a description of sums")
    wide, *_ = (next(it) for _ in range(5))
    n_tables, n_terms = next(it), next(it)
    tables = tuple((next(it), next(it)) for _ in range(n_tables))
    if sum(rows + 1 for rows, _ in tables) >= 2**31:
        raise EncodeError("2^31 rows or more")
    terms = []
    for _ in range(n_terms):
        fields: list[Any] = [next(it) for _ in range(15)]
        fields.append(tuple((next(it), next(it)) for _ in range(next(it))))
        terms.append(Entry(*fields))
    return Words(bool(wide), tables, tuple(terms))


@dataclasses.dataclass(frozen=True)
class Sorted:
    """What is added to all gradients, in the order of tables, rows, and then of the words.

    Attributes:
      keys: int32 [n], the row that an item adds to, counted through all tables, of which each has one more row, the
        last, for what does not count.
      source: int32 [n], the row of its table's `rows` that it adds. weights: [n], or [0] where no table has any.
      rows: for each table [r, elements of a row]. items: how many of n are each table's. weighted: whether they have
        weights.
    """

    keys: jax.Array
    source: jax.Array
    weights: jax.Array
    rows: tuple[jax.Array, ...]
    items: tuple[int, ...]
    weighted: tuple[bool, ...]

    @property
    def arrays(self) -> list[jax.Array]:
        return [self.keys, self.source, self.weights, *self.rows]


def sums(
    words: Words, numbers: Sequence[jax.Array], cotangents: Sequence[jax.Array], options: Any
) -> list[jax.Array]:
    """The sums of all tables.

    Args:
      numbers: the flat arrays that the program of the numbers computes: int32, float, bool.
      cotangents: as the words count them.

    Returns:
      For each table [rows, elements of a row], float32 (float64 if `wide`).
    """
    from recom_jax.api import fuse_flat

    made = sorted_items(words, numbers, cotangents)
    return fuse_flat(lambda *arrays: totals(words, made, arrays), made.arrays, options)


def sorted_items(
    words: Words, numbers: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> Sorted:
    """Sorts what is added to the gradients; arguments as for `sums`."""
    made = [_items(words, k, numbers, cotangents) for k in range(len(words.tables))]
    keys = _concatenated([m.row + start for m, start in zip(made, _starts(words), strict=True)])
    source = _concatenated([m.source for m in made])
    dtype = jnp.dtype("float64" if words.wide else "float32")
    weighted = tuple(m.weight is not None for m in made)
    if any(weighted):
        weights = _concatenated(
            [jnp.ones(m.row.shape, dtype) if m.weight is None else m.weight for m in made]
        )
        order = jax.lax.iota(jnp.int32, keys.shape[0])
        keys, order = jax.lax.sort((keys, order), num_keys=1, is_stable=True)
        source, weights = _taken(source, order), _taken(weights, order)
    else:
        weights = jnp.zeros((0,), dtype)
        keys, source = jax.lax.sort((keys, source), num_keys=1, is_stable=True)
    items = tuple(m.row.shape[0] for m in made)
    return Sorted(keys, source, weights, tuple(m.rows for m in made), items, weighted)


def totals(words: Words, made: Sorted, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The sums of all tables as jagged bags of rows, as a user would write them. `arrays` are `made.arrays`."""
    keys, source, weights, *rows = arrays
    out, at = [], 0
    for k, start in enumerate(_starts(words)):
        part = slice(at, at + made.items[k])
        at = part.stop
        found = rows[k].at[source[part]].get(mode="promise_in_bounds")
        found = found.astype(jnp.float64 if words.wide else jnp.float32)
        if made.weighted[k]:
            found = found * weights[part][:, None]
        n_rows, _ = words.tables[k]
        out.append(jax.ops.segment_sum(found, keys[part] - start, n_rows, indices_are_sorted=True))
    return out


def _starts(words: Words) -> list[int]:
    """The keys of the tables' first rows."""
    sizes = [rows + 1 for rows, _ in words.tables]
    return list(itertools.accumulate(sizes[:-1], initial=0)) if sizes else []


@dataclasses.dataclass(frozen=True)
class _Items:
    """What is added to one table's gradient: item n adds `rows[source[n]] * weight[n]` to row `row[n]`.

    Attributes:
      rows: [r, elements of a row]. row, source: int32 [n]; `row` is the table's number of rows where nothing is added.
      weight: [n], or None.
    """

    rows: jax.Array
    row: jax.Array
    source: jax.Array
    weight: jax.Array | None


def _items(
    words: Words, table: int, numbers: Sequence[jax.Array], cotangents: Sequence[jax.Array]
) -> _Items:
    ints, floats, preds = numbers
    n_rows, width = words.tables[table]
    terms = [t for t in words.terms if t.table == table and t.width > 0]
    rows: list[jax.Array] = []
    row, source, weight = [], [], []
    before = 0
    for t in terms:
        r = ints[t.row_at : t.row_at + t.items]
        counts = (r >= 0) & (r < n_rows)
        if t.bag_at >= 0:
            bag = ints[t.bag_at : t.bag_at + t.items]
            counts &= (bag >= 0) & (bag < t.bags)
            bag = jnp.clip(bag, 0, max(t.bags - 1, 0))
            if t.there_at >= 0:
                counts &= _taken(preds[t.there_at : t.there_at + t.bags], bag)
        else:
            bag = jax.lax.broadcasted_iota(jnp.int32, (t.bags, t.inner), 0).reshape(-1)
            if t.there_at >= 0:
                there = preds[t.there_at : t.there_at + t.bags]
                counts &= jnp.broadcast_to(there[:, None], (t.bags, t.inner)).reshape(-1)
        found = _rows(t, cotangents[t.ct])
        if t.divisor_at >= 0 or t.scale_at >= 0:
            found = found.astype(floats.dtype)
        if t.divisor_at >= 0:
            found = found / floats[t.divisor_at : t.divisor_at + t.bags][:, None]
        if t.scale_at >= 0:
            found = found * floats[t.scale_at : t.scale_at + t.bags][:, None]
        if t.width < width:
            found = jnp.pad(found, ((0, 0), (t.base, width - t.base - t.width)))
        rows.append(found)
        row.append(jnp.where(counts, r, n_rows))
        source.append(bag + before)
        weight.append(None if t.weight_at < 0 else floats[t.weight_at : t.weight_at + t.items])
        before += t.bags
    if not terms:
        none = jnp.zeros((0,), jnp.int32)
        return _Items(jnp.zeros((1, width), floats.dtype), none, none, None)
    weighted = None
    if any(w is not None for w in weight):
        weighted = _concatenated(
            [
                jnp.ones(r.shape, floats.dtype) if w is None else w
                for w, r in zip(weight, row, strict=True)
            ]
        )
    dtype = rows[0].dtype if len({r.dtype for r in rows}) == 1 else floats.dtype
    joined = _concatenated([r.astype(dtype) for r in rows])
    return _Items(joined, _concatenated(row), _concatenated(source), weighted)


def _rows(t: Entry, ct: jax.Array) -> jax.Array:
    """The rows of a cotangent that belong to a term's bags, [bags, width]."""
    if t.feature == 1 and len(t.dims) == 1:
        _, stride = t.dims[0]
        if stride > 0 and ct.size == t.bags * stride and t.offset + t.width <= stride:
            return ct.reshape(t.bags, stride)[:, t.offset : t.offset + t.width]
    if ct.size >= 2**31:
        raise EncodeError("a cotangent of 2^31 elements or more")
    place = jnp.full((), t.offset, jnp.int32)
    shape = (*(n for n, _ in t.dims), t.width)
    for axis, stride in enumerate((*(s for _, s in t.dims), t.feature)):
        place = place + stride * jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return _taken(ct.reshape(-1), place.reshape(t.bags, t.width))


def _taken(x: jax.Array, at: jax.Array) -> jax.Array:
    return x.at[at].get(mode="promise_in_bounds") if x.size else jnp.zeros(at.shape, x.dtype)


def _concatenated(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


__all__ = ["Words", "read", "sorted_items", "sums", "totals"]
