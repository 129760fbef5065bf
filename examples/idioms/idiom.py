"""What an idiom is, and the arrays that idioms are fed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of an idiom's arrays: `fields` features of `length` ids each, over tables of rows x dim."""

    batch: int = 6
    rows: int = 50
    dim: int = 8
    length: int = 5
    fields: int = 26


SMALL = Size()
REAL = Size(batch=256, rows=100_000, dim=32, length=20)
"""About what a server gets in one call."""

Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Idiom:
    """One way of writing an embedding column.

    Attributes:
      make: the function and its arguments, for a size.
      needs: a package beyond JAX that it is written with ("" if none).
    """

    make: Callable[[Size], Made]
    needs: str = ""


class Arrays:
    """Reproducible arrays."""

    def __init__(self, size: Size, seed: int = 0) -> None:
        self.size, self._rng = size, np.random.default_rng(seed)

    def table(self, rows: int | None = None, dim: int | None = None) -> Any:
        """float32[rows, dim]."""
        shape = (self.size.rows if rows is None else rows, dim or self.size.dim)
        return self._rng.normal(size=shape).astype(np.float32)

    def normal(self, *shape: int) -> Any:
        """float32 of `shape`, small enough that layers keep their scale."""
        return (self._rng.normal(size=shape) / max(shape[0], 1) ** 0.5).astype(np.float32)

    def ids(self, *shape: int, rows: int | None = None, low: int = 0) -> Any:
        """int32 of `shape` in [low, rows)."""
        return self._rng.integers(low, rows or self.size.rows, shape).astype(np.int32)

    def floats(self, *shape: int, low: float = 0.0, high: float = 100.0) -> Any:
        """float32 of `shape` in [low, high)."""
        return self._rng.uniform(low, high, shape).astype(np.float32)

    def padded(self, batch: int, length: int, rows: int | None = None) -> Any:
        """int32[batch, length]: ids at the front, -1 behind; some bags are empty."""
        ids = self.ids(batch, length, rows=rows)
        count = self._rng.integers(0, length + 1, batch)
        return np.where(np.arange(length) < count[:, None], ids, -1).astype(np.int32)
