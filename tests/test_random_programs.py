"""Random models of about 50 columns each: the optimized function equals plain JAX.

A column is made of a seed, a model of a list of seeds: hypothesis shrinks a failure to the columns that matter,
and the failure prints the model's source. A long run, which prints counts and the first failing seed::

    python -m tests.test_random_programs --columns 100000 --seed 1 --workers 16
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import recom_jax
from tests import random_oracle, random_run
from tests.helpers import assert_same
from tests.random_columns import BATCHES, arguments, column
from tests.random_compare import check_fused, compare
from tests.random_models import build

SEEDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


@given(SEEDS, st.integers(0, 2**16), st.sampled_from(BATCHES))
@example(list(range(50)), 1, 5)
@settings(max_examples=settings.default.max_examples)
def test_random_models(seeds: list[int], layout_seed: int, batch: int) -> None:
    made = compare(seeds, layout_seed, batch, draws=2)
    check_fused(made.report, len(seeds), batch)


def test_models_are_the_same_for_the_same_seed() -> None:
    assert build(range(30), 7).source == build(range(30), 7).source
    assert build(range(30), 7).source != build(range(1, 31), 7).source


def test_a_wrong_column_is_noticed() -> None:
    model = build(range(12), 3)
    want = jax.jit(model.fn)(model.params, arguments(4, 3))
    broken = jax.tree.map(lambda x: x + 1e-2, want)
    with pytest.raises(AssertionError, match="values differ"):
        assert_same(broken, want, model.bounds(4))


# ---- the oracle of extremes -------------------------------------------------------------------------------------


def _seed_of(text: str) -> int:
    """A seed whose column ends in `text`."""
    return next(s for s in range(5000) if column(0, s)[0].lines[-1].endswith(text))


@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes_by_numpy_keep_nan_and_are_all_that_differs(op: str) -> None:
    rng = np.random.default_rng(0)
    x = np.where(rng.random((33, 9, 33)) < 0.1, np.nan, rng.normal(size=(33, 9, 33)))
    x = x.astype(np.float32)

    def fn(x: Any) -> Any:
        return [getattr(jnp, op)(x * 2, axis=1), jnp.sum(jnp.nan_to_num(x), 2)]

    extreme, total = random_oracle.with_numpy_extremes(fn, x)
    np.testing.assert_array_equal(extreme, getattr(np, op)(x * 2, axis=1))
    np.testing.assert_array_equal(total, jax.jit(fn)(x)[1])


def test_only_a_lost_nan_of_an_extreme_is_forgiven() -> None:
    nan, inf = np.nan, np.inf
    #       lost  ours wrong  not an extreme  both NaN  ours lost it  all equal  another number
    got = [nan, nan, nan, nan, inf, 1.0, 2.0]
    want = [inf, 1.0, inf, nan, nan, 1.0, 1.0]
    by_numpy = [nan, 1.0, nan, nan, nan, 1.0, 2.0]
    mask = [1, 1, 0, 1, 1, 1, 1]
    got, want, by_numpy, mask = (
        {"a": jnp.asarray(x, jnp.float32)} for x in (got, want, by_numpy, mask)
    )
    found, lost = random_oracle.corrected(got, want, mask, lambda: by_numpy)
    assert lost == 1
    np.testing.assert_array_equal(found["a"], [nan, 1.0, inf, nan, nan, 1.0, 1.0])


@pytest.mark.parametrize("end", [".max(1)", ".min(1)", "-jnp.inf).max(1)"])
def test_which_columns_are_extremes(end: str) -> None:
    seed = _seed_of(end)
    model = build([seed], 0)
    assert model.columns[0].extreme
    sums = build([_seed_of(".sum(1)"), _seed_of(".mean(1)")], 0)
    assert not any(c.extreme for c in sums.columns)
    assert compare([seed], 0, 33, draws=3).report.num_columns


# ---- long runs --------------------------------------------------------------------------------------------------


@pytest.mark.once
def test_a_long_run_is_the_same_whatever_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for workers in ("1", "2"):
        args = ["--columns", "14", "--per-model", "4", "--seed", "3", "--workers", workers]
        assert random_run.main([*args, "--draws", "1"]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0].startswith("4 models, 14 columns, 0 failed")
        lines.append(out[1:-1])
    assert lines[0] == lines[1]


@pytest.mark.once
def test_a_gpus_oracle_is_plain_jax_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    made = random_run.environment("cuda")
    assert made["XLA_FLAGS"] == "--xla_dump_to=/nowhere --xla_allow_excess_precision=false"
    assert made["JAX_DEFAULT_MATMUL_PRECISION"] == "highest"
    assert random_run.environment("cpu")["XLA_FLAGS"] == "--xla_dump_to=/nowhere"


@pytest.mark.once
@pytest.mark.parametrize("rows", [1, 9])
def test_rows_of_a_cast_table_are_rounded_as_written(rows: int) -> None:
    """What long runs on a GPU met: XLA leaves the rounding out there, of a table of one row."""
    t = np.random.default_rng(0).normal(size=(rows, 9)).astype(np.float32)
    i = np.arange(4, dtype=np.int32) % rows
    fn = recom_jax.optimize(lambda t, i: t.astype(jnp.bfloat16)[i].astype(jnp.float32) * 0.5)
    want = t.astype(jnp.bfloat16).astype(np.float32)[i] * np.float32(0.5)
    np.testing.assert_array_equal(fn(t, i), want)
    assert fn.explain(t, i).num_fused == 1


@pytest.mark.once
def test_a_long_run_names_what_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"begin": 1},
        {"passed": 1, "columns": 3, "lost": 2, "counts": {"bag": 3}},
        {"begin": 3},
        {"failed": 3, "columns": 3, "why": "values differ", "alone": "column seed 9 fails alone"},
        {"begin": 5},
    ]
    script = "".join(f"print({json.dumps(x)!r});" for x in lines) + "print('words'); exit(3)"
    monkeypatch.setattr(random_run, "command", lambda o, k: [sys.executable, "-c", script])
    args = ["--columns", "18", "--per-model", "3", "--seed", "5"]
    assert random_run.main([*args, "--keep-going"]) == 1
    out = capsys.readouterr().out
    assert "2 models, 6 columns, 1 failed" in out
    assert "values differ\ncolumn seed 9 fails alone" in out
    assert "2 extremes whose NaN plain JAX lost, in 1 models" in out
    assert "worker 0: words" in out
    assert "BROKEN: worker 0 ended with 3, model 5" in out
    assert "the first is model 3 of --seed 5" in out
    assert random_run.main(args) == 1  # stops there
    assert "BROKEN" not in capsys.readouterr().out


if __name__ == "__main__":
    sys.exit(random_run.main())
