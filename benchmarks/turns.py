"""Who may time, where several processes measure beside one another.

XLA takes minutes to compile some peers, on a few cores; processes that compile side by side share one machine well.
Timed parts run one after the other, and none begins while anybody compiles, except when `patience` seconds have gone by
since the process began.
"""

import contextlib
import dataclasses
import fcntl
import pathlib
import time
from collections.abc import Iterator

POLL = 0.1


@contextlib.contextmanager
def _locked(path: pathlib.Path, kind: int, patience: float | None = None) -> Iterator[bool]:
    """Holds a file's lock; gives False if `patience` seconds were over before it was free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    until = None if patience is None else time.monotonic() + patience
    with open(path, "a") as file:
        held = until is None
        if until is None:
            fcntl.flock(file, kind)
        while until is not None and not held:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
                time.sleep(POLL)
        yield held


@dataclasses.dataclass(frozen=True)
class Turns:
    """`folder` holds the locks; None: nobody else measures here. `patience` in seconds, counted from `begun`: with each
    timed part waiting that long for the same compiler, the last one would wait many times as long."""

    folder: pathlib.Path | None = None
    patience: float = 600.0
    begun: float = dataclasses.field(default_factory=time.monotonic)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Around what takes processors and is not timed. Don't nest it."""
        if self.folder is None:
            yield
            return
        with _locked(self.folder / "compile.lock", fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def timed(self) -> Iterator[bool]:
        """Around what is timed. Gives whether nobody compiles beside it."""
        if self.folder is None:
            yield True
            return
        with _locked(self.folder / "timed.lock", fcntl.LOCK_EX):
            left = max(self.begun + self.patience - time.monotonic(), 0.0)
            with _locked(self.folder / "compile.lock", fcntl.LOCK_EX, left) as quiet:
                yield quiet
