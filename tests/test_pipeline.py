"""The stages together: golden printed forms, dumps, values forced back to XLA, one program for all sizes, ablation.

``python -m tests.test_pipeline --regenerate`` writes tests/golden/*.txt anew; read the difference before committing.
"""

from __future__ import annotations

import pathlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import ir, lowering, pipeline, schedule, trace
from recom_jax.emit import Emitter
from recom_jax.emit_code import Space
from recom_jax.errors import EncodeError
from recom_jax.simplify import NAMES
from tests.helpers import Bag, assert_same, check, ids, table

GOLDEN = pathlib.Path(__file__).parent / "golden"
STAGES = ("detect", "simplify", "program0", "splice")

# ---- the model whose stages are kept -----------------------------------------------------------------------------


def masked_mean(items: Any, ids: Any) -> Any:
    """A padded bag: ids below zero are padding, the others are hashed; the mean of what is there."""
    mask = ids >= 0
    rows = jnp.take(items, jnp.where(mask, ids, 0) % 1000, axis=0)
    rows = jnp.where(mask[..., None], rows, 0)
    return rows.sum(axis=1) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def bucketized(ages: Any, x: Any) -> Any:
    return ages[jnp.digitize(x, np.arange(0, 100, 10, dtype=np.float32))]


def small_model(params: Any, batch: Any) -> Any:
    columns = [masked_mean(params["items"], batch["ids"]), bucketized(params["ages"], batch["age"])]
    return jnp.concatenate(columns, axis=1)


def small_inputs(batch: int = 4, length: int = 3, dim: int = 8) -> tuple[Any, Any]:
    params = {"items": table(1000, dim), "ages": table(11, 4)}
    return params, {
        "ids": ids((batch, length), 1000, odd=True),
        "age": jnp.linspace(-5, 120, batch),
    }


def compiled(
    fn: Callable[..., Any], *args: Any, options: recom_jax.Options | None = None
) -> pipeline.Compiled:
    leaves, tree = jax.tree_util.tree_flatten(args)

    def flat(*leaves: Any) -> Any:
        return fn(*jax.tree_util.tree_unflatten(tree, leaves))

    traced = trace.trace(flat, leaves, tuple(f"a{k}" for k in range(len(leaves))))
    return pipeline.compile_jaxpr(traced, options or recom_jax.Options(verify=True))


def stages(fn: Callable[..., Any], *args: Any) -> dict[str, str]:
    """The printed form of each stage."""
    c = compiled(fn, *args)
    with ir.numbered():
        spliced = re.sub(r"<\d+ bytes, [0-9a-f]+>", "<the encoded program>", str(c.jaxpr))
        forms = {
            "trace": str(c.traced),
            "detect": str(c.detected),
            "simplify": str(c.simplified),
            "splice": spliced,
        }
    return {**forms, **{f"program{level}": str(s) for level, s, _ in c.calls}}


def test_variables_are_numbered_as_they_are_met() -> None:
    first, second = (stages(small_model, *small_inputs()) for _ in range(2))
    assert first == second
    assert "%0" in first["detect"]


def test_a_one_hot_product_with_one_of_several_tables_is_refused() -> None:
    """Its row numbers say where one table ends; shifted, they would say so of another one."""
    pool, var = ir.Pool(), jax.make_jaxpr(lambda x: x)(1.0).jaxpr.invars[0]
    take = pool.take(
        var,
        "float32",
        idx=pool.load(var, "int32", 0, (1, 0)),
        rows=4,
        row_stride=2,
        base=0,
        cols=(0, 1),
        row_shift=(4, 0),
        mode="fill",
        fill=0.0,
        one_hot=True,
    )
    emitter = Emitter(pool, lambda d: d, lambda v: 0, [], lambda v: None)
    with pytest.raises(EncodeError, match="one of several stacked tables"):
        emitter.emit(take, Space("bag", 2, (0,), 1, frozenset(), []))


STEPS = {
    "steps": np.arange(4, dtype=np.int32) * 7,
    "steps down": np.array([9, 6, 3, 0], np.int32),
    "one number": np.full(4, 3, np.int32),
    "64 bits": np.arange(4, dtype=np.uint32) + np.uint32(2**31),
    "no steps": np.array([0, 7, 14, 22], np.int32),
    "two axes": np.arange(8, dtype=np.int32).reshape(2, 4)[:, None],
    "far apart": np.array([-(2**31), 2**31 - 1, 0, 5], np.int32),
}


@pytest.mark.parametrize("name", STEPS)
def test_constants_in_equal_steps_are_computed(name: str) -> None:
    """XLA would make them, as operands, in a kernel in front of the call."""
    starts = STEPS[name]

    def model(t: Any, i: Any) -> Any:
        return t[i + starts]

    args = table(40, 8), ids((5, 4), 12)
    check(model, *args, columns=1)
    call = compiled(model, *args).calls[0][1].program
    constant = name in ("no steps", "two axes", "far apart")
    assert len(call.operands) == 2 + constant
    assert "AFFINE" in str(call.classes) or constant


@pytest.mark.parametrize("stage", STAGES)
def test_golden(stage: str) -> None:
    """The same on every JAX version: what differs between versions ends in front of detection."""
    got = stages(small_model, *small_inputs())[stage]
    want = (GOLDEN / f"{stage}.txt").read_text()
    assert got + "\n" == want, (
        f"{stage} changed: python -m tests.test_pipeline --regenerate, and read the difference"
    )


def test_the_golden_model_is_right() -> None:
    check(small_model, *small_inputs(), columns=2, bound=Bag(3))


# ---- dumps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["option", "environment"])
def test_dumps_are_written(
    how: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made" / "by us"
    if how == "environment":
        monkeypatch.setenv("RECOM_DUMP_DIR", str(folder))
    options = recom_jax.Options(dump_dir=str(folder) if how == "option" else None, verify=True)
    recom_jax.optimize(small_model, options=options).explain(*small_inputs())
    files = sorted(f.name for f in folder.iterdir())
    assert [f.split("_", 1)[1] for f in files] == [
        "0_trace.txt",
        "1_detect.txt",
        "2_simplify.txt",
        "3_splice.txt",
        "4_program0.txt",
    ]
    text = {f.split("_", 2)[2]: (folder / f).read_text() for f in files}
    assert "{ lambda" in text["trace.txt"]
    assert text["detect.txt"].startswith("1 fused results, 0 equations left to XLA")
    assert "search.uniform.right" in text["simplify.txt"]
    assert text["program0.txt"].startswith("program: ")
    assert "recom_fused" in text["splice.txt"]


def test_dumps_of_two_traces_do_not_collide(tmp_path: pathlib.Path) -> None:
    f = recom_jax.optimize(small_model, options=recom_jax.Options(dump_dir=str(tmp_path)))
    f.explain(*small_inputs(4))
    f.explain(*small_inputs(5))
    assert len(list(tmp_path.iterdir())) == 10


def test_an_unwritable_dump_folder_only_warns(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "_WARNED", set())
    blocked = tmp_path / "a file"
    blocked.write_text("")
    f = recom_jax.optimize(
        small_model, options=recom_jax.Options(dump_dir=str(blocked / "below"), verify=True)
    )
    with pytest.warns(RuntimeWarning, match="cannot write stage dumps"):
        got = f(*small_inputs())
    assert_same(got, jax.jit(small_model)(*small_inputs()), 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once a process
        f.explain(*small_inputs(6))


# ---- what a later stage cannot express ---------------------------------------------------------------------------


def strided(t: Any, u: Any, i: Any) -> Any:
    """Every second number of a row: no table row of the format, so the concatenation and the slice go to XLA."""
    return jnp.concatenate([t[i][:, ::2], u[i]], axis=1)


def test_a_value_that_cannot_be_expressed_goes_back_to_xla() -> None:
    t, u, i = table(20, 8), table(20, 4), ids((6,), 20, odd=True)
    c = compiled(strided, t, u, i)
    assert set(c.forced.values()) == {"a table row read with a stride"}
    report = check(strided, t, u, i, columns=2)
    assert report.num_fused == 2  # the reads themselves need no stride


def test_a_forced_read_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first schedule of the read of `t` fails: it stays in XLA, the other column does not."""
    real = schedule.schedule
    t, u, i = table(20, 8), table(30, 8), ids((6,), 20, odd=True)

    def failing(detected: Any, outs: Any) -> Any:
        for o in outs:
            if o.val.expr is not None and any(
                isinstance(x, ir.Take) and x.rows == 20 for x in ir.walk(o.val.expr)
            ):
                raise schedule.PartError(o.var, "the moon is full")
        return real(detected, outs)

    monkeypatch.setattr(pipeline, "schedule", failing)

    def fn(t: Any, u: Any, i: Any) -> Any:
        return t[i], u[i] * 2.0

    report = check(fn, t, u, i, columns=2, fused=1, leaves_gather=True)
    assert [(c.table, c.status, c.reason) for c in report.columns] == [
        ("t", "xla", "the moon is full"),
        ("u", "fused", ""),
    ]
    assert "the moon is full" in report.to_text()


def test_many_parts_that_cannot_be_expressed_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More outer products than there are attempts: what they are made of is fused, and the column beside them."""
    seen = []
    monkeypatch.setattr(
        pipeline, "detect", lambda *args, real=pipeline.detect: seen.append(args) or real(*args)
    )

    def fn(t: Any, x: Any) -> Any:
        pairs = [(t[x + k], t[2 * x + k]) for k in range(70)]
        return [a[:, :, None] * b[:, None, :] for a, b in pairs], t[x % 7]

    report = check(fn, table(40, 3), ids((4,), 20), columns=141, bound=Bag(1))
    assert report.num_fused == 141
    assert len(seen) <= 3 * 2  # the call, and the report


def test_nothing_can_be_expressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value is refused, one by one: the function runs as plain JAX, in bounded time."""

    def failing(detected: Any, outs: Any) -> Any:
        raise schedule.PartError(outs[0].var, "not today")

    monkeypatch.setattr(pipeline, "schedule", lambda d, outs: failing(d, outs) if outs else None)
    report = check(
        small_model,
        *small_inputs(),
        columns=2,
        fused=0,
        calls=0,
        bound=Bag(3),
        leaves_gather=True,
        leaves_while=True,
    )
    assert {c.reason for c in report.columns} <= {"not today", "no result of a call is made of it"}


def test_a_defect_of_ours_costs_fusion_not_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(pipeline, "simplify", broken)
    monkeypatch.setattr(lowering, "_WARNED", set())
    f = recom_jax.optimize(small_model, options=recom_jax.Options(verify=False))
    with pytest.warns(RuntimeWarning, match="a defect"):
        got = f(*small_inputs())
    assert_same(got, jax.jit(small_model)(*small_inputs()), 1e-3)
    with pytest.raises(ZeroDivisionError):  # the test-suite wants to know
        compiled(small_model, *small_inputs())


# ---- one program for all sizes -----------------------------------------------------------------------------------


def test_sizes_that_coincide_give_the_same_program() -> None:
    """B = L = D, B = 1000 (the table's rows), B = 11 and others: a size is known by where it comes from."""
    digests = {
        (b, n): compiled(small_model, *small_inputs(b, n)).calls[0][2].digest
        for b, n in ((8, 8), (4, 3), (8, 3), (3, 8), (1000, 4), (11, 11), (4, 1000))
    }
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize(
    ("batch", "length"), [(8, 8), (1, 3), (3, 1), (1, 1), (2, 8), (0, 3), (3, 0)]
)
def test_sizes_that_coincide_give_right_numbers(batch: int, length: int) -> None:
    inputs = small_inputs(batch, length)
    if batch * length:
        # What is in bags of one is no sum: XLA divides it, as it multiplies by an inverse where one count is for a row.
        check(small_model, *inputs, bound=Bag(length), calls=1 if length > 1 else None)
    else:  # empty batch, empty bags: nothing to say of what is fused
        assert_same(recom_jax.optimize(small_model)(*inputs), jax.jit(small_model)(*inputs))


def test_a_program_is_prepared_once() -> None:
    def fn(t: Any, i: Any) -> Any:
        return t[(i * 977) % 13] * 3.0

    before = recom_jax.stats()["programs_prepared"]
    f = recom_jax.optimize(fn)
    for n in (2, 5, 13, 40):
        f(table(13, 4), ids((n,), 50))
    assert recom_jax.stats()["programs_prepared"] == before + 1


# ---- ablation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [*sorted(NAMES), "everything"])
def test_ablation(off: str) -> None:
    """Any rewrite can be left out, and all of them: the numbers stay."""
    disable = tuple(sorted(NAMES)) if off == "everything" else (off,)
    options = recom_jax.Options(disable=disable, verify=True)
    check(small_model, *small_inputs(5), bound=Bag(3), options=options, columns=2)


def test_ablation_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOM_DISABLE", "uniform-bucketize, facts-under-mask")
    report = recom_jax.optimize(small_model).explain(*small_inputs())
    assert not {"uniform-bucketize", "facts-under-mask"} & {
        r for c in report.columns for r in c.rewrites
    }


def test_each_rewrite_that_fires_leaves_less_code() -> None:
    """The program without rewrites is longer; with them it is as short as it gets."""

    def size(*disable: str) -> int:
        c = compiled(
            masked_mean,
            table(1000, 8),
            ids((4, 3), 1000),
            options=recom_jax.Options(disable=disable, verify=True),
        )
        return str(c.calls[0][1].program.classes[0]).count("\n")

    assert size(*sorted(NAMES)) > size("facts-under-mask") > size()
    assert size() <= 16


def regenerate() -> None:
    GOLDEN.mkdir(exist_ok=True)
    forms = stages(small_model, *small_inputs())
    for stage in STAGES:
        (GOLDEN / f"{stage}.txt").write_text(forms[stage] + "\n")


if __name__ == "__main__" and "--regenerate" in sys.argv:
    regenerate()
