"""Models of other kinds: jagged bags (RecFlex), and few columns with much around them (Criteo's DLRM)."""

from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Row
from benchmarks.workloads import make

RECFLEX_SHARE = 0.1  # of the 1,000 features: all of them take plain JAX minutes to compile
VOCABULARY = 100_000


def run_recflex(context: Context) -> Result:
    s = context.settings
    rows: list[Row] = []
    scale = RECFLEX_SHARE * s.scale
    for mlp in (False, True):
        w = make({"kind": "recflex", "name": "A", "scale": scale, "max_rows": None, "mlp": mlp})
        what = "whole" if mlp else "columns only"
        group = f"RecFlex A, {w.columns} of 1,000 features, {what}, batch {s.batch}"
        rows += steady.measure(context, w, group, s.batch).rows
    return Result(tuple(rows), facts={"share": scale})


def run_criteo(context: Context) -> Result:
    s = context.settings
    rows: list[Row] = []
    vocabulary = max(100, round(VOCABULARY * s.scale))
    for mlp in (False, True):
        w = make({"kind": "criteo", "vocabulary": vocabulary, "dim": 16, "mlp": mlp})
        for size in s.batches:
            group = f"Criteo DLRM, {'whole' if mlp else 'columns only'}, batch {size}"
            rows += steady.measure(context, w, group, size).rows
    return Result(tuple(rows), facts={"vocabulary": vocabulary})
