"""The preprocessing program as XLA runs it, and shapes of what goes through it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from recom_jax.corun.options import Options
from recom_jax.preprocess.ingest import ladder, padded
from recom_jax.preprocess.values import Jagged


class Room:
    """Pads lists to capacities that seldom change: for each one XLA compiles the program again.

    The first batch sets them, with a sixteenth to spare. Thread-safe.
    """

    def __init__(self) -> None:
        self._capacities: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, columns: Any) -> Any:
        """Columns of a raw batch, with lists of host arrays padded."""
        # All at once: lists that belong together (ids and their scores) must stay of one capacity.
        with self._lock:
            rooms = {name: self._room(name, x) for name, x in columns.items()}
        return {
            name: x.replace(padded(x.values, rooms[name])) if rooms[name] else x
            for name, x in columns.items()
        }

    def _room(self, name: str, x: Any) -> int:
        """A list column's capacity; 0: it stays as it is."""
        if not isinstance(x, Jagged):
            return 0
        if not all(isinstance(a, np.ndarray) for a in jax.tree.leaves(x)):
            return 0
        known = self._capacities.get(name, 0)
        if x.capacity > known:
            used = int(x.row_splits[-1])
            known = self._capacities[name] = max(x.capacity, ladder(used + used // 16, 64))
        return known


def compile_prep(prep: Callable[[Any], Any], options: Options) -> Callable[[Any], Any]:
    """The preprocessing program as it is run: jitted, or through the fusion compiler; lists get room."""
    room = Room()
    if not options.fused:
        made: Callable[[Any], Any] = jax.jit(prep)
    else:
        import recom_jax

        made = recom_jax.optimize(prep, options=recom_jax.Options(fuse_values=True))
    return lambda raw: made(room(raw))


def like(tree: Any) -> Any:
    """Shapes and dtypes of a pytree of arrays: random keys and Python numbers among them."""

    def leaf(x: Any) -> Any:
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        weak = getattr(x, "weak_type", type(x) in (int, float))  # as jit takes them
        dtype = _canonical(dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(np.shape(x), dtype, weak_type=weak)

    return jax.tree.map(leaf, tree)


_canonical: Any = jax.dtypes.canonicalize_dtype
