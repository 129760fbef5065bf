"""What becomes of the rows of a bag: where sums start, how a row is added, joined with other slices', and finished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recom_jax.cuda.text import KINDS, TYPES, Text, Unsupported, Variant
from recom_jax.cuda.units import closure, size_of, walk, writes
from recom_jax.program import Instr

_SMALL_TABLE = 1 << 22  # bytes: a table that a batch's bags may well read most of


class Pools(Text):
    """Adds POOL and ACC: reductions over positions."""

    def start(self, b: Instr) -> None:
        """Declares a reduction's register."""
        pool = b.op == "POOL"
        dst, kind = (b.args[2], b.args[1]) if pool else (b.args[1], b.args[0])
        init = self.imm(self.cls.regs[dst].dtype, b.args[9 if pool else 3])
        row = self.is_row(dst)
        rank = "me.slice" if row else "team.rank"
        if self.variant is Variant.LONG:
            rank = f"parts.rank + {rank}"
        start = f"start_of<{KINDS[kind]}>({init}, {rank})"
        start = f"spread<kVec>({start})" if row else start
        self.put(f"{self.type_of(dst)} r{dst} = {start};")

    def unrolled(self, index: str, n: str, line: str) -> None:
        self.put("#pragma unroll")
        self.put(f"for (int {index} = 0; {index} < {n}; ++{index}) {line}")

    def by_lines(self, b: Instr) -> bool:
        """Whether rows that are neighbours of a row will be wanted too: jagged bags read small tables nearly whole."""
        rows, width = self.rows_slot(b), self.u.width
        if not self.jagged or rows is None or width is None or rows not in self.u.most:
            return False
        return self.u.most[rows] * width * size_of(self.u.dtypes[b.args[5]]) <= _SMALL_TABLE

    def pool(self, b: Instr) -> None:
        """Adds a row to its bag."""
        dst, k = b.args[2], self.reg(b.args[3])
        weight = f", {self.reg(b.args[4])}" if b.args[4] >= 0 else ""
        kind = KINDS[b.args[1]]

        def times(row: str) -> str:
            return f"x_mul({row}{weight})" if weight else row

        row = times(f"x{dst}[u]" if self.jagged else f"x{dst}[u].row()")
        self.put(f"if ({k} >= 0) r{dst} = combine<{kind}>(r{dst}, {row});")

    def lost(self, b: Instr) -> tuple[str, str]:
        """(type, value) of what a pool adds for a position whose row does not exist, in each feature."""
        dtype, fill = TYPES[self.cls.regs[b.args[2]].dtype], self.fill(b)
        return dtype, f"x_mul({fill}, now[i].r{b.args[4]})" if b.args[4] >= 0 else fill

    def fill(self, b: Instr) -> str:
        """What stands for a row that does not exist, in each feature."""
        dtype = self.cls.regs[b.args[2]].dtype
        return f"immediate<{TYPES[dtype]}>(0)" if b.args[0] else self.imm(dtype, b.args[8])

    def poison(self, b: Instr) -> bool:
        """Whether one missing row makes the whole bag NaN, however many there are and whatever they weigh."""
        dtype, bits = self.cls.regs[b.args[2]].dtype, self.u.constants.get(b.args[8])
        if b.args[0] or bits is None or dtype not in ("float32", "float64"):
            return False
        word = np.array([bits], np.int64).view(np.uint64)
        return bool(
            np.isnan(
                word.astype(np.uint32).view(np.float32)
                if dtype == "float32"
                else word.view(np.float64)
            )[0]
        )

    def may_miss(self, idx: int) -> bool:
        """Whether a row number may stand for a row that does not exist."""
        made = {writes(x): x for x in walk(self.u.code)}
        at = made.get(idx)
        while at is not None and at.op in ("PREDICATE", "EXPAND"):
            at = made.get(at.args[1])
        if at is None or at.op != "INDEX" or at.args[0] != "CLIP":
            return True
        return not self.u.constants.get(at.args[3], 0) > 0

    def finish(self, region: Instr, reductions: Sequence[Instr], counts: Sequence[Instr]) -> None:
        for b in reductions:
            dst, kind = (b.args[2], b.args[1]) if b.op == "POOL" else (b.args[1], b.args[0])
            # Lanes hold features of their own. Of a number they hold parts, or copies where each computes all of it.
            lanes = "kLanes / kShare, team.size" if b in counts else "kLanes, kSlices"
            join = f"join_slices<{KINDS[kind]}>(r{dst}, {lanes});"
            usual = self.variant is Variant.USUAL
            if usual and self.is_row(dst) and b not in counts and self.u.width is not None:
                join = f"join_rows<{KINDS[kind]}, kLanes>(r{dst}, kSlices, me.thread);"
            if self.jagged and usual:
                # A warp whose bags are all empty has nothing to join.
                init = self.imm(self.cls.regs[dst].dtype, b.args[9 if b.op == "POOL" else 3])
                init = f"spread<kVec>({init})" if self.is_row(dst) else init
                join = f"if (kShare == 1 || most > 0) {join} else r{dst} = {init};"
            self.put(join)

    def one_hots(self, region: Instr, pools: Sequence[Instr]) -> None:
        """What one-hot products make of rows that no position of the bag selected."""
        for b in pools:
            if not b.args[0]:
                continue
            dst = b.args[2]
            if not self.floating(dst):
                continue
            if self.jagged:
                raise Unsupported("a one-hot product summed over jagged bags")
            table, base, stride = self.table(b)
            self.one_hot_index(region, b.args[3], f"index_{dst}")
            self.put(
                f"one_hot_finish(r{dst}, {table} + {base}, {self.one_hot_rows(b)}, {stride}, f, dirty_{dst}, "
                f"[&](i64 row) {{ for (i32 q = 0; q < end; ++q) if (index_{dst}(q) == row) return true; "
                "return false; });"
            )

    def one_hot_index(self, region: Instr, register: int, name: str) -> None:
        code = closure(region.body, {register})
        self.position = "q"
        self.put(f"const auto {name} = [&](i32 q) -> i64 {{")
        if self.inner > 1:
            self.put("  i32 rest = q;")
            for k in range(self.inner - 1, 0, -1):
                size = self.slot(region.args[1 + k])
                self.put(f"  const i32 q_{k} = rest % static_cast<i32>({size});")
                self.put(f"  rest /= static_cast<i32>({size});")
            self.put("  const i32 q_0 = rest;")
        for i in code:
            self.put(f"  const {self.type_of(self.dst(i))} r{writes(i)} = {self.value(i)};")
        self.put(f"  return r{register};")
        self.put("};")

    def integer(self, r: int) -> bool:
        return self.cls.regs[r].dtype in ("int32", "int64", "uint32", "uint64")


__all__ = ["Pools"]
