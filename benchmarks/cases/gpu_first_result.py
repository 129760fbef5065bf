"""On a GPU: time to the first result, from fresh processes that find no compiled code, or an earlier one's."""

import statistics
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks import cold
from benchmarks.cases.first_result import rows_of
from benchmarks.context import Context, Settings
from benchmarks.pieces import Piece
from benchmarks.record import Result, Target
from benchmarks.steady import AGAIN, BIND, OURS, PLAIN

COLD, FROM_DISK, MANY = 5.0, 2.0, 25.0  # seconds
NUMBER = 10_000


def pieces(settings: Settings) -> dict[str, Piece]:
    """Ours by model, and jit as written in a piece of its own: XLA compiles it once, for long."""
    return {"model e": _model_e, f"columns {_number(settings)}": _many, "model e jit": _plain}


def _number(settings: Settings) -> int:
    return max(2, round(NUMBER * settings.scale))


def _spec(settings: Settings) -> dict[str, Any]:
    s = settings
    return {"kind": "model_e", "large_rows": s.large_rows, "scale": s.scale, "mlp": False}


def _group(settings: Settings) -> str:
    return f"model E, columns only, batch {settings.batch}"


def _answers(
    context: Context, spec: Mapping[str, Any], names: tuple[str, ...], processes: int
) -> dict[str, list[dict[str, Any]]]:
    """What fresh processes say, contestants in turns, one process at a time."""
    found: dict[str, list[dict[str, Any]]] = {n: [] for n in names}
    with context.turns.timed(), tempfile.TemporaryDirectory() as folder:
        job = {"spec": spec, "batch": context.settings.batch}
        if AGAIN in names:
            with context.progress.step(f"{spec['kind']}: the process that keeps the program"):
                cold.spawn({**job, "contestant": AGAIN}, folder)
        for turn in range(processes):
            for name in names:
                with context.progress.step(f"{spec['kind']}: fresh process {turn + 1} of {name}"):
                    cache = folder if name == AGAIN else "off"
                    found[name].append(cold.spawn({**job, "contestant": name}, cache))
    return found


def _median(answers: list[dict[str, Any]]) -> float:
    return float(statistics.median(a["first_s"] for a in answers))


def _model_e(context: Context) -> Result:
    s = context.settings
    answers = _answers(context, _spec(s), (OURS, AGAIN, BIND), s.processes)
    columns = f"{answers[OURS][0]['columns']:,} columns"
    targets = (
        Target(f"first result of model E, {columns}", _median(answers[OURS]), "<=", COLD, "s",
               "fresh processes, nothing cached"),
        Target(f"first result of model E, {columns}, from disk", _median(answers[AGAIN]), "<=", FROM_DISK, "s",
               "fresh processes; an earlier one kept the program, its kernel and the driver's code"),
    )  # fmt: skip
    facts = {"programs_from_disk": [a["from_disk"] for a in answers[AGAIN]]}
    return Result(tuple(rows_of(_group(s), answers, {})), targets, facts)


def _many(context: Context) -> Result:
    s = context.settings
    spec = {"kind": "microbenchmark", "n": _number(s), "random_boundaries": False}
    answers = _answers(context, spec, (OURS, AGAIN), 1)
    group = f"{_number(s):,} bucketize columns, batch {s.batch}"
    target = Target(f"first result of {_number(s):,} columns", _median(answers[OURS]), "<=", MANY, "s",
                    "fresh process, nothing cached; microbenchmark")  # fmt: skip
    return Result(tuple(rows_of(group, answers, {})), (target,), {})


def _plain(context: Context) -> Result:
    s = context.settings
    return Result(tuple(rows_of(_group(s), _answers(context, _spec(s), (PLAIN,), 1), {})), (), {})


__all__ = ["pieces"]
