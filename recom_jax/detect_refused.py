"""The end of stage 2 for table reads that stay in XLA: each is recorded with a reason, for `explain`."""

from __future__ import annotations

from typing import Any

from recom_jax import compat, ir
from recom_jax.detect import Detector
from recom_jax.detect_inner import COMPUTED, inner_reads
from recom_jax.detect_tables import NOT_ROWS, base_table
from recom_jax.detect_values import DTYPES, Read, Refuse
from recom_jax.trace import SPARSE

_OWN_KERNEL = "JAX multiplies compressed rows (BCSR) by a kernel of its own"


def refused_read(d: Detector, eqn: Any, reason: str | None) -> None:
    """Records a table read that stays in XLA, if the equation is one, and reads inside loops and branches."""
    if eqn.primitive.name in ("gather", "dynamic_slice"):
        found = base_table(d, eqn.invars[0])
        symbolic = any(map(compat.is_symbolic, eqn.invars[0].aval.shape))
        if found is not None and symbolic and _fixed(d, eqn.invars[1]):
            return  # a slice of a feature: no table is read
        if found is not None and reason != NOT_ROWS:
            d.reads.append(Read(found[0], eqn, reason or "this form of read is not understood"))
        else:
            _other_read(d, eqn)
    elif eqn.primitive.name in SPARSE:
        found = base_table(d, eqn.invars[-1])
        if found is not None:
            own = eqn.primitive.name == "bcsr_dot_general"
            why = _OWN_KERNEL if own else "a product with a batch of sparse matrices"
            d.reads.append(Read(found[0], eqn, why))
    elif reason is not None and eqn.primitive.name == "dot_general":
        found = base_table(d, eqn.invars[1])
        if found is not None and "one-hot" in reason:
            d.reads.append(Read(found[0], eqn, reason))
    else:
        _refused_inside(d, eqn, reason)


def _refused_inside(d: Detector, eqn: Any, reason: str | None) -> None:
    """Records what the bodies of an equation read. A defect of ours here costs lines of `explain`, not the fusion."""
    try:
        inner = inner_reads(d, eqn)
    except Exception:
        if d.options.verifies:
            raise
        return
    why = reason or f"the lookup is inside {eqn.primitive.name}"
    d.reads += [Read(table, read, why) for table, read in inner.reads]
    d.others += inner.others


def _other_read(d: Detector, eqn: Any) -> None:
    """Notes a gather that is no embedding column: a reader of `explain` may look for it."""
    table, ids = eqn.invars[0], eqn.invars[1]
    if isinstance(table, compat.Literal) or isinstance(ids, compat.Literal):
        return
    if _fixed(d, ids):
        return  # a shuffle by constants
    shape, dtype = table.aval.shape, str(table.aval.dtype)
    if dtype not in DTYPES:
        why = f"its table is {dtype}"
    elif id(table) not in d.arguments:
        why = COMPUTED
    elif len(shape) not in (2, 3):
        why = (
            f"its table has {len(shape)} axis"
            if len(shape) == 1
            else f"its table has {len(shape)} axes"
        )
    else:
        why = "it does not read whole rows"
    d.others.append((eqn, why))


def _fixed(d: Detector, ids: Any) -> bool:
    """Whether the places that a gather reads depend on constants and sizes alone."""
    try:
        v = d.val(ids)
    except (Refuse, ir.NotAffine):
        return False
    return all(
        isinstance(e, (ir.Const, ir.Affine))
        or (isinstance(e, ir.Load) and id(e.var) in d.value_of)
        or e.children
        for expr in ([v.expr] if v.expr is not None else [p.expr for p in v.parts])
        for e in ir.walk(expr)
    )


__all__ = ["refused_read"]
