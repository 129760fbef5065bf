"""Input preprocessing for recommendation models: TorchArrow's operators as JAX functions, with its exact semantics.

    from recom_jax import preprocess as pp

    def prep(raw):                                          # an ordinary function of raw columns; jit, vmap, trace it
        ids = pp.sigrid_hash(pp.firstx(raw["C1"], 3), salt=1, max_value=100_000)
        x = pp.logit(pp.fill_null(raw["I1"], 0.0), eps=1e-6)
        return {"ids": pp.pad(ids, 3), "x": x}

    prep(pp.columns(record_batch))

Columns are arrays (B,), `Nullable`, `Jagged` lists or `Int64`. Null in gives null out. Integer operators give the same
bits everywhere; logarithms and powers are right to a few units in the last place. docs/corun.md has the table.
"""

from recom_jax.preprocess import dense, functions, hashing, ingest, lists, scores
from recom_jax.preprocess import program as _program
from recom_jax.preprocess.dense import *  # noqa: F403
from recom_jax.preprocess.functions import *  # noqa: F403
from recom_jax.preprocess.hashing import *  # noqa: F403
from recom_jax.preprocess.ingest import *  # noqa: F403
from recom_jax.preprocess.int64 import Int64
from recom_jax.preprocess.lists import *  # noqa: F403
from recom_jax.preprocess.operator import OPERATORS
from recom_jax.preprocess.program import *  # noqa: F403
from recom_jax.preprocess.scores import *  # noqa: F403
from recom_jax.preprocess.values import (
    Column,
    Jagged,
    Nullable,
)

__all__ = [
    *dense.__all__,
    *functions.__all__,
    *hashing.__all__,
    *ingest.__all__,
    *lists.__all__,
    *_program.__all__,
    *scores.__all__,
    "OPERATORS",
    "Column",
    "Int64",
    "Jagged",
    "Nullable",
]
