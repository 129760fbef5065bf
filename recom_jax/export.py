"""Models outside of JAX: what ``jax.export`` has to be told, and SavedModels for TensorFlow.

    recom_jax.export.to_saved_model(model, params, "saved", {"item": np.zeros(256, np.int32)})

    recom_jax.export.register_tensorflow()            # or tf.load_library(path of the library): no JAX needed
    served = tf.saved_model.load("saved").signatures["serving_default"](item=ids)

docs/tensorflow.md is the guide.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import keyword
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, ffi
from recom_jax import tensorflow_library as _library
from recom_jax.errors import ArgumentError, TensorFlowError
from recom_jax.tensorflow_library import tensorflow_library

__all__ = [
    "Signature",
    "disabled_checks",
    "readable_by_tensorflow",
    "register_tensorflow",
    "tensorflow_library",
    "to_saved_model",
]

SERVING = "serving_default"
_STABLEHLO: dict[tuple[int, ...], tuple[int, ...]] = {
    (2, 21): (1, 13, 7)
}  # what each TensorFlow reads


def disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What lets exported modules hold our custom call, whose name carries its version.

    For the parameter ``disabled_checks`` of ``jax.export.export`` and ``native_serialization_disabled_checks`` of
    ``jax2tf.convert``.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(ffi.FUSED)]


def register_tensorflow() -> None:
    """Lets TensorFlow in this process run models of ours; builds the library if it has to be (a minute, once).

    Any number of times, from any thread. A process without JAX loads the library itself:
    ``tf.load_library(path)``, the path from `tensorflow_library` or ``python -m recom_jax tf-library``.

    Raises:
      TensorFlowError (ImportError), ExportError (RuntimeError): as `tensorflow_library`; or TensorFlow refuses it.
    """
    _library.find_tensorflow()  # a clear error before a minute passes
    _library.load(_tensorflow())


@contextlib.contextmanager
def readable_by_tensorflow() -> Iterator[None]:
    """Within it, ``jax.export`` and ``jax2tf`` write modules that the installed TensorFlow reads.

    JAX is often newer than the XLA inside TensorFlow. `to_saved_model` does this by itself; it is for who calls
    ``jax2tf.convert`` by hand: around the first call of the converted function, and around saving.

    Raises:
      TensorFlowError (ImportError): no TensorFlow, or a wrong version.
    """
    version = _STABLEHLO.get(_library.find_tensorflow().numbers)
    with compat.stablehlo_target(version) if version else contextlib.nullcontext():
        yield


@dataclasses.dataclass(frozen=True)
class Signature:
    """One signature of a SavedModel.

    Attributes:
      inputs: what the model takes behind the parameters, by example: a tuple is one argument each, all else is one
        argument. Leaves have ``shape`` and ``dtype`` (arrays, `jax.ShapeDtypeStruct`, `tf.TensorSpec`).
      polymorphic_shapes: as in ``jax2tf.convert``, for `inputs` alone: "(b, ...)", or a tree of such strings; None:
        all sizes are those of `inputs`. A list may begin with None for the parameters.
      model: the function of this signature; None: the one that `to_saved_model` was given.
    """

    inputs: Any
    polymorphic_shapes: Any = None
    model: Callable[..., Any] | None = None


def to_saved_model(
    model: Callable[..., Any],
    params: Any,
    path: str | os.PathLike[str],
    signature: Any,
    polymorphic_shapes: Any = None,
    *,
    with_gradient: bool = False,
    jit_compile: bool = True,
) -> Any:
    """Writes ``model(params, *inputs)`` as a TensorFlow SavedModel for the CPU, by ``jax2tf``.

    The parameters become variables: ``loaded.params["tables/item"].assign(rows)`` takes effect with the next call.
    A signature takes its inputs by the names of their places (key, attribute or parameter; joined by "_"), and
    returns a dict: a result that is one array is "output_0". The loaded model's attribute of a signature's name is
    the same function with positional tensors.

    Whoever runs the model loads our library first (`register_tensorflow`); writing needs none.

    Args:
      model: optimized or not; nothing of it may be static. Not a bound one: its parameters would not be variables.
      params: pytree of arrays.
      path: a folder.
      signature: inputs by example (`Signature.inputs`) of the signature "serving_default"; or a dict of names to
        `Signature`.
      polymorphic_shapes: of `signature`, if that is inputs.
      with_gradient: whether the gradients of all signatures are saved with them.
      jit_compile: whether the functions are marked to be compiled whole. The model itself always is.

    Returns:
      the `tf.Module` that was saved, with its ``params``.

    Raises:
      TensorFlowError (ImportError): no TensorFlow, or a wrong version.
      ArgumentError (TypeError): inputs or parameters that are no arrays, or two of one name.
    """
    from recom_jax.serve import Server

    _library.find_tensorflow()
    tf = _tensorflow()
    module = tf.Module()
    signatures = _signatures(signature, polymorphic_shapes, module)
    for fn in [model, *(s.model for s in signatures.values() if s.model is not None)]:
        if not callable(fn) or isinstance(fn, Server):
            raise ArgumentError(
                f"expected a function of (params, *inputs), was given {fn!r}; of a bound server, pass the model "
                "itself and the parameters"
            )
    with_paths, params_tree = _flatten(params)
    variables = [
        tf.Variable(_canonical(leaf, f"params{jax.tree_util.keystr(at)}"), name=_identifier(at))
        for at, leaf in with_paths
    ]
    names = _unique([_variable_name(at) for at, _ in with_paths], "parameters")
    module.params = dict(zip(names, variables, strict=True))
    concrete = {}
    with readable_by_tensorflow():
        for name, one in signatures.items():
            fn = _function(
                tf, one.model or model, one, params_tree, variables, with_gradient, jit_compile
            )
            setattr(module, name, fn)
            concrete[name] = fn.get_concrete_function()
        tf.saved_model.save(  # traces the gradients
            module,
            os.fspath(path),
            signatures=concrete,
            options=tf.saved_model.SaveOptions(experimental_custom_gradients=with_gradient),
        )
    return module


# ---- inside ---------------------------------------------------------------------------------------------------


def _tensorflow() -> Any:
    try:
        import tensorflow
    except ImportError as why:
        raise TensorFlowError(f"TensorFlow is installed, but cannot be imported: {why}") from why
    return tensorflow


def _signatures(signature: Any, polymorphic_shapes: Any, module: Any) -> dict[str, Signature]:
    if isinstance(signature, Signature):
        signature = {SERVING: signature}
    several = isinstance(signature, Mapping) and bool(signature) and all(
        isinstance(s, Signature) for s in signature.values()
    )  # fmt: skip
    if not several:
        return {SERVING: Signature(signature, polymorphic_shapes)}
    if polymorphic_shapes is not None:
        raise ArgumentError(
            "polymorphic_shapes belongs to each Signature where there are several: "
            "Signature(inputs, polymorphic_shapes)"
        )
    for name in signature:
        valid = isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w*", name)
        if not valid or name == "params" or hasattr(module, name):
            raise ArgumentError(
                f"signature {name!r}: a name is letters, digits and _, and not 'params' or what a tf.Module has"
            )
    return dict(signature)


def _function(
    tf: Any,
    model: Callable[..., Any],
    signature: Signature,
    params_tree: Any,
    variables: Sequence[Any],
    with_gradient: bool,
    jit_compile: bool,
) -> Any:
    """The `tf.function` of one signature: positional tensors to a dict of tensors."""
    from jax.experimental import jax2tf

    one = not isinstance(signature.inputs, tuple)
    inputs = (signature.inputs,) if one else signature.inputs
    with_paths, inputs_tree = _flatten(inputs)
    parameters = _parameters(model, len(inputs))
    leaves = [_leaf(leaf, f"input {_shown(at, parameters)}") for at, leaf in with_paths]
    given = _shapes_of(inputs, signature.polymorphic_shapes, one)
    scope = jax.export.SymbolicScope()
    for k, (at, _) in enumerate(with_paths):
        if given[k] is not None:
            sizes = jax.export.symbolic_shape(given[k], like=leaves[k].shape, scope=scope)
            leaves[k] = dataclasses.replace(leaves[k], shape=tuple(sizes))
        elif None in leaves[k].shape:
            raise ArgumentError(
                f"input {_shown(at, parameters)} has a size that is not known: name it in polymorphic_shapes, "
                '"(b, ...)" say'
            )
    names = _unique([_input_name(at, parameters) for at, _ in with_paths], "inputs")

    def flat(params: list[Any], values: list[Any]) -> Any:
        return model(params_tree.unflatten(params), *inputs_tree.unflatten(values))

    converted = jax2tf.convert(
        flat,
        with_gradient=with_gradient,
        polymorphic_shapes=[None, [_polymorphic(s.shape) for s in leaves]],
        native_serialization_platforms=("cpu",),
        native_serialization_disabled_checks=disabled_checks(),
    )

    def call(*tensors: Any) -> dict[str, Any]:
        out, _ = _flatten(converted(list(variables), list(tensors)))
        made = _unique([_result_name(at) for at, _ in out], "results")
        return dict(zip(made, (value for _, value in out), strict=True))

    # A tf.function takes its names from here.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    specs = [
        tf.TensorSpec([d if isinstance(d, int) else None for d in s.shape], s.dtype, name)
        for s, name in zip(leaves, names, strict=True)
    ]
    return tf.function(call, input_signature=specs, jit_compile=jit_compile, autograph=False)


def _shapes_of(inputs: tuple[Any, ...], shapes: Any, one: bool) -> list[str | None]:
    """One string a leaf. `shapes` is as in jax2tf: a prefix of the inputs, or None; for one input, also in a list."""
    listed = isinstance(shapes, (list, tuple))
    plain = not one or not isinstance(inputs[0], (list, tuple))
    if listed and plain and len(shapes) == len(inputs) + 1 and shapes[0] is None:
        shapes = shapes[1:]  # it was that of the parameters
    if one and not (listed and plain and len(shapes) == 1):
        shapes = (shapes,)
    elif listed:
        shapes = tuple(shapes)
    try:
        whole = jax.tree.broadcast(shapes, inputs, is_leaf=_is_none)
    except ValueError as why:
        raise ArgumentError(
            f"polymorphic_shapes are a string for all inputs, or strings in the structure of the inputs: {why}"
        ) from why
    found: list[str | None] = list(_flatten(inputs)[1].flatten_up_to(whole))
    return found


def _flatten(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Leaves with their paths, and the structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return list(leaves), structure


def _polymorphic(shape: Sequence[Any]) -> str:
    return "(" + "".join(f"{d}, " for d in shape) + ")"


def _canonical(leaf: Any, what: str) -> Any:
    """The leaf as numpy, in the dtype that JAX gives it."""
    array = np.asarray(leaf)
    return array.astype(_dtype(array.dtype, what), copy=False)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An input; a size is a number, a symbol or (at first) None."""

    shape: tuple[Any, ...]
    dtype: Any


def _leaf(given: Any, what: str) -> _Leaf:
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        given = np.asarray(given)
    dtype = getattr(given.dtype, "as_numpy_dtype", given.dtype)  # TensorFlow's
    return _Leaf(tuple(given.shape), _dtype(dtype, what))


def _is_none(value: Any) -> bool:
    return value is None


def _dtype(dtype: Any, what: str) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind in "OSUTMm":
        raise ArgumentError(
            f"{what} is of {dtype}: JAX has numbers only. Strings become ids before the model "
            "(recom_jax.strings; tf.strings.to_hash_bucket_fast gives the same)"
        )
    return jax.dtypes.canonicalize_dtype(dtype)


def _parameters(model: Callable[..., Any], n: int) -> list[str]:
    """The names of the model's parameters behind the first one, as many as there are inputs."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in inspect.signature(model).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    return names[1 : n + 1] + [f"input_{k}" for k in range(len(names[1 : n + 1]), n)]


def _key(key: Any) -> str:
    """A part of a pytree's path, as a name."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _identifier(keys: Sequence[Any], first: str = "") -> str:
    name = re.sub(
        r"\W", "_", "_".join([first] * bool(first) + [_key(k) for k in keys]), flags=re.ASCII
    )
    name = name if name[:1].isalpha() else f"x{name}"
    return f"{name}_" if keyword.iskeyword(name) else name


def _input_name(at: Sequence[Any], parameters: Sequence[str]) -> str:
    """`at` begins with the position of an argument."""
    keys = jax.tree_util
    named = len(at) > 1 and isinstance(at[1], (keys.DictKey, keys.GetAttrKey))
    return _identifier(at[1:], "" if named else parameters[at[0].idx])


def _result_name(at: Sequence[Any]) -> str:
    named = bool(at) and isinstance(at[0], (jax.tree_util.DictKey, jax.tree_util.GetAttrKey))
    return _identifier(at) if named else _identifier(at, "output") if at else "output_0"


def _variable_name(at: Sequence[Any]) -> str:
    return "/".join(_key(k) for k in at) or "value"


def _shown(at: Sequence[Any], parameters: Sequence[str]) -> str:
    return f"{parameters[at[0].idx]}{jax.tree_util.keystr(tuple(at[1:]))}"


def _unique(names: list[str], what: str) -> list[str]:
    twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ArgumentError(
            f"two {what} would have the name {twice[0]!r} in the SavedModel; rename one of them"
        )
    return names
