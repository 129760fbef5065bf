"""Kernel time of a fused call on a GPU, by device events around raw launches: no JAX dispatch in it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax import _recom, compat, ffi, pipeline
from recom_jax.cpu import encode
from recom_jax.cuda import codegen, nvrtc
from recom_jax.cuda import kernel as cuda_kernel
from recom_jax.options import Options
from recom_jax.program import Program
from recom_jax.trace import trace


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One fused call, ready to be launched on arrays of this device."""

    program: Program
    generated: codegen.Generated
    operands: tuple[jax.Array, ...]
    results: tuple[jax.Array, ...]
    pointers: int
    found: tuple[jax.Array, ...] = ()  # memory for what tiles that search segment ids find

    @property
    def operand_bytes(self) -> int:
        return sum(x.nbytes for x in self.operands)

    @property
    def result_bytes(self) -> int:
        return sum(x.nbytes for x in self.results)


def kernel_of(fn: Any, *args: Any, options: Options | None = None) -> Kernel:
    """The kernel of a function whose columns make one call that reads the arguments themselves.

    Raises:
      ValueError: the function makes several calls, or one reads what XLA computes.
    """
    args = jax.device_put(args)
    leaves, tree = jax.tree_util.tree_flatten(args)

    def flat(*xs: Any) -> list[Any]:
        return jax.tree_util.tree_leaves(fn(*jax.tree_util.tree_unflatten(tree, xs)))

    traced = trace(flat, leaves, tuple(f"leaf {k}" for k in range(len(leaves))))
    compiled = pipeline.compile_jaxpr(traced, options or Options())
    if len(compiled.calls) != 1:
        raise ValueError(f"{len(compiled.calls)} fused calls, expected 1")
    scheduled = compiled.calls[0][1]
    inner = compat.open_jaxpr(compiled.jaxpr)
    where = {id(v): x for v, x in zip(inner.invars, leaves, strict=True)}
    where |= {
        id(v): jnp.asarray(c) for v, c in zip(inner.constvars, compiled.jaxpr.consts, strict=True)
    }
    missing = [v for v in scheduled.operands if id(v) not in where]
    if missing:
        raise ValueError(f"the call reads {len(missing)} values that XLA computes")
    operands = tuple(jax.device_put(where[id(v)]) for v in scheduled.operands)
    results = tuple(jnp.full(o.var.aval.shape, 7, o.var.aval.dtype) for o in scheduled.outputs)
    jax.block_until_ready((operands, results))
    made = codegen.generate(scheduled.program)
    found: tuple[jax.Array, ...] = ()
    if cuda_kernel.searches(made.launch):
        found = (jax.block_until_ready(jnp.zeros(cuda_kernel.FOUND_BYTES, jnp.uint8)),)
    n = len(operands) + len(results) + len(found)
    return Kernel(scheduled.program, made, operands, results, cuda_kernel.bucket(n), found)


@dataclasses.dataclass(frozen=True)
class Timed:
    """Milliseconds per call of each repeat, and what was launched."""

    ms: tuple[float, ...]
    launches: int
    blocks: int

    @property
    def median(self) -> float:
        return float(np.median(self.ms))


def time_kernel(
    kernel: Kernel,
    *,
    calls: int = 20,
    repeats: int = 11,
    flush: int = 0,
    sms: int | None = None,
    slice_positions: float = 0,
    schedule: codegen.Schedule | None = None,
    vectors: bool = True,
    search: int = 0,
) -> Timed:
    """Times the kernel, and the one that mends behind it, if any.

    `flush`: bytes of device memory overwritten before each repeat (0: caches stay warm).
    `schedule`: another than the untuned one; `vectors`: whether rows are read and written in whole vectors.
    `search`: segment ids of a column from which on tiles search them, 0: as the plan likes, -1: none.
    """
    made = codegen.generate(kernel.program, schedule) if schedule else kernel.generated
    found = kernel.found if search >= 0 else ()
    c = ffi.extension().constants()["dtype"]
    layout = np.array([x for k in range(len(kernel.operands)) for x in (k, -1, 0)], np.int64)
    plan = _recom.cuda_plan(
        encode(kernel.program).words,
        made.launch,
        layout,
        [(c[str(x.dtype)], list(x.shape)) for x in kernel.operands],
        [(c[str(x.dtype)], list(x.shape)) for x in (*kernel.results, *found)],
        sms or _recom.cuda_info()["devices"][0]["sms"],
        kernel.pointers,
        slice_positions,
        max(search, 0),
    )
    addresses = [x.unsafe_buffer_pointer() for x in (*kernel.operands, *kernel.results, *found)]
    launches = [
        (
            one["tiles" if vectors else "unaligned"],
            one["words"],
            [addresses[b] for b in one["buffers"]],
        )
        for one in plan["launches"]
    ]
    ptx = nvrtc.ptx(made.source, kernel.pointers)
    mends = [one["mends" if vectors else "unaligned_mends"] for one in plan["launches"]]
    ms = _recom.cuda_time(
        ptx.text, kernel.pointers, launches, 0, calls, repeats, flush, mends=mends
    )
    tile = 32
    return Timed(tuple(ms), len(launches), sum(len(t) // tile for t, _, _ in launches))


def error(kernel: Kernel, want: Any, result: int = 0) -> float:
    """Largest difference of what the kernel wrote from `want`, NaN where only one of them is NaN."""
    have = np.asarray(kernel.results[result], np.float64)
    want = np.asarray(want, np.float64)
    if (np.isnan(have) != np.isnan(want)).any():
        return math.nan
    return float(np.nanmax(np.abs(have - want), initial=0))
