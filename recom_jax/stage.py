"""Staging on a GPU: a call is handed a slot's token and copies the slot itself.

JAX copies numpy arrays to a GPU from pageable memory, in its own time. Here slots are page-locked, and the jitted
function's first equation is the FFI target `recom_stage_v2`: it finds a slot by the device address of its *token*, an
array as large as the slot and made once a slot, where the slot's bytes are or are on their way, and has XLA's stream
wait for them. Fused calls behind it read the token itself. What XLA reads must be an array like any other, so it is
copied out of the token (`part`): XLA may move a read of an operand ahead of the wait.

JAX does not know that a call reads a slot, so `Flights` holds on to it: each call also returns a tiny array `done`,
and its slot is let go once that is ready.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from recom_jax import _recom, ffi
from recom_jax.errors import RecomError
from recom_jax.lowering import warn_once

_MOST_THREADS = 8
PIECE_BYTES = 1 << 20
SPIN_US = 1000
LOOK_US = 2000  # so long a thread that waits for results leaves the interpreter
STIRRED = 3  # threads that a lease wakes: a processor that sleeps is slow to start the call
_SPINNING = 8  # processors
_emulated = False  # tests: stage on the CPU as on a GPU


class Flights:
    """Calls on one device that may still read their slots, the oldest first. Thread-safe.

    A call that is looked at is taken out meanwhile, so that no two threads judge the same one.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Any, Any]] = deque()
        self._lost: list[Any] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, done: Any, held: Any) -> None:
        """Keeps `held` until `done`, an array nobody else has, is ready."""
        self._calls.append((done, held))

    def add_failed(self, token: Any, held: Any) -> None:
        """Keeps `held` until what the device was given before now has run: a failed call may have begun to copy."""
        try:
            self.add(_after(token), held)
        except (
            Exception
        ):  # the device takes no work any more: nobody can tell whether it still reads
            self._lost.append(held)

    def sweep(self) -> None:
        """Lets go of what has ended, without waiting."""
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread was quicker
                return
            if not _has_ended(call[0]):
                self._calls.appendleft(call)
                return
            del call

    def wait(self) -> bool:
        """Waits for the oldest call; False if there is none."""
        try:
            done, held = self._calls.popleft()
        except IndexError:
            return False
        with contextlib.suppress(Exception):  # as in _has_ended
            done.block_until_ready()
        del held
        return True


def _has_ended(done: Any) -> bool:
    try:
        return bool(done.is_ready())
    except Exception:  # it failed; the caller learns of it from the call's own result
        return True


class Token(NamedTuple):
    """A slot's buffer on a device, where that is, and where calls that are handed it deliver results to."""

    array: Any
    address: int
    delivery: Any


class Target:
    """A device whose calls are handed tokens. Made by `target_of`, once for each device and commitment.

    Attributes:
      committed: whether results are committed to the device, as they are where bound arrays are.
      ordinal: CUDA's number of the device; -1: emulated.
      threads: how many may pack a batch. The CPU has little else to do, and the device waits for it.
      spin_us: how long they look out for the next batch before they sleep, where `Options.spin_us` does not say.
    """

    def __init__(self, device: Any, committed: bool, flights: Flights) -> None:
        self.device, self.committed, self.flights = device, committed, flights
        self.ordinal = -1 if device.platform == "cpu" else int(device.local_hardware_id)
        processors = len(os.sched_getaffinity(0))
        self.threads = min(processors, _MOST_THREADS)
        self.spin_us = SPIN_US if processors >= _SPINNING and self.ordinal >= 0 else 0

    def token(self, slot: Any) -> Token:
        """The array that stands for a slot of any ring."""
        found: Token | None = slot.tokens.get((slot.index, self))
        if found is None:
            with jax.default_device(self.device):
                place = self.device if self.committed else None
                array = jax.device_put(np.zeros(slot.layout.total_bytes, np.uint8), place)
                # Ready: nothing of XLA's may write it after the first batch was copied there.
                address = jax.block_until_ready(array).unsafe_buffer_pointer()
            why = slot.register_token(address, self.ordinal, uploads=True)
            if why:
                warn_once(
                    f"recom_jax: staging memory is not page-locked, copies to the GPU are slower: {why}"
                )
            found = Token(array, address, _recom.delivery(address, slot.layout.total_bytes))
            slot.tokens[slot.index, self] = found
        return found

    def __repr__(self) -> str:
        return f"<staging on {self.device}>"


def copy_slot(token: Any, nbytes: int) -> tuple[Any, Any]:
    """In a jitted function: (a copy of the slot that the token stands for, `done`)."""
    return _wish(token, nbytes, (0, nbytes), whole=False)


def hand_slot(token: Any, nbytes: int, part: tuple[int, int]) -> tuple[Any, Any]:
    """In a jitted function: (a copy of the slot's bytes from `part[0]` up to `part[1]`, `done`).

    Whatever has `done` as an operand may read the token itself.
    """
    return _wish(token, nbytes, part, whole=True)


def _wish(token: Any, nbytes: int, part: tuple[int, int], whole: bool) -> tuple[Any, Any]:
    begin, end = part
    kinds = [jax.ShapeDtypeStruct(shape, np.uint8) for shape in ((end - begin,), ())]
    if begin == end:
        del kinds[0]
    found = jax.ffi.ffi_call(ffi.STAGE, kinds)(
        token, nbytes=np.int64(nbytes), begin=np.int64(begin), whole=np.int64(whole)
    )
    return (jax.numpy.zeros(0, np.uint8), found[0]) if begin == end else (found[0], found[1])


def deliver(token: Any, nbytes: int, done: Any, results: Sequence[Any]) -> Any:
    """In a jitted function, at its end: copies results to host memory of the slot that the token stands for.

    Only if the call was begun so: `Token.delivery`. Otherwise nothing happens.

    Args:
      nbytes: of the slot; done: what `copy_slot` or `hand_slot` gave.

    Returns:
      `done` in its place: ready once the call has ended.
    """
    kind = jax.ShapeDtypeStruct((), np.uint8)
    # Not marked as having a side effect: JAX starts such calls from Python.
    return jax.ffi.ffi_call(ffi.DELIVER, kind)(token, done, *results, nbytes=np.int64(nbytes))


def delivered_bytes(kinds: Sequence[Any]) -> int:
    """Of results one behind the other, each at a multiple of 64."""
    end = 0
    for k in kinds:
        end = -(-end // 64) * 64 + math.prod(k.shape) * k.dtype.itemsize
    return end


def await_results(delivery: Any, ended: Any, spin_us: int) -> None:
    """Waits for results of a call that delivers them.

    Args:
      ended: what the call returned; spin_us: how long the thread looks without sleeping.

    Raises:
      Whatever the call failed with.
    """
    while not delivery.wait(LOOK_US, spin_us):  # in between, signals are handled: Ctrl-C ends it
        if _has_ended(ended):
            ended.block_until_ready()
            if not delivery.copied:
                raise RecomError("a call ended without its results: please report this")


def home_of(leaves: Sequence[Any]) -> tuple[Any, bool]:
    """(the one device that these arrays are on, whether any is committed to it).

    The device is None if there are several, or if nothing is committed: then JAX's default device counts at each
    call.
    """
    committed = [x for x in leaves if not isinstance(x, jax.core.Tracer) and x.committed]
    devices = {d for x in committed for d in x.sharding.device_set}
    return (devices.pop() if len(devices) == 1 else None), bool(committed)


def target_of(home: tuple[Any, bool]) -> Target | None:
    """How batches get to the device that calls will run on; None: as numpy arrays, which is best on a CPU."""
    device = _device_of(home)
    return _target(device, home[1]) if device is not None and is_staged(device) else None


def reads_host(home: tuple[Any, bool]) -> bool:
    """Whether calls read a numpy array where it is, so that handing it over twice costs nothing: on one CPU device."""
    device = _device_of(home)
    return device is not None and device.platform == "cpu"


def _device_of(home: tuple[Any, bool]) -> Any:
    """The device that calls will run on; None if there are several."""
    device, committed = home
    if device is None and not committed:
        device = getattr(jax.config, "jax_default_device")  # noqa: B009 - mypy does not know it
        if device is None or isinstance(device, str):
            device = jax.local_devices(backend=device)[0]
    return device


def is_staged(device: Any) -> bool:
    if device.platform == "cpu":
        return _emulated
    return device.platform in ("gpu", "cuda") and "cuda" in device.client.platform_version.lower()


@functools.cache
def _target(device: Any, committed: bool) -> Target:
    return Target(device, committed, _flights(device))


@functools.cache
def _flights(device: Any) -> Flights:
    """One for all servers: what a dropped server had in flight is kept until it has ended, too."""
    flights = Flights()
    atexit.register(_drain, flights)  # before JAX's own, which takes the device away
    return flights


def _drain(flights: Flights) -> None:
    while flights.wait():
        pass


@functools.cache
def _successor() -> Any:
    return jax.jit(lambda token: token[:1] + np.uint8(1))


def _after(token: Any) -> Any:
    return _successor()(token)
