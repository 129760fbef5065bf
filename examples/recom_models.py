"""The models that the RECom paper (ASPLOS 2023) measures, written in plain JAX as a user writes them.

`model_e()` and `model_f()` are click-rate models with about 1,000 and 1,200 embedding columns of five
kinds; `microbenchmark(n)` is n bucketize columns and nothing else. Each is a `RecomModel`:

    model = model_e(large_rows=2**16, scale=0.05)      # a small one; model_e() is the paper's
    params = model.init(seed=0)
    batch = model.batch(256, seed=0)                   # one numpy array per column
    wide = model.columns(params, batch)                # [256, total]: embeddings and dense side by side
    click = model.forward(params, batch)               # [256]: probabilities

The kinds of column, and what the batch holds for each:

| kind | batch entry | id | table |
| --- | --- | --- | --- |
| `bucket` | float32 [B] | `jnp.digitize` with 100 constant boundaries | 101 x 8 |
| `hash` | int32 [B] | multiplicative hash in uint32, then `% 100` | 100 x 8 |
| `string` | int32 [B], fingerprints | `% 10_000` | 10,000 x 8 |
| `sparse` | int32 [B, 10], fingerprints, -1 pads | `% 10_000`, masked sum | 10,000 x 8 |
| `large` | int32 [B, 10], fingerprints, -1 pads | `% large_rows`, masked sum | large_rows x 32 |

JAX has no strings, so they are hashed to fingerprints on the host (`fingerprint`). RECom pools the first
three kinds with a mean over exactly one id, which is the looked-up row itself.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from examples.mlp import apply_mlp, init_mlp

Batch: TypeAlias = Mapping[str, Any]
"""Column name -> array, as numpy or on a device."""

DENSE = 32  # continuous features that go through the bottom MLP
TOKENS = 10  # slots of a multi-valued column
KINDS = ("bucket", "hash", "string", "sparse", "large")


def fingerprint(strings: Iterable[str]) -> np.ndarray:
    """Strings -> int32 [N], never negative: the low 31 bits of a 64-bit hash."""
    digests = b"".join(hashlib.blake2b(s.encode(), digest_size=8).digest() for s in strings)
    return (np.frombuffer(digests, "<i8") & 0x7FFFFFFF).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Column:
    """One embedding column; `boundaries` (float32, rising) belongs to the kind `bucket` alone."""

    name: str
    kind: str
    rows: int
    dim: int = 8
    boundaries: np.ndarray = dataclasses.field(
        default_factory=lambda: np.empty(0, np.float32), compare=False
    )


def column_input(kind: str, rng: np.random.Generator, size: int) -> np.ndarray:
    """Random raw values of one column: [size], or [size, TOKENS] for the multi-valued kinds."""
    if kind == "bucket":
        return rng.uniform(-10, 520, size).astype(np.float32)
    if kind == "hash":
        return rng.integers(0, 1_000_000, size, dtype=np.int32)
    # Fingerprints of many distinct strings look like uniform 31-bit numbers, so they are drawn as such.
    if kind == "string":
        return rng.integers(0, 2**31 - 1, size, dtype=np.int32)
    tokens = rng.integers(0, 2**31 - 1, (size, TOKENS), dtype=np.int32)
    lengths = rng.integers(1, TOKENS + 1, (size, 1))
    return np.where(np.arange(TOKENS) < lengths, tokens, np.int32(-1))


def int_hash(x: jax.Array, rows: int) -> jax.Array:
    """int32 [...] -> int32 ids in [0, rows): a 32-bit multiplicative hash that wraps around."""
    mixed = x.astype(jnp.uint32) * jnp.uint32(2654435769)
    ids: jax.Array = ((mixed ^ (mixed >> 16)) % jnp.uint32(rows)).astype(jnp.int32)
    return ids


def lookup(column: Column, table: jax.Array, x: jax.Array) -> jax.Array:
    """One column as a user writes it: table [rows, dim], x [B] or [B, TOKENS] -> [B, dim]."""
    if column.kind == "bucket":
        return jnp.take(table, jnp.digitize(x, column.boundaries), axis=0)
    if column.kind == "hash":
        return jnp.take(table, int_hash(x, column.rows), axis=0)
    if column.kind == "string":
        return jnp.take(table, x % column.rows, axis=0)
    mask = x >= 0
    ids = jnp.where(mask, x % column.rows, 0)
    return jnp.sum(jnp.take(table, ids, axis=0) * mask[..., None], axis=1)


def lookup_tuned(column: Column, table: jax.Array, x: jax.Array) -> jax.Array:
    """`lookup` as somebody writes it who knows what is slow in XLA: no search loop, no bounds checks."""
    if column.kind == "bucket":
        ids = jnp.searchsorted(
            jnp.asarray(column.boundaries), x, side="right", method="compare_all"
        )
    elif column.kind == "hash":
        ids = int_hash(x, column.rows)
    else:
        ids = jnp.where(x >= 0, x % column.rows, 0)
    rows = table.at[ids].get(mode="promise_in_bounds")
    if rows.ndim == 2:
        return rows
    return jnp.sum(jnp.where((x >= 0)[..., None], rows, 0), axis=1)


@dataclasses.dataclass(frozen=True)
class RecomModel:
    """A click-rate model: its columns, their order in the output, and the two MLPs around them.

    Parameters are `{"tables": {kind: [table, ...]}, "bottom": Mlp, "top": Mlp}`. A model without `top`
    has columns only, and no dense features.
    """

    name: str
    specs: tuple[Column, ...]
    bottom: tuple[int, ...] = (32,)
    top: tuple[int, ...] = (1024, 1024, 128)

    @property
    def has_dense(self) -> bool:
        return bool(self.top)

    @property
    def width(self) -> int:
        """Columns of the output of `columns`."""
        return sum(c.dim for c in self.specs) + DENSE * self.has_dense

    def by_kind(self) -> dict[str, list[Column]]:
        """Kind -> its columns in output order, for the kinds that the model has."""
        groups = {kind: [c for c in self.specs if c.kind == kind] for kind in KINDS}
        return {kind: columns for kind, columns in groups.items() if columns}

    def init(self, seed: int = 0) -> dict[str, Any]:
        """Random parameters, on the default device."""
        rng = np.random.default_rng(seed)
        tables = {
            kind: [
                jnp.asarray(rng.standard_normal((c.rows, c.dim), dtype=np.float32)) for c in columns
            ]
            for kind, columns in self.by_kind().items()
        }
        if not self.has_dense:
            return {"tables": tables, "bottom": [], "top": []}
        bottom = init_mlp(rng, DENSE, self.bottom)
        joined = sum(c.dim for c in self.specs) + self.bottom[-1]
        return {"tables": tables, "bottom": bottom, "top": init_mlp(rng, joined, (*self.top, 1))}

    def batch(self, size: int, seed: int = 0) -> dict[str, np.ndarray]:
        """`size` random samples: one numpy array per column, and `dense` float32 [size, DENSE]."""
        rng = np.random.default_rng([seed, size])
        batch = {c.name: column_input(c.kind, rng, size) for c in self.specs}
        if self.has_dense:
            batch["dense"] = rng.standard_normal((size, DENSE), dtype=np.float32)
        return batch

    def embeddings(self, params: Mapping[str, Any], batch: Batch) -> list[jax.Array]:
        """Each column's [B, dim], in output order."""
        return [
            lookup(column, table, jnp.asarray(batch[column.name]))
            for kind, columns in self.by_kind().items()
            for column, table in zip(columns, params["tables"][kind], strict=True)
        ]

    def columns(self, params: Mapping[str, Any], batch: Batch) -> jax.Array:
        """[B, width]: every embedding, then the dense features. No MLP."""
        return jnp.concatenate(self.embeddings(params, batch) + self._dense(batch), axis=1)

    def columns_tuned(self, params: Mapping[str, Any], batch: Batch) -> jax.Array:
        """`columns`, each column tuned for XLA by hand. A peer in benchmarks; ids are trusted."""
        pieces = [
            lookup_tuned(column, table, jnp.asarray(batch[column.name]))
            for kind, columns in self.by_kind().items()
            for column, table in zip(columns, params["tables"][kind], strict=True)
        ]
        return jnp.concatenate(pieces + self._dense(batch), axis=1)

    def columns_hand_batched(
        self, stacked_params: Mapping[str, Any], stacked_batch: Batch
    ) -> jax.Array:
        """`columns` from `stack_params` and `stack_batch`: what an expert writes when columns are equal.

        The second peer in benchmarks. Stacking happens outside, so its price is not in here.
        """
        pieces = []
        for kind, columns in self.by_kind().items():
            one = columns[0]
            stacked = jax.vmap(lambda table, x, one=one: lookup_tuned(one, table, x))(
                stacked_params[kind], jnp.asarray(stacked_batch[kind])
            )  # [N, B, dim]
            number, size, dim = stacked.shape
            pieces.append(jnp.swapaxes(stacked, 0, 1).reshape(size, number * dim))
        return jnp.concatenate(pieces + self._dense(stacked_batch), axis=1)

    def stack_params(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Kind -> its tables as one [N, rows, dim]. ValueError where columns of a kind differ."""
        for kind, columns in self.by_kind().items():
            for column in columns[1:]:
                if not _same_columns(columns[0], column):
                    raise ValueError(
                        f"{self.name}: {kind} columns {columns[0].name} and {column.name} differ in "
                        "rows, dim or boundaries, so they can't be stacked"
                    )
        # On the host: XLA takes minutes to compile a concatenation of 10,000 arrays.
        stacked = {
            kind: np.stack(jax.device_get(params["tables"][kind])) for kind in self.by_kind()
        }
        return {kind: jnp.asarray(tables) for kind, tables in stacked.items()}

    def stack_batch(self, batch: Batch) -> dict[str, np.ndarray]:
        """Kind -> its inputs as one [N, B] or [N, B, TOKENS]; `dense` as it was."""
        stacked = {
            kind: np.stack([batch[c.name] for c in columns])
            for kind, columns in self.by_kind().items()
        }
        return stacked | ({"dense": batch["dense"]} if self.has_dense else {})

    def forward(self, params: Mapping[str, Any], batch: Batch) -> jax.Array:
        """[B]: click probabilities."""
        if not self.has_dense:
            raise ValueError(f"{self.name} has columns only: call .columns(params, batch)")
        bottom = apply_mlp(params["bottom"], jnp.asarray(batch["dense"]))
        joined = jnp.concatenate([*self.embeddings(params, batch), bottom], axis=1)
        return jax.nn.sigmoid(apply_mlp(params["top"], joined, last_relu=False)[:, 0])

    def _dense(self, batch: Batch) -> list[jax.Array]:
        return [jnp.asarray(batch["dense"])] if self.has_dense else []


def _same_columns(a: Column, b: Column) -> bool:
    return (a.rows, a.dim) == (b.rows, b.dim) and (
        a.boundaries is b.boundaries or np.array_equal(a.boundaries, b.boundaries)
    )


BOUNDARIES = np.arange(0, 500, 5, dtype=np.float32)  # 0, 5, ..., 495: ids 0 to 100


def _columns(counts: Mapping[str, int], large_rows: int, scale: float) -> tuple[Column, ...]:
    rows = {"hash": 100, "string": 10_000, "sparse": 10_000, "large": large_rows}
    return tuple(
        Column(f"{kind}_{i:04d}", kind, len(BOUNDARIES) + 1, 8, BOUNDARIES)
        if kind == "bucket"
        else Column(f"{kind}_{i:04d}", kind, rows[kind], 32 if kind == "large" else 8)
        for kind, count in counts.items()
        for i in range(max(1, round(count * scale)))
    )


def model_e(large_rows: int = 2**20, scale: float = 1.0) -> RecomModel:
    """RECom's model E: 1,000 columns. The paper's `large_rows` is 2**23 (1 GiB a table, five of them).

    `scale` multiplies the number of columns of each kind (at least one stays) and leaves the rest alone.
    """
    counts = {"bucket": 880, "hash": 50, "string": 50, "sparse": 15, "large": 5}
    return RecomModel("model_e", _columns(counts, large_rows, scale))


def model_f(large_rows: int = 2**20, scale: float = 1.0) -> RecomModel:
    """RECom's model F: 1,200 columns and a wider top MLP. `large_rows` and `scale` as for `model_e`."""
    counts = {"bucket": 1000, "hash": 90, "string": 100, "sparse": 7, "large": 3}
    return RecomModel("model_f", _columns(counts, large_rows, scale), top=(2048, 1024, 1024, 512))


def microbenchmark(n: int, random_boundaries: bool = False, seed: int = 0) -> RecomModel:
    """`n` bucketize columns, nothing else.

    With `random_boundaries`, each column has its own table of 50 to 150 rows and its own boundaries,
    5 to 10 apart; without, all columns are model E's.
    """
    rng = np.random.default_rng(seed)
    columns = []
    for i in range(n):
        boundaries = BOUNDARIES
        if random_boundaries:
            steps = rng.integers(5, 11, int(rng.integers(50, 151)) - 1)
            boundaries = np.cumsum(steps).astype(np.float32)
        columns.append(Column(f"bucket_{i:04d}", "bucket", len(boundaries) + 1, 8, boundaries))
    return RecomModel(f"microbenchmark_{n}", tuple(columns), bottom=(), top=())
