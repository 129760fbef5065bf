"""On a GPU: how kernel time, latency and first call grow with the number of columns and with the batch."""

import dataclasses
import functools
from collections.abc import Sequence

import jax

from benchmarks import gpu_kernel, machine, steady
from benchmarks.cases.gpu import FUSED, HAND_LOOP, pipelined
from benchmarks.context import Context, Settings
from benchmarks.gpu_kernel import Kernel
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row
from benchmarks.workloads import Workload, make

NUMBERS = (100, 300, 1000, 3000, 10_000)
BATCHES = (1, 8, 64, 256, 1024, 2048, 8192)
SEVERAL = "fused kernel, addresses as parameters of several launches"
PARAMETERS = 4064  # addresses that a launch's parameters hold


def pieces(settings: Settings) -> dict[str, Piece]:
    """A piece a number of columns, and a piece a batch size of model E."""
    found: dict[str, Piece] = {}
    for number in dict.fromkeys(max(2, round(n * settings.scale)) for n in NUMBERS):
        found[f"columns {number}"] = functools.partial(_columns, number=number)
    for size in BATCHES if settings.scale >= 1 else settings.batches:
        found[f"batch {size}"] = functools.partial(_batch, size=size)
    return found


def _columns(context: Context, number: int) -> Result:
    w = make({"kind": "microbenchmark", "n": number, "random_boundaries": False})
    size = context.settings.batch
    return _measure(context, w, f"{number:,} bucketize columns, batch {size}", size)


def _batch(context: Context, size: int) -> Result:
    s = context.settings
    w = make({"kind": "model_e", "large_rows": s.large_rows, "scale": s.scale, "mlp": False})
    return _measure(context, w, f"model E, columns only, batch {size}", size)


def _measure(context: Context, w: Workload, group: str, size: int) -> Result:
    """Latencies through `steady`, and kernel times, of ours and of the hand-batched form with a search loop."""
    # Comparisons with all boundaries are the slower form for large batches, and take minutes to compile.
    w = dataclasses.replace(w, hand=None)
    found = steady.measure(context, w, group, size, plain=False, tuned=False, views=False)
    rows = list(found.rows)
    if not machine.has_gpu():  # a quick run elsewhere: latencies alone
        return Result(tuple(rows), (), {})
    with context.turns.compiling():
        kernel = gpu_kernel.kernel_of(w.fn, found.params, found.batches[0])
        kinds = [(FUSED, kernel)]
        if not kernel.pointers:
            kinds.append((SEVERAL, dataclasses.replace(kernel, pointers=PARAMETERS)))
        for _, one in kinds:
            gpu_kernel.time_kernel(one, calls=1, repeats=1)
        loop = None
        if w.hand_loop and w.stack_params and w.stack_batch:
            loop = functools.partial(jax.jit(w.hand_loop), w.stack_params(found.params))
            there = jax.device_put(w.stack_batch(found.batches[0]))
            jax.block_until_ready(loop(there))
    with context.turns.timed() as quiet:
        rows += kernel_rows(group, kinds)
        if loop:
            peer = pipelined(loop, there, calls=20)
            rows.append(Row.single(f"{group}: kernel", HAND_LOOP, steady.DEVICE, "us", peer))
    return Result(tuple(rows), (), {"timed while others compiled": not (quiet and found.quiet)})


def kernel_rows(group: str, kinds: Sequence[tuple[str, Kernel]]) -> list[Row]:
    """Times of kernels that take turns, so that what slows the device down slows them all."""
    times: dict[str, list[float]] = {name: [] for name, _ in kinds}
    launched = {}
    for _ in range(3):
        for name, kernel in kinds:
            timed = gpu_kernel.time_kernel(kernel, repeats=5)
            times[name] += [1e3 * ms for ms in timed.ms]
            n = len(kernel.operands) + len(kernel.results)
            launched[name] = f"{timed.launches} launch, {timed.blocks:,} blocks, {n:,} buffers"
    return [
        Row.single(f"{group}: kernel", name, steady.DEVICE, "us", times[name], launched[name])
        for name, _ in kinds
    ]


__all__ = ["pieces"]
