"""`xla_gpu_deterministic_ops`: fused columns and gradients under the flag, and the same bits call after call."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import pytest

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs an NVIDIA GPU: set JAX_PLATFORMS=cuda,cpu"
)
SCRIPT = textwrap.dedent("""
    import jax, jax.numpy as jnp, numpy as np
    import recom_jax

    rng = np.random.default_rng(0)
    tables = [jnp.asarray(rng.normal(size=(500, 16)), jnp.float32) for _ in range(3)]
    segments = rng.integers(-3, 70, 5000).astype(np.int32)
    ids = rng.integers(-20, 520, 5000).astype(np.int32)

    def columns(tables, ids, segments):
        a, b, c = tables
        def bags(rows):
            return jax.ops.segment_sum(rows, segments, num_segments=64)
        padded = jnp.where((ids[:3200] >= 0)[:, None], b[ids[:3200]], 0).reshape(64, 50, 16)
        return jnp.concatenate(
            [bags(jnp.take(a, ids, axis=0, mode="clip")), padded.sum(1), jnp.take(c, ids[:64], axis=0)], axis=1
        )

    def loss(tables, ids, segments):
        return jnp.sum(jnp.nan_to_num(columns(tables, ids, segments)) ** 2)

    model = recom_jax.optimize(columns)
    report = model.explain(tables, ids, segments)
    assert report.num_fused == 3, report
    want = np.asarray(jax.jit(columns)(tables, ids, segments))
    first = np.asarray(model(tables, ids, segments))
    np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-4)
    for _ in range(50):
        np.testing.assert_array_equal(np.asarray(model(tables, ids, segments)), first)

    for options in (recom_jax.Options(), recom_jax.Options(always_fuse=True)):
        trained = recom_jax.optimize(loss, options=options)
        grad = jax.jit(jax.grad(lambda *a: trained(*a)))
        plain = jax.jit(jax.grad(loss))(tables, ids, segments)
        first = jax.device_get(grad(tables, ids, segments))
        for g, p in zip(first, plain):
            np.testing.assert_allclose(g, p, rtol=1e-4, atol=1e-2)
        for _ in range(20):
            for g, f in zip(jax.device_get(grad(tables, ids, segments)), first):
                np.testing.assert_array_equal(g, f)
    print("the same bits")
""")


def test_bits_do_not_change_under_the_flag() -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    env = {**os.environ, "XLA_FLAGS": f"{flags} --xla_gpu_deterministic_ops=true".strip()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the same bits" in done.stdout
