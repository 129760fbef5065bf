"""The text of one unit of preprocessing code, as it is written: typed variables, and numbers kept apart from the
text, so that units that differ in numbers alone share their code."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

C_TYPES = {
    np.dtype(k): v
    for k, v in {
        "bool": "pred", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16",
        "uint32": "u32", "uint64": "u64", "float32": "f32", "float64": "f64",
    }.items()
}  # fmt: skip
_MARK = re.compile("\x01(\\d+)\x01")


class Unsupported(Exception):
    """What preprocessing kernels cannot express; the program runs by XLA instead."""


def type_of(dtype: Any) -> str:
    """The C name of a dtype. Raises Unsupported for others than numbers of 8 to 64 bits."""
    found = C_TYPES.get(np.dtype(dtype))
    if found is None:
        raise Unsupported(f"values of {dtype}")
    return found


@dataclasses.dataclass(frozen=True)
class Number:
    """A number in the text: `dtype` "int" for sizes and places, else an element's."""

    dtype: str
    word: int  # its bits

    def text(self) -> str:
        if self.dtype == "int":
            return str(self.word)
        bits = self.word & ((1 << 8 * np.dtype(self.dtype).itemsize) - 1)
        if self.dtype == "float32":
            return f"from_bits({bits:#x}u)"
        if self.dtype == "float64":
            return f"from_bits(u64{{{bits:#x}ull}})"
        if self.dtype == "bool":
            return "true" if bits else "false"
        return (
            f"static_cast<{C_TYPES[np.dtype(self.dtype)]}>({bits:#x}{'ull' if bits >> 32 else 'u'})"
        )

    def parameter(self, k: int) -> str:
        if self.dtype == "int":
            return f"static_cast<int>(w[{k}])"
        if self.dtype == "bool":
            return f"(w[{k}] != 0)"
        return f"immediate<{C_TYPES[np.dtype(self.dtype)]}>(w[{k}])"


class Writer:
    """Lines of C++, variables, and numbers.

    Attributes:
      memo: (array, index) -> variable, of what is in scope.
      operations: how many values are computed; bytes_read: from the raw batch, as often as they are read.
    """

    def __init__(self, constants: dict[bytes, int]) -> None:
        self.memo: dict[Any, str] = {}
        self.numbers: list[Number] = []
        self.bytes_read = 0
        self._number_of: dict[Number, int] = {}
        self._lines: list[str] = []
        self._costs: list[float] = []  # operations of each line
        self._names = itertools.count()
        self._exprs: dict[tuple[str, str], str] = {}
        self._constants = constants
        self._weight = 1.0

    def fresh(self, prefix: str) -> str:
        return f"{prefix}{next(self._names)}"

    @property
    def operations(self) -> float:
        return sum(self._costs)

    def line(self, text: str, cost: float = 0.0) -> None:
        self._lines.append(text)
        self._costs.append(cost)

    def _named(self, kind: str, text: str, prefix: str) -> str:
        found = self._exprs.get((kind, text))
        if found is None:
            found = self._exprs[kind, text] = self.fresh(prefix)
            self.line(f"const {kind} {found} = {text};", self._weight)
        return found

    def value(self, dtype: Any, text: str) -> str:
        """A variable of an element's type."""
        return self._named(type_of(dtype), text, "v")

    def integer(self, text: str) -> str:
        """A variable of type int: a place or a length."""
        return self._named("int", text, "j")  # not "i": i32 is a type

    def wide(self, text: str) -> str:
        return self._named("long long", text, "n")

    def declare(self, dtype: Any, text: str = "") -> str:
        """A variable that is assigned later."""
        name = self.fresh("r")
        kind = type_of(dtype)
        self.line(f"{kind} {name} = {text or f'{kind}(0)'};")
        return name

    def number(self, value: int) -> str:
        """A size or a place."""
        return self._number(Number("int", int(value)))

    def literal(self, dtype: Any, value: Any) -> str:
        """A number of an element's type."""
        type_of(dtype)
        raw = np.asarray(value).astype(dtype, casting="unsafe").tobytes()
        return self._number(Number(str(np.dtype(dtype)), int.from_bytes(raw, "little")))

    def _number(self, number: Number) -> str:
        k = self._number_of.setdefault(number, len(self.numbers))
        if k == len(self.numbers):
            self.numbers.append(number)
        return f"\x01{k}\x01"

    def constant(self, array: Any) -> int:
        """The place of an array among the program's constants."""
        raw = np.ascontiguousarray(array).tobytes()
        if raw not in self._constants:
            size = sum(-(-len(k) // 16) * 16 for k in self._constants)
            self._constants[raw] = size
        return self._constants[raw]

    @contextlib.contextmanager
    def block(self, head: str, weight: float = 1.0) -> Iterator[None]:
        """Lines in braces; `head` ends with the opening one. What they name is out of scope behind them."""
        memo, exprs, before = dict(self.memo), dict(self._exprs), self._weight
        self.line(head)
        self._weight *= weight
        try:
            yield
        finally:
            self.line("}")
            self.memo, self._exprs, self._weight = memo, exprs, before

    @contextlib.contextmanager
    def loop(self, count: int) -> Iterator[str]:
        """Lines that run `count` times, in a scope of their own; the variable that counts.

        What is the same each time is computed once, in front: a compiler leaves searches and loads where they are.
        """
        k, begun = self.fresh("k"), len(self._lines)
        with self.block(f"for (int {k} = 0; {k} < {self.number(count)}; ++{k}) {{", weight=count):
            yield k
        if count < 1:  # nothing is read if nothing runs
            return
        body = self._lines[begun + 1 : -1]
        moved, kept = hoisted(body, k)
        costs = self._costs[begun + 1 : -1]
        self._lines[begun:] = [
            *(body[i] for i in moved),
            self._lines[begun],
            *(body[i] for i in kept),
            self._lines[-1],
        ]
        self._costs[begun:] = [
            *(costs[i] / count for i in moved),
            self._costs[begun],
            *(costs[i] for i in kept),
            self._costs[-1],
        ]

    def text(self) -> str:
        return "\n".join(self._lines)


_NAME = re.compile(r"\b[a-z]+\d+\b")
_ASSIGNED = re.compile(r"\b([a-z]+\d+) = ")


def hoisted(body: list[str], counter: str) -> tuple[list[int], list[int]]:
    """Lines of a loop's body that may run once in front of it, and those that stay.

    A statement (a line, or a block with all in it) stays if it mentions a name that changes in the loop: its counter,
    what is assigned to and declared outside, and whatever a statement that stays assigns to.
    """
    statements: list[list[int]] = []
    depth = 0
    for i, text in enumerate(body):
        if depth == 0:
            statements.append([])
        statements[-1].append(i)
        depth += text.count("{") - text.count("}")
    texts = ["\n".join(body[i] for i in s) for s in statements]
    names = [set(_NAME.findall(t)) for t in texts]
    assigned = [set(_ASSIGNED.findall(t)) for t in texts]
    declared = {
        name
        for line in body
        if not line.startswith(("if ", "for ", "while ")) and len(line.split(" = ")[0].split()) > 1
        for name in _ASSIGNED.findall(line)
    }
    changing = {counter} | (set().union(*assigned) - declared if assigned else set())
    staying: set[int] = set()
    while True:
        more = {k for k, n in enumerate(names) if k not in staying and n & changing}
        if not more:
            break
        staying |= more
        for k in more:
            changing |= assigned[k]
    moved = [i for k, s in enumerate(statements) if k not in staying for i in s]
    return moved, [i for k, s in enumerate(statements) if k in staying for i in s]


def canonical(text: str, numbers: list[Number]) -> tuple[str, list[Number]]:
    """The text with its numbers counted from 0 in its order, and they in that order: equal for equal code."""
    order: list[Number] = []

    def replace(found: re.Match[str]) -> str:
        number = numbers[int(found[1])]
        order.append(number)
        return f"\x01{len(order) - 1}:{number.dtype}\x02"

    return _MARK.sub(replace, text), order


_CANONICAL = re.compile("\x01(\\d+):(\\w+)\x02")


def filled(text: str, texts: list[str]) -> str:
    """A canonical text with its numbers' texts in their places."""
    return _CANONICAL.sub(lambda found: texts[int(found[1])], text)
