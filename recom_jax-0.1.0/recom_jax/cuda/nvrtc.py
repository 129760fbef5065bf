"""CUDA text -> PTX (what a call carries) or machine code (to look at), by NVIDIA's run-time compiler.

No driver and no GPU are needed. The compiler is a library, found in this order: pip's packages, the toolkit that
``CUDA_HOME`` or ``CUDA_PATH`` names, ``/usr/local/cuda``, the loader's own search path.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib.util
import pathlib
import re
import threading
from collections.abc import Sequence

from recom_jax import options
from recom_jax.errors import CudaError

HEADERS = pathlib.Path(__file__).parent / "headers"
# PTX of the oldest architecture runs on all later ones; the driver compiles it for the device it meets.
ARCH = "compute_80"
# Results must equal XLA's and plain JAX's to the last bit: nothing is contracted, flushed or approximated.
FLAGS = (
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "-default-device",
)
NAME = "recom_fused.cu"
_KEEP = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Ptx:
    """A compiled kernel.

    Attributes:
      text: the PTX.
      digest: hex digest of it, the key of the loaded module.
      log: warnings of the compiler.
    """

    text: str
    digest: str
    log: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What the machine code of one function takes; `spill_*`, `stack` and `local` in bytes a thread."""

    function: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    local: int


@functools.lru_cache(maxsize=1)
def libraries() -> list[str]:
    """Where the compiler's library may be, best first."""
    folders: list[pathlib.Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for part in ("cu13/lib", "cuda_nvrtc/lib", "cu12/lib"):
            folders.append(pathlib.Path(root) / part)
        folders += sorted(pathlib.Path(root).glob("cu*/lib"), reverse=True)
    folders += [home / part for home in options.cuda_homes() for part in ("lib64", "lib")]
    folders.append(pathlib.Path("/usr/local/cuda/lib64"))
    found: dict[str, None] = {}
    for folder in folders:
        # The newest name first; the -builtins library lies beside and is not meant.
        for path in sorted(folder.glob("libnvrtc.so*"), key=lambda p: (len(p.name), p.name)):
            found.setdefault(str(path))
    return list(found)


@functools.lru_cache(maxsize=1)
def headers() -> tuple[tuple[str, str], ...]:
    """(name, text) of the headers that a kernel includes."""
    paths = sorted(p for p in HEADERS.iterdir() if p.suffix in (".h", ".cuh"))
    return tuple((p.name, p.read_text()) for p in paths)


def version() -> tuple[int, int]:
    """The compiler's. Raises CudaError if there is none."""
    from recom_jax import ffi

    try:
        found: tuple[int, int] = ffi.extension().nvrtc_version(libraries())[0]
    except RuntimeError as why:
        raise CudaError(str(why)) from None
    return found


def ptx(source: str, pointers: int) -> Ptx:
    """Compiles a kernel whose launches name up to `pointers` buffers."""
    image, log = _compile(source, (*FLAGS, f"--gpu-architecture={ARCH}", _define(pointers)), False)
    return Ptx(image.decode(), hashlib.sha256(image).hexdigest(), log)


def sass(
    source: str, arch: str = "sm_90", pointers: int = 32
) -> tuple[bytes, str, tuple[Figures, ...]]:
    """Machine code for `arch` ("sm_90"), the assembler's log, and what each function takes."""
    flags = (*FLAGS, f"--gpu-architecture={arch}", _define(pointers), "--ptxas-options=-v")
    image, log = _compile(source, flags, True)
    return image, log, figures(log)


def key(source: str, pointers: int, arch: str = "") -> str:
    """Names an image in a cache: all that it depends on."""
    return repr((version(), FLAGS, arch or ARCH, pointers, headers(), source))


def _define(pointers: int) -> str:
    return f"-DRECOM_POINTERS={pointers}"


_FUNCTION = re.compile(r"(?:Compiling entry function|Function properties for) '?([\w$]+)'?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")


def figures(log: str) -> tuple[Figures, ...]:
    """Reads ``ptxas -v``'s report."""
    out: list[Figures] = []
    name, stack = "", (0, 0, 0)
    for line in log.splitlines():
        if found := _FUNCTION.search(line):
            name, stack = found[1], (0, 0, 0)
        elif found := _STACK.search(line):
            stack = (int(found[1]), int(found[2]), int(found[3]))
        elif found := _USED.search(line):
            more = {kind: int(n) for n, kind in re.findall(r"(\d+) bytes (smem|lmem)", line)}
            out.append(
                Figures(name, int(found[1]), *stack, more.get("smem", 0), more.get("lmem", 0))
            )
    return tuple(out)


_LOCK = threading.Lock()
_DONE: collections.OrderedDict[str, tuple[bytes, str]] = collections.OrderedDict()


def _compile(source: str, flags: Sequence[str], cubin: bool) -> tuple[bytes, str]:
    """The compiler's image and log, from memory if the same text was compiled before."""
    from recom_jax import ffi

    key = hashlib.sha256(repr((source, tuple(flags), headers(), cubin)).encode()).hexdigest()
    with _LOCK:
        if key in _DONE:
            _DONE.move_to_end(key)
            return _DONE[key]
    try:
        made: tuple[bytes, str] = ffi.extension().nvrtc_compile(
            libraries(), source, NAME, headers(), list(flags), cubin
        )
    except RuntimeError as why:
        raise CudaError(str(why)) from None
    with _LOCK:
        _DONE[key] = made
        while len(_DONE) > _KEEP:
            _DONE.popitem(last=False)
    return made
