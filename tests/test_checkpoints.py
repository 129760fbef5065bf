"""bind from other libraries' checkpoints and states (docs/checkpoints.md), and weights swapped under load."""

from __future__ import annotations

import pathlib
import re
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax

pytestmark = pytest.mark.once

PAGE = pathlib.Path(__file__).parent.parent / "docs/checkpoints.md"
SECTIONS = {
    "Orbax": ("orbax.checkpoint",), "Flax Linen": ("flax", "optax"), "Flax NNX": ("flax",), "Equinox": ("equinox",)
}  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_the_guides_examples_run(section: str, tmp_path: pathlib.Path) -> None:
    for package in SECTIONS[section]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    (text,) = re.findall(
        rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, f"checkpoints.md, {section}", "exec"), {"folder": tmp_path})


def test_the_guide_has_no_other_section() -> None:
    assert re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE) == list(SECTIONS)


def test_weights_swapped_under_load_are_never_mixed() -> None:
    """Every weight of version k is k, in small and large tables and behind them: a result is one number all over."""

    @recom_jax.optimize
    def model(params: Any, batch: Any) -> Any:
        pieces = [jnp.take(t, batch["ids"], axis=0) for t in params["small"]]
        bag = jnp.take(params["large"], batch["bags"], axis=0).max(1)
        return jnp.concatenate(
            [*pieces, bag, jnp.broadcast_to(params["dense"], (len(batch["ids"]), 4))], -1
        )

    def version(k: int) -> Any:
        return {
            "small": [jnp.full((50, 4), float(k)) for _ in range(12)],
            "large": jnp.full((70_000, 8), float(k)),  # beyond what the arena takes
            "dense": jnp.full((4,), float(k)),
        }

    def batch(size: int) -> dict[str, np.ndarray]:
        bags = np.arange(size * 3, dtype=np.int32).reshape(size, 3)
        return {"ids": np.arange(size, dtype=np.int32) % 50, "bags": bags}

    versions = [version(k) for k in range(4)]
    serve = model.bind(versions[0])
    serve.warmup([2, 33], batch(2))
    stop, faults, seen = threading.Event(), [], [set() for _ in range(6)]
    before = recom_jax.stats()["programs_prepared"]

    def call(worker: int) -> None:
        size = (2, 33)[worker % 2]
        try:
            while not stop.is_set():
                if worker < 4:
                    out = np.asarray(serve(batch(size)))
                else:  # through a lease
                    views = serve.input_views(batch(size))
                    for name, value in batch(size).items():
                        views[name][...] = value
                    out = np.asarray(serve(views))
                if out.shape != (size, 60) or len(set(out.ravel().tolist())) != 1:
                    faults.append(out)
                    return
                seen[worker].add(float(out[0, 0]))
        except Exception as why:
            faults.append(why)

    callers = [threading.Thread(target=call, args=(k,), daemon=True) for k in range(len(seen))]
    for t in callers:
        t.start()
    stale = []
    for k in range(1, 61):
        serve.update(versions[k % 4])
        out = np.asarray(serve(batch(2)))
        if not (out == k % 4).all():
            stale.append(k)
    stop.set()
    for t in callers:
        t.join(60)
        assert not t.is_alive()
    assert not stale, "a call after an update sees the new weights"
    assert not faults, faults[0]
    assert all(seen), "every thread was served"
    assert set().union(*seen) <= {0.0, 1.0, 2.0, 3.0} and len(set().union(*seen)) > 1
    assert recom_jax.stats()["programs_prepared"] == before, "an update compiles nothing"
