"""Co-running on a GPU: preprocessing beside the step gives the bits of preprocessing in front of it."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.cases import gpu_corun_mesh
from examples import rap_plans
from recom_jax import corun
from recom_jax import preprocess as pp
from recom_jax.corun import runtime
from recom_jax.corun.probe_stream import run_steps
from recom_jax.corun.report import STREAM_MODES
from tests.test_corun_kernels import columns, exact
from tests.test_corun_markers import behind_gradients
from tests.test_corun_stream import losses, prep, raw_batch, start, step

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device")


def offline(pipe: corun.Pipeline, batches: Any) -> list[float]:
    state, found = start(), []
    for raw in batches:
        state, m = step(state, pipe.prepare(raw))
        found.append(float(m["loss"]))
    return found


def same_bits(got: list[float], want: list[float]) -> None:
    """Numbers that change from step to step, so that a batch trained twice or left out is seen."""
    assert np.isfinite(want).all() and len(set(want)) == len(want)
    assert np.array_equal(got, want), (got, want)


def test_a_run_equals_offline_preprocessing() -> None:
    batches = [raw_batch(k, 500) for k in range(20)]
    pipe = corun.Pipeline(prep, step, options=corun.Options(runtime="stream"))
    same_bits(losses(pipe, batches), offline(pipe, batches))
    assert pipe.runtime == "stream"


def test_a_plan_is_executed() -> None:
    batches = [raw_batch(k, 500) for k in range(40)]
    options = corun.Options(runtime="stream", probe=True, profile=True)
    pipe = corun.Pipeline(prep, step, options=options)
    pipe.make_plan(start(), batches[0])
    same_bits(losses(pipe, batches), offline(pipe, batches))
    assert pipe.report().late[1] >= 40 and pipe.report().kernels


def test_all_orders_give_the_same_bits() -> None:
    plan = rap_plans.plan(2, shrink=13, rows=300)
    model = plan.model(dim=8, small=True)
    pipe = corun.Pipeline(plan.prep, jax.jit(model.step, donate_argnums=0))
    report = corun.measure(pipe, model.init, list(plan.raw_batches(6, 200)), rounds=1)
    assert [name for name, _ in report.baselines] == list(STREAM_MODES)


def test_kernels_equal_plain_jax() -> None:
    raw = columns(300, 300)
    pipe = corun.Pipeline(exact, step, options=corun.Options(runtime="stream"))
    got, want = pipe.prepare(raw), jax.jit(exact)(pp.columns(raw))
    for (path, w), g in zip(
        jax.tree_util.tree_flatten_with_path(want)[0], jax.tree.leaves(got), strict=True
    ):
        np.testing.assert_array_equal(g, w, err_msg=jax.tree_util.keystr(path))


def test_kernels_start_behind_the_gradients() -> None:
    assert behind_gradients(corun.Options(runtime="stream", slots=2)).late[1] == 12


@pytest.mark.parametrize("timed", [False, True])
def test_a_kernel_starts_where_its_marker_stands(timed: bool) -> None:
    """In a step of milliseconds, whose marker is a third of the way, mostly as a node of a graph."""

    @functools.partial(jax.jit, donate_argnums=0)
    def long(state: Any, batch: Any) -> Any:
        x = state["x"] + jnp.sum(batch["x"])
        for k in range(30):
            x = jnp.tanh(x @ state["w"])
            x = corun.stage(x, "third") if k == 9 else x
        return {"x": x, "w": state["w"]}, {"x": jnp.sum(x)}

    rng = np.random.default_rng(0)
    state = {"x": np.zeros((2048, 2048), np.float32), "w": rng.normal(0, 0.02, (2048, 2048))}
    state = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), state)
    pipe = corun.Pipeline(prep, long, options=corun.Options(runtime="stream"))

    def schedule(k: Any) -> runtime.Schedule:
        launches = tuple(dataclasses.replace(x, stage=1) for x in runtime.whole(k, 0).launches)
        return runtime.Schedule(runtime.PLAN, launches, ("third",), timed)

    engine = pipe.make_engine(3, schedule, profile=True)
    times = run_steps(engine, pp.columns(raw_batch(0, 500)), state)
    leads, periods = np.array(times.leads[0][1]), np.array(times.periods)
    engine.close()
    places = 1 - np.median(leads[10:]) / np.median(periods[10:])
    print(f"a kernel starts at {places:.3f} of a step of {np.median(periods):.3f} ms")
    assert 0.25 < places < 0.45  # 0.333


def test_without_command_buffers() -> None:
    """The same in a process whose XLA makes none."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    here = f"{pathlib.Path(__file__)}::{test_a_run_equals_offline_preprocessing.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", here],
        env={**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("mapped", [True, False])
def test_over_all_devices(mapped: bool) -> None:
    """Tables parted between however many there are; one is a mesh, too."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), (gpu_corun_mesh.AXIS,))
    plan = rap_plans.plan(0, shrink=8, rows=500)
    like = plan.model(dim=8, small=True)
    parted = gpu_corun_mesh.Parted(like, mesh, mapped, frozen=True)
    raws = list(plan.raw_batches(5, 16 * mesh.devices.size))
    options = corun.Options(runtime="stream", slots=2)
    assert gpu_corun_mesh.differences(parted, plan, raws, options) == 0


def test_what_a_step_returns_of_its_batch_stays() -> None:
    batches = [raw_batch(k, 500) for k in range(12)]
    keeping = jax.jit(lambda s, b: (step({"table": s["table"]}, b)[0], b))
    pipe = corun.Pipeline(prep, keeping, options=corun.Options(runtime="stream", slots=1))
    kept = [m for _, m in pipe.run(start(), batches)]
    for raw, got in zip(batches, kept, strict=True):
        for name, want in pipe.prepare(raw).items():
            np.testing.assert_array_equal(got[name], want)
