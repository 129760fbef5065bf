"""The cost model, and plans that are held against what was measured."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recom_jax import corun
from recom_jax.cache import Cache
from recom_jax.corun import alone, kernels, measure_stream, probe_stream, runtime
from recom_jax.corun.cost import NOTHING, Device, Work, both, rest_of
from recom_jax.corun.duel import ROUNDS, duel, loss, pairs, rivals
from recom_jax.corun.plan import Choice, Measured, PrepOp, Stage
from recom_jax.corun.planner import plan_for_kernels
from recom_jax.corun.search import chosen, lost_us, search
from recom_jax.corun.stream import Times
from recom_jax.corun.units import every_row, kernel_us, load_of, ragged_mb, unit_ops

pytestmark = pytest.mark.once

DEVICE = Device(launch_us=2.0, processors=4)  # 32 blocks


def tiles(n: float, turn: float = 1.0, longest: float = 5.0, full: float = 0.1) -> Work:
    return Work(0.0, n * full, n, n * turn, longest)


def test_a_small_launch_takes_as_long_as_its_slowest_tile() -> None:
    for share in (1.0, 0.5, 0.25):
        assert DEVICE.kernel_us(tiles(3), share) == 2 + 5


def test_few_blocks_take_tiles_in_turns_and_many_share_the_processors() -> None:
    assert DEVICE.kernel_us(tiles(64, full=0), 0.0625) == 2 + 32  # 2 blocks
    assert DEVICE.kernel_us(tiles(65, full=0), 0.0625) == pytest.approx(2 + 33)
    assert DEVICE.kernel_us(tiles(640, turn=0, full=0.5), 1.0) == 2 + 320
    # One block on one of four processors.
    assert DEVICE.kernel_us(tiles(20, turn=0, full=0.5), 1 / 32) == 2 + 4 * 10
    # Where bounds are alike they add up to some more.
    assert 32 < DEVICE.kernel_us(tiles(64, full=0.25), 0.0625) - 2 < 1.25 * 32
    assert rest_of(both(3.0, 4.0), 3.0) == pytest.approx(4.0) and rest_of(3.0, 4.0) == 0.0


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


def test_between_few_blocks_and_many_the_excess_is_what_was_measured() -> None:
    d = Device(2.0, processors=4, filled=((0.5, 1.0), (2.0, 1.2), (8.0, 1.0)))
    assert [d.excess(b) for b in (1, 2, 8, 32, 64)] == [1.0, 1.0, 1.2, 1.0, 1.0]
    assert d.excess(4) == pytest.approx(1.1)  # between two, by their logarithms
    work = tiles(640, turn=0, full=0.5)
    assert d.kernel_us(work, 0.25) == pytest.approx(2 + 1.2 * 320)
    part = d.fits(work, NOTHING, 0.25, 100.0)
    assert d.kernel_us(work * part, 0.25) <= 100.0


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


def stage(name: str, us: float, *choices: tuple[float, float, float]) -> Stage:
    """A stage whose shares were measured: (share, free, cost)."""
    made = tuple(Choice(*c) for c in choices)
    return dataclasses.replace(Stage(name, us, 0.0, 0.0).taking(made[0]), choices=made)


def test_a_stages_share_depends_on_what_the_others_take() -> None:
    """A small share costs least and gets least done: it is enough only where another stage takes the rest."""
    slow, fast = (0.0625, 0.2, 0.1), (0.25, 0.8, 0.3)
    alone_us = 100.0
    used = chosen([stage("s", 200.0, slow, fast)], alone_us, (0.0625, 0.5))
    assert [s.share for s in used] == [0.25]  # 40 us at 0.1 and 60 behind cost more than 100 at 0.3
    both = [stage("s", 200.0, slow, fast), stage("t", 800.0, (0.125, 0.1, 0.2))]
    used = chosen(both, alone_us, (0.0625, 0.5))
    assert [(s.name, s.share) for s in used] == [("s", 0.0625), ("t", 0.125)]
    assert lost_us(used, alone_us) == pytest.approx(0.1 * 40 + 0.2 * 60)
    plan = search(ops(20), both, device=DEVICE)
    assert {k.stage: k.share for k in plan.kernels} == {"s": 0.0625, "t": 0.125}
    assert chosen([stage("dear", 200.0, (0.5, 0.5, 1.2))], alone_us, (0.0625, 0.5)) == []
    assert chosen(both, alone_us, (0.5, 0.5)) == []  # shares that the user does not allow


shares_of = st.tuples(*[
    st.tuples(st.just(s), st.floats(0, 1), st.floats(0, 1.6)) for s in (0.0625, 0.125, 0.25, 0.5)
])  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from([10.0, 50, 200, 800]), shares_of), max_size=5),
       st.sampled_from([5.0, 50, 500]))  # fmt: skip
def test_shares_chosen_together_are_never_worse_than_one_by_one(
    drawn: list[tuple[float, Any]], need_us: float
) -> None:
    stages = [stage(str(k), us, *c) for k, (us, c) in enumerate(drawn)]
    lost = lost_us(chosen(stages, need_us, (0.0625, 0.5)), need_us)
    cheapest = [s.taking(min(s.choices, key=lambda c: c.cost)) for s in stages]
    assert lost <= lost_us([s for s in cheapest if s.cost < 1], need_us) + 1e-6
    assert 0 <= lost <= need_us + 1e-6
    if len(stages) == 1:
        worth = [s for s in stages for s in map(s.taking, s.choices) if s.cost < 1]
        best = min((lost_us([s], need_us) for s in worth), default=need_us)
        assert lost == pytest.approx(best)


def compiled() -> kernels.PrepKernels:
    raw = {"n": np.zeros(5000, np.int32), "x": np.zeros(5000, np.float32)}
    return kernels.compile_prep(lambda r: {"a": r["n"] + 1, "b": r["x"] * 2}, raw)


def probed(beside: tuple[probe_stream.Beside, ...]) -> probe_stream.Probed:
    k = compiled()
    took = {"share 1.0": 6.0}
    for c in {u.cls for u in k.units}:
        took |= {f"tile {c}": 2.0 + c, f"few {c}": 8.0, f"class {c}": 5.0}
    device, classes = alone.fitted(k, took, 4)
    stages = [Stage("s", 100.0, 0.0, 0.0), Stage("t", 100.0, 0.0, 0.0)]
    free = tuple(probe_stream.left_free(s, n, beside, 6.0) for n, s in enumerate(stages))
    return probe_stream.Probed(free, device, classes, ((0.5, 5.0, 5.2),), beside, 6.0, 200.0, 203.0)


def test_what_is_fitted_is_what_was_measured() -> None:
    p, k = probed(()), compiled()
    assert p.device == Device(2.0, processors=4)
    assert p.within_tenth == 1.0 and p.from_json(p.to_json()) == p
    for c in p.classes:
        assert c.alone_us == c.cls and c.turn_us == pytest.approx(6.0 / 3)  # 5 tiles, 2 blocks
    costs, every = {c.cls: c for c in p.classes}, every_row(range(len(k.units)))
    assert load_of(k, costs, p.device, every, 1.0).alone_us < 4.0  # together, not one by one
    assert kernel_us(k, costs, p.device, every, 1.0) == pytest.approx(6.0, rel=0.01)


def test_the_busiest_block_is_what_its_tiles_take() -> None:
    k = compiled()  # two classes, five tiles each, the last of them not full
    costs = {c: alone.ClassCost(c, 3.0 + c, (2.0, 8.0)[c], 0.1) for c in range(2)}
    assert [u.cls for u in k.units] == [0, 1]
    tiles = k.tiles(every_row((0, 1)))
    took = [(2.0, 8.0)[c] * n / kernels.TILE for c, n in tiles[["cls", "count"]].tolist()]
    assert sum(took) == pytest.approx(10.0 * 5000 / kernels.TILE)
    for share in (1 / 32, 0.0625, 0.125, 0.25, 1.0):
        load = load_of(k, costs, DEVICE, every_row((0, 1)), share)
        blocks = min(round(32 * share), 10)
        assert load.blocks == blocks and load.longest_us == 4.0
        assert load.busiest_us == pytest.approx(max(sum(took[b::blocks]) for b in range(blocks)))
        assert load.alone_us == pytest.approx(0.2 * 5000 / kernels.TILE)
    part = load_of(k, costs, DEVICE, ((1, 0.0, 0.5),), 1.0)
    assert (part.blocks, part.busiest_us) == (3, 8.0)
    assert load_of(k, costs, DEVICE, (), 1.0).busiest_us == 0.0


def test_random_parts_tell_the_excess() -> None:
    k, took = compiled(), {"share 1.0": 40.0}
    for c in {u.cls for u in k.units}:
        took |= {f"tile {c}": 2.0 + c, f"few {c}": 80.0, f"class {c}": 30.0}
    bare, classes = alone.fitted(k, took, 1)
    fits = [((0, 1), s) for s in (1.0, 0.25, 0.25, 0.25)]
    for n, (units, share) in enumerate(fits):
        said = kernel_us(k, {c.cls: c for c in classes}, bare, every_row(units), share) - 2.0
        took[f"fit {n}"] = 2.0 + said * (1.0, 1.1, 1.3, 1.2)[n]
    device, same = alone.fitted(k, took, 1, fits)
    assert same == classes
    assert device.excess(8) == pytest.approx(1.0) and device.excess(2) == pytest.approx(1.2)


def side_by_side(rows: int) -> kernels.PrepKernels:
    """A result of `rows` times 4 columns of 8 bytes each, another of single bytes."""
    raw = {"n": np.zeros((rows, 4), np.int32), "b": np.zeros(rows, np.int8)}

    def prep(r: Any) -> Any:
        pairs = [jnp.stack([r["n"][:, k], r["n"][:, k] + k], 1) for k in range(4)]
        return {"ids": jnp.concatenate(pairs, 1), "odd": r["b"] + 1}

    return kernels.compile_prep(prep, raw)


@given(st.sets(st.integers(0, 4)), st.sampled_from((32, 64, 96)))
def test_sectors_written_in_part(chosen: set[int], rows: int) -> None:
    """Counted one by one."""
    k = side_by_side(rows)
    names = [u for u, _ in enumerate(k.units)]
    assert len(names) >= 5
    written = np.zeros(k.out_bytes, bool)
    for u in chosen:
        unit = k.units[u]
        for row in range(unit.rows):
            for cell in unit.cells:
                at = row * unit.pitch + cell
                assert not written[at : at + unit.itemsize].any()  # no two units write one byte
                written[at : at + unit.itemsize] = True
    sectors = np.pad(written, (0, -len(written) % 32)).reshape(-1, 32).sum(1)
    wanted = 32 * int(((sectors > 0) & (sectors < 32)).sum())
    assert ragged_mb(k, every_row(sorted(chosen))) == pytest.approx(wanted / 1e6)


def test_units_that_fill_sectors_together() -> None:
    k = side_by_side(64)
    every = tuple(range(len(k.units)))
    assert ragged_mb(k, every_row(every)) == 0.0
    ids = [u for u in every if k.units[u].pitch == 32]
    half = [(u, 0.0, 0.5) for u in ids]
    assert ragged_mb(k, tuple(half)) == 0.0  # whole sectors of half of the rows
    late = [(u, 0.0, 0.5 if u == ids[0] else 1.0) for u in ids]
    assert ragged_mb(k, tuple(late)) == pytest.approx(
        32 * 32 / 1e6
    )  # the other half lacks one unit


def test_random_parts_tell_what_partial_sectors_cost() -> None:
    k = side_by_side(65536)
    took = {"share 1.0": 40.0}
    for c in {u.cls for u in k.units}:
        took |= {f"tile {c}": 2.0, f"few {c}": 300.0, f"class {c}": 30.0}
    bare, classes = alone.fitted(k, took, 4)
    fits = [(units, 1.0) for units in ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3))]
    costs = {c.cls: c for c in classes}
    for n, (units, share) in enumerate(fits):
        true = dataclasses.replace(bare, ragged_us=1.5)
        took[f"fit {n}"] = kernel_us(k, costs, true, every_row(units), share)
    device, _ = alone.fitted(k, took, 4, fits)
    assert device.ragged_us == pytest.approx(1.5) and device.filled[0][1] == pytest.approx(1.0)
    for n, (units, share) in enumerate(fits):  # without such a cost, none is found
        took[f"fit {n}"] = kernel_us(k, costs, bare, every_row(units), share)
    assert alone.fitted(k, took, 4, fits)[0].ragged_us == 0.0


def test_what_kernels_cost_is_the_median_of_pairs() -> None:
    """One bad run changes nothing, whichever of the two it is."""
    runs: list[int] = []

    def run(schedule_for: Any) -> Times:
        runs.append(schedule_for(compiled()).mode)
        period = 1.0 if runs[-1] == runtime.ONCE else 1.004
        return Times((), (), (), (1.5 if len(runs) in (3, 8) else period,))

    found = pairs(runtime.whole(compiled(), runtime.PLAN), run, 5)
    assert runs[:4] == [runtime.PLAN, runtime.ONCE, runtime.ONCE, runtime.PLAN] and len(found) == 5
    assert loss(found) == pytest.approx(0.004, abs=1e-6)


def test_a_device_that_slows_down_is_held_against_itself() -> None:
    """Steps take 0.1% longer with each run; beside the second stage, 5% longer."""
    runs: list[Any] = []

    def run(schedule_for: Any) -> Times:
        schedule = schedule_for(compiled())
        runs.append(schedule)
        ms = 1 + 0.001 * len(runs)
        kernels: tuple[Any, ...] = ()
        if schedule.mode == runtime.PLAN:
            kernels = (("k0", (0.01,)),)
            ms *= 1.05 if schedule.launches[0].stage == 1 else 1.0
        assert schedule.timed and schedule.stages == ("a", "b", "short", "unseen")
        ends = (("a", (0.3,)), ("b", (0.5,)), ("short", (0.51,)), ("unseen", ()))
        return Times(kernels, ends, (0.9,), (ms,))

    bare, found = probe_stream.beside_stages(run, ("a", "b", "short", "unseen"))
    found = tuple(dataclasses.replace(b, stage=min(b.stage, 2)) for b in found)
    assert len(runs) == probe_stream.MOST_SETTLING + 4 + 3 * len(probe_stream.BESIDE)
    assert [b.stage for b in found] == [k for k in range(3) for _ in probe_stream.BESIDE]
    lost = [b.lost_us for b in found]
    assert max(map(abs, lost[:4] + lost[8:])) < 2 and min(lost[4:8]) > 49
    stages = probe_stream.stages_of(bare, ("a", "b", "short", "unseen"))
    assert [(x.name, round(x.duration_us)) for x in stages] == [
        ("a", 300), ("b", 200), ("short", 10), ("unseen", 0), ("rest", 390),
    ]  # fmt: skip


def test_of_two_speeds_the_mean_counts() -> None:
    fast, slow = [1.0] * 20, [1.2] * 20
    first = [9.0] * probe_stream.WARM
    assert probe_stream.mean(first + fast + slow) == pytest.approx(1100)
    assert probe_stream.mean(first + fast + [50.0]) == pytest.approx(1000)  # a hiccup
    assert probe_stream.mean([2.0]) == 2000 and np.isnan(probe_stream.mean([]))


def test_a_state_is_copied_if_it_is_there() -> None:
    state = {"w": jnp.arange(3.0), "key": jax.random.key(3), "n": np.int32(4)}
    made = probe_stream.copied(state)
    jax.jit(lambda s: s["w"] + 1, donate_argnums=0)(made)
    assert state["w"].tolist() == [0, 1, 2] and made["n"] == 4
    state["w"].delete()
    assert probe_stream.copied(state) is None
    assert probe_stream.copied({"w": jax.ShapeDtypeStruct((3,), np.float32)}) is None


def test_plans_are_held_against_one_another(tmp_path: pathlib.Path) -> None:
    everywhere = tuple(
        probe_stream.Beside(n, s, 9.0, lost)
        for n, s, lost in [(0, 0.5, 4.0), (0, 0.25, 3.0), (0, 0.125, 5.0), (1, 0.25, 1.0)]
    )
    p, k, options = probed(everywhere), compiled(), corun.Options(max_share=0.3)
    assert p.stages[1].cost == pytest.approx(1 / 6) and p.stages[1].share == 0.25
    plan = plan_for_kernels(k, p, Measured(None, None), options)
    plans = rivals(plan, p, options)
    assert plans[0] == plan
    assert [(q.kernels[0].stage, q.kernels[0].share) for q in plans[1:]] == [
        ("s", 0.25), ("s", 0.125), ("after the step", 1.0),
    ]  # fmt: skip
    runs = []

    def run(schedule_for: Any) -> Times:
        """The second of them is the fastest."""
        made = schedule_for(k)
        runs.append(made)
        share = made.launches[0].share
        ms = 0.3 if made.mode == runtime.PLAN and share == 0.125 else 0.4
        return Times((), (), (), (0.252 if made.mode == runtime.ONCE else ms,))

    cache = Cache(tmp_path, 1 << 20)
    won = duel(plans, k, 6.0, run, cache, "key")
    assert len(runs) == ROUNDS * (1 + len(plans))
    assert won.kernels[0].share == 0.125 and won.kernels == plans[2].kernels
    assert won.ideal_us == pytest.approx(252) and won.predicted_us == pytest.approx(300)
    assert duel(plans, k, 6.0, run, cache, "key") == won and len(runs) == ROUNDS * (1 + len(plans))


def test_units_cost_their_part_of_a_tile() -> None:
    k = compiled()
    costs = {u.cls: alone.ClassCost(u.cls, 3.0, 2.0, 0.1) for u in k.units}
    for op in unit_ops(k, costs):
        assert (op.tiles, op.longest_us) == (5, 3.0)
        assert op.latency_us == pytest.approx(2 * 5000 / kernels.TILE)


@dataclasses.dataclass
class Clock:
    """A host and a device whose times are known: a step's dispatch, and the step behind the one before."""

    dispatch: float = 5.0
    takes: float = 10.0
    now: float = 100.0
    free: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, state: Any, k: int) -> tuple[Any, float]:
        self.now += self.dispatch
        self.free = max(self.free, self.now) + self.takes
        return (state, Ready(self, self.free)), 0.5


@dataclasses.dataclass
class Ready:
    clock: Clock
    at: float

    def block_until_ready(self) -> Ready:
        self.clock.now = max(self.clock.now, self.at)
        return self


@pytest.mark.parametrize(
    ("dispatch", "takes", "ahead", "wanted"),
    [(5.0, 10.0, 2, 10.0), (5.0, 10.0, 4, 10.0), (10.0, 3.0, 4, 10.0), (5.0, 10.0, 1, 15.0)],
)
def test_a_step_is_timed_as_one_of_many(
    monkeypatch: pytest.MonkeyPatch, dispatch: float, takes: float, ahead: int, wanted: float
) -> None:
    """Without the first one's dispatch, which the step before hides; whether the host or the device is slower."""
    clock = Clock(dispatch, takes)
    monkeypatch.setattr(measure_stream, "time", clock)
    run = measure_stream._timed(40, ahead, 0, clock.step)
    assert run.step_s == pytest.approx(wanted)
    assert run.wait_s == pytest.approx(0.5) and len(run.metrics) == 40


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_steps_are_timed_whole(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    clock = Clock()
    monkeypatch.setattr(measure_stream, "time", clock)
    assert measure_stream._timed(n, 4, 0, clock.step).step_s == pytest.approx((5.0 + 10.0 * n) / n)
