"""Where a marker of several arrays stands in what XLA makes of a step, and that it changes no value."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recom_jax import corun
from recom_jax import preprocess as pp
from recom_jax.corun import calls, pipeline
from recom_jax.corun.plan import Stage
from tests import cuda_emulation
from tests.helpers import cpu_only
from tests.test_corun_stream import make

pytestmark = [pytest.mark.once, cpu_only("looks at what XLA makes for CPUs")]

FIELDS, ROWS, DIM = 5, 50, 8


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_emulated", True)


def train(state: Any, batch: Any) -> Any:
    """Tables by their rows' gradients, layers by theirs: gradients of very different sizes, in one stage."""
    ids = batch["ids"]
    rows = jnp.stack([t[ids[:, k]] for k, t in enumerate(state["tables"])], 1)

    def loss(layers: Any, rows: Any) -> Any:
        h = jnp.tanh(rows.reshape(len(ids), -1) @ layers["w"] + layers["b"])
        return jnp.mean((h @ layers["v"] - batch["y"]) ** 2)

    value, (d_layers, d_rows) = jax.value_and_grad(loss, (0, 1))(state["layers"], rows)
    d_layers, d_rows = corun.stage((d_layers, d_rows), "bwd")
    layers = jax.tree.map(lambda w, g: w - 0.1 * g, state["layers"], d_layers)
    tables = [t.at[ids[:, k]].add(-d_rows[:, k]) for k, t in enumerate(state["tables"])]
    return {"layers": layers, "tables": tables}, value


def state() -> Any:
    rng = np.random.default_rng(0)
    width = FIELDS * DIM
    layers = {"w": rng.normal(size=(width, 7)), "b": np.zeros(7), "v": rng.normal(size=7)}
    tables = [rng.normal(size=(ROWS, DIM)) for _ in range(FIELDS)]
    made: Any = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), {"layers": layers, "tables": tables}
    )
    return made  # fmt: skip


def batch(size: int = 64) -> Any:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, ROWS, (size, FIELDS)).astype(np.int32)
    return {"ids": ids, "y": rng.random(size, np.float32)}


def scheduled(text: str) -> list[str]:
    """Instructions of a scheduled program, in the order in which they run."""
    entry = text[text.index("\nENTRY ") :]
    return [line for line in entry.splitlines() if " = " in line]


@pytest.mark.parametrize("marking", ["event", "mark", "pass"])
def test_updates_of_tables_follow_a_marker_behind_all_gradients(marking: str) -> None:
    """What is smallest is there first, and XLA would update tables before it."""
    step = jax.jit(lambda s, b: train(s, b))
    with calls.marking(frozenset([] if marking == "pass" else ["bwd"]), marking == "event"):
        text = step.lower(state(), batch()).compile().as_text()
    lines = scheduled(text)
    (at,) = [k for k, x in enumerate(lines) if f"recom_corun_{marking}_v1" in x]
    products = [k for k, x in enumerate(lines) if re.search(r"\bdot\(", x)]
    updates = [k for k, x in enumerate(lines) if "scatter" in x.split(" = ")[0]]
    assert len(updates) == FIELDS and products
    assert max(products) < at < min(updates)


def test_it_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A co-run step gives the bits of the user's own; without markers XLA fuses as it likes."""
    made = []
    for marking, in_graphs in ((["bwd"], True), (["bwd"], False), ([], True)):
        with calls.marking(frozenset(marking), in_graphs):
            made.append(jax.tree.leaves(jax.jit(lambda s, b: train(s, b))(state(), batch())))
    monkeypatch.setattr(calls, "_emulated", False)
    plain = jax.tree.leaves(jax.jit(lambda s, b: train(s, b))(state(), batch()))
    for x, y, z, p in zip(*made, plain, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z)
        np.testing.assert_allclose(x, p, rtol=1e-5)


def behind_gradients(options: corun.Options) -> corun.Report:
    """Trains with a plan whose kernels start behind the gradients; its losses must be those of prepared inputs."""

    @jax.jit
    def step(s: Any, b: Any) -> Any:
        made, loss = train(s, {"ids": b["ids"], "y": b["y"]})
        return made, {"loss": loss}

    def prep(raw: Any) -> Any:
        ids = [pp.sigrid_hash(raw[f"C{k}"], k, ROWS) for k in range(FIELDS)]
        return {"ids": jnp.stack(ids, 1), "y": pp.clamp(raw["y"], 0.0, 1.0)}

    rng = np.random.default_rng(2)
    raws = [
        {f"C{k}": rng.integers(0, 1 << 30, 64) for k in range(FIELDS)}
        | {"y": rng.random(64, np.float32)}
        for _ in range(12)
    ]
    pipe = corun.Pipeline(prep, step, options=options)
    plan = pipe.make_plan(state(), raws[0])
    kernels = tuple(dataclasses.replace(k, stage="rest", share=0.25) for k in plan.kernels)
    stages = (Stage("bwd", 500.0, 0.5, 0.5), Stage("rest", 500.0, 0.5, 0.5))
    pipe.follow(dataclasses.replace(plan, kernels=kernels, stages=stages))
    found = [float(m["loss"]) for _, m in pipe.run(state(), raws)]
    now, wanted = state(), []
    for raw in raws:
        now, m = step(now, pipe.prepare(raw))
        wanted.append(float(m["loss"]))
    assert len(set(wanted)) == len(wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)  # on a GPU scatters are sums by atomics
    engine = pipe._made_engine
    assert engine is not None
    # On a GPU the host sees a marker when it becomes part of a graph.
    seen = engine.stats()["marks"]
    assert seen == len(raws) if jax.default_backend() == "cpu" else seen > 0
    return pipe.report()


@pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing()))
def test_kernels_start_behind_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_emulated", (make, 4))
    report = behind_gradients(corun.Options(runtime="stream", slots=2))
    assert report.late[1] == 12 and report.late[0] <= 1  # the first batch has no step before it


ODD = {
    "empty": jnp.zeros((0, 3)),
    "scalar": jnp.float32(2.5),
    "nan": jnp.array([jnp.nan, -0.0, jnp.inf]),
    "bool": jnp.array([True, False] * 4),
    "int": jnp.arange(-3, 9).reshape(3, 4),
    "half": jnp.ones((5, 1, 2), jnp.bfloat16),
    "complex": jnp.array([1 + 2j, -1j]),
    "key": jax.random.key(3),
    "byte": jnp.full((9,), 255, jnp.uint8),
}


@given(st.lists(st.sampled_from(sorted(ODD)), max_size=6))
def test_any_arrays_come_out_as_they_went_in(names: list[str]) -> None:
    given_ = [ODD[n] for n in names]
    with calls.marking(frozenset(["s"])):
        made = jax.jit(lambda xs: corun.stage([_again(x) for x in xs], "s"))(given_)
    for x, y in zip(made, given_, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _again(x: Any) -> Any:
    """The same, computed."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.flip(jnp.flip(x))


def test_which_arrays_stand_for_all() -> None:
    def kinds(*shapes: tuple[int, ...]) -> list[Any]:
        return [jax.core.ShapedArray(s, np.dtype(np.float32)) for s in shapes]

    assert calls.chosen(kinds()) is None and calls.chosen(kinds((0, 4))) is None
    assert calls.chosen(kinds((3,))) == (0, [], [])  # alone: as it ever was
    # The smallest is passed on, all are asked for, what is about as large as the largest is tied.
    assert calls.chosen(kinds((100,), (0,), (2,), (30,), (20,))) == (2, [0, 3, 4], [0, 3])
    many = calls.chosen(kinds(*[(k + 1,) for k in range(40)]))
    assert many is not None
    first, asked, tied = many
    assert (
        first == 0 and asked == list(range(40 - calls.MOST_ASKED, 40)) and set(tied) <= set(asked)
    )
