"""Whether a function works row by row: a proof by dataflow over its jaxpr, traced with a symbolic batch size.

A variable is *row by row* along an axis if the rows there are the batch's, in order, and each depends on the same row
of the inputs alone: not on other rows, nor on how many there are. Then rows may be appended to the inputs and the
results' first rows stay what they were. What no rule understands counts as mixing rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from recom_jax import compat, templates
from recom_jax.detect_rules import BINARY, UNARY


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row by row along `axis`, whose size is the batch size times `each`."""

    axis: int
    each: int = 1


class MixesRows(Exception):
    """A result that is not computed row by row: where, and by what."""


# None: the same whatever the batch and its size. An exception: rows are mixed.
State = Rows | MixesRows | None
States = Sequence[State]

ELEMENTWISE = {
    *BINARY, *UNARY, "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "tan", "sinh", "cosh",
    "asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2", "pow", "integer_pow", "square", "rsqrt", "cbrt", "erf",
    "erfc", "erf_inv", "lgamma", "digamma", "nextafter", "round", "select_n", "clamp", "convert_element_type",
    "reduce_precision", "copy", "copy_p", "stop_gradient", "real", "imag", "complex", "conj", "pvary", "pcast",
}  # fmt: skip
REDUCTIONS = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
    "argmin",
}  # fmt: skip
ALONG = {
    "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis", "split": "axis",
    "top_k": "axis", "sort": "dimension", "rev": "dimensions",
}  # fmt: skip


def states(jaxpr: Any, batch: Any, inputs: States) -> list[State]:
    """The state of each result of a flat jaxpr.

    Args:
      batch: the symbolic batch size.
      inputs: of the jaxpr's inputs.

    Raises MixesRows where a side effect (a callback, a print) would see the rows.
    """
    return _Proof(batch).run(jaxpr, inputs)


class _Proof:
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def run(self, jaxpr: Any, inputs: States) -> list[State]:
        env: dict[int, State] = {id(v): None for v in jaxpr.constvars}
        env.update(zip(map(id, jaxpr.invars), inputs, strict=True))

        def read(atom: Any) -> State:
            return None if isinstance(atom, compat.Literal) else env[id(atom)]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if eqn.effects and any(s is not None for s in ins):
                raise MixesRows(f"{eqn.primitive.name}, whose side effect would see more rows")
            found = self.equation(eqn, ins)
            env.update(zip(map(id, eqn.outvars), found, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: States) -> States:
        mixed = next((s for s in ins if isinstance(s, MixesRows)), None)
        if mixed is not None:
            return [mixed] * len(eqn.outvars)
        name = eqn.primitive.name
        plain = all(s is None for s in ins) and not any(map(self.mentions, eqn.outvars))
        try:
            if plain and name != "dim_as_value" and not self.sizes_inside(eqn):
                return [None] * len(eqn.outvars)
            rule = _RULES.get(name)
            if name in ELEMENTWISE:
                rule = _elementwise
            elif name in REDUCTIONS:
                rule = _reduce
            elif name in ALONG:
                rule = _along
            if rule is None:
                raise MixesRows(f"{name}, which recom_jax does not know to work row by row")
            found = rule(self, eqn, ins)
            out = list(found) if isinstance(found, (list, tuple)) else [found] * len(eqn.outvars)
            for var, state in zip(eqn.outvars, out, strict=True):
                if not isinstance(state, MixesRows):
                    self.check(var, state, name)
            return out
        except (MixesRows, LookupError, AttributeError, TypeError, compat.Inconclusive) as error:
            known = isinstance(error, MixesRows)
            why = error if known else f"{name}, in a form that recom_jax does not know"
            line = compat.source_line(eqn)
            return [MixesRows(f"{why}{f' at {line}' if line else ''}")] * len(eqn.outvars)

    def check(self, var: Any, state: Rows | None, name: str) -> None:
        """The shape must say the same as the state."""
        for k, n in enumerate(var.aval.shape):
            if state is not None and k == state.axis:
                if n != self.batch * state.each:
                    raise MixesRows(f"{name}, whose result has {n} rows")
            elif compat.is_symbolic(n):
                raise MixesRows(f"{name}, whose result has the batch size in more than one axis")

    def mentions(self, var: Any) -> bool:
        return any(map(compat.is_symbolic, getattr(var.aval, "shape", ())))

    def sizes_inside(self, eqn: Any) -> bool:
        """Whether an equation's parameters or bodies use the batch size."""
        own = (x for v in eqn.params.values() for x in (v if isinstance(v, tuple) else (v,)))
        return any(type(x) is not int and compat.is_symbolic(x) for x in own) or any(
            e.primitive.name == "dim_as_value"
            or any(map(self.mentions, e.outvars))
            or self.sizes_inside(e)
            for inner in compat.sub_jaxprs(eqn)
            for e in getattr(inner, "jaxpr", inner).eqns
        )

    def axis_of(self, shape: Sequence[Any]) -> Rows | None:
        """Where the batch size stands in the shape of what is the same in all rows."""
        for k, n in enumerate(shape):
            if compat.is_symbolic(n):
                each = n // self.batch
                if not isinstance(each, int) or n != each * self.batch:
                    raise MixesRows(f"an array of {n} rows")
                return Rows(k, each)
        return None

    def call(self, closed: Any, ins: States) -> list[State]:
        return self.run(compat.open_jaxpr(closed), ins)


_Rule = Callable[[_Proof, Any, States], Any]


def _one(ins: States) -> Rows | None:
    """The state that all inputs with rows share."""
    found = {s for s in ins if isinstance(s, Rows)}
    if len(found) > 1:
        raise MixesRows("arrays whose rows lie along different axes")
    return found.pop() if found else None


def _elementwise(proof: _Proof, eqn: Any, ins: States) -> State:
    rank = len(eqn.outvars[0].aval.shape)
    for v, s in zip(eqn.invars, ins, strict=True):
        if isinstance(s, Rows) and len(v.aval.shape) != rank:
            raise MixesRows(f"{eqn.primitive.name} of different ranks")
    return _one(ins)


def _identity(proof: _Proof, eqn: Any, ins: States) -> States:
    return list(ins)


def _without(state: Rows | None, gone: Sequence[int], what: str) -> Rows | None:
    """The state once axes are gone."""
    if state is None:
        return None
    if state.axis in gone:
        raise MixesRows(what)
    return Rows(state.axis - sum(k < state.axis for k in gone), state.each)


def _reduce(proof: _Proof, eqn: Any, ins: States) -> State:
    return _without(_one(ins), eqn.params["axes"], f"{eqn.primitive.name} over the batch")


def _along(proof: _Proof, eqn: Any, ins: States) -> State:
    state = _one(ins)
    where = eqn.params.get(ALONG[eqn.primitive.name], len(eqn.invars[0].aval.shape) - 1)
    axes = where if isinstance(where, (tuple, list)) else (where,)
    if state is not None and state.axis in axes:
        raise MixesRows(f"{eqn.primitive.name} along the batch")
    return state


def _constant(proof: _Proof, eqn: Any, ins: States) -> State:
    return proof.axis_of(eqn.outvars[0].aval.shape)


def _dim_as_value(proof: _Proof, eqn: Any, ins: States) -> State:
    raise MixesRows(f"the number {eqn.params['dim']}, which depends on the batch size")


def _broadcast(proof: _Proof, eqn: Any, ins: States) -> State:
    state = _one(ins)
    if state is None:
        return proof.axis_of(eqn.outvars[0].aval.shape)
    return Rows(eqn.params["broadcast_dimensions"][state.axis], state.each)


def _reshape(proof: _Proof, eqn: Any, ins: States) -> State:
    state = _one(ins)
    if state is None or eqn.params.get("dimensions") is not None:
        raise MixesRows("a reshape in another order")
    before = math.prod(eqn.invars[0].aval.shape[: state.axis])
    new = eqn.outvars[0].aval.shape
    found = proof.axis_of(new)
    if found is None or math.prod(new[: found.axis]) != before:
        raise MixesRows("a reshape of the batch axis")
    return found


def _transpose(proof: _Proof, eqn: Any, ins: States) -> State:
    state = _one(ins)
    return state and Rows(tuple(eqn.params["permutation"]).index(state.axis), state.each)


def _squeeze(proof: _Proof, eqn: Any, ins: States) -> State:
    rank = len(eqn.invars[0].aval.shape)
    return _without(_one(ins), [k % rank for k in eqn.params["dimensions"]], "squeeze")


def _slice(proof: _Proof, eqn: Any, ins: States) -> State:
    state, p = _one(ins), eqn.params
    if state is not None:
        k = state.axis
        whole = p["start_indices"][k] == 0 and p["limit_indices"][k] == eqn.invars[0].aval.shape[k]
        if not whole or (p["strides"] is not None and p["strides"][k] != 1):
            raise MixesRows("a slice of the batch")
    return state


def _dynamic_slice(proof: _Proof, eqn: Any, ins: States) -> State:
    state = ins[0]
    if not isinstance(state, Rows) or any(s is not None for s in ins[1:]):
        raise MixesRows("a slice at a place that depends on the batch")
    if eqn.params["slice_sizes"][state.axis] != eqn.invars[0].aval.shape[state.axis]:
        raise MixesRows("a slice of the batch")
    return state


def _pad(proof: _Proof, eqn: Any, ins: States) -> State:
    state = ins[0]
    if ins[1] is not None or (
        isinstance(state, Rows) and tuple(eqn.params["padding_config"][state.axis]) != (0, 0, 0)
    ):
        raise MixesRows("padding of the batch")
    return state


def _concatenate(proof: _Proof, eqn: Any, ins: States) -> State:
    state = _one(ins)
    if state is not None and eqn.params["dimension"] == state.axis:
        raise MixesRows("a concatenation along the batch")
    return state


def _stack(proof: _Proof, eqn: Any, ins: States) -> State:
    state = _one(ins)
    return state and Rows(state.axis + (eqn.params["axis"] <= state.axis), state.each)


def _dot_general(proof: _Proof, eqn: Any, ins: States) -> State:
    contract, batch = eqn.params["dimension_numbers"]
    found: list[Rows] = []
    position = len(batch[0])
    for side in (0, 1):
        state, rank = ins[side], len(eqn.invars[side].aval.shape)
        free = [k for k in range(rank) if k not in (*contract[side], *batch[side])]
        if isinstance(state, Rows):
            if state.axis in contract[side]:
                raise MixesRows("a product that sums over the batch")
            axis = (
                tuple(batch[side]).index(state.axis)
                if state.axis in batch[side]
                else position + free.index(state.axis)
            )
            found.append(Rows(axis, state.each))
        position += len(free)
    return _one(found)


def _gather(proof: _Proof, eqn: Any, ins: States) -> State:
    dims = eqn.params["dimension_numbers"]
    operand, start = ins
    rank = len(eqn.outvars[0].aval.shape)
    places = [k for k in range(rank) if k not in dims.offset_dims]  # of the axes of the indices
    batching = tuple(getattr(dims, "operand_batching_dims", ()))
    found: list[Rows] = []
    if isinstance(start, Rows):
        if start.axis >= len(places):
            raise MixesRows("an index that is made of rows")
        found.append(Rows(places[start.axis], start.each))
    if isinstance(operand, Rows):
        k = operand.axis
        if k in batching:
            own = dims.start_indices_batching_dims[batching.index(k)]
            found.append(Rows(places[own], operand.each))
        elif start is not None:
            raise MixesRows("a lookup in other rows of the batch")
        elif (
            k in dims.collapsed_slice_dims
            or eqn.params["slice_sizes"][k] != eqn.invars[0].aval.shape[k]
        ):
            raise MixesRows("a lookup of rows of the batch")
        else:
            kept = [
                n
                for n in range(len(eqn.invars[0].aval.shape))
                if n not in (*dims.collapsed_slice_dims, *batching)
            ]
            found.append(Rows(dims.offset_dims[kept.index(k)], operand.each))
    return _one(found)


# ---- calls and loops -------------------------------------------------------------------------------------------


def _call(proof: _Proof, eqn: Any, ins: States) -> States:
    search = templates.recognise(eqn)
    if search is not None and ins[search.boundaries] is None:
        return [ins[search.query]]
    inner = compat.inner_jaxpr(eqn)
    if inner is None:  # custom_vjp_call, whose rule belongs to it but whose body is as any
        inner = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
    return proof.call(inner, ins)


def _loop(
    proof: _Proof, body: Callable[[States], list[State]], carry: list[State], eqn: Any
) -> tuple[list[State], list[State]]:
    """The states of what a loop carries, which an iteration may only add to; and all that its body returns."""
    while True:
        out = body(carry)
        after = [b if a is None else a for a, b in zip(carry, out, strict=False)]
        if any(
            isinstance(b, MixesRows) or (b is not None and a != b)
            for a, b in zip(after, out, strict=False)
        ):
            wrong = next((s for s in out if isinstance(s, MixesRows)), None)
            raise MixesRows(str(wrong) if wrong else "a loop that moves rows")
        if after == carry:
            return carry, out
        carry = after


def _scan(proof: _Proof, eqn: Any, ins: States) -> States:
    n_consts, n_carry = compat.scan_inputs(eqn)
    consts, first = list(ins[:n_consts]), list(ins[n_consts : n_consts + n_carry])
    xs = [_without(_one([s]), [0], "a loop over the batch") for s in ins[n_consts + n_carry :]]
    body = eqn.params["jaxpr"]
    carry, out = _loop(proof, lambda c: proof.call(body, [*consts, *c, *xs]), first, eqn)
    each = [s and Rows(s.axis + 1, s.each) for s in (_one([s]) for s in out[n_carry:])]
    return [*carry, *each]


def _while(proof: _Proof, eqn: Any, ins: States) -> States:
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    consts = list(ins[n_cond : n_cond + n_body])
    carry, _ = _loop(
        proof,
        lambda c: proof.call(p["body_jaxpr"], [*consts, *c]),
        list(ins[n_cond + n_body :]),
        eqn,
    )
    if proof.call(p["cond_jaxpr"], [*ins[:n_cond], *carry])[0] is not None:
        raise MixesRows("a loop whose end depends on the batch")
    return carry


def _cond(proof: _Proof, eqn: Any, ins: States) -> States:
    if ins[0] is not None:
        raise MixesRows("a branch that depends on the batch")
    found = [proof.call(branch, ins[1:]) for branch in eqn.params["branches"]]
    out: list[State] = []
    for of_each in zip(*found, strict=True):
        wrong = next((s for s in of_each if isinstance(s, MixesRows)), None)
        out.append(wrong if wrong is not None else _one(of_each))
    return out


_RULES: dict[str, _Rule] = {
    "optimization_barrier": _identity,
    "iota": _constant,
    "dim_as_value": _dim_as_value,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "dot_general": _dot_general,
    "gather": _gather,
    "jit": _call,
    "pjit": _call,
    "closed_call": _call,
    "core_call": _call,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "custom_vjp_call_jaxpr": _call,
    "remat2": _call,
    "checkpoint": _call,
    "remat": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
