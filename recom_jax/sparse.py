"""Training tables without a gradient as large as a table.

`value_and_grad` looks rows up, differentiates a loss with respect to *the rows*, and hands back `RowGrads`: ids and a
gradient for each of them. `Sgd`, `Adagrad` and `RowwiseAdagrad` (or the functions behind them, one table at a time) add
up what belongs to one row and change the rows that were read, and no others. Under ``jax.jit(step, donate_argnums=0)``
tables and their state are changed in place.

docs/sparse.md is the guide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from recom_jax.errors import ArgumentError
from recom_jax.sparse_lookup import (
    Lookup,
    check_table,
    fused_read,
    match,
    spread,
    subtrees,
    wide,
)
from recom_jax.sparse_sums import check_state, combine, scalar, scatter_add, subtract, summed

__all__ = [
    "Adagrad",
    "Lookup",
    "RowGrads",
    "RowwiseAdagrad",
    "Sgd",
    "adagrad",
    "adagrad_init",
    "combine",
    "row_grads",
    "rows",
    "rowwise_adagrad",
    "rowwise_adagrad_init",
    "sgd",
    "value_and_grad",
]
_DEFAULT = Lookup()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowGrads:
    """The gradient of one table, as far as it was read. Ids may repeat; `combine` adds such up.

    Attributes:
      ids: integers [N], rows of the table; its number of rows stands for "none".
      grads: [N, D], for each id.
    """

    ids: jax.Array
    grads: jax.Array


# ---- looking rows up -----------------------------------------------------------------------------------------


def rows(tables: Any, ids: Any, lookup: Any = _DEFAULT) -> Any:
    """The rows that `ids` name, all of them by one fused call (`recom_jax.optimize`).

    Args:
      tables: a pytree of tables, floats [R, D]; a dict of names, say.
      ids: `tables`' structure, with integers of any shape [...], or a pytree of them (features that share a table),
        in each table's place.
      lookup: a `Lookup` for all tables, or one for each in `tables`' structure.

    Returns:
      The structure of `ids`: [..., D] for each, or, pooled, one axis less. Dtypes are the tables'.

    Raises:
      ArgumentError: (a TypeError) a table is no float array, or ids are no integers.
      SparseError: (a ValueError) structures or shapes do not fit each other.
    """
    m = match(tables, ids, lookup)
    made: Any = fused_read(m.lookups, m.tables, m.ids)
    grown = [jax.tree.unflatten(s, part) for s, part in zip(m.shapes, made, strict=True)]
    return jax.tree.unflatten(m.outline, grown)


def row_grads(tables: Any, ids: Any, d_rows: Any, lookup: Any = _DEFAULT) -> Any:
    """The gradients of tables from those of the rows that `rows` read.

    Args:
      tables, ids, lookup: as `rows` was given them. Of tables, shapes and dtypes alone matter.
      d_rows: the derivative of a loss by what `rows` returned.

    Returns:
      `tables`' structure, with a `RowGrads` in each table's place: N is the number of all ids of that table.

    Raises:
      As `rows`.
    """
    m = match(tables, ids, lookup)
    made = []
    parts = subtrees(m.outline, d_rows, "the rows' gradients")
    for k, (name, table) in enumerate(zip(m.names, m.tables, strict=True)):
        flat = subtrees(m.shapes[k], parts[k], f"the rows' gradients of {name}")
        pairs = [
            spread(name, table, i, g, m.lookups[k]) for i, g in zip(m.ids[k], flat, strict=True)
        ]
        where = [i for i, _ in pairs] or [jnp.zeros(0, jnp.int32)]
        grads = [g for _, g in pairs] or [jnp.zeros((0, table.shape[1]), table.dtype)]
        made.append(RowGrads(jnp.concatenate(where), jnp.concatenate(grads)))
    return jax.tree.unflatten(m.outline, made)


def value_and_grad(
    loss: Callable[..., Any],
    lookup: Any = _DEFAULT,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, for a loss that reads tables through their rows.

    Args:
      loss: ``loss(rows, params, *args)``, a scalar (with `has_aux`, a pair of it and anything): `rows` as the function
        `rows` returns them, `params` any pytree of what else is trained, () if nothing is.
      lookup: as in `rows`.

    Returns:
      A function ``(tables, ids, params, *args) -> (value, (grads, d_params))``; with `has_aux` value is a pair. `grads`
      has `tables`' structure with `RowGrads` for tables, `d_params` is that of `params`. What is given after `params`,
      and keywords, reach the loss as they are.

    Raises:
      As `rows`, when it is called.
    """
    if not callable(loss):
        raise ArgumentError(
            f"sparse.value_and_grad takes a function of (rows, params, ...), not a {type(loss).__name__}"
        )
    inner = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux)

    def both(tables: Any, ids: Any, params: Any, *args: Any, **keywords: Any) -> Any:
        read = rows(tables, ids, lookup)
        value, (d_rows, d_params) = inner(read, params, *args, **keywords)
        return value, (row_grads(tables, ids, d_rows, lookup), d_params)

    return both


# ---- updates of one table ------------------------------------------------------------------------------------


def sgd(
    table: jax.Array, ids: jax.Array, row_grads: jax.Array, lr: Any, *, mode: str = "fill"
) -> jax.Array:
    """``table[i] -= lr * g`` for each id i, where g is the sum of all its gradients.

    Stochastic gradient descent: Goodfellow, Bengio and Courville, Deep Learning, 2016, algorithm 8.1. Equals
    ``optax.sgd`` on the dense gradient.

    Args:
      table: floats [R, D]; 16-bit tables are updated in float32 and rounded once.
      ids: integers of any shape [...].
      row_grads: floats [..., D].
      lr: the learning rate, a number or a scalar array.
      mode: of the lookup (`Lookup`).

    Returns:
      The new table. Rows that no id names keep every bit.

    Raises:
      ArgumentError: (a TypeError) types that are no floats or no integers.
      SparseError: (a ValueError) shapes that do not fit each other.
    """
    where, grads = summed(table, ids, row_grads, mode)
    if 0 in table.shape:
        return jnp.asarray(table)
    return subtract(table, where, scalar(lr, grads.dtype) * grads)


def adagrad_init(table: jax.Array, initial: float = 0.1) -> jax.Array:
    """Adagrad's sums of squares [R, D], `initial` everywhere; float32 for 16-bit tables."""
    check_table("table", table)
    return jnp.full(table.shape, initial, wide(table.dtype))


def adagrad(
    table: jax.Array,
    squares: jax.Array,
    ids: jax.Array,
    row_grads: jax.Array,
    lr: Any,
    *,
    eps: float = 1e-7,
    mode: str = "fill",
) -> tuple[jax.Array, jax.Array]:
    """``squares[i] += g * g``, then ``table[i] -= lr * g / sqrt(squares[i] + eps)``; g is the sum of i's gradients.

    The diagonal form of Duchi, Hazan and Singer, Adaptive subgradient methods, JMLR 12, 2011, section 1.1, with optax's
    place for epsilon: equals ``optax.adagrad`` on the dense gradient. Where squares are 0, nothing moves.

    Args:
      table, ids, row_grads, lr, mode: as in `sgd`.
      squares: [R, D], from `adagrad_init`.
      eps: added to the squares.

    Returns:
      (the new table, the new squares); rows that no id names keep every bit in both.

    Raises:
      As `sgd`.
    """
    where, grads = summed(table, ids, row_grads, mode)
    check_state("squares", squares, table.shape, wide(table.dtype))
    if 0 in table.shape:
        return jnp.asarray(table), jnp.asarray(squares)
    total = scatter_add(squares, where, grads * grads)
    here = total.at[where].get(mode="fill", fill_value=0)
    scale = jnp.where(here > 0, jax.lax.rsqrt(here + eps), 0)
    return subtract(table, where, scalar(lr, grads.dtype) * (scale * grads)), total


def rowwise_adagrad_init(table: jax.Array, initial: float = 0.0) -> jax.Array:
    """Row-wise Adagrad's state [R], `initial` everywhere; float32 for 16-bit tables."""
    check_table("table", table)
    return jnp.full(table.shape[:1], initial, wide(table.dtype))


def rowwise_adagrad(
    table: jax.Array,
    moments: jax.Array,
    ids: jax.Array,
    row_grads: jax.Array,
    lr: Any,
    *,
    eps: float = 1e-8,
    mode: str = "fill",
) -> tuple[jax.Array, jax.Array]:
    """``moments[i] += mean(g * g)``, then ``table[i] -= lr * g / (sqrt(moments[i]) + eps)``: one number a row.

    The exact row-wise Adagrad of FBGEMM (``EXACT_ROWWISE_ADAGRAD`` without weight decay); Mudigere et al.,
    Software-hardware co-design for fast and scalable training of deep learning recommendation models, ISCA 2022.
    "Exact": g is the sum of all of i's gradients in the batch, squared once. Where a moment is 0, nothing
    moves.

    Args:
      table, ids, row_grads, lr, mode: as in `sgd`.
      moments: [R], from `rowwise_adagrad_init`.
      eps: added to the root.

    Returns:
      (the new table, the new moments); rows that no id names keep every bit in both.

    Raises:
      As `sgd`.
    """
    where, grads = summed(table, ids, row_grads, mode)
    check_state("moments", moments, table.shape[:1], wide(table.dtype))
    if 0 in table.shape:
        return jnp.asarray(table), jnp.asarray(moments)
    mean = jnp.sum(grads * grads, axis=1) / table.shape[1]
    total = scatter_add(moments, where, mean)
    here = total.at[where].get(mode="fill", fill_value=0)
    scale = jnp.where(here > 0, 1 / (jnp.sqrt(here) + eps), 0)
    return subtract(table, where, scalar(lr, grads.dtype) * (scale[:, None] * grads)), total


# ---- optimizers of many tables -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sgd:
    """`sgd` for a pytree of tables. `lr`: a number or a scalar array; a schedule makes a new object in each step."""

    lr: Any

    def init(self, tables: Any) -> Any:
        """No state: () for each table."""
        return jax.tree.map(lambda table: (), tables)

    def update(self, tables: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """(new tables, state); `grads` as `value_and_grad` returns them."""
        return _each(tables, state, grads, lambda t, s, g: (sgd(t, g.ids, g.grads, self.lr), s))


@dataclasses.dataclass(frozen=True)
class Adagrad:
    """`adagrad` for a pytree of tables. Defaults are optax's."""

    lr: Any
    initial: float = 0.1
    eps: float = 1e-7

    def init(self, tables: Any) -> Any:
        """Sums of squares [R, D] for each table."""
        return jax.tree.map(lambda table: adagrad_init(table, self.initial), tables)

    def update(self, tables: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """(new tables, new state); `grads` as `value_and_grad` returns them."""
        return _each(
            tables,
            state,
            grads,
            lambda t, s, g: adagrad(t, s, g.ids, g.grads, self.lr, eps=self.eps),
        )


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad:
    """`rowwise_adagrad` for a pytree of tables. Defaults are FBGEMM's."""

    lr: Any
    initial: float = 0.0
    eps: float = 1e-8

    def init(self, tables: Any) -> Any:
        """One number a row, [R], for each table."""
        return jax.tree.map(lambda table: rowwise_adagrad_init(table, self.initial), tables)

    def update(self, tables: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """(new tables, new state); `grads` as `value_and_grad` returns them."""
        return _each(
            tables,
            state,
            grads,
            lambda t, s, g: rowwise_adagrad(t, s, g.ids, g.grads, self.lr, eps=self.eps),
        )


def _each(
    tables: Any, state: Any, grads: Any, one: Callable[[Any, Any, RowGrads], tuple[Any, Any]]
) -> tuple[Any, Any]:
    outline = jax.tree.structure(tables)
    states = subtrees(outline, state, "the optimizer's state")
    parts = subtrees(outline, grads, "the gradients")
    made = []
    for table, old, grad in zip(jax.tree.leaves(tables), states, parts, strict=True):
        if not isinstance(grad, RowGrads):
            raise ArgumentError(
                f"update takes the RowGrads of sparse.value_and_grad or sparse.row_grads for a table, "
                f"not a {type(grad).__name__}"
            )
        made.append(one(table, old, grad))
    return (
        jax.tree.unflatten(outline, [t for t, _ in made]),
        jax.tree.unflatten(outline, [s for _, s in made]),
    )
