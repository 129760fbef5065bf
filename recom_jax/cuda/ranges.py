"""Where a jagged bag's positions lie, and how many positions a bag of any kind has."""

from __future__ import annotations

from recom_jax.cuda.orders import BAGS, Orders
from recom_jax.cuda.text import TYPES, Unsupported, Variant
from recom_jax.cuda.units import closure, writes
from recom_jax.program import Instr

_NARROW = ("int8", "uint8", "int16", "uint16", "int32")


class Ranges(Orders):
    """Adds the ranges of positions."""

    def ranges(self, i: Instr) -> None:
        """How many positions there are, and which are the bag's."""
        if self.jagged:
            # What segment ids say of a tile needs no number of positions.
            unused = "[[maybe_unused]] " if self.splits(i) is None else ""
            gathered = f"gathered_{i.args[1]}.n"
            total = gathered if self.gathers(i) else f"static_cast<i32>({self.slot(i.args[0])})"
            self.put(f"{unused}const i32 total = {total};")
        else:
            sizes = [self.slot(s) for s in i.args[1:]]
            self.put(f"const i32 total = static_cast<i32>({' * '.join(sizes) or '1'});")
        if not self.jagged or self.any_order:
            self.put("const Range span{0, total};")
            return
        span, splits = self.range_of(i, "bag"), self.splits(i)
        if self.rare:
            if splits is None or splits[0] != "LENGTHS":  # which a thread adds up on its way
                self.bags(i)
        elif self.within(i):
            span = f"limits_{i.args[1]}.in_tile(bag)"
        elif any(region is i for region, _ in self.staged):
            span = "span_of(bag)"
            self.put("const auto span_of = [&](i32 at) -> Range {")
            self.put(f"  if constexpr (kStaged) return limits_{i.args[1]}.of(at);")
            self.put(f"  else return {self.range_of(i, 'at')};")
            self.put("};")
        if self.variant is Variant.LONG:
            span = f"parts.of({span})"
        elif self.schedule.long:  # rows without vectors are rare, and have no code for long bags
            span = f"kVec == {self.u.vec} ? unless_long({span}) : {span}"
        self.put(f"const Range span = {span};")

    def within(self, i: Instr) -> bool:
        """Whether a region's positions are counted from its tile's first one, which then no register has to hold."""
        return self.apart and not self.rare and any(region is i for region, _ in self.staged)

    def range_of(self, i: Instr, bag: str) -> str:
        """The positions of a jagged bag, as text."""
        seg, splits = i.args[1], self.splits(i)
        if splits is None:
            return f"range_in(seg_{seg}, tile_{seg}, {bag})"
        if splits[0] in BAGS:
            return f"bags_{seg}.range(total, {bag})"
        return f"split_range(splits_{seg}, {self.slot(splits[3])}, total, {bag})"

    def bags(self, i: Instr) -> None:
        """Names what says where a jagged region's bags lie."""
        seg, splits = i.args[1], self.splits(i)
        if splits is None:
            self.lambda_of(i, seg, f"seg_{seg}")
            return
        mode, buffer, offset, n = splits
        at = self.buffer(buffer)
        at = at if self.u.constants.get(offset) == 0 else f"{at} + {self.slot(offset)}"
        if mode in BAGS:
            kind = f"{BAGS[mode]}<{TYPES[self.u.dtypes[buffer]]}>"
            self.put(f"{kind} bags_{seg}{{{at}, {self.slot(n)}}};")
        else:
            self.put(f"const auto* const splits_{seg} = {at};")

    def lambda_of(self, region: Instr, register: int, name: str) -> None:
        """A function of the position that computes a number of the region's body."""
        code = closure(region.body, {register})
        if any(i.op in ("EXPAND", "TAKE", "POOL", "ACC") for i in code):
            raise Unsupported("segment ids that depend on bags")
        kept, self.in_flight = self.in_flight, set()
        position, self.position, jagged, self.jagged = (
            self.position,
            "q",
            self.jagged,
            region.op == "JREGION",
        )
        # Half the instructions to compare with, where 32 bits hold all of them.
        kind = "i32" if self.cls.regs[register].dtype in _NARROW else "i64"
        self.put(f"const auto {name} = [&](i32 q) -> {kind} {{")
        for i in code:
            self.put(f"  const {self.type_of(self.dst(i))} r{writes(i)} = {self.value(i)};")
        self.put(f"  return static_cast<{kind}>(r{register});")
        self.put("};")
        self.in_flight, self.position, self.jagged = kept, position, jagged


__all__ = ["Ranges"]
