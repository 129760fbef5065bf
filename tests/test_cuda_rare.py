"""Code of jagged bags that hardly ever runs, emulated: tiles that have no room in shared memory or allow no vectors,
and bags in any order. It reads again what the usual code keeps in registers (recom_jax/cuda/body.py)."""

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

from recom_jax.cuda.codegen import generate
from tests import cuda_emulation
from tests.cuda_emulation import Compiled, Options, emulate, interpret
from tests.helpers import assert_same
from tests.test_cuda_codegen import LONG_BAGS, source

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]
POSITIONS, BAGS, ROWS = 9000, 24, 60  # a tile of 6,128 int32 ids has room, in kernels with runs
WAYS = (Options(sms=1), Options(tiles="unaligned", sms=1), Options(tiles=5, order=2))


def bags(seg: Any, n: int, args: Any) -> dict[str, Any]:
    """Sums by runs at several places of results of several widths, a mean, a weighted sum, and an extreme."""
    x, weights, tables = args
    total = functools.partial(jax.ops.segment_sum, segment_ids=seg, num_segments=n)
    sums = [total(t[i]) for t, i in zip(tables["sums"], x, strict=False)]
    mean = total(tables["mean"][x[3]]) / jnp.maximum(total(jnp.ones(POSITIONS)), 1)[:, None]
    weighted = [total(tables["mean"][x[4]] * w[:, None]) for w in weights]
    return {
        "two": jnp.concatenate(sums[:2], axis=1),
        "one": sums[2],
        "mean": mean,
        "weighted": jnp.concatenate(weighted, axis=1),
        "max": jax.ops.segment_max(jnp.take(tables["mean"], x[5], axis=0), seg, num_segments=n),
    }


def of_splits(args: Any) -> dict[str, Any]:
    splits, rest = args
    seg = jnp.searchsorted(splits, jnp.arange(POSITIONS), side="right") - 1
    return bags(seg, splits.shape[0] - 1, rest)


def of_segments(args: Any) -> dict[str, Any]:
    seg, rest = args
    return bags(seg, BAGS, rest)


def of_repeats(args: Any) -> dict[str, Any]:
    splits, rest = args
    n = splits.shape[0] - 1
    seg = jnp.repeat(jnp.arange(n), jnp.diff(splits), total_repeat_length=POSITIONS)
    return bags(seg, n, rest)


@functools.cache
def rest(seed: int = 0) -> Any:
    """Row numbers of each column, a few of them no row's; weights; tables."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-ROWS, ROWS, (6, POSITIONS)).astype(np.int32)
    x = np.where(rng.random(x.shape) < 0.001, 10 * ROWS, x).astype(np.int32)
    rows = rng.standard_normal((4, ROWS, 8)).astype(np.float32)
    weights = rng.random((2, POSITIONS)).astype(np.float32)
    return list(x), list(weights), {"sums": list(rows[:3]), "mean": rows[3]}


@functools.lru_cache(maxsize=3)
def compiled(fn: Any) -> Compiled:
    shown = np.zeros(POSITIONS if fn is of_segments else BAGS + 1, np.int32)
    return cuda_emulation.compiled(fn, (shown, rest()))


def check(fn: Any, limits: Any, ways: Sequence[Options] = WAYS) -> None:
    args = (np.asarray(limits, np.int32), rest())
    c = dataclasses.replace(compiled(fn), args=jax.tree_util.tree_leaves((args,)))
    want = c.run(interpret)
    assert_same(want, jax.jit(fn)(args), dict.fromkeys(want, 0.1))
    for way in ways:
        assert_same(c.run(functools.partial(emulate, options=way)), want, dict.fromkeys(want, 0.1))


def splits_of(lengths: Sequence[int]) -> Any:
    at = np.minimum(np.cumsum([0, *lengths]), POSITIONS)
    return np.concatenate([at, np.full(BAGS + 1 - len(at), at[-1])]).astype(np.int32)


LENGTHS = {
    "one long": [3, 0, 8000, 7, 900],
    "two long": [0, 4400, 4400, 1, 0, 30],
    "short": [9] * 20,
}


@pytest.mark.parametrize("fn", [of_splits, of_segments, of_repeats])
@pytest.mark.parametrize("name", LENGTHS)
def test_tiles_without_room(fn: Any, name: str) -> None:
    splits = splits_of(LENGTHS[name])
    if fn is of_segments:
        splits = np.searchsorted(splits, np.arange(POSITIONS), side="right") - 1
    check(fn, splits)


def test_bags_in_any_order() -> None:
    splits = splits_of([40] * 20)
    splits[[3, 17]] = splits[[17, 3]]
    check(of_splits, splits, WAYS[:1])
    seg = np.random.default_rng(2).integers(-2, BAGS + 2, POSITIONS)
    check(of_segments, seg, WAYS[:1])


def test_bags_that_take_a_block() -> None:
    """Rare code leaves long bags to their block as the usual code does."""
    way = Options(sms=1, schedule=LONG_BAGS)
    check(of_splits, splits_of(LENGTHS["one long"]), (way,))
    check(of_splits, splits_of(LENGTHS["one long"])[::-1], (way,))


@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 9, 60, 700, 3000, 6500]), max_size=BAGS),
    st.booleans(),
    st.sampled_from(WAYS),
)
@settings(max_examples=max(settings.default.max_examples // 8, 2), deadline=None)
def test_any_lengths(lengths: list[int], swapped: bool, way: Options) -> None:
    splits = splits_of(lengths)
    if swapped:
        splits[[2, 5]] = splits[[5, 2]]
    check(of_splits, splits, (way,))


# ---- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jagged", "splits", "runs"])
def test_usual_code_reads_nothing_again(name: str) -> None:
    """Words are read again behind `else` of `if constexpr (kStaged)`, and in the function for any order, alone."""
    any_order, _, ascending = source(name).partition("// Class 0:")
    assert "me.again(" in any_order and "me.word(" not in any_order
    usual, _, rare = ascending.partition("  } else {\n")
    assert "if constexpr (kStaged) {" in usual and "me.again(" not in usual
    assert "me.again(" in rare and "me.word(" not in rare and "out +" not in rare


@pytest.mark.parametrize("name", ["lookup", "weighted", "largest", "one_hot", "masked"])
def test_bags_of_one_length_have_no_rare_code(name: str) -> None:
    assert "again" not in source(name)


def test_rows_without_vectors_have_no_rare_loop() -> None:
    """Their tiles have one kind of code, which is the usual one."""

    def fn(args: Any) -> Any:
        table, x, splits = args
        seg = jnp.searchsorted(splits, jnp.arange(POSITIONS), side="right") - 1
        return jax.ops.segment_sum(table[x], seg, num_segments=splits.shape[0] - 1)

    args = np.zeros((ROWS, 3), np.float32), rest()[0][0] % ROWS, splits_of([4] * 20)
    for program in cuda_emulation.compiled(fn, args).programs:
        text = generate(program).source
        assert "class_0<1, false>(p, t)" in text and "class_0<4" not in text
        assert "again(" not in text.partition("template <int kVec, bool kStaged>")[2]
