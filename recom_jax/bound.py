"""Compiles one batch signature of a bound model: which leaves are packed, and the jitted function of few operands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, pack, pipeline, stage
from recom_jax.errors import RecomError
from recom_jax.lowering import FusedCall, fused_p
from recom_jax.options import Options
from recom_jax.pack import LeafSpec
from recom_jax.signature import Arguments


@dataclasses.dataclass(frozen=True)
class Source:
    """What a plan is made from.

    Attributes:
      call: the whole call, bound leaves (as ShapeDtypeStructs) first.
      static: values of static arguments in the batch.
      packable: per batch leaf, whether it is a plain numpy array that a pack can hold.
      arena: whether small tables lie in an arena.
      pack_any: numpy leaves up to this many bytes are packed whoever reads them.
      target: how staged leaves get to the device; None: as a numpy array.
    """

    fn: Callable[..., Any]
    call: Arguments
    n_bound: int
    tree: Any
    static: Any
    packable: tuple[bool, ...]
    arena: bool
    options: Options
    name: str
    pack_any: int
    target: stage.Target | None


class MismatchError(RecomError):
    """A leaf passed directly is not of the type that the plan was made for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How to serve one batch signature.

    Attributes:
      tree: of (batch, kwargs).
      static: values of static arguments in the batch.
      names: a printable path of each batch leaf.
      packed, direct: numbers of batch leaves that are staged, and of those passed as they are.
      direct_types: (type, shape, dtype, weak type) of the latter.
      direct_numpy: those of them that are numpy arrays.
      arena_leaves, direct_bound: numbers of bound leaves in the arena, and of those passed as they are.
      layout, packer: of the staged leaves; packer: narrows 64-bit leaves as the x64 flag was.
      target: where the staging operand is a token (`stage`); None: where it is the staging array.
      copied: bytes of the pack that each call copies on the device, where there is a target.
      out_tree, kinds: the result's structure, and the shapes and types of its arrays.
      delivered: with a target, their bytes on the host (`stage.deliver`); -1 where JAX alone can take them there.
      words: calls take the staging array's 32-bit words behind it, too.
      body: (staging?, words?, arena?, *direct_bound, *direct) -> the function's result; with a target (result, done).
      call: the same, jitted; raises `MismatchError` where a direct leaf's type is another.
    """

    tree: Any
    static: Any
    names: tuple[str, ...]
    packed: tuple[int, ...]
    direct: tuple[int, ...]
    direct_types: tuple[Any, ...]
    direct_numpy: tuple[int, ...]
    arena_leaves: tuple[int, ...]
    direct_bound: tuple[int, ...]
    layout: Any
    packer: Any
    target: stage.Target | None
    copied: int
    out_tree: Any
    kinds: tuple[jax.ShapeDtypeStruct, ...]
    delivered: int
    words: bool
    body: Callable[..., Any]
    call: Callable[..., Any]

    @property
    def all_packed(self) -> bool:
        return not self.direct

    @property
    def packed_names(self) -> list[str]:
        return [self.names[k] for k in self.packed]


def make_plan(source: Source) -> Plan:
    """Traces, compiles and decides what is packed. Allocates no buffers."""
    from recom_jax.api import trace_call

    pipeline.count("traces")
    call, n_bound = source.call, source.n_bound
    compiled = pipeline.fuse(trace_call(source.fn, call, source.name), source.options)
    if source.options.tune:
        from recom_jax.cuda import tune

        tune.measure(compiled, source.options)
    spliced = compat.open_jaxpr(compiled.jaxpr)
    by_fused, by_xla = _readers(spliced)
    bound_vars, batch_vars = spliced.invars[:n_bound], spliced.invars[n_bound:]
    batch = call.leaves[n_bound:]

    def fused_only(var: Any) -> bool:
        return id(var) in by_fused and id(var) not in by_xla

    arena, direct_bound = [], []
    for k, var in enumerate(bound_vars):
        spec = LeafSpec.of(call.leaves[k])
        small = _nbytes(spec) <= source.options.small_table_bytes and spec.packable
        if source.arena and small and fused_only(var):
            arena.append(k)
        elif id(var) in by_fused or id(var) in by_xla:
            direct_bound.append(k)
    packed: list[int] = []
    direct: list[int] = []
    for k, var in enumerate(batch_vars):
        fits = source.packable[k] and (fused_only(var) or batch[k].nbytes <= source.pack_any)
        (packed if fits else direct).append(k)
    names = call.names[n_bound:]
    by_other = [id(batch_vars[k]) in by_xla for k in packed]
    specs = [LeafSpec(np.dtype(batch_vars[k].aval.dtype), tuple(batch[k].shape)) for k in packed]
    layout = pack.layout_of(specs, [names[k] for k in packed]) if packed else None
    part = _part(layout, by_other) if layout is not None else None
    kinds = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in spliced.outvars)
    places = _Places(
        n_bound,
        tuple(packed),
        tuple(direct),
        tuple(arena),
        tuple(direct_bound),
        layout,
        pack.layout_of([LeafSpec.of(call.leaves[k]) for k in arena]) if arena else None,
        source.target is not None and bool(packed),
        part,
        all(_has_plain_bytes(k.dtype) for k in kinds),
        source.target is None and layout is not None and _reads_words(layout, by_other),
    )
    body = _body(compiled, places)
    body.__name__ = source.name
    types = tuple(_type_of(batch[k]) for k in direct)
    packer = pack.Packer(layout, narrow=not x64()) if layout is not None else None
    return Plan(
        source.tree,
        source.static,
        names,
        places.packed,
        places.direct,
        types,
        tuple(k for k in direct if isinstance(batch[k], np.ndarray)),
        places.arena,
        places.direct_bound,
        layout,
        packer,
        source.target if places.by_token else None,
        part[1] - part[0] if part else layout.total_bytes if layout is not None else 0,
        compiled.traced.out_tree,
        kinds,
        stage.delivered_bytes(kinds) if places.delivers else -1,
        places.words,
        body,
        jax.jit(body),
    )


def _has_plain_bytes(dtype: Any) -> bool:
    """Whether a result's bytes are those of a numpy array: keys, and types of less than a byte, have others."""
    return isinstance(dtype, np.dtype) and (dtype.kind in "biufc" or dtype == jax.numpy.bfloat16)


def x64() -> bool:
    """Whether JAX has 64-bit types now, in this thread."""
    return bool(getattr(jax.config, "jax_enable_x64"))  # noqa: B009 - mypy does not know it


def context() -> tuple[bool, Any]:
    """What of JAX's configuration decides how this thread's calls run: 64-bit types, the default device."""
    return x64(), getattr(jax.config, "jax_default_device")  # noqa: B009


def _type_of(leaf: Any) -> Any:
    return (
        type(leaf),
        np.shape(leaf),
        getattr(leaf, "dtype", None),
        getattr(leaf, "weak_type", False),
    )


def direct_mismatch(plan: Plan, leaves: Sequence[Any]) -> str:
    """Which directly passed leaf is not of the plan's type, in words; "" if all are."""
    for k, want in zip(plan.direct, plan.direct_types, strict=True):
        have = _type_of(leaves[k])
        if have != want:
            shown = [
                f"{t.__name__} {d}{list(s)}" if d is not None else t.__name__
                for t, s, d, _ in (want, have)
            ]
            return f"leaf {k} ({plan.names[k]}): expected {shown[0]}, was given {shown[1]}"
    return ""


def _part(layout: Any, by_other: Sequence[bool]) -> tuple[int, int] | None:
    """Which bytes of a pack something besides fused calls reads. None: most of it, so that it is copied whole."""
    read = [
        (layout.offset(k), layout.offset(k) + layout.entry_bytes(k))
        for k, other in enumerate(by_other)
        if other and layout.entry_bytes(k)
    ]
    begin, end = (min(a for a, _ in read), max(b for _, b in read)) if read else (0, 0)
    return (begin, end) if 2 * (end - begin) <= layout.total_bytes else None


def _reads_words(layout: Any, by_other: Sequence[bool]) -> bool:
    """Whether something besides fused calls reads 32-bit entries: XLA puts bytes together one by one."""
    return any(other and pack.is_words(layout, k) for k, other in enumerate(by_other))


def _nbytes(spec: LeafSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


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


@dataclasses.dataclass(frozen=True)
class _Places:
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


def _body(compiled: Any, places: _Places) -> Callable[..., Any]:
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
            token = _Token(staging, done, stage.copy_slot(staging, nbytes)[0])
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
class _Token:
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
    token: _Token | None,
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
