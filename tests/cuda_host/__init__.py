"""Runs the handlers of CUDA without a GPU: a driver that counts (host.cc) and call frames as XLA makes them.

A process must call `load` before it imports the extension, so tests do it in one of their own (facts.py).
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import subprocess
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
INITIALIZE, EXECUTE = 2, 3  # XLA_FFI_ExecutionStage
ARRAY, SCALAR, STRING = 1, 3, 4  # XLA_FFI_AttrType
DRIVER = "libcuda.so.1"


def build(folder: pathlib.Path, compiler: list[str]) -> pathlib.Path:
    """The driver as a shared object in `folder`."""
    spec = importlib.util.find_spec("jaxlib")
    assert spec is not None
    assert spec.origin is not None
    include = pathlib.Path(spec.origin).parent / "include"
    out = folder / DRIVER
    command = [*compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [
        f"-I{HERE}",
        f"-I{ROOT / 'csrc'}",
        "-isystem",
        str(include),
        f"-Wl,-soname,{DRIVER}",
    ]
    # Of a C++ library that the compiler links in, nothing: there would be two of them in the process.
    command += ["-Wl,--exclude-libs,ALL", *map(str, sorted(HERE.glob("*.cc"))), "-o", str(out)]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[:6000]
    return out


def load(path: str) -> Any:
    """The built library. What is loaded later takes it for the CUDA driver, and its `operator new` for its own."""
    host = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    host.new_call.restype = p
    host.add_buffer.argtypes = [p, i, i, i, p, ctypes.c_uint64]
    host.add_attribute.argtypes = [p, ctypes.c_char_p, i, ctypes.c_char_p, n]
    host.finish.argtypes = [p]
    host.set_address.argtypes = [p, n, ctypes.c_uint64]
    host.set_dim.argtypes = [p, n, n, n]
    host.set_bytes.argtypes = [p, ctypes.c_char_p, ctypes.c_char_p, n]
    host.run.argtypes = [p, i, p, n, n, p, p]
    host.run.restype = ctypes.c_char_p
    host.calls_in_order.restype = ctypes.c_char_p
    host.count_of.argtypes = [ctypes.c_char_p]
    host.count_of.restype = host.count_all.restype = n
    host.last_word.argtypes = [n]
    host.last_word.restype = ctypes.c_uint64
    return host


class Call:
    """A call frame.

    Args:
      operands, results: (number of the dtype, shape) of each.
      attributes: bytes, str, an int or an array of int64 by name.
    """

    def __init__(self, host: Any, operands: Any, results: Any, attributes: dict[str, Any]) -> None:
        self.host, self.n_buffers = host, len(operands) + len(results)
        self.at = host.new_call()
        for result, kinds in enumerate((operands, results)):
            for dtype, shape in kinds:
                dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
                host.add_buffer(self.at, result, dtype, len(shape), dims, 0)
        for name, value in sorted(attributes.items()):
            kind, raw = raw_of(value)
            host.add_attribute(self.at, name.encode(), kind, raw, len(raw))
        host.finish(self.at)
        self.move(1 << 12)

    def move(self, first: int, step: int = 256) -> list[int]:
        """Gives the buffers these addresses."""
        addresses = [first + step * k for k in range(self.n_buffers)]
        for k, address in enumerate(addresses):
            self.host.set_address(self.at, k, address)
        return addresses

    def overwrite(self, name: str, value: Any) -> None:
        """Another value of as many bytes, at the same address."""
        raw = raw_of(value)[1]
        self.host.set_bytes(self.at, name.encode(), raw, len(raw))

    def run(
        self, handler: int, stage: int, times: int = 1, keep: int = 0
    ) -> tuple[str, float, int]:
        """(the error or "", nanoseconds a call, allocations). `keep`: words of the launch's parameters to look at."""
        ns, allocated = ctypes.c_double(), ctypes.c_int64()
        why = self.host.run(
            handler, stage, self.at, times, keep, ctypes.byref(ns), ctypes.byref(allocated)
        )
        return why.decode(), ns.value, allocated.value


def raw_of(value: Any) -> tuple[int, bytes]:
    if isinstance(value, np.ndarray):
        return ARRAY, value.astype(np.int64).tobytes()
    if isinstance(value, (bytes, str)):
        return STRING, value if isinstance(value, bytes) else value.encode()
    return SCALAR, np.int64(value).tobytes()


def address_of(capsule: Any) -> int:
    """The handler in a capsule."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found: int = get(capsule, None)
    return found
