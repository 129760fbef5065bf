"""Gradients of tables on a GPU: equal to plain JAX's, the same bits each time. Plain JAX on the same GPU is the oracle.

Run with ``JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu``; without a GPU every test is skipped by name.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import gate
from tests.helpers import EPS, table
from tests.test_backward import ALWAYS, LINEAR, arrays, bound, pulled
from tests.test_sorted_sums import many

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs an NVIDIA GPU: set JAX_PLATFORMS=cuda,cpu"
)


@pytest.mark.parametrize("name", LINEAR)
def test_gradients_are_fused_and_equal(name: str) -> None:
    args = arrays()
    f, got = pulled(recom_jax.optimize(LINEAR[name], options=ALWAYS), *args)
    text = f.lower(*args).as_text()
    assert "scatter" not in text and text.count("@recom_fused_v1") >= 2
    want = np.asarray(pulled(LINEAR[name], *args)[1], np.float64)
    assert (np.abs(np.asarray(got) - want) <= bound(LINEAR[name], *args)).all()


@pytest.mark.parametrize("same", [0.0, 0.9])
def test_large_batches_repeat_their_bits(same: float) -> None:
    """Atomic additions in XLA's scatter do not; `same`: the share of ids that are one row's."""
    tables = [table(rows, dim) for rows, dim in ((20_000, 16), (500, 32), (3, 9))]
    rng = np.random.default_rng(0)
    n = 20_000
    i = rng.integers(0, 600, (n, 3)).astype(np.int32)
    i = jnp.asarray(np.where(rng.random((n, 3)) < same, 7, i))
    w = jnp.asarray(rng.normal(size=(n, 3)), jnp.float32)

    def gradient(f: Any) -> Any:
        cts = jnp.asarray(rng.normal(size=(n, 16 + 32 + 9 + 16 + 32)), jnp.float32)
        return jax.jit(lambda t, ct: jax.vjp(lambda t: f(t, i, w), t)[1](ct)[0]), cts

    ours, ct = gradient(recom_jax.optimize(many, options=ALWAYS))
    plain, _ = gradient(many)
    first = ours(tables, ct)
    for _ in range(5):
        for a, b in zip(ours(tables, ct), first, strict=True):
            np.testing.assert_array_equal(
                np.asarray(a).view(np.int32), np.asarray(b).view(np.int32)
            )
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), tables)
        wide = jax.jit(
            lambda t, ct: jax.vjp(lambda t: many(t, i, w.astype(jnp.float64)), t)[1](ct)[0]
        )(jax.tree.map(jnp.asarray, exact), jnp.asarray(np.asarray(ct), jnp.float64))
        wide = [np.asarray(x) for x in wide]
    for a, b, c in zip(first, wide, plain(tables, ct), strict=True):
        size = 20 * EPS * np.sqrt(3 * n) * (1 + np.abs(b))
        assert (np.abs(np.asarray(a) - b) <= size).all()
        assert (np.abs(np.asarray(c) - b) <= 100 * size).all()


def test_the_report_says_so() -> None:
    t, i, w = arrays()
    (report,) = recom_jax.optimize(LINEAR["sum"], options=ALWAYS).explain(t, i, w).gradients
    assert (report.status, report.reason) == ("fused", "")
    (report,) = recom_jax.optimize(LINEAR["sum"]).explain(t, i, w).gradients
    assert (report.status, report.reason) == ("xla", gate.SCATTER)


def test_by_default_the_gradient_is_xlas_scatter() -> None:
    args = arrays()
    f, _ = pulled(recom_jax.optimize(LINEAR["sum"]), *args)
    assert "scatter" in f.lower(*args).as_text()
