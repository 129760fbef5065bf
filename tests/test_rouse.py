"""The driver's thread that says when a call has ended is given something to do before (here emulated: a count)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from test_serve import PLAIN, fill, make_batch, make_params, model

import recom_jax
from recom_jax import _recom, stage
from recom_jax.options import Options

SPIN_US = 100_000


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stage, "_emulated", True)
    yield
    _recom.set_rousing(True)


@pytest.fixture
def params() -> Any:
    return make_params()


@pytest.fixture
def serve(params: Any) -> Any:
    return recom_jax.optimize(model, options=Options(spin_us=SPIN_US)).bind(params)


def roused() -> int:
    return int(recom_jax.stats()["cuda_roused"])


def until_roused(call: Callable[[], Any], seconds: float = 20.0) -> bool:
    """Whether it is, at one of the calls: a helper that was woken takes its time to be awake."""
    before, begun = roused(), time.monotonic()
    while time.monotonic() - begun < seconds:
        _recom.stir(1, SPIN_US)
        call()
        time.sleep(0.005)
        if roused() > before:
            return True
    return False


def never_roused(call: Callable[[], Any], calls: int = 20) -> bool:
    before = roused()
    for _ in range(calls):
        call()
    time.sleep(0.05)
    return roused() == before


def test_by_calls_whose_results_are_left(serve: Any, params: Any) -> None:
    batch = make_batch(6)
    assert until_roused(lambda: jax.block_until_ready(serve(batch)))
    assert until_roused(lambda: jax.block_until_ready(serve(fill(serve.input_views(batch), batch))))
    np.testing.assert_allclose(serve(batch), PLAIN(params, batch), rtol=2e-6, atol=1e-6)


def test_not_by_fetch(serve: Any) -> None:
    batch = make_batch(6)
    jax.block_until_ready(serve(batch))
    time.sleep(0.05)

    def fetch() -> None:
        _recom.stir(1, SPIN_US)
        serve.fetch(batch)

    assert never_roused(fetch)


def test_not_where_it_was_turned_off(serve: Any) -> None:
    batch = make_batch(6)
    _recom.set_rousing(False)

    def call() -> None:
        _recom.stir(1, SPIN_US)
        jax.block_until_ready(serve(batch))

    assert never_roused(call)
    _recom.set_rousing(True)
    assert until_roused(lambda: jax.block_until_ready(serve(batch)))


def test_a_helper_looks_out_as_long_as_it_would_have(serve: Any) -> None:
    """What it does beside does not send it to sleep."""
    batch = make_batch(6)
    for _ in range(3):
        assert until_roused(lambda: jax.block_until_ready(serve(batch)))
        assert until_roused(lambda: jax.block_until_ready(serve(batch)))


def test_many_threads(serve: Any) -> None:
    want = {seed: np.asarray(serve(make_batch(6, seed))) for seed in range(8)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(40):
            if np.asarray(serve(make_batch(6, seed))).tobytes() != want[seed].tobytes():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert until_roused(lambda: jax.block_until_ready(serve(make_batch(6))))
