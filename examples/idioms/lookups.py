"""Single lookups: how ids are made, and how tables are shared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.idioms.idiom import Arrays, Idiom, Made, Size


def modulo(s: Size) -> Made:
    """Hashed ids of all fields in one shared table: ``ids % vocabulary`` on a flattened batch."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        rows = jnp.take(table, ids.reshape(-1) % s.rows, axis=0)
        return rows.reshape(ids.shape[0], s.fields * s.dim)

    return fn, (a.table(), a.ids(s.batch, s.fields, rows=2**31 - 1))


def separate_tables(s: Size) -> Made:
    """A table for each field, its rows side by side."""
    a = Arrays(s)

    def fn(tables: Any, ids: Any) -> Any:
        return jnp.concatenate([t[ids[:, k]] for k, t in enumerate(tables)], axis=-1)

    return fn, ([a.table() for _ in range(s.fields)], a.ids(s.batch, s.fields))


def offsets(s: Size) -> Made:
    """One table for all fields, each field's rows behind the last one's."""
    a = Arrays(s)
    starts = np.arange(s.fields, dtype=np.int32) * s.rows

    def fn(table: Any, ids: Any) -> Any:
        return table[ids + starts]

    return fn, (a.table(s.rows * s.fields), a.ids(s.batch, s.fields))


def stacked(s: Size) -> Made:
    """Tables of equal size in one array, read under vmap."""
    a = Arrays(s)

    def fn(tables: Any, ids: Any) -> Any:
        return jax.vmap(lambda t, i: jnp.take(t, i, axis=0), (0, 1), 1)(tables, ids)

    tables = np.stack([a.table() for _ in range(s.fields)])
    return fn, (tables, a.ids(s.batch, s.fields))


def half_precision_cast(s: Size) -> Made:
    """The whole table is cast before the lookup, as layers with a computation dtype do."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        return jnp.take(table.astype(jnp.bfloat16), ids, axis=0)

    return fn, (a.table(), a.ids(s.batch, s.length))


def quotient_remainder(s: Size) -> Made:
    """Two small tables instead of a large one: rows by quotient and remainder, multiplied."""
    a = Arrays(s)
    split = max(int(s.rows**0.5), 1)

    def fn(quotients: Any, remainders: Any, ids: Any) -> Any:
        return quotients[ids // split] * remainders[ids % split]

    args = a.table(s.rows // split + 1), a.table(split), a.ids(s.batch, s.fields)
    return fn, args


def unique(s: Size) -> Made:
    """Ids made unique before the lookup, the rows spread again behind it."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        few, back = jnp.unique(ids, return_inverse=True, size=ids.size, fill_value=0)
        return table[few][back]

    return fn, (a.table(), a.ids(s.batch * s.length))


def tied(s: Size) -> Made:
    """One table for a user's items, the candidate and the last click; and its rows as classes."""
    a = Arrays(s)

    def fn(items: Any, history: Any, candidate: Any) -> Any:
        state = items[history].sum(1)
        return state * items[candidate], items[history[:, -1]], state @ items[: s.rows].T

    return fn, (a.table(), a.ids(s.batch, s.length), a.ids(s.batch))


def buckets_to_one_hot(s: Size) -> Made:
    """Bucketized, clipped, floored, cast, one-hot, multiplied by a table."""
    a = Arrays(s)

    def fn(table: Any, x: Any) -> Any:
        bucket = jnp.floor(jnp.clip(x, 0.0, s.rows - 1.0)).astype(jnp.int32)
        return jax.nn.one_hot(bucket, s.rows) @ table

    return fn, (a.table(), a.floats(s.batch, low=-9.0, high=1.2 * s.rows))


def thresholds_argmax(s: Size) -> Made:
    """The bin of a value: compared with all thresholds, the first that is larger."""
    a = Arrays(s)
    edges = np.append(np.sort(a.floats(s.rows - 1)), np.inf).astype(np.float32)

    def fn(table: Any, x: Any) -> Any:
        return table[jnp.argmax(x[:, None] < edges, axis=-1)]

    return fn, (a.table(), a.floats(s.batch, low=-9.0, high=120.0))


def thresholds_count(s: Size) -> Made:
    """The bin of a value: how many thresholds it reaches."""
    a = Arrays(s)
    edges = np.sort(a.floats(s.rows - 1))

    def fn(table: Any, x: Any) -> Any:
        return table[(x[:, None] >= edges).sum(-1)]

    return fn, (a.table(), a.floats(s.batch, low=-9.0, high=120.0))


def digitize(s: Size) -> Made:
    """The bin of a value by `jnp.digitize`."""
    a = Arrays(s)
    edges = np.sort(a.floats(s.rows - 1))

    def fn(table: Any, x: Any) -> Any:
        return table[jnp.digitize(x, edges)]

    return fn, (a.table(), a.floats(s.batch, low=-9.0, high=120.0))


def murmur(s: Size) -> Made:
    """Ids through a 32-bit finaliser of the murmur kind: xor-shifts and multiplications, wrapping."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        h = ids.astype(jnp.uint32)
        h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
        return table[(h ^ (h >> 16)) % np.uint32(s.rows)]

    return fn, (a.table(), a.ids(s.batch, s.fields, rows=2**31 - 1, low=-(2**31)))


def xxhash(s: Size) -> Made:
    """Two ids in one hash of the xxhash kind: multiplications and rotations of 32 bits."""
    a = Arrays(s)

    def mix(h: Any, x: Any) -> Any:
        h = h + x * np.uint32(3266489917)
        return ((h << 17) | (h >> 15)) * np.uint32(668265263)

    def fn(table: Any, ids: Any, others: Any) -> Any:
        h = jnp.full(ids.shape, 374761393 + 8, jnp.uint32)
        h = mix(mix(h, ids.astype(jnp.uint32)), others.astype(jnp.uint32))
        h = (h ^ (h >> 15)) * np.uint32(2246822519)
        h = (h ^ (h >> 13)) * np.uint32(3266489917)
        return table[((h ^ (h >> 16)) % np.uint32(s.rows)).astype(jnp.int32)]

    ids = a.ids(s.batch, s.fields, rows=2**31 - 1, low=-(2**31))
    return fn, (a.table(), ids, ids[:, ::-1].copy())


def splitmix(s: Size) -> Made:
    """Ids through a 64-bit finaliser of the splitmix kind (as wide as JAX's integers are)."""
    a = Arrays(s)
    wide = jnp.asarray(0).dtype == np.int64
    word: Any = np.uint64 if wide else np.uint32
    steps = (30, 27, 31) if wide else (16, 13, 15)
    factors = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB) if wide else (0x21F0AAAD, 0xD35A2D97)

    def fn(table: Any, ids: Any) -> Any:
        h = ids.astype(word) + word(0x9E3779B97F4A7C15 & np.iinfo(word).max)
        h = (h ^ (h >> word(steps[0]))) * word(factors[0])
        h = (h ^ (h >> word(steps[1]))) * word(factors[1])
        h = h ^ (h >> word(steps[2]))
        return table[h % word(s.rows)]

    return fn, (a.table(), a.ids(s.batch, s.fields, rows=2**31 - 1))


def several_hashes(s: Size) -> Made:
    """One id, two rows of a small table by two hashes, added."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        x = ids.astype(jnp.uint32)
        rows = [table[(x * np.uint32(k)) >> 8 & 31] for k in (2654435761, 805459861)]
        return rows[0] + rows[1]

    return fn, (a.table(32), a.ids(s.batch, s.fields, rows=2**31 - 1))


def positions(s: Size) -> Made:
    """Token and position embeddings, added."""
    a = Arrays(s)

    def fn(tokens: Any, places: Any, ids: Any) -> Any:
        return tokens[ids] + places[jnp.arange(ids.shape[1])]

    return fn, (a.table(), a.table(2 * s.length), a.ids(s.batch, s.length))


def scaled_and_shifted(s: Size) -> Made:
    """Rows with a learned scale and shift."""
    a = Arrays(s)

    def fn(table: Any, scale: Any, shift: Any, ids: Any) -> Any:
        return table[ids] * scale + shift

    return fn, (a.table(), a.normal(s.dim), a.normal(s.dim), a.ids(s.batch, s.length))


LOOKUPS: dict[str, Idiom] = {
    f.__name__: Idiom(f)
    for f in (
        modulo, separate_tables, offsets, stacked, half_precision_cast, quotient_remainder, unique, tied,
        buckets_to_one_hot, thresholds_argmax, thresholds_count, digitize, murmur, xxhash, splitmix,
        several_hashes, positions, scaled_and_shifted,
    )
}  # fmt: skip
