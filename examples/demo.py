"""A tour: `python -m examples.demo [--full] [--batch 256] [--calls 20] [--criteo FILE] [--html FILE]`.

Takes two models, RECom's model E with its 1,000 embedding columns and the DLRM for Criteo's data (its 26 columns
alone, then with the MLPs, which take most of its time and are XLA's either way). For each: what `recom_jax.optimize`
found (`explain`), whether the results are those of plain JAX, and the time of the first call and of a call, beside
plain `jax.jit`, for each way that inputs can arrive.

`--full` takes the paper's tables of 2^23 rows (in place of 2^20; some 11 GB), times model E with its MLPs too, and
adds the two ways in which an expert speeds up plain JAX by hand. `--criteo` reads your file instead of made-up
rows. `--html` writes model E's report as a page.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import recom_jax
from examples import criteo
from examples.recom_models import RecomModel, model_e

Function = Callable[[Any, Any], jax.Array]
CONSOLE = Console(width=None if sys.stdout.isatty() else 110)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table of times: how inputs arrive, and a call without arguments for each system."""

    inputs: str
    plain: Callable[[], jax.Array] | None
    ours: Callable[[], jax.Array] | None


def seconds(call: Callable[[], jax.Array]) -> float:
    """Time until the result is there."""
    start = time.perf_counter()
    call().block_until_ready()
    return time.perf_counter() - start


def medians(calls: list[Callable[[], jax.Array]], repeats: int) -> list[float]:
    """Median milliseconds of each, taken in turns so that a busy moment hits all of them.

    Each is timed right after a call of its own, as a server makes them: the processor's caches hold its arrays, not
    the other's.
    """

    def timed(call: Callable[[], jax.Array]) -> float:
        seconds(call)
        return seconds(call)

    for call in calls:
        seconds(call)
    rounds = [[timed(call) for call in calls] for _ in range(repeats)]
    return [1e3 * statistics.median(times) for times in zip(*rounds, strict=True)]


def print_columns(report: Any) -> None:
    """The report, shortened: columns that differ in nothing but their name and table share a line."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for c in report.columns:
        why = ", ".join(c.rewrites) if c.status == "fused" else c.reason
        source = pathlib.Path(c.source).name  # without its folders
        shape = f"{c.rows} x {c.dim}"
        groups.setdefault((shape, c.combiner, c.status, source, why), []).append(c.name)
    table = Table(show_lines=True)
    table.add_column("columns", justify="right")
    table.add_column("first of them", no_wrap=True)
    for header in ("rows x dim", "pooling", "runs in", "source", "rewrites, or reason"):
        table.add_column(header)
    for key, names in groups.items():
        table.add_row(f"{len(names):,}", escape(names[0]), *map(escape, key))
    CONSOLE.print(table)
    CONSOLE.print(
        f"{report.num_fused} of {report.num_columns} columns fused into "
        f"{report.num_custom_calls} custom call(s)"
    )


def print_difference(plain: jax.Array, ours: jax.Array) -> None:
    """How the two results compare, element by element."""
    a, b = np.asarray(plain), np.asarray(ours)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise SystemExit(f"results differ: {a.dtype}{a.shape} and {b.dtype}{b.shape}")
    equal = np.mean((a == b) | (np.isnan(a) & np.isnan(b)))
    furthest = np.abs(np.nan_to_num(a) - np.nan_to_num(b)).max(initial=0.0)
    CONSOLE.print(
        f"results: {equal:.2%} of {a.size:,} numbers equal, furthest apart {furthest:.2g}"
    )


def print_times(rows: list[Row], repeats: int) -> dict[Callable[[], jax.Array], float]:
    """The milliseconds of each call, which it prints as a table."""
    calls = [call for row in rows for call in (row.plain, row.ours) if call is not None]
    times = dict(zip(calls, medians(calls, repeats), strict=True))
    table = Table("inputs", "jax.jit, ms", "recom_jax, ms", "faster by")
    baseline = 0.0
    for row in rows:
        baseline = times[row.plain] if row.plain else baseline
        if row.ours is None:
            table.add_row(row.inputs, f"{baseline:.2f}", "", "")
        else:
            shown = f"{baseline:.2f}" if row.plain else ""
            ours = times[row.ours]
            table.add_row(row.inputs, shown, f"{ours:.2f}", f"{baseline / ours:.1f}x")
    CONSOLE.print(table)
    return times


def tour(
    title: str,
    function: Function,
    params: Any,
    batch: Mapping[str, np.ndarray],
    repeats: int,
    peers: tuple[Row, ...] = (),
    explain: bool = True,
) -> tuple[Any, float]:
    """Explains, compares and times `function(params, batch)`.

    Returns:
      Its report, and the milliseconds of a call of plain JAX with numpy arrays.
    """
    size = len(next(iter(batch.values())))
    CONSOLE.rule(f"[bold]{title}, batch {size}")
    plain = jax.jit(function)
    ours = recom_jax.optimize(function)
    on_device = jax.device_put(dict(batch))
    ours_first = seconds(lambda: ours(params, on_device))
    report = ours.explain(params, batch)
    if explain:
        print_columns(report)
    with CONSOLE.status("first call of plain jax.jit (half a minute for 1,000 columns)"):
        plain_first = seconds(lambda: plain(params, on_device))
    CONSOLE.print(
        f"first call (trace, compile, run): jax.jit {plain_first:.2f} s, recom_jax {ours_first:.2f} s"
    )
    print_difference(plain(params, on_device), ours(params, on_device))

    serve = ours.bind(params)

    def through_views() -> jax.Array:
        views = serve.input_views(batch)
        for name, values in batch.items():
            views[name][...] = values
        result: jax.Array = serve(views)
        return result

    def numpy_arrays() -> jax.Array:
        result: jax.Array = plain(params, batch)
        return result

    rows = [
        Row(
            f"{len(batch):,} device arrays",
            lambda: plain(params, on_device),
            lambda: ours(params, on_device),
        ),
        Row(f"{len(batch):,} numpy arrays", numpy_arrays, lambda: ours(params, batch)),
        Row("  serve = model.bind(params)", None, lambda: serve(batch)),
        Row("  serve.input_views: lease, fill, call", None, through_views),
        *peers,
    ]
    times = print_times(rows, repeats)
    return report, times[numpy_arrays]


def expert_rows(model: RecomModel, params: Any, batch: Mapping[str, np.ndarray]) -> tuple[Row, ...]:
    """Model E's columns as an expert writes them in plain JAX; what is stacked is stacked beforehand."""
    on_device = jax.device_put(dict(batch))
    stacked_params = model.stack_params(params)
    stacked_batch = jax.device_put(model.stack_batch(batch))
    tuned, batched = jax.jit(model.columns_tuned), jax.jit(model.columns_hand_batched)
    return (
        Row("device arrays, each column tuned by hand", lambda: tuned(params, on_device), None),
        Row(
            "device arrays, equal columns stacked beforehand by hand",
            lambda: batched(stacked_params, stacked_batch),
            None,
        ),
    )


def criteo_batch(path: str | None, size: int, vocabulary: int) -> dict[str, np.ndarray]:
    """The first batch of the file at `path`, or of made-up rows."""
    with tempfile.TemporaryDirectory() as folder:
        source = path or str(pathlib.Path(folder, "made_up.tsv"))
        if not path:
            criteo.write_sample(source, rows=size)
        reader = criteo.CriteoReader(source, size, vocabulary=vocabulary, on_error="skip")
        batch = next(iter(reader), None)
    if batch is None:
        raise SystemExit(f"{source} holds no readable row")
    CONSOLE.print(f"read {reader.rows} rows of {path or 'made-up data'}, skipped {reader.skipped}")
    for problem in reader.problems:
        CONSOLE.print(f"  {problem}", style="yellow", markup=False)
    return batch


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument(
        "--full", action="store_true", help="tables of 2^23 rows, MLPs, expert's versions"
    )
    parser.add_argument("--batch", type=int, default=256, help="samples a call (default 256)")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each (default 20)")
    parser.add_argument("--criteo", metavar="FILE", help="a Criteo TSV or CSV")
    parser.add_argument("--html", metavar="FILE", help="write model E's report here as a page")
    args = parser.parse_args(arguments)
    if args.batch < 1 or args.calls < 1:
        parser.error("--batch and --calls must be at least 1")

    CONSOLE.print(f"recom_jax {recom_jax.__version__}, JAX {jax.__version__}, {jax.devices()[0]}")
    model = model_e(large_rows=2**23 if args.full else 2**20)
    params, batch = model.init(), model.batch(args.batch)
    peers = expert_rows(model, params, batch) if args.full else ()
    title = "RECom's model E, columns alone"
    report, _ = tour(title, model.columns, params, batch, args.calls, peers)
    if args.html:
        report.to_html(args.html)
        CONSOLE.print(f"wrote {args.html}")
    if args.full:
        title = "RECom's model E with its MLPs"
        tour(title, model.forward, params, batch, args.calls, explain=False)

    vocabulary = 100_000 if args.full else 10_000
    dlrm = criteo.Dlrm(vocabulary)
    params, rows = dlrm.init(), criteo_batch(args.criteo, args.batch, vocabulary)
    title = "DLRM on Criteo's data"
    _, alone = tour(f"{title}, columns alone", dlrm.columns, params, rows, args.calls)
    embeddings = jax.block_until_ready(jax.jit(dlrm.embeddings)(params, rows))
    head, dense = jax.jit(dlrm.head), jax.device_put(rows["dense"])
    without = Row("the model without its columns", lambda: head(params, embeddings, dense), None)
    _, whole = tour(
        f"{title} with its MLPs", dlrm.forward, params, rows, args.calls, (without,), explain=False
    )
    CONSOLE.print(
        f"Of the {whole:.2f} ms that plain JAX takes for this model, its 26 columns alone take {alone:.2f}. The "
        "rest is products of matrices, which XLA computes in both: the model can gain no more than its columns do. "
        "The last row is that rest alone, in plain JAX. On several processors it may take longer than the whole: where "
        "little is in front of the products, XLA's own threads have to be woken for them."
    )


if __name__ == "__main__":
    main()
