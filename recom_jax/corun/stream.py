"""The CUDA form of `device.Device`: raw batches go through page-locked slots to a ring in device memory, kernels on a
stream of our own prepare them, and the step takes its batch from a slot. The host waits for nothing but its own
memory.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from recom_jax.corun import runtime as rt
from recom_jax.corun.device import Prepared, Ticket
from recom_jax.corun.kernels import PrepKernels, compile_prep
from recom_jax.corun.steps import Steps, wait_for
from recom_jax.corun.symbols import Unsupported
from recom_jax.errors import CudaError, PipelineError
from recom_jax.lowering import warn_once

_MOST = 8  # programs kept: one for each set of shapes


@dataclasses.dataclass(frozen=True)
class Staged:
    """A batch in a slot, on its way or there: what `Prepared.batch` is here."""

    program: Program
    slot: Any


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds, one for each batch that was looked at.

    Attributes:
      kernels: (name, times); stages: (marker, time from when the step has its batch to it); steps: from there to the
        step's end; periods: from there to when the next step has its batch.
      leads: (name, time from the kernel's beginning to when its batch's step has it).
    """

    kernels: tuple[tuple[str, tuple[float, ...]], ...]
    stages: tuple[tuple[str, tuple[float, ...]], ...]
    steps: tuple[float, ...]
    periods: tuple[float, ...]
    leads: tuple[tuple[str, tuple[float, ...]], ...] = ()


class Program:
    """Kernels and ring for one set of shapes."""

    def __init__(self, shapes: rt.Shapes, runtime: Any) -> None:
        self.shapes, self.runtime = shapes, runtime
        self.take = jax.jit(runtime.batch)


class Compiler:
    """A preprocessing function's kernels by shapes: compiled once for all engines of a pipeline."""

    def __init__(self, prep: Callable[[Any], Any]) -> None:
        self._prep = prep
        self._made: dict[Any, PrepKernels] = {}
        self._lock = threading.Lock()

    def __call__(self, like: Any) -> PrepKernels:
        key = str(jax.tree.flatten(like))
        with self._lock:
            if key not in self._made:
                while len(self._made) >= _MOST:
                    self._made.pop(next(iter(self._made)))
                self._made[key] = compile_prep(self._prep, like)
            return self._made[key]


class Engine:
    """Programs for the shapes that come, kept over the runs of a pipeline.

    Args:
      compiler: makes kernels of the user's preprocessing; steps: the user's step.
      make: what makes native runtimes; device: where; processors: its multiprocessors.
      slots: batches in a ring.
      schedule: kernels -> schedule; called once for each program, and again after `reschedule`.
      profile: time each kernel.
      ahead: steps that may be dispatched and unfinished.
    """

    def __init__(
        self,
        compiler: Compiler,
        steps: Steps,
        make: rt.Make,
        device: Any,
        processors: int,
        slots: int,
        schedule: Callable[[PrepKernels], rt.Schedule],
        profile: bool = False,
        ahead: int = 1,
    ) -> None:
        self._compiler, self.steps, self._ahead = compiler, steps, ahead
        self._make, self.device, self.processors = make, device, processors
        self.slots, self._schedule, self._profile = slots, schedule, profile
        self._programs: list[Program] = []
        self._lock = threading.Lock()
        self.why = ""

    def program(self, columns: Any) -> tuple[Program, list[Any]]:
        """The program for these columns, and their leaves; compiles one where there is none.

        Raises:
          Unsupported: kernels cannot express `prep`.
        """
        leaves, tree = jax.tree.flatten(columns)
        leaves = [a if hasattr(a, "dtype") else np.asarray(a) for a in leaves]
        with self._lock:
            for p in reversed(self._programs):
                if p.shapes.fit(leaves, tree):
                    return p, leaves
            like = self._roomy(columns)
            made = Program(rt.Shapes.of(like), self._runtime_for(like))
            self._programs.append(made)
            return made, leaves

    def _roomy(self, columns: Any) -> Any:
        """What a program for these columns takes: lists as long as any before, or columns whose lists are long in
        turns would need a program for each combination."""
        like = rt.like_with(columns, rt.roomy(rt.capacities_of(columns)))
        for p in self._programs:
            like = p.shapes.joined(like)
        return like

    def _runtime_for(self, like: Any) -> Any:
        kernels = self._compiler(like)
        return rt.PrepRuntime(
            kernels,
            self._schedule(kernels),
            self.slots,
            self._make,
            self.processors,
            self._profile,
            self._ahead,
        )

    def program_or_none(self, columns: Any, strict: bool) -> tuple[Program, list[Any]] | None:
        """The same, or None where kernels cannot express `prep`; `why` says why."""
        if self.why and not strict:
            return None
        try:
            return self.program(columns)
        except (Unsupported, CudaError) as why:
            self.why = str(why)
            if strict:
                raise PipelineError(
                    f"Pipeline: no kernels for this preprocessing program: {why}; corun.Options(runtime='auto') runs "
                    "it by XLA"
                ) from why
            warn_once(f"recom_jax.corun: preprocessing runs by XLA, not beside the step: {why}")
            return None

    def latest(self) -> PrepKernels | None:
        """The kernels of the program made last."""
        found: PrepKernels | None = self._programs[-1].runtime.kernels if self._programs else None
        return found

    def reschedule(self, schedule: Callable[[PrepKernels], rt.Schedule]) -> None:
        """Another schedule; to be called between runs. Programs are made anew, kernels are kept."""
        with self._lock:
            self._schedule = schedule
            programs, self._programs = self._programs, []
        for p in programs:
            p.runtime.close()

    def trim(self) -> None:
        """Lets go of all but the latest programs; to be called between runs."""
        with self._lock:
            old, self._programs = self._programs[:-_MOST], self._programs[-_MOST:]
        for p in old:
            p.runtime.close()

    def prepare(self, columns: Any) -> Any:
        """A batch prepared here and now, by the same kernels."""
        p, leaves = self.program(columns)
        slot = p.runtime.pack(leaves)
        token = p.runtime.token(slot, self.device, False)
        return jax.block_until_ready(p.take(token))

    def stats(self) -> dict[str, int]:
        """Sums of the programs' counters."""
        found: dict[str, int] = {}
        for p in self._programs:
            for name, n in p.runtime.native.stats.items():
                found[name] = found.get(name, 0) + n
        return found

    def times(self) -> Times:
        """What the latest program's kernels and stages took, where they are timed."""
        if not self._programs:
            return Times((), (), (), ())
        r = self._programs[-1].runtime
        rows, n = r.native.times, len(r.launched)
        ends = r.schedule.stages
        kernels = tuple((x.name, tuple(row[k] for row in rows)) for k, x in enumerate(r.launched))
        behind = n + len(ends)
        leads = tuple(
            (x.name, tuple(row[behind + k] for row in rows)) for k, x in enumerate(r.launched)
        )
        stages = tuple(
            (name, tuple(row[n + k] for row in rows if row[n + k] >= 0))
            for k, name in enumerate(ends)
        )
        steps, periods = (tuple(row[k] for row in rows) for k in (-2, -1))
        return Times(kernels, stages, steps, periods, leads)

    def close(self) -> None:
        with self._lock:
            programs, self._programs = self._programs, []
        for p in programs:
            p.runtime.close()


class Streams:
    """One run's `Device`: packs on the thread that reads, in order.

    A program that kernels cannot express is run by XLA instead, on that thread: right, but not beside the step.

    Args:
      engine: programs; ingest: makes columns of a raw batch.
      plain: the preprocessing program compiled by XLA; step: the user's step, for what it prepares.
      strict: raise `PipelineError` rather than use `plain`.
    """

    def __init__(
        self,
        engine: Engine,
        ingest: Callable[[Any], Any],
        plain: Callable[[Any], Any],
        step: Callable[[Any, Any], Any],
        strict: bool,
    ) -> None:
        self._engine, self._ingest, self._plain = engine, ingest, plain
        self._step, self._strict = step, strict
        self.threads: set[int] = set()  # it packs on the reader's
        self._waiting: list[Staged] = []
        self._lock = threading.Lock()
        self._last: Any = None

    def submit(self, raw: Any) -> Ticket:
        """Packs on the caller's thread, which is the reader's: one thread less that asks for Python's lock."""
        done: concurrent.futures.Future[Prepared] = concurrent.futures.Future()
        try:
            done.set_result(self._run(raw))
        except Exception as why:
            done.set_exception(why)
        return done

    def _run(self, raw: Any) -> Prepared:
        begun = time.perf_counter()
        columns = self._ingest(raw)
        ready = time.perf_counter()
        found = self._engine.program_or_none(columns, self._strict)
        if found is None:
            batch = jax.block_until_ready(self._plain(columns))
            return Prepared(batch, ready - begun, time.perf_counter() - ready)
        program, leaves = found
        staged = Staged(program, program.runtime.pack(leaves))
        with self._lock:
            self._waiting.append(staged)
        return Prepared(staged, ready - begun, time.perf_counter() - ready)

    def step(self, state: Any, batch: Any) -> Any:
        if not isinstance(batch, Staged):
            return self._step(state, batch)

        def begun() -> None:  # a step that failed before that leaves the batch to `close`
            with self._lock:
                self._waiting.remove(batch)

        made = self._engine.steps(state, batch.program.runtime, batch.slot, begun)
        self._last = made[1]
        return made

    def close(self) -> None:
        with self._lock:
            left, self._waiting = self._waiting, []
        try:
            wait_for(self._last)  # steps that have not taken their batch yet
        except Exception:  # it was raised where the step's results were asked for
            self._engine.close()
            return
        for batch in left:
            batch.program.runtime.abandon(batch.slot)
        self._engine.trim()
