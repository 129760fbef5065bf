"""Compiles one batch signature of a bound model: which leaves are packed, and the jitted function of few operands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, pack, pipeline, stage
from recom_jax.bound_body import Places, make_body
from recom_jax.lowering import fused_p
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
      reads_host: whether that array is read where it is.
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
    reads_host: bool


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
    places = Places(
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
        source.reads_host
        and source.target is None
        and layout is not None
        and _reads_words(layout, by_other),
    )
    body = make_body(compiled, places)
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
