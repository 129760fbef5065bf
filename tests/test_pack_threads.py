"""Large batches are copied by several threads, kept from batch to batch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest

from recom_jax import pack


def batch(seed: int, scale: int = 1) -> list[Any]:
    """Leaves of many kinds: 12 MB and more."""
    rng = np.random.default_rng(seed)
    n = 40_000 * scale
    return [
        *(rng.integers(0, 1 << 30, 500, dtype=np.int32) for _ in range(1000)),
        rng.standard_normal((n, 30), dtype=np.float32),  # larger than what a thread takes
        rng.standard_normal((n, 60), dtype=np.float32)[:, ::2],
        rng.standard_normal((30, n)).T,
        np.empty((0, 3), np.int32),
        np.array(seed, np.float32),
    ]


def packed(leaves: list[Any], threads: int) -> np.ndarray[Any, Any]:
    specs = [
        pack.LeafSpec(np.dtype(np.float32) if x.dtype == np.float64 else x.dtype, x.shape)
        for x in leaves
    ]
    layout = pack.layout_of(specs)
    slot, data = pack.Packer(layout).pack(pack.SlotRing(layout, 1), leaves, threads)
    assert slot.state == "in_flight"
    for i, leaf in enumerate(leaves):
        got = data[layout.offset(i) :][: layout.entry_bytes(i)].view(specs[i].dtype)
        np.testing.assert_array_equal(got.reshape(leaf.shape), leaf.astype(specs[i].dtype))
    return data


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_any_number_of_threads(threads: int) -> None:
    for seed in range(3):
        packed(batch(seed), threads)


def test_many_batches_at_once() -> None:
    bad: list[Any] = []

    def work(k: int) -> None:
        try:
            for n in range(4):
                packed(batch(10 * k + n), 4)
        except BaseException as why:
            bad.append(why)

    callers = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(6)]
    for t in callers:
        t.start()
    for t in callers:
        t.join(120)
        assert not t.is_alive()
    assert not bad


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    script = textwrap.dedent("""
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from test_pack_threads import batch, packed
        packed(batch(0), 4)
        child = os.fork()
        packed(batch(1), 4)
        if not child:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("fine")
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
