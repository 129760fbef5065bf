"""What a server can say and do before it serves: its memory cost, and compiling for sizes to come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import pack, stage
from recom_jax.errors import BatchError, BatchTypeError
from recom_jax.pack import LeafSpec
from recom_jax.serve_batch import Given, batch_axes, concrete, given
from recom_jax.serve_core import BindCost
from recom_jax.serve_trace import InTrace

_PAGE = 4096


class Prepared(InTrace):
    """The part of `Server` for what comes before calls."""

    def __call__(self, *batch: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def cost(self, *batch: Any, **kwargs: Any) -> BindCost:
        """What serving this batch (arrays or ShapeDtypeStructs) will allocate. Allocates none of it."""
        plan = self._core.plan(*concrete(batch, kwargs))
        specs = self._core.specs
        inside = [LeafSpec.of(specs[k]) for k in plan.arena_leaves]
        arena = pack.layout_of(inside).total_bytes if inside else 0
        shared = sum(
            int(np.prod(specs[k].shape)) * specs[k].dtype.itemsize for k in plan.direct_bound
        )
        slot = pack.ring_bytes(plan.layout, 1) if plan.packed else 0
        slots = self._core.options.ring_slots
        target = stage.target_of(self._core.home)
        if target is None:
            return BindCost(-(-arena // _PAGE) * _PAGE, slot, slots, shared)
        copy = plan.layout.total_bytes + plan.copied if plan.packed else 0
        results = max(0, plan.delivered) if plan.packed else 0
        return BindCost(arena, slot, slots, shared, str(target.device), copy, results)

    def warmup(self, sizes: int | Iterable[int], *example: Any, **kwargs: Any) -> None:
        """Traces and compiles for these batch sizes before traffic.

        With ``Options(tune=True)``, programs are compiled as they were tuned, but nothing is measured: the batches are
        made up. Serve a real one of each size first, in this process or an earlier one.

        Args:
          sizes: batch sizes, or one.
          *example: one batch (arrays or ShapeDtypeStructs) whose shapes say what a batch looks like; may be left
            out once the server has seen a batch. Axes that share the example's batch size scale.

        Raises:
          BatchError: there is no example yet, or a size is negative.
        """
        core = self._core
        if isinstance(sizes, (int, np.integer)):
            sizes = (int(sizes),)
        if not isinstance(sizes, Iterable):
            raise BatchTypeError(
                f"warmup of {self.__name__}: takes a batch size or several, not {sizes!r}"
            )
        sizes = tuple(sizes)
        spec = (
            jax.tree_util.tree_map(given, (example, kwargs)) if example or kwargs else core.example
        )
        if spec is None:
            raise BatchError(
                f"warmup of {self.__name__}: no batch was seen yet; pass one: "
                "warmup(sizes, example_batch)"
            )
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
                raise BatchError(
                    f"warmup of {self.__name__}: a batch size is a number of at least 0, not {size!r}"
                )
        leaves, tree = jax.tree_util.tree_flatten(spec, is_leaf=lambda x: isinstance(x, Given))
        scales = batch_axes(leaves)
        for size in sizes:
            made = [x.of_size(int(size) if k in scales else None) for k, x in enumerate(leaves)]
            args, kw = jax.tree_util.tree_unflatten(tree, made)
            with self._without_values():
                jax.block_until_ready(self(*args, **kw))

    # ---- what is measured -------------------------------------------------------------------------------------

    def _values(self, leaves: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """While a plan is made for this batch: what `Options.tune` may measure on."""
        if not self._core.options.tune or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return contextlib.nullcontext()
        from recom_jax.cuda import tune

        return tune.values(lambda: [*self._weights.leaves, *leaves])

    def _without_values(self) -> contextlib.AbstractContextManager[None]:
        if not self._core.options.tune:
            return contextlib.nullcontext()
        from recom_jax.cuda import tune

        return tune.without()
