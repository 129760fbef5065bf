"""Cases in pieces, for machines that are lent by the minute: each piece is measured in a process of its own, is kept
as soon as it is there, and is not measured again. Processes of one case run beside one another; `turns` keeps their
timed parts apart. A case whose pieces are not all there yet says which are missing.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import machine, record
from benchmarks.context import Context, Settings, settings_from
from benchmarks.record import Result
from benchmarks.turns import Turns

Piece = Callable[[Context], Result]
Pieces = Callable[[Settings], Mapping[str, Piece]]
Join = Callable[[Settings, Mapping[str, Result]], Result]
# Makes one part of several pieces that measured the same thing in processes of their own.
Combine = Callable[[Mapping[str, Result]], Mapping[str, Result]]
WAITING = 0.6  # of the time that is left: a timed part that waits longer for compilers would be ended, not timed


@dataclasses.dataclass(frozen=True)
class Beside:
    """How pieces run: so many processes at once, all of them ended after `seconds`.

    `only`: the pieces to measure, if not all, in this order. `share`: of the device's memory, that each process takes.
    `compiled`: folder where XLA's code of slow peers is kept, so that a piece that was ended need not compile it again,
    or None.
    """

    only: tuple[str, ...] | None = None
    processes: int = 4
    seconds: float = 3600.0
    patience: float = 600.0
    share: float = 0.07
    compiled: pathlib.Path | None = None


def path_of(kept: pathlib.Path, case: str, piece: str) -> pathlib.Path:
    """Where a piece's result on this machine with these versions is kept."""
    name = "-".join(piece.split())
    return kept / f"{case}.{name}.{machine.key(machine.machine(), machine.versions())}.json"


def read(path: pathlib.Path, settings: Settings) -> Result | None:
    """A piece's result, if it is there with the same settings."""
    try:
        data = record.read(path)
    except (OSError, ValueError):
        return None
    if data["settings"] != json.loads(json.dumps(dataclasses.asdict(settings))):
        return None
    return result_of(data)


def result_of(data: Mapping[str, Any]) -> Result:
    """A kept piece's result, and the commit that it was measured at."""
    facts = data["facts"] | {"measured at": record.commit_of(data)}
    return Result(tuple(record.rows_of(data)), tuple(record.targets_of(data)), facts)


def join(parts: Mapping[str, Result], missing: Sequence[str]) -> Result:
    """All rows and targets, one after the other; facts that differ from piece to piece by piece."""
    facts: dict[str, Any] = {}
    for name, part in parts.items():
        for key, value in part.facts.items():
            if isinstance(value, Mapping):
                facts.setdefault(key, {}).update(value)
            elif facts.setdefault(key, value) != value:
                facts[f"{key} ({name})"] = value
    if missing:
        facts["missing"] = ", ".join(missing)
    return Result(
        tuple(r for p in parts.values() for r in p.rows),
        tuple(t for p in parts.values() for t in p.targets),
        facts,
    )


def joined(
    pieces: Mapping[str, Piece],
    found: Mapping[str, Result],
    settings: Settings,
    finish: Join | None = None,
    combine: Combine | None = None,
) -> Result:
    """What the pieces that were found say together, and the names of the others."""
    missing = [n for n in pieces if n not in found]
    parts = {n: found[n] for n in pieces if n in found}
    if combine is not None:
        parts = dict(combine(parts))
    whole = join(parts, missing)
    if finish is None:
        return whole
    more = finish(settings, parts)
    return Result(
        whole.rows + more.rows, whole.targets + more.targets, {**whole.facts, **more.facts}
    )


def run(
    case: str,
    pieces: Mapping[str, Piece],
    finish: Join | None,
    context: Context,
    beside: Beside,
    combine: Combine | None = None,
) -> Result:
    """Measures what is missing, and joins what is there.

    Raises:
      RuntimeError: no piece is there, or none has a name that is asked for.
    """
    unknown = [n for n in beside.only or () if n not in pieces]
    if unknown:
        raise RuntimeError(f"{case} has no piece {unknown[0]!r}, but {', '.join(pieces)}")
    paths = {name: path_of(context.kept, case, name) for name in pieces}
    asked = dict.fromkeys(beside.only or pieces)
    todo = [n for n in asked if read(paths[n], context.settings) is None]
    failed = _spawn(case, todo, paths, context, beside)
    read_again = {n: read(p, context.settings) for n, p in paths.items()}
    found = {n: part for n, part in read_again.items() if part is not None}
    for name, why in failed.items():
        context.progress.console.print(f"  {case}, {name}: {why}", highlight=False, soft_wrap=True)
    if not found:
        raise RuntimeError(f"{case}: no piece was measured: {failed}")
    return joined(pieces, found, context.settings, finish, combine)


def command_of(job: Mapping[str, Any]) -> list[str]:
    """What runs a piece in a process of its own."""
    return [sys.executable, "-m", "benchmarks.pieces", json.dumps(job)]


def _environment(beside: Beside) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    env.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(beside.share))
    if beside.compiled is None:
        return env | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    return env | {
        "JAX_COMPILATION_CACHE_DIR": str(beside.compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5",
    }


def _spawn(case: str, todo: Sequence[str], paths: Mapping[str, pathlib.Path], context: Context,
           beside: Beside) -> dict[str, str]:  # fmt: skip
    """Runs pieces in processes; gives the reason of each that is not there in the end."""
    begun = time.monotonic()
    waiting, running = list(todo), dict[str, tuple[subprocess.Popen[bytes], float]]()
    failed: dict[str, str] = {}
    with _ended_with(running):
        while waiting or running:
            left = beside.seconds - (time.monotonic() - begun)
            while waiting and len(running) < beside.processes and left > 0:
                name = waiting.pop(0)
                job = {"case": case, "piece": name, "path": str(paths[name]), "kept": str(context.kept),
                       "settings": dataclasses.asdict(context.settings),
                       "patience": min(beside.patience, WAITING * left),
                       "compiled": beside.compiled and str(beside.compiled)}  # fmt: skip
                child = subprocess.Popen(
                    command_of(job),
                    cwd=machine.ROOT,
                    env=_environment(beside),
                    process_group=0,
                )
                running[name] = child, time.monotonic()
            for name, (child, since) in list(running.items()):
                status = child.poll()
                if status is None and left <= 0:
                    _end(child)
                    failed[name] = f"ended after {time.monotonic() - since:.0f} s"
                elif status is None:
                    continue
                elif status:
                    failed[name] = f"exit status {status}"
                del running[name]
            if left <= 0:
                failed |= dict.fromkeys(waiting, "not begun")
                waiting.clear()
            time.sleep(0.05)
    return failed


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a piece with all that it started: a profiler left behind would keep the device busy."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextlib.contextmanager
def _ended_with(running: Mapping[str, tuple[subprocess.Popen[bytes], float]]) -> Iterator[None]:
    """Ends what runs when this process is asked to end, or fails: groups of their own outlive it otherwise."""

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    here = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, leave) if here else None
    try:
        yield
    finally:
        for child, _ in running.values():
            _end(child)
        if here:
            signal.signal(signal.SIGTERM, before)


def child(job: Mapping[str, Any]) -> None:
    """Measures one piece in this process and keeps its result."""
    from benchmarks.cases import CASES

    settings = settings_from(job["settings"])
    path = pathlib.Path(job["path"])
    context = Context(
        settings,
        pathlib.Path(job["kept"]),
        turns=Turns(path.parent / ".turns", job["patience"]),
        compiled=pathlib.Path(job["compiled"]) if job["compiled"] else None,
    )
    begun, date = time.monotonic(), machine.now()
    pieces = CASES[job["case"]].pieces
    assert pieces is not None
    result = pieces(settings)[job["piece"]](context)
    record.write(path, {
        "schema": record.SCHEMA, "case": job["case"], "piece": job["piece"], "date": date,
        "minutes": round((time.monotonic() - begun) / 60, 2), "settings": dataclasses.asdict(settings),
        "machine": machine.machine(), "versions": machine.versions(), "git": machine.commit(),
        **record.to_json(result),
    })  # fmt: skip


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
