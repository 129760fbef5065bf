"""The gradient of tables: forward and backward of pooled lookups, fused beside XLA's dense scatter.

Both differentiate the same function, one of them optimized, by its tables; results are gradients as large as the
tables, which both must fill with zeros first. Bags, widths and tables vary; the last shape has as many columns as a
large model, where compile time is what tells.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import recom_jax
from benchmarks import steady
from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from benchmarks.timing import Contestant, interleave, paired_ratio

FUSED, DENSE = "fused backward", "XLA's dense scatter"


@dataclasses.dataclass(frozen=True)
class Shape:
    """`tables` of [rows, dim]; `bag` ids a bag, `batch` bags a table."""

    tables: int
    rows: int
    dim: int
    bag: int
    batch: int

    def __str__(self) -> str:
        ids = "an id" if self.bag == 1 else f"{self.bag} ids"
        return (
            f"{self.tables} tables of {self.rows:,} x {self.dim}, {ids} a bag, batch {self.batch:,}"
        )


# (shape, what the ratio to the dense scatter must not exceed)
SHAPES = (
    (Shape(26, 10_000, 16, 1, 2048), 1.05),
    (Shape(26, 10_000, 16, 10, 2048), 1.0),
    (Shape(4, 100_000, 64, 20, 4096), 0.7),
    (Shape(1, 1_000_000, 32, 1, 4096), 1.05),
    (Shape(500, 1000, 8, 5, 256), 1.05),
)
QUICK = ((Shape(3, 64, 8, 3, 32), 1e9),)


def run(context: Context) -> Result:
    rows: list[Row] = []
    targets: list[Target] = []
    for shape, limit in QUICK if context.settings.quick else SHAPES:
        with context.progress.step(str(shape)):
            found, ratio = _measure(context, shape)
        rows += found
        measured = "median over rounds; gradients are equal up to rounding"
        targets.append(Target(f"{shape}: fused / dense", ratio, "<=", limit, "", measured))
    return Result(tuple(rows), tuple(targets))


def _measure(context: Context, shape: Shape) -> tuple[list[Row], float]:
    rng = np.random.default_rng(0)
    size = (shape.rows, shape.dim)
    tables = [jnp.asarray(rng.normal(size=size), jnp.float32) for _ in range(shape.tables)]
    weights = jnp.asarray(rng.normal(size=shape.tables * shape.dim), jnp.float32)
    batches = [_batch(k, shape) for k in range(steady.BATCHES)]
    contestants, first, after = [], {}, {}
    for way, model in ((FUSED, recom_jax.optimize(_columns)), (DENSE, _columns)):
        begun = time.perf_counter()
        step = _step(model, weights).lower(tables, batches[0]).compile()

        def call(k: Any, step: Any = step) -> Any:
            return step(tables, batches[k])

        c = Contestant(way, steady.DEVICE, lambda k: k % steady.BATCHES, call)
        made = jax.block_until_ready(c.call(0))
        first[c.key] = time.perf_counter() - begun
        after[way] = [np.asarray(g[:1000]) for g in made]
        contestants.append(c)
    for a, b in zip(after[FUSED], after[DENSE], strict=True):
        if not np.allclose(a, b, rtol=1e-3, atol=1e-4):
            raise RuntimeError(f"{shape}: the fused gradient is another")
    samples = interleave(contestants, context.settings.plan)
    made_rows = [Row.of(str(shape), c, samples[c.key], first_s=first[c.key]) for c in contestants]
    return made_rows, round(paired_ratio(*(samples[c.key] for c in contestants)), 3)


def _columns(tables: Sequence[jax.Array], ids: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([t[i].sum(1) for t, i in zip(tables, ids, strict=True)], -1)


def _step(model: Callable[..., jax.Array], weights: jax.Array) -> Any:
    def loss(tables: Sequence[jax.Array], ids: Sequence[jax.Array]) -> jax.Array:
        return jnp.tanh(model(tables, ids) @ weights).sum()

    return jax.jit(jax.grad(loss))


def _batch(seed: int, shape: Shape) -> list[jax.Array]:
    """Ids of a skewed distribution, as clicks have: many of a few rows, some of all."""
    rng = np.random.default_rng(seed)
    ids = (shape.rows * rng.random((shape.tables, shape.batch, shape.bag)) ** 3).astype(np.int32)
    return [jnp.asarray(x) for x in ids]
