"""What a pipeline's steps took, beside its baselines."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

IDEAL, SEQUENTIAL, SIDE, CORUN = "no preprocessing", "sequential", "side stream", "co-run"
MODES = (IDEAL, SEQUENTIAL, SIDE, CORUN)
# On a GPU: a kernel for each part of a result; and what is left of co-running without one of its parts.
UNFUSED = "sequential, unfused"
UNPLANNED, UNPLANNED_UNFUSED = "co-run without schedule", "co-run without fusion"
STREAM_MODES = (IDEAL, UNFUSED, SEQUENTIAL, SIDE, CORUN, UNPLANNED, UNPLANNED_UNFUSED)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One step, in seconds: the wait for its batch, the step itself, and what its batch took on the other thread."""

    wait_s: float
    step_s: float
    ingest_s: float
    prep_s: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Medians over steps, in seconds; None where nothing was measured. Prints itself.

    Attributes:
      steps: how many steps the medians are of (the first, which compiles, is left out).
      step_s: wall time of a step, from asking for its batch to its results (or its dispatch, see
        `Options.steps_in_flight`).
      period_s: from one step to the next, on average, without the slowest twentieth. Where batches come late now and
        then, medians don't show it.
      wait_s: the part of it that the step waited for its batch; 0 if preprocessing is hidden.
      prep_s, ingest_s: preprocessing of one batch, and making columns of it, on their own thread.
      baselines: name -> seconds of a step: what `corun.measure` found, in interleaved runs.
      predicted_s: what the plan promised for a co-run step.
      runtime: what prepared batches.
      kernels: (name, seconds that the plan predicted, that it took beside the step) of the plan's kernels on a GPU,
        with `Options.profile`; late: how many kernels missed their stage, of all that were launched.
      host_bytes, device_bytes: of the ring.
    """

    steps: int
    step_s: float | None
    wait_s: float | None
    prep_s: float | None
    ingest_s: float | None
    baselines: tuple[tuple[str, float], ...]
    predicted_s: float | None
    runtime: str = "threads"
    kernels: tuple[tuple[str, float, float], ...] = ()
    late: tuple[int, int] = (0, 0)
    host_bytes: int = 0
    device_bytes: int = 0
    period_s: float | None = None

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        baselines: Mapping[str, Sequence[float]],
        predicted_s: float | None,
        runtime: str = "threads",
        kernels: tuple[tuple[str, float, float], ...] = (),
        counters: Mapping[str, int] | None = None,
    ) -> Report:
        warm = samples[1:]

        def median(values: list[float]) -> float | None:
            return statistics.median(values) if values else None

        names = (*STREAM_MODES, *(m for m in baselines if m not in STREAM_MODES))
        known = tuple((m, statistics.median(baselines[m])) for m in names if baselines.get(m))
        counted = counters or {}
        whole = [s.wait_s + s.step_s for s in warm]
        return cls(
            len(warm),
            median(whole),
            median([s.wait_s for s in warm]),
            median([s.prep_s for s in warm]),
            median([s.ingest_s for s in warm]),
            known,
            predicted_s,
            runtime,
            kernels,
            (counted.get("late", 0), counted.get("launched", 0)),
            counted.get("host_bytes", 0),
            counted.get("device_bytes", 0),
            statistics.fmean(sorted(whole)[: len(whole) - len(whole) // 20]) if whole else None,
        )

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured of a co-run step, or None."""
        measured = dict(self.baselines).get(CORUN, self.period_s)
        if self.predicted_s is None or not measured:
            return None
        return (self.predicted_s - measured) / measured

    @property
    def hidden(self) -> float | None:
        """The part of the preprocessing time that co-running hides: 1 all of it, 0 none; None if not measured."""
        known = dict(self.baselines)
        if not {IDEAL, SEQUENTIAL, CORUN} <= set(known) or known[SEQUENTIAL] <= known[IDEAL]:
            return None
        return (known[SEQUENTIAL] - known[CORUN]) / (known[SEQUENTIAL] - known[IDEAL])

    def __str__(self) -> str:
        lines = [f"{self.steps} steps"]
        for name, value in (
            ("step", self.step_s),
            ("  waited for its batch", self.wait_s),
            ("from step to step, mean", self.period_s),
            ("preprocessing beside it", self.prep_s),
            ("making columns beside it", self.ingest_s),
        ):
            lines.append(f"  {name:<26} {_ms(value)}")
        if self.baselines:
            lines.append("medians of interleaved runs, for each step")
            ideal = dict(self.baselines).get(IDEAL)
            for name, value in self.baselines:
                beside = "" if not ideal or name == IDEAL else f"  {value / ideal:.3f} x ideal"
                lines.append(f"  {name:<26} {_ms(value)}{beside}")
        else:
            lines.append("baselines: not measured (corun.measure takes them)")
        if self.predicted_s is not None:
            error = self.prediction_error
            off = "" if error is None else f", off by {error:+.1%}"
            lines.append(f"  {'predicted co-run step':<26} {_ms(self.predicted_s)}{off}")
        if self.runtime != "threads":
            lines.append(f"prepared by: {self.runtime}")
        if self.host_bytes or self.device_bytes:
            lines.append(
                f"  the ring takes {self.host_bytes:,} bytes of page-locked memory and {self.device_bytes:,} on "
                "the device"
            )
        if self.late[1]:
            lines.append(f"  {self.late[0]} of {self.late[1]} kernels missed their stage")
        for name, predicted, measured in self.kernels:
            lines.append(
                f"  kernel {name:<19} {_ms(measured)} beside the step, {1e3 * predicted:.3f} ms predicted"
            )
        return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{1e3 * seconds:10.3f} ms"
