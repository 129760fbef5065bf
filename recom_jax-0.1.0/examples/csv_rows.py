"""Rows of a delimited text file, checked and in batches, through pyarrow's streaming reader.

A reader subclasses `RowReader`, says what a valid field is (`checks`) and what a batch looks like
(`convert`). Every line is accounted for: a malformed one either raises, naming file, line and column, or
is counted in `skipped`.
"""

import dataclasses
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv


class FormatError(ValueError):
    """A line that isn't what the format asks for."""

    def __init__(self, path: str, line: int, column: str | None, expected: str, found: str) -> None:
        where = f"{path}, line {line}" + (f", column {column}" if column else "")
        found = repr(found if len(found) <= 80 else found[:77] + "...")
        super().__init__(f"{where}: expected {expected}, found {found}")
        self.path, self.line, self.column = path, line, column


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a file is delimited: its column names in order, and whether its first line must hold them."""

    names: tuple[str, ...]
    delimiter: str
    header: bool
    quoted: bool = False


class Check(NamedTuple):
    """One condition on one column: `ok` is bool [rows]."""

    column: str
    ok: np.ndarray
    expected: str


Batch = dict[str, np.ndarray]


class RowReader:
    """Iterates over batches of `batch_size` rows (the last one may be smaller); may be iterated again.

    After or during an iteration, `rows` and `skipped` count the good and the malformed lines so far, and
    `problems` holds the first ten errors. A line longer than `block_bytes` ends the reading with an error
    whatever `on_error` says.
    """

    error: ClassVar[type[FormatError]] = FormatError

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int = 256,
        *,
        on_error: Literal["raise", "skip"] = "raise",
        block_bytes: int = 1 << 20,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
        self.path = os.fspath(path)
        self.batch_size = batch_size
        self.on_error = on_error
        self.block_bytes = block_bytes
        self.rows = 0
        self.skipped = 0
        self.problems: list[FormatError] = []

    def layout(self, first_line: str) -> Layout:
        """The file's layout, told from its first line."""
        raise NotImplementedError

    def checks(self, block: pa.RecordBatch) -> Iterator[Check]:
        """What must hold for each row of `block`, whose columns are raw bytes; most important first."""
        raise NotImplementedError

    def convert(self, rows: pa.RecordBatch) -> Batch:
        """Checked rows -> arrays. Many batches at once, which `cut` takes apart."""
        raise NotImplementedError

    def cut(self, rows: Batch, start: int, stop: int) -> Batch:
        """Rows `start` to `stop` of what `convert` made, without a copy."""
        return {name: array[start:stop] for name, array in rows.items()}

    def __iter__(self) -> Iterator[Batch]:
        self.rows, self.skipped, self.problems = 0, 0, []
        waiting: pa.Table | None = None
        for block in self._good_blocks():
            table = pa.Table.from_batches([block])
            waiting = pa.concat_tables([waiting, table]) if waiting is not None else table
            whole = waiting.num_rows // self.batch_size * self.batch_size
            yield from self._batches(waiting.slice(0, whole))
            waiting = waiting.slice(whole)
        if waiting is not None:
            yield from self._batches(waiting)

    def _batches(self, table: pa.Table) -> Iterator[Batch]:
        if not table.num_rows:
            return
        rows = self.convert(table.combine_chunks().to_batches()[0])
        for start in range(0, table.num_rows, self.batch_size):
            stop = min(start + self.batch_size, table.num_rows)
            self.rows += stop - start
            yield self.cut(rows, start, stop)

    def _good_blocks(self) -> Iterator[pa.RecordBatch]:
        first_line = self._first_line()
        layout = self.layout(first_line)
        names = list(layout.names)
        if layout.header and first_line != layout.delimiter.join(names):
            header = layout.delimiter.join(names)
            raise self.error(self.path, 1, None, f"the header {header!r}", first_line)
        # Lines with the wrong number of fields never reach a block; the handler runs ahead of the blocks.
        ragged: deque[tuple[int, int, str]] = deque()

        def keep(row: Any) -> str:
            ragged.append((row.number, row.actual_columns, _from_latin1(row.text)))
            return "skip"

        next_line = 1 + layout.header
        try:
            stream = pa.csv.open_csv(
                pa.input_stream(self.path),
                pa.csv.ReadOptions(
                    column_names=names,
                    skip_rows=int(layout.header),
                    use_threads=False,  # only then does pyarrow tell line numbers
                    block_size=self.block_bytes,
                    encoding="latin1",  # any byte is text then, so no byte can stop the handler
                ),
                pa.csv.ParseOptions(
                    delimiter=layout.delimiter,
                    quote_char='"' if layout.quoted else False,
                    ignore_empty_lines=False,
                    invalid_row_handler=keep,
                ),
                pa.csv.ConvertOptions(
                    check_utf8=False, column_types={name: pa.binary() for name in names}
                ),
            )
            for block in stream:
                lines = _line_numbers(next_line, block.num_rows, ragged)
                next_line = int(lines[-1]) + 1 if len(lines) else next_line
                bad = self._bad_rows(block, lines)
                while ragged and ragged[0][0] < next_line:
                    line, fields, text = ragged.popleft()
                    bad[line] = self._wrong_fields(line, fields, text, names)
                self._report(bad)
                yield block.filter(pa.array(~np.isin(lines, list(bad))))
        except pa.ArrowInvalid as problem:
            expected = f"lines shorter than {self.block_bytes} bytes"
            raise self.error(self.path, next_line, None, expected, str(problem)) from problem
        self._report({line: self._wrong_fields(line, n, text, names) for line, n, text in ragged})

    def _first_line(self) -> str:
        with pa.input_stream(self.path) as stream:
            start: bytes = stream.read(1 << 16)
        if not start:
            raise self.error(self.path, 1, None, "at least one line", "an empty file")
        return start.decode("utf-8-sig", "replace").split("\n", 1)[0].rstrip("\r")

    def _bad_rows(self, block: pa.RecordBatch, lines: np.ndarray) -> dict[int, FormatError]:
        bad: dict[int, FormatError] = {}
        for column, ok, expected in self.checks(block):
            for row in np.flatnonzero(~ok):
                line = int(lines[row])
                found = _from_latin1(block.column(column)[int(row)].as_py().decode())
                bad.setdefault(line, self.error(self.path, line, column, expected, found))
        return bad

    def _wrong_fields(self, line: int, fields: int, text: str, names: Sequence[str]) -> FormatError:
        expected = f"{len(names)} fields ({names[0]} to {names[-1]})"
        return self.error(self.path, line, None, expected, f"{fields} fields: {text}")

    def _report(self, bad: dict[int, FormatError]) -> None:
        for line in sorted(bad):
            if self.on_error == "raise":
                raise bad[line]
            self.skipped += 1
            if len(self.problems) < 10:
                self.problems.append(bad[line])


def _from_latin1(text: str) -> str:
    return text.encode("latin1").decode("utf-8", "replace")


def _line_numbers(first: int, count: int, ragged: Sequence[tuple[int, int, str]]) -> np.ndarray:
    """Physical line numbers of the next `count` good lines, from `first` on."""
    lines = np.arange(first, first + count + len(ragged))
    return np.setdiff1d(lines, [line for line, _, _ in ragged], assume_unique=True)[:count]


def matches(column: pa.Array, pattern: str) -> np.ndarray:
    """bool [rows]: the whole field matches the regular expression."""
    result = pc.match_substring_regex(column, f"^(?:{pattern})$")
    return np.asarray(result.to_numpy(zero_copy_only=False), bool)


def numbers(column: pa.Array, missing: float) -> np.ndarray:
    """Checked fields -> float64 [rows], empty ones as `missing`."""
    text = pc.if_else(pc.equal(column, b""), pa.scalar(None, pa.binary()), column).cast(pa.string())
    return np.asarray(text.cast(pa.float64()).fill_null(missing))
