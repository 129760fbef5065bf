"""Torch's forms of embedding columns, timed call by call and captured in a CUDA graph."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import steady
from benchmarks.record import Row
from examples.recom_models import RecomModel

BAGS, EAGER = "torch embedding_bag, CUDA graph", "torch embedding_bag, eager"
Peer = Callable[[], Any]


def there(torch: Any, x: Any) -> Any:
    """A copy of an array on torch's GPU, or on the CPU where there is none."""
    made = torch.from_numpy(np.array(x))
    return made.cuda() if torch.cuda.is_available() else made


def same(group: str, peer: str, theirs: np.ndarray, ours: np.ndarray) -> None:
    """Raises RuntimeError if a peer computes something else than the kernel."""
    if theirs.shape != ours.shape or not np.allclose(theirs, ours, rtol=1e-3, atol=1e-3):
        raise RuntimeError(f"{group}: {peer} computes something else: {theirs.shape}, {ours.shape}")


def torch_rows(group: str, name: str, run: Peer) -> list[Row]:
    """Microseconds of a form of torch's, captured in a CUDA graph and (for its bags) call by call."""
    import torch

    rows = []
    with torch.no_grad():
        for _ in range(2):
            run()
        if name == BAGS:
            eager = _events(torch, run, 1)
            rows.append(Row.single(group, EAGER, steady.DEVICE, "us", eager))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
        rows.append(Row.single(group, name, steady.DEVICE, "us", _events(torch, graph.replay, 5)))
        del kept
    return rows


def _events(torch: Any, run: Peer, calls: int) -> list[float]:
    found = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / calls * 1e3)
    return found


def hashed(x: Any, rows: int) -> Any:
    """`examples.recom_models.int_hash` of 64-bit integers, which hold a product of 32 bits."""
    mixed = (x * 2654435769) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) % rows


def recom_columns(torch: Any, model: RecomModel, params: Any, batch: Any) -> Peer:
    """Model E's or F's columns, one `embedding` or `embedding_bag` each, on device inputs."""
    tables = {k: [there(torch, t) for t in ts] for k, ts in params["tables"].items()}
    inputs = {k: there(torch, v) for k, v in batch.items()}
    limits = {c.name: there(torch, c.boundaries) for c in model.specs if c.kind == "bucket"}

    def column(c: Any, table: Any) -> Any:
        x = inputs[c.name]
        functional = torch.nn.functional
        if c.kind == "bucket":
            ids = torch.bucketize(x, limits[c.name], out_int32=True, right=True)
            return functional.embedding(ids, table)
        if c.kind == "hash":
            return functional.embedding(hashed(x.long(), c.rows), table)
        if c.kind == "string":
            return functional.embedding(x % c.rows, table)
        mask = x >= 0
        ids = torch.where(mask, x % c.rows, 0)
        return functional.embedding_bag(ids, table, mode="sum", per_sample_weights=mask.float())

    def run() -> Any:
        with torch.no_grad():
            outs = [
                column(c, table)
                for kind, columns in model.by_kind().items()
                for c, table in zip(columns, tables[kind], strict=True)
            ]
            return torch.cat([*outs, inputs["dense"]] if model.has_dense else outs, 1)

    return functools.partial(run)
