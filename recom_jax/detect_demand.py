"""The end of stage 2: from the results backwards, what fused calls compute and what XLA does, in which order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from recom_jax import compat, ir
from recom_jax.detect_values import Detected, Output, Val
from recom_jax.trace import TABLE_READS

if TYPE_CHECKING:
    from recom_jax.detect import Detector

LONG = 8  # operations from which on a value without lookups is worth a place in a call


def demand(d: Detector, jaxpr: Any) -> Detected:
    """Follows the results backwards to what must be computed, and by whom."""
    made_by = d.made_by()
    fused: dict[int, Val] = {}
    kept: set[int] = set()
    needed: set[int] = set()
    work = [v for v in jaxpr.outvars if not isinstance(v, compat.Literal)]
    for eqn in jaxpr.eqns:
        if eqn.effects:
            kept.add(id(eqn))
            work += [v for v in eqn.invars if not isinstance(v, compat.Literal)]
    while work:
        var = work.pop()
        if id(var) in needed:
            continue
        needed.add(id(var))
        value = d.known(var)
        if value is not None and id(var) in made_by and pays(d, var, value):
            fused[id(var)] = value
            work += d.leaves(value)
            continue
        made = made_by.get(id(var))
        if made is not None and id(made[0]) not in kept:
            kept.add(id(made[0]))
            work += [v for v in made[0].invars if not isinstance(v, compat.Literal)]
    return levels(d, jaxpr, fused, kept)


def pays(d: Detector, var: Any, value: Val) -> bool:
    """Whether a call computes a needed value: it looks rows up, or (`Options.fuse_values`) is long and exact."""
    if value.takes:
        # Where ids repeat, the lookup itself grows: there is no smaller array that XLA could spread.
        return d.made_by()[id(var)][0].primitive.name in TABLE_READS or not grows(d, value)
    if not d.options.fuse_values or value.expr is None or not value.expr.exact:
        return False
    seen: set[int] = set()
    return sum(isinstance(e, (ir.Op, ir.Search)) for e in ir.walk(value.expr, seen)) >= LONG


def grows(d: Detector, value: Val) -> bool:
    """Whether a value repeats lookups or bags along new axes: XLA then spreads the smaller array itself.

    A bag beside its own rows, as in ``rows - rows.mean(1, keepdims=True)``, would be added up once a position; a
    count beside them, as in ``rows * (w / w.sum(1, keepdims=True))[..., None]``, be counted once a position.
    """
    if value.expr is None:
        return False
    sizes = [d.unifier.value(n) for n in value.shape]
    wide = frozenset(k for k, n in enumerate(sizes) if n > 1)
    memo: dict[int, frozenset[int]] = {}
    own = 0
    counts: list[ir.Expr] = []
    work = [value.expr]
    seen: set[int] = (
        set()
    )  # a shared node once: as a tree, an expression may be exponentially large
    while work:
        e = work.pop()
        if id(e) in seen:
            continue
        seen.add(id(e))
        if isinstance(e, (ir.Reduce, ir.SegReduce)) and not e.takes:
            counts.append(e)
        elif isinstance(e, (ir.Take, ir.Reduce, ir.SegReduce)):
            axes = ir.depends(e, memo)
            if not isinstance(e, ir.Take) and wide - axes:
                return True
            own += math.prod(sizes[k] for k in axes)
        else:
            work += e.children
    if counts:
        # Once a row, not once a value: what does not depend on a row's own axis is computed for all of it.
        takes = [e for e in ir.walk(value.expr) if isinstance(e, ir.Take)]
        lanes = frozenset().union(*(ir.depends(e, memo) - ir.depends(e.idx, memo) for e in takes))
        if any(wide - lanes - ir.depends(e, memo) for e in counts):
            return True
    return math.prod(sizes) > 2 * own


def levels(d: Detector, jaxpr: Any, fused: dict[int, Val], kept: set[int]) -> Detected:
    """Orders fused results into calls: a call's operands must exist before it."""
    ready: dict[int, int] = {}
    outputs: list[Output] = []
    eqns: list[tuple[int, Any]] = []
    late: list[Any] = []
    effects = 0
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            if id(var) in fused:
                level = level_of(d, fused[id(var)], ready)
                outputs.append(Output(var, fused[id(var)], level))
                late += waiting(d, var, ready)
                ready[id(var)] = level + 1
        if id(eqn) in kept:
            level = max((ready.get(id(v), 0) for v in eqn.invars), default=0)
            if eqn.effects:  # effects keep their order
                level = effects = max(level, effects)
            eqns.append((level, eqn))
            for var in eqn.outvars:
                if id(var) not in fused:
                    ready[id(var)] = level
    return Detected(
        d.closed,
        d.pool,
        d.unifier,
        tuple(outputs),
        tuple(eqns),
        tuple(d.reads),
        d.value_of,
        d.arguments,
        d.operands,
        d.sizes,
        tuple(late),
        tuple(d.others),
    )


def level_of(d: Detector, value: Val, ready: dict[int, int]) -> int:
    """The first call that could compute a value, as far as is known what makes its operands."""
    return max((ready.get(id(v), 0) for v in d.leaves(value)), default=0)


def waiting(d: Detector, var: Any, ready: dict[int, int]) -> list[Any]:
    """The variable if it waits for what XLA makes of its own rows; then those of its inputs that would do so in turn.

    All at once: left to XLA one by one, each would cost an analysis of the whole program.
    """
    found: list[Any] = []
    work, seen = [var], set()
    while work:
        v = work.pop()
        value = d.known(v)
        if id(v) in seen or value is None or id(v) not in d.made_by() or not pays(d, v, value):
            continue
        seen.add(id(v))
        level = level_of(d, value, ready)
        if level > rows_level(d, value, ready, level):
            found.append(v)
            eqn, _ = d.made_by()[id(v)]
            work += [x for x in eqn.invars if not isinstance(x, compat.Literal)]
    return found


def rows_level(d: Detector, value: Val, ready: dict[int, int], level: int) -> int:
    """The level at which the rows of an unpooled value could be looked up (`level` for other values)."""
    if value.expr is None or isinstance(value.expr, ir.Take):
        return level
    seen: set[int] = set()
    nodes = list(ir.walk(value.expr, seen))
    if any(isinstance(e, (ir.Reduce, ir.SegReduce)) for e in nodes):
        return level
    takes = [e for e in nodes if isinstance(e, ir.Take)]
    return max((ready.get(id(v), 0) for e in takes for v in d.pool.leaves(e)), default=level)
