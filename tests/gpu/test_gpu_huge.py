"""Tables and results past 2^31 elements on a GPU: every offset needs 64 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs an NVIDIA GPU: set JAX_PLATFORMS=cuda,cpu"
)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def room() -> None:
    free = jax.devices()[0].memory_stats() or {}
    free = free.get("bytes_limit", 0) - free.get("bytes_in_use", 0)
    if free < 20 * GIB:
        pytest.skip(f"needs 20 GiB of the GPU's memory; {free / GIB:.0f} are free")


def equal(fn: Any, *args: Any) -> None:
    """One fused call, and the same bytes; compared where they are."""
    model = recom_jax.optimize(fn)
    assert model.explain(*args).num_fused == 2
    got = model(*args)
    assert bool(jnp.array_equal(got, jax.jit(fn)(*args)))


def test_a_result_of_more_than_2_32_elements() -> None:
    rows, batch = 1000, (1 << 25) + 3
    tables = [
        jnp.asarray(np.random.default_rng(k).integers(-128, 128, (rows, 64)), jnp.int8)
        for k in range(2)
    ]
    ids = jax.random.randint(jax.random.key(1), (2, batch), -5, rows + 5)
    assert batch * 128 > 1 << 32

    def fn(a: Any, b: Any, i: Any, j: Any) -> Any:
        return jnp.concatenate([jnp.take(a, i, axis=0, mode="clip"), b[j]], axis=1)

    equal(fn, *tables, ids[0], ids[1])


def test_a_table_of_more_than_2_32_elements() -> None:
    rows, batch, bag = (1 << 26) + 5, 1000, 7
    table = jax.random.randint(jax.random.key(0), (rows, 64), -128, 128, jnp.int8)
    ids = jax.random.randint(jax.random.key(1), (batch, bag), rows - 2000, rows + 10)
    assert rows * 64 > 1 << 32

    def fn(t: Any, i: Any) -> Any:
        one = jnp.take(t, i[:, 0], axis=0, mode="clip").astype(jnp.int32)
        bags = jnp.take(t, i, axis=0, mode="clip").astype(jnp.int32).sum(1)
        return jnp.concatenate([one, bags], axis=1)

    equal(fn, table, ids)
