"""Rules of stage 2 that move values and compute none: broadcasts, slices, reshapes, concatenations.

Most vanish into the strides of views (`ir`). What strides cannot say is refused, or, where lookups meet in one
result, becomes an assembly of parts in the result's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from recom_jax import compat, ir
from recom_jax.detect import Detector, Rule
from recom_jax.detect_values import Part, Refuse, Shape, Val, dtype_name, row_major
from recom_jax.shape_solver.dims import DimLike, atom_dim, exact_div, product, split, terms_of


def _remap(d: Detector, v: Val, shape: Shape, f: ir.Remap) -> Val:
    return Val(shape, d.pool.remap(d.one(v), len(v.shape), f))


def _broadcast_in_dim(d: Detector, eqn: Any) -> Val:
    if len(eqn.invars) != 1:
        raise Refuse("a broadcast to a dynamic shape")
    v = d.val(eqn.invars[0])
    where = [int(k) for k in eqn.params["broadcast_dimensions"]]
    sizes = eqn.outvars[0].aval.shape
    old = eqn.invars[0].aval.shape
    shape: list[DimLike | None] = [None] * len(sizes)
    keeps = []
    for k, axis in enumerate(where):
        if old[k] != 1 or sizes[axis] == 1:
            shape[axis] = v.shape[k]
            keeps.append((k, axis))
    new = tuple(d.literal_dim(n) if s is None else s for s, n in zip(shape, sizes, strict=True))

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        out: list[DimLike] = [0] * len(sizes)
        for k, axis in keeps:
            out[axis] = strides[k]
        return tuple(out), offset

    return _remap(d, v, new, f)


def _transpose(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    perm = eqn.params["permutation"]
    if v.expr is None:
        raise Refuse("a transposed concatenation")
    return _remap(
        d, v, tuple(v.shape[k] for k in perm), lambda s, o: (tuple(s[k] for k in perm), o)
    )


def _squeeze(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    rank = len(v.shape)
    gone = {k % rank for k in eqn.params["dimensions"]}
    keep = [k for k in range(rank) if k not in gone]
    if v.expr is None:
        return reshape(d, v, tuple(v.shape[k] for k in keep))
    return _remap(
        d, v, tuple(v.shape[k] for k in keep), lambda s, o: (tuple(s[k] for k in keep), o)
    )


def _expand_dims(d: Detector, eqn: Any) -> Val:
    return _reshape(d, eqn)


def _slice(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    p = eqn.params
    steps = p["strides"] or (1,) * len(v.shape)
    starts = d.sizes.shape(p["start_indices"])
    old = eqn.invars[0].aval.shape
    sizes = eqn.outvars[0].aval.shape
    shape = tuple(
        v.shape[k]
        if sizes[k] == old[k]
        else v.shape[k] - starts[k]
        if p["limit_indices"][k] == old[k] and steps[k] == 1 and old[k] != 1
        else d.literal_dim(sizes[k])
        for k in range(len(old))
    )

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        for k, s in enumerate(strides):
            offset = offset + s * starts[k]
        return tuple(s * int(n) for s, n in zip(strides, steps, strict=True)), offset

    return _remap(d, v, shape, f)


def _rev(d: Detector, eqn: Any) -> Val:
    v = d.val(eqn.invars[0])
    axes = set(eqn.params["dimensions"])

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        for k in axes:
            offset = offset + strides[k] * (v.shape[k] - 1)
        return tuple(-s if k in axes else s for k, s in enumerate(strides)), offset

    return _remap(d, v, v.shape, f)


def _split(d: Detector, eqn: Any) -> list[Val | None]:
    v = d.val(eqn.invars[0])
    axis, out = eqn.params["axis"], []
    start: DimLike = 0
    for size in eqn.params["sizes"]:
        shape = tuple(d.literal_dim(size) if k == axis else s for k, s in enumerate(v.shape))

        def f(
            strides: ir.Strides, offset: DimLike, at: DimLike = start
        ) -> tuple[ir.Strides, DimLike]:
            return strides, offset + strides[axis] * at

        out.append(_remap(d, v, shape, f))
        start = start + d.sizes.of(size)
    return list(out)


def _iota(d: Detector, eqn: Any) -> Val:
    dtype = dtype_name(eqn.outvars[0].aval)
    if ir.is_float(dtype):
        raise Refuse("a float iota")
    axis = eqn.params["dimension"]
    shape = tuple(d.literal_dim(n) for n in eqn.outvars[0].aval.shape)
    return Val(shape, d.pool.affine(dtype, 0, tuple(int(k == axis) for k in range(len(shape)))))


def _reshape(d: Detector, eqn: Any) -> Val:
    if eqn.params.get("dimensions") is not None:
        raise Refuse("a reshape in another order")
    v = d.val(eqn.invars[0])
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if 0 in old:
        raise Refuse("a reshape of an empty array")
    return reshape(d, v, _new_shape(d, v.shape, old, new))


def _groups(
    value: Callable[[DimLike], int], old: Sequence[DimLike], new: Sequence[DimLike]
) -> list[tuple[range, range]]:
    """Splits two shapes of equal size into the shortest runs of axes with equal products.

    Args:
      value: an example of a size, which decides the side to go on with; that products are equal is decided on the
        sizes themselves. Where that cannot be seen, a run goes on: longer ones are right as well.
    """
    out, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        a: DimLike = old[i] if i < len(old) else 1
        b: DimLike = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while a != b and (i < len(old) or j < len(new)):
            if i < len(old) and (value(a) < value(b) or j == len(new)):
                a = a * old[i]
                i += 1
            else:
                b = b * new[j]
                j += 1
        out.append((range(i0, i), range(j0, j)))
    return out


def _new_shape(d: Detector, dims: Shape, old: Sequence[Any], new: Sequence[Any]) -> Shape:
    """Names the sizes of a reshape's result by provenance where a factor is recognisable."""
    shape: list[DimLike] = []
    if 0 in old:
        return tuple(d.literal_dim(n) for n in new)
    if any(map(compat.is_symbolic, (*old, *new))):
        return _new_symbolic_shape(d, dims, old, new)
    for olds, news in _groups(d.unifier.value, old, new):
        whole = product([dims[k] for k in olds])
        if len(news) == 1:  # a batch of 1 too
            shape.append(whole)
            continue
        parts = _factors(d, whole, [new[j] for j in news])
        if parts is not None:  # merged before: a flattened batch of bags gets its own axes back
            shape += parts
            continue
        real = [j for j in news if new[j] != 1]
        if len(real) == 1:
            shape += [whole if j == real[0] else 1 for j in news]
            continue
        left = whole
        named: dict[int, DimLike] = {}
        for j in reversed(real[1:]):
            # A trailing factor: one of the merged axes, or a literal that divides.
            for k in reversed(olds):
                rest = (
                    exact_div(left, dims[k])
                    if old[k] == new[j] and not isinstance(dims[k], int)
                    else None
                )
                if rest is not None:
                    named[j], left = dims[k], rest
                    break
            else:
                rest = exact_div(left, int(new[j]))
                if rest is None:
                    break
                named[j], left = int(new[j]), rest
        if len(named) == len(real) - 1 and real:
            named[real[0]] = left
        for j in news:
            shape.append(1 if new[j] == 1 else named.get(j, 0) or d.literal_dim(new[j]))
    return tuple(shape)


def _factors(d: Detector, whole: DimLike, sizes: Sequence[int]) -> list[DimLike] | None:
    """The factors of a product that have these sizes in this trace, each once; None where they do not fit."""
    terms = terms_of(whole)
    if len(terms) != 1 or terms[0][1] != 1 or any(n != 1 for _, n in terms[0][0]):
        return None
    left: list[DimLike] = [atom_dim(a) for a, _ in terms[0][0]]
    found = []
    for size in sizes:
        part = next((f for f in left if d.unifier.value(f) == size), None)
        if part is None:
            return None
        left.remove(part)
        found.append(part)
    return found if not left else None


def _new_symbolic_shape(d: Detector, dims: Shape, old: Sequence[Any], new: Sequence[Any]) -> Shape:
    """The sizes as JAX has them; a number is the old axis's own where it is the same axis."""
    shape: list[DimLike] = [d.sizes.of(n) for n in new]
    for olds, news in _groups(d.unifier.value, d.sizes.shape(old), shape):
        kept = [k for k in olds if old[k] != 1]
        real = [j for j in news if new[j] != 1]
        if len(kept) == len(real) == 1:
            shape[real[0]] = dims[kept[0]]
    return tuple(shape)


def reshape(d: Detector, v: Val, shape: Shape) -> Val:
    """A reshape: by strides where they merge, else (for lookups) as an assembly in the same memory."""
    if v.expr is None:
        return Val(shape, None, v.parts)
    try:
        return _remap(d, v, shape, _merge_and_split(d, v.shape, shape))
    except ir.NotAffine:
        if not v.takes:
            raise
        return Val(shape, None, (Part(v.expr, v.shape, 0, row_major(v.shape)),))


def _merge_and_split(d: Detector, old: Shape, new: Shape) -> ir.Remap:
    known = d.unifier.known
    groups = _groups(d.unifier.value, list(map(known, old)), list(map(known, new)))

    def f(strides: ir.Strides, offset: DimLike) -> tuple[ir.Strides, DimLike]:
        out: list[DimLike] = []
        for olds, news in groups:
            real = [k for k in olds if not (isinstance(old[k], int) and old[k] == 1)]
            step: DimLike = strides[real[-1]] if real else 0
            for k, nxt in itertools.pairwise(real):
                want = strides[nxt] * old[nxt]
                if strides[k] != want and d.unifier.resolve(strides[k] - want) != 0:
                    raise ir.NotAffine(
                        "a reshape that merges axes which are not adjacent in memory"
                    )
            sizes = [new[j] for j in news]
            for n in range(len(sizes)):
                out.append(step * product(sizes[n + 1 :]))
        return tuple(out), offset

    return f


# ---- concatenations ------------------------------------------------------------------------------------------


def _concatenate(d: Detector, eqn: Any) -> Val:
    vals = [d.val(v) for v in eqn.invars]
    axis = eqn.params["dimension"]
    shapes = [tuple(0 if k == axis else s for k, s in enumerate(v.shape)) for v in vals]
    common = d.join(shapes)
    width: DimLike = 0
    starts = []
    for v in vals:
        starts.append(width)
        width = width + v.shape[axis]
    shape = tuple(width if k == axis else s for k, s in enumerate(common))
    strides = row_major(shape)
    parts: list[Part] = []
    for v, start in zip(vals, starts, strict=True):
        if v.expr is not None:
            parts.append(Part(v.expr, v.shape, start * strides[axis], strides))
        else:
            parts += [_move(d, p, v.shape, strides, start * strides[axis]) for p in v.parts]
    return Val(shape, None, tuple(parts))


def _stack(d: Detector, eqn: Any) -> Val:
    vals = [d.val(v) for v in eqn.invars]
    axis = eqn.params["axis"]
    common = d.join([v.shape for v in vals])
    shape = (*common[:axis], len(vals), *common[axis:])
    strides = row_major(shape)
    inner = (*strides[:axis], *strides[axis + 1 :])
    parts: list[Part] = []
    for k, v in enumerate(vals):
        if v.expr is None:
            parts += [_move(d, p, v.shape, inner, strides[axis] * k) for p in v.parts]
        else:
            parts.append(Part(v.expr, v.shape, strides[axis] * k, inner))
    return Val(shape, None, tuple(parts))


def _move(d: Detector, p: Part, shape: Shape, strides: ir.Strides, start: DimLike) -> Part:
    """Moves a part of a dense buffer of `shape` into one with other strides.

    Every stride is decomposed into steps along the buffer's axes; that is right only while no part runs
    over the end of an axis, which is proven for all sizes the trace stands for.
    """
    dense = row_major(shape)
    known = d.unifier.known
    if any(known(n) == 0 for n in shape):  # nothing is in it, so nothing has a place to keep
        return Part(p.expr, p.shape, start, (0,) * len(p.strides))

    def decompose(step: DimLike) -> list[DimLike]:
        out: list[DimLike] = []
        for k, unit in enumerate(dense):
            if known(shape[k]) == 1:
                out.append(0)
                continue
            q, step = split(step, unit)
            out.append(q)
        if step != 0:
            raise Refuse("a part that does not keep its place when concatenated again")
        return out

    steps = [decompose(s) for s in p.strides]
    base = decompose(p.offset)
    if not any(known(n) == 0 for n in p.shape):
        for k in range(len(shape)):
            last = base[k]
            for n, s in zip(p.shape, steps, strict=True):
                last = last + (n - 1) * s[k]
            if not d.is_one(shape[k]) and not d.sizes.never_negative(shape[k] - 1 - last):
                raise Refuse("a part that spans rows of a concatenation")

    def weigh(q: Sequence[DimLike]) -> DimLike:
        total: DimLike = 0
        for a, b in zip(q, strides, strict=True):
            total = total + a * b
        return total

    return Part(p.expr, p.shape, start + weigh(base), tuple(weigh(s) for s in steps))


MOVEMENT_RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand_dims,
    "slice": _slice,
    "rev": _rev,
    "split": _split,
    "iota": _iota,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "stack": _stack,
}
