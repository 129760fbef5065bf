"""From a preprocessing function to `pull`'s arrays: a rule for each primitive, and one for each list operator."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, templates
from recom_jax.corun import pull, pull_lists
from recom_jax.corun.moves import MOVES
from recom_jax.corun.pull import Const, Elementwise, SymArray
from recom_jax.corun.symbols import Unsupported, type_of
from recom_jax.preprocess import operator
from recom_jax.preprocess.int64 import Int64
from recom_jax.preprocess.lists import pad_number
from recom_jax.preprocess.values import Jagged, take_apart
from recom_jax.trace import flatten

# Where an operation on float32 is a function of CUDA's library, and what is exact.
_UNARY = {
    "neg": "x_neg({0})", "abs": "x_abs({0})", "sign": "x_sign({0})", "not": "x_not({0})", "floor": "x_floor({0})",
    "ceil": "x_ceil({0})", "sqrt": "x_sqrt({0})", "is_finite": "x_is_finite({0})", "copy": "{0}", "copy_p": "{0}",
    "stop_gradient": "{0}", "square": "x_mul({0}, {0})", "population_count": "x_popcnt({0})", "clz": "x_clz({0})",
    "reduce_precision": "{0}",
}  # fmt: skip
_BINARY = {
    "add": "x_add", "sub": "x_sub", "mul": "x_mul", "div": "x_div", "rem": "x_rem", "max": "x_max", "min": "x_min",
    "and": "x_and", "or": "x_or", "xor": "x_xor", "eq": "x_eq", "ne": "x_ne", "lt": "x_lt", "le": "x_le", "gt": "x_gt",
    "ge": "x_ge", "shift_left": "x_shl", "shift_right_logical": "x_shr_l", "shift_right_arithmetic": "x_shr_a",
    "add_any": "x_add",
}  # fmt: skip
_FLOAT = {
    "exp": "exp", "log": "log", "log1p": "log1p", "expm1": "expm1", "tanh": "tanh", "rsqrt": "rsqrt", "cbrt": "cbrt",
    "sin": "sin", "cos": "cos", "exp2": "exp2",
}  # fmt: skip
_LISTS = ("firstx", "ngram", "pad", "fill_null_lists")
_HASH = "sigrid_hash"


@dataclasses.dataclass(frozen=True, eq=False)
class ListCall:
    """A list operator: its parameters, and how its columns are put together."""

    name: str
    parameters: dict[str, Any]
    in_tree: Any
    out_tree: Any
    run: Callable[..., list[Any]]
    avals: tuple[Any, ...]


list_p = compat.Primitive("recom_list_operator")


def _lower(ctx: Any, *operands: Any, call: ListCall) -> Any:
    return compat.lower_fun(lambda *leaves: call.run(*leaves))(ctx, *operands)


def _never(*_: Any, **__: Any) -> Any:
    raise Unsupported("a list operator under a transformation")


compat.register_primitive(
    list_p,
    abstract_eval=lambda *_, call: list(call.avals),
    jvp=_never,
    batch=_never,
    lower_cpu=_lower,
    lower_cuda=_lower,
    lower_default=_lower,
)


class _KeepLists:
    """What the operators do while a program is traced for kernels: list operators stay one equation, and hashes to
    32 bits do, as 64-bit arithmetic is a tenth of the same in 32-bit words."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def __call__(
        self, name: str, body: Callable[..., Any], inputs: Sequence[Any], values: dict[str, Any]
    ) -> Any:
        narrow = name == _HASH and values["max_value"] <= 1 << 31
        if name not in _LISTS and not narrow:
            return body(*inputs, *values.values())
        leaves, in_tree = jax.tree.flatten(inputs)

        def run(*leaves: Any) -> list[Any]:
            with operator.traced_by(None):
                return jax.tree.leaves(body(*jax.tree.unflatten(in_tree, leaves), *values.values()))

        # Tracing a hash only to learn what it gives takes hundreds of equations; its numbers don't matter.
        numbers = (0, 2) if narrow else tuple(values.values())
        kinds = tuple((x.shape, x.dtype) for x in leaves)
        avals, out_tree = self._shapes((name, in_tree, kinds, numbers), body, inputs)
        call = ListCall(name, values, in_tree, out_tree, run, avals)
        return jax.tree.unflatten(out_tree, list_p.bind(*leaves, call=call))

    def _shapes(
        self, key: Any, body: Callable[..., Any], inputs: Sequence[Any]
    ) -> tuple[tuple[Any, ...], Any]:
        """What an operator gives for such inputs: found once for each kind."""
        found = self._made.get(key)
        if found is None:
            with operator.traced_by(None):
                out = jax.eval_shape(lambda *a: body(*a, *key[-1]), *inputs)
            avals = tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(out))
            found = self._made[key] = avals, jax.tree.structure(out)
        return found


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a raw batch: where it is in a slot, in bytes; -1: no kernel reads it."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Pulled:
    """A program's results as arrays that can be asked for their elements, and the raw leaves that they read.

    Attributes:
      paths: of the inputs; placing: gives each input that is read its place.
    """

    inputs: tuple[pull.Input, ...]
    paths: tuple[str, ...]
    placing: pull.Placing
    outputs: tuple[SymArray, ...]
    out_tree: Any

    def leaves(self) -> tuple[Leaf, ...]:
        """All inputs, as far as they have been read."""
        return tuple(
            Leaf(path, x.shape, x.dtype, x.offset, math.prod(x.shape) * x.dtype.itemsize)
            for path, x in zip(self.paths, self.inputs, strict=True)
        )


def pulled(prep: Callable[[Any], Any], raw_like: Any) -> Pulled:
    """Reads a preprocessing function, for columns of these shapes.

    Raises:
      Unsupported: it does what kernels cannot express; the text says what.
    """
    with operator.traced_by(_KeepLists()):
        # A new function, so that JAX traces it anew rather than take a trace with operators as they are.
        closed, out = jax.make_jaxpr(lambda raw: prep(raw), return_shape=True)(raw_like)
    jaxpr = flatten(closed)
    placing, inputs, paths = pull.Placing(), [], []
    for path, x in jax.tree_util.tree_flatten_with_path(raw_like)[0]:
        feature = str(getattr(path[0], "key", path[0])) if path else ""
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        inputs.append(pull.Input(x.shape, dtype, feature, placing))
        paths.append(jax.tree_util.keystr(path))
    with pull.on_host():
        outputs = _Reader().run(compat.open_jaxpr(jaxpr), jaxpr.consts, inputs)
    outputs_tree = jax.tree.structure(out)
    return Pulled(tuple(inputs), tuple(paths), placing, tuple(outputs), outputs_tree)


class _Reader:
    """Evaluates a jaxpr on `SymArray`s."""

    def __init__(self) -> None:
        self._raw_lists: dict[int, pull.RawLists] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[SymArray]) -> list[SymArray]:
        env: dict[Any, SymArray] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: Const(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}

        def read(v: Any) -> SymArray:
            known: Any = v if isinstance(v, compat.Literal) else None
            return env[v] if known is None else Const(np.asarray(known.val, known.aval.dtype))

        for eqn in jaxpr.eqns:
            args = [read(v) for v in eqn.invars]
            for v, made in zip(eqn.outvars, self.equation(eqn, args), strict=True):
                env[v] = made
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, args: list[SymArray]) -> list[SymArray]:
        name = eqn.primitive.name
        out: Any = eqn.outvars[0].aval if eqn.outvars else None
        if eqn.primitive is list_p:
            return self.lists(eqn.params["call"], args)
        if name in ("jit", "pjit"):
            found = templates.recognise(eqn)
            if found is not None:
                return [_search(found, args, out)]
        inner = compat.inner_jaxpr(eqn)
        if inner is not None:
            return self.run(compat.open_jaxpr(inner), inner.consts, args)
        scalars = [x.value for x in args if isinstance(x, Const) and not x.shape]
        if args and len(scalars) == len(args) and not out.shape and len(eqn.outvars) == 1:
            return [Const(compat.bind_eqn(eqn, scalars)[0])]
        rule = MOVES.get(name)
        if rule is not None:
            made = rule(eqn, args, out)
            return made if isinstance(made, list) else [made]
        text = _text(name, eqn, out)
        return [Elementwise(out.shape, out.dtype, text, *args)]

    # ---- list operators ------------------------------------------------------------------------------------

    def lists(self, call: ListCall, args: list[SymArray]) -> list[SymArray]:
        (x,) = jax.tree.unflatten(call.in_tree, args)
        if call.name == _HASH:
            return self.hashed(call, x, args)
        if not isinstance(x, Jagged):
            raise Unsupported(f"{call.name} of a column without lists")
        where = self.structure(x.row_splits)
        values, present = take_apart(x.values)
        if call.name == "pad":
            return self.pad(call, values, present, x, where, args)
        if call.name == "fill_null_lists" and x.valid is None:
            return list(args)
        made = pull_lists.Derived(call.name, where, x.valid, int(call.parameters.get("n", 0)))
        like = jax.tree.unflatten(call.out_tree, call.avals)
        shape = like.row_splits.shape
        splits = pull_lists.ListSplits(shape, np.int32, made, *args)
        leaves = [
            pull_lists.ListValues(a.shape, made, leaf, *args)
            for a, leaf in zip(jax.tree.leaves(like.values), jax.tree.leaves(x.values), strict=True)
        ]
        new = jax.tree.unflatten(jax.tree.structure(x.values), leaves)
        valid = None if like.valid is None else x.valid
        return [*jax.tree.leaves(new), splits, *([] if valid is None else [valid])]

    def hashed(self, call: ListCall, x: Any, args: list[SymArray]) -> list[SymArray]:
        """The column with its numbers hashed; validity and lists as they are."""
        numbers, _ = take_apart(x.values if isinstance(x, Jagged) else x)
        salt = Const(np.array(call.parameters["salt"] % (1 << 64), np.uint64))
        limit = Const(np.array(call.parameters["max_value"], np.uint64))
        inverse = Const(np.array(((1 << 64) - 1) // call.parameters["max_value"], np.uint64))
        parts: tuple[SymArray, ...]
        if isinstance(numbers, Int64):
            text, parts = "sigrid_hash(join({0}, {1}), {2}, {3}, {4})", (numbers.hi, numbers.lo)
        else:
            text, parts = "sigrid_hash(x_convert<u64>({0}), {1}, {2}, {3})", (numbers,)
        made = Elementwise(parts[0].shape, np.int32, text, *parts, salt, limit, inverse)
        return [made, *args[len(parts) :]]

    def structure(self, splits: SymArray) -> pull.ListOf:
        if isinstance(splits, pull_lists.ListSplits):
            return splits.lists
        return self._raw_lists.setdefault(splits.serial, pull.RawLists(splits))

    def pad(
        self, call: ListCall, values: Any, present: Any, x: Any, where: pull.ListOf, args: Any
    ) -> list[SymArray]:
        value = call.parameters["value"]

        def lined(leaf: SymArray, shape: Any, behind: Any) -> SymArray:
            return pull_lists.Lined(shape, leaf, where, x.valid, present, behind, *args)

        shape = call.avals[0].shape
        if isinstance(values, Int64):
            bits = np.uint64(pad_number(value, values.dtype) % (1 << 64))
            high, low = np.uint32(bits >> np.uint64(32)), np.uint32(bits & np.uint64(0xFFFFFFFF))
            return [lined(values.hi, shape, high), lined(values.lo, shape, low)]
        if values.dtype.kind in "iu":
            value = pad_number(value, values.dtype)
        return [lined(values, shape, np.asarray(value).astype(values.dtype))]


def _search(found: templates.Search, args: list[SymArray], out: Any) -> SymArray:
    boundaries, x = args[found.boundaries], args[found.query]
    if not isinstance(boundaries, Const) or found.method not in ("scan", "scan_unrolled", "sort"):
        raise Unsupported(f"{found.function} with computed boundaries, or by {found.method}")
    b = boundaries.value
    if b.ndim != 1 or (b.dtype.kind == "f" and np.isnan(b).any()) or (b[1:] < b[:-1]).any():
        raise Unsupported(f"{found.function} of boundaries that don't ascend")
    if b.dtype != x.dtype:
        raise Unsupported(f"{found.function} of {x.dtype} among {b.dtype}")
    return pull.Counted(b, x, found.side, out.dtype)


def _text(name: str, eqn: Any, out: Any) -> str:
    """The C expression of an elementwise primitive."""
    if name in _UNARY and len(eqn.invars) == 1:
        return _UNARY[name]
    if name in _BINARY:
        return f"{_BINARY[name]}({{0}}, {{1}})"
    if name == "select_n":
        if len(eqn.invars) != 3 or eqn.invars[0].aval.dtype != np.bool_:
            raise Unsupported("a choice of more than two")
        return "x_select({0}, {1}, {2})"
    if name == "clamp":
        return "x_min(x_max({1}, {0}), {2})"
    if name == "convert_element_type":
        return f"x_convert<{type_of(out.dtype)}>({{0}})"
    if name == "bitcast_convert_type" and eqn.invars[0].aval.shape == out.shape:
        return f"x_bitcast<{type_of(out.dtype)}>({{0}})"
    if name == "round":
        way = "away" if int(eqn.params["rounding_method"]) == 0 else "even"
        return f"x_round_{way}({{0}})"
    if name == "integer_pow" and eqn.params["y"] == 2:
        return "x_mul({0}, {0})"
    if out is not None and np.dtype(out.dtype) in (np.float32, np.float64):
        f = "f" if np.dtype(out.dtype) == np.float32 else ""
        if name in _FLOAT:
            return f"{_FLOAT[name]}{f}({{0}})"
        if name == "pow" and eqn.invars[1].aval.dtype == out.dtype:
            return f"pow{f}({{0}}, {{1}})"
        if name == "logistic":
            one = f"1.0{f}"
            return f"({one} / ({one} + exp{f}(-{{0}})))"
    raise Unsupported(f"the operation {name}")


__all__ = ["Leaf", "Pulled", "pulled"]
