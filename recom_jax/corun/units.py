"""Between kernels and plans: units as operators with costs, and a plan's kernels as a schedule that can be run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from recom_jax.corun.cost import Device, Load
from recom_jax.corun.graph import BYTES_PER_US, OPS_PER_US
from recom_jax.corun.kernels import SECTOR, TILE, PrepKernels, Unit
from recom_jax.corun.plan import AFTER, Plan, PrepOp
from recom_jax.corun.runtime import PLAN, Launch, Schedule


class TileCost(Protocol):
    """What a full tile of a class costs, in microseconds: see `alone.ClassCost`."""

    @property
    def alone_us(self) -> float: ...
    @property
    def turn_us(self) -> float: ...
    @property
    def full_us(self) -> float: ...


def unit_ops(
    kernels: PrepKernels, costs: Mapping[int, TileCost] | None = None
) -> tuple[PrepOp, ...]:
    """Units as operators: independent of one another, and cut by rows as one likes.

    Args:
      costs: class -> of its tiles; None: from numbers of operations and bytes.
    """
    made = []
    for k, u in enumerate(kernels.units):
        n = u.rows * u.inner
        compute, memory = u.operations * n / OPS_PER_US, u.nbytes * n / BYTES_PER_US
        op = PrepOp(f"u{k}", f"class {u.cls}", u.features, (), compute, 0.0, memory)
        c = None if costs is None else costs.get(u.cls)
        if c is not None:  # arithmetic and traffic were measured as one
            op = dataclasses.replace(
                op,
                compute_us=0.0,
                out_us=c.full_us * n / TILE,
                tiles=float(-(-n // TILE)),
                latency_us=c.turn_us * n / TILE,
                longest_us=c.alone_us,
            )
        made.append(op)
    return tuple(made)


Pieces = tuple[tuple[int, float, float], ...]  # (unit, first row, last row), rows in parts


def every_row(units: Iterable[int]) -> Pieces:
    """These units, whole."""
    return tuple((k, 0.0, 1.0) for k in units)


def load_of(
    kernels: PrepKernels,
    costs: Mapping[int, TileCost],
    device: Device,
    pieces: Pieces,
    share: float,
) -> Load:
    """A kernel of these pieces, tile by tile: blocks take them in turns, in their order."""
    tiles = kernels.tiles(pieces)
    if not len(tiles):
        return Load(1, 0.0, 0.0, 0.0)
    blocks = min(device.blocks(share), len(tiles))
    part = tiles["count"] / TILE
    turn, full, alone = (
        np.array([getattr(costs[c], name) for c in range(max(costs) + 1)])[tiles["cls"]]
        for name in ("turn_us", "full_us", "alone_us")
    )
    busiest = np.bincount(np.arange(len(tiles)) % blocks, turn * part).max()
    done = float((full * part).sum())
    return Load(blocks, float(busiest), done, float(alone.max()), ragged_mb(kernels, pieces))


def ragged_mb(kernels: PrepKernels, pieces: Pieces) -> float:
    """Megabytes of the sectors of results that a kernel of these pieces writes in part."""
    total = 0.0
    cuts = sorted({0.0, 1.0, *(x for _, low, high in pieces for x in (low, high))})
    for low, high in itertools.pairwise(cuts):  # rows that the same units write
        mine = [k for k, a, b in pieces if a <= low and high <= b]
        total += (high - low) * _ragged_bytes([kernels.units[k] for k in mine])
    return total / 1e6


def _ragged_bytes(units: Sequence[Unit]) -> float:
    """Bytes of the sectors that these units write in part, were every row theirs."""
    found = 0.0
    # Those of one result, or of such as are laid out alike.
    for rows, pitch in {(u.rows, u.pitch) for u in units}:
        cells = [(u.cells, u.itemsize) for u in units if (u.rows, u.pitch) == (rows, pitch)]
        at = np.concatenate([np.add.outer(c, np.arange(n)).ravel() for c, n in cells])
        period = SECTOR // math.gcd(SECTOR, pitch) if pitch else 1  # rows: then sectors begin alike
        every = np.add.outer(pitch * np.arange(period), at).ravel() // SECTOR
        _, written = np.unique(every, return_counts=True)
        found += SECTOR * float((written < SECTOR).sum()) * rows / period
    return found


def kernel_us(
    kernels: PrepKernels,
    costs: Mapping[int, TileCost],
    device: Device,
    pieces: Pieces,
    share: float,
) -> float:
    """Time of a kernel of these pieces."""
    return device.loaded_us(load_of(kernels, costs, device, pieces, share))


def markers_of(stages: Sequence[str]) -> tuple[str, ...]:
    """The markers that end stages: the last stage has none, and "NAME.2" is the second of that name."""
    made: list[str] = []
    for name in stages[:-1]:
        plain = re.sub(r"\.\d+$", "", name)
        made.append(plain if plain in made else name)
    return tuple(made)


def schedule_of(plan: Plan, kernels: PrepKernels, gpu: int = 0) -> Schedule | None:
    """The plan's kernels for one device; None if it is not a plan for these kernels."""
    ops = {s.name: s.ops for s in plan.segments}
    known = {f"u{k}": k for k in range(len(kernels.units))}
    if {op.name for op in plan.ops} != set(known):
        return None
    at = {s.name: k for k, s in enumerate(plan.stages)}
    launches = []
    for kernel in plan.kernels:
        if kernel.gpu == gpu:
            pieces = tuple(
                (known[op], low, high) for name, low, high in kernel.pieces for op in ops[name]
            )
            stage = len(plan.stages) if kernel.stage == AFTER else at[kernel.stage]
            launches.append(Launch(kernel.name, stage, kernel.share, pieces))
    launches.sort(key=lambda x: x.stage)
    return Schedule(PLAN, tuple(launches), markers_of([s.name for s in plan.stages]))
