"""First result and peak memory, each in a process of its own.

    python -m benchmarks.cold '{"spec": {...}, "contestant": "recom_jax.optimize", "batch": 256}'

prints one line of JSON: seconds from the call to the ready result (imports, parameters and inputs exist
already), and the process's memory.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import machine, record
from benchmarks.context import Context
from benchmarks.steady import AGAIN, BIND, HAND, HAND_LOOP, OURS, PLAIN, TUNED


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one job in this process, which should have done nothing before."""
    import jax

    import recom_jax
    from benchmarks import workloads

    w = workloads.make(job["spec"])
    name = job["contestant"]
    params = jax.block_until_ready(w.init())
    batch = w.batches(job["batch"], 1)[0]
    if name in (HAND, HAND_LOOP) and w.hand and w.stack_params and w.stack_batch:
        params, batch = jax.block_until_ready(w.stack_params(params)), w.stack_batch(batch)
    server: Any = None
    arguments: tuple[Any, ...]
    if name == BIND:
        call = server = recom_jax.optimize(w.fn).bind(params)
        arguments = (batch,)
    else:
        fn = {
            OURS: w.fn,
            AGAIN: w.fn,
            PLAIN: w.fn,
            TUNED: w.tuned,
            HAND: w.hand,
            HAND_LOOP: w.hand_loop,
        }[name]
        if fn is None:
            raise ValueError(f"{w.name} has no form for {name!r}")
        call = recom_jax.optimize(fn) if name in (OURS, AGAIN) else jax.jit(fn)
        arguments = (params, jax.block_until_ready(jax.device_put(batch)))
    before = machine.memory_mib()
    from_the_call = machine.reset_peak_memory()  # making the parameters took some memory too
    begun = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    seconds = time.perf_counter() - begun
    return {
        "first_s": seconds,
        "before_mib": before,
        "after_mib": machine.memory_mib(),
        "peak_mib": machine.peak_memory_mib(),
        "peak_is_of_the_call": from_the_call,
        "arena_mib": server.cost(batch).arena / 2**20 if server else 0.0,
        "columns": w.columns,
        "from_disk": recom_jax.stats().get("programs_from_disk", 0),
    }


def spawn(job: Mapping[str, Any], cache: str = "off") -> dict[str, Any]:
    """Runs one job in a fresh process, without any compilation cache of JAX's.

    Args:
      cache: folder of what recom_jax and CUDA's driver keep, or "off".

    Raises:
      RuntimeError: it failed; with the end of what it wrote.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    env |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "RECOM_CACHE_DIR": cache}
    env |= {"CUDA_CACHE_DISABLE": "1"} if cache == "off" else {"CUDA_CACHE_PATH": cache}
    done = subprocess.run([sys.executable, "-m", "benchmarks.cold", json.dumps(job)], cwd=machine.ROOT,
                          env=env, capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{job}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(context: Context, spec: Mapping[str, Any], names: Sequence[str], batch: int
            ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:  # fmt: skip
    """`settings.processes` fresh processes per contestant, interleaved.

    What doesn't run our code is kept in `context.kept` for the next time.

    Returns:
      The answers by contestant, and for kept ones the date of their measurement.
    """
    from_disk: dict[str, str] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    peer_versions = {k: v for k, v in machine.versions().items()
                     if k in ("python", "jax", "jaxlib", "numpy")}  # fmt: skip
    path = context.kept / f"{machine.key(machine.machine(), peer_versions)}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    label = {n: json.dumps([spec, n, batch], sort_keys=True) for n in names}
    for name in names:
        found = None if name in (OURS, AGAIN, BIND) or context.renew_kept else kept.get(label[name])
        if found and len(found["answers"]) >= context.settings.processes:
            answers[name], from_disk[name] = found["answers"], found["date"]
    todo = [name for name in names if name not in answers]
    with tempfile.TemporaryDirectory() as folder:
        if AGAIN in todo:
            with context.progress.step(f"{spec['kind']}: the process that keeps the program"):
                spawn({"spec": spec, "contestant": AGAIN, "batch": batch}, folder)
        for turn in range(context.settings.processes):
            for name in todo:
                title = f"{spec['kind']}: fresh process {turn + 1} of {name}"
                with context.progress.step(title):
                    job = {"spec": spec, "contestant": name, "batch": batch}
                    answer = spawn(job, folder if name == AGAIN else "off")
                answers.setdefault(name, []).append(answer)
                if name not in (OURS, AGAIN, BIND):
                    kept[label[name]] = {"answers": answers[name], "date": machine.now()}
                    record.write(path, kept)
    return answers, from_disk


if __name__ == "__main__":
    print(json.dumps(child(json.loads(sys.argv[1]))))
