"""Criteo display ads: a streaming reader that loses nothing silently, and the DLRM model.

    for batch in CriteoReader("train.txt", batch_size=1024, vocabulary=100_000):
        ...                                 # batch["label"], batch["dense"], batch["C1"], ..., batch["C26"]

    model = Dlrm(vocabulary=100_000)
    params = model.init(seed=0)
    click = model.forward(params, batch)    # [B]: probabilities

The reader takes the published TSV (no header: label, 13 integers, 26 hexadecimal categories) and the CSV
with a header that DeepCTR ships; it tells them apart by the first line, and reads .gz as it is.

| field | valid | missing (empty) |
| --- | --- | --- |
| label | 0 or 1 | malformed |
| I1 to I13 | a number, -1 and 260.0 included; becomes log1p(max(x, 0)) | 0.0 |
| C1 to C26 | 8 hexadecimal digits; becomes 1 + value % (vocabulary - 1) | id 0 |

Any other line (a blank one too) is malformed: `CriteoFormatError`, or with on_error="skip" one more in
`reader.skipped`.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from examples.csv_rows import Batch, Check, FormatError, Layout, RowReader, matches, numbers
from examples.mlp import apply_mlp, init_mlp

DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
NAMES = ("label", *DENSE, *CATEGORIES)
_NUMBER = r"[+-]?\d{1,30}(\.\d{0,30})?([eE][+-]?\d{1,2})?"


class CriteoFormatError(FormatError):
    """A line of a Criteo file that isn't a label, 13 numbers and 26 categories."""


def per_field(vocabulary: int | Sequence[int]) -> tuple[int, ...]:
    """One vocabulary size per category (26 of them) from one size for all, or from 26 sizes."""
    sizes = (vocabulary,) * len(CATEGORIES) if isinstance(vocabulary, int) else tuple(vocabulary)
    if len(sizes) != len(CATEGORIES) or min(sizes) < 2:
        raise ValueError(
            f"vocabulary must be one size, or {len(CATEGORIES)}, each at least 2 (id 0 stands for "
            f"missing), got {vocabulary!r}"
        )
    return sizes


class CriteoReader(RowReader):
    """Batches of `{"label": float32 [B], "dense": float32 [B, 13], "C1": [B], ..., "C26": [B]}`.

    Categories are int32 ids. With `hash_in_model` they are the uint32 behind the hexadecimal digits, 0 where
    missing, for a model that reduces them itself (`Dlrm(hash_in_model=True)`); ids come out the same.
    """

    error = CriteoFormatError

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int = 256,
        *,
        vocabulary: int | Sequence[int] = 10_000,
        hash_in_model: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        block_bytes: int = 1 << 20,
    ) -> None:
        super().__init__(path, batch_size, on_error=on_error, block_bytes=block_bytes)
        self.vocabulary = per_field(vocabulary)
        self.hash_in_model = hash_in_model

    def layout(self, first_line: str) -> Layout:
        if "\t" in first_line:
            return Layout(NAMES, "\t", header=False)
        return Layout(NAMES, ",", header=True)

    def checks(self, block: pa.RecordBatch) -> Iterator[Check]:
        yield Check("label", matches(block.column("label"), "[01]"), "0 or 1")
        for name in DENSE:
            yield Check(name, matches(block.column(name), f"({_NUMBER})?"), "a number or nothing")
        for name in CATEGORIES:
            ok = matches(block.column(name), "([0-9a-fA-F]{8})?")
            yield Check(name, ok, "8 hexadecimal digits or nothing")

    def convert(self, rows: pa.RecordBatch) -> Batch:
        dense = np.stack([numbers(rows.column(name), missing=0.0) for name in DENSE], axis=1)
        batch = {
            "label": numbers(rows.column("label"), missing=0.0).astype(np.float32),
            "dense": np.log1p(np.maximum(dense, 0.0)).astype(np.float32),
        }
        for name, size in zip(CATEGORIES, self.vocabulary, strict=True):
            field = rows.column(name)
            missing = np.asarray(pc.equal(field, b"").to_numpy(zero_copy_only=False), bool)
            digits = pc.if_else(pa.array(missing), b"0", field).cast(pa.string())
            value = pc.binary_join_element_wise("0x", digits, "").cast(pa.uint32()).to_numpy()
            if self.hash_in_model:
                # 0 says missing, so the category 00000000 takes another number with the same remainder.
                value = np.where(value == 0, np.uint32(size - 1), value)
                batch[name] = np.where(missing, np.uint32(0), value)
            else:
                batch[name] = np.where(missing, 0, 1 + value % np.uint32(size - 1)).astype(np.int32)
        return batch


@dataclasses.dataclass(frozen=True)
class Dlrm:
    """Facebook's DLRM: embeddings and a bottom MLP, all pairwise dot products, a top MLP.

    `shared_table` keeps the 26 vocabularies one after the other in a single table, at constant offsets.
    `hash_in_model` takes raw uint32 categories and reduces them to ids itself.
    """

    vocabulary: int | Sequence[int] = 10_000
    dim: int = 16
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 256)
    shared_table: bool = False
    hash_in_model: bool = False

    def init(self, seed: int = 0) -> dict[str, Any]:
        """`{"tables": [26 of [vocabulary, dim], or one], "bottom": Mlp, "top": Mlp}`."""
        rng = np.random.default_rng(seed)
        sizes = per_field(self.vocabulary)
        rows = [sum(sizes)] if self.shared_table else list(sizes)
        tables = [
            jnp.asarray(rng.uniform(-1, 1, (n, self.dim)).astype(np.float32) / np.sqrt(self.dim))
            for n in rows
        ]
        vectors = len(CATEGORIES) + 1
        pairs = vectors * (vectors - 1) // 2
        return {
            "tables": tables,
            "bottom": init_mlp(rng, len(DENSE), (*self.bottom, self.dim)),
            "top": init_mlp(rng, pairs + self.dim, (*self.top, 1)),
        }

    def batch(self, size: int, seed: int = 0) -> Batch:
        """`size` random samples, as `CriteoReader` gives them; about a tenth of the categories missing."""
        rng = np.random.default_rng([seed, size])
        batch: Batch = {
            "label": rng.integers(0, 2, size).astype(np.float32),
            "dense": rng.exponential(2.0, (size, len(DENSE))).astype(np.float32),
        }
        for name, rows in zip(CATEGORIES, per_field(self.vocabulary), strict=True):
            value = rng.integers(1, 2**32, size, dtype=np.uint32)
            if not self.hash_in_model:
                value = (1 + value % np.uint32(rows - 1)).astype(np.int32)
            batch[name] = np.where(rng.random(size) < 0.1, value.dtype.type(0), value)
        return batch

    def embeddings(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> list[jax.Array]:
        """The 26 embeddings, each [B, dim]."""
        sizes = per_field(self.vocabulary)
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        result = []
        for i, (name, size) in enumerate(zip(CATEGORIES, sizes, strict=True)):
            ids = jnp.asarray(batch[name])
            if self.hash_in_model:
                ids = jnp.where(ids == 0, 0, 1 + ids % jnp.uint32(size - 1)).astype(jnp.int32)
            if self.shared_table:
                result.append(jnp.take(params["tables"][0], ids + int(offsets[i]), axis=0))
            else:
                result.append(jnp.take(params["tables"][i], ids, axis=0))
        return result

    def columns(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """[B, 26 * dim]: the embeddings side by side."""
        return jnp.concatenate(self.embeddings(params, batch), axis=1)

    def logits(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """[B]."""
        return self.head(params, self.embeddings(params, batch), batch["dense"])

    def head(self, params: Mapping[str, Any], embeddings: Sequence[Any], dense: Any) -> jax.Array:
        """[B]: the logits, of embeddings that are there."""
        bottom = apply_mlp(params["bottom"], jnp.asarray(dense))
        vectors = jnp.stack([bottom, *embeddings], axis=1)  # [B, 27, dim]
        dots = jnp.einsum("bid,bjd->bij", vectors, vectors)
        row, column = np.tril_indices(vectors.shape[1], k=-1)
        joined = jnp.concatenate([bottom, dots[:, row, column]], axis=1)
        return apply_mlp(params["top"], joined, last_relu=False)[:, 0]

    def forward(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """[B]: click probabilities."""
        return jax.nn.sigmoid(self.logits(params, batch))

    def loss(self, params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        """Mean binary cross entropy against `batch["label"]`, a scalar."""
        logits, label = self.logits(params, batch), jnp.asarray(batch["label"])
        return jnp.mean(jax.nn.softplus(logits) - label * logits)


def write_sample(path: str | os.PathLike[str], rows: int, seed: int = 0) -> None:
    """Writes made-up rows with gaps like Criteo's: CSV with a header where `path` ends in .csv, else TSV."""
    rng = np.random.default_rng(seed)
    csv = os.fspath(path).endswith(".csv")
    delimiter = "," if csv else "\t"
    lines = [delimiter.join(NAMES)] if csv else []
    for _ in range(rows):
        dense = rng.geometric(0.05, len(DENSE)) - 3
        categories = rng.integers(0, 2**32, len(CATEGORIES), dtype=np.uint32)
        present = rng.random(len(NAMES) - 1) < 0.8
        fields = [str(x) for x in dense] + [f"{x:08x}" for x in categories]
        kept = [field if here else "" for field, here in zip(fields, present, strict=True)]
        lines.append(delimiter.join([str(rng.integers(0, 2)), *kept]))
    pathlib.Path(path).write_text("".join(line + "\n" for line in lines))
