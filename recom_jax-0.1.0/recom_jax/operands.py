"""Bound arrays as operands of a program being traced, instead of constants inside it.

JAX turns an array that a traced function closes over into a constant of the compiled program: gigabytes of tables
would be copied into every executable. Closed-over `jax.Ref`s it passes as operands. An `Operand` travels that way:
for JAX's tracing it is a Ref, for the program a plain array that is only read, never donated and never written.
What it stands for is looked up at each call, so weights swapped by `Server.update` reach programs that were
compiled before. A call of such a program takes JAX's Python dispatch (tenths of a millisecond); a server passed as
an argument takes the fast one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.interpreters import ad, batching, mlir

from recom_jax import compat
from recom_jax.errors import BindError


class Holder(Protocol):
    """Where operands come from."""

    def snapshot(self) -> Any:
        """One version of the arrays; passed back to `lookup`."""

    def lookup(self, version: Any, key: Any) -> jax.Array: ...


class Operand(compat.Ref):
    """An array of `holder`, known by `key`: its type is fixed, its value is whatever the holder has at a call."""

    def __init__(self, holder: Holder, key: Any, like: jax.Array) -> None:
        self._holder, self._key = holder, key
        self._aval = compat.typeof(like)
        array: Any = like
        self._sharding, self._is_committed, self._format = (
            array.sharding,
            array.committed,
            array.format,
        )

    sharding = property(lambda self: self._sharding)
    committed = _committed = property(lambda self: self._is_committed)
    format = property(lambda self: self._format)

    def __repr__(self) -> str:
        return f"<bound {self._aval}>"


def as_operands(operands: Sequence[Operand]) -> list[Any]:
    """The arrays, as values of the trace at work (or themselves, if there is none)."""
    return list(_operands_p.bind(*operands)) if operands else []


def _arrays(operands: Sequence[Any]) -> list[Any]:
    """All values from one version per holder: an update never mixes with a call under way."""
    versions: dict[int, Any] = {}
    out = []
    for x in operands:
        if isinstance(x, Operand):
            if id(x._holder) not in versions:
                versions[id(x._holder)] = x._holder.snapshot()
            x = x._holder.lookup(versions[id(x._holder)], x._key)
        out.append(x)
    return out


def _lower(ctx: Any, *operands: Any) -> Sequence[Any]:
    if ctx.module_context.lowering_parameters.for_export:
        raise BindError(
            "jax.export of a function that closes over a bound server: its tables are operands, which an exported "
            "program can only take as arguments. Export the model itself, "
            "jax.export.export(jax.jit(model))(params, batch), or pass the server as an argument: "
            "jax.export.export(jax.jit(lambda serve, batch: serve(batch)))(serve, batch)"
        )
    return list(operands)


compat.register_operand_type(Operand, _arrays)

_operands_p = compat.Primitive("recom_bound_operands")
_operands_p.multiple_results = True
_operands_p.def_effectful_abstract_eval(lambda *avals: (list(avals), {compat.OperandEffect(0)}))
_operands_p.def_impl(lambda *xs: _arrays(xs))
mlir.register_lowering(_operands_p, _lower)
batching.primitive_batchers[_operands_p] = lambda args, dims: (_operands_p.bind(*args), dims)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return list(_operands_p.bind(*primals)), list(tangents)


ad.primitive_jvps[_operands_p] = _jvp
