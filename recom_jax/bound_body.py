"""The program of a bound model as a function of few operands: packs, or the token of one, and single arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from recom_jax import compat, pack, stage
from recom_jax.errors import RecomError
from recom_jax.lowering import FusedCall, fused_p


class MismatchError(RecomError):
    """A leaf passed directly is not of the type that the plan was made for."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Where each input of the program is."""

    n_bound: int
    packed: tuple[int, ...]
    direct: tuple[int, ...]
    arena: tuple[int, ...]
    direct_bound: tuple[int, ...]
    layout: Any
    arena_layout: Any
    by_token: bool
    part: (
        tuple[int, int] | None
    )  # what of the pack is copied for XLA, where fused calls read the token
    plain: bool  # results are what numpy can hold
    words: bool

    @property
    def delivers(self) -> bool:
        return self.by_token and self.plain


def make_body(compiled: Any, places: Places) -> Callable[..., Any]:
    """The spliced program as a function of packs and direct arrays."""
    jaxpr = compat.open_jaxpr(compiled.jaxpr)
    consts = compiled.jaxpr.consts
    out_tree = compiled.traced.out_tree
    batch_vars = jaxpr.invars[places.n_bound :]

    def call(*args: Any) -> Any:
        rest = list(args)
        staging = rest.pop(0) if places.packed else None
        words = rest.pop(0) if places.words else None
        slot, token = staging, None
        if places.by_token and places.part is None:
            staging, done = stage.copy_slot(staging, places.layout.total_bytes)
        elif places.by_token and places.part is not None:
            nbytes = places.layout.total_bytes
            copied, done = stage.hand_slot(staging, nbytes, places.part)
            # Where no fused call can be made after all, its fallback reads a copy. XLA leaves it out elsewhere.
            token = Token(staging, done, stage.copy_slot(staging, nbytes)[0])
        arena = rest.pop(0) if places.arena else None
        direct = [
            *((jaxpr.invars[k], None) for k in places.direct_bound),
            *((batch_vars[k], batch_vars[k].aval) for k in places.direct),
        ]
        env: dict[int, Any] = {id(v): c for v, c in zip(jaxpr.constvars, consts, strict=True)}
        in_pack: dict[int, tuple[Any, Any, int]] = {}
        for (var, aval), value in zip(direct, rest, strict=True):
            if (
                aval is not None
                and isinstance(value, jax.core.Tracer)
                and (
                    value.shape != aval.shape
                    or value.dtype != aval.dtype
                    or value.weak_type != aval.weak_type
                )
            ):
                raise MismatchError(f"expected {aval}, was given {value.aval}")
            env[id(var)] = value
        for entry, k in enumerate(places.arena):
            in_pack[id(jaxpr.invars[k])] = (arena, places.arena_layout, entry)
        for entry, k in enumerate(places.packed):
            in_pack[id(batch_vars[k])] = (staging, places.layout, entry)

        def read(atom: Any) -> Any:
            if isinstance(atom, compat.Literal):
                return atom.val
            if id(atom) not in env:
                value, layout, entry = in_pack[id(atom)]
                if token is not None and value is token.array:
                    env[id(atom)] = pack.unpack(copied, layout, entry, places.part)
                elif words is not None and value is staging and pack.is_words(layout, entry):
                    env[id(atom)] = pack.unpack_words(words, layout, entry)
                else:
                    env[id(atom)] = pack.unpack(value, layout, entry)
            return env[id(atom)]

        for eqn in jaxpr.eqns:
            if eqn.primitive is fused_p:
                outs = _bind_packed(eqn, env, in_pack, token)
            else:
                outs = compat.bind_eqn(eqn, [read(v) for v in eqn.invars])
            for var, value in zip(eqn.outvars, outs, strict=True):
                env[id(var)] = value
        result = jax.tree_util.tree_unflatten(out_tree, [read(v) for v in jaxpr.outvars])
        if places.delivers:
            leaves = jax.tree_util.tree_leaves(result)
            done = stage.deliver(slot, places.layout.total_bytes, done, leaves)
        return (result, done) if places.by_token else result

    return call


@dataclasses.dataclass(frozen=True)
class Token:
    """A pack that fused calls read where it was staged.

    Attributes:
      array: the token.
      done: an operand of whatever reads it, which comes after the wait for its bytes by that.
      copy: what a fallback reads.
    """

    array: Any
    done: Any
    copy: Any


def _bind_packed(
    eqn: Any,
    env: dict[int, Any],
    in_pack: dict[int, tuple[Any, Any, int]],
    token: Token | None,
) -> list[Any]:
    """A fused equation whose operands lie in packs: the same program, another binding."""
    call: FusedCall = eqn.params["call"]
    physical: list[Any] = []
    index: dict[int, int] = {}
    where: list[tuple[int, int, Any]] = []  # per operand: physical index, entry, layout

    def place(key: int, value: Any) -> int:
        if key not in index:
            index[key] = len(physical)
            physical.append(value)
        return index[key]

    packs: dict[int, int] = {}

    def close() -> int:
        """How many operands the custom call takes, of those placed so far."""
        if token is not None and id(token.array) in packs:
            place(id(token.done), token.done)
        return len(physical)

    for n, var in enumerate(eqn.invars):
        if n == call.n_physical:
            n_used = close()
        if id(var) in in_pack:
            value, layout, entry = in_pack[id(var)]
            at = packs.setdefault(id(value), place(id(value), value))
            where.append((at, entry, layout))
        else:
            value = var.val if isinstance(var, compat.Literal) else env[id(var)]
            where.append((place(id(var), value), -1, None))
    if len(eqn.invars) == call.n_physical:
        n_used = close()
    binding = tuple(x for at, entry, _ in where[: call.n_physical] for x in (at, entry))
    places: list[int] = []  # on CUDA: physical operand, byte offset or -1, rank, dims
    for at, entry, layout in where[: call.n_physical]:
        shape = () if entry < 0 else layout.shape(entry)
        places += [at, -1 if entry < 0 else layout.offset(entry), len(shape), *shape]
    original = call.fallback
    alone = token is not None and id(token.array) in packs
    if alone and token is not None:  # behind what the custom call takes
        copy = place(id(token.copy), token.copy)
        staged = packs[id(token.array)]
        where = [(copy if at == staged else at, entry, layout) for at, entry, layout in where]

    def fallback(*operands: Any) -> list[Any]:
        return original(
            *[
                operands[at] if entry < 0 else pack.unpack(operands[at], layout, entry)
                for at, entry, layout in where
            ]
        )

    new = FusedCall(
        call.encoded,
        binding,
        n_used,
        call.out_avals,
        fallback,
        call.options,
        tuple(places),
        call.program,
        packed=True,
        alone=alone,
    )
    return list(fused_p.bind(*physical, call=new))
