"""Programs read from a table: which operators each output goes through. A program is a function of raw columns.

program = pp.program({
    "x1": ["I1", ("fill_null", {"value": 0.0}), ("logit", {"eps": 1e-6})],
    "ids": {"input": "C1", "ops": [{"op": "sigrid_hash", "salt": 1, "max_value": 1000}, ["firstx", 3]]},
    "both": {"input": ["C1", "C2"], "ops": ["id_overlap_count"]},
})
program(raw)                            # {"x1": ..., "ids": ..., "both": ...}; raw: dict of columns
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from recom_jax.errors import PreprocessError, PreprocessTypeError
from recom_jax.preprocess.operator import OPERATORS, plain
from recom_jax.preprocess.values import Column


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator of a program.

    Attributes:
      output: the name of what it makes; ``NAME.k`` for the k-th step but the last of output NAME.
      op: the operator's name in `recom_jax.preprocess`.
      inputs: names of raw columns or of other steps' outputs.
      params: its parameters, by name.
    """

    output: str
    op: str
    inputs: tuple[str, ...]
    params: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        given = [*self.inputs, *(f"{k}={v!r}" for k, v in self.params)]
        return f"{self.output} = {self.op}({', '.join(given)})"


@dataclasses.dataclass(frozen=True)
class Program:
    """Operators in order of use, and what the program returns. Callable, hashable; prints itself.

    Attributes:
      steps: see `Step`; each reads raw columns and what earlier steps made.
      outputs: (name, step or raw column that it is).
      inputs: raw columns it reads.
    """

    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]

    def __call__(self, raw: Mapping[str, Any]) -> dict[str, Column]:
        """Runs the program. Traceable: under `jax.jit` and in `recom_jax.optimize`.

        Raises:
          PreprocessError: a column that the program reads is not in `raw`.
        """
        known: dict[str, Column] = {}
        for name in self.inputs:
            if name not in raw:
                raise PreprocessError(
                    f"the program reads column {name!r}; the batch has {sorted(raw)}"
                )
            known[name] = raw[name]
        for step in self.steps:
            known[step.output] = OPERATORS[step.op](
                *[known[i] for i in step.inputs], **dict(step.params)
            )
        return {name: known[source] for name, source in self.outputs}

    @property
    def counts(self) -> dict[str, int]:
        """Operator -> how many steps use it."""
        names = [s.op for s in self.steps]
        return {n: names.count(n) for n in sorted(set(names))}

    def __str__(self) -> str:
        head = f"program: {len(self.inputs)} columns in, {len(self.steps)} operators, {len(self.outputs)} out"
        return "\n".join([head, *(f"  {s}" for s in self.steps)])


def program(table: Mapping[str, Any], *, schema: Any = None) -> Program:
    """Reads a program from a table.

    Args:
      table: output name -> a raw column's name (taken as it is), or ``[input, op, op, ...]``, or
        ``{"input": name or names, "ops": [op, ...]}``. An op is a name, ``(name, argument, ...)``,
        ``(name, {parameter: value})`` or ``{"op": name, parameter: value, ...}``. An input is a raw column, or
        ``"@NAME"``: another output of the table, wherever it stands. Operators of several columns take all inputs and
        come first.
      schema: a pyarrow schema (or names); then every raw column must be in it.

    Raises:
      PreprocessError: an unknown operator, parameter or column, a missing parameter, or outputs that need each other.
    """
    columns = None if schema is None else list(getattr(schema, "names", schema))
    specs = {name: _spec(name, entry) for name, entry in table.items()}
    steps: list[Step] = []
    outputs: dict[str, str] = {}
    inputs: dict[str, None] = {}
    open_: list[str] = []

    def source(name: str, asked_by: str) -> str:
        if name.startswith("@"):
            if name[1:] not in specs:
                raise PreprocessError(
                    f"output {asked_by!r} reads {name!r}, but no output has that name"
                )
            return make(name[1:])
        if columns is not None and name not in columns:
            raise PreprocessError(
                f"output {asked_by!r} reads column {name!r}; the schema has {columns}"
            )
        inputs[name] = None
        return name

    def make(name: str) -> str:
        if name in outputs:
            return outputs[name]
        if name in open_:
            raise PreprocessError(f"outputs need each other: {' -> '.join([*open_, name])}")
        open_.append(name)
        read, ops = specs[name]
        current = tuple(source(i, name) for i in read)
        for k, (op, params) in enumerate(ops):
            # Outputs may share their names with raw columns, so steps have names of their own.
            output = f"{name}:{k + 1}.{op}"
            steps.append(Step(output, op, current, params))
            current = (output,)
        open_.pop()
        if len(current) != 1:
            raise PreprocessError(
                f"output {name!r} has {len(current)} inputs and no operator that joins them"
            )
        outputs[name] = current[0]
        return current[0]

    for name in specs:
        make(name)
    return Program(tuple(steps), tuple((n, outputs[n]) for n in specs), tuple(inputs))


_Ops = list[tuple[str, tuple[tuple[str, Any], ...]]]


def _spec(name: str, entry: Any) -> tuple[tuple[str, ...], _Ops]:
    if isinstance(entry, str):
        return (entry,), []
    if isinstance(entry, Mapping):
        extra = set(entry) - {"input", "ops"}
        if extra or "input" not in entry:
            raise PreprocessError(
                f"output {name!r}: a table entry has input and ops, not {sorted(entry)}"
            )
        read, ops = entry["input"], entry.get("ops", [])
    elif isinstance(entry, Sequence) and entry:
        read, ops = entry[0], list(entry[1:])
    else:
        raise PreprocessTypeError(
            f"output {name!r}: a table entry is a name, a list or a mapping, not {entry!r}"
        )
    inputs = (read,) if isinstance(read, str) else tuple(read)
    made: _Ops = []
    for k, op in enumerate(ops):
        made.append(_op(name, op, len(inputs) if k == 0 else 1))
    return inputs, made


def _op(output: str, entry: Any, columns: int) -> tuple[str, tuple[tuple[str, Any], ...]]:
    args: Sequence[Any] = ()
    if isinstance(entry, Mapping):
        params = dict(entry)
        op = params.pop("op", None)
    elif isinstance(entry, str):
        op, params = entry, {}
    else:
        op, *rest = entry
        params = dict(rest.pop()) if rest and isinstance(rest[-1], Mapping) else {}
        args = rest
    if op not in OPERATORS or str(op).startswith("_"):
        known = [n for n in sorted(OPERATORS) if not n.startswith("_")]
        raise PreprocessError(f"output {output!r}: no operator is named {op!r}; there are {known}")
    signature = inspect.signature(OPERATORS[op])
    try:
        bound = signature.bind(*[None] * columns, *args, **params)
    except TypeError as why:
        raise PreprocessError(f"output {output!r}: {op}: {why}; it takes {signature}") from why
    first = next(iter(signature.parameters.values()))
    taken = 1 if first.kind is inspect.Parameter.VAR_POSITIONAL else columns
    given = {k: plain(op, k, v) for k, v in list(bound.arguments.items())[taken:]}
    check = getattr(OPERATORS[op], "check", None)
    if check is not None:
        bound.apply_defaults()
        everything = list(bound.arguments.items())[taken:]
        try:
            check(**{k: plain(op, k, v) for k, v in everything})
        except PreprocessError as why:
            raise type(why)(f"output {output!r}: {why}") from why
    return op, tuple(given.items())


__all__ = ["Program", "Step", "program"]
