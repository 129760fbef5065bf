"""Where raw batches come from: any iterable, read ahead by at most the ring's size, and nothing lost.

A `Source` numbers batches from the stream's beginning, skips those of an earlier run, decides about a short last batch,
and takes back what was read and not trained, so that a run over the same iterator goes on with it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from recom_jax.corun.options import Last
from recom_jax.errors import PipelineError
from recom_jax.preprocess.ingest import rows_of


class Source:
    """An iterator of raw batches. Used by one thread at a time.

    Args:
      raw_batches: an iterable of raw batches. One with a method ``skip(n)`` is asked to skip, or to return what is left
        as datasets of other libraries do; others are read.
      start: how many batches of the stream were trained before.
      last: see `Options.last`. Batches are compared with the stream's first one; behind a ``skip``, which does not read
        it, with the first one from there.
    """

    def __init__(self, raw_batches: Iterable[Any], start: int, last: Last) -> None:
        self.raw_batches = raw_batches
        self._iterator: Iterator[Any] | None = None
        self._start = start
        self._next = start
        self._last = last
        self._rows: int | None = None
        self._back: collections.deque[Any] = collections.deque()

    def continues(self, raw_batches: Iterable[Any]) -> bool:
        """Whether a new run over `raw_batches` goes on here: the same iterator, not a list that begins again."""
        return raw_batches is self.raw_batches and isinstance(raw_batches, Iterator)

    def give_back(self, batches: list[tuple[int, Any]]) -> None:
        """Batches that were read and not trained, in order; they are read again first."""
        if batches:
            self._next = batches[0][0]
            self._back.extendleft(raw for _, raw in reversed(batches))

    @property
    def position(self) -> int:
        return self._next

    def put_back(self, raw: Any) -> None:
        """What was read for a run that has ended: it is read behind what was given back."""
        self._back.append(raw)

    def count(self) -> int:
        """The number of the batch that was read last."""
        number = self._next
        self._next += 1
        return number

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raw = self._read()
        try:
            rows = rows_of(raw)
        except BaseException:
            self._back.appendleft(raw)
            raise
        if self._rows is None:
            self._rows = rows
        elif rows != self._rows and self._last != "keep":
            self._odd(raw, rows)
        return raw

    def _read(self) -> Any:
        if self._back:
            return self._back.popleft()
        if self._iterator is None:
            self._iterator = self._open()
        return next(self._iterator)

    def _open(self) -> Iterator[Any]:
        skip = getattr(self.raw_batches, "skip", None)
        if self._start and callable(skip):
            left = skip(self._start)
            return iter(left if isinstance(left, Iterable) else self.raw_batches)
        iterator = iter(self.raw_batches)
        for k in range(self._start):
            try:
                raw = next(iterator)
                if not k and self._last != "keep":  # what an odd last batch is compared with
                    self._rows = rows_of(raw)
            except StopIteration:
                raise PipelineError(
                    f"the stream ends after {k} batches, the run was to start behind {self._start}"
                ) from None
        return iterator

    def _odd(self, raw: Any, rows: int) -> None:
        """A batch of another size: only the last one may have fewer rows, and the option says what then."""
        wanted, number = self._rows, self._next
        try:
            self._back.appendleft(self._read())
        except StopIteration:
            if self._last == "drop" and rows < (wanted or 0):
                raise
            self._back.appendleft(raw)
            raise PipelineError(
                f"the last batch (number {number}) has {rows} rows, the first had {wanted}; "
                "corun.Options(last='keep') trains on it, last='drop' leaves a smaller one out"
            ) from None
        self._back.appendleft(raw)
        raise PipelineError(
            f"batch {number} has {rows} rows, the first had {wanted}, and it is not the last one; "
            "corun.Options(last='keep') accepts batches of any size"
        )
