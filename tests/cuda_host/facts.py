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

from recom_jax import _recom, pack
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
            "order": self.host.calls_in_order().decode().split(),
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


def searched(run: Runner) -> dict[str, Any]:
    """Calls of so many segment ids that tiles search them, and of fewer."""
    run.host.set_device(0, 1)
    found = {}
    for name, n in (("many", 1 << 16), ("few", 1 << 10)):
        s = jax.ShapeDtypeStruct
        given = s((100, 8), jnp.float32), s((n,), jnp.int32), s((n,), jnp.int32)
        call = captured(run.host, lambda t, x, seg: jax.ops.segment_sum(t[x], seg, 500), *given)
        found[name] = {"first": run(call, "initialize"), "again": run(call, "initialize")}
        keep = HEAD + call.n_buffers
        run(call, "execute")
        addresses = call.move(1 << 16)
        found[name] |= {"execute": run(call, "execute", keep), "addresses": addresses}
        call.move((1 << 16) + 4)
        found[name]["unaligned"] = run(call, "execute", keep)
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


class Slot:
    """A slot on a device, and calls of `recom_stage_v2` that read it."""

    def __init__(self, run: Runner, device: int, token: int) -> None:
        self.run, self.token = run, token
        layout = pack.layout_of([pack.LeafSpec(np.dtype(np.int32), (4096,))])
        self.lease = pack.SlotRing(layout, 2).acquire()
        self.nbytes = layout.total_bytes
        run.host.set_device(device, 1)
        self.lease.register_token(token, device, uploads=True)

    def upload(self) -> None:
        issued = self.lease.upload(self.token, 0)
        if issued is not None:
            issued.join()

    def read(self, part: int, at: int = 1 << 28, token: int | None = None, **other: int) -> Any:
        u8 = _recom.constants()["dtype"]["uint8"]
        numbers = {"nbytes": self.nbytes, "begin": 64, "whole": 1, **other}
        call = Call(
            self.run.host,
            [(u8, (numbers["nbytes"],))],
            [*([(u8, (part,))] if part else []), (u8, ())],
            {k: np.int64(v) for k, v in numbers.items()},
        )
        self.run.host.set_address(call.at, 0, self.token if token is None else token)
        self.run.host.set_address(call.at, 1, at)
        return self.run(call, "execute", target="recom_stage_v2")


def parts(run: Runner) -> dict[str, Any]:
    slot = Slot(run, 0, 1 << 30)
    found = {"not uploaded": slot.read(100)}
    slot.upload()
    found["uploaded"] = slot.read(100)
    found["again"] = slot.read(100)
    found["long"] = slot.read(2 * 4096 + 1)
    found["odd"] = slot.read(100, at=(1 << 28) + 4)
    found["nothing"] = slot.read(0)
    found["outside"] = slot.read(100, begin=slot.nbytes - 16)
    found["another size"] = slot.read(100, nbytes=slot.nbytes - 64)
    found["no slot"] = slot.read(100, token=(1 << 30) + 256)
    return found


def refused(run: Runner) -> dict[str, Any]:
    """Another device, whose driver takes no module."""
    slot = Slot(run, 1, 1 << 31)
    slot.upload()
    run.host.refuse_modules(1)
    seen = slot.read(100)
    run.host.refuse_modules(0)
    return seen


def main() -> None:
    run = Runner(sys.argv[1])
    told = {f.__name__: f(run) for f in (steady, searched, mistaken, many, faults, parts, refused)}
    print("FACTS " + json.dumps(told))


if __name__ == "__main__":
    main()
