"""jit, vmap, grad, jvp and kin of optimized functions, and everything that is not the mathematics of the call."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import VERIFY, assert_same, check, ids, table

import recom_jax
from recom_jax import backward_make

ROWS, DIM, B, L = 9, 4, 6, 3
optimize = functools.partial(recom_jax.optimize, options=VERIFY)


def model(params: Any, batch: Any) -> Any:
    """A small model: a lookup, a bucket, a weighted bag, an MLP."""
    e = jnp.concatenate(
        [
            params["a"][batch["i"]],
            jnp.take(params["b"], jnp.digitize(batch["x"], np.array([0.0, 1.0, 2.0])), axis=0),
            (params["a"][batch["j"]] * params["w"][None, :, None]).sum(1),
        ],
        -1,
    )
    return jax.nn.relu(e @ params["mlp"]).sum(-1)


@optimize
def named(t: jax.Array, i: jax.Array) -> jax.Array:
    """Documented."""
    return t[i]


def params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "a": table(ROWS, DIM),
        "b": table(4, DIM, seed=1),
        "w": jnp.asarray(rng.normal(size=L).astype(np.float32)),
        "mlp": jnp.asarray(rng.normal(size=(3 * DIM, 5)).astype(np.float32)),
    }


def batch(seed: int = 0) -> dict[str, Any]:
    return {
        "i": ids(B, ROWS, seed=seed),
        "x": jnp.linspace(-1.0, 3.0, B),
        "j": ids((B, L), ROWS, seed=seed + 1),
    }


def loss(f: Any) -> Any:
    return lambda p, b: (f(p, b) ** 2).sum()


TRANSFORMS = {
    "plain": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "nested_jit": lambda f: jax.jit(lambda p, b: jax.jit(f)(p, b) + jax.jit(f)(p, b)),
    "grad": lambda f: jax.grad(loss(f)),
    "jit_grad": lambda f: jax.jit(jax.grad(loss(f))),
    "grad_jit": lambda f: jax.grad(loss(jax.jit(f))),
    "value_and_grad": lambda f: jax.jit(jax.value_and_grad(loss(f))),
    "checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f))),
    "jvp": lambda f: lambda p, b: jax.jvp(lambda q: f(q, b), (p,), (jax.tree.map(jnp.cos, p),)),
    "linearize": lambda f: (
        lambda p, b: jax.linearize(lambda q: f(q, b), p)[1](jax.tree.map(jnp.cos, p))
    ),
    "vjp": lambda f: lambda p, b: jax.vjp(lambda q: f(q, b), p)[1](jnp.arange(6.0)),
    "linear_transpose": lambda f: (
        lambda p, b: jax.vjp(lambda a: f({**p, "a": a}, b), p["a"])[1](jnp.ones(6))
    ),
    "hvp": lambda f: (
        lambda p, b: jax.jvp(jax.grad(lambda q: loss(f)(q, b)), (p,), (jax.tree.map(jnp.sin, p),))[
            1
        ]
    ),
    "grad_of_grad": lambda f: (
        lambda p, b: jax.grad(
            lambda q: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss(f))(q, b)))
        )(p)
    ),
    "jacfwd": lambda f: lambda p, b: jax.jacfwd(lambda w: f({**p, "w": w}, b))(p["w"]),
    "jacrev": lambda f: lambda p, b: jax.jacrev(lambda w: f({**p, "w": w}, b))(p["w"]),
    "scan": lambda f: (
        lambda p, b: jax.lax.scan(
            lambda c, s: (c + f(p, b) * s, None), jnp.zeros(B), jnp.arange(3.0)
        )[0]
    ),
    "cond": lambda f: (
        lambda p, b: jax.lax.cond(b["x"][0] < 0, lambda: f(p, b), lambda: jnp.zeros(B))
    ),
    "remat_in_jit": lambda f: jax.jit(jax.grad(loss(jax.checkpoint(jax.jit(f))))),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    make = TRANSFORMS[name]
    # Ours runs "grad" and "vjp" as they are, an operation at a time; the rest under jit, which is faster.
    outer = jax.jit if name not in ("plain", "grad", "grad_jit", "vjp") else lambda f: f
    got = outer(make(optimize(model)))(params(), batch())
    want = jax.jit(make(model))(params(), batch())
    assert_same(got, want, jax.tree.map(lambda x: 1e-5 * float(jnp.abs(x).max()) + 1e-3, want))
    text = jax.jit(make(optimize(model))).lower(params(), batch()).as_text()
    assert "recom_fused_v1" in text


@pytest.mark.parametrize(
    "in_axes",
    [
        (None, 0),
        (0, None),
        (0, 0),
        (None, {"i": 0, "x": None, "j": 1}),
        ({"a": 0, "b": None, "w": None, "mlp": None}, None),
    ],
)
def test_vmap(in_axes: Any) -> None:
    def leaf(x: Any, axis: Any) -> Any:
        return x if axis is None else jnp.stack([x, x[::-1], x], axis)

    def spread(tree: Any, axes: Any) -> Any:
        return {k: leaf(v, axes[k] if isinstance(axes, dict) else axes) for k, v in tree.items()}

    args = spread(params(), in_axes[0]), spread(batch(), in_axes[1])
    mapped = jax.jit(jax.vmap(optimize(model), in_axes=in_axes))
    got = mapped(*args)
    assert mapped.lower(*args).as_text().count("custom_call @recom_fused_v1") == 1
    assert_same(got, jax.vmap(model, in_axes=in_axes)(*args), 1e-3)
    inside = optimize(lambda p, b: jax.vmap(model, in_axes=in_axes)(p, b))
    assert_same(inside(*args), got, 1e-3)


def test_vmap_of_ids_stays_fused_and_exact() -> None:
    f = optimize(lambda t, i: jnp.concatenate([t[i], t[i % 3]], -1))
    args = table(ROWS, DIM), ids((3, B), ROWS, odd=True)
    mapped = jax.jit(jax.vmap(f, in_axes=(None, 0)))
    assert_same(
        mapped(*args),
        jax.vmap(lambda i: jnp.concatenate([args[0][i], args[0][i % 3]], -1))(args[1]),
    )
    assert "recom_fused_v1" in mapped.lower(*args).as_text()


def test_vmap_of_grad_and_grad_of_vmap() -> None:
    def one(t: Any, i: Any) -> Any:
        return (t[i].sum(0) ** 2).sum()

    t, i = table(ROWS, DIM), ids((B, L), ROWS)
    f = optimize(one)
    for make in (
        lambda g: jax.vmap(jax.grad(g), (None, 0)),
        lambda g: jax.grad(lambda t, i: jax.vmap(g, (None, 0))(t, i).sum()),
    ):
        assert_same(jax.jit(make(f))(t, i), jax.jit(make(one))(t, i), 1e-3)


BAGS = {
    "sum": lambda t, w, i: t[i].sum(1),
    "mean": lambda t, w, i: (
        (t[i] * (i > 2)[..., None]).sum(1) / jnp.maximum((i > 2).sum(1, keepdims=True), 1)
    ),
    "weights": lambda t, w, i: jnp.einsum("blh,bl->bh", t[i], w),
    "max": lambda t, w, i: t[i].max(1),
    "segment": lambda t, w, i: jax.ops.segment_sum(
        t[i.reshape(-1)] * w.reshape(-1)[:, None], i.reshape(-1) % 4, 4
    ),
    "one_hot": lambda t, w, i: jax.nn.one_hot(i, ROWS) @ t,
    "cast": lambda t, w, i: t.astype(jnp.bfloat16)[i].astype(jnp.float32) * w[..., None],
    "out_of_range": lambda t, w, i: jnp.take(t, i * 3 - 5, axis=0, mode="clip") * w[..., None],
    "fill": lambda t, w, i: t.at[i * 3 - 5].get(mode="fill", fill_value=0.0),
}


@pytest.mark.parametrize("name", BAGS)
def test_gradients_of_tables_and_weights(name: str) -> None:
    bag = BAGS[name]
    t, i = table(ROWS, DIM), ids((B, L), ROWS)
    w = jnp.asarray(np.random.default_rng(0).normal(size=(B, L)).astype(np.float32))

    def total(f: Any) -> Any:
        return lambda t, w: jnp.sin(f(t, w, i)).sum()

    f = optimize(bag)
    assert_same(jax.grad(total(f), (0, 1))(t, w), jax.grad(total(bag), (0, 1))(t, w), 1e-3)
    assert_same(
        jax.jvp(lambda t: f(t, w, i), (t,), (t,)), jax.jvp(lambda t: bag(t, w, i), (t,), (t,)), 1e-3
    )


def test_no_gradient_flows_into_integers() -> None:
    f = optimize(lambda t, i, q: t[i] * q[i].astype(jnp.float32))
    t, i, q = table(ROWS, DIM), ids(B, ROWS), table(ROWS, DIM, jnp.int8)
    got = jax.grad(lambda *a: f(*a).sum(), (0, 1, 2), allow_int=True)(t, i, q)
    want = jax.grad(
        lambda t, i, q: (t[i] * q[i].astype(jnp.float32)).sum(), (0, 1, 2), allow_int=True
    )(t, i, q)
    assert_same(got[0], want[0], 1e-2)
    assert got[1].dtype == want[1].dtype == jax.dtypes.float0
    assert got[2].shape == want[2].shape


def test_custom_derivatives_downstream_are_kept() -> None:
    @jax.custom_jvp
    def straight_through(x: Any) -> Any:
        return jnp.round(x)

    straight_through.defjvp(
        lambda primals, tangents: (straight_through(*primals), tangents[0] * 3.0)
    )

    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.25, 0.25),))

    def f(t: Any, i: Any) -> Any:
        return (
            straight_through(t[i]).sum()
            + clipped(t[i + 1] * 2.0).sum()
            + jax.nn.relu(t[i] * 0.0).sum()
        )

    t, i = table(ROWS, DIM), ids(B, ROWS - 1)
    assert_same(jax.grad(optimize(f))(t, i), jax.grad(f)(t, i), 1e-5)
    assert float(jax.grad(optimize(lambda t, i: jax.nn.relu(t[i] * 0.0).sum()))(t, i).sum()) == 0.0


def test_stop_gradient() -> None:
    def f(t: Any, u: Any, i: Any) -> Any:
        return (jax.lax.stop_gradient(t[i]) * u[i]).sum()

    args = table(ROWS, DIM), table(ROWS, DIM, seed=1), ids(B, ROWS)
    assert_same(jax.grad(optimize(f), (0, 1))(*args), jax.grad(f, (0, 1))(*args), 1e-3)


def test_training_step_learns() -> None:
    f = optimize(lambda t, i: t[i].sum(1))

    @jax.jit
    def step(t: Any, i: Any) -> Any:
        value, g = jax.value_and_grad(lambda t: ((f(t, i) - 1.0) ** 2).mean())(t)
        return t - 0.1 * g, value

    t, values = table(ROWS, DIM), []
    for _ in range(30):
        t, value = step(t, ids((B, L), ROWS))
        values.append(float(value))
    assert values[-1] < values[0] / 4


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_lower_compile_and_eval_shape() -> None:
    f = optimize(model)
    compiled = f.lower(params(), batch()).compile()
    assert_same(compiled(params(), batch()), f(params(), batch()))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params(), batch()))
    out = jax.eval_shape(f, *shapes)
    assert (out.shape, out.dtype) == ((B,), jnp.float32)
    report = f.explain(*shapes)
    assert (report.num_columns, report.num_fused, report.num_custom_calls) == (3, 3, 1)
    assert "recom_fused_v1" in f.lower(*shapes).as_text()


def test_keywords_defaults_and_static_arguments() -> None:
    def f(t: Any, i: Any, mode: str = "clip", *, scale: Any = 2.0, times: int = 1) -> Any:
        return jnp.take(t, i, axis=0, mode=mode) * scale * times

    args = table(ROWS, DIM), ids(B, ROWS, odd=True)
    for keywords in (
        {"static_argnums": (2,), "static_argnames": ("times",)},
        {"static_argnames": ("mode", "times")},
    ):
        g, plain = optimize(f, **keywords), jax.jit(f, **keywords)
        assert_same(g(*args), plain(*args))
        assert_same(g(*args, "wrap", times=3), plain(*args, "wrap", times=3))
        assert_same(g(*args, scale=jnp.float32(0.5)), plain(*args, scale=jnp.float32(0.5)))
        assert_same(g(i=args[1], t=args[0]), plain(i=args[1], t=args[0]))
        assert g.explain(*args, "wrap", times=3).num_fused == 1
    with pytest.raises(TypeError):
        g(args[0])
    with pytest.raises(TypeError):
        g(*args, nonsense=1)


def test_static_arguments_change_the_program() -> None:
    f = optimize(lambda t, i, n: t[i].sum(1)[:, :n], static_argnums=2)
    t, i = table(ROWS, DIM), ids((B, L), ROWS)
    for n in (1, 3):
        assert f(t, i, n).shape == (B, n)


class Model:
    def __init__(self, t: Any) -> None:
        self.t = t

    def __hash__(self) -> int:
        return 1

    @functools.partial(recom_jax.optimize, static_argnums=0)
    def __call__(self, i: Any) -> Any:
        return self.t[i]

    @recom_jax.optimize
    @staticmethod
    def static(t: Any, i: Any) -> Any:
        return t[i]


def test_methods() -> None:
    m, i = Model(table(ROWS, DIM)), ids(B, ROWS)
    assert_same(m(i), m.t[i])
    assert_same(Model.__call__(m, i), m.t[i])
    assert m.__call__.explain(i).num_fused == 1
    assert "recom_fused_v1" in m.__call__.lower(i).as_text()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    table: Any
    extra: Any = None


class Out(NamedTuple):
    rows: Any
    rest: Any


def test_pytrees() -> None:
    def f(p: Params, i: Any) -> Any:
        return Out(p.table[i["i"]], {"none": p.extra, "list": [i["i"], (p.table,)], "empty": ()})

    report = check(f, Params(table(ROWS, DIM)), {"i": ids(B, ROWS), "unused": None}, columns=1)
    assert report.columns[0].table == "p.table"
    check(f, Params(table(ROWS, DIM), jnp.ones(2)), {"i": ids(B, ROWS)}, columns=1)


def test_python_scalars_numpy_arrays_and_weak_types() -> None:
    def f(t: Any, i: Any, s: Any) -> Any:
        return t[i] * s, i + s, s

    check(f, np.asarray(table(ROWS, DIM)), np.asarray(ids(B, ROWS)), 2.0, columns=1)
    check(f, table(ROWS, DIM), 3, 2, columns=1)
    check(f, table(ROWS, DIM, jnp.bfloat16), ids(B, ROWS), 2.0, columns=1)
    check(f, np.zeros((3, 2)), np.zeros(4, np.int64), np.float64(2), columns=1)


def test_metadata_copying_and_pickling() -> None:
    assert named.__name__ == "named"
    assert named.__doc__ == "Documented."
    assert named.__module__ == __name__
    assert named.__wrapped__(jnp.eye(2), jnp.arange(2)).shape == (2, 2)
    assert pickle.loads(pickle.dumps(named)) is named
    assert copy.deepcopy(named) is named
    assert copy.deepcopy({"f": named})["f"](jnp.eye(2), jnp.arange(2)).shape == (2, 2)
    assert "named" in repr(named)


def test_what_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal shapes: nothing. A new batch: traced by JAX, analysed, no new program; a gradient is analysed once."""
    made: list[Any] = []
    make = backward_make.make
    monkeypatch.setattr(backward_make, "make", lambda *args: made.append(args) or make(*args))
    f = optimize(lambda t, i: t[i].sum(1) * 1.0)
    gradient = jax.jit(jax.grad(lambda t, i: (f(t, i) ** 2).sum()))
    t = table(ROWS, DIM)

    def counts() -> tuple[int, int]:
        stats = recom_jax.stats()
        return stats["traces"], stats["programs_prepared"]

    f(t, ids((B, L), ROWS))
    traces, programs = counts()
    for seed in range(3):
        f(t, ids((B, L), ROWS, seed=seed))
        f(np.asarray(t), np.asarray(ids((B, L), ROWS, seed=seed)))
    assert counts() == (traces, programs)
    for size in (B + 1, B + 2, B + 1, B):
        f(t, ids((size, L), ROWS))
    assert counts() == (traces + 2, programs)
    for seed in range(3):
        gradient(t, ids((B, L), ROWS, seed=seed))
    assert len(made) == 1 and gradient._cache_size() == 1
    before = counts()
    gradient(t, ids((B, L), ROWS, seed=4))
    jax.jit(jax.value_and_grad(lambda t, i: (f(t, i) ** 2).sum()))(t, ids((B, L), ROWS))
    assert counts() == before and len(made) == 1


def test_decorator_forms_and_bad_arguments() -> None:
    assert recom_jax.optimize(static_argnums=1)(lambda t, k: t[:k])(jnp.arange(3), 2).shape == (2,)
    with pytest.raises(TypeError):
        recom_jax.optimize(3)
    with pytest.raises(TypeError):
        recom_jax.optimize(lambda: 0, options={"verify": True})


def test_functions_of_functools_partial_and_optimized_functions() -> None:
    args = table(ROWS, DIM), ids(B, ROWS)
    f = optimize(functools.partial(lambda n, t, i: t[i][:, :n], 2))
    assert f(*args).shape == (B, 2)
    twice = optimize(lambda t, i: named(t, i) + 1.0)
    assert_same(twice(*args), args[0][args[1]] + 1.0)


def test_errors_of_the_function_keep_their_type() -> None:
    class Mine(Exception):
        pass

    def fails(t: Any) -> Any:
        raise Mine("for a reason")

    with pytest.raises(Mine, match="for a reason"):
        optimize(fails)(jnp.ones(2))
    with pytest.raises(TypeError):
        optimize(lambda t, i: t[i])(table(ROWS, DIM), jnp.ones(3))
    with pytest.raises(TypeError):
        optimize(lambda t: t @ jnp.ones((5, 5)))(table(ROWS, DIM))


def test_effects_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    def f(t: Any, i: Any) -> Any:
        e = t[i]
        jax.debug.print("saw {}", e.shape[0])
        jax.debug.print("first {}", i[0])
        return e

    args = table(ROWS, DIM), ids(B, ROWS)
    assert_same(optimize(f)(*args), args[0][args[1]])
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert "saw 6" in printed
    assert f"first {int(args[1][0])}" in printed


def test_functions_without_columns_or_without_arguments() -> None:
    check(lambda x: jnp.sin(x).sum(), jnp.arange(3.0), columns=0, calls=0)
    check(lambda: table(ROWS, DIM)[jnp.arange(3)], columns=None, fused=None, calls=None)
    assert recom_jax.optimize(lambda t: {})(jnp.ones(1)) == {}


def test_two_threads() -> None:
    import concurrent.futures

    f, args = optimize(model), [(params(), batch(k)) for k in range(4)]
    want = [jax.jit(model)(*a) for a in args]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got, w in zip(pool.map(lambda a: f(*a), args * 3), want * 3, strict=True):
            assert_same(got, w, 1e-3)
