"""Between kernels and plans: units as operators with costs, and a plan's kernels as a schedule that can be run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from recom_jax.corun.graph import BYTES_PER_US, OPS_PER_US
from recom_jax.corun.kernels import PrepKernels
from recom_jax.corun.plan import AFTER, Plan, PrepOp
from recom_jax.corun.runtime import PLAN, Launch, Schedule


def unit_ops(kernels: PrepKernels, rates: Mapping[int, float] | None = None) -> tuple[PrepOp, ...]:
    """Units as operators: independent of one another, and cut by rows as one likes.

    Args:
      rates: class -> microseconds of an element on the whole device; None: from numbers of operations and bytes.
    """
    made = []
    for k, u in enumerate(kernels.units):
        n = u.rows * u.inner
        compute, memory = u.operations * n / OPS_PER_US, u.nbytes * n / BYTES_PER_US
        if rates is not None:  # arithmetic and traffic were measured as one
            compute, memory = 0.0, rates.get(u.cls, 0.0) * n
        kind = f"class {u.cls}"
        made.append(PrepOp(f"u{k}", kind, u.features, (), compute, 0.0, memory))
    return tuple(made)


def markers_of(stages: Sequence[str]) -> tuple[str, ...]:
    """The markers that end stages: the last stage has none, and "NAME.2" is the second of that name."""
    made: list[str] = []
    for name in stages[:-1]:
        plain = re.sub(r"\.\d+$", "", name)
        made.append(plain if plain in made else name)
    return tuple(made)


def schedule_of(plan: Plan, kernels: PrepKernels, gpu: int = 0) -> Schedule | None:
    """The plan's kernels for one device; None if it is not a plan for these kernels."""
    ops = {s.name: s.ops for s in plan.segments}
    known = {f"u{k}": k for k in range(len(kernels.units))}
    if {op.name for op in plan.ops} != set(known):
        return None
    at = {s.name: k for k, s in enumerate(plan.stages)}
    launches = []
    for kernel in plan.kernels:
        if kernel.gpu == gpu:
            pieces = tuple(
                (known[op], low, high) for name, low, high in kernel.pieces for op in ops[name]
            )
            stage = len(plan.stages) if kernel.stage == AFTER else at[kernel.stage]
            launches.append(Launch(kernel.name, stage, kernel.share, pieces))
    launches.sort(key=lambda x: x.stage)
    return Schedule(PLAN, tuple(launches), markers_of([s.name for s in plan.stages]))
