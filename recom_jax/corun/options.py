"""Options of a pipeline: checked once, frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from recom_jax.errors import OptionError

Last = Literal["keep", "drop", "error"]
Runtime = Literal["auto", "threads", "stream"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a `Pipeline` runs. Frozen and hashable.

    Attributes:
      slots: batches that may be read, prepared or waiting at a time: the size of the ring. At least 1; with 1 nothing
        overlaps.
      workers: threads that prepare batches on the CPU. Batches arrive in order however many there are.
      last: what becomes of a last batch with fewer rows than the first one: "keep" trains on it (the step is compiled
        for its size, too), "drop" leaves it out, "error" raises.
      copy: copy numpy arrays as they are read, so that an iterator may reuse its buffers; False for iterators that
        never do.
      fused: whether prep goes through the fusion compiler, ``recom_jax.Options(fuse_values=True)``; False: `jax.jit`
        alone. It compiles faster, and runs faster or slower, by the program.
      runtime: "stream" prepares on a GPU, by kernels on a stream of our own; "threads" by JAX on threads; "auto"
        takes the stream on one CUDA device, where it can.
      profile: time each kernel beside the step (stream runtime), for `report`.
      steps_in_flight: steps that may be dispatched and unfinished before the pipeline waits for the oldest.
      probe: measure the train step's stages (`corun.stage`) for the plan. Compiles each stage once more.
      min_share, max_share: bounds of the share of the device that preprocessing may take at a time, in the plan.
      gpus: devices that the plan maps features to; None: the mesh's size, else 1.
      owners: (raw column, device) pairs, or a mapping: columns that the plan leaves on the device that holds their
        table.
      close_timeout_s: seconds to wait at the end for an input iterator that is still reading.
    """

    slots: int = 3
    workers: int = 1
    last: Last = "keep"
    copy: bool = True
    fused: bool = False
    runtime: Runtime = "auto"
    profile: bool = False
    steps_in_flight: int = 2
    probe: bool = False
    min_share: float = 0.0625
    max_share: float = 0.5
    gpus: int | None = None
    owners: tuple[tuple[str, int], ...] = ()
    close_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("workers", 1), ("steps_in_flight", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(
                    f"corun.Options.{name} is an integer of at least {least}, not {value!r}"
                )
        if self.last not in ("keep", "drop", "error"):
            raise OptionError(f"corun.Options.last is keep, drop or error, not {self.last!r}")
        if self.runtime not in ("auto", "threads", "stream"):
            raise OptionError(
                f"corun.Options.runtime is auto, threads or stream, not {self.runtime!r}"
            )
        if not 0 < self.min_share <= self.max_share <= 1:
            raise OptionError(
                f"corun.Options: 0 < min_share <= max_share <= 1, not {self.min_share} and {self.max_share}"
            )
        if self.gpus is not None and (not isinstance(self.gpus, int) or self.gpus < 1):
            raise OptionError(f"corun.Options.gpus is an integer of at least 1, not {self.gpus!r}")
        pairs = self.owners.items() if isinstance(self.owners, Mapping) else self.owners
        object.__setattr__(self, "owners", tuple((str(f), int(g)) for f, g in pairs))
        if any(g < 0 or (self.gpus is not None and g >= self.gpus) for _, g in self.owners):
            raise OptionError(
                f"corun.Options.owners names a device that is not there: {self.owners}"
            )
        if not self.close_timeout_s >= 0:
            raise OptionError(
                f"corun.Options.close_timeout_s is at least 0, not {self.close_timeout_s}"
            )
