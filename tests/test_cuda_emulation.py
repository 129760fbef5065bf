"""Generated CUDA text, executed without a GPU, against the CPU's interpreter and plain JAX.

A long run over random columns, as tests.test_random_programs makes them::

    python -m tests.test_cuda_emulation --columns 2000 --seed 1
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recom_jax
from recom_jax.cuda.codegen import Schedule, generate
from recom_jax.errors import EncodeError
from recom_jax.program import Program
from tests import cuda_emulation, random_columns, random_models
from tests.cuda_emulation import Options, emulate, interpret
from tests.cuda_emulation.models import GROUPS, as_function
from tests.helpers import assert_same

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]

# Tiles as the real plan cuts them, for small and large devices; for buffers that lie badly; then any others.
WAYS = (
    Options(sms=1),
    Options(sms=132, order=3, slice_positions=1.0),
    Options(tiles="unaligned"),
    Options(tiles="simple", order=1),
    Options(tiles=1),
    Options(tiles=2, order=2),
)
BATCH = 37  # no other axis of a group has this many elements
# The long profile takes its time (tests/conftest.py).
LONG = os.environ.get("RECOM_HYPOTHESIS") == "long"
BATCHES = (BATCH, 135) if LONG else (BATCH,)


def check(fn: Any, args: Any, bounds: Any, ways: Sequence[Options] = WAYS) -> None:
    """The function with its fused calls emulated equals itself on the CPU and plain JAX."""
    c = cuda_emulation.compiled(fn, args)
    want = jax.jit(fn)(args)
    on_cpu = c.run(interpret)
    for way in ways:
        got = c.run(functools.partial(emulate, options=way))
        for other, name in ((on_cpu, "the interpreter"), (want, "plain JAX")):
            try:
                assert_same(got, other, bounds)
            except AssertionError as why:
                raise AssertionError(f"{way}, against {name}:\n{why}") from None


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", GROUPS)
def test_group(name: str, batch: int) -> None:
    cases = GROUPS[name](batch)
    fn, args = as_function(cases)
    check(fn, args, {k: c.tolerance() for k, c in cases.items()})


def cut(arrays: Sequence[Any], sizes: dict[int, int]) -> list[Any]:
    """The arrays with axes of the given sizes shortened."""
    shapes = [tuple(sizes.get(n, n) for n in a.shape) for a in arrays]
    return [
        np.ascontiguousarray(a[tuple(map(slice, s))]) for a, s in zip(arrays, shapes, strict=True)
    ]


@pytest.mark.parametrize("name", GROUPS)
def test_nothing_at_all(name: str) -> None:
    """A program made for a batch meets an empty one, and bags without positions. (Traced for one, nothing is fused.)"""
    fn, args = as_function(GROUPS[name](BATCH))
    ran = []

    def both(program: Program, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        for sizes in (
            {BATCH: 0, BATCH * 4: 0},
            {BATCH: 1, 1: 0},
            {BATCH: 2, 4: 0, 9: 0, 40: 0, 290: 0},
        ):
            try:
                want = interpret(program, cut(operands, sizes), cut(results, sizes))
            except ValueError:  # such sizes contradict each other
                continue
            for way in WAYS if LONG else WAYS[:3]:
                got = emulate(program, cut(operands, sizes), cut(results, sizes), way)
                assert_same(got, want, 1e-3)
            ran.append(sizes)
        return interpret(program, operands, results)

    cuda_emulation.compiled(fn, args).run(both)
    assert ran


# ---- where buffers lie ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layouts", "dtypes", "jagged", "bag_kinds"])
def test_packed_operands(name: str) -> None:
    """Operands inside a pack give the same bits as operands of their own."""
    cases = GROUPS[name](37)
    fn, args = as_function(cases)
    rng = random.Random(name)

    def both(program: Program, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        alone = emulate(program, operands, results)
        for part in (0.5, 1.0):
            chosen = [k for k in range(len(operands)) if rng.random() < part]
            physical, places = cuda_emulation.packed(operands, chosen)
            for way in (Options(), Options(tiles=5)):
                got = emulate(program, physical, results, way, places)
                if way.tiles == "real":
                    assert [a.tobytes() for a in got] == [a.tobytes() for a in alone]
        return alone

    cuda_emulation.compiled(fn, args).run(both)


@pytest.mark.parametrize("name", ["layouts", "bag_kinds", "digitize"])
def test_several_launches(name: str) -> None:
    """A call with more buffers than a launch may name."""
    cases = GROUPS[name](37)
    fn, args = as_function(cases)
    bounds = {k: c.tolerance() for k, c in cases.items()}
    check(fn, args, bounds, [Options(pointers=n) for n in (8, 12, 0)])


@pytest.mark.parametrize("n", [1, 6, 7, 8, 300])
def test_a_table_of_addresses(n: int) -> None:
    """Every address is where it belongs, and nothing is written beside the table."""
    addresses = [(k + 1) << 40 | 64 * k for k in range(n)]
    for order in (0, 1, 2):
        got = np.frombuffer(cuda_emulation.fill_table(addresses, order), np.uint64)
        assert got.tolist() == addresses


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_weighted_bags_with_missing_rows(kind: str) -> None:
    """A row that does not exist makes its bag NaN, whatever it weighs."""
    rng = np.random.default_rng(5)
    args = {
        "t": rng.standard_normal((50, 8)).astype(np.float32),
        "i": rng.integers(-60, 60, (BATCH, 9)).astype(np.int32),
        "w": rng.standard_normal((BATCH, 9)).astype(np.float32),
        "seg": np.sort(rng.integers(0, 20, BATCH)).astype(np.int32),
    }

    def fn(a: Any) -> Any:
        rows = jnp.take(a["t"], a["i"], axis=0) * a["w"][..., None]
        flat = jnp.take(a["t"], a["i"][:, 0], axis=0) * a["w"][:, :1]
        jagged = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max}[kind]
        return getattr(rows, kind)(1), jagged(flat, a["seg"], num_segments=20)

    c = cuda_emulation.compiled(fn, args)
    wants = [c.run(interpret)]
    if kind == "sum":  # an extreme of NaN is NaN, as numpy has it; XLA's CPU code may lose it
        wants.append(jax.jit(fn)(args))
    for way in WAYS[:3]:
        got = c.run(functools.partial(emulate, options=way))
        for want in wants:
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_bags_longer_than_shared_memory(dtype: Any) -> None:
    """Tiles whose positions fit the stage, tiles whose do not, and splits that promise more than there is."""
    rng = np.random.default_rng(3)
    t = rng.standard_normal((50, 16)).astype(np.float32)
    w = rng.standard_normal((50, 6)).astype(np.float32)
    lengths = np.array([3, 0, 5000, 1, 0, 17, 4096, 40, 0, 2])
    splits = np.concatenate([[0], np.cumsum(lengths)])
    x = rng.integers(-52, 52, splits[-1]).astype(dtype)

    def fn(args: Any) -> Any:
        t, w, x, splits = args
        seg = jnp.searchsorted(splits, jnp.arange(x.shape[0]), side="right") - 1
        n = splits.shape[0] - 1
        sums = jax.ops.segment_sum(t[x], seg, num_segments=n)
        return {"sum": sums, "max": jax.ops.segment_max(w[x], seg, num_segments=n)}

    with jax.enable_x64(dtype is np.int64):
        for shown in (
            splits,
            splits + 9000,
            splits[::-1].copy(),
            np.sort(rng.permutation(splits))[::3],
        ):
            args = (t, w, x, shown.astype(np.int32))
            check(fn, args, {"sum": 0.02, "max": 0.0}, (Options(sms=1), Options(tiles=3, order=2)))


@pytest.mark.parametrize(("n", "total"), [(1500, 2250), (2200, 3300), (4200, 300)])
def test_tiles_of_many_short_bags(n: int, total: int) -> None:
    """The stage holds a tile's ids and its bags' limits: both fit, not both, not even the limits."""
    rng = np.random.default_rng(n)
    splits = np.sort(rng.integers(0, total + 1, n + 1)).astype(np.int32)
    splits[[0, -1]] = 0, total
    t = rng.standard_normal((50, 8)).astype(np.float32)
    x = rng.integers(0, 50, total).astype(np.int32)

    def fn(args: Any) -> Any:
        t, x, splits = args
        seg = jnp.searchsorted(splits, jnp.arange(x.shape[0]), side="right") - 1
        return jax.ops.segment_sum(t[x], seg, num_segments=n)

    shown = [splits] if total > 1000 else [splits, splits[::-1].copy()]
    for one in shown:
        check(fn, (t, x, one), 1e-4, (Options(tiles="simple"), Options(sms=1, order=2)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("rows", "width"), [(3, 3), (41, 8), (700, 5), (900, 16)])
def test_one_number_that_is_not_finite(rows: int, width: int, dtype: Any) -> None:
    """A product with a one-hot matrix is NaN where a row that it leaves out is not finite: all rows are looked at."""
    rng = np.random.default_rng(rows)
    ids = rng.integers(-1, rows + 1, (9, 4)).astype(np.int32)
    table = rng.standard_normal((rows, width)).astype(dtype)

    def fn(a: Any) -> Any:
        t, x = a
        picked = jax.nn.one_hot(x[:, 0], rows, dtype=t.dtype)
        return [picked @ t, jax.nn.one_hot(x, rows, dtype=t.dtype).sum(1) @ t]

    # XLA adds rows up in float16.
    fused = 2 if dtype == np.float32 else 1
    assert recom_jax.optimize(fn).explain((table, ids)).num_fused == fused
    places = {0, 1, 3, 4, table.size - 1, table.size - 2, table.size - table.size % 8}
    for at in (*sorted(places - {table.size}), *rng.integers(0, table.size, 12)):
        t = table.copy()
        t.reshape(-1)[at] = rng.choice([np.nan, np.inf, -np.inf])
        check(fn, (t, ids), 1e-2 if dtype == np.float16 else 1e-5, (Options(sms=1),))


@pytest.mark.parametrize("beyond", [1, 30])
def test_more_bags_than_splits(beyond: int) -> None:
    """Bags that no split begins are empty, and take nothing from those that share their tile."""
    rng = np.random.default_rng(beyond)
    splits = np.sort(rng.integers(0, 300, 41)).astype(np.int32)
    splits[[0, -1]] = 0, 300
    args = (
        rng.standard_normal((50, 8)).astype(np.float32),
        rng.integers(0, 50, 300).astype(np.int32),
        splits,
    )

    def fn(a: Any) -> Any:
        t, x, splits = a
        at = jnp.arange(x.shape[0])
        n = splits.shape[0] - 1 + beyond
        searched = jnp.searchsorted(splits, at, side="right") - 1
        repeated = jnp.repeat(jnp.arange(40), jnp.diff(splits), total_repeat_length=x.shape[0])
        return [jax.ops.segment_sum(t[x], seg, num_segments=n) for seg in (searched, repeated)]

    check(fn, args, 1e-4, (Options(sms=1), Options(tiles="simple"), Options(tiles=3, order=1)))


@pytest.mark.parametrize("way", ["splits", "segments", "lengths"])
def test_bags_that_take_a_block(way: str) -> None:
    """Bags of 2,048 positions or more, by sums, means, extremes and weights, with rows that do not exist."""
    rng = np.random.default_rng(9)
    lengths = np.array([3, 2048, 2047, 0, 5000, 2, 2049, 1], np.int32)
    total, n = int(lengths.sum()), len(lengths)
    args = {
        "t": rng.standard_normal((50, 16)).astype(np.float32),
        "w": rng.standard_normal((40, 5)).astype(np.float32),
        "x": rng.integers(0, 40, total).astype(np.int32),
        "y": np.where(rng.random(total) < 1e-4, 77, rng.integers(0, 50, total)).astype(np.int32),
        "by": rng.standard_normal(total).astype(np.float32),
        "splits": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "segments": np.repeat(np.arange(n), lengths).astype(np.int32),
        "lengths": lengths,
    }

    def fn(a: Any) -> Any:
        seg = a["segments"]
        if way == "splits":
            seg = jnp.searchsorted(a["splits"], jnp.arange(total), side="right") - 1
        elif way == "lengths":
            seg = jnp.repeat(jnp.arange(n), a["lengths"], total_repeat_length=total)
        rows = a["t"][a["x"]]
        count = jax.ops.segment_sum(jnp.ones(total), seg, num_segments=n)
        sums = jax.ops.segment_sum(rows, seg, num_segments=n)
        odd = jnp.take(a["t"], a["y"], axis=0) * a["by"][:, None]
        return {
            "mean": sums / jnp.maximum(count, 1)[:, None],
            "max": jax.ops.segment_max(a["w"][a["x"]], seg, num_segments=n),
            "missing": jax.ops.segment_sum(odd, seg, num_segments=n),
        }

    bounds = {"mean": 1e-4, "max": 0.0, "missing": 0.02}
    by_blocks = functools.partial(Options, schedule=Schedule(long=True))
    check(fn, args, bounds, (by_blocks(sms=1), by_blocks(tiles=3, order=2), by_blocks("unaligned")))
    c = cuda_emulation.compiled(fn, args)
    first, *others = [
        c.run(functools.partial(emulate, options=by_blocks(order=o))) for o in (0, 1, 2)
    ]
    for other in others:  # in whatever order threads run
        jax.tree.map(np.testing.assert_array_equal, other, first)


def test_odd_lengths_where_bags_may_take_a_block() -> None:
    """Lengths that no bags have send a block another way before it met any bag."""
    rng = np.random.default_rng(4)
    args = (
        rng.standard_normal((50, 8)).astype(np.float32),
        rng.integers(0, 50, 6000).astype(np.int32),
        np.array([3000, -2500, 2600, 0, 3, 2500], np.int32),
    )

    def fn(a: Any) -> Any:
        t, x, lengths = a
        n = lengths.shape[0]
        seg = jnp.repeat(jnp.arange(n), lengths, total_repeat_length=x.shape[0])
        return {"sum": jax.ops.segment_sum(t[x], seg, num_segments=n)}

    check(fn, args, {"sum": 0.02}, (Options(sms=1, schedule=Schedule(long=True)),))


# ---- random columns --------------------------------------------------------------------------------------------------


def compare_random(seeds: Sequence[int], layout_seed: int, batch: int, tiles: int) -> list[str]:
    """Raises AssertionError where the emulated model differs. The reasons why a call was not emulated."""
    model = random_models.build(seeds, layout_seed)
    b = random_columns.arguments(batch, layout_seed)
    left: list[str] = []

    def run(way: Options, program: Program, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        try:
            generate(program)
        except EncodeError as why:
            left.append(str(why))
            return interpret(program, operands, results)
        return emulate(program, operands, results, way)

    try:
        c = cuda_emulation.compiled(model.fn, model.params, b)
        want = c.run(interpret)
        tolerance = model.bounds(batch)
        for way in (Options(), Options(tiles="unaligned", order=3), Options(tiles=tiles, order=1)):
            assert_same(c.run(functools.partial(run, way)), want, tolerance)
    except Exception as why:
        raise AssertionError(
            f"seeds={list(seeds)!r} layout_seed={layout_seed} batch={batch} tiles={tiles}\n{why}\n{model.source}"
        ) from why
    return left


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12),
    st.integers(0, 2**16),
    st.sampled_from(random_columns.BATCHES),
    st.integers(0, 2**16),
)
@settings(max_examples=max(settings.default.max_examples // 2, 1))
def test_random_columns(seeds: list[int], layout_seed: int, batch: int, tiles: int) -> None:
    assert not compare_random(seeds, layout_seed, batch, tiles)


def main() -> int:
    parser = argparse.ArgumentParser(description="Emulates many random models.")
    parser.add_argument("--columns", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-model", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    start, done, serial, failed = time.monotonic(), 0, 0, 0
    while done < options.columns and time.monotonic() - start < options.seconds:
        r = random.Random(options.seed * 1_000_003 + serial)
        seeds = [r.randrange(2**32) for _ in range(min(options.per_model, options.columns - done))]
        rest = r.randrange(2**16), r.choice(random_columns.BATCHES), r.randrange(2**16)
        try:
            for why in compare_random(seeds, *rest):
                print(f"model {serial} left to XLA: {why}")
        except AssertionError as why:
            failed += 1
            print(f"FAILED model {serial} of --seed {options.seed}: {str(why)[:1500]}", flush=True)
            for s in seeds:
                try:
                    compare_random([s], *rest)
                except AssertionError as alone:
                    print(f"column seed {s} fails alone:\n{alone}", flush=True)
                    break
        done += len(seeds)
        serial += 1
    print(
        f"{serial} models, {done} columns, {failed} failed, {time.monotonic() - start:.0f} s, seed {options.seed}"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
