"""The emulator that runs CUDA text without a GPU: what it computes, and the mistakes that it must not let pass."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests import cuda_emulation
from tests.cuda_emulation import EmulationError, build

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing())),
]

N = 600  # threads of most launches below: three blocks, the last one not full

HEAD = """
struct P { const float* x; float* y; int n; };
__device__ __forceinline__ int me() { return blockIdx.x * blockDim.x + threadIdx.x; }
"""


def kernel(body: str, *extra: str) -> cuda_emulation.Kernel:
    text = f'{HEAD}\nextern "C" __global__ void __launch_bounds__(256) k(const __grid_constant__ P p) {{\n{body}\n}}'
    return cuda_emulation.kernel(text, "k", "P", extra=extra)


def run(
    body: str, x: Any = None, *, grid: int = 3, block: int = 256, order: int = 0, shift: int = 0
) -> Any:
    """y of a kernel of that body; `x` and `y` have N floats, `shift` moves x by bytes."""
    x = np.arange(N, dtype=np.float32) if x is None else x
    m = cuda_emulation.memory([x], [np.zeros(N, np.float32)])
    params = struct.pack("<QQi4x", m.regions[0].base + shift, m.regions[1].base, N)
    kernel(body).launch(params, grid, m, block, order)
    return m.arrays[1].copy()


COPY = "int i = me(); if (i < p.n) p.y[i] = p.x[i];"


@pytest.mark.parametrize("order", range(4))
def test_threads_of_all_blocks_run(order: int) -> None:
    assert np.array_equal(run(COPY, order=order), np.arange(N))


def test_unwritten_results_hold_garbage() -> None:
    y = run("if (me() == 5) p.y[5] = 1.0f;")
    assert y[5] == 1 and np.all(y[:5].view(np.uint32) == 0xA5A5A5A5)


@pytest.mark.parametrize("order", range(4))
def test_shared_memory_and_barriers(order: int) -> None:
    body = """
      __shared__ float s[256];
      int i = me();
      s[threadIdx.x] = i < p.n ? p.x[i] : 0.0f;
      __syncthreads();
      float other = s[threadIdx.x ^ 255];
      int any = __syncthreads_or(threadIdx.x == 17), all = __syncthreads_and(threadIdx.x != 17);
      int count = __syncthreads_count(threadIdx.x < 9);
      if (i < p.n) p.y[i] = other + 1000.0f * any + 2000.0f * all + 10000.0f * count;
    """
    x = np.concatenate([np.arange(N), np.zeros(768 - N)]).astype(np.float32)
    want = x.reshape(3, 256)[:, ::-1].reshape(-1)[:N] + 91000
    assert np.array_equal(run(body, order=order), want)


SHUFFLES = {
    "__shfl_sync(~0u, v, 5)": lambda lane: 5,
    "__shfl_sync(~0u, v, 5, 4)": lambda lane: lane // 4 * 4 + 1,
    "__shfl_sync(~0u, v, threadIdx.x + 1, 8)": lambda lane: lane // 8 * 8 + (lane + 1) % 8,
    "__shfl_xor_sync(~0u, v, 3)": lambda lane: lane ^ 3,
    "__shfl_xor_sync(~0u, v, 16)": lambda lane: lane ^ 16,
    "__shfl_down_sync(~0u, v, 2)": lambda lane: lane + 2 if lane < 30 else lane,
    "__shfl_down_sync(~0u, v, 2, 8)": lambda lane: lane + 2 if lane % 8 < 6 else lane,
    "__shfl_up_sync(~0u, v, 1)": lambda lane: max(lane - 1, 0),
    "float(__shfl_xor_sync(~0u, 1e100 * v, 4) / 1e100)": lambda lane: lane ^ 4,
    "__shfl_xor_sync(0xffu << (threadIdx.x & 24), v, 1)": lambda lane: lane ^ 1,
}


@pytest.mark.parametrize("text", SHUFFLES)
def test_shuffles(text: str) -> None:
    want = np.array([i // 32 * 32 + SHUFFLES[text](i % 32) for i in range(N)])
    got = run(f"int i = me(); float v = i; v = {text}; if (i < p.n) p.y[i] = v;")
    assert np.array_equal(got, want)


def test_votes_and_reductions() -> None:
    body = """
      int i = me(), lane = i % 32;
      float v = __popc(__ballot_sync(~0u, lane % 3 == 0));
      v += 100.0f * __any_sync(~0u, lane == 7) + 200.0f * __all_sync(~0u, lane < 31);
      v += 1000.0f * (__match_any_sync(~0u, lane % 2) == (lane % 2 ? 0xaaaaaaaau : 0x55555555u));
      v += 10000.0f * __reduce_add_sync(~0u, 1u) + 1000000.0f * (__reduce_max_sync(~0u, lane) == 31);
      if (i < p.n) p.y[i] = v;
    """
    assert np.all(run(body) == 11 + 100 + 1000 + 320000 + 1000000)


def test_device_functions() -> None:
    checks = """
      __clz(0) == 32, __clz(1) == 31, __clzll(1ll << 40) == 23, __popcll(~0ull) == 64, __ffs(8) == 4,
      __brev(1u) == 0x80000000u, __umulhi(~0u, 2u) == 1u, __umul64hi(~0ull, 4ull) == 3ull,
      __mulhi(-1, 1) == -1, __byte_perm(0x33221100u, 0x77665544u, 0x5410u) == 0x55441100u,
      __funnelshift_r(0u, 1u, 4) == 0x10000000u, __float_as_uint(1.0f) == 0x3f800000u,
      __int_as_float(0x40000000) == 2.0f, __longlong_as_double(__double_as_longlong(3.0)) == 3.0,
      __hiloint2double(__double2hiint(5.5), __double2loint(5.5)) == 5.5,
      __float2int_rz(1e20f) == 2147483647, __float2int_rz(-1e20f) == -2147483647 - 1,
      __float2int_rz(__int_as_float(0x7fc00000)) == 0, __float2uint_rz(-5.0f) == 0u,
      __float2uint_rz(1e20f) == ~0u, __float2ll_rz(-2.75f) == -2, __float2int_rn(2.5f) == 2,
      __float2int_rd(-2.5f) == -3, __double2ull_rz(1e30) == ~0ull, __int2float_rn(7) == 7.0f,
      fmaxf(__int_as_float(0x7fc00000), 1.0f) == 1.0f, !signbit(fmaxf(-0.0f, 0.0f)),
      signbit(fminf(0.0f, -0.0f)), isnan(__int_as_float(0x7fc00000)), !isfinite(1.0f / 0.0f),
      rintf(2.5f) == 2.0f, floorf(-0.5f) == -1.0f, fmod(5.5, 2.0) == 1.5, min(3, -4) == -4,
      max(1u, 2u) == 2u, make_float4(1, 2, 3, 4).w == 4, sizeof(uint4) == 16, alignof(int2) == 8,
      __fmaf_rn(2.0f, 3.0f, 1.0f) == 7.0f, __fdiv_rn(1.0f, 4.0f) == 0.25f
    """.replace("\n", " ")
    y = run(
        f"bool ok[] = {{{checks}}}; int i = me(); if (i < p.n) p.y[i] = i < int(sizeof(ok)) ? ok[i] : 1;"
    )
    assert np.all(y == 1), np.flatnonzero(y != 1)


def test_a_block_writes_again_behind_a_barrier() -> None:
    y = run("p.y[me()] = 1; __syncthreads(); p.y[me() ^ 1] = 2;", grid=2)
    assert np.all(y[:512] == 2)


MISTAKES = {
    "a read behind the end": ("p.y[me()] = p.x[me()];", "read of 4 bytes at offset 2400"),
    "a write behind the end": ("p.y[me()] = 1.0f;", "write of 4 bytes at offset 2400"),
    "a read in front": ("if (me() == 3) p.y[3] = p.x[-1];", "read of 4 bytes"),
    "a null pointer": ("if (me() == 3) p.y[3] = *(const float*)(size_t)(p.n - 600);", "null"),
    "a read of a result": ("if (me() < 9) p.y[me()] = p.y[me() + 9];", "read .* of a result"),
    "a write of an operand": ("const_cast<float*>(p.x)[1] = 2;", "write .* of an operand"),
    "two writers": ("p.y[me() / 2 % 600] = 1;", "thread 0 of the grid wrote"),
    "two writers of two blocks, behind barriers": (
        "__syncthreads(); p.y[threadIdx.x] = 1; __syncthreads();",
        "thread 0 of the grid wrote",
    ),
    "a vector that is not aligned": (
        "if (me() == 0) { float4 v = *(const float4*)(p.x + 1); p.y[0] = v.x + v.w; }",
        "no multiple of 16",
    ),
    "a vector half outside": (
        "if (me() == 0) { float4 v = *(const float4*)(p.x + 600 - 4 * (p.n == 0)); p.y[0] = v.x; }",
        "offset 2400",
    ),
    "a shift by the width": ("p.y[me() % 600] = 1 << (p.n / 10);", "shift by too much"),
    "signed overflow": ("int a = 2147483647 - p.n; p.y[me()] = a + 2 * p.n;", "signed overflow"),
    "a cast of a large float": ("p.y[me()] = int(p.x[1] * 1e30f);", "cast of a float"),
    "an index outside an array": (
        "int a[4] = {1, 2, 3, 4}; p.y[me()] = a[p.n / 100];",
        "outside an array",
    ),
    "division by zero": ("p.y[me()] = 7 / (p.n - 600);", "division by zero"),
    "a trap": ("if (me() == 40) __trap();", "block 0 thread 40: __trap"),
    "a barrier that some don't reach": (
        "if (threadIdx.x < 64) __syncthreads();",
        "divergent barrier",
    ),
    "different barriers": (
        "if (threadIdx.x < 64) __syncthreads(); else __syncthreads_or(1);",
        "divergent barrier",
    ),
    "a shuffle that a lane left": (
        "if (threadIdx.x % 32 == 3) return; __shfl_xor_sync(~0u, 1, 1);",
        "thread 3 has ended",
    ),
    "a shuffle against a barrier": (
        "if (threadIdx.x == 3) __syncthreads(); else __shfl_xor_sync(~0u, 1, 1);",
        "thread 3 is in __syncthreads",
    ),
    "different shuffles": (
        "if (threadIdx.x % 2) __shfl_xor_sync(~0u, 1, 1); else __ballot_sync(~0u, 1);",
        "divergent barrier",
    ),
    "different masks": (
        "__syncwarp(threadIdx.x % 32 < 16 ? ~0u : 0xffff0000u);",
        "divergent barrier",
    ),
    "a mask without the caller": ("__syncwarp(1u);", "doesn't name the caller's lane"),
    "a shuffle from outside the mask": (
        "if (threadIdx.x % 32 < 8) __shfl_xor_sync(0xffu, 1, 8);",
        "reads lane 8",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what: str) -> None:
    body, message = MISTAKES[what]
    with pytest.raises(EmulationError, match=message):
        run(body)


def test_a_moved_buffer_is_not_aligned() -> None:
    body = "if (me() == 0) { float4 v = *(const float4*)p.x; p.y[0] = v.x + v.y + v.z + v.w; }"
    assert run(body)[0] == 6
    with pytest.raises(EmulationError, match="no multiple of 16"):
        run(body, shift=8)


def test_an_error_names_its_line() -> None:
    with pytest.raises(EmulationError, match=r"kernel\.(cc|cu):\d+"):
        run("p.y[me()] = p.x[me()];")


def test_a_launch_after_an_error_is_right() -> None:
    with pytest.raises(EmulationError):
        run("__shared__ int s[9]; s[me() % 9] = 1; if (me() == 100) __trap(); __syncthreads();")
    assert np.array_equal(run(COPY), np.arange(N))


def test_text_that_does_not_compile() -> None:
    with pytest.raises(EmulationError, match="undeclared_thing"):
        kernel("undeclared_thing();")


def test_uninitialized_arrays_hold_garbage() -> None:
    body = "float v[4]; if (p.n == 0) v[1] = 1; int i = me(); if (i < p.n) p.y[i] = v[i % 4];"
    assert np.all(np.abs(run(body)) > 1e20)


# ---- beside others in the process ------------------------------------------------------------------------------------

STATIC = ("-static-libstdc++", "-static-libgcc")  # as some compilers link by themselves


def own_library(extra: tuple[str, ...]) -> pathlib.Path:
    try:
        return build.runtime(extra)
    except EmulationError as why:
        pytest.skip(f"the C++ library is not there to be linked in: {why}")


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
@pytest.mark.parametrize("extra", [(), STATIC], ids=["shared", "static"])
def test_the_process_gets_the_emulators_names_alone(extra: tuple[str, ...]) -> None:
    """They are global: a second C++ library among them would be that of modules loaded later."""
    command = ["nm", "-D", "--defined-only", str(own_library(extra))]
    lines = subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()
    names = [line.split()[-1] for line in lines]
    assert "emu_run" in names
    assert all(n.startswith(("emu_", "__asan_", "__ubsan_")) for n in names), names


def test_modules_loaded_later_catch_their_exceptions() -> None:
    """matplotlib's ft2font throws where a name is asked for that it does not have, while it is imported."""
    pytest.importorskip("matplotlib")
    own_library(STATIC)
    code = """
from tests.cuda_emulation import build
build._runtime()
from matplotlib import ft2font
print(hasattr(ft2font, "no such name"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=build.ROOT,
        env={**os.environ, "CXX": shlex.join([*build.compiler(), *STATIC])},
        text=True,
        capture_output=True,
    )
    assert done.stdout.split() == ["False"], done.stderr[-3000:]
