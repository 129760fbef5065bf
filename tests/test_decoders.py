"""Hostile words: programs, launch words and layouts with faults give an error of ours, or run inside their buffers.

Long runs, which are worth most under the address sanitizer (tools/sanitize)::

    python -m tests.test_decoders --rounds 20000 --seed 1
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from recom_jax import _recom
from recom_jax.cpu import encode
from recom_jax.cpu.encode import constants
from recom_jax.cuda import codegen
from recom_jax.program import Program
from tests import test_interpreter
from tests.cuda_emulation.models import GROUPS, as_function
from tests.cuda_emulation.programs import compiled
from tests.test_cuda_plan import MAGIC, SEARCHES, Call, check_tiles

pytestmark = pytest.mark.once

Array = np.ndarray[Any, Any]
BATCH = 7
ODD = (0, 1, 2, 3, 4, 8, -1, -2, 100, 1 << 62, -(1 << 63), (1 << 63) - 1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A program that runs, and what it runs on. `program` is None where the words were written by hand."""

    words: bytes
    operands: list[Array]
    results: list[Array]
    program: Program | None = None

    def run(self, words: bytes, threads: int = 1) -> list[Array]:
        binding = np.array([w for k in range(len(self.operands)) for w in (k, -1)], np.int64)
        out = [r.copy() for r in self.results]
        _recom.run_program(words, binding, self.operands, out, threads)
        return out


@functools.cache
def by_hand() -> list[Sample]:
    with jax.enable_x64(True):
        return [Sample(*made) for made in test_interpreter.samples()]


@functools.cache
def by_compiler() -> list[Sample]:
    """A program for each kind of column that the CUDA target knows; plain ones lie side by side in one result."""
    found: list[Sample] = []

    def keep(program: Program, operands: Any, results: Any) -> list[Array]:
        for r in results:
            r.fill(0)
        sample = Sample(encode(program).words, list(operands), list(results), program)
        found.append(sample)
        return sample.run(sample.words)

    for make in GROUPS.values():
        fn, args = as_function(make(BATCH))
        compiled(fn, args).run(keep)
    return found


@functools.cache
def calls() -> list[Call]:
    return [call_of(s) for s in by_compiler()]


def call_of(s: Sample) -> Call:
    assert s.program is not None
    types = constants()["dtype"]

    def typed(arrays: list[Array]) -> list[tuple[int, list[int]]]:
        return [(types[a.dtype.name], list(a.shape)) for a in arrays]

    words = np.frombuffer(codegen.generate(s.program).launch, np.int64).tolist()
    layout = [x for k in range(len(s.operands)) for x in (k, -1, 0)]
    classes, units = parts(words)
    return Call(s.program, typed(s.operands), typed(s.results), classes, units, layout)


def parts(words: list[int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Classes and units of launch words."""
    n = 4 + 4 * words[2]
    classes = [tuple(words[k : k + 4]) for k in range(4, n, 4)]
    return classes, [tuple(words[k : k + 2]) for k in range(n, len(words), 2)]


def mutated(words: list[int], rng: random.Random) -> list[int]:
    """The words with a few of them changed; some are cut short."""
    out = list(words)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(out))
        near = (out[at] // 2, out[at] ^ 1, out[at] & ~1, min(rng.choice(out), 1000))
        out[at] = rng.choice((*ODD, *near))
    return out[: rng.randrange(len(out))] if rng.random() < 0.1 else out


def pack(words: list[int]) -> bytes:
    return np.array(words, np.int64).tobytes()


def told(why: Exception) -> bool:
    """Whether an error is one of ours, or says that there is no memory for so much."""
    return isinstance(why, MemoryError) or str(why).startswith("recom")


# ---- the CPU's interpreter ---------------------------------------------------------------------------------------


def fuzz_programs(samples: list[Sample], rounds: int, seed: int) -> Counter[str]:
    """Runs mutated programs. What is not refused stays inside its buffers: the address sanitizer sees to it."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for k in range(rounds):
        s = samples[k % len(samples)]
        words = mutated(np.frombuffer(s.words, np.int64).tolist(), rng)
        try:
            s.run(pack(words), threads=rng.choice((1, 1, 1, 2)))
            outcomes["ran"] += 1
        except (ValueError, MemoryError) as why:
            outcomes["refused" if told(why) else f"strange: {why}"] += 1
    return outcomes


@pytest.mark.parametrize(("samples", "rounds"), [(by_hand, 3000), (by_compiler, 3000)])
def test_mutated_programs(samples: Any, rounds: int) -> None:
    before = [s.run(s.words) for s in samples()]
    outcomes = fuzz_programs(samples(), rounds, seed=0)
    assert set(outcomes) == {"ran", "refused"}
    assert outcomes["ran"] > rounds / 20
    assert outcomes["refused"] > rounds / 20
    for s, want in zip(samples(), before, strict=True):  # nothing is left of them
        for got, other in zip(s.run(s.words), want, strict=True):
            assert got.tobytes() == other.tobytes()


def test_columns_side_by_side_are_among_the_samples() -> None:
    """Rows of several columns that one loop writes (csrc/exec.cc: groups)."""
    programs = [s.program for s in by_compiler() if s.program is not None]
    assert max(len(p.columns) for p in programs) >= 8


# ---- the CUDA target's plan --------------------------------------------------------------------------------------


def fuzz_launches(chosen: list[Call], rounds: int, seed: int) -> Counter[str]:
    """Plans with mutated launch words, layouts, sizes, or programs. What is not refused has sound tiles."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for k in range(rounds):
        call = chosen[k % len(chosen)]
        what = rng.choice(("words", "words", "layout", "sizes", "program"))
        try:
            if what == "program":
                words = np.frombuffer(encode(call.program).words, np.int64).tolist()
                call.plan(program=pack(mutated(words, rng)))
            elif what == "layout":
                check(call, call.plan(layout=in_64_bits(mutated(call.layout, rng))))
            elif what == "sizes":
                other = dataclasses.replace(call, operands=resized(call.operands, rng))
                given = with_memory(call, rng)
                check(other, other.plan(sms=rng.choice((1, 132, -1, 1 << 30)), results=given))
            else:
                words = mutated(call.words(), rng)
                launches = call.plan(words=pack(words), results=with_memory(call, rng))
                classes, units = parts(words)
                check(dataclasses.replace(call, classes=classes, units=units), launches)
            outcomes[f"{what} planned"] += 1
        except (ValueError, MemoryError) as why:
            outcomes[f"{what} refused" if told(why) else f"strange: {why}"] += 1
    return outcomes


def with_memory(call: Call, rng: random.Random) -> list[tuple[int, list[int]]]:
    """The call's results, and memory for what tiles that search find, where any may: of some size, or none."""
    may = any(form >= SEARCHES for _, form, *_ in call.classes)
    if not may or rng.random() < 0.3:
        return call.results
    size = rng.choice((0, 1, 100, 1 << 16, 1 << 40))
    return [*call.results, (constants()["dtype"]["uint8"], [size])]


def check(call: Call, launches: list[dict[str, Any]]) -> None:
    check_tiles(call, launches)
    check_tiles(call, launches, "unaligned")


def in_64_bits(words: list[int]) -> list[int]:
    return np.array(words, np.int64).tolist()


def resized(types: list[tuple[int, list[int]]], rng: random.Random) -> list[tuple[int, list[int]]]:
    """One operand with other dims, or of another dtype."""
    out = [(t, list(dims)) for t, dims in types]
    at = rng.randrange(len(out))
    dtype, dims = out[at]
    if dims and rng.random() < 0.8:
        dims[rng.randrange(len(dims))] = rng.choice((0, 1, 3, 1000, 1 << 40, -1, (1 << 63) - 1))
    else:
        out[at] = (rng.choice((dtype, 1, 99, -1)), dims[: rng.randrange(len(dims) + 1)])
    return out


def test_mutated_launches() -> None:
    outcomes = fuzz_launches(calls(), 1500, seed=0)
    assert not [o for o in outcomes if o.startswith("strange")]
    for what in ("words", "layout", "sizes", "program"):
        assert outcomes[f"{what} refused"] > 20, outcomes
    assert outcomes["words planned"] > 20, outcomes
    assert outcomes["sizes planned"] > 0, outcomes


def test_every_class_and_unit_word_is_checked() -> None:
    """One word at a time, each odd value: an error, or tiles that are sound for the words as they are."""
    planned = refused = 0
    for call in calls()[::4]:
        good = call.words()
        assert good[0] == MAGIC
        for at in range(0, len(good), max(1, len(good) // 40)):
            for value in (*ODD, good[at] ^ 1):
                words = [*good[:at], value, *good[at + 1 :]]
                try:
                    launches = call.plan(words=pack(words))
                except ValueError as why:
                    refused += told(why)
                    continue
                classes, units = parts(words)
                check(dataclasses.replace(call, classes=classes, units=units), launches)
                planned += 1
    assert planned
    assert refused > planned


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rounds", type=int, default=20_000)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    for name, samples in (("by hand", by_hand()), ("by the compiler", by_compiler())):
        print(
            f"programs {name}: {dict(fuzz_programs(samples, args.rounds, args.seed))}", flush=True
        )
    print(f"launches: {dict(fuzz_launches(calls(), args.rounds, args.seed))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
