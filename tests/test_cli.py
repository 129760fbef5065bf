"""`python -m recom_jax`: what it prints and its exit status, in processes of its own as a user starts it."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import jax
import numpy as np
import pytest

from recom_jax import _recom, argspec, cli, doctor, explain
from recom_jax.argspec import SpecError, parse

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parent.parent
MODELS = """
import jax, jax.numpy as jnp, numpy as np, recom_jax

def two(tables, batch):
    return jnp.concatenate([tables["a"][batch["i"]], tables["b"][batch["i"]]], axis=1)

@recom_jax.optimize
def looped(t, i):
    return t[i], jax.lax.scan(lambda c, k: (c + t[k], None), jnp.zeros(8), i)[0]

def arguments():
    t = np.zeros((100, 8), np.float32)
    return {"a": t, "b": t}, {"i": np.zeros(16, np.int32)}

def one():
    return np.zeros(3, np.float32)

def broken():
    raise KeyError("no file")

class Holder:
    @staticmethod
    def method(x):
        return x

number = 3
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "faulty.py").write_text("x = 1\nimport missing_thing\n")
    return tmp_path


def run(folder: pathlib.Path, *args: str, **env: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RECOM_")}
    done = subprocess.run(
        [sys.executable, "-m", "recom_jax", *args], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


# ---- explain -------------------------------------------------------------------------------------------------------

TWO = ("models:two", "--args", "{'a': f32[100,8], 'b': f32[50,4]}", "{'i': i32[16]}")


def test_explain(folder: pathlib.Path) -> None:
    status, out, err = run(folder, "explain", *TWO, "--html", "page.html", "--check")
    assert (status, err) == (0, "")
    assert out.startswith("two: 2 of 2 embedding columns fused into 1 custom call")
    assert "models.py:5" in out and "wrote page.html" in out
    assert "2 of 2 columns" in (folder / "page.html").read_text()


def test_explain_an_optimized_function(folder: pathlib.Path) -> None:
    status, out, _ = run(
        folder, "explain", "models:looped", "--args", "f32[9,8]", "i32[4]", "--all", "--check"
    )
    assert status == 1  # --check: the loop's column is not fused
    assert "1 of 2 embedding columns" in out and "scan" in out


# In this process: what a command line means needs no process of its own.


@pytest.fixture
def here(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return folder


@pytest.mark.usefixtures("here")
def test_arguments_from_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "models:two", "--args-from", "models:arguments"]) == 0
    assert "2 of 2" in capsys.readouterr().out
    assert cli.main(["explain", "models:Holder.method", "--args-from", "models:one"]) == 0
    assert "nothing to fuse" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["models.two", "--args", "f32[1]"], "'models.two' is not module:function"),
        (["nowhere:f", "--args", "f32[1]"], "no module 'nowhere'"),
        (["faulty:f", "--args", "f32[1]"], r"No module named 'missing_thing' \(.*faulty.py:2\)"),
        (["models:three", "--args", "f32[1]"], "'models' has nothing named 'three'"),
        (["models:number", "--args", "f32[1]"], "is a int, not a function"),
        (["models:two", "--args", "f32[1"], "describes no argument"),
        (["models:two", "--args", "f33[1]"], "no dtype 'f33'"),
        (["models:two", "--args", "i64[1]"], "JAX_ENABLE_X64"),
        (["models:two", "--args-from", "models:broken"], r"KeyError: 'no file' \(.*models.py:19\)"),
        ([*TWO, "--html", "/no/such/folder/x.html"], "cannot write /no/such/folder/x.html: No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and re.search(words, err), err


@pytest.mark.usefixtures("here")
def test_a_function_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "models:two", "--args", "{'a': f32[1,2]}", "{'i': i32[3]}"]) == 1
    err = capsys.readouterr().err
    assert "models.py:5" in err and "'b'" in err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["nonsense"], ["explain", "models:two"]):
        with pytest.raises(SystemExit) as status:
            cli.main(args)
        assert status.value.code == 2
    assert "usage: python -m recom_jax" in capsys.readouterr().err
    with pytest.raises(SystemExit) as status:
        cli.main(["explain", "--help"])
    assert status.value.code == 0 and "bf16[64,16]" in capsys.readouterr().out


# ---- types as text -------------------------------------------------------------------------------------------------


def struct(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f32[1000,8]", struct(np.float32, 1000, 8)),
        ("i32[]", struct(np.int32)),
        (" bf16[ 2 , 3 ] ", struct(jax.numpy.bfloat16, 2, 3)),
        ("pred[4]", struct(np.bool_, 4)),
        ("uint8[4]", struct(np.uint8, 4)),
        ("s8[0]", struct(np.int8, 0)),
        ("[f32[1], (i32[2], 3)]", [struct(np.float32, 1), (struct(np.int32, 2), 3)]),
        ("{'f32': f32[1], 'n': None}", {"f32": struct(np.float32, 1), "n": None}),
        ("3.5", 3.5),
        ("'sum'", "sum"),
    ],
)
def test_types(text: str, value: Any) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f32",
        "f32[-1]",
        "f32[a]",
        "str[3]",
        "object[3]",
        "f32[1] f32[2]",
        "open('x')",
        "[" * 300,
    ],
)
def test_no_types(text: str) -> None:
    with pytest.raises(SpecError):
        parse(text)


def test_every_short_name_is_a_dtype() -> None:
    for name in argspec.SHORT.values():
        assert jax.numpy.dtype(name).name == name
    narrow = {k: v for k, v in argspec.SHORT.items() if "64" not in v}
    assert all(parse(f"{k}[2]").dtype == jax.numpy.dtype(v) for k, v in narrow.items())


# ---- doctor --------------------------------------------------------------------------------------------------------


def test_doctor(tmp_path: pathlib.Path) -> None:
    status, out, err = run(tmp_path, "doctor", RECOM_CACHE_DIR=str(tmp_path / "c"), RECOM_CACHEDIR="typo")  # fmt: skip
    assert (status, err) == (0, ""), out
    for what in (
        "Python",
        "jaxlib",
        "sympy",
        "instruction set",
        "recom_fused_v1",
        "runs fused",
        "CUDA driver",
        "NVRTC",
    ):
        assert what in out
    assert f"{tmp_path}/c:0entries" in re.sub(r"\s", "", out)  # a long path is folded
    assert re.search("note +RECOM_CACHEDIR +typo +no such variable", out)
    assert "no problems" in out and "problem  " not in out


def findings(monkeypatch: pytest.MonkeyPatch, **env: str) -> dict[str, doctor.Finding]:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return {f.what: f for f in doctor.examine()}


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert findings(monkeypatch, RECOM_CACHE_DIR="off")["cache folder"].found == "off"
    tmp_path.chmod(0o777)
    f = findings(monkeypatch, RECOM_CACHE_DIR=str(tmp_path))["cache folder"]
    assert f.state == "note" and "other users may write" in f.found
    f = findings(monkeypatch, RECOM_CACHE_BYTES="lots")["cache folder"]
    assert f.state == "problem" and "RECOM_CACHE_BYTES" in f.found


def test_a_gpu_whose_columns_run_as_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU and no compiler: the answer is right, and the doctor is not content."""
    monkeypatch.setattr(explain, "unfused_on_cuda", lambda _: "recom_jax: no compiler here")
    found = findings(monkeypatch)["a small model"]
    assert found.state == "problem"
    assert found.found == "runs as plain JAX on the GPU: no compiler here"
    assert doctor.main() == 1


@pytest.mark.parametrize(
    ("driver", "devices", "state"),
    [((11, 8), 1, "problem"), ((11, 8), 0, "note"), ((12, 1), 1, "ok"), ((13, 0), 0, "note")],
)
def test_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int], devices: int, state: str
) -> None:
    one = {"name": "H200", "capability": (9, 0), "sms": 132}
    info = {"driver": driver, "devices": [one] * devices, "error": ""}
    monkeypatch.setattr(_recom, "cuda_info", lambda: info)
    (found,) = doctor._driver()
    assert found.state == state
    assert ("12.1 or newer" in found.todo) == (driver < (12, 1))
    assert ("H200 (sm_90)" in found.found) == bool(devices)


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.NEEDS, "numpy", (">=99", "<100"))
    monkeypatch.setitem(doctor.NEEDS, "nosuchpackage", (">=1",))
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy", "nosuchpackage"))
    found = findings(monkeypatch)
    assert (found["numpy"].state, found["numpy"].todo) == ("problem", "a version >=99, <100")
    assert found["nosuchpackage"].todo == "pip install 'nosuchpackage>=1'"
    assert doctor.main() == 1


def test_the_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = {re.split("[><]", d)[0]: tuple(re.findall("[><]=?[^,]+", d)) for d in project["dependencies"]}  # fmt: skip
    assert needs == doctor.NEEDS
    assert doctor._fits("0.10.2", ">=0.10.2") and doctor._fits("0.12.0.1", "<0.13")
    assert not doctor._fits("0.9.9", ">=0.10.2") and not doctor._fits("0.13.0", "<0.13")


def test_without_the_extension(tmp_path: pathlib.Path) -> None:
    """The package cannot be imported, and says why; the doctor still runs, as a script."""
    shutil.copytree(
        ROOT / "recom_jax",
        tmp_path / "recom_jax",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    # An editable install would find the checkout's extension.
    (tmp_path / "recom_jax" / "_recom.py").write_text("raise ImportError('it was not built')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(tmp_path / "recom_jax" / "doctor.py")], env=env, cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    out = re.sub(r"\s+", " ", done.stdout)
    assert done.returncode == 1, done.stderr
    assert (
        "problem recom_jax cannot be imported" in out and "compiled part" in out and "C++17" in out
    )
    again = subprocess.run([sys.executable, "-c", "import recom_jax"], env=env, cwd=tmp_path, capture_output=True,
                           text=True, timeout=120)  # fmt: skip
    assert "PlatformError: the compiled part of recom_jax cannot be loaded" in again.stderr
