"""The text that the CUDA target generates, and what NVIDIA's compilers make of it: no GPU is needed.

``python -m tests.test_cuda_codegen --regenerate`` writes tests/golden/cuda/ anew; read the difference before
committing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import Options
from recom_jax.cuda import kernel, nvrtc
from recom_jax.cuda.codegen import DEFAULT, Schedule, generate
from recom_jax.errors import CudaError
from tests.helpers import ids, table
from tests.test_pipeline import compiled, small_inputs, small_model

pytestmark = pytest.mark.once

GOLDEN = pathlib.Path(__file__).parent / "golden" / "cuda"
FIGURES = GOLDEN / "figures.json"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
LONG = (
    os.environ.get("RECOM_HYPOTHESIS") == "long"
)  # the profile that takes its time (tests/conftest.py)
B = 6  # rows of a batch; the text doesn't depend on it


# ---- the programs ----------------------------------------------------------------------------------------------------


def lookup() -> Any:
    """One plain lookup: rows of 64 bytes."""
    return (lambda t, i: t[i]), (table(50, 16), ids(B, 50))


def columns() -> Any:
    """Hashed ids, several widths, an offset that allows no vectors, and a bfloat16 table read as float32."""

    def fn(a: Any, b: Any, c: Any, i: Any, u: Any) -> Any:
        hashed = c[(u ^ (u >> 16)) * jnp.uint32(2246822519) % jnp.uint32(101)]
        rows = [a[i % 50], b[i + 1], a[i], hashed.astype(jnp.float32)]
        return jnp.concatenate(rows, axis=1)

    c = table(101, 8, jnp.bfloat16)
    return fn, (table(50, 16), table(20, 3), c, ids(B, 50), ids(B, 99, 1, np.uint32))


def boundaries() -> Any:
    """Bucketized floats: evenly spaced, irregular and unsorted boundaries."""

    def fn(t: Any, x: Any, v: Any) -> Any:
        uniform = t[jnp.digitize(x, np.arange(0, 60, 2, dtype=np.float32))]
        irregular = t[jnp.digitize(x, np.float32([1, 2, 4, 8, 16, 30]))]
        return [uniform, irregular, t[jnp.searchsorted(v, x, side="left")]]

    x = jnp.linspace(-5, 70, B, dtype=jnp.float32)
    return fn, (table(32, 4), x, jnp.linspace(0, 9, 30))


def weighted() -> Any:
    """A padded bag: weights, a mask, the sum over its square root."""

    def fn(t: Any, i: Any, w: Any) -> Any:
        mask = i >= 0
        rows = t.at[i].get(mode="clip") * w[..., None]
        total = jnp.where(mask[..., None], rows, 0).sum(1)
        return total / jnp.sqrt(jnp.maximum(mask.sum(1), 1).astype(jnp.float32))[:, None]

    return fn, (table(50, 32), ids((B, 5), 50, odd=True), jnp.ones((B, 5)))


def largest() -> Any:
    """Maximum and minimum of bags of 16-bit rows, stored as they are."""
    rows = table(50, 24, jnp.float16)
    return (lambda t, i: [t[i].max(1), t[i].min(1)]), (rows, ids((B, 5), 50))


def jagged() -> Any:
    """Jagged bags whose segment ids come in any order."""

    def fn(t: Any, i: Any, s: Any, like: Any) -> Any:
        total = jax.ops.segment_sum(t[i], s, like.shape[0])
        count = jax.ops.segment_sum(jnp.ones(i.shape[0], jnp.float32), s, like.shape[0])
        return total / jnp.maximum(count, 1.0)[:, None]

    return fn, (table(50, 8), ids(40, 50), ids(40, B, 1), jnp.zeros(B))


def splits() -> Any:
    """Jagged bags given by where each begins."""

    def fn(t: Any, i: Any, first: Any) -> Any:
        s = jnp.searchsorted(first, jnp.arange(i.shape[0]), side="right") - 1
        return jax.ops.segment_max(t[i], s, first.shape[0])

    return fn, (table(50, 40), ids(40, 50), jnp.arange(B, dtype=jnp.int32) * 5)


def runs() -> Any:
    """Jagged sums of narrow rows: a tile's positions are dealt out evenly."""

    def fn(t: Any, i: Any, first: Any) -> Any:
        s = jnp.searchsorted(first, jnp.arange(i.shape[0]), side="right") - 1
        return jax.ops.segment_sum(t[i], s, first.shape[0])

    return fn, (table(50, 8), ids(40, 50), jnp.arange(B, dtype=jnp.int32) * 5)


def one_hot() -> Any:
    """Products with a one-hot matrix: NaN in rows that are not selected counts."""
    return (lambda t, i: jax.nn.one_hot(i, 11) @ t), (table(11, 8), ids(B, 11))


def masked() -> Any:
    """The model whose stages tests.test_pipeline keeps."""
    return small_model, small_inputs()


PROGRAMS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (lookup, columns, boundaries, weighted, largest, jagged, splits, runs, one_hot, masked)
}


LONG_BAGS = Schedule(long=True)
GOLDENS = {name: (name, DEFAULT) for name in PROGRAMS} | {"jagged_long": ("jagged", LONG_BAGS)}
"""File -> program and schedule."""


@functools.cache
def source(name: str, schedule: Schedule = DEFAULT) -> str:
    fn, args = PROGRAMS[name]()
    ((_, scheduled, _),) = compiled(fn, *args).calls
    return f"// {PROGRAMS[name].__doc__}\n{generate(scheduled.program, schedule).source}"


# ---- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", GOLDENS)
def test_golden(file: str) -> None:
    """The same on every JAX version: what differs between versions ends in front of detection."""
    assert source(*GOLDENS[file]) == (GOLDEN / f"{file}.cu").read_text(), (
        f"{file} changed: python -m tests.test_cuda_codegen --regenerate, and read the difference"
    )


def test_no_file_is_left_over() -> None:
    assert {f.stem for f in GOLDEN.glob("*.cu")} == set(GOLDENS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_long_bags_change_jagged_bags_alone(name: str) -> None:
    assert (source(name, LONG_BAGS) != source(name)) == (name in ("jagged", "splits", "runs"))
    assert "long" not in source(name)


@pytest.mark.parametrize("flight", [0, -2, 3, 6])
def test_flights_are_powers_of_two(flight: int) -> None:
    with pytest.raises(ValueError, match="expected a power of two"):
        Schedule(flight=flight)


def test_the_option_for_long_bags() -> None:
    """`Options.long_bags` is part of what a kernel is kept by, whatever was made before; a CPU has nothing of it."""
    fn, args = jagged()
    ((_, scheduled, encoded),) = compiled(fn, *args).calls
    results = []
    for chosen in (False, True, False):
        options = Options(long_bags=chosen)
        want = generate(scheduled.program, Schedule(long=chosen)).source
        ours = recom_jax.optimize(fn, options=options)
        shown = ours.explain(*args).cuda_source()
        assert re.sub(r" /\*.*?\*/|// On .*\n", "", shown) == want
        results.append(np.asarray(ours(*args)))
        if not no_compiler():
            made = kernel.kernel_for(scheduled.program, encoded.digest, 4, options, portable=True)
            assert made.source == want
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_the_text_does_not_depend_on_the_batch() -> None:
    texts = set()
    for batch, length in ((4, 3), (37, 5), (8, 8)):
        ((_, scheduled, _),) = compiled(small_model, *small_inputs(batch, length)).calls
        generated = generate(scheduled.program)
        texts.add((generated.source, generated.launch))
    assert len(texts) == 1


def test_columns_that_differ_in_numbers_alone_share_code() -> None:
    """Twenty hashed columns: one function, whatever their table sizes."""

    def fn(tables: Any, i: Any) -> Any:
        rows = [t[i[:, k] % t.shape[0]] for k, t in enumerate(tables)]
        return jnp.concatenate(rows, axis=1)

    # No power of two among the sizes: those would be masks.
    args = [table(33 + k, 8) for k in range(20)], ids((B, 20), 1000)
    ((_, scheduled, _),) = compiled(fn, *args).calls
    text = generate(scheduled.program).source
    assert len(re.findall(r"^__device__ .*class_\d+\(", text, re.M)) == 1, text


# ---- what the compilers say -----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def no_compiler() -> str:
    try:
        nvrtc.version()
    except CudaError as why:
        return f"NVRTC is not here: {why}"
    return ""


def figures(name: str, arch: str, schedule: Schedule = DEFAULT) -> dict[str, int]:
    """What the machine code of a program takes: registers a thread, and bytes of stack and spills."""
    _, log, functions = nvrtc.sass(source(name, schedule), arch)
    (fused,) = [f for f in functions if f.function == "recom_fused"]
    assert {f.function for f in functions} <= {"recom_fused", "recom_mend"}, log
    found = dataclasses.asdict(fused)
    return {k: found[k] for k in ("registers", "stack", "spill_stores", "spill_loads", "shared")}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_machine_code(name: str, arch: str) -> None:
    """As it was, with the compiler that the golden figures are from."""
    if no_compiler():
        pytest.skip(no_compiler())
    want = json.loads(FIGURES.read_text())
    if want["nvrtc"] != list(nvrtc.version()):
        pytest.skip(f"the golden figures are of NVRTC {want['nvrtc']}")
    assert figures(name, arch) == want[name][arch], (
        "python -m tests.test_cuda_codegen --regenerate, and read the difference"
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_spills(name: str, arch: str) -> None:
    """What a class keeps over its loops has room in registers, with as many blocks a multiprocessor as is fastest."""
    got = json.loads(FIGURES.read_text())[name][arch]
    assert got["stack"] == got["spill_stores"] == got["spill_loads"] == 0, got


@pytest.mark.parametrize("arch", ARCHITECTURES if LONG else ("sm_90",))
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_spills_where_two_blocks_fit(name: str, arch: str) -> None:
    """128 registers suffice for any code: what more blocks a multiprocessor spill, they spill for occupancy."""
    if no_compiler():
        pytest.skip(no_compiler())
    got = figures(name, arch, dataclasses.replace(DEFAULT, blocks=2))
    assert got["stack"] == got["spill_stores"] == got["spill_loads"] == 0, got


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_long_bags_spill_nothing(arch: str) -> None:
    """Their code has registers of its own; on sm_80 the usual code spills one for it."""
    if no_compiler():
        pytest.skip(no_compiler())
    if json.loads(FIGURES.read_text())["nvrtc"] != list(nvrtc.version()):
        pytest.skip("the golden figures are of another NVRTC")
    got = figures("jagged", arch, LONG_BAGS)
    assert got["stack"] == got["spill_stores"] == got["spill_loads"] == 0, got


def test_what_is_shown_says_which_columns_and_numbers() -> None:
    def model(p: Any, b: Any) -> Any:
        return jnp.concatenate(
            [
                *(p[n][b[n]] * 2 for n in ("u", "v", "w", "x")),
                jnp.take(p["t"], jnp.digitize(b["y"], np.array([-1.5, 0.25])), axis=0),
            ],
            axis=1,
        )

    p = {n: jnp.ones((5, 8)) for n in "uvwx"} | {"t": jnp.ones((3, 4))}
    b = {n: jnp.arange(3) for n in "uvwx"} | {"y": jnp.arange(3.0)}
    report = recom_jax.optimize(model).explain(p, b)
    text = report.cuda_source()
    several = "(b['u'], p['u']), (b['v'], p['v']), (b['w'], p['w']), ...\n"
    assert f"// On 4 sets of arguments: {several}" in text
    assert "// On (b['y'], p['t'])\n" in text
    for value in ("-1.5", "2"):
        assert re.search(rf"immediate<f32>\([^/]*/\* {re.escape(value)} \*/\)", text), text
    if not no_compiler():  # it is still the kernel's text
        assert nvrtc.ptx(text, 32).text == nvrtc.ptx(generate(report.programs[0]).source, 32).text


@pytest.mark.parametrize("file", GOLDENS)
def test_ptx(file: str) -> None:
    """What a call carries compiles without a warning, however many buffers a launch names."""
    if no_compiler():
        pytest.skip(no_compiler())
    name, schedule = GOLDENS[file]
    text = source(name, schedule)
    few, many = nvrtc.ptx(text, 32), nvrtc.ptx(text, 4064)
    assert few.log == many.log == ""
    assert ".entry recom_fused" in few.text and few.digest != many.digest
    assert "fma.rn.f" not in few.text or name in ("boundaries", "masked")


def regenerate() -> None:
    GOLDEN.mkdir(exist_ok=True, parents=True)
    for old in GOLDEN.glob("*.cu"):
        old.unlink()
    for file, (name, schedule) in GOLDENS.items():
        (GOLDEN / f"{file}.cu").write_text(source(name, schedule))
    if no_compiler():
        print(f"{FIGURES.name} stays as it was. {no_compiler()}")
        return
    found: dict[str, Any] = {"nvrtc": list(nvrtc.version())}
    found |= {name: {arch: figures(name, arch) for arch in ARCHITECTURES} for name in PROGRAMS}
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__" and "--regenerate" in sys.argv:
    regenerate()
