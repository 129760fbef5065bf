"""How a fused call depends on its tables, where that is linear: what the fused backward is made from.

Many columns are linear in their tables: rows, times numbers that no table decides, added up. Then the derivative by a
table is the same program run on the table's tangent, and its transpose adds rows of the cotangent to rows of the
gradient. This stage finds such tables in the expressions of a call, and says of every other table why it is none.

A `Term` is one lookup with the numbers that its rows are multiplied by. Its *items* are what one row of the table is
read for: the positions of a bag, or the bags themselves where nothing is pooled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from recom_jax import compat, ir
from recom_jax.detect_values import Detected, Output, Part, Refuse, Val, row_major
from recom_jax.errors import EncodeError
from recom_jax.linear_parts import Mover, all_of, as_int32, product, row_of
from recom_jax.schedule import Piece, piece_of
from recom_jax.shape_solver.dims import DimLike

# What stands between a table and a result, and is differentiated as it is written. `stop_gradient` is not, for one.
_PLAIN = frozenset((
    "gather", "dynamic_slice", "mul", "div", "add", "add_any", "sub", "neg", "select_n", "reduce_sum", "scatter-add",
    "scatter_add", "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "concatenate", "slice",
    "squeeze", "expand_dims", "dot_general", "copy", "copy_p", "split", "stack", "rev",
))  # fmt: skip
# Of fewer bits, JAX has no rules to promote by; their tables are read, hardly trained.
_FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))
NO_ROWS = "no row of it is looked up"
NO_TABLE = frozenset((NO_ROWS,))
"""Reasons why a variable is no table at all."""


@dataclasses.dataclass(frozen=True)
class Term:
    """One lookup that a result is linear in.

    Attributes:
      table: the variable of the table. base: the first of its columns that is read. width: how many.
      piece: where the rows of the cotangent lie. jagged: whether items say themselves which bag they are of.
      shape: sizes of the items: bags, then positions (one size, all positions, if jagged).
      row: int32 over the items, the row of the table (counted through stacked tables), -1 for none.
      bag: int32 over the items, if jagged; else None.
      weight: over the items; scale, divisor, there: over the bags. None: 1, 1, 1, True.
    """

    table: Any
    base: int
    width: int
    piece: Piece
    jagged: bool
    shape: tuple[DimLike, ...]
    row: ir.Expr
    bag: ir.Expr | None
    weight: ir.Expr | None
    scale: ir.Expr | None
    divisor: ir.Expr | None
    there: ir.Expr | None

    def __str__(self) -> str:
        numbers = [
            f"{name} {e}"
            for name in ("bag", "weight", "scale", "divisor", "there")
            if (e := getattr(self, name)) is not None
        ]
        size = "*".join(map(str, self.shape)) or "1"
        return (
            f"{ir.name_of(self.table)}[{self.row}]({self.base}; {self.width}) += result {self.piece.result} "
            f"@{self.piece.offset} strides {self.piece.strides} for {size} items"
            + "".join(f"; {x}" for x in numbers)
        )


@dataclasses.dataclass(frozen=True)
class Linear:
    """What is linear in a call.

    Attributes:
      tables: variables of the tables that every result is linear in.
      terms: their lookups. results: numbers of the results that depend on them.
      tangent: those results as functions of the tables' tangents, which stand in the tables' places.
      refused: why a table is not among them, by the id of its variable.
    """

    tables: tuple[Any, ...]
    terms: tuple[Term, ...]
    results: tuple[int, ...]
    tangent: tuple[Output, ...]
    refused: Mapping[int, str]

    def __str__(self) -> str:
        return "\n".join(map(str, self.terms))


def linear(detected: Detected, outputs: Sequence[Output], candidates: Sequence[Any]) -> Linear:
    """Which of `candidates`, variables of tables, a call is linear in, and how.

    Args:
      detected, outputs: of a program that is one fused call, simplified.
    """
    finder = _Finder(detected, candidates)
    refuse_hidden(detected.jaxpr, candidates, finder.refused)
    for k, out in enumerate(outputs):
        for part in parts_of(out.val):
            finder.part(part, k)
    bad = finder.refused
    for var in candidates:
        if str(var.aval.dtype) not in _FLOATS:
            bad[id(var)] = "a table of 8-bit floats"
    read = {id(t.table) for t in finder.terms} | set(bad)
    for key in finder.arrays:
        bad[key] = "it is read as an array, too" if key in read else NO_ROWS
    found = {id(t.table) for t in finder.terms} - set(bad)
    for var in candidates:
        if id(var) not in found:
            bad.setdefault(id(var), NO_ROWS)
    tables = tuple(v for v in candidates if id(v) not in bad)
    terms = tuple(t for t in finder.terms if id(t.table) not in bad)
    results = tuple(sorted({t.piece.result for t in terms}))
    mover = Mover(detected.pool, {id(v) for v in tables})
    tangent = tuple(
        dataclasses.replace(outputs[k], val=mover.value(outputs[k].val), level=0) for k in results
    )
    return Linear(tables, terms, results, tangent, bad)


def parts_of(value: Val) -> tuple[Part, ...]:
    if value.expr is None:
        return value.parts
    return (Part(value.expr, value.shape, 0, row_major(value.shape)),)


def refuse_hidden(closed: Any, candidates: Sequence[Any], refused: dict[int, str]) -> None:
    """Tables behind an operation whose derivative is not that of its value, or is not known here."""
    behind: dict[int, frozenset[int]] = {id(v): frozenset((id(v),)) for v in candidates}
    for eqn in compat.open_jaxpr(closed).eqns:
        tables = [behind[id(v)] for v in eqn.invars if id(v) in behind]
        if not tables:
            continue
        if (
            eqn.primitive.name.startswith("scatter")
            and "FILL" not in str(eqn.params["mode"]).upper()
        ):
            for key in frozenset().union(*tables):
                refused.setdefault(
                    key, "the gradient of an id outside the bags is not that of its value"
                )
        union = tables[0] if len(tables) == 1 else frozenset().union(*tables)
        if eqn.primitive.name not in _PLAIN:
            for key in union:
                refused.setdefault(key, f"{eqn.primitive.name} lies between it and the result")
        for var in eqn.outvars:
            behind[id(var)] = union


@dataclasses.dataclass(frozen=True)
class _Path:
    """What lies between the result and the expression at hand. `items`: of the pooling on the way, if any."""

    piece: Piece
    items: ir.Reduce | ir.SegReduce | None = None
    sign: int = 1
    weights: tuple[ir.Expr, ...] = ()
    scales: tuple[ir.Expr, ...] = ()
    divisors: tuple[ir.Expr, ...] = ()
    masks: tuple[ir.Expr, ...] = ()  # over items
    there: tuple[ir.Expr, ...] = ()  # over bags
    converted: bool = False

    @property
    def feature(self) -> int:
        return 1 if isinstance(self.items, ir.SegReduce) else len(self.piece.outer)

    @property
    def at_root(self) -> bool:
        return self == _Path(self.piece)


class _Finder:
    def __init__(self, detected: Detected, candidates: Iterable[Any]) -> None:
        self.detected, self.pool = detected, detected.pool
        self.resolve = detected.unifier.resolve
        self.candidates = {id(v) for v in candidates}
        self.refused: dict[int, str] = {}
        self.arrays: set[int] = set()  # candidates that are read as arrays
        self.terms: list[Term] = []
        self.deps: dict[int, frozenset[int]] = {}

    def part(self, part: Part, result: int) -> None:
        for e in ir.walk(part.expr):
            if isinstance(e, (ir.Load, ir.Search)) and id(e.var) in self.candidates:
                self.arrays.add(id(e.var))
        try:
            piece = piece_of(self.detected, part, result)
        except EncodeError as why:
            return self.refuse(part.expr, str(why))
        if piece.width is None:
            return self.refuse(part.expr, "a scalar result")
        self.visit(piece.expr, _Path(piece))

    def refuse(self, e: ir.Expr, why: str) -> None:
        for x in ir.walk(e):
            if isinstance(x, ir.Take):
                self.refused.setdefault(id(x.table), why)

    def visit(self, e: ir.Expr, path: _Path) -> None:
        if not e.takes:
            return
        try:
            self.step(e, path)
        except (Refuse, ir.NotAffine) as why:
            self.refuse(e, str(why) or "a view that strides cannot express")

    def step(self, e: ir.Expr, path: _Path) -> None:
        if isinstance(e, ir.Take):
            return self.take(e, path)
        if isinstance(e, ir.Reduce):
            if e.kind != "sum" or path.items is not None:
                raise Refuse(f"a bag's {e.kind}" if e.kind != "sum" else "bags of bags")
            return self.visit(e.arg, dataclasses.replace(path, items=e))
        if isinstance(e, ir.SegReduce):
            return self.jagged(e, path)
        if not isinstance(e, ir.Op):
            raise Refuse("a search among rows")
        if e.name in ("add", "sub"):
            self.visit(e.args[0], path)
            sign = -path.sign if e.name == "sub" else path.sign
            return self.visit(e.args[1], dataclasses.replace(path, sign=sign))
        if e.name == "neg":
            return self.visit(e.args[0], dataclasses.replace(path, sign=-path.sign))
        if e.name == "convert":
            return self.convert(e, path)
        if e.name == "select":
            return self.select(e, path)
        if e.name in ("mul", "div"):
            a, b = e.args
            if a.takes and b.takes:
                raise Refuse("a product of rows")
            if b.takes and e.name == "div":
                raise Refuse("a number divided by rows")
            rows, factor = (a, b) if a.takes else (b, a)
            return self.visit(rows, self.times(path, factor, e.name))
        raise Refuse(f"{e.name} of rows")

    def times(self, path: _Path, factor: ir.Expr, how: str) -> _Path:
        on_items = self.place(factor, path)
        if how == "div":
            if on_items:
                factor = self.pool.op(
                    "div", factor.dtype, self.pool.const(factor.dtype, 1.0), factor
                )
                return dataclasses.replace(path, weights=(*path.weights, factor))
            return dataclasses.replace(
                path, divisors=(*path.divisors, self.over_bags(factor, path))
            )
        if on_items:
            return dataclasses.replace(path, weights=(*path.weights, factor))
        return dataclasses.replace(path, scales=(*path.scales, self.over_bags(factor, path)))

    def place(self, e: ir.Expr, path: _Path) -> bool:
        """Whether a number belongs to items, not to bags."""
        axes = ir.depends(e, self.deps)
        if path.feature in axes:
            raise Refuse("a number for each column of a row")
        if path.items is None or isinstance(e, ir.Const):
            return False
        if isinstance(path.items, ir.Reduce) and not any(k > path.feature for k in axes):
            return False
        if any(isinstance(x, (ir.Reduce, ir.SegReduce)) for x in ir.walk(e)):
            raise Refuse("a number for each position that a whole bag decides")
        return True

    def select(self, e: ir.Op, path: _Path) -> None:
        pred, on_false, on_true = e.args
        if pred.takes:
            raise Refuse("a choice that rows decide")
        on_items = self.place(pred, path)
        for branch, mask in ((on_false, self.pool.op("not", "bool", pred)), (on_true, pred)):
            if on_items:
                self.visit(branch, dataclasses.replace(path, masks=(*path.masks, mask)))
            else:
                mask = self.over_bags(mask, path)
                self.visit(branch, dataclasses.replace(path, there=(*path.there, mask)))

    def convert(self, e: ir.Op, path: _Path) -> None:
        old, new = e.args[0].dtype, e.dtype
        if not {old, new} <= _FLOATS:
            raise Refuse(f"a conversion from {old} to {new}")
        if jnp.promote_types(old, new) != jnp.dtype(new) and not path.at_root:
            raise Refuse(f"rounding to {new}")
        self.visit(e.args[0], dataclasses.replace(path, converted=True))

    def jagged(self, e: ir.SegReduce, path: _Path) -> None:
        if e.kind != "sum" or path.items is not None:
            raise Refuse(f"a bag's {e.kind}" if e.kind != "sum" else "bags of bags")
        feature = len(path.piece.outer)
        unit = [int(k == 0) for k in range(len(e.bag))]
        rows = [int(k == feature) for k in range(len(e.feature))]
        if (
            feature != 1
            or e.bag_offset != 0
            or [self.resolve(v) for v in e.bag] != unit
            or [self.resolve(v) for v in e.feature] != rows
        ):
            raise Refuse("jagged bags that are no plain rows of the result")
        self.visit(e.data, dataclasses.replace(path, items=e))

    def take(self, t: ir.Take, path: _Path) -> None:
        shape = t.table.aval.shape
        if id(t.table) not in self.candidates:
            return
        if t.one_hot:
            raise Refuse("a one-hot product")
        if t.idx.takes:
            raise Refuse("ids that are looked up")
        if any(v != int(k == path.feature) for k, v in enumerate(t.cols)):
            raise Refuse("rows that do not lie along the embedding axis")
        width = self.detected.unifier.value(path.piece.width or 0)
        if t.row_stride != shape[-1] or not 0 <= t.base <= shape[-1] - width:
            raise Refuse("rows that are no rows of the table")
        if math.prod(shape[:-1]) >= 2**31:
            raise Refuse("2^31 rows or more")
        self.place(t.idx, path)
        drops = t.mode != "clip" or self.promised(t)
        bag = None
        outer = path.piece.outer
        items: tuple[DimLike, ...] = outer
        if isinstance(path.items, ir.Reduce):
            items = (*outer, *path.items.sizes)
        elif isinstance(path.items, ir.SegReduce):
            items = (path.items.total,)
            bag = self.over_items(as_int32(self.pool, path.items.seg), path)
        pooled = any(isinstance(x, (ir.Reduce, ir.SegReduce)) for x in ir.walk(t.idx))
        if pooled and path.items is not None:
            raise Refuse("an id for each position that a whole bag decides")
        row = row_of(self.pool, t, drops, path.masks)
        scales = path.scales
        if path.sign < 0:
            scales = (*scales, self.pool.const("float32", -1.0))
        self.terms.append(
            Term(
                t.table,
                t.base,
                width,
                path.piece,
                bag is not None,
                items,
                self.over_items(row, path),
                bag,
                self.over_items(product(self.pool, path.weights), path),
                product(self.pool, scales),
                product(self.pool, path.divisors),
                all_of(self.pool, path.there),
            )
        )

    # ---- numbers ------------------------------------------------------------------------------------------

    def over_bags(self, e: ir.Expr, path: _Path) -> ir.Expr:
        """`e`, which no position decides, over (bags..., feature)."""
        if not isinstance(path.items, ir.Reduce) or isinstance(e, ir.Const):
            return e
        rank = path.feature + 1
        return self.pool.remap(e, rank + len(path.items.sizes), lambda s, o: (s[:rank], o))

    def over_items(self, e: Any, path: _Path) -> Any:
        """`e` over (items..., 1): without the embedding axis."""
        if e is None or isinstance(e, ir.Const):
            return e
        n = path.feature
        rank = ir.rank_of(e)
        if isinstance(path.items, ir.SegReduce) and rank == 1:
            return self.pool.remap(e, 1, lambda s, o: ((*s, 0), o))
        return self.pool.remap(e, rank or 0, lambda s, o: ((*s[:n], *s[n + 1 :], 0), o))

    def promised(self, t: ir.Take) -> bool:
        """Whether ids outside were promised not to be (`table[ids]`): reads clip them, gradients drop them."""
        modes = {
            "promise" in str(self.detected.reads[k].eqn.params.get("mode", "clip")).lower()
            for k in self.pool.origins.get(id(t), ())
        }
        if len(modes) != 1:
            raise Refuse("equal ids in two modes")
        return modes.pop()


__all__ = ["NO_TABLE", "Linear", "Term", "linear"]
