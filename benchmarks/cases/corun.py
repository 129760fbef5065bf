"""RAP's plans beside training: no preprocessing, sequential, side stream, co-run; losses compared bit for bit."""

from typing import Any

import jax
import numpy as np

from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from examples import rap_plans
from recom_jax import corun
from recom_jax.corun.report import CORUN, IDEAL, SEQUENTIAL

STEPS = 6
ROUNDS = 3
BATCH = 4096
ROWS = 20_000


def run(context: Context, number: int) -> Result:
    """One plan on a DLRM that is cut down to what a CPU trains in tens of milliseconds."""
    s = context.settings
    shrink = max(1, round(1 / s.scale / 4)) if s.quick else 1
    size = 64 if s.quick else BATCH
    plan = rap_plans.plan(number, rows=max(100, round(ROWS * s.scale)), shrink=shrink)
    model = plan.model(dim=8 if s.quick else 16, small=True)
    raws = list(plan.raw_batches(4 if s.quick else STEPS, size))
    pipe = corun.Pipeline(plan.prep, jax.jit(model.step, donate_argnums=0))
    what = f"plan {number}, {plan.operators} operators, batch {size}"
    rounds = min(s.plan.rounds, ROUNDS)
    with context.progress.step(f"{what}: compiling, then {rounds} rounds"):
        report = corun.measure(pipe, model.init, raws, rounds=rounds)
    times = dict(pipe.baselines)
    rows = [
        Row.single(what, mode, "numpy arrays", "ms", [1e3 * x for x in seconds])
        for mode, seconds in times.items()
    ]
    pairs = zip(times[CORUN], times[SEQUENTIAL], times[IDEAL], strict=True)
    medians = np.median(np.array([(c / q, c / i) for c, q, i in pairs]), axis=0)
    paired = "median over rounds, both in each round; losses are equal in every bit"
    targets = (
        Target(f"{what}: co-run / sequential", float(medians[0]), "<", 1, "", paired),
        Target(f"{what}: co-run / no preprocessing", float(medians[1]), "<=", 1.1, "", paired),
    )
    predicted = pipe.plan
    facts: dict[str, Any] = {
        "batch": size,
        "shrink": shrink,
        f"plan {number}": {
            "plan": str(predicted),
            "prediction_error": pipe.report().prediction_error,
            "hidden": report.hidden,
        },
    }
    return Result(tuple(rows), targets, facts)
