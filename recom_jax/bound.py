"""Compiles one batch signature of a bound model: which leaves are packed, and the jitted function of few operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, pack, pipeline
from recom_jax.lowering import FusedCall, fused_p
from recom_jax.options import Options
from recom_jax.pack import LeafSpec
from recom_jax.signature import Arguments


@dataclasses.dataclass(frozen=True)
class Source:
    """What a plan is made from.

    Attributes:
      call: the whole call, bound leaves first.
      packable: per batch leaf, whether it is a plain numpy array that a pack can hold.
      pack_any: numpy leaves up to this many bytes are packed whoever reads them.
    """

    fn: Callable[..., Any]
    call: Arguments
    bound_names: tuple[str, ...]
    names: tuple[str, ...]
    tree: Any
    packable: tuple[bool, ...]
    options: Options
    name: str
    pack_any: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How to serve one batch signature.

    Attributes:
      tree: of (batch, kwargs).
      packed, direct: numbers of batch leaves that are staged, and of those passed as they are.
      arena_leaves, direct_bound: numbers of bound leaves in the arena, and of those passed as they are.
      call: jitted (staging?, arena?, *direct_bound, *direct) -> the function's result.
    """

    tree: Any
    names: tuple[str, ...]
    packed: tuple[int, ...]
    direct: tuple[int, ...]
    direct_kinds: tuple[tuple[int, type, tuple[int, ...], Any], ...]
    layout: Any
    packer: Any
    arena_leaves: tuple[int, ...]
    direct_bound: tuple[int, ...]
    call: Callable[..., Any]
    all_packed: bool


def make_plan(source: Source) -> Plan:
    """Traces, compiles and decides what is packed. Allocates no buffers."""
    from recom_jax.api import trace_call

    pipeline.count("traces")
    traced = trace_call(source.fn, source.call, source.name)
    compiled = pipeline.compile_jaxpr(traced, source.options)
    spliced = compat.open_jaxpr(compiled.jaxpr)
    n_bound = len(source.bound_names)
    by_fused, by_xla = _readers(spliced)
    invars = spliced.invars
    arena_leaves, direct_bound = [], []
    for k in range(n_bound):
        leaf, var = source.call.leaves[k], invars[k]
        small = leaf.nbytes <= source.options.small_table_bytes and LeafSpec.of(leaf).packable
        if id(var) in by_fused and id(var) not in by_xla and small:
            arena_leaves.append(k)
        else:
            direct_bound.append(k)
    packed, direct = [], []
    for k, can in enumerate(source.packable):
        leaf, var = source.call.leaves[n_bound + k], invars[n_bound + k]
        fits = can and (id(var) in by_fused and id(var) not in by_xla or leaf.nbytes <= source.pack_any)
        (packed if fits else direct).append(k)
    batch = source.call.leaves[n_bound:]
    specs = [LeafSpec(np.dtype(invars[n_bound + k].aval.dtype), tuple(batch[k].shape)) for k in packed]
    layout = pack.layout_of(specs, [source.names[k] for k in packed]) if packed else None
    arena_layout = pack.layout_of([LeafSpec.of(source.call.leaves[k]) for k in arena_leaves]) if arena_leaves else None
    body = _body(compiled, n_bound, packed, direct, arena_leaves, direct_bound, layout, arena_layout)
    body.__name__ = source.name
    kinds = tuple((k, type(batch[k]), np.shape(batch[k]), getattr(batch[k], "dtype", type(batch[k]))) for k in direct)
    packer = pack.Packer(layout, narrow=not jax.config.jax_enable_x64) if layout is not None else None
    return Plan(source.tree, source.names, tuple(packed), tuple(direct), kinds, layout, packer, tuple(arena_leaves),
                tuple(direct_bound), jax.jit(body), len(packed) == len(batch))


def _readers(jaxpr: Any) -> tuple[set[int], set[int]]:
    """Variables that fused calls read, and variables that anything else reads (results included)."""
    by_fused: set[int] = set()
    by_xla = {id(v) for v in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive is fused_p:
            n = eqn.params["call"].n_physical
            by_fused |= {id(v) for v in eqn.invars[:n]}
        else:
            by_xla |= {id(v) for v in eqn.invars}
    return by_fused, by_xla


def _body(compiled: Any, n_bound: int, packed: Sequence[int], direct: Sequence[int], arena_leaves: Sequence[int],
          direct_bound: Sequence[int], layout: Any, arena_layout: Any) -> Callable[..., Any]:
    """The spliced program as a function of packs and direct arrays."""
    jaxpr = compat.open_jaxpr(compiled.jaxpr)
    consts = compiled.jaxpr.consts
    out_tree = compiled.traced.out_tree

    def call(*args: Any) -> Any:
        rest = list(args)
        staging = rest.pop(0) if packed else None
        arena = rest.pop(0) if arena_leaves else None
        env: dict[int, Any] = {id(v): c for v, c in zip(jaxpr.constvars, consts, strict=True)}
        in_pack: dict[int, tuple[Any, Any, int]] = {}
        for k in direct_bound:
            env[id(jaxpr.invars[k])] = rest.pop(0)
        for k in direct:
            env[id(jaxpr.invars[n_bound + k])] = rest.pop(0)
        for entry, k in enumerate(arena_leaves):
            in_pack[id(jaxpr.invars[k])] = (arena, arena_layout, entry)
        for entry, k in enumerate(packed):
            in_pack[id(jaxpr.invars[n_bound + k])] = (staging, layout, entry)

        def read(atom: Any) -> Any:
            if isinstance(atom, compat.Literal):
                return atom.val
            if id(atom) not in env:
                env[id(atom)] = pack.unpack(*in_pack[id(atom)])
            return env[id(atom)]

        for eqn in jaxpr.eqns:
            if eqn.primitive is fused_p:
                outs = _bind_packed(eqn, env, in_pack)
            else:
                outs = compat.bind_eqn(eqn, [read(v) for v in eqn.invars])
            for var, value in zip(eqn.outvars, outs, strict=True):
                env[id(var)] = value
        return jax.tree_util.tree_unflatten(out_tree, [read(v) for v in jaxpr.outvars])

    return call


def _bind_packed(eqn: Any, env: dict[int, Any], in_pack: dict[int, tuple[Any, Any, int]]) -> list[Any]:
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
    for n, var in enumerate(eqn.invars):
        if n == call.n_physical:
            n_used = len(physical)
        if id(var) in in_pack:
            value, layout, entry = in_pack[id(var)]
            at = packs.setdefault(id(value), place(id(value), value))
            where.append((at, entry, layout))
        else:
            where.append((place(id(var), env[id(var)]), -1, None))
    if len(eqn.invars) == call.n_physical:
        n_used = len(physical)
    binding = tuple(x for at, entry, _ in where[:call.n_physical] for x in (at, entry))
    original = call.fallback

    def fallback(*operands: Any) -> list[Any]:
        return original(*[operands[at] if entry < 0 else pack.unpack(operands[at], layout, entry)
                          for at, entry, layout in where])

    new = FusedCall(call.encoded, binding, n_used, call.out_avals, fallback, call.options, packed=True)
    return list(fused_p.bind(*physical, call=new))
