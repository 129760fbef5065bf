"""What preprocessing kernels take with nothing beside them: what is launched to learn it, and the cost model that
follows. `probe_stream` runs and times it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from recom_jax.corun import runtime as rt
from recom_jax.corun.cost import Device, rest_of
from recom_jax.corun.kernels import TILE, PrepKernels
from recom_jax.corun.units import every_row, load_of

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
FEW = SHARES[-1]  # a share with which a processor has a block at most
PARTS = 48  # that nothing is fitted to
FITS = 6  # for each share
RAGGED = tuple(
    k / 10 for k in range(31)
)  # `Device.ragged_us`: ten times what memory takes, at most


@dataclasses.dataclass(frozen=True)
class ClassCost:
    """What a full tile of a class of code costs, in microseconds.

    Attributes:
      alone_us: the only tile of a launch; turn_us: one of many that a block runs in turns, alone on its processor;
      full_us: of a launch that fills the device.
    """

    cls: int
    alone_us: float
    turn_us: float
    full_us: float


Part = tuple[tuple[int, ...], float]  # units, and the share of the device that they get


def alone(kernels: PrepKernels, seed: int = 0) -> tuple[rt.Schedule, list[Part], list[Part]]:
    """The schedule of the run in front of the step, and its random parts: to fit to, and held out."""
    n = len(kernels.units)
    everything = tuple((k, 0.0, 1.0) for k in range(n))
    launches = [rt.Launch("first", 0, SHARES[0], everything)]  # brings the batch near
    launches += [rt.Launch(f"share {s}", 0, s, everything) for s in SHARES]
    for c in sorted({u.cls for u in kernels.units}):
        mine = [k for k, u in enumerate(kernels.units) if u.cls == c]
        pieces = tuple((k, 0.0, 1.0) for k in mine)
        first = kernels.units[mine[0]]
        tile = min(1.0, TILE // max(1, first.inner) / first.rows)
        launches += [
            rt.Launch(f"tile {c}", 0, 1.0, ((mine[0], 0.0, tile),)),
            rt.Launch(f"few {c}", 0, FEW, pieces),
            rt.Launch(f"class {c}", 0, 1.0, pieces),
        ]
    rng = np.random.default_rng(seed)
    fits = [(_drawn(rng, n), s) for s in SHARES for _ in range(FITS)]
    parts = [(_drawn(rng, n), float(rng.choice(SHARES))) for _ in range(PARTS)]
    for name, drawn in (("fit", fits), ("part", parts)):
        for k, (units, share) in enumerate(drawn):
            launches.append(rt.Launch(f"{name} {k}", 0, share, every_row(units)))
    return rt.Schedule(rt.SEQUENTIAL, tuple(launches)), fits, parts


def _drawn(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    """A quarter of the units, or more."""
    size = int(rng.integers(max(1, n // 4), n + 1))
    return tuple(sorted(int(u) for u in rng.choice(n, size, replace=False)))


def fitted(
    kernels: PrepKernels, took: dict[str, float], processors: int, fits: Sequence[Part] = ()
) -> tuple[Device, tuple[ClassCost, ...]]:
    """The cost model of what kernels took alone, in microseconds: classes, and random parts (`fits`)."""
    classes = sorted({u.cls for u in kernels.units})
    launch = min(took[f"tile {c}"] for c in classes)
    device = Device(launch, processors=processors)
    made = []
    for c in classes:
        units = [u for u in kernels.units if u.cls == c]
        tiles = sum(-(-u.rows * u.inner // TILE) for u in units)
        full = sum(u.rows * u.inner for u in units) / TILE
        single = took[f"tile {c}"] - launch
        few, whole = (max(0.0, took[f"{n} {c}"] - launch) for n in ("few", "class"))
        blocks = min(device.blocks(FEW), tiles)
        turn = few / math.ceil(tiles / blocks)
        made.append(ClassCost(c, single, turn, min(whole, few) / full))
    # Classes run one after the other fill the device less well than together.
    total = sum(m.full_us * full_tiles(kernels, m.cls) for m in made)
    everything = every_row(range(len(kernels.units)))
    load = load_of(kernels, {m.cls: m for m in made}, device, everything, SHARES[0])
    together = rest_of(took[f"share {SHARES[0]}"] - launch, load.busiest_us)
    by = min(1.0, together / total) if total > 0 else 1.0
    costs = tuple(dataclasses.replace(m, full_us=m.full_us * by) for m in made)
    return _to_random_parts(kernels, took, device, costs, fits), costs


def _to_random_parts(
    kernels: PrepKernels,
    took: dict[str, float],
    device: Device,
    costs: Sequence[ClassCost],
    fits: Sequence[Part],
) -> Device:
    """The constants that only kernels of several classes tell: `Device.ragged_us` and `Device.filled`.

    For each candidate of the first the second is what is left of what kernels took: medians, by blocks a processor. The
    candidate is taken with which kernels of as many blocks agree best.
    """
    known = {c.cls: c for c in costs}
    loads = [load_of(kernels, known, device, every_row(units), share) for units, share in fits]

    def with_(ragged_us: float) -> tuple[float, Device]:
        made = dataclasses.replace(device, ragged_us=ragged_us)
        found: dict[int, list[float]] = {}
        for k, load in enumerate(loads):
            took_us = took[f"fit {k}"] - device.launch_us
            said_us = made.loaded_us(load) - device.launch_us
            if said_us > load.longest_us and took_us > 0:  # a single tile's time is what it is
                near = round(2 * math.log2(load.blocks / device.processors))  # to within a fifth
                found.setdefault(near, []).append(took_us / said_us)
        middle = {n: statistics.median(x) for n, x in found.items()}
        spread = sum(abs(math.log(x / middle[n])) for n, xs in found.items() for x in xs)
        filled = tuple((2 ** (n / 2), middle[n]) for n in sorted(found))
        return spread, dataclasses.replace(made, filled=filled)

    return min((with_(us) for us in RAGGED), key=lambda x: x[0])[1]


def full_tiles(kernels: PrepKernels, cls: int) -> float:
    """Tiles of a class, those that are not full in parts."""
    return sum(u.rows * u.inner for u in kernels.units if u.cls == cls) / TILE
