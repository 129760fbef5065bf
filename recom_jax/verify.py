"""The rules of the program IR, short enough to be read as its specification. Always on in the test-suite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recom_jax.emit_code import BINARY, UNARY
from recom_jax.errors import VerifyError
from recom_jax.ir import is_16bit
from recom_jax.program import DIM, IMM, OPERAND, RESULT, ClassDef, Instr, Program

COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
BAG_SEARCHES = frozenset(["SPLITS", "LENGTHS"])
INTEGERS = frozenset(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])


def program(p: Program) -> None:
    """Raises `VerifyError`, naming class and instruction, if a rule is broken."""
    for k, op in enumerate(p.dims):
        if op.kind in ("add", "sub", "mul", "floordiv"):
            _need(op.a < k and op.b < k, f"dim {k} refers to a later one")
        elif op.kind != "const":
            arrays = p.operands if op.kind == "operand_axis" else p.results
            _need(
                op.a < len(arrays) and op.b < arrays[op.a][1],
                f"dim {k} reads an axis that does not exist",
            )
    checked = [_Checker(cls, f"class {k}") for k, cls in enumerate(p.classes)]
    for checker in checked:
        checker.code(checker.cls.code, "bag", len(checker.cls.outer))
    for k, c in enumerate(p.columns):
        _need(c.cls < len(p.classes), f"column {k} has no class")
        slots = p.classes[c.cls].slots
        _need(
            len(slots) == len(c.values),
            f"column {k} has {len(c.values)} values for {len(slots)} slots",
        )
        limit = {DIM: len(p.dims), OPERAND: len(p.operands), RESULT: len(p.results)}
        for kind, v in zip(slots, c.values, strict=True):
            _need(kind == IMM or 0 <= v < limit[kind], f"column {k}: {kind} {v} does not exist")
        for slot, held, narrower, where in checked[c.cls].arrays:
            array = (p.operands if slots[slot] == OPERAND else p.results)[c.values[slot]][0]
            fits = array == held or (narrower and held == "float32" and is_16bit(array))
            _need(fits, f"column {k}, {where}: {held} for an array of {array}")


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise VerifyError(
            f"{what}. This is a defect of recom_jax; please report it with a dump (RECOM_DUMP_DIR)"
        )


class _Checker:
    def __init__(self, cls: ClassDef, name: str) -> None:
        self.cls, self.name = cls, name
        self.defined: set[int] = set()
        # (slot, dtype of the register, whether the array may be of 16-bit floats instead, instruction)
        self.arrays: list[tuple[int, str, bool, str]] = []

    def code(self, code: Sequence[Instr], space: str, axes: int) -> None:
        """Checks code of a space; `axes`: how many strides a view has there, without the embedding's."""
        for i in code:
            where = f"{self.name}, {i.lines()[0]}"
            if i.op in ("REGION", "JREGION"):
                _need(space == "bag", f"{where}: a region in a region")
                if i.op == "JREGION":
                    _need(len(self.cls.outer) == 1, f"{where}: jagged bags have one axis")
                jagged = i.op == "JREGION"
                inner = len(self.cls.outer) + len(i.args) - 1
                self.code(i.body, "pos", 1 if jagged else inner)
                if jagged:
                    seg = i.args[1]
                    _need(seg in self.defined, f"{where}: r{seg} is read before it is written")
                    held = self.cls.regs[seg]
                    _need(held.dtype in INTEGERS, f"{where}: a bag's number of type {held.dtype}")
                continue
            reads, writes = self.operands(i)
            for r in reads:
                _need(r in self.defined, f"{where}: r{r} is read before it is written")
            for r in writes:
                self.defined.add(r)
            self.slots(i, where)
            self.types(i, where, space)
            self.views(i, where, axes)

    def operands(self, i: Instr) -> tuple[list[int], list[int]]:
        """(registers read, registers written) of an instruction, by position of its arguments."""
        a = i.args
        if i.op in ("LOAD", "AFFINE", "CONST"):
            return [], [a[0]]
        if i.op in ("EXPAND", "CONVERT", "BITCAST"):
            return [a[1]], [a[0]]
        if i.op == "UNARY":
            return [a[2]], [a[1]]
        if i.op == "BINARY":
            return [a[2], a[3]], [a[1]]
        if i.op == "SELECT":
            return [a[1], a[2], a[3]], [a[0]]
        if i.op == "SEARCH":
            return [a[3]], [a[2]]
        if i.op == "SEARCH_UNIFORM":
            return [a[2]], [a[1]]
        if i.op == "INDEX":
            return [a[2]], [a[1]]
        if i.op == "PREDICATE":
            return [a[1], a[2]], [a[0]]
        if i.op == "TAKE":
            return [a[2]], [a[1]]
        if i.op == "POOL":
            return [a[3], *([a[4]] if a[4] >= 0 else [])], [a[2]]
        if i.op == "ACC":
            return [a[2]], [a[1]]
        _need(i.op == "STORE", f"{self.name}: unknown instruction {i.op}")
        return [a[0]], []

    def slots(self, i: Instr, where: str) -> None:
        """What kinds of slots an instruction names."""
        a = i.args
        numbers: list[int] = []
        sizes: list[int] = []
        if i.op == "LOAD":
            sizes = [a[2], *a[4:]]
        elif i.op == "AFFINE":
            sizes = [a[1], *a[3:]]
        elif i.op == "CONST":
            numbers = [a[1]]
        elif i.op == "SEARCH":
            sizes = list(a[5:])
        elif i.op == "SEARCH_UNIFORM":
            numbers, sizes = list(a[3:5]), [a[5]]
        elif i.op == "INDEX":
            sizes = [a[3]]
        elif i.op == "TAKE":
            sizes, numbers = list(a[4:6]), [a[6]]
        elif i.op == "POOL":
            sizes, numbers = list(a[6:8]), list(a[8:])
        elif i.op == "ACC":
            numbers = [a[3]]
        elif i.op == "STORE":
            sizes = [a[2], *a[4:]]
        kinds = self.cls.slots
        for s in numbers:
            _need(kinds[s] == IMM, f"{where}: s{s} is a {kinds[s]} slot, not a number's")
        for s in sizes:
            _need(kinds[s] in (IMM, DIM), f"{where}: s{s} is a {kinds[s]} slot, not a size's")

    def views(self, i: Instr, where: str, axes: int) -> None:
        """As many strides as axes; and what the arrays of columns must be, for `program` to check."""
        regs, a = self.cls.regs, i.args
        if i.op == "LOAD":
            axes += regs[a[0]].width >= 0
            _need(a[3] == axes == len(a) - 4, f"{where}: {len(a) - 4} strides for {axes} axes")
        elif i.op == "AFFINE":
            _need(a[2] == axes == len(a) - 3, f"{where}: {len(a) - 3} strides for {axes} axes")
        elif i.op == "STORE":
            _need(a[3] == axes == len(a) - 5, f"{where}: {len(a) - 5} strides for {axes} axes")
        uses = {
            "LOAD": (1, 0, OPERAND),
            "SEARCH": (4, 3, OPERAND),
            "TAKE": (3, 1, OPERAND),
            "POOL": (5, 2, OPERAND),
            "STORE": (1, 0, RESULT),
        }
        if i.op in uses:
            slot, reg, kind = uses[i.op]
            _need(self.cls.slots[a[slot]] == kind, f"{where}: s{a[slot]} is no {kind} slot")
            narrower = i.op in ("TAKE", "POOL", "STORE")
            self.arrays.append((a[slot], regs[a[reg]].dtype, narrower, where))

    def types(self, i: Instr, where: str, space: str) -> None:
        regs, a = self.cls.regs, i.args
        reads, writes = self.operands(i)
        for r in writes:
            want = "bag" if i.op in ("POOL", "ACC") else space
            _need(regs[r].space == want, f"{where}: r{r} is in {regs[r].space} space, not {want}")
        for r in reads:
            want = "bag" if i.op == "EXPAND" else space
            _need(regs[r].space == want, f"{where}: r{r} is in {regs[r].space} space, not {want}")
        if i.op == "BINARY":
            _need(a[0] in BINARY, f"{where}: no such operation")
            _need(regs[a[2]].dtype == regs[a[3]].dtype, f"{where}: operands of two dtypes")
            want = "bool" if a[0] in COMPARISONS else regs[a[2]].dtype
            _need(regs[a[1]].dtype == want, f"{where}: result is {regs[a[1]].dtype}, not {want}")
        elif i.op == "UNARY":
            _need(a[0] in UNARY, f"{where}: no such operation")
            want = "bool" if a[0] == "is_finite" else regs[a[2]].dtype
            _need(regs[a[1]].dtype == want, f"{where}: result is {regs[a[1]].dtype}, not {want}")
        elif i.op in ("SEARCH", "SEARCH_UNIFORM"):
            dst = regs[writes[0]].dtype
            _need(dst == "int32", f"{where}: a bucket's number of type {dst}")
            if i.op == "SEARCH":
                by_bags = a[0] in BAG_SEARCHES
                _need(len(a) == 7 + by_bags, f"{where}: {len(a)} fields")
                x = regs[a[3]].dtype
                wide = x in INTEGERS and np.dtype(x).itemsize >= 4
                _need(wide or not by_bags, f"{where}: splits or lengths of type {x}")
        elif i.op == "SELECT":
            _need(regs[a[1]].dtype == "bool", f"{where}: the predicate is {regs[a[1]].dtype}")
            _need(
                regs[a[2]].dtype == regs[a[3]].dtype == regs[a[0]].dtype,
                f"{where}: cases of two dtypes",
            )
        elif i.op == "INDEX":
            _need(regs[a[2]].dtype in INTEGERS, f"{where}: a row number of type {regs[a[2]].dtype}")
            _need(regs[a[1]].dtype == "int64", f"{where}: row numbers are int64")
        elif i.op == "PREDICATE":
            _need(regs[a[2]].dtype == "bool", f"{where}: the mask is {regs[a[2]].dtype}")
        elif i.op in ("TAKE", "POOL"):
            dst, idx = (a[1], a[2]) if i.op == "TAKE" else (a[2], a[3])
            _need(regs[dst].width >= 0, f"{where}: a lookup gives rows")
            _need(
                regs[idx].dtype == "int64" and regs[idx].width < 0,
                f"{where}: row numbers are int64, one a bag",
            )
            _need(i.op == "TAKE" or space == "pos", f"{where}: pooling happens in a region")
        elif i.op == "ACC":
            _need(space == "pos", f"{where}: accumulation happens in a region")
            _need(regs[a[1]].dtype == regs[a[2]].dtype, f"{where}: accumulates another dtype")
        elif i.op == "EXPAND":
            _need(regs[a[0]].dtype == regs[a[1]].dtype, f"{where}: another dtype")
