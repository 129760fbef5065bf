"""A co-run step reads its batch where it was made: what that must not change, and whose memory it is."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recom_jax import corun
from recom_jax import preprocess as pp
from recom_jax.errors import PipelineError
from tests import cuda_emulation
from tests.helpers import cpu_only
from tests.test_corun_stream import (
    emulated,  # noqa: F401 - a fixture
    losses,
    one_by_one,
    prep,
    raw_batch,
    start,
    step,
)

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
    cpu_only("tests/gpu runs the stream itself"),
]


def test_what_a_step_returns_of_its_batch_stays() -> None:
    """The batch's memory is written again while the caller still holds results."""

    @jax.jit
    def keeping(state: Any, batch: Any) -> Any:
        return {"last": batch["ids"], **step({"table": state["table"]}, batch)[0]}, batch

    batches = [raw_batch(k) for k in range(12)]
    pipe = corun.Pipeline(prep, keeping, options=corun.Options(slots=1))
    state = {"last": jnp.zeros((20, 3), jnp.int32), **start()}
    kept = [(made["last"], m) for made, m in pipe.run(state, batches)]
    for raw, (ids, batch) in zip(batches, kept, strict=True):
        want = jax.jit(prep)(pp.columns(raw))
        for name in want:
            np.testing.assert_array_equal(batch[name], want[name])
        np.testing.assert_array_equal(ids, want["ids"])


@pytest.mark.parametrize("committed", [False, True])
def test_the_step_is_compiled_once_and_reads_its_batch_where_it_was_made(committed: bool) -> None:
    state = jax.device_put(start(), jax.devices()[0]) if committed else start()
    pipe = corun.Pipeline(prep, step, options=corun.Options(slots=2))
    for made, _ in pipe.run(state, [raw_batch(k) for k in range(9)]):
        assert all(x.committed == committed for x in jax.tree.leaves(made))
    engine = pipe._made_engine
    assert engine is not None
    assert [f._cache_size() for f in engine.steps._compiled.values()] == [1]
    r = engine._programs[0].runtime
    assert len(r._views) == 4  # slots, and steps in flight
    for views in r._views.values():
        for x in views:
            assert x.unsafe_buffer_pointer() % 256 == 0 and x.committed == committed


def test_a_state_elsewhere_is_refused() -> None:
    pipe = corun.Pipeline(prep, step, options=corun.Options(runtime="stream"))
    engine = pipe._engine()
    assert engine is not None
    engine.steps._device = "another device"
    state = jax.device_put(start(), jax.devices()[0])
    with pytest.raises(PipelineError, match="the state is on"):
        list(pipe.run(state, [raw_batch(0)]))


def test_a_step_without_metrics() -> None:
    def silent(state: Any, batch: Any) -> Any:
        return step(state, batch)[0], ()

    pipe = corun.Pipeline(prep, silent, options=corun.Options(slots=1, steps_in_flight=3))
    batches = [raw_batch(k) for k in range(12)]
    *_, (state, _) = pipe.run(start(), batches)
    want = start()
    for raw in batches:
        want, _ = step(want, jax.jit(prep)(pp.columns(raw)))
    np.testing.assert_array_equal(state["table"], want["table"])


def test_a_ring_goes_with_its_engine() -> None:
    """Its memory must not be held by the step that was compiled for it, nor by views."""
    pipe = corun.Pipeline(prep, step)
    losses(pipe, [raw_batch(k) for k in range(5)])
    engine = pipe._made_engine
    assert engine is not None
    ring = weakref.ref(engine._programs[0].runtime)
    engine.reschedule(pipe.schedule_of)
    gc.collect()
    assert ring() is None
    assert losses(pipe, [raw_batch(0)]) == one_by_one([raw_batch(0)])
