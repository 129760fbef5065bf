"""Small models of every kind of column through the CUDA target, for compute-sanitizer:

compute-sanitizer --tool memcheck python tools/gpu_sanitize.py

The tools are memcheck, racecheck, synccheck and initcheck. The columns run twice, the second time with buffers'
addresses in a table on the device, as those of calls with thousands of buffers are; then bags that take a block,
segment ids that tiles search (both ways), and gradients. XLA_PYTHON_CLIENT_ALLOCATOR=platform gives each array memory
of its own, so that memcheck sees where it ends.
"""

import pathlib
import sys
from typing import Any

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
    """Zero if every part agrees with plain JAX and launched fused kernels."""
    found, buckets = [], kernel.BUCKETS
    for name, part, pointers in (
        ("columns", columns, buckets),
        ("columns, addresses in a table", columns, ()),
        ("long bags", long_bags, buckets),
        ("many segment ids", many_segments, buckets),
        ("many segment ids, addresses in a table", many_segments, ()),
        ("gradients", gradients, buckets),
    ):
        kernel.BUCKETS = pointers  # type: ignore[assignment]
        before = launched()
        found.append((part(), launched() - before))
        print(f"{name}: done", flush=True)
    worst, launches = zip(*found, strict=True)
    print("largest differences", *worst, "kernel launches", *launches)
    return int(not all(w <= 1e-3 for w in worst) or not all(launches))


def launched() -> int:
    """Fused kernels that this process has launched."""
    return int(recom_jax.stats().get("cuda_kernel_launches", 0))


def on_cpu(fn: Any, *args: Any) -> Any:
    """What plain JAX makes of it: on the CPU, as XLA's own kernels for a GPU read what nobody wrote."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(fn)(*args)


def difference(got: Any, want: Any) -> float:
    """The largest, where the result wanted is finite; NaN if one is not a number there."""
    worst = [0.0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        known = np.isfinite(b)
        worst.append(np.abs(np.asarray(a)[known] - np.asarray(b)[known]).max(initial=0))
    return float(np.max(worst))


def columns() -> float:
    """Every kind of column, jagged ones also where splits do not ascend."""
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
    ours = recom_jax.optimize(lambda *args: model(*args))
    backwards = batch | {"splits": splits[::-1].copy()}
    want, wanted = on_cpu(model, tables, batch), on_cpu(model, tables, backwards)
    got, again = ours(tables, batch), ours(tables, backwards)
    return difference([got, again, ours.bind(tables)(batch)], [want, wanted, want])


def long_bags() -> float:
    """Bags of 2,048 positions or more, the last one among them, in rows with vectors and without; by splits, and by
    segment ids, which do not ascend the second time."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 4, 40)
    lengths[[3, 4, 39]] = 2047, 2100, 2060
    n, total = len(lengths), int(lengths.sum())
    tables = [rng.normal(size=(300, dim)).astype(np.float32) for dim in (8, 5)]
    batch = {
        "ids": rng.integers(0, 300, total).astype(np.int32),
        "splits": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "segments": np.repeat(np.arange(n, dtype=np.int32), lengths),
    }

    def fn(tables: Any, b: Any) -> Any:
        by_splits = jnp.searchsorted(b["splits"], jnp.arange(total), side="right") - 1
        wide, odd = (t[b["ids"]] for t in tables)
        return [
            jax.ops.segment_sum(wide, by_splits, num_segments=n),
            jax.ops.segment_max(wide, b["segments"], num_segments=n),
            jax.ops.segment_sum(odd, by_splits, num_segments=n),
        ]

    ours = recom_jax.optimize(fn, options=recom_jax.Options(long_bags=True))
    mixed = batch | {"segments": rng.permutation(batch["segments"])}
    return max(difference(ours(tables, b), on_cpu(fn, tables, b)) for b in (batch, mixed))


def many_segments() -> float:
    """So many that tiles search them: in order, with two that are not, at random, and nearly all of them one bag's."""
    rng = np.random.default_rng(3)
    n, total = 600, 40_000
    # Whole numbers: their sums are exact, in any order.
    tables = [rng.integers(-9, 10, (300, dim)).astype(np.float32) for dim in (8, 36, 5)]
    ids = rng.integers(0, 300, total).astype(np.int32)
    weights = rng.integers(-9, 10, total).astype(np.float32)
    ascending = np.sort(rng.integers(-3, n + 3, total)).astype(np.int32)
    swapped, alone = ascending.copy(), ascending.copy()
    swapped[[50, 15_000]] = swapped[[15_000, 50]]
    alone[100:-100] = 7
    orders = ascending, swapped, rng.permutation(ascending), alone

    def fn(tables: Any, seg: Any) -> Any:
        narrow, wide, odd = (t[ids] for t in tables)
        return [
            jax.ops.segment_sum(narrow, seg, num_segments=n),  # runs
            jax.ops.segment_sum(wide * weights[:, None], seg, num_segments=n),
            jax.ops.segment_max(odd, seg, num_segments=n),
        ]

    worst = []
    for long in (False, True):
        ours = recom_jax.optimize(fn, options=recom_jax.Options(long_bags=long))
        worst += [difference(ours(tables, seg), on_cpu(fn, tables, seg)) for seg in orders]
    return float(np.max(worst))


def gradients() -> float:
    """Of tables: ids are sorted, and rows summed up by the forward kernel."""
    rng = np.random.default_rng(2)
    tables = [rng.normal(size=(rows, dim)).astype(np.float32) for rows, dim in ((50, 8), (3, 5))]
    ids = rng.integers(0, 60, (37, 9)).astype(np.int32)
    weights = rng.normal(size=(37, 9)).astype(np.float32)
    cotangent = rng.normal(size=(37, 13)).astype(np.float32)

    def fn(tables: Any) -> Any:
        rows = jnp.take(tables[0], ids, axis=0, mode="clip")
        single = jnp.take(tables[1], ids[:, 0] % 3, axis=0)
        return jnp.concatenate([(rows * weights[..., None]).sum(1), single], axis=1)

    def gradient(f: Any) -> Any:
        return lambda tables: jax.vjp(f, tables)[1](cotangent)[0]

    ours = recom_jax.optimize(fn, options=recom_jax.Options(always_fuse=True))
    return difference(jax.jit(gradient(ours))(tables), on_cpu(gradient(fn), tables))


if __name__ == "__main__":
    sys.exit(main())
