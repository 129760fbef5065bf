"""What XLA reads of a pack in its 32-bit words, instead of putting the numbers' bytes together."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from recom_jax import pack
from tests.helpers import cpu_only

pytestmark = cpu_only("elsewhere a pack is a token, or bytes on the device")
WORDS = ("float32", "int32", "uint32")
OTHERS = ("bool", "int8", "uint8", "float16", "bfloat16")


def packed(arrays: list[np.ndarray[Any, Any]]) -> tuple[Any, Any]:
    """A layout, and a pack of random bytes: any bits must come through."""
    layout = pack.layout_of([pack.LeafSpec.of(a) for a in arrays])
    data = np.random.default_rng(len(arrays)).integers(0, 256, layout.total_bytes, np.uint8)
    return layout, data


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(WORDS + OTHERS), shapes), min_size=1, max_size=5))
def test_words_are_the_bytes(leaves: list[tuple[str, tuple[int, ...]]]) -> None:
    layout, data = packed([np.zeros(shape, jnp.dtype(dtype)) for dtype, shape in leaves])
    for k, (dtype, shape) in enumerate(leaves):
        assert pack.is_words(layout, k) == (dtype in WORDS and 0 not in shape)
        if pack.is_words(layout, k):
            got = pack.unpack_words(jnp.asarray(data.view(np.uint32)), layout, k)
            want = pack.unpack(jnp.asarray(data), layout, k)
            assert (got.dtype, got.shape) == (want.dtype, want.shape) == (dtype, shape)
            assert bits(got) == bits(want)


def plan_of(serve: Any) -> Any:
    (plan,) = serve._core.by_types.values()
    return plan


def lowered(serve: Any, batch: Any) -> str:
    """What XLA gets of a call."""
    plan = plan_of(serve)
    data = np.zeros(plan.layout.total_bytes, np.uint8)
    given = (data, data.view(np.uint32)) if plan.words else (data,)
    text: str = plan.call.lower(*given, *serve._bound(plan)).as_text()
    return text


def model(params: Any, batch: Any) -> Any:
    rows = jnp.take(params["table"], batch["ids"], axis=0, mode="clip")
    return rows, *(batch[k] for k in ("dense", "label", "count") if k in batch)


def inputs(seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    params = {"table": rng.standard_normal((50, 4), dtype=np.float32)}
    odd = rng.integers(0, 2**32, (8, 3), np.uint32)
    odd[0] = 0x7F800001, 0xFFFFFFFF, 0x00000001  # NaN with a payload, a negative one, a denormal
    return params, {
        "ids": rng.integers(-2, 52, 8).astype(np.int32),
        "dense": odd.view(np.float32),
        "label": rng.integers(-(2**31), 2**31, 8).astype(np.int32),
        "count": odd[:, 0].copy(),
    }


def test_a_server_reads_words() -> None:
    params, batch = inputs()
    serve = recom_jax.optimize(model).bind(params)
    want = jax.jit(model)(params, batch)
    for call in range(20):  # through every slot, and again
        got = serve(batch) if call % 2 else serve(_filled(serve, batch))
        assert [bits(x) for x in got] == [bits(x) for x in want]
    assert plan_of(serve).words
    text = lowered(serve, batch)
    assert "tensor<8x3xui32>" in text or "tensor<24xui32>" in text
    assert "xui8>) -> tensor<24xf32>" not in text  # no number is made of bytes


def _filled(serve: Any, batch: Any) -> Any:
    views = serve.input_views(batch)
    for name, value in batch.items():
        views[name][...] = value
    return views


def test_results_outlive_their_slot() -> None:
    """A result may be the pack's own memory as far as XLA is concerned; it never is."""
    params, first = inputs()
    serve = recom_jax.optimize(model, options=recom_jax.Options(ring_slots=2)).bind(params)
    kept = serve(first)
    want = [bits(x) for x in kept]
    for seed in range(1, 8):
        serve(inputs(seed)[1])
    assert [bits(x) for x in kept] == want


@pytest.mark.parametrize(
    "extra",
    [{}, {"dense": np.ones((8, 3), np.float16)}, {"label": np.ones(8, np.bool_)}],
    ids=["nothing", "halves", "booleans"],
)
def test_not_without_words_for_xla(extra: Any) -> None:
    """Ids are 32-bit words, but the fused call reads them where they are."""
    params, batch = inputs()
    batch = {"ids": batch["ids"], **extra}
    serve = recom_jax.optimize(model).bind(params)
    got, want = serve(batch), jax.jit(model)(params, batch)
    assert [bits(x) for x in got] == [bits(x) for x in want]
    assert not plan_of(serve).words
    assert "ui32" not in lowered(serve, batch).split("->")[0]


def test_inside_a_trace() -> None:
    params, batch = inputs()
    serve = recom_jax.optimize(model).bind(params)
    got, want = jax.jit(serve)(batch), jax.jit(model)(params, batch)
    assert [bits(x) for x in got] == [bits(x) for x in want]


SEVERAL = """
import sys
import jax, numpy as np
import recom_jax
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.test_pack_words import bits, inputs, model, plan_of

assert jax.device_count() == 2
params, batch = inputs()
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), params)
want = jax.jit(model)(params, batch)
for bound, words in ((everywhere, False), (jax.device_put(params, jax.devices()[1]), True)):
    serve = recom_jax.optimize(model).bind(bound)
    for _ in range(3):
        assert [bits(x) for x in serve(batch)] == [bits(x) for x in want]
    assert plan_of(serve).words == words
print("fine")
"""


def test_words_are_not_handed_to_several_devices() -> None:
    """There a pack is copied, and would be twice."""
    flags = "--xla_force_host_platform_device_count=2"
    ran = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout.strip() == "fine", ran.stdout + ran.stderr
