"""The report: its fields, its text, its source lines; and that making it runs and compiles nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax.explain import ColumnReport, Report
from tests.helpers import ids, table

T, I2 = table(50, 8), ids((6, 5), 50)
I1 = I2[:, 0]


def explain(fn: Callable[..., Any], *args: Any, **options: Any) -> Report:
    report = recom_jax.optimize(fn, options=recom_jax.Options(verify=True, **options)).explain(
        *args
    )
    assert isinstance(report, Report)
    return report


def line_of(fn: Callable[..., Any], text: str) -> str:
    """``file:line`` of the first line of `fn` that holds `text`."""
    lines, start = inspect.getsourcelines(fn)
    return f"{__file__}:{start + next(k for k, line in enumerate(lines) if text in line)}"


# ---- fields ------------------------------------------------------------------------------------------------------


def model(params: Any, batch: Any) -> Any:
    mask = batch["ids"] >= 0
    rows = jnp.where(mask[..., None], params["items"][jnp.where(mask, batch["ids"], 0) % 50], 0)
    mean = rows.sum(axis=1) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
    best = params["items"][batch["ids"]].max(axis=1)
    return jnp.concatenate([mean, best, params["users"][batch["user"]]], axis=1)


PARAMS = {"items": T, "users": table(20, 4).astype(jnp.bfloat16).astype(jnp.float32)}
BATCH = {"ids": I2, "user": I1}


def test_fields() -> None:
    r = explain(model, PARAMS, BATCH)
    assert isinstance(r, Report)
    assert (r.num_columns, r.num_fused, r.num_custom_calls) == (3, 3, 1)
    assert all(isinstance(c, ColumnReport) for c in r.columns)
    mean, best, user = r.columns
    assert mean == ColumnReport(
        "params['items']#0",
        "params['items']",
        "fused",
        "",
        line_of(model, "rows = "),
        "mean",
        8,
        50,
        "float32",
        mean.rewrites,
        mean.ids,
        "row 0..49, always in the table",
        mean.classes,
        50 * 8 * 4,
    )
    assert len(mean.classes) == 1 and mean.classes != best.classes
    assert "facts-under-mask" in mean.rewrites
    assert "rem(" in mean.ids
    assert (best.name, best.combiner, best.source) == (
        "params['items']#1",
        "max",
        line_of(model, "best ="),
    )
    assert (user.name, user.table, user.dim, user.rows, user.combiner) == (
        "params['users']",
        "params['users']",
        4,
        20,
        "none",
    )
    assert r.source.startswith("call 0 (level 0)\nprogram: ")
    assert sum(map(sum, r.classes)) >= 3
    assert r.function == "model"


@pytest.mark.parametrize(
    ("combiner", "fn"),
    [
        ("none", lambda t, i: t[i]),
        ("sum", lambda t, i: t[i].sum(1)),
        ("max", lambda t, i: t[i].max(1)),
        ("min", lambda t, i: t[i].min(1)),
        ("mean", lambda t, i: t[i].mean(1)),
        ("sum", lambda t, i: (t[i] * (i > 0)[..., None]).sum(1)),
        ("sum", lambda t, i: jnp.where((i > 0)[..., None], t[i], 0).sum(1)),
        (
            "weighted sum",
            lambda t, i: (t[i] * jnp.sqrt(i.astype(jnp.float32) + 50)[..., None]).sum(1),
        ),
        (
            "sum",
            lambda t, i: jax.ops.segment_sum(
                t[i.reshape(-1)], jnp.repeat(jnp.arange(6), 5), num_segments=6
            ),
        ),
        ("max", lambda t, i: jax.ops.segment_max(t[i.reshape(-1)], i.reshape(-1), num_segments=6)),
    ],
)
def test_combiners(combiner: str, fn: Callable[..., Any]) -> None:
    (c,) = explain(fn, T, I2).columns
    assert (c.status, c.combiner) == ("fused", combiner)


def test_names() -> None:
    """Paths of arguments, keywords, constants; a serial number for a table read more than once."""
    const = np.asarray(T) * 2

    def fn(tables: Any, i: Any, *, extra: Any) -> Any:
        return tables[0][i], tables[1]["t"][i], extra[i], jnp.asarray(const)[i], tables[0][i + 1]

    r = recom_jax.optimize(fn).explain([T, {"t": T}], I1, extra=T)
    assert [c.name for c in r.columns] == [
        "tables[0]#0",
        "tables[1]['t']",
        "extra",
        "constant[0]",
        "tables[0]#1",
    ]
    assert r.num_fused == 5


def test_reads_that_are_equal_are_two_columns() -> None:
    """Counted as written, before common reads are merged."""
    r = explain(lambda t, i: t[i] + t[i], T, I1)
    assert (r.num_columns, r.num_fused) == (2, 2)
    assert r.source.count(" take ") == 1


# ---- source lines ------------------------------------------------------------------------------------------------


def with_brackets(t: Any, i: Any) -> Any:
    j = i + 1
    return t[j]  # brackets


def with_take(t: Any, i: Any) -> Any:
    j = i + 1
    return jnp.take(t, j, axis=0)  # take


def with_at(t: Any, i: Any) -> Any:
    return t.at[i].get(mode="clip")  # at


def with_one_hot(t: Any, i: Any) -> Any:
    hot = jax.nn.one_hot(i, 50)
    return hot @ t  # dot


def with_slice(t: Any, i: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(t, i[0], 1)  # slice


def helper(t: Any, i: Any) -> Any:
    return t[i]  # inside


def nested(t: Any, i: Any) -> Any:
    return jax.jit(helper)(t, jax.jit(lambda x: x * 2)(i)) + 1.0


def vmapped(t: Any, i: Any) -> Any:
    return jax.vmap(lambda k: t[k])(i)  # mapped


def with_scan(t: Any, i: Any) -> Any:
    return jax.lax.scan(lambda c, k: (c + t[k], None), jnp.zeros(8), i)[0]  # scanned


@pytest.mark.parametrize(
    ("fn", "where", "text"),
    [
        (with_brackets, with_brackets, "# brackets"),
        (with_take, with_take, "# take"),
        (with_at, with_at, "# at"),
        (with_one_hot, with_one_hot, "# dot"),
        (with_slice, with_slice, "# slice"),
        (nested, helper, "# inside"),
        (vmapped, vmapped, "# mapped"),
        (with_scan, with_scan, "# scanned"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_source_lines_are_the_users(
    fn: Callable[..., Any], where: Callable[..., Any], text: str
) -> None:
    (c,) = explain(fn, T, I1).columns
    assert c.source == line_of(where, text)


def test_source_line_of_every_call_site() -> None:
    """jnp.take is traced once and shared: each column still points to its own caller."""

    def fn(t: Any, i: Any) -> Any:
        a = jnp.take(t, i, axis=0)  # first
        b = jnp.take(t, i + 1, axis=0)  # second
        return a, b

    r = explain(fn, T, I1)
    assert [c.source for c in r.columns] == [line_of(fn, "# first"), line_of(fn, "# second")]


# ---- what is not fused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (with_scan, "scan"),
        (lambda t, i: jax.lax.cond(i[0] > 0, lambda: t[i], lambda: t[i + 1]), "cond"),
        (
            lambda t, i: jax.lax.while_loop(
                lambda c: c[0] < 2, lambda c: (c[0] + 1, t[i]), (0, jnp.zeros((6, 8)))
            )[1],
            "while",
        ),
    ],
)
def test_reasons(fn: Callable[..., Any], reason: str) -> None:
    r = explain(fn, T, I1)
    assert r.num_fused == 0
    assert r.num_custom_calls == 0
    assert r.columns
    for c in r.columns:
        assert c.status == "xla"
        assert reason in c.reason
        assert c.combiner == "-"
    text = str(r)
    assert f"0 of {r.num_columns} embedding columns fused" in text
    assert reason in text


def test_one_bad_column_is_named_and_costs_only_itself() -> None:
    def fn(t: Any, u: Any, i: Any) -> Any:
        return t[i], jax.lax.fori_loop(0, 3, lambda k, c: c + u[i + k], jnp.zeros((6, 8)))

    r = explain(fn, T, table(60, 8), I1)
    assert {(c.table, c.status) for c in r.columns} == {("t", "fused"), ("u", "xla")}


def test_nothing_to_fuse() -> None:
    r = explain(lambda x: x * 2.0, T)
    assert (r.num_columns, r.num_fused, r.num_custom_calls, r.columns, r.source) == (
        0,
        0,
        0,
        (),
        "",
    )
    assert "nothing to fuse" in str(r)


# ---- text --------------------------------------------------------------------------------------------------------


def many(tables: Any, i: Any) -> Any:
    out = [t[i] for t in tables]
    first = jax.lax.scan(lambda c, k: (c + tables[0][k], None), jnp.zeros(8), i)[0]
    return jnp.concatenate(out, axis=1), first


def test_text_groups_equal_neighbours_and_keeps_what_is_not_fused() -> None:
    tables = [table(50, 8, seed=k) for k in range(30)]
    r = explain(many, tables, I1)
    text = r.to_text()
    assert text == str(r)
    assert "30 of 31 embedding columns fused into 1 custom call" in text
    assert "tables[0]#0 .. tables[29] (30)" in text
    assert "50 x 8 float32" in text
    assert re.search(r"xla.*test_explain\.py:\d+.*scan", text)
    assert all(line == line.rstrip() for line in text.splitlines())
    full = r.to_text(limit=None)
    assert all(f"tables[{k}]" in full for k in range(30))
    assert "more lines" not in full


def test_text_limit() -> None:
    def fn(tables: Any, i: Any) -> Any:
        return [t[i + k] * float(k) for k, t in enumerate(tables)], many(tables[:1], i)[1]

    r = explain(fn, [table(20 + k, 8) for k in range(9)], I1)
    text = r.to_text(limit=3)
    assert "... and 7 more lines" in text
    assert "scan" in text  # the column that is not fused is never cut off
    assert "scan" in r.to_text(limit=1)


# ---- it runs nothing ---------------------------------------------------------------------------------------------


def test_explain_of_shapes_runs_and_compiles_nothing() -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (PARAMS, BATCH))
    explain(model, *shapes)  # what JAX and the templates trace once a process
    seen: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: seen.append(event)
    )
    r = recom_jax.optimize(model).explain(*shapes)
    assert not [name for name in seen if "backend_compile" in name], seen
    jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert [name for name in seen if "backend_compile" in name], "the listener hears nothing"
    assert r.num_fused == 3
    calls = recom_jax.stats()["calls"]
    recom_jax.optimize(model).explain(PARAMS, BATCH)
    assert recom_jax.stats()["calls"] == calls


def test_explain_reads_no_values() -> None:
    """Concrete arguments and their shapes give the same report."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (PARAMS, BATCH))

    def plain(r: Report) -> Any:
        return [(c.name, c.status, c.combiner, c.rewrites, c.source) for c in r.columns], r.classes

    assert plain(explain(model, *shapes)) == plain(explain(model, PARAMS, BATCH))


def test_explain_is_remembered() -> None:
    f = recom_jax.optimize(model)
    before = recom_jax.stats()["traces"]
    assert f.explain(PARAMS, BATCH) is f.explain(PARAMS, BATCH)
    assert recom_jax.stats()["traces"] == before + 1
    other = {**BATCH, "user": I1[:3], "ids": I2[:3]}
    assert f.explain(PARAMS, other).num_fused == 3


def test_explain_wrong_arguments() -> None:
    f = recom_jax.optimize(model)
    with pytest.raises(TypeError, match="model"):
        f.explain(PARAMS)
    with pytest.raises(recom_jax.RecomError):
        f.explain(PARAMS, {"ids": "no array"})


def test_a_report_is_of_the_types_that_jax_has_now() -> None:
    optimized = recom_jax.optimize(lambda t, i: t[i])
    args = np.ones((5, 2)), 3
    assert optimized.explain(*args).columns[0].dtype == "float32"
    with jax.enable_x64(True):
        assert optimized.explain(*args).columns[0].dtype == "float64"


# ---- inside loops and branches -----------------------------------------------------------------------------------

U = table(50, 8, seed=1)  # of the shape of T
LOOPS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "scan": (
        lambda t, u, i: jax.lax.scan(lambda c, x: (c + u[x].sum() - t[x].sum(), None), 0.0, i),
        ["u", "t"],
    ),
    "cast": (
        lambda t, u, i: jax.lax.map(lambda x: u.astype(jnp.bfloat16)[x].sum(), i),
        ["u"],
    ),
    "one_hot": (lambda t, u, i: jax.lax.map(lambda x: jax.nn.one_hot(x, 50) @ u, i), ["u"]),
    "positions": (
        lambda t, u, i: jax.lax.fori_loop(0, 5, lambda k, c: c + t[i[:, k]].sum(), 0.0),
        ["t"],
    ),
    "branches": (
        lambda t, u, i: jax.lax.switch(i[0, 0], [lambda: u[i], lambda: t[i], lambda: u[i] * 2]),
        ["u", "t", "u"],
    ),
    "while": (
        lambda t, u, i: jax.lax.while_loop(
            lambda s: t[i[0, 0]].sum() > s[1], lambda s: (s[0] + 1, s[1] + u[i[1]].sum()), (0, 0.0)
        ),
        ["t", "u"],
    ),
    "nested": (
        lambda t, u, i: jax.lax.map(lambda x: jax.lax.map(lambda y: jnp.take(u, y, axis=0), x), i),
        ["u"],
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_reads_in_bodies_name_their_own_table(name: str) -> None:
    fn, tables = LOOPS[name]
    report = explain(fn, T, U, I2)
    assert [c.table for c in report.columns] == tables, report
    inside = {"branches": "cond", "while": "while"}.get(name, "scan")
    assert {c.reason for c in report.columns} == {f"the lookup is inside {inside}"}
    assert all(re.fullmatch(rf"{re.escape(__file__)}:\d+", c.source) for c in report.columns)


def test_what_is_read_of_scanned_tables_is_named_below() -> None:
    def fn(tables: Any, i: Any) -> Any:
        return jax.lax.scan(lambda c, t: (c + t[i].sum(), None), 0.0, tables)[0]

    report = explain(fn, jnp.stack([T, U]), I2)
    assert [(c.table, c.status) for c in report.columns] == [("tables", "xla")], report
    (other,) = explain(lambda t, u, i: fn(jnp.stack([t, u]), i), T, U, I2).others
    assert other[1] == "its table is computed in the function, not an argument"


def test_a_body_that_our_rules_fail_on_costs_no_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr("recom_jax.detect_refused.inner_reads", fails)
    fn = lambda t, i: (t[i], jax.lax.map(lambda x: t[x].sum(), i))  # noqa: E731
    options = recom_jax.Options(verify=False)
    report = recom_jax.optimize(fn, options=options).explain(T, I2)
    assert [c.status for c in report.columns] == ["fused"]


def test_a_column_of_ids_that_is_chosen_at_run_time_is_no_table() -> None:
    report = explain(lambda t, i, k: t[i[:, k]], T, I2, 3)
    assert [(c.table, c.status) for c in report.columns] == [("t", "fused")], report
    report = explain(lambda t, k: t[k, 2], T, 3)
    assert [c.reason for c in report.columns] == ["a slice of part of a row"], report
