"""A preprocessing program as one CUDA kernel that runs any part of it: units, their shared code, and tiles of them.

A *unit* is a part of a result that has code of its own: a column of a stack, say. Units with the same text but for
numbers share a *class*, and numbers that differ are words. A launch runs a list of tiles, each some elements of one
unit; how many blocks it has is the share of the device that it takes, as blocks take tiles in turns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recom_jax.corun import pull
from recom_jax.corun.cost import BLOCKS
from recom_jax.corun.rules import Leaf, pulled
from recom_jax.corun.symbols import Number, Unsupported, Writer, canonical, filled, type_of

TILE = 1024  # elements: four for each thread of a block
SECTOR = 32  # bytes: what a device's cache and memory exchange at least
_GOLDEN = 0.6180339887498949  # multiples of it, without their whole parts, lie far apart

TILE_TYPE = np.dtype(
    [("first", "<i8"), ("count", "<i4"), ("cls", "<i4"), ("words", "<i4"), ("unused", "<i4")]
)


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of a result.

    Attributes:
      features: raw columns that it is made of.
      rows: its first axis; inner: elements in a row of it.
      cls: number of its code; words: where its numbers begin.
      operations: of an element, counted in the text; nbytes: read and written for an element.
      cells: where a row's elements go in the results, in bytes; itemsize: of each; pitch: bytes from row to row.
    """

    name: str
    features: tuple[str, ...]
    rows: int
    inner: int
    cls: int
    words: int
    operations: float
    nbytes: float
    cells: tuple[int, ...] = ()
    itemsize: int = 1
    pitch: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """A leaf of the prepared batch: where it is in a slot's results."""

    shape: tuple[int, ...]
    dtype: Any
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class PrepKernels:
    """A program compiled to kernels, for one set of shapes.

    Attributes:
      source: CUDA text; words: numbers of units; consts: arrays of the program.
      leaves, in_bytes: the raw batch in a slot; results, out_bytes: the prepared batch; out_tree: its structure.
    """

    source: str
    units: tuple[Unit, ...]
    words: bytes
    consts: bytes
    leaves: tuple[Leaf, ...]
    in_bytes: int
    results: tuple[Result, ...]
    out_bytes: int
    out_tree: Any

    def tiles(self, pieces: Sequence[tuple[int, float, float]]) -> np.ndarray[Any, Any]:
        """Tiles of (unit, first row, last row) pieces; rows in parts of the unit's: 0 to 1 is all of it.

        In the order of their first rows: units lie side by side in a row of the result, often a few bytes each, and
        what is written at about the same time goes to memory as a whole. Units of the same rows begin with another one
        each time: a block takes tiles at equal distances, and none shall get those of one unit alone.
        """
        made: list[np.ndarray[Any, Any]] = []
        rows: list[np.ndarray[Any, Any]] = []
        for k, low, high in pieces:
            u = self.units[k]
            a, b = (min(u.rows, max(0, round(u.rows * x))) * u.inner for x in (low, high))
            first = np.arange(a, b, TILE, dtype=np.int64)
            tiles = np.zeros(len(first), TILE_TYPE)
            tiles["first"], tiles["count"] = first, np.minimum(b - first, TILE)
            tiles["cls"], tiles["words"] = u.cls, u.words
            made.append(tiles)
            rows.append(first // max(1, u.inner))
        if not made:
            return np.zeros(0, TILE_TYPE)
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        layers = np.split(order, np.flatnonzero(np.diff(row[order])) + 1)
        turned = [np.roll(x, int(len(x) * (n * _GOLDEN % 1))) for n, x in enumerate(layers)]
        return np.concatenate(made)[np.concatenate(turned)]


def compile_prep(prep: Callable[[Any], Any], raw_like: Any) -> PrepKernels:
    """Writes the kernels of a preprocessing function, for columns of these shapes.

    Raises:
      Unsupported: it does what kernels cannot express.
    """
    program = pulled(prep, raw_like)
    results, placing = [], pull.Placing()
    for x in program.outputs:
        nbytes = math.prod(x.shape) * x.dtype.itemsize
        results.append(Result(x.shape, x.dtype, placing(nbytes), nbytes))
    constants: dict[bytes, int] = {}
    drafts = [
        _draft(part, f"{k}.{n}", results[k], constants)
        for k, x in enumerate(program.outputs)
        for n, part in enumerate(parts(x))
        if math.prod(part.array.shape)
    ]
    if max(placing.end, program.placing.end) >= 1 << 31:
        raise Unsupported("a batch of 2**31 bytes or more")
    classes: dict[str, list[int]] = {}
    for k, d in enumerate(drafts):
        classes.setdefault(d.text, []).append(k)
    texts: list[str] = []
    units: dict[int, Unit] = {}
    words: list[int] = []
    for c, (text, members) in enumerate(classes.items()):
        columns = list(zip(*(drafts[k].numbers for k in members), strict=True))
        varying = [k for k, column in enumerate(columns) if len(set(column)) > 1]
        slot = {k: n for n, k in enumerate(varying)}
        names = [
            column[0].parameter(slot[k]) if k in slot else column[0].text()
            for k, column in enumerate(columns)
        ]
        texts.append(_CLASS.format(c=c, body=filled(text, names)))
        for k in members:
            d = drafts[k]
            units[k] = dataclasses.replace(d.unit, cls=c, words=len(words))
            words += [_signed(d.numbers[i].word) for i in varying]
    source = _SOURCE.format(
        blocks=BLOCKS,
        classes="\n".join(texts),
        cases="\n".join(
            f"      case {c}: for (int i = threadIdx.x; i < t.count; i += blockDim.x) "
            f"class_{c}(p, w, static_cast<int>(t.first) + i); break;"
            for c in range(len(classes))
        ),
    )
    consts = bytearray(sum(-(-len(k) // 16) * 16 for k in constants))
    for raw, place in constants.items():
        consts[place : place + len(raw)] = raw
    return PrepKernels(
        source,
        tuple(units[k] for k in range(len(drafts))),
        np.array(words, np.int64).tobytes(),
        bytes(consts),
        program.leaves(),
        program.placing.end,
        tuple(results),
        placing.end,
        program.out_tree,
    )


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


# ---- units -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """An array and where its elements go: `offset + sum(index * strides)`, in elements of the result."""

    array: pull.SymArray
    strides: tuple[int, ...]
    offset: int


def parts(result: pull.SymArray) -> list[Part]:
    """A result, cut where arrays were put side by side (not along the rows, which are cut later as needed)."""
    strides = tuple(math.prod(result.shape[k + 1 :]) for k in range(len(result.shape)))
    found, work = [], [Part(result, strides, 0)]
    while work:
        part = work.pop()
        x = part.array
        if isinstance(x, pull.Concat) and x.axis > 0:
            start, inside = 0, []
            for y in x.parts:
                inside.append(Part(y, part.strides, part.offset + start * part.strides[x.axis]))
                start += y.shape[x.axis]
            work += reversed(inside)
        elif isinstance(x, pull.Moved) and x.expands is not None and 0 not in x.expands:
            kept = tuple(s for k, s in enumerate(part.strides) if k not in x.expands)
            work.append(Part(x.source, kept, part.offset))
        else:
            found.append(part)
    return found


def _cells(part: Part) -> list[int]:
    """Where a row's elements go, in elements from the part's first."""
    at = [0]
    for n, stride in zip(part.array.shape[1:], part.strides[1:], strict=True):
        at = [a + k * stride for a in at for k in range(n)]
    return at


@dataclasses.dataclass(frozen=True)
class _Draft:
    text: str
    numbers: list[Number]
    unit: Unit


def _draft(part: Part, name: str, result: Result, constants: dict[bytes, int]) -> _Draft:
    x = part.array
    w = Writer(constants)
    index: list[str] = []
    rest = "e"
    for k, n in enumerate(reversed(x.shape)):
        if k == len(x.shape) - 1:
            index.append(rest)
        elif n == 1:
            index.append(w.integer(w.number(0)))
        else:
            index.append(w.integer(f"{rest} % {w.number(n)}"))
            rest = w.integer(f"{rest} / {w.number(n)}")
    index.reverse()
    value = x.at(w, tuple(index))
    place = w.number(part.offset)
    for i, s in zip(index, part.strides, strict=True):
        place = f"{place} + {i} * {w.number(s)}" if s != 1 else f"{place} + {i}"
    w.line(f"store<{type_of(x.dtype)}>(p.out, {w.number(result.offset)}, {place}, {value});")
    text, numbers = canonical(w.text(), w.numbers)
    rows = x.shape[0] if x.shape else 1
    unit = Unit(
        name,
        tuple(sorted(x.features)),
        rows,
        math.prod(x.shape) // rows,
        0,
        0,
        w.operations,
        w.bytes_read + x.dtype.itemsize,
        tuple(result.offset + x.dtype.itemsize * (part.offset + at) for at in _cells(part)),
        x.dtype.itemsize,
        x.dtype.itemsize * part.strides[0] if x.shape else 0,
    )
    return _Draft(text, numbers, unit)


_CLASS = """__device__ void class_{c}(const PrepParams& p, const Words& w, int e) {{
{body}
}}"""

_SOURCE = """#include "recom_ops.cuh"
#include "recom_prep.h"

namespace recom_cuda {{
// What a kernel reads it never writes: said so, loads of one element need not wait for stores of another.
template <class T>
RECOM_FN T load(const unsigned char* base, int offset, int place) {{
  if constexpr (kSame<T, pred>) {{
    return __ldg(base + offset + place) != 0;
  }} else {{
    return __ldg(reinterpret_cast<const T*>(base + offset) + place);
  }}
}}
struct Words {{
  const long long* at;
  RECOM_FN long long operator[](int k) const {{ return __ldg(at + k); }}
}};
template <class T>
RECOM_FN void store(unsigned char* base, int offset, int place, T value) {{
  reinterpret_cast<T*>(base + offset)[place] = value;
}}
RECOM_FN u64 join(u32 high, u32 low) {{ return u64{{high}} << 32 | low; }}
// Signed x mod d, from 0 to d - 1, for d up to 2**31; inverse: (2**64 - 1) / d, so that the quotient is short by one at
// most. A division by a number that is not known to the compiler would be twice as much as the rest of a hash.
RECOM_FN i32 floor_mod(u64 x, u32 d, u64 inverse) {{
  if ((d & (d - 1)) == 0) return static_cast<i32>(static_cast<u32>(x) & (d - 1));
  u32 r = static_cast<u32>(x) - static_cast<u32>(__umul64hi(x, inverse)) * d;
  r = r >= d ? r - d : r;
  const u32 s = r - (0u - static_cast<u32>(inverse) * d);  // less 2**64 mod d, or less d where that is 0
  const u32 t = s + d;
  return static_cast<i32>(static_cast<i64>(x) < 0 ? (s < t ? s : t) : r);  // one of the two has wrapped around
}}
RECOM_FN i32 sigrid_hash(u64 x, u64 salt, u64 limit, u64 inverse) {{
  const u64 mul = 0x9ddfea08eb382d69ull;
  u64 k = ~x + (x << 21);
  k ^= k >> 24;
  k += (k << 3) + (k << 8);
  k ^= k >> 14;
  k += (k << 2) + (k << 4);
  k ^= k >> 28;
  k += k << 31;
  u64 a = (k ^ salt) * mul;
  a ^= a >> 47;
  u64 b = (salt ^ a) * mul;
  b ^= b >> 47;
  return floor_mod(b * mul, static_cast<u32>(limit), inverse);
}}
{classes}
}}  // namespace recom_cuda

extern "C" __global__ void __launch_bounds__(256, {blocks}) recom_prep(
    const __grid_constant__ recom_cuda::PrepParams p) {{
  using namespace recom_cuda;
  int k = blockIdx.x;
  if (k >= p.n_tiles) return;
  PrepTile next = p.tiles[k];
  while (k < p.n_tiles) {{
    const PrepTile t = next;
    k += gridDim.x;
    if (k < p.n_tiles) next = p.tiles[k];
    const Words w{{p.words + t.words}};
    switch (t.cls) {{
{cases}
    }}
  }}
}}
"""

__all__ = ["TILE", "PrepKernels", "Unit", "Unsupported", "compile_prep"]
