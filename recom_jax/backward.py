"""The fused backward: derivatives of a fused call by its tables.

Of a call that is linear in tables (`linear`) the tangent is `recom_tangent`, one fused call in which the tables'
tangents stand in the tables' places. It is linear, and its transpose is `recom_row_sums`, which adds rows of the
cotangents to rows of the tables' gradients, in a fixed order: one custom call on a CPU, a sort between two fused
calls on a GPU (`sorted_sums`). The transpose of that is `recom_tangent` again. So jvp, vjp, linearize and products with
the Hessian all follow from these two.

Each carries the original columns as a fallback: their own derivative, as JAX makes it. It is what vmap batches, what
derivatives by anything but the tables go through (weights, say), and what platforms without the target run.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax import compat, ffi, gate, lowering, sorted_sums
from recom_jax.errors import EncodeError, RecomError
from recom_jax.lowering import FusedCall, warn_once
from recom_jax.row_sums import RowSums


@dataclasses.dataclass(frozen=True, eq=False)
class Pullback:
    """The parameters of both primitives. Operands are `numbers`, then one for each table, or for each result.

    Attributes:
      operands: positions, among the fused call's operands, of those that do not move.
      constants: arrays behind them that the compiler made.
      tables: positions of the tables. results: numbers of the results that depend on them.
      tangent: the fused call of the tangents.
      sums: its transpose, with `binding` for the program of its numbers; `number_call`: that program as a fused call.
      pushed, pulled: the same of the original columns, as functions of the operands that return a list.
      refused: why the fused call is not linear in a table, by its position.
    """

    operands: tuple[int, ...]
    constants: tuple[Any, ...]
    tables: tuple[int, ...]
    results: tuple[int, ...]
    table_avals: tuple[Any, ...]
    tangent: FusedCall
    sums: RowSums
    binding: tuple[int, ...]
    number_call: FusedCall
    pushed: Callable[..., list[Any]]
    pulled: Callable[..., list[Any]]
    refused: Mapping[int, str]

    @property
    def n_numbers(self) -> int:
        return len(self.operands) + len(self.constants)

    def numbers(self, operands: Sequence[Any]) -> list[Any]:
        """The operands that do not move, from those of the fused call."""
        return [*(operands[k] for k in self.operands), *self.constants]

    def __repr__(self) -> str:
        return f"<{len(self.tables)} tables, {len(self.sums.words)} words, {self.sums.encoded.digest[:12]}>"


tangent_p = compat.Primitive("recom_tangent")
row_sums_p = compat.Primitive("recom_row_sums")
_LOCK = threading.Lock()
_KNOWN: weakref.WeakKeyDictionary[FusedCall, dict[tuple[int, ...], Pullback | Mapping[int, str]]]
_KNOWN = weakref.WeakKeyDictionary()


def pullback(call: FusedCall, moving: Sequence[int]) -> Pullback | Mapping[int, str]:
    """What of a call is linear in the operands `moving`; why each of them is not, if none is."""
    key = tuple(moving)
    with _LOCK:
        known = _KNOWN.setdefault(call, {}).get(key)
    if known is None:
        known = _make(call, key)
        with _LOCK:
            _KNOWN[call][key] = known
    return known


def refused(call: FusedCall, moving: Sequence[int], platform: str) -> Mapping[int, str]:
    """Why a derivative by an operand is not fused, by its position; "" where it is. For `explain`."""
    found = pullback(call, moving) if moving else {}
    why = found.refused if isinstance(found, Pullback) else found
    all_of_them = ""
    if platform in ("cuda", "gpu"):
        all_of_them = refused_on_cuda(found) if isinstance(found, Pullback) else ""
    elif platform != "cpu":
        all_of_them = f"on {platform} the backward pass is JAX's own"
    return {k: why.get(k, all_of_them) for k in moving}


def _make(call: FusedCall, moving: Sequence[int]) -> Pullback | Mapping[int, str]:
    if call.closed is None:
        return dict.fromkeys(moving, "a bound model's operands lie in packs")
    avals = [v.aval for v in compat.open_jaxpr(call.closed).invars]
    if any(compat.is_symbolic(n) for a in (*avals, *call.out_avals) for n in a.shape):
        return dict.fromkeys(moving, "a size is symbolic (jax.export)")
    from recom_jax.backward_make import make
    from recom_jax.pipeline import gc_paused

    try:
        with gc_paused():
            return make(call, moving)
    except RecomError as why:
        return dict.fromkeys(moving, str(why))
    except Exception as why:  # a defect of ours costs the fusion, never the user's call
        if call.options.verifies:
            raise
        reason = f"recom_jax failed ({type(why).__name__}: {why}); please report"
        warn_once(f"{reason}. Gradients of fused columns run as plain JAX")
        return dict.fromkeys(moving, reason)


# ---- rules -------------------------------------------------------------------------------------------------------


def jvp(
    call: FusedCall, primals: Sequence[Any], tangents: Sequence[Any], live: Sequence[int]
) -> list[Any]:
    """The tangents of a fused call's results (None: zero), of which `live` operands' are not zero."""
    tables = [k for k in live if len(jnp.shape(primals[k])) >= 2 and _is_float(primals[k])]
    pull = pullback(call, tables) if tables else {}
    if not isinstance(pull, Pullback):
        return original_jvp(call.fallback, primals, tangents, live)
    out: list[Any] = [None] * len(call.out_avals)
    moved = tangent_p.bind(*pull.numbers(primals), *(tangents[k] for k in pull.tables), pull=pull)
    for k, t in zip(pull.results, moved, strict=True):
        out[k] = t
    rest = [k for k in live if k not in pull.tables]
    if rest:
        more = original_jvp(call.fallback, primals, tangents, rest)
        out = [
            b if a is None else a if b is None else a + b for a, b in zip(out, more, strict=True)
        ]
    return out


def original_jvp(
    fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], live: Sequence[int]
) -> list[Any]:
    """Tangents of the original columns, by the operands `live`; None where a result has none."""

    def original(*moving: Any) -> list[Any]:
        full = list(primals)
        for k, value in zip(live, moving, strict=True):
            full[k] = value
        return list(fn(*full))

    _, moved = jax.jvp(original, tuple(primals[k] for k in live), tuple(tangents[k] for k in live))
    return [None if t.dtype == jax.dtypes.float0 else t for t in moved]


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, np.floating))


def _linear_jvp(prim: Any, original: Callable[[Pullback], Any]) -> Callable[..., Any]:
    """The JVP rule of a primitive that is linear in the operands behind the numbers."""

    def rule(
        primals: Sequence[Any], tangents: Sequence[Any], *, pull: Pullback
    ) -> tuple[list[Any], list[Any]]:
        out = prim.bind(*primals, pull=pull)
        n = pull.n_numbers
        zero = [compat.is_zero_tangent(t) for t in tangents]
        moved: list[Any] = [None] * len(out)
        if not all(zero[n:]):
            lines = [compat.instantiate_zeros(t) for t in tangents[n:]]
            moved = list(prim.bind(*primals[:n], *lines, pull=pull))
        numbers = [k for k in range(n) if not zero[k]]
        if numbers:
            more = original_jvp(original(pull), primals, tangents, numbers)
            moved = [
                b if a is None else a if b is None else a + b
                for a, b in zip(moved, more, strict=True)
            ]
        return out, [
            compat.zero_tangent(o) if t is None else t for o, t in zip(out, moved, strict=True)
        ]

    return rule


def _linear_transpose(prim: Any) -> Callable[..., Any]:
    """The transpose of a linear primitive is `prim`, which reads the same numbers."""

    def rule(cotangents: Sequence[Any], *operands: Any, pull: Pullback) -> list[Any]:
        numbers, lines = operands[: pull.n_numbers], operands[pull.n_numbers :]
        if any(map(compat.is_undefined, numbers)):
            raise NotImplementedError("recom_jax: the transpose by the numbers of a linear call")
        full = [compat.instantiate_zeros(t) for t in cotangents]
        made = prim.bind(*numbers, *full, pull=pull)
        return [*[None] * len(numbers), *made][: len(numbers) + len(lines)]

    return rule


def _linear_batch(original: Callable[[Pullback], Any], prim: Any) -> Callable[..., Any]:
    """vmap of the original columns' derivative; tangents go through the compiler again."""

    def rule(
        axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, pull: Pullback
    ) -> tuple[list[Any], list[Any]]:
        if all(d is None for d in dims):
            outs = list(prim.bind(*args, pull=pull))
            return outs, [None] * len(outs)
        many = lowering.batched(original(pull), axis_data, dims)
        if prim is row_sums_p:
            outs = many(*args)
        else:
            from recom_jax.api import fuse_flat

            outs = fuse_flat(many, args, pull.tangent.options)
        return list(outs), [0] * len(outs)

    return rule


# ---- lowering ----------------------------------------------------------------------------------------------------


def _lower_sums(ctx: Any, *operands: Any, pull: Pullback) -> Any:
    if lowering.is_partitioned(ctx):
        return _lower_pulled(ctx, *operands, pull=pull)
    rule = jax.ffi.ffi_lowering(ffi.ROW_SUMS)
    return rule(
        ctx,
        *operands,
        program=pull.sums.encoded.words,
        hash=pull.sums.encoded.digest,
        binding=np.array(pull.binding, np.int64),
        sums=pull.sums.words,
    )


def _lower_sorted(ctx: Any, *operands: Any, pull: Pullback) -> Any:
    if lowering.is_partitioned(ctx) or refused_on_cuda(pull):
        return _lower_pulled(ctx, *operands, pull=pull)
    return compat.lower_fun(lambda *given: sorted_pull(pull, given))(ctx, *operands)


def sorted_pull(pull: Pullback, operands: Sequence[Any]) -> list[Any]:
    """`recom_row_sums` as JAX operations around fused calls: what it is on a GPU."""
    n = pull.n_numbers
    numbers = lowering.fused_p.bind(*operands[:n], call=pull.number_call)
    words = sorted_sums.read(pull.sums.words)
    made = sorted_sums.sums(words, numbers, operands[n:], pull.tangent.options)
    return [m.reshape(a.shape).astype(a.dtype) for m, a in zip(made, pull.table_avals, strict=True)]


def refused_on_cuda(pull: Pullback) -> str:
    """Why a GPU leaves the transpose to XLA, "" if it does not."""
    from recom_jax.cuda.codegen import generate

    if not pull.tangent.options.always_fuse:
        return gate.SCATTER
    try:
        sorted_sums.read(pull.sums.words)
        generate(pull.number_call.program)
    except EncodeError as why:
        return str(why)
    return ""


def _lower_pulled(ctx: Any, *operands: Any, pull: Pullback) -> Any:
    return compat.lower_fun(pull.pulled)(ctx, *operands)


def _tangent(lower: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ctx, *operands, pull: lower(ctx, *operands, call=pull.tangent)


compat.register_primitive(
    tangent_p,
    abstract_eval=lambda *_, pull: list(pull.tangent.out_avals),
    jvp=_linear_jvp(tangent_p, lambda pull: pull.pushed),
    batch=_linear_batch(lambda pull: pull.pushed, tangent_p),
    lower_cpu=_tangent(lowering.lower_cpu),
    lower_cuda=_tangent(lowering.lower_cuda),
    lower_default=_tangent(lowering.lower_default),
)
compat.register_primitive(
    row_sums_p,
    abstract_eval=lambda *_, pull: list(pull.table_avals),
    jvp=_linear_jvp(row_sums_p, lambda pull: pull.pulled),
    batch=_linear_batch(lambda pull: pull.pulled, row_sums_p),
    lower_cpu=_lower_sums,
    lower_cuda=_lower_sorted,
    lower_default=_lower_pulled,
)
compat.register_transpose(tangent_p, _linear_transpose(row_sums_p))
compat.register_transpose(row_sums_p, _linear_transpose(tangent_p))
