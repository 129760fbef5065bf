"""What goes wrong raises our exception, of the type plain JAX raises, naming the argument and the user's line."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax.errors import (
    ArgumentError,
    BatchTypeError,
    BindTypeError,
    DeletedError,
    RecomError,
    TraceError,
    trace_error,
)

TABLE = jnp.arange(40, dtype=jnp.float32).reshape(10, 4)
IDS = np.array([1, 2, 3], np.int32)


def lookup(table: Any, batch: Any) -> Any:
    return jnp.take(table, batch["ids"], axis=0)


def raised(fn: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        fn()
    return caught.value


def ours_and_theirs(
    fn: Callable[..., Any], *args: Any, bound: int = 1, where: str = "all"
) -> list[Exception]:
    """Each way in raises ours, of the type plain JAX raises for the same arguments."""
    model = recom_jax.optimize(fn)
    theirs = raised(lambda: jax.jit(fn)(*args))
    ways: dict[str, Callable[[], Any]] = {
        "call": lambda: model(*args),
        "lower": lambda: model.lower(*args),
        "explain": lambda: model.explain(*args),
        "bind": lambda: model.bind(*args[:bound])(*args[bound:]),
    }
    found = []
    for name, way in ways.items():
        if where != "all" and name not in where:
            continue
        error = raised(way)
        assert isinstance(error, RecomError), (name, error)
        builtin = next(t for t in type(theirs).__mro__ if t.__module__ == "builtins")
        assert isinstance(error, builtin), (name, type(error).__mro__, type(theirs))
        found.append(error)
    return found


# ---- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [(), (TABLE,), (TABLE, {"ids": IDS}, 3)])
def test_arity(args: Any) -> None:
    for error in ours_and_theirs(lookup, *args):
        assert isinstance(error, (ArgumentError, BindTypeError))
        assert "lookup(table" in str(error)
        assert re.search("missing|too many", str(error))


def test_unknown_keyword() -> None:
    model = recom_jax.optimize(lookup)
    for way in (
        lambda: model(TABLE, {"ids": IDS}, mode=1),
        lambda: model.bind(TABLE)({"ids": IDS}, mode=1),
        lambda: model.explain(TABLE, {"ids": IDS}, mode=1),
        lambda: model.bind(TABLE, {"ids": IDS}, 1),
    ):
        error = raised(way)
        assert isinstance(error, (ArgumentError, BindTypeError))
        assert isinstance(error, TypeError)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("user", "str 'user'"),
        (object(), "object"),
        (np.array(["a", "b"]), "dtype <U1"),
        ({1, 2}, "set"),
        (np.array([1, None]), "dtype object"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
        (np.array([1, 2], ">i4"), "native byte order.*>i4"),
        (b"x", "bytes"),
        (np.ones(2, np.longdouble), "at most 64 bits a number, was given float128"),
    ],
)
def test_leaves_that_are_no_arrays(leaf: Any, text: str) -> None:
    for error in ours_and_theirs(lookup, TABLE, {"ids": leaf}):
        assert isinstance(error, (ArgumentError, BatchTypeError))
        assert re.search(rf"batch\['ids'\].*{text}", str(error)), error


class Convertible:
    def __jax_array__(self) -> Any:
        return jnp.asarray(IDS)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (2**31, "2147483648 does not fit int32"),
        (-(2**40), "-1099511627776 does not fit int32"),
        (Convertible(), r"a Convertible \(__jax_array__\)"),
        (np.ma.masked_array(IDS, mask=[0, 1, 0]), "masked arrays"),
    ],
)
def test_leaves_that_jax_does_not_convert(leaf: Any, text: str) -> None:
    """Ours names the argument, also where it was traced with bound tables of which only the types are known."""
    for error in ours_and_theirs(lookup, TABLE, {"ids": leaf, "more": 2**40 * 0}):
        assert re.search(rf"argument batch\['ids'\] of lookup: .*{text}", str(error)), error


@pytest.mark.parametrize("args", [(TABLE, {"ids": IDS, 1: IDS}), ({"t": TABLE, 1: TABLE}, IDS)])
def test_arguments_that_are_no_pytrees(args: Any) -> None:
    name = "batch" if isinstance(args[1], dict) else "table"
    for error in ours_and_theirs(lookup, *args):
        assert f"argument {name} of lookup is no pytree of arrays" in str(error)


def test_a_named_failure_of_the_users_code_is_not_blamed_on_an_argument() -> None:
    def fails(table: Any, batch: Any) -> Any:
        raise OverflowError("mine")

    for error in ours_and_theirs(fails, TABLE, {"ids": 3}):
        assert isinstance(error, TraceError)
        assert "does not fit" not in str(error)


def test_modules_have_the_functions_name() -> None:
    """What profiles and JAX's own messages show is the user's name, and the user's parameters."""
    text = recom_jax.optimize(lookup).lower(TABLE, {"ids": IDS}).as_text()
    assert text.startswith("module @jit_lookup ")


def test_tables_that_are_no_arrays() -> None:
    for error in ours_and_theirs(lookup, {"t": "no"}, {"ids": IDS}):
        assert "table['t']" in str(error)
    assert isinstance(raised(lambda: recom_jax.optimize(lookup).bind({"t": "no"})), BindTypeError)


def test_a_type_instead_of_an_array() -> None:
    spec = jax.ShapeDtypeStruct((3,), np.int32)
    for error in ours_and_theirs(lookup, TABLE, {"ids": spec}, where="call bind"):
        assert "batch['ids']" in str(error)
        assert "only its type" in str(error)


def test_shapes_do_not_match() -> None:
    fn = lambda t, b: jnp.take(t, b["ids"], axis=0) + b["x"]  # noqa: E731
    for error in ours_and_theirs(fn, TABLE, {"ids": IDS, "x": np.ones((2, 4), np.float32)}):
        assert isinstance(error, TraceError)
        assert "float32[2,4]" in str(error)


@pytest.mark.parametrize("shape", [(), (7,)])
def test_tables_of_low_rank(shape: tuple[int, ...]) -> None:
    table = jnp.ones(shape)
    if shape:
        batch = {"ids": IDS}
        want = jax.jit(lookup)(table, batch)
        np.testing.assert_array_equal(recom_jax.optimize(lookup)(table, batch), want)
        np.testing.assert_array_equal(recom_jax.optimize(lookup).bind(table)(batch), want)
    else:
        for error in ours_and_theirs(lookup, table, {"ids": IDS}):
            assert isinstance(error, TraceError)
            assert f"{__file__}:" in str(error)
            assert "jnp.take(table, batch" in str(error)


def index(table: Any, batch: Any) -> Any:
    return table[batch["ids"]]  # the failing line


@pytest.mark.parametrize("fn", [lookup, index])
def test_float_ids(fn: Any) -> None:
    for error in ours_and_theirs(fn, TABLE, {"ids": IDS.astype(np.float32)}):
        assert isinstance(error, TraceError)
        assert "integer" in str(error)
        line = fn.__code__.co_firstlineno + 1
        assert f"{__file__}:{line}, in {fn.__name__}" in str(error)


@pytest.mark.parametrize("ids", [[-1, -10, -11, 10, 99, 2**31 - 1, -(2**31)], [], [[1], [2]]])
def test_odd_ids_are_plain_jaxs_numbers(ids: Any) -> None:
    batch = {"ids": np.array(ids, np.int32)}
    want = np.asarray(jax.jit(lookup)(TABLE, batch))
    model = recom_jax.optimize(lookup)
    np.testing.assert_array_equal(model(TABLE, batch), want)
    np.testing.assert_array_equal(model.bind(TABLE)(batch), want)


def test_nan_and_infinite_features() -> None:
    fn = lambda t, x: jnp.take(t, jnp.digitize(x, jnp.array([0.0, 1.0, 5.0])), axis=0)  # noqa: E731
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45], np.float32)
    want = np.asarray(jax.jit(fn)(TABLE, x))
    np.testing.assert_array_equal(recom_jax.optimize(fn)(TABLE, x), want)
    np.testing.assert_array_equal(recom_jax.optimize(fn).bind(TABLE)(x), want)


def test_float64_and_int64_convert() -> None:
    fn = lambda t, b: (jnp.take(t, b["ids"], axis=0), b["x"] + 1)  # noqa: E731
    batch = {"ids": np.array([1, 2**32 + 3, -1], np.int64), "x": np.array([1 / 3, 1e300])}
    want = jax.jit(fn)(TABLE, batch)
    for got in (recom_jax.optimize(fn)(TABLE, batch), recom_jax.optimize(fn).bind(TABLE)(batch)):
        for g, w in zip(got, want, strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_array_equal(g, w)


# ---- deleted and donated -------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
def test_deleted(warm: bool) -> None:
    model = recom_jax.optimize(lookup)
    table, ids = TABLE + 0, jnp.asarray(IDS)
    serve = model.bind(TABLE)
    if warm:
        model(table, {"ids": ids})
        serve({"ids": ids})
    table.delete()
    for error in ours_and_theirs(lookup, table, {"ids": ids}, where="call bind"):
        assert isinstance(error, DeletedError)
        assert re.search("argument table of lookup: .*deleted or donated", str(error))
    ids.delete()
    for way in (lambda: model(TABLE, {"ids": ids}), lambda: serve({"ids": ids})):
        error = raised(way)
        assert isinstance(error, DeletedError)
        assert isinstance(error, RuntimeError)
        assert re.search(r"argument batch\['ids'\] of lookup: .*deleted or donated", str(error))


# ---- the user's exceptions -----------------------------------------------------------------------------------


class OddError(Exception):
    """Keeps other things than its constructor takes."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


class SlottedError(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(code, "two args")
        self.code = code


@pytest.mark.parametrize(
    "error",
    [
        KeyError("age"),
        ValueError("bad"),
        OddError(3, detail="d"),
        SlottedError(4),
        OSError(2, "gone"),
        StopIteration(1),
        UnicodeDecodeError("utf8", b"x", 0, 1, "why"),
        ZeroDivisionError(),
        AssertionError("x", 1),
        LookupError("l"),
        ExceptionGroup("several", [ValueError(1)]),
        NotImplementedError("not yet"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_the_users_exceptions_keep_their_type(error: Exception, nested: bool) -> None:
    def fails(x: Any) -> Any:
        raise error  # here

    def fn(table: Any, batch: Any) -> Any:
        return jnp.take(table, (jax.jit(fails) if nested else fails)(batch["ids"]), axis=0)

    model = recom_jax.optimize(fn)
    plain = type(raised(lambda: jax.jit(fn)(TABLE, {"ids": IDS})))
    for way in (
        lambda: model(TABLE, {"ids": IDS}),
        lambda: model.bind(TABLE)({"ids": IDS}),
        lambda: model.explain(TABLE, {"ids": IDS}),
        lambda: model.lower(TABLE, {"ids": IDS}),
        lambda: jax.grad(lambda t: model(t, {"ids": IDS}).sum())(TABLE),
        lambda: jax.vmap(lambda i: model(TABLE, {"ids": i}))(IDS),
        lambda: jax.jit(model)(TABLE, {"ids": IDS}),
    ):
        got = raised(way)
        assert isinstance(got, plain)
        assert got.args == error.args or got is not error
        text = str(got) + "".join(getattr(got, "__notes__", ()))
        if not isinstance(got, TraceError):
            assert got is error  # Python can't build a class of both
            assert "recom_jax: while tracing fn" in text
            error.__notes__ = []
            continue
        assert got.__cause__ is error
        assert str(error) in text
        assert "recom_jax: while tracing fn(table: float32[10,4], batch['ids']: " in text
        assert (
            f"{__file__}:{fails.__code__.co_firstlineno + 1}, in fails: raise error  # here" in text
        )
        assert text.count("recom_jax: ") == 1
        if isinstance(error, OddError):
            assert isinstance(got, OddError)
            assert (got.code, got.detail) == (3, "d")


def test_the_call_after_a_failure_works() -> None:
    calls: list[int] = []

    def fn(table: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("first")
        return jnp.take(table, batch["ids"], axis=0)

    serve = recom_jax.optimize(fn).bind(TABLE)
    assert isinstance(raised(lambda: serve({"ids": IDS})), TraceError)
    np.testing.assert_array_equal(serve({"ids": IDS}), TABLE[IDS])


def test_control_flow_on_a_traced_value() -> None:
    def fn(table: Any, batch: Any) -> Any:
        if batch["ids"][0] > 0:
            return table
        return lookup(table, batch)

    for error in ours_and_theirs(fn, TABLE, {"ids": IDS}):
        assert isinstance(error, jax.errors.TracerBoolConversionError)
        assert 'if batch["ids"][0] > 0' in str(error)


def test_a_missing_key() -> None:
    for error in ours_and_theirs(lookup, TABLE, {"id": IDS}):
        assert isinstance(error, KeyError)
        assert str(error).startswith("'ids'\n  recom_jax: ")


def test_keyboard_interrupt_passes() -> None:
    def fn(table: Any, batch: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recom_jax.optimize(fn)(TABLE, {"ids": IDS})


def test_results_that_are_no_arrays() -> None:
    for error in ours_and_theirs(lambda t, b: "text", TABLE, {"ids": IDS}):
        assert isinstance(error, TypeError)


def test_decorator_misuse() -> None:
    for way, text in [
        (lambda: recom_jax.optimize(3), "takes a function"),
        (lambda: recom_jax.optimize(lookup, options="fast"), "Options"),
        (lambda: recom_jax.optimize(lookup, static_argnums=5), "2 positional parameters"),
        (lambda: recom_jax.optimize(lookup, static_argnames="mode"), "no such parameter"),
        (
            lambda: recom_jax.optimize(lookup, static_argnums="batch"),
            "static_argnums is a position",
        ),
        (lambda: recom_jax.optimize(lookup, static_argnums=1.0), "static_argnums is a position"),
        (lambda: recom_jax.optimize(lookup, static_argnums=(0, True)), "not (0, True)"),
        (lambda: recom_jax.optimize(lookup, static_argnames=1), "static_argnames is a name"),
        (lambda: recom_jax.optimize(lookup, static_argnames=b"batch"), "static_argnames is a name"),
    ]:
        error = raised(way)
        assert isinstance(error, ArgumentError)
        assert text in str(error)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ring_slots", "8", "Options.ring_slots is an integer, not '8'"),
        ("small_table_bytes", 1.5, "Options.small_table_bytes is an integer"),
        ("fast_ids", "yes", "Options.fast_ids is True or False"),
        ("verify", 1, "Options.verify is True or False or None"),
        ("lease_timeout_s", None, "Options.lease_timeout_s is a number"),
        ("lease_timeout_s", -1, "Options.lease_timeout_s is at least 0"),
        ("lease_timeout_s", float("nan"), "Options.lease_timeout_s is at least 0"),
        ("dump_dir", 3, "Options.dump_dir is a path or None"),
        ("spin_us", "x", "Options.spin_us is an integer or None"),
        ("cache_bytes", "1G", "Options.cache_bytes is an integer or None"),
    ],
)
def test_options_of_the_wrong_type(name: str, value: Any, text: str) -> None:
    error = raised(lambda: recom_jax.Options(**{name: value}))
    assert isinstance(error, recom_jax.OptionError) and text in str(error)


def test_options_of_kin_types() -> None:
    made = recom_jax.Options(ring_slots=np.int64(3), lease_timeout_s=2)
    assert (made.ring_slots, made.lease_timeout_s) == (3, 2)
    nums = recom_jax.optimize(lambda t, n: t[:n], static_argnums=np.array([1]))
    assert nums(TABLE, 2).shape == (2, 4)


def test_jax_names_the_users_function_and_arguments() -> None:
    def fn(table: Any, ids: Any, most: int, *, scale: Any = 1.0) -> Any:
        return table[ids][:most] * (2.0 if scale > 0 else 1.0)

    model = recom_jax.optimize(fn, static_argnums=2)
    for way in (
        lambda: model(TABLE, IDS, 2, scale=1.0),
        lambda: model.explain(TABLE, IDS, 2, scale=1.0),
        lambda: model.lower(TABLE, IDS, 2, scale=1.0),
        lambda: model.bind(TABLE)(IDS, 2, scale=1.0),
    ):
        error = raised(way)
        assert isinstance(error, jax.errors.TracerBoolConversionError)
        line = fn.__code__.co_firstlineno
        assert f"tracing the function fn at {__file__}:{line} for jit" in str(error)
        assert "depends on the value of the argument scale." in str(error)


def test_servers_are_not_copied() -> None:
    serve = recom_jax.optimize(lookup).bind(TABLE)
    for way in (lambda: pickle.dumps(serve), lambda: copy.deepcopy(serve)):
        error = raised(way)
        assert isinstance(error, BindTypeError) and "model.bind(params)" in str(error)


def test_trace_error_is_thread_safe() -> None:
    made: list[Any] = []

    def work() -> None:
        made.extend(trace_error(KeyError(k), "here") for k in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert len(made) == 800
    assert all(isinstance(e, KeyError) and isinstance(e, TraceError) for e in made)
