"""A product with a mask: where XLA makes it a select, NaN times a false mask is 0; elsewhere it is NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import check

NAN, INF = np.nan, np.inf
TABLE = np.array([[NAN, 1], [1, INF], [2, -3]], np.float32)
NARROW = TABLE[:, :1].copy()
FINITE = np.nan_to_num(TABLE, posinf=4.0)
IDS = np.array([[0, 1, 2], [5, 1, 0]], np.int32)
MASK = np.array([[0, 1, 0], [0, 1, 1]], bool)
ODD = np.array([INF, NAN], np.float32)
WEIGHTS = np.array([[NAN, 1, 2], [INF, 1, 2]], np.float32)


def _float(x: Any) -> Any:
    return x.astype(jnp.float32)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rows_of_two": (lambda t, i, m: (t[i] * m[..., None]).sum(1), (TABLE, IDS, MASK)),
    "rows_of_one": (lambda t, i, m: (t[i] * m[..., None]).sum(1), (NARROW, IDS, MASK)),
    "rows_of_one_not_pooled": (lambda t, i, m: t[i] * m[..., None], (NARROW, IDS, MASK)),
    "first_order_weights": (lambda t, i, m: t[i][..., 0] * _float(m), (NARROW, IDS, MASK)),
    "reshaped_after_the_cast": (
        lambda t, i, m: t[i[:, 0]] * _float(m[:, 0])[:, None],
        (NARROW, IDS, MASK),
    ),
    "boolean_table": (lambda t, i, x: _float(t[i[:, 0]]) * x[:, None], (TABLE > 0, IDS, ODD)),
    "masked_weights": (
        lambda t, i, m, w: (t[i] * (w * _float(m))[..., None]).sum(1),
        (FINITE, IDS, MASK, WEIGHTS),
    ),
    "weights_masked_by_themselves": (
        lambda t, i, w: (t[i] * (w * (w > 1))[..., None]).sum(1),
        (FINITE, IDS, WEIGHTS),
    ),
    "masked_ids": (lambda t, w: t[(w * (w > 1)).astype(jnp.int32)], (TABLE, WEIGHTS)),
    "batch_of_one": (lambda t, i, m: t[i] * m[None, :], (NARROW, IDS[:1, 0], MASK[:1, :1])),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_jax_with_nan_under_the_mask(name: str) -> None:
    fn, args = CASES[name]
    check(fn, *args, columns=1)
