"""Many threads call one server for long, while its weights change: right results, flat memory, no deadlock.

python tools/stress.py [--threads 16] [--calls 10000]

Each call has a batch of one of several sizes, through `server(batch)`, leased views, or the decorated function. Another
thread updates the weights all the time. A result must be that of one of the two sets of weights, bit for bit: the
columns are single lookups. Memory is read when a fifth of the calls are through, and at the end.
"""

import argparse
import gc
import pathlib
import resource
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import recom_jax

SIZES = (1, 3, 16, 64, 257)
COLUMNS = 12
GROWTH = 1.05  # of resident memory, at most


def model(tables: dict[str, jax.Array], batch: dict[str, Any]) -> jax.Array:
    found = [jnp.take(t, batch[name], axis=0, mode="clip") for name, t in tables.items()]
    return jnp.concatenate([*found, batch["dense"]], axis=1)


def weights(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        f"c{k}": jnp.asarray(rng.normal(size=(50 + k, 8)).astype(np.float32))
        for k in range(COLUMNS)
    }


def batch_of(size: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([size, seed])
    ids = {f"c{k}": rng.integers(-3, 70, size).astype(np.int32) for k in range(COLUMNS)}
    return {**ids, "dense": rng.normal(size=(size, 4)).astype(np.float32)}


def resident() -> int:
    """Bytes of memory in use."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--threads", type=int, default=16)
    p.add_argument("--calls", type=int, default=10_000)
    args = p.parse_args()
    both = weights(0), weights(1)
    ours = recom_jax.optimize(model)
    server = ours.bind(both[0])
    batches = [batch_of(size, seed) for size in SIZES for seed in range(3)]
    wanted = [[np.asarray(jax.jit(model)(w, b)) for w in both] for b in batches]
    for b in batches:
        jax.block_until_ready((server(b), ours(both[0], b)))
    faults: list[str] = []
    updates, through = 0, [0] * args.threads
    done = threading.Event()

    def update() -> None:
        nonlocal updates
        while not done.is_set():
            updates += 1
            server.update(both[updates % 2])
            time.sleep(0.002)

    def work(thread: int) -> None:
        try:
            for n in range(args.calls):
                k = (thread * 7 + n * 5) % len(batches)
                batch, want = batches[k], wanted[k]
                way = (thread + n) % 8
                if way == 0:
                    out, want = ours(both[0], batch), want[:1]
                elif way < 3:
                    views = server.input_views(batch)
                    for name, x in batch.items():
                        views[name][...] = x
                    out = server(views)
                    del views, x  # a slot is not free while views of it are around
                else:
                    out = server(batch)
                got = np.asarray(out)
                if not any(np.array_equal(got, w) for w in want):
                    faults.append(f"thread {thread}, call {n}: neither set of weights gives this")
                    return
                through[thread] = n + 1
        except BaseException as why:
            faults.append(f"thread {thread}: {why!r}")

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(args.threads)]
    changer = threading.Thread(target=update, daemon=True)
    begun = time.perf_counter()
    for t in (*threads, changer):
        t.start()
    early, last, moved = 0, -1, time.monotonic()
    while any(t.is_alive() for t in threads):
        time.sleep(0.5)
        now = sum(through)
        if now != last:
            last, moved = now, time.monotonic()
        elif time.monotonic() - moved > 60:
            print(f"no call ended for a minute, after {now:,}: deadlock")
            return 1
        if not early and now * 5 >= args.threads * args.calls:
            gc.collect()
            early = resident()
    took = time.perf_counter() - begun
    done.set()
    changer.join()
    gc.collect()
    late = resident()
    calls = sum(through)
    print(
        f"{calls:,} calls of {args.threads} threads in {took:.1f} s ({calls / took:,.0f} a second), "
        f"{updates:,} updates; resident {early / 2**20:.1f} MiB after a fifth, {late / 2**20:.1f} MiB at the end"
    )
    for fault in faults[:5]:
        print(fault)
    grown = early > 0 and late > GROWTH * early
    if grown:
        print("memory grew")
    return int(bool(faults) or grown or calls < args.threads * args.calls)


if __name__ == "__main__":
    sys.exit(main())
