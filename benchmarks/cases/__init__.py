"""The cases by name. `run` of each module takes a `Context` and returns a `Result`."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable

from benchmarks.cases import (
    ablation,
    backward,
    columns_e,
    corun,
    first_result,
    gpu,
    gpu_ablation,
    gpu_corun,
    gpu_corun_mesh,
    gpu_end_to_end,
    gpu_first_result,
    gpu_profile,
    gpu_recflex,
    gpu_scaling,
    gpu_serve,
    gpu_tuned,
    idioms,
    micro,
    models,
    others,
    scaling,
    sparse,
    stages,
    strings,
    tensorflow_e,
)
from benchmarks.context import Context
from benchmarks.pieces import Combine, Join, Pieces
from benchmarks.record import Result


@dataclasses.dataclass(frozen=True)
class Case:
    """`minutes` is about what it takes on a quiet machine with two cores.

    `gpu`: it needs one. `package`: what must be installed besides, or "". A case has `run`, or `pieces` (and what
    `finish` makes of those that are there, once `combine` has joined those that measured the same thing).
    """

    name: str
    title: str
    minutes: float
    run: Callable[[Context], Result] | None = None
    gpu: bool = False
    package: str = ""
    pieces: Pieces | None = None
    finish: Join | None = None
    combine: Combine | None = None

    @property
    def can_run(self) -> bool:
        """Whether its package is there."""
        return not self.package or importlib.util.find_spec(self.package) is not None


ALL = (
    Case("columns_e", "Model E, columns only: the promises", 4, columns_e.run),
    Case("first_result", "First result and memory, in fresh processes", 8, first_result.run),
    Case("model_e", "Model E with its MLPs", 9, models.run_e),
    Case("model_f", "Model F with its MLPs", 11, models.run_f),
    Case("micro", "Microbenchmark: bucketize columns", 6, micro.run),
    Case("scaling", "Scaling in the number of columns", 4, scaling.run),
    Case("ablation", "Model E with a rewrite left out", 3, ablation.run),
    Case("stages", "The compiler's stages, by columns", 1, stages.run),
    Case("recflex", "RecFlex A, jagged bags (cut down)", 3, others.run_recflex),
    Case("criteo", "Criteo: DLRM", 2, others.run_criteo),
    Case("strings", "Strings to ids on the host", 1, strings.run),
    Case(
        "tensorflow_e",
        "Model E from raw strings, beside TensorFlow",
        5,
        tensorflow_e.run,
        package="tensorflow",
    ),
    *(
        Case(
            f"corun_{number}",
            f"RAP's plan {number}: preprocessing beside training",
            2,
            functools.partial(corun.run, number=number),
        )
        for number in (0, 2, 3)
    ),
    Case("backward", "Gradients of tables, fused and dense", 6, backward.run),
    Case("sparse", "Sparse training steps by table size", 5, sparse.run),
    Case("idioms", "Every idiom against plain jit", 5, idioms.run),
    Case(
        "gpu_idioms",
        "CUDA: every idiom against plain jit",
        2,
        gpu=True,
        pieces=idioms.pieces,
        finish=idioms.finish,
        combine=idioms.combine,
    ),
    Case(
        "gpu_first_result",
        "CUDA: first results, in fresh processes",
        2,
        gpu=True,
        pieces=gpu_first_result.pieces,
    ),
    Case("gpu_recflex", "CUDA: kernel times of RecFlex", 4, gpu=True, pieces=gpu_recflex.pieces),
    Case(
        "gpu_kernels",
        "CUDA: kernel times of E and F",
        4,
        gpu=True,
        pieces=gpu.kernel_pieces,
        finish=gpu.finish_kernels,
    ),
    Case(
        "gpu_model_e",
        "CUDA: model E from numpy arrays, beside plain JAX",
        4,
        gpu=True,
        pieces=functools.partial(gpu_end_to_end.pieces, kind="model_e"),
        finish=functools.partial(gpu_end_to_end.finish, kind="model_e"),
    ),
    Case(
        "gpu_model_f",
        "CUDA: model F from numpy arrays, beside plain JAX",
        4,
        gpu=True,
        pieces=functools.partial(gpu_end_to_end.pieces, kind="model_f"),
        finish=functools.partial(gpu_end_to_end.finish, kind="model_f"),
    ),
    Case(
        "gpu_scaling",
        "CUDA: scaling in columns and batch",
        6,
        gpu=True,
        pieces=gpu_scaling.pieces,
    ),
    Case(
        "gpu_ablation",
        "CUDA: kernel times with parts left out",
        3,
        gpu=True,
        pieces=gpu_ablation.pieces,
    ),
    Case(
        "gpu_tuned",
        "CUDA: what tuning gains",
        5,
        gpu=True,
        pieces=gpu_tuned.pieces,
    ),
    Case(
        "gpu_profile",
        "CUDA: Nsight Compute of the fused kernel",
        3,
        gpu=True,
        pieces=gpu_profile.pieces,
    ),
    Case(
        "gpu_serve",
        "CUDA: model E served from numpy arrays",
        2,
        gpu=True,
        pieces=gpu_serve.pieces,
    ),
    *(
        Case(
            f"gpu_corun_{number}_{size}",
            f"CUDA: {'RAP' if number < 4 else 'not RAP'}'s plan {number} beside training, batch {size:,}",
            1,
            functools.partial(gpu_corun.run, number=number, size=size),
            gpu=True,
        )
        for number in range(5)
        for size in gpu_corun.BATCHES
    ),
    *(
        Case(
            f"gpu_corun_mesh_{number}",
            f"CUDA: RAP's plan {number} over all GPUs",
            2,
            functools.partial(gpu_corun_mesh.run, number=number),
            gpu=True,
        )
        for number in (0, 2, 3)
    ),
)
CASES = {case.name: case for case in ALL}
