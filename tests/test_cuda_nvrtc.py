"""NVRTC through the extension. Needs pip's nvidia-cuda-nvrtc or a toolkit; no GPU and no driver."""

from __future__ import annotations

import pytest

from recom_jax import _recom
from recom_jax.cuda import nvrtc
from recom_jax.errors import CudaError

pytestmark = pytest.mark.once

KERNEL = """
#include "recom_abi.h"
extern "C" __global__ void recom_fused(const __grid_constant__ recom_cuda::Params p) {
  const recom_cuda::Tile t = p.tiles[blockIdx.x];
  ((float*)p.buffer[t.cls])[threadIdx.x] = ((const float*)p.buffer[t.words])[threadIdx.x] * 3.0f;
}
"""


@pytest.fixture(autouse=True)
def compiler():
    try:
        nvrtc.version()
    except CudaError as why:
        pytest.skip(str(why))


@pytest.mark.parametrize(("pointers", "size"), [(32, 272), (512, 4112), (4064, 32528), (0, 24)])
def test_ptx(pointers, size):
    made = nvrtc.ptx(KERNEL, pointers)
    assert ".target sm_80" in made.text
    assert f"recom_fused_param_0[{size}]" in made.text
    assert len(made.digest) == 64
    assert nvrtc.ptx(KERNEL, pointers) == made


def test_digest_is_of_the_text():
    assert nvrtc.ptx(KERNEL, 32).digest != nvrtc.ptx(KERNEL, 512).digest


def test_machine_code():
    image, log, (figures,) = nvrtc.sass(KERNEL, "sm_90")
    assert image.startswith(b"\x7fELF")
    assert "recom_fused" in log
    assert figures.function == "recom_fused"
    assert 0 < figures.registers < 64
    assert figures.spill_stores == figures.spill_loads == figures.local == 0


def test_errors_carry_the_log():
    with pytest.raises(CudaError, match=r'recom_fused.cu\(1\): error: identifier "y" is undefined'):
        nvrtc.ptx("int x = y;", 32)
    with pytest.raises(CudaError, match="arch"):
        nvrtc.sass(KERNEL, "sm_1")


def test_figures():
    log = """\
ptxas info    : Compiling entry function 'f' for 'sm_90'
ptxas info    : Function properties for f
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem, 16 bytes lmem
"""
    assert nvrtc.figures(log) == (nvrtc.Figures("f", 40, 16, 8, 4, 128, 16),)


def test_info_names_what_is_missing():
    info = _recom.cuda_info()
    assert info["driver"] or "NVIDIA" in info["error"]
    assert isinstance(info["devices"], list)
