"""Raw Criteo rows for preprocessing on the way to the step: nothing hashed, nothing filled in, missing fields null.

A batch is `{"label": float32 [B], "I1".."I13": Nullable float32, "C1".."C26": Nullable Int64}`. It comes from the
published TSV or DeepCTR's CSV (`RawCriteo`), from parquet (`RawParquet`), or is made up (`ZipfRows`). All can be
iterated again, and the last two skip batches without reading them.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from examples.criteo import CATEGORIES, DENSE, CriteoReader
from examples.csv_rows import Batch, numbers
from recom_jax import preprocess as pp

Raw = dict[str, Any]


class RawCriteo(CriteoReader):
    """Raw batches of a Criteo TSV or CSV, checked as `CriteoReader` does."""

    def convert(self, rows: pa.RecordBatch) -> Batch:
        made: Batch = {"label": numbers(rows.column("label"), missing=0.0).astype(np.float32)}
        for name in DENSE:
            made[name] = numbers(rows.column(name), missing=np.nan).astype(np.float32)
        for name in CATEGORIES:
            made[name] = hexadecimal(rows.column(name))
        return made

    def cut(self, rows: Batch, start: int, stop: int) -> Raw:
        """Rows `start` to `stop`; NaN and -1 are what `convert` writes for a missing field."""
        made: Raw = {"label": rows["label"][start:stop]}
        for name in (*DENSE, *CATEGORIES):
            values = rows[name][start:stop]
            there = ~np.isnan(values) if name in DENSE else values >= 0
            made[name] = pp.Nullable(np.where(there, values, 0).astype(values.dtype), there)
        return made


def hexadecimal(column: pa.Array) -> np.ndarray:
    """Checked fields of 8 hexadecimal digits -> int64 [rows], -1 for empty ones."""
    missing = np.asarray(pc.equal(column, b"").to_numpy(zero_copy_only=False), bool)
    digits = pc.if_else(pa.array(missing), b"0", column).cast(pa.string())
    value = pc.binary_join_element_wise("0x", digits, "").cast(pa.uint32()).to_numpy()
    return np.where(missing, np.int64(-1), value.astype(np.int64))


class RawParquet:
    """Raw batches of a parquet file with the columns label, I1 to I13 (numbers) and C1 to C26 (integers, or strings of
    hexadecimal digits); nulls are missing fields."""

    def __init__(self, path: str | os.PathLike[str], batch_size: int = 256) -> None:
        self.path, self.batch_size, self._skip = os.fspath(path), batch_size, 0
        have = set(pq.ParquetFile(self.path).schema_arrow.names)
        missing = [n for n in ("label", *DENSE, *CATEGORIES) if n not in have]
        if missing:
            raise ValueError(f"{self.path}: no column {missing[0]}; it has {sorted(have)}")

    def skip(self, batches: int) -> None:
        """The next iteration begins behind this many batches."""
        self._skip = batches

    def __iter__(self) -> Iterator[Raw]:
        skip, self._skip = self._skip, 0
        names = ["label", *DENSE, *CATEGORIES]
        for k, rows in enumerate(
            pq.ParquetFile(self.path).iter_batches(self.batch_size, columns=names)
        ):
            if k >= skip:
                yield {
                    name: self._column(name, rows.column(k))
                    for k, name in enumerate(rows.schema.names)
                }

    def _column(self, name: str, x: pa.Array) -> Any:
        if name == "label":
            return np.asarray(x.cast(pa.float32()).to_numpy(zero_copy_only=False))
        if name in DENSE:
            return pp.from_arrow(x.cast(pa.float32()))
        if pa.types.is_integer(x.type):
            return pp.from_arrow(x.cast(pa.int64()))
        values = hexadecimal(x.cast(pa.binary()).fill_null(b""))
        return pp.Nullable(np.maximum(values, 0), values >= 0)


def write_parquet(path: str | os.PathLike[str], batches: Any) -> None:
    """Writes raw batches as a parquet file of numbers, nulls where a field is missing."""
    tables = []
    for raw in batches:
        made = {"label": pa.array(raw["label"])}
        for name in (*DENSE, *CATEGORIES):
            x = raw[name]
            made[name] = pa.array(np.asarray(x.values), mask=~np.asarray(x.valid))
        tables.append(pa.table(made))
    pq.write_table(pa.concat_tables(tables), os.fspath(path))


class ZipfRows:
    """Made-up rows: categories by a Zipf law, a tenth of all fields missing, clicks that depend on the fields.

    Args:
      batches, batch_size: how much there is. Batch k is the same whatever came before it.
      values: how many values a category has.
    """

    def __init__(
        self, batches: int, batch_size: int = 256, values: int = 100_000, seed: int = 0
    ) -> None:
        self.batches, self.batch_size, self.values, self.seed = batches, batch_size, values, seed
        self._skip = 0

    def skip(self, batches: int) -> None:
        """The next iteration begins behind this many batches."""
        self._skip = min(batches, self.batches)

    def __iter__(self) -> Iterator[Raw]:
        start, self._skip = self._skip, 0
        return (self.batch(k) for k in range(start, self.batches))

    def batch(self, k: int) -> Raw:
        rng = np.random.default_rng([self.seed, k])
        size = self.batch_size
        ranks = (
            (rng.pareto(1.05, (len(CATEGORIES), size)) * 3)
            .clip(0, self.values - 1)
            .astype(np.int64)
        )
        dense = rng.exponential(20.0, (len(DENSE), size)).astype(np.float32)
        there = rng.random((len(DENSE) + len(CATEGORIES), size)) > 0.1
        taste = np.sin(ranks[:4] * 12.9898).sum(0) + 0.5 * (np.log1p(dense[0]) - 2.5)
        label = (rng.random(size) < 1 / (1 + np.exp(1.0 - taste))).astype(np.float32)
        made: Raw = {"label": label}
        for k2, name in enumerate(DENSE):
            made[name] = pp.Nullable(np.where(there[k2], dense[k2], 0), there[k2])
        for k2, name in enumerate(CATEGORIES):
            ids = ranks[k2] * 1_000_003 + (k2 << 40)  # as wide as real ids
            made[name] = pp.Nullable(ids, there[len(DENSE) + k2])
        return made
