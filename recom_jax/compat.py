"""The only importer of ``jax._src`` and the only place that knows JAX versions apart.

Checked against JAX 0.10.2, 0.11.2 and 0.12.0.1. From 0.11 on ``ClosedJaxpr`` and ``Jaxpr`` are one class;
here "closed" means: has ``.jaxpr``, ``.consts``, ``.eqns``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import array as _array
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import linear_util as _lu
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source
from jax._src.export import _export
from jax._src.export import shape_poly as _poly
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import pxla as _pxla
from jax._src.state.types import ReadEffect
from jax.extend import core as jcore
from jax.interpreters import ad, batching, mlir

Var = jcore.Var
Literal = jcore.Literal
DropVar = _core.DropVar
Ref = _core.Ref
typeof = _core.typeof
Primitive = jcore.Primitive
new_jaxpr_eqn = jcore.new_jaxpr_eqn
jaxpr_as_fun = jcore.jaxpr_as_fun
check_jaxpr = jcore.check_jaxpr
UNSPECIFIED_NAMES = ("UnspecifiedValue",)


def fresh_var(aval: Any) -> Any:
    """A new jaxpr variable of abstract value `aval`."""
    return _core.Var(aval)


def is_drop(var: Any) -> bool:
    """Whether a variable is the placeholder of an unused output."""
    return isinstance(var, DropVar)


def open_jaxpr(closed: Any) -> Any:
    """The inner jaxpr (with ``constvars``, ``invars``, ``eqns``) of a closed one."""
    return closed.jaxpr


def closed(
    constvars: Sequence[Any],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
    consts: Sequence[Any],
    like: Any,
) -> Any:
    """A closed jaxpr made of equations; effects are the union of the equations' own."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    info = like.debug_info
    if len(info.arg_names or ()) != len(invars) or len(info.result_paths or ()) != len(outvars):
        info = info._replace(arg_names=("",) * len(invars), result_paths=("",) * len(outvars))
    parts = (list(constvars), list(invars), list(outvars), list(eqns), effects, info)
    inner: Any = jcore.Jaxpr
    outer: Any = jcore.ClosedJaxpr
    if outer is inner:
        return inner(*parts, consts=list(consts))
    return outer(inner(*parts), list(consts))


def jaxpr_text(closed: Any, equations: int) -> str:
    """The printed form of a jaxpr, with its first equations only."""
    jaxpr = open_jaxpr(closed)
    if len(jaxpr.eqns) <= equations:
        return str(jaxpr)
    text = str(jaxpr.replace(eqns=list(jaxpr.eqns[:equations])))
    return f"{text}\n... and {len(jaxpr.eqns) - equations:,} more equations"


def debug_info(what: str) -> Any:
    """Debug information for a jaxpr of ours."""
    return _lu.DebugInfo("recom_jax", what, (), ())


def inner_jaxpr(eqn: Any) -> Any | None:
    """The closed jaxpr of a call-like equation (jit, remat, custom_jvp), else None."""
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call", "closed_call", "core_call"):
        return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if eqn.primitive.name in ("remat2", "checkpoint", "remat"):
        inner = eqn.params["jaxpr"]
        if hasattr(inner, "consts"):
            return inner
        return jcore.ClosedJaxpr(inner, [])
    return None


def is_plain_jit(eqn: Any) -> bool:
    """Whether a jit equation carries nothing but its body: no shardings, layouts, donation or options."""
    p = eqn.params
    for key in ("in_shardings", "out_shardings"):
        for s in p.get(key, ()):
            if type(s).__name__ not in UNSPECIFIED_NAMES:
                return False
    for key in ("in_layouts", "out_layouts"):
        for x in p.get(key, ()):
            if x is not None:
                return False
    return not any(p.get("donated_invars", ())) and not p.get("compiler_options_kvs", ())


def sparse_product(eqn: Any) -> Any | None:
    """``matrix @ table`` of ``bcoo_dot_general`` as the lookup and scatter that JAX lowers it to, a closed jaxpr.

    None for what is no such product, and where cuSPARSE is asked for (``jax_bcoo_cusparse_lowering``).
    """
    p = eqn.params
    (left, right), (batch, _) = p["dimension_numbers"]
    data, table = eqn.invars[0].aval, eqn.invars[-1].aval
    plain = (tuple(left), tuple(right), tuple(batch)) == ((1,), (0,), ())
    if not plain or len(data.shape) != 1 or len(table.shape) != 2:
        return None
    if getattr(jax.config, "jax_bcoo_cusparse_lowering", False):
        return None
    bags, dtype = p["lhs_spinfo"].shape[0], p["preferred_element_type"]

    def product(data: Any, indices: Any, table: Any) -> Any:
        rows = table.at[indices[:, 1]].get(mode="fill", fill_value=0)
        each = (((), ()), ((0,), (0,)))
        rows = jax.lax.dot_general(data, rows, each, preferred_element_type=dtype)
        return jnp.zeros((bags, table.shape[1]), rows.dtype).at[indices[:, 0]].add(rows)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(product)(*avals)


_JAX_SOURCES = os.path.dirname(jax.__file__) + os.sep


def is_library_call(closed: Any) -> bool:
    """Whether a call's body is JAX's own code (`jnp.take`, ...): its source lines say nothing of the caller."""
    info = getattr(open_jaxpr(closed), "debug_info", None)
    return _JAX_SOURCES in str(getattr(info, "func_src_info", ""))


def sub_jaxprs(eqn: Any) -> list[Any]:
    """Every jaxpr among an equation's parameters (loop bodies, branches, calls)."""
    found: list[Any] = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found


def closed_jaxprs(eqn: Any) -> list[Any]:
    """The same, closed."""
    return [
        j if hasattr(j, "consts") else jcore.ClosedJaxpr(j, [])
        for value in eqn.params.values()
        for j in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(getattr(j, "jaxpr", j), "eqns")
    ]


def scan_inputs(eqn: Any) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are carried; the rest is scanned over."""
    p = eqn.params
    if "num_consts" in p:
        return int(p["num_consts"]), int(p["num_carry"])
    consts, carry, _ = p["ft_in"].unpack()  # 0.12
    return len(consts), len(carry)


def source_line(eqn: Any) -> str:
    """``file:line`` of the user's code that made the equation, or an empty string."""
    frame = _source.user_frame(eqn.source_info.traceback)
    return f"{frame.file_name}:{frame.start_line}" if frame is not None else ""


def bind_eqn(eqn: Any, invals: Sequence[Any]) -> list[Any]:
    """Runs one equation on values, under its own context, as JAX's evaluator does."""
    subfuns_params = eqn.primitive.get_bind_params(eqn.params)
    name_stack = _source.current_name_stack() + eqn.source_info.name_stack
    with _source.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        if isinstance(subfuns_params, tuple):
            subfuns, params = subfuns_params
            out = eqn.primitive.bind(*subfuns, *invals, **params)
        else:
            out = eqn.primitive.bind(*invals, **subfuns_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def register_primitive(
    prim: Any,
    *,
    abstract_eval: Callable[..., Any],
    jvp: Callable[..., Any],
    batch: Callable[..., Any],
    lower_cpu: Callable[..., Any],
    lower_cuda: Callable[..., Any],
    lower_default: Callable[..., Any],
) -> None:
    """Wires a multi-result primitive into evaluation, differentiation, batching and lowering."""
    prim.multiple_results = True
    prim.def_abstract_eval(abstract_eval)
    prim.def_impl(lambda *args, **params: _dispatch.apply_primitive(prim, *args, **params))
    ad.primitive_jvps[prim] = jvp
    batching.fancy_primitive_batchers[prim] = batch
    mlir.register_lowering(prim, lower_default)
    mlir.register_lowering(prim, lower_cpu, platform="cpu")
    mlir.register_lowering(prim, lower_cuda, platform="cuda")


def uncommitted(x: Any) -> Any:
    """The same memory as an array that is committed to no device, as what `jax.numpy` makes is."""
    return _array.ArrayImpl(x.aval, x.sharding, [x.addressable_data(0)], committed=False)


# The type of all arrays that JAX makes, outside of traces.
ArrayImpl: type = _array.ArrayImpl


def register_transpose(prim: Any, rule: Callable[..., Any]) -> None:
    """`rule` gets cotangents (or zeros, `is_zero_tangent`), operands (`is_undefined` where linear) and parameters."""
    ad.primitive_transposes[prim] = rule


def register_checks(prim: Any, fallback: Callable[..., Any]) -> None:
    """What `checkify` sees of a primitive where it looks for more than the user's own checks: `fallback`'s equations.

    Args:
      fallback: a function of the operands, and by keyword of the parameters, that returns a list.
    """
    with_context = hasattr(_checkify, "CheckifyContext")  # 0.11

    def rule(*args: Any, **params: Any) -> Any:
        context, (error, enabled, *operands) = args[:with_context], args[with_context:]
        if frozenset(enabled) <= _checkify.user_checks:  # of which columns hold none
            return error, prim.bind(*operands, **params)
        made = jax.make_jaxpr(lambda *xs: fallback(*xs, **params))(*operands)
        values, tree = jax.tree_util.tree_flatten(error)
        return _checkify.checkify_jaxpr_flat(
            *context, open_jaxpr(made), made.consts, enabled, tree, *values, *operands
        )

    _checkify.error_checks[prim] = rule


def is_undefined(operand: Any) -> bool:
    """Whether an operand of a transposition is what is linear, its value unknown."""
    return isinstance(operand, ad.UndefinedPrimal)


def module_devices(ctx: Any) -> int:
    """Over how many devices XLA will partition the module being lowered by itself (1 inside shard_map)."""
    axis_context = ctx.module_context.axis_context
    if hasattr(axis_context, "num_devices"):  # ShardingContext: jit; SPMDAxisContext: shard_map
        return int(axis_context.num_devices)
    return 1


def is_export(ctx: Any) -> bool:
    """Whether the module being lowered is meant for other machines too, as far as that can be told."""
    parameters = ctx.module_context.lowering_parameters
    return len(ctx.module_context.platforms) > 1 or bool(getattr(parameters, "for_export", False))


def lower_fun(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering rule that traces `fun` (list of outputs) in place of the primitive."""
    return mlir.lower_fun(fun, multiple_results=True)


def is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def is_batched(value: Any) -> bool:
    """Whether a value belongs to a vmap at work."""
    return isinstance(value, _batching.BatchTracer)


def tracing() -> bool:
    """Whether a transformation (jit, vmap, grad, ...) is at work in this thread."""
    return not _core.trace_ctx.is_top_level()


def instantiate_zeros(tangent: Any) -> Any:
    return ad.instantiate_zeros(tangent)


def is_zero_tangent(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero)


def zero_tangent(primal_out: Any) -> Any:
    return ad.Zero(_core.typeof(primal_out).to_tangent_aval())


# ---- symbolic dimensions -----------------------------------------------------------------------------------------

Inconclusive = _core.InconclusiveDimensionOperation


def default_platform() -> str:
    """The platform of the device that arrays go to by default, as JAX names it ("cpu", "gpu")."""
    device = _config.default_device.value
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else str(device.platform)


def is_symbolic(dim: Any) -> bool:
    """Whether a size of a shape is an expression in dimension variables (`jax.export`)."""
    return not isinstance(dim, int) and _core.is_symbolic_dim(dim)


def dim_terms(dim: Any) -> list[tuple[int, list[tuple[Any, int]]]]:
    """A symbolic dimension as a sum: (coefficient, [(factor, exponent)]) of each term.

    A factor is the name of a variable, or (operation, operands) with "floordiv", "mod", "max" or "min".
    """
    return [
        (int(coef), [(f.var or (f.operation, tuple(f.operands)), int(n)) for f, n in term._factors])
        for term, coef in dim._sorted_terms
    ]


def dim_bounds(dim: Any) -> tuple[int | None, int | None]:
    """The lowest and highest value that JAX can prove, None where it knows no bound."""
    low, high = _poly._bounds_decision(dim, _poly.BoundsPrecision.BEST)
    return (
        None if low == float("-inf") else int(low),
        None if high == float("inf") else int(high),
    )


def dim_variable(dim: Any, name: str) -> Any:
    """The variable `name` of a symbolic dimension's scope; an expression where a constraint defines it."""
    return _poly._DimExpr._from_var(name, dim.scope)


def dim_constraints(dim: Any) -> list[tuple[bool, Any]]:
    """What the user promised of a dimension's scope: (whether it is an equality, difference of both sides)."""
    return [(c.cmp == _poly.Comparator.EQ, c.diff) for c in dim.scope._explicit_constraints]


# ---- arrays that a traced function closes over, as operands (see `operands`) -------------------------------------


class OperandEffect(ReadEffect):
    """Tells JAX to make operands of the closed-over `Ref`s that an equation reads; it orders nothing."""


for _allowed in (
    _effects.lowerable_effects,
    _effects.control_flow_allowed_effects,
    _effects.remat_allowed_effects,
    _effects.custom_derivatives_allowed_effects,
):
    _allowed.add_type(OperandEffect)


def register_operand_type(kind: type[Any], arrays: Callable[[Sequence[Any]], list[Any]]) -> None:
    """Lets instances of `kind`, a subclass of `Ref` with an ``_aval``, be passed to compiled programs.

    Args:
      arrays: the arrays that instances stand for at this moment.
    """

    def shard(xs: Any, shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        return _pxla.shard_args(shardings, layouts, copy_semantics, arrays(xs))

    _core.pytype_aval_mappings[kind] = lambda x: x._aval
    _dtypes.canonicalize_value_handlers[kind] = lambda x: x
    _pxla.shard_arg_handlers[kind] = shard


def enable_x64() -> bool:
    """Whether JAX has 64-bit types at this time, in this thread."""
    return bool(_config.enable_x64.value)


# Where `jax.set_mesh` and `with mesh:` keep what they set in a thread: no configuration states.
_MESHES = ("abstract_mesh_context_manager", "device_context", "mesh_context_manager")


def thread_settings() -> Callable[[], None]:
    """What `with jax.enable_x64(...)`, `with jax.set_mesh(...)` and their like set in this thread: a function that sets
    it in another thread, which is ours, for good."""
    states = _config.config_states.values()
    unset = _config.config_ext.unset
    local = [(state, state.get_local()) for state in states]
    given = [(state, value) for state, value in local if value is not unset]
    found = [vars(_mesh).get(name, vars(_config).get(name)) for name in _MESHES]
    meshes = [(x, x.get_local()) for x in found if x is not None]
    meshes = [(x, value) for x, value in meshes if value is not unset]
    stack = list(_mesh.thread_resources.stack)  # of `with mesh:`

    def take_over() -> None:
        for state, value in given:
            state(value).__enter__()
        for x, value in meshes:
            x.set_local(value)
        if len(stack) > 1:
            _mesh.thread_resources.stack = list(stack)
            _mesh.thread_resources.env = stack[-1]

    return take_over


def promise_stable(target: str) -> None:
    """Lets ``jax.export`` serialize calls of a custom call target, as it does those of JAX's own stable ones."""
    _export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE.add(target)


_TARGET_LOCK = threading.RLock()


@contextlib.contextmanager
def stablehlo_target(version: tuple[int, ...]) -> Iterator[None]:
    """Within it, ``jax.export`` in this thread writes modules that readers of that version of StableHLO understand.

    JAX itself writes for readers four weeks older than itself, and has no parameter for it.
    """
    thread, hlo = threading.get_ident(), getattr(_export, "hlo")  # noqa: B009 (it has no types)
    with _TARGET_LOCK:
        original = hlo.get_version_from_compatibility_requirement

        def target(requirement: Any) -> str:
            usual = str(original(requirement))
            if threading.get_ident() != thread or tuple(map(int, usual.split("."))) <= version:
                return usual
            return ".".join(map(str, version))

        hlo.get_version_from_compatibility_requirement = target
        try:
            yield
        finally:
            hlo.get_version_from_compatibility_requirement = original


def lower_as(
    ctx: Any, fun: Callable[..., Any], operands: Sequence[Any], avals_in: Any, avals_out: Any
) -> list[Any]:
    """In a lowering rule: the results of a traceable function that returns a list of arrays."""
    rule = mlir.lower_fun(fun, multiple_results=True)
    made = rule(ctx.replace(avals_in=list(avals_in), avals_out=list(avals_out)), *operands)
    return list(made)


def identity_primitive(
    name: str, label: str, transposed: Callable[[str], str], lower: Callable[..., Any]
) -> Any:
    """A primitive that returns its operands, with a string parameter `label`; its transpose has `transposed` of it.

    Args:
      lower: its lowering rule on CPUs and CUDA devices; elsewhere it is nothing.
    """
    prim = Primitive(name)
    prim.multiple_results = True
    prim.def_impl(lambda *args, **_: list(args))
    prim.def_abstract_eval(lambda *avals, **_: list(avals))
    mlir.register_lowering(prim, lambda ctx, *args, **_: args)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(prim, lower, platform=platform)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = prim.bind(*primals, **params)
        live = [k for k, t in enumerate(tangents) if not is_zero_tangent(t)]
        moved = list(tangents)
        if live:
            for k, t in zip(live, prim.bind(*[tangents[k] for k in live], **params), strict=True):
                moved[k] = t
        return out, moved

    def transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
        live = [k for k, t in enumerate(cotangents) if not isinstance(t, ad.Zero)]
        moved = list(cotangents)
        if live:
            params = {**params, label: transposed(params[label])}
            for k, t in zip(live, prim.bind(*[cotangents[k] for k in live], **params), strict=True):
                moved[k] = t
        return moved

    ad.primitive_jvps[prim] = jvp
    ad.primitive_transposes[prim] = transpose
    batching.primitive_batchers[prim] = lambda args, dims, **params: (
        prim.bind(*args, **params),
        list(dims),
    )
    return prim
