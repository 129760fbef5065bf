"""Stage 8: puts fused calls where their columns were, and re-checks the jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from recom_jax import compat, trace
from recom_jax.cpu import Encoded
from recom_jax.detect_values import Detected
from recom_jax.lowering import FusedCall, fused_p
from recom_jax.schedule import Scheduled


@dataclasses.dataclass(frozen=True)
class Split:
    """Of `Detected`, what is needed here.

    Attributes:
      kept: equations XLA runs, with the level each belongs to.
      value_of: constants by id of their variable.
    """

    jaxpr: Any
    kept: tuple[tuple[int, Any], ...]
    value_of: dict[int, Any]


def splice(
    detected: Detected | Split,
    extra_consts: Sequence[tuple[Any, Any]],
    calls: Sequence[tuple[int, Scheduled, Encoded]],
    options: Any,
) -> Any:
    """The program with one fused equation per call.

    Args:
      extra_consts: (variable, array) of constants the compiler made.
      calls: (level, program, its encoding).

    Returns:
      A closed jaxpr with the inputs and outputs of the original.
    """
    closed = detected.jaxpr
    jaxpr = compat.open_jaxpr(closed)
    made_by = {id(v): (n, eqn) for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    levels = 1 + max([lv for lv, _, _ in calls] + [lv for lv, _ in detected.kept], default=0)
    eqns: list[Any] = []
    known = {**detected.value_of, **{id(v): c for v, c in extra_consts}}
    fused_vars = {id(o.var) for _, s, _ in calls for o in s.outputs}
    for level in range(levels):
        for lv, eqn in detected.kept:
            if lv == level:
                if any(id(v) in fused_vars for v in eqn.outvars):
                    # Another output of this equation is still wanted; the fused one must not be defined twice.
                    eqn = eqn.replace(
                        outvars=[
                            compat.fresh_var(v.aval) if id(v) in fused_vars else v
                            for v in eqn.outvars
                        ]
                    )
                eqns.append(eqn)
        for lv, scheduled, encoded in calls:
            if lv == level:
                eqns += _call_eqns(made_by, scheduled, encoded, options, known)
    constvars = [*jaxpr.constvars, *(v for v, _ in extra_consts)]
    consts = [*closed.consts, *(c for _, c in extra_consts)]
    eqns = trace.live(eqns, jaxpr.outvars)
    used = {id(v) for e in eqns for v in e.invars} | {id(v) for v in jaxpr.outvars}
    kept = [(v, c) for v, c in zip(constvars, consts, strict=True) if id(v) in used]
    new = compat.closed(
        [v for v, _ in kept], jaxpr.invars, jaxpr.outvars, eqns, [c for _, c in kept], jaxpr
    )
    if options.verifies:
        compat.check_jaxpr(compat.open_jaxpr(new))
    return new


def _call_eqns(
    made_by: dict[int, tuple[int, Any]],
    scheduled: Scheduled,
    encoded: Encoded,
    options: Any,
    known: Mapping[int, Any],
) -> list[Any]:
    """The fused equation, behind those that its operands need."""
    outs = [o.var for o in scheduled.outputs]
    spread = _spread(made_by, scheduled.operands, outs)
    inside = [spread[id(v)][0].outvars[0] if id(v) in spread else v for v in scheduled.operands]
    same = {id(e.outvars[0]): eqns[0].outvars[0] for eqns in spread.values() for e in eqns}
    closed, extra = _original(made_by, inside, outs, same)
    original = compat.jaxpr_as_fun(closed)
    before, operands = [], []
    for v in scheduled.operands:
        if id(v) in spread:
            eqn = spread[id(v)][0]
            v = compat.fresh_var(eqn.outvars[0].aval)
            before.append(eqn.replace(outvars=[v]))
        operands.append(v)
    operands += extra
    n = len(scheduled.operands)
    binding = tuple(x for k in range(n) for x in (k, -1))
    avals = tuple(v.aval for v in outs)
    layout = tuple(x for k in range(n) for x in (k, -1, 0))
    call = FusedCall(
        encoded,
        binding,
        n,
        avals,
        original,
        options,
        layout,
        scheduled.program,
        closed=closed,
        constants={k: known[id(v)] for k, v in enumerate(operands) if id(v) in known},
    )
    made = compat.new_jaxpr_eqn(
        operands,
        outs,
        fused_p,
        {"call": call},
        set(),
        source_info=made_by[id(outs[0])][1].source_info,
        ctx=made_by[id(outs[0])][1].ctx,
    )
    return [*before, made]


def _spread(
    made_by: dict[int, tuple[int, Any]], operands: Sequence[Any], outs: Sequence[Any]
) -> dict[int, list[Any]]:
    """Inside shard_map: the equations that make a table differ from device to device, by the table.

    They stay outside the call. There their transpose adds up what the devices make of one table; inside it would keep
    the derivative by the table from being fused.
    """
    tables = {id(v) for v in operands if len(v.aval.shape) >= 2}
    needed = _needed(made_by, {id(v) for v in operands}, outs)[0]
    found: dict[int, list[Any]] = {}
    others: set[int] = set()
    for eqn in needed:
        if eqn.primitive.name in ("pvary", "pcast") and id(eqn.invars[0]) in tables:
            found.setdefault(id(eqn.invars[0]), []).append(eqn)
        else:
            others |= {id(v) for v in eqn.invars}
    return {
        key: eqns
        for key, eqns in found.items()
        if key not in others and all(e.params == eqns[0].params for e in eqns)
    }


def _needed(
    made_by: dict[int, tuple[int, Any]], stop: set[int], outs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The equations behind `outs` up to the variables `stop`, in order; and inputs that only they read."""
    extra: dict[int, Any] = {}
    needed: dict[int, tuple[int, Any]] = {}
    work = list(outs)
    while work:
        var = work.pop()
        if id(var) in stop or isinstance(var, compat.Literal):
            continue
        if id(var) not in made_by:
            extra[id(var)] = var
            continue
        n, eqn = made_by[id(var)]
        if n not in needed:
            needed[n] = (n, eqn)
            work += eqn.invars
    return [eqn for _, eqn in sorted(needed.values(), key=lambda x: x[0])], list(extra.values())


def _original(
    made_by: dict[int, tuple[int, Any]],
    operands: Sequence[Any],
    outs: Sequence[Any],
    same: Mapping[int, Any],
) -> tuple[Any, list[Any]]:
    """The equations between the operands and the results, as a jaxpr; and inputs only they read.

    Args:
      same: variables that stand for others, by the ids of those.
    """
    stop = {id(v) for v in operands}
    eqns, extras = _needed(made_by, stop | set(same), outs)
    if same:
        eqns = [e.replace(invars=[same.get(id(v), v) for v in e.invars]) for e in eqns]
    # An operand that one of these equations makes as well (a second output) keeps the operand's value.
    if any(id(v) in stop for e in eqns for v in e.outvars):
        eqns = [
            e.replace(outvars=[compat.fresh_var(v.aval) if id(v) in stop else v for v in e.outvars])
            if any(id(v) in stop for v in e.outvars)
            else e
            for e in eqns
        ]
    like = _Info()
    return compat.closed([], [*operands, *extras], outs, eqns, [], like), extras


class _Info:
    """Debug information for a jaxpr that no user function stands for."""

    def __init__(self) -> None:
        self.debug_info = compat.debug_info("recom_jax fused columns")
