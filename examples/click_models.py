"""DLRM and DCN-v2 with sparse updates of their tables: no gradient is ever as large as a table.

The step looks rows up, differentiates the loss with respect to *the rows*, and updates those rows of the tables, which
are donated (`recom_jax.sparse`). `corun.stage` marks where its stages end.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import recom_jax
from examples.mlp import Mlp, apply_mlp, init_mlp
from recom_jax import corun, sparse

State = dict[str, Any]
Batch = dict[str, Any]


@recom_jax.optimize
def look_up(tables: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
    """[B, fields, dim] from one table a field: one fused call.

    Ids are [B, fields], or [B, fields, length] for bags, which are summed; -1 stands for no id.
    """
    if ids.ndim == 2:
        return jnp.stack([jnp.take(t, ids[:, k], axis=0) for k, t in enumerate(tables)], axis=1)
    bags = []
    for k, table in enumerate(tables):
        there = ids[:, k] >= 0
        rows = jnp.take(table, jnp.where(there, ids[:, k], 0), axis=0)
        bags.append(jnp.where(there[..., None], rows, 0).sum(1))
    return jnp.stack(bags, axis=1)


@dataclasses.dataclass(frozen=True)
class ClickModel:
    """What both models share. A batch: `{"label": [B], "dense": [B, D] float32, "ids": [B, F] int32}`, or ids
    [B, F, L] for bags, -1 where there is none.

    Attributes:
      rows: table sizes, one a field.
      dim: of the embeddings; dense: how many dense features.
      optimizer: "sgd" or "adagrad", for tables and layers alike.
    """

    rows: tuple[int, ...]
    dim: int = 16
    dense: int = 13
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)
    optimizer: str = "sgd"
    rate: float = 0.1

    def init(self, seed: int = 0) -> State:
        """Tables, layers, and (Adagrad) the sums of squares."""
        if self.optimizer not in ("sgd", "adagrad"):
            raise ValueError(f"optimizer is sgd or adagrad, not {self.optimizer!r}")
        rng = np.random.default_rng(seed)
        tables = [
            jnp.asarray(rng.uniform(-1, 1, (n, self.dim)).astype(np.float32) / np.sqrt(self.dim))
            for n in self.rows
        ]
        state: State = {"tables": tables, "layers": self.init_layers(rng)}
        if self.optimizer == "adagrad":
            squares = jax.tree.map(lambda w: jnp.full(w.shape, 1e-6, w.dtype), state["layers"])
            state["squares"] = {"tables": self.rule.init(tables), "layers": squares}
        return state

    @property
    def rule(self) -> sparse.Sgd | sparse.Adagrad:
        """How tables are updated."""
        if self.optimizer == "sgd":
            return sparse.Sgd(self.rate)
        return sparse.Adagrad(self.rate, initial=1e-6, eps=0.0)

    def init_layers(self, rng: np.random.Generator) -> dict[str, Any]:
        raise NotImplementedError

    def logits(self, layers: dict[str, Any], rows: jax.Array, dense: jax.Array) -> jax.Array:
        """[B] from looked-up rows [B, F, dim] and dense features [B, D]."""
        raise NotImplementedError

    def predict(self, state: State, batch: Batch) -> jax.Array:
        """[B] click probabilities."""
        rows = look_up(state["tables"], batch["ids"])
        return jax.nn.sigmoid(self.logits(state["layers"], rows, batch["dense"]))

    def step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """One update. Metrics: the mean log loss, and the logits and labels [B] from before the update."""
        rows = corun.stage(look_up(state["tables"], batch["ids"]), "emb_fwd")

        def loss(layers: dict[str, Any], rows: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = corun.stage(self.logits(layers, rows, batch["dense"]), "mlp_fwd")
            return jnp.mean(jax.nn.softplus(logits) - batch["label"] * logits), logits

        (value, logits), (d_layers, d_rows) = jax.value_and_grad(
            loss, argnums=(0, 1), has_aux=True
        )(state["layers"], rows)
        d_layers, d_rows = corun.stage((d_layers, d_rows), "mlp_bwd")
        made = self.update(state, d_layers, d_rows, batch["ids"])
        return made, {"loss": value, "logits": logits, "label": batch["label"]}

    def update(self, state: State, d_layers: Any, d_rows: jax.Array, ids: jax.Array) -> State:
        """SGD or Adagrad on the layers and on the rows that were read."""
        fields = range(len(self.rows))
        grads = sparse.row_grads(
            state["tables"],
            [ids[:, k] for k in fields],
            [d_rows[:, k] for k in fields],
            sparse.Lookup() if ids.ndim == 2 else sparse.Lookup("zero", "sum"),
        )
        if self.optimizer == "sgd":
            tables, _ = self.rule.update(state["tables"], [()] * len(self.rows), grads)
            layers = jax.tree.map(lambda w, g: w - self.rate * g, state["layers"], d_layers)
            return {"tables": tables, "layers": layers}
        squares = state["squares"]
        tables, table_squares = self.rule.update(state["tables"], squares["tables"], grads)
        sums = jax.tree.map(lambda s, g: s + g * g, squares["layers"], d_layers)
        layers = jax.tree.map(
            lambda w, g, s: w - self.rate * g / jnp.sqrt(s), state["layers"], d_layers, sums
        )
        made = {"tables": table_squares, "layers": sums}
        return {"tables": tables, "layers": layers, "squares": made}


@jax.custom_vjp
def pairs(vectors: jax.Array) -> jax.Array:
    """[B, n * (n - 1) / 2] dot products of all pairs of [B, n, dim] vectors: (1, 0), (2, 0), (2, 1), and so on.

    Its gradient is one product of a symmetric matrix, whose elements are read from what comes in. What JAX derives
    scatters them, and multiplies twice: a tenth of a training step on a GPU.
    """
    n = vectors.shape[1]
    i, j = np.tril_indices(n, k=-1)
    dots = jnp.einsum("bid,bjd->bij", vectors, vectors)
    return dots.reshape(-1, n * n)[:, i * n + j]


def _pairs_forward(vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
    return pairs(vectors), vectors


def _pairs_backward(vectors: jax.Array, d_pairs: jax.Array) -> tuple[jax.Array]:
    n = vectors.shape[1]
    i, j = np.tril_indices(n, k=-1)
    place = np.full((n, n), len(i))  # the diagonal is no pair
    place[i, j] = place[j, i] = np.arange(len(i))
    d_dots = jnp.pad(d_pairs, ((0, 0), (0, 1)))[:, place.reshape(-1)].reshape(-1, n, n)
    return (jnp.einsum("bij,bjd->bid", d_dots, vectors),)


pairs.defvjp(_pairs_forward, _pairs_backward)


@dataclasses.dataclass(frozen=True)
class Dlrm(ClickModel):
    """A bottom MLP, all pairwise dot products of it and the embeddings, a top MLP."""

    def init_layers(self, rng: np.random.Generator) -> dict[str, Any]:
        vectors = len(self.rows) + 1
        pairs = vectors * (vectors - 1) // 2
        return {
            "bottom": init_mlp(rng, self.dense, (*self.bottom, self.dim)),
            "top": init_mlp(rng, pairs + self.dim, (*self.top, 1)),
        }

    def logits(self, layers: dict[str, Mlp], rows: jax.Array, dense: jax.Array) -> jax.Array:
        bottom = apply_mlp(layers["bottom"], dense)
        vectors = jnp.concatenate([bottom[:, None], rows], axis=1)
        joined = jnp.concatenate([bottom, pairs(vectors)], axis=1)
        return apply_mlp(layers["top"], joined, last_relu=False)[:, 0]


@dataclasses.dataclass(frozen=True)
class DcnV2(ClickModel):
    """Cross layers ``x0 * (x W + b) + x`` over everything side by side, then an MLP (the stacked form)."""

    crosses: int = 2

    def init_layers(self, rng: np.random.Generator) -> dict[str, Any]:
        width = self.dense + len(self.rows) * self.dim
        cross = [init_mlp(rng, width, (width,))[0] for _ in range(self.crosses)]
        for layer in cross:
            layer["w"] = layer["w"] * 0.1
        return {"cross": cross, "top": init_mlp(rng, width, (*self.top, 1))}

    def logits(self, layers: dict[str, Any], rows: jax.Array, dense: jax.Array) -> jax.Array:
        x0 = jnp.concatenate([dense, rows.reshape(rows.shape[0], -1)], axis=1)
        x = x0
        for layer in layers["cross"]:
            x = x0 * (x @ layer["w"] + layer["b"]) + x
        return apply_mlp(layers["top"], x, last_relu=False)[:, 0]


MODELS: dict[str, type[ClickModel]] = {"dlrm": Dlrm, "dcnv2": DcnV2}


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The area under the ROC curve: how often a click has the higher score, ties half. NaN without both classes."""
    clicks = labels > 0.5
    positive, negative = int(clicks.sum()), int((~clicks).sum())
    if not positive or not negative:
        return float("nan")
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[which]
    return float((ranks[clicks].sum() - positive * (positive + 1) / 2) / (positive * negative))
