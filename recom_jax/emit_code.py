"""Part of stage 5: a class of code under construction, its slots and registers."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recom_jax import ir
from recom_jax.program import DIM, IMM, Instr, Reg
from recom_jax.shape_solver.dims import DimLike
from recom_jax.simplify.facts import LARGEST_CONSTANT

# The format's operations under the names of `ir.Op`.
# fmt: off
UNARY = frozenset((
    "neg", "abs", "sign", "not", "floor", "ceil", "round_even", "round_away", "sqrt", "is_finite", "popcnt", "clz",
))
BINARY = frozenset((
    "add", "sub", "mul", "div", "rem", "max", "min", "and", "or", "xor", "shl", "shr_l", "shr_a",
    "eq", "ne", "lt", "le", "gt", "ge",
))
# fmt: on

_WIDE = 2**62  # differences of smaller numbers fit 64 bits


@dataclasses.dataclass(frozen=True)
class Space:
    """An index space code runs in: which axes LOAD strides follow, which axis is the embedding, inner axes."""

    name: str
    rank: int
    axes: tuple[int, ...]
    feature: int | None
    inner: frozenset[int]
    body: list[Instr]


def equal_steps(array: Any) -> tuple[int, int] | None:
    """(first, step) of a vector of integers in equal steps, else None."""
    if np.ndim(array) != 1 or not 2 <= np.size(array) <= LARGEST_CONSTANT:
        return None
    a = np.asarray(array)
    if a.dtype.kind not in "iu" or int(a.min()) < -_WIDE or int(a.max()) > _WIDE:
        return None
    a = a.astype(np.int64)
    first, step = int(a[0]), int(a[1] - a[0])
    return (first, step) if (np.diff(a) == step).all() else None


class Code:
    """Slots, registers and instructions. `memo` says which register holds an expression in which space."""

    def __init__(
        self,
        pool: ir.Pool,
        resolve: Callable[[DimLike], DimLike],
        operand: Callable[[Any], int],
        outputs: Sequence[Any],
        steps_of: Callable[[Any], tuple[int, int] | None],
    ) -> None:
        self.pool, self.resolve, self.operand, self.outputs = pool, resolve, operand, outputs
        self.steps_of = steps_of
        self.slots: list[tuple[str, Any]] = []
        self.regs: list[Reg] = []
        self.memo: dict[Any, int] = {}
        self.deps: dict[int, frozenset[int]] = {}
        self.code: list[Instr] = []
        self.bodies: list[list[Instr]] = []  # kept: `memo` names them by id
        self.width = -1
        self.offset = -1  # the slot of the last stored piece's place in the result

    def slot(self, kind: str, value: Any) -> int:
        """A new slot: its number."""
        self.slots.append((kind, value))
        return len(self.slots) - 1

    def size(self, d: DimLike) -> int:
        """A slot that holds a size, stride or offset."""
        d = self.resolve(d)
        return self.slot(IMM, d) if isinstance(d, int) else self.slot(DIM, d)

    def imm(self, dtype: str, value: Any) -> int:
        """A slot that holds a number's bits."""
        return self.slot(IMM, bits_of(dtype, value))

    def reg(self, space: Space, dtype: str, row: bool) -> int:
        """A new register; `row`: of as many elements as the piece at work is wide."""
        self.regs.append(Reg(space.name, dtype, self.width if row else -1))
        return len(self.regs) - 1

    def put(self, space: Space, op: str, *args: Any, body: Sequence[Instr] = ()) -> None:
        """Appends an instruction to the space's code."""
        space.body.append(Instr(op, args, tuple(body)))

    def constant(self, s: Space, dtype: str, value: Any) -> int:
        """A register that holds a number."""
        dst = self.reg(s, dtype, False)
        self.put(s, "CONST", dst, self.imm(dtype, value))
        return dst


def held(dtype: str) -> str:
    """The dtype a register holds values of `dtype` in."""
    return "float32" if ir.is_16bit(dtype) else dtype


def bits_of(dtype: str, value: Any) -> int:
    """The value's bits in the low bytes of a signed 64-bit word."""
    if dtype == "bfloat16":
        return int.from_bytes(struct.pack("<f", float(value)), "little") >> 16
    with np.errstate(all="ignore"):
        raw = np.asarray(value).astype(dtype).tobytes()
    return int.from_bytes(raw.ljust(8, b"\0"), "little", signed=True)
