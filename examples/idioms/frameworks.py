"""Embedding layers of neural network libraries. Each needs its package."""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax
import jax.numpy as jnp

from examples.idioms.idiom import Arrays, Idiom, Made, Size


def _package(name: str) -> Any:
    if name.startswith("keras"):  # its backend is chosen when it is imported
        os.environ.setdefault("KERAS_BACKEND", "jax")
    return importlib.import_module(name)


def linen_embed(s: Size) -> Made:
    """flax.linen.Embed, one for each column."""
    nn, a = _package("flax.linen"), Arrays(s)
    layer = nn.Embed(s.rows, s.dim)

    def fn(params: Any, ids: Any) -> Any:
        return jnp.concatenate([layer.apply(p, ids[:, k]) for k, p in enumerate(params)], -1)

    fields = min(s.fields, 8)
    params = [{"params": {"embedding": a.table()}} for _ in range(fields)]
    return fn, (params, a.ids(s.batch, fields))


def linen_embed_bf16(s: Size) -> Made:
    """flax.linen.Embed with a computation dtype: it casts the whole table in each call."""
    nn, a = _package("flax.linen"), Arrays(s)
    layer = nn.Embed(s.rows, s.dim, dtype=jnp.bfloat16)

    def fn(params: Any, ids: Any) -> Any:
        return layer.apply(params, ids)

    return fn, ({"params": {"embedding": a.table()}}, a.ids(s.batch, s.length))


def nnx_embed(s: Size) -> Made:
    """flax.nnx.Embed."""
    nnx, a = _package("flax.nnx"), Arrays(s)
    graph, state = nnx.split(nnx.Embed(s.rows, s.dim, rngs=nnx.Rngs(0)))

    def fn(state: Any, ids: Any) -> Any:
        return nnx.merge(graph, state)(ids)

    return fn, (state, a.ids(s.batch, s.length))


def _haiku(s: Size, style: str) -> Made:
    hk, a = _package("haiku"), Arrays(s)
    layer = hk.without_apply_rng(
        hk.transform(lambda i: hk.Embed(s.rows, s.dim, lookup_style=style)(i))
    )
    ids = a.ids(s.batch, s.length)
    return layer.apply, (layer.init(jax.random.key(0), ids), ids)


def haiku_index(s: Size) -> Made:
    """hk.Embed by indexing."""
    return _haiku(s, "ARRAY_INDEX")


def haiku_one_hot(s: Size) -> Made:
    """hk.Embed by one-hot products."""
    return _haiku(s, "ONE_HOT")


def equinox_embedding(s: Size) -> Made:
    """eqx.nn.Embedding of single ids, under vmap."""
    eqx, a = _package("equinox"), Arrays(s)
    layer = eqx.nn.Embedding(weight=jnp.asarray(a.table()))

    def fn(layer: Any, ids: Any) -> Any:
        return jax.vmap(jax.vmap(layer))(ids)

    return fn, (layer, a.ids(s.batch, s.length))


def keras_embedding(s: Size) -> Made:
    """keras.layers.Embedding."""
    keras, a = _package("keras"), Arrays(s)
    layer = keras.layers.Embedding(s.rows, s.dim)
    layer.build()

    def fn(table: Any, ids: Any) -> Any:
        return layer.stateless_call([table], [], ids)[0]

    return fn, (a.table(), a.ids(s.batch, s.length))


def _embed_reduce(s: Size, combiner: str) -> Made:
    keras_rs, a = _package("keras_rs"), Arrays(s)
    layer = keras_rs.layers.EmbedReduce(s.rows, s.dim, combiner=combiner)
    ids = a.ids(s.batch, s.length)
    layer.build([ids.shape, ids.shape])

    def fn(table: Any, ids: Any, weights: Any) -> Any:
        return layer.stateless_call([table], [], ids, weights=weights)[0]

    return fn, (a.table(), ids, a.floats(s.batch, s.length, low=0.1, high=1.0))


def keras_rs_sum(s: Size) -> Made:
    """keras_rs EmbedReduce, weighted sum."""
    return _embed_reduce(s, "sum")


def keras_rs_mean(s: Size) -> Made:
    """keras_rs EmbedReduce, weighted mean."""
    return _embed_reduce(s, "mean")


def keras_rs_sqrtn(s: Size) -> Made:
    """keras_rs EmbedReduce, weighted, over the root of the sum of squares."""
    return _embed_reduce(s, "sqrtn")


FRAMEWORKS: dict[str, Idiom] = {
    f.__name__: Idiom(f, package)
    for package, functions in {
        "flax": (linen_embed, linen_embed_bf16, nnx_embed),
        "haiku": (haiku_index, haiku_one_hot),
        "equinox": (equinox_embedding,),
        "keras": (keras_embedding,),
        "keras_rs": (keras_rs_sum, keras_rs_mean, keras_rs_sqrtn),
    }.items()
    for f in functions
}
