"""Numpy arrays in the other byte order: `jax.jit` reads their bytes as they are once it knows the type; ours raises."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recom_jax
from recom_jax import _recom, compat
from recom_jax.errors import ArgumentError, BatchTypeError


def swapped(x: Any) -> Any:
    """The same numbers in the other byte order."""
    return x.astype(x.dtype.newbyteorder("S"))


class Watched(_recom.Forward):  # type: ignore[misc]
    """Counts what it is told of."""

    def __init__(self) -> None:
        self.told = 0
        self._forward(lambda *args, **kwargs: None, compat.ArrayImpl, jax.tree_util.tree_leaves)

    def _swapped(self, args: Any, kwargs: Any) -> None:
        self.told += 1

    def finds(self, *args: Any, **kwargs: Any) -> bool:
        before = self.told
        self(*args, **kwargs)
        return self.told > before


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    x: Any
    y: Any = None


Pair = collections.namedtuple("Pair", "a b")
GOOD = np.arange(6, dtype=np.float32).reshape(2, 3)
BAD = swapped(GOOD)

PLACES: dict[str, Any] = {
    "alone": lambda x: x,
    "tuple": lambda x: (1, x),
    "list": lambda x: [None, x],
    "dict": lambda x: {"a": GOOD, "b": x},
    "ordered": lambda x: collections.OrderedDict(z=1.5, a=x),
    "named": lambda x: Pair(jnp.ones(2), x),
    "dataclass": lambda x: Record(x),
    "deep": lambda x: {"a": [Record((GOOD, {"b": [x]}))]},
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_wherever_it_is(place: str) -> None:
    watched = Watched()
    for x in (BAD, BAD[::2, 1:], BAD.reshape(3, 2).T, np.array(2.0, BAD.dtype)):
        assert watched.finds(PLACES[place](x))
        assert watched.finds(1, named=PLACES[place](x))
    for y in (GOOD, np.ones(3, bool), np.ones(2, np.int8), np.ones(3, jnp.bfloat16), np.float32(1)):
        assert not watched.finds(PLACES[place](y), named=PLACES[place](y))
    assert not watched.finds(PLACES[place](jnp.ones(3)), None, "text", 1j, jax.random.key(0))


def test_subclasses_are_looked_at(tmp_path: Any) -> None:
    file = np.memmap(tmp_path / "ids", ">i4", "w+", shape=(4,))
    assert Watched().finds(file)
    assert not Watched().finds(np.memmap(tmp_path / "ids", "<i4", "r"))
    assert Watched().finds(np.ma.masked_array(BAD))


def test_what_holds_itself_or_fails_ends_the_search() -> None:
    loop: list[Any] = [GOOD]
    loop += [loop, loop, BAD]
    assert not Watched().finds(loop)  # jax.jit itself refuses it

    @jax.tree_util.register_pytree_node_class
    class Broken:
        def tree_flatten(self) -> Any:
            raise ValueError("cannot")

        @classmethod
        def tree_unflatten(cls, aux: Any, children: Any) -> Any:
            return cls()

    assert not Watched().finds(Broken())
    assert Watched().finds(Broken(), BAD)


def test_a_pytree_may_change_what_is_being_looked_through() -> None:
    outer: Any = {"a": None, "b": GOOD}

    @jax.tree_util.register_pytree_node_class
    class Emptying:
        def tree_flatten(self) -> Any:
            outer.clear()
            gc.collect()
            return (GOOD,), None

        @classmethod
        def tree_unflatten(cls, aux: Any, children: Any) -> Any:
            return cls()

    outer["a"] = Emptying()
    assert not Watched().finds(outer)
    assert outer == {}


def test_what_it_holds_is_collected() -> None:
    class Leaves:
        def __call__(self, x: Any) -> list[Any]:
            return [x]

    leaves = Leaves()
    alive = weakref.ref(leaves)
    f = _recom.Forward.__new__(Watched)
    f._forward(lambda x: x, compat.ArrayImpl, leaves)
    leaves.own = f  # type: ignore[attr-defined] # a cycle
    f(object())
    del f, leaves
    gc.collect()
    assert alive() is None


@given(st.data())
def test_any_tree(data: Any) -> None:
    """It is found exactly if a leaf is one."""
    leaves = st.sampled_from([GOOD, BAD, None, 3, 2.5, np.ones(2, np.uint8), np.int64(4), "s"])
    trees = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.builds(Record, inner, inner),
        ),
        max_leaves=12,
    )
    tree = data.draw(trees)
    want = any(x is BAD for x in jax.tree_util.tree_leaves(tree))
    assert Watched().finds(tree) == want


def model(table: Any, batch: Any) -> Any:
    return jnp.take(table, batch["ids"], axis=0).sum(1), batch["x"] * 2


TABLE = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)


def batch(rows: int = 4, x: int = 4) -> dict[str, Any]:
    return {
        "ids": np.arange(3 * rows, dtype=np.int32).reshape(rows, 3),
        "x": np.ones(x, np.float32),
    }


@pytest.mark.parametrize("name", ["ids", "x"])
@pytest.mark.parametrize(
    "options",
    [recom_jax.Options(), recom_jax.Options(batch_buckets=(4, 8))],
    ids=["plain", "buckets"],
)
def test_a_call_refuses_it_by_name(name: str, options: Any) -> None:
    f = recom_jax.optimize(model, options=options)
    good = batch()
    for _ in range(2):
        bad = {**good, name: swapped(good[name])}
        with pytest.raises(ArgumentError, match=f"argument batch.*{name}.*native byte order"):
            f(TABLE, bad)
        with pytest.raises(ArgumentError, match=f"argument batch.*{name}.*native byte order"):
            jax.jit(lambda t: f(t, bad))(TABLE)  # noqa: B023
        np.testing.assert_array_equal(f(TABLE, good)[1], good["x"] * 2)
    np.testing.assert_array_equal(f(TABLE, {**bad, name: good[name]})[1], good["x"] * 2)


@pytest.mark.parametrize("name", ["ids", "x"])
def test_a_server_refuses_it_by_name(name: str) -> None:
    """`x` is handed to JAX as it is: it is large, and no column reads it."""
    serve = recom_jax.optimize(model).bind(TABLE)
    good = batch(x=100_000)
    bad = {**good, name: swapped(good[name])}
    for _ in range(2):
        for call in (serve, serve.fetch, serve.input_views):
            with pytest.raises(BatchTypeError, match=f"{name}.*native byte order"):
                call(bad)
        np.testing.assert_array_equal(serve(good)[1], good["x"] * 2)
    views = serve.input_views(good)
    views["ids"][...] = good["ids"]
    # On a GPU `x` is a view as well.
    said = r"x.*expected a? ?(numpy\.)?ndarray float32.*was given ndarray >f4"
    with pytest.raises(BatchTypeError, match=said):
        serve({**views, "x": bad["x"]} if name == "x" else {**views, "x": swapped(good["x"])})


def test_static_arguments_may_hold_anything() -> None:
    """A list of leaves that no call is made of is not looked at."""

    class Config:
        def __init__(self) -> None:
            self.values = BAD

    config = Config()
    f = recom_jax.optimize(
        lambda t, ids, config: t[ids] * float(config.values[0, 1]), static_argnums=2
    )
    ids = np.arange(3)
    np.testing.assert_array_equal(f(TABLE, ids, config), TABLE[:3])
