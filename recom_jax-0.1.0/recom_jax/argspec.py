"""Types of arguments as text: ``f32[1000,8]``, ``{'ids': i32[256], 'tables': [f32[10,4], f32[20,4]]}``, ``3``."""

from __future__ import annotations

import ast
import re
from typing import Any

import jax
import jax.numpy as jnp

SHORT = {
    "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16", "pred": "bool",
    **{f"{s}{n}": f"{'u' if s == 'u' else ''}int{n}" for s in "iu" for n in (8, 16, 32, 64)},
    **{f"s{n}": f"int{n}" for n in (8, 16, 32, 64)},
}  # fmt: skip
_ARRAY = re.compile(r"(?<![\w'\"])([A-Za-z]\w*)\[([\d\s,]*)\]")
_MARK = "\0array "


class SpecError(ValueError):
    """A text that describes no argument."""


def parse(text: str) -> Any:
    """The argument: ``jax.ShapeDtypeStruct``s in the containers that the text has. Raises SpecError."""
    marked = _ARRAY.sub(lambda m: repr(f"{_MARK}{m[1]} {m[2]}"), text)
    try:
        value = ast.literal_eval(marked.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as why:
        raise SpecError(f"{text!r} describes no argument") from why
    return _made(value, text)


def _made(value: Any, text: str) -> Any:
    if isinstance(value, str) and _MARK in value:
        if value.rindex(_MARK):  # Python joins strings that stand side by side
            raise SpecError(f"{text!r} describes no argument: a comma is missing")
        name, _, sizes = value.removeprefix(_MARK).partition(" ")
        return _array(name, sizes, text)
    if isinstance(value, dict):
        return {k: _made(v, text) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_made(v, text) for v in value)
    return value


def _array(name: str, sizes: str, text: str) -> Any:
    shape = tuple(int(n) for n in sizes.split(",") if n.strip())
    try:
        dtype = jnp.dtype(SHORT.get(name, name))
        if dtype.kind not in "biufV":
            raise TypeError
    except TypeError as why:
        raise SpecError(
            f"{text!r}: there is no dtype {name!r} (there are {', '.join(SHORT)})"
        ) from why
    if dtype.itemsize == 8 and not jax.config.read("jax_enable_x64"):
        raise SpecError(f"{text!r}: {name} needs 64-bit types: set JAX_ENABLE_X64=1")
    return jax.ShapeDtypeStruct(shape, dtype)


__all__ = ["SpecError", "parse"]
