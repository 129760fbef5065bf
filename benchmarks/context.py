"""What a case is given: how much to measure, and where to say how far it is."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.timing import Plan
from benchmarks.turns import Turns

SLOW_S = 5.0  # first calls that take longer are kept with XLA's code


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the numbers depend on and a user may choose; part of the JSON.

    `scale` multiplies the number of columns, `large_rows` is the size of the large tables of models E
    and F (the paper's: 2**23), `batch` is that of the promises, `batches` those of the whole models.
    """

    quick: bool = False
    scale: float = 1.0
    large_rows: int = 2**20
    batch: int = 256
    batches: tuple[int, ...] = (32, 256, 2048)
    plan: Plan = dataclasses.field(default_factory=Plan)
    processes: int = 3

    @classmethod
    def tiny(cls) -> "Settings":
        """Every line of a case, in seconds. The numbers mean nothing."""
        return cls(True, 0.02, 2**12, 16, (8,), Plan(rounds=3, burst=2, least_rounds=2), 1)


def settings_from(given: Mapping[str, Any]) -> Settings:
    """Settings as they are in JSON."""
    return Settings(**{**given, "plan": Plan(**given["plan"]), "batches": tuple(given["batches"])})


class Progressing:
    """Progress on the terminal, or a line per step where there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Says what goes on, and how long it took."""
        begun = time.monotonic()
        if self.console.is_terminal:
            with self.console.status(what, refresh_per_second=2):
                yield
        else:
            yield
        seconds = time.monotonic() - begun
        if seconds >= 1:
            self.console.print(f"  {what}: {seconds:.1f} s", highlight=False, soft_wrap=True)

    def track(self, rounds: Iterable[int], what: str, total: int) -> Iterator[int]:
        """The rounds, with a bar."""
        columns = (SpinnerColumn(), TextColumn("  {task.description}"), BarColumn(),
                   TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())  # fmt: skip
        # Refreshed between rounds alone: a thread that draws would take time from what is measured.
        bar = Progress(*columns, console=self.console, auto_refresh=False, transient=True)
        with bar:
            task = bar.add_task(what, total=total)
            for k in rounds:
                yield k
                bar.update(task, advance=1, refresh=self.console.is_terminal)


@dataclasses.dataclass(frozen=True)
class Context:
    """`kept` is the folder of measurements that don't depend on recom_jax and are slow to repeat.

    `turns`: with what else runs on the machine. `compiled`: folder of XLA's code of an earlier try, or None.
    """

    settings: Settings
    kept: pathlib.Path
    progress: Progressing = dataclasses.field(default_factory=Progressing)
    renew_kept: bool = False
    turns: Turns = dataclasses.field(default_factory=Turns)
    compiled: pathlib.Path | None = None

    def first_call(self, what: str, seconds: float) -> float:
        """Seconds of a first call: those of the time when XLA compiled, where its code came from `compiled`."""
        if self.compiled is None:
            return seconds
        path = self.compiled / "first_calls.jsonl"
        if seconds >= SLOW_S:
            self.compiled.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.write(json.dumps([what, seconds]) + "\n")
            return seconds
        kept = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}
        return float(kept.get(what, seconds))
