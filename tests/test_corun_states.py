"""Pipelines over odd states, and what happens between runs: errors, other iterators, restarts, garbage collection."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recom_jax import corun, ffi
from recom_jax import preprocess as pp
from recom_jax.corun import calls, pipeline
from tests import corun_emulation, cuda_emulation
from tests.helpers import cpu_only
from tests.test_corun import numbers, prep, raws, start, step, threads

pytestmark = [pytest.mark.once, cpu_only("the stream runtime is emulated here")]
SEEDS = iter(range(1 << 30))


@pytest.fixture(params=["threads", "stream"])
def runtime(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test on threads, and on the stream runtime as tests have it without a GPU."""
    if request.param == "stream":
        if cuda_emulation.missing() is not None:
            pytest.skip(str(cuda_emulation.missing()))

        def make(k: Any, /, **plan: Any) -> Any:
            address = corun_emulation.address(k.source)
            return ffi.extension().CorunRuntime.simulated(seed=next(SEEDS), kernel=address, **plan)

        monkeypatch.setattr(pipeline, "_emulated", (make, 4))
        monkeypatch.setattr(calls, "_emulated", True)
    return str(request.param)


# ---- states --------------------------------------------------------------------------------------------------------


@jax.jit
def noisy(state: Any, batch: Any) -> tuple[Any, Any]:
    key, now = jax.random.split(state["key"])
    table = state["table"].at[batch["ids"]].add(state["rate"] * jax.random.uniform(now))
    return {**state, "key": key, "table": table}, {"loss": table.sum(), "number": batch["number"][0]}


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_state_may_hold_random_keys_and_python_numbers(
    runtime: str, probe: bool, impl: str
) -> None:
    def fresh() -> Any:
        return {"key": jax.random.key(0, impl=impl), "table": jnp.zeros(50), "rate": 0.1}

    pipe = corun.Pipeline(prep, noisy, options=corun.Options(probe=probe))
    state, want = fresh(), []
    for raw in raws(4):
        state, m = noisy(state, jax.jit(prep)(pp.columns(raw)))
        want.append(float(m["loss"]))
    assert [float(m["loss"]) for _, m in pipe.run(fresh(), raws(4))] == want
    assert pipe.runtime == runtime
    assert pipe.make_plan(fresh(), raws(1)[0]).predicted_us > 0
    assert [float(m["loss"]) for _, m in pipe.run(fresh(), raws(4))] == want


def test_python_numbers_of_a_state_stay_weak(runtime: str) -> None:
    """Float32 instead, the rate would make the carry of the loop float32, and the plan could not be made."""

    @jax.jit
    def scanned(state: Any, batch: Any) -> tuple[Any, Any]:
        def body(w: Any, x: Any) -> tuple[Any, Any]:
            return w - state["rate"] * x.astype(w.dtype), None

        made = jax.lax.scan(body, state["w"], batch["x"])[0]
        return {**state, "w": made}, {"number": batch["number"][0], "w": made}

    pipe = corun.Pipeline(prep, scanned)
    state = {"w": jnp.zeros((), jnp.bfloat16), "rate": 0.1}
    assert numbers(pipe.run(state, raws(3))) == [0, 1, 2]
    assert pipe.runtime == runtime and pipe.plan.predicted_us > 0
