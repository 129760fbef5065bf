"""The serving path: bound tables, packed inputs, leases.

Handing XLA thousands of arrays costs more than computing with them. `Server` fixes the leading arguments, packs
small tables into one arena once, and gathers a batch's numpy leaves into one staging buffer per call, so that a
call hands over a few operands. Weights are swapped atomically; calls in flight keep the ones they started with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import jax
import numpy as np

from recom_jax import _recom, compat, operands, pack, pipeline, stage
from recom_jax.bound import Plan, context, direct_mismatch
from recom_jax.bound_body import MismatchError
from recom_jax.buckets import Buckets
from recom_jax.errors import (
    BatchError,
    BatchTypeError,
    BindError,
    BindTypeError,
    LeaseError,
    RecomError,
)
from recom_jax.options import Options
from recom_jax.serve_batch import concrete, first_shape
from recom_jax.serve_core import Core, FlatBatch, Weights
from recom_jax.serve_run import Runs
from recom_jax.signature import Signature


class Server(Runs):
    """A function with its leading arguments bound: ``serve(batch)``. Made by `OptimizedFunction.bind`.

    Thread-safe. The bound arrays must stay alive: if they are donated elsewhere, calls raise DeletedError.

    Inside a trace the bound arrays enter as operands, never as constants. A server is a pytree of its arrays, so it
    can be an argument too: ``jax.jit(lambda serve, batch: serve(batch))(serve, batch)``.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        options: Options,
        leading: Sequence[Any],
        name: str,
    ) -> None:
        if signature.parameters is not None:
            try:
                signature.parameters.bind_partial(*leading)
            except TypeError as why:
                raise BindTypeError(f"bind: {name}{signature.parameters}: {why}") from None
        self.__name__ = name
        self._core = Core(fn, signature, options, name, leading)
        leaves = self._core.own(jax.tree_util.tree_leaves(self._core.dynamic(leading)))
        self._core.home = stage.home_of(leaves)
        self._core.specs = tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in leaves
        )
        self._weights = Weights(
            leaves, {}, traced=any(isinstance(x, jax.core.Tracer) for x in leaves)
        )
        self._lock = threading.RLock()
        self._operands: dict[Any, operands.Operand] = {}
        core = self._core
        self._buckets = (
            Buckets(
                fn, signature, options, core.specs,
                lambda batch: core.full_args(core.specs, batch), core.n_leading,
            )
            if options.batch_buckets
            else None
        )  # fmt: skip

    # ---- weights ------------------------------------------------------------------------------------------

    def update(self, *leading: Any) -> None:
        """Swaps the bound arguments. Calls that have begun keep the old ones; nothing is recompiled.

        Jitted functions that close over this server use the new ones from their next call on.

        Raises:
          BindError: structure, shape or dtype differ from what was bound (nothing has changed then).
        """
        core = self._core
        if len(leading) != core.n_leading:
            raise BindTypeError(
                f"update takes the {core.n_leading} bound arguments of {self.__name__}, "
                f"not {len(leading)}"
            )
        for k, value in core.static.items():
            if leading[k] != value:
                raise BindError(
                    f"update: static argument {core.signature.parameter(k)} was bound as {value!r}; "
                    "bind again to change it"
                )
        leaves, tree = jax.tree_util.tree_flatten(core.dynamic(leading))
        if cast(Any, tree) != core.tree:
            raise BindError(
                f"update: the arguments' structure differs from what was bound: {tree}, not {core.tree}"
            )
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            raise BindError(
                "update inside a trace would leak traced arrays into the server; bind there instead: "
                "model.bind(params)(batch)"
            )
        new = self._core.own(leaves)
        for name, old, now in zip(core.names, core.specs, new, strict=True):
            if old.shape != now.shape or old.dtype != now.dtype:
                raise BindError(
                    f"update: {name} is {now.dtype}{list(now.shape)}, "
                    f"bound was {old.dtype}{list(old.shape)}"
                )
        self._core.stays_home(new)
        with self._lock:
            arenas = {key: self._core.pack_tables(new, key) for key in self._weights.arenas}
            self._weights = Weights(new, arenas)
        pipeline.count("weight_updates")

    # ---- calls --------------------------------------------------------------------------------------------

    def __call__(self, *batch: Any, **kwargs: Any) -> Any:
        """The function's result for the remaining arguments.

        Raises:
          BatchError (a ValueError), BatchTypeError (a TypeError): a leaf does not fit, named.
          LeaseError: the batch is a lease that was served already, or no staging slot came free in time.
        """
        if self._weights.traced or compat.tracing():
            return self._traced(batch, kwargs)
        return self._in_bucket(batch, kwargs, False)

    def fetch(self, *batch: Any, **kwargs: Any) -> Any:
        """The function's result as numpy arrays, for which it waits: for whoever answers a request.

        On a GPU this is quicker than ``np.asarray(serve(batch))``: the program ends by copying its results to
        page-locked memory of its staging slot, and the calling thread looks for them there (for `Options.spin_us`
        without sleeping) rather than being woken by JAX. Elsewhere, and where numpy cannot hold a result, it is the
        same as that; arrays may be read-only then.

        Raises:
          As a call does. RecomError: inside a trace there is nothing to wait for.
        """
        if compat.tracing():
            raise RecomError(
                f"{self.__name__}.fetch inside a trace: there are no numbers yet to wait for. Call the server itself"
            )
        if self._weights.traced:
            return _on_host(self._traced(batch, kwargs))
        return _on_host(self._in_bucket(batch, kwargs, True))

    def _in_bucket(self, batch: Sequence[Any], kwargs: dict[str, Any], fetched: bool) -> Any:
        if self._buckets is not None:
            leaves = jax.tree_util.tree_leaves((batch, kwargs))
            if _recom.lease_among(leaves) is None:  # a lease has the size that it was taken for
                return self._buckets.call(
                    lambda *args, **named: self._serve(args, named, fetched), batch, kwargs
                )
        return self._serve(batch, kwargs, fetched)

    def _serve(self, batch: Sequence[Any], kwargs: dict[str, Any], fetched: bool) -> Any:
        core = self._core
        if len(batch) == 1 and not kwargs and type(batch[0]) is dict:
            flat = core.flat.get(len(batch[0]))
            if flat is not None:
                found = self._call_flat(flat, batch[0], fetched)
                if found is not _MISS:
                    return found
        leaves, tree, static = core.flatten(batch, kwargs)
        slot = _recom.lease_among(leaves)
        if slot is not None:
            return self._serve_lease(slot, leaves, tree, static, fetched)
        for plan in core.plans.get((len(leaves), first_shape(leaves), context()), ()):
            if plan.tree == tree and plan.static == static:
                found = self._try(plan, leaves, fetched)
                if found is not _MISS:
                    return found
        with self._values(leaves):
            plan = core.plan(batch, kwargs)
        staged = self._stage(plan, leaves)
        if isinstance(staged, int):
            raise pack.mismatch(plan.layout, staged, leaves[plan.packed[staged]], plan.packed_names)
        return self._run(plan, staged, leaves, fetched)

    def _call_flat(self, flat: FlatBatch, batch: dict[Any, Any], fetched: bool) -> Any:
        found = flat.read(batch)
        if type(found) is tuple:
            slot = _recom.lease_among(found)
            if slot is not None:
                return self._serve_lease(slot, found, flat.tree, (), fetched)
            for plan in flat.candidates(found):
                out = self._try(plan, found, fetched)
                if out is not _MISS:
                    return out
        elif found is not None:
            leased = flat.leased.get((found.layout, context()))
            if leased is not None:
                try:
                    staged = found.array()
                except RuntimeError:
                    self._served_twice()
                return self._run(leased, self._leased(leased, found, staged), (), fetched)
        return _MISS

    def _try(self, plan: Plan, leaves: Sequence[Any], fetched: bool) -> Any:
        if plan.direct_numpy and _recom.any_swapped([leaves[k] for k in plan.direct_numpy]):
            return _MISS  # JAX would read the bytes as they are
        staged = self._stage(plan, leaves)
        if isinstance(staged, int):
            return _MISS
        try:
            return self._run(plan, staged, leaves, fetched)
        except MismatchError:
            return _MISS

    # ---- leases -------------------------------------------------------------------------------------------

    def input_views(self, *example: Any, **kwargs: Any) -> Any:
        """Leases one staging slot: writable numpy arrays shaped like the batch, with undefined contents.

        Fill them and serve them; that consumes the lease and copies nothing. Waits while every slot is taken.
        Leaves of 64 bits are views of 32 while JAX's x64 mode is off. Python scalars come back as they are.

        Args:
          *example: a batch, as arrays or ShapeDtypeStructs.

        Returns:
          The batch's pytree (a tuple if the function takes several remaining arguments).

        Raises:
          LeaseError: no slot came free in ``Options.lease_timeout_s``.
        """
        if len(example) == 1 and not kwargs and type(example[0]) is dict:
            found = self._flat_views(example[0])
            if found is not None:
                return found
        leaves, tree, static = self._core.flatten(example, kwargs)
        plan = self._known(leaves, tree, static)
        if plan is None:
            batch, kw = concrete(example, kwargs, all_numpy=True)
            with self._values(leaves):
                plan = self._core.plan(batch, kw)
            dynamic, named, _ = self._core.split_static(batch, kw)
            leaves, tree = jax.tree_util.tree_flatten((dynamic, named))
        if plan.all_packed:
            views = self._acquire(plan).views()
        else:
            views = [np.empty(x.shape, x.dtype) if type(x) is np.ndarray else x for x in leaves]
            if plan.packed:
                slot = self._acquire(plan)
                for k, view in zip(plan.packed, slot.views(), strict=True):
                    views[k] = view
        args, named = jax.tree_util.tree_unflatten(tree, views)
        if named:
            return named if not args else (args, named)
        return args[0] if len(args) == 1 else args

    def _flat_views(self, example: dict[Any, Any]) -> dict[Any, Any] | None:
        flat = self._core.flat.get(len(example))
        leaves = flat.read(example) if flat is not None else None
        if flat is not None and type(leaves) is tuple:
            for plan in flat.candidates(leaves):
                if plan.packer.matches(leaves) < 0:
                    return dict(zip(flat.keys, self._acquire(plan).views(), strict=True))
        return None

    def _acquire(self, plan: Plan) -> pack.Slot:
        target = plan.target
        slot = self._core.staging.acquire(plan.layout, flights=target.flights if target else None)
        if target is not None and self._spin(target):
            _recom.stir(stage.STIRRED, self._spin(target))
        return slot

    def _known(self, leaves: Sequence[Any], tree: Any, static: Any) -> Plan | None:
        """The plan that these leaves fit as they are, without looking at each from Python."""
        for plan in self._core.plans.get((len(leaves), first_shape(leaves), context()), ()):
            if plan.tree == tree and plan.static == static:
                chosen = leaves if plan.all_packed else [leaves[k] for k in plan.packed]
                if (not plan.packed or plan.packer.matches(chosen) < 0) and not direct_mismatch(
                    plan, leaves
                ):
                    return plan
        return None

    def _serve_lease(
        self, slot: Any, leaves: Sequence[Any], tree: Any, static: Any, fetched: bool
    ) -> Any:
        if slot.state != "leased":
            self._served_twice()
        plans = [
            p
            for p in self._core.by_layout.get((slot.layout, context()[1]), ())
            if p.tree == tree and p.static == static
        ]
        if not plans:
            raise BatchError(
                f"{self.__name__}: the batch does not match the lease: its structure differs from the "
                "example that input_views() was given. Serve the views in the structure they came in, "
                "or copies of them"
            )
        why = ""
        for plan in plans:
            why = direct_mismatch(plan, leaves)
            if not why:
                break
        else:
            raise BatchTypeError(f"{self.__name__}: the batch does not match the lease: {why}")
        chosen = leaves if plan.all_packed else [leaves[k] for k in plan.packed]
        try:
            bad = plan.packer.pack_into(
                slot, chosen
            )  # leaves in their own place are skipped, others copied in
            if bad < 0:
                slot.freeze()
                staged = slot.array()
        except RuntimeError:  # another thread serves the same lease
            self._served_twice()
        if bad >= 0:
            raise pack.mismatch(plan.layout, bad, chosen[bad], plan.packed_names)
        return self._run(plan, self._leased(plan, slot, staged), leaves, fetched)

    def _leased(self, plan: Plan, slot: pack.Slot, held: Any) -> Any:
        if plan.target is None:
            return slot, held
        token = plan.target.token(slot)
        # Now: XLA takes its time to begin.
        return pack.Begun(token, held, slot.upload(token.address, self._spin(plan.target)))

    def _served_twice(self) -> NoReturn:
        raise LeaseError(
            f"{self.__name__}: these input views were served already; lease new ones with "
            "input_views()"
        ) from None

    def __reduce__(self) -> NoReturn:
        raise BindTypeError(
            f"a server ({self.__name__}) holds buffers of this process and cannot be pickled or copied; "
            "send the model and its parameters, and bind there: model.bind(params)"
        )

    def __repr__(self) -> str:
        total = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in self._core.specs)
        return f"<recom_jax server of {self.__name__}: {len(self._core.specs)} bound arrays, {total:,} bytes>"


jax.tree_util.register_pytree_node(Server, Server._flatten, Server._unflatten)
_MISS: Any = object()


def _on_host(result: Any) -> Any:
    """Its arrays as numpy arrays. All copies begin before the first is waited for."""
    leaves, tree = jax.tree_util.tree_flatten(result)
    if all(type(x) is np.ndarray for x in leaves):
        return result
    return jax.tree_util.tree_unflatten(tree, jax.device_get(leaves))
