"""Stage 7 for CUDA: a `Program` -> what its custom call carries. Runs when a call is lowered, where falling back to
plain JAX is still possible; needs the run-time compiler, no driver and no GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import threading
from typing import Any

import numpy as np

from recom_jax import ffi
from recom_jax.cache import Cache
from recom_jax.cuda import codegen, nvrtc
from recom_jax.cuda.text import Schedule
from recom_jax.cuda.units import SEARCHES
from recom_jax.errors import CudaError
from recom_jax.options import Options
from recom_jax.program import Program

# Buffers that a launch may name: its parameters take 8 bytes for each, which the driver copies at every launch. The
# last is what fits a kernel's parameters; a call with more buffers has a table of them on the device (TABLE).
BUCKETS = (32, 512, 4064)
TABLE = 0
FOUND_BYTES = 1 << 16  # a tile that searches its segment ids says in a byte what it has found
# Parameters of more than 4 KiB, and the PTX for them.
OLDEST_DRIVER = (12, 1)
_KEEP = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A program's kernel.

    Attributes:
      source: CUDA C++.
      launch: launch words.
      image: PTX, or machine code where the driver here is older than the compiler.
      digest: hex digest of the image.
      pointers: buffers that one launch may name; 0: any number, in a table on the device.
    """

    source: str
    launch: bytes
    image: bytes
    digest: str
    pointers: int


_LOCK = threading.Lock()
_MADE: collections.OrderedDict[tuple[str, int, str, Schedule], Kernel] = collections.OrderedDict()


def bucket(n_buffers: int) -> int:
    """The smallest bucket that holds a call's buffers, or `TABLE`."""
    return next((b for b in BUCKETS if n_buffers <= b), TABLE)


def searches(launch: bytes) -> bool:
    """Whether tiles of any class may search their segment ids: then calls have memory for what they find."""
    words = np.frombuffer(launch, np.int64)
    first = 4 + (3 if words[1] == codegen.TUNED_VERSION else 0)
    return bool((words[first : first + 4 * int(words[2])].reshape(-1, 4)[:, 1] >= SEARCHES).any())


def scratch_of(kernel: Kernel, n_buffers: int) -> tuple[int, ...]:
    """Bytes of what each execution of a call needs beside its buffers, in this order behind its results: memory for
    what tiles find, and the table.

    Args:
      n_buffers: physical operands and results of the call.
    """
    found = (FOUND_BYTES,) if searches(kernel.launch) else ()
    table = table_bytes(kernel, n_buffers + len(found))
    return (*found, table) if table else found


def table_bytes(kernel: Kernel, n_buffers: int) -> int:
    """Bytes of the table that each execution of a call needs; 0 if parameters hold its buffers."""
    return 8 * n_buffers if kernel.pointers == TABLE else 0


def kernel_for(
    program: Program,
    digest: str,
    n_buffers: int,
    options: Options,
    portable: bool = False,
    schedule: Schedule = codegen.DEFAULT,
) -> Kernel:
    """Generates and compiles a kernel, unless this process or the disk cache has it.

    Args:
      digest: of the program's words.
      n_buffers: physical operands and results of the call.
      portable: the call may run on another machine: PTX, whatever the driver here.
      schedule: what `tune` chose. Of `options`, `long_bags` joins it.

    Raises:
      CudaError: no compiler, or a driver that is too old.
      codegen.Unsupported: the program holds what this target cannot express.
    """
    schedule = scheduled_as(options, schedule)
    jagged = any(i.op == "JREGION" for cls in program.classes for i in cls.code)
    pointers = bucket(n_buffers + jagged)  # what tiles find
    arch = "" if portable else native_arch()
    key = (digest, pointers, arch, schedule)
    with _LOCK:
        if key in _MADE:
            _MADE.move_to_end(key)
            return _MADE[key]
    made = codegen.generate(program, schedule)
    image = _image(made.source, pointers, arch, options)
    kernel = Kernel(made.source, made.launch, image, hashlib.sha256(image).hexdigest(), pointers)
    _dump(kernel, arch, options)
    with _LOCK:
        _MADE[key] = kernel
        while len(_MADE) > _KEEP:
            _MADE.popitem(last=False)
    return kernel


def scheduled_as(options: Options, schedule: Schedule = codegen.DEFAULT) -> Schedule:
    """A schedule with what options say of it."""
    return dataclasses.replace(schedule, long=True) if options.long_bags else schedule


def native_arch() -> str:
    """ "sm_*" of the devices here if their driver is older than the compiler, whose PTX it would refuse; else ""."""
    info: dict[str, Any] = ffi.extension().cuda_info()
    if info["driver"] is None or not info["devices"]:
        return ""
    if tuple(info["driver"]) < OLDEST_DRIVER:
        raise CudaError(
            "recom_jax: the CUDA driver is of version {}.{}, fused kernels need {}.{} or newer".format(
                *info["driver"], *OLDEST_DRIVER
            )
        )
    if tuple(info["driver"]) >= nvrtc.version():
        return ""
    kinds = {tuple(d["capability"]) for d in info["devices"]}
    if len(kinds) > 1:
        return ""
    ((major, minor),) = kinds
    return f"sm_{major}{minor}"


def _image(source: str, pointers: int, arch: str, options: Options) -> bytes:
    kind = "cubin" if arch else "ptx"
    cache = Cache.of(options)
    key = nvrtc.key(source, pointers, arch)
    image = cache.get(kind, key)
    if image is None:
        if arch:
            image = nvrtc.sass(source, arch, pointers)[0]
        else:
            image = nvrtc.ptx(source, pointers).text.encode()
        cache.put(kind, key, image)
    return image


def _dump(kernel: Kernel, arch: str, options: Options) -> None:
    """Keeps the text, the PTX, what the machine code takes, and that code, if asked to."""
    if options.dumps_to is None:
        return
    from recom_jax import pipeline

    code: dict[str, bytes] = {}
    try:
        code["cubin"], _, figures = nvrtc.sass(kernel.source, arch or "sm_90", kernel.pointers)
        taken = "\n".join(str(f) for f in figures)
        ptx = nvrtc.ptx(kernel.source, kernel.pointers).text
    except CudaError as why:
        taken = ptx = str(why)
    pipeline.dump(options, cuda=kernel.source, ptx=ptx, sass=taken, **code)


__all__ = [
    "BUCKETS",
    "OLDEST_DRIVER",
    "TABLE",
    "Kernel",
    "bucket",
    "kernel_for",
    "native_arch",
    "scratch_of",
    "searches",
    "table_bytes",
]
