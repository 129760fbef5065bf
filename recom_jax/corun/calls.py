"""Custom calls of co-running: markers, where a stage ends, `take`, a copy of a batch, and `stream`.

Markers that record an event are part of command buffers; the others act on the streams anew each time. The step itself
is the user's, as it stands: its batch is an argument like any other, which XLA reads where the kernels wrote it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax import compat, ffi
from recom_jax.errors import PipelineError

_LOCAL = threading.local()
MOST_ASKED = 16  # arrays of a marker whose first elements are read
TIED = 4  # arrays of a marker as large as the largest, to within this factor, are tied to it
_emulated = False  # tests: markers on the CPU as on a GPU


def stream(token: Any) -> Any:
    """In a jitted function: tells the token's runtime on which stream XLA runs; returns nothing of use.

    Args:
      token: (16,) uint8, see `runtime.PrepRuntime.token`.
    """
    return stream_p.bind(token)[0]


def own(leaves: Sequence[Any]) -> list[Any]:
    """In a jitted function: the same arrays, but not its arguments: JAX returns those as they are, not as copies, and
    their memory is written again."""
    return list(own_p.bind(*leaves)) if leaves else []


def take(token: Any, like: Sequence[Any]) -> list[Any]:
    """In a jitted function: the leaves of the batch in the slot that the token stands for.

    Args:
      token: (16,) uint8, see `runtime.PrepRuntime.token`; like: their shapes and dtypes.
    """
    if not like:
        return []
    kinds = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in like)
    return list(take_p.bind(token, kinds=kinds))


# A primitive of ours, not `jax.ffi.ffi_call` with a side effect: JAX dispatches programs with effects in Python, which
# takes it milliseconds a step. XLA is told of the effect all the same.
take_p = compat.Primitive("recom_corun_take")
stream_p = compat.Primitive("recom_corun_stream")
own_p = compat.Primitive("recom_corun_own")


def _lower_take(ctx: Any, token: Any, *, kinds: Any) -> Any:
    del kinds
    return jax.ffi.ffi_lowering(ffi.TAKE, has_side_effect=True)(ctx, token)


def _lower_stream(ctx: Any, token: Any) -> Any:
    return jax.ffi.ffi_lowering(ffi.STREAM, has_side_effect=True)(ctx, token)


def _never(*_: Any, **__: Any) -> Any:
    raise PipelineError(
        "a co-run step takes its batch once, under no transformation: differentiate or batch inside the step itself"
    )


compat.register_primitive(
    take_p,
    abstract_eval=lambda _, *, kinds: list(kinds),
    jvp=_never,
    batch=_never,
    lower_cpu=_lower_take,
    lower_cuda=_lower_take,
    lower_default=_never,
)
compat.register_primitive(
    stream_p,
    abstract_eval=lambda token: [token],
    jvp=_never,
    batch=_never,
    lower_cpu=_lower_stream,
    lower_cuda=_lower_stream,
    lower_default=_never,
)
compat.register_primitive(
    own_p,
    abstract_eval=lambda *leaves: list(leaves),
    jvp=_never,
    batch=_never,
    lower_cpu=lambda _, *leaves: list(leaves),
    lower_cuda=lambda _, *leaves: list(leaves),
    lower_default=lambda _, *leaves: list(leaves),
)


@contextlib.contextmanager
def marking(names: frozenset[str], in_graphs: bool = True) -> Iterator[None]:
    """Within it, in this thread, stage markers of these names are lowered to calls that start preprocessing kernels.

    in_graphs: they record an event, as a part of command buffers. Otherwise they tell the host each time, and part a
    command buffer in two, which costs the step microseconds.
    """
    before: dict[str, str] = getattr(_LOCAL, "on", {})
    _LOCAL.on = dict.fromkeys(names, ffi.EVENT if in_graphs else ffi.MARK)
    try:
        yield
    finally:
        _LOCAL.on = before


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Within it, in this thread, steps are compiled as if they had no markers: what those cost can be measured."""
    before = getattr(_LOCAL, "off", False)
    _LOCAL.off = True
    try:
        yield
    finally:
        _LOCAL.off = before


def lower_mark(ctx: Any, *operands: Any, name: str) -> Any:
    """The marker's lowering: a call that returns its operand's memory.

    Within `marking` it starts preprocessing kernels. Otherwise it does nothing, and is part of command buffers; it is
    there so that XLA compiles the step alike: a co-run step must give the bits of the user's own. Over several
    devices, and on CPUs, where steps are not changed, it is nothing.
    """
    target: str | None = getattr(_LOCAL, "on", {}).get(name)
    on = target is not None
    cpu = ctx.module_context.platforms[0] == "cpu"
    off = getattr(_LOCAL, "off", False) or (cpu and not _emulated)
    if off or not operands or compat.module_devices(ctx) > 1:
        return operands
    found = chosen(ctx.avals_in)
    if found is None:
        return operands
    k, others, tied = found
    asked = [operands[j] for j in others]
    kinds = [ctx.avals_in[j] for j in others]
    avals, own = [ctx.avals_in[k]], [operands[k]]
    if others:
        avals.append(jax.core.ShapedArray((len(others),), np.dtype(np.uint8)))
        own += compat.lower_as(ctx, first_elements, asked, kinds, avals[1:])
    aliases = {n: n for n in range(len(own))}
    rule = jax.ffi.ffi_lowering(
        target or ffi.PASS, operand_output_aliases=aliases, has_side_effect=on
    )
    extra: dict[str, Any] = {"name": name} if on else {}
    made = list(rule(ctx.replace(avals_in=avals, avals_out=avals), *own, **extra))
    results = list(operands)
    results[k] = made[0]
    if tied:
        kinds = [ctx.avals_in[j] for j in tied]
        behind = [operands[j] for j in tied]
        behind = compat.lower_as(ctx, tied_to, [made[1], *behind], [avals[1], *kinds], kinds)
        for j, x in zip(tied, behind, strict=True):
            results[j] = x
    return results


def chosen(avals: Sequence[Any]) -> tuple[int, list[int], list[int]] | None:
    """Of a marker's arrays: the one that is passed on, those that are asked for as well, and those that are tied.

    None if all are empty. The smallest is passed on: XLA has it in memory anyway, and passes it on without a copy, or
    a cheap one. Alone it would say that a stage has ended as soon as *it* is there: of gradients, when the backward
    pass has hardly begun. So the first elements of others are read in front of the call: those of the largest, which
    take longest. And XLA would go on with large ones before the call, to let go of their memory: they are tied to it.
    """
    sizes = {
        k: math.prod(a.shape) * a.dtype.itemsize
        for k, a in enumerate(avals)
        if not jnp.issubdtype(a.dtype, jax.dtypes.extended)
    }
    there = sorted((k for k in sizes if sizes[k]), key=lambda k: sizes[k])
    if not there:
        return None
    asked = there[1:][-MOST_ASKED:]
    tied = [k for k in asked if TIED * sizes[k] >= sizes[asked[-1]]]
    return there[0], sorted(asked), sorted(tied)


def first_elements(*arrays: Any) -> list[Any]:
    """(n,) uint8: whether the first element of each array is 0. One small kernel reads them all."""
    firsts = [jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(1) for x in arrays]
    return [jnp.concatenate([(x != x.dtype.type(0)).astype(np.uint8) for x in firsts])]


def tied_to(bits: Any, *arrays: Any) -> list[Any]:
    """The arrays, as something that is computed behind `bits`: XLA doesn't know that they are 0 or 1.

    A select, as it becomes part of the kernels that read the arrays: those are not written once more.
    """
    never = bits[0] == 255
    return [jnp.where(never, jnp.zeros_like(x), x) for x in arrays]
