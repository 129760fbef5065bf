"""Columns of so many segment ids that tiles search them (recom_jax/cuda/headers/recom_segments.cuh), emulated."""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import cuda_emulation
from tests.cuda_emulation import Compiled, Options, emulate, interpret
from tests.helpers import assert_same

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]
POSITIONS, BAGS, ROWS = 600, 40, 30
WAYS = (
    Options(search=1),
    Options(search=1, sms=40, order=1),
    Options(search=1, tiles="unaligned", sms=12, order=2),
    Options(search=1, sms=1, order=3, pointers=0),
)


def model(seg: Any, ids: Any, weights: Any, tables: dict[str, Any]) -> dict[str, Any]:
    """Narrow rows, whose tiles deal out positions; rows with weights and several reductions, whose tiles don't."""
    total = functools.partial(jax.ops.segment_sum, segment_ids=seg, num_segments=BAGS)
    narrow, wide = tables["narrow"][ids], jnp.take(tables["wide"], ids, axis=0)
    return {
        "narrow": total(narrow),
        "weighted": total(narrow * weights[:, None]),
        "wide": total(wide),
        "max": jax.ops.segment_max(wide, seg, num_segments=BAGS),
        "mean": total(wide) / jnp.maximum(total(weights), 1)[:, None],
        "scalars": total(weights),
        "odd": total(tables["odd"][ids % 7]),
    }


def tables() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "narrow": rng.standard_normal((ROWS, 8)).astype(np.float32),
        "wide": rng.standard_normal((ROWS, 160)).astype(np.float32),
        "odd": rng.standard_normal((7, 3)).astype(np.float32),
    }


def values(seed: int = 0, missing: float = 0.02) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-ROWS, ROWS, POSITIONS)
    weights = rng.standard_normal(POSITIONS)
    ids = np.where(rng.random(POSITIONS) < missing, 5 * ROWS, ids)
    weights = np.where(rng.random(POSITIONS) < missing, np.nan, weights)
    return ids.astype(np.int32), weights.astype(np.float32)


@functools.lru_cache(maxsize=3)
def compiled(dtype: str) -> Compiled:
    seg = np.zeros(POSITIONS, dtype)
    return cuda_emulation.compiled(model, seg, *values(), tables())


def run(seg: Any, *values: Any, options: Options | None = None) -> Any:
    """The model's results, its fused calls emulated; without options, interpreted."""
    args = (seg, *values, tables())
    c = dataclasses.replace(compiled(seg.dtype.name), args=jax.tree_util.tree_leaves(args))
    return c.run(functools.partial(emulate, options=options) if options else interpret)


def check(seg: Any, dtype: str = "int32", ways: Any = WAYS, seed: int = 0) -> None:
    seg = np.asarray(seg, dtype)
    given = values(seed)
    want = run(seg, *given)
    assert_same(want, jax.jit(model)(seg, *given, tables()), dict.fromkeys(want, 0.02))
    for way in ways:
        assert_same(run(seg, *given, options=way), want, dict.fromkeys(want, 0.02))


def ascending(rng: Any, low: int = 0, high: int = BAGS) -> Any:
    return np.sort(rng.integers(low, high, POSITIONS))


def made(name: str) -> Any:
    rng = np.random.default_rng(3)
    seg = ascending(rng)
    if name == "one bag":
        seg[:] = 17
    elif name == "negative in front, padding behind":
        seg = ascending(rng, -9, BAGS + 9)
    elif name == "no bag of theirs":
        seg = np.where(np.arange(POSITIONS) < 300, -3, BAGS)
    elif name == "empty bags":
        seg = seg // 7 * 7
    elif name == "two out of order":
        seg[[299, 300]] = 30, 5
    elif name == "the last one":
        seg[-1] = 0
    elif name == "the first one":
        seg[0] = BAGS - 1
    elif name == "padding in front":
        seg[:5] = BAGS + 3
    elif name == "one negative amid":
        seg[350] = -1
    elif name == "backwards":
        seg = seg[::-1].copy()
    elif name == "at random":
        seg = rng.integers(-5, BAGS + 5, POSITIONS)
    elif name == "turns":
        seg = np.arange(POSITIONS) % BAGS
    elif name == "extremes":
        seg[100], seg[400] = -(2**31), 2**31 - 1
    else:
        assert name == "sorted"
    return seg


NAMES = (
    "sorted", "one bag", "negative in front, padding behind", "no bag of theirs", "empty bags", "two out of order",
    "the last one", "the first one", "padding in front", "one negative amid", "backwards", "at random", "turns",
    "extremes",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_ids(name):
    check(made(name))


@pytest.mark.parametrize(("name", "right"), [("sorted", True), ("two out of order", False)])
def test_what_is_out_of_order_is_mended(name, right):
    """By the second kernel; in order, the first one's results are the results."""
    seg, given = made(name).astype(np.int32), values()
    way = Options(search=1, sms=12)
    want = run(seg, *given, options=way)
    alone = run(seg, *given, options=dataclasses.replace(way, mended=False))
    fused = set(want) - {"scalars"}  # XLA sums those, on a GPU in any order
    assert right == all(np.array_equal(alone[k], want[k], equal_nan=True) for k in fused)


@pytest.mark.parametrize("name", ["sorted", "at random", "extremes"])
@pytest.mark.parametrize("dtype", ["int16", "uint32"])
def test_other_dtypes(name, dtype):
    with np.errstate(all="ignore"):
        check(made(name).astype(np.int64).astype(dtype), dtype, WAYS[:2])


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_ids(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    low, high = data.draw(st.sampled_from([(0, BAGS), (-4, BAGS + 4), (10, 12)]))
    seg = ascending(rng, low, high)
    for at in data.draw(st.lists(st.integers(0, POSITIONS - 1), max_size=4)):
        seg[at] = data.draw(st.integers(-3, BAGS + 3))
    way = dataclasses.replace(
        data.draw(st.sampled_from(WAYS)), sms=data.draw(st.sampled_from((1, 3, 12, 40)))
    )
    check(seg, ways=[way], seed=int(rng.integers(1 << 30)))


PROBE = """
#include "recom_tile.cuh"
namespace recom_cuda {
struct Given {
  const i32* seg;
  i32* out;
  i64 total;
  i32 bag0, bag1;
};
}
extern "C" __global__ void probe(const __grid_constant__ recom_cuda::Given p) {
  using namespace recom_cuda;
  const auto seg = [&](i32 q) -> i32 { return p.seg[q]; };
  Gathered<16, 64> gathered;
  i32 to = 0;
  for (i32 low = p.bag0, bags; low < p.bag1; low = bags) {
    bags = p.bag1;
    gathered.gather(seg, p.total, low, bags);
    for (i32 k = threadIdx.x; k < gathered.n; k += kThreads) p.out[to + 3 + k] = gathered.at(k);
    if (threadIdx.x == 0) {
      p.out[to] = bags;
      p.out[to + 1] = gathered.n;
      p.out[to + 2] = gathered.all;
    }
    to += 3 + gathered.n;
  }
}
"""


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_gathered_positions(data):
    """Each window of bags has its positions, in their order, as far as there is room; a bag without room has all."""
    total = data.draw(st.sampled_from([1, 31, 255, 257, 2048, 2049, 5000]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    bag0, bags = data.draw(st.sampled_from([(0, 1), (0, 9), (3, 40), (100, 7)]))
    spread = data.draw(st.sampled_from([1, 10, 100, 3000]))
    seg = rng.integers(bag0 - spread, bag0 + bags + spread, total).astype(np.int32)
    if data.draw(st.booleans()):
        seg[rng.integers(0, total, min(total, 25))] = bag0 + bags - 1
    kernel = cuda_emulation.kernel(PROBE, "probe", "recom_cuda::Given")
    m = cuda_emulation.memory([seg], [np.empty((total + 3) * bags, np.int32)])
    head = [r.base for r in m.regions]
    params = struct.pack("<QQqii", *head, total, bag0, bag0 + bags)
    kernel.launch(params, 1, m, order=data.draw(st.integers(0, 3)))
    out, low = m.arrays[1].tolist(), bag0
    while low < bag0 + bags:
        high, n, everything = out[:3]
        want = np.flatnonzero((seg >= low) & (seg < high)).tolist()
        assert bool(everything) == (len(want) > 16)
        if everything:
            assert high == low + 1
            want = list(range(total))
        assert low < high <= bag0 + bags
        assert out[3 : 3 + n] == want
        out, low = out[3 + n :], high
