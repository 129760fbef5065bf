"""Kernel times of the models on a GPU, each result compared with the CPU interpreter's. Needs no JAX on the way.

python tools/gpu_kernels.py [--models e f A B C D] [--batches 256 2048] [--rows 1048576]
"""

import argparse
import json
import pathlib
import sys
import time

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import gpu_kernel
from examples.recflex import recflex
from examples.recom_models import model_e, model_f


def oracle(kernel: gpu_kernel.Kernel) -> list[np.ndarray]:
    """What the CPU interpreter makes of the same program and operands."""
    from recom_jax import _recom
    from recom_jax.cpu import encode

    outs = [np.full(x.shape, 7, x.dtype) for x in kernel.results]
    binding = np.array([x for k in range(len(kernel.operands)) for x in (k, -1)], np.int64)
    ins = [np.asarray(x) for x in kernel.operands]
    _recom.run_program(encode(kernel.program).words, binding, ins, outs, 16)
    return outs


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--models", nargs="+", default=["e", "f", "A", "B", "C", "D"])
    p.add_argument("--batches", nargs="+", type=int, default=[256, 512, 2048])
    p.add_argument("--rows", type=int, default=2**20)
    p.add_argument("--scale", type=float, default=1.0)
    p.add_argument("--no-check", action="store_true")
    p.add_argument("--out", type=pathlib.Path)
    args = p.parse_args()
    lines = []
    for name in args.models:
        if name in "ef":
            model = {"e": model_e, "f": model_f}[name](large_rows=args.rows, scale=args.scale)
        else:
            model = recflex(name, scale=args.scale, expand="searchsorted")
        begun = time.perf_counter()
        params = jax.device_put(model.init(seed=0))
        print(f"{name}: tables in {time.perf_counter() - begun:.1f} s", flush=True)
        for size in args.batches:
            begun = time.perf_counter()
            kernel = gpu_kernel.kernel_of(model.columns, params, model.batch(size, 1))
            made = time.perf_counter() - begun
            warm = gpu_kernel.time_kernel(kernel)
            cold = gpu_kernel.time_kernel(kernel, calls=1, flush=256 << 20)
            worst = None
            if not args.no_check:
                want = oracle(kernel)
                worst = max(gpu_kernel.error(kernel, w, k) for k, w in enumerate(want))
            line = {
                "model": name, "batch": size, "warm_us": warm.median * 1e3, "cold_us": cold.median * 1e3,
                "launches": warm.launches, "blocks": warm.blocks, "operand_mb": kernel.operand_bytes / 1e6,
                "result_mb": kernel.result_bytes / 1e6, "error": worst, "prepare_s": made,
            }  # fmt: skip
            lines.append(line)
            print(
                json.dumps(
                    {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}
                ),
                flush=True,
            )
        del params
    if args.out:
        args.out.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
