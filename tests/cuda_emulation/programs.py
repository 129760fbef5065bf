"""Runs programs, and whole functions, with their fused calls emulated."""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import recom_jax
from recom_jax import _recom, compat, cpu, pipeline, trace
from recom_jax.lowering import fused_p
from recom_jax.program import Program
from tests.cuda_emulation.build import POINTED, POINTERS, EmulationError, kernel, memory
from tests.cuda_emulation.tiles import Launch, Place, plan

Array = np.ndarray[Any, Any]
Executor = Callable[[Program, Sequence[Array], Sequence[Array]], list[Array]]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a program is run.

    Attributes:
      tiles: "real" (csrc/cuda_plan.cc), "unaligned" (its other tiles, on buffers that allow no wide accesses),
        "simple" (one tile a unit) or a seed for tiles of arbitrary shapes.
      order: of threads, see `Kernel.launch`.
      pointers: buffers a launch may name; 0: any number, in a table.
      sms: multiprocessors that the real plan spreads its tiles over.
      slice_positions: least positions of a jagged bag's slice in the real plan, 0: as the plan likes.
      schedule: of the kernel and the real plan; None: the untuned one.
      search: segment ids of a column from which on tiles search them in the real plan, 0: as the plan likes, -1: none.
      mended: whether the kernel that mends runs.
      flags: more flags of the C++ compiler.
    """

    tiles: str | int = "real"
    order: int = 0
    pointers: int = POINTERS
    sms: int = 4
    slice_positions: float = 0.0
    schedule: Any = None
    search: int = 0
    mended: bool = True
    flags: tuple[str, ...] = ()


def interpret(program: Program, operands: Sequence[Array], results: Sequence[Array]) -> list[Array]:
    """The oracle: the program on the CPU."""
    binding = np.array([w for k in range(len(operands)) for w in (k, -1)], np.int64)
    out = [np.empty(a.shape, a.dtype) for a in results]
    for a in out:
        a.reshape(-1).view(np.uint8)[...] = 0xA5
    _recom.run_program(cpu.encode(program).words, binding, list(operands), out, 2)
    return out


def emulate(
    program: Program,
    operands: Sequence[Array],
    results: Sequence[Array],
    options: Options = Options(),
    layout: Sequence[Place] | None = None,
) -> list[Array]:
    """The generated kernel's results.

    Args:
      operands: the physical ones; the virtual ones too where `layout` is None.
      results: arrays of the results' shapes and dtypes.
      layout: per virtual operand, where it lies.
    """
    from recom_jax.cuda.codegen import DEFAULT, generate
    from recom_jax.cuda.kernel import FOUND_BYTES, searches

    text = generate(program, options.schedule or DEFAULT)
    if layout is None:
        places = [Place(k, 0, a.shape) for k, a in enumerate(operands)]
    else:
        places = list(layout)
    found = [np.empty(FOUND_BYTES, np.uint8)] * (searches(text.launch) and options.search >= 0)
    launches = _launches(
        program, text.launch, operands, [*results, *found], places, layout, options
    )
    compiled = kernel(text.source, pointers=options.pointers, extra=options.flags)
    m = memory(operands, [*results, *found], shifted=options.tiles == "unaligned")
    regions = list(m.regions)
    for launch in launches:
        if len(launch.buffers) > options.pointers > 0:
            raise EmulationError(f"a launch of {len(launch.buffers)} buffers")
        if launch.grid == 0:
            continue
        pointers = [regions[b].base for b in launch.buffers]
        # Buffers that the launch doesn't name are null, and no other launch's.
        pointers += [0] * (options.pointers - len(pointers))
        if options.pointers == 0:
            pointers = [m.add(fill_table(pointers))]
        head = m.add(launch.tiles), m.add(launch.words)
        params = struct.pack(f"<{2 + len(pointers)}Q", *head, *pointers)
        compiled.launch(params, launch.grid, m, order=options.order)
        if launch.mends and options.mended:
            m.forget()
            m.readable(len(operands) + len(results))
            tiles = struct.pack("<Q", m.add(launch.mends))
            grid = len(launch.mends) // 32
            compiled.launch(tiles + params[8:], grid, m, order=options.order, entry="emu_mend")
    for a, b in zip(operands, m.arrays, strict=False):
        assert a.tobytes() == b.tobytes(), "an operand changed"
    return [a.copy() for a in m.arrays[len(operands) : len(operands) + len(results)]]


def fill_table(addresses: Sequence[int], order: int = 0) -> bytes:
    """What `recom_point` makes of addresses, launch by launch."""
    fill = kernel('#include "recom_tile.cuh"', "recom_point", "recom_cuda::Pointing", pointers=0)
    m = memory([], [np.empty(len(addresses), np.uint64)])
    (table,) = m.regions
    for at in range(0, len(addresses), POINTED):
        some = addresses[at : at + POINTED]
        rest = [0] * (POINTED - len(some))
        params = struct.pack(f"<{2 + POINTED}Q", table.base + 8 * at, len(some), *some, *rest)
        fill.launch(params, -(-len(some) // 256), m, order=order)
    return m.arrays[0].tobytes()


def _launches(
    program: Program,
    launch: bytes,
    operands: Sequence[Array],
    results: Sequence[Array],
    places: Sequence[Place],
    layout: Sequence[Place] | None,
    options: Options,
) -> list[Launch]:
    if options.tiles not in ("real", "unaligned"):
        out = [Place(len(operands) + k, 0, a.shape) for k, a in enumerate(results)]
        rng = random.Random(options.tiles) if isinstance(options.tiles, int) else None
        at = [dataclasses.replace(p, offset=max(p.offset, 0)) for p in places]
        return [plan(program, at, out, rng)]
    words: list[int] = []
    for p in places:
        whole = layout is None or p.offset < 0
        words += [p.buffer, -1, 0] if whole else [p.buffer, p.offset, len(p.shape), *p.shape]
    made = _recom.cuda_plan(
        cpu.encode(program).words,
        launch,
        np.array(words, np.int64),
        [_type(a) for a in operands],
        [_type(a) for a in results],
        options.sms,
        options.pointers,
        options.slice_positions,
        max(options.search, 0),
    )
    kind, mends = "tiles", "mends"
    if options.tiles != "real":
        kind, mends = "unaligned", "unaligned_mends"
    return [Launch(x[kind], x["words"], tuple(x["buffers"]), x[mends]) for x in made["launches"]]


def _type(a: Array) -> tuple[int, list[int]]:
    return _recom.constants()["dtype"][a.dtype.name], list(a.shape)


def packed(operands: Sequence[Array], chosen: Sequence[int]) -> tuple[list[Array], list[Place]]:
    """The operands with the chosen ones in one pack; and where each of them is then.

    The header, which the GPU does not read, holds garbage.
    """
    physical: list[Array] = [np.zeros(0, np.uint8)]
    places, data = [], b"\xa5" * 128
    for k, a in enumerate(operands):
        if k in chosen:
            places.append(Place(0, len(data), a.shape))
            data += a.tobytes()
            data += b"\xa5" * (-len(data) % 64)
        else:
            places.append(Place(len(physical), -1, a.shape))
            physical.append(a)
    physical[0] = np.frombuffer(data, np.uint8)
    return physical, places


# ---- functions ---------------------------------------------------------------------------------------------------


class _Info:
    """Debug information for an equation on its own."""

    debug_info = compat.debug_info("one equation")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A function, its fused calls ready for any executor."""

    compiled: pipeline.Compiled
    args: list[Any]

    @property
    def programs(self) -> list[Program]:
        return [s.program for _, s, _ in self.compiled.calls]

    def run(self, executor: Executor) -> Any:
        """The function's result; `executor(program, operands, like results)` runs fused calls."""
        by_digest = {e.digest: s.program for _, s, e in self.compiled.calls}
        closed = self.compiled.jaxpr
        jaxpr, env = closed.jaxpr, {}
        env.update(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, self.args, strict=True))

        def read(v: Any) -> Any:
            return v.val if hasattr(v, "val") else env[v]

        for eqn in jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            if eqn.primitive is fused_p:
                call = eqn.params["call"]
                operands = [np.ascontiguousarray(x) for x in values[: call.n_physical]]
                like = [np.empty(a.shape, a.dtype) for a in call.out_avals]
                out = [
                    jax.numpy.asarray(x)
                    for x in executor(by_digest[call.encoded.digest], operands, like)
                ]
            else:
                inputs = [v for v in eqn.invars if not hasattr(v, "val")]
                alone = compat.closed([], inputs, eqn.outvars, [eqn], [], _Info())
                out = compat.jaxpr_as_fun(alone)(*(env[v] for v in inputs))
            env.update(zip(eqn.outvars, out, strict=True))
        leaves = [read(v) for v in jaxpr.outvars]
        return jax.tree_util.tree_unflatten(self.compiled.traced.out_tree, leaves)


def compiled(fn: Callable[..., Any], *args: Any, **options: Any) -> Compiled:
    leaves, tree = jax.tree_util.tree_flatten(args)

    def flat(*leaves: Any) -> Any:
        return fn(*jax.tree_util.tree_unflatten(tree, leaves))

    traced = trace.trace(flat, leaves, tuple(f"a{k}" for k in range(len(leaves))))
    made = pipeline.compile_jaxpr(traced, recom_jax.Options(verify=True, **options))
    return Compiled(made, [jax.numpy.asarray(x) for x in leaves])
