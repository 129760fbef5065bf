"""Recognises what a library function traced to among the equations of a flat jaxpr.

As in `templates`, the reference is JAX's own trace of the function at the same types. Here it is not one call but
several equations, so the two dataflow graphs are walked together from their results to their inputs: equal
primitives, equal parameters, equal literals, and one and the same variable wherever the reference reads its input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from recom_jax import compat

_FILLS = (None, 0, -1, 1)
# Sizes of the trace of `jnp.repeat`: numbers that occur in it for nothing else.
_BAGS, _POSITIONS = 1009, 2003


def unique_inverse(made_by: dict[int, tuple[Any, int]], values: Any, inverse: Any) -> Any | None:
    """`ids` where (values, inverse) are ``jnp.unique(ids, return_inverse=True, size=n)`` with n >= ids.size.

    Then ``values[inverse] == ids``, whatever the ids.

    Args:
      made_by: id of a variable -> (equation that made it, which output).
    """
    size = values.aval.shape[0]
    if compat.is_drop(values) or not jnp.issubdtype(values.aval.dtype, jnp.integer):
        return None
    count = math.prod(inverse.aval.shape)
    fits = size >= count if isinstance(size, int) and isinstance(count, int) else size == count
    if not fits or id(values) not in made_by or id(inverse) not in made_by:
        return None
    for shape in dict.fromkeys((tuple(inverse.aval.shape), (count,))):
        for fill in _FILLS:
            reference = _unique(shape, str(values.aval.dtype), size, fill)
            if reference is None:
                continue
            jaxpr, made = reference
            found = _match(made_by, made, (values, inverse), jaxpr.outvars, jaxpr.invars, {})
            if found is not None:
                return found[0]
    return None


def repeated(
    made_by: dict[int, tuple[Any, int]], eqn: Any, dtypes: Sequence[str]
) -> tuple[Any, Any] | None:
    """(array, lengths) where a gather is the last step of ``jnp.repeat(array, lengths, total_repeat_length=t)``.

    The trace of the function is the same for all sizes but for the sizes in it, so one reference serves all of
    them: bags and positions of the reference are matched with those of `eqn`.

    Args:
      made_by: id of a variable -> (equation that made it, which output).
      dtypes: those that lengths may have.
    """
    (result,) = eqn.outvars
    array = eqn.invars[0].aval
    if (
        len(array.shape) != 1
        or len(result.aval.shape) != 1
        or 0 in (*array.shape, *result.aval.shape)
    ):
        return None
    bags, positions = array.shape[0], result.aval.shape[0]
    symbolic = any(map(compat.is_symbolic, (bags, positions)))
    # Symbolic sizes are part of what is traced (``bags - 1`` as a slice, say): the reference has the same ones.
    sizes = {} if symbolic else {_BAGS: bags, _BAGS - 1: bags - 1, _POSITIONS: positions}
    own = (bags, positions) if symbolic else (_BAGS, _POSITIONS)
    default = str(jax.dtypes.canonicalize_dtype("int64"))
    for dtype in dtypes:
        if default == "int32" and dtype.endswith("64"):
            continue  # there are none
        reference = _repeat(str(array.dtype), dtype, default, *own)
        if reference is not None:
            jaxpr, made = reference
            found = _match(made_by, made, (result,), jaxpr.outvars, jaxpr.invars, sizes)
            if found is not None:
                return found[0], found[1]
    return None


@functools.lru_cache(maxsize=256)
def _repeat(
    array: str, lengths: str, default: str, bags: Any, positions: Any
) -> tuple[Any, dict[int, tuple[Any, int]]] | None:
    """The trace of ``jnp.repeat``; `default` is JAX's own integer type at this time, a key."""

    def reference(a: Any, n: Any) -> Any:
        return jnp.repeat(a, n, total_repeat_length=positions)

    return _reference(
        reference, *(jax.ShapeDtypeStruct((bags,), dtype) for dtype in (array, lengths))
    )


@functools.lru_cache(maxsize=256)
def _unique(
    shape: tuple[Any, ...], dtype: str, size: Any, fill: int | None
) -> tuple[Any, dict[int, tuple[Any, int]]] | None:
    def reference(ids: Any) -> Any:
        return jnp.unique(ids, return_inverse=True, size=size, fill_value=fill)

    return _reference(reference, jax.ShapeDtypeStruct(shape, dtype))


def _reference(fn: Any, *args: Any) -> tuple[Any, dict[int, tuple[Any, int]]] | None:
    """The flat trace of a function and its `producers`; None where this JAX refuses or closes over arrays."""
    from recom_jax.trace import flatten

    try:
        closed = flatten(jax.make_jaxpr(fn)(*args))
    except (TypeError, ValueError, OverflowError, compat.Inconclusive):
        return None
    jaxpr = compat.open_jaxpr(closed)
    return None if closed.consts else (jaxpr, producers(jaxpr.eqns))


def producers(eqns: Sequence[Any]) -> dict[int, tuple[Any, int]]:
    """id of each variable -> (its equation, which output it is)."""
    return {id(v): (e, k) for e in eqns for k, v in enumerate(e.outvars)}


def _match(
    made_by: dict[int, tuple[Any, int]],
    made: dict[int, tuple[Any, int]],
    actual: Sequence[Any],
    reference: Sequence[Any],
    holes: Sequence[Any],
    sizes: dict[int, int],
) -> list[Any] | None:
    """What stands for `holes`, the reference's inputs, if the graphs are equal; else None.

    Args:
      sizes: numbers of the reference that stand for others.
    """
    bound: dict[int, Any] = {}
    inputs = {id(h) for h in holes}

    def same_number(a: Any, r: Any) -> bool:
        return bool(a == sizes.get(r, r))

    def same_param(a: Any, r: Any) -> bool:
        if a is r:
            return not (isinstance(r, int) and r in sizes) or same_number(a, r)
        if type(a) is not type(r):
            return False
        if isinstance(r, int) and not isinstance(r, bool):
            return same_number(a, r)
        if type(r) in (tuple, list):
            return len(a) == len(r) and all(map(same_param, a, r))
        if compat.is_symbolic(r):
            return bool(a == r)
        return str(a) == str(r)

    def same_literal(a: Any, r: Any) -> bool:
        value = r.val if r.aval.dtype.kind not in "iu" else sizes.get(int(r.val), r.val)
        return bool(a.aval.dtype == r.aval.dtype and a.val == value)

    def same(a: Any, r: Any) -> bool:
        if isinstance(r, compat.Literal):
            return isinstance(a, compat.Literal) and same_literal(a, r)
        if isinstance(a, compat.Literal):
            return False
        if id(r) in bound:
            return bound[id(r)] is a
        bound[id(r)] = a
        if id(r) in inputs:
            return bool(
                a.aval.dtype == r.aval.dtype
                and len(a.aval.shape) == len(r.aval.shape)
                and all(map(same_number, a.aval.shape, r.aval.shape))
            )
        if id(a) not in made_by or id(r) not in made:
            return False
        (ea, ka), (er, kr) = made_by[id(a)], made[id(r)]
        return bool(
            ka == kr
            and ea.primitive.name == er.primitive.name
            and len(ea.invars) == len(er.invars)
            and ea.params.keys() == er.params.keys()
            and all(same_param(ea.params[k], v) for k, v in er.params.items())
            and all(map(same, ea.invars, er.invars))
        )

    if all(map(same, actual, reference)) and all(id(h) in bound for h in holes):
        return [bound[id(h)] for h in holes]
    return None
