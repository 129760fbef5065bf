"""Interleaved timing: every contestant takes its turn in every round, in one process."""

import contextlib
import dataclasses
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to compute the same thing.

    `prepare(k)` makes the argument of the k-th call and is not timed; `call(argument)` is timed, until
    its result is ready. `inputs` says what is handed over ("device", "numpy", ...). `turn()` is entered around each
    of its turns: what runs beside its calls may not run beside the others'.
    """

    name: str
    inputs: str
    prepare: Callable[[int], Any]
    call: Callable[[Any], Any]
    note: str = ""
    turn: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    @property
    def key(self) -> str:
        return f"{self.name} / {self.inputs}"


@dataclasses.dataclass(frozen=True)
class Samples:
    """Times of one contestant, one list per round, milliseconds."""

    rounds: tuple[tuple[float, ...], ...]

    @property
    def flat(self) -> list[float]:
        return sorted(t for r in self.rounds for t in r)

    @property
    def median(self) -> float:
        return statistics.median(self.flat)

    def percentile(self, percent: float) -> float:
        """Linear between the nearest samples."""
        times = self.flat
        at = (len(times) - 1) * percent / 100
        low = int(at)
        high = min(low + 1, len(times) - 1)
        return times[low] + (times[high] - times[low]) * (at - low)

    @property
    def medians(self) -> list[float]:
        """One median per round, for paired comparisons."""
        return [statistics.median(r) for r in self.rounds]

    def then(self, later: "Samples") -> "Samples":
        """These rounds and those of a later measurement."""
        return Samples(self.rounds + later.rounds)

    def divided(self, by: int) -> "Samples":
        """Of calls that do something several times: the times of one."""
        return Samples(tuple(tuple(ms / by for ms in r) for r in self.rounds))


def paired_difference(a: Samples, b: Samples) -> float:
    """The median over rounds of a - b, milliseconds: what slows a whole round down cancels."""
    return statistics.median(x - y for x, y in zip(a.medians, b.medians, strict=True))


def paired_ratio(a: Samples, b: Samples) -> float:
    """The median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a.medians, b.medians, strict=True))


def timed(call: Callable[[Any], Any], argument: Any) -> tuple[float, Any]:
    """Milliseconds until the result is ready, and the result."""
    start = time.perf_counter_ns()
    out = jax.block_until_ready(call(argument))
    return (time.perf_counter_ns() - start) / 1e6, out


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long to measure: `rounds` rounds of `burst` timed calls, fewer if `seconds` are over."""

    rounds: int = 40
    burst: int = 4
    seconds: float = 90.0
    least_rounds: int = 8


@dataclasses.dataclass(frozen=True)
class Block:
    """A turn as a server's: `calls` in a row, every one of them timed and counted, the first ones too.

    Of what is slow fewer: a block ends once its calls took `ms` milliseconds.
    """

    calls: int = 50
    ms: float = 150.0


@contextlib.contextmanager
def still() -> Iterator[None]:
    """Without Python's garbage collector, and with what there is now out of its sight: walking all of JAX takes longer
    than what is timed. Inside one another, the outermost counts."""
    global _STILL
    if _STILL:
        yield
        return
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    _STILL = True
    try:
        yield
    finally:
        _STILL = False
        gc.unfreeze()
        if was_enabled:
            gc.enable()


_STILL = False


def interleave(
    contestants: Sequence[Contestant],
    plan: Plan,
    track: Callable[[Iterable[int]], Iterable[int]] = lambda rounds: rounds,
    block: Block | None = None,
    seed: int = 0,
) -> Mapping[str, Samples]:
    """Times the contestants, which are compiled already, round robin.

    In each round each contestant, in an order that differs from round to round, makes one call that isn't
    timed (the one before it has filled the caches) and `burst` calls that are; or a block, in place of both.
    Python's garbage collector runs between rounds alone. `seed`: of the order.
    """
    untimed = 1 if block is None else 0
    calls = untimed + (plan.burst if block is None else block.calls)
    longest = math.inf if block is None else block.ms
    order = random.Random(seed)
    times: dict[str, list[tuple[float, ...]]] = {c.key: [] for c in contestants}
    if len(times) != len(contestants):
        raise ValueError(f"two contestants have the same key: {[c.key for c in contestants]}")
    turn = 0
    with still():
        begun = time.monotonic()
        for done in track(range(plan.rounds)):
            if done >= plan.least_rounds and time.monotonic() - begun > plan.seconds:
                break
            for c in order.sample(contestants, len(contestants)):
                burst: list[float] = []
                with c.turn():
                    for call in range(calls):
                        argument = c.prepare(turn + call)
                        ms, out = timed(c.call, argument)
                        del argument, out
                        if call >= untimed:
                            burst.append(ms)
                        if sum(burst) > longest:
                            break
                times[c.key].append(tuple(burst))
            turn += calls
            gc.collect()
    return {k: Samples(tuple(v)) for k, v in times.items()}
