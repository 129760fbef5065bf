"""Recognises what a library function traced to among the equations of a flat jaxpr.

As in `templates`, the reference is JAX's own trace of the function at the same types. Here it is not one call but
several equations, so the two dataflow graphs are walked together from their results to their inputs: equal
primitives, equal parameters, equal literals, and one and the same variable wherever the reference reads its input.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from recom_jax import compat

_FILLS = (None, 0, -1, 1)


def unique_inverse(made_by: dict[int, tuple[Any, int]], values: Any, inverse: Any) -> Any | None:
    """`ids` where (values, inverse) are ``jnp.unique(ids, return_inverse=True, size=n)`` with n >= ids.size.

    Then ``values[inverse] == ids``, whatever the ids.

    Args:
      made_by: id of a variable -> (equation that made it, which output).
    """
    size = int(values.aval.shape[0])
    if compat.is_drop(values) or not jnp.issubdtype(values.aval.dtype, jnp.integer):
        return None
    count = int(inverse.aval.size)
    if size < count or id(values) not in made_by or id(inverse) not in made_by:
        return None
    for shape in dict.fromkeys((tuple(inverse.aval.shape), (count,))):
        for fill in _FILLS:
            reference = _unique(shape, str(values.aval.dtype), size, fill)
            if reference is None:
                continue
            jaxpr, made = reference
            found = _match(made_by, made, (values, inverse), jaxpr.outvars, jaxpr.invars[0])
            if found is not None:
                return found
    return None


@functools.lru_cache(maxsize=256)
def _unique(
    shape: tuple[int, ...], dtype: str, size: int, fill: int | None
) -> tuple[Any, dict[int, tuple[Any, int]]] | None:
    from recom_jax.trace import flatten

    def reference(ids: Any) -> Any:
        return jnp.unique(ids, return_inverse=True, size=size, fill_value=fill)

    try:
        closed = flatten(jax.make_jaxpr(reference)(jax.ShapeDtypeStruct(shape, dtype)))
    except (TypeError, ValueError, OverflowError):
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
    hole: Any,
) -> Any | None:
    """What stands for `hole`, the reference's input, if the graphs are equal; else None."""
    bound: dict[int, Any] = {}

    def same_literal(a: Any, r: Any) -> bool:
        return bool(a.aval.dtype == r.aval.dtype and a.val == r.val)

    def same(a: Any, r: Any) -> bool:
        if isinstance(r, compat.Literal):
            return isinstance(a, compat.Literal) and same_literal(a, r)
        if isinstance(a, compat.Literal):
            return False
        if id(r) in bound:
            return bound[id(r)] is a
        bound[id(r)] = a
        if r is hole:
            return bool(a.aval.shape == r.aval.shape and a.aval.dtype == r.aval.dtype)
        if id(a) not in made_by or id(r) not in made:
            return False
        (ea, ka), (er, kr) = made_by[id(a)], made[id(r)]
        return bool(
            ka == kr
            and ea.primitive.name == er.primitive.name
            and len(ea.invars) == len(er.invars)
            and str(ea.params) == str(er.params)
            and all(map(same, ea.invars, er.invars))
        )

    if all(map(same, actual, reference)):
        return bound.get(id(hole))
    return None
