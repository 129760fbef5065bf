"""Jagged bags that all warps of a block sum up, on a GPU: numpy is the oracle, and repeated calls agree to the bit."""

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


@pytest.mark.parametrize("way", ["splits", "segments"])
@pytest.mark.parametrize("dim", [4, 5, 32, 160])
def test_sums_and_means(dim: int, way: str) -> None:
    rng = np.random.default_rng(dim)
    lengths = rng.integers(0, 5, 300)
    lengths[[7, 8, 9, 150, 299]] = 2047, 2048, 2049, 10_000, 5000
    total, n = int(lengths.sum()), len(lengths)
    table = rng.standard_normal((5000, dim)).astype(np.float32)
    batch = {
        "ids": rng.integers(0, 5000, total).astype(np.int32),
        "weights": rng.standard_normal(total).astype(np.float32),
        "splits": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "segments": np.repeat(np.arange(n), lengths).astype(np.int32),
    }

    def fn(t: Any, b: Any) -> Any:
        seg = b["segments"]
        if way == "splits":
            seg = jnp.searchsorted(b["splits"], jnp.arange(total), side="right") - 1
        rows = t[b["ids"]]
        count = jax.ops.segment_sum(jnp.ones(total), seg, num_segments=n)
        return {
            "mean": jax.ops.segment_sum(rows, seg, num_segments=n) / jnp.maximum(count, 1)[:, None],
            "weighted": jax.ops.segment_sum(rows * b["weights"][:, None], seg, num_segments=n),
            "max": jax.ops.segment_max(rows, seg, num_segments=n),
        }

    ours = recom_jax.optimize(fn, options=recom_jax.Options(verify=True, long_bags=True))
    got = {k: np.asarray(v) for k, v in ours(table, batch).items()}
    for _ in range(3):
        for k, v in ours(table, batch).items():
            np.testing.assert_array_equal(v, got[k])
    wide = table.astype(np.float64)
    for bag, (begin, end) in enumerate(zip(batch["splits"][:-1], batch["splits"][1:], strict=True)):
        rows = wide[batch["ids"][begin:end]]
        weights = batch["weights"][begin:end, None]
        if len(rows) == 0:
            assert not got["mean"][bag].any()
            assert np.isneginf(got["max"][bag]).all()
            continue
        np.testing.assert_allclose(got["mean"][bag], rows.mean(0), atol=2e-5)
        np.testing.assert_allclose(got["weighted"][bag], (rows * weights).sum(0), atol=5e-3)
        np.testing.assert_array_equal(got["max"][bag], rows.max(0).astype(np.float32))
