"""The end of stage 2 for table reads that stay in XLA: each is recorded with a reason, for `explain`."""

from __future__ import annotations

from typing import Any

from recom_jax import compat, ir, templates
from recom_jax.detect import Detector
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
        for name, inner, table in _inner_reads(d, eqn):
            d.reads.append(Read(table, inner, reason or f"the lookup is inside {name}"))


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
        why = "its table is computed in the function, not an argument"
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


def _inner_reads(d: Detector, eqn: Any) -> list[tuple[str, Any, Any]]:
    """Table reads in the bodies of an equation: (construct, inner equation, table argument)."""
    if eqn.primitive.name in ("jit", "pjit") and templates.recognise(eqn) is not None:
        return []
    found = []
    tables = [
        v for v in eqn.invars if not isinstance(v, compat.Literal) and base_table(d, v) is not None
    ]
    if tables:

        def look(jaxpr: Any) -> None:
            for e in jaxpr.eqns:
                if e.primitive.name in ("gather", "dynamic_slice"):
                    aval = e.invars[0].aval
                    same = [
                        t
                        for t in tables
                        if t.aval.shape == aval.shape and t.aval.dtype == aval.dtype
                    ]
                    if same:
                        found.append((eqn.primitive.name, e, same[0]))
                for sub in compat.sub_jaxprs(e):
                    look(sub)

        for sub in compat.sub_jaxprs(eqn):
            look(sub)
    return found


__all__ = ["refused_read"]
