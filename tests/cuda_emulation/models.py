"""Small models, grouped: the columns of a group are one program, so that one compilation tests all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import Bag, ids, table

WIDTHS = (1, 3, 4, 8, 12, 16, 32, 40, 128, 160)
HALVES = (jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Case:
    """One column.

    Attributes:
      n: longest bag that a float sum adds up; None if the result is exact.
      absolute: arguments to be made positive for the size of the sum.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    n: int | None = None
    absolute: tuple[int, ...] = (0,)

    def tolerance(self) -> Any:
        return None if self.n is None else Bag(self.n, self.absolute).tolerance(self.fn, self.args)


Group = dict[str, Case]
GROUPS: dict[str, Callable[[int], Group]] = {}


def group(make: Callable[[int], Group]) -> Callable[[int], Group]:
    GROUPS[make.__name__] = make
    return make


def numbers(shape: Any, seed: int, low: float = -5, high: float = 60) -> Any:
    rng = np.random.default_rng([seed, *np.atleast_1d(shape)])
    x = rng.uniform(low, high, shape).astype(np.float32)
    odd = rng.choice(
        np.array([0.0, -0.0, 10.0, 1e9, -1e9, np.inf, -np.inf, np.nan], np.float32), shape
    )
    return jnp.asarray(np.where(rng.random(shape) < 0.2, odd, x))


def mask(b: int, n: int, seed: int) -> Any:
    rng = np.random.default_rng([seed, b, n])
    return jnp.asarray(np.arange(n)[None] < rng.integers(0, n + 1, (b, 1)))


# ---- lookups -----------------------------------------------------------------------------------------------------


@group
def widths(b: int) -> Group:
    return {
        f"d{d}": Case(lambda t, i: t[i], (table(50, d), ids(b, 50, d, odd=True))) for d in WIDTHS
    }


@group
def dtypes(b: int) -> Group:
    kinds = (jnp.bool_, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32)
    out = {}
    for k, dtype in enumerate((*kinds, *HALVES)):
        for d in (1, 4, 8, 13):
            i = ids(b, 20, 40 + k, odd=True)
            out[f"{np.dtype(dtype)}_{d}"] = Case(lambda t, i: t[i], (table(20, d, dtype), i))
    return out


@group
def conversions(b: int) -> Group:
    out = {}
    i = ids(b, 20, 60, odd=True)
    for dtype in (jnp.bool_, jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, *HALVES):
        name = np.dtype(dtype).name
        out[f"from_{name}"] = Case(
            lambda t, i: t.at[i].get(mode="clip").astype(jnp.float32) * 0.5,
            (table(20, 8, dtype), i),
        )
        out[f"to_{name}"] = Case(
            lambda t, i, dtype=dtype: t.at[i].get(mode="fill", fill_value=3).astype(dtype),
            (table(20, 8), i),
        )
    return out


@group
def modes(b: int) -> Group:
    t, out = table(13, 8), {}
    for dtype in (np.int8, np.uint8, np.int16, np.uint32, np.int32):
        i = ids(b, 13, 7, dtype, odd=True)
        name = np.dtype(dtype).name
        for mode in ("clip", "fill", "wrap"):
            out[f"{mode}_{name}"] = Case(
                lambda t, i, mode=mode: jnp.take(t, i, axis=0, mode=mode), (t, i)
            )
        out[f"get_{name}"] = Case(
            lambda t, i: t.at[i].get(mode="fill", fill_value=7, wrap_negative_indices=False), (t, i)
        )
    out["one_row"] = Case(lambda t, i: t[i], (table(1, 5), ids(b, 1, 3, odd=True)))
    return out


@group
def hashes(b: int) -> Group:
    i, u = ids(b, 1 << 30, 1, odd=True), ids(b, 1 << 31, 2, np.uint32, odd=True)
    t = table(101, 16)
    return {
        "rem": Case(lambda t, i: t[i % 101], (t, i)),
        "lax_rem": Case(lambda t, i: t[jax.lax.rem(i, jnp.int32(101))], (t, i)),
        "unsigned": Case(lambda t, u: t[u % jnp.uint32(101)], (t, u)),
        "mix": Case(
            lambda t, u: t[((u ^ (u >> 16)) * jnp.uint32(2246822519) >> 3) % jnp.uint32(101)],
            (t, u),
        ),
        "mix_signed": Case(lambda t, i: t[((i * 31 + 7) ^ (i >> 5)) % 101], (t, i)),
        "division": Case(lambda t, i: t[jnp.clip(i // 7, 0, 100)], (t, i)),
        "of_floats": Case(
            lambda t, x: t[jnp.clip(jnp.floor(x), 0, 100).astype(jnp.int32)], (t, numbers(b, 5))
        ),
        "cast": Case(lambda t, x: t[x.astype(jnp.int32) % 101], (t, numbers(b, 6))),
        "bits": Case(
            lambda t, x: t[jax.lax.bitcast_convert_type(x, jnp.uint32) % jnp.uint32(101)],
            (t, jnp.nan_to_num(numbers(b, 7))),
        ),
        "popcount": Case(
            lambda t, u: t[
                jax.lax.population_count(u).astype(jnp.int32) + jax.lax.clz(u).astype(jnp.int32)
            ],
            (t, u),
        ),
    }


@group
def digitize(b: int) -> Group:
    t, x = table(32, 4), numbers(b, 11)
    rng = np.random.default_rng(3)
    ascending = np.sort(rng.uniform(-5, 60, 31)).astype(np.float32)
    out = {}
    for name, bins in {
        "irregular": ascending,
        "uniform": np.arange(0, 62, 2, dtype=np.float32),
        "tenths": (np.arange(31) * 0.1).astype(np.float32),
        "repeated": np.sort(np.repeat(ascending[:8], 4))[:31],
        "descending": ascending[::-1].copy(),
        "one": ascending[:1],
    }.items():
        for right in (False, True):
            out[f"{name}_{right}"] = Case(
                lambda t, x, bins=bins, right=right: t[jnp.digitize(x, bins, right=right)], (t, x)
            )
    for method in ("scan", "compare_all", "scan_unrolled"):
        for side in ("left", "right"):
            out[f"{method}_{side}"] = Case(
                lambda t, x, v, method=method, side=side: t[
                    jnp.searchsorted(v, x, side=side, method=method)
                ],
                (t, x, jnp.asarray(rng.permutation(ascending))),
            )
    out["integers"] = Case(
        lambda t, i: t[jnp.digitize(i, np.arange(0, 60, 2, dtype=np.int32))],
        (t, ids(b, 60, 5, odd=True)),
    )
    return out


@group
def after(b: int) -> Group:
    t, i, x = table(30, 12), ids(b, 30, 21, odd=True), numbers(b, 22)
    f = jnp.asarray(np.random.default_rng(5).random(b) < 0.5)
    return {
        "where": Case(lambda t, i, f: jnp.where(f[:, None], t[i], 0.0), (t, i, f)),
        "scale": Case(lambda t, i, x: t[i] * x[:, None], (t, i, x)),
        # XLA contracts these on the CPU.
        "affine": Case(lambda t, i: t[i] * 0.3 + 1.7, (t, i), 2),
        "clip": Case(lambda t, i: jnp.clip(t[i], -1.0, 1.0), (t, i)),
        "abs": Case(lambda t, i: jnp.sqrt(jnp.abs(t[i])) / 3.0, (t, i)),
        "round": Case(lambda t, i: jnp.round(t[i]) + jnp.floor(t[i]) - jnp.sign(t[i]), (t, i)),
        "two_tables": Case(
            lambda t, u, i: t[i] + u[i] * t[i], (t, table(30, 12, seed=1), i), 2, (0, 1)
        ),
        "dense_row": Case(lambda t, i, y: t[i] * y, (t, i, numbers((b, 12), 23))),
        "masked": Case(lambda t, i: jnp.where((i >= 0)[:, None], t[i], -1.0), (t, i)),
        "max": Case(lambda t, i, x: jnp.maximum(t[i], x[:, None]), (t, i, x)),
    }


@group
def layouts(b: int) -> Group:
    i, j = ids(b, 9, 31), ids((b, 3, 2), 9, 32, odd=True)
    t4, t8, t3 = table(9, 4), table(9, 8), table(9, 3)
    dense = numbers((b, 5), 33)
    many = ids((b, 6), 40, 34, odd=True)
    big = table(40, 8)
    return {
        "outer_dims": Case(lambda t, j: t[j], (t8, j)),
        "outer_odd": Case(lambda t, j: t[j], (t3, j)),
        "transposed": Case(lambda t, i: t[i].T, (t8, i)),
        "unaligned": Case(
            lambda a, c, d, x, i: jnp.concatenate([a[i], c[i], x, d[i], a[i]], 1),
            (t3, t8, t4, dense, i),
        ),
        "aligned": Case(
            lambda a, d, i: jnp.concatenate([a[i], d[i], d[i * 2], a[i + 1]], 1), (t8, t4, i)
        ),
        "fields": Case(lambda t, m: t[m], (big, many)),
        "fields_flat": Case(
            lambda t, m: jnp.concatenate([t[m[:, k]] for k in range(6)], -1), (big, many)
        ),
        "stacked": Case(lambda a, c, i: jnp.stack([a[i], c[i]], 1), (t8, table(9, 8, seed=2), i)),
        "tables_3d": Case(
            lambda t, m: jnp.stack([t[k][m[:, k]] for k in range(6)], 1),
            (jnp.stack([table(40, 8, seed=k) for k in range(6)]), many),
        ),
        "half_concat": Case(
            lambda a, c, i: jnp.concatenate([a[i], c[i]], 1),
            (table(9, 8, jnp.bfloat16), table(9, 4, jnp.bfloat16), i),
        ),
        "numbers": Case(lambda t, i: t[i], (table(50, 1)[:, 0], i)),
    }


# ---- bags --------------------------------------------------------------------------------------------------------


def _pooled(t: Any, i: Any) -> dict[str, tuple[Callable[..., Any], bool]]:
    return {
        "sum": (lambda e: e.sum(1), False),
        "mean": (lambda e: e.mean(1), False),
        "max": (lambda e: e.max(1), True),
        "min": (lambda e: e.min(1), True),
    }


@group
def bag_widths(b: int) -> Group:
    out = {}
    for d in WIDTHS:
        i = ids((b, 5), 50, 100 + d, odd=True)
        t = table(50, d)
        out[f"sum_{d}"] = Case(lambda t, i: t.at[i].get(mode="clip").sum(1), (t, i), 5)
        out[f"max_{d}"] = Case(lambda t, i: t.at[i].get(mode="clip").max(1), (t, i))
    return out


@group
def bag_kinds(b: int) -> Group:
    out = {}
    t = table(50, 16)
    for n in (1, 4, 9, 39):
        i = ids((b, n), 50, 200 + n, odd=True)
        m, w = mask(b, n, n), jnp.asarray(np.random.default_rng(n).normal(size=(b, n)), jnp.float32)

        def rows(t: Any, i: Any) -> Any:
            return t.at[i].get(mode="clip")

        out |= {
            f"mean_{n}": Case(lambda t, i: rows(t, i).mean(1), (t, i), n),
            f"min_{n}": Case(lambda t, i: t[i].min(1), (t, i)),
            f"masked_sum_{n}": Case(
                lambda t, i, m: jnp.where(m[..., None], rows(t, i), 0).sum(1), (t, i, m), n
            ),
            f"masked_mean_{n}": Case(
                lambda t, i, m: (
                    jnp.where(m[..., None], rows(t, i), 0).sum(1)
                    / jnp.maximum(m.sum(1, keepdims=True), 1)
                ),
                (t, i, m),
                n,
            ),
            f"masked_max_{n}": Case(
                lambda t, i, m: jnp.where(m[..., None], rows(t, i), -jnp.inf).max(1), (t, i, m)
            ),
            f"sqrtn_{n}": Case(
                lambda t, i, m: (
                    jnp.where(m[..., None], rows(t, i), 0).sum(1)
                    / jnp.sqrt(jnp.maximum(m.sum(1), 1).astype(jnp.float32))[:, None]
                ),
                (t, i, m),
                n,
            ),
            f"weighted_{n}": Case(
                lambda t, i, w: (rows(t, i) * w[..., None]).sum(1), (t, i, w), n, (0, 2)
            ),
            f"einsum_{n}": Case(
                lambda t, i, w: jnp.einsum("blh,bl->bh", rows(t, i), w), (t, i, w), n, (0, 2)
            ),
            f"padding_{n}": Case(
                lambda t, i: jnp.where((i >= 0)[..., None], rows(t, jnp.maximum(i, 0) % 50), 0).sum(
                    1
                ),
                (t, i),
                n,
            ),
        }
    return out


@group
def bag_dtypes(b: int) -> Group:
    out = {}
    i = ids((b, 6), 20, 300, odd=True)
    m = mask(b, 6, 301)
    for dtype in (*HALVES, jnp.int8, jnp.int32):
        name = np.dtype(dtype).name
        t = table(20, 8, dtype)
        if dtype == jnp.int8 or dtype in HALVES:
            out[f"sum_{name}"] = Case(
                lambda t, i: t.at[i].get(mode="clip").astype(jnp.float32).sum(1), (t, i), 6
            )
        out[f"max_{name}"] = Case(lambda t, i: t.at[i].get(mode="clip").max(1), (t, i))
    t = table(20, 8, jnp.int32)
    out["sum_int"] = Case(lambda t, i: t.at[i].get(mode="clip").sum(1), (t, i))
    out["masked_int"] = Case(
        lambda t, i, m: jnp.where(m[..., None], t.at[i].get(mode="clip"), 0).sum(1), (t, i, m)
    )
    u = table(20, 3, jnp.float32)
    out["nested"] = Case(
        lambda t, j: t.at[j].get(mode="clip").sum((1, 2)),
        (u, ids((b, 3, 4), 20, 303, odd=True)),
        12,
    )
    out["outer"] = Case(
        lambda t, j: t.at[j].get(mode="clip").sum(2), (u, ids((b, 3, 4), 20, 304, odd=True)), 4
    )
    # A row that doesn't depend on the position is the bag's own, and each lane has a part of it.
    one = {"uint8": table(1, 4, jnp.uint8), "float32": table(1, 22)}
    out["one_row_max"] = Case(
        lambda t, i: t[jnp.clip(i, 0, 0)].astype(jnp.float32).max(1), (one["uint8"], i)
    )
    out["one_row_mean"] = Case(
        lambda t, i, m: jnp.mean(
            t.astype(jnp.bfloat16).at[jnp.clip(i, 0, 0)].get(mode="clip").astype(jnp.float32),
            axis=1,
            where=m[..., None],
        ),
        (one["float32"], i, m.at[:, 0].set(True)),
        6,
    )
    out["bags_of_none"] = Case(lambda t, j: t[j].sum(1), (u, ids((b, 0), 20)), 1)
    return out


@group
def jagged(b: int) -> Group:
    """Segment ids of every sort: ascending, in any order, negative, too large; bags that nothing falls into."""
    out = {}
    size = jnp.zeros((b,), jnp.float32)
    rng = np.random.default_rng(17)
    t = table(30, 8)
    for total in (1, 40, 410):
        i = ids((total,), 30, 400 + total, odd=True)
        w = jnp.asarray(rng.normal(size=total), jnp.float32)
        segments = {
            "sorted": np.sort(rng.integers(0, max(b, 1), total)),
            "unsorted": rng.integers(-3, b + 3, total),
            "one_bag": np.full(total, max(b // 2, 0)),
            "outside": np.where(np.arange(total) % 2, -1, b),
        }
        for name, s in segments.items():
            s = jnp.asarray(s, jnp.int32)

            def rows(t: Any, i: Any) -> Any:
                return t.at[i].get(mode="clip")

            out[f"sum_{name}_{total}"] = Case(
                lambda t, i, s, z: jax.ops.segment_sum(rows(t, i), s, z.shape[0]),
                (t, i, s, size),
                total,
            )
            if total == 40:
                out[f"weighted_{name}"] = Case(
                    lambda t, i, s, z, w: jax.ops.segment_sum(
                        rows(t, i) * w[:, None], s, z.shape[0]
                    ),
                    (t, i, s, size, w),
                    total,
                    (0, 4),
                )
                out[f"filled_{name}"] = Case(
                    lambda t, i, s, z: jax.ops.segment_sum(
                        t.at[i].get(mode="fill", fill_value=2.0), s, z.shape[0]
                    ),
                    (t, i, s, size),
                    total,
                )
                out[f"max_{name}"] = Case(
                    lambda t, i, s, z: jax.ops.segment_max(rows(t, i), s, z.shape[0]),
                    (t, i, s, size),
                )
                out[f"min_{name}"] = Case(
                    lambda t, i, s, z: jax.ops.segment_min(t[i], s, z.shape[0]), (t, i, s, size)
                )
                out[f"mean_{name}"] = Case(
                    lambda t, i, s, z: (
                        jax.ops.segment_sum(rows(t, i), s, z.shape[0])
                        / jnp.maximum(
                            jax.ops.segment_sum(jnp.ones(s.shape[0], jnp.float32), s, z.shape[0]), 1
                        )[:, None]
                    ),
                    (t, i, s, size),
                    total,
                )
    return out


@group
def repeats(b: int) -> Group:
    """Segment ids by `jnp.repeat` of row splits and of lengths, few of which are as they should be."""
    rng = np.random.default_rng(29)
    size = jnp.zeros((b,), jnp.float32)
    out = {}
    for total, d in ((41, 8), (101, 33)):
        t, i = table(30, d), ids((total,), 30, 600 + total, odd=True)
        ascending = np.sort(rng.integers(0, total + 1, b + 1))
        ascending[0], ascending[-1] = 0, total
        lengths = np.diff(ascending)
        for name, n in {
            "splits": ascending,
            "splits_from_five": ascending + 5,
            "splits_short": ascending // 2,
            "splits_long": ascending * 3,
            "splits_unsorted": rng.permutation(ascending),
            "splits_wrap": ascending * (2**31 // total),
            "splits_unsigned": ascending.astype(np.uint32),
            "lengths": lengths,
            "lengths_short": lengths // 2,
            "lengths_long": lengths * 3 + 1,
            "lengths_negative": rng.integers(-total, total, b),
            "lengths_wrap": rng.integers(0, 2**31 - 1, b),
            "lengths_unsigned": lengths.astype(np.uint32),
        }.items():
            n = jnp.asarray(n if n.dtype == np.uint32 else n.astype(np.int32))

            def model(t: Any, i: Any, n: Any, z: Any, name: str = name) -> Any:
                seg = jnp.repeat(
                    jnp.arange(z.shape[0]),
                    jnp.diff(n) if name.startswith("splits") else n,
                    total_repeat_length=i.shape[0],
                )
                return jax.ops.segment_sum(t.at[i].get(mode="clip"), seg, z.shape[0])

            out[f"{name}_{total}"] = Case(model, (t, i, n, size), total)
    return out


@group
def splits(b: int) -> Group:
    """Row splits: segment ids are `searchsorted(splits, position, side="right") - 1`."""
    rng = np.random.default_rng(23)
    size = jnp.zeros((b,), jnp.float32)
    out = {}
    for total, d in ((40, 8), (290, 33)):
        t, i = table(30, d), ids((total,), 30, 500 + total, odd=True)
        ascending = np.sort(rng.integers(0, total + 1, b))
        if b:
            ascending[0] = 0
        for name, s in {
            "ascending": ascending,
            "late": np.minimum(ascending + 3, total),
            "short": ascending // 2,
            "unsorted": rng.permutation(ascending),
        }.items():
            out[f"{name}_{total}"] = Case(
                lambda t, i, s, z: jax.ops.segment_sum(
                    t.at[i].get(mode="clip"),
                    jnp.searchsorted(s, jnp.arange(i.shape[0]), side="right") - 1,
                    z.shape[0],
                ),
                (t, i, jnp.asarray(s, jnp.int32), size),
                total,
            )
    return out


@group
def one_hot(b: int) -> Group:
    i, bag = ids(b, 11, 600, odd=True), ids((b, 4), 11, 601, odd=True)
    clean, dirty = table(11, 6), table(11, 6)
    dirty = dirty.at[3, 2].set(jnp.nan).at[7, 0].set(jnp.inf).at[1].set(-0.0)
    return {
        "clean": Case(lambda t, i: jax.nn.one_hot(i, 11) @ t, (clean, i)),
        "dirty": Case(lambda t, i: jax.nn.one_hot(i, 11) @ t, (dirty, i)),
        "bag": Case(lambda t, i: (jax.nn.one_hot(i, 11) @ t).sum(1), (clean, bag), 4),
        "bag_dirty": Case(lambda t, i: jax.nn.one_hot(i, 11).sum(1) @ t, (dirty, bag), 4),
    }


def as_function(cases: Group) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The group as one function of one argument."""
    functions = {name: c.fn for name, c in cases.items()}

    def fn(args: dict[str, Any]) -> dict[str, Any]:
        return {name: f(*args[name]) for name, f in functions.items()}

    return fn, {name: c.args for name, c in cases.items()}
