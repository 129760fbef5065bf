"""On a GPU: kernel times with parts of the compiler left out, each line one part more than the one before.

*Fusion only* has no rewrite, and a plan that chooses nothing: single words instead of vectors, a row at a time, a
column a block, a thread group a bag. *Shapes* adds the rewrites that need what is known of sizes and values (no clamp,
no fill, no wrap of negative ids where none can be), *simplification* all others, *schedules* the plan as the cost
model makes it.
"""

import functools

import jax

from benchmarks import gpu_kernel, steady
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row
from benchmarks.workloads import Workload, make
from recom_jax.cuda.text import Schedule
from recom_jax.options import Options
from recom_jax.simplify import NAMES

SHAPES = frozenset({"clamp-into-lookup", "drop-clamp", "drop-fill", "drop-negative-wrap", "facts-under-mask",
                    "implied-predicate", "index-as-is"})  # fmt: skip
NAIVE = Schedule(flight=1, slices=1 << 19, run=1)
STEPS: tuple[tuple[str, frozenset[str], bool], ...] = (
    ("fusion only", NAMES, False),
    ("+ shapes", NAMES - SHAPES, False),
    ("+ simplification", frozenset(), False),
    ("+ schedules", frozenset(), True),
)
"""Name, rewrites left out, whether there are schedules."""


def pieces(settings: Settings) -> dict[str, Piece]:
    """A piece a model and batch size."""
    found: dict[str, Piece] = {}
    for name, sizes in (("e", (256, 2048)), ("f", (256, 2048)), ("A", (512,)), ("D", (512,))):
        for size in sizes:
            found[f"{name} {size}"] = functools.partial(_piece, name=name, size=size)
    return found


def workload(settings: Settings, name: str) -> tuple[str, Workload]:
    """A model's columns by its letter: RECom's E and F, RecFlex's A to D."""
    s = settings
    if name in "ef":
        spec = {"kind": f"model_{name}", "large_rows": s.large_rows, "scale": s.scale, "mlp": False}
        return f"model {name.upper()}, columns only", make(spec)
    flex = {"kind": "recflex", "name": name, "scale": s.scale, "max_rows": None, "mlp": False}
    return f"RecFlex {name}", make(flex)


def _piece(context: Context, name: str, size: int) -> Result:
    title, w = workload(context.settings, name)
    group = f"{title}, batch {size}: kernel"
    structure = {}
    made = []
    with context.turns.compiling(), context.progress.step(group):
        params = jax.device_put(w.init())
        batch = jax.device_put(w.batches(size, 1)[0])
        for step, disabled, schedules in STEPS:
            options = Options(disable=tuple(sorted(disabled)))
            kernel = gpu_kernel.kernel_of(w.fn, params, batch, options=options)
            time = functools.partial(
                gpu_kernel.time_kernel,
                kernel,
                schedule=None if schedules else NAIVE,
                vectors=schedules,
            )
            time(calls=1, repeats=1)
            made.append((step, time))
            structure[f"{group}: {step}"] = {
                "fused": len(kernel.program.columns),
                "calls": 1,
                "classes": len(kernel.program.classes),
            }
    times: dict[str, list[float]] = {step: [] for step, _ in made}
    with context.turns.timed() as quiet:
        for _ in range(3):
            for step, time in made:
                times[step] += [1e3 * ms for ms in time(calls=10, repeats=5).ms]
    rows = [Row.single(group, step, steady.DEVICE, "us", times[step]) for step, _ in made]
    return Result(
        tuple(rows), (), {"structure": structure, "timed while others compiled": not quiet}
    )


__all__ = ["pieces", "workload"]
