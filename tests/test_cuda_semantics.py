"""What the tests of the CPU say of odd inputs holds for the generated CUDA text: the same cases, emulated.

Each group is one function, so that one compilation tests all of it. Where rows are subnormal the CPU's threads take
them for 0 and a GPU does not, so those are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.idioms import ALL
from examples.idioms.bags import BAGS
from examples.idioms.lookups import LOOKUPS
from tests import cuda_emulation, test_bags, test_lookup, test_public_reports
from tests.cuda_emulation import Options, emulate, interpret
from tests.helpers import assert_same, ids, table
from tests.idioms.test_idioms import EXPECTED, ODD, made, odd

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]

WAYS = (Options(sms=1), Options(tiles="unaligned", order=3))
SUM = 1e-3
FLOATS = test_lookup.FLOATS[np.abs(test_lookup.FLOATS) != np.float32(1e-45)]
ROWS = test_lookup.ROWS

Group = tuple[Callable[[Any], Any], Any, float | None]
GROUPS: dict[str, Callable[[], Group]] = {}


def group(make: Callable[[], Group]) -> Callable[[], Group]:
    GROUPS[make.__name__] = make
    return make


def emulated(fn: Callable[[Any], Any], args: Any, bound: Any, calls: int | None = 1) -> None:
    """The function, its fused calls emulated, equals plain JAX and itself on the CPU."""
    c = cuda_emulation.compiled(fn, args)
    assert c.programs and (calls is None or len(c.programs) == calls)
    want, on_cpu = jax.jit(fn)(args), c.run(interpret)
    for way in WAYS:
        got = c.run(functools.partial(emulate, options=way))
        assert_same(got, on_cpu, bound)
        assert_same(got, want, bound)


@group
def spellings() -> Group:
    cases = test_lookup.SPELLINGS
    args = table(ROWS, 5), ids((6, 4), ROWS, odd=True)
    return lambda a: {k: f(*a) for k, f in cases.items()}, args, None


@group
def id_expressions() -> Group:
    def fn(a: Any) -> Any:
        t, i = a
        found = {k: f(i) for k, f in test_lookup.IDS.items()}
        return {
            k: (t[j], jnp.take(t, j, axis=0), jnp.take(t, j, axis=0, mode="clip"))
            for k, j in found.items()
        }

    return fn, (table(ROWS, 3), ids((24,), ROWS, odd=True, seed=3)), None


@group
def ids_from_floats() -> Group:
    def fn(a: Any) -> Any:
        t, x = a
        found = {k: f(x) for k, f in test_lookup.FLOAT_IDS.items()}
        return {k: (t[j], jnp.take(t, j, axis=0, mode="clip")) for k, j in found.items()}

    return fn, (table(ROWS, 3), jnp.asarray(FLOATS)), None


@group
def id_dtypes() -> Group:
    kinds = ("int8", "int16", "uint8", "uint16", "uint32")

    def fn(a: Any) -> Any:
        t, found = a
        return {k: [jnp.take(t, i, axis=0, mode=m) for m in (None, "clip")] for k, i in found}

    odd_ids = [(k, ids((24,), ROWS, odd=True, dtype=k)) for k in kinds]
    t = table(ROWS, 5)
    by_kind = dict(odd_ids)
    flags = jnp.arange(24) % 3 == 0
    rest = lambda a: fn((a[0], a[1].items())) | {"bool": a[0][a[2].astype(jnp.uint8)]}  # noqa: E731
    return rest, (t, by_kind, flags), None


@group
def boundaries() -> Group:
    def fn(a: Any) -> Any:
        t, x, bins = a
        out: dict[str, Any] = {}
        for name, values in test_lookup.BOUNDARIES.items():
            b = np.asarray(values, np.float32)
            for side in ("left", "right"):
                for method in ("scan", "compare_all", "scan_unrolled"):
                    search = functools.partial(jnp.searchsorted, side=side, method=method)
                    out[f"{name}_{side}_{method}"] = t[search(jnp.asarray(b), x)]
                    out[f"{name}_{side}_{method}_given"] = t[search(bins[name], x)]
            out[f"{name}_digitize"] = jnp.take(t, jnp.digitize(x, b), axis=0)
        return out

    bins = {k: jnp.asarray(b, jnp.float32) for k, b in test_lookup.BOUNDARIES.items()}
    return fn, (table(5, 3), jnp.asarray(FLOATS), bins), None


@group
def fills() -> Group:
    """Missing rows of every dtype: the smallest integer, True, NaN or what is asked for."""
    kinds = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "bfloat16", "float16", "float32")  # fmt: skip
    tables = {k: table(9, 3, k) for k in kinds} | {"bool": table(9, 3) > 0}
    given = (("int8", -128), ("uint8", 255), ("int32", 7), ("bool", True), ("bool", False),
             ("bfloat16", 1.0078125), ("float32", np.inf), ("float32", -0.0), ("float16", 65504.0))  # fmt: skip

    def fn(a: Any) -> Any:
        tables, i = a
        out = {k: [jnp.take(t, i, axis=0), t.at[i].get(mode="fill")] for k, t in tables.items()}
        values = {
            f"{k} {v}": tables[k].at[i].get(mode="fill", fill_value=v, wrap_negative_indices=False)
            for k, v in given
        }
        return out, values

    return fn, (tables, jnp.asarray([0, -1, 9, -10, 2**31 - 1, -(2**31), -9, 8], jnp.int32)), None


@group
def sums() -> Group:
    args = table(test_bags.ROWS, 6), *test_bags.padded(odd=True)
    return lambda a: {k: f(*a) for k, f in test_bags.SUMS.items()}, args, SUM


@group
def means() -> Group:
    def fn(a: Any) -> Any:
        t, i, m, _ = a
        total = (t[i] * m[..., None]).sum(1)
        counts = {d: m.astype(d).sum(1, keepdims=True) for d in ("int32", "float32")}
        guards = {
            f"{k} {d}": g(total, n) for k, g in test_bags.GUARDS.items() for d, n in counts.items()
        }
        return guards | {k: f(*a) for k, f in test_bags.MEANS.items()}

    return fn, (table(test_bags.ROWS, 6), *test_bags.padded()), SUM


@group
def extremes() -> Group:
    t = table(test_bags.ROWS, 6)
    dirty = t.at[3, 1].set(jnp.nan).at[4].set(-0.0).at[5].set(0.0).at[6].set(-jnp.inf)
    i, m, _ = test_bags.padded(odd=True)
    cases = {k: f for k, f in test_bags.EXTREMES.items() if "large" not in k}
    # Bound 0: -0.0 or 0.0, as in the tests of the CPU.
    return (
        lambda a: {f"{k} {n}": f(a[n], *a[2:]) for k, f in cases.items() for n in (0, 1)},
        (t, dirty, i, m),
        0.0,
    )


@group
def odd_numbers() -> Group:
    """NaN, infinities and -0.0 in tables and weights: a mask hides them, a product with 0 does not."""
    t = table(13, 6).at[2, 1].set(jnp.nan).at[3, 2].set(jnp.inf).at[4, 2].set(-jnp.inf)
    i, m, w = test_bags.padded()
    w = w.at[0, 0].set(jnp.nan).at[2, 1].set(jnp.inf).at[3, 0].set(0.0)

    def fn(a: Any) -> Any:
        t, i, m, w = a
        hidden = jnp.where(m[..., None], t[i], 0).sum(1)
        count = m.sum(1, keepdims=True)
        return {
            "hidden": hidden,
            "not hidden": (t[i] * m[..., None]).sum(1),
            "weighted": (t[i] * w[..., None]).sum(1),
            "einsum": jnp.einsum("blh,bl->bh", t[i], w),
            "mean": jnp.mean(t[i], axis=1, where=m[..., None]),
            "of nothing": (hidden / count, hidden / jnp.sqrt(count)),
            "rows": (t[i], -t[i], jnp.abs(t[i])),
        }

    return fn, (t.at[5].set(-0.0), i, m, w), SUM


@group
def halves() -> Group:
    def fn(a: Any) -> Any:
        tables, i, m, w = a
        return [
            (
                t[i].sum(1),
                jnp.where(m[..., None], t[i], 0).sum(1),
                (t[i] * w.astype(t.dtype)[..., None]).sum(1),
                jnp.einsum("bld,bl->bd", t[i], w),
                jax.ops.segment_sum(t[i.reshape(-1)], jnp.arange(35) // 5, 7),
                t[i].max(1),
            )
            for t in tables
        ]

    tables = [table(13, 6, k) for k in ("bfloat16", "float16")]
    return fn, (tables, *test_bags.padded()), 0.3


@group
def segments() -> Group:
    rng = np.random.default_rng(1)
    seg, n = test_bags.SEG, test_bags.TOTAL
    kinds = {
        "sorted": seg,
        "shuffled": rng.permutation(seg),
        "outside": rng.integers(0, 20, n),
        "negative": rng.integers(-9, 8, n),
        "one": np.zeros(n),
        "none": np.full(n, 100),
    }

    def fn(a: Any) -> Any:
        t, i, kinds = a
        return {
            f"{name} {kind}": getattr(jax.ops, f"segment_{kind}")(t[i], s, 8)
            for name, s in kinds.items()
            for kind in ("sum", "max", "min")
        }

    args = {k: jnp.asarray(v.astype(np.int32)) for k, v in kinds.items()}
    return fn, (table(test_bags.ROWS, 6), ids(n, test_bags.ROWS, odd=True), args), SUM


@group
def public_reports() -> Group:
    cases = test_public_reports.CASES
    args = {k: c[1] for k, c in cases.items()}
    return lambda a: {k: c[0](*a[k]) for k, c in cases.items()}, args, 1e-4


@pytest.mark.parametrize("name", GROUPS)
def test_group(name: str) -> None:
    fn, args, bound = GROUPS[name]()
    emulated(fn, args, bound, None if name == "public_reports" else 1)


@pytest.mark.parametrize("name", ["sums", "segments", "halves"])
def test_26_27_bits_do_not_depend_on_the_order_of_threads(name: str) -> None:
    """What XLA's flag for deterministic operations asks for: nothing is added in an order that threads decide."""
    fn, args, _ = GROUPS[name]()
    c = cuda_emulation.compiled(fn, args)
    first, *others = [
        jax.tree.map(np.asarray, c.run(functools.partial(emulate, options=Options(order=k))))
        for k in range(4)
    ]
    for other in others:
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            assert a.tobytes() == b.tobytes()


def test_a_low_precision_sum_of_ones() -> None:
    """Summed in float32: XLA's own sum of bfloat16 ends at 256."""
    args = jnp.ones((4, 3), jnp.bfloat16), ids(1000, 4), jnp.asarray(np.arange(1000) // 500)
    c = cuda_emulation.compiled(lambda a: jax.ops.segment_sum(a[0][a[1]], a[2], 2), args)
    for way in WAYS:
        got = c.run(functools.partial(emulate, options=way))
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.full((2, 3), 500))


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "float32"])
def test_64_bits(dtype: str) -> None:
    wide = [2**40, -(2**40), 2**63 - 1, -(2**63), 2**32, 2**32 + 3, -1, 0, 19, 20, -20, -21, 5]

    def fn(a: Any) -> Any:
        t, i, j, s = a
        u = i.astype(jnp.uint64)
        rows = [t[i], *(jnp.take(t, i, axis=0, mode=m) for m in (None, "wrap", "clip"))]
        rows += [t[u], t[u % 20], t[i % 20], t[jax.lax.div(i, jnp.int64(3)) % 20]]
        rows.append(t[u * jnp.uint64(0x9E3779B97F4A7C15) >> jnp.uint64(60)])
        flat = t[j.reshape(-1)]
        bags = t[j].sum(1), jax.ops.segment_sum(flat, s, 5)
        return rows, bags, (t[j].max(1), jax.ops.segment_min(flat, s, 5))

    with jax.enable_x64(True):
        segments = jnp.asarray(np.random.default_rng(0).integers(-2, 7, 24))
        args = table(20, 5, dtype), jnp.asarray(wide), ids((6, 4), 20, dtype=np.int64), segments
        bound = None if "int" in dtype else SUM if dtype == "float32" else 1e-12
        emulated(fn, args, (None, bound, None))


@pytest.mark.parametrize("strange", [False, True])
@pytest.mark.parametrize("cases", [LOOKUPS, BAGS], ids=["lookups", "bags"])
def test_idioms_of_columns(cases: Any, strange: bool) -> None:
    models = {name: made(name) for name in cases}
    args = {k: odd(a) if strange and k in ODD else a for k, (_, a) in models.items()}
    emulated(lambda a: {k: fn(*a[k]) for k, (fn, _) in models.items()}, args, 1e-4)


MODELS = [k for k in EXPECTED if k not in {*LOOKUPS, *BAGS} and EXPECTED[k].fused != 0]


@pytest.mark.parametrize("name", [k for k in MODELS if not ALL[k].needs])
def test_idioms_of_models(name: str) -> None:
    fn, args = made(name)
    emulated(lambda a: fn(*a), args, 2e-3, EXPECTED[name].calls)


@pytest.mark.parametrize("name", [k for k in MODELS if ALL[k].needs])
def test_idioms_of_libraries(name: str) -> None:
    fn, args = made(name)
    emulated(lambda a: fn(*a), args, EXPECTED[name].bound, EXPECTED[name].calls)
    if name in ODD:
        emulated(lambda a: fn(*a), odd(args), EXPECTED[name].bound and 1e-4, EXPECTED[name].calls)
