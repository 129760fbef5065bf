"""The training example: sparse updates equal dense gradients, and co-running changes no bit of the loss curve."""

from __future__ import annotations

import itertools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import click_models, criteo, train_dlrm
from examples.click_models import MODELS, Dlrm, auc
from examples.criteo import CATEGORIES, DENSE
from examples.criteo_raw import RawCriteo, RawParquet, ZipfRows, write_parquet
from recom_jax import corun
from recom_jax import preprocess as pp
from tests.helpers import cpu_only
from tests.test_preprocess import sigrid

ROWS = (97,) * 3
SMALL: dict[str, Any] = {"dim": 4, "bottom": (8,), "top": (8,)}


def test_the_loss_curve_is_that_of_offline_preprocessing() -> None:
    model = Dlrm(ROWS, **SMALL)
    rows = ZipfRows(6, 64)
    prep = jax.jit(train_dlrm.make_prep(ROWS))
    offline = [
        jax.tree.map(np.asarray, prep(pp.columns(raw))) for raw in rows
    ]  # before any training
    step = jax.jit(model.step, donate_argnums=0)
    state, losses = model.init(), []
    for batch in offline:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    got, history, pipe = train_dlrm.train(model, rows, options=corun.Options(slots=4, workers=2))
    assert history.losses == losses and len(set(losses)) == 6 and pipe.position == 6
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "AUC" in history.summary()


def test_preprocessing_is_the_formula() -> None:
    raw = ZipfRows(1, 32).batch(0)
    made = jax.jit(train_dlrm.make_prep(ROWS))(pp.columns(raw))
    for k, name in enumerate(CATEGORIES[:3]):
        ids = np.where(
            raw[name].valid, pp.Int64(raw[name].values.hi, raw[name].values.lo).to_numpy(), -1
        )
        assert made["ids"][:, k].tolist() == [sigrid(int(i), k, 97) for i in ids]
    x = np.where(raw["I1"].valid, raw["I1"].values, 0)
    np.testing.assert_allclose(made["dense"][:, 0], np.log1p(np.maximum(x, 0)), rtol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize(("name", "optimizer"), [("dlrm", "sgd"), ("dcnv2", "adagrad")])
def test_sparse_updates_are_those_of_dense_gradients(name: str, optimizer: str) -> None:
    options = {k: v for k, v in SMALL.items() if k != "bottom" or name == "dlrm"}
    model = MODELS[name]((5,) * 3, optimizer=optimizer, **options)
    batch = jax.jit(train_dlrm.make_prep(model.rows))(pp.columns(ZipfRows(1, 40).batch(0)))
    state = model.init()

    def loss(weights: Any) -> Any:
        rows = jnp.stack(
            [jnp.take(t, batch["ids"][:, k], axis=0) for k, t in enumerate(weights["tables"])], 1
        )
        logits = model.logits(weights["layers"], rows, batch["dense"])
        return jnp.mean(jax.nn.softplus(logits) - batch["label"] * logits)

    weights = {k: state[k] for k in ("tables", "layers")}
    value, grads = jax.jit(jax.value_and_grad(loss))(weights)
    made, metrics = jax.jit(model.step)(state, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    if optimizer == "sgd":
        want = jax.tree.map(lambda w, g: w - model.rate * g, weights, grads)
    else:
        want = jax.tree.map(
            lambda w, g: w - model.rate * g / jnp.sqrt(1e-6 + g * g), weights, grads
        )
    for a, b in zip(
        jax.tree.leaves({k: made[k] for k in weights}), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)


@cpu_only("XLA gives a table through a tuple")
def test_no_gradient_is_as_large_as_a_table() -> None:
    model = Dlrm((50_021,) * 2, **SMALL)
    batch = jax.eval_shape(train_dlrm.make_prep(model.rows), pp.columns(ZipfRows(1, 8).batch(0)))
    state = jax.eval_shape(model.init)
    text = jax.jit(model.step, donate_argnums=0).lower(state, batch).compile().as_text()
    made_by = set(re.findall(r" = f32\[50021,4\]\S* ([\w-]+)\(", text))
    assert made_by <= {"parameter", "scatter", "fusion"}, (
        made_by
    )  # in place: no copy, no table of zeros
    assert "recom_fused_v1" in text


@pytest.mark.once
@pytest.mark.parametrize("n", [1, 2, 5])
def test_pairs_and_their_gradient_are_what_jax_derives(n: int) -> None:
    def plain(v: jax.Array) -> jax.Array:
        i, j = np.tril_indices(n, k=-1)
        return jnp.einsum("bid,bjd->bij", v, v)[:, i, j]

    rng = np.random.default_rng(n)
    v = jnp.asarray(rng.normal(size=(6, n, 4)), jnp.float32)
    d = jnp.asarray(rng.normal(size=(6, n * (n - 1) // 2)), jnp.float32)
    (got, back), (want, wanted) = jax.vjp(click_models.pairs, v), jax.vjp(plain, v)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(back(d)[0], wanted(d)[0], rtol=1e-5, atol=1e-6)
    assert "scatter" not in str(jax.make_jaxpr(lambda v: jax.vjp(click_models.pairs, v)[1](d))(v))
    assert click_models.pairs(v[:0]).shape == (0, n * (n - 1) // 2)


def test_auc() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 60).astype(float), rng.integers(0, 2, 60)
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a, b in itertools.product(scores[labels == 1], scores[labels == 0])
    ]
    assert auc(scores, labels) == pytest.approx(np.mean(pairs))
    assert np.isnan(auc(scores, np.ones(60)))


@pytest.mark.once
@pytest.mark.parametrize("ending", ["txt", "csv", "parquet"])
def test_raw_rows_of_files(tmp_path: pathlib.Path, ending: str) -> None:
    text = tmp_path / f"rows.{'csv' if ending == 'csv' else 'txt'}"
    criteo.write_sample(text, 50, seed=3)
    read: Any = RawCriteo(text, 20)
    if ending == "parquet":
        write_parquet(tmp_path / "rows.parquet", read)
        read = RawParquet(tmp_path / "rows.parquet", 20)
    batches = list(read)
    assert [len(b["label"]) for b in batches] == [20, 20, 10]
    lines = text.read_text().splitlines()[ending == "csv" :]
    for line, row in zip(lines[20:40], range(20), strict=True):
        fields = dict(zip(criteo.NAMES, line.split("," if ending == "csv" else "\t"), strict=True))
        batch = batches[1]
        assert batch["label"][row] == float(fields["label"])
        for name in (*DENSE, *CATEGORIES):
            assert batch[name].valid[row] == bool(fields[name])
            if fields[name]:
                want = float(fields[name]) if name in DENSE else int(fields[name], 16)
                assert np.asarray(batch[name].values)[row] == want
    if ending == "parquet":
        read.skip(2)
        assert [len(b["label"]) for b in read] == [10]


@pytest.mark.once
def test_interrupted_and_resumed_is_the_same_run(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Dlrm((97,), **SMALL)
    _, whole, _ = train_dlrm.train(model, ZipfRows(7, 16))
    _, first, _ = train_dlrm.train(model, ZipfRows(7, 16), steps=3, checkpoint=tmp_path, every=2)
    _, second, pipe = train_dlrm.train(model, ZipfRows(7, 16), checkpoint=tmp_path, resume=True)
    assert first.losses + second.losses == whole.losses and pipe.position == 7
    other = Dlrm((96,), **SMALL)
    with pytest.raises(ValueError, match="the model has"):
        train_dlrm.train(other, ZipfRows(7, 16), checkpoint=tmp_path, resume=True)
    with pytest.raises(FileNotFoundError, match="without --resume"):
        train_dlrm.train(model, ZipfRows(7, 16), checkpoint=tmp_path / "none", resume=True)
    arguments = "--steps 3 --batch 16 --rows 50 --dim 4 --model dcnv2 --fields 2"
    train_dlrm.main(arguments.split())
    said = capsys.readouterr().out
    assert "AUC" in said and "predicted step" in said


def test_a_resumed_run_with_nothing_left_keeps_its_place(tmp_path: pathlib.Path) -> None:
    """It trains no step, and a run after it goes on behind the saved one, not from the beginning."""
    model, rows = Dlrm(ROWS, **SMALL), ZipfRows(6, 16)
    _, whole, _ = train_dlrm.train(model, rows)
    train_dlrm.train(model, rows, steps=4, checkpoint=tmp_path)
    for steps in (4, 2, 0):
        _, none, _ = train_dlrm.train(model, rows, steps=steps, checkpoint=tmp_path, resume=True)
        assert not none.losses
    _, rest, pipe = train_dlrm.train(model, rows, checkpoint=tmp_path, resume=True)
    assert rest.losses == whole.losses[4:] and pipe.position == 6
