"""What may be done with float8 rows in a call: look them up, move them, widen them."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows float8 by it
import numpy as np

from recom_jax import ir
from recom_jax.detect_values import Refuse

# XLA computes the rest, in precisions of its own choice.
_MOVES = frozenset(
    ("gather", "dynamic_slice", "convert_element_type", "select_n", "reshape", "squeeze", "broadcast_in_dim",
     "transpose", "copy")
)  # fmt: skip
_FLOAT8 = frozenset(map(np.dtype, sorted(ir.FLOAT8)))


def check_float8(eqn: Any, name: str) -> None:
    """Raises Refuse for arithmetic on float8 rows and for rounding to them, which stay in XLA."""
    for v in (*eqn.outvars, *eqn.invars):
        if getattr(v.aval, "dtype", None) in _FLOAT8:
            break
    else:
        return
    if name not in _MOVES or (
        name == "convert_element_type" and eqn.outvars[0].aval.dtype in _FLOAT8
    ):
        raise Refuse("float8 arithmetic: only lookups and conversions to wider types are fused")


__all__ = ["check_float8"]
