"""Part of stage 5: the code of a column like one before it is that one's, with other values in its slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recom_jax import ir
from recom_jax.emit import Emitter
from recom_jax.emit_code import equal_steps
from recom_jax.program import DIM, IMM, OPERAND, ClassDef
from recom_jax.shape_solver.dims import DimLike, substitute, symbol, symbols

if TYPE_CHECKING:
    from recom_jax.renaming import Renaming
    from recom_jax.schedule import Piece

Slots = list[tuple[str, Any]]

MOST_SYMBOLS = 16  # in one size; one of more is in no key


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """The code of a first column.

    Attributes:
      slots: its values; in their place, of operands the id of the variable, of sizes that are symbols their number, of
        other sizes the polynomial.
      numbers: of the symbols, by name.
      offset: the slot of the place in the result.
    """

    cls: ClassDef
    slots: tuple[tuple[str, Any], ...]
    numbers: dict[str, int]
    offset: int


class Columns:
    """Emits the columns of one call."""

    def __init__(
        self,
        pool: ir.Pool,
        resolve: Callable[[DimLike], DimLike],
        operand: Callable[[Any], int],
        order: Sequence[Any],
        outputs: Sequence[Any],
        constants: Mapping[int, Any],
    ) -> None:
        """`constants`: arrays by id of their variable."""
        self.pool, self.resolve, self.operand, self.outputs = pool, resolve, operand, outputs
        self.order, self.constants = order, constants
        self._steps: dict[int, tuple[int, int] | None] = {}
        self._known: dict[Any, _Known | None] = {}

    def column(self, group: Sequence[Piece]) -> tuple[ClassDef, Slots]:
        """The code of the pieces, and the values of its slots. Raises EncodeError as `Emitter.column`."""
        emitter = Emitter(self.pool, self.resolve, self.operand, self.outputs, self._steps_of)
        twin = self.pool.twins.get(id(group[0].expr)) if len(group) == 1 else None
        if twin is None:
            return emitter.column(group)
        piece, (first, renaming) = group[0], twin
        numbers: dict[str, int] = {}
        key = self._key(piece, first, renaming, numbers)
        known = None if key is None else self._known.get(key)
        if known is not None:
            return known.cls, self._slots(known, piece, renaming, numbers)
        cls, slots = emitter.column(group)
        if key is not None and key not in self._known:
            self._known[key] = self._remember(cls, slots, renaming, numbers, emitter.offset)
        return cls, slots

    def _steps_of(self, var: Any) -> tuple[int, int] | None:
        if id(var) not in self._steps:
            value = self.constants.get(id(var))
            self._steps[id(var)] = None if value is None else equal_steps(value)
        return self._steps[id(var)]

    def _key(
        self, piece: Piece, first: ir.Expr, renaming: Renaming, numbers: dict[str, int]
    ) -> tuple[Any, ...] | None:
        """What decides the code: the first expression, and all sizes, symbols numbered as they come.

        None for a size of very many symbols.
        """
        found: list[Any] = [id(first), piece.result, isinstance(piece.offset, int)]
        for d in (
            *renaming.sizes.values(),
            *piece.outer,
            len(piece.outer),
            piece.width,
            piece.feature_stride,
            *piece.strides,
        ):
            if d is None or isinstance(d, int):
                found.append(d)
                continue
            d = self.resolve(d)
            if isinstance(d, int):
                found.append(d)
            elif d.name is not None:
                found.append(("size", numbers.setdefault(d.name, len(numbers))))
            elif len(symbols(d)) <= MOST_SYMBOLS:
                names = sorted(symbols(d))
                found += (d, *((n, numbers.setdefault(n, len(numbers))) for n in names))
            else:
                return None
        return tuple(found)

    def _remember(
        self, cls: ClassDef, slots: Slots, renaming: Renaming, numbers: dict[str, int], offset: int
    ) -> _Known | None:
        """The code in names of its own; None where a size holds a symbol that has no number."""
        first = {id(v): k for k, v in renaming.variables.items()}
        out: list[tuple[str, Any]] = []
        for n, (kind, value) in enumerate(slots):
            if kind == OPERAND:
                value = first[id(self.order[value])]
            elif kind == DIM and n != offset:
                if not symbols(value) <= numbers.keys():
                    return None
                value = value if value.name is None else numbers[value.name]
            out.append((kind, value))
        return _Known(cls, tuple(out), numbers, offset)

    def _slots(
        self, known: _Known, piece: Piece, renaming: Renaming, numbers: dict[str, int]
    ) -> Slots:
        """The slots' values of a column whose code is known; operands are numbered in the order of the code."""
        names = [*map(symbol, numbers)]
        same = known.numbers == numbers
        out: Slots = []
        for kind, value in known.slots:
            if kind == OPERAND:
                value = self.operand(renaming.variables[value])
            elif kind == DIM:
                if isinstance(value, int):
                    value = names[value]
                elif not same:
                    value = substitute(value, {n: names[k] for n, k in known.numbers.items()})
            out.append((kind, value))
        out[known.offset] = (IMM if isinstance(piece.offset, int) else DIM, piece.offset)
        return out


__all__ = ["Columns"]
