"""Table reads in the bodies of loops, branches and calls that stay in XLA: named for `explain`, never fused.

The rules run on a body as on a function of its own, so what counts as a read is the same inside and outside; an
argument of the body is then the operand that it stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from recom_jax import compat, templates
from recom_jax.detect import Detector
from recom_jax.detect_tables import base_table
from recom_jax.trace import TABLE_READS, flatten

COMPUTED = "its table is computed in the function, not an argument"


@dataclasses.dataclass(frozen=True)
class Inner:
    """What a body reads.

    Attributes:
      reads: (table of the function outside, the equation).
      others: gathers that are no embedding columns, with the reason.
    """

    reads: tuple[tuple[Any, Any], ...] = ()
    others: tuple[tuple[Any, str], ...] = ()


def inner_reads(d: Detector, eqn: Any) -> Inner:
    """What the bodies of an equation read."""
    if eqn.primitive.name in ("jit", "pjit") and templates.recognise(eqn) is not None:
        return Inner()
    reads: list[tuple[Any, Any]] = []
    others: list[tuple[Any, str]] = []
    for jaxpr, operands in _bodies(eqn):
        if not _reads_tables(jaxpr):
            continue
        closed = flatten(jaxpr, keep_fused=True)
        body = compat.open_jaxpr(closed)
        inner = Detector(closed, d.options, {})
        inner.twins.run(body)
        outside = {id(v): atom for v, atom in zip(body.invars, operands, strict=True)}
        for read in inner.reads:
            atom = outside.get(id(read.table))
            found = None if atom is None else base_table(d, atom)
            if found is None:
                others.append((read.eqn, COMPUTED))
            else:
                reads.append((found[0], read.eqn))
        others += inner.others
    return Inner(tuple(reads), tuple(others))


def _bodies(eqn: Any) -> list[tuple[Any, Sequence[Any]]]:
    """The bodies (closed jaxprs) of an equation, and the operand that each argument of a body stands for."""
    p, invars = eqn.params, eqn.invars
    name = eqn.primitive.name
    if name == "while":
        n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
        carried = invars[n_cond + n_body :]
        bodies = [
            (p["cond_jaxpr"], [*invars[:n_cond], *carried]),
            (p["body_jaxpr"], [*invars[n_cond : n_cond + n_body], *carried]),
        ]
    elif name == "cond":
        bodies = [(b, invars[1:]) for b in p["branches"]]
    else:  # a call, or a loop over what is scanned: an argument for an operand
        bodies = [(j, invars) for j in compat.closed_jaxprs(eqn)]
    return [(j, ins) for j, ins in bodies if len(compat.open_jaxpr(j).invars) == len(ins)]


def _reads_tables(closed: Any) -> bool:
    def any_in(jaxpr: Any) -> bool:
        return any(
            e.primitive.name in TABLE_READS or any(map(any_in, compat.sub_jaxprs(e)))
            for e in jaxpr.eqns
        )

    return any_in(compat.open_jaxpr(closed))


__all__ = ["COMPUTED", "Inner", "inner_reads"]
