"""Results are poisoned before each run of the correctness tests: an element that no kernel writes is seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import ffi
from tests.helpers import POISON, check, poison

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs an NVIDIA GPU: set JAX_PLATFORMS=cuda,cpu"
)


@pytest.mark.parametrize("shape", [(3,), (1000,), (256, 33), (1 << 20,)])
def test_what_nobody_writes_is_poison(shape: tuple[int, ...]) -> None:
    recom_jax.optimize(lambda t, i: t[i])(jnp.ones((4, 2)), jnp.arange(3))  # registers the targets
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    call = jax.jit(lambda x: jax.ffi.ffi_call(ffi.EMPTY, out)(x))
    x = jnp.ones(5)
    seen = []
    for _ in range(5):
        jax.block_until_ready(call(x))
        poison(out)
        seen.append((np.asarray(call(x)).view(np.uint8) == POISON).all())
    assert all(seen), seen


def test_columns_are_written_whole() -> None:
    def model(t: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.concatenate([t[i], t[i + 1], t[i - 1]], axis=1)

    check(model, jnp.ones((50, 5)), jnp.arange(37))
