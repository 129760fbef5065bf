"""Plain JAX as the oracle of random models, and the one deviation from it that is right.

XLA's CPU code loses NaN in the minimum or maximum of a bag for some shapes and processors (docs/semantics.md). There
plain JAX is wrong by its own definition, and a fused bag, which gives NaN, is not. `corrected` accepts exactly that:
NaN for the extreme of a bag, where the same model with its extremes taken by numpy has NaN as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax import compat

_EXTREMES = {"reduce_max": np.max, "reduce_min": np.min}


def corrected(got: Any, want: Any, extreme: Any, by_numpy: Callable[[], Any]) -> tuple[Any, int]:
    """What `got` must be equal to, by what plain JAX gives.

    Args:
      got, want: results of the optimized and of the plain model, pytrees of arrays.
      extreme: the same pytree, 1 where a value is the extreme of a bag and nothing else.
      by_numpy: what `with_numpy_extremes` gives; called where it matters.

    Returns:
      `want`, with NaN where plain JAX lost it, and how many values those are.
    """
    candidates = [
        np.isnan(g) & ~np.isnan(w) & (x == 1)
        if np.issubdtype(w.dtype, np.floating)
        else np.zeros(w.shape, bool)
        for g, w, x in zip(*(map(np.asarray, jax.tree.leaves(t)) for t in (got, want, extreme)), strict=True)
    ]  # fmt: skip
    if not any(c.any() for c in candidates):
        return want, 0
    leaves, tree = jax.tree.flatten(want)
    lost = [
        c & np.isnan(np.asarray(n))
        for c, n in zip(candidates, jax.tree.leaves(by_numpy()), strict=True)
    ]
    leaves = [
        jnp.where(jnp.asarray(x), jnp.asarray(np.nan, w.dtype), w) if x.any() else w
        for x, w in zip(lost, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves), sum(int(x.sum()) for x in lost)


def with_numpy_extremes(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` under jit, except that every reduction of floats to an extreme is numpy's, which keeps NaN."""
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    flat = jax.tree.leaves(args)
    values = jax.jit(lambda *xs: _evaluate(compat.open_jaxpr(closed), closed.consts, xs))(*flat)
    return jax.tree.unflatten(jax.tree.structure(out), values)


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, compat.Literal) else known[v]

    for eqn in jaxpr.eqns:
        values = [value(v) for v in eqn.invars]
        inner = compat.inner_jaxpr(eqn)
        reduce = _EXTREMES.get(eqn.primitive.name)
        if reduce is not None and jnp.issubdtype(eqn.invars[0].aval.dtype, np.floating):
            made = [_by_numpy(reduce, values[0], eqn.params["axes"], eqn.outvars[0].aval)]
        elif inner is not None:
            made = _evaluate(compat.open_jaxpr(inner), getattr(inner, "consts", ()), values)
        else:
            made = compat.bind_eqn(eqn, values)
        known.update(zip(eqn.outvars, made, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _by_numpy(reduce: Callable[..., Any], x: Any, axes: Sequence[int], aval: Any) -> Any:
    def host(x: Any) -> Any:
        return reduce(np.asarray(x, np.float32), axis=tuple(axes)).astype(aval.dtype)

    return jax.pure_callback(host, jax.ShapeDtypeStruct(aval.shape, aval.dtype), x)
