"""What runs preprocessing beside the step: one small interface, and its CPU form, a pool of threads.

The pipeline knows this interface alone. The form for CUDA is in `stream.py`: a stream of its own, a ring in device
memory, kernels started by events at the step's stage boundaries.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax

from recom_jax import compat


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared batch and what it cost.

    Attributes:
      batch: a pytree of device arrays, finished.
      ingest_s: seconds to make columns of the raw batch; prep_s: seconds of the preprocessing program.
    """

    batch: Any
    ingest_s: float
    prep_s: float


class Ticket(Protocol):
    """A batch on its way."""

    def result(self) -> Prepared:
        """Waits for the batch; raises what preparing it raised."""

    def cancel(self) -> bool:
        """Gives it up, if it has not begun."""


class Device(Protocol):
    """Runs preprocessing beside the train step. Calls come from one thread.

    Attributes:
      threads: identifiers of threads of its own.
    """

    threads: set[int]

    def submit(self, raw: Any) -> Ticket:
        """Begins to prepare a raw batch. The caller bounds how many are in flight."""

    def step(self, state: Any, batch: Any) -> Any:
        """Dispatches the step on a batch that `submit` prepared: (state, metrics)."""

    def close(self) -> None:
        """Waits for what runs, gives up what doesn't, and frees everything. No call comes after it."""


class Threads:
    """The CPU form: a pool of threads, each preparing a batch at a time.

    Args:
      ingest: makes columns of a raw batch, on the host.
      prep: the compiled program, from columns to the step's batch.
      place: puts the batch where the step wants it.
      step: the user's.
      workers: how many threads.
    """

    def __init__(
        self,
        ingest: Callable[[Any], Any],
        prep: Callable[[Any], Any],
        place: Callable[[Any], Any],
        step: Callable[[Any, Any], Any],
        workers: int,
    ) -> None:
        self._ingest, self._prep, self._place, self._step = ingest, prep, place, step
        self.threads: set[int] = set()
        self._settings = compat.thread_settings()
        self._pool = concurrent.futures.ThreadPoolExecutor(
            workers, "recom-corun-prep", initializer=self._begin
        )

    def _begin(self) -> None:
        self.threads.add(threading.get_ident())
        self._settings()

    def submit(self, raw: Any) -> Ticket:
        return self._pool.submit(self._run, raw)

    def _run(self, raw: Any) -> Prepared:
        begun = time.perf_counter()
        columns = self._ingest(raw)
        ready = time.perf_counter()
        batch = jax.block_until_ready(self._place(self._prep(columns)))
        return Prepared(batch, ready - begun, time.perf_counter() - ready)

    def step(self, state: Any, batch: Any) -> Any:
        return self._step(state, batch)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
