"""Stage 1: a Python function -> one flat jaxpr.

Calls that only structure a program (jit, and remat bodies that read a table) are inlined, so that a column
that crosses them is seen whole; a product of a sparse matrix and a table becomes the lookup and scatter that it
is. What is recognised as one operation (`jnp.digitize`, `jnp.searchsorted`)
stays a call: see `templates.py`. custom_jvp and custom_vjp calls stay: their rules belong to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from recom_jax import compat, templates

TABLE_READS = ("gather", "dynamic_slice", "dot_general")
CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "recom_fused", "remat2", "checkpoint", "remat",
                   "bcoo_dot_general"))  # fmt: skip
SPARSE = ("bcoo_dot_general", "bcsr_dot_general")


@dataclasses.dataclass(frozen=True)
class Traced:
    """A flat jaxpr and what is known of its inputs.

    Attributes:
      jaxpr: the closed jaxpr; equations that nothing uses are gone.
      arg_names: a printable path per input, e.g. ``params['tables'][3]``.
      out_tree: how the outputs are put back together.
    """

    jaxpr: Any
    arg_names: tuple[str, ...]
    out_tree: Any

    def __str__(self) -> str:
        return str(self.jaxpr)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    arg_names: Sequence[str],
    kwargs: Mapping[str, Any] | None = None,
) -> Traced:
    """Traces `fn` and flattens the result.

    Args:
      args, kwargs: pytrees of arrays, tracers or ``ShapeDtypeStruct``s.
      arg_names: a printable path for each of their leaves.
    """
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args, **(kwargs or {}))
    return Traced(flatten(closed), tuple(arg_names), jax.tree_util.tree_structure(out_shape))


def flatten(closed: Any, keep_fused: bool = False) -> Any:
    """Inlines calls and removes dead equations. The result computes the same, equation by equation.

    Args:
      keep_fused: leave fused calls as they are, rather than put back the equations that they stand for.
    """
    flat = _Inliner(keep_fused)
    jaxpr = compat.open_jaxpr(closed)
    env: dict[Any, Any] = {}
    flat.run(jaxpr, env)
    outvars = [env.get(v, v) if not isinstance(v, compat.Literal) else v for v in jaxpr.outvars]
    constvars = list(jaxpr.constvars) + flat.constvars
    consts = list(closed.consts) + flat.consts
    eqns = live(flat.eqns, outvars)
    kept = list(zip(constvars, consts, strict=True))
    if kept:
        used = {id(v) for e in eqns for v in e.invars} | {id(v) for v in outvars}
        kept = [(v, c) for v, c in kept if id(v) in used]
    return compat.closed(
        [v for v, _ in kept], jaxpr.invars, outvars, eqns, [c for _, c in kept], jaxpr
    )


def live(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations that `outvars` need, and those with effects, in order."""
    needed = {id(v) for v in outvars}
    kept: list[Any] = []
    for eqn in reversed(eqns):
        used = bool(eqn.effects)
        for v in eqn.outvars:
            used = used or id(v) in needed
        if used:
            kept.append(eqn)
            needed.update(map(id, eqn.invars))
    kept.reverse()
    return kept


class _Inliner:
    def __init__(self, keep_fused: bool) -> None:
        self.keep_fused = keep_fused
        self.eqns: list[Any] = []
        self.constvars: list[Any] = []
        self.consts: list[Any] = []
        self._const_vars: dict[int, Any] = {}
        self._reads_table: dict[int, bool] = {}

    def const(self, value: Any, aval: Any) -> Any:
        var = self._const_vars.get(id(value))
        if var is None:
            var = self._const_vars[id(value)] = compat.fresh_var(aval)
            self.constvars.append(var)
            self.consts.append(value)
        return var

    def inlines(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        if name in ("jit", "pjit"):
            return compat.is_plain_jit(eqn) and templates.recognise(eqn) is None
        if name in ("closed_call", "core_call"):
            return True
        if name == "recom_fused":  # an optimized function inside this one: its columns join ours
            return eqn.params["call"].closed is not None and not self.keep_fused
        if name in ("remat2", "checkpoint", "remat"):
            return self.reads_table(compat.inner_jaxpr(eqn))
        return False

    def inlined(self, eqn: Any) -> Any | None:
        """The body to put in an equation's place, None to leave the equation."""
        if eqn.primitive.name == SPARSE[0]:
            return compat.sparse_product(eqn)
        if not self.inlines(eqn):
            return None
        if eqn.primitive.name == "recom_fused":
            return eqn.params["call"].closed
        return compat.inner_jaxpr(eqn)

    def reads_table(self, closed: Any) -> bool:
        """Whether a body holds an equation that could read a table (memoised per body)."""
        jaxpr = getattr(closed, "jaxpr", closed)
        known = self._reads_table.get(id(jaxpr))
        if known is None:
            known = any(
                e.primitive.name in TABLE_READS
                or any(self.reads_table(j) for j in compat.sub_jaxprs(e))
                for e in jaxpr.eqns
            )
            self._reads_table[id(jaxpr)] = known
        return known

    def run(
        self, jaxpr: Any, env: dict[Any, Any], rename: bool = False, source: Any = None
    ) -> None:
        """Appends the equations of `jaxpr`; `env` maps its variables to the flat program's atoms.

        Inside a call of JAX's own (`jnp.take`), traced once and shared by all callers, equations get the
        `source` of the call.
        """
        literal, known, drop, fresh = compat.Literal, env.get, compat.DropVar, compat.fresh_var
        for eqn in jaxpr.eqns:
            invars = [v if isinstance(v, literal) else known(v, v) for v in eqn.invars]
            inner = self.inlined(eqn) if eqn.primitive.name in CALLS else None
            if inner is not None:
                sparse = eqn.primitive.name == SPARSE[0]
                body = compat.open_jaxpr(inner)
                scope: dict[Any, Any] = dict(zip(body.invars, invars, strict=True))
                for var, value in zip(body.constvars, inner.consts, strict=True):
                    scope[var] = self.const(value, var.aval)
                library = sparse or compat.is_library_call(inner)
                inside = source or (eqn.source_info if library else None)
                self.run(body, scope, rename=True, source=inside)
                for outer, atom in zip(eqn.outvars, body.outvars, strict=True):
                    env[outer] = atom if isinstance(atom, literal) else scope[atom]
                continue
            if rename:
                outvars = [v if isinstance(v, drop) else fresh(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, outvars, strict=True))
                if source is None:
                    self.eqns.append(eqn.replace(invars=invars, outvars=outvars))
                else:
                    new = eqn.replace(invars=invars, outvars=outvars, source_info=source)
                    self.eqns.append(new)
            elif any(a is not b for a, b in zip(invars, eqn.invars, strict=True)):
                self.eqns.append(eqn.replace(invars=invars))
            else:
                self.eqns.append(eqn)
