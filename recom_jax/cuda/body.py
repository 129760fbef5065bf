"""The function of one class of units: what a block does with a tile.

Bag space is straight-line code, run once a bag and lane; regions.py has the loops over positions.
"""

from __future__ import annotations

from recom_jax.cuda.orders import BAGS
from recom_jax.cuda.regions import STAGE_BYTES
from recom_jax.cuda.runs import STAGE_BYTES as RUN_STAGE_BYTES
from recom_jax.cuda.runs import Runs
from recom_jax.cuda.text import TYPES, Unsupported, Variant
from recom_jax.cuda.units import JAGGED, PLAIN, REGION, walk
from recom_jax.program import Instr

_FORMS = ("kPlain", "kRegion", "kJagged")


def indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


class Body(Runs):
    """Writes the function of one unit class."""

    def text(self) -> list[str]:
        u = self.u
        stride = 1 + len(self.cls.slots)
        self.depth = 2 if u.width_slot < 0 else 3
        stores = [i for i in u.code if i.op == "STORE"]
        # One result's address is kept, those of several are read again where they are used.
        self.out = stores[0] if len(stores) == 1 and u.form != PLAIN else None
        summed = self.summed()
        usual = [] if self.any_order or summed is not None else self.passes(rare=False)
        rare = self.passes(rare=True) if self.any_order or self.apart else []
        gathering = self.gathering() if self.any_order else []
        self.rare, self.depth = self.any_order, 1
        self.checks: list[str] = []
        before = self.before(summed is not None)
        runs = self.runs(summed, list(self.checks)) if summed else []
        rows = (
            "numbers"
            if u.width_slot < 0
            else f"rows of {u.width if u.width is not None else 'any width'}"
        )
        form = ("no reduction", "bags", "jagged bags")[u.form]
        lanes = "const int kLanes = t.lanes;"
        if u.width is not None and not self.any_order:
            lanes = f"constexpr int kLanes = lanes_for({_FORMS[u.form]}, {u.width}, kVec);"
        share = "1" if u.width is None or self.any_order else "kLanes"
        slices = "const int kSlices = t.slices;"
        if u.form == REGION or self.turns:
            # Kept, or the compiler keeps the tile's two bytes as well as what it makes of them.
            slices = "const int kSlices = kept_number(t.slices);"
        name = f"class_{self.number}"
        head = [
            f"// Class {self.number}: {rows}, {form}.",
            f"template <int kVec{', bool kStaged' if self.turns else ''}>",
            f"__device__ __forceinline__ {'bool' if self.turns else 'void'} {name}(const Params& p, const Tile& t) {{",
        ]
        if self.variant is Variant.LONG:
            head = [
                "// The same for bags of kLongBag positions or more: all warps of the block sum one up.",
                f"__device__ __forceinline__ void {name}_long(const Params& p) {{",
                f"  constexpr int kVec = {u.vec};",
                "  const Tile t = tile_again(p);",
            ]
        if self.any_order:
            # Inlined, the kernel's parameters are constants; what gathers positions takes too many registers for that.
            inline = "__noinline__" if gathering else "__forceinline__"
            head = [
                "// The same for segment ids in any order.",
                f"__device__ {inline} void {name}_any(const Params& p) {{",
                "  constexpr int kVec = 1;",
            ]
        if gathering:
            # What a bag's sum needs is found out behind the gathering, which takes all registers there are.
            opened, head = head, []
        if self.any_order:
            head.append("  const Tile t = tile_again(p);")
        head += [
            f"  {lanes}",
            *([] if u.form == PLAIN else [f"  {slices}"]),
            *([] if u.form == PLAIN else [f"  constexpr int kShare = {share};"]),
            (
                f"  const {'Block' if self.any_order else 'Warp'}Worker me(p, t, kLanes, kSlices);"
                if u.form == JAGGED
                else f"  const Worker me(p, t, kLanes, {'' if u.form == PLAIN else 'kSlices, '}{stride});"
            ),
            *([] if u.form == PLAIN else ["  const Team<kShare> team(me, kSlices);"]),
            *(["  const Parts parts(me);"] if self.variant is Variant.LONG else []),
        ]
        if self.out is not None and not self.any_order:
            buffer, offset = self.out.args[1:3]
            place = f"target<{TYPES[u.dtypes[buffer]]}>(p, me.word({1 + buffer}))"
            at = "" if u.constants.get(offset) == 0 else f" + {self.slot(offset)}"
            where = f"{place}{at}"
            if self.once:
                head.append(f"  constexpr bool kOnce = kLanes * kVec >= {u.width};")
                some = f"!kOnce || (me.slice == 0 && me.lane * kVec < {u.width})"
                where = f"{some} ? {where} + (kOnce ? me.lane * kVec : 0) : nullptr"
            before = [f"  auto* const out = kept({where});", *before]
        read = "me.again" if self.any_order else "me.word"
        head += [f"  {self.declared(s, read)}" for s in sorted(self.used)]
        lines = [*head, *before, *self.loops(runs, usual, rare)]
        if gathering:
            lines = [*opened, *gathering, *indented(lines), "  }"]
        return [*lines, *(["  return false;"] if self.turns else []), "}"]

    def loops(self, runs: list[str], usual: list[str], rare: list[str]) -> list[str]:
        """The loops over bags, and what a block asks behind them."""
        checks = [] if self.variant is Variant.LONG else self.checks
        if self.takes_blocks and not checks:
            # The kernel asks for long bags next. The checks are barriers, where there are any.
            checks = ["  __syncthreads();"]
        if not self.apart:
            return [*self.loop_head(), *(usual or rare), *self.loop_tail(), *checks]
        if not runs:
            runs = indented([*self.loop_head(), *usual, *self.loop_tail(), *checks])
        self.rare, self.depth = True, 1
        late = self.again(self.late_checks) if self.checks else checks
        rare = [*self.loop_head(), *rare, *self.loop_tail(), *late]
        self.rare = False
        return ["  if constexpr (kStaged) {", *runs, "  } else {", *indented(rare), "  }"]

    def passes(self, rare: bool) -> list[str]:
        """What is done with a bag; `rare`: in code that hardly ever runs."""
        self.rare = rare
        return self.again(self.bag) if rare else self.taken(self.bag)

    def bag(self) -> None:
        for i in self.u.code:
            if i.op == "REGION" or i.op == "JREGION":
                self.region(i)
            elif i.op == "STORE":
                self.store(i)
            else:
                self.write(i)

    def before(self, summed: bool) -> list[str]:
        """What the whole block finds out before its first bag."""
        one_hot = [i for i in walk(self.u.code) if i.op in ("TAKE", "POOL") and i.args[0]]
        for i in one_hot:
            dst = self.dst(i)
            table, base, stride = self.table(i)
            if self.floating(dst):
                self.put(
                    f"const bool dirty_{dst} = block_non_finite({table} + {base}, "
                    f"{self.one_hot_rows(i)}, {stride}, {self.width()});"
                )
        if self.takes_blocks:
            self.put("no_long_bags();")
        for i in self.u.code:
            if i.op == "JREGION":
                self.ascending(i)
        self.stage(summed, RUN_STAGE_BYTES if summed else STAGE_BYTES)
        if self.variant is Variant.LONG:
            self.long_test()
        out, self.lines = self.lines, []
        return out

    def long_test(self) -> None:
        """Whether the block sums up a bag: any of its regions is long there."""
        tests = []
        for i in self.u.code:
            if i.op != "JREGION":
                continue
            seg = i.args[1]
            self.put(f"const auto range_{seg} = [&](i64 bag) -> Range {{")
            if self.splits(i) is not None:
                self.put(f"  const i32 total = static_cast<i32>({self.slot(i.args[0])});")
            self.put(f"  return {self.range_of(i, 'bag')};")
            self.put("};")
            tests.append(f"is_long(range_{seg}(bag))")
        self.put(f"const auto takes_all = [&](i64 bag) -> bool {{ return {' || '.join(tests)}; }};")

    def ascending(self, i: Instr) -> None:
        """Segment ids that ascend, as they nearly always do, say where a bag's positions begin and end."""
        total, seg = self.slot(i.args[0]), i.args[1]
        splits = self.splits(i)
        if splits is None or self.any_order:
            self.lambda_of(i, seg, f"seg_{seg}")
        if self.any_order:
            return
        if splits is None:  # found out before the first bag: it says where the tile's bags lie, too
            if self.variant is Variant.LONG:
                self.put(f"const Range tile_{seg}{{0, static_cast<i32>({total})}};")
                return
            if not self.searches:
                self.searches = True
                self.put(f"const Looks looks{{p, me, {1 + len(self.cls.slots)}}};")
            self.put(f"Range tile_{seg};")
            found = f"find_segments(seg_{seg}, {total}, t, looks, tile_{seg})"
            self.put(f"if (!{found}) return !searches(t);")
            return
        self.bags(i)
        if self.variant is Variant.LONG and splits[0] in BAGS:  # asked before
            self.put(f"bags_{seg}.ascend(t);")
        elif splits[0] == "LENGTHS":  # where the tile's first bag begins is found on the way
            self.put(f"if (!bags_{seg}.ascend(t)) return true;")
        if asks := self.asks(i):
            self.checks.append(f"  {asks}")

    def asks(self, i: Instr) -> str:
        """A block asks when it is through: sums hardly ever have to be made again, and no warp waits to begin."""
        splits = self.splits(i)
        if splits is None or splits[0] == "LENGTHS":
            return ""
        ascend = f"bags_{i.args[1]}.ascend(t)"
        if splits[0] not in BAGS:
            of = f"[&](i64 k) {{ return static_cast<i64>(load_one(splits_{i.args[1]} + k)); }}"
            ascend = f"block_ascends({of}, {self.slot(splits[3])})"
        before = "forget_long_bags(), " if self.takes_blocks else ""
        return f"if (!{ascend}) return {before}true;"

    def late_checks(self) -> None:
        """The same in rare code, which does not remember where splits lie."""
        for i in self.u.code:
            if i.op == "JREGION" and (asks := self.asks(i)):
                self.bags(i)
                self.put(asks)

    @property
    def once(self) -> bool:
        """Whether the kept address is the lane's own (kOnce), where one pass over the features is enough: none for
        lanes that never store, so that no thread has to remember its slice behind the loop."""
        if self.out is None or self.u.form != REGION or self.u.width is None:
            return False
        return self.is_row(self.out.args[0]) and self.u.constants.get(self.out.args[-1]) == 1

    def width(self) -> str:
        return str(self.u.width) if self.u.width is not None else self.slot(self.u.width_slot)

    def loop_head(self) -> list[str]:
        u = self.u
        # A minimum keeps no limit in a register.
        near = "at + me.first < bags - 1" if u.form == REGION else "on"
        lines = [
            "  const i32 bags = static_cast<i32>(t.bag0) + t.bags;",
            "  for (i32 at = static_cast<i32>(t.bag0); at < bags; at += me.step) {",
            "    const bool on = at + me.first < bags;",
            f"    const i32 bag = {near} ? at + me.first : bags - 1;",
        ]
        if self.gathered():
            lines[:2] = ["  for (i32 at = low; at < bags; at += me.step) {"]
        if self.variant is Variant.LONG:
            lines[1:] = [
                "  for (i32 bag = static_cast<i32>(t.bag0); bag < bags; ++bag) {",
                "    if (!takes_all(bag)) continue;",
                "    const bool on = parts.rank == 0;",
            ]
        if self.turns:
            lines[1:] = [
                "  for (Turn turn(t, me.step); turn.at < bags; turn.end()) {",
                # Early, so that the answer is on its way meanwhile; it takes a register.
                *(self.anew() if self.rare else ["    turn.draw(me.thread);"]),
                "    const bool on = turn.at + me.first < bags;",
                "    const i32 bag = on ? turn.at + me.first : bags - 1;",
            ]
        outer = self.cls.outer
        if len(outer) > 1:
            lines.append("    i32 rest = bag;")
            for k in range(len(outer) - 1, 0, -1):
                size = self.slot_late(outer[k])
                lines.append(f"    const i32 bag_{k} = rest % static_cast<i32>({size});")
                lines.append(f"    rest /= static_cast<i32>({size});")
            lines.append("    const i32 bag_0 = rest;")
        if u.width_slot >= 0:
            width = str(u.width) if u.width is not None else self.slot_late(u.width_slot)
            lines += [
                f"    for (i32 chunk = 0; chunk < {width}; chunk += kLanes * kVec) {{",
                "      const i32 mine = chunk + me.lane * kVec;",
                f"      const bool has = on && mine < {width};",
                f"      const i32 f = mine < {width} ? mine : 0;",
            ]
        else:
            lines.append("    const bool has = on;")
        return lines

    def gathering(self) -> list[str]:
        """The head of a loop over as many bags at a time as the block has room for the positions of."""
        if not (regions := self.gathered()):
            return []
        self.rare, self.depth = True, 3
        each = f"kStageBytes / {len(regions)}"
        return [
            *(
                f"  Gathered<{each} * {k}, {each}> gathered_{i.args[1]};"
                for k, i in enumerate(regions)
            ),
            "  for (i32 low = static_cast<i32>(tile_again(p).bag0), bags; low < end_of_tile(p); low = bags) {",
            "    bags = end_of_tile(p);",
            "    {",
            "      const Worker me(p.words + tile_again(p).words);",
            *self.again(self.gather),
            "    }",
        ]

    def gather(self) -> None:
        for i in self.gathered():
            self.lambda_of(i, i.args[1], f"seg_{i.args[1]}")
            self.put(
                f"gathered_{i.args[1]}.gather(seg_{i.args[1]}, {self.slot(i.args[0])}, low, bags);"
            )

    @staticmethod
    def anew() -> list[str]:
        """Which part of a tile this thread works on, so that nothing of it is kept from bag to bag."""
        return [
            "    const WarpWorker me(p, t, kLanes, kSlices, true);",
            "    const Team<kShare> team(me, kSlices);",
        ]

    def slot_late(self, s: int) -> str:
        """A slot read after the list of used slots is written: from the words themselves."""
        value = self.u.constants.get(s)
        return str(value) if value is not None else f"me.word({1 + s})"

    def loop_tail(self) -> list[str]:
        draw = ["    turn.draw(me.thread);"] if self.rare and self.turns else []
        return [*(["    }"] if self.u.width_slot >= 0 else []), *draw, "  }"]

    def store(self, i: Instr) -> None:
        src, buffer, offset, _, *strides = i.args
        outer, step = strides[:-1], strides[-1]
        self.late = self.u.form != PLAIN and (i is not self.out or self.rare)
        kept = i is self.out and not self.late
        if kept:
            data = "out"
        elif self.late:
            data = f"target<{TYPES[self.u.dtypes[buffer]]}>(p, {self.read_late}({1 + buffer}))"
        else:
            data = self.buffer(buffer)
        at = self.dot(None, outer, self.bag_axes)
        if i is self.out and self.turns and len(outer) == 1 and at != "bag":
            at = f"row_offset<kStaged>(bag, {self.slot(outer[0])})"
        if not kept and (begin := self.dot(offset, (), ())) != "0":
            at = begin if at == "0" else f"{begin} + {at}"
        self.late = False
        if not self.is_row(src):
            self.put(f"if (has && me.lane == 0 && me.slice == 0) store({data} + {at}, r{src});")
        elif self.u.constants.get(step) == 1 or self.u.width == 1:
            here, f = "has && me.slice == 0", "f"
            if i is self.out and self.once:
                here, f = f"kOnce ? on && out != nullptr : {here}", "(kOnce ? 0 : f)"
            self.put(f"if ({here}) store({data} + {at} + {f}, r{src});")
        else:
            # Vectors need neighbours: the plan never calls such a unit aligned.
            self.put(
                f"if constexpr (kVec == 1) {{ if (has && me.slice == 0) "
                f"store_strided({data} + {at}, f, {self.slot(step)}, r{src}); }}"
            )


__all__ = ["Body", "Unsupported"]
