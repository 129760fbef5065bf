"""Export, and TensorFlow: SavedModels equal plain JAX, also in a process without JAX, and errors say what to do."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import cli, doctor, export, tensorflow_library
from recom_jax.errors import ArgumentError, ExportError, TensorFlowError
from recom_jax.export import Signature

BOUNDARIES = np.linspace(0, 10, 11, dtype=np.float32)


def columns(params: Any, batch: Any) -> Any:
    """Four columns: a masked mean, a bucketized one, a hashed one, and one of another dtype."""
    items, price, user = batch["items"], batch["price"], batch["user"]
    mask = items >= 0
    rows = jnp.take(params["item"], jnp.where(mask, items, 0), axis=0)
    mean = jnp.where(mask[..., None], rows, 0).sum(1) / jnp.maximum(mask.sum(1, keepdims=True), 1)
    hashed = ((user.astype(jnp.uint32) * jnp.uint32(2654435769)) % jnp.uint32(20)).astype(jnp.int32)
    return jnp.concatenate(
        [
            mean,
            params["price"][jnp.digitize(price, BOUNDARIES)],
            params["user"][hashed],
            params["half"][user % 7].astype(jnp.float32),
        ],
        -1,
    )


model = recom_jax.optimize(columns)


def score(params: Any, batch: Any) -> Any:
    return {"score": (model(params, batch) ** 2).sum(-1), "ids": batch["user"] % 7}


def make_params(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made = {
        name: rng.standard_normal(shape, dtype=np.float32)
        for name, shape in {"item": (50, 8), "price": (12, 4), "user": (20, 16)}.items()
    }
    return made | {"half": jnp.asarray(rng.standard_normal((7, 4)), jnp.bfloat16)}


def make_batch(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([seed, size])
    return {
        "items": rng.integers(-1, 70, (size, 5)).astype(np.int32),  # some rows do not exist
        "price": np.where(rng.random(size) < 0.2, np.nan, rng.uniform(-2, 12, size)).astype(np.float32),
        "user": rng.integers(0, 2**31 - 1, size).astype(np.int32),
    }  # fmt: skip


def expected(batch: Any, params: Any = None) -> np.ndarray:
    return np.asarray(jax.jit(columns)(make_params() if params is None else params, batch))


# ---- without TensorFlow -------------------------------------------------------------------------------------------


def test_disabled_checks_let_a_model_be_serialized() -> None:
    batch = make_batch(4)
    exported = jax.export.export(jax.jit(model), disabled_checks=export.disabled_checks())(
        make_params(), batch
    )
    assert "recom_fused_v1" in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(make_params(), batch), expected(batch))


@pytest.fixture
def pretend(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A TensorFlow that is files alone: a version and headers."""

    def install(version: str, *, headers: bool = True) -> pathlib.Path:
        folder = tmp_path / "tensorflow"
        api = folder / "include/xla/ffi/api"
        api.mkdir(parents=True, exist_ok=True)
        (api / "ffi.h").write_text("#error not the real one\n")
        if not headers:
            (api / "ffi.h").unlink()
        spec = SimpleNamespace(submodule_search_locations=[str(folder)])
        monkeypatch.setattr(tensorflow_library.importlib.util, "find_spec", lambda _: spec)
        monkeypatch.setattr(tensorflow_library.importlib.metadata, "version", lambda _: version)
        monkeypatch.setenv("RECOM_CACHE_DIR", str(tmp_path / "cache"))
        return tmp_path / "cache" / "tensorflow"

    return install


@pytest.mark.once
def test_no_tensorflow_or_a_wrong_one(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("2.15.1")
    with pytest.raises(TensorFlowError, match=r"2\.15\.1 is too old.*recom_jax\[tf\]"):
        export.tensorflow_library()
    pretend("2.21.0", headers=False)
    with pytest.raises(TensorFlowError, match="without XLA's FFI headers"):
        export.tensorflow_library()
    monkeypatch.setattr(tensorflow_library.importlib.util, "find_spec", lambda _: None)
    for call in (
        export.tensorflow_library,
        export.register_tensorflow,
        lambda: export.to_saved_model(model, make_params(), "nowhere", make_batch(2)),
    ):
        with pytest.raises(TensorFlowError, match="TensorFlow is not installed"):
            call()
    assert issubclass(TensorFlowError, ImportError) and issubclass(ExportError, RuntimeError)
    assert cli.main(["tf-library"]) == 1


@pytest.mark.once
def test_no_compiler_or_a_broken_one(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pretend("2.21.0")
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(ExportError, match="CXX names, 'no-such-compiler -m64', is not there"):
        export.tensorflow_library()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ExportError, match=r"there is none.*apt-get install g"):
        export.tensorflow_library()
    monkeypatch.undo()
    pretend("2.21.0")
    monkeypatch.setattr(tensorflow_library, "SOURCES", ("ffi_handler.cc", "tensorflow/library.cc"))
    with pytest.raises(ExportError, match=r"(?s)cannot be compiled.*not the real one"):
        export.tensorflow_library()
    assert {p.name for p in folder.iterdir()} == {".lock"}, "nothing half done is left"


@pytest.mark.once
def test_the_library_is_built_once_and_kept_where_nobody_else_writes(
    pretend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any
) -> None:
    folder, built = pretend("2.21.0"), []

    def build(path: pathlib.Path, found: Any) -> None:
        built.append(path)
        path.write_bytes(b"library")

    monkeypatch.setattr(tensorflow_library, "_build", build)
    threads = [threading.Thread(target=export.tensorflow_library) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    path = export.tensorflow_library()
    assert built == [path] and path.parent == folder and path.stat().st_size == 7
    with monkeypatch.context() as patch:
        patch.setattr(tensorflow_library, "_folder", None)
        assert export.tensorflow_library() == path, "what is there is found without a lock"
    monkeypatch.setattr(tensorflow_library, "FLAGS", ("-O0",))
    assert export.tensorflow_library() != path, "other flags, another library"
    assert cli.main(["tf-library", "--out", str(tmp_path / "copy.so")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "copy.so")
    assert (tmp_path / "copy.so").read_bytes() == b"library"
    (finding,) = doctor._tensorflow()
    assert finding.found.startswith("2.21.0, library") and finding.state == doctor.OK
    assert cli.main(["tf-library", "--out", str(tmp_path / "no" / "copy.so")]) == 2
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="cannot keep the library for TensorFlow"):
        assert export.tensorflow_library().parent != folder
    monkeypatch.setenv("RECOM_CACHE_DIR", "0")
    assert export.tensorflow_library().exists()

    def full(path: pathlib.Path, found: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorflow_library, "_build", full)
    monkeypatch.setattr(tensorflow_library, "FLAGS", ("-O1",))
    with pytest.raises(ExportError, match=r"cannot be written to .*No space left"):
        export.tensorflow_library()


@pytest.mark.once
def test_the_library_needs_no_python_and_no_cuda() -> None:
    folder, seen = tensorflow_library.csrc(), set()
    todo = [folder / name for name in tensorflow_library.SOURCES]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            text = path.read_text()
            todo += [
                (path.parent / name).resolve()
                for name in re.findall(r'#include "(?!xla/)([^"]+)"', text)
            ]
            assert not re.search(r"#include [<\"](pybind11|Python|cuda)", text), path
    assert len(seen) > len(tensorflow_library.SOURCES)


# ---- with TensorFlow ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tf() -> Iterator[Any]:
    """TensorFlow with our library, built without optimisation: that is quick, and results are the same."""
    tensorflow = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    with pytest.MonkeyPatch.context() as patch:
        flags = tuple("-O0" if f == "-O3" else f for f in tensorflow_library.FLAGS)
        patch.setattr(tensorflow_library, "FLAGS", flags)
        for _ in range(2):
            export.register_tensorflow()
        yield tensorflow


@pytest.fixture(scope="module")
def saved(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with three signatures, and its folder."""
    folder = tmp_path_factory.mktemp("saved")
    signatures = {
        "serving_default": Signature(make_batch(6)),
        "one": Signature(make_batch(1)),
        "any": Signature(make_batch(6), ["(b, ...)"], score),
    }
    module = export.to_saved_model(model, make_params(), folder, signatures, with_gradient=True)
    return SimpleNamespace(folder=folder, module=module)


WITHOUT_JAX = """
import sys, threading, ctypes
for name in ("jax", "jaxlib", "recom_jax"):
    sys.modules[name] = None  # TensorFlow's own packages import JAX where they find it
import numpy as np
import tensorflow as tf
library, folder, data = sys.argv[1:]
tf.load_library(library)
model, data = tf.saved_model.load(folder), np.load(data)
wrong = []
def call(seed):
    for name, size in (("serving_default", 6), ("one", 1), ("any", 3), ("any", 9)):
        batch = {k: tf.constant(data[f"{seed}/{size}/{k}"]) for k in ("items", "price", "user")}
        for _ in range(3):
            out = model.signatures[name](**batch)
            got = out["score" if name == "any" else "output_0"].numpy()
            if not np.allclose(got, data[f"{seed}/{size}/{name}"], rtol=1e-6, atol=1e-6, equal_nan=True):
                wrong.append((seed, name, size))
threads = [threading.Thread(target=call, args=(k,)) for k in range(8)]
for t in threads: t.start()
for t in threads: t.join()
def one():
    batch = {k: tf.constant(data[f"0/1/{k}"]) for k in ("items", "price", "user")}
    return model.signatures["one"](**batch)["output_0"]
before = one()
for name, variable in model.params.items():
    variable.assign(variable * 2)
after = one()
counted = ctypes.CDLL(library).recom_tensorflow_calls()
doubled = bool(np.array_equal(after, before * 2, equal_nan=True))
print("wrong", wrong, "doubled", doubled, "calls", counted > 0)
"""


def test_a_saved_model_in_a_process_without_jax(saved: Any, tmp_path: pathlib.Path) -> None:
    """Eight threads, three signatures, several batch sizes; then new weights."""
    data = {}
    for seed in range(8):
        for name, size in (("serving_default", 6), ("one", 1), ("any", 3), ("any", 9)):
            batch = make_batch(size, seed)
            data |= {f"{seed}/{size}/{k}": v for k, v in batch.items()}
            wide = expected(batch)
            data[f"{seed}/{size}/{name}"] = (wide**2).sum(-1) if name == "any" else wide
    np.savez(tmp_path / "data.npz", **data)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, export.tensorflow_library(), saved.folder, tmp_path / "data.npz"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "wrong [] doubled True calls True"


def test_results_are_plain_jaxs(tf: Any, saved: Any) -> None:
    for size in (6, 1):
        batch = make_batch(size)
        fn = saved.module.serving_default if size == 6 else saved.module.one
        got = fn(**{k: tf.constant(v) for k, v in batch.items()})["output_0"]
        want = expected(batch)
        np.testing.assert_array_equal(got[:, 8:], want[:, 8:])  # lookups: bit for bit
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    for size in (1, 7):
        batch = make_batch(size)
        got = saved.module.any(**{k: tf.constant(v) for k, v in batch.items()})
        np.testing.assert_allclose(got["score"], (expected(batch) ** 2).sum(-1), rtol=1e-5)
        np.testing.assert_array_equal(got["ids"], batch["user"] % 7)


def test_gradients_are_jaxs(tf: Any, saved: Any) -> None:
    batch = make_batch(6) | {"items": np.arange(30, dtype=np.int32).reshape(6, 5)}
    want = jax.grad(lambda p: (jnp.nan_to_num(columns(p, batch)) ** 2).sum())(make_params())
    module = tf.saved_model.load(str(saved.folder))
    with tf.GradientTape() as tape:
        wide = module.serving_default(*[tf.constant(batch[k]) for k in ("items", "price", "user")])
        loss = tf.reduce_sum(wide["output_0"] ** 2)
    for name, g in tape.gradient(loss, module.params).items():
        got, rtol = tf.cast(tf.convert_to_tensor(g), tf.float32), 1e-2 if name == "half" else 1e-5
        np.testing.assert_allclose(got, want[name].astype(np.float32), rtol=rtol, err_msg=name)


def test_gradients_beside_integer_results(tf: Any, saved: Any) -> None:
    """Of a signature whose batch is open: the float result has gradients, the ids that it also returns have none."""
    items = np.arange(15, dtype=np.int32).reshape(3, 5)
    batch = make_batch(3) | {"items": items, "price": np.float32([1.0, 5.5, 9.0])}
    want = jax.grad(lambda p: (columns(p, batch) ** 2).sum())(make_params())
    with tf.GradientTape(persistent=True) as tape:
        out = saved.module.any(**{k: tf.constant(v) for k, v in batch.items()})
        loss = tf.reduce_sum(out["score"])
        by_ids = tf.reduce_sum(tf.cast(out["ids"], tf.float32))
    assert out["ids"].dtype == tf.int32
    assert set(tape.gradient(by_ids, saved.module.params).values()) == {None}
    for name, g in tape.gradient(loss, saved.module.params).items():
        got, rtol = tf.cast(tf.convert_to_tensor(g), tf.float32), 1e-2 if name == "half" else 1e-5
        np.testing.assert_allclose(got, want[name].astype(np.float32), rtol=rtol, err_msg=name)


def test_trees_of_any_kind_without_jit_compile(tf: Any, tmp_path: pathlib.Path) -> None:
    """Several arguments, lists, a result that is a tuple, parameters in a list; 64-bit inputs as JAX takes them."""

    @recom_jax.optimize
    def fn(tables: Any, ids: Any, more: Any) -> Any:
        return tables[0][ids], (tables[1][more[0]] * more[1][:, None], {"n": ids.sum()})

    tables = [np.arange(12.0).reshape(6, 2), np.ones((4, 3), np.float32)]
    inputs = (
        np.arange(5),
        [tf.TensorSpec([None], tf.int32), jax.ShapeDtypeStruct((5,), np.float32)],
    )
    module = export.to_saved_model(
        fn, tables, tmp_path, inputs, [None, "(b,)", ["(b,)", "(b,)"]], jit_compile=False
    )
    assert list(module.params) == ["0", "1"]
    loaded = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    ids = np.array([5, 0, 9], np.int32)
    got = loaded(
        ids=tf.constant(ids), more_0=tf.constant([3, 0, -1]), more_1=tf.constant([1.0, 2, 3])
    )
    want = jax.jit(fn)(tables, ids, [np.array([3, 0, -1]), np.array([1.0, 2, 3], np.float32)])
    assert set(got) == {"output_0", "output_1_0", "output_1_1_n"}
    np.testing.assert_array_equal(got["output_0"], want[0])
    np.testing.assert_array_equal(got["output_1_0"], want[1][0])
    positional = tf.constant(ids), tf.constant([3, 0, -1]), tf.constant([1.0, 2, 3])
    np.testing.assert_array_equal(module.serving_default(*positional)["output_0"], want[0])
    with (
        tf.GradientTape(),
        pytest.raises(LookupError, match="does not support gradients"),
    ):
        module.serving_default(*positional)


def test_wrong_arguments(tf: Any, tmp_path: pathlib.Path) -> None:
    def fails(inputs: Any, text: str, polymorphic: Any = None, params: Any = None) -> None:
        with pytest.raises(ArgumentError, match=text):
            export.to_saved_model(
                model, make_params() if params is None else params, tmp_path, inputs, polymorphic
            )

    batch = make_batch(2)
    fails(
        batch | {"user": np.array(["a", "b"])},
        r"input batch\['user'\] is of <U1: JAX has numbers only",
    )
    fails(
        batch | {"user": tf.TensorSpec([None], tf.int32)},
        r"batch\['user'\] has a size that is not known",
    )
    fails({"a b": np.zeros(2), "a_b": np.zeros(2)}, "two inputs would have the name 'a_b'")
    fails(batch, r"params\['x'\] is of object", params={"x": np.array([None])})
    fails({"ok": Signature(batch)}, "belongs to each Signature", "(b, ...)")
    fails(
        {"x": Signature(batch, model=model.bind(make_params()))},
        "of a bound server, pass the model itself",
    )
    fails({"params": Signature(batch)}, "signature 'params'")
    fails({"no-name": Signature(batch)}, "signature 'no-name'")
    fails({"variables": Signature(batch)}, "signature 'variables'")
    fails(batch, "polymorphic_shapes are a string", {"items": "(b, ...)"})
    fails((batch,), "polymorphic_shapes are a string", ["(b, ...)", "(b,)"])


def test_the_guides_examples_run(
    tf: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (pathlib.Path(__file__).parent.parent / "docs/tensorflow.md").read_text()
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "tensorflow.md"}
    for k, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL)):
        exec(compile(block, f"tensorflow.md, example {k}", "exec"), space)


def test_a_second_copy_of_the_library_is_no_error(
    tf: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(export.tensorflow_library().read_bytes())
    monkeypatch.setattr(tensorflow_library, "tensorflow_library", lambda: copy)
    export.register_tensorflow()
    missing = tmp_path / "none.so"
    monkeypatch.setattr(tensorflow_library, "tensorflow_library", lambda: missing)
    with pytest.raises(ExportError, match=r"none\.so cannot be loaded"):
        export.register_tensorflow()
