"""RECom's microbenchmark: bucketize columns alone, boundaries equal for all or random for each."""

from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Row
from benchmarks.workloads import make


def run(context: Context) -> Result:
    s = context.settings
    rows: list[Row] = []
    for number in (100, 1000):
        for random in (False, True):
            n = max(2, round(number * s.scale))
            w = make({"kind": "microbenchmark", "n": n, "random_boundaries": random})
            kind = "random" if random else "uniform"
            group = f"{n:,} bucketize columns, {kind} boundaries, batch {s.batch}"
            if s.scale != 1:
                group += f" (of {number:,})"
            rows += steady.measure(context, w, group, s.batch).rows
    return Result(tuple(rows))
