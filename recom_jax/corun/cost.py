"""The cost model: what a piece of preprocessing is, and how long a kernel of pieces takes with a share of a device.

A kernel is a list of tiles; its blocks take them in turns. Three things can bound it: one tile's latency (a small
launch takes as long as its slowest tile, however many processors it has), the tiles that a block gets one after the
other, and what the processors that it occupies compute and move at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

_SHARP = 3.5  # how sharply one bound gives way to the other: measured
BLOCKS = 8  # of 256 threads, on a multiprocessor: as many as it holds at a time


@dataclasses.dataclass(frozen=True)
class Work:
    """What something costs.

    Attributes:
      compute_us, memory_us: arithmetic, and memory traffic, on a whole device with nothing beside them; they overlap.
      tiles: how many it is cut into, 0 where that is not known.
      latency_us: what the tiles take one after the other, each alone on a processor; longest_us: the slowest of them.
    """

    compute_us: float
    memory_us: float
    tiles: float = 0.0
    latency_us: float = 0.0
    longest_us: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.compute_us + other.compute_us,
            self.memory_us + other.memory_us,
            self.tiles + other.tiles,
            self.latency_us + other.latency_us,
            max(self.longest_us, other.longest_us),
        )

    def __mul__(self, fraction: float) -> Work:
        return Work(
            self.compute_us * fraction,
            self.memory_us * fraction,
            self.tiles * fraction,
            self.latency_us * fraction,
            self.longest_us if fraction > 0 else 0.0,
        )

    @property
    def alone_us(self) -> float:
        return max(self.compute_us, self.memory_us)


NOTHING = Work(0.0, 0.0)


def total(works: Iterable[Work]) -> Work:
    return sum(works, NOTHING)


@dataclasses.dataclass(frozen=True)
class Load:
    """A kernel whose tiles are known one by one, in microseconds.

    Attributes:
      blocks: that share the tiles, each taking every so manieth; busiest_us: of the block that has most to do.
      alone_us: of all tiles on a whole device; longest_us: of the slowest tile.
      ragged_mb: megabytes of the 32-byte sectors of results that the kernel writes in part.
    """

    blocks: int
    busiest_us: float
    alone_us: float
    longest_us: float
    ragged_mb: float = 0.0


@dataclasses.dataclass(frozen=True)
class Device:
    """The cost model's constants.

    Attributes:
      launch_us: what a kernel costs besides its work.
      bandwidth_gain: a kernel with a share of the processors gets this many times as much of the memory bandwidth, at
        most all of it. Where tiles are known, they tell it instead.
      processors: of the device; 0 where tiles are not known.
      filled: (blocks a processor, how many times as long a kernel takes there as its two bounds say), ascending: what
        was measured between few blocks and as many as a processor holds. Empty: 1 everywhere.
      ragged_us: what a megabyte of sectors that are written in part costs a whole device. Results that stay in its
        cache until others write the rest cost nothing; those that leave it are read again and written twice.
    """

    launch_us: float = 3.0
    bandwidth_gain: float = 4.0
    processors: int = 0
    filled: tuple[tuple[float, float], ...] = ()
    ragged_us: float = 0.0

    def blocks(self, share: float) -> int:
        """Blocks of a kernel with this share, if it has as many tiles."""
        return max(1, round(share * self.processors * BLOCKS))

    def excess(self, blocks: int) -> float:
        """How many times as long a kernel of so many blocks takes as its two bounds say."""
        if not self.filled:
            return 1.0
        at = [math.log2(b) for b, _ in self.filled]
        return float(
            np.interp(math.log2(blocks / self.processors), at, [x for _, x in self.filled])
        )

    def kernel_us(self, work: Work, share: float) -> float:
        """Time of a kernel that has `share` of the processors; its tiles are taken to be alike."""
        if not (self.processors and work.tiles):
            memory = work.memory_us / min(1.0, share * self.bandwidth_gain)
            return self.launch_us + max(work.compute_us / share, memory)
        tiles = math.ceil(work.tiles - 1e-9)
        blocks = min(self.blocks(share), tiles)
        turns = math.ceil(tiles / blocks) / tiles * work.latency_us
        return self.loaded_us(Load(blocks, turns, work.alone_us, work.longest_us))

    def loaded_us(self, load: Load) -> float:
        """Time of a kernel."""
        spread = max(1.0, self.processors / load.blocks)  # fewer than processors leave some idle
        done_us = (load.alone_us + self.ragged_us * load.ragged_mb) * spread
        bounds = both(load.busiest_us, done_us) * self.excess(load.blocks)
        return self.launch_us + max(load.longest_us, bounds)

    def fits(self, work: Work, load: Work, share: float, us: float) -> float:
        """Which part of `work` may join `load` in a kernel with `share` that takes `us` at most, launch included."""
        us -= self.launch_us
        if not (self.processors and work.tiles):
            wide = min(1.0, share * self.bandwidth_gain)
            return min(
                part_of(work.compute_us, us * share - load.compute_us),
                part_of(work.memory_us, us * wide - load.memory_us),
            )
        if work.longest_us > us:
            return 0.0
        blocks = self.blocks(share)
        us /= both(1.0, 1.0) * self.excess(blocks)  # so that both bounds at their limits fit
        spread = max(1.0, self.processors / blocks)
        return min(
            part_of(work.latency_us, us * blocks - load.latency_us),
            part_of(work.alone_us, us / spread - load.alone_us),
        )


def both(a: float, b: float) -> float:
    """What two bounds come to together: the larger one, and more where they are alike."""
    most = max(a, b)
    return most * sum((x / most) ** _SHARP for x in (a, b)) ** (1 / _SHARP) if most > 0 else 0.0


def rest_of(whole: float, a: float) -> float:
    """The other bound of `both`, from what they come to and one of them."""
    return whole * max(0.0, 1 - (a / whole) ** _SHARP) ** (1 / _SHARP) if 0 <= a < whole else 0.0


def part_of(need: float, room: float) -> float:
    """Which part of a need fits a room."""
    if need <= 0:
        return 1.0
    return min(1.0, max(0.0, room / need))
