"""Stage 4: rewrites of column expressions, each from facts that make it sound.

`PASSES` is the order; a rewrite is a function of one node whose children are done. `NAMES` also lists the
rewrites that detection itself performs (they need the jaxpr); all can be left out by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from recom_jax import ir
from recom_jax.detect import Output, Part, Val
from recom_jax.simplify.facts import Facts
from recom_jax.simplify.rules import RULES, Rewrite

DETECTION_REWRITES = {
    "one-hot-to-lookup": "one_hot(ids) @ table reads one row a position (facts: the left side is ids == iota)",
    "cast-after-gather": "a whole-table cast becomes a cast of the rows read",
    "uniform-bucketize": "constant boundaries start + k*step, exact for every k, are found by arithmetic",
    "merge-searches": "any search in constant, ascending, NaN-free boundaries is one operation",
}
NAMES: frozenset[str] = frozenset(DETECTION_REWRITES) | frozenset(RULES)


@dataclasses.dataclass(frozen=True)
class Simplified:
    """Results with simpler expressions, and which rewrites fired below each lookup.

    Attributes:
      applied: rewrite names by id of a detected `Take`: all that fired in the expressions it is part of.
    """

    outputs: tuple[Output, ...]
    applied: dict[int, tuple[str, ...]]

    def __str__(self) -> str:
        lines = []
        for o in self.outputs:
            for e in [o.val.expr] if o.val.expr is not None else [p.expr for p in o.val.parts]:
                lines.append(str(e))
        return "\n".join(lines)


def simplify(pool: ir.Pool, outputs: Sequence[Output], constants: dict[int, Any], disabled: frozenset[str]) -> Simplified:
    """Rewrites every expression of every result, bottom up, until no rule applies.

    Args:
      constants: arrays by id of their jaxpr variable; their values are facts.
      disabled: rewrites to leave out.
    """
    s = _Simplifier(pool, Facts(constants), {k: r for k, r in RULES.items() if k not in disabled})
    done = tuple(dataclasses.replace(o, val=s.value(o.val)) for o in outputs)
    return Simplified(done, {k: tuple(dict.fromkeys(v)) for k, v in s.applied.items()})


class _Simplifier:
    def __init__(self, pool: ir.Pool, facts: Facts, rules: dict[str, Rewrite]) -> None:
        self.pool, self.facts = pool, facts
        self.memo: dict[int, ir.Expr] = {}
        self.keep: list[ir.Expr] = []  # ids in memo stay valid while their objects live
        self.fired: dict[int, list[str]] = {}
        self.applied: dict[int, list[str]] = {}
        self.by_op: dict[str, list[tuple[str, Rewrite]]] = {}
        for name, rule in rules.items():
            for op in rule.ops:
                self.by_op.setdefault(op, []).append((name, rule))

    def value(self, v: Val) -> Val:
        if v.expr is not None:
            return Val(v.shape, self.root(v.expr))
        return Val(v.shape, None, tuple(Part(self.root(p.expr), p.shape, p.offset, p.strides) for p in v.parts))

    def root(self, e: ir.Expr) -> ir.Expr:
        new = self.run(e)
        for take in ir.walk(e):
            if isinstance(take, ir.Take):
                self.applied.setdefault(id(take), []).extend(self.fired[id(e)])
        return new

    def run(self, e: ir.Expr) -> ir.Expr:
        found = self.memo.get(id(e))
        if found is not None:
            return found
        fired: list[str] = []
        new = e
        if e.children:
            children = []
            for c in e.children:
                children.append(self.run(c))
                fired += self.fired.get(id(c), [])
            new = self.pool.with_children(e, children)
        for _ in range(64):
            step = self.step(new)
            if step is None:
                break
            name, new = step
            fired.append(name)
            new = self.settle(new, fired)
        self.memo[id(e)] = self.memo[id(new)] = new
        self.keep += [e, new]
        self.fired[id(e)] = self.fired[id(new)] = fired
        return new

    def settle(self, e: ir.Expr, fired: list[str]) -> ir.Expr:
        """A rule may build new children: they are simplified first."""
        if not e.children:
            return e
        children = []
        for c in e.children:
            children.append(self.run(c))
            fired += [f for f in self.fired.get(id(c), []) if f not in fired]
        return self.pool.with_children(e, children)

    def step(self, e: ir.Expr) -> tuple[str, ir.Expr] | None:
        op = e.name if isinstance(e, ir.Op) else type(e).__name__
        for name, rule in self.by_op.get(op, ()):
            new = rule.apply(self.pool, self.facts, e)
            if new is not None and new is not e:
                return name, new
        return None
