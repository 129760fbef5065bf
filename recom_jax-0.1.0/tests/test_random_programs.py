"""Random models of about 50 columns each: the optimized function equals plain JAX.

A column is made of a seed, a model of a list of seeds: hypothesis shrinks a failure to the columns that matter,
and the failure prints the model's source. A long run, which prints counts and the first failing seed::

    python -m tests.test_random_programs --columns 5000 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from helpers import EPS, VERIFY, assert_same

import recom_jax

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


# ---- arguments --------------------------------------------------------------------------------------------------


def table_of(spec: tuple[int, int, str, int]) -> np.ndarray[Any, Any]:
    rows, dim, dtype, seed = spec
    rng = np.random.default_rng([rows, dim, seed])
    if dtype == "bool":
        return rng.integers(0, 2, (rows, dim)).astype(bool)
    if "int" in dtype:
        return rng.integers(0, 100, (rows, dim)).astype(dtype)
    return np.asarray(jnp.asarray(rng.normal(size=(rows, dim)), dtype))


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
    s, size = f"b[{r.choice('SU') + str(n)!r}]", "b['like'].shape[0]"
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


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """A random model: `source` defines ``model(p, b)``."""

    source: str
    fn: Callable[[Any, Any], Any]
    params: dict[str, Any]
    columns: list[Column]
    layout: Callable[[Sequence[Any], Any], Any]


def build(seeds: Sequence[int], layout_seed: int) -> Model:
    made = [column(k, s) for k, s in enumerate(seeds)]
    columns = [c for c, _ in made]
    params = {"t_{}_{}_{}_{}".format(*spec): table_of(spec) for _, spec in made}
    join = _layout(random.Random(layout_seed), columns)
    lines = ["def join(c, b):", *[f"    {x}" for x in join], "", "def model(p, b):"]
    lines += [f"    {x}" for c in columns for x in c.lines]
    lines.append(f"    return join([{', '.join(f'c{k}' for k in range(len(columns)))}], b)")
    source = "\n".join(lines)
    scope: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np}
    exec(compile(source, "<random model>", "exec"), scope)
    return Model(source, scope["model"], params, columns, scope["join"])


def _layout(r: random.Random, columns: Sequence[Column]) -> list[str]:
    """How the columns meet: groups of neighbours, each joined in a way of its own."""
    lines, names, k = [], [], 0
    while k < len(columns):
        n = min(r.choice((1, 2, 5, 12, 40)), len(columns) - k)
        part = f"c[{k}:{k + n}]"
        equal = len({c.dim for c in columns[k : k + n]}) == 1
        lines.append(
            f"g{len(names)} = "
            + r.choice(
                (
                    f"jnp.concatenate({part}, -1)",
                    f"jnp.concatenate({part}, -1)",
                    f"list({part})",
                    f"jnp.concatenate([b['like'][:, None], *{part}], -1)",
                    f"jnp.concatenate([*{part}, c[{k}]], 1)",
                    f"jnp.concatenate([x.reshape(-1) for x in {part}])",
                    f"jnp.concatenate({part}, -1).T",
                    *(
                        (
                            f"jnp.stack({part}, 1)",
                            f"(lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2]))(jnp.stack({part}, 1))",
                            f"jnp.concatenate({part}, 0)",
                            f"jnp.stack({part}, 0)",
                        )
                        if equal
                        else ()
                    ),
                )
            )
        )
        names.append(f"g{len(names)}")
        k += n
    if r.random() < 0.4:
        flat = [
            g
            for g, line in zip(names, lines, strict=True)
            if line.endswith(", -1)") and "reshape" not in line
        ]
        if flat:
            lines.append(f"wide = jnp.concatenate([{', '.join(flat)}], -1)")
            names.append("wide")
    lines.append(f"return {{{', '.join(f'{n!r}: {n}' for n in names)}}}")
    return lines


def compare(seeds: Sequence[int], layout_seed: int, batch: int) -> tuple[Model, recom_jax.Report]:
    """Raises AssertionError, with the model's source, where the optimized model differs."""
    model = build(seeds, layout_seed)
    b = arguments(batch, layout_seed)
    try:
        want = jax.jit(model.fn)(model.params, b)
        optimized = recom_jax.optimize(model.fn, options=VERIFY)
        got = optimized(model.params, b)
        report = optimized.explain(model.params, b)
        bounds = [np.full((batch, c.dim), c.bound) for c in model.columns]
        assert_same(got, want, jax.tree.map(np.asarray, _joined(model, bounds, b)))
    except Exception as why:
        raise AssertionError(
            f"seeds={list(seeds)!r} layout_seed={layout_seed} batch={batch}\n{why}\n{model.source}"
        ) from why
    return model, report


def _joined(model: Model, bounds: Sequence[Any], b: Any) -> Any:
    return model.layout([jnp.asarray(x, jnp.float32) for x in bounds], b)


def check_fused(report: recom_jax.Report, columns: int, batch: int) -> None:
    left = [c for c in report.columns if c.status != "fused"]
    assert not left, report
    assert batch == 0 or report.num_columns >= columns, report
    assert report.num_custom_calls == (1 if report.num_columns else 0), report


SEEDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


@given(SEEDS, st.integers(0, 2**16), st.sampled_from(BATCHES))
@example(list(range(50)), 1, 5)
@settings(max_examples=settings.default.max_examples)
def test_random_models(seeds: list[int], layout_seed: int, batch: int) -> None:
    _, report = compare(seeds, layout_seed, batch)
    check_fused(report, len(seeds), batch)


def test_models_are_the_same_for_the_same_seed() -> None:
    assert build(range(30), 7).source == build(range(30), 7).source
    assert build(range(30), 7).source != build(range(1, 31), 7).source


def test_a_wrong_column_is_noticed() -> None:
    model = build(range(12), 3)
    b = arguments(4, 3)
    want = jax.jit(model.fn)(model.params, b)
    bounds = _joined(model, [np.full((4, c.dim), c.bound) for c in model.columns], b)
    broken = jax.tree.map(lambda x: x + 1e-2, want)
    try:
        assert_same(broken, want, jax.tree.map(np.asarray, bounds))
    except AssertionError:
        return
    raise AssertionError("a difference of 0.01 went unnoticed")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares many random models with plain JAX.")
    parser.add_argument("--columns", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-model", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    start, done, serial, failed = time.monotonic(), 0, 0, 0
    counts: collections.Counter[str] = collections.Counter()
    while done < options.columns and time.monotonic() - start < options.seconds:
        r = random.Random(options.seed * 1_000_003 + serial)
        seeds = [r.randrange(2**32) for _ in range(min(options.per_model, options.columns - done))]
        layout, batch = r.randrange(2**16), r.choice(BATCHES)
        try:
            model, report = compare(seeds, layout, batch)
        except AssertionError as why:
            failed += 1
            print(f"FAILED model {serial} of --seed {options.seed}: {str(why)[:1500]}")
            for s in seeds:
                try:
                    compare([s], layout, batch)
                except AssertionError as alone:
                    print(f"column seed {s} fails alone:\n{alone}")
                    if not options.keep_going:
                        break
            if not options.keep_going:
                return 1
        else:
            counts.update(c.kind for c in model.columns)
            counts.update(
                f"{c.status}: {c.reason}" if c.reason else c.status for c in report.columns
            )
        done += len(seeds)
        serial += 1
    print(
        f"{serial} models, {done} columns, {failed} failed, {time.monotonic() - start:.0f} s, seed {options.seed}"
    )
    for name, n in sorted(counts.items()):
        print(f"  {n:6d} {name}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
