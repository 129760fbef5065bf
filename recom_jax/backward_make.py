"""Makes the derivatives of a fused call: analysis of the columns it stands for, and the original ones beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from recom_jax import compat, linear, row_sums
from recom_jax.backward import Pullback
from recom_jax.detect import detect
from recom_jax.detect_values import Detected
from recom_jax.errors import EncodeError
from recom_jax.lowering import FusedCall
from recom_jax.schedule import Scheduled, schedule
from recom_jax.simplify import simplify


def make(call: FusedCall, moving: Sequence[int]) -> Pullback | Mapping[int, str]:
    """See `backward.pullback`."""
    from recom_jax.pipeline import dump, prepare

    jaxpr = compat.open_jaxpr(call.closed)
    detected, detector = detect(_with_constants(call), call.options)
    outputs = {id(o.var): o for o in detected.outputs}
    if any(id(v) not in outputs for v in jaxpr.outvars) or any(o.level for o in outputs.values()):
        raise EncodeError("the columns, by themselves, are no single fused call")
    simple = simplify(
        detected.pool,
        [outputs[id(v)] for v in jaxpr.outvars],
        detected.value_of,
        # A clip in front of a lookup that clips by itself decides where the gradient of an id outside goes.
        call.options.disabled | {"clamp-into-lookup"},
    )
    found = linear.linear(detected, simple.outputs, [jaxpr.invars[k] for k in moving])
    refused = {
        k: found.refused[id(jaxpr.invars[k])]
        for k in moving
        if id(jaxpr.invars[k]) in found.refused
    }
    if not found.tables:
        return refused
    tangent = schedule(detected, found.tangent)
    sums = row_sums.row_sums(detected, found, call.options)
    dump(call.options, linear=found, tangent=tangent, row_sums=sums)

    place = {id(v): k for k, v in enumerate(jaxpr.invars)}
    tables = tuple(place[id(v)] for v in found.tables)
    constants = dict(_constants(detected, detector))
    programs: tuple[Scheduled, ...] = (tangent, sums.numbers)
    used = {id(v) for s in programs for v in s.operands}
    numbers = tuple(k for k in range(len(jaxpr.invars)) if k not in tables)
    made = tuple(key for key in constants if key in used and key not in place)
    if not used <= {*place, *made}:
        raise EncodeError("the columns, by themselves, are no single fused call")
    order = [*(id(jaxpr.invars[k]) for k in numbers), *made, *(id(v) for v in found.tables)]
    index = {key: k for k, key in enumerate(order)}

    original = _pushed(call.fallback, numbers, len(made), tables, found.results)
    table_avals = tuple(jaxpr.invars[k].aval for k in tables)
    return Pullback(
        numbers,
        tuple(constants[key] for key in made),
        tables,
        found.results,
        table_avals,
        _call(call, tangent, prepare(tangent, call.options), index, found.results, original),
        sums,
        tuple(x for v in sums.numbers.operands for x in (index[id(v)], -1)),
        _number_call(call, sums, index, len(numbers) + len(made)),
        original,
        _pulled(original, len(numbers) + len(made), table_avals),
        refused,
    )


def _with_constants(call: FusedCall) -> Any:
    """The call's columns as a jaxpr whose known arrays are constants: what they hold are facts."""
    jaxpr = compat.open_jaxpr(call.closed)
    return compat.closed(
        [*jaxpr.constvars, *(jaxpr.invars[k] for k in call.constants)],
        [v for k, v in enumerate(jaxpr.invars) if k not in call.constants],
        jaxpr.outvars,
        jaxpr.eqns,
        [*call.closed.consts, *call.constants.values()],
        jaxpr,
    )


def _constants(detected: Detected, detector: Any) -> list[tuple[int, Any]]:
    """Arrays by the ids of the variables that stand for them."""
    jaxpr = compat.open_jaxpr(detected.jaxpr)
    made = [*zip(jaxpr.constvars, detected.jaxpr.consts, strict=True), *detector.extra_consts]
    return [(id(v), c) for v, c in made]


def _pushed(
    fallback: Callable[..., Any],
    numbers: Sequence[int],
    n_made: int,
    tables: Sequence[int],
    results: Sequence[int],
) -> Callable[..., list[Any]]:
    """The original columns' tangents, as a function of numbers, what the compiler made, and the tables' tangents."""

    def push(*args: Any) -> list[Any]:
        still = dict(zip(numbers, args[: len(numbers)], strict=True))

        def columns(*moving: Any) -> list[Any]:
            full = {**still, **dict(zip(tables, moving, strict=True))}
            made = fallback(*[full[k] for k in range(len(full))])
            return [made[k] for k in results]

        # They are linear in the tables, so it does not matter where they are differentiated.
        tangents = tuple(args[len(numbers) + n_made :])
        return list(jax.jvp(columns, tangents, tangents)[1])

    return push


def _pulled(
    pushed: Callable[..., list[Any]], n_numbers: int, table_avals: Sequence[Any]
) -> Callable[..., list[Any]]:
    """The transpose of `pushed` by what stands behind its numbers."""

    def pull(*args: Any) -> list[Any]:
        numbers, cotangents = args[:n_numbers], args[n_numbers:]
        transposed = jax.linear_transpose(lambda *t: pushed(*numbers, *t), *table_avals)
        return list(transposed(list(cotangents)))

    return pull


def _number_call(
    call: FusedCall, sums: row_sums.RowSums, index: Mapping[int, int], n_numbers: int
) -> FusedCall:
    """The program of a row sum's numbers as a fused call of its own."""

    def unknown(*_: Any) -> list[Any]:
        raise EncodeError("the numbers of a row sum have no other form")

    places = [index[id(v)] for v in sums.numbers.operands]
    return FusedCall(
        sums.encoded,
        tuple(x for k in places for x in (k, -1)),
        n_numbers,
        tuple(o.var.aval for o in sums.numbers.outputs),
        unknown,
        call.options,
        tuple(x for k in places for x in (k, -1, 0)),
        sums.numbers.program,
    )


def _call(
    call: FusedCall,
    scheduled: Scheduled,
    encoded: Any,
    index: Mapping[int, int],
    results: Sequence[int],
    original: Callable[..., list[Any]],
) -> FusedCall:
    """The fused call of the tangents, which takes all of the primitive's operands."""
    places = [index[id(v)] for v in scheduled.operands]
    return FusedCall(
        encoded,
        tuple(x for k in places for x in (k, -1)),
        len(index),
        tuple(call.out_avals[k] for k in results),
        original,
        call.options,
        tuple(x for k in places for x in (k, -1, 0)),
        scheduled.program,
    )
