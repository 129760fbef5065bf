"""The intermediate representation, level two: what one fused call runs (docs/program_format.md).

Columns with the same structure share a *class*: one piece of code with slots; a column is a class and its slot
values. So the program's size, and the time to prepare it, grow with classes where code is concerned and with
columns only by a row of numbers each. Nothing in it depends on the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from recom_jax.shape_solver.recover import DimOp

IMM, DIM, OPERAND, RESULT = "IMM", "DIM", "OPERAND", "RESULT"


@dataclasses.dataclass(frozen=True, slots=True)
class Reg:
    """A register: `space` "bag" or "pos", dtype, and the slot of its width (-1: one element per item)."""

    space: str
    dtype: str
    width: int

    def __str__(self) -> str:
        return f"{self.space}:{self.dtype}{'' if self.width < 0 else f'[s{self.width}]'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Instr:
    """One instruction; `args` are register numbers, slot numbers or enum names as the format's table lists."""

    op: str
    args: tuple[Any, ...]
    body: tuple[Instr, ...] = ()

    def lines(self, indent: str = "") -> list[str]:
        text = f"{indent}{self.op.lower()} {' '.join(map(str, self.args))}"
        return [text, *(line for i in self.body for line in i.lines(indent + "  "))]


@dataclasses.dataclass(frozen=True, slots=True)
class ClassDef:
    """Code shared by equal columns."""

    slots: tuple[str, ...]
    regs: tuple[Reg, ...]
    outer: tuple[int, ...]
    code: tuple[Instr, ...]

    def __str__(self) -> str:
        regs = ", ".join(f"r{k} {r}" for k, r in enumerate(self.regs))
        head = f"bags over ({', '.join(f's{s}' for s in self.outer)}); {regs}"
        return "\n".join([head, *(line for i in self.code for line in i.lines("  "))])


@dataclasses.dataclass(frozen=True, slots=True)
class ColumnDef:
    """One column: its class and the values of the class's slots."""

    cls: int
    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Everything a fused call computes, at any batch size.

    Attributes:
      operands, results: (dtype, rank) of each virtual operand and result.
      dims: how sizes come from the shapes of operands and results.
    """

    operands: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]
    dims: tuple[DimOp, ...]
    classes: tuple[ClassDef, ...]
    columns: tuple[ColumnDef, ...]

    def __str__(self) -> str:
        lines = [
            f"program: {len(self.operands)} operands, {len(self.results)} results, "
            f"{len(self.classes)} classes, {len(self.columns)} columns"
        ]
        lines += [f"d{k} = {op.kind} {op.a} {op.b}" for k, op in enumerate(self.dims)]
        for k, c in enumerate(self.classes):
            of = [x for x in self.columns if x.cls == k]
            lines += [
                f"class {k}: {len(of)} columns",
                *("  " + line for line in str(c).splitlines()),
            ]
            lines += [
                f"    values {' '.join(f'{s}={v}' for s, v in zip(c.slots, x.values, strict=True))}"
                for x in of[:3]
            ]
        return "\n".join(lines)
