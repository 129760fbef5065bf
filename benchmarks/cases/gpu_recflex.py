"""On a GPU: kernel times of RecFlex's models, beside torch's bags, FBGEMM's if it is installed, and jit as written."""

import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import gpu_kernel, steady
from benchmarks.cases.gpu import copy_bandwidth, kernel_rows, limits, pipelined
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row
from benchmarks.torch_peers import BAGS, Peer, same, there, torch_rows
from examples.recflex import RecflexModel, recflex

FBGEMM = "FBGEMM, inference"
JIT = "jax.jit, pipelined"
SIZES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys("ABCD", (512, 256, 2048)),
    **dict.fromkeys(("E", "F", "mlperf"), (512,)),
}
PEERS = 512  # the batch size at which the peers run
COMPILED = (
    "ABCD"  # models that jit as written is timed with: XLA compiles a search and a scatter a column
)
MAX_ROWS = {"mlperf": 2**20}  # its tables take 52 GB
LIMITS = {("A", 512): 200, ("B", 512): 75, ("C", 512): 140, ("D", 512): 75}  # microseconds


def pieces(settings: Settings) -> dict[str, Piece]:
    """A piece a model and batch size, and one of its own for what XLA compiles for long."""
    found: dict[str, Piece] = {}
    for name, sizes in SIZES.items():
        for size in sizes:
            found[f"{name} {size}"] = functools.partial(_piece, name=name, size=size)
    for name in COMPILED:
        found[f"{name} {PEERS} jit"] = functools.partial(_jit_piece, name=name, size=PEERS)
    return found


def _model(settings: Settings, name: str) -> RecflexModel:
    rows = settings.large_rows if settings.quick else MAX_ROWS.get(name)
    return recflex(name, scale=settings.scale, max_rows=rows, expand="searchsorted")


def group_of(name: str, size: int) -> str:
    return f"RecFlex {name}, batch {size}: kernel"


def _piece(context: Context, name: str, size: int) -> Result:
    group = group_of(name, size)
    facts: dict[str, Any] = {}
    with context.turns.compiling(), context.progress.step(f"{group}: inputs and kernel"):
        flex = _model(context.settings, name)
        params = jax.device_put(flex.init(seed=0))
        batch = flex.batch(size, 0)
        kernel = gpu_kernel.kernel_of(flex.columns, params, batch)
        gpu_kernel.time_kernel(kernel, calls=1, repeats=1)
        peers = peers_of(flex, params, batch, facts) if size == PEERS else {}
        ours = np.asarray(kernel.results[0])
        for peer, run in peers.items():
            same(group, peer, run().cpu().numpy(), ours)
    with context.turns.timed() as quiet:
        bandwidth = round(copy_bandwidth(), 2)
        rows = kernel_rows(group, kernel)
        for peer, run in peers.items():
            rows += torch_rows(group, peer, run)
    floor = round(moved_bytes(flex, batch) / bandwidth / 1e6, 1)
    facts |= {
        "floors_us": {group: floor},
        "copy_tb_per_s": {group: bandwidth},
        "timed while others compiled": not quiet,
    }
    if name in MAX_ROWS:
        facts[f"rows a table of {name}, at most"] = max(f.rows for f in flex.features)
    return Result(
        tuple(rows), tuple(limits(group, rows[0].median, LIMITS.get((name, size)))), facts
    )


def _jit_piece(context: Context, name: str, size: int) -> Result:
    group = group_of(name, size)
    with context.turns.compiling(), context.progress.step(f"{group}: {JIT}"):
        flex = _model(context.settings, name)
        params = jax.device_put(flex.init(seed=0))
        there = jax.device_put(flex.batch(size, 0))
        call = functools.partial(jax.jit(flex.columns), params)
        begun = time.perf_counter()
        jax.block_until_ready(call(there))
        seconds = context.first_call(f"{group} | {JIT}", time.perf_counter() - begun)
    with context.turns.timed() as quiet:
        us = pipelined(call, there, calls=5)
    row = Row.single(group, JIT, steady.DEVICE, "us", us, f"first call {seconds:.1f} s")
    return Result((row,), (), {"timed while others compiled": not quiet})


def peers_of(
    model: RecflexModel, params: Any, batch: Any, facts: dict[str, Any]
) -> dict[str, Peer]:
    """Torch's and FBGEMM's forms, as far as they are installed; which are not is a fact."""
    try:
        import torch
    except ImportError:
        facts["torch"] = "not installed"
        return {}
    tables = {f.name: there(torch, params["tables"][f.name]) for f in model.features}
    inputs = {k: there(torch, v) for k, v in batch.items()}
    bags = functools.partial(torch_bags, torch, model, tables, inputs)
    found: dict[str, Peer] = {BAGS: bags}
    try:
        found[FBGEMM] = fbgemm_bags(torch, model, tables, inputs)
    except ImportError:
        facts["FBGEMM"] = "not installed"
    except Exception as why:  # of a version whose interface differs: no reason to measure nothing
        facts["FBGEMM"] = f"{type(why).__name__}: {why}"
    return found


def torch_bags(torch: Any, model: RecflexModel, tables: Any, inputs: Any) -> Any:
    """[B, width]: one `embedding_bag` a feature, one `embedding` where a sample has exactly one id."""
    bag = torch.nn.functional.embedding_bag
    outs = []
    with torch.no_grad():
        for f in model.features:
            if f.jagged:
                values, splits = inputs[f"{f.name}_values"], inputs[f"{f.name}_splits"]
                outs.append(
                    bag(values, tables[f.name], splits, mode="sum", include_last_offset=True)
                )
            else:
                outs.append(torch.nn.functional.embedding(inputs[f.name], tables[f.name]))
        return torch.cat(outs, 1)


def fbgemm_bags(torch: Any, model: RecflexModel, tables: Any, inputs: Any) -> Peer:
    """All features by FBGEMM's inference kernel: tables in one buffer, ids and offsets concatenated beforehand.

    Raises:
      ImportError: FBGEMM is not installed.
    """
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    ids, ends, total = [], [torch.zeros(1, dtype=torch.int32)], 0
    for f in model.features:
        values = inputs[f"{f.name}_values" if f.jagged else f.name]
        splits = inputs[f"{f.name}_splits"] if f.jagged else torch.arange(len(values) + 1)
        ids.append(values)
        ends.append(splits[1:].cpu().to(torch.int32) + total)
        total += int(splits[-1])
    specs = [
        (f.name, f.rows, f.dim, SparseType.FP32, EmbeddingLocation.DEVICE) for f in model.features
    ]
    made = IntNBitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=specs, output_dtype=SparseType.FP32, device=torch.cuda.current_device()
    )
    made.initialize_weights()
    for f, (weights, _) in zip(model.features, made.split_embedding_weights(), strict=True):
        raw = tables[f.name].view(torch.uint8)
        weights[:, : raw.shape[1]].copy_(raw)
    indices, offsets = torch.cat(ids).to(torch.int32), torch.cat(ends).cuda()
    return functools.partial(made, indices=indices, offsets=offsets)


def moved_bytes(model: RecflexModel, batch: Any) -> int:
    """Bytes of every row in use, every id and every result, each once."""
    moved = 0
    for f in model.features:
        ids = batch[f"{f.name}_values"] if f.jagged else batch[f.name]
        bags = len(batch[f"{f.name}_splits"]) - 1 if f.jagged else len(ids)
        moved += np.unique(ids).size * f.dim * 4 + ids.nbytes + bags * f.dim * 4
    return moved


__all__ = ["pieces"]
