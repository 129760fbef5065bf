"""Stage 2: finds the embedding columns of a flat jaxpr by propagating a lattice over its equations.

Every variable gets a `Val`: an expression over its index space (what the fused call can compute by itself),
an assembly of such expressions (a concatenation), or nothing, in which case XLA computes it and whoever
reads it reads an operand. Rules are tabled by primitive in `detect_rules` and its siblings. Then the program's
results are followed backwards: a variable that XLA needs and whose value holds a lookup becomes a result of a
fused call; everything in front of it that nobody else needs disappears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recom_jax import compat, ir
from recom_jax.detect_demand import demand
from recom_jax.detect_float8 import check_float8
from recom_jax.detect_values import (
    SYMBOLIC,
    Detected,
    Read,
    Refuse,
    Shape,
    Val,
    dtype_name,
    python_scalar,
    row_major,
)
from recom_jax.shape_solver.dims import DimLike
from recom_jax.shape_solver.unify import Unifier
from recom_jax.subgraph import producers
from recom_jax.symbolic import Sizes
from recom_jax.twins import Twins

DEEPEST = 150  # operations inside one another


class Detector:
    """The state rules work on. One per analysis."""

    def __init__(self, closed: Any, options: Any, forced: dict[int, str]) -> None:
        self.closed = closed
        self.options = options
        self.disabled: frozenset[str] = options.disabled
        self.forced = forced
        self.pool = ir.Pool()
        self.unifier = Unifier()
        self.sizes = Sizes(self.unifier)
        self.twins = Twins(self)
        self.env: dict[int, Val] = {}
        self.operands: dict[int, Val] = {}
        self.reads: list[Read] = []
        self.others: list[tuple[Any, str]] = []
        self.value_of: dict[int, Any] = {}
        self._made_by: dict[int, tuple[Any, int]] | None = None
        self._depth: dict[int, int] = {}
        self._leaves: dict[int, tuple[Val, list[Any]]] = {}
        self.extra_consts: list[tuple[Any, Any]] = []
        jaxpr = compat.open_jaxpr(closed)
        self.symbolic = _symbolic((jaxpr.invars, jaxpr.constvars, *(e.outvars for e in jaxpr.eqns)))
        self.inputs = frozenset(map(id, jaxpr.invars))
        self.arguments = self.inputs | frozenset(map(id, jaxpr.constvars))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            if not compat.is_tracer(value):
                self.value_of[id(var)] = value

    # ---- values -----------------------------------------------------------------------------------------

    def val(self, atom: Any) -> Val:
        """The value of an equation's input; raises `Refuse` for types the program format lacks."""
        if isinstance(atom, compat.Literal):
            return self.const_val(atom)
        found = self.known(atom)
        if found is None:
            found = self.env[id(atom)] = self.opaque(atom)
        return found

    def known(self, var: Any) -> Val | None:
        """The value of a variable that a rule made or `val` was asked for; None: XLA computes it."""
        found = self.env.get(id(var))
        if found is None and id(var) in self.twins.later:
            found = self.env[id(var)] = self.twins.value(var)
        return found

    def const_val(self, literal: Any) -> Val:
        dtype = dtype_name(literal.aval)
        if literal.aval.shape != ():
            raise Refuse("an array literal")
        return Val((), self.pool.const(dtype, python_scalar(literal.val)))

    def opaque(self, var: Any) -> Val:
        """An operand read as it is: an argument, a constant, or what XLA computed."""
        found = self.operands.get(id(var))
        if found is None:
            dtype = dtype_name(var.aval)
            known = self.known(var)
            kind = "in" if id(var) in self.arguments else "x"
            shape = (
                known.shape
                if known is not None
                else tuple(self.axis(kind, d) for d in var.aval.shape)
            )
            found = self.operands[id(var)] = Val(
                shape, self.pool.load(var, dtype, 0, row_major(shape))
            )
        return found

    def axis(self, kind: str, size: Any) -> DimLike:
        """The size of an operand's axis: a symbol of its own.

        In a symbolic trace it is what JAX says, numbers included: they belong to the type of what is exported.
        """
        found = self.sizes.of(size)
        if self.symbolic or not isinstance(found, int):
            return found
        return self.unifier.fresh(kind, found)

    def literal_dim(self, size: Any) -> DimLike:
        """A size written in the program: a symbol of its own unless it is 1 (it may turn out to be the batch)."""
        found = self.sizes.of(size)
        if found == 1 or self.symbolic or not isinstance(found, int):
            return found
        return self.unifier.fresh("n", found, literal=True)

    def same(self, a: DimLike, b: DimLike) -> bool:
        """Whether two sizes are equal in every call that this trace stands for."""
        return a is b or self.unifier.known(a) == self.unifier.known(b)

    def is_one(self, d: DimLike) -> bool:
        return self.unifier.known(d) == 1

    def join(self, shapes: Sequence[Shape]) -> Shape:
        """The common shape of an elementwise operation; scalars fit everything, size 1 stretches."""
        rank = max(map(len, shapes))
        full = [s for s in shapes if len(s) == rank]
        out = list(full[0])
        for other in full[1:]:
            if other is full[0]:
                continue
            for k, b in enumerate(other):
                a = out[k]
                if a is b or a == b:
                    continue
                if not self.same(a, b):  # lax stretches axes of size 1
                    out[k] = b if self.is_one(a) else a
                elif a == 1 or b == 1:  # a batch of 1 is no fact about the batch
                    out[k] = b if a == 1 else a
                else:
                    self.unifier.unify(a, b)
        return tuple(out)

    def spread(self, v: Val, shape: Shape) -> ir.Expr:
        """The expression of `v`, stretched to `shape` if need be."""
        expr = self.one(v)
        if v.shape is shape or isinstance(expr, ir.Const):
            return expr
        rank = len(shape)
        if not v.shape:
            zeros = (0,) * rank
            return expr if rank == 0 else self.pool.remap(expr, 0, lambda s, o: (zeros, o))
        if len(v.shape) != rank:
            raise Refuse("operands of different rank")
        flat = [k for k in range(rank) if self.is_one(v.shape[k]) and not self.is_one(shape[k])]
        if not flat:
            return expr
        return self.pool.remap(
            expr, rank, lambda s, o: (tuple(0 if k in flat else x for k, x in enumerate(s)), o)
        )

    def one(self, v: Val) -> ir.Expr:
        if v.expr is None:
            raise Refuse("a concatenation used as a value")
        return v.expr

    def leaves(self, value: Val) -> list[Any]:
        """The variables a value reads."""
        found = self._leaves.get(id(value))
        if found is None:
            exprs = [p.expr for p in value.parts] if value.expr is None else [value.expr]
            read = {id(v): v for e in exprs for v in self.pool.leaves(e)}
            found = self._leaves[id(value)] = value, list(read.values())
        return found[1]

    def made_by(self) -> dict[int, tuple[Any, int]]:
        """id of a variable -> (its equation, which output)."""
        if self._made_by is None:
            self._made_by = producers(compat.open_jaxpr(self.closed).eqns)
        return self._made_by

    def note(self, e: ir.Expr, rewrite: str) -> None:
        self.pool.note(e, (rewrite,))

    # ---- propagation ------------------------------------------------------------------------------------

    def run(self) -> Detected:
        jaxpr = compat.open_jaxpr(self.closed)
        self.twins.run(jaxpr)
        return demand(self, jaxpr)

    def step(self, eqns: Sequence[Any]) -> None:
        """Applies their rules to equations, in order."""
        from recom_jax.detect_bags import BAG_RULES
        from recom_jax.detect_refused import refused_read
        from recom_jax.detect_rules import RULES
        from recom_jax.detect_tables import TABLE_RULES

        for eqn in eqns:
            name = eqn.primitive.name
            rule = RULES.get(name) or TABLE_RULES.get(name) or BAG_RULES.get(name)
            reads_before = len(self.reads)
            if rule is None:
                refused_read(self, eqn, None)
                continue
            if id(eqn.outvars[0]) in self.forced:
                refused_read(self, eqn, self.forced[id(eqn.outvars[0])])
                continue
            try:
                check_float8(eqn, name)
                out = rule(self, eqn)
                if name in RULES:
                    self.check_depth(out if isinstance(out, list) else [out])
            except (Refuse, ir.NotAffine) as why:
                del self.reads[reads_before:]
                refused_read(self, eqn, str(why))
                continue
            except compat.Inconclusive:  # what a rule needs to know is no fact of all sizes
                del self.reads[reads_before:]
                refused_read(self, eqn, SYMBOLIC)
                continue
            except Exception as why:  # a defect of ours in one rule costs one column its fusion, not the user a call
                if self.options.verifies:
                    raise
                del self.reads[reads_before:]
                refused_read(
                    self,
                    eqn,
                    f"recom_jax failed on it ({type(why).__name__}: {why}); please report",
                )
                continue
            if out is None:
                if name in ("gather", "dynamic_slice"):
                    refused_read(self, eqn, None)
                continue
            for var, v in zip(eqn.outvars, out if isinstance(out, list) else [out], strict=True):
                if v is not None:
                    self.env[id(var)] = v

    def check_depth(self, out: Sequence[Val | None]) -> None:
        """What walks expressions recurses: a deeper one is cut here, and goes on from an operand."""
        for v in out:
            if v is not None and v.expr is not None and self.depth(v.expr) > DEEPEST:
                raise Refuse(f"an expression more than {DEEPEST} operations deep")

    def depth(self, e: ir.Expr) -> int:
        found = self._depth.get(id(e))
        if found is None:
            found = self._depth[id(e)] = 1 + max(map(self.depth, e.children), default=0)
        return found


def _symbolic(variables: Sequence[Sequence[Any]]) -> bool:
    """Whether a size of a variable is a symbol of JAX's."""
    for some in variables:
        for v in some:
            for n in getattr(v.aval, "shape", ()):
                if n.__class__ is not int and compat.is_symbolic(n):
                    return True
    return False


# What a primitive's rule is: its outputs' values (see `detect_rules`).
Rule = Callable[[Detector, Any], Val | list[Val | None] | None]


def detect(
    closed: Any, options: Any, forced: dict[int, str] | None = None
) -> tuple[Detected, Detector]:
    """Finds the columns of a flat jaxpr. `forced` names variables (by id) that must stay in XLA, and why."""
    detector = Detector(closed, options, forced or {})
    return detector.run(), detector
