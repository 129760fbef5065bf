"""RECom's own scene: model E's columns, from raw strings, as TensorFlow's feature columns and as ours.

Both start from the same raw features (floats, and strings in numpy arrays), have the same weights and must give
the same numbers. Ours hashes the strings on the host, then calls the bound model; a third contestant is our
SavedModel inside TensorFlow, with TensorFlow's own ops for the strings.
"""

import importlib.metadata
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import recom_jax
from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from benchmarks.timing import Contestant, interleave, paired_ratio
from examples.recom_models import TOKENS, Column, RecomModel, model_e

BATCHES = 4
FEATURE_COLUMNS, OURS, SAVED = (
    "TensorFlow feature columns",
    "recom_jax bind",
    "recom_jax in TensorFlow",
)
ARRAYS, TENSORS = "numpy arrays of strings", "tensors of strings"
LISTS = ("sparse", "large")
Raw = dict[str, np.ndarray]


def raw_batch(specs: tuple[Column, ...], size: int, seed: int) -> Raw:
    """What a client sends: float32 [size], strings (objects) [size], or lists [size, TOKENS] with "" behind the end."""
    rng = np.random.default_rng([seed, size])
    batch: Raw = {}
    for c in specs:
        if c.kind == "bucket":
            batch[c.name] = rng.uniform(-10, 520, size).astype(np.float32)
        elif c.kind in LISTS:
            tokens = np.array([f"item_{k}" for k in rng.integers(0, 10**9, size * TOKENS)], object)
            lengths = rng.integers(1, TOKENS + 1, (size, 1))
            batch[c.name] = np.where(np.arange(TOKENS) < lengths, tokens.reshape(size, TOKENS), "")
        else:
            batch[c.name] = np.array([f"user_{k}" for k in rng.integers(0, 10**9, size)], object)
    return batch


def to_ids(specs: tuple[Column, ...], raw: Raw) -> Raw:
    """The batch that `columns` takes: strings as ids, -1 behind the end of a list."""
    out: Raw = {}
    for c in specs:
        x = raw[c.name]
        if c.kind == "bucket":
            out[c.name] = x
        else:
            ids = recom_jax.strings.hash_bucket(x, c.rows)
            out[c.name] = np.where(x == "", np.int32(-1), ids) if c.kind in LISTS else ids
    return out


def columns(specs: tuple[Column, ...]) -> Callable[[Any, Any], jax.Array]:
    """(tables by name, batch) -> [size, width]: columns in the order of their names, as in TensorFlow's input_layer."""

    def model(tables: Any, batch: Any) -> jax.Array:
        pieces = []
        for c in sorted(specs, key=lambda c: c.name):
            x, table = jnp.asarray(batch[c.name]), tables[c.name]
            if c.kind == "bucket":
                pieces.append(jnp.take(table, jnp.digitize(x, c.boundaries), axis=0))
            elif c.kind in LISTS:
                mask = x >= 0
                rows = jnp.take(table, jnp.where(mask, x, 0), axis=0)
                pieces.append(jnp.where(mask[..., None], rows, 0).sum(1))
            else:
                pieces.append(jnp.take(table, x, axis=0))
        return jnp.concatenate(pieces, axis=1)

    return model


def feature_columns(
    tf: Any, specs: tuple[Column, ...], tables: dict[str, np.ndarray], raw: Raw
) -> Any:
    """The same as TensorFlow's users write it: feature columns, `input_layer`, one graph."""
    fc = tf.feature_column
    made = []
    for c in specs:
        if c.kind == "bucket":
            source = fc.bucketized_column(fc.numeric_column(c.name), c.boundaries.tolist())
        else:
            source = fc.categorical_column_with_hash_bucket(c.name, c.rows)
        made.append(fc.embedding_column(source, c.dim, "sum" if c.kind in LISTS else "mean"))

    def layer(*values: Any) -> Any:
        features = dict(zip(raw, values, strict=True))
        return tf.compat.v1.feature_column.input_layer(features, made)

    specifications = [tf.TensorSpec([None, *x.shape[1:]], tf.float32 if x.dtype == np.float32 else tf.string)
                      for x in raw.values()]  # fmt: skip
    graph = tf.compat.v1.wrap_function(layer, specifications)
    for variable in graph.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES):
        name = variable.name.split("/")[1].removesuffix("_embedding").removesuffix("_bucketized")
        variable.assign(tables[name])
    return graph


def in_tensorflow(
    tf: Any, specs: tuple[Column, ...], tables: Any, ids: Raw, folder: pathlib.Path
) -> Any:
    """Our SavedModel behind TensorFlow's string ops, as one function of raw tensors."""
    recom_jax.export.register_tensorflow()
    recom_jax.export.to_saved_model(recom_jax.optimize(columns(specs)), tables, folder, ids)
    loaded = tf.saved_model.load(str(folder))
    by_name = {c.name: c for c in specs}

    def call(raw: Any) -> Any:
        batch = {}
        for name, x in raw.items():
            batch[name] = x
            if by_name[name].kind != "bucket":
                hashed = tf.cast(tf.strings.to_hash_bucket_fast(x, by_name[name].rows), tf.int32)
                listed = by_name[name].kind in LISTS
                batch[name] = tf.where(tf.equal(x, ""), -1, hashed) if listed else hashed
        return loaded.signatures["serving_default"](**batch)["output_0"]

    made = tf.function(call, autograph=False)
    made.loaded = loaded  # a function does not keep the model alive that it came from
    return made


def run(context: Context) -> Result:
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # it warns of each feature column
    s, step = context.settings, context.progress.step
    whole: RecomModel = model_e(s.large_rows, s.scale)
    specs, size = whole.specs, s.batch
    rng = np.random.default_rng(0)
    tables = {c.name: rng.standard_normal((c.rows, c.dim), dtype=np.float32) for c in specs}
    raws = [raw_batch(specs, size, seed) for seed in range(BATCHES)]
    tensors = [{k: tf.constant(v) for k, v in raw.items()} for raw in raws]
    group = f"model E from raw strings, {len(specs):,} columns, batch {size}" + " (of 1,000)" * (
        s.scale != 1
    )
    first: dict[str, float] = {}
    outputs: dict[str, np.ndarray] = {}

    def begin(name: str, make: Callable[[], Any], argument: Any) -> Any:
        """Builds a contestant and calls it once; how long both took."""
        with step(f"{group}: {name}"):
            begun = time.perf_counter()
            call = make()
            outputs[name] = np.asarray(call(argument))
            first[name] = time.perf_counter() - begun
        return call

    server = begin(OURS, lambda: _served(specs, tables), raws[0])
    recom_jax.export.tensorflow_library()  # built once per machine: not part of a model's first call
    with tempfile.TemporaryDirectory() as path:
        folder, ids = pathlib.Path(path), to_ids(specs, raws[0])
        inside = begin(SAVED, lambda: in_tensorflow(tf, specs, tables, ids, folder), tensors[0])
    graph = begin(FEATURE_COLUMNS, lambda: _graph(tf, specs, tables, raws[0]), tensors[0])
    for name, out in outputs.items():
        np.testing.assert_allclose(
            out, outputs[FEATURE_COLUMNS], rtol=1e-5, atol=1e-5, err_msg=name
        )

    ways = [
        Contestant(OURS, ARRAYS, lambda k: raws[k % BATCHES], server, "strings hashed in the call"),
        Contestant(SAVED, TENSORS, lambda k: tensors[k % BATCHES], lambda b: inside(b).numpy()),
        Contestant(FEATURE_COLUMNS, TENSORS, lambda k: tensors[k % BATCHES], lambda b: graph(b).numpy()),
    ]  # fmt: skip
    samples = interleave(ways, s.plan)
    rows = [
        Row.of(group, c, samples[c.key], first_s=first[c.name],
               max_difference=float(np.abs(outputs[c.name] - outputs[FEATURE_COLUMNS]).max()))
        for c in ways
    ]  # fmt: skip
    theirs, how = (
        samples[f"{FEATURE_COLUMNS} / {TENSORS}"],
        "median over rounds, both in each round",
    )
    bind, saved = (samples[f"{a} / {b}"] for a, b in ((OURS, ARRAYS), (SAVED, TENSORS)))
    targets = (
        Target("from strings: bind / TensorFlow feature columns", paired_ratio(bind, theirs), "<=", 1 / 4, "", how),
        Target("from strings: our SavedModel / TensorFlow feature columns", paired_ratio(saved, theirs), "<", 1, "",
               how),
    )  # fmt: skip
    report = recom_jax.optimize(columns(specs)).explain(tables, to_ids(specs, raws[0]))
    facts = {
        "columns": report.num_columns,
        "fused": report.num_fused,
        "tensorflow": importlib.metadata.version("tensorflow"),
        "strings_per_call": sum(v.size for v in raws[0].values() if v.dtype == object),
    }
    return Result(tuple(rows), targets, facts)


def _served(specs: tuple[Column, ...], tables: Any) -> Callable[[Raw], Any]:
    server = recom_jax.optimize(columns(specs)).bind({k: jnp.asarray(v) for k, v in tables.items()})
    return lambda raw: server(to_ids(specs, raw))


def _graph(tf: Any, specs: tuple[Column, ...], tables: Any, raw: Raw) -> Callable[[Any], Any]:
    graph = feature_columns(tf, specs, tables, raw)
    return lambda tensors: graph(*tensors.values())
