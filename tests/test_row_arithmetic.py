"""Float arithmetic on rows that are not pooled: plain JAX's bits, whatever XLA makes of the operations together."""

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
from recom_jax import ir, pipeline, row_arithmetic
from recom_jax.trace import trace
from tests.helpers import VERIFY, check, cpu_only

pytestmark = cpu_only("XLA contracts and reassociates otherwise there")
RNG = np.random.default_rng(7)
T = RNG.standard_normal((100, 16)).astype(np.float32)
Q = RNG.integers(0, 255, (100, 16)).astype(np.uint8)
S = RNG.random(100).astype(np.float32)
Z = RNG.standard_normal(100).astype(np.float32)
IDS = RNG.integers(0, 100, 64).astype(np.int32)
Y = RNG.standard_normal((64, 16)).astype(np.float32)
W = RNG.standard_normal((64, 1)).astype(np.float32)
Model = Callable[[Any, Any, Any, Any], Any]

LEFT: dict[str, Model] = {
    "scaled, plus": lambda t, i, y, w: t[i] * 3.3 + 1.7,
    "scaled, minus rows": lambda t, i, y, w: t[i] * w - t[i + 1],
    "weighted, plus": lambda t, i, y, w: t[i] * y + w,
    "minus weighted": lambda t, i, y, w: -(t[i] * y) + w,
    "product of products, plus": lambda t, i, y, w: (t[i] * y) * 3.1 + w,
    "sum, scaled, plus": lambda t, i, y, w: (t[i] + y) * 3.1 + w,
    "moved between": lambda t, i, y, w: (t[i] * y).T[::2].reshape(-1) + 1.7,
    "joined between": lambda t, i, y, w: jnp.concatenate([t[i] * y, y], 1) + 1.7,
    "constants added": lambda t, i, y, w: (t[i] + 0.1) + 0.7,
    "constants subtracted": lambda t, i, y, w: (1.3 - t[i]) + 0.7,
    "constants multiplied": lambda t, i, y, w: (t[i] * 0.1) * 0.7,
    "over one for all": lambda t, i, y, w: t[i] / w[3, 0],
    "over one a row": lambda t, i, y, w: t[i] / w,
    "over one a feature": lambda t, i, y, w: t[i] / y[0],
    "over a count": lambda t, i, y, w: t[i] / jnp.maximum(i % 5, 1)[:, None],
    "over a quotient": lambda t, i, y, w: t[i] / (y / w),
    "over and over": lambda t, i, y, w: t[i] / y / w,
    "over a root": lambda t, i, y, w: t[i] / jnp.sqrt(jnp.abs(w)),
    "over the root of a number": lambda t, i, y, w: t[i] / jnp.sqrt(7.0),
    "over an exponential": lambda t, i, y, w: t[i] / jnp.exp(w),
    "over a constant array": lambda t, i, y, w: t[i] / np.linspace(1, 3, 16, dtype=np.float32),
    "over constant integers": lambda t, i, y, w: t[i] / np.arange(1, 17, dtype=np.int32),
    "over the norm": lambda t, i, y, w: t[i] / jnp.linalg.norm(t[i], axis=-1, keepdims=True),
    "plus a power": lambda t, i, y, w: t[i] + y**3,
    "an extreme, scaled, plus": lambda t, i, y, w: t[i.reshape(8, 8)].max(1) * w[:8] + 1.5,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_depends_on_its_context_is_plain_jax(name: str) -> None:
    """The rows are looked up in one call all the same."""
    check(LEFT[name], T, IDS, Y, W)
    if "extreme" in name:
        return
    one = T, IDS[:8], Y[:8], W[:8]
    np.testing.assert_array_equal(recom_jax.optimize(LEFT[name])(*one), jax.jit(LEFT[name])(*one))


XLAS: dict[str, Model] = {
    "two products": lambda t, i, y, w: t[i] * y + t[i + 1] * (1 - w),
    "squares added up": lambda t, i, y, w: jnp.square(t[i]).sum(-1),
    "the norm": lambda t, i, y, w: jnp.linalg.norm(t[i] * y, axis=-1),
    "variance": lambda t, i, y, w: jnp.var(t[i] * y, axis=-1),
}


@pytest.mark.parametrize("name", XLAS)
def test_sums_of_products_are_xlas_own(name: str) -> None:
    """Which product is contracted, and in which order is added, XLA decides anew where the rows come from a call."""
    fn = XLAS[name]
    call = trace(fn, (T, IDS, Y, W), tuple("tiyw"))
    assert row_arithmetic.REASON in pipeline.compile_jaxpr(call, VERIFY).forced.values()
    np.testing.assert_allclose(
        recom_jax.optimize(fn)(T, IDS, Y, W), jax.jit(fn)(T, IDS, Y, W), rtol=1e-4, atol=1e-5
    )


FUSED: dict[str, Model] = {
    "scaled": lambda t, i, y, w: t[i] * 3.3,
    "weighted": lambda t, i, y, w: t[i] * y,
    "weighted twice": lambda t, i, y, w: t[i] * y * w,
    "three tables' rows": lambda t, i, y, w: t[i] + t[i + 1] + t[i + 2],
    "plus an argument": lambda t, i, y, w: t[i] + y + w,
    "plus, times": lambda t, i, y, w: (t[i] + y) * w,
    "over an argument": lambda t, i, y, w: t[i] / y,
    "over a power of two": lambda t, i, y, w: t[i] / 4,
    "scaled, into a layer": lambda t, i, y, w: (t[i] * w) @ t[:16],
    "scaled, and compared": lambda t, i, y, w: t[i] * w > y,
    "scaled, and its extreme": lambda t, i, y, w: jnp.max(t[i] * w, -1),
    "masked": lambda t, i, y, w: jnp.where(w > 0, t[i] * y, 0.0),
    "joined": lambda t, i, y, w: jnp.concatenate([t[i] * y, t[i + 1]], 1),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_has_its_bits_anywhere_stays_in_the_call(name: str) -> None:
    check(FUSED[name], T, IDS, Y, W)
    call = trace(FUSED[name], (T, IDS, Y, W), tuple("tiyw"))
    compiled = pipeline.compile_jaxpr(call, VERIFY)
    assert row_arithmetic.REASON not in compiled.forced.values()


def test_bags_keep_their_arithmetic() -> None:
    """What is promised of their sums allows for one rounding more or less."""

    def fn(t: Any, i: Any, y: Any, w: Any) -> Any:
        rows = t[i.reshape(8, 8)]
        return (rows * y.reshape(8, 8, 16) * 3.3).mean(1) * w[:8] + 1.5

    compiled = pipeline.compile_jaxpr(trace(fn, (T, IDS, Y, W), tuple("tiyw")), VERIFY)
    assert row_arithmetic.REASON not in compiled.forced.values()


def dequantised(q: Any, s: Any, z: Any, ids: Any) -> Any:
    rows = jnp.take(q, ids, axis=0).astype(jnp.float32)
    return rows * jnp.take(s, ids)[:, None] + jnp.take(z, ids)[:, None]


def test_printed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product goes to XLA with its sum; the rows are converted in the call."""
    call = trace(dequantised, (Q, S, Z, IDS), tuple("qszi"))

    def printed() -> list[str]:
        lines = str(pipeline.compile_jaxpr(call, VERIFY).detected).splitlines()
        return [line.partition(": ")[2] for line in lines if line.startswith("  @")]

    (after,) = printed()
    assert after.startswith("convert<float32>(")
    assert "mul" not in after
    monkeypatch.setattr(row_arithmetic, "left_to_xla", lambda d, detected: {})
    assert any(line.startswith("mul(convert<float32>(") for line in printed())


def test_dequantised_rows() -> None:
    check(dequantised, Q, S, Z, IDS, leaves_gather=True)  # of s and z, which are no tables
    assert recom_jax.optimize(dequantised)(Q, S, Z, IDS[:0]).shape == (0, 16)
    odd = np.where(IDS % 5 == 0, -IDS, IDS + IDS % 3 * 50).astype(np.int32)
    check(dequantised, Q, S, Z, odd, leaves_gather=True)


def test_a_table_that_is_computed() -> None:
    """A chain, or a division by a constant, of the whole table is XLA's; one product is moved behind the lookup."""
    for fn in (
        lambda t, i: (t / 7)[i],
        lambda t, i: (t * 0.1 + 0.7)[i],
        lambda t, i: (t * 0.1)[i] + 0.7,
        lambda t, i: (t * 0.1 * 0.7)[i],
    ):
        check(fn, T, IDS, fused=0, calls=0)
    check(lambda t, i: (t * 0.1)[i], T, IDS)
    check(lambda t, i: (t / 4)[i], T, IDS)


OPERATIONS = {
    "times a number": lambda x, y, w: x * 0.37,
    "plus a number": lambda x, y, w: x + 1.1,
    "minus from a number": lambda x, y, w: 0.6 - x,
    "over a number": lambda x, y, w: x / 3.0,
    "times rows": lambda x, y, w: x * y,
    "plus rows": lambda x, y, w: x + y,
    "over rows": lambda x, y, w: x / y,
    "minus weights": lambda x, y, w: x - w,
    "times weights": lambda x, y, w: x * w,
    "over a root": lambda x, y, w: x / jnp.sqrt(jnp.abs(w) + 1),
    "plus a power": lambda x, y, w: x + y**3,
    "times weights, scaled": lambda x, y, w: x * (w * 0.3),
    "negative": lambda x, y, w: -x,
    "absolute": lambda x, y, w: jnp.abs(x),
    "at most": lambda x, y, w: jnp.minimum(x, w),
    "masked": lambda x, y, w: jnp.where(w > 0, x, 0.0),
    "other rows": lambda x, y, w: x + x[::-1],
    "square": lambda x, y, w: jnp.square(x),
    "upside down": lambda x, y, w: x[::-1],
    "to and fro": lambda x, y, w: x.reshape(-1).reshape(x.shape),
}


@given(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=5), st.booleans())
def test_any_chain(names: list[str], quantised: bool) -> None:
    """Bit for bit, or all of it left to XLA, whose own results may differ by context."""

    def fn(table: Any, ids: Any, y: Any, w: Any) -> Any:
        x = table[ids].astype(jnp.float32)
        for name in names:
            x = OPERATIONS[name](x, y, w)
        return x

    args = Q if quantised else T, IDS, Y, W
    want, got = jax.jit(fn)(*args), recom_jax.optimize(fn, options=VERIFY)(*args)
    if not np.array_equal(got, want):
        compiled = pipeline.compile_jaxpr(trace(fn, args, tuple("tiyw")), VERIFY)
        for out in compiled.detected.outputs:
            assert out.val.expr is not None
            assert not any(row_arithmetic.is_arithmetic(e) for e in ir.walk(out.val.expr))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# ---- ids: the neighbouring row is not nearly right -----------------------------------------------------------------

A, B = (RNG.integers(1, n, 20_000).astype(np.float32) for n in (400, 40))
WIDE = np.arange(3000, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32)
IDS_OF: dict[str, Callable[[Any, Any], Any]] = {
    "plus the cube of a root": lambda a, b: jnp.cbrt(b) ** 3 + a,
    "plus a cube": lambda a, b: (b / 7) ** 3 + a,
    "over an exponential": lambda a, b: a / jnp.exp(-jnp.log(b)),
    "over a power": lambda a, b: a / jnp.power(b, 0.5),
    "scaled, over a root": lambda a, b: a / jax.lax.rsqrt(b),
    "of a sigmoid": lambda a, b: jax.nn.sigmoid(b * 0.1) * 100 + a,
    "over one for all": lambda a, b: a / b[0],
}


@pytest.mark.parametrize("name", IDS_OF)
@pytest.mark.parametrize("search", [False, True], ids=["cast", "digitize"])
def test_ids_from_arithmetic_that_xla_does_are_its_own(name: str, search: bool) -> None:
    def fn(table: Any, a: Any, b: Any) -> Any:
        x = IDS_OF[name](a, b)
        if search:
            return table[jnp.digitize(x, np.arange(0, 2999, dtype=np.float32))]
        return table[jnp.clip(x.astype(jnp.int32), 0, 2999)]

    check(fn, WIDE, A, B, leaves_while=True)


def test_ids_from_one_operation_are_found_in_the_call() -> None:
    def fn(table: Any, a: Any, b: Any) -> Any:
        return table[(a / b).astype(jnp.int32)]

    report = check(fn, WIDE, A, B)
    assert "div" in report.source


def test_ids_from_a_division_by_one_number() -> None:
    """XLA multiplies by its inverse: whole quotients become the number below or above."""
    scale = np.float32(0.037)
    x = np.arange(3000, dtype=np.float32) * scale

    def fn(table: Any, x: Any, scale: Any) -> Any:
        return table[jnp.clip((x / scale).astype(jnp.int32), 0, 2999)]

    by_inverse = (x * (1 / scale)).astype(np.int32)
    assert (by_inverse != (x / scale).astype(np.int32)).any()
    check(fn, WIDE, x, scale)
