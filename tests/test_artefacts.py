"""Exported models stay usable: those of earlier versions run, and what a version cannot read says what to do."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import cpu, ffi
from tests.artefacts import make
from tests.helpers import assert_same

FILES = sorted(make.FOLDER.glob("*.bin"))


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:4]))


def jax_of(name: str) -> str:
    found = re.fullmatch(r"jax-([\d.]+)-recom_fused_v\d+\.bin", name)
    assert found, name
    return found[1]


def test_every_custom_call_has_an_artefact() -> None:
    """A new version of the custom call comes with a file of its own, and the old file stays."""
    calls = {name for name in ffi.extension().handlers() if name.startswith("recom_fused")}
    assert ffi.FUSED in calls
    assert {f.name.removesuffix(".bin").split("-")[2] for f in FILES} == calls
    assert all(f.stat().st_size < 10_000 for f in FILES)


@pytest.mark.parametrize("name", [f.name for f in FILES])
def test_an_artefact_runs(name: str) -> None:
    """JAX reads what older versions of it wrote, and newer ones for a while: not tested here."""
    if version(jax_of(name)) > version(jax.__version__):
        pytest.skip(f"made by JAX {jax_of(name)}, newer than this one")
    again = jax.export.deserialize((make.FOLDER / name).read_bytes())
    if jax.default_backend() not in again.platforms:
        pytest.skip(f"made for {', '.join(again.platforms)}")
    before = recom_jax.stats()
    for shape in ((1, 1), (3, 5), (100, 2)):
        args = make.arguments(*shape)
        assert_same(again.call(*args), jax.jit(make.model)(*args), 1e-5)
    after = recom_jax.stats()
    assert after["calls"] == before["calls"] + 3
    assert after["traces"] == before["traces"]  # nothing of it is analysed again


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the model is exported for CPUs")
def test_exporting_needs_no_disabled_checks() -> None:
    blob = make.exported().serialize()
    assert_same(
        jax.export.deserialize(blob).call(*make.arguments(4, 2)),
        jax.jit(make.model)(*make.arguments(4, 2)),
        1e-5,
    )


def words_of(fn: Any) -> bytes:
    """The program inside an exported function."""
    made = recom_jax.optimize(fn).explain(jnp.ones((3, 2)), jnp.zeros(2, jnp.int32))
    (program,) = made.programs
    return cpu.encode(program).words


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (2, "install the recom_jax that exported the model, or a newer one"),
        (7, "install the recom_jax that exported the model, or a newer one"),
        (0, "export the model again with this recom_jax"),
    ],
)
def test_another_version_says_what_to_do(number: int, advice: str) -> None:
    """In the decoder, and as the user of an exported model meets it."""

    def model(table: Any, i: Any) -> Any:
        return table[i * 3 + number]

    words = words_of(model)
    other = words[:8] + np.int64(number).tobytes() + words[16:]
    text = f"program format version {number}, this recom_jax reads version 1: {advice}"
    with pytest.raises(ValueError, match=re.escape(text)):
        ffi.extension().validate(other)
    args = jnp.ones((30, 2)), jnp.zeros(2, jnp.int32)
    blob = bytes(jax.export.export(jax.jit(recom_jax.optimize(model)))(*args).serialize())
    assert blob.count(words[:16]) == 1
    newer = jax.export.deserialize(bytearray(blob.replace(words[:16], other[:16])))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(text)):
        jax.block_until_ready(newer.call(*args))
