"""Notes for who reads a kernel's text: which arguments a class's code reads, and what floating-point constants are.

The compiled text has none of them: it is the same for all programs of equal code, which share what is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from recom_jax.cuda.units import units_of
from recom_jax.program import OPERAND, Program

SHOWN, OPERANDS = 3, 8
_CLASS = re.compile(r"^// Class (\d+): .*$", re.MULTILINE)
_FLOAT = re.compile(r"(immediate<(f64|f32|f16|bf16)>\((?:static_cast<i64>\()?(-?\d+)(?:ull\))?)\)")
_BITS: dict[str, tuple[Any, Any]] = {
    "f64": (np.uint64, np.float64),
    "f32": (np.uint32, np.float32),
    "f16": (np.uint16, np.float16),
    "bf16": (np.uint16, jnp.bfloat16),
}


def annotated(text: str, program: Program, names: Sequence[str]) -> str:
    """The text of `codegen.generate` with notes.

    Args:
      names: of the call's operands, as far as they are known.
    """
    units = units_of(program)
    columns: dict[int, list[int]] = {}
    for column, number in units.units:
        columns.setdefault(number, []).append(column)

    def of(match: re.Match[str]) -> str:
        mine = columns.get(int(match[1]), [])
        shown = ", ".join(_reads(program, k, names) for k in mine[:SHOWN])
        many = f"{len(mine):,} sets of arguments: " if len(mine) > 1 else ""
        return f"{match[0]}\n// On {many}{shown}{', ...' if len(mine) > SHOWN else ''}"

    return _FLOAT.sub(_number, _CLASS.sub(of, text))


def _reads(program: Program, column: int, names: Sequence[str]) -> str:
    """The operands of a program column, each once: one input may serve several tables."""
    made = program.columns[column]
    kinds = program.classes[made.cls].slots
    read = dict.fromkeys(v for kind, v in zip(kinds, made.values, strict=True) if kind == OPERAND)
    shown = [names[v] if v < len(names) else f"operand {v}" for v in list(read)[:OPERANDS]]
    return f"({', '.join(shown)}{', ...' if len(read) > OPERANDS else ''})"


def _number(match: re.Match[str]) -> str:
    bits, kind = _BITS[match[2]]
    value = int(match[3]) & np.iinfo(bits).max
    return f"{match[1]} /* {float(np.array(value, bits).view(kind)):g} */)" if value else match[0]
