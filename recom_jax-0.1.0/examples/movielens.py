"""MovieLens ratings with multi-valued genres: a reader to jagged or padded bags, and a small model.

    for batch in MovieLensReader("movielens_sample.csv", batch_size=64):
        ...                                         # batch["user_id"], ..., batch["genres_values"]

    model = MovieLensModel()
    params = model.init(seed=0)
    rating = model.forward(params, batch)           # [B], between 1 and 5

The file is the CSV that DeepCTR ships, with the header `user_id,movie_id,rating,timestamp,title,genres,
gender,age,occupation,zip`; genres look like `Comedy|Drama`. No genres (empty, or "(no genres listed)") is
an empty bag. A malformed line raises `MovieLensFormatError`, or with on_error="skip" is one more in
`reader.skipped`.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from examples.csv_rows import Batch, Check, FormatError, Layout, RowReader, matches, numbers
from examples.mlp import apply_mlp, init_mlp

NAMES = (
    "user_id",
    "movie_id",
    "rating",
    "timestamp",
    "title",
    "genres",
    "gender",
    "age",
    "occupation",
    "zip",
)
# fmt: off
GENRES = (
    "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
# fmt: on
AGES = np.array([18, 25, 35, 45, 50, 56], np.float32)  # where MovieLens' age groups begin
USERS, MOVIES, OCCUPATIONS = 6040, 3952, 21
NO_GENRES = (b"", b"(no genres listed)")
GENDERS = (b"F", b"M")


class MovieLensFormatError(FormatError):
    """A line of a MovieLens file with a field that can't be read."""


class MovieLensReader(RowReader):
    """Batches with one array per column.

    `user_id`, `movie_id`, `gender` (0 is F, 1 is M) and `occupation` are int32 [B], `age` and `rating`
    float32 [B]. Genres, as numbers into `GENRES`, come in one of two forms:

    - genres="jagged": `genres_values` int32 [total] and `genres_splits` int32 [B + 1];
    - genres="padded": `genres` int32 [B, max_genres], -1 behind the last.
    """

    error = MovieLensFormatError

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int = 256,
        *,
        genres: Literal["jagged", "padded"] = "jagged",
        max_genres: int = 6,
        on_error: Literal["raise", "skip"] = "raise",
        block_bytes: int = 1 << 20,
    ) -> None:
        super().__init__(path, batch_size, on_error=on_error, block_bytes=block_bytes)
        if genres not in ("jagged", "padded"):
            raise ValueError(f'genres must be "jagged" or "padded", got {genres!r}')
        self.genres = genres
        self.max_genres = max_genres

    def layout(self, first_line: str) -> Layout:
        return Layout(NAMES, ",", header=True, quoted=True)

    def checks(self, block: pa.RecordBatch) -> Iterator[Check]:
        for name, low, high in (
            ("user_id", 1, USERS),
            ("movie_id", 1, MOVIES),
            ("age", 0, 150),
            ("occupation", 0, OCCUPATIONS - 1),
        ):
            ok = _integers(block.column(name))
            yield Check(name, (ok >= low) & (ok <= high), f"an integer from {low} to {high}")
        rating = matches(block.column("rating"), r"[1-4](\.[05]0*)?|5(\.0*)?|0\.50*")
        yield Check("rating", rating, "a rating from 0.5 to 5 in halves")
        gender = pc.is_in(block.column("gender"), pa.array(GENDERS)).to_numpy(zero_copy_only=False)
        yield Check("gender", gender, "F or M")
        values, splits = _split_genres(block.column("genres"))
        unknown = np.concatenate([[0], np.cumsum(values < 0)])[splits]
        yield Check("genres", np.diff(unknown) == 0, f"genres of {'|'.join(GENRES)}")
        if self.genres == "padded":
            few = np.diff(splits) <= self.max_genres
            yield Check("genres", few, f"at most max_genres={self.max_genres} genres")

    def convert(self, rows: pa.RecordBatch) -> Batch:
        batch = {
            name: _integers(rows.column(name)).astype(np.int32)
            for name in ("user_id", "movie_id", "occupation")
        }
        gender = pc.equal(rows.column("gender"), GENDERS[1]).to_numpy(zero_copy_only=False)
        batch["gender"] = gender.astype(np.int32)
        batch["age"] = _integers(rows.column("age")).astype(np.float32)
        batch["rating"] = numbers(rows.column("rating"), missing=0.0).astype(np.float32)
        values, splits = _split_genres(rows.column("genres"))
        if self.genres == "jagged":
            return batch | {"genres_values": values, "genres_splits": splits}
        padded = np.full((len(splits) - 1, self.max_genres), -1, np.int32)
        padded[np.arange(self.max_genres) < np.diff(splits)[:, None]] = values
        return batch | {"genres": padded}

    def cut(self, rows: Batch, start: int, stop: int) -> Batch:
        if self.genres == "padded":
            return super().cut(rows, start, stop)
        splits = rows["genres_splits"][start : stop + 1]
        batch = super().cut(rows, start, stop)
        values = rows["genres_values"][splits[0] : splits[-1]]
        return batch | {"genres_values": values, "genres_splits": splits - splits[0]}


def _integers(column: pa.Array) -> np.ndarray:
    """int64 [rows]; -1 where the field isn't one to nine digits."""
    digits = pc.if_else(pa.array(matches(column, "[0-9]{1,9}")), column, b"-1")
    return np.asarray(digits.cast(pa.string()).cast(pa.int64()).to_numpy())


def _split_genres(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """`Comedy|Drama` fields -> int32 values (-1: unknown) and int32 row splits."""
    none = pc.is_in(column, pa.array(NO_GENRES))
    bags = pc.split_pattern(pc.if_else(none, pa.scalar(None, pa.binary()), column), b"|")
    known = pc.index_in(bags.flatten(), pa.array([genre.encode() for genre in GENRES]))
    lengths = pc.list_value_length(bags).fill_null(0).to_numpy()
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return known.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32), splits


def mean_jagged(table: jax.Array, values: jax.Array, splits: jax.Array) -> jax.Array:
    """Mean of each bag, zeros for an empty one: [rows, dim], [total], [B + 1] -> [B, dim]."""
    size, lengths = splits.shape[0] - 1, jnp.diff(splits)
    row = jnp.repeat(jnp.arange(size), lengths, total_repeat_length=values.shape[0])
    total = jax.ops.segment_sum(jnp.take(table, values, axis=0), row, num_segments=size)
    return total / jnp.maximum(lengths, 1)[:, None]


def mean_padded(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Mean over the ids that aren't -1, zeros where none is: [rows, dim], [B, n] -> [B, dim]."""
    mask = ids >= 0
    rows = jnp.take(table, jnp.where(mask, ids, 0), axis=0) * mask[..., None]
    return rows.sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)[:, None]


@dataclasses.dataclass(frozen=True)
class MovieLensModel:
    """Six embedding columns and a two-layer rating head. Takes both forms of genres."""

    dim: int = 16
    units: int = 64

    def init(self, seed: int = 0) -> dict[str, Any]:
        """`{"tables": {column: [rows, dim]}, "head": Mlp}`. Ids 0 of users and movies are unused."""
        rng = np.random.default_rng(seed)
        rows = {
            "user_id": USERS + 1,
            "movie_id": MOVIES + 1,
            "gender": len(GENDERS),
            "age": len(AGES) + 1,
            "occupation": OCCUPATIONS,
            "genres": len(GENRES),
        }
        tables = {
            name: jnp.asarray(rng.standard_normal((n, self.dim), dtype=np.float32))
            for name, n in rows.items()
        }
        return {"tables": tables, "head": init_mlp(rng, len(rows) * self.dim, (self.units, 1))}

    def columns(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """[B, 6 * dim]: user, movie, gender, age group, occupation, mean of the genres."""
        tables = params["tables"]
        pieces = [
            jnp.take(tables[name], jnp.asarray(batch[name]), axis=0)
            for name in ("user_id", "movie_id", "gender")
        ]
        group = jnp.digitize(jnp.asarray(batch["age"]), AGES)
        pieces.append(jnp.take(tables["age"], group, axis=0))
        pieces.append(jnp.take(tables["occupation"], jnp.asarray(batch["occupation"]), axis=0))
        if "genres" in batch:
            pieces.append(mean_padded(tables["genres"], jnp.asarray(batch["genres"])))
        else:
            values, splits = batch["genres_values"], batch["genres_splits"]
            pieces.append(mean_jagged(tables["genres"], jnp.asarray(values), jnp.asarray(splits)))
        return jnp.concatenate(pieces, axis=1)

    def forward(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """[B]: ratings between 1 and 5."""
        x = apply_mlp(params["head"], self.columns(params, batch), last_relu=False)
        return 1 + 4 * jax.nn.sigmoid(x[:, 0])

    def loss(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """Mean squared error against `batch["rating"]`, a scalar."""
        return jnp.mean((self.forward(params, batch) - jnp.asarray(batch["rating"])) ** 2)


def write_sample(path: str | os.PathLike[str], rows: int, seed: int = 0) -> None:
    """Writes made-up ratings in the CSV form, some without genres and some with a comma in the title."""
    rng = np.random.default_rng(seed)
    lines = [",".join(NAMES)]
    for i in range(rows):
        genres = "|".join(rng.choice(GENRES, rng.integers(0, 5), replace=False))
        title = f'"Film {i}, The (1999)"' if i % 3 == 0 else f"Film {i} (1999)"
        fields = (
            rng.integers(1, USERS + 1),
            rng.integers(1, MOVIES + 1),
            rng.integers(1, 6),
            970_000_000 + i,
            title,
            genres,
            rng.choice(["F", "M"]),
            rng.choice([1, 18, 25, 35, 45, 50, 56]),
            rng.integers(0, OCCUPATIONS),
            f"{rng.integers(0, 100_000):05d}",
        )
        lines.append(",".join(str(field) for field in fields))
    pathlib.Path(path).write_text("".join(line + "\n" for line in lines))
