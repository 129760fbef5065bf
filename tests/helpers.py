"""What the correctness tests share: plain JAX is the oracle.

`check` runs a function under `recom_jax.optimize` and under `jax.jit` and compares everything a caller can see:
values (bit for bit unless a bound is given), dtypes, shapes, weak types, the pytree; and that the columns did
run fused.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax

VERIFY = recom_jax.Options(verify=True)
EPS = float(np.finfo(np.float32).eps)


def cpu_only(why: str) -> pytest.MarkDecorator:
    """Skips where JAX's default device is a GPU."""
    return pytest.mark.skipif(jax.default_backend() != "cpu", reason=f"on a GPU: {why}")


@dataclasses.dataclass(frozen=True)
class Bag:
    """The contract's bound for pooled floats: 2 * n * eps * sum |w * e|, once for each side compared.

    Attributes:
      n: longest bag. A handful of roundings of the post-arithmetic are added.
      absolute: positions of the arguments (tables, weights) whose absolute values give ``sum |w * e|``
        when put through the function itself.
      magnitude: ``sum |w * e|`` itself, where the function is no sum of products of those.
    """

    n: int
    absolute: tuple[int, ...] = (0,)
    magnitude: Any = None

    def tolerance(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        size = self.magnitude
        if size is None:
            size = jax.jit(fn)(
                *[
                    jax.tree.map(absolute, a) if k in self.absolute else a
                    for k, a in enumerate(args)
                ]
            )
        return jax.tree.map(
            lambda m: 2 * (self.n + 6) * EPS * np.abs(np.asarray(m, np.float64)) + 1e-37, size
        )


def absolute(x: Any) -> Any:
    """By numpy: XLA would compile it for each shape."""
    return jnp.asarray(np.abs(np.asarray(x)))


POISON = 0xA5  # the byte that memory which nobody wrote holds


def poison(like: Any) -> None:
    """On a GPU: what the next call leaves unwritten of results of these shapes and dtypes holds `POISON`.

    XLA's pool gives memory out again, so a kernel that writes nothing could return what an earlier one wrote. Many
    buffers at once take every free place that a result may get.
    """
    if (
        jax.default_backend() == "cpu"
    ):  # tests of the interpreter and of emulated kernels do so themselves
        return
    plain = [x for x in jax.tree.leaves(like) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]
    sizes = {math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in plain}
    for size in sizes - {0}:
        junk = np.full(size, POISON, np.uint8)
        copies = [jax.device_put(junk) for _ in range(max(2, min(64, (64 << 20) // size)))]
        for x in jax.block_until_ready(copies):
            x.delete()


def run(
    fn: Callable[..., Any], *args: Any, options: recom_jax.Options = VERIFY, **keywords: Any
) -> tuple[Any, recom_jax.Report]:
    """The optimized function's result and its report."""
    optimized = recom_jax.optimize(fn, options=options, **keywords)
    return optimized(*args), optimized.explain(*args)


def check(
    fn: Callable[..., Any],
    *args: Any,
    columns: int | None = None,
    fused: int | None = None,
    calls: int | None = 1,
    bound: Any = None,
    leaves_gather: bool = False,
    leaves_while: bool = False,
    options: recom_jax.Options = VERIFY,
    **keywords: Any,
) -> recom_jax.Report:
    """`optimize(fn)(*args)` equals `jax.jit(fn)(*args)`, and runs fused.

    Args:
      columns: table reads that must be found (None: at least one).
      fused: how many of them must be fused (None: all).
      calls: custom calls expected (None: any number).
      bound: None for bit equality, a `Bag`, a number, or a pytree prefix of absolute bounds.
      leaves_gather, leaves_while: the lowered text may hold such an operation that is no column's.
      keywords: of `optimize` and `jax.jit` (``static_argnums``...).

    Returns:
      The report.
    """
    optimized = recom_jax.optimize(fn, options=options, **keywords)
    expected = jax.jit(fn, **keywords)(*args)
    poison(expected)
    actual = optimized(*args)
    tolerance = bound.tolerance(fn, args) if isinstance(bound, Bag) else bound
    assert_same(actual, expected, tolerance)
    report = optimized.explain(*args)
    check_report(report, columns, fused, calls)
    text = optimized.lower(*args).as_text()
    assert text.count("custom_call @recom_fused_v1") == report.num_custom_calls, report
    if report.num_fused == report.num_columns:
        assert leaves_gather or not re.search(r"stablehlo\.\"?(dynamic_)?gather", text), text
        assert leaves_while or "stablehlo.while" not in text, text
    return report


def check_report(
    report: recom_jax.Report, columns: int | None, fused: int | None, calls: int | None
) -> None:
    """The numbers of the contract, and a reason for every column left in XLA."""
    if columns is None:
        assert report.num_columns > 0, report.to_text(limit=None)
    else:
        assert report.num_columns == columns, report.to_text(limit=None)
    want = report.num_columns if fused is None else fused
    assert report.num_fused == want, report.to_text(limit=None)
    if calls is not None:
        assert report.num_custom_calls == calls, report.to_text(limit=None)
    for column in report.columns:
        assert (column.reason == "") == (column.status == "fused"), column


def assert_same(actual: Any, expected: Any, tolerance: Any = None) -> None:
    """Equal pytrees, dtypes, shapes, weak types and values; reports every leaf that differs."""
    got, tree = jax.tree_util.tree_flatten_with_path(actual)
    want, expected_tree = jax.tree_util.tree_flatten(expected)
    assert tree == expected_tree, f"{tree}\n{expected_tree}"
    if tolerance is None or isinstance(tolerance, (int, float)):
        bounds: list[Any] = [tolerance] * len(want)
    else:
        bounds = []  # `tolerance` is a prefix of the result's tree; None is a leaf of it
        jax.tree.map(
            lambda t, e: bounds.extend([t] * len(jax.tree.leaves(e))),
            tolerance,
            expected,
            is_leaf=lambda t: t is None,
        )
    wrong = [
        f"result{jax.tree_util.keystr(path)}: {why}"
        for (path, a), e, b in zip(got, want, bounds, strict=True)
        if (why := difference(a, e, b)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def difference(a: Any, e: Any, bound: Any = None) -> str | None:
    """How `a` differs from `e`, None if it does not. NaNs are equal whatever their bits."""
    if getattr(a, "dtype", None) != getattr(e, "dtype", None):
        return f"dtype {getattr(a, 'dtype', type(a))} is not {getattr(e, 'dtype', type(e))}"
    if np.shape(a) != np.shape(e):
        return f"shape {np.shape(a)} is not {np.shape(e)}"
    weak = getattr(a, "weak_type", False), getattr(e, "weak_type", False)
    if weak[0] != weak[1]:
        return f"weak types {weak}"
    x, y = np.asarray(a), np.asarray(e)
    if x.dtype.name in ("bfloat16", "float16"):
        x, y = x.astype(np.float32), y.astype(np.float32)
    if not np.issubdtype(x.dtype, np.floating):
        bad = x != y
    elif bound is None:
        nan = np.isnan(x) & np.isnan(y)
        with np.errstate(invalid="ignore"):
            bad = ~nan & ((x != y) | (np.signbit(x) != np.signbit(y)))
    else:
        with np.errstate(invalid="ignore"):
            x, y = x.astype(np.float64), y.astype(np.float64)
            same = (np.isnan(x) & np.isnan(y)) | (x == y)
            bad = ~same & ~(np.abs(x - y) <= np.broadcast_to(bound, x.shape))
    if not np.any(bad):
        return None
    where = tuple(int(k[0]) for k in np.nonzero(np.atleast_1d(bad)))
    limit = (
        ""
        if bound is None
        else f" (bound {np.broadcast_to(bound, np.shape(x))[where if x.ndim else ()]})"
    )
    return (
        f"{int(np.sum(bad))} of {bad.size} values differ, first at {where}: "
        f"{np.atleast_1d(x)[where]!r} is not {np.atleast_1d(y)[where]!r}{limit}"
    )


def table(rows: int, dim: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    """A table of values of every magnitude; integers use their whole range."""
    rng = np.random.default_rng([seed, rows, dim])
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return jnp.asarray(rng.integers(0, 2, (rows, dim)).astype(bool))
    if np.issubdtype(kind, np.integer):
        info = np.iinfo(kind)
        return jnp.asarray(rng.integers(info.min, info.max, (rows, dim), dtype=kind, endpoint=True))
    # numpy's casts are XLA's, which would compile each for each shape.
    values = (rng.normal(size=(rows, dim)) * 4).astype(jnp.result_type(float))
    return jnp.asarray(values.astype(kind))


def ids(
    shape: int | tuple[int, ...], rows: int, seed: int = 0, dtype: Any = np.int32, odd: bool = False
) -> Any:
    """Row numbers; `odd` adds negative, too large and huge ones as far as the dtype has them."""
    rng = np.random.default_rng([seed, rows])
    out = rng.integers(0, max(rows, 1), shape)
    if odd and out.size:
        info = np.iinfo(dtype)
        strange = [
            v
            for v in (
                -1,
                -2,
                -rows,
                -rows - 1,
                rows,
                rows + 1,
                3 * rows,
                info.max,
                info.min,
                0,
                rows - 1,
            )
            if info.min <= v <= info.max
        ]
        flat = out.reshape(-1).astype(object)  # of Python ints: no dtype holds all of them
        at = rng.permutation(flat.size)[: max(flat.size * 2 // 3, 1)]
        for k, where in enumerate(at):
            flat[where] = strange[k % len(strange)]
        out = flat.reshape(out.shape)
    return jnp.asarray(out.astype(dtype))
