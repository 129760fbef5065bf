"""What a server is inside a trace: its program becomes part of it, its arrays operands."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Self

import jax

from recom_jax import compat, operands
from recom_jax.errors import RecomError, trace_error
from recom_jax.serve_core import Core, Weights


class InTrace:
    """The part of `Server` for jit, vmap, grad, and for servers that are arguments of traced functions."""

    __name__: str
    _core: Core
    _weights: Weights
    _lock: threading.RLock
    _operands: dict[Any, operands.Operand]

    def _arena(self, weights: Weights, which: tuple[int, ...]) -> Any:
        """The packed tables of a version of the weights, made at first use."""
        found = weights.arenas.get(which)
        if found is None:
            with self._lock:
                found = weights.arenas.get(which)
                if found is None:
                    found = weights.arenas[which] = self._core.pack_tables(weights.leaves, which)
        return found

    def snapshot(self) -> Weights:
        """For `operands`: the version of the weights that a call of a traced program uses."""
        return self._weights

    def lookup(self, version: Weights, key: Any) -> Any:
        """For `operands`: an arena (by the leaves in it) or a leaf (by number) of a version."""
        return self._arena(version, key) if isinstance(key, tuple) else version.leaves[key]

    def _traced(self, batch: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Inside jit, vmap, grad: the program becomes part of the trace, with the bound arrays as operands."""
        weights = self._weights
        batched = any(compat.is_batched(x) for x in jax.tree_util.tree_leaves((batch, kwargs)))
        # Batching goes through the compiler again, which sees tables, not packs.
        plan, leaves = self._core.make(batch, kwargs, packs=False, arena=not batched)
        if weights.traced and plan.arena_leaves not in weights.arenas:
            plan, leaves = self._core.make(batch, kwargs, packs=False, arena=False)
        keys = ([plan.arena_leaves] if plan.arena_leaves else []) + list(plan.direct_bound)
        bound = [self._core.in_trace(weights, key) if weights.traced else None for key in keys]
        fixed = [n for n, x in enumerate(bound) if not isinstance(x, jax.core.Tracer)]
        values = operands.as_operands([self._operand(weights, keys[n]) for n in fixed])
        for n, value in zip(fixed, values, strict=True):
            bound[n] = value
        try:
            return plan.body(*bound, *(leaves[k] for k in plan.direct))
        except RecomError:
            raise
        except Exception as why:
            raise trace_error(why, f"while serving {self.__name__} inside a trace") from why

    def _operand(self, weights: Weights, key: Any) -> operands.Operand:
        with self._lock:
            found = self._operands.get(key)
            if found is None:
                found = self._operands[key] = operands.Operand(self, key, self.lookup(weights, key))
            return found

    def _flatten(self) -> tuple[tuple[Any, ...], Any]:
        weights = self._weights
        keys = tuple(sorted(weights.arenas))
        inside = {k for key in keys for k in key}
        rest = tuple(x for k, x in enumerate(weights.leaves) if k not in inside)
        return (*(weights.arenas[key] for key in keys), *rest), (self._core, keys)

    @classmethod
    def _unflatten(cls, aux: Any, children: Sequence[Any]) -> Self:
        core, keys = aux
        arenas = dict(zip(keys, children, strict=False))
        inside = {k for key in keys for k in key}
        rest = iter(children[len(keys) :])
        leaves = tuple(None if k in inside else next(rest) for k in range(len(core.names)))
        new = object.__new__(cls)
        new.__name__, new._core = core.name, core
        # Tracers, or whatever JAX puts in their place: such a server takes every call the traced way.
        new._weights = Weights(leaves, arenas, traced=True)
        new._lock, new._operands = threading.RLock(), {}
        return new
