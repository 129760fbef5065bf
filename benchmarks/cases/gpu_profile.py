"""On a GPU: what Nsight Compute (`ncu`) says of the fused kernel, and so what bounds it."""

import csv
import functools
import io
import shutil
import subprocess
import sys
from collections.abc import Mapping

from benchmarks import machine
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Row

SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "SchedulerStats", "MemoryWorkloadAnalysis")
STALLS = ("long_scoreboard", "short_scoreboard", "lg_throttle", "mio_throttle", "barrier", "wait", "math_pipe_throttle",
          "not_selected", "imc_miss", "no_instruction", "branch_resolving", "selected")  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SHARES = {
    "Memory Throughput": "memory, of its peak",
    "DRAM Throughput": "device memory, of its peak",
    "L2 Cache Throughput": "second-level cache, of its peak",
    "L1/TEX Cache Throughput": "first-level cache, of its peak",
    "Compute (SM) Throughput": "multiprocessors, of their peak",
    "Achieved Occupancy": "occupancy achieved",
    "Theoretical Occupancy": "occupancy, at most",
    "L1/TEX Hit Rate": "hits in the first-level cache",
    "L2 Hit Rate": "hits in the second-level cache",
    "One or More Eligible": "cycles in which a scheduler issues",
}
NUMBERS = ("Duration", "Registers Per Thread", "Grid Size", "Issued Warp Per Scheduler",
           "Active Warps Per Scheduler", "Eligible Warps Per Scheduler")  # fmt: skip


def pieces(settings: Settings) -> dict[str, Piece]:
    """A piece a model and batch size."""
    which = (("e", 256), ("e", 2048), ("A", 512), ("D", 512))
    return {
        f"{name} {size}": functools.partial(_piece, name=name, size=size) for name, size in which
    }


def command(name: str, size: int, settings: Settings) -> list[str]:
    """One warm launch of the kernel of a model, profiled: tools/gpu_kernels.py launches it first."""
    stalls = ",".join(STALL.format(s) for s in STALLS)
    asked = [x for s in SECTIONS for x in ("--section", s)]
    run = ["tools/gpu_kernels.py", "--models", name, "--batches", str(size), "--no-check",
           "--rows", str(settings.large_rows), "--scale", str(settings.scale)]  # fmt: skip
    return ["ncu", "--csv", "--page", "details", *asked, "--metrics", stalls, "--print-details", "all",
            "--kernel-name", "recom_fused", "--launch-skip", "3", "--launch-count", "1",
            "--cache-control", "none", sys.executable, *run]  # fmt: skip


def metrics(text: str) -> dict[str, tuple[float, str]]:
    """Metric -> value and unit, from ncu's CSV, which its own lines and the program's stand before."""
    lines = text.splitlines()
    first = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        said = [line for line in lines if "==ERROR==" in line or "==WARNING==" in line] or lines
        raise RuntimeError("Nsight Compute measured nothing: " + " ".join(said[-3:]))
    found: dict[str, tuple[float, str]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except (ValueError, KeyError, AttributeError):
            continue
        found.setdefault(row["Metric Name"], (value, row["Metric Unit"]))
    return found


def rows_of(group: str, found: Mapping[str, tuple[float, str]]) -> tuple[list[Row], str]:
    """Shares in percent, stalls as shares of all of them, and the other numbers as a sentence."""
    rows = [
        Row.single(f"{group}: Nsight Compute", title, "", "%", [found[name][0]])
        for name, title in SHARES.items()
        if name in found
    ]
    stalls = {s: found[STALL.format(s)][0] for s in STALLS if STALL.format(s) in found}
    total = sum(stalls.values())
    rows += [
        Row.single(
            f"{group}: what its warps wait for", s.replace("_", " "), "", "%", [100 * v / total]
        )
        for s, v in sorted(stalls.items(), key=lambda x: -x[1])
        if total and v / total >= 0.01
    ]
    numbers = [f"{n.lower()} {found[n][0]:g} {found[n][1]}".strip() for n in NUMBERS if n in found]
    return rows, ", ".join(numbers)


def _piece(context: Context, name: str, size: int) -> Result:
    if shutil.which("ncu") is None:
        raise RuntimeError("Nsight Compute (ncu) is not on PATH")
    title = f"model {name.upper()}" if name in "ef" else f"RecFlex {name}"
    group = f"{title}, columns only, batch {size}"
    with context.turns.timed(), context.progress.step(f"{group}: ncu"):
        done = subprocess.run(command(name, size, context.settings), cwd=machine.ROOT,
                              capture_output=True, text=True)  # fmt: skip
    rows, numbers = rows_of(group, metrics(done.stdout + done.stderr))
    return Result(tuple(rows), (), {group: numbers})


__all__ = ["pieces"]
