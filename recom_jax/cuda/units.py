"""Stage 6 for CUDA, first half: a `Program` -> units, grouped into classes of equal code.

A unit is what one program column does for one width: the stores of that width and everything they need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from recom_jax.program import DIM, IMM, OPERAND, RESULT, ClassDef, Instr, Program

PLAIN, REGION, JAGGED = 0, 1, 2
RUNS = 3  # JAGGED, in launch words: aligned tiles deal out their positions (runs.py)
SEARCHES = 4  # added to either in launch words: tiles may search their segment ids (headers/recom_segments.cuh)

_SIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "float8_e5m2": 1, "float8_e4m3fn": 1,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class UnitClass:
    """Units of the same code.

    Attributes:
      cls: the program class.
      width_slot: of the rows it stores, -1 if it stores numbers.
      width: their width where every unit agrees on it, else None.
      form: PLAIN, REGION or JAGGED.
      vec: elements of a lane's vector where everything is aligned.
      dtypes: of the array in each buffer slot.
      constants: values of the slots that are equal for all units, to be written into the text.
      most: the largest value of each slot whose value is fixed in each unit.
      small: slots whose value is fixed in each unit, differs between units, and fits 32 bits.
      code: the instructions needed.
    """

    cls: ClassDef
    number: int
    width_slot: int
    width: int | None
    form: int
    vec: int
    dtypes: Mapping[int, str]
    constants: Mapping[int, int]
    most: Mapping[int, int]
    small: frozenset[int]
    code: tuple[Instr, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Units:
    """All units of a program: the classes, and (program column, class) of each unit."""

    classes: tuple[UnitClass, ...]
    units: tuple[tuple[int, int], ...]


def size_of(dtype: str) -> int:
    """Bytes of an element."""
    return _SIZES[dtype]


def writes(i: Instr) -> int | None:
    """The register an instruction writes (REGION and STORE: none)."""
    if i.op in ("UNARY", "BINARY", "INDEX", "TAKE", "SEARCH_UNIFORM", "ACC"):
        return int(i.args[1])
    if i.op in ("SEARCH", "POOL"):
        return int(i.args[2])
    if i.op in ("REGION", "JREGION", "STORE"):
        return None
    return int(i.args[0])


def reads(i: Instr) -> tuple[int, ...]:
    """The registers an instruction reads."""
    a = i.args
    if i.op in ("LOAD", "AFFINE", "CONST", "REGION"):
        return ()
    if i.op in ("EXPAND", "CONVERT", "BITCAST", "JREGION"):
        return (a[1],)
    if i.op in ("UNARY", "SEARCH_UNIFORM", "INDEX", "TAKE", "ACC"):
        return (a[2],)
    if i.op == "BINARY":
        return (a[2], a[3])
    if i.op == "SELECT":
        return (a[1], a[2], a[3])
    if i.op == "SEARCH":
        return (a[3],)
    if i.op == "PREDICATE":
        return (a[1], a[2])
    if i.op == "POOL":
        return (a[3], a[4]) if a[4] >= 0 else (a[3],)
    if i.op == "STORE":
        return (a[0],)
    raise AssertionError(i.op)


def closure(code: Sequence[Instr], wanted: set[int]) -> tuple[Instr, ...]:
    """The instructions that registers in `wanted` need, in order. Adds what they read to `wanted`."""
    kept: list[Instr] = []
    for i in reversed(code):
        if i.op in ("REGION", "JREGION"):
            if any(r in wanted for b in i.body if (r := writes(b)) is not None):
                inner = set(wanted)
                if i.op == "JREGION":
                    inner.add(i.args[1])
                body = closure(i.body, inner)
                wanted |= inner
                kept.append(Instr(i.op, i.args, body))
        elif i.op != "STORE" and writes(i) in wanted:
            wanted.update(reads(i))
            kept.append(i)
    return tuple(reversed(kept))


def needed(cls: ClassDef, width_slot: int) -> tuple[Instr, ...]:
    """The code of the stores of one width."""
    stores = [i for i in cls.code if i.op == "STORE" and cls.regs[i.args[0]].width == width_slot]
    wanted = {i.args[0] for i in stores}
    return (*closure(cls.code, wanted), *stores)


def walk(code: Sequence[Instr]) -> Iterator[Instr]:
    """Every instruction, bodies included."""
    for i in code:
        yield i
        yield from walk(i.body)


def units_of(program: Program) -> Units:
    """Splits columns by width and groups equal code."""
    keys: dict[tuple[object, ...], int] = {}
    members: list[list[int]] = []
    made: list[tuple[int, int, int | None, dict[int, str], tuple[Instr, ...]]] = []
    units: list[tuple[int, int]] = []
    parts: dict[int, list[tuple[int, tuple[Instr, ...]]]] = {}
    for n, column in enumerate(program.columns):
        cls = program.classes[column.cls]
        if column.cls not in parts:
            slots = dict.fromkeys(cls.regs[i.args[0]].width for i in cls.code if i.op == "STORE")
            parts[column.cls] = [(s, needed(cls, s)) for s in slots]
        for slot, code in parts[column.cls]:
            width = 1 if slot < 0 else _constant(program, cls, column.values, slot)
            dtypes = {
                k: (program.operands if kind == OPERAND else program.results)[v][0]
                for k, (kind, v) in enumerate(zip(cls.slots, column.values, strict=True))
                if kind in (OPERAND, RESULT)
            }
            key = (column.cls, slot, width, tuple(dtypes.items()))
            if key not in keys:
                keys[key] = len(made)
                made.append((column.cls, slot, width, dtypes, code))
                members.append([])
            members[keys[key]].append(n)
            units.append((n, keys[key]))
    classes = []
    for (number, slot, width, dtypes, code), of in zip(made, members, strict=True):
        cls = program.classes[number]
        constants, most, small = _fixed(program, cls, [program.columns[n].values for n in of])
        ops = {i.op for i in code}
        form = JAGGED if "JREGION" in ops else REGION if "REGION" in ops else PLAIN
        vec = _vector(cls, code, slot, width, dtypes)
        classes.append(
            UnitClass(cls, number, slot, width, form, vec, dtypes, constants, most, small, code)
        )
    return Units(tuple(classes), tuple(units))


def _constant(program: Program, cls: ClassDef, values: Sequence[int], slot: int) -> int | None:
    """A slot's value if no shape of the call decides it."""
    if cls.slots[slot] == IMM:
        return values[slot]
    op = program.dims[values[slot]]
    return op.a if cls.slots[slot] == DIM and op.kind == "const" else None


def _fixed(
    program: Program, cls: ClassDef, columns: Sequence[Sequence[int]]
) -> tuple[dict[int, int], dict[int, int], frozenset[int]]:
    """Slots that are one constant, the largest of all that are constants, and which of those are small."""
    equal: dict[int, int] = {}
    most: dict[int, int] = {}
    small: set[int] = set()
    for slot, kind in enumerate(cls.slots):
        if kind not in (IMM, DIM):
            continue
        values = {_constant(program, cls, c, slot) for c in columns}
        if None in values:
            continue
        most[slot] = max(v or 0 for v in values)
        if len(values) == 1:
            equal[slot] = values.pop() or 0
        elif all(-(2**31) <= (v or 0) < 2**31 for v in values):
            small.add(slot)
    return equal, most, frozenset(small)


def _vector(
    cls: ClassDef, code: Sequence[Instr], slot: int, width: int | None, dtypes: Mapping[int, str]
) -> int:
    """Elements that make 16 bytes of the narrowest rows read, cut to what divides the width."""
    if slot < 0 or width is None:
        return 1
    sizes = [_SIZES[dtypes[i.args[_BUFFER[i.op]]]] for i in walk(code) if i.op in ("TAKE", "POOL")]
    sizes += [_SIZES[dtypes[i.args[1]]] for i in code if i.op == "STORE"]
    # Eight elements a lane are as many registers as pay.
    vec = min(16 // min(sizes), 8)
    while width % vec or width < vec:
        vec //= 2
    return max(vec, 1)


_BUFFER = {"TAKE": 3, "POOL": 5}
