"""The report: what was fused, what was not and why, as a table."""

from __future__ import annotations

import collections
import dataclasses
import io
import math
import os
import pathlib
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recom_jax import compat, ir
from recom_jax.explain_stages import Result, Stage, lookups_of, results_of, stages_of
from recom_jax.linear import NO_TABLE
from recom_jax.lowering import FusedCall, fused_p, unfused_on_cuda
from recom_jax.pipeline import Compiled
from recom_jax.program import Program

_SHOWN = 40


@dataclasses.dataclass(frozen=True)
class ColumnReport:
    """One table read as written.

    Attributes:
      name: the table's path, with a serial number where it is read more than once.
      table: the path of the argument (or constant) read.
      status: "fused" or "xla".
      reason: why it is not fused ("" if it is).
      source: file:line of the read.
      combiner: "none", "sum", "mean", "max", "min", "weighted sum" or "weighted mean".
      dim, rows: of the table, 0 where symbolic. dtype: of the table.
      rewrites: names of the rewrites applied to it, in order.
      ids: the row number as the program computes it, after rewrites; x(o;s) reads x at offset o with strides s.
      facts: what is known of that row number's values.
      classes: the code that runs it, as "call.class": columns of one class share code.
      bytes: of the table.
    """

    name: str
    table: str
    status: str
    reason: str
    source: str
    combiner: str
    dim: int
    rows: int
    dtype: str
    rewrites: tuple[str, ...]
    ids: str
    facts: str = ""
    classes: tuple[str, ...] = ()
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """How the derivative by one table that a fused call reads is computed.

    Attributes:
      table: the path of the argument, or "constant[k]", or "a computed table".
      status: "fused": one custom call on a CPU, a sort between two on a GPU; "xla": the derivative of the columns as
        they are written.
      reason: why it is not fused ("" if it is).
    """

    table: str
    status: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `OptimizedFunction.explain` returns. ``print(report)`` is a table.

    Attributes:
      columns: every table read, in the order of the program.
      num_custom_calls: fused calls in the spliced jaxpr.
      source: the programs that the calls run, as text.
      classes: per call, how many columns share each class of code.
      others: gathers that are no embedding columns: (file:line, why).
      stages: what each stage of the compiler made of this model.
      results: where columns land in what the fused calls return.
      digests: of the calls' programs.
    """

    function: str
    columns: tuple[ColumnReport, ...]
    num_custom_calls: int
    source: str
    classes: tuple[tuple[int, ...], ...]
    others: tuple[tuple[str, str], ...] = ()
    stages: tuple[Stage, ...] = ()
    results: tuple[Result, ...] = ()
    programs: tuple[Program, ...] = dataclasses.field(default=(), repr=False)
    digests: tuple[str, ...] = ()
    calls: tuple[tuple[Any, tuple[str, ...]], ...] = dataclasses.field(default=(), repr=False)

    @property
    def gradients(self) -> tuple[GradientReport, ...]:
        """`gradients_on` the platform of JAX's default device."""
        return self.gradients_on(compat.default_platform())

    def gradients_on(self, platform: str) -> tuple[GradientReport, ...]:
        """The derivative by each float table of each fused call: fused, or why not. Analysed when it is asked for.

        Args:
          platform: as JAX names it: "cpu", "cuda", "gpu", ...
        """
        return tuple(g for call, names in self.calls for g in _gradients(call, names, platform))

    @property
    def unfused_on_cuda(self) -> tuple[tuple[int, str], ...]:
        """(call, why) of calls that were lowered for CUDA so far, and run as plain JAX there."""
        found = ((k, unfused_on_cuda(digest)) for k, digest in enumerate(self.digests))
        return tuple((k, why) for k, why in found if why)

    @property
    def num_columns(self) -> int:
        return len(self.columns)

    @property
    def num_fused(self) -> int:
        return sum(c.status == "fused" for c in self.columns)

    def __str__(self) -> str:
        return self.to_text()

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as one self-contained page, for people: stages, a picture of the results, columns, code.

        Args:
          path: a file to write it to. Raises OSError if that cannot be done.
        """
        from recom_jax.explain_html import render

        page = render(self)
        if path is not None:
            pathlib.Path(path).write_text(page, encoding="utf-8")
        return page

    def cuda_source(self) -> str:
        """The kernels as the CUDA target would write them; "" where it cannot express them. Needs no GPU.

        Comments say which arguments each class of code reads, and the values of floating-point constants.
        """
        try:
            from recom_jax.cuda.codegen import DEFAULT, Unsupported, generate
            from recom_jax.cuda.kernel import scheduled_as
            from recom_jax.cuda.notes import annotated
        except ImportError:
            return ""
        schedule = scheduled_as(self.calls[0][0].options) if self.calls else DEFAULT
        texts = []
        for k, p in enumerate(self.programs):
            names = self.calls[k][1] if k < len(self.calls) else ()
            try:
                texts.append(annotated(generate(p, schedule).source, p, names))
            except Unsupported as why:
                texts.append(f"// not expressible: {why}\n")
        return "\n".join(texts)

    def to_text(self, limit: int | None = _SHOWN) -> str:
        """The table. Equal neighbours share a line; `limit` bounds the lines (None: all columns, one a line)."""
        calls = f"{self.num_custom_calls} custom call{'' if self.num_custom_calls == 1 else 's'}"
        classes = sum(map(len, self.classes))
        head = (
            f"{self.function}: {self.num_fused} of {self.num_columns} embedding columns fused into {calls} "
            f"({classes} classes of code)"
        )
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("column", "status", "combiner", "rows x dim", "rewrites", "source", "reason"):
            table.add_column(name, overflow="fold")
        groups = _runs(self.columns) if limit is not None else [[c] for c in self.columns]
        # What was not fused is what a reader looks for: never cut it off.
        shown = groups if limit is None else [g for g in groups if g[0].status != "fused"][:limit]
        if limit is not None:
            room = max(limit - len(shown), 0)
            keep = {id(g) for g in shown} | {
                id(g) for g in [g for g in groups if g[0].status == "fused"][:room]
            }
            shown = [g for g in groups if id(g) in keep]
        for g in shown:
            c = g[0]
            name = c.name if len(g) == 1 else f"{c.name} .. {g[-1].name} ({len(g)})"
            table.add_row(
                name,
                c.status,
                c.combiner,
                f"{c.rows:,} x {c.dim} {c.dtype}",
                ", ".join(c.rewrites) or "-",
                c.source.rsplit("/", 1)[-1],
                c.reason or "-",
            )
        out = io.StringIO()
        Console(file=out, width=160, color_system=None).print(table)
        lines = [head, "\n".join(line.rstrip() for line in out.getvalue().splitlines())]
        hidden = len(groups) - len(shown)
        if hidden:
            lines.append(
                f"... and {hidden} more lines: report.to_text(limit=None) prints every column"
            )
        for (line, why), n in list(collections.Counter(self.others).items())[:20]:
            times = f" ({n} times)" if n > 1 else ""
            lines.append(
                f"No embedding column, left to XLA: the gather at {line}, as {why}{times}."
            )
        lines += [f"On CUDA, call {k} runs as plain JAX: {why}" for k, why in self.unfused_on_cuda]
        if not self.columns:
            lines.append(
                "No table is read along its rows: nothing to fuse, the function runs as plain JAX."
            )
        return "\n".join(lines)


def _runs(columns: tuple[ColumnReport, ...]) -> list[list[ColumnReport]]:
    groups: list[list[ColumnReport]] = []
    for c in columns:
        same = groups and all(
            getattr(groups[-1][0], f) == getattr(c, f)
            for f in ("status", "reason", "combiner", "dim", "rows", "dtype", "rewrites", "source")
        )
        if same:
            groups[-1].append(c)
        else:
            groups.append([c])
    return groups


def report_of(compiled: Compiled, function: str) -> Report:
    """Puts together the report of a compiled trace."""
    jaxpr = compat.open_jaxpr(compiled.traced.jaxpr)
    names = {id(v): n for v, n in zip(jaxpr.invars, compiled.traced.arg_names, strict=True)}
    names |= {id(v): f"constant[{k}]" for k, v in enumerate(jaxpr.constvars)}
    reached: dict[int, list[str]] = collections.defaultdict(list)
    rewrites: dict[int, list[str]] = collections.defaultdict(list)
    notes = compiled.detected.pool.notes
    for out in compiled.detected.outputs:
        for e in [out.val.expr] if out.val.expr is not None else [p.expr for p in out.val.parts]:
            segments = _segment_notes(e, notes)
            found: dict[int, list[str]] = collections.defaultdict(list)
            _combiners(e, "none", False, found, set())
            for take in ir.walk(e):
                for k in compiled.detected.pool.origins.get(id(take), ()):
                    reached[k] += found[id(take)] or ["none"]
                    rewrites[k] += [n for x in ir.walk(take) for n in notes.get(id(x), ())]
                    rewrites[k] += segments.get(id(take), ())
                    rewrites[k] += compiled.simplified.applied.get(id(take), ())
    lookups = lookups_of(compiled, names)
    total = collections.Counter(id(r.table) for r in compiled.reads)
    seen: collections.Counter[int] = collections.Counter()
    columns = []
    for k, r in enumerate(compiled.reads):
        table = names.get(id(r.table), "table")
        name = table if total[id(r.table)] == 1 else f"{table}#{seen[id(r.table)]}"
        seen[id(r.table)] += 1
        fused = k in reached
        reason = r.reason or ("" if fused else "no result of a call is made of it")
        shape = [0 if compat.is_symbolic(n) else int(n) for n in r.table.aval.shape]
        columns.append(
            ColumnReport(
                name,
                table,
                "fused" if fused else "xla",
                reason,
                compat.source_line(r.eqn),
                reached[k][0] if fused else "-",
                shape[-1],
                shape[-2],
                str(r.table.aval.dtype),
                tuple(dict.fromkeys(rewrites[k])),
                lookups.ids.get(k, ""),
                lookups.facts.get(k, ""),
                lookups.classes.get(k, ()),
                math.prod(shape) * r.table.aval.dtype.itemsize,
            )
        )
    programs = "\n\n".join(
        f"call {k} (level {lv})\n{s.program}" for k, (lv, s, _) in enumerate(compiled.calls)
    )
    classes = tuple(
        tuple(collections.Counter(c.cls for c in s.program.columns).values())
        for _, s, _ in compiled.calls
    )
    others = tuple((compat.source_line(e), why) for e, why in compiled.detected.others)
    counted = collections.Counter(name for c in columns for name in c.rewrites)
    return Report(
        function,
        tuple(columns),
        len(compiled.calls),
        programs,
        classes,
        others,
        stages_of(compiled, names, counted),
        results_of(compiled),
        tuple(s.program for _, s, _ in compiled.calls),
        tuple(encoded.digest for _, _, encoded in compiled.calls),
        tuple(
            (e.params["call"], tuple(names.get(id(v), "a computed table") for v in e.invars))
            for e in compat.open_jaxpr(compiled.jaxpr).eqns
            if e.primitive is fused_p
        ),
    )


def _gradients(call: FusedCall, names: tuple[str, ...], platform: str) -> list[GradientReport]:
    from recom_jax.backward import refused

    variables = compat.open_jaxpr(call.closed).invars
    floats = [
        k
        for k, v in enumerate(variables)
        if len(v.aval.shape) >= 2 and ir.is_float(str(v.aval.dtype))
    ]
    why = refused(call, floats, platform)
    return [
        GradientReport(names[k], "xla" if why[k] else "fused", why[k])
        for k in floats
        if why[k] not in NO_TABLE
    ]


def _segment_notes(e: ir.Expr, notes: dict[int, tuple[str, ...]]) -> dict[int, list[str]]:
    """Rewrites that made the segment ids of jagged bags, by id of the lookups in those bags."""
    found: dict[int, list[str]] = collections.defaultdict(list)
    for bag in ir.walk(e):
        if isinstance(bag, ir.SegReduce):
            names = [n for x in ir.walk(bag.seg) for n in notes.get(id(x), ())]
            for take in ir.walk(bag.data) if names else ():
                if isinstance(take, ir.Take):
                    found[id(take)] += names
    return found


def _combiners(
    e: ir.Expr, kind: str, weighted: bool, found: dict[int, list[str]], seen: set[Any]
) -> None:
    """Names, for each lookup below `e`, how its rows are combined."""
    if (id(e), kind, weighted) in seen:
        return
    seen.add((id(e), kind, weighted))
    if isinstance(e, ir.Take):
        found[id(e)].append(
            ("weighted " if weighted and kind in ("sum", "mean", "sqrtn") else "") + kind
        )
        _combiners(e.idx, "none", False, found, seen)
        return
    if (
        isinstance(e, ir.Op)
        and e.name == "div"
        and e.takes
        and isinstance(e.args[0], (ir.Reduce, ir.SegReduce))
    ):
        by_root = any(isinstance(x, ir.Op) and x.name == "sqrt" for x in ir.walk(e.args[1]))
        _combiners(e.args[0], "sqrtn" if by_root else "mean", weighted, found, seen)
        return
    if isinstance(e, (ir.Reduce, ir.SegReduce)):
        kind = kind if kind in ("mean", "sqrtn") else e.kind
    if isinstance(e, ir.Op) and e.name == "mul" and kind in ("sum", "mean", "sqrtn"):
        weighted = weighted or any(not a.takes and not _is_mask(a) for a in e.args)
    for c in e.children:
        if c.takes:
            _combiners(c, kind, weighted, found, seen)


def _is_mask(e: ir.Expr) -> bool:
    return isinstance(e, ir.Op) and e.name == "convert" and e.args[0].dtype == "bool"
