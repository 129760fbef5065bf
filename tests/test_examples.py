"""The example models against numpy, the readers against good and bad files, and `optimize` on all models."""

import gzip
import itertools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import criteo, movielens
from examples.criteo import CriteoFormatError, CriteoReader, Dlrm
from examples.movielens import MovieLensFormatError, MovieLensModel, MovieLensReader
from examples.recflex import NAMES, RecflexModel, recflex, zipf_ids
from examples.recom_models import (
    RecomModel,
    fingerprint,
    int_hash,
    microbenchmark,
    model_e,
    model_f,
)

ROOT = pathlib.Path(__file__).parents[1]
# The samples that DeepCTR publishes; where there are none, the readers get made-up rows.
SAMPLES = pathlib.Path(os.environ.get("RECOM_SAMPLES", ROOT.parent / "shared" / "data"))
SIZES = [0, 1, 5]


def numpy_mlp(layers: list[dict[str, jax.Array]], x: np.ndarray, last_relu: bool) -> np.ndarray:
    for i, layer in enumerate(layers):
        x = x @ np.asarray(layer["w"]) + np.asarray(layer["b"])
        if last_relu or i + 1 < len(layers):
            x = np.maximum(x, 0)
    return x


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


# --- RECom's models -----------------------------------------------------------------------------------------


def numpy_columns(
    model: RecomModel, params: Mapping[str, Any], batch: Mapping[str, np.ndarray]
) -> np.ndarray:
    """`RecomModel.columns`, one sample and one id at a time."""
    pieces: list[np.ndarray] = []
    for kind, columns in model.by_kind().items():
        for column, table in zip(columns, params["tables"][kind], strict=True):
            rows, x = np.asarray(table), batch[column.name]
            out = np.zeros((len(x), column.dim), np.float32)
            for b, value in enumerate(x):
                if kind == "bucket":
                    out[b] = rows[sum(bound <= value for bound in column.boundaries)]
                elif kind == "hash":
                    mixed = int(value) * 2654435769 % 2**32
                    out[b] = rows[(mixed ^ (mixed >> 16)) % column.rows]
                elif kind == "string":
                    out[b] = rows[value % column.rows]
                else:
                    for token in value[value >= 0]:
                        out[b] += rows[token % column.rows]
            pieces.append(out)
    if model.has_dense:
        pieces.append(batch["dense"])
    return np.concatenate(pieces, axis=1)


RECOM = {
    "model_e": model_e(large_rows=512, scale=0.01),
    "model_f": model_f(large_rows=512, scale=0.01),
    "microbenchmark": microbenchmark(6),
    "microbenchmark_random": microbenchmark(4, random_boundaries=True),
}


@pytest.mark.once
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RECOM)
def test_recom_columns_equal_numpy(name: str, size: int) -> None:
    model = RECOM[name]
    params, batch = model.init(1), model.batch(size, 2)
    actual = jax.jit(model.columns)(params, batch)
    assert actual.shape == (size, model.width)
    assert actual.dtype == jnp.float32
    expected = numpy_columns(model, params, batch)
    close(actual, expected)
    close(jax.jit(model.columns_tuned)(params, batch), expected)


@pytest.mark.once
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["model_e", "model_f", "microbenchmark"])
def test_recom_hand_batched_equals_columns(name: str, size: int) -> None:
    model = RECOM[name]
    params, batch = model.init(1), model.batch(size, 2)
    stacked = model.stack_params(params), model.stack_batch(batch)
    close(model.columns_hand_batched(*stacked), numpy_columns(model, params, batch))


def test_recom_columns_that_differ_cannot_be_stacked() -> None:
    model = RECOM["microbenchmark_random"]
    with pytest.raises(ValueError, match="bucket_0000 and bucket_0001 differ"):
        model.stack_params(model.init())


@pytest.mark.once
@pytest.mark.parametrize("name", ["model_e", "model_f"])
def test_recom_forward_equals_numpy(name: str) -> None:
    model = RECOM[name]
    params, batch = model.init(1), model.batch(5, 2)
    wide = numpy_columns(model, params, batch)
    bottom = numpy_mlp(params["bottom"], batch["dense"], last_relu=True)
    joined = np.concatenate([wide[:, : -batch["dense"].shape[1]], bottom], axis=1)
    expected = sigmoid(numpy_mlp(params["top"], joined, last_relu=False)[:, 0])
    close(model.forward(params, batch), expected, 1e-4)
    assert model.forward(params, model.batch(0)).shape == (0,)


def test_recom_microbenchmark_has_no_forward() -> None:
    model = RECOM["microbenchmark"]
    with pytest.raises(ValueError, match="columns only"):
        model.forward(model.init(), model.batch(1))


def test_recom_models_have_the_papers_sizes() -> None:
    e, f = model_e(), model_f()
    assert [len(columns) for columns in e.by_kind().values()] == [880, 50, 50, 15, 5]
    assert [len(columns) for columns in f.by_kind().values()] == [1000, 90, 100, 7, 3]
    assert e.width == 995 * 8 + 5 * 32 + 32
    assert e.specs[0].rows == 101
    assert f.top == (2048, 1024, 1024, 512)
    rows = [column.rows for column in microbenchmark(200, random_boundaries=True).specs]
    assert min(rows) >= 50
    assert max(rows) <= 150
    assert len(set(rows)) > 50


def test_recom_batches_depend_on_the_seed_alone() -> None:
    model = RECOM["model_e"]
    first, again, other = model.batch(9, 1), model.batch(9, 1), model.batch(9, 2)
    assert first.keys() == again.keys()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["string_0000"], other["string_0000"])


def test_bucketize_edges() -> None:
    model = microbenchmark(1)
    params = model.init()
    x = np.array([-np.inf, -1, 0, 4.9, 5, 495, 1e9, np.nan], np.float32)
    ids = [0, 0, 1, 1, 2, 100, 100, 100]
    actual = model.columns(params, {"bucket_0000": x})
    np.testing.assert_array_equal(actual, np.asarray(params["tables"]["bucket"][0])[ids])


def test_int_hash_wraps_as_uint32() -> None:
    x = np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32)
    mixed = [int(v) * 2654435769 % 2**32 for v in x]
    expected = [(m ^ (m >> 16)) % 100 for m in mixed]
    np.testing.assert_array_equal(int_hash(jnp.asarray(x), 100), expected)


def test_fingerprints() -> None:
    prints = fingerprint(["a", "b", "a", "", "ünïcode"])
    assert prints.dtype == np.int32
    assert (prints >= 0).all()
    assert prints[0] == prints[2]
    assert len(set(prints.tolist())) == 4
    assert fingerprint([]).shape == (0,)


# --- RecFlex's models ---------------------------------------------------------------------------------------


def numpy_bags(
    model: RecflexModel, params: Mapping[str, Any], batch: Mapping[str, np.ndarray]
) -> np.ndarray:
    pieces: list[np.ndarray] = []
    for f in model.features:
        table = np.asarray(params["tables"][f.name])
        if f.jagged:
            values, splits = batch[f"{f.name}_values"], batch[f"{f.name}_splits"]
            bags = [values[a:b] for a, b in itertools.pairwise(splits)]
        else:
            bags = [np.array([i]) for i in batch[f.name]]
        sums = [table[bag].sum(axis=0) for bag in bags]
        pieces.append(np.array(sums, np.float32).reshape(-1, f.dim))
    return np.concatenate(pieces, axis=1)


def small_recflex(name: str, **options: Any) -> RecflexModel:
    scale = {"F": 0.001, "mlperf": 0.2}.get(name, 0.008)
    return recflex(name, scale=scale, max_rows=500, **options)


@pytest.mark.once
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_recflex_columns_equal_numpy(name: str, size: int) -> None:
    model = small_recflex(name)
    params, batch = model.init(1), model.batch(size, 2)
    actual = model.columns(params, batch)
    assert actual.shape == (size, model.width)
    close(actual, numpy_bags(model, params, batch), 1e-4)


@pytest.mark.once
def test_recflex_search_ignores_padding() -> None:
    model = small_recflex("C", expand="searchsorted")
    params = model.init(1)
    exact, padded = model.batch(5, 2), model.batch(5, 2, round_up=64)
    assert all(len(v) % 64 == 0 for name, v in padded.items() if name.endswith("_values"))
    expected = numpy_bags(model, params, exact)
    close(jax.jit(model.columns)(params, exact), expected, 1e-4)
    close(jax.jit(model.columns)(params, padded), expected, 1e-4)
    with pytest.raises(ValueError, match="searchsorted"):
        small_recflex("C").batch(5, round_up=64)


@pytest.mark.once
def test_recflex_forward() -> None:
    model = small_recflex("A")
    params, batch = model.init(1), model.batch(5, 2)
    x = numpy_mlp(params["top"], numpy_bags(model, params, batch), last_relu=False)
    close(model.forward(params, batch), sigmoid(x[:, 0]), 1e-4)


def test_recflex_models_have_the_papers_sizes() -> None:
    counts = {name: len(recflex(name).features) for name in NAMES}
    assert counts == dict(zip(NAMES, [1000, 1200, 800, 1000, 1000, 10_000, 26], strict=True))
    assert max(f.rows for f in recflex("mlperf").features) == 40_000_000
    with pytest.raises(ValueError, match="unknown RecFlex model 'G'"):
        recflex("G")


def test_recflex_bags_have_the_papers_lengths() -> None:
    rng = np.random.default_rng(0)
    for f in recflex("A").features[525:1000:50]:
        lengths = f.lengths(rng, 4000)
        assert lengths.max(initial=0) <= f.max
        assert abs((lengths > 0).mean() - f.coverage) < 0.05
        if f.kind == "multi_hot_static":
            assert set(lengths[lengths > 0]) == {int(f.mean)}


def test_zipf_ids_are_skewed_and_in_range() -> None:
    ids = zipf_ids(np.random.default_rng(0), rows=1000, size=20_000)
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    assert ids.min() >= 0
    assert ids.max() < 1000
    # Rank 1 against rank 10: 10 ** 1.05 = 11.2.
    assert 8 < counts[0] / counts[9] < 15


# --- readers: what both share -------------------------------------------------------------------------------


def collect(reader: Any) -> dict[str, np.ndarray]:
    """All batches in one. Row splits are moved behind those of the batches before."""
    batches = list(reader)
    merged = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    if "genres_splits" in merged:
        lengths = [np.diff(b["genres_splits"]) for b in batches]
        merged["genres_splits"] = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    return merged


def same(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("reader", [CriteoReader, MovieLensReader])
def test_reader_arguments_are_checked(reader: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        reader("x", 0)
    with pytest.raises(ValueError, match="on_error"):
        reader("x", on_error="ignore")
    with pytest.raises(FileNotFoundError):
        next(iter(reader(tmp_path / "absent.csv")))


@pytest.mark.parametrize(
    ("module", "reader"), [(criteo, CriteoReader), (movielens, MovieLensReader)]
)
def test_batches_do_not_depend_on_batch_or_block_size(
    module: Any, reader: Any, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "rows.csv"
    module.write_sample(path, 43, seed=3)
    whole = collect(reader(path, 1000))
    for batch_size, block in [(1, 1 << 20), (10, 2000), (30, 4000), (43, 700)]:
        pieces = reader(path, batch_size, block_bytes=block)
        sizes = [len(b["dense" if module is criteo else "user_id"]) for b in pieces]
        assert set(sizes[:-1]) <= {batch_size}
        assert sum(sizes) == 43 == pieces.rows
        same(collect(pieces), whole)  # iterating again starts anew
        assert pieces.rows == 43


# --- Criteo -------------------------------------------------------------------------------------------------


def criteo_line(**fields: str) -> str:
    """A valid TSV line but for `fields`."""
    row = {"label": "1"} | dict.fromkeys(criteo.DENSE, "3")
    row |= {name: f"{i:08x}" for i, name in enumerate(criteo.CATEGORIES, 200)}
    return "\t".join((row | fields).values())


def write(path: pathlib.Path, *lines: str, end: str = "\n") -> pathlib.Path:
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


@pytest.fixture
def tsv(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "rows.tsv"


def test_criteo_values_and_defaults(tsv: pathlib.Path) -> None:
    odd = {"label": "0", "I1": "", "I2": "-1", "I3": "260.0", "I4": "1e2", "I5": "+7"}
    categories = {"C1": "", "C2": "00000000", "C3": "FFffFFff"}
    write(tsv, criteo_line(), criteo_line(**odd, **categories))
    batch = collect(CriteoReader(tsv, vocabulary=100))
    assert batch["label"].tolist() == [1.0, 0.0]
    assert batch["label"].dtype == batch["dense"].dtype == np.float32
    np.testing.assert_allclose(batch["dense"][0], np.log1p(3), rtol=1e-6)
    np.testing.assert_allclose(batch["dense"][1, :6], np.log1p([0, 0, 260, 100, 7, 3]), rtol=1e-6)
    assert [int(batch[f"C{i}"][1]) for i in (1, 2, 3)] == [0, 1, 1 + (2**32 - 1) % 99]
    assert batch["C26"].tolist() == [1 + 225 % 99] * 2
    assert batch["C26"].dtype == np.int32


@pytest.mark.once
def test_criteo_ids_are_the_same_hashed_on_the_host_or_in_the_model(tsv: pathlib.Path) -> None:
    write(tsv, criteo_line(), criteo_line(C1="", C2="00000000", C3="ffffffff"))
    vocabulary = [50 + i for i in range(26)]
    host = collect(CriteoReader(tsv, vocabulary=vocabulary))
    raw = collect(CriteoReader(tsv, vocabulary=vocabulary, hash_in_model=True))
    assert raw["C1"].dtype == np.uint32
    for shared in (False, True):
        model = Dlrm(vocabulary, dim=4, bottom=(8,), top=(8,), shared_table=shared)
        hashing = Dlrm(vocabulary, 4, (8,), (8,), shared_table=shared, hash_in_model=True)
        params = model.init()
        np.testing.assert_array_equal(model.columns(params, host), hashing.columns(params, raw))


def test_criteo_csv_and_tsv_and_gzip_and_line_ends_agree(tmp_path: pathlib.Path) -> None:
    for name in ("a.tsv", "a.csv"):
        criteo.write_sample(tmp_path / name, 20, seed=5)
    whole = collect(CriteoReader(tmp_path / "a.tsv"))
    same(collect(CriteoReader(tmp_path / "a.csv")), whole)
    text = (tmp_path / "a.tsv").read_bytes()
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "c.tsv").write_bytes(text.replace(b"\n", b"\r\n"))
    (tmp_path / "d.tsv").write_bytes(text.rstrip(b"\n"))
    csv = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "e.csv").write_bytes(b"\xef\xbb\xbf" + csv.replace(b"\n", b"\r\n"))
    for name in ("b.tsv.gz", "c.tsv", "d.tsv", "e.csv"):
        same(collect(CriteoReader(tmp_path / name)), whole)


BAD_CRITEO = [
    ({"label": "2"}, "label", "0 or 1"),
    ({"label": ""}, "label", "0 or 1"),
    ({"I1": "x"}, "I1", "a number"),
    ({"I7": "nan"}, "I7", "a number"),
    ({"I13": " 3"}, "I13", "a number"),
    ({"I2": "1e999"}, "I2", "a number"),
    ({"I3": "3\n"}, None, "40 fields"),
    ({"C1": "0000000g"}, "C1", "8 hexadecimal"),
    ({"C26": "0000000"}, "C26", "8 hexadecimal"),
    ({"C9": "000000000"}, "C9", "8 hexadecimal"),
    ({"C9": "ünï"}, "C9", "8 hexadecimal"),
    ({"C3": "00000000\t00000000"}, None, "40 fields"),
]


@pytest.mark.parametrize(("fields", "column", "expected"), BAD_CRITEO)
def test_criteo_malformed_line_is_named(
    tsv: pathlib.Path, fields: dict[str, str], column: str | None, expected: str
) -> None:
    good = criteo_line()
    write(tsv, good, good, criteo_line(**fields), good)
    with pytest.raises(CriteoFormatError, match=expected) as error:
        collect(CriteoReader(tsv))
    assert (error.value.line, error.value.column) == (3, column)
    assert f"{tsv}, line 3" in str(error.value)

    reader = CriteoReader(tsv, on_error="skip")
    rows = len(collect(reader)["label"])
    lines = len(tsv.read_text().splitlines())
    assert reader.rows == rows == 3
    assert reader.skipped == lines - rows
    assert reader.problems[0].line == 3


def test_criteo_first_bad_line_is_the_one_raised_and_line_numbers_cross_blocks(
    tsv: pathlib.Path,
) -> None:
    lines = [criteo_line() for _ in range(60)]
    for number, bad in [(12, "short"), (30, ""), (44, criteo_line(I5="?")), (60, "1\t2")]:
        lines[number - 1] = bad
    write(tsv, *lines)
    for block in (700, 3000, 1 << 20):
        with pytest.raises(CriteoFormatError, match="line 12: expected 40 fields"):
            collect(CriteoReader(tsv, block_bytes=block))
        reader = CriteoReader(tsv, 7, on_error="skip", block_bytes=block)
        assert len(collect(reader)["label"]) == 56
        assert [problem.line for problem in reader.problems] == [12, 30, 44, 60]
        assert reader.skipped == 4


def test_criteo_good_batches_come_before_the_error(tsv: pathlib.Path) -> None:
    write(tsv, *[criteo_line() for _ in range(40)], "bad")
    batches = iter(CriteoReader(tsv, 10, block_bytes=2000))
    assert len(next(batches)["label"]) == 10
    with pytest.raises(CriteoFormatError, match="line 41"):
        list(batches)


def test_criteo_truncated_file(tsv: pathlib.Path) -> None:
    text = "\n".join([criteo_line()] * 3)
    tsv.write_text(text[:-3])
    with pytest.raises(CriteoFormatError, match="line 3, column C26: expected 8 hexadecimal"):
        collect(CriteoReader(tsv))
    tsv.write_text(text[:-30])
    with pytest.raises(CriteoFormatError, match=r"line 3: expected 40 fields .* found '37 fields"):
        collect(CriteoReader(tsv))


def test_criteo_files_without_rows(tmp_path: pathlib.Path) -> None:
    empty = write(tmp_path / "empty.tsv")
    for policy in ("raise", "skip"):  # nothing to skip: there is no line
        with pytest.raises(CriteoFormatError, match="an empty file"):
            list(CriteoReader(empty, on_error=policy))  # type: ignore[arg-type]
    header = write(tmp_path / "header.csv", ",".join(criteo.NAMES))
    assert list(CriteoReader(header)) == []
    bad = write(tmp_path / "bad.tsv", "x\ty", "z\tw")
    reader = CriteoReader(bad, on_error="skip")
    assert list(reader) == []
    assert reader.skipped == 2


def test_criteo_wrong_header(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "a.csv", ",".join(criteo.NAMES[::-1]), "1")
    with pytest.raises(CriteoFormatError, match="line 1: expected the header 'label,I1,"):
        list(CriteoReader(path))


def test_criteo_overlong_line_is_an_error(tsv: pathlib.Path) -> None:
    write(tsv, criteo_line(), "x" * 20_000, criteo_line())
    for policy in ("raise", "skip"):
        with pytest.raises(
            CriteoFormatError, match="line 2: expected lines shorter than 4000 bytes"
        ):
            list(CriteoReader(tsv, block_bytes=4000, on_error=policy))  # type: ignore[arg-type]


def test_criteo_lines_that_are_not_text(tsv: pathlib.Path) -> None:
    good = criteo_line().encode()
    tsv.write_bytes(good + b"\n\xff\xfe\x00\n" + good.replace(b"000000c8", b"000000\xff8"))
    reader = CriteoReader(tsv, on_error="skip")
    assert len(collect(reader)["label"]) == 1
    assert reader.skipped == 2
    assert [(p.line, p.column) for p in reader.problems] == [(2, None), (3, "C1")]


def test_criteo_vocabulary_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        CriteoReader("x", vocabulary=1)
    with pytest.raises(ValueError, match="26"):
        Dlrm([10, 20]).init()


@pytest.fixture
def criteo_file(tmp_path: pathlib.Path) -> pathlib.Path:
    sample = SAMPLES / "criteo_sample.csv"
    if sample.exists():
        return sample
    criteo.write_sample(tmp_path / "criteo.csv", 200)
    return tmp_path / "criteo.csv"


@pytest.mark.once
def test_criteo_sample_trains(criteo_file: pathlib.Path) -> None:
    model = Dlrm(1000, dim=4, bottom=(16,), top=(16,))
    params = model.init()
    step = jax.jit(jax.value_and_grad(model.loss))
    reader = CriteoReader(criteo_file, 100, vocabulary=1000)
    losses = []
    for _ in range(8):
        for batch in reader:
            loss, gradient = step(params, batch)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
            losses.append(float(loss))
    assert reader.rows == 200
    assert reader.skipped == 0
    assert sum(losses[-2:]) < sum(losses[:2])  # the same two batches, eight times


@pytest.mark.once
@pytest.mark.parametrize("size", SIZES)
def test_dlrm_equals_numpy(size: int) -> None:
    model = Dlrm(vocabulary=50, dim=4, bottom=(8,), top=(8,))
    params, batch = model.init(1), model.batch(size, 2)
    bottom = numpy_mlp(params["bottom"], batch["dense"], last_relu=True)
    embeddings = [
        np.asarray(table)[batch[name]]
        for table, name in zip(params["tables"], criteo.CATEGORIES, strict=True)
    ]
    vectors = [bottom, *embeddings]
    dots = [(vectors[i] * vectors[j]).sum(axis=1) for i in range(27) for j in range(i)]
    joined = np.concatenate([bottom, np.stack(dots, axis=1)], axis=1)
    expected = sigmoid(numpy_mlp(params["top"], joined, last_relu=False)[:, 0])
    close(jax.jit(model.forward)(params, batch), expected, 1e-4)


# --- MovieLens ----------------------------------------------------------------------------------------------

MOVIE = {
    "user_id": "3299",
    "movie_id": "235",
    "rating": "4",
    "timestamp": "968035345",
    "title": '"Bridges, The (1995)"',
    "genres": "Comedy|Drama",
    "gender": "F",
    "age": "25",
    "occupation": "4",
    "zip": "19119",
}


def movie_line(**fields: str) -> str:
    """A valid line but for `fields`."""
    return ",".join((MOVIE | fields).values())


HEADER = ",".join(movielens.NAMES)


@pytest.fixture
def csv(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "movies.csv"


def test_movielens_values(csv: pathlib.Path) -> None:
    genres = ["Comedy|Drama", "", "(no genres listed)", "Western"]
    write(csv, HEADER, *[movie_line(genres=g) for g in genres], movie_line(gender="M", age="1"))
    batch = collect(MovieLensReader(csv))
    comedy, drama, western = (movielens.GENRES.index(g) for g in ("Comedy", "Drama", "Western"))
    assert batch["genres_splits"].tolist() == [0, 2, 2, 2, 3, 5]
    assert batch["genres_values"].tolist() == [comedy, drama, western, comedy, drama]
    assert batch["user_id"].tolist() == [3299] * 5
    assert batch["gender"].tolist() == [0, 0, 0, 0, 1]
    assert batch["age"].tolist() == [25, 25, 25, 25, 1]
    assert batch["rating"].tolist() == [4.0] * 5
    padded = collect(MovieLensReader(csv, genres="padded", max_genres=3))
    assert padded["genres"].tolist() == [
        [comedy, drama, -1],
        [-1, -1, -1],
        [-1, -1, -1],
        [western, -1, -1],
        [comedy, drama, -1],
    ]


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        ({"user_id": "6041"}, "user_id"),
        ({"user_id": ""}, "user_id"),
        ({"movie_id": "0"}, "movie_id"),
        ({"rating": "6"}, "rating"),
        ({"rating": "3.7"}, "rating"),
        ({"gender": "f"}, "gender"),
        ({"age": "old"}, "age"),
        ({"occupation": "21"}, "occupation"),
        ({"genres": "Comedy|Opera"}, "genres"),
        ({"genres": "Comedy|"}, "genres"),
        ({"title": "Bridges, The"}, None),
        ({"zip": "1,2"}, None),
    ],
)
def test_movielens_malformed_line_is_named(
    csv: pathlib.Path, fields: dict[str, str], column: str | None
) -> None:
    write(csv, HEADER, movie_line(), movie_line(**fields), movie_line())
    with pytest.raises(MovieLensFormatError) as error:
        collect(MovieLensReader(csv))
    assert (error.value.line, error.value.column) == (3, column)
    reader = MovieLensReader(csv, on_error="skip")
    assert len(collect(reader)["rating"]) == 2
    assert reader.skipped == 1


def test_movielens_too_many_genres_to_pad(csv: pathlib.Path) -> None:
    write(csv, HEADER, movie_line(genres="|".join(movielens.GENRES[:3])))
    with pytest.raises(MovieLensFormatError, match="max_genres=2"):
        list(MovieLensReader(csv, genres="padded", max_genres=2))
    with pytest.raises(ValueError, match="jagged"):
        MovieLensReader(csv, genres="sparse")  # type: ignore[arg-type]


def test_movielens_empty_file_and_wrong_header(csv: pathlib.Path) -> None:
    write(csv)
    with pytest.raises(MovieLensFormatError, match="an empty file"):
        list(MovieLensReader(csv))
    write(csv, "user_id,movie_id", "1,2")
    with pytest.raises(MovieLensFormatError, match="line 1: expected the header 'user_id,"):
        list(MovieLensReader(csv))


@pytest.fixture
def movielens_file(tmp_path: pathlib.Path) -> pathlib.Path:
    sample = SAMPLES / "movielens_sample.csv"
    if sample.exists():
        return sample
    movielens.write_sample(tmp_path / "movielens.csv", 200)
    return tmp_path / "movielens.csv"


@pytest.mark.once
def test_movielens_model_equals_numpy(movielens_file: pathlib.Path) -> None:
    model = MovieLensModel(dim=4, units=8)
    params = model.init()
    tables = {name: np.asarray(table) for name, table in params["tables"].items()}
    jagged = collect(MovieLensReader(movielens_file, 70))
    padded = collect(MovieLensReader(movielens_file, 70, genres="padded"))
    splits = jagged["genres_splits"]
    bags = [jagged["genres_values"][a:b] for a, b in itertools.pairwise(splits)]
    ages = [sum(age >= bound for bound in movielens.AGES) for age in jagged["age"]]
    genres = [tables["genres"][b].mean(axis=0) if len(b) else np.zeros(4) for b in bags]
    plain = [tables[n][jagged[n]] for n in ("user_id", "movie_id", "gender")]
    rest = [tables["age"][ages], tables["occupation"][jagged["occupation"]], np.array(genres)]
    wide = np.concatenate(plain + rest, axis=1)
    close(model.columns(params, jagged), wide)
    close(model.columns(params, padded), wide)
    expected = 1 + 4 * sigmoid(numpy_mlp(params["head"], wide, last_relu=False)[:, 0])
    close(jax.jit(model.forward)(params, padded), expected, 1e-4)
    assert len(wide) == 200


# --- optimize on every example ------------------------------------------------------------------------------

Case = tuple[Callable[[Any, Any], jax.Array], Any, Mapping[str, np.ndarray], int]


def optimize_case(name: str, size: int) -> Case:
    """Function, parameters, batch, and how many columns the function has."""
    if name in RECOM:
        recom = RECOM[name]
        return recom.columns, recom.init(1), recom.batch(size, 2), len(recom.specs)
    if name.startswith("recflex"):
        expand: Any = "searchsorted" if name.endswith("search") else "repeat"
        flex = small_recflex(name.split("_")[1], expand=expand)
        batch = flex.batch(size, 2)
        # Where no sample holds a feature, nothing is read, and JAX traces no lookup at all.
        read = sum(1 for f in flex.features if len(batch.get(f"{f.name}_values", "one")))
        return flex.columns, flex.init(1), batch, read
    options = {"shared_table": "shared" in name, "hash_in_model": "hash" in name}
    dlrm = Dlrm(vocabulary=50, dim=4, bottom=(8,), top=(8,), **options)
    return dlrm.columns, dlrm.init(1), dlrm.batch(size, 2), 26


OPTIMIZED = [*RECOM, "recflex_A", "recflex_C_search", "dlrm", "dlrm_shared", "dlrm_hash"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPTIMIZED)
def test_optimize_equals_plain(name: str, size: int) -> None:
    import recom_jax

    function, params, batch, columns = optimize_case(name, size)
    expected = np.asarray(jax.jit(function)(params, batch))
    fused = recom_jax.optimize(function)
    actual = fused(params, batch)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if name.startswith(("micro", "dlrm")):  # lookups alone: to the last bit
        np.testing.assert_array_equal(actual, expected)
    else:
        close(actual, expected, 1e-4)
    if size == 0:
        return  # nothing is read, and JAX traces no lookup at all
    report = fused.explain(params, batch)
    assert report.num_columns == report.num_fused == columns
    assert report.num_custom_calls == 1


@pytest.mark.parametrize("name", ["model_e", "recflex_A", "dlrm"])
def test_bound_model_equals_plain(name: str) -> None:
    import recom_jax

    function, params, batch, _ = optimize_case(name, 5)
    expected = np.asarray(jax.jit(function)(params, batch))
    serve = recom_jax.optimize(function).bind(params)
    close(serve(batch), expected, 1e-4)
    views = serve.input_views(batch)
    for key, values in batch.items():
        views[key][...] = values
    close(serve(views), expected, 1e-4)


@pytest.mark.parametrize("form", ["jagged", "padded"])
def test_optimize_equals_plain_on_movielens(form: Any, movielens_file: pathlib.Path) -> None:
    import recom_jax

    model = MovieLensModel(dim=4, units=8)
    params = model.init()
    batch = collect(MovieLensReader(movielens_file, genres=form))
    fused = recom_jax.optimize(model.forward)
    close(fused(params, batch), np.asarray(jax.jit(model.forward)(params, batch)), 1e-4)
    assert fused.explain(params, batch).num_fused == 6


def test_optimize_whole_models_and_gradients() -> None:
    import recom_jax

    e = RECOM["model_e"]
    params, batch = e.init(1), e.batch(5, 2)
    close(recom_jax.optimize(e.forward)(params, batch), e.forward(params, batch), 1e-4)

    dlrm = Dlrm(vocabulary=50, dim=4, bottom=(8,), top=(8,))
    weights, rows = dlrm.init(1), dlrm.batch(5, 2)
    expected = jax.grad(dlrm.loss)(weights, rows)
    actual = jax.grad(recom_jax.optimize(dlrm.loss))(weights, rows)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), actual, expected)


@pytest.mark.once
def test_the_demo_tours_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import demo

    dlrm = Dlrm(vocabulary=50, dim=4, bottom=(8,), top=(8,))
    report, milliseconds = demo.tour(
        "A small DLRM", dlrm.forward, dlrm.init(1), dlrm.batch(5, 2), 2
    )
    assert report.num_fused == 26 and milliseconds > 0
    told = capsys.readouterr().out
    assert "26 of 26 columns fused" in told and "results: 100.00% of 5 numbers equal" in told
