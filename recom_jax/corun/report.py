"""What a pipeline's steps took, beside its baselines."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

IDEAL, SEQUENTIAL, SIDE, CORUN = "no preprocessing", "sequential", "side stream", "co-run"
MODES = (IDEAL, SEQUENTIAL, SIDE, CORUN)


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
      wait_s: the part of it that the step waited for its batch; 0 if preprocessing is hidden.
      prep_s, ingest_s: preprocessing of one batch, and making columns of it, on their own thread.
      baselines: name -> seconds of a step: what `corun.measure` found, in interleaved runs.
      predicted_s: what the plan promised for a co-run step.
    """

    steps: int
    step_s: float | None
    wait_s: float | None
    prep_s: float | None
    ingest_s: float | None
    baselines: tuple[tuple[str, float], ...]
    predicted_s: float | None

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        baselines: Mapping[str, Sequence[float]],
        predicted_s: float | None,
    ) -> Report:
        warm = samples[1:]

        def median(values: list[float]) -> float | None:
            return statistics.median(values) if values else None

        known = tuple((m, statistics.median(baselines[m])) for m in MODES if baselines.get(m))
        return cls(
            len(warm),
            median([s.wait_s + s.step_s for s in warm]),
            median([s.wait_s for s in warm]),
            median([s.prep_s for s in warm]),
            median([s.ingest_s for s in warm]),
            known,
            predicted_s,
        )

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured of a co-run step, or None."""
        measured = dict(self.baselines).get(CORUN, self.step_s)
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
        return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{1e3 * seconds:10.3f} ms"
