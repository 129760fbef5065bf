"""The workloads by name, each with its peers.

A spec is a dict of plain values, so that it travels to a fresh process:
`{"kind": "model_e", "large_rows": 4096, "scale": 0.02, "mlp": False}`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.criteo import Dlrm
from examples.mlp import apply_mlp
from examples.recflex import recflex
from examples.recom_models import DENSE, RecomModel, int_hash, microbenchmark, model_e, model_f

Function = Callable[[Any, Any], jax.Array]
Params = Any
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and the other ways to write it that are worth comparing with.

    `fn(params, batch)` is the model as written. `tuned` computes the same, each column tuned for XLA by
    hand. `hand` computes it from `stack_params(params)` and `stack_batch(batch)`; `hand_loop` likewise, with
    JAX's default search (a loop over all columns at once) in place of comparisons: the better one on a CPU.
    """

    name: str
    columns: int
    fn: Function
    init: Callable[[], Params]
    batches: Callable[[int, int], list[Batch]]
    tuned: Function | None = None
    hand: Function | None = None
    hand_loop: Function | None = None
    stack_params: Callable[[Params], Params] | None = None
    stack_batch: Callable[[Batch], Batch] | None = None


def make(spec: Mapping[str, Any]) -> Workload:
    """The workload of a spec.

    Raises:
      ValueError: unknown kind.
    """
    spec = dict(spec)
    kind = spec.pop("kind")
    makers: dict[str, Callable[..., Workload]] = {
        "model_e": lambda mlp, **kw: _recom(model_e(**kw), mlp),
        "model_f": lambda mlp, **kw: _recom(model_f(**kw), mlp),
        "microbenchmark": lambda **kw: _recom(microbenchmark(**kw), False),
        "recflex": _recflex,
        "criteo": _criteo,
    }
    if kind not in makers:
        raise ValueError(f"unknown workload {kind!r}: expected one of {', '.join(makers)}")
    return makers[kind](**spec)


def _recom(model: RecomModel, mlp: bool) -> Workload:
    def with_mlp(wide: jax.Array, params: Params, dense: Any) -> jax.Array:
        """`columns` of any form -> what `forward` gives."""
        bottom = apply_mlp(params["bottom"], jnp.asarray(dense))
        joined = jnp.concatenate([wide[:, :-DENSE], bottom], axis=1)
        return jax.nn.sigmoid(apply_mlp(params["top"], joined, last_relu=False)[:, 0])

    def tuned(params: Params, batch: Any) -> jax.Array:
        wide = model.columns_tuned(params, batch)
        return with_mlp(wide, params, batch["dense"]) if mlp else wide

    def hand(params: Params, batch: Any) -> jax.Array:
        wide = model.columns_hand_batched(params["stacked"], batch)
        return with_mlp(wide, params, batch["dense"]) if mlp else wide

    def read(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table.at[ids].get(mode="promise_in_bounds")

    def hand_loop(params: Params, batch: Any) -> jax.Array:
        pieces = []
        for kind, columns in model.by_kind().items():
            one, x = columns[0], jnp.asarray(batch[kind])
            if kind == "bucket":
                ids = jnp.searchsorted(jnp.asarray(one.boundaries), x, side="right")
            elif kind == "hash":
                ids = int_hash(x, one.rows)
            else:
                ids = jnp.where(x >= 0, x % one.rows, 0)
            rows = jax.vmap(read)(
                params["stacked"][kind], ids
            )  # [N, B, dim], or [N, B, TOKENS, dim]
            if rows.ndim == 4:
                rows = jnp.sum(jnp.where((x >= 0)[..., None], rows, 0), axis=2)
            pieces.append(jnp.swapaxes(rows, 0, 1).reshape(rows.shape[1], -1))
        dense = [jnp.asarray(batch["dense"])] if model.has_dense else []
        wide = jnp.concatenate(pieces + dense, axis=1)
        return with_mlp(wide, params, batch["dense"]) if mlp else wide

    def stack_params(params: Params) -> Params:
        stacked = model.stack_params(params)
        return {"stacked": stacked, "bottom": params["bottom"], "top": params["top"]}

    same = all(
        c.rows == group[0].rows and np.array_equal(c.boundaries, group[0].boundaries)
        for group in model.by_kind().values()
        for c in group
    )
    return Workload(
        name=model.name,
        columns=len(model.specs),
        fn=model.forward if mlp else model.columns,
        init=lambda: model.init(seed=0),
        batches=lambda size, count: [model.batch(size, seed) for seed in range(count)],
        tuned=tuned,
        hand=hand if same else None,
        hand_loop=hand_loop if same else None,
        stack_params=stack_params if same else None,
        stack_batch=model.stack_batch if same else None,
    )


def _recflex(name: str, scale: float, max_rows: int | None, mlp: bool) -> Workload:
    model = recflex(name, scale=scale, max_rows=max_rows, expand="searchsorted")

    def batches(size: int, count: int) -> list[Batch]:
        """Padded to common totals (the model ignores padding): plain JAX compiles for each new shape."""
        made = [model.batch(size, seed) for seed in range(count)]
        longest = {k: max(len(b[k]) for b in made) for k in made[0]}
        return [{k: np.pad(v, (0, longest[k] - len(v))) for k, v in b.items()} for b in made]

    return Workload(
        name=model.name,
        columns=len(model.features),
        fn=model.forward if mlp else model.columns,
        init=lambda: model.init(seed=0),
        batches=batches,
    )


def _criteo(vocabulary: int, dim: int, mlp: bool) -> Workload:
    model = Dlrm(vocabulary=vocabulary, dim=dim, hash_in_model=True)

    def batches(size: int, count: int) -> list[Batch]:
        made = [model.batch(size, seed) for seed in range(count)]
        return [
            {k: v for k, v in b.items() if k != "label" and (mlp or k != "dense")} for b in made
        ]

    return Workload(
        name="criteo_dlrm",
        columns=26,
        fn=model.forward if mlp else model.columns,
        init=lambda: model.init(seed=0),
        batches=batches,
    )
