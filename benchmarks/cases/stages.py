"""How long each stage of the compiler takes, by columns of model E."""

import collections
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from benchmarks.workloads import make
from recom_jax import compat, gate, pipeline
from recom_jax.cuda import codegen
from recom_jax.detect import detect
from recom_jax.options import Options
from recom_jax.schedule import schedule
from recom_jax.simplify import simplify
from recom_jax.splice import splice
from recom_jax.trace import flatten

SHARES = (0.1, 1.0)  # of the columns
REPEATS = 3
JAXS = ("trace", "lower", "compile")  # JAX's own work on what it is given
BUDGET_US = 165  # of ours, a column


def run(context: Context) -> Result:
    s = context.settings
    rows: list[Row] = []
    targets: list[Target] = []
    for share in SHARES:
        spec = {"kind": "model_e", "large_rows": s.large_rows, "scale": s.scale * share}
        w = make({**spec, "mlp": False})
        args = w.init(), w.batches(s.batch, 1)[0]
        times: dict[str, list[float]] = collections.defaultdict(list)
        group = f"model E, {w.columns:,} columns: stages"
        with context.progress.step(group):
            for _ in range(REPEATS):
                gc.collect()
                gc.disable()  # as the pipeline does
                try:
                    found = stages(w.fn, args)
                finally:
                    gc.enable()
                for name, ms in found.items():
                    times[name].append(ms)
        for name, values in times.items():
            each = f"{1e3 * statistics.median(values) / w.columns:.0f} us a column"
            rows.append(Row.single(group, name, "", "ms", values, each))
        ours = sum(statistics.median(v) for k, v in times.items() if k not in (*JAXS, "CUDA text"))
        targets.append(
            Target(f"{group}, ours, a column", 1e3 * ours / w.columns, "<=", BUDGET_US, "us")
        )
    return Result(tuple(rows), tuple(targets), {"jax's own": ", ".join(JAXS)})


def stages(fn: Callable[..., Any], args: Any) -> dict[str, float]:
    """Milliseconds of each stage, one after the other, as `pipeline.compile_jaxpr` runs them."""
    found: dict[str, float] = {}

    def timed(name: str, stage: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = stage()
        found[name] = (time.perf_counter() - begun) * 1e3
        return result

    jax.clear_caches()
    options = Options()
    leaves, tree = jax.tree_util.tree_flatten(args)

    def flat(*xs: Any) -> list[Any]:
        return jax.tree_util.tree_leaves(fn(*jax.tree_util.tree_unflatten(tree, xs)))

    closed = timed("trace", lambda: jax.make_jaxpr(flat)(*leaves))
    inlined = timed("inline", lambda: flatten(closed))
    detected, detector = timed("detect", lambda: detect(inlined, options, {}))
    simplified = timed(
        "simplify",
        lambda: simplify(detected.pool, detected.outputs, detected.value_of, options.disabled),
    )
    timed("cost gate", lambda: gate.held_back(detected, simplified.outputs))
    levels: dict[int, list[Any]] = collections.defaultdict(list)
    for out in simplified.outputs:
        levels[out.level].append(out)
    scheduled = timed(
        "schedule", lambda: [(k, schedule(detected, outs)) for k, outs in sorted(levels.items())]
    )
    encoded = timed("encode", lambda: [(k, s, pipeline.prepare(s, options)) for k, s in scheduled])
    jaxpr = timed("splice", lambda: splice(detected, detector.extra_consts, encoded, options))
    lowered = timed("lower", lambda: jax.jit(compat.jaxpr_as_fun(jaxpr)).lower(*leaves))
    timed("compile", lowered.compile)
    timed("CUDA text", lambda: [codegen.generate(s.program) for _, s in scheduled])
    return found


__all__ = ["run", "stages"]
