"""TorchArrow's operators on two lists of ids and their scores: overlaps, similarities, sums.

The ids of both lists of all rows are sorted together by (row, id); each run of equal ids then holds what is to be
known of an id: how often it stands on either side, and the sum of its scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recom_jax.errors import PreprocessError
from recom_jax.preprocess.lists import lists_of, live_lengths, row_validity
from recom_jax.preprocess.operator import operator
from recom_jax.preprocess.values import (
    Column,
    Jagged,
    as_float,
    put_together,
    same_rows,
    take_apart,
    words_of,
)


class _Runs(NamedTuple):
    """One entry for each distinct id of a row (and unused ones): its row, B for none, and its figures."""

    row: jax.Array
    left: jax.Array
    right: jax.Array
    left_score: jax.Array
    right_score: jax.Array
    right_least: jax.Array
    right_most: jax.Array


def _runs(name: str, a: Jagged, b: Jagged, sa: Any = None, sb: Any = None) -> _Runs:
    rows = a.rows
    sides: list[tuple[jax.Array, ...]] = []
    for ids, scores, which in ((a, sa, 0), (b, sb, 1)):
        values, _ = take_apart(ids.values)
        w = words_of(values, name)
        seg = ids.segment_ids()
        weight = (
            jnp.ones(ids.capacity, jnp.float32) if scores is None else _scores(name, ids, scores)
        )
        sides.append((seg, w.hi, w.lo, jnp.full(ids.capacity, which, jnp.int32), weight))
    row, hi, lo, side, score = [jnp.concatenate(parts) for parts in zip(*sides, strict=True)]
    total = row.shape[0]
    if not total:
        none = jnp.zeros(0, jnp.float32)
        return _Runs(jnp.zeros(0, jnp.int32), none, none, none, none, none, none)
    row, hi, lo, side, score = jax.lax.sort((row, hi, lo, side, score), num_keys=3, is_stable=True)
    new = (row[1:] != row[:-1]) | (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
    run = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new.astype(jnp.int32))])

    def summed(v: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(v, run, total, indices_are_sorted=True)

    on_right = side == 1
    return _Runs(
        jax.ops.segment_min(row, run, total, indices_are_sorted=True).clip(0, rows),
        summed((~on_right).astype(jnp.float32)),
        summed(on_right.astype(jnp.float32)),
        summed(jnp.where(on_right, 0, score)),
        summed(jnp.where(on_right, score, 0)),
        jax.ops.segment_min(jnp.where(on_right, score, jnp.inf), run, total),
        jax.ops.segment_max(jnp.where(on_right, score, -jnp.inf), run, total),
    )


def _scores(name: str, ids: Jagged, scores: Jagged) -> jax.Array:
    values, _ = take_apart(scores.values)
    made = as_float(values).astype(jnp.float32)
    if made.shape[0] != ids.capacity:
        raise PreprocessError(
            f"length mismatch: {name} takes a score for each id, was given {ids.capacity} ids, "
            f"{made.shape[0]} scores"
        )
    if scores.row_splits is ids.row_splits:
        return made
    # By row: where one list is null, or has other scores than ids, those of the rows behind it are elsewhere.
    seg, at = ids.segment_ids(), jnp.arange(ids.capacity, dtype=jnp.int32)
    row = seg.clip(0, max(ids.rows - 1, 0))
    ours, theirs = jnp.asarray(ids.row_splits), jnp.asarray(scores.row_splits)
    if not ids.rows or not ids.capacity:
        return made
    place = theirs[row] + (at - ours[row])
    found = made.at[place].get(mode="clip")
    return jnp.where((seg < ids.rows) & (place >= theirs[row + 1]), jnp.nan, found)


def _pair(name: str, *columns: Any) -> list[Jagged]:
    made = [lists_of(name, c) for c in columns]
    same_rows(name, *made)
    return made


def _per_row(values: jax.Array, runs: _Runs, rows: int) -> jax.Array:
    return jax.ops.segment_sum(values, runs.row, rows)


def _overlap(name: str, a: Jagged, b: Jagged) -> tuple[jax.Array, Any]:
    runs = _runs(name, a, b)
    return _per_row(jnp.minimum(runs.left, runs.right), runs, a.rows), row_validity(a, b)


@operator(columns=2)
def id_overlap_count(input_ids: Column, matching_ids: Column) -> Column:
    """How many ids two lists have in common, repeated ones as often as both have them. (B,) float32; null where a list
    is null or has a null."""
    a, b = _pair("id_overlap_count", input_ids, matching_ids)
    return put_together(*_overlap("id_overlap_count", a, b))


@operator(columns=2)
def has_id_overlap(input_ids: Column, matching_ids: Column) -> Column:
    """1.0 where two lists have an id in common, else 0.0. (B,) float32; nulls as in `id_overlap_count`."""
    a, b = _pair("has_id_overlap", input_ids, matching_ids)
    count, valid = _overlap("has_id_overlap", a, b)
    return put_together((count > 0).astype(jnp.float32), valid)


@operator(columns=2)
def get_max_count(input_ids: Column, matching_ids: Column) -> Column:
    """For each id in both lists the larger of its two counts, summed. (B,) float32; nulls as in `id_overlap_count`."""
    a, b = _pair("get_max_count", input_ids, matching_ids)
    runs = _runs("get_max_count", a, b)
    larger = jnp.where((runs.left > 0) & (runs.right > 0), jnp.maximum(runs.left, runs.right), 0)
    return put_together(_per_row(larger, runs, a.rows), row_validity(a, b))


@operator(columns=2)
def get_jaccard_similarity(input_ids: Column, matching_ids: Column) -> Column:
    """Overlap over union, with multiplicity. (B,) float32; NaN for two empty lists; nulls as in `id_overlap_count`."""
    a, b = _pair("get_jaccard_similarity", input_ids, matching_ids)
    count, valid = _overlap("get_jaccard_similarity", a, b)
    union = (live_lengths(a) + live_lengths(b)).astype(jnp.float32) - count
    return put_together(count / union, valid)


@operator(columns=4)
def get_cosine_similarity(
    input_ids: Column, input_id_scores: Column, matching_ids: Column, matching_id_scores: Column
) -> Column:
    """The cosine of two lists as vectors over ids, scores as weights (those of a repeated id add up).

    Returns:
      (B,) float32; NaN where a vector has no length or fewer scores than ids (TorchArrow raises); null where any list
      is null or has a null.
    """
    name = "get_cosine_similarity"
    a, sa, b, sb = _pair(name, input_ids, input_id_scores, matching_ids, matching_id_scores)
    runs = _runs(name, a, b, sa, sb)
    dot = _per_row(
        jnp.where((runs.left > 0) & (runs.right > 0), runs.left_score * runs.right_score, 0),
        runs,
        a.rows,
    )
    norms = [jnp.sqrt(_per_row(s * s, runs, a.rows)) for s in (runs.left_score, runs.right_score)]
    return put_together(dot / norms[0] / norms[1], row_validity(a, sa, b, sb))


@operator(columns=4)
def get_score_sum(
    input_ids: Column, input_id_scores: Column, matching_ids: Column, matching_id_scores: Column
) -> Column:
    """The sum of the matching scores whose id is in `input_ids`. (B,) float32; nulls as in `get_cosine_similarity`."""
    name = "get_score_sum"
    a, sa, b, sb = _pair(name, input_ids, input_id_scores, matching_ids, matching_id_scores)
    runs = _runs(name, a, b, sa, sb)
    found = jnp.where(runs.left > 0, runs.right_score, 0)
    return put_together(_per_row(found, runs, a.rows), row_validity(a, sa, b, sb))


def _extreme(name: str, columns: tuple[Any, ...], least: bool) -> Column:
    a, b, sb = _pair(name, *columns)
    runs = _runs(name, a, b, None, sb)
    shared = (runs.left > 0) & (runs.right > 0)
    worst = jnp.inf if least else -jnp.inf
    value = jnp.where(shared, runs.right_least if least else runs.right_most, worst)
    reduce = jax.ops.segment_min if least else jax.ops.segment_max
    found = _per_row(shared.astype(jnp.float32), runs, a.rows) > 0
    made = jnp.where(found, reduce(value, runs.row, a.rows), 0)
    return put_together(made, row_validity(a, b, sb))


@operator(columns=3)
def get_score_min(input_ids: Column, matching_ids: Column, matching_id_scores: Column) -> Column:
    """The least matching score whose id is in `input_ids`, 0 if none is. (B,) float32; null where any list is null or
    has a null."""
    return _extreme("get_score_min", (input_ids, matching_ids, matching_id_scores), least=True)


@operator(columns=3)
def get_score_max(input_ids: Column, matching_ids: Column, matching_id_scores: Column) -> Column:
    """The largest matching score whose id is in `input_ids`, 0 if none is. (B,) float32; nulls as there."""
    return _extreme("get_score_max", (input_ids, matching_ids, matching_id_scores), least=False)


__all__ = [
    "get_cosine_similarity", "get_jaccard_similarity", "get_max_count", "get_score_max", "get_score_min",
    "get_score_sum", "has_id_overlap", "id_overlap_count",
]  # fmt: skip
