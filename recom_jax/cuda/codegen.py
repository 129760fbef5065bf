"""Stage 6 for CUDA, second half: units -> the text of one kernel, and the launch words (docs/cuda_target.md).

The text instantiates what `headers/` holds. Registers of the program become variables of the same number, slots
that differ between columns become `s<number>`, and slots that do not become literals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from recom_jax.cuda.body import Body, Unsupported
from recom_jax.cuda.runs import STAGE_BYTES
from recom_jax.cuda.text import Schedule, Variant
from recom_jax.cuda.units import JAGGED, RUNS, SEARCHES, Units, units_of, walk
from recom_jax.program import Program

LAUNCH_MAGIC = 0x48434E554C4D4352
LAUNCH_VERSION, TUNED_VERSION = 1, 2
DEFAULT = Schedule()
MENDING_BLOCKS = 2  # of a multiprocessor, as in csrc/cuda_cost.cc


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """A kernel's text.

    Attributes:
      source: CUDA C++.
      launch: which code runs each unit, for `csrc/cuda_plan.cc`.
    """

    source: str
    launch: bytes


def generate(program: Program, schedule: Schedule = DEFAULT) -> Generated:
    """Writes the kernel of a program.

    Raises:
      Unsupported: the program holds what this target cannot express; the caller leaves it to XLA.
    """
    units = units_of(program)
    jagged = (Variant.ANY, *([Variant.LONG] if schedule.long else []), Variant.USUAL)
    bodies = [
        Body(cls, k, schedule, variant)
        for k, cls in enumerate(units.classes)
        for variant in (jagged if cls.form == JAGGED else (Variant.USUAL,))
    ]
    functions = [body.text() for body in bodies]
    searches = [body.searches for body in bodies if body.variant is Variant.USUAL]
    runs = [Body(cls, k, schedule).summed() is not None for k, cls in enumerate(units.classes)]
    lines = [
        *([f"#define RECOM_STAGE_BYTES {STAGE_BYTES}"] if any(runs) else []),
        f'#include "recom_{"runs" if any(runs) else "tile"}.cuh"',
        "",
        "namespace recom_cuda {",
        "",
        *(line for f in functions for line in (*f, "")),
        "}  // namespace recom_cuda",
        "",
        *_kernel(units, schedule),
        "",
        *(_mending(units, searches) if any(searches) else []),
    ]
    tuned = any(schedule.plan)
    words = [
        LAUNCH_MAGIC,
        TUNED_VERSION if tuned else LAUNCH_VERSION,
        len(units.classes),
        len(units.units),
        *(schedule.plan if tuned else ()),
    ]
    for cls, has, may in zip(units.classes, runs, searches, strict=True):
        form = (RUNS if has else cls.form) + SEARCHES * may
        words += [cls.number, form, cls.width_slot, cls.vec]
    for unit in units.units:
        words += unit
    return Generated("\n".join(lines), np.array(words, np.int64).tobytes())


def resident_blocks(units: Units) -> int:
    """Blocks that a multiprocessor should hold. Five have 48 registers a thread: enough for one plain sum a bag, in
    vectors of four elements (docs/cuda_target.md), but not for a one-hot product's look at its whole table."""
    for cls in units.classes:
        lookups = [i for i in walk(cls.code) if i.op in ("POOL", "TAKE")]
        pools = [i for i in lookups if i.op == "POOL"]
        if len(pools) > 1 or any(i.args[4] >= 0 for i in pools) or (pools and cls.vec > 4):
            return 4
        if any(i.args[0] for i in lookups):
            return 4
    return 5


def _head(name: str, blocks: int) -> list[str]:
    """A kernel's first lines, up to its classes. `blocks`: of a multiprocessor, that registers must suffice for."""
    return [
        f'extern "C" __global__ void __launch_bounds__(recom_cuda::kThreads, {blocks})',
        f"{name}(const __grid_constant__ recom_cuda::Params p) {{",
        "  const recom_cuda::Tile t = recom_cuda::tile_of(p);",
        "  switch (t.cls) {",
    ]


def _mending(units: Units, searches: Sequence[bool]) -> list[str]:
    """The kernel behind tiles that search their segment ids: it sums up what turns out to be in another order."""
    lines = [
        "// Where segment ids that tiles have searched do not ascend.",
        *_head("recom_mend", MENDING_BLOCKS),
    ]
    for k, (cls, may) in enumerate(zip(units.classes, searches, strict=True)):
        if may:
            asked = f"recom_cuda::all_ascend(p, t, {1 + len(cls.cls.slots)})"
            lines.append(f"    case {k}: if (!{asked}) recom_cuda::class_{k}_any(p); break;")
    return [*lines, "  }", "}", ""]


def _kernel(units: Units, schedule: Schedule) -> list[str]:
    lines = _head("recom_fused", schedule.blocks or resident_blocks(units))
    for k, cls in enumerate(units.classes):
        jagged = cls.form == JAGGED
        call = f"recom_cuda::class_{k}<1{', false' if jagged else ''}>(p, t)"
        if cls.vec > 1:
            vectors = f"recom_cuda::class_{k}<{cls.vec}{', true' if jagged else ''}>(p, t)"
            call = (
                f"t.aligned ? {vectors} : {call}"
                if jagged
                else f"if (t.aligned) {vectors}; else {call}"
            )
        # Bags in any order: asked for once, behind the usual code.
        call = f"if ({call}) recom_cuda::class_{k}_any(p);" if jagged else f"{call};"
        if jagged and schedule.long:  # once here, instead of in each of its forms
            call += f" if (recom_cuda::block_met_long()) recom_cuda::class_{k}_long(p);"
        lines.append(f"    case {k}: {call} break;")
    return [*lines, "  }", "}"]


__all__ = ["Generated", "Schedule", "Unsupported", "generate"]
