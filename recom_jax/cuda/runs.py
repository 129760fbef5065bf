"""Jagged bags of narrow rows: a block's threads share a tile's positions evenly (headers/recom_runs.cuh)."""

from __future__ import annotations

import dataclasses

from recom_jax.cuda.orders import BAGS
from recom_jax.cuda.regions import Regions
from recom_jax.cuda.text import KINDS, TYPES, Variant
from recom_jax.cuda.units import JAGGED, closure, reads, size_of, writes
from recom_jax.program import Instr

LANES = 32  # of a row, at most: all that a warp holds
STAGE_BYTES = 24576  # of shared memory for a tile, in kernels that have runs: kRunStageWords in csrc/cuda_cost.h
_NUMBERS = frozenset({"LOAD", "CONST", "BINARY", "SELECT", "CONVERT", "UNARY", "BITCAST", "INDEX"})


@dataclasses.dataclass(frozen=True, slots=True)
class Summed:
    """A class that does nothing but reduce rows: its loop, reduction, store, and what a row's number is made of."""

    region: Instr
    pool: Instr
    store: Instr
    number: tuple[Instr, ...]
    load: Instr


class Runs(Regions):
    """Adds tiles whose positions are dealt out evenly."""

    @property
    def takes_blocks(self) -> bool:
        """Whether warps leave long bags to their block."""
        return self.turns and self.schedule.long

    def summed(self) -> Summed | None:
        """The parts of a class that `runs` has code for; None for any other."""
        u = self.u
        if u.form != JAGGED or self.variant is not Variant.USUAL or len(self.cls.outer) != 1:
            return None
        if u.width is None or u.vec < 2 or -(-u.width // u.vec) > LANES:
            return None
        if [i.op for i in u.code] != ["JREGION", "STORE"]:
            return None
        region, store = u.code
        pools = [b for b in region.body if b.op in ("POOL", "ACC")]
        if len(pools) != 1 or pools[0].op != "POOL" or pools[0].args[0] or pools[0].args[4] >= 0:
            return None
        pool = pools[0]
        if store.args[0] != pool.args[2] or u.constants.get(store.args[-1]) != 1:
            return None
        if size_of(self.cls.regs[pool.args[2]].dtype) * u.vec > 16:
            return None
        number = closure(region.body, {pool.args[3]})
        loads = [b for b in number if b.op == "LOAD"]
        made = {writes(b) for b in number}
        if len(loads) != 1 or any(b.op not in _NUMBERS for b in number):
            return None
        if any(r not in made for b in number for r in reads(b)):
            return None
        self.jagged = True
        stageable = self.stageable(region, loads[0])
        self.jagged = False
        return Summed(region, pool, store, number, loads[0]) if stageable else None

    def runs(self, s: Summed, checks: list[str]) -> list[str]:
        """What a block does with a tile whose ids lie in shared memory. `checks`: what it asks behind its bags."""
        u, seg, splits = self.u, s.region.args[1], self.splits(s.region)
        dst, idx, loaded = s.pool.args[2], s.pool.args[3], s.load.args[0]
        dtype = TYPES[self.cls.regs[dst].dtype]
        kept, self.lines, self.depth = self.lines, [], 2
        self.jagged, self.position = True, "q"
        in_order = "true" if splits is None else f"in_order_{seg}"
        if splits is not None and splits[0] not in BAGS:
            # Splits are few, and ids are on their way: the block asks about all of them at a barrier that it needs.
            of = f"[&](i64 k) {{ return static_cast<i64>(load_one(splits_{seg} + k)); }}"
            in_order = f"ascends({of}, {self.slot(splits[3])}) && {in_order}"
            checks = []
        if self.takes_blocks and not checks:
            checks = ["  __syncthreads();"]
        forget = "forget_long_bags(), " if self.takes_blocks else ""
        self.put(f"if (!tile_is_there({in_order})) return {forget}true;")
        self.put(f"const Run<kLanes> run(tile_{seg});")
        self.put(f"const i32 mine = run.lane * kVec, f = mine < {u.width} ? mine : 0;")
        taken, made = f"{self.type_of(loaded)} r{loaded}", self.type_of(idx)
        self.put(f"const auto number = [&]({taken}) -> {made} {{")
        for b in s.number:
            if b.op != "LOAD":
                self.put(f"  const {self.type_of(self.dst(b))} r{writes(b)} = {self.value(b)};")
        self.put(f"  return r{idx};")
        self.put("};")
        stride = self.slot(s.store.args[4])
        self.put(f"const auto done = [&](i32 bag, const Row<{dtype}, kVec>& sum) {{")
        self.put(f"  if (mine < {u.width}) store(out + row_offset<true>(bag, {stride}) + f, sum);")
        self.put("};")
        table, base, row_stride = self.table(s.pool)
        at = table if base == "0" else f"{table} + {base}"
        init = self.imm(self.cls.regs[dst].dtype, s.pool.args[9])
        line = "true" if self.by_lines(s.pool) else "false"
        self.put(
            f"sum_runs<{KINDS[s.pool.args[1]]}, {self.schedule.flight}, {line}>("
            f"run, t, limits_{seg}, staged_{loaded}, kept({at} + f), {row_stride},"
        )
        self.put(f"    spread<kVec>({init}), {self.fill(s.pool)}, number, done);")
        self.jagged, self.position = False, ""
        lines, self.lines = self.lines, kept
        return [*lines, *(f"  {line}" for line in checks)]


__all__ = ["Runs", "Summed"]
