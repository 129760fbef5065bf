"""Pieces of generated text: slots, registers, and the right-hand sides of instructions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

from recom_jax.cuda.units import UnitClass, reads, walk, writes
from recom_jax.errors import EncodeError
from recom_jax.program import OPERAND, RESULT, Instr

TYPES = {
    "bool": "pred", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16",
    "uint32": "u32", "uint64": "u64", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
    "float8_e5m2": "e5m2", "float8_e4m3fn": "e4m3",
}  # fmt: skip
KINDS = {"SUM": "kSum", "MAX": "kMax", "MIN": "kMin", "PROD": "kProd"}
SIDES = {"LEFT": "kLeft", "RIGHT": "kRight"}


class Unsupported(EncodeError):
    """What the CUDA target cannot express; its text is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """What may be chosen freely. Results are the same but for `slices` and `long`, by the order of a jagged bag's sum.

    The first two and `long` are the kernel's text, the others the plan's: 0 is what its cost model says
    (csrc/cuda_cost.h).

    Attributes:
      flight: rows that a lane of a bag has on their way at once.
      blocks: of a multiprocessor at once, that registers must suffice for (0: what the text is best with).
      slices: positions, in thousandths, that a slice of a jagged bag has at least.
      run: bytes of adjacent columns' results that a tile writes side by side.
      tiles: of a multiprocessor, aimed at.
      long: all warps of a block sum up a jagged bag of 2,048 positions or more. `Options.long_bags` says so.
    """

    flight: int = 4
    blocks: int = 0
    slices: int = 0
    run: int = 0
    tiles: int = 0
    long: bool = False

    def __post_init__(self) -> None:
        """Rounds of a team are whole flights of each lane's numbers."""
        if self.flight < 1 or self.flight & (self.flight - 1):
            raise ValueError(f"a flight of {self.flight} rows: expected a power of two")

    @property
    def plan(self) -> tuple[int, int, int]:
        """What the launch words say of it."""
        return self.slices, self.run, self.tiles


class Variant(enum.Enum):
    """Which of a class's functions a text is. Jagged bags have two or, if `Schedule.long`, three; others one."""

    USUAL = 0
    ANY = 1  # segment ids in any order
    LONG = 2  # bags that all warps of a block sum up


class Text:
    """Text under construction for one unit class."""

    def __init__(
        self, cls: UnitClass, number: int, schedule: Schedule, variant: Variant = Variant.USUAL
    ) -> None:
        self.schedule = schedule
        self.variant = variant
        self.u, self.cls, self.number = cls, cls.cls, number
        self.lines: list[str] = []
        self.depth = 1
        self.out: Instr | None = None  # the only store of a unit that reduces
        self.used: set[int] = set()  # slots read from the column's words
        self.rare = False  # code that hardly ever runs: its words are read again, to hold no register meanwhile
        self.in_flight: set[int] = set()  # registers that hold a value for each position in flight
        self.position = ""  # "q" inside a region
        self.begun: set[int] = set()  # numbers whose bag's first one has an address of its own
        self.late = False  # words are read again where they are used, to hold no register meanwhile
        self.jagged = False
        self.inner = 0  # axes of the region's positions
        self.staged: list[
            tuple[Instr, list[Instr]]
        ] = []  # jagged regions, and LOADs that shared memory serves
        self.searches = False  # tiles may search their segment ids
        self.narrow = self.narrow_indexes()
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
        if self.late:
            return f"{self.read_late}({1 + s})"
        self.used.add(s)
        return f"s{s}"

    def imm(self, dtype: str, s: int) -> str:
        return f"immediate<{TYPES[dtype]}>({self.slot(s)})"

    def reg(self, r: int) -> str:
        return f"r{r}[u]" if r in self.in_flight else f"r{r}"

    def narrow_indexes(self) -> set[int]:
        """Row numbers that 32 bits hold: of tables whose rows are known to be few enough."""
        shifted = {
            r
            for i in walk(self.u.code)
            if i.op in ("BINARY", "SELECT", "CONVERT", "UNARY")
            for r in reads(i)
        }  # to one of several stacked tables: as wide as the format says
        found: set[int] = set()
        for i in walk(self.u.code):
            if i.op == "INDEX" and i.args[1] not in shifted:
                rows = self.u.constants.get(i.args[3])
                if i.args[3] in self.u.small or (rows is not None and rows < 2**31):
                    found.add(i.args[1])
        for i in walk(self.u.code):
            if i.op in ("PREDICATE", "EXPAND") and i.args[1] in found:
                found.add(i.args[0])
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
        if not self.late:
            self.used.add(s)
        return f"b{s}"

    def declared(self, s: int, read: str = "me.word") -> str:
        """The variable of a used slot, read from the column's words."""
        word, kind = f"{read}({1 + s})", self.cls.slots[s]
        if kind in (OPERAND, RESULT):
            e, access = TYPES[self.u.dtypes[s]], "source" if kind == OPERAND else "target"
            const = "const " if kind == OPERAND else ""
            return f"{const}{e}* const b{s} = {access}<{e}>(p, {word});"
        if s in self.u.small:
            return f"const i32 s{s} = static_cast<i32>({word});"
        return f"const i64 s{s} = {word};"

    def again(self, write: Callable[[], object]) -> list[str]:
        """The lines that `write` puts, behind variables of their own of the slots that they use.

        Those hide the function's, read the words at this very place, and so hold registers no longer than here.
        """
        used, self.used = self.used, set()
        lines = self.taken(write)
        declared = ["  " * self.depth + self.declared(s, self.read_late) for s in sorted(self.used)]
        self.used = used
        return [*declared, *lines]

    def taken(self, write: Callable[[], object]) -> list[str]:
        """The lines that `write` puts, apart."""
        lines, self.lines = self.lines, []
        write()
        taken, self.lines = self.lines, lines
        return taken

    @property
    def read_late(self) -> str:
        return "me.again" if self.rare else "me.late"

    def dot(self, offset: int | None, strides: Sequence[int], axes: Sequence[str]) -> str:
        """offset + sum of index * stride, as text."""
        terms = []
        if offset is not None and self.u.constants.get(offset) != 0:
            terms.append(self.slot(offset))
        for s, axis in zip(strides, axes, strict=True):
            value = self.u.constants.get(s)
            if value == 0:
                continue
            # Bags and positions are counted in 32 bits; their products may not fit.
            terms.append(axis if value == 1 else f"i64{{{axis}}} * {self.slot(s)}")
        return " + ".join(terms) or "0"

    @property
    def bag_axes(self) -> list[str]:
        n = len(self.cls.outer)
        return [] if n == 0 else ["bag"] if n == 1 else [f"bag_{k}" for k in range(n)]

    # ---- instructions -------------------------------------------------------------------------------------

    def dst(self, i: Instr) -> int:
        w = writes(i)
        assert w is not None
        return w

    def write(self, i: Instr) -> None:
        """An instruction that writes a register of its own space."""
        r = self.dst(i)
        finish = i.op == "TAKE" and i.args[0] and self.floating(r)
        if r in self.in_flight:
            self.put(f"{self.reg(r)} = {self.value(i)};")
        else:
            self.put(f"{'' if finish else 'const '}{self.type_of(r)} r{r} = {self.value(i)};")
        if finish:
            table, base, stride = self.table(i)
            self.put(
                f"one_hot_finish({self.reg(r)}, {table} + {base}, {self.one_hot_rows(i)}, {stride}, f, "
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
            find = f"search_{a[0].lower()}<{SIDES[a[1]]}>"
            sizes = ", ".join(self.slot(s) for s in a[6:])
            return f"{find}({reg(a[3])}, {self.buffer(a[4])} + {self.slot(a[5])}, {sizes})"
        if i.op == "SEARCH_UNIFORM":
            x = self.cls.regs[a[2]].dtype
            grid = f"{self.imm(x, a[3])}, {self.imm(x, a[4])}, {self.slot(a[5])}"
            return f"search_uniform<{SIDES[a[0]]}>({reg(a[2])}, {grid})"
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
        if dst in self.begun:
            outer = len(self.cls.outer)
            return f"load_one(from{dst} + {self.dot(None, strides[outer:], self.axes()[outer:])})"
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

    def rows_slot(self, i: Instr) -> int | None:
        """Rows of a lookup's table, of the INDEX that made its row number; None: it is computed."""
        made = {writes(x): x for x in walk(self.u.code)}
        at = made[i.args[2 if i.op == "TAKE" else 3]]
        while at.op in ("PREDICATE", "EXPAND"):
            at = made[at.args[1]]
        return int(at.args[3]) if at.op == "INDEX" else None

    def one_hot_rows(self, i: Instr) -> str:
        """The same of a one-hot lookup, as text."""
        rows = self.rows_slot(i)
        if rows is None:
            raise Unsupported("a one-hot lookup whose row number is computed")
        return self.slot(rows)
