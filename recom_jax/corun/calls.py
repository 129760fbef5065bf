"""What co-running adds to the user's own equations: `begin` in front of a step, `mark` where a stage ends.

Both are custom calls that are not part of command buffers: they act on the streams anew in each step. `begin` is a
program of its own, so that the step is the user's, as it stands: its batch is an argument like any other, which XLA
reads where the kernels wrote it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from recom_jax import compat, ffi
from recom_jax.errors import PipelineError

_LOCAL = threading.local()
_emulated = False  # tests: markers on the CPU as on a GPU


def begin(token: Any) -> Any:
    """In a jitted function: a step begins with the batch in the slot that the token stands for.

    What runs behind it on the device may read that batch's place until the next `begin`.

    Args:
      token: (16,) uint8, see `runtime.PrepRuntime.token`.

    Returns:
      (16,) uint8 that hold nothing; an operand of the step, which so comes behind.
    """
    return begin_p.bind(token)[0]


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
begin_p = compat.Primitive("recom_corun_begin")
own_p = compat.Primitive("recom_corun_own")


def _lower_take(ctx: Any, token: Any, *, kinds: Any) -> Any:
    del kinds
    return jax.ffi.ffi_lowering(ffi.TAKE, has_side_effect=True)(ctx, token)


def _lower_begin(ctx: Any, token: Any) -> Any:
    return jax.ffi.ffi_lowering(ffi.BEGIN, has_side_effect=True)(ctx, token)


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
    begin_p,
    abstract_eval=lambda token: [token],
    jvp=_never,
    batch=_never,
    lower_cpu=_lower_begin,
    lower_cuda=_lower_begin,
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
def marking(names: frozenset[str]) -> Iterator[None]:
    """Within it, in this thread, stage markers of these names are lowered to calls that start preprocessing kernels.

    Each parts a command buffer in two, which costs the host time: so only those that start something are named.
    """
    before: frozenset[str] = getattr(_LOCAL, "on", frozenset())
    _LOCAL.on = names
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
    on = name in getattr(_LOCAL, "on", frozenset())
    cpu = ctx.module_context.platforms[0] == "cpu"
    off = getattr(_LOCAL, "off", False) or (cpu and not _emulated)
    if off or not operands or compat.module_devices(ctx) > 1:
        return operands
    # One array stands for all, the smallest: XLA has it in memory anyway, and passes it on without a copy, or a
    # cheap one.
    sizes = {k: math.prod(a.shape) * a.dtype.itemsize for k, a in enumerate(ctx.avals_in)}
    k = min((k for k in sizes if sizes[k]), key=lambda k: sizes[k], default=None)
    if k is None:
        return operands
    inner = ctx.replace(avals_in=[ctx.avals_in[k]], avals_out=[ctx.avals_out[k]])
    if on:
        rule = jax.ffi.ffi_lowering(ffi.MARK, operand_output_aliases={0: 0}, has_side_effect=True)
        made = rule(inner, operands[k], name=name)
    else:
        made = jax.ffi.ffi_lowering(ffi.PASS, operand_output_aliases={0: 0})(inner, operands[k])
    return [*operands[:k], *made, *operands[k + 1 :]]
