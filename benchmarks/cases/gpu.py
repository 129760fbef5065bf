"""What the CUDA target promises: kernel times beside their peers, and serving from numpy arrays."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_kernel, steady
from benchmarks.context import Context
from benchmarks.gpu_kernel import Kernel
from benchmarks.record import Result, Row, Target
from benchmarks.timing import paired_ratio
from benchmarks.workloads import make
from examples.recflex import RecflexModel, recflex
from examples.recom_models import RecomModel, int_hash, model_e, model_f

FUSED, FUSED_COLD = "fused kernel", "fused kernel, caches flushed"
HAND = "jax.jit, hand-batched, pipelined"
BAGS = "torch embedding_bag, CUDA graph"
FLUSH = 256 << 20  # bytes: several times the second-level cache

# Microseconds at most, by model and batch size.
RECOM = {("e", 256): 15, ("e", 2048): 70, ("f", 256): 17, ("f", 2048): 80}
RECFLEX = {("A", 512): 200, ("B", 512): 75, ("C", 512): 140, ("D", 512): 75}


def run_kernels(context: Context) -> Result:
    """Kernel times of models E and F, on device inputs."""
    s = context.settings
    rows: list[Row] = []
    targets: list[Target] = []
    floors: dict[str, float] = {}
    bandwidth = round(copy_bandwidth(), 2)
    for name, make_model in (("e", model_e), ("f", model_f)):
        model = make_model(s.large_rows, s.scale)
        params = jax.device_put(model.init(seed=0))
        stacked = model.stack_params(params)
        hand = jax.jit(model.columns_hand_batched)
        for size in (256, 2048):
            group = f"model {name.upper()}, columns only, batch {size}: kernel"
            with context.progress.step(group):
                batch = model.batch(size, 0)
                floors[group] = round(recom_bytes(model, batch) / bandwidth / 1e6, 2)
                kernel, found = fused(group, model.columns, params, batch)
                rows += found
                there = jax.device_put(model.stack_batch(batch))
                peer = pipelined(functools.partial(hand, stacked), there)
                rows.append(Row.single(group, HAND, steady.DEVICE, "us", peer))
                targets += limits(group, found[0].median, RECOM.get((name, size)))
                targets.append(
                    Target(f"{group} / hand-batched jit, pipelined",
                           found[0].median / float(np.median(peer)), "<=", 1 / 3)
                )  # fmt: skip
        del params, stacked, kernel
    facts = {"copy_tb_per_s": bandwidth, "floors_us": floors}
    return Result(tuple(rows), tuple(targets), facts)


def run_recflex(context: Context) -> Result:
    """Kernel times of RecFlex A to D, on device inputs."""
    s = context.settings
    rows: list[Row] = []
    targets: list[Target] = []
    facts: dict[str, Any] = {"copy_tb_per_s": round(copy_bandwidth(), 2)}
    for name in "ABCD":
        flex = recflex(name, scale=s.scale, expand="searchsorted")
        params = jax.device_put(flex.init(seed=0))
        for size in (512,):
            group = f"RecFlex {name}, batch {size}: kernel"
            with context.progress.step(group):
                batch = flex.batch(size, 0)
                kernel, found = fused(group, flex.columns, params, batch)
                rows += found
                peer = torch_bags(flex, params, batch)
                if peer:
                    rows.append(Row.single(group, BAGS, steady.DEVICE, "us", peer))
                facts[f"recflex_{name}_floor_us"] = round(
                    floor_us(flex, batch, facts["copy_tb_per_s"]), 1
                )
                targets += limits(group, found[0].median, RECFLEX.get((name, size)))
        del params, kernel
    return Result(tuple(rows), tuple(targets), facts)


def limits(group: str, value: float, limit: float | None) -> list[Target]:
    return [] if limit is None else [Target(group, value, "<=", limit, "us")]


def fused(group: str, fn: Any, params: Any, batch: Any) -> tuple[Kernel, list[Row]]:
    """The fused kernel of a function: with warm caches, and with flushed ones."""
    kernel = gpu_kernel.kernel_of(fn, params, batch)
    warm = gpu_kernel.time_kernel(kernel)
    cold = gpu_kernel.time_kernel(kernel, calls=1, flush=FLUSH)
    launched = f"{warm.launches} launch, {warm.blocks:,} blocks"
    moved = f"{kernel.result_bytes / 1e6:.1f} MB written"
    return kernel, [
        Row.single(group, FUSED, steady.DEVICE, "us", [1e3 * x for x in warm.ms], launched),
        Row.single(group, FUSED_COLD, steady.DEVICE, "us", [1e3 * x for x in cold.ms], moved),
    ]


def pipelined(
    call: Callable[[Any], Any], batch: Any, calls: int = 50, repeats: int = 7
) -> list[float]:
    """Microseconds a call, of calls that don't wait for one another."""
    jax.block_until_ready(call(batch))
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        outs = [call(batch) for _ in range(calls)]
        jax.block_until_ready(outs)
        found.append((time.perf_counter() - begun) / calls * 1e6)
    return found


def torch_bags(model: RecflexModel, params: Any, batch: Any) -> list[float]:
    """Microseconds of one `embedding_bag` a feature, captured in a CUDA graph; empty without torch."""
    try:
        import torch
    except ImportError:
        return []

    def there(x: Any) -> Any:
        return torch.from_numpy(np.array(x)).cuda()

    tables = {f.name: there(params["tables"][f.name]) for f in model.features}
    inputs = {k: there(v) for k, v in batch.items()}

    def run() -> Any:
        bag = torch.nn.functional.embedding_bag
        outs = []
        for f in model.features:
            if f.jagged:
                values, splits = inputs[f"{f.name}_values"], inputs[f"{f.name}_splits"]
                outs.append(
                    bag(values, tables[f.name], splits, mode="sum", include_last_offset=True)
                )
            else:
                outs.append(torch.nn.functional.embedding(inputs[f.name], tables[f.name]))
        return torch.cat(outs, 1)

    with torch.no_grad():
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
        found = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(5):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 5 * 1e3)
        del kept
    return found


def floor_us(model: RecflexModel, batch: Any, tb_per_s: float) -> float:
    """Microseconds to move every row in use, every id and every result once."""
    moved = 0
    for f in model.features:
        ids = batch[f"{f.name}_values"] if f.jagged else batch[f.name]
        bags = len(batch[f"{f.name}_splits"]) - 1 if f.jagged else len(ids)
        moved += np.unique(ids).size * f.dim * 4 + ids.nbytes + bags * f.dim * 4
    return moved / tb_per_s / 1e6


def recom_bytes(model: RecomModel, batch: Any) -> int:
    """Bytes of every row in use once, of every input and of every result."""
    moved = 0
    for c in model.specs:
        x = np.asarray(batch[c.name])
        if c.kind == "bucket":
            rows = np.digitize(x, c.boundaries)
        elif c.kind == "hash":
            rows = np.asarray(int_hash(jnp.asarray(x), c.rows))
        else:
            rows = x[x >= 0] % c.rows
        moved += np.unique(rows).size * c.dim * 4 + x.nbytes + len(x) * c.dim * 4
    return moved


def copy_bandwidth(nbytes: int = 2 << 30) -> float:
    """TB/s of a large copy on the device, read and written bytes both counted."""
    x = jnp.zeros(nbytes // 4, jnp.float32)
    copy = jax.jit(
        lambda a: a + 1
    )  # XLA's code for single bytes is far from the memory's bandwidth
    us = pipelined(copy, x, calls=4, repeats=5)
    return 2 * nbytes / float(np.median(us)) / 1e6


# Milliseconds at most, by batch size: through bind, and through input_views.
SERVE = {256: (0.45, 0.35), 2048: (0.80, 0.70)}


def run_serve(context: Context) -> Result:
    """Model E with its MLPs, from 1,001 numpy arrays to a ready result."""
    s = context.settings
    w = make({"kind": "model_e", "large_rows": s.large_rows, "scale": s.scale, "mlp": True})
    rows: list[Row] = []
    targets: list[Target] = []
    for size, (bound, views) in SERVE.items():
        group = f"model E with its MLPs, batch {size}"
        found = steady.measure(context, w, group, size, plain=False, tuned=False)
        rows += found.rows
        bind = found.of(steady.BIND, steady.NUMPY)
        leased = found.of(steady.BIND, steady.VIEWS)
        stacked = found.of(steady.HAND, steady.STACKED)
        targets += [
            Target(f"{group}: numpy arrays through bind", bind.median, "<=", bound, "ms"),
            Target(f"{group}: through input_views", leased.median, "<=", views, "ms"),
            Target(f"{group}: bind / hand-batched jit given stacked inputs",
                   paired_ratio(bind, stacked), "<", 1),
        ]  # fmt: skip
        del found
    return Result(tuple(rows), tuple(targets), {})
