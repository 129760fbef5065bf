"""The cost gate: single lookups that XLA joins with the arithmetic on their rows stay there, all else is fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import gate
from tests.helpers import VERIFY, check, ids, run, table

DIM = 32
ENOUGH = gate.LEAST // DIM  # rows
ALWAYS = recom_jax.Options(verify=True, always_fuse=True)
Model = Callable[[Any, Any], Any]

GATED: dict[str, Model] = {
    "multiply and add": lambda t, i: t[i] * t[0] + t[1],
    "hashed ids": lambda t, i: t[(i * 7 + 3) % t.shape[0]] * t[0] + t[1],
    "relu behind": lambda t, i: jax.nn.relu(t[i] * t[0] + t[1]),
    "then a layer": lambda t, i: (t[i] * t[0] + t[1]) @ t[:DIM],
    "scaled, with positions": lambda t, i: t[i.reshape(-1, 16)] * jnp.float32(5.5) + t[:16],
    "division": lambda t, i: t[i] / 3.0,
    "two rows": lambda t, i: t[i] * t[i[::-1]] + t[0],
    "default mode": lambda t, i: jnp.take(t, i, axis=0) * t[0] + t[1],
}
FUSED: dict[str, Model] = {
    "the rows are the result": lambda t, i: t[i],
    "the rows are a result too": lambda t, i: (t[i], t[i] * t[0] + t[1]),
    "arithmetic in the call": lambda t, i: t[i] * 2.0,
    "a layer": lambda t, i: t[i] @ t[:DIM],
    "a norm": lambda t, i: (e := t[i] * t[0] + t[1]) - e.mean(-1, keepdims=True),
    "dear arithmetic": lambda t, i: jnp.tanh(t[i]) + 1,
    "a bag": lambda t, i: t[i.reshape(-1, 4)].sum(1) * t[0] + t[1],
    "a concatenation": lambda t, i: jnp.concatenate([t[i], t[i[::-1]]], -1),
    "many": lambda t, i: sum(t[i * k] * t[k] for k in range(1, 6)),
    "a search": lambda t, i: t[jnp.digitize(i, np.arange(0, 500, 7))] * t[0] + t[1],
}


def reads(fn: Model, batch: int, options: recom_jax.Options = VERIFY) -> recom_jax.Report:
    args = table(500, DIM), ids((batch,), 500, odd=True)
    result, report = run(fn, *args, options=options)
    want = jax.jit(fn)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4), result, want)
    return report


@pytest.mark.parametrize("name", GATED)
def test_stays_in_xla(name: str) -> None:
    report = reads(GATED[name], ENOUGH)
    rows = [c for c in report.columns if not c.reason]
    assert (report.num_fused, report.num_custom_calls, rows) == (0, 0, [])
    assert {c.reason for c in report.columns} == {gate.REASON}
    assert "cost gate" in str(report)


@pytest.mark.parametrize("name", ["multiply and add", "two rows"])
def test_few_rows_and_the_option_fuse(name: str) -> None:
    fn = GATED[name]
    few = ENOUGH // (2 if name == "two rows" else 1) - 1
    for report in (reads(fn, few), reads(fn, ENOUGH, ALWAYS)):
        assert report.num_fused == report.num_columns > 0
        assert report.num_custom_calls == 1


@pytest.mark.parametrize("name", FUSED)
def test_is_fused(name: str) -> None:
    report = reads(FUSED[name], 5 * ENOUGH if name == "many" else ENOUGH)
    assert report.num_fused == report.num_columns > 0, report
    assert report.num_custom_calls == 1


def test_what_is_left_to_xla_is_plain_jax_bit_for_bit() -> None:
    """The same equations make the same program: with no call in it, nothing differs."""
    fn = GATED["multiply and add"]
    args = table(500, DIM), ids((ENOUGH,), 500, odd=True)
    check(fn, *args, fused=0, calls=0)


@pytest.mark.once
def test_large_sums_of_rows_stay_in_xla() -> None:
    def shapes(rows: int) -> tuple[Any, Any]:
        return jax.ShapeDtypeStruct((500, DIM), np.float32), jax.ShapeDtypeStruct((rows,), np.int32)

    tokens = recom_jax.optimize(lambda t, i: t[i] + t[i[::-1]], options=VERIFY)
    masked = recom_jax.optimize(lambda t, i: jnp.where(i[:, None] > 0, t[i], 0), options=VERIFY)
    normed = recom_jax.optimize(lambda t, i: (t[i] + t[i[::-1]]).mean(-1), options=VERIFY)
    large = gate.LARGE // DIM
    assert tokens.explain(*shapes(large)).num_fused == 0
    assert tokens.explain(*shapes(large - 1)).num_fused == 2
    assert masked.explain(*shapes(large)).num_fused == 1
    assert normed.explain(*shapes(large)).num_fused == 2


@pytest.mark.once
def test_a_call_that_is_there_anyway_takes_single_lookups_along() -> None:
    def model(t: Any, i: Any) -> Any:
        return t[i] * t[0] + t[1], t[i.reshape(-1, 4)].sum(1)

    assert reads(model, ENOUGH).num_fused == 2


@pytest.mark.once
def test_rows_that_a_later_bag_needs_stay_in_its_call() -> None:
    """The bag's weights are XLA's, made of the same rows: held back, the rows would cost the bag its fusion."""

    def model(t: Any, i: Any) -> Any:
        rows = t[i.reshape(-1, 4)]
        scaled = rows * t[0] + t[1]
        weights = jnp.tanh(scaled.reshape(-1, DIM) @ t[:DIM, :1]).reshape(-1, 4)
        return scaled, (rows * weights[..., None]).sum(1)

    report = reads(model, ENOUGH)
    assert report.num_fused == report.num_columns


@pytest.mark.once
def test_derivatives_batches_and_servers_of_gated_models() -> None:
    fn = GATED["multiply and add"]
    args = table(500, DIM), ids((ENOUGH,), 500)
    model = recom_jax.optimize(fn, options=VERIFY)
    got, want = (jax.grad(lambda t, f=f: f(t, args[1]).sum())(args[0]) for f in (model, fn))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(model.bind(args[0])(args[1]), fn(*args), rtol=1e-5, atol=1e-5)
    two = jnp.stack([args[1], args[1][::-1]])
    got = jax.vmap(model, (None, 0))(args[0], two)
    np.testing.assert_allclose(got, jax.vmap(fn, (None, 0))(args[0], two), rtol=1e-5, atol=1e-5)
