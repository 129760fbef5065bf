"""Two GPUs: plain jit and shard_map over the batch gather nothing of tables or inputs; each GPU runs its own kernel.

Run with ``JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu``; skipped by name where fewer than two GPUs are.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import recom_jax

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or len(jax.devices()) < 2,
    reason="needs two NVIDIA GPUs: set JAX_PLATFORMS=cuda,cpu on a machine that has them",
)
ROWS, DIM, B, L = 640, 16, 512, 5
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute")


def plain(p: Any, b: Any) -> Any:
    there = b["j"] >= 0
    bag = jnp.where(there[..., None], p["u"][jnp.where(there, b["j"], 0)], 0).sum(1)
    return jnp.concatenate(
        [
            p["t"][b["i"]],
            bag / jnp.maximum(there.sum(1, keepdims=True), 1),
            jnp.take(p["t"], jnp.digitize(b["x"], np.array([0.0, 1.0, 2.0])), axis=0),
            p["u"][(b["i"] * 7 + 3) % ROWS],
        ],
        -1,
    )


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that plain jit over devices runs unfused is said once
        yield


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def arrays() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=(ROWS, DIM)).astype(np.float32) for k in "tu"}
    batch = {
        "i": rng.integers(-ROWS, ROWS + 3, B).astype(np.int32),
        "j": rng.integers(-1, ROWS, (B, L)).astype(np.int32),
        "x": rng.normal(size=B).astype(np.float32),
    }
    return params, batch


@pytest.fixture
def ours() -> Any:
    return recom_jax.optimize(plain, options=recom_jax.Options(verify=True))


def put(tree: Any, mesh: Any, spec: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)


def run(fn: Any, args: Any) -> tuple[Any, str]:
    """The result, and the compiled module, which gathers nothing."""
    compiled = jax.jit(fn).lower(*args).compile()
    text = compiled.as_text()
    for op in COLLECTIVES:
        assert not re.search(rf"{op}(?:-start)?\(", text), op
    return compiled(*args), text


def test_plain_jit(mesh: Any, arrays: Any, ours: Any) -> None:
    params, batch = arrays
    args = put(params, mesh, P()), put(batch, mesh, P("b"))
    out, text = run(ours, args)
    assert "all-reduce" not in text
    assert out.sharding.spec == P("b")
    np.testing.assert_allclose(out, jax.jit(plain)(params, batch), atol=2e-5)


def test_shard_map(mesh: Any, arrays: Any, ours: Any) -> None:
    params, batch = arrays
    args = put(params, mesh, P()), put(batch, mesh, P("b"))
    before = recom_jax.stats()["cuda_kernel_launches"]
    f = jax.shard_map(ours, mesh=mesh, in_specs=(P(), P("b")), out_specs=P("b"))
    out, text = run(f, args)
    assert "recom_fused_v1" in text
    np.testing.assert_allclose(out, jax.jit(plain)(params, batch), atol=2e-5)
    assert {s.device for s in out.addressable_shards} == set(jax.devices()[:2])
    assert recom_jax.stats()["cuda_kernel_launches"] - before == 2


def test_gradients_of_shard_map(mesh: Any, arrays: Any, ours: Any) -> None:
    params, batch = arrays
    args = put(params, mesh, P()), put(batch, mesh, P("b"))
    f = jax.shard_map(ours, mesh=mesh, in_specs=(P(), P("b")), out_specs=P("b"))

    def loss(fn: Any) -> Any:
        return jax.grad(lambda p, b: (jnp.tanh(fn(p, b)) ** 2).sum())

    found, text = run(loss(f), args)
    assert "recom_fused_v1" in text
    assert re.search(
        r"all-reduce(?:-start)?\(", text
    )  # of the gradients, which are sums over the batch
    want = jax.jit(loss(plain))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), found, want)


def test_each_device_alone(arrays: Any, ours: Any) -> None:
    """The same function on either device: one module and one plan each."""
    params, batch = arrays
    want = np.asarray(jax.jit(plain)(params, batch))
    for device in jax.devices()[:2]:
        out = ours(*jax.device_put(arrays, device))
        assert out.devices() == {device}
        np.testing.assert_allclose(out, want, atol=2e-5)
    serve = ours.bind(jax.device_put(params, jax.devices()[1]))
    for _ in range(3):
        out = serve(batch)
        assert out.devices() == {jax.devices()[1]}
        np.testing.assert_allclose(out, want, atol=2e-5)
