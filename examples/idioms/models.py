"""Whole models of the literature, cut down to what surrounds their embedding columns."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.idioms.idiom import Arrays, Idiom, Made, Size


def _layers(a: Arrays, *widths: int) -> Any:
    return [(a.normal(n, m), a.normal(m)) for n, m in itertools.pairwise(widths)]


def _mlp(layers: Any, x: Any) -> Any:
    for k, (w, b) in enumerate(layers):
        x = x @ w + b
        x = jax.nn.relu(x) if k + 1 < len(layers) else x
    return x


def dlrm(s: Size) -> Made:
    """DLRM (arXiv:1906.00091): dense and sparse features, all pairs of dot products by a constant gather."""
    a = Arrays(s)
    fields = min(s.fields, 8)
    rows, cols = np.tril_indices(fields + 1, -1)

    def fn(p: Any, dense: Any, ids: Any) -> Any:
        x = jax.nn.relu(_mlp(p["bottom"], dense))
        columns = [jnp.take(t, ids[:, k], axis=0) for k, t in enumerate(p["tables"])]
        z = jnp.stack([x, *columns], axis=1)
        pairs = jnp.einsum("bfd,bgd->bfg", z, z)[:, rows, cols]
        return _mlp(p["top"], jnp.concatenate([x, pairs], -1))

    p = {
        "tables": [a.table() for _ in range(fields)],
        "bottom": _layers(a, 13, 32, s.dim),
        "top": _layers(a, s.dim + len(rows), 32, 1),
    }
    return fn, (p, a.floats(s.batch, 13, high=1.0), a.ids(s.batch, fields))


def _by_field(a: Arrays, s: Size) -> tuple[Any, Any]:
    """ids with each field's offset added (int32[batch, fields]), and the offsets."""
    starts = np.arange(s.fields, dtype=np.int32) * s.rows
    return a.ids(s.batch, s.fields), starts


def fm(s: Size) -> Made:
    """A factorization machine: one table of weights and one of vectors, an offset a field."""
    a = Arrays(s)
    ids, starts = _by_field(a, s)

    def fn(p: Any, ids: Any) -> Any:
        at = ids + starts
        v = p["v"][at]
        pairs = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1)
        return p["w"][at].sum((1, 2)) + pairs

    return fn, ({"w": a.table(s.rows * s.fields, 1), "v": a.table(s.rows * s.fields)}, ids)


def deepfm(s: Size) -> Made:
    """DeepFM (arXiv:1703.04247): a factorization machine and an MLP on the same rows."""
    a = Arrays(s)
    ids, starts = _by_field(a, s)

    def fn(p: Any, ids: Any) -> Any:
        at = ids + starts
        v = jnp.take(p["v"], at, axis=0)
        pairs = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1)
        deep = _mlp(p["mlp"], v.reshape(v.shape[0], -1))[:, 0]
        return jax.nn.sigmoid(jnp.take(p["w"], at, axis=0).sum((1, 2)) + pairs + deep)

    p = {"w": a.table(s.rows * s.fields, 1), "v": a.table(s.rows * s.fields),
         "mlp": _layers(a, s.fields * s.dim, 32, 1)}  # fmt: skip
    return fn, (p, ids)


def wide_and_deep(s: Size) -> Made:
    """Wide & Deep (arXiv:1606.07792): a linear part on crossed ids beside an MLP on embeddings."""
    a = Arrays(s)
    ids, starts = _by_field(a, s)

    def fn(p: Any, ids: Any) -> Any:
        crossed = (ids[:, 0] * 31 + ids[:, 1]) % s.rows
        wide = p["wide"][ids + starts].sum((1, 2)) + p["cross"][crossed][:, 0]
        deep = _mlp(p["mlp"], p["deep"][ids + starts].reshape(ids.shape[0], -1))[:, 0]
        return jax.nn.sigmoid(wide + deep)

    p = {"wide": a.table(s.rows * s.fields, 1), "cross": a.table(s.rows, 1),
         "deep": a.table(s.rows * s.fields), "mlp": _layers(a, s.fields * s.dim, 32, 1)}  # fmt: skip
    return fn, (p, ids)


def xdeepfm(s: Size) -> Made:
    """xDeepFM (arXiv:1803.05170): products of all pairs of fields, one embedding dimension at a time."""
    a = Arrays(s)
    ids, starts = _by_field(a, s)

    def fn(p: Any, ids: Any) -> Any:
        x0 = p["v"][ids + starts]
        x, pooled = x0, []
        for w in p["cin"]:
            x = jnp.einsum("bhd,bfd,hfk->bkd", x, x0, w)
            pooled.append(x.sum(-1))
        return jnp.concatenate(pooled, -1).sum(-1)

    cin = [a.normal(s.fields, s.fields, 4), a.normal(4, s.fields, 4)]
    return fn, ({"v": a.table(s.rows * s.fields), "cin": cin}, ids)


def dcn(s: Size) -> Made:
    """DCN-v2 (arXiv:2008.13535): cross layers on all rows side by side."""
    a = Arrays(s)
    ids, starts = _by_field(a, s)
    width = s.fields * s.dim

    def fn(p: Any, ids: Any) -> Any:
        x0 = p["v"][ids + starts].reshape(ids.shape[0], width)
        x = x0
        for w, b in p["cross"]:
            x = x0 * (x @ w + b) + x
        return _mlp(p["mlp"], x)

    cross = [(a.normal(width, width), a.normal(width)) for _ in range(2)]
    return fn, ({"v": a.table(s.rows * s.fields), "cross": cross, "mlp": _layers(a, width, 16, 1)}, ids)  # fmt: skip


def din(s: Size) -> Made:
    """DIN (arXiv:1706.06978): attention of a candidate over a behaviour sequence."""
    a = Arrays(s)

    def fn(p: Any, history: Any, candidate: Any) -> Any:
        mask = history >= 0
        keys = p["items"][jnp.where(mask, history, 0)]
        query = p["items"][candidate][:, None]
        query = jnp.broadcast_to(query, keys.shape)
        both = jnp.concatenate([query, keys, query - keys, query * keys], -1)
        score = jnp.where(mask, _mlp(p["attention"], both)[..., 0], -1e9)
        interest = (jax.nn.softmax(score, -1)[..., None] * keys).sum(1)
        return _mlp(p["mlp"], jnp.concatenate([interest, query[:, 0]], -1))

    p = {"items": a.table(), "attention": _layers(a, 4 * s.dim, 16, 1),
         "mlp": _layers(a, 2 * s.dim, 16, 1)}  # fmt: skip
    return fn, (p, a.padded(s.batch, s.length), a.ids(s.batch))


def dien(s: Size) -> Made:
    """DIEN (arXiv:1809.03672): a GRU over the behaviour sequence, its steps weighted by attention."""
    a = Arrays(s)

    def fn(p: Any, history: Any, candidate: Any) -> Any:
        keys = jnp.take(p["items"], jnp.maximum(history, 0), axis=0)
        query = jnp.take(p["items"], candidate, axis=0)
        score = jax.nn.softmax(jnp.einsum("bld,bd->bl", keys, query), -1)

        def step(h: Any, x: Any) -> Any:
            key, weight = x
            both = jnp.concatenate([h, key], -1)
            gate = jax.nn.sigmoid(both @ p["gate"]) * weight[:, None]
            h = (1 - gate) * h + gate * jnp.tanh(both @ p["state"])
            return h, None

        start = jnp.zeros((history.shape[0], s.dim))
        h, _ = jax.lax.scan(step, start, (keys.swapaxes(0, 1), score.T))
        return (h * query).sum(-1)

    p = {"items": a.table(), "gate": a.normal(2 * s.dim, s.dim), "state": a.normal(2 * s.dim, s.dim)}  # fmt: skip
    return fn, (p, a.padded(s.batch, s.length), a.ids(s.batch))


def sasrec(s: Size) -> Made:
    """SASRec (arXiv:1808.09781): items scaled, positions added, masked, one causal block; scores of candidates."""
    a = Arrays(s)

    def fn(p: Any, history: Any, candidates: Any) -> Any:
        x = p["items"][history] * jnp.sqrt(jnp.float32(s.dim)) + p["places"][jnp.arange(s.length)]
        x = x * (history != 0)[..., None]
        n = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6)
        q, k, v = (n @ w for w in p["attention"])
        score = jnp.einsum("bqd,bkd->bqk", q, k)
        score = jnp.where(jnp.tril(jnp.ones((s.length, s.length), bool)), score, -1e9)
        x = x + jax.nn.softmax(score, -1) @ v
        return jnp.einsum("bld,bld->bl", x, p["items"][candidates])

    p = {"items": a.table(), "places": a.table(s.length),
         "attention": [a.normal(s.dim, s.dim) for _ in range(3)]}  # fmt: skip
    return fn, (p, a.ids(s.batch, s.length), a.ids(s.batch, s.length))


def two_tower(s: Size) -> Made:
    """Two towers on dictionaries of features: ids, a bag, a bucket; normalised, all pairs scored."""
    a = Arrays(s)
    edges = np.linspace(18, 70, 15).astype(np.float32)

    def tower(p: Any, columns: list[Any]) -> Any:
        x = _mlp(p["mlp"], jnp.concatenate(columns, -1))
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)

    def fn(p: Any, user: Any, item: Any) -> Any:
        seen = user["seen"]
        mask = seen >= 0
        bag = jnp.where(mask[..., None], p["items"][jnp.maximum(seen, 0)], 0).sum(1)
        u = tower(p["user"], [p["users"][user["id"]], bag, p["ages"][jnp.digitize(user["age"], edges)]])  # fmt: skip
        v = tower(p["item"], [p["items"][item["id"]], p["kinds"][item["kind"]]])
        return u @ v.T

    p = {"users": a.table(), "items": a.table(), "kinds": a.table(9), "ages": a.table(16),
         "user": {"mlp": _layers(a, 3 * s.dim, 16, 8)}, "item": {"mlp": _layers(a, 2 * s.dim, 16, 8)}}  # fmt: skip
    user = {"id": a.ids(s.batch), "seen": a.padded(s.batch, s.length), "age": a.floats(s.batch)}
    return fn, (p, user, {"id": a.ids(s.batch), "kind": a.ids(s.batch, rows=9)})


def mmoe(s: Size) -> Made:
    """MMoE (KDD 2018): experts shared by tasks, mixed by a gate for each."""
    a = Arrays(s)
    fields = min(s.fields, 8)
    width = fields * s.dim

    def fn(p: Any, ids: Any) -> Any:
        columns = [t[ids[:, k]] for k, t in enumerate(p["tables"])]
        x = jnp.concatenate(columns, -1)
        experts = jax.nn.relu(jnp.einsum("bi,eio->beo", x, p["experts"]))
        mixed = [jnp.einsum("be,beo->bo", jax.nn.softmax(x @ g, -1), experts) for g in p["gates"]]
        return [_mlp(t, m)[:, 0] for t, m in zip(p["towers"], mixed, strict=True)]

    p = {"tables": [a.table() for _ in range(fields)],
         "experts": np.stack([a.normal(width, 16) for _ in range(4)]),
         "gates": [a.normal(width, 4) for _ in range(2)],
         "towers": [_layers(a, 16, 8, 1) for _ in range(2)]}  # fmt: skip
    return fn, (p, a.ids(s.batch, fields))


def transformer_input(s: Size) -> Made:
    """Token, position and segment embeddings, added and normalised."""
    a = Arrays(s)

    def fn(p: Any, ids: Any, kinds: Any) -> Any:
        x = p["tokens"][ids] + p["places"][jnp.arange(s.length)] + p["kinds"][kinds]
        mean = x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
        return (x - mean) * scale * p["gain"] + p["bias"]

    p = {"tokens": a.table(), "places": a.table(s.length), "kinds": a.table(2),
         "gain": a.normal(s.dim), "bias": a.normal(s.dim)}  # fmt: skip
    return fn, (p, a.ids(s.batch, s.length), a.ids(s.batch, s.length, rows=2))


MODELS: dict[str, Idiom] = {
    f.__name__: Idiom(f)
    for f in (
        dlrm, fm, deepfm, wide_and_deep, xdeepfm, dcn, din, dien, sasrec, two_tower, mmoe, transformer_input,
    )
}  # fmt: skip
