"""Symbolic dimensions (`jax.export`): columns fuse, one program serves all sizes, results are plain JAX's."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from examples import criteo, recom_models
from recom_jax import compat
from recom_jax.cuda import nvrtc
from recom_jax.errors import CudaError
from recom_jax.shape_solver.dims import evaluate
from recom_jax.shape_solver.unify import Unifier
from recom_jax.symbolic import Sizes
from tests.helpers import EPS, VERIFY, assert_same, ids, table
from tests.random_columns import arguments
from tests.random_compare import check_fused
from tests.random_models import build

Struct = jax.ShapeDtypeStruct
I32, F32 = jnp.int32, jnp.float32
TABLE = table(50, 8)
# A scope's constraints may name variables of the arguments only, so each has its own.
SCOPES = {
    "c": jax.export.SymbolicScope(("mod(c, 8) == 0", "c >= 16")),
    "s": jax.export.SymbolicScope(("s <= 3",)),
    "": jax.export.SymbolicScope(),
}


def dim(text: str) -> Any:
    scope = next(s for name, s in SCOPES.items() if name in text)
    return jax.export.symbolic_shape(text, scope=scope)


def spec(text: str, dtype: Any = I32) -> Any:
    """A type of symbolic shape, such as ``spec("b, 3")``."""
    return Struct(dim(text), dtype)


def export(fn: Callable[..., Any], *specs: Any, **how: Any) -> Any:
    return jax.export.export(jax.jit(fn), **how)(*specs)


def odd(*shape: int) -> Any:
    return ids(shape, 50, seed=sum(shape), odd=True)


def floats(*shape: int) -> Any:
    x = np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32) * 3
    x.ravel()[::5] = np.nan
    return jnp.asarray(x)


def masked_mean(t: Any, i: Any) -> Any:
    mask = i >= 0
    rows = jnp.where(mask[..., None], jnp.take(t, jnp.where(mask, i, 0), axis=0), 0)
    return rows.sum(axis=1) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def bags_of(t: Any, i: Any, lengths: Any) -> Any:
    n = lengths.shape[0]
    seg = jnp.repeat(jnp.arange(n), lengths, total_repeat_length=i.shape[0])
    return jax.ops.segment_sum(t[i], seg, num_segments=n)


def bucketize(t: Any, x: Any, edges: Any) -> Any:
    return jnp.take(t, (x[:, None] >= edges[None]).sum(1), axis=0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of a table and features: their types, and arguments at several sizes.

    Attributes:
      columns: table reads, all of which must be fused.
      bound: what results may differ by.
    """

    fn: Callable[..., Any]
    specs: tuple[Any, ...]
    args: Sequence[tuple[Any, ...]]
    columns: int = 1
    bound: float | None = None


SUM = 40 * EPS * 50
CASES = {
    "lookup": Case(lambda t, i: t[i], (spec("b"),), [(odd(n),) for n in (1, 300)]),
    "fill": Case(
        lambda t, i: jnp.take(t, i, axis=0), (spec("b, l"),), [(odd(1, 3),), (odd(3, 1),)]
    ),
    "mean of a bag": Case(
        lambda t, i: t[i].mean(1), (spec("b, l"),), [(odd(1, 1),), (odd(3, 7),)], bound=SUM
    ),
    "masked mean": Case(masked_mean, (spec("b, l"),), [(odd(1, 1),), (odd(2, 9),)], bound=SUM),
    "weighted": Case(
        lambda t, i, w: jnp.einsum("blh,bl->bh", t[i], w),
        (spec("b, l"), spec("b, l", F32)),
        [(odd(1, 1), jnp.ones((1, 1))), (odd(3, 4), jnp.full((3, 4), 0.5))],
        bound=SUM,
    ),
    "segments": Case(
        lambda t, i, s, like: jax.ops.segment_sum(t[i], s, num_segments=like.shape[0]),
        (spec("n"), spec("n"), spec("b")),
        [(odd(n), odd(n) % 4, odd(b)) for n, b in ((9, 1), (1, 5))],
        bound=SUM,
    ),
    "no segments": Case(
        lambda t, i, s, like: jax.ops.segment_max(t[i], s, num_segments=like.shape[0]),
        (spec("n - 1"), spec("n - 1"), spec("b - 1")),
        [(odd(n), odd(n) % 3, odd(b)) for n, b in ((0, 3), (4, 0), (6, 3))],
    ),
    "lengths": Case(
        bags_of,
        (spec("n"), spec("b")),
        [(odd(n), jnp.asarray(x, I32)) for n, x in ((1, [1]), (6, [1, 0, 5]), (5, [9, 1]))],
        bound=SUM,
    ),
    "row splits": Case(
        lambda t, i, s: bags_of(t, i, s[1:] - s[:-1]),
        (spec("n"), spec("b + 1")),
        [(odd(n), jnp.asarray(x, I32)) for n, x in ((1, [0, 1]), (4, [0, 0, 4, 4]))],
        bound=SUM,
    ),
    "concatenation": Case(
        lambda t, i, j: jnp.concatenate([t[i], masked_mean(t, j), t[j[:, 0]]], axis=1),
        (spec("b"), spec("b, l")),
        [(odd(1), odd(1, 1)), (odd(6), odd(6, 3))],
        columns=3,
        bound=SUM,
    ),
    "two batches, one after the other": Case(
        lambda t, i, j: jnp.concatenate([t[i], t[j]]),
        (spec("b"), spec("n")),
        [(odd(1), odd(4)), (odd(4), odd(1))],
        columns=2,
    ),
    "flat": Case(
        lambda t, i: jnp.concatenate([t[i], t[i + 1]], axis=1).reshape(-1),
        (spec("b"),),
        [(odd(1),), (odd(5),)],
        columns=2,
    ),
    "ids of every shape": Case(
        lambda t, i: t[i.reshape(-1)].reshape(*i.shape, 8).sum(1),
        (spec("b, l"),),
        [(odd(1, 4),), (odd(3, 3),)],
        bound=SUM,
    ),
    "a floor": Case(lambda t, i: t[i[1::2]], (spec("b"),), [(odd(n),) for n in (1, 5)]),
    "halves": Case(
        lambda t, i: t[i.reshape(i.shape[0] // 2, 2)].sum(1),
        (spec("2*b"),),
        [(odd(2),), (odd(10),)],
        bound=SUM,
    ),
    "a promised multiple": Case(
        lambda t, i: t[i.reshape(i.shape[0] // 8, 8)].sum(1),
        (spec("c"),),
        [(odd(16),), (odd(40),)],
        bound=SUM,
    ),
    "a small size": Case(lambda t, i: t[i].max(1), (spec("b, s"),), [(odd(2, 1),), (odd(4, 3),)]),
    "all but the last": Case(lambda t, i: t[i[:-1]], (spec("b"),), [(odd(n),) for n in (1, 9)]),
    "one-hot": Case(
        lambda t, i: jax.nn.one_hot(i, 50) @ t, (spec("b"),), [(odd(1),), (odd(20),)], bound=1e-6
    ),
    "constant boundaries": Case(
        lambda t, x: t[jnp.digitize(x, jnp.asarray([-1.0, 0.5, 2.0]))],
        (spec("b", F32),),
        [(floats(1),), (floats(40),)],
    ),
    "symbolic boundaries": Case(
        bucketize,
        (spec("b", F32), spec("m", F32)),
        [(floats(1), jnp.arange(1.0)), (floats(30), jnp.arange(7.0))],
    ),
    "sizes in the ids": Case(
        lambda t, i: t[i % i.shape[0]], (spec("b"),), [(odd(n),) for n in (1, 33)]
    ),
    "sizes without an array": Case(
        lambda t, i: jnp.take(t, jnp.arange(i.shape[0]) % 7, axis=0).sum(0),
        (spec("b"),),
        [(odd(1),), (odd(12),)],
        bound=SUM,
    ),
    "a maximum": Case(
        lambda t, i: t[i[: jax.core.max_dim(i.shape[0] - 4, 0)]],
        (spec("b"),),
        [(odd(4),), (odd(9),)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    specs = (Struct(TABLE.shape, TABLE.dtype), *case.specs)
    model = recom_jax.optimize(case.fn, options=VERIFY)
    report = model.explain(*specs)
    assert (report.num_columns, report.num_fused) == (case.columns, case.columns), report
    exported, plain = export(model, *specs), export(case.fn, *specs)
    text = exported.mlir_module()
    assert text.count("custom_call @recom_fused_v1") == report.num_custom_calls == 1, text
    before = recom_jax.stats()
    for args in case.args:
        got = exported.call(TABLE, *args)
        assert_same(got, plain.call(TABLE, *args), case.bound)
    after = recom_jax.stats()
    assert after["programs_prepared"] == before["programs_prepared"]
    if jax.default_backend() == "cpu":  # a GPU counts launches, and not those of a graph
        assert 0 < after["calls"] - before["calls"] <= len(case.args)  # XLA drops empty ones


@pytest.mark.parametrize(("seed", "symbolic"), [(11, True), (12, False)])
def test_random_models(seed: int, symbolic: bool) -> None:
    """Random columns: bag lengths (and the totals of jagged bags) are symbols too, or numbers."""
    r = random.Random(seed)
    splits = "jnp.arange("
    while True:  # JAX itself neither searches nor repeats by splits of a symbolic number
        seeds = [r.randrange(2**32) for _ in range(6)]
        model = build(seeds, seed)
        if splits not in model.source:
            break
    flat = symbolic and "jnp.ones(" not in model.source

    def of(name: str, x: Any) -> Any:
        number = name[1:]
        if symbolic and name[0] in "JWK":
            return Struct(dim(f"b, l{number}"), x.dtype)
        if name[0] in "PQ" and number.isdigit():  # row splits, which no column reads
            return Struct(dim("b + 1" if name[0] == "P" else "m + 1"), x.dtype)
        if name[0] in "FVSU" and number.isdigit():
            return Struct(dim(f"n{number}") if flat else x.shape, x.dtype)
        return Struct(dim(", ".join(["b", *map(str, x.shape[1:])])), x.dtype)

    specs = (
        jax.tree.map(lambda x: Struct(x.shape, x.dtype), model.params),
        {k: of(k, x) for k, x in arguments(5, seed).items()},
    )
    optimized = recom_jax.optimize(model.fn, options=VERIFY)
    check_fused(optimized.explain(*specs), len(seeds), 5)
    exported, plain = export(optimized, *specs), export(model.fn, *specs)
    for batch in (1, 8):
        b = arguments(batch, seed)
        got, want = exported.call(model.params, b), plain.call(model.params, b)
        assert_same(got, want, model.bounds(batch))


@pytest.mark.parametrize("name", ["model E", "Criteo"])
def test_example_models(name: str) -> None:
    if name == "model E":
        kind: Any = recom_models.model_e(large_rows=32, scale=0.004)
    else:
        kind = criteo.Dlrm(vocabulary=50, dim=8, bottom=(16,), top=(16,), hash_in_model=True)
    params = kind.init(0)
    specs = (
        jax.tree.map(lambda x: Struct(x.shape, x.dtype), params),
        {k: Struct((dim("b")[0], *x.shape[1:]), x.dtype) for k, x in kind.batch(3).items()},
    )
    model = recom_jax.optimize(kind.forward, options=VERIFY)
    report = model.explain(*specs)
    assert report.num_fused == report.num_columns > 0 and report.num_custom_calls == 1, report
    again = jax.export.deserialize(export(model, *specs).serialize())
    plain = export(kind.forward, *specs)
    batch = kind.batch(7, seed=1)
    assert_same(again.call(params, batch), plain.call(params, batch), 1e-5)


def test_the_checks_of_sizes_are_jax_s() -> None:
    """Sizes that do not fit: the same exception and text as plain JAX, zero of a plain variable included."""
    fn = CASES["weighted"].fn
    specs = (Struct(TABLE.shape, F32), *CASES["weighted"].specs)
    exported = [export(f, *specs) for f in (recom_jax.optimize(fn), fn)]
    for args in ((odd(3, 2), floats(3, 4)), (odd(3, 0), jnp.ones((3, 0))), (odd(2), floats(2, 2))):
        texts = []
        for e in exported:
            with pytest.raises(Exception) as why:
                e.call(TABLE, *args)
            texts.append((type(why.value), re.sub("<lambda>|fn", "", str(why.value))))
        assert texts[0] == texts[1]


def test_tables_of_symbolic_size_stay_in_xla() -> None:
    model = recom_jax.optimize(lambda t, i: t[i], options=VERIFY)
    specs = spec("v, 8", F32), spec("b")
    (column,) = model.explain(*specs).columns
    assert (column.status, column.reason) == ("xla", "a table of symbolic size")
    hot = recom_jax.optimize(lambda t, i: jax.nn.one_hot(i, t.shape[0]) @ t, options=VERIFY)
    (column,) = hot.explain(*specs).columns
    assert column.reason == "a one-hot product with a table of symbolic size"
    exported = export(model, *specs)
    for rows in (1, 50):
        assert_same(exported.call(TABLE[:rows], odd(4)), TABLE[:rows][odd(4)])


def test_division_by_a_size_is_left_to_xla() -> None:
    """It is a division by a constant once compiled, whose bits are XLA's affair."""
    model = recom_jax.optimize(lambda t, i: jnp.exp(t[i] / i.shape[0]), options=VERIFY)
    specs = Struct(TABLE.shape, F32), spec("b")
    exported, plain = export(model, *specs), export(lambda t, i: jnp.exp(t[i] / i.shape[0]), *specs)
    for n in (1, 7):
        assert_same(exported.call(TABLE, odd(n)), plain.call(TABLE, odd(n)), 1e-5)
    assert model.explain(*specs).num_fused == 1


def test_a_mask_that_is_a_factor() -> None:
    """NaN times a false mask is 0 where XLA makes a select of it, which at size 1 it may."""
    rows = TABLE.at[3].set(jnp.nan)

    def fn(t: Any, i: Any, flag: Any) -> Any:
        return t[i] * jnp.broadcast_to(flag[:, None], (flag.shape[0], 8)).astype(t.dtype)

    def one(t: Any, i: Any, flag: Any) -> Any:
        return t[i] * jnp.broadcast_to(flag, (i.shape[0], 8)).astype(t.dtype)

    for f, flag in ((fn, "b"), (one, "1, 8")):
        specs = Struct(TABLE.shape, F32), spec("b"), Struct(dim(flag), jnp.bool_)
        exported, plain = export(recom_jax.optimize(f, options=VERIFY), *specs), export(f, *specs)
        for n in (1, 2, 5):
            mask = jnp.zeros(n if flag == "b" else (1, 8), bool)
            args = rows, jnp.full(n, 3, I32), mask
            assert_same(exported.call(*args), plain.call(*args))


def test_a_report_of_symbolic_sizes(tmp_path: Any) -> None:
    report = recom_jax.optimize(CASES["concatenation"].fn).explain(
        Struct(TABLE.shape, F32), *CASES["concatenation"].specs
    )
    report.to_html(tmp_path / "page.html")
    assert "[b, 24]" in (tmp_path / "page.html").read_text()
    assert "operand_axis" in str(report.source) + str(report.programs)


def test_derivatives() -> None:
    """Of an exported model (``vjp_order=1``), and exported themselves."""
    fn, specs = CASES["weighted"].fn, (Struct(TABLE.shape, F32), *CASES["weighted"].specs)
    model = recom_jax.optimize(fn, options=VERIFY)
    again = jax.export.deserialize(export(model, *specs).serialize(vjp_order=1))

    def loss(f: Any) -> Any:
        return jax.grad(lambda t, i, w: (f(t, i, w) ** 2).sum(), argnums=(0, 2))

    inside = export(loss(model), *specs)
    args = TABLE, odd(4, 3), jnp.full((4, 3), 0.5)
    want = loss(fn)(*args)
    assert_same(loss(again.call)(*args), want, 1e-3)
    assert_same(inside.call(*args), want, 1e-3)


def test_vmap_of_symbolic_sizes() -> None:
    model = jax.vmap(recom_jax.optimize(masked_mean, options=VERIFY), in_axes=(None, 0))
    exported = export(model, Struct(TABLE.shape, F32), spec("k, b, l"))
    assert exported.mlir_module().count("custom_call @recom_fused_v1") == 1
    args = TABLE, odd(2, 3, 4)
    assert_same(exported.call(*args), jax.vmap(masked_mean, in_axes=(None, 0))(*args), SUM)


def has_nvrtc() -> bool:
    try:
        return nvrtc.version() > (0, 0)
    except CudaError:
        return False


def test_two_platforms_from_a_machine_without_a_gpu() -> None:
    """What the CUDA half is depends on whether NVRTC is installed; the CPU half runs here."""
    specs = Struct(TABLE.shape, F32), spec("b, l")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        exported = export(
            recom_jax.optimize(masked_mean, options=VERIFY), *specs, platforms=("cpu", "cuda")
        )
    fused = exported.mlir_module().count("custom_call @recom_fused_v1")
    assert fused == 1 + has_nvrtc()
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cpu", "cuda")
    for shape in ((1, 2), (6, 5)):
        assert_same(again.call(TABLE, odd(*shape)), masked_mean(TABLE, odd(*shape)), SUM)


RUN = """
import sys, numpy as np, jax.export, recom_jax
again = jax.export.deserialize(open(sys.argv[1], "rb").read())
inputs = np.load(sys.argv[2])
for k in range(3):
    np.save(f"{sys.argv[1]}.{k}.npy", again.call(inputs["table"], inputs[f"ids{k}"]))
assert recom_jax.stats()["calls"] == (3 if jax.default_backend() == "cpu" else 0)
assert recom_jax.stats()["traces"] == 0
"""


def test_a_fresh_process_needs_the_import_alone(tmp_path: Any) -> None:
    model = export(recom_jax.optimize(masked_mean), Struct(TABLE.shape, F32), spec("b, l"))
    path = tmp_path / "model.bin"
    path.write_bytes(model.serialize())
    batches = [odd(1, 1), odd(4, 3), odd(64, 2)]
    np.savez(tmp_path / "in.npz", table=TABLE, **{f"ids{k}": x for k, x in enumerate(batches)})
    command = [sys.executable, "-c", RUN, str(path), str(tmp_path / "in.npz")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for k, x in enumerate(batches):
        assert_same(jnp.asarray(np.load(f"{path}.{k}.npy")), masked_mean(TABLE, x), SUM)


# ---- sizes -------------------------------------------------------------------------------------------------------


def sizes() -> Sizes:
    return Sizes(Unifier())


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("b", {"b": 5}),
        ("3*b*l - 2*b + 1", {"b": 5, "l": 3}),
        ("b^2*l", {"b": 5, "l": 3}),
        ("floordiv(b + 1, 2)", {"b": 4}),
        ("mod(b, 3) + floordiv(b, l)", {"b": 11, "l": 4}),
        ("max(b, l) - min(b - 1, 2*l)", {"b": 9, "l": 4}),
    ],
)
def test_expressions(text: str, values: dict[str, int]) -> None:
    """Evaluated at other sizes than the example's, a dimension is what JAX makes of it."""
    (d,) = jax.export.symbolic_shape(text)
    found = sizes()
    size = found.of(d)
    for env in (values, {k: v + 6 for k, v in values.items()}):
        variables = {str(found._variables[k]): v for k, v in env.items()}
        for name, symbol in found._variables.items():  # maxima and minima are symbols of their own
            if name not in env:
                pick = max if name.startswith("max") else min
                b, n = env["b"], env["l"]
                variables[str(symbol)] = pick((b, n) if pick is max else (b - 1, 2 * n))
        assert evaluate(size, variables) == int(d._evaluate(env))
    assert found.of(7) == 7


@pytest.mark.parametrize(
    "constraints",
    [
        ("b >= 10", "b <= 12"),
        ("mod(b, 24) == 0", "b <= 96"),
        ("b == 2*l", "l >= 5"),
        ("b <= 1",),
        ("floordiv(b, 4) == l", "mod(l, 3) == 0"),
        ("b >= l + 1", "l >= 100"),
    ],
)
def test_examples_satisfy_the_constraints(constraints: tuple[str, ...]) -> None:
    shape = jax.export.symbolic_shape("b, l", constraints=constraints)
    found = sizes()
    values = dict(zip("bl", found.example(shape), strict=True))
    for text in constraints:
        for operator in ("==", ">=", "<="):
            if operator in text:
                left, right = (
                    eval(x, {"mod": lambda a, b: a % b, "floordiv": lambda a, b: a // b}, values)
                    for x in text.split(operator)
                )
                assert {"==": left == right, ">=": left >= right, "<=": left <= right}[operator]


def test_constraints_without_an_example() -> None:
    shape = jax.export.symbolic_shape("b, l", constraints=("mod(b*l, 1021) == 7", "b <= 9"))
    found = sizes()
    assert found.of(shape[0]) != found.of(shape[1])
    model = recom_jax.optimize(lambda t, i: t[i], options=VERIFY)
    assert model.explain(TABLE, Struct(shape, I32)).num_fused == 1


def test_proofs_hold_for_all_sizes() -> None:
    found = sizes()
    b, n = (found.of(d) for d in jax.export.symbolic_shape("b, l", constraints=("l >= 3",)))
    assert found.never_negative(b - 1) and not found.never_negative(b - 2)
    assert found.never_negative(b * n - 3) and not found.never_negative(b * n - 4)
    assert not found.never_negative(b - n) and found.never_negative(5)
    unifier = found.unifier
    other = unifier.fresh("n", unifier.value(b))
    unifier.unify(b, other)  # the example says so, which proves nothing
    unifier.unify(b, unifier.value(b))
    assert unifier.resolve(b) == b and unifier.resolve(other) == other
    assert unifier.known(b) == b and not compat.is_symbolic(unifier.known(b - b + 4))
