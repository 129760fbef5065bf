"""Each idiom against plain JAX: the values, how many columns are fused, and why where none is."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import jax
import numpy as np
import pytest

import recom_jax
from benchmarks.timing import Plan
from examples.idioms import ALL, SMALL, Size
from examples.idioms.bags import BAGS
from examples.idioms.lookups import LOOKUPS
from tests.helpers import VERIFY, assert_same, check, check_report, run


@dataclasses.dataclass(frozen=True)
class Expect:
    """What `explain` must say. `bound`: of the values, where sums or layers may round otherwise."""

    columns: int
    fused: int | None = None
    calls: int = 1
    bound: float | None = None
    reason: str = ""


def _inside(construct: str, columns: int = 1) -> Expect:
    return Expect(columns, 0, 0, 1e-5, f"the lookup is inside {construct}")


SUM = 1e-5  # values of a few ones, bags of five
LAYERS = 2e-4
F = SMALL.fields
EXPECTED: dict[str, Expect] = {
    # lookups
    "modulo": Expect(1),
    "separate_tables": Expect(F),
    "offsets": Expect(1),
    "stacked": Expect(1),
    "half_precision_cast": Expect(1),
    "quotient_remainder": Expect(2),
    "unique": Expect(1),
    "tied": Expect(3, bound=LAYERS),
    "buckets_to_one_hot": Expect(1),
    "thresholds_argmax": Expect(1),
    "thresholds_count": Expect(1),
    "digitize": Expect(1),
    "murmur": Expect(1),
    "xxhash": Expect(1),
    "splitmix": Expect(1),
    "several_hashes": Expect(2),
    "positions": Expect(2),
    "scaled_and_shifted": Expect(1, bound=SUM),
    # bags
    **dict.fromkeys((n for n in ALL if n.startswith("mean_")), Expect(1, bound=SUM)),
    "multi_hot_sum": Expect(1, bound=SUM),
    "multi_hot_max": Expect(1, 0, 0, SUM, "a one-hot product that takes each id once"),
    "multi_hot_weighted": Expect(1, 0, 0, SUM, "a weighted one-hot product"),
    "multi_hot_masked": Expect(1, bound=SUM),
    "bcoo": Expect(1, bound=SUM),
    "bcsr": Expect(1, 0, 0, SUM, "JAX multiplies compressed rows (BCSR) by a kernel of its own"),
    "segments": Expect(1, bound=SUM),
    "lengths": Expect(1, bound=SUM),
    "weighted": Expect(1, bound=SUM),
    "square_root": Expect(1, bound=SUM),
    "masked_max": Expect(1),
    "every_field_a_bag": Expect(8, bound=SUM),
    # models
    "dlrm": Expect(8, bound=LAYERS),  # the constant gather of pairs is no lookup
    "fm": Expect(2, bound=2e-3),
    "deepfm": Expect(2, bound=2e-3),
    "wide_and_deep": Expect(3, bound=LAYERS),
    "xdeepfm": Expect(1, bound=2e-3),
    "dcn": Expect(1, bound=2e-3),
    "din": Expect(
        2, calls=2, bound=LAYERS
    ),  # the second call's bag has weights that XLA makes of the first's rows
    "dien": Expect(2, bound=LAYERS),
    "sasrec": Expect(3, bound=LAYERS),
    "two_tower": Expect(5, bound=LAYERS),
    "mmoe": Expect(8, bound=LAYERS),
    "transformer_input": Expect(3, bound=LAYERS),
    # control flow
    "scan": _inside("scan"),
    "fori_loop": _inside("scan"),
    "while_loop": _inside("while", 2),
    "cond": _inside("cond"),
    "mapped": _inside("scan"),
    "checkpoint": Expect(1, bound=SUM),
    "custom_vjp": _inside("custom_vjp_call"),
    "beside_a_loop": Expect(1, bound=SUM),
    "sharded_lookup": _inside("shard_map"),
    # libraries
    "linen_embed": Expect(8),
    "linen_embed_bf16": Expect(1),
    "nnx_embed": Expect(1),
    "haiku_index": Expect(1),
    "haiku_one_hot": Expect(1),
    "equinox_embedding": Expect(1),
    "keras_embedding": Expect(1),
    "keras_rs_sum": Expect(1, bound=SUM),
    "keras_rs_mean": Expect(1, bound=SUM),
    "keras_rs_sqrtn": Expect(1, bound=SUM),
}


def made(name: str, size: Size = SMALL) -> tuple[Any, tuple[Any, ...]]:
    """An idiom's function and arguments; skips where its package is absent."""
    idiom = ALL[name]
    if idiom.needs and importlib.util.find_spec(idiom.needs) is None:
        pytest.skip(f"{idiom.needs} is not installed (pip install 'recom_jax[idioms]')")
    return idiom.make(size)


def test_every_idiom_has_an_expectation() -> None:
    assert set(EXPECTED) == set(ALL)


def odd(args: Any, seed: int = 0) -> Any:
    """The arguments with ids that no table has, and NaN and infinity among the numbers."""
    rng = np.random.default_rng(seed)

    def change(x: Any) -> Any:
        x = np.array(x)
        flat = x.reshape(-1)
        if flat.size and x.dtype == np.int32:
            strange = [-1, -2, SMALL.rows, 10**9, -(2**31), 2**31 - 1, SMALL.rows - 1]
            at = rng.integers(0, flat.size, 1 + flat.size // 3)
            flat[at] = rng.choice(strange, at.shape)
        return x

    return jax.tree.map(change, args)


ODD = [
    "modulo", "separate_tables", "offsets", "stacked", "half_precision_cast", "quotient_remainder", "unique",
    "murmur", "several_hashes", "positions", "mean_maximum", "mean_jnp_mean_where", "multi_hot_sum",
    "multi_hot_masked", "bcoo", "segments", "masked_max", "sharded_lookup", "while_loop", "linen_embed_bf16",
    "haiku_one_hot", "equinox_embedding", "keras_embedding", "keras_rs_mean",
]  # fmt: skip


Tried = tuple[Any, Any, recom_jax.Report]


@pytest.fixture(scope="module")
def together() -> dict[str, list[Tried]]:
    """Columns, and bags, as one model each, with usual and with odd ids: its results, plain JAX's, the report."""
    found: dict[str, list[Tried]] = {}
    for group in (LOOKUPS, BAGS):
        cases = {name: made(name) for name in group}

        def model(arrays: Any, cases: Any = cases) -> Any:
            return {name: fn(*arrays[name]) for name, (fn, _) in cases.items()}

        ours, plain = recom_jax.optimize(model, options=VERIFY), jax.jit(model)
        usual = {name: args for name, (_, args) in cases.items()}
        strange = {name: odd(args) if name in ODD else args for name, args in usual.items()}
        for arrays in (usual, strange):
            results = ours(arrays), plain(arrays)
            report = ours.explain(arrays)
            for name in group:
                found.setdefault(name, []).append((results[0][name], results[1][name], report))
    return found


@pytest.mark.parametrize("name", [*LOOKUPS, *BAGS])
def test_column(name: str, together: dict[str, list[Tried]]) -> None:
    want = EXPECTED[name]
    for result, plain, report in together[name]:
        assert_same(result, plain, want.bound and 1e-4)
        mine = [c for c in report.columns if c.name.startswith(f"arrays[{name!r}]")]
        assert len(mine) == want.columns, report
        fused = want.columns if want.fused is None else want.fused
        assert sum(c.status == "fused" for c in mine) == fused, report
        assert {c.reason for c in mine if c.reason} <= {want.reason}, mine


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in {*LOOKUPS, *BAGS}])
def test_model(name: str) -> None:
    want = EXPECTED[name]
    fn, args = made(name)
    ours, plain = recom_jax.optimize(fn, options=VERIFY), jax.jit(fn)
    assert_same(ours(*args), plain(*args), want.bound)
    if name in ODD:
        strange = odd(args)
        assert_same(ours(*strange), plain(*strange), want.bound and 1e-4)
    report = ours.explain(*args)
    check_report(report, want.columns, want.fused, want.calls)
    assert {c.reason for c in report.columns if c.reason} <= {want.reason}, report


@pytest.mark.parametrize("name", ["modulo", "mean_maximum", "bcoo", "multi_hot_masked"])
@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches(name: str, batch: int) -> None:
    fn, args = made(name, dataclasses.replace(SMALL, batch=batch))
    result, _ = run(fn, *args)
    assert_same(result, jax.jit(fn)(*args), LAYERS)


@pytest.mark.parametrize("name", ["splitmix", "xxhash", "bcoo"])
def test_with_64_bits(name: str) -> None:
    with jax.enable_x64(True):
        fn, args = made(name)
        wide = jax.tree.map(lambda x: x.astype(np.int64) if x.dtype == np.int32 else x, args)
        check(fn, *wide, columns=1, bound=EXPECTED[name].bound)


@pytest.mark.parametrize("name", ["custom_vjp", "checkpoint", "bcoo"])
def test_gradients_are_the_functions_own(name: str) -> None:
    fn, args = made(name)

    def loss(f: Any) -> Any:
        return lambda first: sum(x.astype(np.float32).sum() for x in jax.tree.leaves(f(first, *args[1:])))  # fmt: skip

    ours = jax.jit(jax.grad(loss(recom_jax.optimize(fn, options=VERIFY))))(args[0])
    assert_same(ours, jax.jit(jax.grad(loss(fn)))(args[0]), LAYERS)


def test_an_optimized_body_is_fused_inside_the_loop() -> None:
    """What `explain` says of lookups in loops has a remedy: the function that is looped over."""
    fn, args = made("mapped")
    table, ids = args
    bag = recom_jax.optimize(lambda table, i: table[i].sum(0), options=VERIFY)

    def looped(table: Any, ids: Any) -> Any:
        return jax.lax.map(lambda i: bag(table, i), ids)

    text = jax.jit(looped).lower(table, ids).as_text()
    assert text.count("custom_call @recom_fused_v1") == 1
    assert_same(jax.jit(looped)(table, ids), jax.jit(fn)(table, ids), SUM)


@pytest.mark.once
def test_the_benchmark_runs(tmp_path: Any) -> None:
    from benchmarks.cases import idioms
    from benchmarks.context import Context, Settings

    settings = dataclasses.replace(Settings.tiny(), plan=Plan(rounds=2, burst=1, least_rounds=1))
    result = idioms.run(Context(settings, tmp_path))
    assert len(result.rows) >= 10 and len({r.key for r in result.rows}) == len(result.rows)
    (target,) = result.targets
    assert target.limit == 1.05 and target.value > 0
    assert any("1 of 1 fused" in r.note for r in result.rows)
