"""A plan written down in Python: what csrc/cuda_plan.cc makes, but cut into tiles of any legal shape.

So the kernel's text is tested with tiles that the real plan would not choose, and the real plan against a second
opinion.
"""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from recom_jax.cuda.units import JAGGED, PLAIN, UnitClass, units_of, walk
from recom_jax.program import DIM, IMM, OPERAND, RESULT, Program

THREADS = 256
OFFSET_BITS = 44


@dataclasses.dataclass(frozen=True)
class Launch:
    """Attributes:
    buffers: which of the call's buffers (operands, then results) the launch's pointers are.
    mends: tiles of the kernel that mends, which follows.
    """

    tiles: bytes
    words: bytes
    buffers: tuple[int, ...]
    mends: bytes = b""

    @property
    def grid(self) -> int:
        return len(self.tiles) // 32


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a virtual operand or a result lies: a buffer of the call, and a byte in it."""

    buffer: int
    offset: int
    shape: tuple[int, ...]


def lanes_for(form: int, width: int, vec: int) -> int:
    n = max(-(-width // vec), 1)
    if form == PLAIN:
        return min(n, THREADS)
    return min(1 << (n - 1).bit_length(), 32)


def sizes(program: Program, operands: Sequence[Place], results: Sequence[Place]) -> list[int]:
    """The value of each dim of the program."""
    out: list[int] = []
    for op in program.dims:
        a, b = op.a, op.b
        if op.kind == "const":
            out.append(a)
        elif op.kind == "operand_axis":
            out.append(operands[a].shape[b])
        elif op.kind == "result_axis":
            out.append(results[a].shape[b])
        else:
            x, y = out[a], out[b]
            out.append(
                {"add": x + y, "sub": x - y, "mul": x * y}[op.kind]
                if op.kind != "floordiv"
                else x // y
            )
    return out


def alignable(cls: UnitClass, values: Sequence[int], offsets: Sequence[int]) -> bool:
    """Whether each access of a row may be one of `cls.vec` elements. `offsets`: bytes, of buffer slots."""
    program_class, vec = cls.cls, cls.vec
    for i in walk(cls.code):
        if i.op in ("TAKE", "POOL"):
            slot, *steps = i.args[3:6] if i.op == "TAKE" else i.args[5:8]
            feature = 1
        elif i.op in ("LOAD", "STORE") and program_class.regs[i.args[0]].width >= 0:
            slot, *steps = i.args[1], i.args[2], *i.args[4:-1]
            feature = values[i.args[-1]]
            if i.op == "LOAD" and feature == 0:
                continue
        else:
            continue
        size = {"bool": 1, "bfloat16": 2}.get(cls.dtypes[slot]) or np.dtype(
            cls.dtypes[slot]
        ).itemsize
        bytes_ = min(16, vec * size)
        if feature != 1 or offsets[slot] % bytes_ or any(values[s] * size % bytes_ for s in steps):
            return False
    return True


def plan(
    program: Program,
    operands: Sequence[Place],
    results: Sequence[Place],
    rng: random.Random | None = None,
) -> Launch:
    """Tiles and words of one launch; with `rng`, of arbitrary legal shapes in arbitrary order."""
    dims = sizes(program, operands, results)
    units = units_of(program)
    words: list[int] = []
    tiles: list[bytes] = []
    runs: list[list[Any]] = []  # first word, class, columns, bags, values, may be aligned
    for n, number in units.units:
        column, cls = program.columns[n], units.classes[number]
        values, offsets = [], []
        for kind, v in zip(cls.cls.slots, column.values, strict=True):
            place = {OPERAND: operands, RESULT: results}.get(kind)
            offsets.append(place[v].offset if place else 0)
            if place:
                values.append(place[v].buffer << OFFSET_BITS | place[v].offset)
            else:
                values.append({IMM: v, DIM: dims[v] if kind == DIM else 0}[kind])
        bags = math.prod(values[s] for s in cls.cls.outer)
        aligned = cls.vec > 1 and alignable(cls, values, offsets)
        width = 1 if cls.width_slot < 0 else values[cls.width_slot]
        shared = cls.form != JAGGED and not any(
            i.op in ("TAKE", "POOL") and i.args[0] for i in walk(cls.code)
        )
        like = (number, bags, aligned, width, shared)
        if rng and shared and runs and runs[-1][1] == like and rng.random() < 0.7:
            runs[-1][2] += 1
        else:
            runs.append([len(words), like, 1])
        words += [bags, *values]
    for first, (number, bags, aligned, width, _), columns in runs:
        cls = units.classes[number]
        stride = 1 + len(cls.cls.slots)
        if bags == 0 or width == 0:
            continue
        for c0 in range(0, columns, 8):
            some = min(columns - c0, 8)
            bag0 = 0
            while bag0 < bags:
                use = aligned and (rng is None or rng.random() < 0.7)
                lanes = lanes_for(cls.form, width, cls.vec if use else 1)
                take, slices = bags, 1
                if rng:
                    take = rng.choice((1, 3, rng.randint(1, bags), bags))
                    if cls.form != PLAIN:
                        slices = rng.choice([s for s in (1, 2, 4, 8, 16, 32) if s * lanes <= 32])
                take = min(take, bags - bag0)
                for c in range(0, some, fits := max(THREADS // (lanes * slices), 1)):
                    group = min(some - c, fits)
                    at = first + (c0 + c) * stride
                    tiles.append(
                        struct.pack("<qqiihhhh", at, bag0, take, number, group, lanes, slices, use)
                    )
                bag0 += take
    if rng:
        rng.shuffle(tiles)
    raw = np.array([w & (2**64 - 1) for w in words], np.uint64).tobytes()
    n = 1 + max((p.buffer for p in (*operands, *results)), default=-1)
    return Launch(b"".join(tiles), raw, tuple(range(n)))
