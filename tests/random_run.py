"""Long runs over random models, in many processes; see `tests.test_random_programs`.

A model's number alone decides its columns, so what a run covers does not depend on the number of workers: each
takes every n-th model. Workers are processes of their own, which report a line of JSON for each model; a worker that
dies or hangs is a failure, and its model is named.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

PATIENCE = 300.0
"""Seconds without a word after which a worker hangs."""

CLEARED = 25
"""Models after which a worker drops what JAX has compiled."""

ENVIRONMENTS = {
    "cpu": {"JAX_PLATFORMS": "cpu"},
    # XLA's own defaults round the factors of a product to TF32, and leave out a rounding to 16 bits where the number is
    # widened again at once, as for rows of `table.astype(bfloat16)` if the table has one row. The oracle is plain
    # JAX as it is written (docs/semantics.md).
    "cuda": {
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_allow_excess_precision=false",
    },
}


def environment(platform: str) -> dict[str, str]:
    """The environment of a worker: this process's, with what the platform needs."""
    made = {**os.environ, **ENVIRONMENTS[platform]}
    flags = os.environ.get("XLA_FLAGS", ""), ENVIRONMENTS[platform].get("XLA_FLAGS", "")
    return {**made, "XLA_FLAGS": " ".join(filter(None, flags))}


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Compares many random models with plain JAX.")
    p.add_argument("--columns", type=int, default=5000)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--per-model", type=int, default=50)
    p.add_argument("--draws", type=int, default=3, help="calls of each model, with other numbers")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no model after that")
    p.add_argument("--workers", type=int, default=1, help="processes")
    p.add_argument("--platform", choices=sorted(ENVIRONMENTS), default="cpu")
    p.add_argument("--keep-going", action="store_true", help="go on after a failure")
    p.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return p.parse_args(args)


def models(o: argparse.Namespace) -> int:
    return -(-o.columns // o.per_model)


def drawn(o: argparse.Namespace, serial: int) -> tuple[list[int], int, int]:
    """Seeds of the columns, the layout's seed and the batch size of a model, by its number."""
    from tests.random_columns import BATCHES

    r = random.Random(o.seed * 1_000_003 + serial)
    count = min(o.per_model, o.columns - serial * o.per_model)
    return [r.randrange(2**32) for _ in range(count)], r.randrange(2**16), r.choice(BATCHES)


# ---- a worker -------------------------------------------------------------------------------------------------------


def work(o: argparse.Namespace) -> int:
    """Compares every n-th model; prints a line of JSON before and after each."""
    begun = time.monotonic()
    _pin(o.worker, o.workers)
    import jax

    from tests.random_compare import compare

    found = jax.devices()[0].platform
    if (found == "gpu") != (o.platform == "cuda"):
        raise SystemExit(f"--platform {o.platform}: JAX runs on {found}")
    for n, serial in enumerate(range(o.worker, models(o), o.workers)):
        if time.monotonic() - begun > o.seconds:
            break
        seeds, layout, batch = drawn(o, serial)
        _say(begin=serial)
        try:
            made = compare(seeds, layout, batch, o.draws)
        except AssertionError as why:
            _say(failed=serial, columns=len(seeds), why=str(why)[:4000], alone=_alone(o, serial))
            if not o.keep_going:
                break
        else:
            counts = collections.Counter(c.kind for c in made.model.columns)
            for c in made.report.columns:
                counts[f"{c.status}: {c.reason}" if c.reason else c.status] += 1
            _say(passed=serial, columns=len(seeds), lost=made.lost, counts=counts)
        if n % CLEARED == CLEARED - 1:
            jax.clear_caches()
    _say(done=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return 0


def _alone(o: argparse.Namespace, serial: int) -> str:
    """The first column of a model that fails without the others."""
    from tests.random_compare import compare

    seeds, layout, batch = drawn(o, serial)
    for s in seeds:
        try:
            compare([s], layout, batch, o.draws)
        except AssertionError as why:
            return f"column seed {s} fails alone: {str(why)[:4000]}"
    return "no column fails alone"


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _pin(worker: int, workers: int) -> None:
    """A share of the processors for each worker, so that their thread pools do not crowd one another."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // workers, 1)
    first = worker * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])


# ---- all of them -----------------------------------------------------------------------------------------------------


class _Tally:
    def __init__(self) -> None:
        self.models = self.columns = self.lost = self.with_lost = self.memory = 0
        self.failed: dict[int, str] = {}
        self.broken: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def take(self, line: dict[str, Any]) -> None:
        if "passed" in line or "failed" in line:
            self.models += 1
            self.columns += line["columns"]
        if "failed" in line:
            self.failed[line["failed"]] = f"{line['why']}\n{line['alone']}"
        if "passed" in line:
            self.counts.update(line["counts"])
            self.lost += line["lost"]
            self.with_lost += line["lost"] > 0
        self.memory = max(self.memory, line.get("done", 0))


def main(args: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing differs, else 1."""
    o = parse(args)
    if o.worker is not None:
        return work(o)
    o.workers = max(min(o.workers, models(o)), 1)
    begun, tally = time.monotonic(), _Tally()
    run = _Run(o, tally)
    # What is known is worth more than a clean end: `timeout` and Ctrl-C get the summary, too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGINT may be ignored
    try:
        run.all()
    except KeyboardInterrupt:
        tally.broken.append("stopped from outside")
    finally:
        run.stop()
        signal.signal(signal.SIGTERM, before)
    _summary(o, tally, time.monotonic() - begun)
    return int(bool(tally.failed or tally.broken))


class _Run:
    """The workers of a run, and what they say."""

    def __init__(self, o: argparse.Namespace, tally: _Tally) -> None:
        self.o, self.tally = o, tally
        self.words: queue.Queue[tuple[int, str]] = queue.Queue()
        self.running = {k: _start(o, k, self.words) for k in range(o.workers)}
        self.at: dict[int, int] = {}
        self.heard = dict.fromkeys(self.running, time.monotonic())

    def all(self) -> None:
        """Hears all workers to their ends, or to the first failure."""
        while self.running:
            try:
                k, text = self.words.get(timeout=1.0)
            except queue.Empty:
                self.hanging()
                continue
            self.heard[k] = time.monotonic()
            if not text:
                self.ended(k)
            elif not text.startswith("{"):
                print(f"worker {k}: {text}", end="", flush=True)
            elif not self.line(k, json.loads(text)) and not self.o.keep_going:
                return

    def hanging(self) -> None:
        for k, process in self.running.items():
            if time.monotonic() - self.heard[k] > PATIENCE:
                process.kill()
                self.tally.broken.append(f"worker {k} hangs in model {self.at.get(k)}")
                self.heard[k] = float("inf")

    def ended(self, k: int) -> None:
        code = self.running.pop(k).wait()
        if code != 0:
            self.tally.broken.append(f"worker {k} ended with {code}, model {self.at.get(k)}")

    def line(self, k: int, line: dict[str, Any]) -> bool:
        """Takes a worker's line; False if it is a failure."""
        o = self.o
        self.at[k] = line.get("begin", self.at.get(k))
        self.tally.take(line)
        failed = line.get("failed")
        if failed is not None:
            name = f"FAILED model {failed} of --seed {o.seed} --per-model {o.per_model}"
            print(f"{name}: {self.tally.failed[failed]}", flush=True)
        return failed is None

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()


def command(o: argparse.Namespace, k: int) -> list[str]:
    """The command line of worker `k`."""
    made = [sys.executable, "-m", "tests.random_run", "--worker", str(k)]
    for name in ("columns", "seed", "per_model", "draws", "seconds", "workers", "platform"):
        made += [f"--{name.replace('_', '-')}", str(getattr(o, name))]
    return [*made, *(["--keep-going"] if o.keep_going else [])]


def _start(
    o: argparse.Namespace, k: int, words: queue.Queue[tuple[int, str]]
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command(o, k),
        env=environment(o.platform),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words.put((k, line))
        words.put((k, ""))

    threading.Thread(target=read, daemon=True).start()
    return process


def _summary(o: argparse.Namespace, t: _Tally, seconds: float) -> None:
    print(
        f"{t.models} models, {t.columns} columns, {len(t.failed)} failed, seed {o.seed}, {o.platform}"
    )
    for name, n in sorted(t.counts.items()):
        print(f"  {n:6d} {name}")
    print(f"  {t.lost:6d} extremes whose NaN plain JAX lost, in {t.with_lost} models")
    for why in t.broken:
        print(f"BROKEN: {why}")
    if t.failed:
        print(f"the first is model {min(t.failed)} of --seed {o.seed} --per-model {o.per_model}")
    print(
        f"{seconds:.0f} s, {t.columns / seconds:.0f} columns/s in {o.workers} processes, "
        f"at most {t.memory >> 10} MiB each"
    )


if __name__ == "__main__":
    sys.exit(main())
