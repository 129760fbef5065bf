"""Compares a random model with plain JAX, on the default device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

import recom_jax
from tests.helpers import VERIFY, assert_same
from tests.random_columns import arguments
from tests.random_models import Model, build
from tests.random_oracle import corrected, with_numpy_extremes


@dataclasses.dataclass(frozen=True)
class Compared:
    """A model that is equal to plain JAX.

    Attributes:
      lost: values, minima and maxima of bags, that are NaN but were not in plain JAX (`random_oracle`).
    """

    model: Model
    report: recom_jax.Report
    lost: int


def compare(seeds: Sequence[int], layout_seed: int, batch: int, draws: int = 1) -> Compared:
    """Raises AssertionError, with the model's source, where the optimized model differs.

    Args:
      seeds: of the columns.
      draws: how many times the model is called, each time with other numbers in a batch of the same size.
    """
    model = build(seeds, layout_seed)
    try:
        plain, optimized = jax.jit(model.fn), recom_jax.optimize(model.fn, options=VERIFY)
        bounds = model.bounds(batch)
        extreme = model.joined([float(c.extreme) for c in model.columns], batch)
        lost = 0
        for draw in range(draws):
            b = arguments(batch, layout_seed + (draw << 16))
            want, got = plain(model.params, b), optimized(model.params, b)
            want, n = corrected(
                got, want, extreme, lambda b=b: with_numpy_extremes(model.fn, model.params, b)
            )
            assert_same(got, want, bounds)
            lost += n
        report = optimized.explain(model.params, b)
        assert not report.unfused_on_cuda, (
            report.unfused_on_cuda
        )  # plain JAX would be compared with itself
    except Exception as why:
        raise AssertionError(
            f"seeds={list(seeds)!r} layout_seed={layout_seed} batch={batch} draws={draws}\n{why}\n{model.source}"
        ) from why
    return Compared(model, report, lost)


def check_fused(report: recom_jax.Report, columns: int, batch: int) -> None:
    """Every column is fused, all in one call."""
    left = [c for c in report.columns if c.status != "fused"]
    assert not left, report
    assert batch == 0 or report.num_columns >= columns, report
    assert report.num_custom_calls == (1 if report.num_columns else 0), report
