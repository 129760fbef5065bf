"""Whole models E and F: columns, bottom MLP, top MLP."""

from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Row
from benchmarks.workloads import make


def run_e(context: Context) -> Result:
    return _run(context, "model_e", "model E")


def run_f(context: Context) -> Result:
    return _run(context, "model_f", "model F")


def _run(context: Context, kind: str, title: str) -> Result:
    s = context.settings
    w = make({"kind": kind, "large_rows": s.large_rows, "scale": s.scale, "mlp": True})
    rows: list[Row] = []
    for size in s.batches:
        rows += steady.measure(context, w, f"{title} with MLPs, batch {size}", size).rows
    return Result(tuple(rows), facts={"columns": w.columns, "large_rows": s.large_rows})
