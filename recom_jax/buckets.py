"""`Options.batch_buckets`: calls padded to a few batch sizes, so that XLA compiles once for each of these.

The function is traced once with a symbolic batch size, and `rowwise` proves that appended rows change no other. Nothing
is decided by the sizes of one call: what is padded are the arrays of the batch arguments, what is cut are the results
that the proof says have the batch as an axis.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, rowwise
from recom_jax.errors import ArgumentError, BucketError, RecomError
from recom_jax.options import Options
from recom_jax.signature import Arguments, Signature
from recom_jax.trace import trace

_KEEP = 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is proven of a function for arguments of some types.

    Attributes:
      results: where the batch is in each result; None where it is nowhere.
      types: shape (None in the place of the batch) and dtype of each result.
    """

    results: tuple[rowwise.Rows | None, ...]
    types: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call, taken apart.

    Attributes:
      whole: with what is bound in front, without leaves.
      tree: of the call's own arguments. static: of those, position (or name) -> value.
      batched: of each own leaf, whether axis 0 is the batch.
    """

    whole: Arguments
    tree: Any
    static: tuple[tuple[int | str, Any], ...]
    leaves: Sequence[Any]
    batched: tuple[bool, ...]

    def arguments(self, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Its own arguments with other leaves."""
        own = Arguments(tuple(leaves), (), self.tree, 0, self.static)
        return own.arguments(leaves)


class Buckets:
    """Pads calls of one function. Safe to use from several threads.

    Args:
      bound: types of the leaves of leading arguments that calls leave out (`Server`).
      whole: adds those arguments to a call's own.
      offset: how many they are.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        options: Options,
        bound: Sequence[Any] = (),
        whole: Callable[[Sequence[Any]], Sequence[Any]] = list,
        offset: int = 0,
    ) -> None:
        self.fn, self.signature = fn, signature
        self.sizes, self.argnums = options.batch_buckets, options.batch_argnums
        self._bound, self._whole, self._offset = tuple(bound), whole, offset
        self._structures: dict[Any, tuple[Arguments, tuple[bool, ...]]] = {}
        self._plans: dict[Any, Plan] = {}
        self._checked: set[Any] = set()
        self._lock = threading.Lock()

    def call(self, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``run(*args, **kwargs)`` on a padded batch, its results cut.

        Raises:
          BucketError (a ValueError): the arrays have no common batch size, or a result mixes rows.
        """
        call = self._split(args, kwargs)
        try:
            size = self._size(call)
        except BucketError:
            self.signature.split(
                self._whole(args), kwargs
            )  # a leaf that is no array is the better reason
            raise
        key = self._key(call)
        plan = self._plan(call, key)
        if size < 2 and (key, size) not in self._checked:
            self._check(call, plan, size)
            self._checked.add((key, size))
        bucket = self.bucket(size)
        if bucket == size:
            return run(*args, **kwargs)
        leaves = [
            _padded(x, size, bucket) if b else x
            for x, b in zip(call.leaves, call.batched, strict=True)
        ]
        new_args, new_kwargs = call.arguments(leaves)
        out = run(*new_args, **new_kwargs)
        found, tree = jax.tree_util.tree_flatten(out)
        cut = [_cut(x, r, size) for x, r in zip(found, plan.results, strict=True)]
        return jax.tree_util.tree_unflatten(tree, cut)

    def bucket(self, size: int) -> int:
        """The size that a batch is padded to: a bucket, or a multiple of the largest."""
        largest = self.sizes[-1]
        return next((n for n in self.sizes if n >= size), -(-size // largest) * largest)

    # ---- which arrays ------------------------------------------------------------------------------------------

    def _split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call:
        """Takes a call apart. Names, and which arguments are the batch, are found once a structure."""
        nums, names = self.signature.static_argnums, self.signature.static_argnames
        static: list[tuple[int | str, Any]] = [
            (k - self._offset, args[k - self._offset])
            for k in nums
            if self._offset <= k < self._offset + len(args)
        ]
        static += [(k, kwargs[k]) for k in names if k in kwargs]
        dynamic = tuple(x for k, x in enumerate(args, self._offset) if k not in nums)
        named = {k: x for k, x in kwargs.items() if k not in names}
        leaves, tree = jax.tree_util.tree_flatten((dynamic, named))
        key = tree, tuple(static), len(args)
        try:
            hash(key)
        except TypeError as why:
            raise ArgumentError(f"static arguments of {self.signature.name}: {why}") from None
        with self._lock:
            found = self._structures.get(key)
        if found is None:
            whole = self.signature.split(self._whole(args), kwargs)
            found = dataclasses.replace(whole, leaves=()), self._wanted(whole)
            with self._lock:
                _remember(self._structures, key, found)
        whole, wanted = found
        batched = tuple(w and np.ndim(x) > 0 for w, x in zip(wanted, leaves, strict=True))
        return _Call(whole, tree, tuple(static), leaves, batched)

    def _wanted(self, whole: Arguments) -> tuple[bool, ...]:
        """Of each own leaf, whether it is in a batch argument."""
        places = whole.positions(self.signature.parameters)
        n = len(self._bound)
        order = sorted(set(places))
        argnums = self.argnums or (tuple(sorted(set(places[n:]))) if self._offset else (-1,))
        if not places or any(not -len(order) <= k for k in argnums if k < 0):
            raise BucketError(
                f"Options.batch_argnums = {argnums}: {self.signature.name} was called with "
                f"{len(order)} arguments that hold arrays"
            )
        wanted = {order[k] if k < 0 else k for k in argnums}
        if any(p in wanted for p in places[:n]):
            raise BucketError(f"Options.batch_argnums = {argnums} names an argument that is bound")
        return tuple(p in wanted for p in places[n:])

    def _size(self, call: _Call) -> int:
        found: dict[int, str] = {}
        names = call.whole.names[len(self._bound) :]
        for name, x, b in zip(names, call.leaves, call.batched, strict=True):
            if b:
                found.setdefault(int(np.shape(x)[0]), name)
        if not found:
            raise BucketError(
                f"Options.batch_buckets: {self.signature.name} has no arrays in its batch argument; "
                "Options.batch_argnums says which it is"
            )
        if len(found) > 1:
            (n, a), (m, b_) = list(found.items())[:2]
            raise BucketError(
                f"Options.batch_buckets: argument {a} of {self.signature.name} has {n} rows and argument {b_} has {m}. "
                "All arrays of the batch have one size; pass others in arguments that Options.batch_argnums leaves out"
            )
        return next(iter(found))

    # ---- proofs ----------------------------------------------------------------------------------------------------

    def _key(self, call: _Call) -> Any:
        types = tuple(
            (np.shape(x)[1:] if b else np.shape(x), _type(x))
            for x, b in zip(call.leaves, call.batched, strict=True)
        )
        return call.tree, call.static, types, compat.enable_x64()

    def _plan(self, call: _Call, key: Any) -> Plan:
        with self._lock:
            found = self._plans.get(key)
        if found is None:
            found = self._prove(call)
            with self._lock:
                _remember(self._plans, key, found)
        return found

    def _prove(self, call: _Call) -> Plan:
        """Traces the function with a symbolic batch, and follows the rows to the results."""
        (size,) = jax.export.symbolic_shape("batch")
        types = [
            jax.ShapeDtypeStruct(
                (size, *t.shape[1:]) if b else t.shape, t.dtype, weak_type=t.weak_type
            )
            for t, b in zip(_types(call.leaves), call.batched, strict=True)
        ]
        name = self.signature.name
        try:
            traced = trace(call.whole.flat(self.fn), [*self._bound, *types], call.whole.names)
        except RecomError:
            raise
        except Exception as why:
            raise BucketError(
                f"Options.batch_buckets: {name} cannot be traced for all batch sizes at once, so it cannot be shown to "
                f"work row by row (is the batch more than Options.batch_argnums says?): {why}"
            ) from why
        jaxpr = compat.open_jaxpr(traced.jaxpr)
        inputs: list[rowwise.State] = [None for _ in self._bound]
        inputs += [rowwise.Rows(0) if b else None for b in call.batched]
        try:
            states = rowwise.states(jaxpr, size, inputs)
        except rowwise.MixesRows as why:
            raise BucketError(f"Options.batch_buckets: {name} has {why}") from None
        paths = jax.tree_util.tree_flatten_with_path(
            jax.tree_util.tree_unflatten(traced.out_tree, range(len(states)))
        )[0]
        results: list[rowwise.Rows | None] = []
        shapes = []
        for state, (path, _), var in zip(states, paths, jaxpr.outvars, strict=True):
            if isinstance(state, rowwise.MixesRows):
                raise BucketError(
                    f"Options.batch_buckets: result{jax.tree_util.keystr(path)} of {name} is not computed row by row "
                    f"({state}); call it without buckets, or move that part out of the optimized function"
                )
            results.append(state)
            shapes.append(
                (
                    tuple(None if compat.is_symbolic(n) else n for n in var.aval.shape),
                    str(var.aval.dtype),
                )
            )
        return Plan(tuple(results), tuple(shapes))

    def _check(self, call: _Call, plan: Plan, size: int) -> None:
        """A batch of 0 or 1 may be what code asks for (`squeeze`, broadcasting), which a trace for all sizes misses."""
        types = [*self._bound, *_types(call.leaves)]
        made = jax.tree_util.tree_leaves(jax.eval_shape(call.whole.flat(self.fn), *types))
        for n, (t, (shape, dtype), rows) in enumerate(
            zip(made, plan.types, plan.results, strict=True)
        ):
            want = tuple(
                size * rows.each if rows is not None and k == rows.axis else m
                for k, m in enumerate(shape)
            )
            if (tuple(t.shape), str(t.dtype)) != (want, dtype):
                raise BucketError(
                    f"Options.batch_buckets: result {n} of {self.signature.name} is {t.dtype}{list(t.shape)} at a "
                    f"batch of {size}, where other batches make it {dtype}{list(want)}: it treats that size apart"
                )


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    while len(known) >= _KEEP:
        known.pop(next(iter(known)))
    known[key] = value


def _type(x: Any) -> Any:
    return getattr(x, "dtype", type(x)), bool(getattr(x, "weak_type", False))


def _types(leaves: Sequence[Any]) -> list[Any]:
    """Of each leaf, shape and dtype as jit takes it."""
    return list(jax.eval_shape(lambda *x: x, *leaves))


# ---- rows ------------------------------------------------------------------------------------------------------------


def _padded(x: Any, size: int, bucket: int) -> Any:
    """`x` with rows appended: copies of its first one, so that they are as ordinary as any; zeros for none."""
    if isinstance(x, jax.Array) and not _on_host(x):
        rows = x[:1] if size else jax.numpy.zeros((1, *x.shape[1:]), x.dtype)
        more = jax.numpy.broadcast_to(rows, (bucket - size, *x.shape[1:]))
        return jax.numpy.concatenate([x, more])
    array = np.asarray(x)
    out = np.empty((bucket, *array.shape[1:]), array.dtype)
    out[:size] = array
    out[size:] = array[:1] if size else np.zeros((), array.dtype)
    return out


def _cut(x: Any, rows: rowwise.Rows | None, size: int) -> Any:
    """The rows of the batch alone. On the CPU without a program of XLA's, which would be one for each size."""
    if rows is None:
        return x
    where = (slice(None),) * rows.axis + (slice(size * rows.each),)
    if not _on_host(x) or getattr(x, "weak_type", False):
        return x[where]
    part = np.ascontiguousarray(np.asarray(x)[where])
    return jax.device_put(part, x.sharding if x.committed else None)


def _on_host(x: Any) -> bool:
    devices = x.devices() if isinstance(x, jax.Array) else ()
    return all(d.platform == "cpu" for d in devices) and len(devices) == 1
