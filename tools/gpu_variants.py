"""Kernel times of schedules, to choose defaults by: python tools/gpu_variants.py MODEL:BATCH ..."""

import itertools
import pathlib
import sys

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import gpu_kernel
from examples.recflex import recflex
from examples.recom_models import model_e, model_f
from recom_jax.cuda.codegen import Schedule
from tools.gpu_kernels import oracle

# (flight, blocks)
SCHEDULES = ((4, 4), (4, 3), (2, 4), (2, 5), (8, 3))
SLICES, SMS = (0,), (132,)


def main() -> None:
    for spec in sys.argv[1:]:
        name, size = spec.split(":")
        if name in "ef":
            model = {"e": model_e, "f": model_f}[name]()
        else:
            model = recflex(name, expand="searchsorted")
        params = jax.device_put(model.init(seed=0))
        kernel = gpu_kernel.kernel_of(model.columns, params, model.batch(int(size), 1))
        want = oracle(kernel)
        slices = SLICES if name not in "ef" else (0,)
        for (flight, blocks), sms, s in itertools.product(SCHEDULES, SMS, slices):
            timed = gpu_kernel.time_kernel(
                kernel, calls=10, repeats=7, sms=sms, slice_positions=s,
                schedule=Schedule(flight, blocks),
            )  # fmt: skip
            worst = max(gpu_kernel.error(kernel, w, k) for k, w in enumerate(want))
            print(f"{spec} flight {flight} blocks/SM {blocks} sms {sms} slice {s}: "
                  f"{timed.median * 1e3:.1f} us, {timed.blocks} blocks, error {worst:.1e}", flush=True)  # fmt: skip
        del params, kernel


if __name__ == "__main__":
    main()
