"""The printed forms in docs/architecture.md are what the code prints.

``python -m tests.test_docs --regenerate`` writes them anew.
"""

from __future__ import annotations

import inspect
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import recom_jax
from recom_jax.simplify import DESCRIPTIONS
from tests.helpers import Bag, check, ids, table
from tests.test_pipeline import stages

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "architecture.md"
BLOCKS = ["source", "trace", "detect", "simplify", "rewrites", "names", "program0", "splice"]
BLOCK = re.compile(r"(<!-- printed: (\w+) -->\n```\w*\n)(.*?)(```\n)", re.DOTALL)


def masked_mean(items: Any, ids: Any) -> Any:
    mask = ids >= 0
    rows = jnp.take(items, jnp.where(mask, ids, 0), axis=0)
    rows = jnp.where(mask[..., None], rows, 0)
    return rows.sum(axis=1) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def inputs() -> tuple[Any, ...]:
    return table(1000, 8), ids((4, 3), 1000, odd=True)


def printed() -> dict[str, str]:
    forms = stages(masked_mean, *inputs())
    (column,) = recom_jax.optimize(masked_mean).explain(*inputs()).columns
    source = inspect.getsource(masked_mean).replace(": Any", "").replace(" -> Any", "")
    return {
        **forms,
        "source": source.rstrip(),
        "rewrites": "\n".join(column.rewrites),
        "names": "\n".join(f"{name:22}  {what}" for name, what in DESCRIPTIONS.items()),
    }


def test_the_page_names_its_blocks() -> None:
    names = [m[2] for m in BLOCK.finditer(PAGE.read_text())]
    assert names == BLOCKS


@pytest.mark.parametrize("name", BLOCKS)
def test_printed_form(name: str) -> None:
    if name == "trace" and not jax.__version__.startswith("0.10."):
        pytest.skip(
            "a jaxpr prints differently in each version of JAX; the page shows the oldest's"
        )
    (shown,) = (m[3] for m in BLOCK.finditer(PAGE.read_text()) if m[2] == name)
    assert shown == printed()[name] + "\n", "python -m tests.test_docs --regenerate"


def test_the_column_is_right() -> None:
    check(masked_mean, *inputs(), columns=1, bound=Bag(3))


def test_named_files_exist() -> None:
    """Every file of ours that the page names."""
    root = PAGE.parent.parent
    for name in re.findall(r"`([\w/]+\.(?:py|md|cc))`", PAGE.read_text()):
        assert any(
            (root / folder / name).exists()
            for folder in ("", "recom_jax", "docs", "recom_jax/simplify")
        ), name


def regenerate() -> None:
    forms = printed()
    PAGE.write_text(BLOCK.sub(lambda m: f"{m[1]}{forms[m[2]]}\n{m[4]}", PAGE.read_text()))


if __name__ == "__main__" and "--regenerate" in sys.argv:
    regenerate()
