"""The text of one class's function.

Bag space is straight-line code, run once a bag and lane. A region becomes a loop over positions, `kFlight` at a
time, in three phases: numbers (ids, masks, weights), then rows (so that all of them are on their way together),
then what is made of rows. Lanes of a bag hold its features; slices share its positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from recom_jax.cuda.units import JAGGED, PLAIN, UnitClass, closure, reads, walk, writes
from recom_jax.errors import EncodeError
from recom_jax.program import OPERAND, RESULT, Instr, Reg

TYPES = {
    "bool": "pred", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16",
    "uint32": "u32", "uint64": "u64", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
}  # fmt: skip
_KINDS = {"SUM": "kSum", "MAX": "kMax", "MIN": "kMin", "PROD": "kProd"}
_FORMS = ("kPlain", "kRegion", "kJagged")
_SIDES = {"LEFT": "kLeft", "RIGHT": "kRight"}


class Unsupported(EncodeError):
    """What the CUDA target cannot express; its text is the reason."""


class Body:
    """Writes the function of one unit class."""

    def __init__(self, cls: UnitClass, number: int) -> None:
        self.u, self.cls, self.number = cls, cls.cls, number
        self.lines: list[str] = []
        self.depth = 1
        self.used: set[int] = set()  # slots read from the column's words
        # Registers of the region at work that later phases read: numbers, and rows.
        self.numbers: set[int] = set()
        self.rows: set[int] = set()
        self.flight, self.in_flight = 1, False
        self.narrow = self.narrow_indexes()
        self.position = ""  # "q" inside a region
        self.jagged = False
        self.inner = 0
        written = [w for i in walk(cls.code) if (w := writes(i)) is not None]
        if len(set(written)) != len(written):
            raise Unsupported("a register written twice")

    # ---- pieces of text -----------------------------------------------------------------------------------

    def put(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def slot(self, s: int) -> str:
        """A slot's value: a literal where all columns agree."""
        value = self.u.constants.get(s)
        if value is not None:
            return (
                str(value)
                if -(2**31) < value < 2**31
                else f"static_cast<i64>({value & (2**64 - 1)}ull)"
            )
        self.used.add(s)
        return f"s{s}"

    def imm(self, dtype: str, s: int) -> str:
        return f"immediate<{TYPES[dtype]}>({self.slot(s)})"

    def reg(self, r: int) -> str:
        if r in self.numbers:
            return f"now[u].r{r}"
        return f"r{r}[u]" if r in self.rows else f"r{r}"

    def narrow_indexes(self) -> set[int]:
        """Row numbers that 32 bits hold: of tables whose rows are known to be few enough."""
        found: set[int] = set()
        for i in walk(self.u.code):
            rows = self.u.constants.get(i.args[3]) if i.op == "INDEX" else None
            if rows is not None and rows < 2**31:
                found.add(i.args[1])
        for i in walk(self.u.code):
            if i.op in ("PREDICATE", "EXPAND") and i.args[1] in found:
                found.add(i.args[0])
        # Shifted to one of several stacked tables: as wide as the format says.
        for i in walk(self.u.code):
            if i.op in ("BINARY", "SELECT", "CONVERT", "UNARY"):
                found -= set(reads(i))
        return found

    def type_of(self, r: int) -> str:
        g = self.cls.regs[r]
        if r in self.narrow:
            return "i32"
        return TYPES[g.dtype] if g.width < 0 else f"Row<{TYPES[g.dtype]}, kVec>"

    def is_row(self, r: int) -> bool:
        return self.cls.regs[r].width >= 0

    def buffer(self, s: int) -> str:
        """A typed pointer to the array in a buffer slot."""
        self.used.add(s)
        return f"b{s}"

    def dot(self, offset: int, strides: Sequence[int], axes: Sequence[str]) -> str:
        """offset + sum of index * stride, as text."""
        terms = [] if self.u.constants.get(offset) == 0 else [self.slot(offset)]
        for s, axis in zip(strides, axes, strict=True):
            value = self.u.constants.get(s)
            if value == 0:
                continue
            terms.append(axis if value == 1 else f"{axis} * {self.slot(s)}")
        return " + ".join(terms) or "0"

    @property
    def bag_axes(self) -> list[str]:
        n = len(self.cls.outer)
        return [] if n == 0 else ["bag"] if n == 1 else [f"bag_{k}" for k in range(n)]

    # ---- the function -------------------------------------------------------------------------------------

    def text(self) -> list[str]:
        u = self.u
        stride = 1 + len(self.cls.slots)
        self.depth = 2 if u.width_slot < 0 else 3
        for i in u.code:
            if i.op == "REGION" or i.op == "JREGION":
                self.region(i)
            elif i.op == "STORE":
                self.store(i)
            else:
                self.write(i)
        passes, self.lines = self.lines, []
        self.depth = 1
        before = self.before()
        rows = (
            "numbers"
            if u.width_slot < 0
            else f"rows of {u.width if u.width is not None else 'any width'}"
        )
        form = ("no reduction", "bags", "jagged bags")[u.form]
        lanes = "const int kLanes = t.lanes;"
        if u.width is not None:
            lanes = f"constexpr int kLanes = lanes_for({_FORMS[u.form]}, {u.width}, kVec);"
        head = [
            f"// Class {self.number}: {rows}, {form}.",
            "template <int kVec>",
            f"__device__ __forceinline__ void class_{self.number}(const Params& p, const Tile& t) {{",
            f"  {lanes}",
            f"  const Worker me(p, t, kLanes, {stride});",
        ]
        for s in sorted(self.used):
            kind = self.cls.slots[s]
            if kind in (OPERAND, RESULT):
                e, access = TYPES[u.dtypes[s]], "source" if kind == OPERAND else "target"
                const = "const " if kind == OPERAND else ""
                head.append(f"  {const}{e}* const b{s} = {access}<{e}>(p, me.word({1 + s}));")
            else:
                head.append(f"  const i64 s{s} = me.word({1 + s});")
        return [*head, *before, *self.loop_head(), *passes, *self.loop_tail(), "}"]

    def before(self) -> list[str]:
        """What the whole block finds out before its first bag."""
        one_hot = [i for i in walk(self.u.code) if i.op in ("TAKE", "POOL") and i.args[0]]
        for i in one_hot:
            dst = self.dst(i)
            table, base, stride = self.table(i)
            if self.floating(dst):
                self.put(
                    f"const bool dirty_{dst} = block_non_finite({table} + {base}, "
                    f"{self.slot(self.rows_slot(i))}, {stride}, {self.width()});"
                )
        for i in self.u.code:
            if i.op == "JREGION":
                total, seg = self.slot(i.args[0]), i.args[1]
                splits = self.splits(i)
                self.lambda_of(i, seg, f"seg_{seg}")
                if splits is not None:
                    buffer, offset, n = splits
                    self.put(
                        f"const auto* const splits_{seg} = {self.buffer(buffer)} + {self.slot(offset)};"
                    )
                    self.put(
                        f"const bool ascends_{seg} = block_ascends([&](i64 k) {{ return "
                        f"static_cast<i64>(load_one(splits_{seg} + k)); }}, {self.slot(n)});"
                    )
                else:
                    self.put(f"const bool ascends_{seg} = block_ascends(seg_{seg}, {total});")
        out, self.lines = self.lines, []
        return out

    def width(self) -> str:
        return str(self.u.width) if self.u.width is not None else self.slot(self.u.width_slot)

    def loop_head(self) -> list[str]:
        u = self.u
        lines = [
            "  for (int at = 0; at < t.bags; at += me.step) {",
            "    const bool on = !me.idle && at + me.first < t.bags;",
            "    const i64 bag = t.bag0 + (on ? at + me.first : 0);",
        ]
        outer = self.cls.outer
        if len(outer) > 1:
            lines.append("    i64 rest = bag;")
            for k in range(len(outer) - 1, 0, -1):
                size = self.slot_late(outer[k])
                lines.append(f"    const i64 bag_{k} = rest % {size};")
                lines.append(f"    rest /= {size};")
            lines.append("    const i64 bag_0 = rest;")
        if u.width_slot >= 0:
            width = str(u.width) if u.width is not None else self.slot_late(u.width_slot)
            lines += [
                f"    for (i64 chunk = 0; chunk < {width}; chunk += kLanes * kVec) {{",
                "      const i64 mine = chunk + me.lane * kVec;",
                f"      const bool has = on && mine < {width};",
                f"      const i64 f = mine < {width} ? mine : 0;",
            ]
        else:
            lines.append("    const bool has = on;")
        return lines

    def slot_late(self, s: int) -> str:
        """A slot read after the list of used slots is written: from the words themselves."""
        value = self.u.constants.get(s)
        return str(value) if value is not None else f"me.word({1 + s})"

    def loop_tail(self) -> list[str]:
        return ["    }", "  }"] if self.u.width_slot >= 0 else ["  }"]

    # ---- instructions -------------------------------------------------------------------------------------

    def dst(self, i: Instr) -> int:
        w = writes(i)
        assert w is not None
        return w

    def write(self, i: Instr) -> None:
        """An instruction that writes a register of its own space."""
        r = self.dst(i)
        finish = i.op == "TAKE" and i.args[0] and self.floating(r)
        if r in self.rows:
            self.put(f"{self.reg(r)} = {self.value(i)};")
        else:
            self.put(f"{'' if finish else 'const '}{self.type_of(r)} r{r} = {self.value(i)};")
        if finish:
            table, base, stride = self.table(i)
            self.put(
                f"one_hot_finish({self.reg(r)}, {table} + {base}, {self.slot(self.rows_slot(i))}, {stride}, f, "
                f"dirty_{r}, [&](i64 row) {{ return row == {self.reg(i.args[2])}; }});"
            )

    def floating(self, r: int) -> bool:
        return self.cls.regs[r].dtype in ("float32", "float64")

    def value(self, i: Instr) -> str:
        """The right-hand side of an instruction that writes a register of its own space."""
        a, reg = i.args, self.reg
        dtype = self.cls.regs[self.dst(i)].dtype
        if i.op == "LOAD":
            return self.load(i)
        if i.op == "AFFINE":
            return f"static_cast<{TYPES[dtype]}>({self.dot(a[1], a[3:], self.axes())})"
        if i.op == "CONST":
            text = self.imm(dtype, a[1])
            return f"spread<kVec>({text})" if self.is_row(a[0]) else text
        if i.op == "EXPAND":
            return f"r{a[1]}"
        if i.op == "UNARY":
            return f"x_{a[0]}({reg(a[2])})"
        if i.op == "BINARY":
            return self.as_row(a[1], f"x_{a[0]}({reg(a[2])}, {reg(a[3])})", a[2:4])
        if i.op == "SELECT":
            return self.as_row(a[0], f"x_select({reg(a[1])}, {reg(a[2])}, {reg(a[3])})", a[1:4])
        if i.op == "CONVERT":
            return f"x_convert<{TYPES[dtype]}>({reg(a[1])})"
        if i.op == "BITCAST":
            return f"x_bitcast<{TYPES[dtype]}>({reg(a[1])})"
        if i.op == "SEARCH":
            find = f"search_{a[0].lower()}<{_SIDES[a[1]]}>"
            return (
                f"{find}({reg(a[3])}, {self.buffer(a[4])} + {self.slot(a[5])}, {self.slot(a[6])})"
            )
        if i.op == "SEARCH_UNIFORM":
            x = self.cls.regs[a[2]].dtype
            grid = f"{self.imm(x, a[3])}, {self.imm(x, a[4])}, {self.slot(a[5])}"
            return f"search_uniform<{_SIDES[a[0]]}>({reg(a[2])}, {grid})"
        if i.op == "INDEX":
            kind = "i32" if a[1] in self.narrow else "i64"
            return f"index_{a[0].lower()}<{kind}>({reg(a[2])}, {self.slot(a[3])})"
        if i.op == "PREDICATE":
            return f"predicate({reg(a[1])}, {reg(a[2])})"
        if i.op == "TAKE":
            return self.fetch(i)
        raise Unsupported(f"instruction {i.op}")

    def as_row(self, dst: int, text: str, sources: Sequence[int]) -> str:
        """Spreads a result that is a row although nothing it is made of is one."""
        if self.is_row(dst) and not any(self.is_row(s) for s in sources):
            return f"spread<kVec>({text})"
        return text

    def axes(self) -> list[str]:
        if self.position == "":
            return self.bag_axes
        if self.jagged:
            return ["q"]
        n = self.inner
        return [*self.bag_axes, *(["q"] if n == 1 else [f"q_{k}" for k in range(n)])]

    def load(self, i: Instr) -> str:
        dst, buffer, offset, _, *strides = i.args
        data = self.buffer(buffer)
        if not self.is_row(dst):
            return f"load_one({data} + {self.dot(offset, strides, self.axes())})"
        e = TYPES[self.u.dtypes[buffer]]
        at = self.dot(offset, strides[:-1], self.axes())
        step = self.slot(strides[-1])
        if self.u.constants.get(strides[-1]) == 0:
            return f"spread<kVec>(load_one({data} + {at}))"
        return f"load_row<{e}, kVec>({data} + {at}, f, {step})"

    def table(self, i: Instr) -> tuple[str, str, str]:
        k = 3 if i.op == "TAKE" else 5
        return self.buffer(i.args[k]), self.slot(i.args[k + 1]), self.slot(i.args[k + 2])

    def fetch(self, i: Instr) -> str:
        """A lookup's row."""
        take = i.op == "TAKE"
        dst, idx, fill = (
            i.args[1 if take else 2],
            i.args[2 if take else 3],
            i.args[6 if take else 8],
        )
        table, base, stride = self.table(i)
        dtype = self.cls.regs[dst].dtype
        none = f"immediate<{TYPES[dtype]}>(0)" if i.args[0] else self.imm(dtype, fill)
        if take:
            none = (
                f"{self.reg(idx)} == kSkipped ? {TYPES[dtype]}(0) : {none}"
                if self.masked(idx)
                else none
            )
        at = table if base == "0" else f"{table} + {base}"
        return f"take<{TYPES[dtype]}, kVec>({at}, {self.reg(idx)}, {stride}, f, {none})"

    def masked(self, idx: int) -> bool:
        """Whether a row number may stand for a masked-out position."""
        for i in walk(self.u.code):
            if writes(i) == idx:
                return i.op not in ("INDEX", "BINARY", "SELECT")
        return True

    def rows_slot(self, i: Instr) -> int:
        """Rows of a one-hot lookup's table: of the INDEX that made its row number."""
        made = {writes(x): x for x in walk(self.u.code)}
        at = made[i.args[2 if i.op == "TAKE" else 3]]
        while at.op in ("PREDICATE", "EXPAND"):
            at = made[at.args[1]]
        if at.op != "INDEX":
            raise Unsupported("a one-hot lookup whose row number is computed")
        return int(at.args[3])

    def store(self, i: Instr) -> None:
        src, buffer, offset, _, *strides = i.args
        outer, step = strides[:-1], strides[-1]
        data = self.buffer(buffer)
        at = self.dot(offset, outer, self.bag_axes)
        if not self.is_row(src):
            self.put(f"if (has && me.lane == 0 && me.slice == 0) store({data} + {at}, r{src});")
        elif self.u.constants.get(step) == 1 or self.u.width == 1:
            self.put(f"if (has && me.slice == 0) store({data} + {at} + f, r{src});")
        else:
            # Vectors need neighbours: the plan never calls such a unit aligned.
            self.put(
                f"if constexpr (kVec == 1) {{ if (has && me.slice == 0) "
                f"store_strided({data} + {at}, f, {self.slot(step)}, r{src}); }}"
            )

    # ---- regions ------------------------------------------------------------------------------------------

    def lambda_of(self, region: Instr, register: int, name: str) -> None:
        """A function of the position that computes a number of the region's body."""
        code = closure(region.body, {register})
        if any(i.op in ("EXPAND", "TAKE", "POOL", "ACC") for i in code):
            raise Unsupported("segment ids that depend on bags")
        kept, self.numbers, self.rows = (self.numbers, self.rows), set(), set()
        position, self.position, jagged, self.jagged = (
            self.position,
            "q",
            self.jagged,
            region.op == "JREGION",
        )
        self.put(f"const auto {name} = [&](i64 q) -> i64 {{")
        for i in code:
            self.put(f"  const {self.type_of(self.dst(i))} r{writes(i)} = {self.value(i)};")
        self.put(f"  return static_cast<i64>(r{register});")
        self.put("};")
        (self.numbers, self.rows), self.position, self.jagged = kept, position, jagged

    def splits(self, region: Instr) -> tuple[int, int, int] | None:
        """(buffer, offset, count) of row splits, if segment ids are `searchsorted(splits, position, right) - 1`."""
        made = {writes(i): i for i in region.body}
        sub = made.get(region.args[1])
        if sub is None or sub.op != "BINARY" or sub.args[0] != "sub":
            return None
        one, search = made.get(sub.args[3]), made.get(sub.args[2])
        if one is None or one.op != "CONST" or self.u.constants.get(one.args[1]) != 1:
            return None
        while search is not None and search.op == "CONVERT":
            search = made.get(search.args[1])
        if search is None or search.op != "SEARCH" or search.args[1] != "RIGHT":
            return None
        x = made.get(search.args[3])
        while (
            x is not None
            and x.op == "CONVERT"
            and self.integer(x.args[0])
            and self.integer(x.args[1])
        ):
            x = made.get(x.args[1])
        if x is None or x.op != "AFFINE" or not self.integer(x.args[0]):
            return None
        if [self.u.constants.get(s) for s in (x.args[1], *x.args[3:])] != [0, 1]:
            return None
        if self.u.dtypes[search.args[4]] not in ("int32", "int64", "uint32"):
            return None
        return search.args[4], search.args[5], search.args[6]

    def integer(self, r: int) -> bool:
        return self.cls.regs[r].dtype in ("int32", "int64", "uint32", "uint64")

    def region(self, i: Instr) -> None:
        """A loop over positions."""
        self.jagged = i.op == "JREGION"
        self.inner = 0 if self.jagged else len(i.args) - 1
        body = i.body
        phase = _phases(body, self.cls.regs)
        made = {
            w: phase[k]
            for k, b in enumerate(body)
            if (w := writes(b)) is not None and b.op not in ("POOL", "ACC")
        }
        # What a later phase reads of an earlier one. A pool reads its row number in the first.
        later = {
            r
            for k, b in enumerate(body)
            for r in (reads(b)[1:] if b.op == "POOL" else reads(b))
            if r in made and made[r] != phase[k]
        }
        self.numbers = {r for r in later if made[r] == 0}
        self.rows = {r for r in later if made[r] == 1}
        reductions = [b for b in body if b.op in ("POOL", "ACC")]
        pools = [b for b in reductions if b.op == "POOL"]
        lookups = sum(n == 1 for n in phase) + len(pools)
        self.flight = 4 if lookups <= 2 else 2
        for b in reductions:
            dst, kind = (b.args[2], b.args[1]) if b.op == "POOL" else (b.args[1], b.args[0])
            init = self.imm(self.cls.regs[dst].dtype, b.args[9 if b.op == "POOL" else 3])
            start = f"start_of<{_KINDS[kind]}>({init}, me.slice)"
            start = f"spread<kVec>({start})" if self.is_row(dst) else start
            self.put(f"{self.type_of(dst)} r{dst} = {start};")
        self.put("{")
        self.depth += 1
        self.bounds(i)
        wanted = self.numbers | {b.args[3] for b in pools}
        self.first_phase(
            i, closure([b for k, b in enumerate(body) if phase[k] == 0], wanted), pools
        )
        self.put("if (begin + me.slice < end) {")
        self.depth += 1
        self.put(f"Position now[{self.flight}], next[{self.flight}];")
        self.each("now[u] = numbers(begin + me.slice + u * t.slices);")
        step = f"{self.flight} * t.slices"
        self.put(f"for (i64 q0 = begin + me.slice; q0 < end; q0 += {step}) {{")
        self.depth += 1
        for r in sorted(self.rows):
            self.put(f"{self.type_of(r)} r{r}[{self.flight}];")
        for b in pools:
            self.put(
                f"Row<{TYPES[self.cls.regs[b.args[2]].dtype]}, kVec> x{b.args[2]}[{self.flight}];"
            )
        self.in_flight = True
        self.put("#pragma unroll")
        self.put(f"for (int u = 0; u < {self.flight}; ++u) {{")
        self.depth += 1
        ones = [b for k, b in enumerate(body) if phase[k] == 1]
        self.place(i, bool(ones))
        for b in ones:
            self.write(b)
        for b in pools:
            self.put(f"x{b.args[2]}[u] = {self.pool_row(b)};")
        self.depth -= 1
        self.put("}")
        # The next positions' ids are on their way while these rows are.
        self.each(f"next[u] = numbers(q0 + {step} + u * t.slices);")
        self.put("#pragma unroll")
        self.put(f"for (int u = 0; u < {self.flight}; ++u) {{")
        self.depth += 1
        twos = [b for k, b in enumerate(body) if phase[k] == 2]
        self.place(i, any(b.op in ("AFFINE", "LOAD") for b in twos))
        for b in twos:
            if b.op == "POOL":
                self.pool(b)
            elif b.op == "ACC":
                self.put(
                    f"combine_if<{_KINDS[b.args[0]]}>(now[u].in, r{b.args[1]}, {self.reg(b.args[2])});"
                )
            else:
                self.write(b)
        self.put("now[u] = next[u];")
        self.depth -= 1
        self.put("}")
        self.in_flight = False
        for _ in range(2):
            self.depth -= 1
            self.put("}")
        self.numbers, self.rows = set(), set()
        self.finish(i, reductions)
        self.depth -= 1
        self.put("}")
        self.position, self.jagged = "", False

    def each(self, line: str) -> None:
        self.put("#pragma unroll")
        self.put(f"for (int u = 0; u < {self.flight}; ++u) {line}")

    def pool(self, b: Instr) -> None:
        """Adds a row to its bag."""
        dst, row = b.args[2], f"x{b.args[2]}[u]"
        if b.args[4] >= 0:
            row = f"x_mul({row}, {self.reg(b.args[4])})"
        self.put(f"combine_if<{_KINDS[b.args[1]]}>(now[u].k{dst} != kSkipped, r{dst}, {row});")

    def bounds(self, i: Instr) -> None:
        if not self.jagged:
            sizes = [self.slot(s) for s in i.args[1:]]
            self.put(f"const i64 begin = 0, end = {' * '.join(sizes) or '1'};")
            return
        total, seg = self.slot(i.args[0]), i.args[1]
        self.put(f"i64 begin = 0, end = {total};")
        splits = self.splits(i)
        if splits is None:
            self.put(f"if (ascends_{seg}) {{")
            self.put(f"  begin = lower_bound(seg_{seg}, {total}, bag);")
            self.put(f"  end = lower_bound(seg_{seg}, {total}, bag + 1);")
            self.put("}")
            return
        n = self.slot(splits[2])
        self.put(f"if (ascends_{seg}) split_range(splits_{seg}, {n}, {total}, bag, begin, end);")

    def first_phase(self, region: Instr, code: Sequence[Instr], pools: Sequence[Instr]) -> None:
        """What is computed of a position before any row is read, as a function of the position."""
        self.position = "q"
        fields = [f"{self.type_of(r)} r{r};" for r in sorted(self.numbers)]
        fields += [f"{self.type_of(b.args[3])} k{b.args[2]};" for b in pools]
        self.put("struct Position {")
        self.put(f"  {' '.join(['bool in;', *fields])}")
        self.put("};")
        self.put("const auto numbers = [&](i64 at_q) -> Position {")
        self.depth += 1
        self.put("Position now;")
        self.put(self.inside(region))
        self.place(region, True, "at_q")
        kept, self.numbers = self.numbers, set()
        for b in code:
            self.write(b)
        self.put("now.in = in;")
        for r in sorted(kept):
            self.put(f"now.r{r} = r{r};")
        for b in pools:
            k = b.args[3]
            self.put(f"now.k{b.args[2]} = in ? r{k} : static_cast<{self.type_of(k)}>(kSkipped);")
        self.numbers = kept
        self.put("return now;")
        self.depth -= 1
        self.put("};")

    def place(self, region: Instr, wanted: bool, at: str = "q0 + u * t.slices") -> None:
        """Names the position's index: behind the end, the first one's."""
        self.position = "q"
        if not wanted:
            return
        self.put(f"const i64 q = {at} < end ? {at} : begin;")
        if not self.jagged and self.inner > 1:
            self.put("i64 rest_q = q;")
            for k in range(self.inner - 1, 0, -1):
                size = self.slot(region.args[1 + k])
                self.put(f"const i64 q_{k} = rest_q % {size};")
                self.put(f"rest_q /= {size};")
            self.put("const i64 q_0 = rest_q;")

    def inside(self, region: Instr) -> str:
        if not self.jagged:
            return "const bool in = at_q < end;"
        seg = region.args[1]
        return f"const bool in = at_q < end && (ascends_{seg} || seg_{seg}(at_q) == bag);"

    def pool_row(self, b: Instr) -> str:
        table, base, stride = self.table(b)
        dst = b.args[2]
        dtype = self.cls.regs[dst].dtype
        fill = f"immediate<{TYPES[dtype]}>(0)" if b.args[0] else self.imm(dtype, b.args[8])
        at = table if base == "0" else f"{table} + {base}"
        return f"take<{TYPES[dtype]}, kVec>({at}, now[u].k{dst}, {stride}, f, {fill})"

    def finish(self, region: Instr, reductions: Sequence[Instr]) -> None:
        for b in reductions:
            dst, kind = (b.args[2], b.args[1]) if b.op == "POOL" else (b.args[1], b.args[0])
            self.put(f"join_slices<{_KINDS[kind]}>(r{dst}, kLanes, t.slices);")
        for b in reductions:
            if b.op != "POOL" or not b.args[0]:
                continue
            dst = b.args[2]
            if not self.floating(dst):
                continue
            if self.jagged:
                raise Unsupported("a one-hot product summed over jagged bags")
            table, base, stride = self.table(b)
            self.one_hot_index(region, b.args[3], f"index_{dst}")
            self.put(
                f"one_hot_finish(r{dst}, {table} + {base}, {self.slot(self.rows_slot(b))}, {stride}, f, dirty_{dst}, "
                f"[&](i64 row) {{ for (i64 q = 0; q < end; ++q) if (index_{dst}(q) == row) return true; "
                "return false; });"
            )

    def one_hot_index(self, region: Instr, register: int, name: str) -> None:
        code = closure(region.body, {register})
        self.position = "q"
        self.put(f"const auto {name} = [&](i64 q) -> i64 {{")
        if self.inner > 1:
            self.put("  i64 rest = q;")
            for k in range(self.inner - 1, 0, -1):
                size = self.slot(region.args[1 + k])
                self.put(f"  const i64 q_{k} = rest % {size};")
                self.put(f"  rest /= {size};")
            self.put("  const i64 q_0 = rest;")
        for i in code:
            self.put(f"  const {self.type_of(self.dst(i))} r{writes(i)} = {self.value(i)};")
        self.put(f"  return r{register};")
        self.put("};")


def _phases(body: Sequence[Instr], regs: Sequence[Reg]) -> list[int]:
    """0: numbers, 1: rows that are read, 2: what is made of rows, and reductions."""
    after: set[int] = set()  # registers that exist from phase 2 on
    found = []
    for b in body:
        if b.op in ("POOL", "ACC"):
            found.append(2)
            continue
        if any(r in after for r in reads(b)):
            phase = 2
        elif b.op == "TAKE" or (b.op == "LOAD" and regs[b.args[0]].width >= 0):
            phase = 1
        else:
            phase = 0
        if phase > 0:
            after.add(int(writes(b) or 0))
        found.append(phase)
    return found


__all__ = ["JAGGED", "PLAIN", "Body", "Unsupported"]
