"""`_recom.Forward`: what `optimize` returns hands calls on without a step of Python."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import _recom

pytestmark = pytest.mark.usefixtures("short_collections")


class Forward(_recom.Forward):
    def __init__(self, target: Any) -> None:
        self.seen: list[Any] = []
        self._forward(target)

    def _failed(self, why: Any, args: Any, kwargs: Any) -> Any:
        self.seen.append((why, args, kwargs))
        raise LookupError("instead") from why


def test_calls_and_results_pass_through() -> None:
    f = Forward(lambda *args, **kwargs: (args, kwargs))
    assert f() == ((), {})
    assert f(1, 2) == ((1, 2), {})
    assert f(1, b=2, c=3) == ((1,), {"b": 2, "c": 3})
    assert f(*[1] * 300, **{f"k{i}": i for i in range(300)})[1]["k299"] == 299
    assert f.__call__(4) == ((4,), {})
    assert type(f).__call__(f, 5, x=6) == ((5,), {"x": 6})
    assert list(map(f, [7])) == [((7,), {})]
    assert f.seen == []


def test_an_exception_is_told_and_replaced() -> None:
    def bad(a: Any, b: Any = 0) -> Any:
        raise ValueError(f"{a} {b}")

    f = Forward(bad)
    with pytest.raises(LookupError, match="instead") as raised:
        f(1, b=2)
    ((why, args, kwargs),) = f.seen
    assert isinstance(why, ValueError)
    assert str(why) == "1 2"
    assert (args, kwargs) == ((1,), {"b": 2})
    assert raised.value.__cause__ is why
    names = []
    at = why.__traceback__
    while at is not None:
        names.append(at.tb_frame.f_code.co_name)
        at = at.tb_next
    assert "bad" in names  # where it was raised


def test_what_is_no_exception_passes() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    f = Forward(interrupt)
    with pytest.raises(KeyboardInterrupt):
        f()
    assert f.seen == []


def test_nothing_to_call() -> None:
    class Empty(_recom.Forward):  # type: ignore[misc]
        pass

    with pytest.raises(TypeError, match="forwards calls to nothing"):
        Empty()()
    assert callable(Empty())


def test_another_target_while_one_runs() -> None:
    f = Forward(None)

    def first() -> str:
        f._forward(lambda: "second")
        gc.collect()
        return "first"

    f._forward(first)
    del first
    assert (f(), f()) == ("first", "second")


def test_references() -> None:
    f, x = Forward(lambda *args, **kwargs: None), object()
    before = sys.getrefcount(x)
    for _ in range(1000):
        f(x, k=x)
    assert sys.getrefcount(x) == before

    def bad(*_: Any, **__: Any) -> None:
        raise ValueError

    g = Forward(bad)
    for _ in range(100):
        with pytest.raises(LookupError):
            g(x, k=x)
    g.seen.clear()
    gc.collect()
    assert sys.getrefcount(x) == before


def test_cycles_are_collected() -> None:
    f = Forward(None)
    f._forward(f.__init__)
    gone = weakref.ref(f)
    del f
    gc.collect()
    assert gone() is None


def test_an_optimized_function_is_one() -> None:
    @recom_jax.optimize
    def look(table: Any, ids: Any) -> Any:
        """Rows."""
        return table[ids % 5]

    assert isinstance(look, _recom.Forward)
    assert (look.__name__, look.__doc__) == ("look", "Rows.")
    table = jnp.arange(10.0).reshape(5, 2)
    want = table[jnp.arange(3)]
    np.testing.assert_array_equal(look(table, jnp.arange(3)), want)
    np.testing.assert_array_equal(look(table, ids=jnp.arange(3)), want)
    with pytest.raises(TypeError, match="look"):
        look(table)
    with pytest.raises(recom_jax.errors.ArgumentError, match="argument ids of look"):
        look(table, "three")


def pending() -> None:
    """Raises what a call has left behind as raised, though it returned."""
    ctypes.pythonapi.PyErr_Occurred()  # ctypes looks itself, once the call is over


def test_no_call_leaves_an_error_behind() -> None:
    f = Forward(lambda *args: args)
    f(1)
    pending()

    def bad(a: Any) -> Any:
        raise ValueError(a)

    f._forward(bad)
    with pytest.raises(LookupError):
        f(1)
    pending()

    class Forgiving(_recom.Forward):  # type: ignore[misc]
        def _failed(self, why: Any, args: Any, kwargs: Any) -> Any:
            return "instead", type(why), args, kwargs

    g = Forgiving()
    g._forward(bad)
    assert g(3) == ("instead", ValueError, (3,), {})
    pending()

    class Unable(_recom.Forward):  # type: ignore[misc]
        """`_failed` is missing."""

    h = Unable()
    h._forward(bad)
    with pytest.raises(AttributeError, match="_failed") as raised:
        h(4)
    assert raised.value.__traceback__ is not None
    pending()
    del f, g, h
    gc.collect()
    pending()


def test_no_call_of_a_model_leaves_an_error_behind() -> None:
    """Nor takes the exceptions of modules that are loaded later: matplotlib's ft2font throws while it is imported."""

    @recom_jax.optimize
    def look(table: Any, ids: Any) -> Any:
        return table[ids % 5]

    table, ids = np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(3)
    look(table, ids)
    pending()
    serve = look.bind(table)
    for _ in range(3):
        serve(ids)
        pending()
    serve(ids=ids)
    views = serve.input_views(ids)
    views[...] = ids
    serve(views)
    pending()
    for wrong in ("three", ids.astype(object), {"x": ids}):
        with pytest.raises(recom_jax.errors.RecomError):
            serve(wrong)
        pending()
    pytest.importorskip("matplotlib")
    from matplotlib import ft2font

    assert not hasattr(ft2font, "no such name")
    pending()
