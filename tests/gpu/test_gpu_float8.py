"""Float8 tables on a GPU: bit for bit as plain JAX converts them there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import recom_jax

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs an NVIDIA GPU: set JAX_PLATFORMS=cuda,cpu"
)
KINDS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def dequantised(q: Any, s: Any, i: Any) -> Any:
    return jnp.take(q, i, axis=0).astype(jnp.float32) * jnp.take(s, i, axis=0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: np.dtype(k).name)
@pytest.mark.parametrize("width", [1, 8, 13, 32])
def test_rows(kind: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    every = np.arange(256, dtype=np.uint8).view(kind)
    q = jnp.asarray(rng.permutation(np.tile(every, width)).reshape(256, width))
    s = jnp.asarray(rng.uniform(0.5, 2, (256, 1)), jnp.float32)
    i = rng.integers(-300, 300, 1000).astype(np.int32)

    def fn(q: Any, s: Any, i: Any) -> Any:
        rows = q.at[jnp.clip(i, 0, 255)].get(mode="clip")
        return dequantised(q, s, i), rows.astype(jnp.bfloat16), rows.astype(jnp.float32)

    model = recom_jax.optimize(fn, options=recom_jax.Options(verify=True))
    assert model.explain(q, s, i).num_fused == 3
    for got, want in zip(model(q, s, i), jax.jit(fn)(q, s, i), strict=True):
        nan = np.isnan(np.asarray(want, np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(got, np.float32)), nan)
        kind_of = np.uint32 if got.dtype == np.float32 else np.uint16
        np.testing.assert_array_equal(
            np.asarray(got).view(kind_of)[~nan], np.asarray(want).view(kind_of)[~nan]
        )


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: np.dtype(k).name)
def test_jagged_bags_served(kind: Any) -> None:
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((6000, 32)).astype(kind))
    s = jnp.asarray(rng.uniform(0.5, 2, (6000, 1)), jnp.float32)
    batch = {
        "values": rng.integers(0, 6000, 5000).astype(np.int32),
        "segments": np.sort(rng.integers(0, 300, 5000)).astype(np.int32),
    }

    def fn(params: Any, batch: Any) -> Any:
        rows = dequantised(*params, batch["values"])
        return jax.ops.segment_sum(rows, batch["segments"], num_segments=300)

    serve = recom_jax.optimize(fn, options=recom_jax.Options(verify=True)).bind((q, s))
    np.testing.assert_allclose(serve(batch), jax.jit(fn)((q, s), batch), rtol=1e-5, atol=1e-5)
