"""What the report says of a model beside its columns: what each stage made of it, and where columns land."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from recom_jax import compat, ir
from recom_jax.detect_values import Part, row_major
from recom_jax.pipeline import Compiled
from recom_jax.shape_solver.fact import Fact, dtype_of

EQUATIONS, LINES, LONGEST, CHARACTERS = 200, 200, 500, 40_000


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the compiler at work on this model.

    Attributes:
      name: as in docs/architecture.md.
      counts: what it made, in the order of interest: (label, number or word).
      text: the printed form of what it made, its beginning if it is long.
    """

    name: str
    counts: tuple[tuple[str, str], ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Place:
    """A part of a fused result.

    Attributes:
      start, width: elements within one sample's share of the result.
      columns: numbers of the report's columns that it holds; none: values that need no lookup.
    """

    start: int
    width: int
    columns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """A result of a fused call and the columns that land in it, in the order of memory.

    Attributes:
      shape: numbers, or expressions in a symbolic trace.
      width: elements of one sample (or of the whole result, where parts share no leading axis).
      interleaved: parts lie between one another in memory; places have them one after the other.
    """

    call: int
    shape: tuple[Any, ...]
    dtype: str
    width: int
    interleaved: bool
    places: tuple[Place, ...]


def stages_of(
    compiled: Compiled, names: Mapping[int, str], rewrites: Mapping[str, int]
) -> tuple[Stage, ...]:
    """The stages in order.

    Args:
      names: arguments and constants by id of their variable.
      rewrites: how many columns each rewrite was applied to.
    """
    d, jaxpr = compiled.detected, compat.open_jaxpr(compiled.traced.jaxpr)
    parts = sum(len(o.val.parts) or 1 for o in d.outputs)
    made = compat.open_jaxpr(compiled.jaxpr)
    with ir.numbered():
        marks = {ir.name_of(v): names[id(v)] for v in (*jaxpr.invars, *jaxpr.constvars)}

        def printed(outputs: Any) -> str:
            lines = []
            for o in outputs[:LINES]:
                lines.append(f"level {o.level}: {list(o.var.aval.shape)} {o.var.aval.dtype}")
                for p in _parts(o)[:LINES]:
                    lines.append(f"  at {p.offset}: {text_of(p.expr, marks)}")
            return "\n".join(lines)

        texts = [
            compat.jaxpr_text(compiled.traced.jaxpr, EQUATIONS),
            printed(d.outputs),
            printed(compiled.simplified.outputs),
            "\n\n".join(f"call {k}\n{s.program}" for k, (_, s, _) in enumerate(compiled.calls)),
            "\n".join(f"call {k}: {e}" for k, (_, _, e) in enumerate(compiled.calls)),
            compat.jaxpr_text(compiled.jaxpr, EQUATIONS),
        ]
    programs = [s.program for _, s, _ in compiled.calls]
    counts: list[list[tuple[str, Any]]] = [
        [("equations", len(jaxpr.eqns)), ("arguments", len(jaxpr.invars)), ("constants", len(jaxpr.constvars))],
        [("table reads", len(d.reads)), ("fused results", len(d.outputs)), ("parts", parts),
         ("levels", len({o.level for o in d.outputs})), ("equations left to XLA", len(d.kept))],
        [("kinds of rewrites", len(rewrites)), *sorted(rewrites.items(), key=lambda x: -x[1])],
        [("columns of code", sum(len(p.columns) for p in programs)),
         ("classes", sum(len(p.classes) for p in programs)),
         ("operands", sum(len(p.operands) for p in programs)),
         ("sizes from shapes", sum(len(p.dims) for p in programs))],
        [("bytes", sum(len(e.words) for _, _, e in compiled.calls)), ("programs", len(programs))],
        [("custom calls", len(compiled.calls)), ("equations", len(made.eqns))],
    ]  # fmt: skip
    return tuple(
        Stage(
            name,
            tuple((label, f"{n:,}") for label, n in numbers),
            text if len(text) <= CHARACTERS else text[:CHARACTERS] + "\n... (cut here)",
        )
        for name, numbers, text in zip(
            ("trace", "detect", "simplify", "schedule", "encode", "splice"),
            counts,
            texts,
            strict=True,
        )
    )


def results_of(compiled: Compiled) -> tuple[Result, ...]:
    """Where columns land: every fused result."""
    out = []
    for k, (_, scheduled, _) in enumerate(compiled.calls):
        for o in scheduled.outputs:
            out.append(_result(compiled, k, o))
    return tuple(out)


def _parts(output: Any) -> list[Part]:
    v = output.val
    return list(v.parts) or [Part(v.expr, v.shape, 0, row_major(v.shape))]


def _result(compiled: Compiled, call: int, output: Any) -> Result:
    value = compiled.detected.unifier.value
    found = []
    for p in _parts(output):
        holds: dict[int, None] = {}
        for x in ir.walk(p.expr):
            for c in sorted(compiled.detected.pool.origins.get(id(x), ())):
                holds[c] = None
        axes = [(value(n), value(s)) for n, s in zip(p.shape, p.strides, strict=True)]
        found.append((value(p.offset), axes, tuple(holds)))
    shape = tuple(output.var.aval.shape)
    samples = {axes[0] for _, axes, _ in found if axes}
    # One sample's share, if all parts step from sample to sample alike and stay within the step.
    share = next(iter(samples))[1] if len(samples) == 1 and all(a for _, a, _ in found) else 0
    if not share or any(at + _extent(axes[1:]) > share for at, axes, _ in found):
        share = 0
    width = share or math.prod(compiled.detected.sizes.example(shape))
    places, end, interleaved = [], 0, False
    for at, axes, columns in sorted(found, key=lambda x: x[0]):
        inner = axes[1:] if share else axes
        size = math.prod(n for n, _ in inner)
        interleaved |= at < end or _extent(inner) != size
        places.append(Place(at, size, columns))
        end = at + _extent(inner)
    if interleaved:
        end = 0
        for k, place in enumerate(places):
            places[k], end = dataclasses.replace(place, start=end), end + place.width
    return Result(call, shape, str(output.var.aval.dtype), width, interleaved, tuple(places))


def _extent(axes: list[tuple[int, int]]) -> int:
    """How far from its first element the part's last one is, plus one."""
    return sum((n - 1) * s for n, s in axes) + 1 if all(n for n, _ in axes) else 0


# ---- columns ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lookups:
    """What is known of the reads that are fused, by their number.

    Attributes:
      ids: the row number as the program computes it.
      facts: what is known of its values.
      classes: the code that runs it, "call.class".
    """

    ids: dict[int, str]
    facts: dict[int, str]
    classes: dict[int, tuple[str, ...]]


def lookups_of(compiled: Compiled, names: Mapping[int, str]) -> Lookups:
    jaxpr = compat.open_jaxpr(compiled.traced.jaxpr)
    origins = compiled.detected.pool.origins
    known = compiled.simplified.rows
    texts: dict[int, str] = {}
    found = Lookups({}, {}, {})
    with ir.numbered():
        marks = {ir.name_of(v): names[id(v)] for v in (*jaxpr.invars, *jaxpr.constvars)}
        for o in compiled.simplified.outputs:
            for take in (x for p in _parts(o) for x in ir.walk(p.expr)):
                if not isinstance(take, ir.Take):
                    continue
                if id(take.idx) not in texts:
                    texts[id(take.idx)] = text_of(take.idx, marks)
                fact = _fact(known.get(id(take), Fact.top(take.idx.dtype)), take)
                for k in origins.get(id(take), ()):
                    found.ids[k], found.facts[k] = texts[id(take.idx)], fact
    classes: dict[int, dict[str, None]] = collections.defaultdict(dict)
    for call, (_, scheduled, _) in enumerate(compiled.calls):
        for column, takes in zip(scheduled.program.columns, scheduled.lookups, strict=True):
            for k in {k for t in takes for k in origins.get(t, ())}:
                classes[k][f"{call}.{column.cls}"] = None
    found.classes.update({k: tuple(v) for k, v in classes.items()})
    return found


def _fact(fact: Fact, take: ir.Take) -> str:
    """The row number's interval, and what that means for ids out of range."""
    t = dtype_of(fact.dtype)
    low, high = fact.lo >= 0, fact.hi < t.hi
    if fact.lo == fact.hi:
        row = f"row {fact.lo}"
    elif low and high:
        row = f"row {fact.lo}..{fact.hi}"
    elif low or high:
        row = f"row >= {fact.lo}" if low else f"row <= {fact.hi}"
    else:
        row = f"any {fact.dtype}"
    if fact.lo >= 0 and fact.hi < take.rows:
        return f"{row}, always in the table"
    return f"{row}, else {'the nearest row' if take.mode == 'clip' else f'filled with {take.fill}'}"


def text_of(e: ir.Expr, marks: Mapping[str, str]) -> str:
    """An expression with arguments by name."""
    if _printable(e, {}) >= LONGEST:
        return "(a long expression)"
    return re.sub(r"%\d+", lambda m: marks.get(m[0], "XLA's " + m[0]), str(e))


def _printable(e: ir.Expr, memo: dict[int, int]) -> int:
    """How many nodes the printed form of an expression has: shared ones are printed each time."""
    if id(e) not in memo:
        memo[id(e)] = 1 + sum(_printable(c, memo) for c in e.children)
    return memo[id(e)]


__all__ = ["Lookups", "Place", "Result", "Stage", "lookups_of", "results_of", "stages_of", "text_of"]  # fmt: skip
