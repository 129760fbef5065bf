"""How latency and first call grow with the number of columns. Plain JAX stops where it takes too long."""

from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Row
from benchmarks.workloads import make

PLAIN_UP_TO = 300
NUMBERS = (10, 30, 100, 300, 1000, 3000)


def run(context: Context) -> Result:
    s = context.settings
    rows: list[Row] = []
    for n in dict.fromkeys(max(2, round(number * s.scale)) for number in NUMBERS):
        w = make({"kind": "microbenchmark", "n": n, "random_boundaries": False})
        plain = n <= PLAIN_UP_TO * s.scale
        group = f"{n:,} bucketize columns, batch {s.batch}"
        rows += steady.measure(context, w, group, s.batch, plain=plain, tuned=plain, views=False,
                               empty=True).rows  # fmt: skip
    return Result(tuple(rows), facts={"plain_up_to": PLAIN_UP_TO})
