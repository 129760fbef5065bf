"""Lookups inside loops, branches, rematerialised and differentiated calls, and calls over several devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from examples.idioms.idiom import Arrays, Idiom, Made, Size


def scan(s: Size) -> Made:
    """A recurrence that looks up a row a step."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        def step(h: Any, i: Any) -> Any:
            return jnp.tanh(h + table[i]), None

        return lax.scan(step, jnp.zeros((s.batch, s.dim)), ids.T)[0]

    return fn, (a.table(), a.ids(s.batch, s.length))


def fori_loop(s: Size) -> Made:
    """A bag summed in a loop over its positions."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        start = jnp.zeros((s.batch, s.dim))
        return lax.fori_loop(0, s.length, lambda k, h: h + table[ids[:, k]], start)

    return fn, (a.table(), a.ids(s.batch, s.length))


def while_loop(s: Size) -> Made:
    """A path through a table of next ids, until it is long enough."""
    a = Arrays(s)

    def fn(table: Any, following: Any, ids: Any) -> Any:
        def step(state: Any) -> Any:
            k, at, h = state
            return k + 1, following[at, 0], h + table[at]

        start = (0, ids, jnp.zeros((s.batch, s.dim)))
        return lax.while_loop(lambda state: state[0] < s.length, step, start)[2]

    return fn, (a.table(), a.ids(s.rows, 1), a.ids(s.batch))


def cond(s: Size) -> Made:
    """A fallback for ids that the table does not have."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        return lax.cond(ids.max() < s.rows, lambda: table[ids], lambda: jnp.zeros((s.batch, s.dim)))

    return fn, (a.table(), a.ids(s.batch))


def mapped(s: Size) -> Made:
    """A bag at a time, by `lax.map`."""
    a = Arrays(s)

    def fn(table: Any, ids: Any) -> Any:
        return lax.map(lambda i: table[i].sum(0), ids)

    return fn, (a.table(), a.ids(s.batch, s.length))


def checkpoint(s: Size) -> Made:
    """A block that is computed again in the backward pass."""
    a = Arrays(s)

    def fn(table: Any, w: Any, ids: Any) -> Any:
        return jax.checkpoint(lambda t: jnp.tanh(t[ids].sum(1) @ w))(table)

    return fn, (a.table(), a.normal(s.dim, 4), a.ids(s.batch, s.length))


def custom_vjp(s: Size) -> Made:
    """A lookup with a gradient of its own."""
    a = Arrays(s)

    @jax.custom_vjp
    def lookup(table: Any, ids: Any) -> Any:
        return table[ids]

    def forward(table: Any, ids: Any) -> Any:
        return table[ids], (table, ids)

    def backward(kept: Any, g: Any) -> Any:
        table, ids = kept
        return jnp.zeros_like(table).at[ids].add(g * 0.5), None

    lookup.defvjp(forward, backward)
    return lookup, (a.table(), a.ids(s.batch))


def beside_a_loop(s: Size) -> Made:
    """Columns in front of a recurrence: they are fused, the loop stays."""
    a = Arrays(s)

    def fn(table: Any, w: Any, ids: Any) -> Any:
        rows = table[ids].swapaxes(0, 1)
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros(rows.shape[1:]), rows)[
            0
        ]

    return fn, (a.table(), a.normal(s.dim, s.dim), a.ids(s.batch, s.length))


def sharded_lookup(s: Size) -> Made:
    """Rows of a table spread over devices: each device looks up its own, the rest are zeros, all are added."""
    a = Arrays(s)
    auto: Any = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((1,), ("shard",), axis_types=(auto,))
    spec: Any = jax.sharding.PartitionSpec

    def local(table: Any, ids: Any) -> Any:
        at = ids - lax.axis_index("shard") * table.shape[0]
        there = (at >= 0) & (at < table.shape[0])
        rows = jnp.where(there[..., None], table[jnp.where(there, at, 0)], 0)
        return lax.psum(rows, "shard")

    def fn(table: Any, ids: Any) -> Any:
        return jax.shard_map(
            local, mesh=mesh, in_specs=(spec("shard", None), spec()), out_specs=spec()
        )(table, ids)

    return fn, (a.table(), a.ids(s.batch))


CONTROL: dict[str, Idiom] = {
    f.__name__: Idiom(f)
    for f in (
        scan, fori_loop, while_loop, cond, mapped, checkpoint, custom_vjp, beside_a_loop, sharded_lookup,
    )
}  # fmt: skip
