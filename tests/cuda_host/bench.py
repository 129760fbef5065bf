"""Nanoseconds of the handlers of CUDA on this machine's processor, with a driver that does nothing.

python -m tests.cuda_host.bench libcuda.so.1
"""

from __future__ import annotations

import sys

from tests import cuda_host

host = cuda_host.load(sys.argv[1])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from recom_jax import _recom  # noqa: E402
from tests.cuda_host.calls import captured  # noqa: E402


def small(items, ids):
    return items[ids % 100]


def wide(tables, ids):
    return jnp.concatenate([t[i % 100] for t, i in zip(tables, ids, strict=True)], axis=1)


def main() -> None:
    f32, i32 = jnp.float32, jnp.int32
    s = jax.ShapeDtypeStruct
    handlers = _recom.cuda_handlers()
    stages = handlers["recom_fused_v1"]
    for name, fn, args in (
        ("one column", small, (s((100, 8), f32), s((64,), i32))),
        ("100 columns", wide, ([s((100, 8), f32)] * 100, [s((64,), i32)] * 100)),
        ("1,000 columns", wide, ([s((100, 8), f32)] * 1000, [s((64,), i32)] * 1000)),
    ):
        call = captured(host, fn, *args)
        host.set_device(0, 1)
        for stage, key in ((2, "initialize"), (3, "execute")):
            h = cuda_host.address_of(stages[key])
            why, _, _ = call.run(h, stage)
            assert not why, why
            n = 200000 if name == "one column" else 2000
            best = min(call.run(h, stage, n)[1] for _ in range(5))
            print(f"{name:14} {key:10} {best:9.1f} ns, {call.run(h, stage)[2]} allocations")


if __name__ == "__main__":
    main()
