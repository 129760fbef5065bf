"""What `serve` needs to know of a batch's leaves: their types, and how to make more like them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recom_jax.pack import LeafSpec


@dataclasses.dataclass(frozen=True)
class Given:
    """What is remembered of an example's leaf: enough to make one like it."""

    kind: str  # "numpy", "jax" or "scalar" (a Python number, a static argument: kept as it is)
    shape: tuple[int, ...]
    dtype: Any
    value: Any = None

    def of_size(self, size: int | None) -> Any:
        """A leaf like it, of zeros; `size`: of its leading axis (None: as it was)."""
        if self.kind == "scalar":
            return self.value
        shape = self.shape if size is None else (size, *self.shape[1:])
        return (np if self.kind == "numpy" else jax.numpy).zeros(shape, self.dtype)


def given(leaf: Any) -> Given:
    """What is remembered of a leaf."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return Given("scalar", (), None, leaf)
    return Given("jax" if isinstance(leaf, jax.Array) else "numpy", tuple(leaf.shape), leaf.dtype)


def batch_axes(leaves: Sequence[Given]) -> set[int]:
    """Leaves whose leading axis scales with the batch: as long as the first leaf's."""
    first = next((s.shape[0] for s in leaves if s.shape), None)
    return {k for k, s in enumerate(leaves) if s.shape and s.shape[0] == first}


def concrete(batch: Any, kwargs: Any, all_numpy: bool = False) -> Any:
    """The batch with uninitialised numpy arrays where only a type is known (or wherever there is an array)."""

    def one(leaf: Any) -> Any:
        known = type(leaf) is np.ndarray or isinstance(leaf, (bool, int, float, complex))
        if (
            known
            or not hasattr(leaf, "shape")
            or not (all_numpy or isinstance(leaf, jax.ShapeDtypeStruct))
        ):
            return leaf
        return np.empty(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map(one, (tuple(batch), kwargs))


def type_key(leaf: Any) -> Any:
    """Equal for leaves that one plan serves."""
    shape = np.shape(leaf) if hasattr(leaf, "shape") else ()
    return (
        type(leaf),
        shape,
        str(getattr(leaf, "dtype", "")),
        getattr(leaf, "weak_type", False),
        is_packable(leaf),
    )


def first_shape(leaves: Sequence[Any]) -> Any:
    """A cheap key: batches of other sizes mostly differ in it."""
    return getattr(leaves[0], "shape", ()) if leaves else None


def is_packable(leaf: Any) -> bool:
    """Whether a leaf is a numpy array that a pack can hold."""
    return type(leaf) is np.ndarray and leaf.dtype.isnative and LeafSpec.of(leaf).packable
