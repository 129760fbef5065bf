"""The joint search: which device owns a feature, which stage runs a segment, in which pieces, with which share.

Deterministic and heuristic. A mapping is found first (the largest feature to the least loaded device) and improved by
moves. For a device, stages are filled in order; in each, every share of the grid and several orders of the ready
segments are tried; a segment that does not fit whole is cut by rows. A stage is filled up to what it leaves free, so
that the step is not slowed; what finds no place runs after the step and is paid for.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence

from recom_jax.corun.cost import part_of
from recom_jax.corun.fuse import groups, segments, whole
from recom_jax.corun.plan import AFTER, NOTHING, Device, Kernel, Plan, PrepOp, Segment, Stage, Work

LEAST_PIECE = 0.05  # of a segment: smaller cuts cost more than they hide
MOST_MOVES = 64
RESORT = 16  # segments, after which those that wait are sorted anew
_TINY = 1e-9


@dataclasses.dataclass(frozen=True)
class Placed:
    """One device's part of a plan: what runs after the step, and what the step loses to kernels beside it."""

    kernels: tuple[Kernel, ...]
    after_us: float
    lost_us: float = 0.0

    @property
    def extra_us(self) -> float:
        return self.after_us + self.lost_us


def shares(low: float, high: float) -> tuple[float, ...]:
    """The grid of shares: powers of two between the bounds, and the bounds."""
    grid = {low, high}
    share = 1.0
    while share > low:
        if share <= high:
            grid.add(share)
        share /= 2
    return tuple(sorted(grid))


# Orders in which ready segments are tried: (segment, room of the stage for arithmetic and memory) -> key.
_Key = Callable[[Segment, float, float], tuple[float, ...]]


def _by_fit(s: Segment, compute: float, memory: float) -> tuple[float, ...]:
    """First what takes least of the scarcer resource for its work."""
    use = max(s.work.compute_us / max(compute, _TINY), s.work.memory_us / max(memory, _TINY))
    return (use / max(s.work.compute_us + s.work.memory_us, _TINY),)


def _large_first(s: Segment, compute: float, memory: float) -> tuple[float, ...]:
    del compute, memory
    return (-s.work.alone_us,)


def _early_level_first(s: Segment, compute: float, memory: float) -> tuple[float, ...]:
    del compute, memory
    return (s.level, -s.work.alone_us)


def _memory_first(s: Segment, compute: float, memory: float) -> tuple[float, ...]:
    """For programs that memory traffic bounds: a stage's bandwidth is used up before its arithmetic."""
    del compute, memory
    return (-s.work.memory_us / max(s.work.compute_us + s.work.memory_us, _TINY),)


def _compute_first(s: Segment, compute: float, memory: float) -> tuple[float, ...]:
    return (-_memory_first(s, compute, memory)[0],)


ORDERS: tuple[_Key, ...] = (
    _by_fit,
    _early_level_first,
    _large_first,
    _memory_first,
    _compute_first,
)


def fill_stage(
    stage: Stage,
    left: Mapping[str, float],
    parts: Mapping[str, Segment],
    share: float,
    order: _Key,
    device: Device,
) -> dict[str, float]:
    """What one stage takes with one share: segment -> part of it. Respects time, free capacity and dependencies.

    Args:
      left: the part of each segment that has no place yet (absent: all placed).
    """
    compute = stage.free_compute * stage.duration_us
    memory = stage.free_memory * stage.duration_us
    taken: dict[str, float] = {}
    loads: dict[int, Work] = {}
    used_us = 0.0
    open_: dict[str, int] = {}  # a segment's inputs that are not there yet
    readers: dict[str, list[str]] = {}
    for name in left:
        missing = [a for a in parts[name].after if a in left]
        open_[name] = len(missing)
        for a in missing:
            readers.setdefault(a, []).append(name)
    room = (compute, memory)
    ready = [(order(parts[n], *room), n) for n, count in open_.items() if not count]
    heapq.heapify(ready)
    tried = 0
    while ready:
        tried += 1
        if tried % RESORT == 0:  # what is scarce may have changed
            room = (compute, memory)
            ready = [(order(parts[n], *room), n) for _, n in ready]
            heapq.heapify(ready)
        best = parts[heapq.heappop(ready)[1]]
        rest = left[best.name]
        load = loads.get(best.level, NOTHING)
        old_us = device.kernel_us(load, share) if best.level in loads else 0.0
        room_us = stage.duration_us - used_us + old_us
        part = min(
            rest,
            part_of(best.work.compute_us, compute),
            part_of(best.work.memory_us, memory),
            device.fits(best.work, load, share, room_us),
        )
        if part < rest and part < LEAST_PIECE:
            continue
        taken[best.name] = part
        piece = best.work * part
        loads[best.level] = load + piece
        used_us += device.kernel_us(loads[best.level], share) - old_us
        compute, memory = compute - piece.compute_us, memory - piece.memory_us
        if part >= rest - _TINY:
            for name in readers.get(best.name, ()):
                open_[name] -= 1
                if not open_[name]:
                    heapq.heappush(ready, (order(parts[name], *room), name))
    return taken


def place(
    parts: Sequence[Segment],
    stages: Sequence[Stage],
    gpu: int,
    device: Device,
    grid: Sequence[float],
) -> Placed:
    """Places one device's segments: the best of the orders."""
    best: Placed | None = None
    for order in ORDERS:
        made = _place(parts, stages, gpu, device, grid, order)
        if best is None or made.extra_us < best.extra_us - _TINY:
            best = made
        if best.extra_us <= _TINY:
            break
    assert best is not None
    return best


def chosen(stages: Sequence[Stage], need_us: float, grid: Sequence[float]) -> list[Stage]:
    """Stages worth a kernel, the cheapest first, each with the share with which the step loses least as a whole.

    A small share costs the step least, and gets least done; what finds no room runs behind the step at full cost. So
    which share is best depends on the other stages': one is changed at a time, as long as that helps.
    """
    options = [
        [s.taking(c) for c in s.choices if grid[0] <= c.share <= grid[-1] and c.cost < 1]
        if s.choices
        else [s] * (s.cost < 1)
        for s in stages
    ]
    now = [min(o, key=lambda s: (s.cost, s.share)) for o in options if o]
    options = [o for o in options if o]
    best = lost_us(now, need_us)
    better = True
    while better:
        better = False
        for k, mine in enumerate(options):
            for other in mine:
                tried = [*now[:k], other, *now[k + 1 :]]
                lost = lost_us(tried, need_us)
                if lost < best - _TINY:
                    now, best, better = tried, lost, True
    return sorted(now, key=lambda s: s.cost)


def lost_us(stages: Sequence[Stage], need_us: float) -> float:
    """What a step loses to so much preprocessing, which may be cut anywhere: to what runs beside it, and behind it."""
    lost = 0.0
    for stage in sorted(stages, key=lambda s: s.cost):
        taken = min(need_us, stage.duration_us * min(stage.free_compute, stage.free_memory))
        lost, need_us = lost + stage.cost * taken, need_us - taken
    return lost + need_us


def _place(
    parts: Sequence[Segment],
    stages: Sequence[Stage],
    gpu: int,
    device: Device,
    grid: Sequence[float],
    order: _Key,
) -> Placed:
    by_name = {s.name: s for s in parts}
    left = {s.name: 1.0 for s in parts}
    kernels: list[Kernel] = []
    worth = [s for s in stages if s.cost < 1]
    if all(s.level == 0 for s in parts):  # nothing waits for anything: the cheapest stages first
        worth = chosen(stages, whole(parts).alone_us, grid)
    lost = 0.0
    for stage in worth:
        if not left:
            break
        own = [stage.share] if grid[0] <= stage.share <= grid[-1] else grid
        choices = [(fill_stage(stage, left, by_name, s, order, device), s) for s in own]
        taken, share = max(
            choices,
            key=lambda c: (
                round(sum(by_name[n].work.alone_us * f for n, f in c[0].items()), 6),
                -c[1],
            ),
        )
        kernels += _kernels(stage.name, taken, left, by_name, share, gpu, device, len(kernels))
        lost += stage.cost * sum(by_name[n].work.alone_us * f for n, f in taken.items())
        for name, part in taken.items():
            left[name] -= part
            if left[name] <= _TINY:
                del left[name]
    after = _kernels(AFTER, dict(left), left, by_name, 1.0, gpu, device, len(kernels))
    return Placed((*kernels, *after), sum(k.duration_us for k in after), lost)


def _kernels(
    stage: str,
    taken: Mapping[str, float],
    left: Mapping[str, float],
    parts: Mapping[str, Segment],
    share: float,
    gpu: int,
    device: Device,
    number: int,
) -> list[Kernel]:
    """One kernel a level, one after the other."""
    made: list[Kernel] = []
    start = 0.0
    for level in sorted({parts[n].level for n in taken}):
        names = sorted(n for n in taken if parts[n].level == level)
        pieces = tuple((n, 1.0 - left[n], min(1.0, 1.0 - left[n] + taken[n])) for n in names)
        work = sum((parts[n].work * taken[n] for n in names), NOTHING)
        length = device.kernel_us(work, share)
        name = f"k{gpu}.{number + len(made)}"
        made.append(Kernel(name, gpu, stage, level, share, pieces, work, start, length))
        start += length
    return made


# ---- mapping -------------------------------------------------------------------------------------------------


def initial_mapping(
    parts: Sequence[Segment], group_of: Mapping[str, int], gpus: int, owners: Mapping[str, int]
) -> dict[int, int]:
    """Group of features -> device: the owner's where there is one, else the largest first to the least loaded."""
    load = [0.0] * gpus
    size: dict[int, float] = dict.fromkeys(group_of.values(), 0.0)
    for s in parts:
        for feature in s.features[:1]:
            size[group_of[feature]] += s.work.alone_us
    made: dict[int, int] = {}
    for feature, gpu in sorted(owners.items()):
        if feature in group_of and group_of[feature] not in made:
            made[group_of[feature]] = gpu
            load[gpu] += size[group_of[feature]]
    for group in sorted(size, key=lambda g: (-size[g], g)):
        if group not in made:
            gpu = min(range(gpus), key=lambda g: (load[g], g))
            made[group] = gpu
            load[gpu] += size[group]
    return made


def _alone_us(parts: Sequence[Segment], device: Device) -> float:
    """Everything in front of the step, a kernel for each level."""
    levels = {s.level for s in parts}
    return sum(device.kernel_us(whole([s for s in parts if s.level == n]), 1.0) for n in levels)


def search(
    ops: Sequence[PrepOp],
    stages: Sequence[Stage],
    *,
    device: Device | None = None,
    gpus: int = 1,
    owners: Mapping[str, int] | None = None,
    min_share: float = 0.0625,
    max_share: float = 0.5,
    assumed: Sequence[str] = (),
) -> Plan:
    """The plan for one step's stages (the same on every device) and a preprocessing program.

    Args:
      owners: feature -> the device that holds its table; such features stay there. Others go where there is room.
    """
    device = device or Device()
    parts = segments(ops)
    group_of = groups(ops)
    group_of.setdefault("", -1)
    fixed = {group_of[f] for f in owners or {} if f in group_of}
    mapping = initial_mapping(parts, group_of, gpus, owners or {})
    grid = shares(min_share, max_share)

    def of(gpu: int, where: Mapping[int, int]) -> Placed:
        mine = [s for s in parts if where[group_of[s.features[0] if s.features else ""]] == gpu]
        return place(mine, stages, gpu, device, grid)

    placed = {gpu: of(gpu, mapping) for gpu in range(gpus)}
    for _ in range(MOST_MOVES):
        worst = max(placed, key=lambda g: (placed[g].extra_us, -g))
        target = min(placed, key=lambda g: (placed[g].extra_us, g))
        if placed[worst].extra_us - placed[target].extra_us <= _TINY:
            break
        for group in sorted(g for g, gpu in mapping.items() if gpu == worst and g not in fixed):
            moved = {**mapping, group: target}
            new = {g: of(g, moved) for g in (worst, target)}
            if max(p.extra_us for p in new.values()) < placed[worst].extra_us - _TINY:
                mapping, placed = moved, {**placed, **new}
                break
        else:
            break

    ideal = sum(s.duration_us for s in stages)
    by_gpu = [
        [s for s in parts if mapping[group_of[s.features[0] if s.features else ""]] == g]
        for g in range(gpus)
    ]
    alone = max((_alone_us(mine, device) for mine in by_gpu if mine), default=0.0)
    return Plan(
        tuple(stages),
        tuple(ops),
        parts,
        tuple(k for gpu in range(gpus) for k in placed[gpu].kernels),
        tuple((f, mapping[g]) for f, g in sorted(group_of.items()) if f and g in mapping),
        gpus,
        ideal,
        ideal + alone,
        ideal + max(p.extra_us for p in placed.values()),
        tuple(assumed),
    )


__all__ = ["Device", "Work", "search"]
