"""Serving on a GPU: tokens, page-locked slots, one copy a call. Plain JAX on the same GPU is the oracle.

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
from recom_jax import _recom, stage
from recom_jax.errors import DeletedError, LeaseError

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs an NVIDIA GPU: set JAX_PLATFORMS=cuda,cpu"
)
ROOT = pathlib.Path(__file__).parents[2]


def model(params: Any, batch: Any) -> Any:
    """Two small tables, a large one, a weight that only XLA reads."""
    a = jnp.take(params["a"], batch["a"], axis=0)
    b = jnp.sum(jnp.take(params["b"], batch["b"], axis=0), axis=1)
    big = jnp.take(params["big"], batch["a"] % 7, axis=0)
    return jnp.concatenate([a, b, big, batch["x"] * params["w"]], axis=1)


def make_params(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (50, 4), "b": (30, 8), "big": (70_000, 4), "w": (3,)}
    return {k: jnp.asarray(rng.standard_normal(s, dtype=np.float32)) for k, s in shapes.items()}


def make_batch(size: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([seed, size])
    return {
        "a": rng.integers(0, 50, size).astype(np.int32),
        "b": rng.integers(-3, 33, (size, 5)).astype(np.int32),
        "x": rng.standard_normal((size, 3), dtype=np.float32),
    }


def fill(views: Any, batch: Any) -> Any:
    for v, b in zip(jax.tree.leaves(views), jax.tree.leaves(batch), strict=True):
        v[...] = b
    return views


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-6, atol=2e-6)


PLAIN = jax.jit(model)
OPTIONS = recom_jax.Options(verify=True, lease_timeout_s=5.0, ring_slots=4)
MODEL = recom_jax.optimize(model, options=OPTIONS)


@pytest.fixture(scope="module")
def params() -> Any:
    return make_params()


@pytest.fixture
def serve(params: Any) -> Any:
    return MODEL.bind(params)


def plans(serve: Any) -> list[Any]:
    return list(serve._core.by_types.values())


@pytest.mark.parametrize("size", [0, 1, 2, 7, 256, 5000])
def test_equals_plain(serve: Any, params: Any, size: int) -> None:
    batch = make_batch(size)
    for _ in range(5):
        close(serve(batch), PLAIN(params, batch))
    assert all(p.target is not None and p.target.ordinal >= 0 for p in plans(serve))


def test_one_copy_a_call_from_page_locked_memory(
    serve: Any, params: Any, recwarn: pytest.WarningsRecorder
) -> None:
    batch = make_batch(512)
    close(serve(batch), PLAIN(params, batch))
    before = recom_jax.stats()
    for _ in range(10):
        jax.block_until_ready(serve(batch))
    after = recom_jax.stats()
    assert after["cuda_staged_copies"] - before["cuda_staged_copies"] == 10
    assert after["cuda_kernel_launches"] - before["cuda_kernel_launches"] <= 10
    assert not [w for w in recwarn if "page-locked" in str(w.message)]


def test_the_arena_is_on_the_device(serve: Any) -> None:
    jax.block_until_ready(serve(make_batch(8)))
    (arena,) = serve._weights.arenas.values()
    assert {d.platform for d in arena.devices()} == {"gpu"}
    cost = serve.cost(make_batch(8))
    assert cost.arena == arena.nbytes
    assert cost.device == str(jax.devices()[0])


def test_calls_that_are_not_waited_for(serve: Any, params: Any) -> None:
    batches = [make_batch(3000, seed) for seed in range(16)]
    wants = [np.asarray(PLAIN(params, b)) for b in batches]
    for _ in range(10):
        outs = [serve(b) for b in batches]  # far more than slots
        for out, want in zip(outs, wants, strict=True):
            close(out, want)


def test_inputs_may_change_after_the_call(serve: Any, params: Any) -> None:
    want = np.asarray(PLAIN(params, make_batch(4000)))
    for _ in range(50):
        batch = make_batch(4000)
        out = serve(batch)
        for x in batch.values():
            x[...] = 0
        close(out, want)


def test_slots_are_let_go(serve: Any) -> None:
    batch = make_batch(100)
    for _ in range(50):
        jax.block_until_ready(serve(batch))
    (plan,) = plans(serve)
    plan.target.flights.sweep()
    ring = serve._core.staging.ring(plan.layout)
    assert ring.n_free == ring.n_slots
    assert len(ring.acquire().tokens) <= 2  # a call that is waited for needs one


def test_leases(serve: Any, params: Any) -> None:
    for seed in range(30):
        batch = make_batch(300, seed)
        views = fill(serve.input_views(batch), batch)
        out = serve(views)
        for v in views.values():
            with pytest.raises(ValueError, match="read-only"):
                v[...] = 0
        close(out, PLAIN(params, batch))
        with pytest.raises(LeaseError, match="served already"):
            serve(views)


def test_leases_block_and_time_out(params: Any) -> None:
    options = recom_jax.Options(ring_slots=2, lease_timeout_s=0.3)
    serve = recom_jax.optimize(model, options=options).bind(params)
    batch = make_batch(23)
    leases = [serve.input_views(batch) for _ in range(2)]
    with pytest.raises(LeaseError, match=r"no staging slot became free.*2 are leased"):
        serve.input_views(batch)
    threading.Timer(0.1, leases.clear).start()
    close(serve(fill(serve.input_views(batch), batch)), PLAIN(params, batch))


def test_sixteen_threads_and_updates() -> None:
    versions = [make_params(k) for k in range(3)]
    batches = [make_batch(n, seed) for seed in range(4) for n in (5, 300, 2048)]
    wants = [[np.asarray(PLAIN(v, b)) for v in versions] for b in batches]
    serve = MODEL.bind(versions[0])
    for b in batches:
        serve(b)
    stop, bad = threading.Event(), []

    def work(k: int) -> None:
        try:
            n = 0
            while not stop.is_set():
                n += 1
                which = (k + n) % len(batches)
                given = batches[which]
                if n % 3 == 0:
                    given = fill(serve.input_views(given), given)
                out = serve(given)
                del given
                if n % 5 == 0:
                    out.delete()
                elif not any(
                    np.allclose(np.asarray(out), w, rtol=2e-6, atol=2e-6, equal_nan=True)
                    for w in wants[which]
                ):
                    bad.append((k, n, which))
        except Exception as why:
            bad.append(why)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(16)]
    for t in threads:
        t.start()
    for k in range(150):
        serve.update(versions[k % 3])
    stop.set()
    for t in threads:
        t.join(120)
        assert not t.is_alive()
    assert not bad


def test_results_may_be_donated(serve: Any, params: Any) -> None:
    batch = make_batch(900)
    want = 2 * np.asarray(PLAIN(params, batch))
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    for _ in range(30):
        close(double(serve(batch)), want)


def test_a_deleted_bound_array(serve: Any) -> None:
    params = make_params(7)
    server = MODEL.bind(params)
    server(make_batch(4))
    params["big"].delete()
    for _ in range(10):
        with pytest.raises(DeletedError, match=r"params\['big'\]"):
            server(make_batch(4))
    server.update(make_params(8))
    close(server(make_batch(4)), PLAIN(make_params(8), make_batch(4)))


def test_device_arrays_in_the_batch(serve: Any, params: Any) -> None:
    batch = make_batch(64)
    mixed = {**batch, "a": jnp.asarray(batch["a"])}
    close(serve(mixed), PLAIN(params, batch))
    close(serve(jax.device_put(batch)), PLAIN(params, batch))


def test_inside_jit(serve: Any, params: Any) -> None:
    batch = make_batch(64)
    close(jax.jit(lambda b: serve(b) * 2)(batch), PLAIN(params, batch) * 2)


def test_another_default_device(serve: Any, params: Any) -> None:
    batch = make_batch(32)
    want = PLAIN(params, batch)
    close(serve(batch), want)
    with jax.default_device(jax.devices("cpu")[0]):
        close(serve(batch), want)
    close(serve(batch), want)
    if len(jax.devices()) > 1:
        other = jax.devices()[1]
        with jax.default_device(other):
            close(serve(batch), want)
        there = MODEL.bind(jax.device_put(params, other))
        out = there(batch)
        close(out, want)
        assert out.devices() == {other}


def test_committed_parameters(params: Any) -> None:
    device = jax.devices()[0]
    batch = make_batch(32)
    out = MODEL.bind(jax.device_put(params, device))(batch)
    close(out, PLAIN(params, batch))
    assert out.committed
    assert not MODEL.bind(params)(batch).committed


def test_an_unknown_token_is_an_error() -> None:
    copy = jax.jit(lambda t: stage.copy_slot(t, 128))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no staging slot of this process"):
        jax.block_until_ready(copy(jnp.zeros(16, np.uint8)))


def test_rings_come_and_go(params: Any) -> None:
    """Memory is page-locked, released and had again at the same addresses; tokens, too."""
    before = _recom.live_pack_bytes()
    for k in range(20):
        serve = MODEL.bind(params)
        batch = make_batch(400 + k % 3, k)
        close(serve(batch), PLAIN(params, batch))
        del serve
    for flights in [stage._flights(jax.devices()[0])]:
        stage._drain(flights)
    assert _recom.live_pack_bytes() - before < 1 << 22


SCRIPT = textwrap.dedent("""
    import sys
    sys.path[:0] = [{tests!r}, {root!r}]
    import numpy as np, jax, recom_jax
    from test_gpu_serve import MODEL, PLAIN, make_batch, make_params, fill, close

    def kept():  # what calls load and allocate for good: `initialize` does, `execute` never
        names = "modules_loaded", "plans_uploaded", "device_bytes"
        return [recom_jax.stats()["cuda_" + name] for name in names]

    params = make_params()
    serve = MODEL.bind(params)
    batches = [make_batch(n, seed) for seed in range(5) for n in (64, 1000)]
    wants = [np.asarray(PLAIN(params, b)) for b in batches]
    before = None
    for turn in range(40):
        outs = [serve(b) for b in batches]
        for out, want in zip(outs, wants):
            close(out, want)
        for b, want in zip(batches, wants):
            close(serve(fill(serve.input_views(b), b)), want)
        before = before or kept()
    assert kept() == before, (before, kept())
    assert recom_jax.stats()["cuda_late_preparations"] == 0, recom_jax.stats()
    print("fine")
""")


@pytest.mark.parametrize(
    "flags",
    ["", "--xla_gpu_enable_command_buffer=", "--xla_gpu_graph_min_graph_size=1"],
    ids=["default", "no-command-buffers", "eager-command-buffers"],
)
def test_command_buffers(flags: str) -> None:
    env = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    script = SCRIPT.format(tests=str(ROOT / "tests" / "gpu"), root=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "fine"
