"""Jagged bags of narrow rows, whose positions a block's threads share evenly (recom_jax/cuda/runs.py), emulated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recom_jax.cuda.codegen import DEFAULT, Schedule, generate
from recom_jax.cuda.units import RUNS, SEARCHES
from recom_jax.program import Program
from tests import cuda_emulation
from tests.cuda_emulation import Compiled, Options, emulate, interpret
from tests.helpers import assert_same

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]
WAYS = (Options(sms=1), Options(tiles="simple", order=1), Options(tiles=3, order=2))
POSITIONS, BAGS, ROWS = 700, 24, 60


def bags(seg: Any, n: int, x: Any, tables: dict[str, Any]) -> dict[str, Any]:
    """Sums and extremes over bags, with ids of their own that are checked in every way."""
    total = functools.partial(jax.ops.segment_sum, segment_ids=seg, num_segments=n)
    rows = functools.partial(jnp.take, axis=0)
    return {
        "one lane": total(tables["a"][x[0]]),
        "two lanes": total(rows(tables["b"], x[1], mode="clip")),
        "four lanes, missing rows are 2": total(
            rows(tables["c"], x[2], mode="fill", fill_value=2.0)
        ),
        "no whole lane, missing rows are NaN": total(rows(tables["d"], x[3])),
        "integers": total(tables["i"][x[4]]),
        "max": jax.ops.segment_max(rows(tables["b"], x[5], mode="clip"), seg, num_segments=n),
        "min of what may be missing": jax.ops.segment_min(
            rows(tables["c"], x[6]), seg, num_segments=n
        ),
    }


def of_splits(args: Any) -> dict[str, Any]:
    splits, x, tables = args
    seg = jnp.searchsorted(splits, jnp.arange(POSITIONS), side="right") - 1
    return bags(seg, splits.shape[0] - 1, x, tables)


def of_segments(args: Any) -> dict[str, Any]:
    seg, x, tables = args
    return bags(seg, BAGS, x, tables)


def tables() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    made = {
        k: rng.standard_normal((ROWS, d)).astype(np.float32)
        for k, d in (("a", 4), ("b", 8), ("c", 16), ("d", 12))
    }
    return made | {"i": rng.integers(-9, 9, (ROWS, 4)).astype(np.int32)}


def ids(missing: float, seed: int = 0) -> list[Any]:
    """Row numbers of each column, some negative; `missing`: the share that are no row's."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-ROWS, ROWS, (7, POSITIONS))
    return list(np.where(rng.random(x.shape) < missing, 10 * ROWS, x).astype(np.int32))


@functools.lru_cache(maxsize=2)
def compiled(fn: Any) -> Compiled:
    shown = np.zeros(BAGS + 1 if fn is of_splits else POSITIONS, np.int32)
    return cuda_emulation.compiled(fn, (shown, ids(0.0), tables()))


def run(fn: Any, *args: Any, options: Options | None = None) -> Any:
    """The function's results, its fused calls emulated; without options, interpreted."""
    c = dataclasses.replace(compiled(fn), args=jax.tree_util.tree_leaves((args,)))
    return c.run(functools.partial(emulate, options=options) if options else interpret)


def check(fn: Any, limits: Any, x: Any, ways: Sequence[Options] = WAYS) -> None:
    args = (np.asarray(limits, np.int32), x, tables())
    want = run(fn, *args)
    assert_same(want, jax.jit(fn)(args), dict.fromkeys(want, 0.02))
    for way in ways:
        assert_same(run(fn, *args, options=way), want, dict.fromkeys(want, 0.02))


def forms(program: Program, schedule: Schedule = DEFAULT) -> list[int]:
    """The form of each class, as the launch words have it."""
    words = np.frombuffer(generate(program, schedule).launch, np.int64)
    return words[4 + 1 : 4 + 4 * words[2] : 4].tolist()


LENGTHS = {
    "one bag": [POSITIONS],
    "a bag a position": [1] * BAGS,
    "empty ones around": [0, 0, 5, 0, 0, 0, 300, 0, 1, 0],
    "ends of runs": [5, 10, 10, 5, 35, 0, 15, 1, 4],
    "as long as all runs but one": [POSITIONS - 3, 3],
    "none": [],
}


def splits_of(lengths: Sequence[int]) -> Any:
    """Row splits of so many bags, the rest of them empty."""
    at = np.minimum(np.cumsum([0, *lengths]), POSITIONS)
    return np.concatenate([at, np.full(BAGS + 1 - len(at), at[-1])]).astype(np.int32)


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name: str) -> None:
    """Bags that begin and end where runs do, that many runs share, that are empty; positions of no bag."""
    splits = splits_of(LENGTHS[name])
    for missing in (0.0, 0.1):
        check(of_splits, splits, ids(missing), WAYS if missing else WAYS[:1])
    seg = np.searchsorted(splits, np.arange(POSITIONS), side="right") - 1
    check(of_segments, seg, ids(0.1), WAYS[:1])


def test_any_order() -> None:
    """What does not ascend is summed up another way, told before or after the bags."""
    rng = np.random.default_rng(1)
    check(of_splits, splits_of([300, 10, 200])[::-1], ids(0.05))
    shuffled = splits_of([30] * 20)
    shuffled[[3, 17]] = shuffled[[17, 3]]  # other tiles are in order
    check(of_splits, shuffled, ids(0.05))
    check(of_segments, rng.integers(-2, BAGS + 2, POSITIONS), ids(0.05))


@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 17, 60, 250]), max_size=BAGS),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.integers(0, 2**16),
    st.sampled_from(WAYS),
)
@settings(max_examples=max(settings.default.max_examples // 4, 2), deadline=None)
def test_any_lengths(lengths: list[int], missing: float, seed: int, way: Options) -> None:
    check(of_splits, splits_of(lengths), ids(missing, seed), (way,))


def test_the_order_of_threads_changes_no_bit() -> None:
    args = (splits_of([3, 0, 250, 1, 90, 17, 300]), ids(0.05), tables())
    first, *others = [run(of_splits, *args, options=Options(sms=1, order=o)) for o in (0, 1, 2, 3)]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


def test_what_has_runs() -> None:
    """Every sum above has; the launch words say so, and the text holds the other way for tiles without room."""
    for fn in (of_splits, of_segments):
        (program,) = compiled(fn).programs
        searches = SEARCHES if fn is of_segments else 0
        assert set(forms(program)) == {RUNS + searches}
        text = generate(program).source
        assert text.count("sum_runs<") == len(forms(program))
        assert text.count("for (Turn turn(") == len(forms(program))


@pytest.mark.parametrize(
    "kind", ["weights", "wide rows", "numbers", "a mean", "lengths", "padded", "odd width", "bf16"]
)
def test_what_has_none(kind: str) -> None:
    """Sums that a run has no code for are taken bag by bag, as before."""
    dim = {"wide rows": 256, "odd width": 3}.get(kind, 8)
    table = np.zeros((ROWS, dim), np.float32)
    x, splits = ids(0.0)[0] % ROWS, splits_of([50, 60])
    weights = np.ones(POSITIONS, np.float32)

    def fn(args: Any) -> Any:
        table, x, splits, weights = args
        n = splits.shape[0] - 1
        seg = jnp.searchsorted(splits, jnp.arange(POSITIONS), side="right") - 1
        if kind == "lengths":
            seg = jnp.repeat(jnp.arange(n), jnp.diff(splits), total_repeat_length=POSITIONS)
            lengths = splits[:-1]
            seg = jnp.repeat(jnp.arange(n), lengths, total_repeat_length=POSITIONS)
        rows = table[x]
        if kind == "padded":
            return rows.reshape(-1, 10, dim).sum(1)
        if kind == "weights":
            rows = rows * weights[:, None]
        if kind == "numbers":
            rows = rows[:, :1]
        if kind == "bf16":
            rows = table.astype(jnp.bfloat16)[x].astype(jnp.float32)
        sums = jax.ops.segment_sum(rows, seg, num_segments=n)
        if kind == "a mean":
            counts = jax.ops.segment_sum(jnp.ones(POSITIONS), seg, num_segments=n)
            sums = sums / jnp.maximum(counts, 1)[:, None]
        return sums

    for program in cuda_emulation.compiled(fn, (table, x, splits, weights)).programs:
        assert RUNS not in forms(program)
