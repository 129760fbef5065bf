"""Which arguments of a function are static, how the rest flattens, and what went wrong when a call fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax.errors import ArgumentError, DeletedError, RecomError, trace_error


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call, split into array leaves and everything else.

    Attributes:
      leaves, names: the array leaves and a printable path of each.
      static: (position or name) -> value of the static arguments.
    """

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    tree: Any
    n_args: int
    static: tuple[tuple[int | str, Any], ...]

    def flat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as a function of the leaves alone."""

        def call(*leaves: Any) -> Any:
            args, kwargs = self.arguments(leaves)
            return fn(*args, **kwargs)

        return call

    def without_static(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as a function of its other arguments, by the same name: JAX's messages show it and its parameters."""

        def call(*dynamic: Any, **named: Any) -> Any:
            args, kwargs = self.with_static(dynamic, named)
            return fn(*args, **kwargs)

        functools.update_wrapper(call, fn, updated=())
        gone = {where for where, _ in self.static}
        with contextlib.suppress(TypeError, ValueError):  # no signature
            own = inspect.signature(fn)
            kept = [p for k, p in enumerate(own.parameters.values()) if not {k, p.name} & gone]
            vars(call)["__signature__"] = own.replace(parameters=kept)
        return call

    def arguments(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments with these leaves."""
        return self.with_static(*jax.tree_util.tree_unflatten(self.tree, leaves))

    def with_static(
        self, dynamic: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, the static ones among them."""
        args, kwargs = list(dynamic), dict(named)
        for where, value in self.static:
            if isinstance(where, int):
                args.insert(where, value)
            else:
                kwargs[where] = value
        return args, kwargs

    def positions(self, parameters: inspect.Signature | None) -> list[int]:
        """Of each leaf, the position of the argument it is in; keyword arguments by their place in the signature."""
        static = {where for where, _ in self.static if isinstance(where, int)}
        dynamic = [k for k in range(self.n_args) if k not in static]
        order = list(parameters.parameters) if parameters is not None else []
        numbers = jax.tree_util.tree_unflatten(self.tree, range(len(self.leaves)))
        found = []
        for path, _ in jax.tree_util.tree_flatten_with_path(numbers)[0]:
            if path[0].idx == 0:
                found.append(dynamic[path[1].idx])
            else:
                name = str(path[1].key)
                found.append(order.index(name) if name in order else len(order) + self.n_args)
        return found

    def key(self) -> Any | None:
        """A hashable identity of the call's types, None where a leaf has none."""
        try:
            types = tuple(
                (tuple(x.shape), str(x.dtype), getattr(x, "weak_type", False))
                if hasattr(x, "dtype")
                else type(x)
                for x in self.leaves
            )
            key = (types, self.tree, self.static)
            hash(key)
            return key
        except (TypeError, AttributeError):
            return None

    def fault(self, name: str, why: Exception) -> Exception | None:
        """The exception that blames an argument for the failure `why` of tracing `name`, None if none is at fault."""
        return blame(self.named(name), why, shapes=True)

    def named(self, name: str) -> list[tuple[str, Any]]:
        """Each leaf, and what a message calls it."""
        return [
            (f"argument {n} of {name}", x) for n, x in zip(self.names, self.leaves, strict=True)
        ]

    def describe(self) -> str:
        """The call's arguments and their types, one line."""
        shown = [
            f"{n}: {_type_name(x)}" for n, x in list(zip(self.names, self.leaves, strict=True))[:6]
        ]
        more = len(self.leaves) - len(shown)
        return f"({', '.join(shown)}{f', and {more} more' if more > 0 else ''})"


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function's static arguments, normalised so that positions and names agree."""

    name: str
    parameters: inspect.Signature | None
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]

    @staticmethod
    def of(
        fn: Callable[..., Any], nums: int | Sequence[int], names: str | Sequence[str]
    ) -> Signature:
        nums = _several("static_argnums", nums, int, "a position or several")
        names = _several("static_argnames", names, str, "a name or several")
        name = getattr(fn, "__name__", type(fn).__name__)
        try:
            parameters = inspect.signature(fn)
        except (TypeError, ValueError):
            return Signature(name, None, nums, names)
        positional = [
            p.name
            for p in parameters.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        variadic = any(p.kind == p.VAR_POSITIONAL for p in parameters.parameters.values())
        keywords = any(p.kind == p.VAR_KEYWORD for p in parameters.parameters.values())
        n = len(positional)
        for k in nums:
            if not variadic and not -n <= k < n:
                raise ArgumentError(
                    f"static_argnums {k}: {name} has {n} positional parameters {tuple(positional)}"
                )
        for x in names:
            if x not in parameters.parameters and not keywords:
                raise ArgumentError(
                    f"static_argnames {x!r}: {name} has no such parameter; it has "
                    f"{tuple(parameters.parameters)}"
                )
        nums = tuple(k + n if k < 0 else k for k in nums)
        all_names = dict.fromkeys((*names, *(positional[k] for k in nums if k < n)))
        all_nums = dict.fromkeys((*nums, *(k for k, p in enumerate(positional) if p in all_names)))
        only = [
            x
            for x in all_names
            if x not in parameters.parameters
            or parameters.parameters[x].kind != inspect.Parameter.POSITIONAL_ONLY
        ]
        return Signature(name, parameters, tuple(sorted(all_nums)), tuple(only))

    def split(
        self, args: Sequence[Any], kwargs: dict[str, Any], checks_leaves: bool = True
    ) -> Arguments:
        """Flattens a call.

        Raises:
          ArgumentError (a TypeError): the arguments do not fit the function, or a leaf is not an array.
        """
        if self.parameters is not None:
            try:
                self.parameters.bind(*args, **kwargs)
            except TypeError as why:
                raise ArgumentError(f"{self.name}{self.parameters}: {why}") from None
        static: list[tuple[int | str, Any]] = [
            (k, args[k]) for k in self.static_argnums if k < len(args)
        ]
        static += [(k, kwargs[k]) for k in self.static_argnames if k in kwargs]
        dynamic = [x for k, x in enumerate(args) if k not in self.static_argnums]
        named = {k: x for k, x in kwargs.items() if k not in self.static_argnames}
        positions = [k for k in range(len(args)) if k not in self.static_argnums]
        try:
            paths, tree = jax.tree_util.tree_flatten_with_path((tuple(dynamic), named))
        except Exception as why:
            raise self.no_tree(zip(positions, dynamic, strict=True), named, why) from why
        roots = {k: self.parameter(k) for k in positions}
        names, leaves = [], []
        for path, leaf in paths:
            if path[0].idx == 0:
                names.append(roots[positions[path[1].idx]] + jax.tree_util.keystr(path[2:]))
            else:
                names.append(str(path[1].key) + jax.tree_util.keystr(path[2:]))
            leaves.append(leaf)
            if checks_leaves:
                problem = leaf_problem(leaf, shapes=True)
                if problem:
                    raise ArgumentError(f"argument {names[-1]} of {self.name}: {problem}")
        return Arguments(tuple(leaves), tuple(names), tree, len(args), tuple(static))

    def no_tree(
        self, args: Iterable[tuple[int, Any]], kwargs: Mapping[str, Any], why: Exception
    ) -> Exception:
        """The exception where arguments cannot be flattened: it names the first such.

        Args:
          args: (position, value) of positional arguments.
        """
        for name, value in [*((self.parameter(k), x) for k, x in args), *kwargs.items()]:
            try:
                jax.tree_util.tree_flatten(value)
            except Exception:
                what = f"argument {name} of {self.name}"
                return trace_error(why, f"{what} is no pytree of arrays", ArgumentError)
        return why

    def parameter(self, position: int) -> str:
        """The name of a positional parameter."""
        if self.parameters is not None:
            names = [
                p.name
                for p in self.parameters.parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            if position < len(names):
                return names[position]
        return f"args[{position}]"

    def explain_failure(
        self, why: Exception, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Exception:
        """What a failed call raises: ours, of the type JAX raised, naming the argument at fault."""
        try:
            call = self.split(args, kwargs)
        except RecomError as ours:
            return ours
        where = f"while running {self.name}{call.describe()}"
        return blame(call.named(self.name), why) or trace_error(why, where)


def _several(option: str, value: Any, kind: type, what: str) -> tuple[Any, ...]:
    """One value of a kind, or an iterable of them, as a tuple."""

    def fits(x: Any) -> bool:
        if kind is int:
            return isinstance(x, numbers.Integral) and not isinstance(x, bool)
        return isinstance(x, kind)

    if value is None:
        return ()
    if fits(value):
        value = (value,)
    elif isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ArgumentError(f"{option} is {what}, not {value!r}")
    found = tuple(value)
    if not all(map(fits, found)):
        raise ArgumentError(f"{option} is {what}, not {value!r}")
    return tuple(map(operator.index, found)) if kind is int else found


def blame(
    named: Sequence[tuple[str, Any]], why: Exception, shapes: bool = False
) -> Exception | None:
    """The exception that blames an argument for the failure `why`, None if nothing is wrong with any.

    Args:
      named: what each leaf is ("argument x of model"), and the leaf.
      shapes: whether a ShapeDtypeStruct will do.
    """
    for what, leaf in named:
        if is_deleted(leaf):
            return trace_error(why, f"{what}: {DELETED}", DeletedError)
        problem = leaf_problem(leaf, shapes) or _conversion_problem(leaf, why)
        if problem:
            return trace_error(why, f"{what}: {problem}", ArgumentError)
    return _apart(named, why)


def _conversion_problem(leaf: Any, why: Exception) -> str:
    """Why JAX could not make an array of a leaf that looks like one, "" if that is not what failed."""
    if isinstance(why, OverflowError) and type(leaf) is int:
        widest = np.iinfo(jax.dtypes.canonicalize_dtype("int64"))
        if not widest.min <= leaf <= widest.max:
            return f"{leaf} does not fit {widest.dtype}; pass an array of a dtype that holds it"
    if isinstance(why, (TypeError, ValueError)):
        if isinstance(leaf, np.ma.MaskedArray):
            return "JAX takes no masked arrays; fill the missing values first, x.filled(value)"
        if hasattr(leaf, "__jax_array__") and not isinstance(leaf, jax.Array):
            return (
                f"JAX no longer converts a {type(leaf).__name__} (__jax_array__) by itself; "
                "pass jax.numpy.asarray(x)"
            )
    return ""


def _apart(named: Sequence[tuple[str, Any]], why: Exception) -> Exception | None:
    """Blames two arguments that were put on different devices."""
    if not isinstance(why, ValueError) or "device" not in str(why):
        return None
    placed = [
        (what, x.sharding.device_set)
        for what, x in named
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed
    ]
    for what, devices in placed[1:]:
        if devices != placed[0][1]:
            first, second = (
                f"{w} is on {', '.join(sorted(map(str, d)))}"
                for w, d in (placed[0], (what, devices))
            )
            where = f"{first}, but {second}; put them on the same devices (jax.device_put)"
            return trace_error(why, where)
    return None


DELETED = "the array has been deleted or donated to an earlier call; pass a live array, or do not donate it"


def is_deleted(leaf: Any) -> bool:
    """Whether a leaf is an array without its buffer."""
    try:
        return isinstance(leaf, jax.Array) and leaf.is_deleted()
    except (AttributeError, NotImplementedError, TypeError):  # a tracer
        return False


def leaf_problem(leaf: Any, shapes: bool = False) -> str:
    """Why a leaf is no array argument, "" if it is one.

    Args:
      shapes: whether a ShapeDtypeStruct will do.
    """
    if isinstance(leaf, (jax.Array, bool, int, float, complex)):
        return ""
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind in "OSUMmVT" and not _extension(leaf.dtype):
            return (
                f"expected numbers, was given an array of dtype {leaf.dtype}; convert it first "
                "(strings: hash them to integers on the host)"
            )
        if not leaf.dtype.isnative:
            return (
                f"expected native byte order, was given {leaf.dtype.str}; convert it with "
                "x.astype(x.dtype.newbyteorder('='))"
            )
        if leaf.dtype in (np.longdouble, np.clongdouble):
            return f"expected at most 64 bits a number, was given {leaf.dtype}; convert it first"
        return ""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "" if shapes else f"expected an array, was given only its type, {leaf}"
    if hasattr(leaf, "__jax_array__"):
        return ""
    if hasattr(leaf, "shape") and hasattr(
        leaf, "dtype"
    ):  # jax.Ref, a typed key, ...: JAX knows better
        return ""
    return f"expected an array or a number, was given {type(leaf).__name__} {str(leaf)[:40]!r}"


def _extension(dtype: Any) -> bool:
    try:
        jax.numpy.zeros((), dtype)
        return True
    except TypeError:
        return False


def _type_name(leaf: Any) -> str:
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return type(leaf).__name__
