"""What all servers of one function share: its signature, its plans, and what to do with bound arrays."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

from recom_jax import _recom, pack, stage
from recom_jax.bound import Plan, Source, context, make_plan
from recom_jax.errors import BatchError, BatchTypeError, BindError, BindTypeError, DeletedError
from recom_jax.options import Options
from recom_jax.pack import LeafSpec
from recom_jax.serve_batch import first_shape, given, is_packable, type_key
from recom_jax.signature import DELETED, Signature, is_deleted, leaf_problem

# Bytes: numpy leaves up to this size are packed even if only XLA reads them. JAX takes long to copy to a GPU.
_PACK_ANY = 1 << 18
_STAGE_ANY = 1 << 24


@dataclasses.dataclass(frozen=True)
class BindCost:
    """Memory that binding adds to the parameters themselves, in bytes.

    Attributes:
      arena: small tables, copied once into one buffer.
      staging_slot, staging_slots: one staging buffer of this batch size, and how many may exist.
      shared: tables and weights passed as they are: no copy.
      device: the GPU that the arena and copies of staging buffers are on; staging buffers are page-locked host
        memory then. "": all is in host memory.
      staging_copy: what one call in flight takes on that device for its staged inputs: its slot's buffer there, which
        stays, and the call's own copy.
      fetch_slot: page-locked host memory that `Server.fetch` takes for each slot's results, beside the staging buffer.
    """

    arena: int
    staging_slot: int
    staging_slots: int
    shared: int
    device: str = ""
    staging_copy: int = 0
    fetch_slot: int = 0

    @property
    def total(self) -> int:
        return self.arena + self.staging_slot * self.staging_slots

    def __str__(self) -> str:
        if self.device:
            return (
                f"arena {self.arena:,} bytes on {self.device} + staging {self.staging_slots} x "
                f"{self.staging_slot:,} bytes of page-locked host memory (each at its first use), copied to "
                f"{self.staging_copy:,} bytes a call in flight, results for `fetch` to {self.fetch_slot:,} "
                f"page-locked bytes a slot; {self.shared:,} bytes shared with the caller, "
                "not copied"
            )
        return (
            f"arena {self.arena:,} bytes + staging {self.staging_slots} x {self.staging_slot:,} bytes "
            f"(a slot's pages exist once used); {self.shared:,} bytes shared with the caller, not copied"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """One version of the bound arguments. Never changed, except that `arenas` and `ready` fill up.

    Attributes:
      leaves: the arrays; None where only an arena holds it (in a server that is an argument of a traced function).
      arenas: numbers of the leaves in it -> the packed buffer.
      ready: plan -> its operands from this version.
      traced: some of them are tracers.
    """

    leaves: tuple[Any, ...]
    arenas: dict[tuple[int, ...], Any]
    ready: dict[Plan, list[Any]] = dataclasses.field(default_factory=dict)
    traced: bool = False


@dataclasses.dataclass(frozen=True)
class FlatBatch:
    """Batches that are one dict of arrays, as most are: their leaves without flattening.

    Attributes:
      keys: in the order of the leaves.
      read: the leaves of such a dict; the Slot if it is a lease's own views; None if it has other keys.
      plans: by (the first leaf's shape, context).
      leased: by (layout, context).
    """

    tree: Any
    keys: tuple[Any, ...]
    read: Callable[[Any], Any]
    plans: dict[Any, tuple[Plan, ...]] = dataclasses.field(default_factory=dict)
    leased: dict[Any, Plan] = dataclasses.field(default_factory=dict)

    def candidates(self, leaves: Sequence[Any]) -> tuple[Plan, ...]:
        return self.plans.get((getattr(leaves[0], "shape", None), context()), ())

    def add(self, plan: Plan, shape: Any) -> None:
        key = shape, context()
        self.plans[key] = (*self.plans.get(key, ()), plan)
        self.leased.setdefault((plan.layout, key[1]), plan)


class Core:
    """What servers of one function share: everything but the weights."""

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        options: Options,
        name: str,
        leading: Sequence[Any],
    ) -> None:
        self.fn, self.signature, self.options, self.name = fn, signature, options, name
        self.n_leading = len(leading)
        self.static = {k: leading[k] for k in signature.static_argnums if k < len(leading)}
        self.has_static = bool(signature.static_argnames) or any(
            k >= len(leading) for k in signature.static_argnums
        )
        positions = [k for k in range(len(leading)) if k not in self.static]
        try:
            paths, self.tree = jax.tree_util.tree_flatten_with_path(self.dynamic(leading))
        except Exception as why:
            places = [(k, leading[k]) for k in positions]
            raise signature.no_tree(places, {}, why) from why
        self.names = tuple(
            signature.parameter(positions[p[0].idx]) + jax.tree_util.keystr(p[1:]) for p, _ in paths
        )
        self.specs: tuple[Any, ...] = ()
        self.home: tuple[Any, bool] = (None, False)  # see `stage.home_of`
        self.lock = threading.RLock()
        # By (number of leaves, the first leaf's shape, context).
        self.plans: dict[Any, tuple[Plan, ...]] = {}
        self.by_types: dict[Any, Plan] = {}
        self.by_layout: dict[Any, tuple[Plan, ...]] = {}
        self.flat: dict[int, FlatBatch] = {}  # by number of keys
        self.example: Any = None
        self.sweeps = False
        self.staging = pack.Staging(options.ring_slots, timeout_s=options.lease_timeout_s)

    def dynamic(self, leading: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(x for k, x in enumerate(leading) if k not in self.static)

    def full_args(self, bound: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        args: list[Any] = list(jax.tree_util.tree_unflatten(self.tree, bound))
        for k, value in sorted(self.static.items()):
            args.insert(k, value)
        return [*args, *batch]

    def split_static(self, batch: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """The batch without its static arguments, and those."""
        if not self.has_static:
            return tuple(batch), kwargs, ()
        nums, names = self.signature.static_argnums, self.signature.static_argnames
        rest = tuple(x for k, x in enumerate(batch) if k + self.n_leading not in nums)
        static: list[Any] = [(k, x) for k, x in enumerate(batch) if k + self.n_leading in nums]
        static += [(k, x) for k, x in kwargs.items() if k in names]
        for where, value in static:
            try:
                hash(value)
            except TypeError as why:
                at = where + self.n_leading if isinstance(where, int) else None
                what = where if at is None else self.signature.parameter(at)
                raise BatchError(
                    f"static argument {what} of {self.name} cannot be hashed: {why}; pass a tuple, say, or an array "
                    "that is not static"
                ) from None
        return rest, {k: x for k, x in kwargs.items() if k not in names}, tuple(static)

    def flatten(self, batch: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any, Any]:
        """Leaves and structure of the batch without its static arguments, and those."""
        dynamic, named, static = self.split_static(batch, kwargs)
        try:
            leaves, tree = jax.tree_util.tree_flatten((dynamic, named))
        except Exception as why:
            places = enumerate(batch, self.n_leading)
            raise self.signature.no_tree(places, kwargs, why) from why
        return leaves, tree, static

    def add(self, plan: Plan, batch: Any, kwargs: Any, leaves: Sequence[Any]) -> None:
        """Makes a plan known to calls. The lock is held; readers take none, so tuples are replaced whole."""
        shape = first_shape(leaves)
        key = (len(leaves), shape, context())
        self.plans[key] = (*self.plans.get(key, ()), plan)
        if plan.packed:
            where = plan.layout, context()[1]
            self.by_layout[where] = (*self.by_layout.get(where, ()), plan)
        if (
            len(batch) != 1
            or kwargs
            or plan.static
            or type(batch[0]) is not dict
            or not plan.all_packed
        ):
            return
        try:
            keys = sorted(batch[0])
        except TypeError:  # keys of several types: JAX orders them its own way
            return
        if (
            len(keys) < 2
            or len(keys) != len(leaves)
            or any(batch[0][k] is not x for k, x in zip(keys, leaves, strict=True))
        ):
            return
        found = self.flat.get(len(keys))
        if found is None or found.tree != plan.tree:
            found = FlatBatch(plan.tree, tuple(keys), _recom.DictReader(tuple(keys)).read)
        found.add(plan, shape)
        self.flat[len(keys)] = found

    def make(
        self, batch: Sequence[Any], kwargs: dict[str, Any], packs: bool, arena: bool = True
    ) -> tuple[Plan, Sequence[Any]]:
        """A plan, and the batch's leaves."""
        dynamic, named, static = self.split_static(batch, kwargs)
        leaves, tree = jax.tree_util.tree_flatten((dynamic, named))
        call = self.signature.split(self.full_args(self.specs, batch), kwargs, checks_leaves=False)
        n_bound = len(self.specs)
        for name, leaf in zip(call.names[n_bound:], leaves, strict=True):
            what = f"argument {name} of {self.name}"
            problem = leaf_problem(leaf)
            if problem:
                raise BatchTypeError(f"{what}: {problem}")
            if is_deleted(leaf):
                raise DeletedError(f"{what}: {DELETED}")
        target = stage.target_of(self.home) if packs else None
        packable = tuple(packs and is_packable(x) for x in leaves)
        source = Source(
            self.fn,
            call,
            n_bound,
            tree,
            static,
            packable,
            arena,
            self.options,
            self.name,
            _PACK_ANY if target is None else _STAGE_ANY,
            target,
            stage.reads_host(self.home),
        )
        return make_plan(source), leaves

    def plan(self, batch: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
        """The compiled form for these types, made on first sight."""
        dynamic, named, static = self.split_static(batch, kwargs)
        leaves, tree = jax.tree_util.tree_flatten((dynamic, named))
        key = (tree, static, context(), tuple(type_key(x) for x in leaves))
        with self.lock:
            plan = self.by_types.get(key)
            if plan is None:
                plan, _ = self.make(batch, kwargs, packs=True)
                self.by_types[key] = plan
                self.add(plan, dynamic, named, leaves)
            if plan.target is not None and not self.sweeps:
                # What this server has in flight at its end would else stay until another server's call.
                weakref.finalize(self, plan.target.flights.sweep)
                self.sweeps = True
            if self.example is None:
                self.example = jax.tree_util.tree_map(given, (tuple(batch), kwargs))
        return plan

    def own(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Device arrays; numpy arrays are copied, since JAX would alias memory the caller may write."""
        owned = []
        for name, leaf in zip(self.names, leaves, strict=True):
            what = f"bound argument {name} of {self.name}"
            if is_deleted(leaf):
                raise DeletedError(f"{what}: {DELETED}")
            problem = leaf_problem(leaf)
            if problem:
                raise BindTypeError(f"{what}: {problem}")
            if isinstance(leaf, jax.Array):
                owned.append(leaf)
                continue
            with jax.ensure_compile_time_eval():
                scalar = isinstance(leaf, (bool, int, float, complex))  # stays weakly typed
                owned.append(jax.numpy.asarray(leaf) if scalar else jax.numpy.array(leaf))
        return tuple(owned)

    def stays_home(self, leaves: Sequence[Any]) -> None:
        """Raises BindError where new arrays would need other plans: tokens belong to one device."""
        home = stage.home_of(leaves)
        if home == self.home:
            return
        if stage.target_of(home) is not stage.target_of(self.home):
            where = [
                str(device) if device else "JAX's default device"
                for device in (home[0], self.home[0])
            ]
            raise BindError(
                f"update: the arrays are committed to {where[0]}, bound were those of {where[1]}; bind again"
            )
        self.home = home

    def pack_tables(self, leaves: Sequence[Any], which: tuple[int, ...]) -> jax.Array:
        """Leaves of these numbers as one array of bytes: an arena."""
        names = [self.names[k] for k in which]
        for k, name in zip(which, names, strict=True):
            if is_deleted(leaves[k]):
                raise DeletedError(f"bound argument {name} of {self.name}: {DELETED}")
        # From a GPU all at once, not one after the other.
        tables = jax.device_get([leaves[k] for k in which])
        arena = pack.Arena.build(tables, names=names)
        with jax.ensure_compile_time_eval():  # a server lives longer than a trace it is used in
            return cast(jax.Array, jax.device_put(arena.data, self.home[0]))

    def in_trace(self, weights: Weights, key: Any) -> Any:
        """An arena or leaf of weights that are traced; a leaf that only an arena holds is cut out of it."""
        if isinstance(key, tuple):
            return weights.arenas[key]
        if weights.leaves[key] is not None:
            return weights.leaves[key]
        which = next(w for w in weights.arenas if key in w)
        specs = [LeafSpec.of(self.specs[k]) for k in which]
        return pack.unpack(weights.arenas[which], pack.layout_of(specs), which.index(key))
