"""`python -m benchmarks`: runs cases, each in a process of its own, and keeps their results as JSON."""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks import machine, pieces, record
from benchmarks.context import Context, Progressing, Settings
from benchmarks.pieces import Beside

RESULTS = pathlib.Path(__file__).parent / "results"
QUICK_RESULTS = machine.ROOT / "build" / "benchmarks"


def parser() -> argparse.ArgumentParser:
    from benchmarks.cases import ALL

    cases = "\n".join(f"  {c.name:<16} {c.title} (about {c.minutes:g} min)" for c in ALL)
    p = argparse.ArgumentParser(
        prog="python -m benchmarks", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs the benchmarks. Cases that this machine has results of, with the same versions "
        "and settings, are skipped.",
        epilog=f"cases:\n{cases}\n\nthen: python -m benchmarks.report",
    )  # fmt: skip
    p.add_argument(
        "case",
        nargs="*",
        help="which cases (default: all that can run without a GPU)",
    )
    p.add_argument("--quick", action="store_true",
                   help="every line in seconds, with tiny models; the numbers mean nothing")  # fmt: skip
    p.add_argument("--out", type=pathlib.Path, help="folder of the results (default: benchmarks/results; "
                   "build/benchmarks with --quick)")  # fmt: skip
    p.add_argument("--force", action="store_true", help="measure again what has results")
    p.add_argument("--force-kept", action="store_true",
                   help="and the first calls of plain JAX, which are kept across versions of recom_jax")  # fmt: skip
    p.add_argument("--rows", type=int, help="rows of the large tables of models E and F (default 2**20; "
                   "the paper's is 2**23, 1 GiB a table)")  # fmt: skip
    p.add_argument("--scale", type=float, help="multiplies the number of columns (default 1)")
    p.add_argument("--batch", type=int, help="batch size of the promises (default 256)")
    p.add_argument(
        "--batches", type=int, nargs="+", help="of the whole models (default 32 256 2048)"
    )
    p.add_argument("--rounds", type=int, help="interleaved rounds (default 40)")
    p.add_argument(
        "--seconds", type=float, help="stop a table's rounds after that long (default 90)"
    )
    p.add_argument("--processes", type=int, help="fresh processes per first result (default 3)")
    p.add_argument("--pieces", nargs="+", metavar="PIECE", help="of cases in pieces: measure these, and "
                   "join them with what is there")  # fmt: skip
    p.add_argument("--at-once", type=int, help="of cases in pieces: how many processes (default 4)")
    p.add_argument("--end-after", type=float, help="of cases in pieces: seconds after which what still runs is "
                   "ended; a later run goes on with what is missing (default 3600)")  # fmt: skip
    p.add_argument("--patience", type=float, help="of cases in pieces: seconds from its process's start that a "
                   "timed part waits for compilers to end (default 600)")  # fmt: skip
    p.add_argument("--compiled", type=pathlib.Path, help="of cases in pieces: folder that keeps XLA's code of "
                   "slow peers, for a run that goes on")  # fmt: skip
    p.add_argument("--list", action="store_true", help="say what would run, and stop")
    p.add_argument(
        "--here", action="store_true", help="run in this process (what the driver itself uses)"
    )
    return p


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the options ask for."""
    s = Settings.tiny() if args.quick else Settings()
    chosen = {"large_rows": args.rows, "scale": args.scale, "batch": args.batch,
              "batches": tuple(args.batches) if args.batches else None,
              "processes": args.processes}  # fmt: skip
    plan = {"rounds": args.rounds, "seconds": args.seconds}
    plan = {k: v for k, v in plan.items() if v is not None}
    if "rounds" in plan:
        plan["least_rounds"] = min(s.plan.least_rounds, args.rounds)
    return dataclasses.replace(
        s,
        **{k: v for k, v in chosen.items() if v is not None},
        plan=dataclasses.replace(s.plan, **plan),
    )


def beside_of(args: argparse.Namespace) -> Beside:
    """How cases in pieces run, as the options ask for."""
    chosen = {"only": tuple(args.pieces) if args.pieces else None, "processes": args.at_once,
              "seconds": args.end_after, "patience": args.patience,
              "compiled": args.compiled and args.compiled.resolve()}  # fmt: skip
    return Beside(**{k: v for k, v in chosen.items() if v is not None})


def path_of(out: pathlib.Path, case: str) -> pathlib.Path:
    """Where the case's result on this machine with these versions belongs."""
    return out / f"{case}.{machine.key(machine.machine(), machine.versions())}.json"


def is_done(path: pathlib.Path, settings: Settings) -> bool:
    """Whether the file holds a result with the same settings."""
    try:
        data = record.read(path)
        same = data["settings"] == json.loads(json.dumps(dataclasses.asdict(settings)))
        return bool(same) and not data["facts"].get("missing")
    except (OSError, ValueError, KeyError):
        return False


def run_case(name: str, settings: Settings, out: pathlib.Path, progress: Progressing | None = None,
             renew_kept: bool = False, beside: Beside | None = None) -> pathlib.Path:  # fmt: skip
    """Runs one case in this process, or its pieces in theirs, and writes its result.

    Raises:
      KeyError: no such case.
    """
    from benchmarks.cases import CASES

    case = CASES[name]
    context = Context(settings, out / "kept", progress or Progressing(), renew_kept)
    began, load = time.monotonic(), machine.load()
    date, commit = machine.now(), machine.commit()
    if case.pieces is not None:
        every = case.pieces(settings)
        result = pieces.run(name, every, case.finish, context, beside or Beside(), case.combine)
    else:
        assert case.run is not None
        result = case.run(context)
    data: dict[str, Any] = {
        "schema": record.SCHEMA,
        "case": name,
        "title": case.title,
        "date": date,
        "minutes": round((time.monotonic() - began) / 60, 2),
        "settings": dataclasses.asdict(settings),
        "machine": machine.machine(),
        "versions": machine.versions(),
        "git": commit,
        "load_before": load,
        "load_after": machine.load(),
        **record.to_json(result),
    }
    path = path_of(out, name)
    record.write(path, data)
    return path


def command_of(args: argparse.Namespace, case: str, out: pathlib.Path) -> list[str]:
    """The command that runs one case with these options in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", case, "--here", "--force", "--out", str(out)]
    command += [
        f"--{name.replace('_', '-')}" for name in ("quick", "force_kept") if getattr(args, name)
    ]
    for name in ("rows", "scale", "batch", "rounds", "seconds", "processes", "at_once",
                 "end_after", "patience", "compiled"):  # fmt: skip
        if getattr(args, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    for name in ("batches", "pieces"):
        if getattr(args, name):
            command += [f"--{name}", *map(str, getattr(args, name))]
    return command


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.cases import ALL, CASES

    args = parser().parse_args(argv)
    wants_gpu = any(CASES[n].gpu for n in args.case if n in CASES)
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if wants_gpu else "cpu")
    environment = dict(os.environ)
    if not args.here or any(CASES[n].pieces for n in args.case if n in CASES):
        # This process asks for the device's name alone: its memory is for those that measure.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    console = Console(stderr=True)
    unknown = [name for name in args.case if name not in CASES]
    if unknown:
        console.print(f"no case is named {', '.join(unknown)}; there are {', '.join(CASES)}")
        return 2
    settings = settings_of(args)
    out = (args.out or (QUICK_RESULTS if args.quick else RESULTS)).resolve()
    names = args.case or [c.name for c in ALL if not c.gpu and c.can_run]
    missing = [n for n in names if not CASES[n].can_run]
    if missing:
        console.print(f"{missing[0]} needs {CASES[missing[0]].package}, which is not installed")
        return 2
    todo = [n for n in names if args.force or not is_done(path_of(out, n), settings)]
    for name in names:
        if name not in todo:
            console.print(f"{name}: measured already, {path_of(out, name)} (--force to repeat)")
    no_gpu = wants_gpu and not (args.quick or args.list) and not machine.has_gpu()
    if no_gpu:
        needing = ", ".join(n for n in todo if CASES[n].gpu)
        console.print(f"{needing}: JAX has no GPU here (JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}): see "
                      "`python -m recom_jax doctor`; --quick runs what can run without one")  # fmt: skip
        return 2
    if args.list:
        minutes = sum(CASES[n].minutes for n in todo)
        console.print(f"to run: {', '.join(todo) or 'nothing'} (about {minutes:g} minutes)")
        return 0
    if args.here:
        for name in todo:
            run_case(name, settings, out, Progressing(console), args.force_kept, beside_of(args))
        return 0
    failed = []
    for k, name in enumerate(todo, 1):
        case = CASES[name]
        load = ", ".join(map(str, machine.load()[:2]))
        console.print(f"[bold]{name}[/bold] ({k} of {len(todo)}): {case.title}, "
                      f"about {case.minutes:g} min; load {load}")  # fmt: skip
        if args.force and case.pieces is not None:
            for piece in args.pieces or case.pieces(settings):
                pieces.path_of(out / "kept", name, piece).unlink(missing_ok=True)
        command = command_of(args, name, out)
        if subprocess.run(command, cwd=machine.ROOT, env=environment).returncode:
            failed.append(name)
            console.print(f"[red]{name} failed[/red]; going on")
        else:
            console.print(f"  wrote {path_of(out, name)}")
    if failed:
        console.print(f"failed: {', '.join(failed)}")
        return 1
    console.print("now: python -m benchmarks.report")
    return 0
