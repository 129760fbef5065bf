"""RAP's plans over several GPUs: tables parted between them, layers on all of them, each batch split by rows.

A device prepares its rows of the dense features, and of the sparse ones those whose tables it owns, for all rows: the
step exchanges rows of tables and their gradients, and no ids. "Without mapping" each device prepares its rows of all,
and the step exchanges ids as well.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cases import gpu_corun
from benchmarks.context import Context
from benchmarks.record import Result, Row, Target
from examples import rap_plans
from examples.click_models import Dlrm
from recom_jax import corun
from recom_jax.corun.report import CORUN, IDEAL

AXIS = "gpus"
MAPPED = {"label": P(AXIS), "dense": P(AXIS), "ids": P(None, AXIS)}
UNMAPPED = {"label": P(AXIS), "dense": P(AXIS), "ids": P(AXIS)}
STATE = {"tables": P(AXIS), "layers": P()}
NO_MAPPING = "co-run without mapping"


@dataclasses.dataclass(frozen=True)
class Parted:
    """A DLRM whose tables, one array [fields, rows, dim], are parted between the devices of a mesh.

    Attributes:
      mapped: ids come to the owners of their tables; else they are split by rows, as all else is.
      frozen: tables are not updated, so that each run gives the same bits.
    """

    model: Dlrm
    mesh: Mesh
    mapped: bool = True
    frozen: bool = False

    @property
    def specs(self) -> dict[str, P]:
        return MAPPED if self.mapped else UNMAPPED

    @property
    def fields(self) -> int:
        """A multiple of the devices."""
        n = self.mesh.devices.size
        return -(-len(self.model.rows) // n) * n

    def prep(self, plan: rap_plans.RapPlan) -> Callable[[Any], Any]:
        """The plan's program, with fields without ids behind the last one as needed."""

        def prep(raw: Any) -> Any:
            made = plan.prep(raw)
            more = self.fields - made["ids"].shape[1]
            if more:
                none = jnp.full((made["ids"].shape[0], more, made["ids"].shape[2]), -1, jnp.int32)
                made["ids"] = jnp.concatenate([made["ids"], none], 1)
            return made

        return prep

    def init(self) -> Any:
        """The first state: the same one each time, in memory of its own."""
        placed = NamedSharding(self.mesh, P())
        return {
            "tables": self._tables(),
            "layers": jax.device_put(self._layers, placed, may_alias=False),
        }

    @functools.cached_property
    def _tables(self) -> Callable[[], jax.Array]:
        shape = (self.fields, self.model.rows[0], self.model.dim)
        bound = float(1 / np.sqrt(self.model.dim))

        def tables() -> jax.Array:
            return jax.random.uniform(jax.random.key(0), shape, minval=-bound, maxval=bound)

        return jax.jit(tables, out_shardings=NamedSharding(self.mesh, P(AXIS)))

    @functools.cached_property
    def _layers(self) -> Any:
        return jax.tree.map(np.asarray, self.model.init_layers(np.random.default_rng(0)))

    def step(self) -> Callable[[Any, Any], Any]:
        """Jitted: (state, batch) -> (state, metrics); the state is donated unless it is frozen."""
        made = jax.shard_map(
            self.local_step,
            mesh=self.mesh,
            in_specs=(STATE, self.specs),
            out_specs=(STATE, {"loss": P()}),
            check_vma=False,
        )
        return jax.jit(made, donate_argnums=() if self.frozen else 0)

    def local_step(self, state: Any, batch: Any) -> Any:
        """On each device: its tables for all rows, then its rows for all tables."""
        tables, ids = state["tables"], batch["ids"]
        if not self.mapped:
            ids = jax.lax.all_to_all(ids, AXIS, 1, 0, tiled=True)
        mine, rows, dim = tables.shape
        flat = tables.reshape(mine * rows, dim)
        there = ids >= 0
        places = jnp.where(there, ids + rows * jnp.arange(mine)[:, None], 0)
        read = jnp.where(there[..., None], flat[places], 0).sum(2)
        read = corun.stage(read, "emb_fwd")
        vectors = jax.lax.all_to_all(read, AXIS, 0, 1, tiled=True)
        label = batch["label"]

        def loss(layers: Any, vectors: jax.Array) -> jax.Array:
            logits = self.model.logits(layers, vectors[:, : len(self.model.rows)], batch["dense"])
            logits = corun.stage(logits, "mlp_fwd")
            whole = label.shape[0] * self.mesh.devices.size
            mean: jax.Array = jnp.sum(jax.nn.softplus(logits) - label * logits) / whole
            return mean

        value, (d_layers, d_vectors) = jax.value_and_grad(loss, argnums=(0, 1))(
            state["layers"], vectors
        )
        d_layers, d_vectors = corun.stage((d_layers, d_vectors), "mlp_bwd")
        d_layers = jax.lax.psum(d_layers, AXIS)
        layers = jax.tree.map(lambda w, g: w - self.model.rate * g, state["layers"], d_layers)
        if not self.frozen:
            d_rows = jax.lax.all_to_all(d_vectors, AXIS, 1, 0, tiled=True)
            change = jnp.broadcast_to(-self.model.rate * d_rows[:, :, None], (*ids.shape, dim))
            outside = jnp.where(there, places, mine * rows)
            flat = flat.at[outside].add(change, mode="drop")
        made = {"tables": flat.reshape(tables.shape), "layers": layers}
        return made, {"loss": jax.lax.psum(value, AXIS)}


def run(context: Context, number: int) -> Result:
    """One plan, 4,096 rows a device."""
    quick = context.settings.quick
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    size = (16 if quick else gpu_corun.BATCHES[0]) * mesh.devices.size
    plan = rap_plans.plan(number, shrink=8 if quick else 1, rows=500 if quick else None)
    like = plan.model(dim=8, small=True) if quick else plan.model()
    fields = {f.name: getattr(like, f.name) for f in dataclasses.fields(like)}
    model = Dlrm(**fields | {"rate": gpu_corun.RATE})
    with context.progress.step(f"RAP plan {number}: raw batches"):
        distinct = list(plan.raw_batches(2 if quick else gpu_corun.DISTINCT, size))
    raws = [distinct[k % len(distinct)] for k in range(12 if quick else gpu_corun.STEPS)]
    rounds = min(context.settings.plan.rounds, 5)
    what = f"RAP plan {number}, {plan.operators} operators, {mesh.devices.size} GPUs, batch {size}"
    options = corun.Options(
        slots=gpu_corun.SLOTS,
        copy=False,
        runtime="stream",
        steps_in_flight=gpu_corun.AHEAD,
    )
    times: dict[str, tuple[float, ...]] = {}
    for mapped in (True, False):
        parted = Parted(model, mesh, mapped)
        pipe = corun.Pipeline(parted.prep(plan), parted.step(), mesh, options, specs=parted.specs)
        modes = None if mapped else (IDEAL, CORUN)
        which = "" if mapped else "without mapping, "
        with context.progress.step(f"{what}: {which}preprocessing kernels"):
            pipe.streams(distinct[0])
        with context.progress.step(f"{what}: {which}{rounds} rounds"):
            corun.measure(pipe, parted.init, raws, rounds=rounds, rtol=0.05, modes=modes)
        if mapped:
            times |= pipe.baselines
        else:
            times[NO_MAPPING] = pipe.baselines[CORUN]
    with context.progress.step(f"{what}: losses bit for bit"):
        different = differences(Parted(model, mesh, frozen=True), plan, distinct, options)
    rows = [
        Row.single(what, mode, gpu_corun.INPUTS, "ms", [1e3 * x for x in seconds])
        for mode, seconds in times.items()
    ]
    bits = "a deterministic step, co-run and on inputs preprocessed beforehand"
    targets = [
        Target(f"{what}: losses that differ in a bit", different, "==", 0, "", bits),
        *gpu_corun.ratios(what, times),
    ]
    return Result(tuple(rows), tuple(targets), {"devices": mesh.devices.size})


def differences(
    parted: Parted, plan: rap_plans.RapPlan, raws: list[Any], options: corun.Options
) -> int:
    """Steps whose loss differs between a co-run and inputs preprocessed beforehand."""
    step = parted.step()
    pipe = corun.Pipeline(parted.prep(plan), step, parted.mesh, options, specs=parted.specs)
    state, wanted = parted.init(), []
    for raw in raws:
        state, metrics = step(state, pipe.prepare(raw))
        wanted.append(np.asarray(metrics["loss"]))
    found = [np.asarray(m["loss"]) for _, m in pipe.run(parted.init(), raws)]
    return sum(a.tobytes() != b.tobytes() for a, b in zip(found, wanted, strict=True))
