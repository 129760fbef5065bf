"""The preprocessing program as operators with costs, read from its jaxpr.

Operators of `recom_jax.preprocess` are jitted functions with names, so they stay whole in the jaxpr; anything else is
an operator by the name of its primitive. Costs count arithmetic and bytes; the planner scales them to measured times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from recom_jax import compat
from recom_jax.corun.plan import PrepOp
from recom_jax.preprocess.operator import PREFIX

# Operations of a core per microsecond, and bytes: a GPU's proportions; the scale is measured.
OPS_PER_US = 20e6
BYTES_PER_US = 3e6

_FREE = (
    "reshape",
    "squeeze",
    "expand_dims",
    "broadcast_in_dim",
    "copy",
    "convert_element_type",
    "slice",
    "stop_gradient",
)
_SLOW = {
    "div": 8, "rem": 8, "exp": 8, "log": 8, "log1p": 12, "expm1": 12, "pow": 20, "sqrt": 4, "gather": 8, "scatter": 16,
    "scatter-add": 16, "cumsum": 8, "while": 24, "logistic": 12, "tanh": 12, "erf": 12,
}  # fmt: skip
_BARRIERS = ("sort", "cumsum", "cumprod", "cummax", "cummin", "scatter", "scatter-add", "gather", "dot_general",
             "while", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "concatenate")  # fmt: skip
# Operators that compute a place from that place's inputs alone, whatever primitives they need for it.
_ROWWISE = frozenset(
    ("bucketize", "boxcox", "cast", "clamp", "fill_null", "hash_bucket", "log1p", "logit", "mapid", "onehot",
     "onehot_class", "sigrid_hash", "_cross", "to_lists")
)  # fmt: skip


def operators(prep: Callable[[Any], Any], raw_like: Any) -> tuple[PrepOp, ...]:
    """The operators of a program for columns of these shapes, in order of use.

    Args:
      raw_like: columns (name -> pytree) of arrays or ShapeDtypeStructs.
    """
    closed = jax.make_jaxpr(prep)(raw_like)
    jaxpr = compat.open_jaxpr(closed)
    paths, _ = jax.tree_util.tree_flatten_with_path(raw_like)
    features: dict[Any, frozenset[str]] = {}
    made_by: dict[Any, frozenset[str]] = {}
    raw: set[Any] = set()
    for var, (path, _leaf) in zip(jaxpr.invars, paths, strict=True):
        features[var] = frozenset([str(getattr(path[0], "key", path[0]))])
        raw.add(var)
    found: list[dict[str, Any]] = []
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if not isinstance(v, compat.Literal)]
        known = (
            frozenset().union(*(features.get(v, frozenset()) for v in inputs))
            if inputs
            else frozenset()
        )
        before = (
            frozenset().union(*(made_by.get(v, frozenset()) for v in inputs))
            if inputs
            else frozenset()
        )
        kind = _kind(eqn)
        if eqn.primitive.name in _FREE:
            for v in eqn.outvars:
                features[v], made_by[v] = known, before
                if inputs and all(i in raw for i in inputs):
                    raw.add(v)
            continue
        name = f"{kind}#{len(found)}"
        found.append(
            {
                "name": name,
                "kind": kind,
                "features": tuple(sorted(known)),
                "after": tuple(sorted(before)),
                "compute_us": count(eqn) / OPS_PER_US,
                "raw_us": sum(_bytes(v) for v in dict.fromkeys(inputs) if v in raw) / BYTES_PER_US,
                "out_us": sum(_bytes(v) for v in eqn.outvars) / BYTES_PER_US,
                "barrier": _barrier(eqn, kind),
            }
        )
        for v in eqn.outvars:
            features[v], made_by[v] = known, frozenset([name])
    results = [v for v in jaxpr.outvars if not isinstance(v, compat.Literal)]
    kept = {name for v in results for name in made_by.get(v, ())}
    return tuple(PrepOp(**op, kept=op["name"] in kept) for op in found)


def _kind(eqn: Any) -> str:
    name = str(eqn.params.get("name", "")) if eqn.primitive.name in ("jit", "pjit") else ""
    return name.removeprefix(PREFIX) or str(eqn.primitive.name)


def _barrier(eqn: Any, kind: str) -> bool:
    if kind in _ROWWISE:
        return False
    bodies = [eqn]
    while bodies:
        e = bodies.pop()
        if e.primitive.name in _BARRIERS:
            return True
        for sub in compat.sub_jaxprs(e):
            bodies += sub.eqns
    return False


def count(eqn: Any) -> float:
    """Operations of an equation and of what it calls; loops count once, by a round number of rounds."""
    subs = compat.sub_jaxprs(eqn)
    size = float(sum(_size(v) for v in eqn.outvars))
    name = eqn.primitive.name
    if subs and name != "while":
        return sum(count(e) for s in subs for e in s.eqns)
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * float(math.prod(eqn.invars[0].aval.shape[k] for k in contract))
    if name == "sort":
        return size * 8 * max(1, int(size).bit_length())
    if name.startswith(("reduce", "cum")):
        size = float(sum(_size(v) for v in eqn.invars))
    return size * float(_SLOW.get(name, 0 if name in _FREE else 1))


def _size(v: Any) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


def _bytes(v: Any) -> float:
    dtype = getattr(v.aval, "dtype", None)
    return (
        0.0
        if dtype is None
        else _size(v) * float(np.dtype(dtype).itemsize if dtype != jax.dtypes.float0 else 0)
    )
