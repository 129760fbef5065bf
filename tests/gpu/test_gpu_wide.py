"""Calls with more buffers than a kernel's parameters hold, on a GPU: the table of addresses is the execution's own.

Run with ``JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu``; without a GPU every test is skipped by name.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax.cuda import kernel

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs an NVIDIA GPU: set JAX_PLATFORMS=cuda,cpu"
)
ROOT = pathlib.Path(__file__).parents[2]
ROWS, DIM = 20, 4


def columns(tables: list[Any], ids: list[Any]) -> Any:
    return jnp.concatenate([t[i] for t, i in zip(tables, ids, strict=True)], axis=1)


def arrays(n: int, batch: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng([seed, n, batch])
    tables = rng.standard_normal((n, ROWS, DIM)).astype(np.float32)
    ids = rng.integers(-ROWS, ROWS, (n, batch)).astype(np.int32)
    return list(tables), list(ids)


def wanted(tables: list[np.ndarray], ids: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([t[i] for t, i in zip(tables, ids, strict=True)], axis=1)


def model() -> Any:
    """A new function each time, so that it is compiled anew."""
    return recom_jax.optimize(lambda t, i: columns(t, i), options=recom_jax.Options(verify=True))


def test_more_buffers_than_parameters() -> None:
    """4,301 buffers: two launches fill the table, one reads it."""
    fn, before = model(), recom_jax.stats()["cuda_kernel_launches"]
    for seed in range(3):
        tables, ids = arrays(2150, 33, seed)
        args = jax.device_put((tables, ids))
        np.testing.assert_array_equal(fn(*args), wanted(tables, ids))
    assert 1 <= recom_jax.stats()["cuda_kernel_launches"] - before <= 3


@pytest.mark.parametrize("batch", [0, 1, 7, 300])
def test_any_call_may_have_a_table(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(kernel, "BUCKETS", ())
    tables, ids = arrays(5, batch)
    np.testing.assert_array_equal(model()(tables, ids), wanted(tables, ids))


def test_threads_have_tables_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BUCKETS", ())
    fn, wrong = model(), list[int]()
    sets = [arrays(30, 64, seed) for seed in range(8)]
    given, wants = jax.device_put(sets), [wanted(*s) for s in sets]
    jax.block_until_ready(fn(*given[0]))

    def work(k: int) -> None:
        for turn in range(100):
            which = (k + turn) % len(given)
            if not np.array_equal(fn(*given[which]), wants[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


GRAPHS = """
import jax, numpy as np
import recom_jax
from recom_jax.cuda import kernel
from tests.gpu.test_gpu_wide import arrays, model, wanted

kernel.BUCKETS = ()
fn = model()
# More than one operation around the call, so that there is something to capture.
f = jax.jit(lambda t, i: (fn(t, i) * 2, fn(t, [(x + 1) % 20 for x in i]) + 1))
sets = [arrays(40, 50, seed) for seed in range(3)]
given = jax.device_put(sets)
for turn in range(30):  # a captured graph runs again with the addresses it was captured with
    which = turn // 10
    t, i = sets[which]
    a, b = f(*given[which])
    np.testing.assert_array_equal(a, wanted(t, i) * 2)
    np.testing.assert_array_equal(b, wanted(t, [(x + 1) % 20 for x in i]) + 1)
print("launches", recom_jax.stats()["cuda_kernel_launches"])
"""


@pytest.mark.parametrize(
    "flags",
    ["", "--xla_gpu_enable_command_buffer=", "--xla_gpu_graph_min_graph_size=1"],
    ids=["default", "none", "every"],
)
def test_command_buffers(flags: str) -> None:
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    env |= {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(GRAPHS)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    name, launches = done.stdout.split()
    assert name == "launches"
    assert 0 < int(launches) <= 60
    if flags.endswith("buffer="):  # nothing is captured: each call launches
        assert int(launches) == 60
