"""What the handlers of CUDA do at a call, printed as JSON: run by test_cuda_host.py in a process of its own.

LD_PRELOAD=.../libcuda.so.1 python -m tests.cuda_host.facts .../libcuda.so.1
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax import _recom
from tests import cuda_host
from tests.cuda_host import EXECUTE, INITIALIZE, Call
from tests.cuda_host.calls import captured, lowered

HEAD = 2  # words before the addresses: tiles, words (recom_abi.h)


class Runner:
    """The handlers, and what the driver and the allocator saw of a call."""

    def __init__(self, path: str) -> None:
        self.host = cuda_host.load(path)
        self.handlers = _recom.cuda_handlers()

    def __call__(
        self, call: Call, stage: str, keep: int = 0, target: str = "recom_fused_v1"
    ) -> dict[str, Any]:
        handler = self.handlers[target]
        handler = handler[stage] if isinstance(handler, dict) else handler
        number = INITIALIZE if stage == "initialize" else EXECUTE
        self.host.forget_counts()
        before = _recom.program_stats()
        why, _, allocated = call.run(cuda_host.address_of(handler), number, keep=keep)
        after = _recom.program_stats()
        return {
            "error": why,
            "allocations": allocated,
            "driver": self.host.count_all(),
            "launches": self.host.count_of(b"cuLaunchKernel"),
            "contexts_set": self.host.count_of(b"cuCtxSetCurrent"),
            "plans": after["cuda_plans_uploaded"] - before["cuda_plans_uploaded"],
            "modules": after["cuda_modules_loaded"] - before["cuda_modules_loaded"],
            "late": after["cuda_late_preparations"] - before["cuda_late_preparations"],
            "words": [self.host.last_word(k) for k in range(keep)],
            "grid": self.host.last_grid(),
        }  # fmt: skip


def look(a: Any, b: Any, ids: Any, others: Any) -> Any:
    return jnp.concatenate([a[ids % 100], b[others % 100]], axis=1)


def kinds(batch: int = 64) -> tuple[Any, ...]:
    s = jax.ShapeDtypeStruct
    tables = s((100, 8), jnp.float32), s((100, 8), jnp.float32)
    return (*tables, s((batch,), jnp.int32), s((batch,), jnp.int32))


def steady(run: Runner) -> dict[str, Any]:
    call, found = captured(run.host, look, *kinds()), {}
    run.host.set_device(0, 1)
    found["first"] = run(call, "initialize")
    found["again"] = run(call, "initialize")
    run(call, "execute")
    addresses = call.move(1 << 16)
    found["execute"] = run(call, "execute", HEAD + call.n_buffers)
    found["addresses"] = addresses
    call.move((1 << 16) + 4)
    found["unaligned"] = run(call, "execute", HEAD + call.n_buffers)
    run.host.set_device(0, 0)
    found["elsewhere"] = run(call, "execute")
    return found


def mistaken(run: Runner) -> dict[str, Any]:
    """Calls that differ in one thing, at the same addresses, which must not be taken for one another."""
    run.host.set_device(0, 1)
    ((operands, results, attributes),) = lowered(look, *kinds())
    call = Call(run.host, operands, results, attributes)
    keep = HEAD + call.n_buffers
    found = {"before": run(call, "execute", keep)}
    found["same"] = run(call, "execute", keep)
    layout = np.array(attributes["layout"])
    swapped = layout.reshape(-1, 3).copy()  # physical operand, -1, rank 0
    kind = [(dtype, shape) for dtype, shape in operands]
    pairs = [(i, j) for i in range(4) for j in range(i) if kind[i] == kind[j]]
    for i, j in pairs[:1]:
        swapped[[i, j], 0] = swapped[[j, i], 0]
    call.overwrite("layout", swapped.reshape(-1))
    found["layout"] = run(call, "execute", keep)
    call.overwrite("layout", layout)
    for name in ("hash", "digest"):
        value = attributes[name]
        call.overwrite(name, value[:-1] + ("0" if value[-1] != "0" else "1"))
        found[name] = run(call, "execute", keep)
        call.overwrite(name, value)
    words = np.frombuffer(attributes["launch"], np.int64).copy()
    call.overwrite("launch", np.where(words == words[0], 7, words).tobytes())
    found["launch"] = run(call, "execute", keep)
    call.overwrite("launch", attributes["launch"])
    for k, (_, shape) in enumerate([*operands, *results]):  # the batch alone
        if shape[0] == 64:
            run.host.set_dim(call.at, k, 0, 32)
    found["shapes"] = run(call, "execute", keep)
    for k, (_, shape) in enumerate([*operands, *results]):
        run.host.set_dim(call.at, k, 0, shape[0])
    run.host.set_device(1, 1)
    found["device"] = run(call, "execute", keep)
    run.host.set_device(0, 1)
    found["after"] = run(call, "execute", keep)
    return found


def many(run: Runner) -> dict[str, Any]:
    """More calls than a thread remembers, in turns."""
    run.host.set_device(0, 1)
    (found,) = lowered(look, *kinds(24))
    calls = [Call(run.host, *found) for _ in range(200)]
    for call in calls:
        run(call, "execute")
    out = []
    for k, call in enumerate(calls):
        addresses = call.move((k + 1) << 16)
        seen = run(call, "execute", HEAD + call.n_buffers)
        out.append(
            seen["error"] == ""
            and set(seen["words"][HEAD:]) >= set(addresses)
            and not seen["plans"]
        )
    return {"right": all(out), "n": len(out)}


def faults(run: Runner) -> dict[str, Any]:
    run.host.set_device(0, 1)
    ((operands, results, attributes),) = lowered(look, *kinds(40))
    found = {}
    call = Call(run.host, operands, results, attributes)
    run.host.set_capturing(1)
    found["captured"] = run(call, "execute")
    run.host.set_capturing(0)
    found["late"] = run(call, "execute")
    less = {k: v for k, v in attributes.items() if k != "digest"}
    found["attribute missing"] = run(Call(run.host, operands, results, less), "execute")
    other = {**attributes, "pointers": "32"}
    found["attribute's type"] = run(Call(run.host, operands, results, other), "execute")
    more = {**attributes, "zebra": 1}
    found["attribute too many"] = run(Call(run.host, operands, results, more), "execute")
    found["stage"] = run(
        Call(run.host, operands, results, attributes), "initialize", target="recom_fused_alone_v1"
    )
    key = {**attributes, "key": "k" * 64}
    alone = Call(run.host, operands, results, key)
    found["alone"] = run(alone, "execute", target="recom_fused_alone_v1")
    found["alone again"] = run(alone, "execute", target="recom_fused_alone_v1")
    return found


def main() -> None:
    run = Runner(sys.argv[1])
    parts = {f.__name__: f(run) for f in (steady, mistaken, many, faults)}
    print("FACTS " + json.dumps(parts))


if __name__ == "__main__":
    main()
