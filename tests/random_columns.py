"""Random columns, and the arguments that they read. A column is made of a seed; `random_models` joins them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers import EPS

FIELDS, DENSE = 26, 6
LENGTHS = (1, 3, 4, 9)
TOTALS = (1, 12, 40)
BATCHES = (0, 1, 2, 3, 4, 8, 17, 33)
TABLE_DTYPES = ("float32",) * 6 + ("bfloat16", "float16", "int8", "uint8", "int32", "bool")
SHARED = (
    (7, 4, "float32", 0),
    (50, 16, "float32", 0),
    (1, 9, "float32", 0),
    (13, 33, "bfloat16", 0),
)
ODD_FLOATS = (0.0, -0.0, 1.0, 2.5, -1.5, 49.0, 50.0, 1e9, -1e9, np.inf, -np.inf, np.nan)


@dataclasses.dataclass(frozen=True)
class Column:
    """Source lines that end in a [B, dim] float32 value, and what it may differ by from another order of summation."""

    lines: tuple[str, ...]
    dim: int
    bound: float
    kind: str

    @property
    def extreme(self) -> bool:
        """Whether it is the minimum or maximum of a padded bag, with nothing behind it."""
        return self.kind == "bag" and self.bound == 0.0


# ---- arguments --------------------------------------------------------------------------------------------------


def table_of(spec: tuple[int, int, str, int]) -> np.ndarray[Any, Any]:
    rows, dim, dtype, seed = spec
    rng = np.random.default_rng([rows, dim, seed])
    if dtype == "bool":
        return rng.integers(0, 2, (rows, dim)).astype(bool)
    if "int" in dtype:
        return rng.integers(0, 100, (rows, dim)).astype(dtype)
    narrow = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    return rng.normal(size=(rows, dim)).astype(np.float32).astype(narrow)


def arguments(batch: int, seed: int) -> dict[str, Any]:
    """The features every model draws from; each array holds odd values among ordinary ones."""
    rng = np.random.default_rng([batch, seed])

    def numbers(*shape: int) -> np.ndarray[Any, Any]:
        x = rng.uniform(-5, 60, shape).astype(np.float32)
        odd = rng.random(shape) < 0.15
        return np.where(odd, rng.choice(np.array(ODD_FLOATS, np.float32), shape), x)

    def rows(*shape: int, dtype: Any = np.int32) -> np.ndarray[Any, Any]:
        x = rng.integers(0, 50, shape)
        info = np.iinfo(dtype)
        odd = rng.choice(
            np.array([max(-1, info.min), info.max, info.min, max(-50, info.min), 51]), shape
        )
        return np.where(rng.random(shape) < 0.15, odd, x).astype(dtype)

    out: dict[str, Any] = {
        "M": rows(batch, FIELDS),
        "X": numbers(batch, DENSE),
        "x0": numbers(batch),
        "x1": numbers(batch),
        "like": np.zeros(batch, np.float32),
        "flag": rng.random(batch) < 0.5,
        "i8": rows(batch, dtype=np.int8),
        "u8": rows(batch, dtype=np.uint8),
        "i16": rows(batch, dtype=np.int16),
        "u32": rows(batch, dtype=np.uint32),
        "i32": rows(batch),
    }
    for n in LENGTHS:
        out[f"J{n}"] = rows(batch, n)
        out[f"W{n}"] = rng.normal(size=(batch, n)).astype(np.float32)
        out[f"K{n}"] = np.arange(n)[None] < rng.integers(0, n + 1, (batch, 1))
    for n in TOTALS:
        out[f"F{n}"] = rows(n)
        out[f"V{n}"] = rng.normal(size=n).astype(np.float32)
        seg = rng.integers(0, max(batch, 1), n)
        out[f"S{n}"] = np.sort(seg).astype(np.int32)
        out[f"U{n}"] = rng.integers(-2, batch + 2, n).astype(np.int32)
    for (
        n
    ) in TOTALS:  # row splits, of all bags and of fewer: from 0 to n, or from later and to earlier
        for key, bags in (("P", batch), ("Q", batch // 2)):
            low, high = (0, n) if rng.random() < 0.7 else sorted(rng.integers(0, n + 1, 2))
            inner = rng.integers(low, high + 1, max(bags, 1) - 1)
            out[f"{key}{n}"] = np.sort([low, *inner, high]).astype(np.int32)
    return out


# ---- columns ------------------------------------------------------------------------------------------------------


def column(k: int, seed: int) -> tuple[Column, tuple[int, int, str, int]]:
    """Column `k` of a model, and its table."""
    r = random.Random(seed)
    spec = (
        r.choice(SHARED)
        if r.random() < 0.3
        else (
            r.choice((1, 2, 5, 11, 50)) if r.random() < 0.5 else r.randint(1, 50),
            r.choice((1, 2, 4, 8, 16, 32)) if r.random() < 0.6 else r.randint(1, 40),
            r.choice(TABLE_DTYPES),
            r.randint(0, 3),
        )
    )
    rows, dim, dtype, serial = spec
    name = f"p['t_{rows}_{dim}_{dtype}_{serial}']"
    if dtype in ("float32", "int8") and r.random() < 0.1:
        name = f"{name}.astype(jnp.{r.choice(('bfloat16', 'float32'))})"
    kind = r.choice(("lookup", "lookup", "bucket", "bag", "bag", "jagged", "one_hot"))
    lines: list[str] = []
    if kind == "one_hot" and name != f"p['t_{rows}_{dim}_float32_{serial}']":
        kind = "lookup"
    if kind == "bucket":
        lines.append(f"i{k} = {_bucket(r, _float_source(r), rows)}")
    elif kind in ("lookup", "one_hot"):
        lines.append(f"i{k} = {_ids(r, *_int_source(r), rows)}")
    if kind == "one_hot":
        return Column(
            (*lines, f"c{k} = jax.nn.one_hot(i{k}, {rows}) @ {name}"), dim, 0.0, kind
        ), spec
    if kind in ("lookup", "bucket"):
        lines.append(f"c{k} = {_post(r, _cast(_gather(r, name, f'i{k}', dtype)), k)}")
        return Column(tuple(lines), dim, 0.0, kind), spec
    size = 300.0 if "int" in dtype else 6.0  # an int32 fill value is larger
    finite = _cast(f"jnp.take({name}, i{k}, axis=0, mode='clip')")
    if kind == "bag":
        n = r.choice(LENGTHS)
        lines.append(f"i{k} = " + _ids(r, f"b['J{n}']", "int32", rows))
        text, exact = _bag(
            r, n, finite if dtype == "int32" else _cast(_gather(r, name, f"i{k}", dtype)), finite
        )
    else:
        n = r.choice(TOTALS)
        lines.append(f"i{k} = " + _ids(r, f"b['F{n}']", "int32", rows))
        text, exact = _jagged(
            r, n, finite if dtype == "int32" else _cast(_gather(r, name, f"i{k}", dtype))
        )
    lines.append(f"c{k} = {text}")
    # Weights are within 5, a bag within n: 2 * n * eps * sum |w * e| for both sides, and the post-arithmetic.
    return Column(tuple(lines), dim, 0.0 if exact else 4 * (n + 6) * EPS * n * 5 * size, kind), spec


def _cast(rows: str) -> str:
    return f"{rows}.astype(jnp.float32)"


def _int_source(r: random.Random) -> tuple[str, str]:
    choice = r.random()
    if choice < 0.5:
        return f"b['M'][:, {r.randrange(FIELDS)}]", "int32"
    if choice < 0.6:
        return f"b['J9'][:, {r.randrange(9)}]", "int32"
    if choice < 0.7:
        return f"{_float_source(r)}.astype(jnp.int32)", "int32"
    if choice < 0.75:
        return "b['M'].T[::-1][3]", "int32"
    name = r.choice(("i8", "u8", "i16", "u32", "i32"))
    return f"b[{name!r}]", {
        "i8": "int8",
        "u8": "uint8",
        "i16": "int16",
        "u32": "uint32",
        "i32": "int32",
    }[name]


def _float_source(r: random.Random) -> str:
    return r.choice(("b['x0']", "b['x1']", f"b['X'][:, {r.randrange(DENSE)}]"))


def _ids(r: random.Random, text: str, dtype: str, rows: int) -> str:
    if dtype != "int32" and r.random() < 0.5:
        text, dtype = f"({text}).astype(jnp.int32)", "int32"
    for _ in range(r.choice((0, 1, 1, 2, 3))):
        if dtype == "int32":
            text = r.choice(
                (
                    f"jnp.clip({text}, 0, {rows - 1})",
                    f"({text}) % {rows}",
                    f"({text}) // {r.randint(1, 9)}",
                    f"({text}) * {r.randint(-3, 9)}",
                    f"({text}) + {r.randint(-9, 9)}",
                    f"(({text}) ^ {r.randint(0, 99)})",
                    f"jnp.where(({text}) < {r.randint(0, 50)}, {text}, {r.randint(0, rows)})",
                    f"jnp.abs(jnp.maximum({text}, -99))",  # XLA itself crashes on rows of abs(INT_MIN)
                    f"jax.lax.rem({text}, jnp.int32({rows}))",
                    f"jnp.maximum({text}, {r.randint(-2, 3)})",
                    f"((({text}).astype(jnp.uint32) * jnp.uint32(2654435761)) >> {r.randint(1, 20)})"
                    f".astype(jnp.int32)",
                    f"(({text}) & {r.choice((7, 15, 63))})",
                    f"-({text})",
                    f"({text}) >> 1",
                )
            )
        elif dtype == "uint32":
            text = r.choice(
                (
                    f"({text}) % jnp.uint32({rows})",
                    f"({text}) * jnp.uint32(2246822519)",
                    f"({text}) ^ (({text}) >> {r.randint(1, 16)})",
                    f"jnp.minimum({text}, jnp.uint32({rows}))",
                )
            )
        else:
            break
        if len(text) > 400:
            break
    return text


def _bucket(r: random.Random, x: str, rows: int) -> str:
    count = max(rows - r.randint(0, 2), 1)
    shape = r.choice(("uniform", "irregular", "repeated", "descending"))
    if shape == "uniform":
        start, step = r.choice((0.0, -3.0, 0.5)), r.choice((1.0, 5.0, 0.25, 0.1))
        bins = [start + step * j for j in range(count)]
    else:
        bins = sorted(round(r.uniform(-5, 60), 2) for _ in range(count))
        if shape == "repeated":
            bins = sorted(r.choice(bins) for _ in bins)
        if shape == "descending":
            bins = bins[::-1]
    array = f"np.array({[float(v) for v in bins]}, np.float32)"
    right = r.choice((True, False))
    if shape == "descending" or r.random() < 0.5:
        return f"jnp.digitize({x}, {array}, right={right})"
    method = r.choice(("scan", "compare_all", "scan_unrolled"))
    return f"jnp.searchsorted(jnp.asarray({array}), {x}, side={'right' if right else 'left'!r}, method={method!r})"


def _gather(r: random.Random, t: str, i: str, dtype: str) -> str:
    fill = {"bool": "True"}.get(dtype, "3")
    return r.choice(
        (
            f"{t}[{i}]",
            f"jnp.take({t}, {i}, axis=0)",
            f"jnp.take({t}, {i}, axis=0, mode='clip')",
            f"jnp.take({t}, {i}, axis=0, mode='wrap')",
            f"{t}.at[{i}].get(mode='fill', fill_value=0)",
            f"jnp.take({t}, {i}, axis=0, mode='fill', fill_value={fill})"
            if "astype" not in t
            else f"{t}[{i}]",
            f"{t}.at[{i}].get(mode='fill', fill_value=0, wrap_negative_indices=False)",
        )
    )


def _post(r: random.Random, e: str, k: int) -> str:
    return r.choice(
        (
            e,
            e,
            e,
            f"{e} * 0.5",
            f"jnp.where(b['flag'][:, None], {e}, 0.0)",
            f"jnp.maximum({e}, 0.0)",
            f"-{e}",
            f"jnp.abs({e})",
            f"{e} * b['x1'][:, None]",
            f"{e} + 1.0",
            f"jnp.clip({e}, -1.0, 1.0)",
            f"jnp.where((i{k} == 0)[:, None], 0.0, {e})",
            f"{e}[:, None].reshape(-1, {e}.shape[1])",
        )
    )


def _bag(r: random.Random, n: int, e: str, finite: str) -> tuple[str, bool]:
    """A bag's text, and whether it is exact. XLA may turn ``x * mask`` into a select: no NaN there."""
    m, w = f"b['K{n}']", f"b['W{n}']"
    count = r.choice(
        (
            f"jnp.maximum({m}.sum(1, keepdims=True), 1)",
            f"jnp.maximum({m}.astype(jnp.float32).sum(1), 1.0)[:, None]",
            f"({m}.sum(1, keepdims=True) + 1e-6)",
            f"jnp.clip({m}.sum(1), 1, None)[:, None]",
        )
    )
    return r.choice(
        (
            (f"{e}.sum(1)", False),
            (f"{e}.mean(1)", False),
            (f"{e}.max(1)", True),
            (f"{e}.min(1)", True),
            (f"jnp.where({m}[..., None], {e}, 0).sum(1)", False),
            (f"({finite} * {m}[..., None]).sum(1)", False),
            (f"({e} * {w}[..., None]).sum(1)", False),
            (f"jnp.einsum('blh,bl->bh', {e}, {w})", False),
            (f"jnp.where({m}[..., None], {e}, -jnp.inf).max(1)", True),
            (f"({finite} * {m}[..., None]).sum(1) / {count}", False),
            (f"jnp.where({m}[..., None], {e}, 0.0).sum(1) / {count}", False),
            (f"({finite} * {m}[..., None]).sum(1) / jnp.sqrt({count})", False),
            (f"jnp.mean({e}, axis=1, where={m}[..., None])", False),
            (f"jnp.sum({finite} * jnp.where({m}, {w}, 0)[..., None], axis=1) * 0.5", False),
        )
    )


def _jagged(r: random.Random, n: int, e: str) -> tuple[str, bool]:
    splits, size = f"b[{r.choice('PQ') + str(n)!r}]", "b['like'].shape[0]"
    s = r.choice(
        (
            f"b['S{n}']",
            f"b['U{n}']",
            f"(jnp.searchsorted({splits}, jnp.arange({n}), side='right') - 1)",
            f"jnp.repeat(jnp.arange({splits}.shape[0] - 1), jnp.diff({splits}), total_repeat_length={n})",
        )
    )
    total = f"jax.ops.segment_sum({e}, {s}, {size})"
    return r.choice(
        (
            (total, False),
            (f"jax.ops.segment_sum({e} * b['V{n}'][:, None], {s}, {size})", False),
            (f"jax.ops.segment_max({e}, {s}, {size})", True),
            (f"jax.ops.segment_min({e}, {s}, {size})", True),
            (
                f"{total} / jnp.maximum(jax.ops.segment_sum(jnp.ones({n}, jnp.float32), {s}, {size}), 1.0)[:, None]",
                False,
            ),
        )
    )
