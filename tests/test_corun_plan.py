"""The planner on made-up capacities: dependencies, capacities and totals hold, cuts happen, and it repeats itself."""

from __future__ import annotations

import collections
import itertools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recom_jax import corun
from recom_jax import preprocess as pp
from recom_jax.cache import Cache
from recom_jax.corun import fuse, graph, probe
from recom_jax.corun.plan import AFTER, Device, Plan, PrepOp, Stage
from recom_jax.corun.planner import scaled
from recom_jax.corun.search import search, shares

pytestmark = pytest.mark.once


def chain(feature: str, *kinds: str, cost: float = 10.0) -> list[PrepOp]:
    """Operators one after the other, each as dear as the next."""
    made: list[PrepOp] = []
    for k, kind in enumerate(kinds):
        raw_us = 0.0 if k else cost / 4
        before = (made[-1].name,) if made else ()
        barrier, kept = kind in ("firstx", "ngram"), k + 1 == len(kinds)
        name = f"{kind}.{feature}"
        made.append(PrepOp(name, kind, (feature,), before, cost, raw_us, cost / 4, barrier, kept))
    return made


def program(features: int, cost: float = 10.0) -> list[PrepOp]:
    kinds = ("fill_null", "sigrid_hash", "firstx", "clamp")
    costs = [cost * (1 + k % 5) for k in range(features)]
    return [op for k in range(features) for op in chain(f"C{k:02}", *kinds, cost=costs[k])]


STAGES = (
    Stage("emb_fwd", 300.0, 0.8, 0.1), Stage("mlp", 500.0, 0.3, 0.7), Stage("full", 200.0, 0.0, 0.0),
    Stage("emb_bwd", 400.0, 0.7, 0.2),
)  # fmt: skip


def verify(plan: Plan) -> None:
    """The rules of a plan."""
    parts = {s.name: s for s in plan.segments}
    order = {s.name: k for k, s in enumerate(plan.stages)} | {AFTER: len(plan.stages)}
    rows: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    first: dict[str, tuple[int, int]] = {}
    last: dict[str, tuple[int, int]] = {}
    gpu_of: dict[str, set[int]] = collections.defaultdict(set)
    for kernel in plan.kernels:
        at = (order[kernel.stage], kernel.level)
        for name, begin, end in kernel.pieces:
            assert parts[name].level == kernel.level
            rows[name].append((begin, end))
            first[name] = min(first.get(name, at), at)
            last[name] = max(last.get(name, at), at)
            gpu_of[name].add(kernel.gpu)
    assert set(rows) == set(parts)
    for name, ranges in rows.items():  # every row once
        ranges.sort()
        assert abs(ranges[0][0]) < 1e-9 and abs(ranges[-1][1] - 1) < 1e-6
        assert all(abs(a[1] - b[0]) < 1e-6 for a, b in itertools.pairwise(ranges))
        assert len(gpu_of[name]) == 1
        for before in parts[name].after:
            assert last[before] < first[name], (before, name)
            assert gpu_of[before] == gpu_of[name]
    for gpu in range(plan.gpus):
        for stage in plan.stages:
            here = [k for k in plan.kernels if k.gpu == gpu and k.stage == stage.name]
            assert sum(k.duration_us for k in here) <= stage.duration_us + 1e-6
            assert (
                sum(k.work.compute_us for k in here)
                <= stage.free_compute * stage.duration_us + 1e-6
            )
            assert (
                sum(k.work.memory_us for k in here) <= stage.free_memory * stage.duration_us + 1e-6
            )
            assert len({k.share for k in here}) <= 1
    assert plan.ideal_us <= plan.predicted_us <= plan.sequential_us + len(plan.kernels) * 3.0


def test_levels_and_segments() -> None:
    ops = [*chain("a", "fill_null", "sigrid_hash", "firstx", "clamp"), *chain("b", "fill_null")]
    ops.append(PrepOp("join", "add", ("a", "b"), ("clamp.a", "fill_null.b"), 1, 0, 1))
    parts = {s.name: s for s in fuse.segments(ops)}
    assert parts["a/0"].ops == ("fill_null.a", "sigrid_hash.a") and parts["a/1"].ops == (
        "firstx.a",
        "clamp.a",
    )
    assert parts["a/1"].after == ("a/0",) and set(parts["a+1/2"].after) == {"a/1", "b/0"}
    assert (
        parts["a/0"].work.memory_us == 2.5 + 2.5
    )  # what is read and what leaves; not what is passed on inside
    assert fuse.groups(ops) == {"a": 0, "b": 0}


def test_what_fits_is_hidden() -> None:
    plan = search(program(10, cost=3.0), STAGES)
    verify(plan)
    assert plan.predicted_us == plan.ideal_us == 1400 and plan.hidden == 1
    assert all(k.stage != "full" for k in plan.kernels)
    assert "100% of preprocessing hidden" in str(plan)


def test_what_does_not_fit_is_cut_and_the_rest_comes_after() -> None:
    plan = search(program(20), STAGES)
    verify(plan)
    assert any((a, b) != (0.0, 1.0) for k in plan.kernels for _, a, b in k.pieces)
    assert any(k.stage == AFTER for k in plan.kernels)
    free = sum(s.free_compute * s.duration_us for s in STAGES)
    need = fuse.whole(plan.segments).compute_us
    assert plan.predicted_us >= plan.ideal_us + max(0.0, need - free) - 1e-6
    assert 0 < plan.hidden < 1


def test_one_segment_larger_than_any_stage_is_cut_across_stages() -> None:
    plan = search(
        chain("a", "sigrid_hash", cost=300.0),
        [Stage("s", 400.0, 0.6, 0.6), Stage("t", 400.0, 0.6, 0.6)],
    )
    verify(plan)
    assert [k.stage for k in plan.kernels] == ["s", "t"] and plan.predicted_us == plan.ideal_us


def test_no_room_is_sequential() -> None:
    plan = search(program(3), [Stage("full", 100.0, 0.0, 0.0)])
    verify(plan)
    assert {k.stage for k in plan.kernels} == {AFTER}
    assert plan.predicted_us == pytest.approx(plan.sequential_us)
    verify(search([], STAGES))
    assert search([], STAGES).predicted_us == 1400


def test_shares_are_bounded_and_as_small_as_will_do() -> None:
    assert shares(0.0625, 0.5) == (0.0625, 0.125, 0.25, 0.5)
    plan = search(program(3, cost=1.0), STAGES, min_share=0.125, max_share=0.25)
    assert {k.share for k in plan.kernels} == {0.125}


@pytest.mark.parametrize("gpus", [2, 5])
def test_features_go_to_devices_and_owned_ones_stay(gpus: int) -> None:
    ops = program(40)
    plan = search(ops, STAGES, gpus=gpus, owners={"C03": 1, "C04": 1})
    verify(plan)
    assert dict(plan.owner)["C03"] == dict(plan.owner)["C04"] == 1
    assert len(set(dict(plan.owner).values())) == gpus
    one = search(ops, STAGES)
    assert plan.predicted_us <= one.predicted_us


def test_owned_features_are_relieved_by_moving_the_others() -> None:
    owners = {f"C{k:02}": 0 for k in range(12)}
    plan = search(program(24), STAGES, gpus=2, owners=owners)
    verify(plan)
    assert sum(gpu == 1 for f, gpu in plan.owner if f not in owners) >= 10


def test_it_is_deterministic_and_quick() -> None:
    """As large as RAP's plan 3: 156 features, 624 operators, eight devices, too much to hide."""
    kinds = ("logit", "sigrid_hash", "firstx", "ngram")
    ops = [op for k in range(156) for op in chain(f"F{k:03}", *kinds, cost=5.0 + k % 7)]
    stages = [Stage(f"s{k}", 200.0, 0.2 + 0.1 * (k % 5), 0.3) for k in range(12)]
    begun = time.perf_counter()
    plan = search(ops, stages, gpus=8)
    took = time.perf_counter() - begun
    verify(plan)
    assert took < 10
    assert plan == search(list(ops), list(stages), gpus=8)


def test_plan_is_drawn(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    plan = search(program(40), STAGES, gpus=2)
    for name in ("plan.png", "plan.svg"):
        plan.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 2000


def test_kernel_time_model() -> None:
    device = Device(launch_us=2.0, bandwidth_gain=4.0)
    from recom_jax.corun.plan import Work

    assert device.kernel_us(Work(10, 0), 0.5) == 22
    assert device.kernel_us(Work(0, 10), 0.125) == 22
    assert device.kernel_us(Work(0, 10), 0.5) == 12
    assert device.kernel_us(Work(4, 10), 1) == 12


# ---- from programs -----------------------------------------------------------------------------------------------


def prep(raw: Any) -> Any:
    ids = pp.firstx(pp.sigrid_hash(raw["L"], 1, 1000), 2)
    x = pp.logit(pp.fill_null(raw["x"], 0.5), 1e-3)
    return {"ids": pp.pad(ids, 2), "x": x * 2, "y": raw["y"]}


def raw_batch(rows: int = 64) -> dict[str, Any]:
    return {
        "L": pp.Jagged(pp.Int64(np.arange(2 * rows)), np.arange(rows + 1) * 2),
        "x": pp.Nullable(np.ones(rows, np.float32), np.ones(rows, bool)),
        "y": np.zeros(rows, np.float32),
    }


def test_operators_of_a_program() -> None:
    ops = {op.kind: op for op in graph.operators(prep, raw_batch())}
    assert list(ops) == ["sigrid_hash", "firstx", "fill_null", "logit", "pad", "mul"] or set(ops) >= {
        "sigrid_hash", "firstx", "fill_null", "logit", "pad", "mul"
    }  # fmt: skip
    assert ops["firstx"].barrier and ops["pad"].barrier and not ops["sigrid_hash"].barrier
    assert ops["sigrid_hash"].features == ("L",) and ops["logit"].features == ("x",)
    assert ops["pad"].after == (ops["firstx"].name,) and ops["pad"].kept and not ops["firstx"].kept
    assert ops["sigrid_hash"].compute_us > 20 * ops["fill_null"].compute_us > 0
    assert fuse.whole(fuse.segments(scaled(tuple(ops.values()), 123.0))).alone_us == pytest.approx(
        123
    )


def toy_step(state: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        h = corun.stage(jnp.take(w["table"], batch["ids"], axis=0).sum(1), "emb_fwd")
        return ((h * batch["x"][:, None]).sum(1) @ jnp.ones((batch["x"].shape[0], 1))).sum()

    value, grad = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grad), value


def test_stages_of_a_step_are_cut_at_its_markers() -> None:
    state = {"table": jnp.zeros((1000, 8))}
    batch = jax.eval_shape(prep, raw_batch())
    donating = jax.jit(toy_step, donate_argnums=0)
    stages = probe.stages_of(donating, state, batch, repeats=2)
    assert [s.name for s in stages] == ["emb_fwd", "emb_fwd:bwd", "rest"]
    assert all(
        s.duration_us > 0 and 0 <= s.free_compute <= 1 and 0 <= s.free_memory <= 1 for s in stages
    )


def test_measured_stages_are_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, batch = {"table": jnp.zeros((100, 8))}, jax.eval_shape(prep, raw_batch())
    kept = Cache(tmp_path)
    first = probe.stages_of(toy_step, state, batch, repeats=1, cache=kept)
    monkeypatch.setattr(probe, "_time", None)  # measuring again would fail
    assert probe.stages_of(toy_step, state, batch, repeats=1, cache=kept) == first
    with pytest.raises(TypeError):
        probe.stages_of(toy_step, {"table": jnp.zeros((101, 8))}, batch, repeats=1, cache=kept)


def test_owners_are_an_option() -> None:
    options = corun.Options(runtime="threads", gpus=2, owners={"L": 1})  # type: ignore[arg-type]
    assert options.owners == (("L", 1),) and hash(options)
    plan = corun.Pipeline(prep, toy_step, options=options).make_plan(
        {"table": jnp.zeros((1000, 8))}, raw_batch()
    )
    assert dict(plan.owner)["L"] == 1 and plan.gpus == 2
    with pytest.raises(ValueError, match="not there"):
        corun.Options(gpus=2, owners=(("L", 2),))
    alone = corun.Pipeline(
        prep, toy_step, options=corun.Options(runtime="threads", owners=(("L", 1),))
    )
    with pytest.raises(ValueError, match="of 1 devices"):
        alone.make_plan({"table": jnp.zeros((1000, 8))}, raw_batch())


@pytest.mark.parametrize("probes", [False, True])
def test_pipelines_plan(probes: bool) -> None:
    pipe = corun.Pipeline(
        prep, jax.jit(toy_step), options=corun.Options(runtime="threads", probe=probes)
    )
    state = {"table": jnp.zeros((1000, 8))}
    plan = pipe.make_plan(state, raw_batch())
    verify(plan)
    assert ("emb_fwd" in str(plan)) == probes and bool(plan.assumed)
    assert pipe.plan is plan
    assert {f for f, _ in plan.owner} == {"L", "x"}
    assert len(list(pipe.run(state, [raw_batch()] * 3))) == 3
    again = pipe.make_plan(state, raw_batch())
    assert not any("preprocessing's time" in text for text in again.assumed)


def test_no_plan_is_slower_than_everything_in_front() -> None:
    """Levels are kernels of their own, in front of the step as well: one that computes, one that moves memory."""
    ops = [PrepOp(f"a{k}", "clamp", (f"C{k}",), (), 100.0, 5.0, 20.0) for k in range(6)]
    ops += [
        PrepOp(f"b{k}", "stack", (f"C{k}",), (f"a{k}",), 1.0, 0.0, 90.0, True) for k in range(6)
    ]
    for us in (10.0, 300.0, 3000.0):
        plan = search([*ops], [Stage("s", us, 0.5, 0.5)])
        assert plan.ideal_us <= plan.predicted_us <= plan.sequential_us, plan
