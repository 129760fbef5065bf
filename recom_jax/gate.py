"""Stage 4b: leaves to XLA the few columns that a call cannot make faster.

A fused call writes the rows it looks up, and XLA reads them again. Where XLA alone would look them up inside the
loop that computes with them, the call costs one more pass over memory, and only many columns, bags, long id chains
or what XLA cannot join (a product of matrices, a reduction, a concatenation) pay for it. Measured on the CPU, where
`table[ids] * scale + bias` of 65,536 values or more took 1.3 to 2 times as long through a call; on a GPU the two
kernels in the place of one are alike.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recom_jax import compat, ir
from recom_jax.detect_rules import BINARY, UNARY
from recom_jax.detect_values import Detected, Output

FEW = 4
"""A call of more table reads than this is worth its pass over memory."""

LEAST = 1 << 14
"""Rows of fewer values than this fit the nearest caches: neither way is faster by more than the call itself."""

LARGE = 1 << 19
"""Results of this many values do not fit the caches: then arithmetic inside the call costs as much as behind it."""

LONGEST = 24
"""An id of more operations than this is better computed once a row than, as XLA does, once a value."""

REASON = (
    "cost gate: XLA looks these rows up inside the arithmetic on them, a call would pass over them once more "
    "(Options(always_fuse=True) fuses them)"
)

SCATTER = (
    "cost gate: on a GPU XLA's scatter is faster, in another order each run "
    "(Options(always_fuse=True) sums rows in a fixed order)"
)
"""Why a GPU leaves the sums of gradients' rows to XLA: measured on an H200, a sort and a fused call took 1.05 to 3.2
times as long as XLA's additions, the longer the larger the tables."""

_CHEAP = frozenset(
    (*BINARY, *UNARY, "select_n", "clamp", "convert_element_type", "integer_pow", "square", "copy", "copy_p",
     "stop_gradient", "reshape", "squeeze", "expand_dims")
) - {"sqrt", "rem"}  # fmt: skip
_CALLS = frozenset(("jit", "pjit", "custom_jvp_call", "closed_call", "core_call"))


def held_back(detected: Detected, outputs: Sequence[Output]) -> dict[int, str]:
    """The table reads better left to XLA.

    Args:
      outputs: the fused results as the calls would compute them (after `simplify`).

    Returns:
      `REASON` by id of the variable that each of their equations makes; what a forced detection takes.
    """
    levels: dict[int, list[Output]] = collections.defaultdict(list)
    for out in outputs:
        levels[out.level].append(out)
    held: list[Output] = []
    readers: Mapping[int, list[Any]] | None = None
    for outs in levels.values():
        if not all(map(_lone, outs)) or sum(len(_takes(o)) for o in outs) > FEW:
            continue
        size = sum(_size(detected, o) for o in outs)
        if size < LEAST:
            continue
        if readers is None:
            readers = _readers(detected)
        if all(_joins(detected, readers, o.var, size >= LARGE and _computes(o)) for o in outs):
            held += outs
    if not held:
        return {}
    # Rows that another result is made of as well, a bag say, are worth looking up in its call.
    kept = {k for o in outputs if o not in held for k in _reads(detected, o)}
    found = {k for o in held for k in _reads(detected, o)}
    return {} if found & kept else {id(detected.reads[k].eqn.outvars[0]): REASON for k in found}


def _reads(detected: Detected, out: Output) -> set[int]:
    """The serial numbers of the table reads that a result is made of."""
    parts = [out.val.expr] if out.val.expr is not None else [p.expr for p in out.val.parts]
    takes = (x for e in parts for x in ir.walk(e) if isinstance(x, ir.Take))
    return {k for x in takes for k in detected.pool.origins.get(id(x), ())}


def _takes(out: Output) -> list[ir.Take]:
    return [x for x in ir.walk(out.val.expr) if isinstance(x, ir.Take)] if out.val.expr else []


def _lone(out: Output) -> bool:
    """Rows as they are, or arithmetic on them: no bag, no concatenation, no product, no search, no long id."""
    if out.val.expr is None or out.val.takes > FEW:
        return False
    for x in ir.walk(out.val.expr):
        if isinstance(x, (ir.Reduce, ir.SegReduce, ir.Search)):
            return False
        if isinstance(x, ir.Take) and (x.one_hot or sum(1 for _ in ir.walk(x.idx)) > LONGEST):
            return False
    return True


def _computes(out: Output) -> bool:
    """Whether the call itself does arithmetic on rows. A mask is none: it may spare the call the lookup."""
    nodes = (
        [x for x in ir.walk(out.val.expr) if isinstance(x, ir.Op) and x.takes]
        if out.val.expr
        else []
    )
    return bool(nodes) and not any(x.name == "select" for x in nodes)


def _size(detected: Detected, out: Output) -> int:
    return math.prod(detected.unifier.value(n) for n in out.val.shape)


def _readers(detected: Detected) -> Mapping[int, list[Any]]:
    """The equations left to XLA that read a variable, by its id; None stands for the function's result."""
    found = detected.readers()
    for v in compat.open_jaxpr(detected.jaxpr).outvars:
        if not isinstance(v, compat.Literal):
            found.setdefault(id(v), []).append(None)
    return found


def _joins(detected: Detected, readers: Mapping[int, list[Any]], var: Any, computed: bool) -> bool:
    """Whether XLA computes with the rows in one loop: cheap elementwise operations, none reduced in the end.

    Args:
      computed: `var` is itself the result of such operations, not the rows.
    """
    fused = {id(o.var) for o in detected.outputs}
    seen: set[int] = set()
    work = [var]
    while work:
        v = work.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        for eqn in readers.get(id(v), ()):
            if v is var and not computed and (eqn is None or not _cheap(eqn)):
                return False  # the rows themselves must be in memory
            if eqn is None or _materialises(eqn):
                continue
            if not _cheap(eqn):
                return False
            if any(id(o) in fused for o in eqn.outvars):
                return False
            work += eqn.outvars
    return True


def _cheap(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _CALLS:
        return all(_all_cheap(j.eqns) for j in compat.sub_jaxprs(eqn))
    return name in _CHEAP


def _all_cheap(eqns: Iterable[Any]) -> bool:
    return all(map(_cheap, eqns))


def _materialises(eqn: Any) -> bool:
    """Operations whose operands XLA has in memory whoever made them."""
    return eqn.primitive.name in ("dot_general", "conv_general_dilated", "concatenate")


__all__ = ["FEW", "LEAST", "LONGEST", "REASON", "SCATTER", "held_back"]
