"""Results that no cache holds are written past them (csrc/kernels_lookup.inc: stream_rows). No number may change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recom_jax
from recom_jax import _recom
from recom_jax.cpu import encode
from recom_jax.program import Program
from tests.cuda_emulation.programs import compiled

pytestmark = pytest.mark.once

Array = np.ndarray[Any, Any]
LEAST = 2 << 20  # bytes of a result for each thread (csrc/plan.h: kStreamBytes)
GUARD = 32  # floats on either side of the result: whole cache lines
FRESH = itertools.count()  # plans are kept by shape: a batch of its own for each run makes one


def model(tables: list[jax.Array], ids: list[jax.Array], dense: jax.Array) -> jax.Array:
    rows = [
        t.at[i].get(mode="clip") if k % 3 else jnp.take(t, i, axis=0)
        for k, (t, i) in enumerate(zip(tables, ids, strict=True))
    ]
    return jnp.concatenate([dense, *rows], axis=1)


def expected(tables: list[Array], ids: list[Array], dense: Array) -> Array:
    rows = [dense]
    for k, (t, i) in enumerate(zip(tables, ids, strict=True)):
        at = np.where(i < 0, i + len(t), i)
        found = t[np.clip(at, 0, len(t) - 1)]
        if k % 3 == 0:
            found = np.where(((at >= 0) & (at < len(t)))[:, None], found, np.float32(np.nan))
        rows.append(found)
    return np.concatenate(rows, axis=1)


def run(columns: int, width: int, lead: int, batch: int, off: int = 0, threads: int = 1) -> int:
    """Runs `columns` lookups of rows of `width` floats behind `lead` dense ones, into a result that begins `off` floats
    behind a cache line, and compares. Returns how many of the plans that this made stream."""
    rng = np.random.default_rng(columns * width)
    tables = [rng.normal(size=(int(rng.integers(1, 50)), width)) for _ in range(columns)]
    tables = [t.astype(np.float32) for t in tables]
    tables[0][0, 0] = np.nan
    ids = [rng.integers(-60, 60, batch).astype(np.int32) for _ in range(columns)]
    dense = rng.normal(size=(batch, lead)).astype(np.float32)
    total = columns * width + lead
    raw = np.full(batch * total + 2 * GUARD + 32, -7, np.float32)
    room = raw[-(raw.ctypes.data // 4) % 16 + off :]
    out = room[GUARD : GUARD + batch * total].reshape(batch, total)

    def execute(program: Program, operands: Sequence[Array], like: Sequence[Array]) -> list[Array]:
        assert [x.shape for x in like] == [out.shape]
        binding = np.array([w for k in range(len(operands)) for w in (k, -1)], np.int64)
        _recom.run_program(encode(program).words, binding, list(operands), [out], threads)
        return [out]

    before = _recom.program_stats()["plans_streaming"]
    compiled(model, tables, ids, dense).run(execute)
    np.testing.assert_array_equal(out, expected(tables, ids, dense))
    assert (room[:GUARD] == -7).all() and (room[GUARD + batch * total :][:GUARD] == -7).all()
    return int(_recom.program_stats()["plans_streaming"] - before)


def enough(columns: int, width: int, lead: int, threads: int = 1) -> int:
    """The least batch whose result is streamed."""
    return LEAST * threads // ((columns * width + lead) * 4) + 1


@pytest.mark.parametrize("width", [4, 8, 16, 32])
@pytest.mark.parametrize(
    ("lead", "off"), [(0, 0), (8, 0), (4, 4), (16, 8), (12, 12), (3, 0), (16, 1)]
)
def test_streamed_rows_equal_numpy(width: int, lead: int, off: int) -> None:
    """`lead` and `off` put rows at whole, half and quarter lines, changing from bag to bag, and at none of them."""
    assert run(19, width, lead, enough(19, width, lead) + next(FRESH), off) == 1


@settings(max_examples=20, deadline=None)
@given(
    columns=st.integers(1, 70),
    width=st.sampled_from([4, 8, 16, 32]),
    lead=st.integers(0, 20),
    off=st.integers(0, 15),
    more=st.integers(0, 130),
    threads=st.integers(1, 3),
)
def test_any_place_and_number(
    columns: int, width: int, lead: int, off: int, more: int, threads: int
) -> None:
    batch = enough(columns, width, lead, threads) + more + next(FRESH)
    assert run(columns, width, lead, batch, off, threads) == 1


def test_small_results_and_other_rows_are_not_streamed() -> None:
    batch = enough(19, 8, 0)
    assert run(19, 8, 0, batch - 1) == 0
    assert run(19, 8, 0, batch, threads=2) == 0
    assert run(19, 7, 0, 2 * batch) == 0  # rows that aren't copied side by side
    assert run(19, 8, 0, 0) == 0
    assert run(19, 8, 0, 1) == 0


def test_through_jax() -> None:
    """As XLA calls it: by threads of its pool, into memory of its allocator, which the next operation reads at once."""
    columns, width, batch = 40, 8, 13_000  # 16 MB
    rng = np.random.default_rng(3)
    tables = [jnp.asarray(rng.normal(size=(30, width)), jnp.float32) for _ in range(columns)]
    ids = [jnp.asarray(rng.integers(0, 30, batch), jnp.int32) for _ in range(columns)]

    def sines(tables: list[jax.Array], ids: list[jax.Array]) -> jax.Array:
        return jnp.sin(model(tables, ids, jnp.ones((batch, 1))))

    ours, want = recom_jax.optimize(sines), jax.jit(sines)(tables, ids)
    for _ in range(5):
        np.testing.assert_array_equal(ours(tables, ids), want)
