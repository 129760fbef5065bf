"""What the planner's stages hand on: frozen values that print themselves. Times are in microseconds.

stages with free capacity + preprocessing operators -> segments -> kernels placed in stages -> Plan
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from recom_jax.corun.cost import NOTHING, Device, Work, total

AFTER = "after the step"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Medians of what was seen: a step, and the preprocessing of a batch by itself; None: not seen yet."""

    step_us: float | None
    prep_us: float | None


@dataclasses.dataclass(frozen=True)
class Choice:
    """Preprocessing beside a stage with one share of the device, as it was measured.

    Attributes:
      share: of the device; free: how fast preprocessing ran, in parts of its speed on the whole device.
      cost: what the step loses to a microsecond of preprocessing (on the whole device): 0 is hidden, 1 as much as in
        front of the step.
    """

    share: float
    free: float
    cost: float


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of the train step.

    Attributes:
      duration_us: how long it takes alone; free_compute, free_memory: which share of the device it leaves free in it.
      cost: see `Choice`; share: the device's that this was measured with, 0: any.
      choices: what was measured with other shares, the one above included; empty: nothing was.
    """

    name: str
    duration_us: float
    free_compute: float
    free_memory: float
    cost: float = 0.0
    share: float = 0.0
    choices: tuple[Choice, ...] = ()

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Stage:
        """What `dataclasses.asdict` and JSON made of a stage."""
        return cls(**fields | {"choices": tuple(Choice(**c) for c in fields["choices"])})

    def taking(self, choice: Choice) -> Stage:
        """The stage, used with this share."""
        free = choice.free
        return dataclasses.replace(
            self, free_compute=free, free_memory=free, cost=choice.cost, share=choice.share
        )


@dataclasses.dataclass(frozen=True)
class PrepOp:
    """One operator of the preprocessing program.

    Attributes:
      name: unique; kind: the operator's name.
      features: the raw columns that it depends on.
      after: names of the operators whose results it reads.
      compute_us: arithmetic on a whole device.
      raw_us, out_us: memory traffic of the raw columns it reads, and of what it writes.
      barrier: it reads results of other rows or places, so it can't run in one kernel with what makes them.
      kept: the program returns its result.
      tiles, latency_us, longest_us: as in `Work`.
    """

    name: str
    kind: str
    features: tuple[str, ...]
    after: tuple[str, ...]
    compute_us: float
    raw_us: float
    out_us: float
    barrier: bool = False
    kept: bool = True
    tiles: float = 0.0
    latency_us: float = 0.0
    longest_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Segment:
    """Operators of one group of features that run in one kernel, row by row: the smallest thing that is placed."""

    name: str
    features: tuple[str, ...]
    level: int
    ops: tuple[str, ...]
    after: tuple[str, ...]
    work: Work


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Pieces of segments of one level, fused and placed in a stage of one device.

    Attributes:
      pieces: (segment, first row, last row) in parts of the batch: 0 to 1 is all of it; others are cuts.
      share: of the device's processors; 1 for what runs after the step.
      start_us, duration_us: in the stage.
    """

    name: str
    gpu: int
    stage: str
    level: int
    share: float
    pieces: tuple[tuple[str, float, float], ...]
    work: Work
    start_us: float
    duration_us: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which preprocessing runs where. Prints itself; `plot` draws it.

    Attributes:
      stages: the train step's; kernels: placed in them, or after the step.
      owner: (feature, device) of each raw column.
      ideal_us: the step without preprocessing; sequential_us: with all of it in front of the step, fused;
        predicted_us: co-running.
      assumed: what was assumed rather than measured, for the reader.
    """

    stages: tuple[Stage, ...]
    ops: tuple[PrepOp, ...]
    segments: tuple[Segment, ...]
    kernels: tuple[Kernel, ...]
    owner: tuple[tuple[str, int], ...]
    gpus: int
    ideal_us: float
    sequential_us: float
    predicted_us: float
    assumed: tuple[str, ...] = ()

    @property
    def hidden(self) -> float:
        """The part of preprocessing's time that co-running hides, as predicted."""
        extra = self.sequential_us - self.ideal_us
        return 1.0 if extra <= 0 else (self.sequential_us - self.predicted_us) / extra

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for op in self.ops:
            kinds[op.kind] = kinds.get(op.kind, 0) + 1
        named = ", ".join(f"{n} {k}" for k, n in sorted(kinds.items(), key=lambda i: (-i[1], i[0])))
        lines = [
            f"plan: {len(self.ops)} operators ({named}) in {len(self.segments)} segments, {len(self.kernels)} kernels, "
            f"{self.gpus} device{'s' if self.gpus > 1 else ''}",
            f"  predicted step {self.predicted_us:.1f} us: ideal {self.ideal_us:.1f}, sequential "
            f"{self.sequential_us:.1f}, {self.hidden:.0%} of preprocessing hidden",
        ]
        lines += [f"  assumed: {text}" for text in self.assumed]
        for stage in (*self.stages, Stage(AFTER, 0.0, 0.0, 0.0)):
            here = [k for k in self.kernels if k.stage == stage.name]
            if stage.name == AFTER and not here:
                continue
            lines.append(
                f"  stage {stage.name}: {stage.duration_us:.1f} us, free: {stage.free_compute:.0%} of arithmetic, "
                f"{stage.free_memory:.0%} of memory bandwidth"
                + (f", costs {stage.cost:.0%} of what runs beside it" if stage.cost else "")
            )
            for k in here:
                cuts = sum(1 for _, a, b in k.pieces if (a, b) != (0.0, 1.0))
                lines.append(
                    f"    {k.name} on device {k.gpu}, share {k.share:.3g}: {len(k.pieces)} segments ({cuts} cut), "
                    f"level {k.level}, at {k.start_us:.1f} for {k.duration_us:.1f} us"
                )
        if self.gpus > 1:
            for gpu in range(self.gpus):
                mine = [f for f, g in self.owner if g == gpu]
                lines.append(f"  device {gpu}: {len(mine)} features: {', '.join(mine)}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the timeline to a picture file (its type by the name's ending). Needs matplotlib.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from recom_jax.corun.plot import plot

        plot(self, path)


__all__ = [
    "AFTER",
    "NOTHING",
    "Choice",
    "Device",
    "Kernel",
    "Measured",
    "Plan",
    "PrepOp",
    "Segment",
    "Stage",
    "Work",
    "total",
]
