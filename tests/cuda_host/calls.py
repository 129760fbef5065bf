"""The fused calls of a function, lowered for CUDA here, as call frames."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.export
import numpy as np

import recom_jax
from recom_jax import _recom, lowering
from recom_jax.cuda import kernel
from recom_jax.options import Options
from tests.cuda_host import Call

_DTYPES = _recom.constants()["dtype"]


def captured(host: Any, fn: Callable[..., Any], *args: Any, **options: Any) -> Call:
    """The one fused call of `fn`."""
    (found,) = lowered(fn, *args, **options)
    return Call(host, *found)


def lowered(fn: Callable[..., Any], *args: Any, **options: Any) -> list[tuple[Any, Any, Any]]:
    """(operands, results, attributes) of each fused call of `fn`."""
    found: list[tuple[Any, Any, Any]] = []
    original = lowering._lower_call

    def kind(aval: Any) -> tuple[int, tuple[int, ...]]:
        return _DTYPES[str(np.dtype(aval.dtype))], tuple(aval.shape)

    def spy(ctx: Any, operands: Any, call: Any, scratch: Any = (), **more: Any) -> Any:
        results = [kind(x) for x in ctx.avals_out]
        results += [kind(jax.core.ShapedArray((n,), np.dtype(np.uint8))) for n in scratch]
        attributes = {k: v for k, v in more.items() if k != "target"}
        attributes.update(program=call.encoded.words, hash=call.encoded.digest)
        found.append(([kind(x) for x in ctx.avals_in[: call.n_physical]], results, attributes))
        return original(ctx, operands, call, scratch=scratch, **more)

    optimized = recom_jax.optimize(fn, options=Options(**options))

    def image(source: str, *_: Any) -> bytes:  # the driver here does not look at it
        return hashlib.sha256(source.encode()).hexdigest().encode()

    with (
        mock.patch.object(lowering, "_lower_call", spy),
        mock.patch.object(kernel, "_image", image),
        mock.patch.object(kernel, "_MADE", type(kernel._MADE)()),
    ):
        jax.export.export(jax.jit(optimized), platforms=("cuda",))(*args)
    return found
