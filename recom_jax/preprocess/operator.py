"""How an operator becomes a function of columns: checked outside, traced inside under its name.

The body of each operator is a jitted function named ``pp_NAME``. So a call outside a trace compiles once for each
shape and set of parameters, and inside a trace the jaxpr keeps the operators apart (`corun` reads them there).
`recom_jax.optimize` inlines them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
import numpy as np

from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess.values import column

F = TypeVar("F", bound=Callable[..., Any])
OPERATORS: dict[str, Callable[..., Any]] = {}
"""The public operators by name, for programs read from tables."""
PREFIX = "pp_"
_LOCAL = threading.local()

Hook = Callable[[str, Callable[..., Any], list[Any], dict[str, Any]], Any]


@contextlib.contextmanager
def traced_by(hook: Hook | None) -> Iterator[None]:
    """Within it, in this thread, operators call ``hook(name, body, columns, parameters)`` once they are checked."""
    before = getattr(_LOCAL, "hook", None)
    _LOCAL.hook = hook
    try:
        yield
    finally:
        _LOCAL.hook = before


def operator(columns: int = 1, check: Callable[..., None] | None = None) -> Callable[[F], F]:
    """Registers an operator. Its first `columns` parameters are columns, the rest hashable Python values.

    Args:
      check: called with the parameters (not the columns) by name, to raise what is wrong with them.
    """

    def wrap(body: F) -> F:
        name = body.__name__
        names = list(inspect.signature(body).parameters)
        signature = inspect.signature(body)
        parameters = names[columns:]
        known = OPERATORS.get(name)
        if known is not None and known.__module__ != body.__module__:
            raise PreprocessError(
                f"operator: {name!r} is there already, from {known.__module__}; choose another name"
            )

        @functools.wraps(body)
        def traced(*args: Any) -> Any:
            # What users forbid themselves does not bind operators.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return body(*args)

        traced.__name__ = PREFIX + name
        jitted = jax.jit(traced, static_argnums=tuple(range(columns, len(names))))

        @functools.wraps(body)
        def public(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = {n: plain(name, n, bound.arguments[n]) for n in parameters}
            if check is not None:
                check(**values)
            inputs = [column(bound.arguments[n]) for n in names[:columns]]
            hook = getattr(_LOCAL, "hook", None)
            if hook is not None:
                return hook(name, traced, inputs, values)
            return jitted(*inputs, *values.values())

        public.__dict__["check"] = check
        OPERATORS[name] = public
        return cast(F, public)

    return wrap


def plain(operator_name: str, name: str, value: Any) -> Any:
    """A parameter as a hashable Python value; arrays and lists become tuples."""
    if isinstance(value, jax.core.Tracer):
        raise PreprocessTypeError(
            f"{operator_name}: {name} is part of the program, so it must be a Python value, not a traced array"
        )
    if isinstance(
        value, (list, tuple)
    ):  # one by one: numpy would make floats of integers beside a float
        return tuple(plain(operator_name, name, v) for v in value)
    if isinstance(value, (np.ndarray, jax.Array)):
        made = np.asarray(value).tolist()
        return tuple(made) if isinstance(made, list) else made
    if isinstance(value, np.generic):
        return value.item()
    return value


def need_integer(operator_name: str, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise PreprocessTypeError(f"{operator_name}: {name} is an integer, not {value!r}")


def need_number(operator_name: str, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise PreprocessTypeError(f"{operator_name}: {name} is a number, not {value!r}")


def need_at_least(operator_name: str, least: int, **values: Any) -> None:
    need_integer(operator_name, **values)
    for name, value in values.items():
        if value < least:
            raise PreprocessError(f"{operator_name}: {name} is at least {least}, not {value}")
