"""Tables of float8: rows widened in the call, bit for bit as JAX converts them. Plain JAX is the oracle."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import recom_jax
from recom_jax.cuda import codegen
from tests import cuda_emulation
from tests.helpers import VERIFY, ids

KINDS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: np.dtype(k).name)


def every(kind: Any, width: int = 16) -> Any:
    """A table that holds each of the 256 values once."""
    return jnp.asarray(np.arange(256, dtype=np.uint8).view(kind).reshape(-1, width))


def bits(x: Any) -> Any:
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def one_nan(x: Any) -> Any:
    """With all NaN alike: their sign is XLA's choice, by context."""
    x = np.asarray(x)
    if x.dtype.kind in "iu":
        return x
    return np.where(np.isnan(x.astype(np.float32)), np.array(np.nan, x.dtype), x)


def same(fn: Any, *args: Any, columns: int) -> Any:
    """Fused, and every bit is JAX's."""
    model = recom_jax.optimize(fn, options=VERIFY)
    assert model.explain(*args).num_fused == columns
    got, want = model(*args), jax.jit(fn)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(bits(one_nan(g)), bits(one_nan(w)))
    return got


def dequantised(q: Any, s: Any, i: Any) -> Any:
    return jnp.take(q, i, axis=0).astype(jnp.float32) * jnp.take(s, i, axis=0)


@kinds
@pytest.mark.parametrize("to", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("width", [1, 8, 13])
def test_every_value_of_every_conversion(kind: Any, to: str, width: int) -> None:
    q = every(kind, 1) if width == 1 else every(kind)[:, :width]
    i = np.arange(len(q), dtype=np.int32)[::-1].copy()

    same(lambda q, i: q.at[i].get(mode="clip").astype(to), q, i, columns=1)


@kinds
@pytest.mark.parametrize("mode", ["fill", "clip", "wrap"])
def test_rows_that_do_not_exist(kind: Any, mode: str) -> None:
    q, s = every(kind), jnp.linspace(0.5, 2, 16)[:, None]
    i = ids((40,), 16, odd=True)

    def fn(q: Any, s: Any, i: Any) -> Any:
        rows = jnp.take(q, i, axis=0, mode=mode)
        return rows.astype(jnp.float32) * jnp.take(s, i, axis=0, mode=mode)

    same(fn, q, s, i, columns=2)


@kinds
def test_as_users_write_it(kind: Any) -> None:
    """The scale as a vector: its read is no column, but the product is in the call, as it is for int8."""
    q, s, i = every(kind), jnp.linspace(0.5, 2, 16), ids((40,), 16)

    def by_vector(q: Any, s: Any, i: Any) -> Any:
        return jnp.take(q, i, axis=0).astype(jnp.float32) * jnp.take(s, i, axis=0)[:, None]

    same(by_vector, q, s, i, columns=1)
    for table in (q, jnp.zeros((16, 16), jnp.int8)):
        report = recom_jax.optimize(by_vector, options=VERIFY).explain(table, s, i)
        assert "binary mul" in report.source
    same(dequantised, q, s[:, None], i, columns=2)


@kinds
def test_rows_kept_as_they_are(kind: Any) -> None:
    q = every(kind)
    for table in (q, q[:, :13]):
        same(lambda q, i: q.at[i].get(mode="clip"), table, np.arange(16), columns=1)


@kinds
@pytest.mark.parametrize("combine", ["sum", "max"])
def test_bags(kind: Any, combine: str) -> None:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((60, 24)).astype(kind))
    s = jnp.asarray(2.0 ** rng.integers(-3, 3, (60, 1)), jnp.float32)
    i = ids((9, 7), 60, odd=True)

    def fn(q: Any, s: Any, i: Any) -> Any:
        rows = jnp.where((i >= 0)[..., None], dequantised(q, s, jnp.maximum(i, 0) % 60), 0)
        return rows.sum(1) if combine == "sum" else rows.max(1)

    model = recom_jax.optimize(fn, options=VERIFY)
    assert model.explain(q, s, i).num_fused == 2
    np.testing.assert_allclose(model(q, s, i), jax.jit(fn)(q, s, i), rtol=1e-6, atol=1e-6)


@kinds
def test_jagged_bags_served(kind: Any) -> None:
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((60, 8)).astype(kind))
    s = jnp.asarray(rng.uniform(0.5, 2, (60, 1)), jnp.float32)
    batch = {
        "values": rng.integers(0, 60, 50).astype(np.int32),
        "segments": np.sort(rng.integers(0, 9, 50)).astype(np.int32),
    }

    def fn(params: Any, batch: Any) -> Any:
        rows = dequantised(*params, batch["values"])
        return jax.ops.segment_sum(rows, batch["segments"], num_segments=9)

    want = jax.jit(fn)((q, s), batch)
    serve = recom_jax.optimize(fn, options=VERIFY).bind((q, s))
    np.testing.assert_allclose(serve(batch), want, rtol=1e-5, atol=1e-5)
    serve.update((q, s * 2))
    np.testing.assert_allclose(serve(batch), 2 * want, rtol=1e-5, atol=1e-5)


@kinds
def test_arithmetic_stays_in_xla(kind: Any) -> None:
    q, i = every(kind)[3:7], ids((40,), 4)  # no NaN: XLA makes one of another as it likes
    rows = jnp.take

    def fn(q: Any, i: Any) -> Any:
        e = rows(q, i, axis=0)
        return {
            "sum": e + e,
            "max": e.max(0),
            "to": e.astype(jnp.float32).astype(kind),
            "bits": jax.lax.bitcast_convert_type(e, jnp.uint8),
        }

    got = recom_jax.optimize(fn, options=VERIFY)(q, i)
    for k, want in jax.jit(fn)(q, i).items():
        if k != "bits":
            got[k], want = one_nan(got[k]), one_nan(want)
        np.testing.assert_array_equal(bits(got[k]), bits(want), err_msg=k)


def test_other_float8_types_say_so() -> None:
    q = jnp.ones((4, 4), jnp.float8_e4m3b11fnuz)
    report = recom_jax.optimize(lambda q, i: q[i].astype(jnp.float32), options=VERIFY).explain(
        q, np.arange(3)
    )
    assert report.num_fused == 0
    assert "float8_e4m3b11fnuz" in str(report)


@pytest.mark.once
@pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing()))
def test_on_the_emulated_device() -> None:
    """All values of both types, aligned and not, missing rows, and bags."""

    def fn(a: Any) -> Any:
        out = {}
        for name, (q, odd, s, i, m) in a.items():
            out[f"{name} rows"] = jnp.take(q, i, axis=0).astype(jnp.float32)
            out[f"{name} half"] = odd[jnp.clip(i, 0, 15)].astype(jnp.bfloat16)
            out[f"{name} scaled"] = dequantised(q, s, i)
            out[f"{name} kept"] = q[jnp.clip(i, 2, 5)]
            out[f"{name} bags"] = dequantised(q[2:6], s[2:6], m % 4).sum(1)
        return out

    args = {
        np.dtype(kind).name: (
            every(kind), every(kind)[:, :13], jnp.linspace(0.5, 2, 16)[:, None],
            ids((37,), 16, odd=True), ids((37, 5), 60),
        )
        for kind in KINDS
    }  # fmt: skip
    made = cuda_emulation.compiled(fn, args)
    want = jax.jit(fn)(args)
    assert any("e4m3" in codegen.generate(p).source for p in made.programs)
    for options in (cuda_emulation.Options(), cuda_emulation.Options(tiles="unaligned")):
        got = made.run(functools.partial(cuda_emulation.emulate, options=options))
        for k, x in want.items():
            if "bags" in k:
                np.testing.assert_allclose(got[k], x, rtol=1e-6, atol=1e-6, err_msg=k)
            else:
                np.testing.assert_array_equal(bits(one_nan(got[k])), bits(one_nan(x)), err_msg=k)
