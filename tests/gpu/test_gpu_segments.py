"""So many segment ids that tiles search them, on a GPU: numpy is the oracle, and repeated calls agree to the bit."""

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
TOTAL, BAGS = 100_000, 3_000


def orders() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ascending = np.sort(rng.integers(-20, BAGS + 20, TOTAL)).astype(np.int32)
    swapped, alone, last = ascending.copy(), ascending.copy(), ascending.copy()
    swapped[[500, 70_000]] = swapped[[70_000, 500]]
    alone[100:-100] = 7
    last[-1] = 0
    return {
        "ascending": ascending,
        "padded": np.where(np.arange(TOTAL) < 20_000, ascending, BAGS).astype(np.int32),
        "one bag": np.full(TOTAL, 5, np.int32),
        "two swapped": swapped,
        "the last one": last,
        "nearly one bag": alone,
        "at random": rng.permutation(ascending),
    }


def model(t: Any, ids: Any, weights: Any, seg: Any) -> dict[str, Any]:
    rows = t[ids]
    return {
        "sum": jax.ops.segment_sum(rows, seg, num_segments=BAGS),
        "weighted": jax.ops.segment_sum(rows * weights[:, None], seg, num_segments=BAGS),
        "max": jax.ops.segment_max(rows, seg, num_segments=BAGS),
    }


@pytest.mark.parametrize("dim", [5, 8, 64])
def test_every_order(dim: int) -> None:
    """One program for all of them, also inside another jit, whose calls are captured in a CUDA graph."""
    rng = np.random.default_rng(dim)
    table = rng.integers(-8, 9, (5000, dim)).astype(np.float32)  # sums are exact in any order
    ids = rng.integers(0, 5000, TOTAL).astype(np.int32)
    weights = rng.integers(-2, 3, TOTAL).astype(np.float32)
    ours = recom_jax.optimize(model, options=recom_jax.Options(verify=True))
    inner = jax.jit(lambda *args: jax.tree.map(lambda x: x + 1, ours(*args)))
    before = int(recom_jax.stats()["cuda_kernel_launches"])
    for name, seg in orders().items():
        there = (seg >= 0) & (seg < BAGS)
        rows = table[ids[there]]
        want = {k: np.zeros((BAGS, dim), np.float32) for k in ("sum", "weighted")}
        want["max"] = np.full((BAGS, dim), -np.inf, np.float32)
        np.add.at(want["sum"], seg[there], rows)
        np.add.at(want["weighted"], seg[there], rows * weights[there, None])
        np.maximum.at(want["max"], seg[there], rows)
        for _ in range(2):
            got = ours(table, ids, weights, seg)
            more = inner(table, ids, weights, seg)
            for k in want:
                np.testing.assert_array_equal(got[k], want[k], err_msg=f"{name}: {k}")
                np.testing.assert_array_equal(more[k], want[k] + 1, err_msg=f"{name}: {k}")
    assert int(recom_jax.stats()["cuda_kernel_launches"]) > before


def test_streams_share_nothing() -> None:
    """Calls of several threads at once, of ids in order and not: each execution has memory of its own."""
    from concurrent.futures import ThreadPoolExecutor

    rng = np.random.default_rng(1)
    table = jnp.asarray(rng.integers(-8, 9, (5000, 8)).astype(np.float32))
    ids = jnp.asarray(rng.integers(0, 5000, TOTAL).astype(np.int32))
    weights = jnp.ones(TOTAL, jnp.float32)
    ours = recom_jax.optimize(model)
    given = [jnp.asarray(x) for x in list(orders().values())]
    want = [jax.device_get(jax.jit(model)(table, ids, weights, x)) for x in given]

    def one(k: int) -> bool:
        got = jax.device_get(ours(table, ids, weights, given[k % len(given)]))
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want[k % len(given)]), strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(200)))
