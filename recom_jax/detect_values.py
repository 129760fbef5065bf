"""What stage 2 makes of a jaxpr's variables: the lattice's values, and the result of the analysis."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows float8 by it
import numpy as np

from recom_jax import compat, ir
from recom_jax.immutable import node
from recom_jax.shape_solver.dims import DimLike
from recom_jax.shape_solver.unify import Unifier
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


SYMBOLIC = "a size that is symbolic in this trace (jax.export)"


class Refuse(Exception):
    """A rule's answer for a construct it does not understand: the value is left to XLA, for this reason."""


@node()
class Part:
    """One piece of an assembly: `expr` over `shape`, written at offset + sum(index * stride)."""

    expr: ir.Expr
    shape: Shape
    offset: DimLike
    strides: ir.Strides


@node()
class Val:
    """What a variable is: one expression, or parts that together fill a row-major buffer of `shape`."""

    shape: Shape
    expr: ir.Expr | None
    parts: tuple[Part, ...] = ()

    def map(self, f: Callable[[ir.Expr], ir.Expr]) -> Val:
        """The same places, holding what `f` makes of their expressions."""
        if self.expr is not None:
            return Val(self.shape, f(self.expr))
        parts = (Part(f(p.expr), p.shape, p.offset, p.strides) for p in self.parts)
        return Val(self.shape, None, tuple(parts))

    @property
    def takes(self) -> int:
        return self.expr.takes if self.expr is not None else sum(p.expr.takes for p in self.parts)


@dataclasses.dataclass(slots=True)
class Read:
    """One table read as written: a column of the report."""

    table: Any
    eqn: Any
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

    def readers(self) -> dict[int, list[Any]]:
        """The equations left to XLA that read a variable, by its id."""
        found: dict[int, list[Any]] = collections.defaultdict(list)
        for _, eqn in self.kept:
            for v in eqn.invars:
                if not isinstance(v, compat.Literal):
                    found[id(v)].append(eqn)
        return found

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


_NAMES: dict[Any, str] = {}


def dtype_text(aval: Any) -> str:
    """The name of a dtype, whether the format has it or not."""
    dtype = getattr(aval, "dtype", "no dtype")
    name = _NAMES.get(dtype)  # asking numpy for a name costs microseconds
    if name is None:
        name = _NAMES[dtype] = str(dtype)
    return name


def dtype_name(aval: Any) -> str:
    """The name of a dtype. Raises Refuse where the format lacks it."""
    name = dtype_text(aval)
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
