"""From a preprocessing program and a train step to a plan: reads as its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

import recom_jax
from recom_jax import compat
from recom_jax.cache import Cache
from recom_jax.corun import graph
from recom_jax.corun.fuse import segments, whole
from recom_jax.corun.kernels import PrepKernels
from recom_jax.corun.options import Options
from recom_jax.corun.plan import Device, Measured, Plan, PrepOp, Stage
from recom_jax.corun.probe import stages_of
from recom_jax.corun.probe_stream import Probed
from recom_jax.corun.search import search
from recom_jax.corun.units import kernel_us, schedule_of, unit_ops
from recom_jax.errors import OptionError

STEP = "step"


def plan_for(
    prep: Callable[[Any], Any],
    step: Callable[[Any, Any], Any],
    state: Any,
    raw: Any,
    measured: Measured,
    gpus: int,
    options: Options,
) -> Plan:
    """Plans from shapes: `state` and `raw` are pytrees of ShapeDtypeStructs; `measured` is what is known of times."""
    if any(gpu >= gpus for _, gpu in options.owners):
        raise OptionError(
            f"corun.Options.owners names a device that is not there: {options.owners} of {gpus} devices"
        )
    assumed: list[str] = []
    ops = graph.operators(prep, raw)
    batch = jax.eval_shape(prep, raw)
    if options.probe:
        stages = stages_of(step, state, batch, cache=Cache.of(recom_jax.Options()))
        found = sum(s.duration_us for s in stages)
        if (
            measured.step_us is not None and found > 0
        ):  # compiled as one, stages share memory and fuse
            by = measured.step_us / found
            stages = tuple(dataclasses.replace(s, duration_us=s.duration_us * by) for s in stages)
            assumed.append(
                f"stages take {by:.2f} times what they take alone, so that they sum to the step's time"
            )
    else:
        duration = measured.step_us
        if duration is None:
            duration = _guess(step, state, batch)
            assumed.append("the step's time, from its number of operations (run a few steps first)")
        assumed.append(
            "half of the device is free throughout the step (Options(probe=True) measures)"
        )
        stages = (Stage(STEP, duration, 0.5, 0.5),)
    if measured.prep_us is None:
        assumed.append(
            "preprocessing's time, from its numbers of operations and bytes (run a few steps first)"
        )
    else:
        ops = scaled(ops, measured.prep_us)
    return search(
        ops,
        stages,
        device=Device(),
        gpus=gpus,
        owners=dict(options.owners),
        min_share=options.min_share,
        max_share=options.max_share,
        assumed=assumed,
    )


def plan_for_kernels(
    kernels: PrepKernels, probed: Probed | None, measured: Measured, options: Options
) -> Plan:
    """Plans kernels that run beside the step on a GPU: what comes out can be run as it is (`units.schedule_of`)."""
    assumed: list[str] = []
    if probed is not None:
        ops = unit_ops(kernels, {c.cls: c for c in probed.classes})
        stages, device = probed.stages, probed.device
        assumed.append(
            f"held-out kernels: {probed.within_tenth:.0%} predicted within 10%, worst off by "
            f"{max((abs(e) for e in probed.errors), default=0.0):.0%}"
        )
    else:
        ops, device = unit_ops(kernels), Device()
        duration = measured.step_us
        if duration is None:
            duration = 1000.0
            assumed.append("a step of 1 ms (Options(probe=True) measures)")
        assumed.append("half of the device is free throughout the step, and kernels' times")
        stages = (Stage(STEP, duration, 0.5, 0.5),)
    plan = search(
        ops,
        stages,
        device=device,
        min_share=options.min_share,
        max_share=options.max_share,
        assumed=assumed,
    )
    return plan if probed is None else retimed(plan, kernels, probed)


def retimed(plan: Plan, kernels: PrepKernels, probed: Probed) -> Plan:
    """The plan with its kernels' times by their tiles, one by one: the search takes them to be alike."""
    schedule = schedule_of(plan, kernels)
    assert schedule is not None
    costs = {c.cls: c for c in probed.classes}
    pieces = {x.name: x.pieces for x in schedule.launches}
    ends: dict[str, float] = {}
    made = []
    for k in plan.kernels:
        start = ends.get(k.stage, 0.0)
        us = kernel_us(kernels, costs, probed.device, pieces[k.name], k.share)
        made.append(dataclasses.replace(k, start_us=start, duration_us=us))
        ends[k.stage] = start + us
    return dataclasses.replace(plan, kernels=tuple(made))


def scaled(ops: Sequence[PrepOp], measured_us: float) -> tuple[PrepOp, ...]:
    """The operators with costs such that all of them together, fused, take what was measured."""
    alone = whole(segments(ops)).alone_us
    if alone <= 0:
        return tuple(ops)
    by = measured_us / alone
    return tuple(
        dataclasses.replace(
            op, compute_us=op.compute_us * by, raw_us=op.raw_us * by, out_us=op.out_us * by
        )
        for op in ops
    )


def _guess(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> float:
    closed = jax.make_jaxpr(step)(state, batch)
    return sum(map(graph.count, compat.open_jaxpr(closed).eqns)) / graph.OPS_PER_US
