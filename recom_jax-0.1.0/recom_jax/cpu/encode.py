"""Stage 6 for CPU: a `Program` -> the words the interpreter reads (docs/program_format.md)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from recom_jax import ffi
from recom_jax.program import ClassDef, Instr, Program


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A program's words and their digest, the key of every cache.

    Attributes:
      words: little-endian int64 words.
      digest: hex digest of the words.
    """

    words: bytes
    digest: str

    def __str__(self) -> str:
        return f"{len(self.words) // 8} words, digest {self.digest}"


@functools.lru_cache(maxsize=1)
def constants() -> dict[str, Any]:
    """Every number of the format, from the extension itself."""
    return dict(ffi.extension().constants())


def encode(program: Program) -> Encoded:
    """Writes a program. Does not validate: the interpreter does, at its first use."""
    c = constants()
    words: list[int] = []
    for dtype, rank in (*program.operands, *program.results):
        words += [c["dtype"][dtype], rank]
    for op in program.dims:
        words += [c["dim_kind"][op.kind], op.a, op.b]
    for cls in program.classes:
        words += _class(cls, c)
    for column in program.columns:
        words.append(column.cls)
        words += column.values
    head = [
        c["magic"]["PROGRAM_MAGIC"],
        c["magic"]["VERSION"],
        len(words) + 8,
        len(program.dims),
        len(program.operands),
        len(program.results),
        len(program.classes),
        len(program.columns),
    ]
    data = np.array(head + words, dtype=np.int64).tobytes()
    return Encoded(data, hashlib.blake2b(data, digest_size=16).hexdigest())


def _class(cls: ClassDef, c: dict[str, Any]) -> list[int]:
    words = [len(cls.slots), *(c["slot_kind"][s] for s in cls.slots), len(cls.regs)]
    for r in cls.regs:
        words += [c["space"][r.space], c["dtype"][r.dtype], r.width]
    code = _code(cls.code, c)
    return [*words, len(cls.outer), *cls.outer, len(code), *code]


def _code(code: Sequence[Instr], c: dict[str, Any]) -> list[int]:
    words: list[int] = []
    for i in code:
        enums = _ENUMS.get(i.op, ())
        args = [
            c[enums[k]][a] if k < len(enums) and enums[k] else int(a) for k, a in enumerate(i.args)
        ]
        if i.op in ("REGION", "JREGION"):
            body = _code(i.body, c)
            args += [len(body), *body]
        words += [c["opcode"][i.op], len(args) + 2, *args]
    return words


# Which enum the leading arguments of an instruction come from ("" = a plain number).
_ENUMS: dict[str, tuple[str, ...]] = {
    "UNARY": ("unary",),
    "BINARY": ("binary",),
    "SEARCH": ("search_mode", "side"),
    "SEARCH_UNIFORM": ("side",),
    "INDEX": ("index_mode",),
    "POOL": ("", "kind"),
    "ACC": ("kind",),
}
