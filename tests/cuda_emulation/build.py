"""Compiles CUDA text with the host's C++ compiler, once per content, and runs it (emulate.h says how)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
HEADERS = ROOT / "recom_jax" / "cuda" / "headers"
POINTED = 7  # addresses that one launch adds to a table
POINTERS = 256  # buffers of a launch; each thread has its own copy of a kernel's parameters
GUARD = 512  # bytes between buffers

# No unique symbols: shared memory of an inline function would be that of the first kernel loaded, of another size.
COMMON = (
    *("-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off"),
    "-fno-gnu-unique",
)
# Kernels run once or twice, so what counts is the time to compile them: no optimisation.
# kernel-address: each access calls a function that memory.cc defines. The rest of the instrumentation is turned
# off: what a fiber's stack holds is not the call's. Uninitialized arrays hold garbage.
KERNEL = (
    *(
        "-O0",
        "-g1",
        "-w",
        "-fsanitize=kernel-address,undefined,float-cast-overflow",
        "-fno-sanitize=vptr,return",
    ),
    *("--param", "asan-instrumentation-with-call-threshold=0", "--param", "asan-stack=0"),
    *("--param", "asan-globals=0", "-ftrivial-auto-var-init=pattern", "-fno-exceptions"),
    "-fno-rtti",
)


class EmulationError(AssertionError):
    """The kernel did what a GPU does not forgive."""


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


@functools.lru_cache(maxsize=1)
def missing() -> str | None:
    """Why nothing can be emulated here, None if it can."""
    if shutil.which(compiler()[0]) is None:
        return f"no C++ compiler named {compiler()[0]}"
    probe = subprocess.run(
        [*compiler(), *KERNEL, "-x", "c++", "-", "-fsyntax-only"],
        input="int x;",
        text=True,
        capture_output=True,
    )
    return None if probe.returncode == 0 else f"the C++ compiler refuses {probe.stderr[:200]}"


@functools.lru_cache(maxsize=1)
def _cache() -> pathlib.Path:
    for folder in (ROOT / ".pytest_cache", pathlib.Path(tempfile.gettempdir())):
        out = folder / "cuda_emulation"
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(out, os.W_OK):
            return out
    raise OSError("no folder for compiled kernels")


def _built(key: Sequence[str], sources: dict[str, str], command: Sequence[str]) -> pathlib.Path:
    """The shared object that `command` makes of the sources, from the cache if it is there."""
    digest = hashlib.blake2b(digest_size=12)
    for part in (*key, *command, *compiler(), *sources.values()):
        digest.update(part.encode() + b"\0")
    out = _cache() / f"{digest.hexdigest()}.so"
    if out.exists():
        return out
    with tempfile.TemporaryDirectory(dir=_cache()) as folder:
        for name, text in sources.items():
            pathlib.Path(folder, name).write_text(text)
        run = [*compiler(), *command, "-o", "out.so"]
        done = subprocess.run(run, cwd=folder, text=True, capture_output=True)
        if done.returncode != 0:
            raise EmulationError(f"{shlex.join(run)}\n{done.stderr[:6000]}")
        for name, text in sources.items():  # addr2line reads them, if anything is wrong
            out.with_name(f"{out.stem}.{name}").write_text(text)
        os.replace(pathlib.Path(folder, "out.so"), out)
    return out


@functools.lru_cache(maxsize=1)
def _runtime() -> Any:
    library = ctypes.CDLL(str(runtime()), mode=ctypes.RTLD_GLOBAL)
    library.emu_run.restype = ctypes.c_char_p
    return library


def runtime(extra: Sequence[str] = ()) -> pathlib.Path:
    """The emulator's own object, which every kernel refers to."""
    files = [p for kind in ("*.h", "*.cc", "*.map") for p in sorted(HERE.glob(kind))]
    command = [*COMMON, "-O2", "-g1", "-fvisibility=hidden", "-Wl,--version-script=exports.map"]
    command += ["runtime.cc", "memory.cc", "-ldl", *extra]
    return _built(["runtime"], {p.name: p.read_text() for p in files}, command)


@functools.lru_cache(maxsize=1)
def _headers() -> tuple[str, ...]:
    files = [HERE / "emulate.h", HERE / "threads.h", *sorted(HEADERS.iterdir())]
    return tuple(f.read_text() for f in files if f.suffix in (".h", ".cuh"))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("owner", ctypes.c_void_p),
    )


@dataclasses.dataclass
class Memory:
    """The buffers of a call, apart from each other; results hold garbage.

    Attributes:
      arrays: copies of the operands, then the results: what the kernel sees.
    """

    arrays: list[np.ndarray[Any, Any]]
    regions: list[_Buffer]
    owners: list[np.ndarray[Any, Any]]
    storage: np.ndarray[Any, Any]

    def forget(self) -> None:
        """A launch is over: others may write what it has written."""
        for owner in self.owners:
            if owner.dtype == np.uint32:
                owner[:] = 0

    def readable(self, k: int) -> None:
        """From now on buffer `k` is read only."""
        self.regions[k].owner = None

    def add(self, data: bytes) -> int:
        """One more operand; its address."""
        raw = np.frombuffer(data or b"\0", np.uint8).copy()
        self.owners.append(raw)
        self.regions.append(_Buffer(raw.ctypes.data, len(data), None))
        return int(raw.ctypes.data)


def memory(operands: Sequence[Any], results: Sequence[Any], shifted: bool = False) -> Memory:
    """Places operands (copied) and results (of the given arrays' types) at multiples of 256 bytes.

    Args:
      shifted: at one element (a word, for bytes) behind such a multiple instead.
    """
    given = [np.ascontiguousarray(a) for a in (*operands, *results)]
    starts, end = [], GUARD
    for a in given:
        starts.append(end + (8 if a.itemsize == 1 else a.itemsize) * shifted)
        end += -(-(a.nbytes + GUARD) // 256) * 256
    storage = np.full(end + 256, 0xA5, np.uint8)
    storage = storage[-storage.ctypes.data % 256 :]
    arrays, regions, owners = [], [], []
    for k, (a, start) in enumerate(zip(given, starts, strict=True)):
        view = storage[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
        owner = None
        if k < len(operands):
            view[...] = a
        else:
            owner = np.zeros(max(a.nbytes, 1), np.uint32)
            owners.append(owner)
        arrays.append(view)
        address = int(storage.ctypes.data) + start
        regions.append(_Buffer(address, a.nbytes, None if owner is None else owner.ctypes.data))
    return Memory(arrays, regions, owners, storage)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled text."""

    path: pathlib.Path
    library: Any

    def launch(
        self,
        params: bytes,
        grid: int,
        memory: Memory,
        block: int = 256,
        order: int = 0,
        entry: str = "emu_entry",
    ) -> None:
        """Runs `grid` blocks. Raises EmulationError at the first access or barrier that is wrong."""
        shared, size = self.library.emu_shared_begin, self.library.emu_shared_bytes
        shared.restype, size.restype = ctypes.c_void_p, ctypes.c_size_t
        held = np.zeros(len(params) // 8 + 1, np.uint64)
        held.view(np.uint8)[: len(params)] = np.frombuffer(params, np.uint8)
        # The entry copies the parameters, and is compiled as the kernel is.
        all_regions = [*memory.regions, _Buffer(held.ctypes.data, held.nbytes, None)]
        regions = (_Buffer * len(all_regions))(*all_regions)
        error = _runtime().emu_run(
            getattr(self.library, entry),
            ctypes.c_void_p(held.ctypes.data),
            ctypes.c_int(grid),
            ctypes.c_int(block),
            regions,
            ctypes.c_int(len(regions)),
            ctypes.c_void_p(shared()),
            ctypes.c_size_t(size()),
            ctypes.c_int(order),
        )
        if error is not None:
            raise EmulationError(_with_lines(error.decode()))


def _with_lines(message: str) -> str:
    """Replaces the address in a message by the lines of the source."""
    found = re.search(r" @(\S+)\+(0x[0-9a-f]+)$", message)
    if found is None or shutil.which("addr2line") is None:
        return message
    command = ["addr2line", "-Cfpise", found[1], found[2]]
    lines = subprocess.run(command, text=True, capture_output=True).stdout
    return message[: found.start()] + "\n" + lines


# `Params` is the parameter of the kernel; the sections of shared variables exist only where there are some.
ENTRY = """
extern "C" {
extern unsigned char __start_emu_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_emu_shared[] __attribute__((weak, visibility("hidden")));
unsigned char* emu_shared_begin() { return __start_emu_shared; }
size_t emu_shared_bytes() { return static_cast<size_t>(__stop_emu_shared - __start_emu_shared); }
void emu_entry(const void* params) { %s(*static_cast<const %s*>(params)); }
}
"""
MENDS = 'extern "C" void emu_mend(const void* p) { recom_mend(*static_cast<const %s*>(p)); }\n'


def kernel(
    text: str,
    name: str = "recom_fused",
    params: str = "recom_cuda::Params",
    pointers: int = POINTERS,
    extra: Sequence[str] = (),
) -> Kernel:
    """Compiles a text whose kernel `name` takes one `params`.

    Args:
      pointers: RECOM_POINTERS, buffers a launch may name.
      extra: more flags, such as ``-O1`` or ``-ffp-contract=fast``.
    """
    _runtime()
    whole = f'#include "emulate.h"\n#line 1 "kernel.cu"\n{text}\n#line 1 "entry"\n' + ENTRY % (
        name,
        params,
    )
    if " recom_mend(" in whole.replace("\n", " "):
        whole += MENDS % params
    # Each thread has a copy of the parameters on its stack, so they are small here.
    defined = [f"-DRECOM_POINTERS={pointers}", f"-DRECOM_POINTED={POINTED}"]
    command = [*COMMON, *KERNEL, *defined, f"-I{HERE}", f"-I{HEADERS}"]
    path = _built(_headers(), {"kernel.cc": whole}, [*command, *extra, "kernel.cc"])
    return Kernel(path, ctypes.CDLL(str(path)))
