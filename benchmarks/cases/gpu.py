"""What the CUDA target promises: kernel times beside their peers."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_kernel, steady
from benchmarks.context import Context, Settings
from benchmarks.gpu_kernel import Kernel
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row, Target
from benchmarks.torch_peers import BAGS, recom_columns, same, torch_rows
from benchmarks.workloads import Workload, make
from examples.recom_models import RecomModel, int_hash, model_e, model_f

FUSED, FUSED_COLD = "fused kernel", "fused kernel, caches flushed"
HAND = "jax.jit, hand-batched, pipelined"
HAND_LOOP = "jax.jit, hand-batched, loop search, pipelined"
FLUSH = 256 << 20  # bytes: several times the second-level cache

# Microseconds at most, by model and batch size.
RECOM = {("e", 256): 15, ("e", 2048): 70, ("f", 256): 17, ("f", 2048): 80}


def kernel_pieces(settings: Settings) -> dict[str, Piece]:
    """Models E and F by batch size: ours beside hand-batched jit with a search loop; with comparisons apart, which
    XLA compiles for minutes at the larger size; and torch's columns."""
    found: dict[str, Piece] = {}
    for name in "ef":
        for size in (256, 2048):
            found[f"{name} {size}"] = functools.partial(_kernel_piece, name=name, size=size)
            found[f"{name} {size} compare"] = functools.partial(
                _compare_piece, name=name, size=size
            )
            found[f"{name} {size} torch"] = functools.partial(_torch_piece, name=name, size=size)
    return found


def _group(name: str, size: int) -> str:
    return f"model {name.upper()}, columns only, batch {size}: kernel"


def _workload(context: Context, name: str) -> tuple[RecomModel, Workload]:
    s = context.settings
    made = {"e": model_e, "f": model_f}[name](s.large_rows, s.scale)
    spec = {"kind": f"model_{name}", "large_rows": s.large_rows, "scale": s.scale, "mlp": False}
    return made, make(spec)


def _prepared(
    context: Context, name: str, size: int
) -> tuple[RecomModel, Workload, Any, Any, Kernel]:
    """The model, its other forms, parameters on the device, a batch, and the kernel, launched once."""
    model, w = _workload(context, name)
    params = jax.device_put(model.init(seed=0))
    batch = model.batch(size, 0)
    kernel = gpu_kernel.kernel_of(model.columns, params, batch)
    gpu_kernel.time_kernel(kernel, calls=1, repeats=1)
    return model, w, params, batch, kernel


def _kernel_piece(context: Context, name: str, size: int) -> Result:
    group = _group(name, size)
    with context.turns.compiling(), context.progress.step(f"{group}: parameters and compilers"):
        model, w, params, batch, kernel = _prepared(context, name, size)
        call, there, note = _hand(context, group, HAND_LOOP, w, params, batch)
    with context.turns.timed() as quiet:
        bandwidth = round(copy_bandwidth(), 2)
        rows = kernel_rows(group, kernel)
        peer = pipelined(call, there)
        rows.append(Row.single(group, HAND_LOOP, steady.DEVICE, "us", peer, note))
    floor = round(recom_bytes(model, batch) / bandwidth / 1e6, 2)
    facts = {
        "floors_us": {group: floor},
        "copy_tb_per_s": {group: bandwidth},
        "timed while others compiled": not quiet,
    }
    targets = limits(group, rows[0].median, RECOM.get((name, size)))
    return Result(tuple(rows), tuple(targets), facts)


def _compare_piece(context: Context, name: str, size: int) -> Result:
    group = _group(name, size)
    with context.turns.compiling(), context.progress.step(f"{group}: {HAND}"):
        model, w = _workload(context, name)
        params = jax.device_put(model.init(seed=0))
        call, there, note = _hand(context, group, HAND, w, params, model.batch(size, 0))
    with context.turns.timed() as quiet:
        row = Row.single(group, HAND, steady.DEVICE, "us", pipelined(call, there), note)
    return Result((row,), (), {"timed while others compiled": not quiet})


def _torch_piece(context: Context, name: str, size: int) -> Result:
    try:
        import torch
    except ImportError:
        return Result((), (), {"torch": "not installed"})
    group = _group(name, size)
    with context.turns.compiling(), context.progress.step(f"{group}: {BAGS}"):
        model, _, params, batch, kernel = _prepared(context, name, size)
        run = recom_columns(torch, model, params, batch)
        same(group, BAGS, run().cpu().numpy(), np.asarray(kernel.results[0]))
    with context.turns.timed() as quiet:
        rows = torch_rows(group, BAGS, run)
    return Result(tuple(rows), (), {"timed while others compiled": not quiet})


def _hand(
    context: Context, group: str, which: str, w: Workload, params: Any, batch: Any
) -> tuple[Callable[[Any], Any], Any, str]:
    """A hand-batched form, compiled, its inputs on the device, and how long its first call took."""
    fn = w.hand if which == HAND else w.hand_loop
    assert fn and w.stack_params and w.stack_batch
    call = functools.partial(jax.jit(fn), w.stack_params(params))
    there = jax.device_put(w.stack_batch(batch))
    begun = time.perf_counter()
    jax.block_until_ready(call(there))
    seconds = context.first_call(f"{group} | {which}", time.perf_counter() - begun)
    return call, there, f"first call {seconds:.1f} s"


def finish_kernels(settings: Settings, parts: Mapping[str, Result]) -> Result:
    """Kernel time against the faster of the hand-batched forms that were measured."""
    rows = {(r.group, r.contestant): r.median for p in parts.values() for r in p.rows}
    targets = []
    for group in dict.fromkeys(g for g, c in rows if c == FUSED):
        peers = {c: rows[group, c] for c in (HAND, HAND_LOOP) if (group, c) in rows}
        best = min(peers, key=lambda c: peers[c])
        how = f"the faster of {len(peers)} forms: {best.removeprefix('jax.jit, ')}"
        value = rows[group, FUSED] / peers[best]
        targets.append(
            Target(f"{group} / hand-batched jit, pipelined", value, "<=", 1 / 3, "", how)
        )
    return Result((), tuple(targets))


def limits(group: str, value: float, limit: float | None) -> list[Target]:
    return [] if limit is None else [Target(group, value, "<=", limit, "us")]


def kernel_rows(group: str, kernel: Kernel) -> list[Row]:
    """Its time with warm caches, and with flushed ones."""
    warm = gpu_kernel.time_kernel(kernel)
    cold = gpu_kernel.time_kernel(kernel, calls=1, flush=FLUSH)
    launched = f"{warm.launches} launch, {warm.blocks:,} blocks"
    moved = f"{kernel.result_bytes / 1e6:.1f} MB written"
    return [
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


def copy_bandwidth(nbytes: int = 1 << 28) -> float:
    """TB/s of a large copy on the device, read and written bytes both counted. All calls' results exist at once."""
    x = jnp.zeros(nbytes // 4, jnp.float32)
    copy = jax.jit(
        lambda a: a + 1
    )  # XLA's code for single bytes is far from the memory's bandwidth
    us = pipelined(copy, x, calls=12, repeats=5)
    return 2 * nbytes / float(np.median(us)) / 1e6
