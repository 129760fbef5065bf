"""`Pipeline`: the user's preprocessing and train step, run beside one another."""

from __future__ import annotations

import collections
import functools
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import jax

from recom_jax import stage as staging
from recom_jax.corun import runtime as rt
from recom_jax.corun import units
from recom_jax.corun.device import Device, Threads
from recom_jax.corun.duel import duel, rivals
from recom_jax.corun.kernels import PrepKernels
from recom_jax.corun.mesh import MeshEngine, compilers_of, on_mesh
from recom_jax.corun.options import Options
from recom_jax.corun.plan import Measured, Plan
from recom_jax.corun.planner import plan_for, plan_for_kernels
from recom_jax.corun.prep import compile_prep, like
from recom_jax.corun.probe_stream import Probed, Prober
from recom_jax.corun.report import IDEAL, SEQUENTIAL, Report, Sample
from recom_jax.corun.ring import Ring
from recom_jax.corun.source import Source
from recom_jax.corun.steps import Steps, wait_for
from recom_jax.corun.stream import Compiler, Engine, Streams
from recom_jax.errors import PipelineError
from recom_jax.lowering import warn_once
from recom_jax.preprocess.ingest import columns, snapshot

_KEEP = 4096  # samples of steps
_STREAMS = 4  # iterators that a next run may go on with
_emulated: Any = None  # tests: (what makes native runtimes, processors) on a CPU


class Pipeline:
    """Preprocesses batch t + 1 while step t trains, and gives the same results as doing one after the other.

    Args:
      prep: raw columns (name -> column, see `preprocess.columns`) to the step's batch, a pytree. A JAX-traceable
        function or a `preprocess.Program`.
      train_step: (state, batch) -> (state, metrics), usually jitted. It may donate its state. On a GPU one that is not
        jitted is called as it is, and preprocessing runs on threads; with `Options(runtime="stream")` it is traced.
      mesh: a `jax.sharding.Mesh`: batches are split along its first axis where their rows allow it, else copied to all.
      options: see `Options`.
      specs: `PartitionSpec`s, a prefix of the prepared batch: how it is split over the mesh instead. A dimension of
        features that is split lets each device prepare those whose tables it owns. On GPUs the stream runtime needs it.

    Raises:
      PipelineError: `prep` or `train_step` is not callable.
    """

    def __init__(
        self,
        prep: Callable[[Any], Any],
        train_step: Callable[[Any, Any], tuple[Any, Any]],
        mesh: Any = None,
        options: Options | None = None,
        specs: Any = None,
    ) -> None:
        for name, f in (("prep", prep), ("train_step", train_step)):
            if not callable(f):
                raise PipelineError(f"Pipeline: {name} is a function, not a {type(f).__name__}")
        self.options = options or Options()
        self.mesh, self.specs = mesh, specs
        self._prep, self._step = prep, train_step
        self._compiled = compile_prep(prep, self.options)
        one_device = mesh is None or specs is None
        self._compilers = [Compiler(prep)] if one_device else compilers_of(prep, specs, mesh)
        self._made_engine: Engine | None = None
        self._offline: Engine | None = None
        self._step_on_stream: Steps | None = None
        self.prober: Prober | None = None
        self.probed: Probed | None = None
        self._sources: collections.deque[Source] = collections.deque(maxlen=_STREAMS)
        self._position = 0
        self._why_threads = ""
        self._running = threading.Lock()
        self._plan: Plan | None = None
        self._samples: collections.deque[Sample] = collections.deque(maxlen=_KEEP)
        self._baselines: dict[str, tuple[float, ...]] = {}
        self._predicted_s: float | None = None
        self._seen: Any = None
        self._raw_like: Any = None

    # ---- running --------------------------------------------------------------------------------------------

    def run(
        self, state: Any, raw_batches: Iterable[Any], start: int | None = None
    ) -> Generator[tuple[Any, Any], None, None]:
        """Trains on a stream of raw batches; a generator of (state, metrics) after each step.

        Args:
          state: the step's state; donated to the step if the step does so.
          raw_batches: any iterable of raw batches. Read ahead by up to `Options.slots` of them, on another thread.
            When a run over an iterator (rather than a list) is left early, a next run over the same iterator goes on
            with the batches that were read and not trained; so do the four iterators that were used last.
          start: how many batches of the stream an earlier run trained (its `position`): they are skipped. By default
            none, or, over such an iterator, what was trained of it.

        Raises:
          What `raw_batches`, `prep` or `train_step` raise, at the step that needs the batch.
          PipelineError: another run of this pipeline is still open; a last batch of another size (see `Options.last`);
            a stream that ends before `start`.
        """
        if not self._running.acquire(blocking=False):
            raise PipelineError("this pipeline is running; close that run's generator first")
        ring: Ring | None = None
        try:
            source = self._source_for(raw_batches, start)
            self._position = source.position
            o = self.options
            device = self._device()
            ring = Ring(source, device, o.slots, o.close_timeout_s, o.copy, self._running.release)
            with ring:
                yield from self._steps(ring, device, state)
        finally:
            if ring is None or not ring.entered:
                self._running.release()

    def _steps(
        self, ring: Ring, device: Device, state: Any
    ) -> Generator[tuple[Any, Any], None, None]:
        flying: collections.deque[Any] = collections.deque()
        while True:
            asked = time.perf_counter()
            taken = ring.take()
            if taken is None:
                wait_for(list(flying))
                return
            number, prepared = taken
            came = time.perf_counter()
            if self._seen is None:
                self._seen = like(state)
            state, metrics = device.step(state, prepared.batch)
            ring.done()
            flying.append(metrics)
            if len(flying) > self.options.steps_in_flight - 1:
                wait_for(flying.popleft())
            self._samples.append(
                Sample(came - asked, time.perf_counter() - came, prepared.ingest_s, prepared.prep_s)
            )
            # Trained is what the caller has the state of: Ctrl-C comes mostly while this waits.
            self._position = number + 1
            ring.trained()
            yield state, metrics

    def _source_for(self, raw_batches: Iterable[Any], start: int | None) -> Source:
        if start is not None and start < 0:
            raise PipelineError(f"run: start is at least 0, not {start}")
        for old in self._sources:
            if old.continues(raw_batches):
                if start is not None and start != old.position:
                    raise PipelineError(
                        f"run: this iterator was trained on up to batch {old.position}, so it can't start behind "
                        f"{start}; pass a new iterator, or no start"
                    )
                self._sources.remove(old)
                self._sources.append(old)
                return old
        made = Source(raw_batches, start or 0, self.options.last)
        if isinstance(raw_batches, Iterator):
            self._sources.append(made)
        return made

    def _device(self) -> Device:
        engine = self._engine()
        if engine is None:
            return Threads(
                self.ingest, self._compiled, self._place, self._step, self.options.workers
            )
        strict = self.options.runtime == "stream"
        return Streams(engine, self.ingest, self._compiled, self._step, strict)

    def _engine(self) -> Engine | None:
        """What runs preprocessing on a GPU, made at the first run; None: threads do."""
        if self._made_engine is None and self._may_stream():
            self._made_engine = self.make_engine(self.options.slots, self.schedule_of)
        return self._made_engine

    def _may_stream(self) -> bool:
        if self.options.runtime == "threads":
            return False
        strict = self.options.runtime == "stream"
        if self.mesh is not None and self.specs is None:
            if strict:
                raise PipelineError(
                    "Pipeline: over a mesh the stream runtime needs specs, which say how the prepared batch is split"
                )
            return False
        if not staging.is_staged(jax.devices()[0]) and _emulated is None:
            if strict:
                raise PipelineError(
                    f"Pipeline: the stream runtime needs a CUDA device; JAX runs on {jax.devices()[0].platform}"
                )
            return False
        if not strict and not hasattr(self._step, "lower"):
            # Traced, what it does in Python would be done once, not in each step.
            self._why_threads = "train_step is not jitted (jax.jit it)"
            warn_once(
                f"recom_jax.corun: preprocessing runs on threads, not beside the step: {self._why_threads}"
            )
            return False
        return True

    def make_engine(
        self,
        slots: int,
        schedule: Callable[[PrepKernels], rt.Schedule],
        profile: bool | None = None,
    ) -> Engine:
        """Another engine for this pipeline's program and step, as `corun.measure` needs."""
        timed = self.options.profile if profile is None else profile
        ahead = self.options.steps_in_flight
        device = jax.devices()[0]
        if self.mesh is None:
            made, processors = _place_of(device)
            steps = self._steps_of(device)
            compiler = self._compilers[0]
            return Engine(compiler, steps, made, device, processors, slots, schedule, timed, ahead)
        places = [_place_of(d) for d in self.mesh.devices.flat]
        steps = self._steps_of(self.mesh.devices.flat[0])
        return MeshEngine(
            self._compilers, steps, self.mesh, self.specs, places, slots, schedule, timed, ahead
        )

    def _steps_of(self, device: Any) -> Steps:
        if self._step_on_stream is None:
            self._step_on_stream = Steps(self._step, device)
        return self._step_on_stream

    def schedule_of(self, kernels: PrepKernels) -> rt.Schedule:
        """The plan's, as far as there is one for these kernels; else everything beside the step's beginning."""
        found = None if self._plan is None else units.schedule_of(self._plan, kernels)
        return found or rt.whole(kernels, rt.PLAN, self.options.max_share)

    def streams(self, raw: Any) -> bool:
        """Whether batches like this one are prepared by kernels on a stream of ours."""
        engine = self._engine()
        strict = self.options.runtime == "stream"
        return engine is not None and engine.program_or_none(columns(raw), strict) is not None

    @property
    def runtime(self) -> str:
        """What prepares batches: "threads", "stream", or why it is not the stream. Known after the first batch."""
        engine = self._made_engine
        if engine is None:
            return f"threads: {self._why_threads}" if self._why_threads else "threads"
        return f"threads: {engine.why}" if engine.why else "stream"

    def _place(self, batch: Any) -> Any:
        return batch if self.mesh is None else on_mesh(batch, self.mesh, self.specs)

    # ---- looking at it --------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Batches of the stream that were trained: save it with the state, and pass it to `run` as `start`."""
        return self._position

    @property
    def plan(self) -> Plan:
        """What runs where: stages, capacities, kernels, shares, and the device of each feature. Frozen; prints itself.

        Raises:
          PipelineError: no batch was seen yet, so that no size is known.
        """
        if self._plan is None:
            if self._seen is None or self._raw_like is None:
                raise PipelineError(
                    "no plan yet: sizes are known once a batch was trained; run a step, or call "
                    "make_plan(state, raw_batch)"
                )
            self._plan = self._make_plan()
        return self._plan

    def prepare(self, raw: Any) -> Any:
        """One batch, prepared here and now: what `train_step` gets for this raw batch."""
        raw = snapshot(raw) if self.options.copy else raw  # JAX may go on reading numpy's memory
        if self._may_stream():
            if self._offline is None:
                self._offline = self.make_engine(1, lambda k: rt.whole(k, rt.SEQUENTIAL))
            made = columns(raw)
            if self._offline.program_or_none(made, self.options.runtime == "stream") is not None:
                return self._offline.prepare(made)
        return jax.block_until_ready(self._place(self._compiled(columns(raw))))

    def train_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The user's step."""
        return self._step(state, batch)

    @property
    def baselines(self) -> dict[str, tuple[float, ...]]:
        """Seconds of a step in each mode and round, as `corun.measure` found them."""
        return dict(self._baselines)

    def keep_baselines(self, times: dict[str, list[float]]) -> None:
        """Seconds of a step in each mode, for `report`."""
        self._baselines |= {name: tuple(values) for name, values in times.items()}
        if self._made_engine is None:
            self._plan = None  # the next one knows more; one that is executed stays

    def make_plan(self, state: Any, raw_batch: Any) -> Plan:
        """Plans for a state and a raw batch like those to come, and keeps the plan. Trains nothing.

        With `Options.probe` the step's stages are timed: on a GPU with a copy of this state, beside the kernels of
        `prep`, and there the next runs execute the plan; else on made-up values.

        Raises:
          PipelineError: on a GPU, while a run is open.
        """
        made = columns(raw_batch)
        self._seen, self._raw_like = like(state), like(made)
        engine = self._engine()
        found = None
        if engine is not None:
            found = engine.program_or_none(made, self.options.runtime == "stream")
        if engine is None or found is None or self.mesh is not None:
            self._plan = self._make_plan()
            return self._plan
        if not self._running.acquire(blocking=False):
            raise PipelineError(
                "make_plan: this pipeline is running; close that run's generator first"
            )
        try:
            kernels = found[0].runtime.kernels
            self._plan = plan_for_kernels(kernels, None, self._measured(), self.options)
            if self.options.probe:
                timed = functools.partial(self.make_engine, 3, profile=True)
                self.prober = Prober(
                    self._step, self._seen, kernels, made, timed, engine.processors, state
                )
                try:
                    self._plan = self._probed_plan(kernels, self.prober)
                finally:
                    self.prober.values = None  # the user's
            self._predicted_s = self._plan.predicted_us / 1e6
            engine.reschedule(self.schedule_of)
        finally:
            self._running.release()
        return self._plan

    def _probed_plan(self, kernels: PrepKernels, prober: Prober) -> Plan:
        probed = self.probed = prober.probed()
        plan = plan_for_kernels(kernels, probed, self._measured(), self.options)
        plans = rivals(plan, probed, self.options)
        return duel(plans, kernels, probed.alone_us, prober.run, prober.cache, prober.key)

    def follow(self, plan: Plan) -> None:
        """Executes a plan that another pipeline of the same preprocessing program made, from the next run on."""
        self._plan, self._predicted_s = plan, plan.predicted_us / 1e6
        if self._made_engine is not None:
            self._made_engine.reschedule(self.schedule_of)

    def _make_plan(self) -> Plan:
        kernels = None if self._made_engine is None else self._made_engine.latest()
        if kernels is not None and self.mesh is None:
            plan = plan_for_kernels(kernels, None, self._measured(), self.options)
            self._predicted_s = plan.predicted_us / 1e6
            return plan
        gpus = self.options.gpus or (1 if self.mesh is None else self.mesh.devices.size)
        plan = plan_for(
            self._prep, self._step, self._seen, self._raw_like, self._measured(), gpus, self.options
        )
        self._predicted_s = plan.predicted_us / 1e6
        return plan

    def _measured(self) -> Measured:
        """Medians of what is known of the step and of preprocessing; None before the second step."""
        ideal, alone = (self._baselines.get(m) for m in (IDEAL, SEQUENTIAL))
        if ideal and alone:  # measured apart
            step = statistics.median(ideal)
            return Measured(1e6 * step, 1e6 * max(0.0, statistics.median(alone) - step))
        warm = list(self._samples)[1:]
        if not warm:
            return Measured(None, None)
        # With steps in flight, what a step takes shows partly in the wait for the next batch.
        whole = statistics.median(s.wait_s + s.step_s for s in warm)
        return Measured(
            1e6 * max(0.0, whole - statistics.median(s.wait_s for s in warm)),
            1e6 * statistics.median(s.prep_s for s in warm),
        )

    def ingest(self, raw: Any) -> Any:
        """Columns of a raw batch; the first one says what the plan is for."""
        made = columns(raw)
        if self._raw_like is None:
            self._raw_like = like(made)
        return made

    def report(self) -> Report:
        """Times of the steps so far, beside the baselines that `measure` took."""
        engine = self._made_engine
        if engine is None:
            return Report.of(tuple(self._samples), dict(self._baselines), self._predicted_s)
        predicted = (
            {} if self._plan is None else {k.name: k.duration_us for k in self._plan.kernels}
        )
        kernels = tuple(
            (name, predicted[name] / 1e6, statistics.median(values) / 1e3)
            for name, values in engine.times().kernels
            if values and name in predicted
        )
        return Report.of(
            tuple(self._samples),
            dict(self._baselines),
            self._predicted_s,
            self.runtime,
            kernels,
            engine.stats(),
        )


def _place_of(device: Any) -> tuple[rt.Make, int]:
    """What makes native runtimes on a device, and its multiprocessors."""
    found: tuple[rt.Make, int] = _emulated or (rt.on_cuda(device), rt.processors_of(device))
    return found
