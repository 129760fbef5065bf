"""Results of more than 32 MB ask for huge pages (csrc/ffi_handler.cc): each call has them mapped anew."""

from __future__ import annotations

import pathlib
import re
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import _recom

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        not pathlib.Path("/sys/kernel/mm/transparent_hugepage").exists(),
        reason="a kernel without transparent huge pages",
    ),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's handler"),
]

ROOT = pathlib.Path(__file__).parent.parent
ROWS, WIDTH = 50, 64


def asked(x: jax.Array) -> bool:
    """Whether the mapping around the middle of an array is advised to have huge pages."""
    middle = x.unsafe_buffer_pointer() + x.nbytes // 2
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no such mapping")


def lookups(tables: list[jax.Array], ids: jax.Array) -> jax.Array:
    return jnp.concatenate([t[ids] for t in tables], axis=1)


def inputs(batch: int) -> tuple[list[jax.Array], jax.Array]:
    rng = np.random.default_rng(batch)
    tables = [jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32) for _ in range(2)]
    return tables, jnp.asarray(rng.integers(0, ROWS, batch), jnp.int32)


@pytest.mark.parametrize("batch", [0, 1000, 100_000])
def test_results(batch: int) -> None:
    args = inputs(batch)
    out = recom_jax.optimize(lookups)(*args)
    np.testing.assert_array_equal(out, jax.jit(lookups)(*args))
    if batch == 100_000:
        assert asked(out)


def test_small_results_do_not_ask() -> None:
    """In a process of its own: here such a result may lie where numpy had a large array, and has asked."""
    code = """
import recom_jax
from tests.test_huge_pages import asked, inputs, lookups
print(asked(recom_jax.optimize(lookups)(*inputs(1000))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout.split() == ["False"], done.stderr[-3000:]


def test_gradients() -> None:
    table = jnp.zeros((150_000, WIDTH), jnp.float32)
    ids = jnp.asarray([3, 149_999, 3], jnp.int32)
    rows = recom_jax.optimize(lambda t, i: t[i])
    before = _recom.program_stats()["row_sums"]
    grad = jax.grad(lambda t: jnp.sum((rows(t, ids) + 1) ** 2))(table)
    assert _recom.program_stats()["row_sums"] > before
    want = np.zeros(table.shape, np.float32)
    np.add.at(want, np.asarray(ids), 2)
    np.testing.assert_array_equal(grad, want)
    assert asked(grad)


def test_they_spare_page_faults() -> None:
    """Where numpy, which asks for its own arrays, is given them."""

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    size = 100_000 * 2 * WIDTH * 4
    before = faults()
    np.ones(size // 4, np.float32)
    if faults() - before > size // 4096 // 4:
        pytest.skip("no huge pages to be had")
    args, ours = inputs(100_000), recom_jax.optimize(lookups)
    counts = []
    for _ in range(4):
        before = faults()
        jax.block_until_ready(ours(*args))
        counts.append(faults() - before)
    assert min(counts) < size // 4096 // 4, counts
