"""Time to the first result and peak memory: each number from fresh processes."""

import statistics
from typing import Any

from benchmarks import cold
from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from benchmarks.steady import AGAIN, BIND, DEVICE, HAND, HAND_LOOP, NUMPY, OURS, PLAIN, TUNED


def rows_of(
    group: str, answers: dict[str, list[dict[str, Any]]], kept: dict[str, str]
) -> list[Row]:
    """Seconds, peak memory, and memory once the result is there, of each contestant."""
    rows = []
    for name, found in answers.items():
        note = f"kept from {kept[name][:10]}" if name in kept else ""
        inputs = NUMPY if name == BIND else DEVICE
        for field, unit, what in (("first_s", "s", "time to first result"),
                                  ("peak_mib", "MiB", "peak memory of the process"),
                                  ("before_mib", "MiB", "memory before the call"),
                                  ("after_mib", "MiB", "memory after the call")):  # fmt: skip
            values = [a[field] for a in found if a[field] is not None]
            if values:
                rows.append(Row.single(f"{group}: {what}", name, inputs, unit, values, note))
    return rows


def run(context: Context) -> Result:
    s = context.settings
    spec = {"kind": "model_e", "large_rows": s.large_rows, "scale": s.scale, "mlp": False}
    answers, kept = cold.measure(
        context, spec, (OURS, AGAIN, BIND, HAND, HAND_LOOP, TUNED, PLAIN), s.batch
    )
    many = {
        "kind": "microbenchmark",
        "n": max(1, round(10_000 * s.scale)),
        "random_boundaries": False,
    }
    answers_many, _ = cold.measure(context, many, (OURS, AGAIN, BIND), s.batch)

    def median(name: str, field: str) -> float:
        return float(statistics.median(a[field] for a in answers[name]))

    arena = median(BIND, "arena_mib")
    ours_many = statistics.median(a["first_s"] for a in answers_many[OURS])
    targets = (
        Target("first result of model E: ours / jax.jit", median(OURS, "first_s") / median(PLAIN, "first_s"),
               "<=", 1 / 12, "", "fresh processes, nothing cached; trace, compile and run"),
        Target("first result of model E: ours with its program on disk / jax.jit",
               median(AGAIN, "first_s") / median(PLAIN, "first_s"), "<=", 1 / 12, "",
               "fresh processes; an earlier one kept the program"),
        Target("first result of model E: bind / jax.jit", median(BIND, "first_s") / median(PLAIN, "first_s"),
               "<=", 1 / 12, "", "likewise"),
        Target(f"first result of {many['n']:,} columns", ours_many, "<=", 25, "s",
               "fresh process; microbenchmark"),
        Target(f"first result of model E, {answers[OURS][0]['columns']:,} columns", median(OURS, "first_s"),
               "<=", 5, "s", "fresh processes, nothing cached"),
        Target(f"first result of model E, {answers[OURS][0]['columns']:,} columns, program on disk",
               median(AGAIN, "first_s"), "<=", 2, "s", "fresh processes; an earlier one kept the program"),
        Target("peak memory: ours minus jax.jit", median(OURS, "peak_mib") - median(PLAIN, "peak_mib"),
               "<=", 0, "MiB", "fresh processes"),
        Target("peak memory: bind without its arena, minus jax.jit",
               median(BIND, "peak_mib") - arena - median(PLAIN, "peak_mib"), "<=", 0, "MiB",
               f"fresh processes; the arena takes {arena:.1f} MiB"),
    )  # fmt: skip
    rows = rows_of(f"model E, columns only, batch {s.batch}", answers, kept)
    rows += rows_of(f"{many['n']:,} bucketize columns, batch {s.batch}", answers_many, {})
    found = [a["from_disk"] for a in (*answers[AGAIN], *answers_many[AGAIN])]
    facts = {
        "programs_from_disk": found,
        "arena_mib": arena,
        "processes": s.processes,
        "kept": kept,
    }
    return Result(tuple(rows), targets, facts)
