"""Writes the exported model that tests keep for later versions, from the installed JAX and custom call::

    python -m tests.artefacts.make

One file for each JAX version and version of the custom call, in this folder. Files that are there stay as they are:
they are what users have on their disks (`tests/test_artefacts.py` runs them all).
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import recom_jax
from recom_jax import ffi

FOLDER = pathlib.Path(__file__).parent
BOUNDARIES = np.array([-1.0, 0.0, 0.5, 2.25], np.float32)


def model(table: Any, ids: Any, x: Any) -> Any:
    """A masked mean, a plain lookup and a bucketized number, side by side.

    Args:
      table: float32 [20, 4].
      ids: int32 [b, l]; below zero is padding.
      x: float32 [b].

    Returns:
      float32 [b, 12].
    """
    mask = ids >= 0
    rows = jnp.where(mask[..., None], jnp.take(table, jnp.where(mask, ids, 0), axis=0), 0)
    mean = rows.sum(1) / jnp.maximum(mask.sum(1, keepdims=True), 1)
    first = jnp.take(table, ids[:, 0], axis=0)
    bucket = jnp.take(table, jnp.digitize(x, jnp.asarray(BOUNDARIES)), axis=0)
    return jnp.concatenate([mean, first, bucket], axis=1)


def arguments(batch: int, length: int) -> tuple[Any, Any, Any]:
    """Arguments of a size, odd ids and NaN among them."""
    rng = np.random.default_rng([batch, length])
    x = rng.normal(size=batch).astype(np.float32) * 2
    x[::7] = np.nan
    return (
        jnp.asarray(np.arange(80, dtype=np.float32).reshape(20, 4) / 7),
        jnp.asarray(rng.integers(-4, 24, (batch, length)).astype(np.int32)),
        jnp.asarray(x),
    )


def exported() -> Any:
    b, n = jax.export.symbolic_shape("b, l")
    types = (
        jax.ShapeDtypeStruct((20, 4), jnp.float32),
        jax.ShapeDtypeStruct((b, n), jnp.int32),
        jax.ShapeDtypeStruct((b,), jnp.float32),
    )
    return jax.export.export(jax.jit(recom_jax.optimize(model)), platforms=("cpu",))(*types)


def main() -> None:
    path = FOLDER / f"jax-{jax.__version__}-{ffi.FUSED}.bin"
    if path.exists():
        print(f"{path.name} is there already")
        return
    # Locations without the folders of the machine that makes the file.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    path.write_bytes(exported().serialize())
    print(f"wrote {path.name}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
