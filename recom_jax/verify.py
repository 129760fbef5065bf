"""The rules of the program IR, short enough to be read as its specification. Always on in the test-suite."""

from __future__ import annotations

from collections.abc import Sequence

from recom_jax.emit import BINARY, UNARY
from recom_jax.errors import VerifyError
from recom_jax.program import DIM, IMM, OPERAND, RESULT, ClassDef, Instr, Program

COMPARISONS = frozenset("eq ne lt le gt ge".split())
INTEGERS = frozenset("int8 int16 int32 int64 uint8 uint16 uint32 uint64".split())


def program(p: Program) -> None:
    """Raises `VerifyError`, naming class and instruction, if a rule is broken."""
    for k, op in enumerate(p.dims):
        if op.kind in ("add", "sub", "mul", "floordiv"):
            _need(op.a < k and op.b < k, f"dim {k} refers to a later one")
        elif op.kind != "const":
            arrays = p.operands if op.kind == "operand_axis" else p.results
            _need(op.a < len(arrays) and op.b < arrays[op.a][1], f"dim {k} reads an axis that does not exist")
    for k, cls in enumerate(p.classes):
        _Checker(cls, f"class {k}").code(cls.code, "bag")
    for k, c in enumerate(p.columns):
        _need(c.cls < len(p.classes), f"column {k} has no class")
        slots = p.classes[c.cls].slots
        _need(len(slots) == len(c.values), f"column {k} has {len(c.values)} values for {len(slots)} slots")
        limit = {DIM: len(p.dims), OPERAND: len(p.operands), RESULT: len(p.results)}
        for kind, v in zip(slots, c.values, strict=True):
            _need(kind == IMM or 0 <= v < limit[kind], f"column {k}: {kind} {v} does not exist")


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise VerifyError(f"{what}. This is a defect of recom_jax; please report it with a dump (RECOM_DUMP_DIR)")


class _Checker:
    def __init__(self, cls: ClassDef, name: str) -> None:
        self.cls, self.name = cls, name
        self.defined: set[int] = set()

    def code(self, code: Sequence[Instr], space: str) -> None:
        for i in code:
            where = f"{self.name}, {i.lines()[0]}"
            if i.op in ("REGION", "JREGION"):
                _need(space == "bag", f"{where}: a region in a region")
                if i.op == "JREGION":
                    _need(len(self.cls.outer) == 1, f"{where}: jagged bags have one axis")
                self.code(i.body, "pos")
                continue
            reads, writes = self.operands(i)
            for r in reads:
                _need(r in self.defined, f"{where}: r{r} is read before it is written")
            for r in writes:
                self.defined.add(r)
            self.types(i, where, space)

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
        elif i.op == "SELECT":
            _need(regs[a[1]].dtype == "bool", f"{where}: the predicate is {regs[a[1]].dtype}")
            _need(regs[a[2]].dtype == regs[a[3]].dtype == regs[a[0]].dtype, f"{where}: cases of two dtypes")
        elif i.op == "INDEX":
            _need(regs[a[2]].dtype in INTEGERS, f"{where}: a row number of type {regs[a[2]].dtype}")
            _need(regs[a[1]].dtype == "int64", f"{where}: row numbers are int64")
        elif i.op == "PREDICATE":
            _need(regs[a[2]].dtype == "bool", f"{where}: the mask is {regs[a[2]].dtype}")
        elif i.op in ("TAKE", "POOL"):
            dst, idx = (a[1], a[2]) if i.op == "TAKE" else (a[2], a[3])
            _need(regs[dst].width >= 0, f"{where}: a lookup gives rows")
            _need(regs[idx].dtype == "int64" and regs[idx].width < 0, f"{where}: row numbers are int64, one a bag")
            _need(i.op == "TAKE" or space == "pos", f"{where}: pooling happens in a region")
        elif i.op == "ACC":
            _need(space == "pos", f"{where}: accumulation happens in a region")
            _need(regs[a[1]].dtype == regs[a[2]].dtype, f"{where}: accumulates another dtype")
        elif i.op == "EXPAND":
            _need(regs[a[0]].dtype == regs[a[1]].dtype, f"{where}: another dtype")
