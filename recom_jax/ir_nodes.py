"""The nodes of the intermediate representation, and how they print (see `ir`)."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from recom_jax.immutable import node
from recom_jax.shape_solver.dims import DimLike

Strides = tuple[DimLike, ...]


@node(eq=False)
class Expr:
    """Base: ``dtype`` is a numpy dtype name. Equality is identity (interned).

    Attributes:
      exact: every element equals, bit for bit, what XLA computes for it in any context.
      arith: the value is the direct result of float arithmetic, so that XLA may contract it with a
        following add (see `detect_rules`).
      takes: number of lookups inside (0 for plain id arithmetic).
    """

    dtype: str
    exact: bool
    arith: bool
    takes: int

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()


@node(eq=False)
class Load(Expr):
    """An element of an operand: `var` is a jaxpr variable."""

    var: Any
    offset: DimLike
    strides: Strides

    def __str__(self) -> str:
        return f"{name_of(self.var)}{_view(self.offset, self.strides)}"


@node(eq=False)
class Affine(Expr):
    """An integer affine in the index: iota and arange."""

    offset: DimLike
    strides: Strides

    def __str__(self) -> str:
        return f"iota{_view(self.offset, self.strides)}"


@node(eq=False)
class Const(Expr):
    """A scalar; `value` is a Python bool, int or float (NaN is kept as its bits by the encoder)."""

    value: Any

    def __str__(self) -> str:
        return f"{self.value!r}"


@node(eq=False)
class Op(Expr):
    """An elementwise operation: `name` as in docs/program_format.md, or "select", "convert", "bitcast"."""

    name: str
    args: tuple[Expr, ...]

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.args

    def __str__(self) -> str:
        name = f"{self.name}<{self.dtype}>" if self.name in ("convert", "bitcast") else self.name
        return f"{name}({', '.join(map(str, self.args))})"


@node(eq=False)
class Search(Expr):
    """The index of `x` among boundaries: a constant array, an operand's view, or a proven uniform grid.

    Attributes:
      mode: "scan" (exact probe sequence), "compare_all", "sorted" (proven), "uniform" (proven), or "splits" or
        "lengths": the boundaries are where bags start, by their row splits or their lengths, as ``jnp.repeat``
        has it for `total` positions.
      grid: (start, step) for "uniform".
    """

    x: Expr
    var: Any
    offset: DimLike
    count: DimLike
    side: str
    mode: str
    grid: tuple[float, float] | None
    total: DimLike | None

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.x,)

    def __str__(self) -> str:
        what = f"{self.grid[0]}+k*{self.grid[1]}" if self.grid else name_of(self.var)
        total = "" if self.total is None else f", total={self.total}"
        return f"search.{self.mode}.{self.side}({self.x}, {what}, n={self.count}{total})"


@node(eq=False)
class Take(Expr):
    """A table lookup: element ``row * row_stride + sum(index * cols) + base`` of a table.

    Attributes:
      idx: the row as the program computes it, an integer expression in the same index space.
      rows: how many rows `idx` may address; row_index adds ``sum(index * row_shift)`` rows (stacked tables).
      mode: "clip" or "fill" (out-of-range rows give `fill`).
      one_hot: stands for ``one_hot(idx) @ table`` (NaN and inf anywhere in the table matter).
    """

    table: Any
    idx: Expr
    rows: int
    row_stride: int
    base: int
    cols: Strides
    row_shift: Strides
    mode: str
    fill: Any
    one_hot: bool

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.idx,)

    def __str__(self) -> str:
        how = self.mode if self.mode == "clip" else f"fill {self.fill}"
        shift = "" if not any(self.row_shift) else f" + {_view(0, self.row_shift)}"
        hot = ", one_hot" if self.one_hot else ""
        return f"{name_of(self.table)}[{self.idx}{shift}; {how}{hot}]{_view(self.base, self.cols)}"


@node(eq=False)
class Reduce(Expr):
    """`kind` ("sum", "max", "min") of `arg` over its trailing axes of `sizes`, starting from `init`."""

    kind: str
    arg: Expr
    sizes: tuple[DimLike, ...]
    init: Any

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.arg,)

    def __str__(self) -> str:
        return f"{self.kind}[{'*'.join(map(str, self.sizes))}]({self.arg})"


@node(eq=False)
class SegReduce(Expr):
    """A jagged bag: `kind` over the positions p < total with ``seg(p) == sum(index * bag)``.

    `data` and `seg` live in the index space (position, feature): `feature` says which outer index the
    second axis is.
    """

    kind: str
    data: Expr
    seg: Expr
    total: DimLike
    bag: Strides
    bag_offset: DimLike
    feature: Strides
    init: Any

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.data, self.seg)

    def __str__(self) -> str:
        return f"segment_{self.kind}({self.data}, {self.seg}, n={self.total}){_view(self.bag_offset, self.bag)}"


_NUMBERS: contextvars.ContextVar[dict[int, tuple[int, Any]] | None] = contextvars.ContextVar(
    "recom_jax_numbers", default=None
)


@contextlib.contextmanager
def numbered() -> Iterator[None]:
    """Inside, variables print as %0, %1, ... in the order they are first printed.

    Outside they print as a part of their address, which the next process, or variable, may have again.
    """
    token = _NUMBERS.set({})
    try:
        yield
    finally:
        _NUMBERS.reset(token)


def name_of(var: Any) -> str:
    """A printable name of a jaxpr variable (see `numbered`)."""
    if isinstance(var, (str, int)):
        return f"%{var}"
    numbers = _NUMBERS.get()
    if numbers is None:
        return f"%{id(var) & 0xFFFFFFFF:08x}"
    # The variable is kept, so that its id stays its own.
    return f"%{numbers.setdefault(id(var), (len(numbers), var))[0]}"


def _view(offset: DimLike, strides: Strides) -> str:
    return f"({offset};{','.join(map(str, strides))})"


FLOAT8 = frozenset(("float8_e4m3fn", "float8_e5m2"))


def is_float(dtype: str) -> bool:
    return dtype in ("float32", "float64") or is_16bit(dtype)


def is_16bit(dtype: str) -> bool:
    """Whether it is a float of 16 bits or fewer, whose values registers hold as float32."""
    return dtype in ("float16", "bfloat16") or dtype in FLOAT8
