"""Preprocessing kernels as C++ of the host: compiled once per content, run block by block."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from recom_jax.corun.kernels import PrepKernels
from tests.cuda_emulation import build

PRELUDE = """
#include <cmath>
#include <cstring>
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
struct Dim { int x; };
static thread_local Dim blockIdx{0}, threadIdx{0}, blockDim{1}, gridDim{1};
inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
inline long long __double_as_longlong(double x) { long long u; std::memcpy(&u, &x, 8); return u; }
inline double __longlong_as_double(long long u) { double x; std::memcpy(&x, &u, 8); return x; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
using std::memcpy;
template <class T> inline T __ldg(const T* p) { return *p; }
"""
ENTRY = """
extern "C" void recom_prep_host(const recom_cuda::PrepParams* p, int block, int blocks) {
  blockIdx.x = block;
  gridDim.x = blocks;
  recom_prep(*p);
}
"""


@functools.lru_cache(maxsize=64)
def library(source: str) -> Any:
    headers = tuple(f.read_text() for f in sorted(build.HEADERS.iterdir()))
    command = [*build.COMMON, "-O1", "-w", f"-I{build.HEADERS}", "kernel.cc"]
    path = build._built(["prep", *headers], {"kernel.cc": PRELUDE + source + ENTRY}, command)
    return ctypes.CDLL(str(path))


def address(source: str) -> int:
    """The function that runs a block of the kernel of this text."""
    found = ctypes.cast(library(source).recom_prep_host, ctypes.c_void_p).value
    assert found is not None
    return found


class _Params(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("tiles", "words", "input", "consts", "out")),
        ("n_tiles", ctypes.c_int),
        ("unused", ctypes.c_int),
    )


def run(kernels: PrepKernels, leaves: list[Any], tiles: Any = None, blocks: int = 3) -> list[Any]:
    """The results of tiles (default: all) for a raw batch; what no tile writes is 0xa5."""
    if tiles is None:
        tiles = kernels.tiles([(k, 0.0, 1.0) for k in range(len(kernels.units))])
    given = np.full(kernels.in_bytes + 8, 0xA5, np.uint8)
    for leaf, x in zip(kernels.leaves, leaves, strict=True):
        if leaf.offset < 0:
            continue
        raw = np.ascontiguousarray(np.asarray(x).astype(leaf.dtype, copy=False))
        given[leaf.offset : leaf.offset + raw.nbytes] = raw.reshape(-1).view(np.uint8)
    words = np.frombuffer(kernels.words + b"\0" * 8, np.uint8).copy()
    consts = np.frombuffer(kernels.consts + b"\0" * 8, np.uint8).copy()
    out = np.full(kernels.out_bytes + 8, 0xA5, np.uint8)
    params = _Params(*(a.ctypes.data for a in (tiles, words, given, consts, out)), len(tiles), 0)
    function = library(kernels.source).recom_prep_host
    for b in range(blocks):
        function(ctypes.byref(params), b, blocks)
    return [
        out[r.offset : r.offset + r.nbytes].view(r.dtype).reshape(r.shape) for r in kernels.results
    ]
