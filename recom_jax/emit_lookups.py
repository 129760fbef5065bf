"""Part of stage 5: the code of lookups, alone and pooled."""

from __future__ import annotations

import abc
from typing import Any

from recom_jax import ir
from recom_jax.emit_code import Code, Space
from recom_jax.errors import EncodeError
from recom_jax.program import OPERAND

KINDS = {"sum": "SUM", "max": "MAX", "min": "MIN"}


class Lookups(Code, abc.ABC):
    """Writes lookups; what their ids, weights and masks are made of is `emit`'s."""

    @abc.abstractmethod
    def emit(self, e: ir.Expr, s: Space) -> int:
        """The register that holds `e` in space `s`."""

    def _row(self, e: ir.Expr, s: Space) -> bool:
        return s.feature is not None and s.feature in ir.depends(e, self.deps)

    def index(self, t: ir.Take, s: Space) -> int:
        """The checked row number of a lookup, shared between lookups in equally many rows."""
        key = ("index", id(t.idx), t.mode, t.rows, t.row_shift, s.name, id(s.body))
        found = self.memo.get(key)
        if found is not None:
            return found
        src = self.emit(t.idx, s)
        if self.regs[src].width >= 0:
            raise EncodeError("ids that differ along the embedding axis")
        if self.regs[src].dtype == "bool":
            wide = self.reg(s, "int32", False)
            self.put(s, "CONVERT", wide, src)
            src = wide
        idx = self.reg(s, "int64", False)
        self.put(s, "INDEX", t.mode.upper(), idx, src, self.size(t.rows))
        if any(x != 0 for x in t.row_shift):
            if t.one_hot:  # its id outside the table says where the table ends, not which table
                raise EncodeError("a one-hot product with one of several stacked tables")
            idx = self._shift_rows(t, s, idx)
        self.memo[key] = idx
        return idx

    def _shift_rows(self, t: ir.Take, s: Space, idx: int) -> int:
        shift, total, out, bad = (
            self.reg(s, d, False) for d in ("int64", "int64", "int64", "bool")
        )
        self.put(
            s,
            "AFFINE",
            shift,
            self.size(0),
            len(s.axes),
            *(self.size(t.row_shift[k]) for k in s.axes),
        )
        self.put(s, "BINARY", "add", total, idx, shift)
        self.put(s, "BINARY", "lt", bad, idx, self.constant(s, "int64", 0))
        self.put(s, "SELECT", out, bad, total, idx)
        return out

    def _lookup(
        self,
        s: Space,
        op: str,
        dst: int,
        t: ir.Take,
        weight: ir.Expr | None,
        mask: ir.Expr | None,
        kind: str = "",
        init: Any = 0,
    ) -> None:
        if s.feature is None or any(v != int(k == s.feature) for k, v in enumerate(t.cols)):
            raise EncodeError("table rows do not lie along the embedding axis")
        if t.one_hot and weight is not None:
            raise EncodeError("a weighted one-hot product")
        idx = self.index(t, s)
        if mask is not None:
            key = ("mask", idx, id(mask), s.name, id(s.body))
            if key not in self.memo:
                m = self.emit(mask, s)
                picked = self.reg(s, "int64", False)
                self.put(s, "PREDICATE", picked, idx, m)
                self.memo[key] = picked
            idx = self.memo[key]
        flags = int(t.one_hot)
        where = (
            self.slot(OPERAND, self.operand(t.table)),
            self.size(t.base),
            self.size(t.row_stride),
        )
        dtype = self.regs[dst].dtype
        if op == "TAKE":
            self.put(s, "TAKE", flags, dst, idx, *where, self.imm(dtype, t.fill))
        else:
            w = -1 if weight is None else self.emit(weight, s)
            self.put(
                s,
                "POOL",
                flags,
                KINDS[kind],
                dst,
                idx,
                w,
                *where,
                self.imm(dtype, t.fill),
                self.imm(dtype, init),
            )

    def _pool(
        self, body: ir.Expr, kind: str, init: Any, s: Space
    ) -> tuple[ir.Take, ir.Expr | None, ir.Expr | None] | None:
        """`body` as a lookup, times at most one weight, under at most one mask; None otherwise.

        Args:
          init: what the bag starts with.
        """
        mask = weight = None
        if isinstance(body, ir.Op) and body.name == "select":
            pred, on_false, on_true = body.args
            if _adds_nothing(on_false, kind, init) and not self._row(pred, s):
                mask, body = pred, on_true
        if kind == "sum" and isinstance(body, ir.Op) and body.name == "mul":
            for a, b in (body.args, body.args[::-1]):
                if a.takes and not b.takes and not self._row(b, s):
                    body, weight = a, b
                    break
        if (
            isinstance(body, ir.Op)
            and body.name == "convert"
            and body.dtype == "float32"
            and ir.is_16bit(body.args[0].dtype)
            and body.args[0].dtype not in ir.FLOAT8  # widened row by row
        ):
            body = body.args[0]
        if not isinstance(body, ir.Take) or (
            body.one_hot and (weight is not None or mask is not None)
        ):
            return None
        return body, weight, mask


def _adds_nothing(e: ir.Expr, kind: str, init: Any) -> bool:
    """Whether a bag that starts with `init` is the same without a position whose value is `e`."""
    if not isinstance(e, ir.Const):
        return False
    if kind == "sum":
        return bool(e.value == 0)
    if e.value == init == 0:  # one of them may be -0.0
        return False
    return bool(e.value <= init if kind == "max" else e.value >= init)


__all__ = ["KINDS", "Lookups"]
