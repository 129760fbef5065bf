"""What is known of each expression's values, computed once per expression from `shape_solver.facts`.

Facts hold in a context. In ``select(mask, a, b)`` the value of `b` counts only where the mask is true, so there
the mask may be assumed: it is true, and a comparison in it bounds its operands. A context is a `Facts` of its own
with those assumptions; it is valid in one index space, so reductions start again from the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from recom_jax import ir
from recom_jax.shape_solver import facts as rules
from recom_jax.shape_solver.fact import dtype_of
from recom_jax.shape_solver.facts import Fact

LARGEST_CONSTANT = 1 << 22  # elements; a constant beyond that is not scanned for facts
DEEPEST = 4  # contexts inside contexts
LARGEST_BRANCH = 4096  # nodes; a branch beyond that is assumed to mention its mask

_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_SWAPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


class Facts:
    """Facts by expression, in one context.

    Args:
      constants: arrays by id of their jaxpr variable.
      selects: whether the cases of a select are looked at under its predicate.
    """

    def __init__(self, constants: dict[int, Any], selects: bool = True) -> None:
        self.constants, self.selects = constants, selects
        self.root = self
        self.depth = 0
        self.assumed: dict[int, Fact] = {}
        self.memo: dict[int, Fact] = {}
        self._keep: list[ir.Expr] = []
        self._inner: dict[tuple[int, bool, bool, bool], Facts] = {}
        self._identities: Facts | None = None

    def of(self, e: ir.Expr) -> Fact:
        found = self.memo.get(id(e))
        if found is None:
            found = self._of(e)
            if id(e) in self.assumed:
                found = _meet(found, self.assumed[id(e)])
            self.memo[id(e)] = found
            self._keep.append(e)
        return found

    def _of(self, e: ir.Expr) -> Fact:
        if isinstance(e, ir.Const):
            return Fact.const(e.dtype, e.value)
        if isinstance(e, ir.Load):
            array = self.constants.get(id(e.var))
            if array is not None and np.size(array) <= LARGEST_CONSTANT:
                return Fact.of_array(np.asarray(array)) if self is self.root else self.root.of(e)
            return Fact.top(e.dtype)
        if isinstance(e, ir.Affine):
            # Sizes are symbols: all that is known is the sign, and that an index fits its dtype.
            top = Fact.top(e.dtype)
            known = all(isinstance(s, int) and s >= 0 for s in (e.offset, *e.strides))
            return (
                Fact(e.dtype, 0, top.hi, True, True)
                if known and e.dtype in ("int32", "int64")
                else top
            )
        if isinstance(e, ir.Op):
            if e.name == "select" and self.selects:
                return self._select(e)
            return rules.apply(e.name, e.dtype, *map(self.of, e.args))
        if isinstance(e, ir.Search) and isinstance(e.count, int):
            return rules.search(e.dtype, e.count)
        if isinstance(e, (ir.Reduce, ir.SegReduce)) and e.kind in ("max", "min"):
            data = self.root.of(e.children[0])
            return (
                data.join(Fact.const(e.dtype, e.init))
                if data.dtype == e.dtype
                else Fact.top(e.dtype)
            )
        return Fact.top(e.dtype)

    def _select(self, e: ir.Op) -> Fact:
        pred, on_false, on_true = e.args
        known = self.of(pred)
        cases = []
        if not known.is_const or not known.lo:
            cases.append(self.assuming(pred, False, on_false).of(on_false))
        if not known.is_const or known.lo:
            cases.append(self.assuming(pred, True, on_true).of(on_true))
        return cases[0] if len(cases) == 1 else cases[0].join(cases[1])

    # ---- contexts -----------------------------------------------------------------------------------------

    def assuming(
        self,
        pred: ir.Expr,
        truth: bool,
        branch: ir.Expr,
        *,
        itself: bool = True,
        bounds: bool = True,
    ) -> Facts:
        """The facts of `branch` where `pred` is known to be `truth`.

        Args:
          itself: the predicate's own value is assumed; bounds: what its comparisons say of their operands.
        """
        if self.depth >= DEEPEST or isinstance(branch, ir.Const):
            return self
        key = (id(pred), truth, itself, bounds)
        inner = self._inner.get(key)
        if inner is None:
            inner = Facts(self.constants, self.selects)
            inner.root, inner.depth = self.root, self.depth + 1
            self._assume(pred, truth, inner.assumed, itself, bounds)
            self._keep.append(pred)
            self._inner[key] = inner
            inner.assumed = {**self.assumed, **inner.assumed}
            inner._keep.append(pred)
        new = inner.assumed.keys() - self.assumed.keys() | {
            k for k in self.assumed if inner.assumed[k] != self.assumed[k]
        }
        return inner if _mentions(branch, new) else self

    def identities(self) -> Facts:
        """This context without the bounds: only that masks are true or false."""
        if self._identities is None:
            inner = self._identities = Facts(self.constants, self.selects)
            inner.root, inner.depth = self.root, self.depth
            inner.assumed = {k: f for k, f in self.assumed.items() if f.dtype == "bool"}
        return self._identities

    def _assume(
        self, pred: ir.Expr, truth: bool, out: dict[int, Fact], itself: bool, bounds: bool
    ) -> None:
        if itself and not isinstance(pred, ir.Const):
            out[id(pred)] = Fact.const("bool", truth)
        if not isinstance(pred, ir.Op) or pred.dtype != "bool":
            return
        if pred.name == "not":
            self._assume(pred.args[0], not truth, out, itself, bounds)
        elif pred.name == ("and" if truth else "or"):
            for a in pred.args:
                self._assume(a, truth, out, itself, bounds)
        elif pred.name in _OPPOSITE and bounds:
            a, b = pred.args
            if dtype_of(a.dtype).kind in ("int", "uint"):
                name = pred.name if truth else _OPPOSITE[pred.name]
                self._compare(name, a, b, out)
                self._compare(_SWAPPED[name], b, a, out)

    def _compare(self, name: str, a: ir.Expr, b: ir.Expr, out: dict[int, Fact]) -> None:
        """Bounds `a` where ``name(a, b)`` holds (integers)."""
        fa, fb = self.of(a), self.of(b)
        lo, hi = fa.lo, fa.hi
        if name in ("lt", "le", "eq"):
            hi = min(hi, fb.hi - (name == "lt"))
        if name in ("gt", "ge", "eq"):
            lo = max(lo, fb.lo + (name == "gt"))
        if name == "ne" and fb.is_const:
            lo, hi = lo + (lo == fb.lo), hi - (hi == fb.lo)
        if (lo, hi) != (fa.lo, fa.hi):
            self._narrow(a, int(lo), int(hi), out)

    def _narrow(self, e: ir.Expr, lo: int, hi: int, out: dict[int, Fact]) -> None:
        if lo > hi or isinstance(e, ir.Const):  # a branch that is never taken: nothing to gain
            return
        new = Fact(e.dtype, lo, hi, True, True)
        out[id(e)] = _meet(out[id(e)], new) if id(e) in out else new
        if not isinstance(e, ir.Op):
            return
        u = e.args[0]
        t = dtype_of(u.dtype)
        if t.kind not in ("int", "uint"):
            return
        fu = self.of(u)
        if e.name == "convert":
            own = dtype_of(e.dtype)
            if own.lo <= fu.lo and fu.hi <= own.hi:  # keeps every value
                self._narrow(u, max(lo, int(fu.lo)), min(hi, int(fu.hi)), out)
        elif e.name == "sign":
            least = 1 if lo > 0 else 0 if lo == 0 else int(fu.lo)
            most = -1 if hi < 0 else 0 if hi == 0 else int(fu.hi)
            self._narrow(u, max(least, int(fu.lo)), min(most, int(fu.hi)), out)


def _meet(a: Fact, b: Fact) -> Fact:
    """What both facts say; `a` alone where they contradict each other (a branch that is never taken)."""
    lo, hi = max(a.lo, b.lo), min(a.hi, b.hi)
    if lo > hi or a.dtype != b.dtype:
        return a
    return Fact(a.dtype, lo, hi, a.integral or b.integral, a.nan_free or b.nan_free)


def _mentions(e: ir.Expr, ids: set[int]) -> bool:
    """Whether one of the expressions occurs in `e`, in the same index space."""
    return any(id(x) in ids or n > LARGEST_BRANCH for n, x in enumerate(_same_space(e, set())))


def _same_space(e: ir.Expr, seen: set[int]) -> Iterator[ir.Expr]:
    stack = [e]
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        yield x
        if not isinstance(x, (ir.Reduce, ir.SegReduce)):
            stack.extend(x.children)
