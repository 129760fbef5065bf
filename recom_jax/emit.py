"""Part of stage 5: the code of one column.

Bag space holds one value per bag, pos space one per position of the current region; both hold rows where a
value depends on the embedding axis. 16-bit floats are held as float32 (a load widens, a store rounds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from recom_jax import ir
from recom_jax.emit_code import BINARY, UNARY, Space, held
from recom_jax.emit_lookups import KINDS, Lookups
from recom_jax.errors import EncodeError
from recom_jax.program import OPERAND, RESULT, ClassDef, Instr
from recom_jax.shape_solver.dims import DimLike

if TYPE_CHECKING:
    from recom_jax.schedule import Piece


class Emitter(Lookups):
    """Writes the code of columns, one class and its slot values each."""

    # ---- a column -----------------------------------------------------------------------------------------

    def column(self, pieces: Sequence[Piece]) -> tuple[ClassDef, list[tuple[str, Any]]]:
        """The code of the pieces (same bags), and the values of its slots."""
        outer = pieces[0].outer
        sizes = tuple(self.size(d) for d in outer)
        self.roots = [p.expr for p in pieces]
        widths: dict[DimLike, int] = {}
        for p in pieces:
            n, has_width = len(outer), p.width is not None
            bags = Space(
                "bag",
                n + has_width,
                tuple(range(n)),
                n if has_width else None,
                frozenset(),
                self.code,
            )
            if p.width is not None:
                width = self.resolve(p.width)
                if width not in widths:
                    widths[width] = self.size(width)
                self.width = widths[width]
            self.store(bags, p)
        return ClassDef(
            tuple(k for k, _ in self.slots), tuple(self.regs), sizes, tuple(self.code)
        ), self.slots

    def store(self, bags: Space, p: Piece) -> None:
        expr, target = p.expr, str(self.outputs[p.result].var.aval.dtype)
        if (
            ir.is_16bit(target)
            and isinstance(expr, ir.Op)
            and expr.name == "convert"
            and expr.args[0].dtype == "float32"
        ):
            expr = expr.args[0]  # the store rounds
        if isinstance(expr, ir.Take) and expr.dtype == target and target in ir.FLOAT8:
            src = self.reg(bags, target, True)  # as they are: float32 has one NaN, float8_e5m2 six
            self._lookup(bags, "TAKE", src, expr, None, None)
        else:
            src = self.emit(expr, bags)
        if p.width not in (None, 1) and self.regs[src].width < 0:
            wide = self.reg(bags, self.regs[src].dtype, True)
            self.put(bags, "SELECT", wide, self.constant(bags, "bool", True), src, src)
            src = wide
        step = self.size(p.feature_stride)
        self.offset = offset = self.size(p.offset)
        strides = [self.size(s) for s in p.strides]
        self.put(
            bags, "STORE", src, self.slot(RESULT, p.result), offset, len(strides), *strides, step
        )

    # ---- expressions --------------------------------------------------------------------------------------

    def emit(self, e: ir.Expr, s: Space) -> int:
        """The register that holds `e` in space `s`."""
        key = (id(e), s.name, id(s.body), self.width if self._row(e, s) else -1)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._emit(e, s)
        return found

    def _emit(self, e: ir.Expr, s: Space) -> int:
        if s.inner and not isinstance(e, ir.Const) and not ir.depends(e, self.deps) & s.inner:
            return self._hoist(e, s)
        if isinstance(e, ir.Const):
            return self._widen(s, self.constant(s, e.dtype, e.value))
        if isinstance(e, ir.Load):
            return self._load(e, s)
        if isinstance(e, ir.Affine):
            if self._row(e, s):
                raise EncodeError("an iota along the embedding axis")
            return self._affine(s, e.dtype, e.offset, [e.strides[k] for k in s.axes])
        if isinstance(e, ir.Op):
            return self._op(e, s)
        if isinstance(e, ir.Search):
            return self._search(e, s)
        if isinstance(e, ir.Take):
            dst = self.reg(s, held(e.dtype), True)
            self._lookup(s, "TAKE", dst, e, None, None)
            return dst
        if isinstance(e, ir.Reduce):
            self._region(e, s)
            return self.memo[(id(e), s.name, id(s.body), self.width if self._row(e, s) else -1)]
        assert isinstance(e, ir.SegReduce)
        self._jagged(e, s)
        return self.memo[(id(e), s.name, id(s.body), self.width if self._row(e, s) else -1)]

    def _hoist(self, e: ir.Expr, s: Space) -> int:
        """A value that no position of the bag changes: computed once per bag, then spread."""
        outer = len(s.axes) - len(s.inner)
        rank = outer + (s.feature is not None)
        bags = Space("bag", rank, s.axes[:outer], s.feature, frozenset(), self.code)
        inside = self.pool.remap(e, s.rank, lambda st, o: (st[:rank], o))
        src = self.emit(inside, bags)
        dst = self.reg(s, self.regs[src].dtype, self.regs[src].width >= 0)
        self.put(s, "EXPAND", dst, src)
        return dst

    def _widen(self, s: Space, src: int) -> int:
        if not ir.is_16bit(self.regs[src].dtype):
            return src
        dst = self.reg(s, "float32", self.regs[src].width >= 0)
        self.put(s, "CONVERT", dst, src)
        return dst

    def _affine(self, s: Space, dtype: str, offset: DimLike, strides: Sequence[DimLike]) -> int:
        dst = self.reg(s, dtype, False)
        self.put(
            s, "AFFINE", dst, self.size(offset), len(strides), *[self.size(n) for n in strides]
        )
        return dst

    def _load(self, e: ir.Load, s: Space) -> int:
        row = self._row(e, s)
        steps = None if row else self.steps_of(e.var)
        if steps is not None:
            # XLA makes such a constant of an iota, in a kernel of its own in front of the call.
            first, step = steps
            return self._affine(
                s, e.dtype, first + step * e.offset, [step * e.strides[k] for k in s.axes]
            )
        dst = self.reg(s, e.dtype, row)
        axes = [*s.axes, s.feature] if row else list(s.axes)
        strides = [self.size(e.strides[k]) for k in axes if k is not None]
        self.put(
            s,
            "LOAD",
            dst,
            self.slot(OPERAND, self.operand(e.var)),
            self.size(e.offset),
            len(strides),
            *strides,
        )
        return self._widen(s, dst)

    def _op(self, e: ir.Op, s: Space) -> int:
        args = [self.emit(a, s) for a in e.args]
        row = any(self.regs[a].width >= 0 for a in args)
        if e.name == "convert":
            return self._convert(e, s, args[0], row)
        dst = self.reg(s, held(e.dtype), row)
        if e.name == "select":
            self.put(s, "SELECT", dst, *args)
        elif e.name == "bitcast":
            self.put(s, "BITCAST", dst, *args)
        elif e.name in UNARY:
            self.put(s, "UNARY", e.name, dst, *args)
        elif e.name in BINARY:
            self.put(s, "BINARY", e.name, dst, *args)
        else:
            raise EncodeError(f"operation {e.name}")
        return dst

    def _convert(self, e: ir.Op, s: Space, src: int, row: bool) -> int:
        if ir.is_16bit(e.dtype):
            if e.args[0].dtype == e.dtype:
                return src
            narrow = self.reg(s, e.dtype, row)
            self.put(s, "CONVERT", narrow, src)
            return self._widen(s, narrow)
        if self.regs[src].dtype == e.dtype:
            return src  # a 16-bit float, already held as float32
        dst = self.reg(s, e.dtype, row)
        self.put(s, "CONVERT", dst, src)
        return dst

    def _search(self, e: ir.Search, s: Space) -> int:
        x = self.emit(e.x, s)
        if self.regs[x].width >= 0:
            raise EncodeError("a search along the embedding axis")
        dst = self.reg(s, "int32", False)
        side = {"left": "LEFT", "right": "RIGHT"}[e.side]
        if e.mode == "uniform":
            assert e.grid is not None
            start, step = (self.imm(e.x.dtype, v) for v in e.grid)
            self.put(s, "SEARCH_UNIFORM", side, dst, x, start, step, self.size(e.count))
        else:
            self.put(
                s,
                "SEARCH",
                e.mode.upper(),
                side,
                dst,
                x,
                self.slot(OPERAND, self.operand(e.var)),
                self.size(e.offset),
                self.size(e.count),
                *([] if e.total is None else [self.size(e.total)]),
            )
        return dst

    # ---- bags -------------------------------------------------------------------------------------------

    def _combine(self, e: ir.Reduce | ir.SegReduce, body: ir.Expr, s: Space, bags: Space) -> int:
        row = self._row(body, s)
        dst = self.reg(bags, held(e.dtype), row)
        pooled = self._pool(body, e.kind, e.init, s) if row else None
        if pooled is not None:
            self._lookup(s, "POOL", dst, *pooled, kind=e.kind, init=e.init)
            return dst
        src = self.emit(body, s)
        if row and self.regs[src].width < 0:
            raise EncodeError("a bag of values without an embedding axis")
        self.put(s, "ACC", KINDS[e.kind], dst, src, self.imm(held(e.dtype), e.init))
        return dst

    def _siblings(self, e: ir.Expr, same: Callable[[Any], bool]) -> list[Any]:
        """`e` and the other reductions of this column that one pass over the same positions can serve."""
        seen: set[int] = set()
        found: list[Any] = [e]

        def look(x: ir.Expr) -> None:
            if id(x) in seen:
                return
            seen.add(id(x))
            if isinstance(x, (ir.Reduce, ir.SegReduce)):
                if (
                    x is not e
                    and same(x)
                    and not any(
                        isinstance(y, (ir.Reduce, ir.SegReduce))
                        for c in x.children
                        for y in ir.walk(c)
                    )
                ):
                    found.append(x)
                return
            for c in x.children:
                look(c)

        for root in self.roots:
            look(root)
        return found

    def _done(self, e: ir.Expr, s: Space) -> bool:
        return (id(e), s.name, id(s.body), self.width if self._row(e, s) else -1) in self.memo

    def _region(self, e: ir.Reduce, s: Space) -> None:
        if s.inner or s.name == "pos":
            raise EncodeError("a reduction inside a reduction")
        n = len(s.axes)
        k = len(e.sizes)
        rank = s.rank + k
        body: list[Instr] = []
        self.bodies.append(body)
        inner = tuple(range(s.rank, rank))
        space = Space("pos", rank, (*s.axes, *inner), s.feature, frozenset(inner), body)
        sizes = [self.size(d) for d in e.sizes]
        key = tuple(self.resolve(d) for d in e.sizes)
        nested = any(isinstance(y, (ir.Reduce, ir.SegReduce)) for y in ir.walk(e.arg))
        group = (
            [e]
            if nested
            else self._siblings(
                e,
                lambda x: (
                    isinstance(x, ir.Reduce) and tuple(self.resolve(d) for d in x.sizes) == key
                ),
            )
        )
        for x in group:
            if self._done(x, s) or (x is not e and self._other_width(x)):
                continue
            self.memo[(id(x), s.name, id(s.body), self.width if self._row(x, s) else -1)] = (
                self._combine(x, x.arg, space, s)
            )
        assert n == len(s.axes)
        s.body.append(Instr("REGION", (len(sizes), *sizes), tuple(body)))

    def _other_width(self, x: ir.Expr) -> bool:
        """Whether another piece of the column, of another width, is what reads `x`: it makes its own pass."""
        return len(self.roots) > 1 and bool(x.takes)

    def _jagged(self, e: ir.SegReduce, s: Space) -> None:
        if s.name == "pos" or len(s.axes) != 1:
            raise EncodeError("a jagged bag inside another bag")
        if e.bag_offset != 0 or any(self.resolve(v) != int(k == 0) for k, v in enumerate(e.bag)):
            raise EncodeError("a slice of jagged bags")
        body: list[Instr] = []
        self.bodies.append(body)
        rank = 2 if s.feature is not None else 1
        space = Space("pos", rank, (0,), 1 if rank == 2 else None, frozenset(), body)
        total = self.size(e.total)
        seg_expr, key = e.seg, self.resolve(e.total)
        group = self._siblings(
            e,
            lambda x: (
                isinstance(x, ir.SegReduce)
                and self._same_seg(x, e)
                and self.resolve(x.total) == key
                and x.bag_offset == 0
                and all(self.resolve(v) == int(k == 0) for k, v in enumerate(x.bag))
            ),
        )
        seg = self.emit(self._as_rank(seg_expr, rank), space)
        for x in group:
            if self._done(x, s) or (x is not e and self._other_width(x)):
                continue
            if any(v != 0 for v in x.feature) and any(
                self.resolve(v) != int(k == s.feature) for k, v in enumerate(x.feature)
            ):
                raise EncodeError("a jagged bag whose rows do not lie along the embedding axis")
            self.memo[(id(x), s.name, id(s.body), self.width if self._row(x, s) else -1)] = (
                self._combine(x, self._as_rank(x.data, rank), space, s)
            )
        s.body.append(Instr("JREGION", (total, seg), tuple(body)))

    def _same_seg(self, x: ir.SegReduce, e: ir.SegReduce) -> bool:
        return self._as_rank(x.seg, 2) is self._as_rank(e.seg, 2)

    def _as_rank(self, e: ir.Expr, rank: int) -> ir.Expr:
        """An expression over (position) or (position, feature), as one of the other rank."""
        have = ir.rank_of(e)
        if have is None or have == rank:
            return e
        if have == 1:
            return self.pool.remap(e, 1, lambda s, o: ((s[0], 0), o))
        if 1 in ir.depends(e, self.deps):
            raise EncodeError("a jagged bag of rows where numbers are needed")
        return self.pool.remap(e, 2, lambda s, o: ((s[0],), o))
