"""What is known of each expression's values, computed once per expression from `shape_solver.facts`."""

from __future__ import annotations

from typing import Any

import numpy as np

from recom_jax import ir
from recom_jax.shape_solver import facts as rules
from recom_jax.shape_solver.facts import Fact

LARGEST_CONSTANT = 1 << 22  # elements; a constant beyond that is not scanned for facts


class Facts:
    def __init__(self, constants: dict[int, Any]) -> None:
        self.constants = constants
        self.memo: dict[int, Fact] = {}
        self._keep: list[ir.Expr] = []

    def of(self, e: ir.Expr) -> Fact:
        found = self.memo.get(id(e))
        if found is None:
            found = self.memo[id(e)] = self._of(e)
            self._keep.append(e)
        return found

    def _of(self, e: ir.Expr) -> Fact:
        if isinstance(e, ir.Const):
            return Fact.const(e.dtype, e.value)
        if isinstance(e, ir.Load):
            array = self.constants.get(id(e.var))
            if array is not None and np.size(array) <= LARGEST_CONSTANT:
                return Fact.of_array(np.asarray(array))
            return Fact.top(e.dtype)
        if isinstance(e, ir.Affine):
            # Sizes are symbols: all that is known is the sign, and that an index fits its dtype.
            top = Fact.top(e.dtype)
            known = all(isinstance(s, int) and s >= 0 for s in (e.offset, *e.strides))
            return Fact(e.dtype, 0, top.hi, True, True) if known and e.dtype in ("int32", "int64") else top
        if isinstance(e, ir.Op):
            return rules.apply(e.name, e.dtype, *map(self.of, e.args))
        if isinstance(e, ir.Search) and isinstance(e.count, int):
            return rules.search(e.dtype, e.count)
        if isinstance(e, (ir.Reduce, ir.SegReduce)) and e.kind in ("max", "min"):
            data = self.of(e.children[0])
            return data.join(Fact.const(e.dtype, e.init)) if data.dtype == e.dtype else Fact.top(e.dtype)
        return Fact.top(e.dtype)
