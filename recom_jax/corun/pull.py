"""A preprocessing program as arrays that are computed element by element, backwards from the results.

`trace` reads the program's jaxpr; list operators (`firstx`, `ngram`, `pad`, `fill_null_lists`) stay whole, so that an
element of a list is known by its row and its place in the row: no sums over rows, no searches, and only the elements
that a result holds are computed. `SymArray.at` writes the code of one element.

What has no rule raises `Unsupported`; such a program runs by XLA, whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax.corun.symbols import C_TYPES, Unsupported, Writer, type_of

Index = Any  # a C expression of type int, or a `RowPos`


@dataclasses.dataclass(frozen=True)
class RowPos:
    """Where an element of a list column is: C expressions of its row and its place in the row."""

    lists: ListOf
    row: str
    pos: str


class ListOf:
    """The structure of a list column: how long each row is, and where its elements come from."""

    def length(self, w: Writer, row: str) -> str:
        raise NotImplementedError


class RawLists(ListOf):
    """Lists by row splits that are there as an array."""

    def __init__(self, splits: SymArray) -> None:
        self.splits = splits

    def begin(self, w: Writer, row: str) -> str:
        return w.integer(self.splits.at(w, (row,)))

    def length(self, w: Writer, row: str) -> str:
        after = w.integer(self.splits.at(w, (w.integer(f"{row} + 1"),)))
        return w.integer(f"{after} - {self.begin(w, row)}")


def live_length(w: Writer, lists: ListOf, valid: SymArray | None, row: str) -> str:
    found = lists.length(w, row)
    return found if valid is None else w.integer(f"{valid.at(w, (row,))} ? {found} : 0")


_SERIAL = itertools.count()


class SymArray:
    """An array whose elements can be asked for.

    Attributes:
      shape, dtype: of the array; features: names of the raw columns that it is made of.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, *inputs: SymArray) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)
        type_of(self.dtype)
        if math.prod(self.shape) >= 1 << 31:
            raise Unsupported(f"an array of {math.prod(self.shape)} elements")
        self.features: frozenset[str] = frozenset().union(*(x.features for x in inputs))
        self.serial = next(_SERIAL)

    def at(self, w: Writer, index: tuple[Index, ...]) -> str:
        """The name of a C variable that holds the element."""
        key = (self.serial, index)
        found = w.memo.get(key)
        if found is None:
            found = w.memo[key] = self.write(w, index)
        return found

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        raise NotImplementedError


class Placing:
    """Hands out places in a slot, one behind the other."""

    ALIGN = 256

    def __init__(self) -> None:
        self.end = 0

    def __call__(self, nbytes: int) -> int:
        at = self.end
        self.end += -(-max(nbytes, 1) // self.ALIGN) * self.ALIGN
        return at


def plain(index: Sequence[Index], what: str) -> tuple[str, ...]:
    for i in index:
        if isinstance(i, RowPos):
            raise Unsupported(f"{what} of the elements of a list column")
    return tuple(index)


def flat(w: Writer, shape: Sequence[int], index: Sequence[str]) -> str:
    """The row-major place of an element."""
    if not index:
        return "0"
    place = index[0]
    for n, i in zip(shape[1:], index[1:], strict=True):
        place = f"({place}) * {w.number(n)} + {i}"
    return w.integer(place)


class Input(SymArray):
    """A leaf of the raw batch.

    Attributes:
      offset: where it is in a slot, in bytes; -1: nobody has read it, so it needs no place.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, feature: str, place: Placing) -> None:
        super().__init__(shape, dtype)
        self.features, self.offset, self._place = frozenset([feature]), -1, place

    def _where(self) -> int:
        if self.offset < 0:
            self.offset = self._place(math.prod(self.shape) * self.dtype.itemsize)
        return self.offset

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        if index and isinstance(index[0], RowPos):
            where = index[0]
            if not isinstance(where.lists, RawLists) or len(index) > 1:
                raise Unsupported("places of a list column that is computed")
            begin = where.lists.begin(w, where.row)
            last = w.number(max(self.shape[0] - 1, 0))  # behind it lies another array
            place = w.integer(f"{begin} + {where.pos}")
            place = w.integer(f"{place} < {last} ? {place} : {last}")
        else:
            place = flat(w, self.shape, plain(index, "a raw column"))
        w.bytes_read += self.dtype.itemsize
        if not math.prod(self.shape):
            return w.value(self.dtype, f"{C_TYPES[self.dtype]}(0)")
        return w.value(
            self.dtype, f"load<{C_TYPES[self.dtype]}>(p.in, {w.number(self._where())}, {place})"
        )


class Const(SymArray):
    """An array of the program."""

    def __init__(self, value: Any) -> None:
        dtype = getattr(value, "dtype", np.dtype(np.float32))
        if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys are no numpy arrays
            raise Unsupported(f"values of {dtype}")
        self.value = np.asarray(value)
        super().__init__(self.value.shape, self.value.dtype)

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        value = self.value
        if value.ndim and value.size and (value == value.flat[0]).all():
            value = value.reshape(-1)[0]
        if not value.ndim:
            return w.literal(self.dtype, value)
        if not value.size:
            return w.literal(self.dtype, np.zeros((), self.dtype))
        place = flat(w, self.shape, plain(index, "a constant"))
        offset = w.number(w.constant(value))
        return w.value(self.dtype, f"load<{C_TYPES[self.dtype]}>(p.consts, {offset}, {place})")


class Elementwise(SymArray):
    """Each element is made of its inputs' elements at the same place; inputs of rank 0 are spread.

    Args:
      text: the C expression, with {0}, {1}, ... for the inputs' elements.
    """

    def __init__(self, shape: Any, dtype: Any, text: str, *inputs: SymArray) -> None:
        super().__init__(shape, dtype, *inputs)
        self.text, self.inputs = text, inputs

    def at(self, w: Writer, index: tuple[Index, ...]) -> str:
        # Long chains of operations, without deep recursion: what is missing, in order of creation.
        missing: dict[int, Elementwise] = {}
        work: list[Elementwise] = [self]
        while work:
            x = work.pop()
            if x.serial in missing or (x.serial, index) in w.memo:
                continue
            missing[x.serial] = x
            work += [y for y in x.inputs if isinstance(y, Elementwise) and y.shape == self.shape]
        for _, x in sorted(missing.items()):
            w.memo[x.serial, index] = x.write(w, index)
        return w.memo[self.serial, index]

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        names = [x.at(w, index if x.shape else ()) for x in self.inputs]
        return w.value(self.dtype, self.text.format(*names))


class Moved(SymArray):
    """Another array's elements at other places: slices, transposes, broadcasts.

    Args:
      place: (writer, index) -> the other array's index.
      expands: the axes of size 1 that this array has more than the other; None: it is something else.
    """

    def __init__(
        self,
        shape: Any,
        source: SymArray,
        place: Callable[[Writer, tuple[Index, ...]], tuple[Index, ...]],
        expands: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(shape, source.dtype, source)
        self.source, self.place, self.expands = source, place, expands

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        return self.source.at(w, self.place(w, index))


class Concat(SymArray):
    """Arrays one after the other along an axis."""

    def __init__(self, parts: Sequence[SymArray], axis: int) -> None:
        shape = list(parts[0].shape)
        shape[axis] = sum(x.shape[axis] for x in parts)
        super().__init__(shape, parts[0].dtype, *parts)
        self.parts, self.axis = tuple(parts), axis

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        (i,) = plain((index[self.axis],), "a concatenation")
        result = w.declare(self.dtype)
        start = 0
        with contextlib.ExitStack() as stack:
            for k, x in enumerate(self.parts):
                end = start + x.shape[self.axis]
                last = k == len(self.parts) - 1
                with w.block("{" if last else f"if ({i} < {w.number(end)}) {{"):
                    own = w.integer(f"{i} - {w.number(start)}") if start else i
                    place = (*index[: self.axis], own, *index[self.axis + 1 :])
                    w.line(f"{result} = {x.at(w, place)};")
                if not last:
                    stack.enter_context(w.block("else {"))
                start = end
        return result


class Padded(SymArray):
    """An array between elements of one value (lax.pad without interior or negative padding)."""

    def __init__(self, shape: Any, source: SymArray, value: SymArray, low: Sequence[int]) -> None:
        super().__init__(shape, source.dtype, source, value)
        self.source, self.value, self.low = source, value, tuple(low)

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        index = plain(index, "padding")
        tests, place = [], []
        for i, low, have, whole in zip(index, self.low, self.source.shape, self.shape, strict=True):
            own = w.integer(f"{i} - {w.number(low)}") if low else i
            place.append(own)
            if low:
                tests.append(f"{own} >= 0")
            if low + have < whole:
                tests.append(f"{own} < {w.number(have)}")
        if not tests:
            return self.source.at(w, tuple(place))
        outside = self.value.at(w, ())
        result = w.declare(self.dtype, outside)
        with w.block(f"if ({' && '.join(tests)}) {{"):
            w.line(f"{result} = {self.source.at(w, tuple(place))};")
        return result


class Iota(SymArray):
    def __init__(self, shape: Any, dtype: Any, axis: int) -> None:
        super().__init__(shape, dtype)
        self.axis = axis

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        (i,) = plain((index[self.axis],), "numbers")
        return w.value(self.dtype, f"x_convert<{C_TYPES[self.dtype]}>({i})")


class Reduce(SymArray):
    """A reduction over axes, in their order.

    Args:
      text: the C expression of {0}, what came so far, and {1}, the next element.
    """

    def __init__(
        self, source: SymArray, axes: Sequence[int], dtype: Any, initial: Any, text: str
    ) -> None:
        shape = [n for k, n in enumerate(source.shape) if k not in axes]
        super().__init__(shape, dtype, source)
        self.source, self.axes, self.initial, self.text = source, sorted(axes), initial, text

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        result = w.declare(self.dtype, w.literal(self.dtype, self.initial))
        rest = iter(index)
        whole: list[Index] = []
        with contextlib.ExitStack() as stack:
            for k, n in enumerate(self.source.shape):
                if k in self.axes:
                    whole.append(stack.enter_context(w.loop(n)))
                else:
                    whole.append(next(rest))
            w.line(f"{result} = {self.text.format(result, self.source.at(w, tuple(whole)))};")
        return result


class Gather(SymArray):
    """Rows of an array (lax.gather along its first axis).

    Args:
      index: integers, of the result's leading axes; fill: what is outside; None: the nearest row is.
    """

    def __init__(self, source: SymArray, index: SymArray, fill: Any) -> None:
        super().__init__((*index.shape, *source.shape[1:]), source.dtype, source, index)
        self.source, self.index, self.fill = source, index, fill

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        n = len(self.index.shape)
        i = self.index.at(w, index[:n])
        rows = self.source.shape[0]
        if not rows:
            return w.literal(
                self.dtype, np.asarray(0 if self.fill is None else self.fill, self.dtype)
            )
        wide = w.wide(f"static_cast<long long>({i})")
        last = w.number(rows - 1)
        place = w.integer(f"{wide} < 0 ? 0 : {wide} > {last} ? {last} : static_cast<int>({wide})")
        found = self.source.at(w, (place, *index[n:]))
        if self.fill is None:
            return found
        fill = w.literal(self.dtype, np.asarray(self.fill, self.dtype))
        return w.value(self.dtype, f"{wide} == {place} ? {found} : {fill}")


class Counted(SymArray):
    """How many of ascending boundaries lie below each element: jnp.searchsorted.

    Args:
      side: "left" counts boundaries < x, "right" those <= x. A NaN has all of them below it.
    """

    def __init__(
        self, boundaries: np.ndarray[Any, Any], x: SymArray, side: str, dtype: Any
    ) -> None:
        super().__init__(x.shape, dtype, x)
        self.boundaries, self.x, self.side = boundaries, x, side

    def write(self, w: Writer, index: tuple[Index, ...]) -> str:
        x, kind = self.x.at(w, index), C_TYPES[self.x.dtype]
        n = len(self.boundaries)
        # Not (x <= b), so that a NaN is above.
        test = "!({0} <= {1})" if self.side == "left" else "!({0} < {1})"
        if n <= 8:
            parts = []
            for b in self.boundaries:
                parts.append(f"({test.format(x, w.literal(self.x.dtype, b))} ? 1 : 0)")
            count = w.integer(" + ".join(parts) or "0")
        else:
            offset = w.number(w.constant(self.boundaries))
            low, high = w.fresh("low"), w.fresh("high")
            w.line(f"int {low} = 0, {high} = {w.number(n)};")
            with w.block(f"while ({low} < {high}) {{", weight=max(1, n.bit_length())):
                middle = w.integer(f"({low} + {high}) / 2")
                b = w.value(self.x.dtype, f"load<{kind}>(p.consts, {offset}, {middle})")
                w.line(f"if ({test.format(x, b)}) {low} = {middle} + 1; else {high} = {middle};")
            count = low
        return w.value(self.dtype, f"x_convert<{C_TYPES[self.dtype]}>({count})")


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Small constants are computed on the CPU, whatever the default device."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        yield
        return
    with jax.default_device(device):
        yield
