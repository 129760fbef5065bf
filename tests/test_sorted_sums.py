"""Gradients as a GPU computes them: a sort between two fused calls. Here they run on the CPU, or are emulated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import backward, compat, sorted_sums
from recom_jax.backward import Pullback
from recom_jax.errors import EncodeError
from tests import cuda_emulation
from tests.helpers import EPS, assert_same, table
from tests.random_columns import arguments
from tests.random_models import build
from tests.test_backward import ALWAYS, LINEAR, arrays, jagged

Found = tuple[Pullback, list[Any]]
needs_compiler = pytest.mark.skipif(
    cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())
)


def row_sums_of(fn: Callable[..., Any], tables: Any, *rest: Any) -> Found:
    """The one row sum in the gradient of a function by its tables, with what it is given for an odd cotangent."""
    found: list[Found] = []

    def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            given = [v.val if isinstance(v, compat.Literal) else known[v] for v in eqn.invars]
            inner = compat.inner_jaxpr(eqn)
            if eqn.primitive is backward.row_sums_p:
                found.append((eqn.params["pull"], given))
            if inner is None:
                made = compat.bind_eqn(eqn, given)
            else:
                made = evaluate(compat.open_jaxpr(inner), inner.consts, given)
            known.update(zip(eqn.outvars, made, strict=True))
        return [v.val if isinstance(v, compat.Literal) else known[v] for v in jaxpr.outvars]

    optimized = recom_jax.optimize(fn, options=ALWAYS)

    def gradient(tables: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda t: optimized(t, *rest), tables)
        rng = np.random.default_rng(3)
        return pull(jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), out))

    closed = jax.make_jaxpr(gradient)(tables, *rest)
    evaluate(compat.open_jaxpr(closed), closed.consts, jax.tree.leaves((tables, *rest)))
    (one,) = found
    return one


def check(pull: Pullback, operands: Sequence[Any], most: Any = 2e-5) -> None:
    """The sorted sums are the CPU's, whose target adds item by item, and no scatter is left."""
    assert backward.refused_on_cuda(pull) == ""
    run = jax.jit(functools.partial(backward.sorted_pull, pull))
    text = run.lower(operands).as_text()
    assert "scatter" not in text and text.count("call @recom_fused_v1") >= 2
    got, want = run(operands), backward.row_sums_p.bind(*operands, pull=pull)
    sizes = backward.row_sums_p.bind(
        *operands[: pull.n_numbers], *map(jnp.abs, operands[pull.n_numbers :]), pull=pull
    )
    assert_same(got, want, [most * (1 + np.abs(np.asarray(s, np.float64))) for s in sizes])


@pytest.mark.parametrize("name", LINEAR)
def test_sorted_sums_are_the_same(name: str) -> None:
    t, i, w = arrays()
    check(*row_sums_of(LINEAR[name], t, i, w))


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64"])
def test_types(kind: str) -> None:
    with jax.enable_x64(kind == "float64"):
        t, i, w = arrays(kind)
        for name in (
            ("weighted", "concatenation") if kind == "float64" else ("stack", "segment_sum")
        ):
            pull, operands = row_sums_of(LINEAR[name], t, i, w)
            check(pull, operands, {"float64": 1e-14}.get(kind, 8 * float(jnp.finfo(kind).eps)))


def many(tables: Any, i: Any, w: Any) -> Any:
    """Tables of several sizes, one of them read twice, with and without weights."""
    a, b, c = tables
    return jnp.concatenate(
        [a[i].sum(1), (b[i % 3] * w[..., None]).sum(1), c[i[:, 0]], a[i[:, 1]], b[i[:, 2]]], -1
    )


def test_many_tables_and_rows_that_everyone_reads() -> None:
    tables = [table(rows, dim) for rows, dim in ((9, 4), (50, 7), (1, 1))]
    n = 700
    i = np.where(np.random.default_rng(0).random((n, 3)) < 0.8, 0, 7).astype(np.int32)
    w = np.random.default_rng(1).normal(size=(n, 3)).astype(np.float32)
    pull, operands = row_sums_of(many, tables, i, w)
    assert len(pull.tables) == 3
    check(pull, operands, 2 * 3 * n * EPS)


def test_nothing_to_add() -> None:
    t, i, w = arrays()
    pull, operands = row_sums_of(lambda t, i, w: jnp.take(t, i, axis=0).sum(1), t, i + 1000, w)
    check(pull, operands)
    assert not np.asarray(backward.sorted_pull(pull, operands)[0]).any()


def test_what_is_not_finite_stays_in_its_rows() -> None:
    t, i, _ = arrays()
    pull, operands = row_sums_of(lambda t, i: t[i].sum(1), t, i)
    ct = jnp.asarray(operands[-1]).at[2].set(np.nan).at[3, 1].set(np.inf)
    check(pull, [*operands[:-1], ct])


@pytest.mark.once
def test_random_models() -> None:
    for seed in (7, 14):
        model = build([seed * 100 + k for k in range(5)], seed)
        b = jax.tree.map(jnp.asarray, arguments(8, seed))
        floats = {k: jnp.asarray(v) for k, v in model.params.items() if v.dtype == np.float32}
        rest = {k: jnp.asarray(v) for k, v in model.params.items() if k not in floats}

        def fn(p: Any, rest: Any, b: Any, model: Any = model) -> Any:
            return model.fn({**p, **rest}, b)

        check(*row_sums_of(fn, floats, rest, b), most=1e-4)


@pytest.mark.once
@needs_compiler
@pytest.mark.parametrize("name", ["weighted", "segment_weights", "guarded_mean", "stack", "many"])
def test_emulated_cuda_gives_the_same(name: str) -> None:
    t, i, w = arrays()
    if name == "many":
        pull, operands = row_sums_of(many, [t, table(5, 6), table(3, 1)], i, w)
    else:
        pull, operands = row_sums_of(LINEAR[name], t, i, w)
    n, call = pull.n_numbers, pull.number_call
    want = [np.asarray(x) for x in jax.jit(functools.partial(_numbers, pull))(operands[:n])]
    given = [np.asarray(operands[k]) for k in call.binding[::2]]
    results = [np.full_like(x, 1) for x in want]
    numbers = cuda_emulation.emulate(call.program, given, results, cuda_emulation.Options())
    assert_same(numbers, want)

    words = sorted_sums.read(pull.sums.words)
    made = sorted_sums.sorted_items(words, [jnp.asarray(x) for x in numbers], operands[n:])
    c = cuda_emulation.compiled(
        lambda *a: sorted_sums.totals(words, made, a), *map(jnp.asarray, made.arrays)
    )
    got = c.run(functools.partial(cuda_emulation.emulate, options=cuda_emulation.Options()))
    same = c.run(cuda_emulation.interpret)
    assert_same(got, same, [1e-5 * (1 + np.abs(np.asarray(x))) for x in same])
    full = [np.asarray(x).reshape(a.shape) for x, a in zip(got, pull.table_avals, strict=True)]
    plain = backward.row_sums_p.bind(*operands, pull=pull)
    assert_same(full, list(map(np.asarray, plain)), 1e-4)


def _numbers(pull: Pullback, operands: Sequence[Any]) -> list[Any]:
    from recom_jax.lowering import fused_p

    return list(fused_p.bind(*operands, call=pull.number_call))


@pytest.mark.once
def test_too_many_rows_stay_in_xla() -> None:
    t, i, w = arrays()
    pull, _ = row_sums_of(LINEAR["weighted"], t, i, w)
    words = pull.sums.words.copy()
    at = 3 + 5 + 2
    assert (words[at], words[at + 1]) == t.shape
    words[at] = 2**31 - 1
    with pytest.raises(EncodeError, match=r"2\^31 rows or more"):
        sorted_sums.read(words)


@pytest.mark.once
def test_jagged_bags_outside_are_dropped() -> None:
    t, i, _ = arrays()
    seg = np.array([-1, 9, 2, 2, 6, 5] * 3, np.int32)
    check(*row_sums_of(lambda t, i: jagged(t[i.reshape(-1)], seg), t, i))
