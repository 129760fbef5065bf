"""Public reports of errors, exports, transformations, devices, threads and limits (docs/public_reports.md)."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import recom_jax
from tests.helpers import VERIFY, assert_same, check, cpu_only, table
from tests.test_public_reports import CASES

ROOT = pathlib.Path(__file__).parent.parent
T = np.array(table(8, 4))
I = np.arange(6, dtype=np.int32)  # noqa: E741
SUM = 1e-4


def seg(rows: Any, bags: Any, n: int | None = None) -> Any:
    return jax.ops.segment_sum(rows, bags, n)


# ---- errors are JAX's own --------------------------------------------------------------------------------------------

FAILS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "17 no number of segments": (lambda t, i: seg(t[i], i), (T, I)),
    "41 reshape of an empty batch": (lambda t, i: t[i].reshape(i.shape[0], -1), (T, I[:0])),
    "42 lengths that do not divide": (
        lambda t, i, n: seg(t[i], jnp.repeat(jnp.arange(105), n.reshape(105, -1).sum(1), total_repeat_length=6), 105),
        (T, I, np.ones(2114, np.int32))),
    "47 no weights": (lambda t, i, w: (t[i] * w[:, None]).sum(0), (T, I, np.zeros(0, np.float32))),
    "49 a split too few": (
        lambda t, i, o: seg(t[i], jnp.repeat(jnp.arange(4), jnp.diff(o), total_repeat_length=6), 4), (T, I, I[:4])),
    "59 a table of no rows": (lambda t, i: jnp.take(t, i, axis=0), (T[:0], I)),
    "59 a table of no rows, indexed": (lambda t, i: t[i], (T[:0], I)),
    "60 the largest of nothing": (lambda t, i: t[i].max(1), (T, np.zeros((3, 0), np.int32))),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS)
def test_error(name: str) -> None:
    fn, args = FAILS[name]
    with pytest.raises(Exception) as plain:
        jax.jit(fn)(*args)
    builtin = next(c for c in type(plain.value).__mro__ if c.__module__ == "builtins")
    with pytest.raises(builtin) as ours:
        recom_jax.optimize(fn, options=VERIFY)(*args)
    assert isinstance(ours.value, recom_jax.RecomError)
    assert str(plain.value).splitlines()[0] in str(ours.value)
    assert "test_public_reports_systems.py" in str(ours.value)


def test_59_empty_table_with_empty_ids() -> None:
    check(lambda t, i: jnp.take(t, i, axis=0), T[:0], I[:0], columns=0, calls=0)


# ---- types -----------------------------------------------------------------------------------------------------------


def test_57_wide_ids_are_cut_as_jit_cuts_them() -> None:
    ids = np.array([2**32 + 3, 2**31, -1])
    check(lambda t, i: jnp.take(t, i, axis=0), T, ids, columns=1)


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("splits", ["int32", "int64"])
def test_48_dtypes_of_ids_and_splits(ids: str, splits: str) -> None:
    def fn(t: Any, i: Any, o: Any) -> Any:
        n = jnp.diff(o)
        return seg(t[i], jnp.repeat(jnp.arange(3), n, total_repeat_length=6), 3)

    with jax.enable_x64(True):
        check(fn, T, I.astype(ids), np.array([0, 2, 2, 6], splits), columns=1, bound=SUM)


def test_34_padded_and_jagged_bags_are_equal() -> None:
    fn = recom_jax.optimize(lambda t, i: t[i].sum(1), options=VERIFY)
    bags = np.repeat(np.arange(2, dtype=np.int32), 3)
    jagged = recom_jax.optimize(lambda t, i: seg(t[i], bags, 2), options=VERIFY)
    assert_same(fn(T, I.reshape(2, 3)), jagged(T, I), SUM)


def test_13_tables_side_by_side() -> None:
    """The first id past a table in an arena is not the next table's first row."""

    def model(params: Any, i: Any) -> Any:
        return [(jnp.take(t, i, axis=0), t[i]) for t in params]

    params = [T[:3], T[3:5], T[5:]]
    serve = recom_jax.optimize(model, options=VERIFY).bind(params)
    ids = np.array([-9, -4, -1, 0, 2, 3, 4, 8, 2**31 - 1], np.int32)
    assert_same(serve(ids), jax.jit(model)(params, ids))


# ---- export ----------------------------------------------------------------------------------------------------------

(B,) = export.symbolic_shape("b")
EXPORTS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "69 buckets": (
        lambda t, x: t[jnp.digitize(x, np.array([0.0, 1.0], np.float32))].mean(-1), (B,), np.float32),
    "71 bags": (lambda t, i: t[i].sum(1), (B, 5), np.int32),
    "72 take_along_axis": (
        lambda t, i: jnp.take_along_axis(t, i[:, None], axis=0), (B,), np.int32),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTS)
def test_export_with_a_symbolic_batch(name: str) -> None:
    """Results and the assertions on shapes (73: an empty batch) are the plain export's."""
    fn, shape, dtype = EXPORTS[name]
    types = jax.ShapeDtypeStruct(T.shape, T.dtype), jax.ShapeDtypeStruct(shape, dtype)
    ours, plain = (
        export.export(jax.jit(f))(*types) for f in (recom_jax.optimize(fn, options=VERIFY), fn)
    )
    for n in (1, 3):
        x = np.arange(n * 5).reshape(n, 5)[:, : shape[1] if len(shape) > 1 else 1].astype(dtype) % 8
        x = x if len(shape) > 1 else x[:, 0]
        assert_same(ours.call(T, x), plain.call(T, x), SUM)
    with pytest.raises(ValueError, match=">= 1") as first:
        plain.call(T, x[:0])
    with pytest.raises(ValueError, match=re.escape(str(first.value).splitlines()[0])):
        ours.call(T, x[:0])


def test_70_boundaries_of_symbolic_length_fail_as_in_jax() -> None:
    def fn(t: Any, x: Any, edges: Any) -> Any:
        return t[jnp.searchsorted(edges, x)]

    types = [jax.ShapeDtypeStruct(s, np.float32) for s in (T.shape, (3,), (B,))]
    for f in (fn, recom_jax.optimize(fn)):
        with pytest.raises(Exception, match="Symbolic dimension 'b' used in a context"):
            export.export(jax.jit(f))(*types)


def child(code: str, folder: pathlib.Path, **environment: str) -> str:
    """What a fresh Python prints, started in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- transformations and devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)])
def test_80_81_vmap_over_tables_and_ids(axes: Any) -> None:
    def fn(t: Any, i: Any) -> Any:
        return t[i] + 1, t[i].sum(0)

    ours = recom_jax.optimize(fn, options=VERIFY)
    two = jnp.stack([T, T + 1])
    t = two if axes[0] == 0 else jnp.asarray(T)
    i = jnp.stack([I, I[::-1]]) if axes[1] == 0 else jnp.asarray(I)
    assert_same(jax.vmap(ours, axes)(t, i), jax.vmap(fn, axes)(t, i), SUM)
    if axes == (None, 0):
        nested = [jax.vmap(jax.vmap(f, (None, 0)), (0, None)) for f in (ours, fn)]
        assert_same(nested[0](two, i), nested[1](two, i), SUM)


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_97_donated_ids_of_two_columns_and_a_donated_table() -> None:
    ours = recom_jax.optimize(lambda t, i: (t[i], t[i * 2 % 8], t + 1, i + 1), options=VERIFY)
    for _ in range(3):
        a, b, c, d = jax.jit(ours, donate_argnums=(0, 1))(jnp.asarray(T), jnp.asarray(I))
        assert_same([a, b, c, d], [jnp.asarray(x) for x in (T[I], T[I * 2 % 8], T + 1, I + 1)])


def test_95_a_table_of_another_layout() -> None:
    from jax.experimental.layout import Format, Layout

    turned = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    t = jax.device_put(T, turned)
    model = recom_jax.optimize(lambda t, i: t[i], options=VERIFY)
    np.testing.assert_array_equal(model(t, I), T[I])
    np.testing.assert_array_equal(jax.jit(model, in_shardings=(turned, None))(t, I), T[I])


@cpu_only("the module is exported for CPUs")
def test_40_74_77_83_84_85_86_118_another_process_and_two_devices(tmp_path: pathlib.Path) -> None:
    """An exported model, sharded batches, empty bags on one device, explicit meshes, a table in halves."""
    model = recom_jax.optimize(lambda t, i: t[i].sum(1), options=VERIFY)
    made = export.export(jax.jit(model))(T, I.reshape(2, 3))
    assert "recom_fused_v1" in made.mlir_module()
    (tmp_path / "model").write_bytes(made.serialize())
    out = child(
        """
        import pathlib, warnings
        import jax, jax.numpy as jnp, numpy as np, recom_jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        warnings.simplefilter("ignore")
        t = np.arange(32, dtype=np.float32).reshape(8, 4)
        ids = np.arange(6, dtype=np.int32)
        exported = jax.export.deserialize(pathlib.Path("model").read_bytes())
        np.testing.assert_allclose(exported.call(t, ids.reshape(2, 3)), t[ids.reshape(2, 3)].sum(1))

        bags = np.array([0, 0, 1, 9, 9, 9], np.int32)  # all of the second device's are dropped
        def fn(t, i, s):
            return jax.ops.segment_sum(t[i], s, 2)
        mesh = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Auto,))
        specs = {"mesh": mesh, "in_specs": (P(), P("b"), P("b")), "out_specs": P("b")}
        ours = jax.jit(jax.shard_map(recom_jax.optimize(fn), **specs))
        assert "recom_fused_v1" in ours.lower(t, ids, bags).as_text()
        np.testing.assert_allclose(ours(t, ids, bags), jax.jit(jax.shard_map(fn, **specs))(t, ids, bags))

        sharded = jax.device_put(ids, NamedSharding(mesh, P("b")))
        model = jax.jit(recom_jax.optimize(lambda t, i: t[i] * 2))
        text = model.lower(t, sharded).compile().as_text()
        assert "all-gather" not in text and "recom_fused" not in text
        assert model(t, sharded).sharding.spec == P("b")
        np.testing.assert_array_equal(model(t, sharded), t[ids] * 2)

        explicit = jax.make_mesh((2,), ("b",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(explicit):
            there = jax.device_put(ids, NamedSharding(explicit, P("b")))
            lookup = lambda t, i: t.at[i].get(out_sharding=P("b", None))
            plain, got = jax.jit(lookup)(t, there), recom_jax.optimize(lookup)(t, there)
            assert jax.typeof(got) == jax.typeof(plain)
            np.testing.assert_array_equal(got, plain)

        def rows(t, i):
            there = (i >= 0) & (i < t.shape[0])
            return jnp.where(there[:, None], t[jnp.where(there, i, 0)], 0)
        rows = recom_jax.optimize(rows)
        def half(t, i):
            return jax.lax.psum(rows(t, i - jax.lax.axis_index("b") * t.shape[0]), "b")
        halves = jax.jit(jax.shard_map(half, mesh=mesh, in_specs=(P("b", None), P()), out_specs=P()))
        text = halves.lower(t, ids).as_text()
        assert text.count("all_reduce") == 1 and "all_gather" not in text
        np.testing.assert_array_equal(halves(t, ids), t[ids])
        print("fine")
        """,
        tmp_path,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    assert out.strip() == "fine"


# ---- threads, caches, sizes ------------------------------------------------------------------------------------------


@pytest.mark.once
def test_90_91_many_threads_a_tenth_with_empty_bags() -> None:
    def fn(t: Any, i: Any) -> Any:
        return jnp.where((i >= 0)[..., None], t[jnp.maximum(i, 0)], 0).sum(1)

    model = recom_jax.optimize(fn)
    batches = [np.full((3, 4), -1 if k % 10 == 0 else k % 8, np.int32) for k in range(100)]
    want = [np.asarray(fn(T, b)) for b in batches[:10]]
    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        found = list(pool.map(lambda b: np.asarray(model(T, b)), batches * 2))
    for k, got in enumerate(found):
        want_k = want[k % 10] if k % 10 == 0 else np.asarray(4 * T[batches[k % 100]][:, 0])
        np.testing.assert_allclose(got, want_k, atol=1e-5)


@pytest.mark.once
def test_88_96_a_compiled_model_is_found_in_jaxs_cache(tmp_path: pathlib.Path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    hits: list[str] = []
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        found = []
        for _ in range(2):
            hits.clear()
            model = recom_jax.optimize(lambda t, i: t[i].sum(1) - t[i].max(1))
            out = model(T, I.reshape(2, 3))
            found.append(any(name.endswith("cache_hits") for name in hits))
            hits.clear()
            total = recom_jax.optimize(lambda t, i: t[i].sum(1))
            gradient = jax.jit(jax.grad(lambda t, f=total: f(t, I.reshape(2, 3)).sum()))(T)
            found.append(any(name.endswith("cache_hits") for name in hits))
            np.testing.assert_array_equal(gradient[:, 0], np.bincount(I, minlength=len(T)))
        want = T[I.reshape(2, 3)].sum(1) - T[I.reshape(2, 3)].max(1)
        np.testing.assert_allclose(out, want, atol=1e-5)
        assert found == [False, False, True, True]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.once
@cpu_only("launches are counted, not calls")
def test_94_103_104_many_tables_in_one_call() -> None:
    tables = [T] * 513
    model = recom_jax.optimize(lambda ts, i: jnp.concatenate([t[i] for t in ts], -1))
    before = recom_jax.stats()["calls"]
    np.testing.assert_array_equal(model(tables, I), np.tile(T[I], 513))
    assert recom_jax.stats()["calls"] == before + 1


@pytest.mark.once
def test_109_sizes_that_change_each_step_prepare_nothing() -> None:
    model = recom_jax.optimize(lambda t, i, s: seg(t[i], s, 4))
    model.explain(T, I, I // 2)
    before = recom_jax.stats()["programs_prepared"]
    for n in range(7, 40):
        i = np.arange(n, dtype=np.int32)
        report = model.explain(T, i % 8, i // 10)
        assert report.num_fused == 1
    assert recom_jax.stats()["programs_prepared"] == before


@pytest.mark.once
def test_119_many_ragged_inputs_of_random_lengths() -> None:
    """20 ragged columns; the lengths differ from call to call, the totals stay."""
    rng = np.random.default_rng(0)
    features, bags, total = 20, 4, 30

    def fn(ts: Any, ids: Any, lengths: Any) -> Any:
        out = []
        for t, i, n in zip(ts, ids, lengths, strict=True):
            bag = jnp.repeat(jnp.arange(bags), n, total_repeat_length=total)
            out.append(seg(jnp.take(t, i, axis=0, mode="clip"), bag, bags))
        return jnp.concatenate(out, -1)

    tables = [T + k for k in range(features)]
    model = recom_jax.optimize(fn)
    for _ in range(20):
        ids = rng.integers(0, 8, (features, total)).astype(np.int32)
        cuts = np.sort(rng.integers(0, total + 1, (features, bags - 1)), axis=1)
        ends = np.concatenate([np.zeros((features, 1), int), cuts, np.full((features, 1), total)], 1)  # fmt: skip
        lengths = np.diff(ends, axis=1).astype(np.int32)
        want = np.concatenate(
            [
                np.stack([t[i[a:b]].sum(0) for a, b in itertools.pairwise(e)])
                for t, i, e in zip(tables, ids, ends, strict=True)
            ],
            -1,
        )
        got = model(tables, list(ids), list(lengths))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    assert model.explain(tables, list(ids), list(lengths)).num_fused == features


@pytest.mark.once
def test_102_107_what_xla_compiles_does_not_grow_with_columns() -> None:
    def fn(ts: Any, ids: Any) -> Any:
        bags = [t[jnp.maximum(i, 0)].sum(1) for t, i in zip(ts, ids, strict=True)]
        return jnp.concatenate(bags, -1)

    args = [T] * 60, [I.reshape(2, 3)] * 60
    text = recom_jax.optimize(fn).lower(*args).as_text()
    body = text[text.index("func.func") :].splitlines()
    assert len(body) < 10 and sum("custom_call" in line for line in body) == 1


@pytest.mark.once
def test_101_only_one_module_imports_private_names() -> None:
    for path in (ROOT / "recom_jax").rglob("*.py"):
        if path.name != "compat.py":
            assert not re.search(r"^\s*(from|import) jax\._src", path.read_text(), re.M), path


@pytest.mark.once
def test_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs/public_reports.md").read_text()
    rows = re.findall(r"^\| \[(\d+)\]\(https://\S+\) \| .+ \| .+ \| (\S+) \|$", page, re.MULTILINE)
    assert len(rows) == page.count("| [") > 100
    for _, test in rows:
        if test != "-":
            file, name = test.strip("`").split("::")
            assert f"def {name}(" in (ROOT / file).read_text(), test
    tried = {int(n) for name in CASES for n in re.match(r"[\d ]+", name)[0].split()}
    listed = {int(n) for n, test in rows if test.endswith("test_public_reports.py::test_report`")}
    assert tried >= listed
