"""Rules of primitives that move elements, gather rows or reduce axes, on `pull`'s arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recom_jax.corun import pull
from recom_jax.corun.pull import Moved, SymArray
from recom_jax.corun.symbols import Unsupported, Writer, type_of


def _broadcast(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    x, axes = args[0], tuple(eqn.params["broadcast_dimensions"])
    if len(args) > 1:
        raise Unsupported("a broadcast to a computed shape")
    spread = [x.shape[k] == 1 and out.shape[a] != 1 for k, a in enumerate(axes)]

    def place(w: Writer, index: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            w.integer(w.number(0)) if s or n == 1 else index[a]
            for s, a, n in zip(spread, axes, x.shape, strict=True)
        )

    if x.shape == tuple(out.shape):
        return x
    new = tuple(a for a in range(len(out.shape)) if a not in axes)
    only = not any(spread) and all(out.shape[a] == 1 for a in new)
    return Moved(out.shape, x, place, new if only else None)


def _reshape(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    x, to = args[0], tuple(out.shape)
    if eqn.params.get("dimensions") is not None:
        raise Unsupported("a reshape in another order")
    return _reshaped(x, to)


def _reshaped(x: SymArray, to: tuple[int, ...]) -> SymArray:
    if x.shape == to:
        return x
    big, bigger = [n for n in x.shape if n != 1], [n for n in to if n != 1]
    if big == bigger:  # only axes of size 1 come or go
        kept_to = [k for k, n in enumerate(to) if n != 1]
        kept = [k for k, n in enumerate(x.shape) if n != 1]

        def squeezed(w: Writer, index: tuple[Any, ...]) -> tuple[Any, ...]:
            made: list[Any] = [None] * len(x.shape)
            for a, b in zip(kept, kept_to, strict=True):
                made[a] = index[b]
            return tuple(w.integer(w.number(0)) if m is None else m for m in made)

        adds = tuple(k for k, n in enumerate(to) if n == 1)
        return Moved(to, x, squeezed, adds if len(kept) == len(x.shape) else None)

    def place(w: Writer, index: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = pull.flat(w, to, pull.plain(index, "a reshape"))
        made = []
        for n in reversed(x.shape[1:]):
            made.append(w.integer(f"{whole} % {w.number(n)}"))
            whole = w.integer(f"{whole} / {w.number(n)}")
        return (whole, *reversed(made)) if x.shape else ()

    return Moved(to, x, place)


def _slice(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return _sliced(args[0], tuple(out.shape), starts, strides)


def _sliced(x: SymArray, shape: tuple[int, ...], starts: Any, strides: Any) -> SymArray:
    if shape == x.shape:
        return x
    if isinstance(x, pull.Concat) and all(s == 1 for s in strides):
        return _cut(x, shape, starts)
    if isinstance(x, Moved) and x.expands is not None and strides == (1,) * len(shape):
        kept = [k for k in range(len(shape)) if k not in x.expands]
        inner = _sliced(
            x.source,
            tuple(shape[k] for k in kept),
            tuple(starts[k] for k in kept),
            (1,) * len(kept),
        )
        return Moved(shape, inner, x.place, x.expands)

    def place(w: Writer, index: tuple[Any, ...]) -> tuple[Any, ...]:
        made = []
        for i, a, s in zip(index, starts, strides, strict=True):
            if (a, s) != (0, 1):
                (i,) = pull.plain((i,), "a slice")
                i = w.integer(
                    f"{i} * {w.number(s)} + {w.number(a)}" if s != 1 else f"{i} + {w.number(a)}"
                )
            made.append(i)
        return tuple(made)

    return Moved(shape, x, place)


def _cut(x: pull.Concat, shape: tuple[int, ...], starts: Any) -> SymArray:
    """A slice of a concatenation: slices of its parts, so that units stay what they are."""
    low, high = starts[x.axis], starts[x.axis] + shape[x.axis]
    parts, begin = [], 0
    for y in x.parts:
        end = begin + y.shape[x.axis]
        a, b = max(low, begin), min(high, end)
        if a < b:
            own, at = list(shape), list(starts)
            own[x.axis], at[x.axis] = b - a, a - begin
            parts.append(_sliced(y, tuple(own), tuple(at), (1,) * len(own)))
        begin = end
    if not parts:  # nothing of it
        return pull.Const(np.zeros(shape, x.dtype))
    return parts[0] if len(parts) == 1 else pull.Concat(parts, x.axis)


def _split(eqn: Any, args: list[SymArray], out: Any) -> list[SymArray]:
    axis, start, made = eqn.params["axis"], 0, []
    for v in eqn.outvars:
        starts = [0] * len(v.aval.shape)
        starts[axis] = start
        made.append(_sliced(args[0], tuple(v.aval.shape), starts, (1,) * len(starts)))
        start += v.aval.shape[axis]
    return made


def _transpose(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    order = eqn.params["permutation"]

    def place(w: Writer, index: tuple[Any, ...]) -> tuple[Any, ...]:
        made: list[Any] = [None] * len(order)
        for k, a in enumerate(order):
            made[a] = index[k]
        return tuple(made)

    return Moved(out.shape, args[0], place)


def _stack(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    axis = int(eqn.params["axis"])
    shape = tuple(1 if k == axis else n for k, n in enumerate(out.shape))
    return pull.Concat([_reshaped_at(x, shape, axis) for x in args], axis)


def _reshaped_at(x: SymArray, shape: tuple[int, ...], axis: int) -> SymArray:
    def place(w: Writer, index: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*index[:axis], *index[axis + 1 :])

    return Moved(shape, x, place, (axis,))


def _pad(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    config = eqn.params["padding_config"]
    if any(low < 0 or high < 0 or interior for low, high, interior in config):
        raise Unsupported("padding that cuts or spreads")
    return pull.Padded(out.shape, args[0], args[1], [low for low, _, _ in config])


def _gather(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    x, index, p = args[0], args[1], eqn.params
    d = p["dimension_numbers"]
    n = len(index.shape) - 1
    plain_rows = (
        tuple(d.collapsed_slice_dims) == (0,)
        and tuple(d.start_index_map) == (0,)
        and not d.operand_batching_dims
        and tuple(p["slice_sizes"]) == (1, *x.shape[1:])
        and tuple(d.offset_dims) == tuple(range(n, n + len(x.shape) - 1))
        and index.shape[-1:] == (1,)
    )
    if not plain_rows:
        raise Unsupported("a gather of other than rows")
    mode = str(p["mode"]).upper()
    fill = None
    if "FILL" in mode:
        fill = p["fill_value"]
        if fill is None:
            kind = x.dtype
            fill = (
                np.nan if kind.kind == "f" else np.iinfo(kind).max if kind.kind == "u" else True if kind.kind == "b"
                else np.iinfo(kind).min
            )  # fmt: skip
    return pull.Gather(x, _reshaped(index, index.shape[:-1]), fill)


def _reduce(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    kind, dtype = eqn.primitive.name, np.dtype(out.dtype)
    type_of(dtype)
    lowest = -np.inf if dtype.kind == "f" else None if dtype.kind == "b" else np.iinfo(dtype).min
    highest = np.inf if dtype.kind == "f" else None if dtype.kind == "b" else np.iinfo(dtype).max
    initial, text = {
        "reduce_sum": (0, "x_add({0}, {1})"),
        "reduce_prod": (1, "x_mul({0}, {1})"),
        "reduce_max": (lowest, "x_max({0}, {1})"),
        "reduce_min": (highest, "x_min({0}, {1})"),
        "reduce_and": (True, "x_and({0}, {1})"),
        "reduce_or": (False, "x_or({0}, {1})"),
    }[kind]
    axes = tuple(eqn.params["axes"])
    if 0 in axes and args[0].shape[0] > 64:
        raise Unsupported(f"{kind} over the rows of a batch")
    if initial is None:
        raise Unsupported(f"{kind} of {dtype}")
    return pull.Reduce(args[0], axes, dtype, np.asarray(initial).astype(dtype), text)


def _squeeze(eqn: Any, args: list[SymArray], out: Any) -> SymArray:
    return _reshaped(args[0], tuple(out.shape))


MOVES: dict[str, Callable[[Any, list[SymArray], Any], Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "expand_dims": _squeeze,
    "slice": _slice,
    "split": _split,
    "transpose": _transpose,
    "concatenate": lambda eqn, args, out: pull.Concat(args, int(eqn.params["dimension"])),
    "stack": _stack,
    "pad": _pad,
    "iota": lambda eqn, args, out: pull.Iota(out.shape, out.dtype, int(eqn.params["dimension"])),
    "gather": _gather,
    **dict.fromkeys(
        ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or"),
        _reduce,
    ),
}


__all__ = ["MOVES"]
