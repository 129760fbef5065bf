"""The serving path: bound tables, packed inputs, leases.

Handing XLA thousands of arrays costs more than computing with them. `Server` fixes the leading arguments, packs
small tables into one arena once, and gathers a batch's numpy leaves into one staging buffer per call, so that a
call hands over a few operands. Weights are swapped atomically; calls in flight keep the ones they started with.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import pack, pipeline
from recom_jax.bound import Plan, Source, make_plan
from recom_jax.errors import (
    ArgumentError,
    BatchError,
    BindError,
    LeaseError,
    RecomError,
    trace_error,
)
from recom_jax.options import Options
from recom_jax.pack import LeafSpec
from recom_jax.signature import Signature, leaf_problem

_PACK_ANY = 1 << 18  # bytes: numpy leaves up to this size are packed even if only XLA reads them


@dataclasses.dataclass(frozen=True)
class BindCost:
    """Memory that binding adds to the parameters themselves, in bytes.

    Attributes:
      arena: small tables, copied once into one buffer.
      staging_slot, staging_slots: one staging buffer of this batch size, and how many may exist.
      shared: tables and weights passed as they are: no copy.
    """

    arena: int
    staging_slot: int
    staging_slots: int
    shared: int

    @property
    def total(self) -> int:
        return self.arena + self.staging_slot * self.staging_slots

    def __str__(self) -> str:
        return (f"arena {self.arena:,} bytes + staging {self.staging_slots} x {self.staging_slot:,} bytes "
                f"(a slot's pages exist once used); {self.shared:,} bytes shared with the caller, not copied")


@dataclasses.dataclass(frozen=True, eq=False)
class _Weights:
    """One version of the bound arguments. `arenas` maps a tuple of leaf numbers to the packed buffer."""

    leaves: tuple[Any, ...]
    arenas: dict[tuple[int, ...], jax.Array]


class Server:
    """A function with its leading arguments bound: ``serve(batch)``. Made by `OptimizedFunction.bind`.

    Thread-safe. The bound arrays must stay alive: if they are donated elsewhere, calls raise ArgumentError.
    """

    def __init__(self, fn: Callable[..., Any], signature: Signature, options: Options, leading: Sequence[Any],
                 name: str) -> None:
        self._fn, self._signature, self._options, self.__name__ = fn, signature, options, name
        self._static = {k: leading[k] for k in signature.static_argnums if k < len(leading)}
        dynamic = tuple(x for k, x in enumerate(leading) if k not in self._static)
        self._n_leading = len(leading)
        if signature.parameters is not None:
            try:
                signature.parameters.bind_partial(*leading)
            except TypeError as why:
                raise BindError(f"bind: {name}{signature.parameters}: {why}") from None
        paths, self._tree = jax.tree_util.tree_flatten_with_path(dynamic)
        positions = [k for k in range(len(leading)) if k not in self._static]
        self._names = tuple(signature.parameter(positions[p[0].idx]) + jax.tree_util.keystr(p[1:]) for p, _ in paths)
        self._weights = _Weights(self._own([leaf for _, leaf in paths]), {})
        self._lock = threading.RLock()
        self._plans: dict[Any, list[Plan]] = {}
        self._by_types: dict[Any, Plan] = {}
        self._last: Plan | None = None
        self._example: Any = None
        self._staging = pack.Staging(options.ring_slots, timeout_s=options.lease_timeout_s)

    # ---- weights ------------------------------------------------------------------------------------------

    def _own(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Device arrays; numpy arrays are copied, since JAX would alias memory the caller may write."""
        owned = []
        for name, leaf in zip(self._names, leaves, strict=True):
            problem = leaf_problem(leaf)
            if problem:
                raise BindError(f"bound argument {name} of {self.__name__}: {problem}")
            owned.append(leaf if isinstance(leaf, jax.Array) else jax.numpy.array(leaf))
        return tuple(owned)

    def update(self, *leading: Any) -> None:
        """Swaps the bound arguments. Calls that have begun keep the old ones; nothing is recompiled.

        Raises:
          BindError: structure, shape or dtype differ from what was bound (nothing has changed then).
        """
        if len(leading) != self._n_leading:
            raise BindError(f"update takes the {self._n_leading} bound arguments of {self.__name__}, not {len(leading)}")
        for k, value in self._static.items():
            if leading[k] != value:
                raise BindError(f"update: static argument {self._signature.parameter(k)} was bound as {value!r}")
        dynamic = tuple(x for k, x in enumerate(leading) if k not in self._static)
        leaves, tree = jax.tree_util.tree_flatten(dynamic)
        if tree != self._tree:
            raise BindError(f"update: the arguments' structure differs from what was bound: {tree}, not {self._tree}")
        new = self._own(leaves)
        for name, old, now in zip(self._names, self._weights.leaves, new, strict=True):
            if old.shape != now.shape or old.dtype != now.dtype:
                raise BindError(f"update: {name} is {now.dtype}{list(now.shape)}, bound was {old.dtype}{list(old.shape)}")
        with self._lock:
            arenas = {key: self._pack_tables(new, key) for key in self._weights.arenas}
            self._weights = _Weights(new, arenas)
        pipeline.count("weight_updates")

    def _pack_tables(self, leaves: Sequence[Any], which: tuple[int, ...]) -> jax.Array:
        arena = pack.Arena.build([np.asarray(leaves[k]) for k in which], names=[self._names[k] for k in which])
        return jax.device_put(arena.data)

    def _arena(self, plan: Plan) -> tuple[_Weights, Any]:
        weights = self._weights
        if not plan.arena_leaves:
            return weights, None
        found = weights.arenas.get(plan.arena_leaves)
        if found is None:
            with self._lock:
                weights = self._weights
                found = weights.arenas.get(plan.arena_leaves)
                if found is None:
                    found = self._pack_tables(weights.leaves, plan.arena_leaves)
                    weights.arenas[plan.arena_leaves] = found
        return weights, found

    # ---- calls --------------------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **kwargs: Any) -> Any:
        """The function's result for the remaining arguments.

        Raises:
          BatchError (a ValueError), BatchTypeError (a TypeError): a leaf does not fit, named.
          LeaseError: the batch is a lease that was served already, or no staging slot came free in time.
        """
        leaves, tree = jax.tree_util.tree_flatten((batch, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self._traced(batch, kwargs)
        slot = self._lease(leaves)
        if slot is not None:
            return self._serve_lease(slot, leaves, tree)
        plan = self._last
        staged: Any = -1
        if plan is not None and plan.tree == tree:
            staged = self._stage(plan, leaves)
        if isinstance(staged, int):
            for plan in self._plans.get((tree, _first_shape(leaves)), ()):
                staged = self._stage(plan, leaves)
                if not isinstance(staged, int):
                    break
            else:
                plan = self._plan(batch, kwargs)
                staged = self._stage(plan, leaves)
                if isinstance(staged, int):
                    raise pack.mismatch(plan.layout, staged, leaves[plan.packed[staged]],
                                        [plan.names[k] for k in plan.packed])
        assert plan is not None
        return self._run(plan, staged, leaves)

    def _stage(self, plan: Plan, leaves: Sequence[Any]) -> Any:
        """The staging array, or the index of a packed leaf that does not fit."""
        if not plan.packed:
            return None if _fits(plan, leaves) else 0
        if not _fits(plan, leaves):
            return 0
        chosen = leaves if plan.all_packed else [leaves[k] for k in plan.packed]
        return self._staging.try_pack(plan.layout, chosen)

    def _run(self, plan: Plan, staged: Any, leaves: Sequence[Any]) -> Any:
        weights, arena = self._arena(plan)
        args = ([] if staged is None else [staged]) + ([] if arena is None else [arena])
        args += [weights.leaves[k] for k in plan.direct_bound]
        args += [leaves[k] for k in plan.direct]
        self._last = plan
        try:
            return plan.call(*args)
        except RecomError:
            raise
        except Exception as why:
            for k in range(len(weights.leaves)):
                problem = leaf_problem(weights.leaves[k])
                if problem:
                    raise trace_error(why, f"bound argument {self._names[k]} of {self.__name__}: {problem}",
                                      ArgumentError) from why
            for k in plan.direct:
                problem = leaf_problem(leaves[k])
                if problem:
                    raise trace_error(why, f"argument {plan.names[k]} of {self.__name__}: {problem}",
                                      ArgumentError) from why
            raise trace_error(why, f"while serving {self.__name__}") from why

    def _traced(self, batch: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Inside a trace. Weights enter as operands of the traced program where the server itself is an argument."""
        args = self._full_args(self._weights.leaves, batch)
        from recom_jax.api import OptimizedFunction

        return OptimizedFunction(self._fn, self._signature, self._options)._jitted(*args, **kwargs)

    def _full_args(self, bound: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        args: list[Any] = list(jax.tree_util.tree_unflatten(self._tree, bound))
        for k, value in sorted(self._static.items()):
            args.insert(k, value)
        return [*args, *batch]

    # ---- plans --------------------------------------------------------------------------------------------

    def _plan(self, batch: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
        """The compiled form for these types, made on first sight."""
        leaves, tree = jax.tree_util.tree_flatten((tuple(batch), kwargs))
        args = self._full_args(self._weights.leaves, batch)
        call = self._signature.split(args, kwargs)
        n_bound = len(self._weights.leaves)
        names, own = call.names[n_bound:], call.leaves[n_bound:]
        for name, leaf in zip(names, own, strict=True):
            problem = leaf_problem(leaf)
            if problem:
                from recom_jax.errors import BatchTypeError

                raise BatchTypeError(f"argument {name} of {self.__name__}: {problem}")
        packable = tuple(_is_packable(x) for x in leaves)
        key = (tree, packable, tuple((tuple(np.shape(x)), str(_dtype(x))) for x in leaves),
               tuple(k for k, x in enumerate(leaves) if isinstance(x, (bool, int, float, complex))))
        with self._lock:
            plan = self._by_types.get(key)
            if plan is None:
                source = Source(self._fn, call, self._names, names, tree, packable, self._options, self.__name__,
                                _PACK_ANY)
                plan = make_plan(source)
                self._by_types[key] = plan
                self._plans.setdefault((tree, _first_shape(leaves)), []).append(plan)
            if self._example is None:
                self._example = jax.tree_util.tree_map(_spec, (tuple(batch), kwargs))
        return plan

    def cost(self, *batch: Any, **kwargs: Any) -> BindCost:
        """What serving this batch (arrays or ShapeDtypeStructs) will allocate. Allocates nothing itself."""
        plan = self._plan(*_as_numpy(batch, kwargs))
        leaves = self._weights.leaves
        arena = pack.layout_of([LeafSpec.of(leaves[k]) for k in plan.arena_leaves]).total_bytes if plan.arena_leaves else 0
        shared = sum(leaves[k].nbytes for k in plan.direct_bound)
        return BindCost(arena, plan.layout.total_bytes if plan.packed else 0, self._options.ring_slots, shared)

    def warmup(self, sizes: Sequence[int], *example: Any, **kwargs: Any) -> None:
        """Traces and compiles for these batch sizes before traffic.

        Args:
          sizes: batch sizes.
          *example: one batch (arrays or ShapeDtypeStructs) whose shapes say what a batch looks like; may be left
            out once the server has seen a batch. Axes that share the example's batch size scale.

        Raises:
          BatchError: there is no example yet, or a size is negative.
        """
        spec = jax.tree_util.tree_map(_spec, (example, kwargs)) if example or kwargs else self._example
        if spec is None:
            raise BatchError(f"warmup of {self.__name__}: no batch was seen yet; pass one: warmup(sizes, example_batch)")
        scales = _batch_axes(spec)
        for size in sizes:
            if not isinstance(size, (int, np.integer)) or size < 0:
                raise BatchError(f"warmup of {self.__name__}: a batch size is a number of at least 0, not {size!r}")
            leaves, tree = jax.tree_util.tree_flatten(spec)
            made = [np.zeros(tuple(int(size) if (k, a) in scales else n for a, n in enumerate(s.shape)), s.dtype)
                    for k, s in enumerate(leaves)]
            args, kw = jax.tree_util.tree_unflatten(tree, made)
            jax.block_until_ready(self(*args, **kw))

    # ---- leases -------------------------------------------------------------------------------------------

    def input_views(self, *example: Any, **kwargs: Any) -> Any:
        """Leases one staging slot: writable numpy arrays shaped like the batch, with undefined contents.

        Fill them and serve them; that consumes the lease and copies nothing. Waits while every slot is taken.

        Args:
          *example: a batch, as arrays or ShapeDtypeStructs.

        Returns:
          The batch's pytree (a tuple if the function takes several remaining arguments).

        Raises:
          LeaseError: no slot came free in ``Options.lease_timeout_s``.
        """
        batch, kw = _as_numpy(example, kwargs)
        plan = self._plan(batch, kw)
        leaves, tree = jax.tree_util.tree_flatten((batch, kw))
        views = [np.empty(x.shape, x.dtype) for x in leaves]
        if plan.packed:
            slot = self._staging.acquire(plan.layout)
            for entry, k in enumerate(plan.packed):
                views[k] = slot.view(entry)
        args, named = jax.tree_util.tree_unflatten(tree, views)
        if named:
            return named if not args else (args, named)
        return args[0] if len(args) == 1 else args

    def _lease(self, leaves: Sequence[Any]) -> Any:
        for leaf in leaves:
            if type(leaf) is np.ndarray and leaf.base is not None:
                slot = pack.lease_of(leaf)
                if slot is not None:
                    return slot
                return None
        return None

    def _serve_lease(self, slot: Any, leaves: Sequence[Any], tree: Any) -> Any:
        if slot.state != "leased":
            raise LeaseError(f"{self.__name__}: these input views were served already; lease new ones with input_views()")
        plan = next((p for p in self._by_types.values() if p.tree == tree and p.layout == slot.layout), None)
        if plan is None:
            raise BatchError(f"{self.__name__}: the batch does not match the lease: its structure differs from the "
                             "example that input_views() was given")
        chosen = [leaves[k] for k in plan.packed]
        if not _fits(plan, leaves):
            raise BatchError(f"{self.__name__}: the batch does not match the lease: an argument changed its type")
        bad = plan.packer.pack_into(slot, chosen)  # leaves in their own place are skipped, others copied in
        if bad >= 0:
            raise pack.mismatch(plan.layout, bad, chosen[bad], [plan.names[k] for k in plan.packed])
        slot.freeze()
        return self._run(plan, slot.array(), leaves)

    def __repr__(self) -> str:
        total = sum(x.nbytes for x in self._weights.leaves)
        return f"<recom_jax server of {self.__name__}: {len(self._weights.leaves)} bound arrays, {total:,} bytes>"


def _fits(plan: Plan, leaves: Sequence[Any]) -> bool:
    """Whether what is not packed has the kind the plan was made for (XLA checks shapes itself)."""
    return all(type(leaves[k]) is kind and np.shape(leaves[k]) == shape and _dtype(leaves[k]) == dtype
               for k, kind, shape, dtype in plan.direct_kinds)


def _first_shape(leaves: Sequence[Any]) -> Any:
    return np.shape(leaves[0]) if leaves else None


def _dtype(leaf: Any) -> Any:
    return getattr(leaf, "dtype", type(leaf))


def _is_packable(leaf: Any) -> bool:
    return type(leaf) is np.ndarray and leaf.dtype.isnative and LeafSpec.of(leaf).packable


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    array = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _as_numpy(batch: Any, kwargs: Any) -> Any:
    """The batch with every leaf as numpy (uninitialised where only a shape is known)."""
    return jax.tree_util.tree_map(
        lambda x: x if type(x) is np.ndarray else np.empty(_spec(x).shape, _spec(x).dtype), (tuple(batch), kwargs))


def _batch_axes(spec: Any) -> set[tuple[int, int]]:
    """(leaf, axis) pairs that scale with the batch: leading axes as long as the first leaf's."""
    leaves = jax.tree_util.tree_leaves(spec)
    first = next((s.shape[0] for s in leaves if s.shape), None)
    return {(k, 0) for k, s in enumerate(leaves) if s.shape and s.shape[0] == first}
