"""RAP's four preprocessing plans as tables, and a heavier one, with raw batches and the models that they feed.

    plan = rap_plans.plan(2)                        # counts of operators as published
    raw = plan.raw_batch(4096, seed=0)              # dense features with nulls, lists of ids, labels
    batch = plan.prep(pp.columns(raw))              # what plan.model().step trains on

Plans 0 and 1: 13 dense, 26 sparse and a bucketised feature, one operator after the other (Criteo Kaggle and Terabyte;
they differ in the model). Plans 2 and 3: twice and four times as many features; each has an operator of its own, four
times, with other parameters each time: four numbers a dense feature, four lists a sparse one, read from its table.
Plan 4 is not RAP's: plan 3, whose lists are hashed eight times over in front of each operator, so that preprocessing
takes several times as much of a GPU that has much more arithmetic than RAP's.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.click_models import Dlrm
from recom_jax import preprocess as pp
from recom_jax.preprocess.ingest import ladder

TIMES = 4
LISTS = 3  # ids that a model reads of a list
HASHES = 8  # of plan 4, in front of each operator
DENSE = {2: {"logit": 7, "boxcox": 9, "onehot": 10}, 3: {"logit": 16, "boxcox": 21, "onehot": 15}}
SPARSE = {
    2: {"sigrid_hash": 11, "clamp": 16, "firstx": 12, "ngram": 13},
    3: {"sigrid_hash": 25, "clamp": 28, "firstx": 25, "ngram": 26},
}
DENSE[4], SPARSE[4] = DENSE[3], SPARSE[3]


@dataclasses.dataclass(frozen=True)
class RapPlan:
    """A plan: its program, its features, and what its model looks like.

    Attributes:
      number: 0 to 4.
      program: raw columns to outputs, see `preprocess.program`.
      kinds: sparse feature -> the operator that it goes through (plans 2 and 3), which says what its raw ids are.
      rows: of each table; mean_length: of the raw lists.
    """

    number: int
    program: pp.Program
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    kinds: tuple[tuple[str, str], ...]
    rows: int
    mean_length: float

    @property
    def operators(self) -> int:
        return len(self.program.steps)

    # ---- raw batches ----------------------------------------------------------------------------------------

    def raw_batch(self, size: int, seed: int = 0) -> dict[str, Any]:
        """Raw columns of `size` rows, a tenth of the values null; the same for the same seed."""
        rng = np.random.default_rng([seed, self.number])
        raw: dict[str, Any] = {"label": (rng.random(size) < 0.25).astype(np.float32)}
        for name in self.dense:
            raw[name] = pp.Nullable(rng.random(size, np.float32) * 2, rng.random(size) > 0.1)
        kinds = dict(self.kinds)
        for name in self.sparse:
            lengths = rng.poisson(self.mean_length, size)
            splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            capacity = ladder(int(splits[-1]), 64)
            wide = self.number == 4 or kinds.get(name, "sigrid_hash") == "sigrid_hash"
            ids = rng.integers(0, 1 << 62 if wide else self.rows, capacity)
            raw[name] = pp.Jagged(pp.Nullable(ids, rng.random(capacity) > 0.1), splits)
        return raw

    def raw_batches(self, count: int, size: int, seed: int = 0) -> Iterator[dict[str, Any]]:
        return (self.raw_batch(size, seed + k) for k in range(count))

    # ---- what a step takes ----------------------------------------------------------------------------------

    def prep(self, raw: Any) -> dict[str, jax.Array]:
        """The program, and its outputs side by side: `{"label": [B], "dense": [B, D], "ids": [B, F, L]}`."""
        out = self.program({k: v for k, v in raw.items() if k != "label"})
        dense, ids = [], []
        for name in self.dense:
            parts = [out[name]] if name in out else [out[f"{name}.{k}"] for k in range(TIMES)]
            for part in parts:
                x = pp.fill_null(part, 0)
                dense.append(x.mean(1) if x.ndim == 2 else x)
        for name in self.sparse:
            parts = [out[name]] if name in out else [out[f"{name}.{k}"] for k in range(TIMES)]
            ids.append(jnp.concatenate([self.ids_of(part) for part in parts], axis=1))
        if "bucket" in out:
            bucket = jnp.asarray(out["bucket"], jnp.int32)[:, None]
            ids.append(jnp.pad(bucket, ((0, 0), (0, ids[0].shape[1] - 1)), constant_values=-1))
        return {"label": raw["label"], "dense": jnp.stack(dense, 1), "ids": jnp.stack(ids, 1)}

    def ids_of(self, lists: Any) -> jax.Array:
        """[B, LISTS] int32 ids, -1 where a list is shorter or an element null."""
        made: jax.Array = pp.pad(pp.cast(lists, np.int32), LISTS, -1)
        return made

    def model(self, rows: int | None = None, dim: int = 128, small: bool = False) -> Dlrm:
        """The plan's DLRM: RAP's layers, or (`small`) ones for tests and CPUs."""
        tables = len(self.sparse) + ("bucket" in dict(self.program.outputs))
        dense = len(self.dense) * (1 if self.number < 2 else TIMES)
        top = (1024, 1024, 512) if self.number == 0 else (1024, 1024, 512, 256)
        layers = ((64,), (64, 32)) if small else ((512, 256), top)
        return Dlrm((rows or self.rows,) * tables, dim, dense, *layers)


def plan(
    number: int, *, rows: int | None = None, mean_length: float | None = None, shrink: int = 1
) -> RapPlan:
    """RAP's plan 0, 1, 2 or 3, or plan 4.

    Args:
      rows: of each table (default: 100,000 for plans 0 and 1, the published 65,536 for 2 and 3).
      mean_length: of raw lists (default: 1 for plans 0 and 1, as in Criteo's data, else 4).
      shrink: 1 for RAP's numbers of features; k for a k-th of them (at least one of each kind), for tests.
    """
    if number not in (0, 1, 2, 3, 4):
        raise ValueError(f"RAP has plans 0 to 3, here is a plan 4, and no plan {number}")
    size = rows or (100_000 if number < 2 else 65_536)
    if number < 2:
        dense = tuple(f"I{k}" for k in range(1, 1 + 13 // shrink))
        sparse = tuple(f"C{k}" for k in range(1, 1 + 26 // shrink))
        table = criteo_table(dense, sparse, size)
        return RapPlan(number, pp.program(table), dense, sparse, (), size, mean_length or 1.0)
    dense_kinds = [k for k, n in DENSE[number].items() for _ in range(-(-n // shrink))]
    sparse_kinds = [k for k, n in SPARSE[number].items() for _ in range(-(-n // shrink))]
    dense = tuple(f"D{k}" for k in range(len(dense_kinds)))
    sparse = tuple(f"S{k}" for k in range(len(sparse_kinds)))
    table = {}
    for name, kind in zip((*dense, *sparse), (*dense_kinds, *sparse_kinds), strict=True):
        for k in range(TIMES):
            hashes = chain(k, size) if number == 4 and kind in SPARSE[4] else []
            table[f"{name}.{k}"] = [name, *hashes, parameters(kind, k, size)]
    kinds = tuple(zip(sparse, sparse_kinds, strict=True))
    return RapPlan(number, pp.program(table), dense, sparse, kinds, size, mean_length or 4.0)


def criteo_table(dense: tuple[str, ...], sparse: tuple[str, ...], rows: int) -> dict[str, Any]:
    """Plans 0 and 1: 39 fill_null, 26 sigrid_hash, 26 firstx, 13 logit, 1 bucketize."""
    fill = ("fill_null", {"value": 0})
    table: dict[str, Any] = {"filled": [dense[0], fill]}
    for name in dense:
        start = ["@filled"] if name == dense[0] else [name, fill]
        table[name] = [*start, ("logit", {"eps": 1e-6})]
    for k, name in enumerate(sparse):
        table[name] = [
            name,
            fill,
            ("sigrid_hash", {"salt": k, "max_value": rows}),
            ("firstx", LISTS),
        ]
    table["bucket"] = ["@filled", ("bucketize", {"borders": [0.5, 1.0, 1.5]})]
    return table


def chain(k: int, rows: int) -> list[tuple[str, dict[str, Any]]]:
    """The hashes in front of an operator of plan 4: the last one gives ids of a table."""
    sizes = [(1 << 31) - 1] * (HASHES - 1) + [rows]
    return [("sigrid_hash", {"salt": 100 * k + n, "max_value": m}) for n, m in enumerate(sizes)]


def parameters(kind: str, k: int, rows: int) -> tuple[str, dict[str, Any]]:
    """An operator of plans 2 to 4, for the k-th time."""
    made: dict[str, dict[str, Any]] = {
        "logit": {"eps": (1e-6, 1e-4, 1e-3, 1e-2)[k]},
        "boxcox": {"lmbda": (0.0, 0.25, 0.5, 2.0)[k]},
        "onehot": {"low": 0.0, "high": 2.0, "n": 4 << k},
        "sigrid_hash": {"salt": k, "max_value": rows},
        "clamp": {"lo": k, "hi": rows - 1 - k},
        "firstx": {"n": 1 + k},
        "ngram": {"n": 1 + k},
    }
    return kind, made[kind]
