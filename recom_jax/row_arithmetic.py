"""Stage 2b: leaves to XLA arithmetic on rows whose bits depend on what XLA computes beside it.

Looked-up rows promise plain JAX's bits. One product or sum has them in any context, and so have sums of sums. Other
chains have not: XLA may contract a product and a sum to one operation with one rounding, add up constants first, or
make a division a product. So such a chain on rows that are not pooled belongs to one compiler, and where XLA goes on
computing with a fused product, that is part of XLA's chain as well. The rows themselves are looked up in the call as
before, and XLA reads them in the loop that it computes in anyway.

Bags are excepted: their sums differ by the order of summation, and what is promised of them allows for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from recom_jax import compat, ir
from recom_jax.detect_values import Detected, Val

if TYPE_CHECKING:
    from recom_jax.detect import Detector

REASON = "float arithmetic on rows that XLA may compute otherwise in one piece"

_BAGS = (ir.Take, ir.Reduce, ir.SegReduce)
_SUMS = frozenset(("add", "sub", "neg"))
_PRODUCTS = frozenset(("mul", "neg"))
_CHOICES = frozenset(("neg", "abs", "max", "min", "select"))
_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "neg"))
# What hands values on as they are, or chooses among them: a product in front of it meets the sum all the same.
_MOVES = frozenset((
    "neg", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "slice", "rev", "split", "reshape", "concatenate",
    "stack", "copy", "copy_p", "stop_gradient", "pvary", "pcast", "pad", "abs", "max", "min", "clamp", "select_n",
))  # fmt: skip
# What reads values from memory, or does no arithmetic on them.
_ENDS = frozenset((
    "dot_general", "conv_general_dilated", "gather", "dynamic_slice", "dynamic_update_slice", "scatter", "sort",
    "argmax", "argmin", "reduce_max", "reduce_min", "sign", "floor", "ceil", "round", "is_finite", "eq", "ne", "lt",
    "le", "gt", "ge", "convert_element_type", "bitcast_convert_type", "top_k", "while", "scan", "cond", "psum",
    "all_gather", "all_to_all", "ppermute", "optimization_barrier", "ffi_call", "pure_callback", "io_callback",
    "debug_callback",
))  # fmt: skip
# What makes floats that no sum is contracted with.
_READS = frozenset((
    "gather", "dynamic_slice", "sort", "while", "scan", "cond", "convert_element_type", "bitcast_convert_type", "iota",
    "reduce_max", "reduce_min", "floor", "ceil", "round", "sign",
))  # fmt: skip


def left_to_xla(d: Detector, detected: Detected) -> dict[int, str]:
    """The variables, by id, that XLA must compute, and why: all of them at once, as each analysis takes its time."""
    found: dict[int, str] = {}
    readers: dict[int, list[Any]] | None = None
    for out in detected.outputs:
        exprs = list(_exprs(out.val))
        if not any(_computes(e) for e in exprs):
            continue
        goes_on = False
        if any(_contractible(e) for e in exprs):
            readers = detected.readers() if readers is None else readers
            goes_on = _computed_with(readers, out.var)
        if goes_on or any(_is_chain(d, e) for e in exprs):
            _back(d, out.var, goes_on, found)
    return found


def _exprs(value: Val) -> Iterator[ir.Expr]:
    if value.expr is not None:
        yield value.expr
    else:
        yield from (p.expr for p in value.parts)


def _rows(e: ir.Expr) -> Iterator[ir.Op]:
    """The float arithmetic on rows that are not pooled, inside an expression."""
    work, seen = [e], set()
    while work:
        x = work.pop()
        if id(x) in seen or not x.takes or isinstance(x, _BAGS):
            continue
        seen.add(id(x))
        if is_arithmetic(x) and any(map(_unpooled, x.children)):
            yield cast(ir.Op, x)
        work += x.children


def is_arithmetic(e: ir.Expr) -> bool:
    """Whether an expression is an operation whose result is rounded (or a sign's change)."""
    return isinstance(e, ir.Op) and e.name in _ARITHMETIC and ir.is_float(e.dtype)


def _unpooled(e: ir.Expr) -> bool:
    """Whether an expression holds rows themselves, or extremes of bags, which are rows' values: no sums."""
    if isinstance(e, _BAGS):
        return isinstance(e, ir.Take) or e.kind != "sum"
    return any(x.takes and _unpooled(x) for x in e.children)


def _computes(e: ir.Expr) -> bool:
    return next(_rows(e), None) is not None


def _is_chain(d: Detector, e: ir.Expr) -> bool:
    """Whether XLA may compute the arithmetic inside differently as a whole than operation by operation."""
    return any(_depends(d, x) for x in _rows(e))


def _depends(d: Detector, x: ir.Op) -> bool:
    """Whether an operation's bits depend on those that its operands come from.

    Sums of sums and products of products do not, as XLA keeps their order; but it adds (multiplies) constants first.
    """
    if x.name == "neg":
        return False
    if x.name == "div":
        return not context_free_divisor(d, x.args[1]) or any(a.arith for a in x.args)
    alike = _SUMS if x.name in _SUMS else _PRODUCTS
    if _constants(x, alike) > 1:
        return True
    return alike is _SUMS and any(_product(a) or from_arithmetic(d, a) for a in x.args)


def _constants(e: ir.Expr, alike: frozenset[str]) -> int:
    """How many constants that are not neutral are summed up (multiplied) in an expression; 2 for more."""
    found, work, seen = 0, [e], set()
    while work and found < 2:
        x = work.pop()
        found += isinstance(x, ir.Const) and x.value != (0 if alike is _SUMS else 1)
        if isinstance(x, ir.Op) and x.name in alike and id(x) not in seen:
            seen.add(id(x))
            work += x.args
    return found


def _product(e: ir.Expr) -> bool:
    """Whether a value may be a product that is not a bag's: a sum of it may be contracted with it."""
    return any(isinstance(x, ir.Op) and x.name == "mul" for x in _last(e))


def _last(e: ir.Expr) -> Iterator[ir.Expr]:
    """What a value is, where XLA sees through operations that choose: it knows that a square is its own absolute."""
    work, seen = [e], set()
    while work:
        x = work.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, ir.Op) and x.name in _CHOICES:
            work += x.args
        else:
            yield x


def context_free_divisor(d: Detector, e: ir.Expr) -> bool:
    """Whether XLA divides by a value as it is written: not by a constant, a quotient, a root or a power, nor by an
    argument that it divides several elements by, whose inverse it multiplies by."""
    while isinstance(e, ir.Op) and e.name == "convert":
        e = e.args[0]
    if isinstance(e, ir.Const):
        return power_of_two(e.value)
    if isinstance(e, ir.Load):
        return id(e.var) in d.inputs and all(stride != 0 for stride in e.strides)
    return isinstance(e, _BAGS)


def from_arithmetic(d: Detector, e: ir.Expr, sums: bool = False) -> bool:
    """Whether a value is read from what XLA makes by float arithmetic, so that it may compute both in one piece.

    Args:
      sums: whether sums count, which a further sum leaves as they are.
    """
    while isinstance(e, ir.Op) and e.name in ("neg", "convert") and ir.is_float(e.args[0].dtype):
        e = e.args[0]
    if not isinstance(e, ir.Load) or not ir.is_float(e.dtype):
        return False
    work, seen = [e.var], set()
    while work:
        v = work.pop()
        if id(v) in seen or isinstance(v, compat.Literal) or id(v) not in d.made_by():
            continue
        seen.add(id(v))
        eqn, _ = d.made_by()[id(v)]
        name = eqn.primitive.name
        if name in _MOVES:
            work += eqn.invars
        elif name in ("add", "sub"):
            if sums or any(isinstance(x, compat.Literal) for x in eqn.invars):
                return True
        elif name not in _READS:
            return True
    return False


def power_of_two(value: float) -> bool:
    """Whether a division by a number is a product, exactly."""
    return value != 0 and math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5


def _contractible(e: ir.Expr) -> bool:
    """Whether the last that happens to rows is arithmetic that XLA may take together with what follows."""
    return any(
        x.name in ("mul", "div") or (x.name in _SUMS and _constants(x, _SUMS) > 0)
        for x in _last(e)
        if isinstance(x, ir.Op) and _computes(x)
    )


def _computed_with(readers: dict[int, list[Any]], var: Any) -> bool:
    """Whether XLA goes on with arithmetic on a result."""
    work, seen = [var], set()
    while work:
        v = work.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        for eqn in readers.get(id(v), ()):
            name = eqn.primitive.name
            if name in _MOVES:
                work += eqn.outvars
            elif name not in _ENDS:
                return True
    return False


def _back(d: Detector, var: Any, goes_on: bool, found: dict[int, str]) -> None:
    """Marks the arithmetic behind a result, back to the rows."""
    made_by = d.made_by()
    work: list[tuple[Any, bool]] = [(var, goes_on)]
    seen: set[tuple[int, bool]] = set()
    while work:
        v, wanted = work.pop()
        if (id(v), wanted) in seen or id(v) not in made_by:
            continue
        seen.add((id(v), wanted))
        value = d.known(v)
        if value is None or not any(map(_computes, _exprs(value))):
            continue
        wanted = wanted or (value.expr is not None and _is_chain(d, value.expr))
        eqn, _ = made_by[id(v)]
        if wanted:
            found[id(v)] = REASON
        work += [(x, wanted) for x in eqn.invars if not isinstance(x, compat.Literal)]


__all__ = ["REASON", "context_free_divisor", "is_arithmetic", "left_to_xla", "power_of_two"]
