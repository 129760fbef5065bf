"""Small models of every kind of column through the CUDA target, for compute-sanitizer:

compute-sanitizer --tool memcheck python tools/gpu_sanitize.py

The tools are memcheck, racecheck, synccheck and initcheck. All runs twice, the second time with buffers' addresses in a
table on the device, as those of calls with thousands of buffers are. XLA_PYTHON_CLIENT_ALLOCATOR=platform gives each
array memory of its own, so that memcheck sees where it ends.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import recom_jax
from recom_jax.cuda import kernel


def model(tables: dict[str, jax.Array], b: dict[str, jax.Array]) -> list[jax.Array]:
    age = jnp.take(tables["a"], jnp.digitize(b["age"], np.array([1.0, 2, 4, 8])), axis=0)
    ids = b["bag"]
    rows = jnp.where((ids >= 0)[..., None], tables["b"][jnp.maximum(ids, 0)], 0)
    mean = rows.sum(1) / jnp.maximum((ids >= 0).sum(1, keepdims=True), 1)
    seg = jnp.searchsorted(b["splits"], jnp.arange(b["values"].shape[0]), side="right") - 1
    n = b["splits"].shape[0] - 1
    jagged = jax.ops.segment_sum(tables["c"][b["values"]], seg, num_segments=n)
    odd = jax.ops.segment_max(tables["a"][b["values"] % 5], b["seg"], num_segments=n)
    weighted = (jnp.take(tables["b"], b["some"], axis=0) * b["weight"][..., None]).sum(1)
    half = tables["h"][b["bag"][:, 0] % 7].astype(jnp.float32)
    return [jnp.concatenate([age, mean, jagged, weighted, half], axis=1), odd]


def main() -> int:
    worst, launches = run()
    kernel.BUCKETS = ()
    with_table = run()
    print("largest differences", worst, with_table[0], "kernel launches", launches, with_table[1])
    return int(max(worst, with_table[0]) > 1e-3 or not launches or with_table[1] == launches)


def run() -> tuple[float, int]:
    """The largest difference from plain JAX, and how many kernels this process has launched."""
    rng = np.random.default_rng(0)
    tables = {
        "a": rng.normal(size=(5, 3)).astype(np.float32),
        "b": rng.normal(size=(100, 8)).astype(np.float32),
        "c": rng.normal(size=(50, 160)).astype(np.float32),
        "h": rng.normal(size=(7, 16)).astype(jnp.bfloat16),
    }
    n, total = 37, 200
    splits = np.sort(rng.integers(0, total, n + 1)).astype(np.int32)
    batch = {
        "age": rng.uniform(0, 10, n).astype(np.float32),
        "bag": rng.integers(-1, 100, (n, 9)).astype(np.int32),
        "some": rng.integers(-1, 105, (n, 4)).astype(np.int32),  # rows that do not exist, too
        "weight": rng.normal(size=(n, 4)).astype(np.float32),
        "values": rng.integers(-2, 55, total).astype(np.int32),
        "splits": splits,
        "seg": rng.integers(-1, n + 2, total).astype(np.int32),
    }
    # A new function, so that it is compiled anew.
    ours, plain = recom_jax.optimize(lambda *args: model(*args)), jax.jit(model)
    backwards = batch | {"splits": splits[::-1].copy()}
    # XLA's own kernels for a GPU read what nobody wrote.
    with jax.default_device(jax.devices("cpu")[0]):
        want, wanted = plain(tables, batch), plain(tables, backwards)
    got, again = ours(tables, batch), ours(tables, backwards)
    bound = ours.bind(tables)(batch)
    worst = max(
        float(
            np.nanmax(
                np.abs(np.asarray(a) - np.asarray(b)), initial=0, where=np.isfinite(np.asarray(b))
            )
        )
        for a, b in zip([*got, *again, *bound], [*want, *wanted, *want], strict=True)
    )
    return worst, int(recom_jax.stats().get("cuda_kernel_launches", 0))


if __name__ == "__main__":
    sys.exit(main())
