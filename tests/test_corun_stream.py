"""The stream runtime without a GPU: generated kernels run as C++, and what is enqueued runs in any order that streams
and events allow."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recom_jax import corun, ffi
from recom_jax import preprocess as pp
from recom_jax.corun import calls, kernels, pipeline
from recom_jax.corun.report import STREAM_MODES
from tests import corun_emulation, cuda_emulation

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]

SEEDS = iter(range(1 << 30))


def make(k: kernels.PrepKernels, /, **plan: Any) -> Any:
    address = corun_emulation.address(k.source)
    return ffi.extension().CorunRuntime.simulated(seed=next(SEEDS), kernel=address, **plan)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pipeline, "_emulated", (make, 4))
    monkeypatch.setattr(calls, "_emulated", True)
    jax.clear_caches()  # steps compiled without markers
    yield
    jax.clear_caches()


def prep(raw: Any) -> Any:
    ids = pp.sigrid_hash(pp.fill_null(raw["C"], -1), salt=1, max_value=50)
    return {"ids": pp.pad(pp.firstx(ids, 2), 3), "x": pp.clamp(raw["x"], 0.0, 1.0)}


def raw_batch(seed: int, rows: int = 20) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, rows)
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = rng.integers(-(1 << 62), 1 << 62, int(splits[-1]))
    there = rng.random(len(ids)) > 0.2
    return {
        "C": pp.Jagged(pp.Nullable(ids, there), splits),
        "x": rng.normal(size=rows).astype(np.float32),
    }


@functools.partial(jax.jit, donate_argnums=0)
def step(state: Any, batch: Any) -> Any:
    there = batch["ids"] >= 0
    rows = jnp.where(there[..., None], state["table"][batch["ids"]], 0)
    rows = corun.stage(rows, "look up")
    loss = jnp.sum(corun.stage(rows.sum((1, 2)) * batch["x"], "sum"))
    table = state["table"].at[jnp.where(there, batch["ids"], 0)].add(0.01 * loss)
    return {"table": table}, {"loss": loss, "x": batch["x"]}


def start() -> Any:
    return {"table": jnp.arange(100.0).reshape(50, 2)}


def losses(pipe: corun.Pipeline, batches: Any) -> list[float]:
    return [float(m["loss"]) for _, m in pipe.run(start(), batches)]


def one_by_one(batches: Any) -> list[float]:
    """What the run must be equal to: `prep` by plain JAX, then the step."""
    state, found = start(), []
    for raw in batches:
        state, m = step(state, jax.jit(prep)(pp.columns(raw)))
        found.append(float(m["loss"]))
    return found


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_run_equals_one_after_the_other(slots: int) -> None:
    batches = [raw_batch(k) for k in range(12)]
    pipe = corun.Pipeline(prep, step, options=corun.Options(slots=slots))
    assert losses(pipe, batches) == one_by_one(batches)
    assert pipe.runtime == "stream"
    assert losses(pipe, batches) == one_by_one(batches)  # slots are used again


def test_a_plan_is_made_of_the_kernels_and_executed() -> None:
    batches = [raw_batch(k) for k in range(24)]
    pipe = corun.Pipeline(prep, step, options=corun.Options(probe=True, profile=True))
    plan = pipe.make_plan(start(), batches[0])
    assert [s.name for s in plan.stages] == ["look up", "sum", "rest"]
    assert losses(pipe, batches) == one_by_one(batches)
    report = pipe.report()
    assert report.runtime == "stream" and report.late[1] == 24 * len(plan.kernels)
    assert {k[0] for k in report.kernels} == {k.name for k in plan.kernels}
    assert all(measured > 0 for _, _, measured in report.kernels)
    assert "missed their stage" in str(report) and "prepared by: stream" in str(report)


def test_measure_compares_all_orders_bit_for_bit() -> None:
    batches = [raw_batch(k) for k in range(6)]
    pipe = corun.Pipeline(prep, step)
    report = corun.measure(pipe, start, batches, rounds=1)
    assert [name for name, _ in report.baselines] == list(STREAM_MODES)
