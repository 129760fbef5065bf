"""Positions of usual tiles are counted from the tile's first (recom_jax/cuda/ranges.py): ids and limits in shared
memory need no more, and what else a position reads adds where the tile begins."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recom_jax.cuda.codegen import generate
from recom_jax.program import Program
from tests import cuda_emulation
from tests.cuda_emulation import Compiled, Options, emulate, interpret
from tests.helpers import assert_same
from tests.test_cuda_codegen import LONG_BAGS

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]
POSITIONS, BAGS, ROWS = 2000, 30, 50
WAYS = (Options(sms=1), Options(tiles=5, order=2), Options(tiles="unaligned", sms=1))


def columns(seg: Any, args: Any, n: int) -> list[Any]:
    """A mean, whose ids alone are read; weights of 16 bits, which no tile brings to shared memory; weights that the
    position's number makes."""
    x, half, t = args
    total = functools.partial(jax.ops.segment_sum, segment_ids=seg, num_segments=n)
    number = (jnp.arange(x.shape[0]) % 7).astype(jnp.float32)
    return [
        total(t[x]) / jnp.maximum(total(jnp.ones(x.shape[0])), 1)[:, None],
        total(t[x] * half.astype(jnp.float32)[:, None]),
        total(t[x] * number[:, None]),
    ]


def of_segments(seg: Any, args: Any) -> list[Any]:
    return columns(seg, args, BAGS)


def of_splits(splits: Any, args: Any) -> list[Any]:
    seg = jnp.searchsorted(splits, jnp.arange(POSITIONS), side="right") - 1
    return columns(seg, args, splits.shape[0] - 1)


@functools.cache
def rest(width: int = 8) -> Any:
    rng = np.random.default_rng(width)
    x = rng.integers(-ROWS, ROWS, POSITIONS).astype(np.int32)
    half = rng.random(POSITIONS).astype(np.float16)
    return x, half, rng.standard_normal((ROWS, width)).astype(np.float32)


@functools.cache
def compiled(fn: Any, width: int = 8) -> Compiled:
    shown = np.zeros(POSITIONS if fn is of_segments else BAGS + 1, np.int32)
    return cuda_emulation.compiled(lambda args: fn(*args), (shown, rest(width)))


def only(fn: Any, width: int = 8) -> Program:
    (program,) = compiled(fn, width).programs
    return program


def check(fn: Any, limits: Any) -> None:
    args = (np.asarray(limits, np.int32), rest())
    c = dataclasses.replace(compiled(fn), args=jax.tree_util.tree_leaves((args,)))
    want = c.run(interpret)
    assert_same(want, jax.jit(fn)(*args), [0.1] * len(want))
    for way in WAYS:
        assert_same(c.run(functools.partial(emulate, options=way)), want, [0.1] * len(want))


def usual(text: str) -> str:
    """The code of tiles whose ids are in shared memory."""
    found = re.findall(r"^  if constexpr \(kStaged\) \{\n(.*?)^  \} else \{", text, re.M | re.S)
    return "".join(found)


@pytest.mark.parametrize("fn", [of_segments, of_splits])
def test_where_a_tile_begins_is_added_where_it_has_to_be(fn: Any) -> None:
    text = generate(only(fn)).source
    classes = re.split(r"^// Class ", text, flags=re.M)[1:]
    begins = [len(re.findall(r"const i32 q = tile_\d+\.begin \+ ", usual(c))) for c in classes]
    assert sorted(begins) == [0, 1, 1], text
    for c in classes:
        assert re.search(r"const Range span = limits_\d+\.in_tile\(bag\);", usual(c)), c
        assert re.search(r"staged_\d+\.within\(at_q\)", usual(c)), c


@pytest.mark.parametrize("fn", [of_segments, of_splits])
def test_other_code_counts_positions_from_the_first_of_all(fn: Any) -> None:
    """What has no vectors, is rare, or sums up long bags does not know where its tile lies."""
    odd = generate(only(fn, 3)).source
    assert "within(" not in odd and "in_tile(" not in odd
    text = generate(only(fn), LONG_BAGS).source
    for line in re.findall(r".*(?:\.within\(|\.in_tile\().*", text):
        assert line in usual(text)


LIMITS = {
    "even": np.arange(BAGS + 1) * POSITIONS // BAGS,
    "one bag": np.repeat([0, POSITIONS], [12, BAGS - 11]),
    "empty at both ends": np.clip(np.arange(BAGS + 1) * 100 - 500, 0, POSITIONS),
    "not all": 3 + np.arange(BAGS + 1) * 20,
}


@pytest.mark.parametrize("limits", LIMITS)
def test_numbers(limits: str) -> None:
    check(of_splits, LIMITS[limits])
    seg = np.searchsorted(LIMITS[limits], np.arange(POSITIONS), side="right") - 1
    check(of_segments, seg)


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_any_numbers(data: st.DataObject) -> None:
    at = data.draw(st.lists(st.integers(0, POSITIONS), min_size=BAGS + 1, max_size=BAGS + 1))
    limits = np.sort(at)
    check(of_splits, limits)
    seg = np.searchsorted(limits, np.arange(POSITIONS), side="right") - 1
    for k in data.draw(st.lists(st.integers(0, POSITIONS - 1), max_size=2)):
        seg[k] = data.draw(st.integers(-1, BAGS))
    check(of_segments, seg)
