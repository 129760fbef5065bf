"""One training step by table size: gradients and updates of the rows that were read, beside dense ones.

Both train the same small click model (a row for each of four fields, then an MLP) with the same rule, with tables and
state donated. The dense way is XLA's scatter into a gradient of the table's size and a dense optimizer: optax's where
it is installed, else its formula.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from benchmarks.timing import Contestant, interleave, paired_ratio
from examples.mlp import apply_mlp, init_mlp
from recom_jax import sparse

FIELDS, DIM, BATCH, RATE = 4, 16, 2048, 0.05
SIZES = (10_000, 100_000, 1_000_000)
SPARSE, DENSE = "recom_jax.sparse", "dense gradient and update"
Step = Callable[[Any, Any], tuple[Any, Any]]


def run(context: Context) -> Result:
    s = context.settings
    batch = s.batch if s.quick else BATCH
    sizes = (64, 256) if s.quick else SIZES
    rows: list[Row] = []
    targets: list[Target] = []
    facts: dict[str, Any] = {"batch": batch, "fields": FIELDS, "dim": DIM, "dense rule": _whose()}
    for name in ("sgd", "adagrad"):
        for size in sizes:
            what = f"{name}, {FIELDS} tables of {size:,} rows, batch {batch}"
            with context.progress.step(what):
                found = _measure(context, name, size, batch)
            rows += found[0]
            facts[f"temporary bytes, {what}"] = found[2]
            if size == sizes[-1]:
                measured = "median over rounds; losses and tables are equal up to rounding"
                targets.append(Target(f"{what}: sparse / dense", found[1], "<=", 0.5, "", measured))
    return Result(tuple(rows), tuple(targets), facts)


def _measure(context: Context, name: str, size: int, batch: int) -> tuple[list[Row], float, Any]:
    """(rows, the ratio of sparse to dense, temporary bytes of both)."""
    batches = [_batch(k, size, batch) for k in range(steady.BATCHES)]
    group = f"training step, {name}, {size:,} rows"
    contestants, first, memory, after = [], {}, {}, {}
    for way, step, state in (
        (SPARSE, _sparse(name), _state(name, size, True)),
        (DENSE, _dense(name), _state(name, size, False)),
    ):
        begun = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(state, batches[0]).compile()
        memory[way] = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
        held = {"state": state}
        del state

        def call(k: Any, compiled: Any = compiled, held: dict[str, Any] = held) -> Any:
            held["state"], value = compiled(held["state"], batches[k])
            return value, held["state"]

        c = Contestant(way, steady.DEVICE, lambda k: k % steady.BATCHES, call)
        value, made = jax.block_until_ready(c.call(0))
        first[c.key] = time.perf_counter() - begun
        after[way] = (float(value), [np.asarray(t[:1000]) for t in made[0]])
        del value, made
        contestants.append(c)
    for a, b in zip(jax.tree.leaves(after[SPARSE]), jax.tree.leaves(after[DENSE]), strict=True):
        if not np.allclose(a, b, rtol=1e-3, atol=1e-5):
            raise RuntimeError(f"{group}: the sparse and the dense step train something else")
    samples = interleave(contestants, context.settings.plan)
    made_rows = [Row.of(group, c, samples[c.key], first_s=first[c.key]) for c in contestants]
    ratio = round(paired_ratio(*(samples[c.key] for c in contestants)), 3)
    return made_rows, ratio, memory


def _batch(seed: int, size: int, batch: int) -> dict[str, jax.Array]:
    """Ids of a skewed distribution, as clicks have: many of a few rows, some of all."""
    rng = np.random.default_rng(seed)
    ids = (size * rng.random((FIELDS, batch)) ** 3).astype(np.int32)
    return {"ids": jnp.asarray(ids), "label": jnp.asarray(rng.random(batch) < 0.3, jnp.float32)}


def _state(name: str, size: int, is_sparse: bool) -> Any:
    """(tables, their state, layers), the same numbers for both ways."""
    rng = np.random.default_rng(0)
    tables = [jnp.asarray(rng.normal(size=(size, DIM)), jnp.float32) for _ in range(FIELDS)]
    state = _rule(name).init(tables) if is_sparse else _optax(name)[0](tables)
    return tables, state, init_mlp(rng, FIELDS * DIM, (64, 1))


def _loss(rows: Any, layers: Any, label: jax.Array) -> jax.Array:
    logits = apply_mlp(layers, jnp.concatenate(rows, axis=1), last_relu=False)[:, 0]
    return jnp.mean(jax.nn.softplus(logits) - label * logits)


def _layers(layers: Any, grads: Any) -> Any:
    return jax.tree.map(lambda w, g: w - RATE * g, layers, grads)


def _rule(name: str) -> sparse.Sgd | sparse.Adagrad:
    return sparse.Sgd(RATE) if name == "sgd" else sparse.Adagrad(RATE)


def _sparse(name: str) -> Step:
    rule, both = _rule(name), sparse.value_and_grad(_loss)

    def step(held: Any, batch: Any) -> tuple[Any, Any]:
        tables, state, layers = held
        value, (grads, d_layers) = both(tables, list(batch["ids"]), layers, batch["label"])
        tables, state = rule.update(tables, state, grads)
        return (tables, state, _layers(layers, d_layers)), value

    return step


def _dense(name: str) -> Step:
    _, update = _optax(name)

    def step(held: Any, batch: Any) -> tuple[Any, Any]:
        tables, state, layers = held

        def loss(tables: Any, layers: Any) -> jax.Array:
            rows = [jnp.take(t, i, axis=0) for t, i in zip(tables, batch["ids"], strict=True)]
            return _loss(rows, layers, batch["label"])

        value, (grads, d_layers) = jax.value_and_grad(loss, (0, 1))(tables, layers)
        tables, state = update(tables, state, grads)
        return (tables, state, _layers(layers, d_layers)), value

    return step


def _whose() -> str:
    return "optax" if importlib.util.find_spec("optax") else "the formula of optax"


def _optax(name: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]:
    """(init, update) of the dense optimizer."""
    if importlib.util.find_spec("optax"):
        import optax

        rule: Any = optax.sgd(RATE) if name == "sgd" else optax.adagrad(RATE)

        def with_optax(tables: Any, state: Any, grads: Any) -> Any:
            updates, state = rule.update(grads, state, tables)
            return optax.apply_updates(tables, updates), state

        return rule.init, with_optax

    def init(tables: Any) -> Any:
        return () if name == "sgd" else [jnp.full_like(t, 0.1) for t in tables]

    def update(tables: Any, state: Any, grads: Any) -> Any:
        if name == "sgd":
            return jax.tree.map(lambda t, g: t - RATE * g, tables, grads), state
        state = jax.tree.map(lambda s, g: s + g * g, state, grads)
        new = jax.tree.map(
            lambda t, s, g: t - RATE * g * jax.lax.rsqrt(s + 1e-7), tables, state, grads
        )
        return new, state

    return init, update
