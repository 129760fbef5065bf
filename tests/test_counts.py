"""Bins by comparing with all boundaries, counted or the first: searches, where boundaries are constant and ascend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from tests.helpers import VERIFY, assert_same, check, table

NAME = "comparisons-to-search"
T = table(9, 4)
EDGES = np.array([-np.inf, -1.0, 0.0, 0.0, 2.5, 7.0], np.float32)
ODD = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, -1, 2.5, 8, 1e-40, -1e-40, 3], np.float32)

FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "ge": lambda x, e: (x[:, None] >= e).sum(-1),
    "gt": lambda x, e: (x[:, None] > e).sum(-1),
    "lt": lambda x, e: (x[:, None] < e).sum(-1),
    "le": lambda x, e: (x[:, None] <= e).sum(-1),
    "edges first": lambda x, e: (e[:, None] <= x).sum(0),
    "count_nonzero": lambda x, e: jnp.count_nonzero(e > x[:, None], axis=-1),
    "int cast": lambda x, e: (x[:, None] >= e).astype(jnp.int32).sum(1),
    "argmax": lambda x, e: jnp.argmax(x[:, None] < e, axis=-1),
    "argmax le": lambda x, e: jnp.argmax(x[:, None] <= e, axis=-1),
    "argmin": lambda x, e: jnp.argmin(x[:, None] >= e, axis=-1),
    "argmin gt": lambda x, e: jnp.argmin(x[:, None] > e, axis=-1),
}


def everything(edges: Any) -> Callable[[Any, Any], Any]:
    return lambda t, x: {name: t[form(x, edges)] for name, form in FORMS.items()}


def test_numbers_and_names() -> None:
    report = check(everything(EDGES), T, ODD, columns=len(FORMS))
    assert all(NAME in c.rewrites for c in report.columns), report


def test_left_out_the_numbers_are_the_same() -> None:
    off = recom_jax.Options(disable=(NAME,), verify=True)
    report = check(everything(EDGES), T, ODD, columns=len(FORMS), options=off)
    assert not any(NAME in c.rewrites for c in report.columns)


@given(
    edges=st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.1, 1.0, np.inf]), min_size=2, max_size=5),
    x=st.lists(st.sampled_from([*map(float, ODD), 0.1, 1.0, -2.0]), min_size=4, max_size=4),
)
def test_property(edges: list[float], x: list[float]) -> None:
    """Against numpy, which compares each with each."""
    sorted_edges = np.sort(np.array(edges, np.float32))
    values = np.array(x, np.float32)
    fn = recom_jax.optimize(
        lambda t, x: (
            t[(x[:, None] >= sorted_edges).sum(-1)],
            t[jnp.argmax(x[:, None] < sorted_edges, axis=-1)],
        ),
        options=VERIFY,
    )
    got = fn(T, values)
    t = np.asarray(T)
    assert_same(got[0], jnp.asarray(t[(values[:, None] >= sorted_edges).sum(-1)]))
    assert_same(got[1], jnp.asarray(t[np.argmax(values[:, None] < sorted_edges, axis=-1)]))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64", "float64"])
def test_dtypes(dtype: str) -> None:
    with jax.enable_x64(dtype.endswith("64")):
        edges = np.array([0, 1, 1, 5, 100], dtype)
        x = np.array([0, 1, 2, 5, 99, 100, 101, 127], dtype)
        report = check(everything(edges), T, x, columns=len(FORMS))
        assert all(NAME in c.rewrites for c in report.columns)


def test_ranks_and_uniform_boundaries() -> None:
    grid = np.arange(0, 40, 5, dtype=np.float32)

    def model(t: Any, x: Any) -> Any:
        return t[(x[..., None] >= grid).sum(-1)], t[(x[:, None, :] >= grid[:, None]).sum(1)]

    x = np.linspace(-5, 50, 12, dtype=np.float32).reshape(3, 4)
    report = check(model, T, x, columns=2)
    assert all("uniform-bucketize" in c.rewrites for c in report.columns)


OTHERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "boundaries that are arguments": lambda t, x, e: t[(x[:, None] >= e).sum(-1)],
    "boundaries that descend": lambda t, x, e: t[(x[:, None] >= EDGES[::-1].copy()).sum(-1)],
    "boundaries with NaN": lambda t, x, e: t[(x[:, None] >= np.append(EDGES, np.nan)).sum(-1)],
    "another comparison": lambda t, x, e: t[(x[:, None] == EDGES).sum(-1)],
    "the first below": lambda t, x, e: t[jnp.argmax(x[:, None] >= EDGES, axis=-1)],
    "the largest of numbers": lambda t, x, e: t[jnp.argmax(x[:, None] - EDGES[1:], axis=-1)],
    "weighted": lambda t, x, e: t[((x[:, None] >= EDGES) * 2).sum(-1) % 9],
    "values along the axis": lambda t, x, e: t[(x[:6] >= EDGES).sum(-1)],
    "both at once": lambda t, x, e: t[(x[:, None] >= EDGES).sum() % 9],
    "subnormal boundaries": lambda t, x, e: t[(x[:, None] >= np.float32([-1e-45, 1e-45])).sum(-1)],
}


def test_must_not_fire() -> None:
    def model(t: Any, x: Any, e: Any) -> Any:
        return {name: fn(t, x, e) for name, fn in OTHERS.items()}

    ours = recom_jax.optimize(model, options=VERIFY)
    x = np.nan_to_num(ODD, nan=0.5, posinf=9, neginf=-9)
    assert_same(ours(T, x, EDGES), jax.jit(model)(T, x, EDGES))
    assert not any(NAME in c.rewrites for c in ours.explain(T, x, EDGES).columns)
