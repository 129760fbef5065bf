"""Model E's columns through bind, each time with one rewrite left out, and with all of them left out."""

import time
from typing import Any

import jax
import numpy as np

import recom_jax
from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Row
from benchmarks.timing import Contestant, interleave
from benchmarks.workloads import make
from recom_jax.simplify import NAMES

ALL_ON = "all rewrites"


def run(context: Context) -> Result:
    s = context.settings
    w = make({"kind": "model_e", "large_rows": s.large_rows, "scale": s.scale, "mlp": False})
    params = jax.block_until_ready(w.init())
    batches = w.batches(s.batch, steady.BATCHES)

    def explain(disabled: tuple[str, ...]) -> Any:
        """The report, without the rewrites named."""
        options = recom_jax.Options(disable=disabled)
        return recom_jax.optimize(w.fn, options=options).explain(params, batches[0])

    variants: dict[str, tuple[str, ...]] = {ALL_ON: ()}
    idle = []
    with context.progress.step("model E: which rewrites change its program"):
        whole = explain(())
        for name in sorted(NAMES):
            report = explain((name,))
            if (report.source, report.num_fused) == (whole.source, whole.num_fused):
                idle.append(name)
            else:
                variants[f"without {name}"] = (name,)
    variants["without any rewrite"] = tuple(sorted(NAMES))

    runners, first, structure, outputs = [], {}, {}, {}
    for name, disabled in variants.items():
        with context.progress.step(f"model E {name}"):
            optimized = recom_jax.optimize(w.fn, options=recom_jax.Options(disable=disabled))
            server = optimized.bind(params)
            begun = time.perf_counter()
            out = np.asarray(server(batches[0]))
            c = Contestant(name, steady.NUMPY, lambda k: batches[k % len(batches)], server)
            first[c.key] = time.perf_counter() - begun
            outputs[c.key] = out
            structure[name] = _structure(optimized.explain(params, batches[0]))
            runners.append(c)
    differences = steady.compare(outputs, outputs[runners[0].key])
    plan = s.plan
    group = f"model E, columns only, bind, batch {s.batch}"
    samples = interleave(runners, plan, lambda it: context.progress.track(it, group, plan.rounds))
    rows = [Row.of(group, c, samples[c.key], first_s=first[c.key], max_difference=differences[c.key])
            for c in runners]  # fmt: skip
    return Result(
        tuple(rows), facts={"left out without effect": ", ".join(idle), "structure": structure}
    )


def _structure(report: Any) -> dict[str, int]:
    return {"fused": report.num_fused, "calls": report.num_custom_calls,
            "classes": sum(map(len, report.classes))}  # fmt: skip
