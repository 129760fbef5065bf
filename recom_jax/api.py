"""`optimize` and what it returns: reads as the pipeline does."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from recom_jax import _recom, compat, pipeline
from recom_jax.bound import context
from recom_jax.buckets import Buckets
from recom_jax.errors import ArgumentError, RecomError, trace_error
from recom_jax.explain import Report, report_of
from recom_jax.options import Options
from recom_jax.signature import Arguments, Signature
from recom_jax.trace import trace


def optimize(
    fn: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    options: Options | None = None,
) -> Any:
    """Fuses the embedding columns of a JAX function into one custom call. A decorator.

    Args:
      fn: a function of pytrees of arrays, as for `jax.jit`.
      static_argnums, static_argnames: as for `jax.jit`.
      options: see `Options`.

    Returns:
      An `OptimizedFunction`: outside a trace it behaves as ``jax.jit(fn)``; inside jit, vmap, grad and jvp as `fn`.
      Without `fn`, a decorator.

    Raises:
      ArgumentError (a TypeError): `fn` is not callable.
    """
    if fn is None:
        return functools.partial(
            optimize,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            options=options,
        )
    if not callable(fn):
        raise ArgumentError(f"recom_jax.optimize takes a function, not a {type(fn).__name__}")
    if options is not None and not isinstance(options, Options):
        raise ArgumentError(f"options is a recom_jax.Options, not a {type(options).__name__}")
    return OptimizedFunction(
        fn, Signature.of(fn, static_argnums, static_argnames), options or Options()
    )


class OptimizedFunction(_recom.Forward):  # type: ignore[misc]
    """A function whose embedding columns run fused. Make it with `optimize`.

    Calls go to `_jitted` or `_call` without a step of Python in between, and what they raise to `_failed`.
    """

    def __init__(self, fn: Callable[..., Any], signature: Signature, options: Options) -> None:
        self._fn, self._signature, self.options = fn, signature, options
        functools.update_wrapper(self, fn, updated=())
        static: dict[str, Any] = {
            "static_argnums": signature.static_argnums or None,
            "static_argnames": signature.static_argnames or None,
        }
        self._jitted = jax.jit(self._named(self._body), **static)
        # Calls with values, where they are measured: JAX would take them for what it traced inside another function.
        measured = self._named(self._measured_body)
        self._measured = jax.jit(measured, **static) if options.tune else self._jitted
        self._buckets = Buckets(fn, signature, options) if options.batch_buckets else None
        direct = self._buckets is None and not options.tune
        target = self._jitted if direct else self._call
        self._forward(target, compat.ArrayImpl, jax.tree_util.tree_leaves)
        self._reports: dict[Any, Report] = {}
        self._lock = threading.Lock()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._buckets is not None and not compat.tracing():
            return self._buckets.call(self._run, args, kwargs)
        return self._run(*args, **kwargs)

    def _swapped(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuses a numpy array in the other byte order, of which `jax.jit` may read the bytes as they are."""
        self._signature.split(args, kwargs)

    def _failed(self, why: Exception, args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
        """Raises what a call that raised `why` shall raise."""
        if isinstance(why, RecomError):
            raise why
        raise self._signature.explain_failure(why, args, kwargs) from why

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.options.tune or compat.tracing():
            return self._jitted(*args, **kwargs)
        from recom_jax.cuda import tune

        with tune.values(lambda: self._signature.split(args, kwargs).leaves):
            return self._measured(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """What would be fused for these arguments, and why the rest is not. Runs and compiles nothing.

        Args:
          *args, **kwargs: as for a call; arrays may be ``jax.ShapeDtypeStruct``s.
        """
        call = self._signature.split(args, kwargs)
        key = call.key()
        key = None if key is None else (key, context())
        with self._lock:
            found = self._reports.get(key) if key is not None else None
        if found is None:
            found = report_of(self._compile(call), getattr(self, "__name__", "model"))
            if key is not None:
                with self._lock:
                    if len(self._reports) >= 64:
                        self._reports.pop(next(iter(self._reports)))
                    self._reports[key] = found
        return found

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit(fn).lower(...)`` of the fused program: has ``as_text()`` and ``compile()``."""
        try:
            return self._jitted.lower(*args, **kwargs)
        except Exception as why:
            self._failed(why, args, kwargs)

    def bind(self, *leading: Any) -> Any:
        """Fixes the leading arguments (tables, weights): see `recom_jax.serve.Server`.

        Prints nothing and allocates nothing before `Server.cost` can be read: arenas are packed at the first call.
        """
        from recom_jax.serve import Server

        return Server(
            self._fn, self._signature, self.options, leading, getattr(self, "__name__", "model")
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedFunction:
        return self

    def __reduce__(self) -> Any:
        where = (self.__module__, getattr(self._fn, "__qualname__", ""))
        try:
            if _by_name(*where) is self:
                return _by_name, where
        except (ImportError, AttributeError):
            pass
        s = self._signature  # found by another name: the function itself must be picklable
        return _again, (self._fn, s.static_argnums, s.static_argnames, self.options)

    def __repr__(self) -> str:
        return f"<recom_jax.optimize({getattr(self._fn, '__qualname__', self._fn)!s})>"

    # ---- tracing ------------------------------------------------------------------------------------------

    def _named(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """`body` with the function's name and parameters: what profiles, modules and JAX's messages show."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

        call.__name__ = self._signature.name
        return functools.update_wrapper(call, self._fn, updated=())

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        if not compat.tracing():  # jax_disable_jit, or JAX looks for the operation that made a NaN
            return self._fn(*args, **kwargs)
        call = self._signature.split(args, kwargs)
        pipeline.count("traces")
        compiled = pipeline.fuse(trace_call(self._fn, call, self._signature.name), self.options)
        if self.options.tune:
            from recom_jax.cuda import tune

            tune.measure(compiled, self.options)
        outs = compat.jaxpr_as_fun(compiled.jaxpr)(*call.leaves)
        return jax.tree_util.tree_unflatten(compiled.traced.out_tree, outs)

    def _measured_body(self, *args: Any, **kwargs: Any) -> Any:
        return self._body(*args, **kwargs)

    def _compile(self, call: Arguments) -> pipeline.Compiled:
        pipeline.count("traces")
        return pipeline.compile_jaxpr(
            trace_call(self._fn, call, self._signature.name), self.options
        )


class BoundMethod:
    """An optimized method looked up on an instance: the instance is its first argument."""

    def __init__(self, function: OptimizedFunction, instance: Any) -> None:
        self.__func__, self.__self__ = function, instance
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        return self.__func__.explain(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def bind(self, *leading: Any) -> Any:
        return self.__func__.bind(self.__self__, *leading)


def trace_call(fn: Callable[..., Any], call: Arguments, name: str) -> Any:
    """Traces a call of the user's function; what it raises is raised as ours, of the same type."""
    try:
        dynamic, named = jax.tree_util.tree_unflatten(call.tree, call.leaves)
        return trace(call.without_static(fn), dynamic, call.names, named)
    except RecomError:
        raise
    except Exception as why:
        where = f"while tracing {name}{call.describe()}"
        raise call.fault(name, why) or trace_error(why, where) from why


def fuse_flat(fn: Callable[..., Any], args: Sequence[Any], options: Options) -> list[Any]:
    """Runs a flat function (list of outputs) through the compiler, on values or tracers."""
    traced = trace(fn, args, tuple(f"operand {k}" for k in range(len(args))))
    compiled = pipeline.fuse(traced, options)
    return list(compat.jaxpr_as_fun(compiled.jaxpr)(*args))


def stats() -> dict[str, int]:
    """Counters since the process began.

    ``traces`` (functions analysed), ``programs_prepared`` (programs made: kernel compiles), ``program_cache_hits``,
    ``calls`` (fused calls executed), ``bytes_packed`` (bytes gathered from numpy leaves), and others.
    """
    from recom_jax import ffi

    ext = ffi.extension()
    out = {
        "traces": 0,
        "programs_prepared": 0,
        "program_cache_hits": 0,
        "calls": 0,
        "bytes_packed": 0,
    }
    out.update(pipeline.counters())
    out.update({k: v for k, v in ext.program_stats().items() if isinstance(v, int)})
    return out


def _again(fn: Any, nums: Any, names: Any, options: Options) -> OptimizedFunction:
    made: OptimizedFunction = optimize(
        fn, static_argnums=nums, static_argnames=names, options=options
    )
    return made


def _by_name(module: str, qualname: str) -> Any:
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value


__all__ = ["OptimizedFunction", "optimize", "stats"]
