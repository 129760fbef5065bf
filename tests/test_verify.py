"""The program verifier: accepts what the compiler makes, rejects each broken rule and says where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from examples.criteo import Dlrm
from examples.movielens import MovieLensModel
from examples.recflex import recflex
from examples.recom_models import model_e, model_f
from recom_jax import pipeline, trace, verify
from recom_jax.errors import RecomError, VerifyError
from recom_jax.program import IMM, ColumnDef, Instr, Program, Reg
from tests.helpers import ids, table

pytestmark = pytest.mark.once


def programs(fn: Callable[..., Any], *args: Any) -> list[Program]:
    leaves, tree = jax.tree_util.tree_flatten(args)

    def flat(*leaves: Any) -> Any:
        return fn(*jax.tree_util.tree_unflatten(tree, leaves))

    traced = trace.trace(flat, leaves, tuple(f"a{k}" for k in range(len(leaves))))
    compiled = pipeline.compile_jaxpr(traced, recom_jax.Options(verify=False))
    return [s.program for _, s, _ in compiled.calls]


def movielens_batch(size: int) -> dict[str, Any]:
    zeros = np.zeros(size, np.int32)
    names = ("user_id", "movie_id", "gender", "age", "occupation", "zip", "timestamp", "title")
    return {
        **dict.fromkeys(names, zeros),
        "genres": np.full((size, 4), -1, np.int32),
        "genres_values": np.zeros(3, np.int32),
        "genres_splits": np.zeros(size + 1, np.int32),
    }


MODELS: dict[str, Callable[[], list[Program]]] = {
    "E": lambda: _columns(model_e(large_rows=2**10, scale=0.02)),
    "F": lambda: _columns(model_f(large_rows=2**10, scale=0.02)),
    "recflex": lambda: _columns(recflex("A", scale=0.02, max_rows=100)),
    "recflex mlperf": lambda: _columns(recflex("mlperf", scale=1.0, max_rows=100)),
    "dlrm": lambda: _columns(Dlrm(vocabulary=50)),
    "movielens": lambda: programs(
        MovieLensModel().columns, MovieLensModel().init(), movielens_batch(5)
    ),
}


def _columns(model: Any) -> list[Program]:
    return programs(model.columns, model.init(), model.batch(8))


@pytest.mark.parametrize("name", MODELS)
def test_accepts_the_example_models(name: str) -> None:
    made = MODELS[name]()
    assert made
    for p in made:
        verify.program(p)
        assert str(p).startswith("program:")


# ---- broken by hand ----------------------------------------------------------------------------------------------


def good() -> Program:
    """A masked mean, a bucketize column, a jagged bag: every kind of instruction."""

    def fn(t: Any, i: Any, x: Any, seg: Any) -> Any:
        mask = i > 0
        bag = jnp.where(mask[..., None], t[jnp.where(mask, i, 0) % 50], 0).sum(1) / jnp.maximum(
            mask.sum(1, keepdims=True), 1
        )
        one = t[jnp.digitize(x, np.array([0.0, 1.0, 7.0], np.float32))]
        jagged = jax.ops.segment_sum(t[seg + 1], seg, num_segments=6)
        return jnp.concatenate([bag, -one, jagged], axis=1)

    (made,) = programs(fn, table(50, 8), ids((6, 5), 50), jnp.zeros(6), ids((9,), 6))
    return made


GOOD = good()


def edit(op: str, change: Callable[[Instr], Instr | None], p: Program = GOOD) -> Program:
    """`p` with its first instruction `op` changed (None: removed)."""
    done: list[Instr] = []

    def code(instrs: tuple[Instr, ...]) -> tuple[Instr, ...]:
        out: list[Instr] = []
        for i in instrs:
            if i.body:
                i = dataclasses.replace(i, body=code(i.body))
            if i.op == op and not done:
                done.append(i)
                new = change(i)
                out += [] if new is None else [new]
            else:
                out.append(i)
        return tuple(out)

    classes = tuple(dataclasses.replace(c, code=code(c.code)) for c in p.classes)
    assert done, f"no {op} in the program"
    return dataclasses.replace(p, classes=classes)


def args(i: Instr, where: int, value: Any) -> Instr:
    return dataclasses.replace(i, args=(*i.args[:where], value, *i.args[where + 1 :]))


def with_reg(op: str, position: int, **changes: Any) -> Program:
    """The program with the register that is argument `position` of the first `op` changed."""
    for k, c in enumerate(GOOD.classes):
        stack = list(c.code)
        while stack:
            i = stack.pop(0)
            stack = [*i.body, *stack]
            if i.op == op:
                regs = list(c.regs)
                regs[i.args[position]] = dataclasses.replace(regs[i.args[position]], **changes)
                classes = list(GOOD.classes)
                classes[k] = dataclasses.replace(c, regs=tuple(regs))
                return dataclasses.replace(GOOD, classes=tuple(classes))
    raise AssertionError(f"no {op}")


def first(kind: str) -> int:
    return next(k for k, c in enumerate(GOOD.classes) if kind in str(c))


def fresh_reg(p: Program, cls: int, reg: Reg) -> tuple[Program, int]:
    c = p.classes[cls]
    classes = list(p.classes)
    classes[cls] = dataclasses.replace(c, regs=(*c.regs, reg))
    return dataclasses.replace(p, classes=tuple(classes)), len(c.regs)


def wrong_predicate() -> Program:
    """A select on integers: the mask's comparison replaced by its operand."""
    p, r = fresh_reg(GOOD, first("predicate"), Reg("pos", "bool", -1))
    return edit("PREDICATE", lambda i: args(i, 2, r), p)


def in_bag_space(op: str) -> Program:
    """An instruction of a region, moved in front of it."""
    k = first(op.lower())
    c = GOOD.classes[k]
    region = next(
        i for i in c.code if i.op in ("REGION", "JREGION") and any(j.op == op for j in i.body)
    )
    moved = next(j for j in region.body if j.op == op)
    classes = list(GOOD.classes)
    classes[k] = dataclasses.replace(
        c, code=(*region.body[: region.body.index(moved)], moved, *c.code)
    )
    return dataclasses.replace(GOOD, classes=tuple(classes))


def column(**changes: Any) -> Program:
    return dataclasses.replace(
        GOOD, columns=(dataclasses.replace(GOOD.columns[0], **changes), *GOOD.columns[1:])
    )


def slot_out_of_range(kind: str) -> Program:
    c = GOOD.columns[0]
    slots = GOOD.classes[c.cls].slots
    values = tuple(99 if s == kind else v for s, v in zip(slots, c.values, strict=True))
    return column(values=values)


def dims(**changes: Any) -> Program:
    return dataclasses.replace(
        GOOD, dims=(dataclasses.replace(GOOD.dims[0], **changes), *GOOD.dims[1:])
    )


def float_rows() -> Program:
    """A lookup by a number that is no integer."""
    k = next(n for n, c in enumerate(GOOD.classes) if "search" in str(c))
    p, r = fresh_reg(GOOD, k, Reg("bag", "float32", -1))
    c = p.classes[k]
    code = [replaced(i, "INDEX", 2, r) for i in c.code]
    const = Instr("CONST", (r, c.slots.index(IMM)))
    changed = dataclasses.replace(c, code=(const, *code))
    return dataclasses.replace(p, classes=(*p.classes[:k], changed, *p.classes[k + 1 :]))


def replaced(i: Instr, op: str, where: int, value: Any) -> Instr:
    return args(i, where, value) if i.op == op else i


def float_segments() -> Program:
    """The jagged bag's segment ids made floats, with a load of floats."""
    k = first("jregion")
    p, r = fresh_reg(GOOD, k, Reg("pos", "float32", -1))
    p = edit("JREGION", lambda i: args(i, 1, r), p)
    return edit("JREGION", lambda i: dataclasses.replace(i, body=(*i.body, bogus_const(p, r))), p)


def bogus_const(p: Program, register: int) -> Instr:
    return Instr("CONST", (register, p.classes[first("jregion")].slots.index(IMM)))


BROKEN: dict[str, tuple[Callable[[], Program], str]] = {
    "a dim of a later one": (lambda: dims(kind="add", a=5, b=0), r"dim 0 refers to a later one"),
    "a dim of no axis": (
        lambda: dims(kind="operand_axis", a=0, b=7),
        r"dim 0 reads an axis that does not exist",
    ),
    "a dim of no operand": (
        lambda: dims(kind="operand_axis", a=77, b=0),
        r"dim 0 reads an axis that does not exist",
    ),
    "no such class": (lambda: column(cls=17), r"column 0 has no class"),
    "a value too few": (
        lambda: column(values=GOOD.columns[0].values[:-1]),
        r"column 0 has \d+ values for \d+ slots",
    ),
    "no such operand": (
        lambda: slot_out_of_range("OPERAND"),
        r"column 0: OPERAND 99 does not exist",
    ),
    "no such result": (lambda: slot_out_of_range("RESULT"), r"column 0: RESULT 99 does not exist"),
    "no such dim": (lambda: slot_out_of_range("DIM"), r"column 0: DIM 99 does not exist"),
    "unknown instruction": (
        lambda: edit("STORE", lambda i: dataclasses.replace(i, op="FROB")),
        r"class \d+: unknown instruction FROB",
    ),
    "read before written": (
        lambda: edit("LOAD", lambda i: None),
        r"class \d+, .*: r\d+ is read before it is written",
    ),
    "a region in a region": (
        lambda: edit("REGION", lambda i: dataclasses.replace(i, body=(i, *i.body))),
        r"a region in a region",
    ),
    "a jagged region over two axes": (
        lambda: dataclasses.replace(
            GOOD,
            classes=tuple(
                dataclasses.replace(c, outer=(*c.outer, c.outer[0])) if "jregion" in str(c) else c
                for c in GOOD.classes
            ),
        ),
        r"jregion .*: jagged bags have one axis",
    ),
    "a result in the wrong space": (
        lambda: with_reg("INDEX", 1, space="bag"),
        r"index .*: r\d+ is in bag space, not pos",
    ),
    "pooling into a position": (
        lambda: with_reg("POOL", 2, space="pos"),
        r"pool .*: r\d+ is in pos space, not bag",
    ),
    "no such binary operation": (
        lambda: edit("BINARY", lambda i: args(i, 0, "pow")),
        r"binary pow .*: no such operation",
    ),
    "two dtypes": (
        lambda: with_reg("BINARY", 3, dtype="int16"),
        r"binary .*: operands of two dtypes",
    ),
    "a comparison that is no bool": (
        lambda: with_reg("PREDICATE", 2, dtype="int32"),
        r": result is int32, not bool|the mask is int32",
    ),
    "no such unary operation": (
        lambda: edit("UNARY", lambda i: args(i, 0, "tan")),
        r"unary tan .*: no such operation",
    ),
    "a mask never made": (wrong_predicate, r"predicate .*: r\d+ is read before it is written"),
    "a float row number": (
        float_rows,
        r"index .*: a row number of type float32",
    ),
    "narrow row numbers": (
        lambda: with_reg("INDEX", 1, dtype="int32"),
        r"index .*: row numbers are int64",
    ),
    "a lookup of one number": (
        lambda: with_reg("TAKE", 1, width=-1),
        r"take .*: a lookup gives rows",
    ),
    "pooling outside a region": (
        lambda: in_bag_space("POOL"),
        r"pos space, not bag|pooling happens in a region",
    ),
    "accumulating outside a region": (
        lambda: in_bag_space("ACC"),
        r"pos space, not bag|accumulation happens in a region",
    ),
    "a store of another dtype": (
        lambda: dataclasses.replace(GOOD, results=(("int32", 2),)),
        r"column \d+, class \d+, store .*: float32 for an array of int32",
    ),
    "a store of another rank": (
        lambda: edit("STORE", lambda i: args(i, 3, 0)),
        r"store .*: \d strides for \d axes",
    ),
    "a store of too few strides": (
        lambda: edit("STORE", lambda i: Instr("STORE", (*i.args[:4], i.args[-1]))),
        r"store .*: 0 strides for 1 axes",
    ),
    "a load of another dtype": (
        lambda: dataclasses.replace(
            GOOD,
            operands=tuple(("int16" if d == "int32" else d, n) for d, n in GOOD.operands),
        ),
        r"column \d+, class \d+, load .*: int32 for an array of int16",
    ),
    "a load of another rank": (
        lambda: edit("LOAD", lambda i: Instr("LOAD", i.args[:-1])),
        r"load .*: \d strides for \d axes",
    ),
    "a table of another dtype": (
        lambda: dataclasses.replace(
            GOOD,
            operands=tuple(
                ("float64" if n == 2 and d == "float32" else d, n) for d, n in GOOD.operands
            ),
        ),
        r"column \d+, class \d+, (take|pool) .*: float32 for an array of float64",
    ),
    "a constant that is a size": (
        lambda: edit(
            "CONST", lambda i: args(i, 1, GOOD.classes[first("const")].slots.index("OPERAND"))
        ),
        r"const .*: s\d+ is a OPERAND slot, not a number's",
    ),
    "a size that is an array": (
        lambda: edit("LOAD", lambda i: args(i, 2, i.args[1])),
        r"load .*: s\d+ is a OPERAND slot, not a size's",
    ),
    "an array that is a size": (
        lambda: edit("LOAD", lambda i: args(i, 1, i.args[2])),
        r"load .*: s\d+ is no OPERAND slot",
    ),
    "a unary result of another dtype": (
        lambda: with_reg("UNARY", 1, dtype="int32"),
        r"unary neg .*: result is int32, not float32",
    ),
    "a bucket that is no int32": (
        lambda: with_reg("SEARCH", 2, dtype="int64"),
        r"search .*: a bucket's number of type int64",
    ),
    "splits of few bits": (
        lambda: edit("SEARCH", lambda i: Instr("SEARCH", ("SPLITS", *i.args[1:], i.args[-1]))),
        r"search .*: splits or lengths of type float32",
    ),
    "a search without its total": (
        lambda: edit("SEARCH", lambda i: Instr("SEARCH", ("LENGTHS", *i.args[1:]))),
        r"search .*: 7 fields",
    ),
    "a float bag number": (float_segments, r"jregion .*: a bag's number of type float32"),
    "accumulating another dtype": (
        lambda: with_reg("ACC", 1, dtype="int64"),
        r"acc .*: accumulates another dtype",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rejects(name: str) -> None:
    make, message = BROKEN[name]
    verify.program(GOOD)
    with pytest.raises(VerifyError, match=message) as caught:
        verify.program(make())
    assert isinstance(caught.value, (RecomError, AssertionError))
    assert "please report it" in str(caught.value)


def test_select_and_expand_are_typed() -> None:
    """Rules of instructions that the program above does not hold."""
    p, r = fresh_reg(GOOD, 0, Reg("bag", "float32", -1))
    p, q = fresh_reg(p, 0, Reg("bag", "int32", -1))
    p, pos = fresh_reg(p, 0, Reg("pos", "int32", -1))
    k = p.classes[0].slots.index(IMM)
    const = (Instr("CONST", (r, k)), Instr("CONST", (q, k)))

    def run(*code: Instr, region: bool = False) -> None:
        c = dataclasses.replace(
            p.classes[0], code=(*const, Instr("REGION", (0,), code)) if region else (*const, *code)
        )
        verify.program(dataclasses.replace(p, classes=(c, *p.classes[1:])))

    with pytest.raises(VerifyError, match="the predicate is float32"):
        run(Instr("SELECT", (r, r, r, r)))
    with pytest.raises(VerifyError, match="another dtype"):
        run(Instr("EXPAND", (pos, r)), region=True)
    run(Instr("EXPAND", (pos, q)), region=True)


def test_the_pipeline_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On with the option or RECOM_VERIFY, off by default."""
    seen: list[Program] = []
    monkeypatch.setattr(verify, "program", seen.append)

    def compile_once(verifies: bool | None) -> int:
        seen.clear()
        traced = trace.trace(lambda t, i: t[i], (table(5, 4), ids((3,), 5)), ("t", "i"))
        pipeline.compile_jaxpr(traced, recom_jax.Options(verify=verifies))
        return len(seen)

    assert compile_once(True) == 1
    assert compile_once(False) == 0
    monkeypatch.setenv("RECOM_VERIFY", "0")
    assert compile_once(None) == 0
    monkeypatch.setenv("RECOM_VERIFY", "1")
    assert compile_once(None) == 1
    assert isinstance(seen[0].columns[0], ColumnDef)
