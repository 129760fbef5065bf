"""Prepared programs on disk: the next process runs the same program, and never one kept for another function."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import cache, kept, pipeline, trace
from tests.helpers import ids, table
from tests.test_random_programs import arguments, build

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def options(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> recom_jax.Options:
    monkeypatch.setattr(kept, "LEAST", 1)
    monkeypatch.setattr(cache, "_WARNED", set())
    return recom_jax.Options(verify=False, cache_dir=str(tmp_path / "cache"))


def model(params: Any, batch: Any, fill: float = 0.0, bins: Any = None) -> Any:
    """Two levels of calls, a constant that the compiler makes, equations left to XLA, a function among parameters."""
    bins = np.array([9.0, 5.5, 5.0, -1.0], np.float32) if bins is None else bins
    first = params["a"][jnp.digitize(batch["x"], bins)]
    second = params["b"].at[batch["ids"] % 7].get(mode="fill", fill_value=fill).sum(1)
    hashed = params["a"][jnp.clip(params["rows"][batch["ids"][:, 0]][:, 0], 0, 4)]
    return jax.nn.relu(jnp.concatenate([first, second, hashed], 1)) @ params["w"]


def inputs() -> tuple[Any, Any]:
    params = {
        "a": table(5, 4),
        "b": table(9, 8),
        "rows": jnp.arange(20, dtype=jnp.int32).reshape(10, 2) % 5,
        "w": jnp.ones((16, 3)),
    }
    return params, {"x": jnp.linspace(-3, 12, 6), "ids": ids((6, 3), 9, odd=True)}


def traced(fn: Callable[..., Any], *args: Any) -> trace.Traced:
    leaves, tree = jax.tree_util.tree_flatten(args)

    def flat(*leaves: Any) -> Any:
        return jax.tree_util.tree_leaves(fn(*jax.tree_util.tree_unflatten(tree, leaves)))

    return trace.trace(flat, leaves, tuple(f"a{k}" for k in range(len(leaves))))


def counted(name: str) -> int:
    return pipeline.counters().get(name, 0)


def entries(options: recom_jax.Options) -> list[pathlib.Path]:
    assert options.caches_in is not None
    return sorted(options.caches_in.glob("program-*"))


def spliced(made: pipeline.Fused) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(made.jaxpr))


def test_a_kept_program_is_the_one_that_was_made(options: recom_jax.Options) -> None:
    args = inputs()
    want = np.asarray(jax.jit(model)(*args))
    first = recom_jax.optimize(model, options=options)
    np.testing.assert_allclose(first(*args), want, rtol=1e-5)
    assert len(entries(options)) == 1
    before = counted("programs_from_disk")
    again = recom_jax.optimize(model, options=options)
    np.testing.assert_array_equal(again(*args), first(*args))
    assert counted("programs_from_disk") == before + 2  # two levels, two calls
    t = traced(model, *args)
    made, read = pipeline.compile_jaxpr(t, options), pipeline.fuse(t, options)
    assert isinstance(made, pipeline.Compiled) and not isinstance(read, pipeline.Compiled)
    assert [e.digest for _, _, e in made.calls] == [e.digest for _, _, e in read.calls]
    assert [s.program for _, s, _ in made.calls] == [s.program for _, s, _ in read.calls]
    assert spliced(made) == spliced(read)


def test_the_report_is_the_same(options: recom_jax.Options) -> None:
    args = inputs()
    off = recom_jax.Options(verify=False, cache_dir="off")
    fresh = recom_jax.optimize(model, options=off).explain(*args)
    recom_jax.optimize(model, options=options)(*args)
    known = recom_jax.optimize(model, options=options)
    known(*args)
    report = known.explain(*args)
    assert str(report) == str(fresh)
    assert report.columns == fresh.columns and report.source == fresh.source
    assert any("test_kept.py:" in c.source for c in report.columns)


def test_derivatives_of_a_kept_program(options: recom_jax.Options) -> None:
    params, batch = inputs()
    rows, rest = params.pop("rows"), params

    def loss(p: Any) -> Any:
        return (model({**p, "rows": rows}, batch) ** 2).sum()

    want = jax.grad(loss)(rest)
    for _ in range(2):
        got = jax.grad(recom_jax.optimize(loss, options=options))(rest)
        for name, g in got.items():
            np.testing.assert_allclose(g, want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_models(options: recom_jax.Options, seed: int) -> None:
    made = build([seed * 100 + k for k in range(25)], seed)
    t = traced(made.fn, made.params, arguments(4, seed))
    fresh = pipeline.compile_jaxpr(t, options)
    assert isinstance(pipeline.fuse(t, options), pipeline.Compiled)
    read = pipeline.fuse(t, options)
    assert not isinstance(read, pipeline.Compiled) and spliced(read) == spliced(fresh)
    assert [s.program for _, s, _ in read.calls] == [s.program for _, s, _ in fresh.calls]


def test_what_decides_is_part_of_the_key(
    options: recom_jax.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, batch = inputs()
    bins = np.array([9.0, 5.5, 5.0, -1.0], np.float32)
    nearly = np.array([9.0, 5.5, np.nextafter(np.float32(5), np.float32(6)), -1.0], np.float32)

    def key(fn: Any = model, p: Any = params, b: Any = batch, o: Any = options) -> Any:
        return kept.key(traced(fn, p, b), o)

    keys = [
        key(),
        key(lambda p, b: model(p, b, fill=1.0)),
        key(lambda p, b: model(p, b, fill=-0.0)),
        key(lambda p, b: model(p, b, bins=nearly)),
        key(lambda p, b: model(p, b)[:, ::-1]),
        key(lambda p, b: model({**p, "b": p["b"] * 1}, b)),
        key(p={**params, "a": table(6, 4)}),
        key(p={**params, "a": table(5, 4).astype(jnp.bfloat16)}),
        key(b={**batch, "x": jnp.zeros(7), "ids": ids((7, 3), 9)}),
        key(o=recom_jax.Options(fast_ids=True, verify=False)),
        key(o=recom_jax.Options(disable=("drop-fill",), verify=False)),
        key(o=recom_jax.Options(always_fuse=True, verify=False)),
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    assert key(lambda p, b: model(p, b, bins=bins)) == keys[0]
    assert key(o=recom_jax.Options(verify=False, cache_dir="elsewhere")) == keys[0]
    monkeypatch.setenv("RECOM_DISABLE", "drop-fill")
    assert key() not in keys
    monkeypatch.delenv("RECOM_DISABLE")
    monkeypatch.setattr(kept, "sources", lambda: "another compiler")
    assert key() not in keys


def test_an_inner_jaxpr_counts_with_its_constants() -> None:
    """JAX's text of one does not tell what they are."""
    bins = [np.array([low, 5.5, 6.5], np.float32) for low in (1.0, 2.0, 1.0)]
    inner = [
        jax.make_jaxpr(functools.partial(lambda b, x: x + jnp.asarray(b), b))(bins[0]) for b in bins
    ]
    one, other, again = (kept._Text().value(j) for j in inner)
    assert one == again != other


@pytest.mark.parametrize("loop", ["scan", "map", "cond"])
def test_constants_of_inner_functions_are_part_of_the_key(
    options: recom_jax.Options, loop: str
) -> None:
    def run(bins: np.ndarray[Any, Any], params: Any, batch: Any) -> Any:
        def one(x: Any) -> Any:
            return params["a"][jnp.digitize(x, bins)] * jnp.asarray(bins[:4])

        if loop == "scan":
            return jax.lax.scan(lambda c, x: (c, one(x)), 0, batch["x"])[1]
        if loop == "map":
            return jax.lax.map(one, batch["x"])
        return jax.lax.cond(batch["ids"][0, 0] > 0, one, lambda x: one(x) + 1, batch["x"][0])

    for low in (5.0, 1.0, 3.0):
        bins = np.array([low, 5.5, 6.5, 9.0], np.float32)
        fn = functools.partial(run, bins)
        got = recom_jax.optimize(fn, options=options)(*inputs())
        np.testing.assert_array_equal(got, fn(*inputs()))


def test_functions_without_a_key(options: recom_jax.Options) -> None:
    params, batch = inputs()
    (n,) = jax.export.symbolic_shape("n")
    open_batch = {
        "x": jax.ShapeDtypeStruct((n,), jnp.float32),
        "ids": jax.ShapeDtypeStruct((n, 3), jnp.int32),
    }
    assert kept.key(traced(model, params, open_batch), options) is None
    huge = np.broadcast_to(np.float32(0), (kept.LARGEST_CONSTANTS // 4 + 1,))
    assert kept.key(traced(lambda x: jnp.asarray(huge)[:3] + x, jnp.ones(3)), options) is None

    def outer(bound: Any, b: Any) -> Any:  # constants of the inner function are traced
        return recom_jax.optimize(lambda b: model(bound, b), options=options)(b)

    want = jax.jit(model)(params, batch)
    np.testing.assert_allclose(jax.jit(outer)(params, batch), want, rtol=1e-5)


def test_not_where_stages_are_to_be_seen(
    options: recom_jax.Options, tmp_path: pathlib.Path
) -> None:
    args = inputs()
    folder = str(tmp_path / "cache")
    for other in (
        recom_jax.Options(verify=True, cache_dir=folder),
        recom_jax.Options(verify=False, cache_dir=folder, dump_dir=str(tmp_path / "dumps")),
        recom_jax.Options(verify=False, cache_dir="off"),
    ):
        recom_jax.optimize(model, options=other)(*args)
    assert entries(options) == []


def test_small_functions_are_not_looked_up(
    options: recom_jax.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LEAST", 512)
    recom_jax.optimize(model, options=options)(*inputs())
    assert entries(options) == []


# ---- trouble -----------------------------------------------------------------------------------------------------


def _flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _gone(path: pathlib.Path) -> None:
    shutil.rmtree(path.parent)


def _other(path: pathlib.Path) -> None:
    """A whole entry of this key that says something else."""
    c = cache.Cache(path.parent)
    key = kept.key(traced(model, *inputs()), recom_jax.Options(verify=False))
    assert key is not None and c.get("program", key) is not None
    c.put("program", key, b'{"kept": [[0, 99999]], "extra": [], "calls": []}')


def _text(path: pathlib.Path) -> None:
    c = cache.Cache(path.parent)
    key = kept.key(traced(model, *inputs()), recom_jax.Options(verify=False))
    assert key is not None
    c.put("program", key, b"\xff\xfe not JSON")


@pytest.mark.parametrize("harm", [_flip, _cut, _gone, _other, _text])
def test_a_damaged_entry_is_made_again(
    options: recom_jax.Options, harm: Callable[[pathlib.Path], None]
) -> None:
    args = inputs()
    want = recom_jax.optimize(model, options=options)(*args)
    harm(entries(options)[0])
    before = counted("programs_from_disk")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = recom_jax.optimize(model, options=options)(*args)
    np.testing.assert_array_equal(got, want)
    assert counted("programs_from_disk") == before
    again = recom_jax.optimize(model, options=options)(*args)
    np.testing.assert_array_equal(again, want)
    assert counted("programs_from_disk") == before + 2


def test_nothing_is_read_from_a_folder_that_others_may_write(options: recom_jax.Options) -> None:
    args = inputs()
    want = recom_jax.optimize(model, options=options)(*args)
    folder = entries(options)[0].parent
    folder.chmod(0o777)
    before = counted("programs_from_disk")
    with pytest.warns(RuntimeWarning, match="other users may write"):
        got = recom_jax.optimize(model, options=options)(*args)
    np.testing.assert_array_equal(got, want)
    assert counted("programs_from_disk") == before
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777


def test_a_folder_that_cannot_be_made(options: recom_jax.Options, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = recom_jax.Options(verify=False, cache_dir=str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            got = recom_jax.optimize(model, options=blocked)(*inputs())
    assert len([w for w in seen if "cache folder" in str(w.message)]) == 1
    np.testing.assert_allclose(got, jax.jit(model)(*inputs()), rtol=1e-5)


def test_a_full_disk(options: recom_jax.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        got = recom_jax.optimize(model, options=options)(*inputs())
    np.testing.assert_allclose(got, jax.jit(model)(*inputs()), rtol=1e-5)
    assert entries(options) == []


def test_a_defect_of_ours_costs_no_call(
    options: recom_jax.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "warn_once", lambda text: warnings.warn(text, stacklevel=1))
    monkeypatch.setattr(kept, "key", lambda *args: 1 // 0)
    with pytest.warns(UserWarning, match="is made again: ZeroDivisionError"):
        got = recom_jax.optimize(model, options=options)(*inputs())
    np.testing.assert_allclose(got, jax.jit(model)(*inputs()), rtol=1e-5)


# ---- processes ---------------------------------------------------------------------------------------------------

PROCESS = """
import sys
import numpy as np
import recom_jax
from recom_jax import kept, pipeline
from tests.test_kept import inputs, model
kept.LEAST = 1
got = recom_jax.optimize(model, options=recom_jax.Options(verify=False, cache_dir=sys.argv[1]))(*inputs())
print(np.asarray(got).tobytes().hex(), pipeline.counters().get("programs_from_disk", 0))
"""


def test_two_processes_at_once_and_one_after_them(options: recom_jax.Options) -> None:
    off = recom_jax.Options(verify=False, cache_dir="off")
    want = np.asarray(recom_jax.optimize(model, options=off)(*inputs()))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(options.cache_dir)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in (1, 2)
    ]
    for process in running:
        out, errors = process.communicate(timeout=180)
        assert process.returncode == 0 and "Warning" not in errors, errors
        assert out.split()[0] == want.tobytes().hex()
    assert len(entries(options)) == 1
    before = counted("programs_from_disk")
    got = recom_jax.optimize(model, options=options)(*inputs())
    np.testing.assert_array_equal(got, want)
    assert counted("programs_from_disk") == before + 2
