"""Classes of preprocessing code for several elements at a time: their text, and that it computes the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recom_jax import preprocess as pp
from recom_jax.corun import kernels, lanes
from recom_jax.corun import runtime as rt
from recom_jax.corun.symbols import Writer
from tests import corun_emulation, cuda_emulation

pytestmark = pytest.mark.once

BODY = """const int j0 = e % 3;
const i32 v1 = load<i32>(p.in, 64, j0);
i32 r2 = static_cast<i32>(0xffffffffu);
if (j0 < v1) {
const int j3 = v1 + j0;
const i32 v4 = load<i32>(p.in, static_cast<int>(w[0]), j3);
const int j5 = j3 / v4;
r2 = x_add(v4, j5);
}
for (int k6 = 0; k6 < 4; ++k6) {
r2 = x_add(r2, k6);
}
store<i32>(p.out, 0, e * 3, r2);"""
WIDE = """int j0[U];
EACH j0[u] = e[u] % 3;
i32 v1[U];
EACH v1[u] = load<i32>(p.in, 64, j0[u]);
i32 r2[U];
EACH r2[u] = static_cast<i32>(0xffffffffu);
bool m6[U];
EACH m6[u] = (j0[u] < v1[u]);
if (any(m6)) {
int j3[U];
EACH j3[u] = v1[u] + j0[u];
i32 v4[U];
EACH v4[u] = m6[u] ? load<i32>(p.in, static_cast<int>(w[0]), j3[u]) : static_cast<i32>(0);
int j5[U];
EACH j5[u] = m6[u] ? j3[u] / v4[u] : static_cast<int>(0);
EACH if (m6[u]) r2[u] = x_add(v4[u], j5[u]);
}
for (int k6 = 0; k6 < 4; ++k6) {
EACH r2[u] = x_add(r2[u], k6);
}
EACH store<i32>(p.out, 0, e[u] * 3, r2[u]);"""


def test_what_comes_out() -> None:
    assert lanes.widened(BODY) == WIDE


@pytest.mark.parametrize(
    "line",
    [
        "while (low1 < high2) {\n}",
        "if (v1) low2 = j3 + 1; else high4 = j3;",
        "for (int k1 = 0; k1 < v2; ++k1) {\n}",  # its count differs
        "if (j1 < 3) {\nstore<i32>(p.out, 0, e, r2);\n}",
        "r9 = v1;",  # never declared
        "}",
        "if (j1 < 3) {",
    ],
)
def test_other_code_stays_as_it_is(line: str) -> None:
    assert lanes.widened(f"const i32 v2 = load<i32>(p.in, 0, e);\n{line}") is None


def test_a_search_is_for_one_element_at_a_time() -> None:
    raw = {"x": np.zeros(10, np.float32)}
    borders = np.linspace(0, 1, 100)
    made = kernels.compile_prep(
        lambda r: {"n": pp.bucketize(r["x"], borders), "y": r["x"] + 1}, raw
    )
    bodies = made.source[made.source.index("void class_0") :]
    assert "const PrepParams& p, const Words& w, int e)" in bodies
    assert "const PrepParams& p, const Words& w, const Places& e)" in bodies


def test_no_variable_has_the_name_of_a_type() -> None:
    w = Writer({})
    names = {w.integer(f"e + {k}") for k in range(70)}
    assert not names & {"i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "f32", "f64"}


def prep(raw: Any) -> Any:
    ids = pp.fill_null(raw["C"], -1)
    for salt in range(2):
        ids = pp.sigrid_hash(ids, salt, 1000)
    words = pp.ngram(pp.clamp(raw["C"], -50, 50), 2)
    return {
        "ids": pp.pad(pp.firstx(ids, 2), 3),
        "words": pp.pad(pp.cast(words, np.int32), 4),
        "x": pp.clamp(raw["x"], -1.0, 1.0),
        "n": jnp.where(raw["x"] > 0, jnp.floor(raw["x"]) % 3, -1.0),
    }


@pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing()))
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=5), min_size=1, max_size=9),
    st.integers(1, 13),
)
def test_any_tiles_of_any_lists_equal_plain_jax(lists: list[list[int]], size: int) -> None:
    """Tiles of a few elements, odd numbers of them too: the last element is written twice."""
    n = len(lists)
    splits = np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int32)
    flat = np.array([i for x in lists for i in x] + [0] * (64 - int(splits[-1])), np.int64)
    there = np.arange(64) % 4 != 1
    x = np.resize(np.array([-2.5, np.nan, 0.0, 7.25, np.inf], np.float32), n)
    raw = pp.columns({"C": pp.Jagged(pp.Nullable(flat, there), splits), "x": x})
    like = rt.like_with(raw, rt.capacities_of(raw))
    made = kernels.compile_prep(prep, like)
    tiles = made.tiles([(k, 0.0, 1.0) for k in range(len(made.units))])
    small = []
    for tile in tiles:
        for at in range(0, int(tile["count"]), size):
            cut = tile.copy()
            cut["first"], cut["count"] = tile["first"] + at, min(size, tile["count"] - at)
            small.append(cut)
    leaves = [np.asarray(a) for a in jax.tree.leaves(raw)]
    got = corun_emulation.run(made, leaves, np.array(small, kernels.TILE_TYPE))
    want = jax.tree.leaves(jax.jit(prep)(raw))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, np.asarray(w))
