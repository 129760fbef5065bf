"""Stage 7: the fused primitive.

One equation stands for all columns of a level. It carries the encoded program and, as `fallback`, the equations
it replaces: on platforms without a target, over several devices, under differentiation and batching, these are
what counts, so the answer is right wherever plain JAX's is.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, ffi
from recom_jax.cpu import Encoded
from recom_jax.errors import RecomError
from recom_jax.program import Program


@dataclasses.dataclass(frozen=True, eq=False)
class FusedCall:
    """The parameters of a fused equation. Compared by identity: JAX caches on it.

    Attributes:
      encoded: the program.
      binding: two words per virtual operand of the program: physical operand, entry of a pack or -1.
      n_physical: leading operands the custom call takes; operands behind them only the fallback reads.
      fallback: the replaced equations as a function of all operands, returning a list.
      options: how it was made, for the calls that batching makes of it.
      packed: whether it reads packs (a bound call).
      layout: what `binding` is on CUDA, where a pack's header is not read (docs/cuda_target.md).
      program: what `encoded` encodes.
      closed: `fallback` as a jaxpr, so that an optimized function inside another is compiled as one.
    """

    encoded: Encoded
    binding: tuple[int, ...]
    n_physical: int
    out_avals: tuple[Any, ...]
    fallback: Callable[..., list[Any]]
    options: Any
    layout: tuple[int, ...]
    program: Program
    packed: bool = False
    closed: Any = None

    def __repr__(self) -> str:
        return f"<{len(self.encoded.words)} bytes, {self.encoded.digest[:12]}>"


fused_p = compat.Primitive("recom_fused")
_WARNED: set[str] = set()
_LOCK = threading.Lock()


def warn_once(message: str) -> None:
    with _LOCK:
        if message in _WARNED:
            return
        _WARNED.add(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _abstract_eval(*_: Any, call: FusedCall) -> list[Any]:
    return list(call.out_avals)


def _lower_fallback(ctx: Any, *operands: Any, call: FusedCall) -> Any:
    return compat.lower_fun(call.fallback)(ctx, *operands)


def _is_partitioned(ctx: Any) -> bool:
    if compat.module_devices(ctx) <= 1:
        return False
    warn_once(
        "recom_jax: a module over several devices outside shard_map runs its embedding columns unfused; "
        "wrap the model in jax.shard_map over the batch to fuse them"
    )
    return True


def _lower_call(ctx: Any, operands: Sequence[Any], call: FusedCall, **attributes: Any) -> Any:
    rule = jax.ffi.ffi_lowering(ffi.FUSED)
    return rule(
        ctx.replace(avals_in=ctx.avals_in[: call.n_physical]),
        *operands[: call.n_physical],
        program=call.encoded.words,
        hash=call.encoded.digest,
        **attributes,
    )


def _lower_cpu(ctx: Any, *operands: Any, call: FusedCall) -> Any:
    if _is_partitioned(ctx):
        return _lower_fallback(ctx, *operands, call=call)
    return _lower_call(ctx, operands, call, binding=np.array(call.binding, np.int64))


_UNFUSED_ON_CUDA: dict[str, str] = {}


def unfused_on_cuda(digest: str) -> str:
    """Why the last lowering of a program for CUDA fell back to plain JAX; "" if it did not, or there was none."""
    return _UNFUSED_ON_CUDA.get(digest, "")


def _lower_cuda(ctx: Any, *operands: Any, call: FusedCall) -> Any:
    if _is_partitioned(ctx):
        return _lower_fallback(ctx, *operands, call=call)
    from recom_jax.cuda import kernel, tune  # costs nothing where there is no GPU

    try:
        n_buffers = call.n_physical + len(call.out_avals)
        portable = compat.is_export(ctx)
        made = kernel.kernel_for(
            call.program, call.encoded.digest, n_buffers, call.options, portable=portable
        )
        if call.options.tune and not portable:
            made = kernel.kernel_for(
                call.program,
                call.encoded.digest,
                n_buffers,
                call.options,
                schedule=tune.schedule_for(made, call, ctx.avals_in),
            )
    except Exception as why:  # any defect costs the fusion, never the user's call
        if not isinstance(why, RecomError) and call.options.verifies:
            raise
        reason = str(why) if isinstance(why, RecomError) else f"{type(why).__name__}: {why}"
        _UNFUSED_ON_CUDA[call.encoded.digest] = reason
        warn_once(
            f"recom_jax: no fused kernel for CUDA, embedding columns run as plain JAX: {reason}"
        )
        return _lower_fallback(ctx, *operands, call=call)
    _UNFUSED_ON_CUDA.pop(call.encoded.digest, None)
    return _lower_call(
        ctx,
        operands,
        call,
        launch=made.launch,
        ptx=made.image,
        digest=made.digest,
        layout=np.array(call.layout, np.int64),
        pointers=np.int64(made.pointers),
    )


def _lower_default(ctx: Any, *operands: Any, call: FusedCall) -> Any:
    warn_once(
        "recom_jax: this platform has no fused target yet; embedding columns run as plain JAX"
    )
    return _lower_fallback(ctx, *operands, call=call)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: FusedCall
) -> tuple[list[Any], list[Any]]:
    """Fused forward; the tangent differentiates the original columns, so any order of derivative is JAX's."""
    out = fused_p.bind(*primals, call=call)
    live = [k for k, t in enumerate(tangents) if not compat.is_zero_tangent(t)]
    if not live:
        return out, [compat.zero_tangent(o) for o in out]

    def original(*moving: Any) -> list[Any]:
        full = list(primals)
        for k, value in zip(live, moving, strict=True):
            full[k] = value
        return call.fallback(*full)

    _, moved = jax.jvp(original, tuple(primals[k] for k in live), tuple(tangents[k] for k in live))
    return out, [
        compat.zero_tangent(o) if t.dtype == jax.dtypes.float0 else t
        for o, t in zip(out, moved, strict=True)
    ]


def _batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, call: FusedCall
) -> tuple[list[Any], list[Any]]:
    """vmap of the original columns, put through the compiler again."""
    from recom_jax.api import fuse_flat

    if all(d is None for d in dims):  # nothing of this call is batched
        return list(fused_p.bind(*args, call=call)), [None] * len(call.out_avals)
    batched = jax.vmap(
        call.fallback,
        in_axes=tuple(dims),
        out_axes=0,
        axis_size=axis_data.size,
        axis_name=axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )
    outs = batched(*args) if call.packed else fuse_flat(batched, args, call.options)
    return list(outs), [0] * len(outs)


compat.register_primitive(
    fused_p,
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    batch=_batch,
    lower_cpu=_lower_cpu,
    lower_cuda=_lower_cuda,
    lower_default=_lower_default,
)
