"""Loops over positions: bags of equally many, and jagged ones.

All threads of a bag, its *team*, share the numbers of its positions (ids, masks, weights): each computes those of
some positions, and shuffles hand them on. The lanes of a slice read rows together, kFlight rows on their way at
once; slices take turns, position by position, so that each has as many as the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from recom_jax.cuda.ranges import Ranges
from recom_jax.cuda.text import KINDS, TYPES, Variant
from recom_jax.cuda.units import closure, reads, writes
from recom_jax.program import Instr, Reg

# What cp.async copies (recom_stage.cuh).
_STAGED = ("int32", "int64", "uint32", "uint64", "float32", "float64")
STAGE_BYTES = 16384


class Regions(Ranges):
    """Adds REGION and JREGION."""

    def region(self, i: Instr) -> None:
        """A loop over positions, and the reductions that it feeds."""
        self.jagged = i.op == "JREGION"
        self.inner = 0 if self.jagged else len(i.args) - 1
        body, phase = i.body, _phases(i.body, self.cls.regs)
        parts = [[b for b, n in zip(body, phase, strict=True) if n == k] for k in range(3)]
        reductions = [b for b in body if b.op in ("POOL", "ACC")]
        pools = [b for b in reductions if b.op == "POOL"]
        # Numbers are accumulated by the lane that computed them, rows by all lanes.
        counts = [b for b in reductions if b.op == "ACC" and not self.is_row(b.args[1])]
        parts[2] = [b for b in parts[2] if b not in counts]
        made = {
            w: n
            for b, n in zip(body, phase, strict=True)
            if (w := writes(b)) is not None and b.op not in ("POOL", "ACC")
        }
        numbers = {r for b in (*parts[1], *parts[2]) for r in reads(b) if made.get(r) == 0}
        whole = any(b.op == "ACC" for b in parts[2])  # rows that count wherever there is a position
        rows = {r for b in parts[2] for r in reads(b) if made.get(r) == 1}
        flight = self.schedule.flight if len(parts[1]) + len(pools) <= 2 else 2
        flight = 1 if self.any_order else flight
        first = closure(parts[0], numbers | {b.args[2] for b in counts})
        for b in reductions:
            self.start(b)
        loads = [b for b in first if b.op == "LOAD"]
        staged = [b for b in loads if self.stageable(i, b)]
        if staged and not any(region is i for region, _ in self.staged):
            self.staged.append((i, staged))
        flights = f"constexpr int kFlight = {flight}, kOwn = own_numbers(kShare, kFlight);"
        self.put("{")
        self.depth += 1
        self.ranges(i)
        self.put(flights)
        self.put("const i32 end = span.end;")
        self.reader(i, loads)
        self.numbers_of(i, first, numbers, counts)
        missing = [b for b in pools if self.may_miss(b.args[3])]
        for b in missing:
            self.put(f"Missed<decltype(Position::r{b.args[3]})> missed{b.args[2]};")
            if not self.poison(b):
                init = self.imm(self.cls.regs[b.args[2]].dtype, b.args[9])
                self.put(
                    f"{self.lost(b)[0]} lost{b.args[2]} = start_of<{KINDS[b.args[1]]}>({init}, 1);"
                )
        for b in pools:
            table, base, _ = self.table(b)
            at = table if base == "0" else f"{table} + {base}"
            self.put(f"const auto* const mine{b.args[2]} = kept({at} + f);")
        rounds = "end"
        if self.jagged and not self.any_order:
            rounds = "team.most(end - span.begin)"
        self.put(f"const i32 most = {rounds};")
        if self.variant is Variant.LONG:
            self.flying(pools)  # once a bag, whose rounds are many
        if self.gathers(i):
            self.gathered_loop(i.args[1])
        else:
            self.put("for (i32 done = 0; done < most; done += kOwn * team.size) {")
            self.depth += 1
            self.put("const i32 q0 = span.begin + done;")
        self.put("Position now[kOwn];")
        self.put("Read raw[kOwn];")
        self.unrolled("i", "kOwn", "raw[i] = read(q0 + i * team.size + team.rank);")
        self.unrolled("i", "kOwn", "now[i] = numbers(q0 + i * team.size + team.rank, raw[i]);")
        for b in counts:
            self.unrolled(
                "i",
                "kOwn",
                f"combine_if<{KINDS[b.args[0]]}>(now[i].in, r{b.args[1]}, now[i].r{b.args[2]});",
            )
        for b in missing:
            dst, kind, idx = b.args[2], KINDS[b.args[1]], f"now[i].r{b.args[3]}"
            self.unrolled("i", "kOwn", f"missed{dst}.see({idx});")
            if not self.poison(b):
                self.unrolled(
                    "i",
                    "kOwn",
                    f"combine_if<{kind}>({idx} == kMissing, lost{dst}, {self.lost(b)[1]});",
                )
        if parts[1] or parts[2]:
            self.flights(i, parts, pools, numbers, rows, whole)
        for _ in range(2 if self.gathers(i) else 1):
            self.depth -= 1
            self.put("}")
        self.finish(i, reductions, counts)
        for b in missing:
            dst, kind = b.args[2], KINDS[b.args[1]]
            if self.poison(b):
                joined = f"poison_missing<{kind}>(r{dst}, {self.fill(b)}, missed{dst}.any(), "
            else:
                joined = f"join_missing<{kind}>(r{dst}, lost{dst}, missed{dst}.any(), "
            self.put(f"{joined}kLanes / kShare, team.size);")
        if self.variant is Variant.LONG:
            for b in reductions:
                dst, kind = (b.args[2], b.args[1]) if b.op == "POOL" else (b.args[1], b.args[0])
                self.put(f"join_parts<{KINDS[kind]}>(r{dst}, me, kLanes, parts);")
        self.one_hots(i, pools)
        self.depth -= 1
        self.put("}")
        self.position, self.jagged = "", False

    def flying(self, pools: Sequence[Instr]) -> None:
        """Names what holds rows on their way, and writes it."""
        for b in pools:
            dtype, e = TYPES[self.cls.regs[b.args[2]].dtype], TYPES[self.u.dtypes[b.args[5]]]
            kind = f"Row<{dtype}, kVec>" if self.jagged else f"Flying<{dtype}, {e}, kVec>"
            self.put(f"{kind} x{b.args[2]}[kFlight]{{}};")

    def flights(
        self, i: Instr, parts: Sequence[Sequence[Instr]], pools: Sequence[Instr], numbers: set[int],
        rows: set[int], whole: bool,
    ) -> None:  # fmt: skip
        """The rows of a round, kFlight at a time."""
        # Rare code writes its rows' registers before the loop over flights, as bags of one length do (`Flying`).
        once = self.rare and not self.any_order
        self.flying(pools if once or not self.jagged else ())
        self.put("#pragma unroll 1")
        self.put("for (int g = 0; g < kOwn * kShare; g += kFlight) {")
        self.depth += 1
        self.put("if (done + g * kSlices >= most) break;")
        for r in sorted(numbers):
            self.put(f"{self.type_of(r)} r{r}[kFlight];")
            self.put(f"share_flight<kFlight>(team, r{r}, g, [&](int i) {{ return now[i].r{r}; }});")
        if whole:
            self.put("bool in[kFlight];")
            self.unrolled(
                "u",
                "kFlight",
                "in[u] = team.share(now[u / kShare].in, g + u);",
            )
        for r in sorted(rows):
            self.put(f"{self.type_of(r)} r{r}[kFlight];")
        for b in pools if self.jagged and not once and self.variant is not Variant.LONG else ():
            dtype = TYPES[self.cls.regs[b.args[2]].dtype]
            self.put(f"Row<{dtype}, kVec> x{b.args[2]}[kFlight];")
        self.in_flight = numbers | rows
        self.put("#pragma unroll")
        self.put("for (int u = 0; u < kFlight; ++u) {")
        self.depth += 1
        self.place(i, any(b.op in ("LOAD", "AFFINE") for b in parts[1]))
        for b in parts[1]:
            self.write(b)
        for b in pools:
            stride = self.table(b)[2]
            line = "true" if self.by_lines(b) else "false"
            k = self.reg(b.args[3])
            dtype = TYPES[self.cls.regs[b.args[2]].dtype]
            x, of = f"x{b.args[2]}[u]", f"mine{b.args[2]}, {k}, {stride}"
            read = (
                f"{x} = fetch<{dtype}, kVec, {line}>({of})"
                if self.jagged
                else f"fetch<{line}>({x}, {of})"
            )
            self.put(f"if ({k} >= 0) {read};")
        self.depth -= 1
        self.put("}")
        self.put("#pragma unroll")
        self.put("for (int u = 0; u < kFlight; ++u) {")
        self.depth += 1
        self.place(i, any(b.op in ("LOAD", "AFFINE") for b in parts[2]))
        for b in parts[2]:
            if b.op == "POOL":
                self.pool(b)
            elif b.op == "ACC":
                self.put(
                    f"combine_if<{KINDS[b.args[0]]}>(in[u], r{b.args[1]}, {self.reg(b.args[2])});"
                )
            else:
                self.write(b)
        for _ in range(2):
            self.depth -= 1
            self.put("}")
        self.in_flight = set()

    def numbers_of(
        self, region: Instr, code: Sequence[Instr], numbers: set[int], counts: Sequence[Instr]
    ) -> None:
        """What is computed of a position before any row is read, as a function of bag and position."""
        kept = sorted(numbers | {b.args[2] for b in counts})
        lookups = {b.args[3] for b in region.body if b.op == "POOL"}
        self.put("struct Position {")
        self.put(f"  {' '.join(['bool in;', *(f'{self.type_of(r)} r{r};' for r in kept)])}")
        self.put("};")
        self.put("const auto numbers = [&](i32 at_q, const Read& raw) -> Position {")
        self.depth += 1
        self.put("Position now;")
        known = not self.any_order or self.gathers(region)
        match = "" if known else f" && seg_{region.args[1]}(at_q) == bag"
        self.put(f"const bool in = at_q < end{match};")
        self.place(region, any(b.op == "AFFINE" for b in code), "at_q")
        for b in code:
            if b.op == "LOAD":
                self.put(f"const {self.type_of(b.args[0])} r{b.args[0]} = raw.r{b.args[0]};")
            else:
                self.write(b)
        self.put("now.in = in;")
        for r in kept:
            skipped = f"in ? r{r} : static_cast<{self.type_of(r)}>(kSkipped)"
            self.put(f"now.r{r} = {skipped if r in lookups else f'r{r}'};")
        self.put("return now;")
        self.depth -= 1
        self.put("};")

    def place(
        self,
        region: Instr,
        wanted: bool,
        at: str = "q0 + (g + u) * kSlices + me.slice",
        inside: bool = False,
    ) -> None:
        """Names the position's index: behind the last one, the last one's, unless it is known to be `inside`."""
        self.position = "q"
        if not wanted:
            return
        if self.within(region):
            at = f"tile_{region.args[1]}.begin + {f'({at})' if inside else at}"
        here = at if inside else f"{at} < total ? {at} : total - 1"
        self.put(f"const i32 q = {self.gathered_at(region, here)};")
        if not self.jagged and self.inner > 1:
            self.put("i32 rest_q = q;")
            for k in range(self.inner - 1, 0, -1):
                size = self.slot(region.args[1 + k])
                self.put(f"const i32 q_{k} = rest_q % static_cast<i32>({size});")
                self.put(f"rest_q /= static_cast<i32>({size});")
            self.put("const i32 q_0 = rest_q;")

    def stage(self, limits_last: bool = False, size: int = STAGE_BYTES) -> None:
        """Has the tile's part of what positions read brought to `size` bytes of shared memory."""
        each = size // max(sum(len(loads) for _, loads in self.staged), 1) // 16 * 16
        first = 0
        for i, loads in self.staged:
            seg, kinds = i.args[1], list[tuple[str, Instr]]()
            searched = self.splits(i) is not None
            if searched:
                self.put(f"const auto tile_{seg} = [&]() -> Range {{")
                self.put(f"  const i32 total = static_cast<i32>({self.slot(i.args[0])});")
                self.put(f"  const Range begin = {self.range_of(i, 't.bag0')};")
                self.put(
                    f"  return Range{{begin.begin, {self.range_of(i, 't.bag0 + t.bags - 1')}.end}};"
                )
                self.put("}();")
            for b in loads:
                kinds.append((f"Staged<{TYPES[self.u.dtypes[b.args[1]]]}, {first}, {each}>", b))
                first += each
            limits = ", t.bags"  # they lie behind the last array's part
            fits = " && ".join(
                f"{kind}::fits(tile_{seg}{limits if b is loads[-1] else ', 0'})"
                for kind, b in kinds
            )
            self.put(f"if (kStaged && !({fits})) return class_{self.number}<kVec, false>(p, t);")
            find = [f"Limits<{first - each}, {each}> limits_{seg}(t, tile_{seg});"]
            if searched:
                find += [
                    f"bool in_order_{seg} = true;",
                    f"if (kStaged) in_order_{seg} = limits_{seg}.find(t, tile_{seg}, [&](i32 at) -> Range {{",
                    f"  const i32 total = static_cast<i32>({self.slot(i.args[0])});",
                    f"  return {self.range_of(i, 'at')};",
                    "});",
                ]
            else:
                find.append(f"if (kStaged) mark_segments(limits_{seg}, t, tile_{seg}, seg_{seg});")
                ascends = f"tile_ascends(seg_{seg}, t, tile_{seg})"
                self.put(f"if (kStaged && searches(t) && !{ascends}) return false;")
            copies = []
            for kind, b in kinds:
                _, buffer, offset, *_ = b.args
                at = "" if self.u.constants.get(offset) == 0 else f" + {self.slot(offset)}"
                array = f"{self.buffer(buffer)}{at}"
                copies += [
                    f"{kind} staged_{b.args[0]}({array}, tile_{seg});",
                    f"if (kStaged) staged_{b.args[0]}.copy({array}, tile_{seg});",
                ]
            # Limits first: the compiler then keeps fewer numbers while bags are summed up. Runs have room, and segment
            # ids were read before.
            for line in [*copies, *find] if limits_last or not searched else [*find, *copies]:
                self.put(line)

    def stageable(self, i: Instr, b: Instr) -> bool:
        """Whether positions read it side by side with their neighbours, in four or eight bytes."""
        splits = self.splits(i)
        if (
            not self.jagged
            or self.variant is not Variant.USUAL
            or (splits is not None and splits[0] == "LENGTHS")
        ):
            return False
        _, buffer, _, _, *strides = b.args
        return self.u.dtypes[buffer] in _STAGED and [self.u.constants.get(s) for s in strides] == [
            1
        ]

    def reader(self, region: Instr, loads: Sequence[Instr]) -> None:
        """What is read of a position before anything is computed, as a function of the position."""
        self.put(
            f"struct Read {{ {' '.join(f'{self.type_of(b.args[0])} r{b.args[0]};' for b in loads)} }};"
        )
        outer = 0 if self.jagged else len(self.cls.outer)
        for b in loads:
            # Where a bag's numbers begin: kept, or the compiler multiplies anew for each position.
            _, buffer, offset, _, *strides = b.args
            at = self.dot(offset, strides[:outer], self.bag_axes[:outer])
            if outer and at != "0":
                self.put(f"const auto* const from{b.args[0]} = kept({self.buffer(buffer)} + {at});")
                self.begun.add(b.args[0])
        self.put("const auto read = [&](i32 at_q) -> Read {")
        self.depth += 1
        staged = [b for b in loads if self.stageable(region, b)]
        # Where nobody has a position left there is no round, so that there is a position 0 to read instead.
        kept = len(staged) if self.within(region) else 0
        self.place(region, kept < len(loads), "at_q < end ? at_q : 0", inside=True)
        self.put("Read found;")
        for b in loads:
            there = f"found.r{b.args[0]} = {self.load(b)};"
            if b in staged and self.within(region):
                there = f"found.r{b.args[0]} = staged_{b.args[0]}.within(at_q);"
            elif b in staged and not self.rare:
                there = f"if constexpr (kStaged) found.r{b.args[0]} = staged_{b.args[0]}.at(at_q); else {there}"
            self.put(there)
        self.put("return found;")
        self.depth -= 1
        self.put("};")
        self.begun = set()


def _phases(body: Sequence[Instr], regs: Sequence[Reg]) -> list[int]:
    """0: numbers, 1: rows that are read, 2: what is made of rows, and reductions."""
    after: set[int] = set()  # registers that exist from phase 2 on
    found = []
    for b in body:
        if b.op in ("POOL", "ACC"):
            found.append(2)
            continue
        w = writes(b)
        row = w is not None and regs[w].width >= 0
        if any(r in after for r in reads(b)):
            phase = 2
        elif b.op in ("TAKE", "LOAD") and row:
            phase = 1
        elif row:  # made of the bag's own rows: a lane has its features of them alone, so it is nothing to share
            phase = 2
        else:
            phase = 0
        if phase > 0:
            after.add(int(writes(b) or 0))
        found.append(phase)
    return found
