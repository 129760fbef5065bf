"""RAP's plans beside training on a GPU: the same kernels and the same step in different orders.

The step that is timed updates tables by scatter-add, as one writes it for speed: its sums are made by atomics, so its
last bits differ between any two runs. A second step, which trains the layers alone and is deterministic, shows that
co-run and offline-preprocessed inputs give the same losses bit for bit.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from examples import rap_plans
from examples.click_models import Dlrm
from recom_jax import corun
from recom_jax.corun import calls, duel, measure_stream
from recom_jax.corun.report import CORUN, IDEAL, STREAM_MODES, UNFUSED

BATCHES = (4096, 8192)
STEPS, LONG_STEPS = 60, 40  # of a run; of plans whose steps take milliseconds
DISTINCT = 8  # raw batches
SLOTS = 6
AHEAD = 4  # steps that may be dispatched and unfinished
RATE = 1e-5  # small: sums by atomics must not grow apart
INPUTS = "numpy arrays"
BARE = "no preprocessing, no markers"
PAIRS = 9  # of runs, beside kernels and without
EVENTS = "device events, from step to step, median of paired runs with and without kernels"
HELD_OUT = "kernels of random units and shares, by device events"


@dataclasses.dataclass(frozen=True)
class ScatterDlrm(Dlrm):
    """DLRM whose tables are updated by scatter-add, with SGD. `frozen`: they are not updated."""

    frozen: bool = False

    def update(self, state: Any, d_layers: Any, d_rows: jax.Array, ids: jax.Array) -> Any:
        layers = jax.tree.map(lambda w, g: w - self.rate * g, state["layers"], d_layers)
        if self.frozen:
            return {"tables": state["tables"], "layers": layers}
        tables = []
        for k, table in enumerate(state["tables"]):
            places = jnp.where(ids[:, k] >= 0, ids[:, k], table.shape[0])  # dropped
            change = jnp.broadcast_to(
                -self.rate * d_rows[:, k, None], (*places.shape, table.shape[1])
            )
            tables.append(table.at[places].add(change, mode="drop"))
        return {"tables": tables, "layers": layers}


def run(context: Context, number: int, size: int) -> Result:
    """One plan at one batch size."""
    return measure(context, number, 64 if context.settings.quick else size)


def measure(context: Context, number: int, size: int) -> Result:
    """One plan at one batch size."""
    quick = context.settings.quick
    plan = rap_plans.plan(number, shrink=8 if quick else 1, rows=500 if quick else None)
    like = plan.model(dim=8, small=True) if quick else plan.model()
    fields = {f.name: getattr(like, f.name) for f in dataclasses.fields(like)} | {"rate": RATE}
    model, frozen = ScatterDlrm(**fields), ScatterDlrm(**fields, frozen=True)
    step = jax.jit(model.step, donate_argnums=0)
    with context.progress.step(f"RAP plan {number}: raw batches"):
        distinct = list(plan.raw_batches(2 if quick else DISTINCT, size))
    raws = [
        distinct[k % len(distinct)]
        for k in range(12 if quick else STEPS if number < 2 else LONG_STEPS)
    ]
    what = f"RAP plan {number}, {plan.operators} operators, batch {size}"
    options = corun.Options(
        slots=SLOTS, probe=True, profile=True, copy=False, runtime="stream", steps_in_flight=AHEAD
    )
    pipe = corun.Pipeline(plan.prep, step, options=options)
    make_state = on_device(model)
    with context.progress.step(f"{what}: preprocessing kernels"):
        pipe.streams(distinct[0])
    with context.progress.step(f"{what}: plan, probing the device"):
        planned = pipe.make_plan(make_state(), distinct[0])
    with context.progress.step(f"{what}: what kernels cost the step"):
        found = interference(pipe, make_state(), 2 if quick else PAIRS)
    rounds = min(context.settings.plan.rounds, 7)
    with context.progress.step(f"{what}: {rounds} rounds"):
        report = corun.measure(pipe, make_state, raws, rounds=rounds, rtol=0.05)
    with context.progress.step(f"{what}: without markers"):
        bare = without_markers(model, pipe, make_state, raws, rounds)
    with context.progress.step(f"{what}: losses bit for bit"):
        different = differences(plan, frozen, make_state, distinct, pipe)
    times = pipe.baselines
    rows = [
        Row.single(what, mode, INPUTS, "ms", [1e3 * x for x in times[mode]])
        for mode in STREAM_MODES
    ]
    rows.append(Row.single(what, BARE, INPUTS, "ms", [1e3 * x for x in bare]))

    bits = "a deterministic step, co-run and on inputs preprocessed beforehand"
    targets = [
        Target(f"{what}: losses that differ in a bit", different, "==", 0, "", bits),
        *ratios(what, times),
        Target(f"{what}: what kernels cost the step beside them", duel.loss(found), "<=", 0.01, "", EVENTS),
        Target(f"{what}: held-out kernels off by more than 10%", missed(pipe), "<=", 0.1, "", HELD_OUT),
    ]  # fmt: skip
    for state, metrics in pipe.run(make_state(), raws):  # the plan's kernels, timed beside it
        jax.block_until_ready((state, metrics))
    facts = {
        what: {
            "plan": str(planned),
            "report": str(pipe.report()),
            "kernels_ms": [[n, 1e3 * p, 1e3 * m] for n, p, m in pipe.report().kernels],
            "hidden": report.hidden,
            "held_out_us": [] if pipe.probed is None else [list(x) for x in pipe.probed.parts],
            "alone_us": None if pipe.probed is None else pipe.probed.alone_us,
            "beside": []
            if pipe.probed is None
            else [dataclasses.astuple(b) for b in pipe.probed.beside],
            "pairs_us": [dataclasses.astuple(p) for p in found],
            "cost_model": None if pipe.probed is None else dataclasses.asdict(pipe.probed.device),
            "classes_us": []
            if pipe.probed is None
            else [dataclasses.astuple(c) for c in pipe.probed.classes],
            "prediction_error": report.prediction_error,
        }
    }
    return Result(tuple(rows), tuple(targets), facts)


def ratios(what: str, times: Mapping[str, Sequence[float]]) -> list[Target]:
    """Co-running beside the ideal and beside RAP's baseline."""

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))

    paired = "median over rounds, both in each round"
    return [
        Target(f"{what}: co-run / no preprocessing", ratio(CORUN, IDEAL), "<=", 1.02, "", paired),
        Target(f"{what}: co-run / sequential, unfused", ratio(CORUN, UNFUSED), "<=", 1 / 1.99, "", paired),
    ]  # fmt: skip


def missed(pipe: corun.Pipeline) -> float:
    """The part of held-out kernels that the cost model did not predict within 10%."""
    return 1.0 if pipe.probed is None else 1.0 - pipe.probed.within_tenth


def interference(pipe: corun.Pipeline, state: Any, rounds: int) -> list[duel.Pair]:
    """The step beside the plan's kernels and without them, by events."""
    assert pipe.prober is not None
    pipe.prober.values = state
    engine = pipe.make_engine(1, pipe.schedule_of)
    try:
        program, _ = engine.program(pipe.prober.columns)
        schedule = program.runtime.schedule
    finally:
        engine.close()
    try:
        return duel.pairs(schedule, pipe.prober.run, rounds)
    finally:
        pipe.prober.values = None


def without_markers(
    model: Dlrm, pipe: Any, make_state: Callable[[], Any], raws: list[Any], rounds: int
) -> list[float]:
    """Seconds of a step on prepared inputs that is compiled without its stage markers."""
    step = jax.jit(lambda state, batch: model.step(state, batch), donate_argnums=0)
    made = {id(raw): pipe.prepare(raw) for raw in raws}
    batches = [made[id(raw)] for raw in raws]
    with calls.unmarked():
        found = [
            measure_stream.ideal(step, make_state(), batches, AHEAD) for _ in range(rounds + 1)
        ]
    return [run.step_s for run in found[1:]]


def differences(
    plan: rap_plans.RapPlan, model: Dlrm, make_state: Callable[[], Any], raws: list[Any], timed: Any
) -> int:
    """Steps whose loss differs between a co-run and inputs preprocessed beforehand, with the timed pipeline's plan."""
    step = jax.jit(model.step)
    pipe = corun.Pipeline(plan.prep, step, options=timed.options)
    pipe.follow(timed.plan)
    state, wanted = make_state(), []
    for raw in raws:
        state, metrics = step(state, pipe.prepare(raw))
        wanted.append(np.asarray(metrics["loss"]))
    found = [np.asarray(m["loss"]) for _, m in pipe.run(make_state(), raws)]
    return sum(a.tobytes() != b.tobytes() for a, b in zip(found, wanted, strict=True))


def on_device(model: Any) -> Callable[[], Any]:
    """Makes a model's first state where it is trained: the same one each time."""
    host = jax.tree.map(np.asarray, model.init_layers(np.random.default_rng(0)))
    bound = float(1 / np.sqrt(model.dim))

    def table(key: jax.Array, rows: int) -> jax.Array:
        return jax.random.uniform(key, (rows, model.dim), minval=-bound, maxval=bound)

    one = jax.jit(table, static_argnums=1)
    keys = [jax.random.key(k) for k in range(len(model.rows))]
    tables = [one(key, rows) for key, rows in zip(keys, model.rows, strict=True)]
    first = {"tables": tables, "layers": jax.tree.map(jnp.array, host)}
    return lambda: jax.tree.map(lambda a: a.copy(), first)  # steps donate theirs
