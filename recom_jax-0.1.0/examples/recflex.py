"""The models of the RecFlex paper (SC 2024): jagged bags of very different lengths and widths.

    model = recflex("A", scale=0.02)                    # every 50th feature; recflex("A") has all 1,000
    params = model.init(seed=0)
    batch = model.batch(256, seed=0)
    wide = model.columns(params, batch)                 # [256, total]
    score = model.forward(params, batch)                # [256]

A feature that every sample holds exactly once is an int32 [B] (`feature_0003`). Every other one is a
jagged bag: `feature_0503_values` int32 [total of the batch] and `feature_0503_splits` int32 [B + 1], where
sample b owns values[splits[b]:splits[b + 1]]. Bags are summed; an empty bag gives zeros.

Shapes and distributions are in `examples/data/recflex.json`. Ids follow a Zipf law with exponent 1.05.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from examples.mlp import apply_mlp, init_mlp

NAMES = ("A", "B", "C", "D", "E", "F", "mlperf")
TOP = (1024, 256, 128, 1)
_DATA = pathlib.Path(__file__).parent / "data" / "recflex.json"


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature: its table and how many ids a sample holds.

    `kind` is "one_hot", "multi_hot" (normal with mean and std, kept within 1 and max), "multi_hot_static"
    (always `length`) or "multi_hot_one_side" (no maximum). A sample holds the feature at all with
    probability `coverage`.
    """

    name: str
    rows: int
    dim: int
    kind: str
    coverage: float
    mean: float = 1.0
    std: float = 0.0
    max: float = np.inf

    @property
    def jagged(self) -> bool:
        return self.kind != "one_hot" or self.coverage < 1.0

    def lengths(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """int64 [size]: how many ids each sample holds."""
        lengths = np.full(size, self.mean)
        if self.std:
            lengths = rng.normal(self.mean, self.std, size)
            while (outside := (lengths < 1) | (lengths > self.max)).any():
                lengths[outside] = rng.normal(self.mean, self.std, outside.sum())
        return np.where(rng.random(size) < self.coverage, lengths, 0).astype(np.int64)


@functools.cache
def _zipf_cdf(rows: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return np.asarray(np.cumsum(weights) / weights.sum())


def zipf_ids(rng: np.random.Generator, rows: int, size: int, exponent: float = 1.05) -> np.ndarray:
    """int32 [size] in [0, rows): Zipf-distributed ranks, spread over the table as a hash would."""
    ranks = np.searchsorted(_zipf_cdf(rows, exponent), rng.random(size), side="right")
    # The multiplier is a prime larger than any table, so this maps ranks to rows one to one.
    return (np.minimum(ranks, rows - 1) * 2654435761 % rows).astype(np.int32)


def pool_jagged(
    table: jax.Array,
    values: jax.Array,
    splits: jax.Array,
    expand: Literal["repeat", "searchsorted"] = "repeat",
) -> jax.Array:
    """Sum of each bag: table [rows, dim], values [total], splits [B + 1] -> [B, dim].

    `expand` is how row splits become one sample number per value: both idioms are common. With
    "searchsorted", values behind splits[-1] are padding and count for nothing.
    """
    size, total = splits.shape[0] - 1, values.shape[0]
    if expand == "repeat":
        sample = jnp.repeat(jnp.arange(size), jnp.diff(splits), total_repeat_length=total)
    else:
        sample = jnp.searchsorted(splits, jnp.arange(total), side="right") - 1
    return jax.ops.segment_sum(jnp.take(table, values, axis=0), sample, num_segments=size)


@dataclasses.dataclass(frozen=True)
class RecflexModel:
    """Parameters are `{"tables": {feature: [rows, dim]}, "top": Mlp}`."""

    name: str
    features: tuple[Feature, ...]
    expand: Literal["repeat", "searchsorted"] = "repeat"

    @property
    def width(self) -> int:
        """Columns of the output of `columns`."""
        return sum(f.dim for f in self.features)

    def init(self, seed: int = 0) -> dict[str, Any]:
        """Random parameters, on the default device."""
        rng = np.random.default_rng(seed)
        tables = {
            f.name: jnp.asarray(rng.standard_normal((f.rows, f.dim), dtype=np.float32))
            for f in self.features
        }
        return {"tables": tables, "top": init_mlp(rng, self.width, TOP)}

    def batch(self, size: int, seed: int = 0, round_up: int = 1) -> dict[str, np.ndarray]:
        """`size` random samples.

        Totals differ from batch to batch, and `jax.jit` compiles anew for each new shape. `round_up` pads
        every `_values` array to a multiple of it, which a model with expand="searchsorted" ignores.
        """
        if round_up > 1 and self.expand != "searchsorted":
            raise ValueError('round_up needs a model made with expand="searchsorted"')
        rng = np.random.default_rng([seed, size])
        batch = {}
        for f in self.features:
            lengths = f.lengths(rng, size)
            ids = zipf_ids(rng, f.rows, int(lengths.sum()))
            if not f.jagged:
                batch[f.name] = ids
                continue
            batch[f"{f.name}_values"] = np.pad(ids, (0, -len(ids) % round_up))
            batch[f"{f.name}_splits"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return batch

    def columns(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """[B, width]: every feature's embedding side by side."""
        pieces = []
        for f in self.features:
            table = params["tables"][f.name]
            if f.jagged:
                values = jnp.asarray(batch[f"{f.name}_values"])
                splits = jnp.asarray(batch[f"{f.name}_splits"])
                pieces.append(pool_jagged(table, values, splits, self.expand))
            else:
                pieces.append(jnp.take(table, jnp.asarray(batch[f.name]), axis=0))
        return jnp.concatenate(pieces, axis=1)

    def forward(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """[B]: probabilities."""
        x = apply_mlp(params["top"], self.columns(params, batch), last_relu=False)
        return jax.nn.sigmoid(x[:, 0])


def recflex(
    name: str,
    *,
    scale: float = 1.0,
    max_rows: int | None = None,
    expand: Literal["repeat", "searchsorted"] = "repeat",
) -> RecflexModel:
    """One of A to F or mlperf (26 one-hot features; its largest tables take 10 GB each).

    `scale` keeps that share of the features, evenly spaced (at least one); `max_rows` caps the tables.
    """
    models = json.loads(_DATA.read_text())["models"]
    if name not in models:
        raise ValueError(f"unknown RecFlex model {name!r}: expected one of {', '.join(models)}")
    shapes = [
        (rows, dim)
        for count, rows, dim in models[name]["tables_count_rows_dim"]
        for _ in range(count)
    ]
    pooling = [entry for entry in models[name]["pooling"] for _ in range(entry["features"])]
    pooling += [{"kind": "one_hot", "coverage": 1.0}] * (len(shapes) - len(pooling))
    keep = np.linspace(0, len(shapes) - 1, max(1, round(len(shapes) * scale))).astype(int)
    features = []
    for i in keep:
        (rows, dim), p = shapes[i], pooling[i]
        mean = p.get("length", p.get("mean", 1.0))
        features.append(
            Feature(
                f"feature_{i:04d}",
                min(rows, max_rows or rows),
                dim,
                p["kind"],
                p["coverage"],
                mean,
                p.get("std", 0.0),
                p.get("max", np.inf),
            )
        )
    return RecflexModel(f"recflex_{name}", tuple(features), expand)
