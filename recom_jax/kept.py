"""Prepared programs on disk: what detection, simplification and scheduling made of a function, for the next process.

An entry holds what `splice` needs: which equations stay in XLA, and for each fused call its program and the variables
that it reads and makes, by their place in the jaxpr. Its key is a digest of the jaxpr as the stages see it (primitives,
parameters, shapes, dtypes, literals, the bytes of constants), of the options, and of versions: JAX's, and the sources
of this package. Source lines and names are no part of it. `explain` never reads it: a report says what analysis found.

Entries are JSON: numbers and names, checked when they are read. A small function is analysed faster than a file is
read, so functions of fewer than `LEAST` equations are not looked up.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, version
from recom_jax.cache import Cache, key_of
from recom_jax.detect_values import Output, Val
from recom_jax.options import Options
from recom_jax.program import ClassDef, ColumnDef, Instr, Program, Reg
from recom_jax.schedule import Scheduled
from recom_jax.shape_solver.recover import DimOp
from recom_jax.splice import Split
from recom_jax.trace import Traced

LEAST = 512  # equations
LARGEST_CONSTANTS = 1 << 26  # bytes of all constants together that are worth a digest

_FORMAT = 1
_NO_PART = ("cache_dir", "cache_bytes", "dump_dir", "verify")  # of the key, of all options
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")

# What a program on disk is: which equations stay, constants that the compiler made, (level, program) of each call.
Kept = tuple[Split, tuple[tuple[Any, Any], ...], tuple[tuple[int, Scheduled], ...]]


class Unkeyed(Exception):
    """A function that has no key: sizes are symbols, constants are traced or too large."""


def applies(traced: Traced, options: Options) -> bool:
    """Whether programs of this function are kept: not where each stage is to be seen or verified."""
    return (
        len(compat.open_jaxpr(traced.jaxpr).eqns) >= LEAST
        and options.caches_in is not None
        and options.dumps_to is None
        and not options.verifies
    )


# ---- keys --------------------------------------------------------------------------------------------------------


def key(traced: Traced, options: Options) -> str | None:
    """The digest of everything that the stages look at; None where there is none."""
    try:
        parts = _Text().jaxpr(traced.jaxpr)
    except Unkeyed:
        return None
    chosen = [
        f"{f.name}={getattr(options, f.name)!r}"
        for f in dataclasses.fields(options)
        if f.name not in _NO_PART
    ]
    chosen += sorted(options.disabled)
    x64 = bool(getattr(jax.config, "jax_enable_x64"))  # noqa: B009 - mypy does not know it
    versions = (_FORMAT, version.__version__, sources(), jax.__version__, x64)
    return key_of(*versions, "\n".join(chosen), "\n".join(parts))


@functools.lru_cache(maxsize=1)
def sources() -> str:
    """A digest of this package's Python files: a compiler that was changed reads nothing that another one kept."""
    folder = pathlib.Path(__file__).parent
    made = hashlib.blake2b(digest_size=32)
    for path in sorted(folder.rglob("*.py")):
        data = path.read_bytes()
        made.update(f"{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return made.hexdigest()


class _Text:
    """A jaxpr as lines that are the same in every process, and differ where a stage could decide differently."""

    def __init__(self) -> None:
        self.numbers: dict[int, str] = {}
        self.params: dict[int, str] = {}
        self.avals: dict[int, tuple[Any, str]] = {}
        self.bodies: dict[int, tuple[Any, str]] = {}
        self.literals: dict[int, str] = {}
        self.dtypes: dict[Any, str] = {None: ""}

    def jaxpr(self, x: Any) -> list[str]:
        """Lines of a jaxpr, open or closed. JAX's own text of one leaves the values of its constants out."""
        jaxpr = compat.open_jaxpr(x) if hasattr(x, "consts") else x
        lines = [self.made(jaxpr.invars), self.made(jaxpr.constvars)]
        lines += _constants(getattr(x, "consts", ()))
        for e in jaxpr.eqns:
            params = self.params.get(id(e.params))
            if params is None:
                params = self.params[id(e.params)] = self.value(e.params)
            effects = ",".join(sorted(map(self.value, e.effects))) if e.effects else ""
            lines.append(
                f"{e.primitive.name} {self.read(e.invars)} {params} {self.made(e.outvars)} {effects}"
            )
        lines.append(self.read(jaxpr.outvars))
        return lines

    def made(self, variables: Sequence[Any]) -> str:
        texts = []
        for v in variables:
            self.numbers[id(v)] = str(len(self.numbers))
            known = self.avals.get(id(v.aval))
            if known is None:
                known = self.avals[id(v.aval)] = v.aval, self.aval(v.aval)
            texts.append(known[1])
        return ";".join(texts)

    def aval(self, aval: Any) -> str:
        shape = getattr(aval, "shape", ())
        if any(type(n) is not int for n in shape):
            raise Unkeyed
        kind, dtype = type(aval).__name__, self.dtype(getattr(aval, "dtype", None))
        return f"{kind}:{dtype}{list(shape)}{getattr(aval, 'weak_type', '')}"

    def dtype(self, dtype: Any) -> str:
        name = self.dtypes.get(dtype)  # asking numpy for a name costs microseconds
        if name is None:
            name = self.dtypes[dtype] = str(dtype)
        return name

    def read(self, atoms: Sequence[Any]) -> str:
        literal, numbers = compat.Literal, self.numbers
        return ",".join(
            [self.literal(v) if isinstance(v, literal) else numbers[id(v)] for v in atoms]
        )

    def literal(self, v: Any) -> str:
        text = self.literals.get(id(v))
        if text is None:
            value = np.asarray(v.val)
            text = f"{self.aval(v.aval)}={self.dtype(value.dtype)}{value.tobytes().hex()}"
            self.literals[id(v)] = text
        return text

    def value(self, x: Any) -> str:
        """A parameter. What no stage can look into (a function, say) counts by its printed form without addresses."""
        if x is None or isinstance(x, (bool, int, str, bytes)):
            return repr(x)
        if isinstance(x, float):
            return x.hex()
        if isinstance(x, (np.generic, np.ndarray)):
            return f"{x.dtype}{x.shape}{np.ascontiguousarray(x).tobytes().hex()}"
        if isinstance(x, (tuple, list)):
            return f"{type(x).__name__}({','.join(map(self.value, x))})"
        if isinstance(x, dict):
            return ",".join(sorted(f"{k}={self.value(v)}" for k, v in x.items()))
        if hasattr(x, "eqns"):
            known = self.bodies.get(id(x))
            if known is None:
                known = self.bodies[id(x)] = x, "{" + "\n".join(_Text().jaxpr(x)) + "}"
            return known[1]
        return f"{type(x).__module__}.{type(x).__qualname__}:{_ADDRESS.sub('0x', str(x))}"


def _constants(consts: Sequence[Any]) -> list[str]:
    if any(map(compat.is_tracer, consts)):
        raise Unkeyed
    if sum(getattr(c, "nbytes", 0) for c in consts) > LARGEST_CONSTANTS:
        raise Unkeyed
    lines = []
    for c in consts:
        try:
            array = np.ascontiguousarray(np.asarray(c))
        except Exception as why:  # a constant that is no array (a key of random numbers, say)
            raise Unkeyed from why
        if array.dtype.hasobject:
            raise Unkeyed
        lines.append(f"{array.dtype}{array.shape}{hashlib.blake2b(array.tobytes()).hexdigest()}")
    return lines


# ---- entries -----------------------------------------------------------------------------------------------------


def load(name: str, traced: Traced, options: Options) -> Kept | None:
    """What was kept under a key, in this trace's variables."""
    data = Cache.of(options).get("program", name)
    if data is None:
        return None
    try:
        return _unpacked(json.loads(data), traced.jaxpr)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None  # whole, says its digest, but not as this version writes it


def keep(name: str, traced: Traced, options: Options, kept: Kept) -> bool:
    """Keeps what was made of a function. Returns whether it will be found again."""
    split, extra, calls = kept
    data = json.dumps(_packed(split, extra, calls), separators=(",", ":")).encode()
    again = _unpacked(json.loads(data), traced.jaxpr)
    if [s.program for _, s in again[2]] != [s.program for _, s in calls]:
        return False
    return Cache.of(options).put("program", name, data)


def _variables(jaxpr: Any) -> list[Any]:
    return [*jaxpr.invars, *jaxpr.constvars, *(v for e in jaxpr.eqns for v in e.outvars)]


def _packed(
    split: Split, extra: Sequence[tuple[Any, Any]], calls: Sequence[tuple[int, Scheduled]]
) -> Any:
    jaxpr = compat.open_jaxpr(split.jaxpr)
    place = {id(v): n for n, v in enumerate(_variables(jaxpr))}
    place |= {id(v): -1 - k for k, (v, _) in enumerate(extra)}
    row = {id(e): n for n, e in enumerate(jaxpr.eqns)}
    arrays = [np.ascontiguousarray(np.asarray(a)) for _, a in extra]
    return {
        "kept": [[level, row[id(e)]] for level, e in split.kept],
        "extra": [[str(a.dtype), a.shape, base64.b64encode(a.tobytes()).decode()] for a in arrays],
        "calls": [
            {
                "level": level,
                "operands": [place[id(v)] for v in s.operands],
                "results": [place[id(o.var)] for o in s.outputs],
                "program": _packed_program(s.program),
            }
            for level, s in calls
        ],
    }


def _unpacked(made: Any, closed: Any) -> Kept:
    jaxpr = compat.open_jaxpr(closed)
    extra = []
    for dtype, shape, text in made["extra"]:
        array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
        extra.append((compat.fresh_var(jax.core.ShapedArray(array.shape, array.dtype)), array))
    variables = [*_variables(jaxpr), *(v for v, _ in reversed(extra))]  # -1 - k from the end
    split = Split(
        closed,
        tuple((level, jaxpr.eqns[row]) for level, row in made["kept"]),
        {
            id(v): c
            for v, c in zip(jaxpr.constvars, closed.consts, strict=True)
            if not compat.is_tracer(c)
        },
    )
    calls = []
    for c in made["calls"]:
        outs = [Output(variables[n], Val((), None), c["level"]) for n in c["results"]]
        operands = tuple(variables[n] for n in c["operands"])
        calls.append((c["level"], Scheduled(_program(c["program"]), operands, tuple(outs))))
    return split, tuple(extra), tuple(calls)


def _packed_program(p: Program) -> Any:
    return {
        "operands": p.operands,
        "results": p.results,
        "dims": [[d.kind, d.a, d.b] for d in p.dims],
        "classes": [
            {
                "slots": c.slots,
                "regs": [[r.space, r.dtype, r.width] for r in c.regs],
                "outer": c.outer,
                "code": [_packed_code(i) for i in c.code],
            }
            for c in p.classes
        ],
        "columns": [[c.cls, *c.values] for c in p.columns],
    }


def _packed_code(i: Instr) -> Any:
    return [i.op, i.args, [_packed_code(b) for b in i.body]]


def _program(made: Any) -> Program:
    return Program(
        tuple((dtype, rank) for dtype, rank in made["operands"]),
        tuple((dtype, rank) for dtype, rank in made["results"]),
        tuple(DimOp(kind, a, b) for kind, a, b in made["dims"]),
        tuple(
            ClassDef(
                tuple(c["slots"]),
                tuple(Reg(*r) for r in c["regs"]),
                tuple(c["outer"]),
                tuple(map(_code, c["code"])),
            )
            for c in made["classes"]
        ),
        tuple(ColumnDef(c[0], tuple(c[1:])) for c in made["columns"]),
    )


def _code(made: Any) -> Instr:
    op, args, body = made
    return Instr(op, tuple(args), tuple(map(_code, body)))


__all__ = ["LARGEST_CONSTANTS", "LEAST", "applies", "keep", "key", "load", "sources"]
