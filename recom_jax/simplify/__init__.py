"""Stage 4: rewrites of column expressions, each from facts that make it sound.

`RULES` is tried in its order; a rewrite is a function of one node whose children are done. `NAMES` also lists
what is no rule of one node: `CONTEXT_REWRITES` (what a mask says of the values under it) and the rewrites that
detection itself performs (they need the jaxpr). All can be left out by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from recom_jax import ir
from recom_jax.detect_values import Output, Val
from recom_jax.shape_solver.fact import Fact
from recom_jax.simplify.facts import Facts
from recom_jax.simplify.rules import RULES, Rewrite

DETECTION_REWRITES = {
    "one-hot-to-lookup": "one_hot(ids) @ table reads one row a position (facts: the left side is ids == iota)",
    "unique-inverse": "table[u][inv] of (u, inv) = unique(ids) reads table[ids] (facts: u is large enough)",
    "cast-after-gather": "a whole-table cast becomes a cast of the rows read",
    "uniform-bucketize": "constant boundaries start + k*step, exact for every k, are found by arithmetic",
    "comparisons-to-search": "counting the constant, ascending boundaries below x, or the first above it, is a search",
    "repeat-to-search": "repeat(arange(n), lengths) counts the bags that start at a position or before it",
    "merge-searches": "any search in constant, ascending, NaN-free boundaries is one operation",
}
CONTEXT_REWRITES = {
    "masked-lookup": "under a mask the mask is true: where(m, table[where(m, i, c)], 0) = where(m, table[i], 0)",
    "facts-under-mask": "under a mask its comparisons bound their operands: where(x >= 0, x % n, 0) needs no sign",
}
DESCRIPTIONS: Mapping[str, str] = {
    **DETECTION_REWRITES,
    **CONTEXT_REWRITES,
    **{name: f"needs: {rule.why}" for name, rule in RULES.items()},
}
"""Every rewrite: name -> what it does, or the facts it needs."""

NAMES: frozenset[str] = frozenset(DESCRIPTIONS)
"""What `Options.disable` can leave out."""


@dataclasses.dataclass(frozen=True)
class Simplified:
    """Results with simpler expressions, and which rewrites fired below each lookup.

    Attributes:
      applied: rewrite names by id of a detected `Take`: all that fired in the expressions it is part of.
      rows: what is known of a simplified `Take`'s row number where it counts, by the id of the `Take`.
    """

    outputs: tuple[Output, ...]
    applied: dict[int, tuple[str, ...]]
    rows: dict[int, Fact] = dataclasses.field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        lines = []
        for o in self.outputs:
            for e in [o.val.expr] if o.val.expr is not None else [p.expr for p in o.val.parts]:
                lines.append(str(e))
        return "\n".join(lines)


def simplify(
    pool: ir.Pool, outputs: Sequence[Output], constants: dict[int, Any], disabled: frozenset[str]
) -> Simplified:
    """Rewrites every expression of every result, bottom up, until no rule applies.

    Args:
      constants: arrays by id of their jaxpr variable; their values are facts.
      disabled: rewrites to leave out.
    """
    s = _Simplifier(pool, Facts(constants, "facts-under-mask" not in disabled), disabled)
    done = tuple(dataclasses.replace(o, val=s.value(o.val)) for o in outputs)
    return Simplified(done, {k: tuple(dict.fromkeys(v)) for k, v in s.applied.items()}, s.rows)


@dataclasses.dataclass(frozen=True, slots=True)
class _Alone:
    """What was made of an expression by itself: rewrites, its lookups, facts of row numbers, the pool's journal."""

    new: ir.Expr
    fired: tuple[str, ...]
    takes: tuple[ir.Expr, ...]
    rows: tuple[tuple[ir.Expr, Fact], ...]
    journal: tuple[tuple[Any, ...], ...]


class _Simplifier:
    def __init__(self, pool: ir.Pool, facts: Facts, disabled: frozenset[str]) -> None:
        self.pool, self.facts, self.disabled = pool, facts, disabled
        self.first: dict[int, _Alone] = {}
        self.itself, self.bounds = (
            "masked-lookup" not in disabled,
            "facts-under-mask" not in disabled,
        )
        self.memo: dict[tuple[int, int], ir.Expr] = {}
        self.keep: list[ir.Expr] = []  # ids in memo stay valid while their objects live
        self.fired: dict[tuple[int, int], list[str]] = {}
        self.applied: dict[int, list[str]] = {}
        self.rows: dict[int, Fact] = {}
        self.by_op: dict[str, list[tuple[str, Rewrite]]] = {}
        for name, rule in RULES.items():
            for op in rule.ops if name not in disabled else ():
                self.by_op.setdefault(op, []).append((name, rule))

    def value(self, v: Val) -> Val:
        return v.map(self.root)

    def root(self, e: ir.Expr) -> ir.Expr:
        twin = self.pool.twins.get(id(e))
        if twin is not None:
            return self.renamed(*twin)
        new = self.run(e, self.facts)
        fired = self.fired[id(e), id(self.facts)]
        for take in self.pool.takes(e):
            self.applied.setdefault(id(take), []).extend(fired)
        return new

    def renamed(self, first: ir.Expr, renaming: Any) -> ir.Expr:
        """What becomes of an expression like `first`: the renamed form of what becomes of that one (see `twins`)."""
        known = self.first.get(id(first))
        if known is None:
            known = self.first[id(first)] = self.alone(first)
        new: ir.Expr = renaming.expr(known.new)
        renaming.again(known.journal)
        for take, fact in known.rows:
            self.know(renaming.expr(take), fact)
        for take in known.takes:
            self.applied.setdefault(id(renaming.expr(take)), []).extend(known.fired)
        self.pool.twins[id(new)] = known.new, renaming
        return new

    def alone(self, e: ir.Expr) -> _Alone:
        """An expression simplified by itself."""
        s = _Simplifier(self.pool, Facts(self.facts.constants, self.facts.selects), self.disabled)
        before, self.pool.journal = self.pool.journal, []
        try:
            new = s.run(e, s.facts)
            journal = tuple(self.pool.journal)
        finally:
            self.pool.journal = before
        takes = self.pool.takes(e)
        seen = {id(x): x for x in s.keep if id(x) in s.rows}
        rows = tuple((x, s.rows[k]) for k, x in seen.items())
        return _Alone(new, tuple(s.fired[id(e), id(s.facts)]), tuple(takes), rows, journal)

    def know(self, take: ir.Expr, fact: Fact) -> None:
        """What is known of a lookup's row number in one more place where it counts."""
        before = self.rows.get(id(take))
        self.rows[id(take)] = fact if before is None else before.join(fact)

    def run(self, e: ir.Expr, facts: Facts) -> ir.Expr:
        """`e` made simpler, equal to it wherever the facts hold."""
        key = (id(e), id(facts))
        found = self.memo.get(key)
        if found is not None:
            return found
        fired: list[str] = []
        new = self.inside(e, facts, fired)
        for _ in range(64):
            step = self.step(new, facts, fired)
            if step is None:
                break
            # A rule may build new children: they are simplified first.
            new = self.inside(step, facts, fired)
        self.memo[key] = self.memo[id(new), id(facts)] = new
        self.keep += [e, new]
        if isinstance(new, ir.Take):
            self.know(new, facts.of(new.idx))
        self.fired[key] = list(dict.fromkeys(fired))
        self.fired.setdefault((id(new), id(facts)), [])  # by itself, it is as simple as it gets
        return new

    def inside(self, e: ir.Expr, facts: Facts, fired: list[str]) -> ir.Expr:
        """`e` with its children simplified, each with the facts that hold where its value counts."""
        if not e.children:
            return e
        children: list[ir.Expr] = []
        for k, c in enumerate(e.children):
            within = facts
            if isinstance(e, (ir.Reduce, ir.SegReduce)):
                within = facts.root  # another index space
            elif isinstance(e, ir.Op) and e.name == "select" and k and (self.itself or self.bounds):
                within = facts.assuming(
                    children[0], k == 2, c, itself=self.itself, bounds=self.bounds
                )
            children.append(self.run(c, within))
            fired += self.fired[id(c), id(within)]
        return self.pool.with_children(e, children)

    def step(self, e: ir.Expr, facts: Facts, fired: list[str]) -> ir.Expr | None:
        op = e.name if isinstance(e, ir.Op) else type(e).__name__
        for name, rule in self.by_op.get(op, ()):
            new = rule.apply(self.pool, facts, e)
            if new is None or new is e:
                continue
            fired.append(name)
            if facts is not facts.root and rule.apply(self.pool, facts.root, e) is not new:
                fired.append(self.thanks_to(rule, facts, e, new))
            return new
        return None

    def thanks_to(self, rule: Rewrite, facts: Facts, e: ir.Expr, new: ir.Expr) -> str:
        """Which of the context rewrites a step owes its facts to."""
        if not (self.itself and self.bounds):
            return "masked-lookup" if self.itself else "facts-under-mask"
        return (
            "masked-lookup"
            if rule.apply(self.pool, facts.identities(), e) is new
            else "facts-under-mask"
        )
