"""Neighbouring lookup columns of one width are written side by side; that must change no number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import check


def _columns(
    n: int, dims: tuple[int, ...], dtype: str, rng: np.random.Generator
) -> list[jax.Array]:
    sizes = [(int(rng.integers(1, 60)), dims[k % len(dims)]) for k in range(n)]
    if dtype.startswith("int"):
        return [jnp.asarray(rng.integers(-9, 9, s), dtype) for s in sizes]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in sizes]


TYPES = [
    ((4,), "float32"),
    ((32,), "float32"),
    ((8, 8, 16), "float32"),
    ((8,), "float64"),
    ((16,), "int8"),
    ((8,), "bfloat16"),
    ((7, 8), "float32"),
]


@pytest.mark.parametrize(
    ("batch", "dims", "dtype"),
    [
        *((batch, (8,), "float32") for batch in (0, 1, 127, 128, 129, 257, 700)),
        *((257, *types) for types in TYPES),
    ],
)
def test_neighbours_equal_plain_jax(batch: int, dims: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(batch)
    with jax.enable_x64(dtype == "float64"):
        tables = _columns(37, dims, dtype, rng)
        ids = [jnp.asarray(rng.integers(-70, 70, batch), jnp.int32) for _ in tables]

        def model(tables: list[jax.Array], ids: list[jax.Array]) -> jax.Array:
            rows = [
                jnp.take(t, i, axis=0) if k % 3 else t.at[i].get(mode="clip")
                for k, (t, i) in enumerate(zip(tables, ids, strict=True))
            ]
            return jnp.concatenate(rows, axis=1)

        check(model, tables, ids, columns=37 if batch else 0, calls=1 if batch else 0)


def test_neighbours_with_other_columns_between() -> None:
    rng = np.random.default_rng(5)
    tables = _columns(12, (8,), "float32", rng)
    ids = jnp.asarray(rng.integers(0, 40, (64, 12)), jnp.int32)
    dense = jnp.asarray(rng.normal(size=(64, 3)), jnp.float32)

    def model(tables: list[jax.Array], ids: jax.Array, dense: jax.Array) -> jax.Array:
        rows = [t[ids[:, k]] for k, t in enumerate(tables)]
        rows[3:3] = [dense, tables[0][ids[:, :3]].sum(1)]
        return jnp.concatenate(rows, axis=-1)

    bound = 3 * np.finfo(np.float32).eps * float(jnp.abs(tables[0]).max()) * 3
    check(model, tables, ids, dense, columns=13, bound=bound)
