"""The ring between the input and the step: a reader thread, a bounded number of batches, order kept.

The reader takes a slot *before* it reads a batch, so that at any time at most `slots` batches are read and not trained.
What goes wrong while batch k is read or prepared is raised where batch k is asked for, after all batches before it.
"""

from __future__ import annotations

import atexit
import collections
import queue
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from recom_jax import compat
from recom_jax.corun.device import Device, Prepared, Ticket
from recom_jax.corun.source import Source
from recom_jax.preprocess.ingest import snapshot

END = object()
OWN = "recom-corun"  # how the names of threads of ours begin
_OPEN: weakref.WeakSet[Ring] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends runs that are open when the process ends: later there are no modules left to do it with."""
    for ring in list(_OPEN):
        ring.__exit__()


class Places:
    """Counts free places. A thread that found none waits until half of them are free.

    To wake it takes the other thread, which trains, tens of microseconds: so that is done seldom.
    """

    def __init__(self, count: int) -> None:
        self._free, self._enough = count, max(1, count // 2)
        self._changed = threading.Condition()
        self._waits = self._closed = False

    def acquire(self) -> None:
        """Takes a place; returns at once when closed."""
        with self._changed:
            if not self._free:
                self._waits = True
                self._changed.wait_for(lambda: self._closed or self._free >= self._enough)
                self._waits = False
            self._free -= 1

    def release(self) -> None:
        with self._changed:
            self._free += 1
            if self._waits and self._free >= self._enough:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Ring:
    """Batches of a `Source`, prepared by a `Device`, in order. `take`, `done`, `trained` are the train loop's, in turn.

    Ctrl-C may come between any two instructions: a batch stays in `_items` until it was trained.

    Use as a context manager: leaving it stops the reader, gives untrained batches back to the source, calls `closed`.
    Threads of the ring's own may leave it as well, as they may happen to collect the garbage of a run that was dropped;
    then another thread does this, as none can wait for itself.
    """

    def __init__(
        self,
        source: Source,
        device: Device,
        slots: int,
        timeout_s: float,
        copy: bool,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._device, self._timeout_s = source, device, timeout_s
        self._copy, self._closed = copy, closed
        self._free = Places(slots)
        self._settings = compat.thread_settings()
        self._items: collections.deque[Any] = collections.deque()
        self._filled: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each item
        self._stop = threading.Event()
        self._lock = threading.Lock()  # held while a batch is submitted
        self._reading = self._left_behind = self.entered = False
        self._refused: tuple[int, Any] | None = None
        self._finished = self._left = False
        self._thread = threading.Thread(target=self._read, name=f"{OWN}-reader", daemon=True)

    def _read(self) -> None:
        try:
            self._settings()
            while True:
                self._free.acquire()
                with self._lock:
                    if self._stop.is_set():
                        return
                    self._reading = True
                raw = next(self._source)
                with self._lock:
                    if self._left_behind:  # the device is another run's by now
                        self._source.put_back(raw)
                        return
                    self._reading = False
                    self._submit(self._source.count(), raw)
        except StopIteration:
            self._put(END)
        except BaseException as why:
            self._put(why)

    def _put(self, item: Any) -> None:
        self._items.append(item)
        self._filled.put(None)

    def _submit(self, number: int, raw: Any) -> None:
        try:
            kept = snapshot(raw) if self._copy else raw
            self._put((number, kept, self._device.submit(kept)))
        except BaseException:
            self._refused = (number, raw)
            raise

    def take(self) -> tuple[int, Prepared] | None:
        """The next batch, or None after the last. Raises what reading or preparing this batch raised."""
        if self._finished:
            return None
        self._filled.get()
        item = self._items[0]
        if item is END:
            self._finished = True
            return None
        if isinstance(item, BaseException):
            self._finished = True
            raise item
        number, _, ticket = item
        try:
            return number, ticket.result()
        except Exception as why:
            why.add_note(f"recom_jax.corun: while batch {number} was prepared")
            raise

    def done(self) -> None:
        """The step has the batch that was taken last: its slot is free."""
        self._free.release()

    def trained(self) -> None:
        """The batch taken last will not be asked for again."""
        self._items.popleft()

    def __enter__(self) -> Ring:
        self.entered = True
        _OPEN.add(self)
        try:
            self._thread.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._left:  # at the process's end, and the run was dropped since
            return
        self._left = True
        _OPEN.discard(self)
        self._stop.set()
        self._free.close()  # a reader that waits for a slot wakes up
        here = threading.get_ident()
        if here == self._thread.ident or here in self._device.threads:
            threading.Thread(target=self._finish, name=f"{OWN}-end", daemon=True).start()
        else:
            self._finish()

    def _finish(self) -> None:
        try:
            if self._thread.ident is not None:
                self._thread.join(self._timeout_s)
        finally:  # Ctrl-C, once more
            try:
                self._give_back()
            finally:
                self._closed()

    def _give_back(self) -> None:
        with self._lock:
            stuck = self._left_behind = self._thread.is_alive() and self._reading
        left: list[tuple[int, Any]] = []
        for item in self._items:
            if isinstance(item, tuple):
                ticket: Ticket = item[2]
                ticket.cancel()
                left.append(item[:2])
        if self._refused is not None:
            left.append(self._refused)
        self._source.give_back(left)
        self._device.close()
        if stuck:
            warnings.warn(
                "recom_jax.corun: the input iterator still reads; its thread is left behind, and what it reads comes "
                "behind what was read before",
                RuntimeWarning,
                stacklevel=4,
            )
