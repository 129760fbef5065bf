"""A first look on a machine with a GPU: right answers from a fused kernel without a warning, and beside it on the CPU.

python tools/gpu_check.py
"""

from __future__ import annotations

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import recom_jax


def model(tables: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    age = jnp.take(tables["age"], jnp.digitize(batch["age"], np.arange(0, 100, 5.0)), axis=0)
    liked = batch["liked"]
    rows = jnp.where((liked >= 0)[..., None], tables["item"][liked], 0)
    mean = rows.sum(1) / jnp.maximum((liked >= 0).sum(1, keepdims=True), 1)
    return jnp.concatenate([age, mean], axis=1)


def main() -> int:
    rng = np.random.default_rng(0)
    tables = {"age": rng.normal(size=(21, 8)), "item": rng.normal(size=(1000, 16))}
    tables = {k: jnp.asarray(v, jnp.float32) for k, v in tables.items()}
    batch = {
        "age": rng.uniform(-5, 120, 64).astype(np.float32),
        "liked": rng.integers(-1, 1000, (64, 20)).astype(np.int32),
    }
    ours = recom_jax.optimize(model)
    want = jax.jit(model)(tables, batch)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = ours(tables, batch)
    bound = ours.bind(tables)(batch)
    grads = [jax.grad(lambda t, f=f: f(t, batch).sum())(tables) for f in (ours, model)]
    print("platform", jax.default_backend(), "jax", jax.__version__)
    print(
        "largest difference", float(jnp.abs(got - want).max()), float(jnp.abs(bound - want).max())
    )
    print(
        "gradients",
        [float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, grads), strict=True)],
    )
    print("warnings", [str(w.message)[:90] for w in seen])
    with jax.default_device(jax.devices("cpu")[0]):
        here = jax.tree.map(np.asarray, (tables, batch))
        on_cpu = ours(*here)
        print(
            "on the CPU of the same process", float(jnp.abs(on_cpu - jax.jit(model)(*here)).max())
        )
    launches = recom_jax.stats()["cuda_kernel_launches"]
    print("calls on the CPU", recom_jax.stats()["calls"], "kernel launches", launches)
    unfused = jax.default_backend() == "gpu" and (bool(seen) or launches == 0)
    close = np.allclose(got, want, atol=1e-5) and np.allclose(bound, want, atol=1e-5)
    return int(unfused or not close)


if __name__ == "__main__":
    sys.exit(main())
