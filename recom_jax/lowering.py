"""Stage 7: the fused primitive.

One equation stands for all columns of a level. It carries the encoded program and, as `fallback`, the equations
it replaces: on platforms without a target, over several devices, under differentiation and batching, these are
what counts, so the answer is right wherever plain JAX's is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
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
      alone: whether it reads a slot's token (`stage`), and so stays out of CUDA graphs.
      layout: what `binding` is on CUDA, where a pack's header is not read (docs/cuda_target.md).
      program: what `encoded` encodes.
      closed: `fallback` as a jaxpr, so that an optimized function inside another is compiled as one.
      constants: arrays that the compiler knew, by position among the operands.
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
    alone: bool = False
    closed: Any = None
    constants: Mapping[int, Any] = dataclasses.field(default_factory=dict)

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


def is_partitioned(ctx: Any) -> bool:
    if compat.module_devices(ctx) <= 1:
        return False
    warn_once(
        "recom_jax: a module over several devices outside shard_map runs its embedding columns unfused; "
        "wrap the model in jax.shard_map over the batch to fuse them"
    )
    return True


def _lower_call(
    ctx: Any, operands: Sequence[Any], call: FusedCall, scratch: Sequence[int] = (),
    target: str = ffi.FUSED, **attributes: Any,
) -> Any:  # fmt: skip
    """The custom call; `scratch`: bytes of memory for each execution, last results that nobody reads."""
    rule = jax.ffi.ffi_lowering(target)
    outs = list(ctx.avals_out)
    outs += [jax.core.ShapedArray((n,), np.dtype(np.uint8)) for n in scratch]
    results = rule(
        ctx.replace(avals_in=ctx.avals_in[: call.n_physical], avals_out=outs),
        *operands[: call.n_physical],
        program=call.encoded.words,
        hash=call.encoded.digest,
        **attributes,
    )
    return results[: len(ctx.avals_out)]


def lower_cpu(ctx: Any, *operands: Any, call: FusedCall) -> Any:
    if is_partitioned(ctx):
        return _lower_fallback(ctx, *operands, call=call)
    return _lower_call(ctx, operands, call, binding=np.array(call.binding, np.int64))


_UNFUSED_ON_CUDA: dict[str, str] = {}


def unfused_on_cuda(digest: str) -> str:
    """Why the last lowering of a program for CUDA fell back to plain JAX; "" if it did not, or there was none."""
    return _UNFUSED_ON_CUDA.get(digest, "")


def lower_cuda(ctx: Any, *operands: Any, call: FusedCall) -> Any:
    if is_partitioned(ctx):
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
    layout = np.array(call.layout, np.int64)
    more: dict[str, Any] = {}
    if call.alone:
        key = hashlib.sha256(made.launch + layout.tobytes()).hexdigest()
        more = {"target": ffi.ALONE, "key": key}
    return _lower_call(
        ctx,
        operands,
        call,
        scratch=kernel.scratch_of(made, n_buffers),
        launch=made.launch,
        ptx=made.image,
        digest=made.digest,
        layout=layout,
        pointers=np.int64(made.pointers),
        **more,
    )


def lower_default(ctx: Any, *operands: Any, call: FusedCall) -> Any:
    warn_once(
        "recom_jax: this platform has no fused target yet; embedding columns run as plain JAX"
    )
    return _lower_fallback(ctx, *operands, call=call)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: FusedCall
) -> tuple[list[Any], list[Any]]:
    """Fused forward; the tangent is fused where it is linear in tables (`backward`), else the original columns'."""
    from recom_jax import backward

    out = fused_p.bind(*primals, call=call)
    live = [k for k, t in enumerate(tangents) if not compat.is_zero_tangent(t)]
    moved: list[Any] = backward.jvp(call, primals, tangents, live) if live else [None] * len(out)
    return out, [
        compat.zero_tangent(o) if t is None else t for o, t in zip(out, moved, strict=True)
    ]


def _transpose(cotangents: Sequence[Any], *operands: Any, call: FusedCall) -> list[Any]:
    """Of a function that is linear as it was written; JAX's own rules know whether it is."""
    lines = [k for k, x in enumerate(operands) if compat.is_undefined(x)]

    def original(*moving: Any) -> list[Any]:
        full = list(operands)
        for k, value in zip(lines, moving, strict=True):
            full[k] = value
        return call.fallback(*full)

    full = [compat.instantiate_zeros(t) for t in cotangents]
    made = jax.linear_transpose(original, *(operands[k].aval for k in lines))(full)
    out: list[Any] = [None] * len(operands)
    for k, t in zip(lines, made, strict=True):
        out[k] = t
    return out


def batched(fn: Callable[..., Any], axis_data: Any, dims: Sequence[Any]) -> Callable[..., Any]:
    """vmap of a flat function as a batching rule is asked for it; results are batched along axis 0."""
    return jax.vmap(
        fn,
        in_axes=tuple(dims),
        out_axes=0,
        axis_size=axis_data.size,
        axis_name=axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )


def _batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, call: FusedCall
) -> tuple[list[Any], list[Any]]:
    """vmap of the original columns, put through the compiler again."""
    from recom_jax.api import fuse_flat

    if all(d is None for d in dims):  # nothing of this call is batched
        return list(fused_p.bind(*args, call=call)), [None] * len(call.out_avals)
    many = batched(call.fallback, axis_data, dims)
    outs = many(*args) if call.packed else fuse_flat(many, args, call.options)
    return list(outs), [0] * len(outs)


compat.register_primitive(
    fused_p,
    abstract_eval=_abstract_eval,
    jvp=_jvp,
    batch=_batch,
    lower_cpu=lower_cpu,
    lower_cuda=lower_cuda,
    lower_default=lower_default,
)
compat.register_transpose(fused_p, _transpose)
compat.register_checks(fused_p, lambda *operands, call: call.fallback(*operands))
