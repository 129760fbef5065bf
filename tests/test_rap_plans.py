"""RAP's plans: counts of operators as published, one program against a plain one, and a step trained on each."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from examples import rap_plans
from recom_jax import corun
from recom_jax import preprocess as pp
from recom_jax.corun import graph, search
from recom_jax.corun.plan import Stage
from recom_jax.corun.planner import scaled
from tests.test_preprocess import sigrid

PUBLISHED = {
    0: {"fill_null": 39, "sigrid_hash": 26, "firstx": 26, "logit": 13, "bucketize": 1},
    1: {"fill_null": 39, "sigrid_hash": 26, "firstx": 26, "logit": 13, "bucketize": 1},
    2: {
        "logit": 28,
        "boxcox": 36,
        "onehot": 40,
        "sigrid_hash": 44,
        "clamp": 64,
        "firstx": 48,
        "ngram": 52,
    },
    3: {
        "logit": 64,
        "boxcox": 84,
        "onehot": 60,
        "sigrid_hash": 100,
        "clamp": 112,
        "firstx": 100,
        "ngram": 104,
    },
}
FEATURES = {0: (13, 26), 1: (13, 26), 2: (26, 52), 3: (52, 104)}


@pytest.mark.once
@pytest.mark.parametrize("number", range(4))
def test_counts_are_the_published_ones(number: int) -> None:
    plan = rap_plans.plan(number)
    assert plan.program.counts == dict(sorted(PUBLISHED[number].items()))
    assert (len(plan.dense), len(plan.sparse)) == FEATURES[number]
    assert plan.rows == (100_000 if number < 2 else 65_536)
    made = jax.eval_shape(plan.prep, pp.columns(plan.raw_batch(32)))
    model = plan.model()
    assert made["dense"].shape == (32, model.dense) and made["ids"].shape[1] == len(model.rows)
    ops = graph.operators(
        plan.program, pp.columns({k: v for k, v in plan.raw_batch(32).items() if k != "label"})
    )
    kinds = [op.kind for op in ops]
    assert {k: kinds.count(k) for k in PUBLISHED[number]} == PUBLISHED[number]
    if number >= 2:  # too much for one stage: several kernels
        stages = [Stage("emb", 40.0, 0.4, 0.2), Stage("mlp", 60.0, 0.3, 0.6)]
        plans = [search.search(scaled(ops, us), stages) for us in (20.0, 100.0)]
        assert plans[0].hidden > 0.9 and len(plans[1].kernels) > 2 and 0 < plans[1].hidden < 1


@pytest.mark.once
def test_plan_4_is_plan_3_with_more_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, like = rap_plans.plan(4), rap_plans.plan(3)
    more = rap_plans.HASHES * rap_plans.TIMES * len(plan.sparse)
    counts = dict(like.program.counts)
    assert plan.program.counts == counts | {"sigrid_hash": counts["sigrid_hash"] + more}
    assert (plan.dense, plan.sparse, plan.model()) == (like.dense, like.sparse, like.model())
    monkeypatch.setattr(rap_plans, "HASHES", 2)  # XLA takes half a minute for eight
    small = rap_plans.plan(4, rows=50, shrink=26)
    ids = np.asarray(jax.jit(small.prep)(pp.columns(small.raw_batch(40)))["ids"])
    assert ids.min() == -1 and 40 < ids.max() < 50  # of all the table, not its ends alone
    assert len(np.unique(ids)) == 51


def test_plan_0_by_hand() -> None:
    plan = rap_plans.plan(0, rows=1000, mean_length=2.5, shrink=6)
    raw = plan.raw_batch(50, seed=4)
    made = jax.jit(plan.prep)(pp.columns(raw))
    lists = raw["C3"].to_lists()
    want = [[sigrid(v or 0, 2, 1000) for v in row[:3]] for row in lists]
    assert [[i for i in row if i >= 0] for row in made["ids"][:, 2].tolist()] == want
    x = np.where(raw["I1"].valid, raw["I1"].values, np.float32(0))
    bins = [sum(b < v for b in (0.5, 1.0, 1.5)) for v in x]
    assert made["ids"][:, -1, 0].tolist() == bins
    p = np.clip(x, np.float32(1e-6), np.float32(1) - np.float32(1e-6)).astype(np.float64)
    np.testing.assert_allclose(made["dense"][:, 0], np.log(p / (1 - p)), rtol=1e-5)


@pytest.mark.once
def test_plan_2_trains_as_with_offline_preprocessing() -> None:
    plan = rap_plans.plan(2, rows=64, mean_length=1.5, shrink=16)
    model = plan.model(dim=4, small=True)
    raws = list(plan.raw_batches(2, 16)) * 2
    step = jax.jit(model.step)
    pipe = corun.Pipeline(plan.prep, step)
    losses = [float(m["loss"]) for _, m in pipe.run(model.init(), raws)]
    state, want = model.init(), []
    for raw in raws:
        state, metrics = step(state, pipe.prepare(raw))
        want.append(float(metrics["loss"]))
    assert losses == want and np.isfinite(losses).all() and len(set(losses)) == 4
    assert pipe.plan.segments
