"""The transpose of a call that is linear in its tables, as one custom call (docs/program_format.md, "Row sums").

Two things describe it: a program of the usual format computes the *numbers*, which rows are read and what they are
multiplied by, all of them in three flat arrays; words say for each lookup where its numbers and its rows of the
cotangents lie. The words hold sizes: unlike a program they are made for one batch size, when the call is lowered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, ir
from recom_jax.cpu import Encoded
from recom_jax.cpu.encode import constants
from recom_jax.detect_values import Detected, Output, Part, Val, row_major
from recom_jax.errors import EncodeError
from recom_jax.linear import Linear, Term
from recom_jax.schedule import Scheduled, schedule
from recom_jax.shape_solver.dims import DimLike
from recom_jax.simplify import simplify


@dataclasses.dataclass(frozen=True)
class RowSums:
    """The transpose of a `Linear`.

    Attributes:
      numbers: the program of the numbers; its results are the three arrays.
      encoded: that program, encoded.
      words: where numbers and cotangents lie, int64.
    """

    numbers: Scheduled
    encoded: Encoded
    words: np.ndarray[Any, np.dtype[np.int64]]

    def __str__(self) -> str:
        return f"{len(self.words)} words of sums; numbers:\n{self.numbers}"


def row_sums(detected: Detected, linear: Linear, options: Any) -> RowSums:
    """Makes the transpose of what is linear in a call.

    Raises:
      EncodeError: numbers that the program format cannot express, or too many of them.
    """
    from recom_jax.pipeline import prepare

    numbers = _Numbers(detected, linear)
    places = [numbers.term(t) for t in linear.terms]
    simple = simplify(detected.pool, numbers.outputs(), detected.value_of, options.disabled)
    made = schedule(detected, simple.outputs)
    return RowSums(made, prepare(made, options), numbers.words(places))


class _Numbers:
    """Collects the numbers of all terms; equal ones share a place."""

    def __init__(self, detected: Detected, linear: Linear) -> None:
        self.detected, self.linear = detected, linear
        results = [o.var.aval for o in linear.tangent]
        avals = [*results, *(v.aval for v in linear.tables)]
        self.wide = any(a.dtype == np.float64 for a in avals)
        self.dtypes = ("int32", "float64" if self.wide else "float32", "bool")
        self.parts: list[list[Part]] = [[], [], []]
        # Numbers, not symbols: sums of the sizes of a thousand columns would be long polynomials.
        self.sizes = [0, 0, 0]
        self.known: dict[tuple[int, Any], int] = {}

    def put(self, kind: int, e: ir.Expr | None, shape: tuple[DimLike, ...]) -> int:
        """The place of an expression over (shape..., 1) in its array, -1 for none."""
        if e is None:
            return -1
        if e.dtype != self.dtypes[kind]:
            e = self.detected.pool.op("convert", self.dtypes[kind], e)
        value = self.detected.unifier.value
        key = (id(e), shape)
        if key not in self.known:
            at = self.sizes[kind]
            full = (*shape, 1)
            self.parts[kind].append(Part(e, full, at, row_major(full)))
            self.known[key] = at
            self.sizes[kind] = at + math.prod(map(value, shape))
        return self.known[key]

    def term(self, t: Term) -> tuple[int, ...]:
        bags = t.piece.outer
        return (
            self.put(0, t.row, t.shape),
            self.put(0, t.bag, t.shape),
            self.put(1, t.weight, t.shape),
            self.put(1, t.scale, bags),
            self.put(1, t.divisor, bags),
            self.put(2, t.there, bags),
        )

    def outputs(self) -> list[Output]:
        made = []
        for dtype, size, parts in zip(self.dtypes, self.sizes, self.parts, strict=True):
            var = compat.fresh_var(jax.core.ShapedArray((size,), np.dtype(dtype)))
            made.append(Output(var, Val((size,), None, tuple(parts)), 0))
        return made

    def words(self, places: Sequence[tuple[int, ...]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        value = self.detected.unifier.value
        magic = constants()["magic"]
        tables = {id(v): k for k, v in enumerate(self.linear.tables)}
        cts = {result: k for k, result in enumerate(self.linear.results)}
        words = [int(self.wide), len(cts), *self.sizes, len(tables), len(places)]
        for var in self.linear.tables:
            words += [math.prod(var.aval.shape[:-1]), var.aval.shape[-1]]
        for t, at in zip(self.linear.terms, places, strict=True):
            bags = [value(n) for n in t.piece.outer]
            items = math.prod(value(n) for n in t.shape)
            if max(items, math.prod(bags), *self.sizes) >= 2**31:
                raise EncodeError("2^31 ids or more")
            inner = math.prod(value(n) for n in t.shape[len(bags) :]) if not t.jagged else 0
            words += [tables[id(t.table)], cts[t.piece.result], t.base, t.width]
            words += [value(t.piece.offset), value(t.piece.feature_stride)]
            words += [items, math.prod(bags), inner, *at]
            words += [len(bags)]
            for n, stride in zip(bags, t.piece.strides, strict=True):
                words += [n, value(stride)]
        head = [magic["SUMS_MAGIC"], magic["SUMS_VERSION"], len(words) + 3]
        return np.array(head + words, np.int64)


__all__ = ["RowSums", "row_sums"]
