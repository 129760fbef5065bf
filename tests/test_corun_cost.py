"""The cost model, and plans that are held against what was measured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from recom_jax import corun
from recom_jax.corun import kernels, probe_stream
from recom_jax.corun.cost import NOTHING, Device, Work
from recom_jax.corun.plan import Measured, PrepOp, Stage
from recom_jax.corun.planner import better, plan_for_kernels
from recom_jax.corun.search import search
from recom_jax.corun.units import unit_ops

pytestmark = pytest.mark.once

DEVICE = Device(launch_us=2.0, processors=4)  # 32 blocks


def tiles(n: float, turn: float = 1.0, longest: float = 5.0, full: float = 0.1) -> Work:
    return Work(0.0, n * full, n, n * turn, longest)


def test_a_small_launch_takes_as_long_as_its_slowest_tile() -> None:
    for share in (1.0, 0.5, 0.25):
        assert DEVICE.kernel_us(tiles(3), share) == 2 + 5


def test_few_blocks_take_tiles_in_turns_and_many_share_the_processors() -> None:
    assert DEVICE.kernel_us(tiles(64), 0.0625) == 2 + 32  # 2 blocks
    assert DEVICE.kernel_us(tiles(65), 0.0625) == pytest.approx(2 + 33)
    assert DEVICE.kernel_us(tiles(640, full=0.5), 1.0) == 2 + 320
    # One block on one of four processors.
    assert DEVICE.kernel_us(tiles(20, turn=0.1, full=0.5), 1 / 32) == 2 + 4 * 10


@pytest.mark.parametrize("share", [0.0625, 0.25, 1.0])
def test_what_fits_takes_no_longer_than_asked(share: float) -> None:
    load, work = tiles(40), tiles(400)
    for us in (4.0, 10.0, 30.0, 100.0, 1000.0):
        part = DEVICE.fits(work, load, share, us)
        assert 0 <= part <= 1
        blocks = DEVICE.blocks(share)
        if part:  # to within a turn of the blocks
            assert DEVICE.kernel_us(load + work * part, share) <= us + 1.0 + 400 / 400 / blocks
    assert DEVICE.fits(work, NOTHING, share, 6.0) == 0  # its slowest tile does not


def ops(n: int) -> list[PrepOp]:
    return [
        PrepOp(f"u{k}", "class 0", (f"C{k}",), (), 0.0, 0.0, 2.0, tiles=20, latency_us=20, longest_us=3)
        for k in range(n)
    ]  # fmt: skip


def test_cheap_stages_are_filled_first_and_dear_ones_not_at_all() -> None:
    stages = [
        Stage("dear", 500.0, 0.5, 0.5, cost=1.5),
        Stage("half", 500.0, 0.5, 0.5, cost=0.5),
        Stage("free", 60.0, 0.5, 0.5, share=0.25),
    ]
    plan = search(ops(40), stages, device=DEVICE)
    used = {k.stage: k for k in plan.kernels}
    assert set(used) == {"free", "half"} and used["free"].share == 0.25
    inside = used["half"].work.alone_us
    assert plan.predicted_us == pytest.approx(plan.ideal_us + 0.5 * inside)
    assert "costs 50% of what runs beside it" in str(plan)


def compiled() -> kernels.PrepKernels:
    raw = {"n": np.zeros(5000, np.int32), "x": np.zeros(5000, np.float32)}
    return kernels.compile_prep(lambda r: {"a": r["n"] + 1, "b": r["x"] * 2}, raw)


def probed(beside: tuple[probe_stream.Beside, ...]) -> probe_stream.Probed:
    k = compiled()
    took = {"share 1.0": 6.0}
    for c in {u.cls for u in k.units}:
        took |= {f"tile {c}": 2.0 + c, f"few {c}": 8.0, f"class {c}": 5.0}
    device, classes = probe_stream.fitted(k, took, 4)
    stages = [Stage("s", 100.0, 0.0, 0.0), Stage("t", 100.0, 0.0, 0.0)]
    free = tuple(probe_stream.left_free(s, n, beside, 6.0) for n, s in enumerate(stages))
    return probe_stream.Probed(free, device, classes, ((0.5, 5.0, 5.2),), beside, 6.0, 200.0, 203.0)


def test_what_is_fitted_is_what_was_measured() -> None:
    p, k = probed(()), compiled()
    assert p.device == Device(2.0, processors=4)
    assert p.within_tenth == 1.0 and p.from_json(p.to_json()) == p
    for c in p.classes:
        assert c.alone_us == c.cls and c.turn_us == pytest.approx(6.0 / 3)  # 5 tiles, 2 blocks
    every = probe_stream.work_of(k, p.classes, range(len(k.units)))
    assert every.tiles == 10 and every.memory_us == pytest.approx(4.0)  # together, not one by one
    assert p.device.kernel_us(every, 1.0) == pytest.approx(6.0)


def test_a_measured_kernel_beats_a_plan_that_promises_less() -> None:
    everywhere = tuple(
        probe_stream.Beside(n, s, 9.0, lost) for n, s, lost in [(0, 0.5, 4.0), (1, 0.25, 1.0)]
    )
    p, options = probed(everywhere), corun.Options()
    assert p.best == everywhere[1]
    assert p.stages[1].cost == pytest.approx(1 / 6) and p.stages[1].share == 0.25
    plan = plan_for_kernels(compiled(), p, Measured(None, None), options)
    assert plan.predicted_us <= plan.ideal_us + 1.0
    worse = dataclasses.replace(plan, predicted_us=plan.ideal_us + 50)
    (kernel,) = better(worse, p, options).kernels
    assert (kernel.stage, kernel.share, len(kernel.pieces)) == ("t", 0.25, len(plan.segments))
    assert better(worse, p, corun.Options(min_share=0.3)) == worse
    assert better(worse, probed(()), options) == worse


def test_units_cost_their_part_of_a_tile() -> None:
    k = compiled()
    costs = {u.cls: probe_stream.ClassCost(u.cls, 3.0, 2.0, 0.1) for u in k.units}
    for op in unit_ops(k, costs):
        assert (op.tiles, op.longest_us) == (5, 3.0)
        assert op.latency_us == pytest.approx(2 * 5000 / kernels.TILE)
