"""The preprocessing program as XLA runs it, and shapes of what goes through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from recom_jax.corun.options import Options


def compile_prep(prep: Callable[[Any], Any], options: Options) -> Callable[[Any], Any]:
    """The preprocessing program as it is run: jitted, or through the fusion compiler."""
    if not options.fused:
        return jax.jit(prep)
    import recom_jax

    made: Callable[[Any], Any] = recom_jax.optimize(
        prep, options=recom_jax.Options(fuse_values=True)
    )
    return made


def like(tree: Any) -> Any:
    """Shapes and dtypes of a pytree of arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            np.shape(x),
            jax.dtypes.canonicalize_dtype(x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype),
        ),
        tree,
    )
