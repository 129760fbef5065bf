"""Model E without its MLPs at one batch size: most of what the project promises."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import recom_jax
from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Target
from benchmarks.timing import paired_difference, paired_ratio
from benchmarks.workloads import make
from examples.recom_models import RecomModel, model_e

# What a column of plain JAX lowers to. Slices that read a row count as gathers.
COLUMN_OPS = ("gather", "dynamic_gather", "dynamic_slice", "while", "sort")


def lowered_counts(text: str) -> dict[str, int]:
    """How often the lowered module (StableHLO) calls us, and holds an operation of an unfused column."""
    counts = {"custom_call": len(re.findall(r"custom_call @recom_\w+", text))}
    for op in COLUMN_OPS:
        counts[op] = len(re.findall(rf"\bstablehlo\.{op}\b", text))
    return counts


def exactness(model: RecomModel, params: Any, batch: Mapping[str, np.ndarray], ours: np.ndarray,
              plain: np.ndarray) -> dict[str, float]:  # fmt: skip
    """`single`: elements of single lookups whose bits differ. `pooled`: largest |ours - plain| relative to
    n * eps * sum |w * e| of its bag, at most 1 if as promised. `dense`: differing dense features."""
    at, single, pooled = 0, 0, 0.0
    for kind, columns in model.by_kind().items():
        for column, table in zip(columns, params["tables"][kind], strict=True):
            a, b = (x[:, at : at + column.dim] for x in (ours, plain))
            at += column.dim
            if kind not in ("sparse", "large"):
                single += int((a.view(np.uint32) != b.view(np.uint32)).sum())
                continue
            x = batch[column.name]
            mask = x >= 0
            rows = np.abs(np.asarray(table)[np.where(mask, x % column.rows, 0)]) * mask[..., None]
            bound = mask.sum(1)[:, None] * np.finfo(np.float32).eps * rows.sum(1)
            error = np.abs(a.astype(np.float64) - b.astype(np.float64))
            with np.errstate(divide="ignore", invalid="ignore"):
                pooled = max(pooled, float(np.where(error == 0, 0, error / bound).max()))
    dense = int((ours[:, at:].view(np.uint32) != plain[:, at:].view(np.uint32)).sum())
    return {"single": single, "pooled": pooled, "dense": dense}


def new_programs(server: Any, optimized: Any, params: Any, w: Any, size: int) -> dict[str, int]:
    """How far the counters move when a batch size comes that was never seen."""
    batch = w.batches(size, 1)[0]
    before = recom_jax.stats()
    jax.block_until_ready(server(batch))
    jax.block_until_ready(optimized(params, jax.device_put(batch)))
    after = recom_jax.stats()
    names = [k for k, v in after.items() if isinstance(v, int)]
    return {k: after[k] - before.get(k, 0) for k in names}


def run(context: Context) -> Result:
    s = context.settings
    model = model_e(s.large_rows, s.scale)
    w = make({"kind": "model_e", "large_rows": s.large_rows, "scale": s.scale, "mlp": False})
    size = s.batch
    optimized = recom_jax.optimize(w.fn)
    found = steady.measure(context, w, f"model E, columns only, batch {size}", size, empty=True)
    params, batch = found.params, found.batches[0]

    with context.progress.step("counts and exactness"):
        report = optimized.explain(params, batch)
        counts = lowered_counts(optimized.lower(params, batch).as_text())
        plain = found.outputs[f"{steady.PLAIN} / {steady.DEVICE}"]
        exact = {
            key: exactness(model, params, batch, found.outputs[key], plain)
            for key in (f"{steady.OURS} / {steady.DEVICE}", f"{steady.BIND} / {steady.NUMPY}",
                        f"{steady.BIND} / {steady.VIEWS}")
        }  # fmt: skip
        moved = new_programs(found.server, optimized, params, w, size + 13)

    device, bind = found.of(steady.OURS, steady.DEVICE), found.of(steady.BIND, steady.NUMPY)
    views, filling = found.of(steady.BIND, steady.VIEWS), found.of(steady.BIND, steady.FILLING)
    empty = found.of(steady.EMPTY, steady.DEVICE)
    plain_device = found.of(steady.PLAIN, steady.DEVICE)
    plain_numpy = found.of(steady.PLAIN, steady.NUMPY)
    left = sum(counts[op] for op in COLUMN_OPS)
    paired = "median over rounds, both in each round"
    targets = (
        Target("columns of model E not fused", report.num_columns - report.num_fused, "==", 0, "",
               f"explain: {report.num_fused} of {report.num_columns} fused"),
        Target("custom calls in the lowered module", counts["custom_call"], "==", 1),
        Target("gathers, row slices, while loops and sorts left in it", left, "==", 0, "",
               ", ".join(f"{op} {counts[op]}" for op in COLUMN_OPS)),
        Target("single lookups and dense features: elements that differ in a bit from jax.jit",
               max(e["single"] + e["dense"] for e in exact.values()), "==", 0),
        Target("pooled columns: error relative to n * eps * sum |w * e|",
               max(e["pooled"] for e in exact.values()), "<=", 1),
        Target("device arrays: ours minus an empty FFI call", paired_difference(device, empty), "<=", 1.5,
               "ms", paired),
        Target("device arrays: ours / jax.jit", paired_ratio(device, plain_device), "<=", 1 / 2, "",
               paired),
        Target("numpy arrays: bind / jax.jit", paired_ratio(bind, plain_numpy), "<=", 1 / 4, "", paired),
        Target("numpy arrays: bind / jax.jit (the aim)", paired_ratio(bind, plain_numpy), "<=", 1 / 6, "",
               paired),
        Target("input_views / bind with numpy arrays", paired_ratio(views, bind), "<", 1, "",
               f"{paired}; with filling the views: {paired_ratio(filling, bind):.2f}"),
        Target("programs prepared for a batch size never seen", moved["programs_prepared"], "==", 0, "",
               f"batch {size + 13}, through bind and directly"),
    )  # fmt: skip
    facts = {
        "columns": report.num_columns,
        "fused": report.num_fused,
        "classes": [list(c) for c in report.classes],
        "lowered": counts,
        "exactness": exact,
        "operands": len(jax.tree_util.tree_leaves((params, batch))),
        "counters_moved_by_a_new_batch_size": moved,
        "bind_cost": str(found.server.cost(batch)),
    }
    return Result(found.rows, targets, facts)
