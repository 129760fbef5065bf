"""A run over eight virtual devices, in a process of its own (`test_corun_mesh.py`): tables are parted between them,
each prepares the ids of the tables that it owns and its rows of the dense features."""

import functools
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recom_jax import corun, ffi
from recom_jax import preprocess as pp
from recom_jax.corun import calls, kernels, pipeline
from tests import corun_emulation

DEVICES, FEATURES, ROWS, DIM, BATCH = 8, 16, 50, 4, 32
NAMES = [f"C{k}" for k in range(FEATURES)]
SPECS = {"dense": P("x"), "ids": P(None, "x"), "label": P("x")}
SEEDS = iter(range(1 << 30))


def make(k: kernels.PrepKernels, /, **plan: Any) -> Any:
    address = corun_emulation.address(k.source)
    return ffi.extension().CorunRuntime.simulated(seed=next(SEEDS), kernel=address, **plan)


def prep(raw: Any) -> Any:
    dense = [pp.clamp(pp.fill_null(raw[f"I{k}"], 0.0), -1.0, 1.0) for k in range(3)]
    ids = [
        pp.pad(pp.firstx(pp.sigrid_hash(raw[n], salt=k, max_value=ROWS), 2), 2)
        for k, n in enumerate(NAMES)
    ]
    return {"dense": jnp.stack(dense, 1), "ids": jnp.stack(ids, 1), "label": raw["label"]}


def raw_batch(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    raw: dict[str, Any] = {"label": rng.random(BATCH).astype(np.float32)}
    for k in range(3):
        values = rng.normal(size=BATCH).astype(np.float32)
        raw[f"I{k}"] = pp.Nullable(values, rng.random(BATCH) > 0.2)
    for n in NAMES:
        splits = np.concatenate([[0], np.cumsum(rng.integers(0, 4, BATCH))]).astype(np.int32)
        raw[n] = pp.Jagged(rng.integers(0, 1 << 62, int(splits[-1])), splits)
    return raw


def local_step(state: Any, batch: Any) -> Any:
    """On each device: its tables for all rows, then an exchange, then its rows."""
    tables, ids = state["tables"], batch["ids"]
    there = ids >= 0
    rows = jax.vmap(lambda t, i: t[i], in_axes=(0, 1), out_axes=1)(tables, ids)
    rows = corun.stage(jnp.where(there[..., None], rows, 0).sum((1, 2)), "look up")
    mine = jax.lax.psum_scatter(rows, "x", scatter_dimension=0, tiled=True)
    score = mine.sum(1) + batch["dense"].sum(1)
    error = corun.stage(score - batch["label"], "error")
    loss = jax.lax.psum(jnp.sum(error**2), "x")
    full = jax.lax.all_gather(error, "x", tiled=True)
    change = jnp.broadcast_to(-0.001 * full[:, None, None, None], (*ids.shape, DIM))
    places = jnp.where(there, ids, ROWS)
    tables = jax.vmap(lambda t, i, c: t.at[i].add(c, mode="drop"), in_axes=(0, 1, 1))(
        tables, places, change
    )
    return {"tables": tables}, {"loss": loss}


MESH = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
STATE = {"tables": P("x")}


@functools.partial(jax.jit, donate_argnums=0)
def step(state: Any, batch: Any) -> Any:
    return jax.shard_map(
        local_step,
        mesh=MESH,
        in_specs=(STATE, SPECS),
        out_specs=(STATE, {"loss": P()}),
        check_vma=False,
    )(state, batch)


def start() -> Any:
    tables = np.random.default_rng(0).normal(size=(FEATURES, ROWS, DIM)).astype(np.float32)
    return {"tables": jax.device_put(tables, NamedSharding(MESH, P("x")))}


def main() -> None:
    pipeline._emulated, calls._emulated = (make, 4), True
    batches = [raw_batch(k) for k in range(8)]
    pipe = corun.Pipeline(prep, step, MESH, corun.Options(runtime="stream"), specs=SPECS)
    found = [float(m["loss"]) for _, m in pipe.run(start(), batches)]
    state, want = start(), []
    for raw in batches:
        made = jax.jit(prep)(pp.columns(raw))
        put = {n: jax.device_put(x, NamedSharding(MESH, SPECS[n])) for n, x in made.items()}
        state, m = step(state, put)
        want.append(float(m["loss"]))
    assert found == want, (found, want)
    assert np.isfinite(want).all() and want[0] != want[-1]
    engine = pipe._made_engine
    assert engine is not None
    for k, part in enumerate(engine._programs[0].runtime.parts):
        read = {leaf.path.split("'")[1] for leaf in part.kernels.leaves if leaf.offset >= 0}
        assert read == {f"C{2 * k}", f"C{2 * k + 1}", "I0", "I1", "I2", "label"}, read
        assert part.native.stats["taken"] == 8
    for a, b in zip(
        jax.tree.leaves(pipe.prepare(batches[0])),
        jax.tree.leaves(jax.jit(prep)(pp.columns(batches[0]))),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    threads = corun.Pipeline(prep, step, MESH, corun.Options(runtime="threads"), specs=SPECS)
    assert [float(m["loss"]) for _, m in threads.run(start(), batches)] == want
    print("equal")


if __name__ == "__main__":
    main()
