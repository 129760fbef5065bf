"""On a GPU: what `Options(tune=True)` finds, and what it gains, on the kernels that the other cases time."""

import concurrent.futures
import dataclasses
import functools
import itertools

import jax

from benchmarks import gpu_kernel, steady
from benchmarks.cases.gpu_ablation import workload
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row, Target
from recom_jax.cpu import encode
from recom_jax.cuda import kernel as cuda_kernel
from recom_jax.cuda import tune
from recom_jax.cuda.text import Schedule
from recom_jax.options import Options

UNTUNED, TUNED = "fused kernel, untuned", "fused kernel, Options(tune=True)"
MODELS = (("e", (256, 2048)), ("f", (256, 2048)), *((n, (512,)) for n in "ABCD"))
WORKERS = 8  # threads that compile candidates


def pieces(settings: Settings) -> dict[str, Piece]:
    """A piece a model and batch size."""
    return {
        f"{name} {size}": functools.partial(_piece, name=name, size=size)
        for name, sizes in MODELS
        for size in sizes
    }


def texts(axes: tuple[tuple[str, tuple[int, ...]], ...]) -> list[Schedule]:
    """Every schedule of these axes whose kernel has a text of its own: the others differ in the plan."""
    values = dict(axes)
    flights = (Schedule().flight, *values.get("flight", ()))
    blocks = (Schedule().blocks, *values.get("blocks", ()))
    return [Schedule(flight=f, blocks=b) for f, b in itertools.product(flights, blocks)]


def _piece(context: Context, name: str, size: int) -> Result:
    title, w = workload(context.settings, name)
    group = f"{title}, batch {size}: kernel"
    with context.turns.compiling(), context.progress.step(f"{group}: candidates"):
        params = jax.device_put(w.init())
        batch = jax.device_put(w.batches(size, 1)[0])
        made = gpu_kernel.kernel_of(w.fn, params, batch)
        encoded, options = encode(made.program), Options()
        n = len(made.operands) + len(made.results)
        axes = tune.axes_of(made.program)
        build = functools.partial(cuda_kernel.kernel_for, made.program, encoded.digest, n, options)
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda s: build(schedule=s), texts(axes)))
        timer = tune.make_timer(
            made.program, encoded, made.operands, made.results, n, options, jax.devices()[0]
        )
        for schedule in texts(axes):  # the driver compiles each once
            timer(schedule)
    with context.turns.timed() as quiet:
        found = tune.search(axes, timer)
        pairs = [(timer(Schedule()), timer(found.schedule)) for _ in range(tune.DUELS)]
    untuned, tuned = (
        [1e3 * ms for ms in one if ms is not None] for one in zip(*pairs, strict=True)
    )
    changed = {
        k: v for k, v in dataclasses.asdict(found.schedule).items() if v != getattr(Schedule(), k)
    }
    note = f"{found.tried} schedules tried: {changed or 'the untuned one stays'}"
    rows = (
        Row.single(group, UNTUNED, steady.DEVICE, "us", untuned),
        Row.single(group, TUNED, steady.DEVICE, "us", tuned, note),
    )
    # The same schedule twice differs by noise.
    ratio = rows[1].median / rows[0].median if changed else 1.0
    target = Target(f"{group}, tuned / untuned", ratio, "<=", 1, "", note)
    return Result(rows, (target,), {"timed while others compiled": not quiet})


__all__ = ["pieces"]
