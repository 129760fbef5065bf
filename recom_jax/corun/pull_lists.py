"""List columns that are computed, for `pull`: an element is known by its row and its place in the row."""

from __future__ import annotations

from typing import Any

from recom_jax.corun.pull import Index, ListOf, RowPos, SymArray, live_length, plain
from recom_jax.corun.symbols import Unsupported, Writer


class Derived(ListOf):
    """Lists made of another column's lists, row by row.

    Args:
      kind: "firstx", "ngram" or "fill_null_lists"; n: its parameter.
    """

    def __init__(self, kind: str, parent: ListOf, valid: SymArray | None, n: int) -> None:
        self.kind, self.parent, self.valid, self.n = kind, parent, valid, n

    def _live(self, w: Writer, row: str) -> str:
        return live_length(w, self.parent, self.valid, row)

    def _width(self, w: Writer, row: str) -> str:
        live, n = self._live(w, row), w.number(self.n)
        return w.integer(f"{live} < {n} ? {live} : {n}")

    def length(self, w: Writer, row: str) -> str:
        if self.kind == "firstx":
            return self._width(w, row)
        if self.kind == "ngram":
            live, width = self._live(w, row), self._width(w, row)
            return w.integer(f"({live} - {width} + 1) * {width}")
        return self._live(w, row)

    def source(self, w: Writer, row: str, pos: str) -> RowPos:
        if self.kind == "ngram":
            width = self._width(w, row)
            m = w.integer(f"{width} > 1 ? {width} : 1")
            pos = w.integer(f"{pos} / {m} + {pos} % {m}")
        return RowPos(self.parent, row, pos)


class ListSplits(SymArray):
    """The row splits of lists that are computed: nobody may ask for them, only for the lists."""

    def __init__(self, shape: Any, dtype: Any, lists: ListOf, *inputs: SymArray) -> None:
        super().__init__(shape, dtype, *inputs)
        self.lists = lists

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        raise Unsupported("row splits that are computed, as a result")


class ListValues(SymArray):
    """A leaf of the values of lists that are computed."""

    def __init__(self, shape: Any, lists: Derived, source: SymArray, *inputs: SymArray) -> None:
        super().__init__(shape, source.dtype, source, *inputs)
        self.lists, self.source = lists, source

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        where = index[0]
        if not isinstance(where, RowPos) or where.lists is not self.lists:
            raise Unsupported("places of a list column that is computed")
        return self.source.at(w, (self.lists.source(w, where.row, where.pos), *index[1:]))


class Lined(SymArray):
    """(B, n): the first n elements of each list, another value behind them (`preprocess.pad`), of one leaf.

    Args:
      source: a leaf of the values; present: the values' validity or None; valid: the lists' or None.
    """

    def __init__(
        self,
        shape: Any,
        source: SymArray,
        lists: ListOf,
        valid: SymArray | None,
        present: SymArray | None,
        value: Any,
        *inputs: SymArray,
    ) -> None:
        super().__init__(shape, source.dtype, source, *inputs)
        self.source, self.lists, self.valid = source, lists, valid
        self.present, self.value = present, value

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        row, k = plain(index, "rows")
        length = live_length(w, self.lists, self.valid, row)
        result = w.declare(self.dtype, w.literal(self.dtype, self.value))
        with w.block(f"if ({k} < {length}) {{"):
            where = (RowPos(self.lists, row, k),)
            if self.present is None:
                w.line(f"{result} = {self.source.at(w, where)};")
            else:
                with w.block(f"if ({self.present.at(w, where)}) {{"):
                    w.line(f"{result} = {self.source.at(w, where)};")
        return result
