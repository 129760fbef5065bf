"""Strings to ids on the host: ours beside TensorFlow's op, pyarrow's own encoding, and a loop in Python."""

import importlib.util
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from benchmarks.timing import Contestant, interleave, paired_ratio
from examples.recom_models import fingerprint
from recom_jax.strings import hash_bucket, split_hash_bucket

COUNT = 200_000  # strings a call
BUCKETS = 10_000
OURS, TENSORFLOW = "recom_jax.strings", "TensorFlow"


def make_strings(kind: str, n: int, seed: int = 0) -> list[str]:
    """n strings: identifiers of 8 to 12 characters, addresses of 40 to 90, names beyond ASCII, or lists of tags."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(10**8, 10**12, n).tolist()
    if kind == "identifiers":
        return [str(k) for k in numbers]
    if kind == "addresses":
        return [
            f"https://shop.example/items/{k}/reviews?page={k % 97}&ref={k * 7}" for k in numbers
        ]
    if kind == "names":
        return [f"café {k} für 日本" for k in numbers]
    return ["|".join(f"tag{k >> s & 4095}" for s in range(0, 8 * (k % 5 + 1), 8)) for k in numbers]


def contestants(kind: str, strings: list[str]) -> list[Contestant]:
    """Ways to the ids of the same strings. What TensorFlow is not given as a tensor it has to copy first."""
    lists = kind == "lists of tags"
    array, arrow = np.array(strings, object), pa.array(strings)
    made: list[Contestant] = []

    def add(name: str, inputs: str, call: Any, value: Any, note: str = "") -> None:
        made.append(Contestant(name, inputs, lambda _: value, call, note))

    def ours(x: Any) -> Any:
        return split_hash_bucket(x, BUCKETS, "|") if lists else hash_bucket(x, BUCKETS)

    add(OURS, "numpy objects", ours, array)
    add(OURS, "pyarrow", ours, arrow)
    if not lists:
        add(OURS, "pyarrow, one thread", lambda x: hash_bucket(x, BUCKETS, threads=1), arrow)
        add(OURS, "numpy U", ours, np.array(strings))
    if importlib.util.find_spec("tensorflow"):
        import tensorflow as tf

        def theirs(x: Any) -> Any:
            if lists:
                ragged = tf.strings.split(x, "|")
                ids = tf.strings.to_hash_bucket_fast(ragged.values, BUCKETS)
                return ids.numpy(), ragged.row_splits.numpy()
            return tf.strings.to_hash_bucket_fast(x, BUCKETS).numpy()

        add(
            TENSORFLOW, "tensor", theirs, tf.constant(array), "the strings are TensorFlow's already"
        )
        add(TENSORFLOW, "numpy objects", lambda x: theirs(tf.constant(x)), array)
    if not lists:
        add("pyarrow dictionary_encode", "pyarrow", lambda x: x.dictionary_encode(), arrow,
            "other ids: positions in this batch's own dictionary")  # fmt: skip
        add("Python loop over hashlib", "list", fingerprint, strings, "another hash")
    return made


def run(context: Context) -> Result:
    s = context.settings
    n = max(100, round(COUNT * s.scale))
    rows: list[Row] = []
    targets: list[Target] = []
    facts: dict[str, Any] = {
        "strings": n,
        "tensorflow": bool(importlib.util.find_spec("tensorflow")),
    }
    for kind in ("identifiers", "addresses", "names", "lists of tags"):
        strings = make_strings(kind, n)
        ways = contestants(kind, strings)
        with context.progress.step(f"{kind}: comparing"):
            results = {c.key: c.call(c.prepare(0)) for c in ways if c.name in (OURS, TENSORFLOW)}
            first, *others = results.values()
            for other in others:
                assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
        samples = interleave(ways, s.plan)
        nbytes = sum(len(x.encode()) for x in strings)
        group = f"{n:,} {kind}, {nbytes / n:.0f} bytes each, to ids"
        rows += [Row.of(group, c, samples[c.key]) for c in ways]
        facts[kind] = {
            key: {"million_strings_per_s": round(n / x.median / 1e3, 2),
                  "mb_per_s": round(nbytes / x.median / 1e3, 1)}
            for key, x in samples.items()
        }  # fmt: skip
        if facts["tensorflow"]:
            ratio = paired_ratio(
                samples[f"{OURS} / numpy objects"], samples[f"{TENSORFLOW} / numpy objects"]
            )
            targets.append(Target(f"{kind}: ours / TensorFlow, from numpy objects", ratio, "<=", 1, "",
                                  "median over rounds, both in each round"))  # fmt: skip
    return Result(tuple(rows), tuple(targets), facts)
