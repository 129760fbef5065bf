"""Lowering for CUDA on a machine without a GPU: what the custom call carries, and falling back."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import _recom, lowering
from recom_jax.cuda import codegen, kernel, nvrtc
from recom_jax.errors import CudaError
from tests.helpers import VERIFY, ids, table


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    try:
        nvrtc.version()
    except CudaError as why:
        pytest.skip(str(why))
    monkeypatch.setenv("RECOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(lowering, "_WARNED", set())
    monkeypatch.setattr(kernel, "_MADE", type(kernel._MADE)())


def model(items: Any, ages: Any, x: Any, m: Any) -> Any:
    rows = jnp.where((m >= 0)[..., None], items[m % 50], 0)
    return jnp.concatenate([ages[jnp.digitize(x, np.arange(5.0))], rows.sum(1)], axis=1)


def inputs(batch: int = 6) -> tuple[Any, ...]:
    return (
        table(50, 8),
        table(6, 4),
        jnp.linspace(-1, 6, batch),
        ids((batch, 3), 50, odd=True),
    )


def exported(fn: Any, *args: Any, platforms: tuple[str, ...] = ("cuda",)) -> str:
    return str(jax.export.export(jax.jit(fn), platforms=platforms)(*args).mlir_module())


def attributes(text: str) -> dict[str, str]:
    (call,) = re.findall(r"custom_call @recom_fused_v1.*", text)
    return dict(re.findall(r'(\w+) = ("(?:[^"\\]|\\.)*"|dense<[^>]*>[^,}]*|-?\d+ : i64)', call))


def test_the_call_carries_its_kernel():
    found = attributes(exported(recom_jax.optimize(model, options=VERIFY), *inputs()))
    assert set(found) >= {"program", "hash", "launch", "ptx", "digest", "layout", "pointers"}
    assert "recom_fused" in found["ptx"]
    assert ".target sm_80" in found["ptx"]
    assert found["pointers"] == "32 : i64"


def test_both_platforms_in_one_module():
    text = exported(recom_jax.optimize(model, options=VERIFY), *inputs(), platforms=("cpu", "cuda"))
    calls = re.findall(r"custom_call @recom_fused_v1.*", text)
    assert sum("binding = " in c for c in calls) == 1
    assert sum("ptx = " in c for c in calls) == 1


def test_the_exported_module_still_runs_here():
    fn = recom_jax.optimize(model, options=VERIFY)
    args = inputs()
    made = jax.export.export(jax.jit(fn), platforms=("cpu", "cuda"))(*args)
    np.testing.assert_array_equal(made.call(*args), jax.jit(model)(*args))


def test_a_bound_call_knows_where_entries_lie(monkeypatch):
    seen: list[lowering.FusedCall] = []
    real = lowering._lower_call

    def spy(ctx: Any, operands: Any, call: Any, *rest: Any, **kw: Any) -> Any:
        seen.append(call)
        return real(ctx, operands, call, *rest, **kw)

    monkeypatch.setattr(lowering, "_lower_call", spy)
    items, ages, x, m = inputs()
    serve = recom_jax.optimize(model, options=VERIFY).bind(items, ages)
    serve(np.asarray(x), np.asarray(m))
    (call,) = (c for c in seen if c.packed)
    words = list(call.layout)
    made = kernel.kernel_for(call.program, call.encoded.digest, 4, call.options)
    operands: dict[int, tuple[int, list[int]]] = {}
    types = _recom.constants()["dtype"]
    for dtype, _ in call.program.operands:
        at, offset, rank, *rest = words
        dims, words = rest[:rank], rest[rank:]
        if offset >= 0:
            assert offset % 64 == 0
            end = offset + int(np.prod(dims)) * np.dtype(dtype).itemsize
            operands[at] = (types["uint8"], [max(end, operands.get(at, (0, [0]))[1][0])])
    assert words == []
    plan = _recom.cuda_plan(
        call.encoded.words,
        made.launch,
        np.array(call.layout, np.int64),
        [operands[k] for k in sorted(operands)],
        [(types[str(a.dtype)], list(a.shape)) for a in call.out_avals],
        132,
        made.pointers,
    )
    assert len(plan["launches"]) == 1


def test_kernels_are_kept():
    calls = 0
    real = nvrtc.ptx

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "ptx", counted)
        for batch in (6, 7):  # one program for all sizes
            exported(recom_jax.optimize(model, options=VERIFY), *inputs(batch))
        assert calls == 1
        kernel._MADE.clear()  # as another process
        exported(recom_jax.optimize(model, options=VERIFY), *inputs(8))
        assert calls == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CudaError("no compiler here"), "no compiler here"),
        (codegen.Unsupported("an odd instruction"), "an odd instruction"),
        (KeyError("a defect"), "KeyError: 'a defect'"),
    ],
)
def test_failures_fall_back_and_say_so(monkeypatch, error, reason):
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(codegen, "generate", fail)
    fn = recom_jax.optimize(model)
    monkeypatch.delenv("RECOM_VERIFY", raising=False)
    with pytest.warns(RuntimeWarning, match=reason):
        text = exported(fn, *inputs())
    assert "recom_fused_v1" not in text
    assert "gather" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported(recom_jax.optimize(model), *inputs(7))  # one warning
    assert f"runs as plain JAX: {reason}" in str(fn.explain(*inputs()))
    monkeypatch.undo()
    exported(fn, *inputs(9))
    assert fn.explain(*inputs()).unfused_on_cuda == ()


def test_buckets():
    assert [kernel.bucket(n) for n in (1, 32, 33, 512, 513, 4064, 9999)] == [
        *(32, 32, 512, 512, 4064, 4064, kernel.TABLE)
    ]


def test_a_call_of_many_buffers_has_a_table(monkeypatch):
    """Beyond what parameters hold: one more result, that only the kernel sees."""
    monkeypatch.setattr(kernel, "BUCKETS", (4,))
    text = exported(recom_jax.optimize(model, options=VERIFY), *inputs())
    (call,) = re.findall(r"custom_call @recom_fused_v1.*", text)
    assert "pointers = 0 : i64" in call
    n = int(re.search(r"tensor<(\d+)xui8>", call.rsplit("->", 1)[1]).group(1))
    assert n % 8 == 0
    assert n // 8 > 4
    assert "recom_point" in attributes(text)["ptx"]


def segments(t: Any, x: Any, seg: Any) -> Any:
    return jax.ops.segment_sum(t[x], seg, num_segments=6)


def test_a_call_of_segment_ids_has_memory_for_what_tiles_find(monkeypatch):
    """One more result, before the table, whatever the number of ids; the module runs on a CPU as before."""
    args = table(50, 8), ids((9,), 50), jnp.arange(9, dtype=jnp.int32) // 2
    for buckets, last in ((kernel.BUCKETS, []), ((3,), [8 * 5])):
        monkeypatch.setattr(kernel, "BUCKETS", buckets)
        kernel._MADE.clear()
        text = exported(recom_jax.optimize(segments, options=VERIFY), *args)
        (call,) = re.findall(r"custom_call @recom_fused_v1.*", text)
        sizes = [int(n) for n in re.findall(r"tensor<(\d+)xui8>", call.rsplit("->", 1)[1])]
        assert sizes == [kernel.FOUND_BYTES, *last]
        assert "recom_mend" in attributes(text)["ptx"]
    fn = recom_jax.optimize(segments, options=VERIFY)
    made = jax.export.export(jax.jit(fn), platforms=("cpu", "cuda"))(*args)
    np.testing.assert_array_equal(made.call(*args), jax.jit(segments)(*args))
    (n,) = jax.export.symbolic_shape("n")
    s = jax.ShapeDtypeStruct
    dynamic = s((50, 8), jnp.float32), s((n,), jnp.int32), s((n,), jnp.int32)
    made = jax.export.export(jax.jit(fn), platforms=("cpu", "cuda"))(*dynamic)
    np.testing.assert_array_equal(made.call(*args), jax.jit(segments)(*args))


def test_row_splits_need_none():
    def fn(t: Any, x: Any, splits: Any) -> Any:
        seg = jnp.searchsorted(splits, jnp.arange(9), side="right") - 1
        return jax.ops.segment_sum(t[x], seg, num_segments=6)

    text = exported(
        recom_jax.optimize(fn, options=VERIFY), table(50, 8), ids((9,), 50), jnp.arange(7)
    )
    (call,) = re.findall(r"custom_call @recom_fused_v1.*", text)
    assert "ui8>" not in call.rsplit("->", 1)[1]
    assert "recom_mend" not in attributes(text)["ptx"]


def test_an_older_driver_gets_machine_code(monkeypatch):
    info = {"driver": (12, 9), "devices": [{"capability": (9, 0)}], "error": ""}
    monkeypatch.setattr(_recom, "cuda_info", lambda: info)
    assert kernel.native_arch() == "sm_90"
    info["driver"] = (99, 0)
    assert kernel.native_arch() == ""
    info["driver"] = (11, 8)
    with pytest.raises(CudaError, match=r"11\.8.* 12\.1 or newer"):
        kernel.native_arch()


def test_dumps(tmp_path):
    options = recom_jax.Options(dump_dir=str(tmp_path / "dumps"))
    exported(recom_jax.optimize(model, options=options), *inputs())
    files = list((tmp_path / "dumps").iterdir())
    names = {p.name.split("_", 2)[2]: p.read_text() for p in files if p.suffix == ".txt"}
    assert "recom_fused" in names["cuda.txt"]
    assert ".target sm_80" in names["ptx.txt"]
    assert "registers=" in names["sass.txt"]
    (code,) = [p.read_bytes() for p in files if p.suffix == ".cubin"]
    assert code.startswith(b"\x7fELF") and b"recom_fused" in code
