"""A compiled preprocessing program on a device: slots, tokens, and the step that reads its batch where it was made."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from recom_jax import compat, ffi
from recom_jax.cache import Cache
from recom_jax.corun import calls
from recom_jax.corun.cost import BLOCKS
from recom_jax.corun.kernels import PrepKernels, Result
from recom_jax.errors import PipelineError
from recom_jax.options import Options as CompilerOptions
from recom_jax.preprocess.ingest import ladder
from recom_jax.preprocess.values import Jagged

PLAN, EAGER, SEQUENTIAL, ONCE = 0, 1, 2, 3
_TOKEN_BYTES = 16
_MOST_THREADS = 8
_BYTES_A_THREAD = 4 << 20
_CHECKED = 512  # steps
_DLPACK_CODE = {"i": 0, "u": 1, "f": 2, "b": 6}
_DLPACK_DEVICE = {"cpu": 1, "gpu": 2, "cuda": 2}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel of a schedule.

    Attributes:
      name: the plan's; stage: which stage's beginning starts it, counted from 0.
      share: of the device; pieces: (unit, first row, last row), rows in parts of the batch.
    """

    name: str
    stage: int
    share: float
    pieces: tuple[tuple[int, float, float], ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What runs when.

    Attributes:
      mode: PLAN: kernels start with their stages; EAGER: as soon as a raw batch is there, on a stream of ours;
        SEQUENTIAL: in front of the step, on XLA's stream; ONCE: the same for the first batch in each place, and no
        kernels for later ones, which are taken to be that batch: to time steps with nothing beside them.
      stages: names of the markers that end them, in order; timed: time them all, by markers that tell the host (each
        costs the step something; those of other schedules record an event, as parts of CUDA graphs).
    """

    mode: int
    launches: tuple[Launch, ...]
    stages: tuple[str, ...] = ()
    timed: bool = False


def whole(kernels: PrepKernels, mode: int, share: float = 1.0) -> Schedule:
    """Everything in one kernel."""
    pieces = tuple((k, 0.0, 1.0) for k in range(len(kernels.units)))
    return Schedule(mode, (Launch("k0", 0, share, pieces),) if pieces else ())


def unfused(kernels: PrepKernels, mode: int) -> Schedule:
    """A kernel for each part of a result."""
    units = range(len(kernels.units))
    return Schedule(mode, tuple(Launch(f"u{k}", 0, 1.0, ((k, 0.0, 1.0),)) for k in units))


class Make(Protocol):
    """Makes the native runtime of a program: `CorunRuntime` on a GPU, its simulation in tests."""

    def __call__(self, program: PrepKernels, /, **plan: Any) -> Any: ...


def on_cuda(device: Any) -> Make:
    """For a CUDA device of JAX."""

    def make(program: PrepKernels, /, **plan: Any) -> Any:
        ordinal = int(device.local_hardware_id)
        return ffi.extension().CorunRuntime(device=ordinal, image=image_of(program.source), **plan)

    return make


def processors_of(device: Any) -> int:
    """Multiprocessors of a CUDA device."""
    return int(ffi.extension().cuda_info()["devices"][int(device.local_hardware_id)]["sms"])


def image_of(source: str) -> bytes:
    """PTX, or machine code where the driver is older than the compiler."""
    from recom_jax.cuda import kernel, nvrtc

    arch = kernel.native_arch()
    cache = Cache.of(CompilerOptions())
    kind, key = ("cubin" if arch else "ptx"), nvrtc.key(source, 32, arch)
    image = cache.get(kind, key)
    if image is None:
        image = nvrtc.sass(source, arch, 32)[0] if arch else nvrtc.ptx(source, 32).text.encode()
        cache.put(kind, key, image)
    return image


class PrepRuntime:
    """One program for one set of shapes, with a schedule, on one device.

    Args:
      kernels: the program; schedule: see there; slots: batches in the ring.
      make: what makes the native part; processors: multiprocessors of the device.
      profile: time each kernel.
      ahead: steps that may be dispatched and unfinished.
    """

    def __init__(
        self,
        kernels: PrepKernels,
        schedule: Schedule,
        slots: int,
        make: Make,
        processors: int,
        profile: bool = False,
        ahead: int = 1,
    ) -> None:
        self.kernels, self.schedule = kernels, schedule
        tiles = [kernels.tiles(x.pieces) for x in schedule.launches]
        planned, at = [], 0
        for launch, mine in zip(schedule.launches, tiles, strict=True):
            if len(mine):
                blocks = max(1, round(launch.share * processors * BLOCKS))
                planned.append((at, len(mine), blocks, launch.stage))
            at += len(mine)
        self.launched = [x for x, mine in zip(schedule.launches, tiles, strict=True) if len(mine)]
        self.native = make(
            kernels,
            slots=slots,
            ahead=ahead,
            in_bytes=kernels.in_bytes,
            results=[(r.offset, r.nbytes) for r in kernels.results],
            tiles=b"".join(t.tobytes() for t in tiles),
            words=kernels.words,
            consts=kernels.consts,
            kernels=planned,
            stages=list(schedule.stages),
            mode=schedule.mode,
            profile=profile,
            in_graphs=not schedule.timed,
        )
        self.marks, self.in_graphs = marks_of(schedule), not schedule.timed
        self._places = ffi.extension().CorunPlaces(
            [
                (x.offset, x.nbytes, np.dtype(x.dtype).kind, np.dtype(x.dtype).itemsize)
                for x in kernels.leaves
            ]
        )
        self._slots, self.ahead, self._begun = slots, ahead, 0
        self._tokens: dict[tuple[Any, bool], list[Any]] = {}
        self._views: dict[tuple[int, Any, bool], list[Any]] = {}
        self._lock = threading.Lock()
        # Each more that is awake takes time from the thread that trains.
        wanted = max(1, kernels.in_bytes // _BYTES_A_THREAD)
        self._threads = min(len(os.sched_getaffinity(0)), wanted, _MOST_THREADS)

    def pack(self, leaves: Sequence[Any]) -> int:
        """Copies the leaves of columns into a slot and starts their way to the device; the slot.

        Waits for a slot. Lists may be shorter than the program's capacity.
        """
        leaves = list(leaves)
        slot: int | None = self.native.stage(leaves, self._places, self._threads)
        if slot is None:  # other kinds of arrays: made what they should be
            leaves = [
                np.ascontiguousarray(np.asarray(x), leaf.dtype)
                for leaf, x in zip(self.kernels.leaves, leaves, strict=True)
            ]
            slot = self.native.stage(leaves, self._places, self._threads)
        if slot is None:
            raise PipelineError("Pipeline: a batch changed while it was packed")
        return slot

    def token(self, slot: int, device: Any, committed: bool) -> Any:
        """The array that stands for a slot: an operand of the step."""
        with self._lock:
            found = self._tokens.get((device, committed))
            if found is None:
                found = self._tokens[device, committed] = []
                with jax.default_device(device):
                    for k in range(self._slots):
                        place = device if committed else None
                        made = jax.device_put(np.zeros(_TOKEN_BYTES, np.uint8), place)
                        self.native.register_token(made.unsafe_buffer_pointer(), k)
                        found.append(made)
            return found[slot]

    def views(self, slot: int, device: Any, committed: bool) -> list[Any]:
        """Leaves of the prepared batch in a slot, where the kernels write them: to be read behind `begin` alone."""
        place = self.native.place_of(slot)
        found = self._views.get((place, device, committed))
        if found is None:
            made = [self._view(place, k, r, device) for k, r in enumerate(self.kernels.results)]
            found = made if committed else [compat.uncommitted(x) for x in made]
            self._views[place, device, committed] = found
        return found

    def _view(self, place: int, k: int, result: Result, device: Any) -> Any:
        if not result.nbytes:
            return jax.device_put(np.zeros(result.shape, result.dtype), device)
        dtype = np.dtype(result.dtype)
        kind = (_DLPACK_CODE[dtype.kind], 8 * dtype.itemsize)
        where = (_DLPACK_DEVICE[device.platform], int(device.local_hardware_id or 0))
        capsule = self.native.view(place, k, list(result.shape), kind, where)
        return jax.dlpack.from_dlpack(_Exported(where, capsule))

    def begin(self, slot: int, device: Any, committed: bool) -> None:
        """A step will be dispatched with the batch in this slot: XLA's stream waits for it.

        On which stream that is, a program of XLA's tells: at first, and now and then again.
        """
        if self._begun % _CHECKED == 0:
            jax.block_until_ready(_stream(self.token(slot, device, committed)))
        self._begun += 1
        self.native.begin(slot)

    def dispatched(self) -> None:
        """The step was handed to XLA: what starts with its later stages may wait for its markers."""
        self.native.dispatched()

    def abandon(self, slot: int) -> None:
        """Gives a batch up that no step took."""
        self.native.abandon(slot)

    @functools.cached_property
    def key(self) -> str:
        """What a compiled step depends on."""
        return repr((self.kernels.out_tree, self.kernels.results, self.marks, self.in_graphs))

    def batch_like(self) -> Any:
        """Shapes of the prepared batch."""
        return batch_like(self.kernels)

    def batch(self, token: Any) -> Any:
        """In a jitted function: the prepared batch in the slot that the token stands for."""
        return take_batch(self.kernels, token)

    def close(self) -> None:
        """Waits for what runs, and lets go of the slots."""
        self.native.close()


@jax.jit
def _stream(token: Any) -> Any:
    return calls.stream(token)


@dataclasses.dataclass(frozen=True)
class _Exported:
    """A DLPack capsule, as `jax.dlpack` wants it."""

    where: tuple[int, int]
    capsule: Any

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where


def marks_of(schedule: Schedule) -> frozenset[str]:
    """The markers at which kernels start; all of them where stages are timed."""
    ends = schedule.stages
    if schedule.timed:
        return frozenset(ends)
    if schedule.mode != PLAN:
        return frozenset()
    return frozenset(ends[x.stage - 1] for x in schedule.launches if 0 < x.stage <= len(ends))


def batch_like(kernels: PrepKernels) -> Any:
    """Shapes of the prepared batch."""
    kinds = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in kernels.results]
    return jax.tree.unflatten(kernels.out_tree, kinds)


def take_batch(kernels: PrepKernels, token: Any) -> Any:
    """In a jitted function: the prepared batch in the slot that the token stands for."""
    return jax.tree.unflatten(kernels.out_tree, calls.take(token, kernels.results))


# ---- shapes --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Shapes:
    """What columns a program takes.

    Attributes:
      tree: their structure; kinds: (dtype, shape) of each leaf; lists: whether a leaf holds the values of lists, which
        may be fewer.
    """

    tree: Any
    kinds: tuple[tuple[Any, tuple[int, ...]], ...]
    lists: tuple[bool, ...]

    @classmethod
    def of(cls, like: Any) -> Shapes:
        leaves, tree = jax.tree.flatten(like)
        lists: list[bool] = []
        for name in sorted(like):  # as dicts are flattened
            x = like[name]
            inner = len(jax.tree.leaves(x.values)) if isinstance(x, Jagged) else 0
            lists += [k < inner for k in range(len(jax.tree.leaves(x)))]
        return cls(tree, tuple((np.dtype(a.dtype), tuple(a.shape)) for a in leaves), tuple(lists))

    def fit(self, leaves: Sequence[Any], tree: Any) -> bool:
        """Whether columns of these leaves are taken."""
        if tree != self.tree:
            return False
        for a, (dtype, shape), lists in zip(leaves, self.kinds, self.lists, strict=True):
            if a.dtype != dtype and jax.dtypes.canonicalize_dtype(a.dtype) != dtype:
                return False
            if a.shape != shape and not (
                lists and a.shape[1:] == shape[1:] and a.shape[0] <= shape[0]
            ):
                return False
        return True

    def joined(self, like: Any) -> Any:
        """Shapes of columns with lists that are as long as these where these are longer; the same shapes if they
        differ from these in more than the lengths of lists."""
        leaves, tree = jax.tree.flatten(like)
        if tree != self.tree:
            return like
        made = []
        for x, (dtype, shape), lists in zip(leaves, self.kinds, self.lists, strict=True):
            cut = 1 if lists else 0
            if x.dtype != dtype or x.shape[cut:] != shape[cut:]:
                return like
            made.append(jax.ShapeDtypeStruct(max(x.shape, shape), dtype))
        return jax.tree.unflatten(tree, made)


def capacities_of(raw: Any) -> dict[str, int]:
    """The capacity of each list column."""
    return {name: x.capacity for name, x in raw.items() if isinstance(x, Jagged)}


def like_with(raw: Any, capacities: dict[str, int]) -> Any:
    """Shapes and dtypes of columns whose lists have these capacities."""

    def kind(a: Any, n: int | None = None) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(a).dtype)
        shape = np.shape(a) if n is None else (n, *np.shape(a)[1:])
        return jax.ShapeDtypeStruct(shape, dtype)

    made = {}
    for name, x in raw.items():
        own = jax.tree.map(kind, x)
        if isinstance(x, Jagged):
            n = capacities[name]
            own = own.replace(jax.tree.map(lambda a, n=n: kind(a, n), x.values))
        made[name] = own
    return made


def roomy(capacities: dict[str, int]) -> dict[str, int]:
    """Capacities with an eighth to spare, so that the next batches fit as well."""
    return {name: ladder(n + n // 8, 64) for name, n in capacities.items()}


def ring_bytes(kernels: PrepKernels, slots: int, ahead: int = 1) -> tuple[int, int]:
    """(page-locked host memory, device memory) of a ring, in bytes: known before anything is allocated."""
    own = len(kernels.words) + len(kernels.consts)
    device = slots * kernels.in_bytes + (slots + ahead) * kernels.out_bytes
    return slots * kernels.in_bytes, device + own


__all__ = [
    "EAGER",
    "ONCE",
    "PLAN",
    "SEQUENTIAL",
    "Launch",
    "Make",
    "PrepRuntime",
    "Schedule",
    "Shapes",
    "capacities_of",
    "like_with",
    "on_cuda",
    "processors_of",
    "ring_bytes",
    "roomy",
    "take_batch",
    "unfused",
    "whole",
]  # fmt: skip
