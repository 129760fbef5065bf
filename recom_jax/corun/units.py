"""Between kernels and plans: units as operators with costs, and a plan's kernels as a schedule that can be run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from recom_jax.corun.graph import BYTES_PER_US, OPS_PER_US
from recom_jax.corun.kernels import TILE, PrepKernels
from recom_jax.corun.plan import AFTER, Plan, PrepOp
from recom_jax.corun.runtime import PLAN, Launch, Schedule


class TileCost(Protocol):
    """What a full tile of a class costs, in microseconds: see `probe_stream.ClassCost`."""

    @property
    def alone_us(self) -> float: ...
    @property
    def turn_us(self) -> float: ...
    @property
    def full_us(self) -> float: ...


def unit_ops(
    kernels: PrepKernels, costs: Mapping[int, TileCost] | None = None
) -> tuple[PrepOp, ...]:
    """Units as operators: independent of one another, and cut by rows as one likes.

    Args:
      costs: class -> of its tiles; None: from numbers of operations and bytes.
    """
    made = []
    for k, u in enumerate(kernels.units):
        n = u.rows * u.inner
        compute, memory = u.operations * n / OPS_PER_US, u.nbytes * n / BYTES_PER_US
        op = PrepOp(f"u{k}", f"class {u.cls}", u.features, (), compute, 0.0, memory)
        c = None if costs is None else costs.get(u.cls)
        if c is not None:  # arithmetic and traffic were measured as one
            op = dataclasses.replace(
                op,
                compute_us=0.0,
                out_us=c.full_us * n / TILE,
                tiles=float(-(-n // TILE)),
                latency_us=c.turn_us * n / TILE,
                longest_us=c.alone_us,
            )
        made.append(op)
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
