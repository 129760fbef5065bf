"""Stage 2: finds the embedding columns of a flat jaxpr by propagating a lattice over its equations.

Every variable gets a `Val`: an expression over its index space (what the fused call can compute by itself),
an assembly of such expressions (a concatenation), or nothing, in which case XLA computes it and whoever
reads it reads an operand. Rules are tabled by primitive in `detect_rules` and its siblings. Then the program's
results are followed backwards: a variable that XLA needs and whose value holds a lookup becomes a result of a
fused call; everything in front of it that nobody else needs disappears.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows float8 by it
import numpy as np

from recom_jax import compat, ir
from recom_jax.shape_solver.dims import DimLike
from recom_jax.shape_solver.unify import Unifier
from recom_jax.subgraph import producers
from recom_jax.symbolic import Sizes

Shape = tuple[DimLike, ...]

DTYPES = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        *ir.FLOAT8,
    ]
)
# What may be done with float8 rows before they are converted. XLA computes the rest, in precisions of its own choice.
_MOVES_FLOAT8 = frozenset(
    (
        "gather",
        "dynamic_slice",
        "convert_element_type",
        "select_n",
        "reshape",
        "squeeze",
        "broadcast_in_dim",
        "transpose",
        "copy",
    )
)


LONG = 8  # operations from which on a value without lookups is worth a place in a call
DEEPEST = 150  # operations inside one another
SYMBOLIC = "a size that is symbolic in this trace (jax.export)"


class Refuse(Exception):
    """A rule's answer for a construct it does not understand: the value is left to XLA, for this reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One piece of an assembly: `expr` over `shape`, written at offset + sum(index * stride)."""

    expr: ir.Expr
    shape: Shape
    offset: DimLike
    strides: ir.Strides


@dataclasses.dataclass(frozen=True, slots=True)
class Val:
    """What a variable is: one expression, or parts that together fill a row-major buffer of `shape`."""

    shape: Shape
    expr: ir.Expr | None
    parts: tuple[Part, ...] = ()

    @property
    def takes(self) -> int:
        return self.expr.takes if self.expr is not None else sum(p.expr.takes for p in self.parts)


@dataclasses.dataclass(slots=True)
class Read:
    """One table read as written: a column of the report."""

    table: Any
    eqn: Any
    expr: ir.Expr | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Output:
    """A variable that a fused call produces."""

    var: Any
    val: Val
    level: int


@dataclasses.dataclass(frozen=True)
class Detected:
    """The split of a program into fused results and equations left to XLA.

    Attributes:
      outputs: results of fused calls; those of one level make one call.
      kept: equations XLA runs, with the level each belongs to: level-k calls read what levels <= k made.
      reads: every table read found, fused or not.
      value_of: jaxpr constants by id of their variable.
      late: unpooled results that wait for what XLA makes of the same rows: better left to XLA, so that rows
        are looked up once.
      others: gathers that are no embedding columns, with the reason.
    """

    jaxpr: Any
    pool: ir.Pool
    unifier: Unifier
    outputs: tuple[Output, ...]
    kept: tuple[tuple[int, Any], ...]
    reads: tuple[Read, ...]
    value_of: dict[int, Any]
    arguments: frozenset[int]
    operands: dict[int, Val]
    sizes: Sizes
    late: tuple[Any, ...] = ()
    others: tuple[tuple[Any, str], ...] = ()

    def shape_of(self, var: Any) -> Shape:
        """The sizes of a variable read as an operand."""
        known = self.operands.get(id(var))
        return known.shape if known is not None else self.sizes.shape(var.aval.shape)

    def __str__(self) -> str:
        lines = [f"{len(self.outputs)} fused results, {len(self.kept)} equations left to XLA"]
        for o in self.outputs:
            parts = o.val.parts or (Part(o.val.expr, o.val.shape, 0, ()),)  # type: ignore[arg-type]
            lines.append(
                f"level {o.level}: [{', '.join(map(str, o.val.shape))}] from {len(parts)} parts"
            )
            lines += [f"  @{p.offset} strides {p.strides} over {p.shape}: {p.expr}" for p in parts]
        lines += [
            f"not fused: {r.reason} ({compat.source_line(r.eqn)})" for r in self.reads if r.reason
        ]
        return "\n".join(lines)


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
        self.env: dict[int, Val] = {}
        self.operands: dict[int, Val] = {}
        self.reads: list[Read] = []
        self.others: list[tuple[Any, str]] = []
        self.value_of: dict[int, Any] = {}
        self._made_by: dict[int, tuple[Any, int]] | None = None
        self._depth: dict[int, int] = {}
        self.extra_consts: list[tuple[Any, Any]] = []
        jaxpr = compat.open_jaxpr(closed)
        self.symbolic = any(
            type(n) is not int and compat.is_symbolic(n)
            for vars in (jaxpr.invars, jaxpr.constvars, *(e.outvars for e in jaxpr.eqns))
            for v in vars
            for n in getattr(v.aval, "shape", ())
        )
        self.arguments = frozenset(map(id, (*jaxpr.invars, *jaxpr.constvars)))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            if not compat.is_tracer(value):
                self.value_of[id(var)] = value

    # ---- values -----------------------------------------------------------------------------------------

    def val(self, atom: Any) -> Val:
        """The value of an equation's input; raises `Refuse` for types the program format lacks."""
        if isinstance(atom, compat.Literal):
            return self.const_val(atom)
        found = self.env.get(id(atom))
        if found is None:
            found = self.env[id(atom)] = self.opaque(atom)
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
            known = self.env.get(id(var))
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

    def made_by(self) -> dict[int, tuple[Any, int]]:
        """id of a variable -> (its equation, which output)."""
        if self._made_by is None:
            self._made_by = producers(compat.open_jaxpr(self.closed).eqns)
        return self._made_by

    def note(self, e: ir.Expr, rewrite: str) -> None:
        self.pool.note(e, (rewrite,))

    # ---- propagation ------------------------------------------------------------------------------------

    def run(self) -> Detected:
        from recom_jax.detect_bags import BAG_RULES
        from recom_jax.detect_rules import RULES
        from recom_jax.detect_tables import TABLE_RULES, refused_read

        jaxpr = compat.open_jaxpr(self.closed)
        for eqn in jaxpr.eqns:
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
        return self.demand(jaxpr)

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

    def demand(self, jaxpr: Any) -> Detected:
        """Follows the results backwards to what must be computed, and by whom."""
        made_by = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
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
            value = self.env.get(id(var))
            if value is not None and id(var) in made_by and self.pays(value):
                fused[id(var)] = value
                work += leaves(value)
                continue
            eqn = made_by.get(id(var))
            if eqn is not None and id(eqn) not in kept:
                kept.add(id(eqn))
                work += [v for v in eqn.invars if not isinstance(v, compat.Literal)]
        return self.levels(jaxpr, fused, kept)

    def pays(self, value: Val) -> bool:
        """Whether a call computes a needed value: it looks rows up, or (`Options.fuse_values`) is long and exact."""
        if value.takes:
            return not self.grows(value)
        if not self.options.fuse_values or value.expr is None or not value.expr.exact:
            return False
        seen: set[int] = set()
        return sum(isinstance(e, (ir.Op, ir.Search)) for e in ir.walk(value.expr, seen)) >= LONG

    def grows(self, value: Val) -> bool:
        """Whether a value repeats lookups along new axes: XLA then spreads the smaller array itself."""
        if value.expr is None:
            return False
        sizes = [self.unifier.value(n) for n in value.shape]
        memo: dict[int, frozenset[int]] = {}
        own = 0
        work = [value.expr]
        seen: set[int] = (
            set()
        )  # a shared node once: as a tree, an expression may be exponentially large
        while work:
            e = work.pop()
            if id(e) in seen:
                continue
            seen.add(id(e))
            if isinstance(e, (ir.Take, ir.Reduce, ir.SegReduce)):
                if e.takes:
                    own += math.prod(sizes[k] for k in ir.depends(e, memo))
            else:
                work += e.children
        return math.prod(sizes) > 2 * own

    def levels(self, jaxpr: Any, fused: dict[int, Val], kept: set[int]) -> Detected:
        """Orders fused results into calls: a call's operands must exist before it."""
        ready: dict[int, int] = {}
        outputs: list[Output] = []
        eqns: list[tuple[int, Any]] = []
        late: list[Any] = []
        effects = 0
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                if id(var) in fused:
                    level = max((ready.get(id(v), 0) for v in leaves(fused[id(var)])), default=0)
                    outputs.append(Output(var, fused[id(var)], level))
                    if level > self.rows_level(fused[id(var)], ready, level):
                        late.append(var)
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
            self.closed,
            self.pool,
            self.unifier,
            tuple(outputs),
            tuple(eqns),
            tuple(self.reads),
            self.value_of,
            self.arguments,
            self.operands,
            self.sizes,
            tuple(late),
            tuple(self.others),
        )

    def rows_level(self, value: Val, ready: dict[int, int], level: int) -> int:
        """The level at which the rows of an unpooled value could be looked up (`level` for other values)."""
        if value.expr is None or isinstance(value.expr, ir.Take):
            return level
        seen: set[int] = set()
        nodes = list(ir.walk(value.expr, seen))
        if any(isinstance(e, (ir.Reduce, ir.SegReduce)) for e in nodes):
            return level
        takes = [e for e in nodes if isinstance(e, ir.Take)]
        return max((ready.get(id(v), 0) for e in takes for v in leaves(Val((), e))), default=level)


# What a primitive's rule is: its outputs' values (see `detect_rules`).
Rule = Callable[[Detector, Any], Val | list[Val | None] | None]


def detect(
    closed: Any, options: Any, forced: dict[int, str] | None = None
) -> tuple[Detected, Detector]:
    """Finds the columns of a flat jaxpr. `forced` names variables (by id) that must stay in XLA, and why."""
    detector = Detector(closed, options, forced or {})
    return detector.run(), detector


def leaves(value: Val) -> list[Any]:
    """The variables a value reads."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    for expr in [value.expr] if value.expr is not None else [p.expr for p in value.parts]:
        for e in ir.walk(expr, seen):
            if isinstance(e, ir.Load):
                found[id(e.var)] = e.var
            elif isinstance(e, ir.Take):
                found[id(e.table)] = e.table
            elif isinstance(e, ir.Search) and e.var is not None:
                found[id(e.var)] = e.var
    return list(found.values())


def check_float8(eqn: Any, name: str) -> None:
    """Float8 rows are looked up, moved and widened; arithmetic on them, and rounding to them, stays in XLA."""
    made, given = ([getattr(v.aval, "dtype", None) for v in vs] for vs in (eqn.outvars, eqn.invars))
    if not any(t in _FLOAT8 for t in (*made, *given)):
        return
    if name not in _MOVES_FLOAT8 or (name == "convert_element_type" and made[0] in _FLOAT8):
        raise Refuse("float8 arithmetic: only lookups and conversions to wider types are fused")


_FLOAT8 = frozenset(map(np.dtype, sorted(ir.FLOAT8)))
_NAMES: dict[Any, str] = {}


def dtype_name(aval: Any) -> str:
    dtype = getattr(aval, "dtype", "no dtype")
    name = _NAMES.get(dtype)  # asking numpy for a name costs microseconds
    if name is None:
        name = _NAMES[dtype] = str(dtype)
    if name not in DTYPES:
        raise Refuse(f"values of type {name}")
    return name


def python_scalar(value: Any) -> Any:
    return np.asarray(value)[()].item()


def row_major(shape: Shape) -> Shape:
    """Strides, in elements, of a dense array."""
    strides: list[DimLike] = []
    step: DimLike = 1
    for size in reversed(shape):
        strides.append(step)
        step = size * step
    return tuple(reversed(strides))
