"""Kernel times by device events: launches wait behind a gate until all of them are made (csrc/cuda_time.cc).

The driver here is a stand-in that notes what it is asked for: no GPU is needed.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

# Symbols that do something; every other one of cuda_driver.h returns success.
STAND_IN = r"""
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

static std::atomic<int> held{0}, launches{0}, behind{0}, most{0}, gates{0}, recorded{0};
static std::thread worker;

extern "C" {
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuMemAlloc_v2(unsigned long long* p, size_t n) { *p = (unsigned long long)std::malloc(n); return 0; }
int cuMemFree_v2(unsigned long long p) { std::free((void*)p); return 0; }
int cuLaunchHostFunc(void*, void (*fn)(void*), void* data) {
#ifdef NO_GATE
  return 801;
#endif
  if (worker.joinable()) worker.join();
  held = 1;
  ++gates;
  behind = 0;
  worker = std::thread([=] { fn(data); held = 0; });
  return 0;
}
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) {
  ++launches;
  if (held) { ++behind; if (behind > most) most = behind.load(); }
  for (int ms = 0; behind > 900 && held; ++ms) {  // the queue is full
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (ms > 10000) { std::puts("STUCK"); std::fflush(stdout); std::_Exit(3); }
  }
  return 0;
}
int cuEventRecord(void*, void*) { ++recorded; return 0; }
int cuEventSynchronize(void*) { if (worker.joinable()) worker.join(); return 0; }
int cuStreamSynchronize(void*) { if (worker.joinable()) worker.join(); return 0; }
int cuEventElapsedTime(float* ms, void*, void*) { *ms = 20; return 0; }
int cuModuleUnload(void*) {
  std::printf("launches %d gates %d most %d recorded %d\n", launches.load(), gates.load(), most.load(),
              recorded.load());
  std::fflush(stdout);
  return 0;
}
}
"""

RUN = """
import sys
sys.path.insert(0, {root!r})
from recom_jax import _recom
tiles, words = bytes(32 * 3), bytes(64)
launch = (tiles, words, [16] * {buffers})
mends = [tiles[:64]] * {mends}
print(_recom.cuda_time("ptx", {pointers}, [launch] * {number}, 0, {calls}, {repeats}, 0, mends=mends))
"""


def built(folder: pathlib.Path, *flags: str) -> pathlib.Path:
    """A folder with a libcuda.so.1."""
    wanted = re.findall(r'X\(\w+, "(\w+)"', (ROOT / "csrc" / "cuda_driver.h").read_text())
    assert "cuLaunchKernel" in wanted and len(wanted) > 30
    others = [n for n in wanted if not re.search(rf"\b{n}\(", STAND_IN)]
    text = STAND_IN + "".join(f'extern "C" int {n}(...) {{ return 0; }}\n' for n in others)
    source, library = folder / "driver.cc", folder / "libcuda.so.1"
    source.write_text(text)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-pthread", *flags, "-o", library, source], check=True
    )
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return built(tmp_path_factory.mktemp("driver"))


def timed(driver: pathlib.Path, **given: int) -> subprocess.CompletedProcess[str]:
    script = RUN.format(root=str(ROOT), **{"mends": 0, **given})
    env = {"LD_LIBRARY_PATH": str(driver), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(("pointers", "buffers", "fills"), [(32, 3, 0), (0, 9000, 3)])
def test_launches_wait_for_one_another(
    driver: pathlib.Path, pointers: int, buffers: int, fills: int
) -> None:
    done = timed(driver, pointers=pointers, buffers=buffers, number=2, calls=20, repeats=7)
    assert done.returncode == 0, done.stdout + done.stderr
    each = 2 * (1 + fills)  # of a call: two launches, with the kernel that fills the table before
    calls = 1 + 20 * 7
    expected = f"launches {calls * each} gates 7 most {20 * each} recorded 14"
    assert expected in done.stdout
    assert "[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]" in done.stdout


def test_what_mends_follows_its_launch(driver: pathlib.Path) -> None:
    done = timed(driver, pointers=32, buffers=3, number=3, calls=20, repeats=7, mends=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"launches {141 * 5} gates 7 most 100 recorded 14" in done.stdout


def test_no_gate_holds_back_more_than_a_stream_takes(driver: pathlib.Path) -> None:
    done = timed(driver, pointers=32, buffers=3, number=2, calls=3000, repeats=2)
    assert done.returncode == 0 and "STUCK" not in done.stdout, done.stdout + done.stderr
    assert "launches 12002 gates 0" in done.stdout


def test_a_driver_that_cannot_is_an_error(tmp_path: pathlib.Path) -> None:
    driver = built(tmp_path, "-DNO_GATE")
    done = timed(driver, pointers=32, buffers=3, number=1, calls=1, repeats=1)
    assert done.returncode != 0
    assert "CUDA cannot hold a stream back" in done.stderr
