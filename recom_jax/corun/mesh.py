"""The stream runtime over several devices: each prepares the part of a batch that it trains on.

`specs` say how the prepared batch lies on the mesh. Split by rows, a device prepares its rows; split by features
(tables that are parted between the devices), it prepares the features whose tables it owns, for all rows, and reads
no other raw columns: nothing has to be exchanged. Each device has a ring, streams and kernels of its own,
and the step gets a batch that is put together of theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from recom_jax.corun import runtime as rt
from recom_jax.corun.kernels import PrepKernels
from recom_jax.corun.steps import Steps
from recom_jax.corun.stream import Compiler, Engine
from recom_jax.errors import PipelineError


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def map_specs(f: Callable[[Any, PartitionSpec], Any], specs: Any, batch: Any) -> Any:
    """`f` of each leaf of a batch and its spec; `specs` may be a prefix of the batch's structure."""

    def under(spec: PartitionSpec, part: Any) -> Any:
        return jax.tree.map(lambda x: f(x, spec), part)

    try:
        return jax.tree.map(under, specs, batch, is_leaf=_is_spec)
    except ValueError as why:
        raise PipelineError(
            f"Pipeline: specs don't have the prepared batch's structure: {why}"
        ) from None


def on_mesh(batch: Any, mesh: Any, specs: Any) -> Any:
    """A batch on a mesh, by `specs`; without them, split along its first axis where its rows allow it, else copied."""

    def put(x: Any, spec: PartitionSpec) -> Any:
        local_shape(np.shape(x), spec, mesh)  # raises what is wrong
        return jax.device_put(x, NamedSharding(mesh, spec))

    def by_rows(x: Any) -> Any:
        name = mesh.axis_names[0]
        divides = np.ndim(x) > 0 and np.shape(x)[0] % mesh.shape[name] == 0
        return put(x, PartitionSpec(name) if divides else PartitionSpec())

    return jax.tree.map(by_rows, batch) if specs is None else map_specs(put, specs, batch)


def axes_of(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """The mesh axes that a dimension is split over."""
    found = spec[dim] if dim < len(spec) else None
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)


def local_shape(shape: Sequence[int], spec: PartitionSpec, mesh: Any) -> tuple[int, ...]:
    """The shape of each device's part.

    Raises:
      PipelineError: a dimension is no multiple of the number of parts.
    """
    made = []
    for k, n in enumerate(shape):
        parts = math.prod(mesh.shape[a] for a in axes_of(spec, k))
        if n % parts:
            raise PipelineError(
                f"Pipeline: specs split dimension {k} of {tuple(shape)} into {parts} parts, which don't come out even; "
                "corun.Options(last='drop') leaves out a smaller last batch"
            )
        made.append(n // parts)
    return tuple(made)


def local_prep(
    prep: Callable[[Any], Any], specs: Any, mesh: Any, device: int
) -> Callable[[Any], Any]:
    """The part of a preprocessing function that one device (by its place in `mesh.devices.flat`) runs."""
    place = dict(zip(mesh.axis_names, np.unravel_index(device, mesh.devices.shape), strict=True))

    def part(x: Any, spec: PartitionSpec) -> Any:
        shape = local_shape(x.shape, spec, mesh)
        starts = []
        for k, n in enumerate(shape):
            at = 0
            for a in axes_of(spec, k):
                at = at * mesh.shape[a] + int(place[a])
            starts.append(at * n)
        return jax.lax.slice(x, starts, [a + n for a, n in zip(starts, shape, strict=True)])

    return lambda raw: map_specs(part, specs, prep(raw))


class MeshRuntime:
    """A `PrepRuntime` on each device of a mesh; a slot is a tuple of theirs.

    Attributes:
      kernels: the first device's; all have results of the same shapes.
    """

    def __init__(self, parts: Sequence[rt.PrepRuntime], mesh: Any, specs: Any) -> None:
        self.parts, self.mesh, self.specs = tuple(parts), mesh, specs
        self.kernels, self.launched, self.schedule = (
            parts[0].kernels,
            parts[0].launched,
            parts[0].schedule,
        )
        self.native = _Natives([p.native for p in parts])
        self.marks, self.in_graphs = parts[0].marks, parts[0].in_graphs
        self._tokens: dict[tuple[int, ...], Any] = {}
        self._views: dict[tuple[int, ...], Any] = {}
        self.ahead = parts[0].ahead

    def pack(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        slots: list[int] = []
        try:
            for p in self.parts:
                slots.append(p.pack(leaves))
        except BaseException:
            for p, slot in zip(self.parts, slots, strict=False):
                p.abandon(slot)
            raise
        return tuple(slots)

    def abandon(self, slots: tuple[int, ...]) -> None:
        for p, slot in zip(self.parts, slots, strict=True):
            p.abandon(slot)

    def token(self, slots: tuple[int, ...], device: Any, committed: bool) -> Any:
        found = self._tokens.get(slots)
        if found is None:
            devices = list(self.mesh.devices.flat)
            shards = [
                p.token(slot, d, True).reshape(1, -1)
                for p, slot, d in zip(self.parts, slots, devices, strict=True)
            ]
            for p, slot, shard in zip(self.parts, slots, shards, strict=True):
                p.native.register_token(shard.unsafe_buffer_pointer(), slot)
            sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
            shape = (len(devices), shards[0].shape[1])
            found = jax.make_array_from_single_device_arrays(shape, sharding, shards)
            self._tokens[slots] = found
        return found

    def views(self, slots: tuple[int, ...], device: Any, committed: bool) -> list[Any]:
        """Leaves of the whole batch, where the devices' kernels write them."""
        places = tuple(p.native.place_of(s) for p, s in zip(self.parts, slots, strict=True))
        found = self._views.get(places)
        if found is None:
            devices = list(self.mesh.devices.flat)
            each = [
                p.views(slot, d, True)
                for p, slot, d in zip(self.parts, slots, devices, strict=True)
            ]
            leaves = jax.tree.leaves(self.batch_like())
            specs = jax.tree.leaves(
                map_specs(lambda _, spec: spec, self.specs, rt.batch_like(self.kernels)),
                is_leaf=_is_spec,
            )
            found = self._views[places] = [
                jax.make_array_from_single_device_arrays(
                    leaf.shape, NamedSharding(self.mesh, spec), [part[k] for part in each]
                )
                for k, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
            ]
        return found

    def begin(self, slots: tuple[int, ...], device: Any, committed: bool) -> None:
        devices = self.mesh.devices.flat
        for p, slot, d in zip(self.parts, slots, devices, strict=True):
            p.begin(slot, d, True)

    def dispatched(self) -> None:
        for p in self.parts:
            p.dispatched()

    @functools.cached_property
    def key(self) -> str:
        return repr((self.kernels.results, self.mesh, self.specs, self.marks, self.in_graphs))

    def batch_like(self) -> Any:
        """Shapes of the whole batch."""

        def whole(x: Any, spec: PartitionSpec) -> Any:
            parts = [
                n * math.prod(self.mesh.shape[a] for a in axes_of(spec, k))
                for k, n in enumerate(x.shape)
            ]
            return jax.ShapeDtypeStruct(tuple(parts), x.dtype)

        return map_specs(whole, self.specs, rt.batch_like(self.kernels))

    def batch(self, token: Any) -> Any:
        out = map_specs(lambda _, spec: spec, self.specs, rt.batch_like(self.kernels))
        return jax.shard_map(
            lambda t: rt.take_batch(self.kernels, t),
            mesh=self.mesh,
            in_specs=PartitionSpec(self.mesh.axis_names),
            out_specs=out,
            check_vma=False,
        )(token)

    def close(self) -> None:
        for p in self.parts:
            p.close()


class _Natives:
    """Sums of what native runtimes count; the first one's times."""

    def __init__(self, natives: Sequence[Any]) -> None:
        self._natives = natives

    @property
    def stats(self) -> dict[str, int]:
        each = [n.stats for n in self._natives]
        return {name: sum(s[name] for s in each) for name in each[0]}

    @property
    def times(self) -> Any:
        return self._natives[0].times


class MeshEngine(Engine):
    """An `Engine` whose programs run on all devices of a mesh.

    Args:
      compilers: of each device (`compilers_of`); specs: of the prepared batch, a prefix of it.
      places: (what makes native runtimes, processors) of each device, in the order of `mesh.devices.flat`.
      schedule: kernels -> schedule, of each device.
    """

    def __init__(
        self,
        compilers: Sequence[Compiler],
        steps: Steps,
        mesh: Any,
        specs: Any,
        places: Sequence[tuple[rt.Make, int]],
        slots: int,
        schedule: Callable[[PrepKernels], rt.Schedule],
        profile: bool = False,
        ahead: int = 1,
    ) -> None:
        first = mesh.devices.flat[0]
        make, processors = places[0]
        super().__init__(
            compilers[0], steps, make, first, processors, slots, schedule, profile, ahead
        )
        self._compilers, self._mesh, self._specs, self._places = compilers, mesh, specs, places

    def _runtime_for(self, like: Any) -> Any:
        parts = []
        for compiler, (make, processors) in zip(self._compilers, self._places, strict=True):
            kernels = compiler(like)
            parts.append(
                rt.PrepRuntime(
                    kernels,
                    self._schedule(kernels),
                    self.slots,
                    make,
                    processors,
                    self._profile,
                    self._ahead,
                )
            )
        return MeshRuntime(parts, self._mesh, self._specs)


def compilers_of(prep: Callable[[Any], Any], specs: Any, mesh: Any) -> list[Compiler]:
    """What makes the kernels of each device."""
    return [Compiler(local_prep(prep, specs, mesh, k)) for k in range(mesh.devices.size)]


__all__ = ["MeshEngine", "MeshRuntime", "compilers_of", "local_prep", "local_shape"]
