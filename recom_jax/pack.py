"""Host packing: many numpy arrays become one *pack* (docs/program_format.md, "Binding").

Handing a thousand numpy arrays to a jitted function costs JAX tens of milliseconds; handing it one
costs microseconds. `Staging` gathers a batch's leaves into a slot of a ring, `Arena` a model's tables
into one buffer.

JAX on CPU aliases aligned numpy memory instead of copying it, so a slot must not be written while a
call still reads it. Hence the ring's one rule: **a slot is free again only when the array given to JAX,
every view of the slot, and everything made from such a view, are gone.** JAX keeps the array until the
call has finished, and jaxlib lets go of it only when some thread next enters JAX (or the garbage
collector runs); `SlotRing.acquire` provokes that. A server that calls again and again needs two slots,
plus one for each set of views its user still holds.

Memory: a ring costs `ring_bytes(layout, n_slots)`; a slot's pages are touched at its first use, and the
slot given back last is taken first, so idle slots cost address space only. `Staging` makes a ring at a
layout's first use and drops the idle rings used longest ago above `max_bytes`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from recom_jax import _recom
from recom_jax._recom import Layout, Packer, Packing, Slot, SlotRing
from recom_jax.errors import ArgumentError, BatchError, BatchTypeError, BindError, LeaseError

if TYPE_CHECKING:
    from recom_jax.stage import Flights, Target, Token

__all__ = [
    "Arena",
    "Begun",
    "Layout",
    "LeafSpec",
    "Packer",
    "Slot",
    "SlotRing",
    "Staging",
    "layout_of",
    "lease_of",
    "mismatch",
    "ring_bytes",
    "spec_of",
    "unpack",
]

lease_of = _recom.lease_of
_PAGE = 4096
_PACKABLE = frozenset(
    np.dtype(d)
    for d in [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", jnp.bfloat16),
    ]
)


class _Shaped(Protocol):
    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class LeafSpec:
    """One entry of a pack."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: _Shaped) -> LeafSpec:
        """The spec of an array or a ShapeDtypeStruct, as it is (nothing is converted)."""
        return cls(np.dtype(value.dtype), tuple(value.shape))

    @property
    def packable(self) -> bool:
        """Whether a pack can hold it; what can't is passed to JAX as it is."""
        return len(self.shape) <= _recom.PACK_MAX_RANK and self.dtype in _PACKABLE

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def layout_of(specs: Sequence[LeafSpec], names: Sequence[str] | None = None) -> Layout:
    """The layout of a pack with these entries; 0.25 ms per 1,000, so keep it.

    Raises:
      ArgumentError: a spec isn't `packable`, or its size is impossible.
    """
    for i, spec in enumerate(specs):
        if not spec.packable:
            raise ArgumentError(
                f"{_leaf(i, names)}: expected at most {_recom.PACK_MAX_RANK} dims and a bool, integer, "
                f"float16, bfloat16, float32 or float64 dtype of native byte order, was given {spec}"
            )
    try:
        return Layout([(spec.dtype, spec.shape) for spec in specs])
    except ValueError as error:
        raise ArgumentError(f"the leaves can't be packed: {error}") from None


def spec_of(layout: Layout, i: int) -> LeafSpec:
    """Entry `i` of a layout."""
    return LeafSpec(layout.dtype(i), layout.shape(i))


def ring_bytes(layout: Layout, n_slots: int) -> int:
    """What a SlotRing allocates: every slot starts on a page of its own."""
    return n_slots * (-(-(int(layout.total_bytes) + int(_recom.PACK_ALIGN)) // _PAGE) * _PAGE)


def unpack(
    pack_u8: jax.Array, layout: Layout, i: int, part: tuple[int, int] | None = None
) -> jax.Array:
    """Entry `i` of a pack, or of the part of one from byte `part[0]` up to `part[1]`, inside or outside a trace."""
    begin, end = part or (0, layout.total_bytes)
    if pack_u8.dtype != jnp.uint8 or pack_u8.shape != (end - begin,):
        raise ArgumentError(
            f"expected a pack of uint8[{end - begin}], was given {pack_u8.dtype}{list(pack_u8.shape)}"
        )
    dtype, shape, offset = layout.dtype(i), layout.shape(i), layout.offset(i) - begin
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ArgumentError(
            f"entry {i} is {dtype}, which JAX does not have while jax_enable_x64 is off"
        )
    nbytes = layout.entry_bytes(i)
    if nbytes == 0:
        return jnp.zeros(shape, dtype)
    data = lax.slice(pack_u8, (offset,), (offset + nbytes,))
    if dtype == np.bool_:
        return lax.reshape(data, shape) != 0
    if dtype.itemsize > 1:
        data = lax.reshape(data, (nbytes // dtype.itemsize, dtype.itemsize))
    return lax.reshape(lax.bitcast_convert_type(data, dtype), shape)


def is_words(layout: Layout, i: int) -> bool:
    """Whether entry `i` can be read from the pack's 32-bit words."""
    whole = layout.offset(i) % 4 == 0 and layout.total_bytes % 4 == 0
    return bool(whole and layout.dtype(i).itemsize == 4 and layout.entry_bytes(i))


def unpack_words(pack_u32: jax.Array, layout: Layout, i: int) -> jax.Array:
    """Entry `i` of a pack's 32-bit words: a slice, where XLA makes each number of four bytes in `unpack`."""
    begin, size = layout.offset(i) // 4, layout.entry_bytes(i) // 4
    data = lax.slice(pack_u32, (begin,), (begin + size,))
    return lax.reshape(lax.bitcast_convert_type(data, layout.dtype(i)), layout.shape(i))


def mismatch(
    layout: Layout, i: int, leaf: object, names: Sequence[str] | None = None
) -> BatchError:
    """The error that says why `leaf` was refused for entry `i`: what was expected, what was given."""
    want = spec_of(layout, i)
    kind: type[BatchError] = BatchTypeError
    if isinstance(leaf, np.ndarray):
        got = LeafSpec.of(leaf)
        order = "" if leaf.dtype.isnative else ", byte-swapped"
        given = f"{type(leaf).__name__} {got}{order}"
        if type(leaf) is np.ndarray and leaf.dtype.isnative and got.shape != want.shape:
            kind = BatchError
    elif hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        given = f"{type(leaf).__name__} {leaf.dtype}{list(leaf.shape)}"
    else:
        given = type(leaf).__name__
    return kind(
        f"{_leaf(i, names)}: expected a numpy.ndarray {want} (no subclass, native byte order), "
        f"was given {given}"
    )


def _leaf(i: int, names: Sequence[str] | None) -> str:
    return f"leaf {i} ({names[i]})" if names is not None and i < len(names) else f"leaf {i}"


class Staging:
    """Rings of staging slots, one per layout. Thread-safe.

    Args:
      n_slots: slots per ring.
      max_bytes: bounds the rings kept while idle. A ring in use is never dropped, so many batch sizes in
        flight at once may exceed it for a while.
      timeout_s: how long to wait for a slot before `LeaseError`.
    """

    def __init__(
        self, n_slots: int = 8, max_bytes: int = 256 << 20, timeout_s: float = 60.0
    ) -> None:
        self.n_slots = n_slots
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self._rings: OrderedDict[Layout, tuple[SlotRing, tuple[Packer, Packer]]] = OrderedDict()
        # Reentrant: allocation may run the garbage collector, whose finalizers may come back here.
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes of the rings held (not of dropped ones that an array or a view keeps alive)."""
        with self._lock:
            return sum(ring.nbytes for ring, _ in self._rings.values())

    @property
    def n_rings(self) -> int:
        return len(self._rings)

    def ring(self, layout: Layout) -> SlotRing:
        """The layout's ring, made at its first use."""
        return self._get(layout)[0]

    def acquire(
        self, layout: Layout, timeout_s: float | None = None, flights: Flights | None = None
    ) -> Slot:
        """Leases a slot; waits while none is free, for `timeout_s` (None: the staging's own)."""
        if flights is not None:
            flights.sweep()
        ring = self._get(layout)[0]
        limit = self.timeout_s if timeout_s is None else timeout_s
        slot = ring.try_acquire()
        if slot is None and flights is not None:
            slot = self._wait(ring, limit, flights)
        if slot is not None:
            return slot
        try:
            return ring.acquire(limit) if flights is None else ring.acquire(0.0, waited_s=limit)
        except TimeoutError as error:
            raise LeaseError(str(error)) from None

    def _wait(self, ring: SlotRing, limit: float, flights: Flights) -> Slot | None:
        """A slot, once calls on a GPU have ended: nobody is told of that, so look again and again."""
        begun, full_collection, step = time.monotonic(), 0.1, 50e-6
        slot: Slot | None = None
        while slot is None and (waited := time.monotonic() - begun) < limit:
            if waited > full_collection:  # a traceback may hold a slot, and be held by itself
                full_collection = waited + 2.0
                _recom.collect_all()
            if not flights.wait():
                time.sleep(step)  # other threads are about to call, or to drop their leases
                step = min(2 * step, 2e-3)
            slot = ring.try_acquire()
        return slot

    def try_pack(
        self,
        layout: Layout,
        leaves: Sequence[object],
        timeout_s: float | None = None,
        flights: Flights | None = None,
        threads: int = 2,
    ) -> tuple[Slot, np.ndarray[Any, Any]] | int:
        """Gathers `leaves` into a slot and consumes it.

        Args:
          flights: calls that hold slots until they are swept (on a GPU).
          threads: how many may copy large batches.

        Returns:
          The slot and its bytes, which hold it; or, if a leaf doesn't fit its entry, the index of the first
          such leaf (then no slot is consumed: take the slow path, or raise `mismatch(...)`).
        """
        if flights is not None:
            flights.sweep()
        ring, packers = self._get(layout)
        packer = packers[cast(Any, jax.config).jax_enable_x64]
        if not isinstance(leaves, list | tuple):
            leaves = list(leaves)
        found = packer.pack(ring, leaves, threads)
        if found is not None:
            return cast("tuple[Slot, np.ndarray[Any, Any]] | int", found)
        bad: int = packer.matches(leaves)  # so that bad leaves don't wait for a slot first
        if bad >= 0:
            return bad
        slot = self.acquire(layout, timeout_s, flights)
        bad = packer.pack_into(slot, leaves, threads)
        if bad >= 0:
            slot.release()
            return bad
        return slot, slot.array()

    def begin(
        self, layout: Layout, leaves: Sequence[object], target: Target, spin_us: int
    ) -> Begun | int:
        """As `try_pack`, but returns while a large batch is still being copied.

        A call may be handed the slot at once: its handler waits for the bytes it copies (`stage`). `Begun.join` must
        be called before whoever owns the leaves may write them again.

        Args:
          spin_us: how long threads that helped look out for the next batch.

        Returns:
          What was begun; or the index of the first leaf that doesn't fit (then nothing was, and no slot is consumed).
        """
        target.flights.sweep()
        ring, packers = self._get(layout)
        packer = packers[cast(Any, jax.config).jax_enable_x64]
        slot = ring.try_acquire()
        if slot is None:
            bad: int = packer.matches(leaves)  # so that bad leaves don't wait for a slot first
            if bad >= 0:
                return bad
            slot = self.acquire(layout, None, target.flights)
        token = target.token(slot)
        found = packer.begin(slot, leaves, target.threads, token.address, spin_us)
        if isinstance(found, int):
            slot.release()
            return found
        return Begun(token, *found)

    def _get(self, layout: Layout) -> tuple[SlotRing, tuple[Packer, Packer]]:
        with self._lock:
            found = self._rings.get(layout)
            if found is None:
                self._make_room(ring_bytes(layout, self.n_slots))
                packers = Packer(layout, narrow=True), Packer(layout, narrow=False)
                found = self._rings[layout] = (SlotRing(layout, self.n_slots), packers)
            else:
                self._rings.move_to_end(layout)
            return found

    def _make_room(self, nbytes: int) -> None:
        total = self.nbytes + nbytes
        for layout, (ring, _) in list(self._rings.items()):
            if total <= self.max_bytes:
                return
            if ring.n_free == ring.n_slots:
                del self._rings[layout]
                total -= ring.nbytes


@dataclass(slots=True)
class Begun:
    """A batch on its way into a slot.

    Attributes:
      token: what the call is handed.
      held: what keeps the slot: its bytes, which may not all be there yet.
      packing: None once all are.
    """

    token: Token
    held: Any
    packing: Packing | None

    def join(self) -> None:
        """Waits until every leaf was read, and the slot is on its way to the device.

        Raises:
          RuntimeError: a copy failed; a call that was handed the slot fails, too.
        """
        packing, self.packing = self.packing, None
        if packing is not None:
            packing.join()


@dataclass(frozen=True, eq=False)
class Arena:
    """A model's tables as one read-only pack; JAX on CPU aliases it, so it exists once."""

    layout: Layout
    data: np.ndarray[Any, Any]

    @classmethod
    def build(
        cls,
        arrays: Sequence[np.ndarray[Any, Any]],
        specs: Sequence[LeafSpec] | None = None,
        names: Sequence[str] | None = None,
    ) -> Arena:
        """Copies `arrays`; host memory needed: the arena itself.

        Args:
          arrays: plain numpy arrays, contiguous or not.
          specs: what each entry shall be; 64-bit arrays are converted to 32-bit specs as jit converts
            them with x64 off. None: as they are.
          names: what messages call the arrays.
        """
        for i, array in enumerate(arrays):
            if type(array) is not np.ndarray:
                raise BindError(
                    f"{_leaf(i, names)}: expected a numpy.ndarray, was given {type(array).__name__}"
                )
        layout = layout_of([LeafSpec.of(a) for a in arrays] if specs is None else specs, names)
        if len(layout) != len(arrays):
            raise BindError(f"expected {len(layout)} arrays, was given {len(arrays)}")
        bad = Packer(layout).matches(list(arrays))
        if bad >= 0:
            raise BindError(str(mismatch(layout, bad, arrays[bad], names)))
        return cls(layout, _recom.build_arena(list(arrays), layout))

    @property
    def nbytes(self) -> int:
        return int(self.layout.total_bytes)

    def view(self, i: int) -> np.ndarray[Any, Any]:
        """Entry `i`, read-only, without a copy."""
        offset, dtype, shape = self.layout.offset(i), self.layout.dtype(i), self.layout.shape(i)
        return np.ndarray(shape, dtype, buffer=self.data.data, offset=offset)
