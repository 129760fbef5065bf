"""The guides in docs/: their examples run, their lists are whole, what they quote is the source."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import warnings
from typing import Any

import pytest

from recom_jax import corun, options
from recom_jax.options import Options
from recom_jax.preprocess import OPERATORS
from recom_jax.simplify import NAMES
from tests.messages import messages
from tests.simplify_cases import CASES

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = (
    "options", "semantics", "troubleshooting", "adding_a_rewrite", "adding_a_primitive_rule", "wheels", "export",
    "corun", "sparse", "serving",
)  # fmt: skip
QUOTE = re.compile(r"<!-- source: (\S+) (\w+) -->\n```python\n(.*?)\n```", re.DOTALL)


def text(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


@pytest.mark.parametrize("name", GUIDES)
def test_examples_run(name: str) -> None:
    """All python blocks of a page, one after the other."""
    page = QUOTE.sub("", text(name))
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space: dict[str, Any] = {"__name__": name}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for k, block in enumerate(blocks):
            exec(compile(block, f"{name}.md, example {k}", "exec"), space)


@pytest.mark.parametrize("name", [*GUIDES, "tensorflow"])
def test_named_files_exist(name: str) -> None:
    for file in re.findall(
        r"`?((?:docs|recom_jax|tests|csrc|tools|examples)/[\w/.]+\w)`?", text(name)
    ):
        assert (ROOT / file).exists(), file


def quotes() -> list[Any]:
    return [
        pytest.param(*m.groups(), id=m[2]) for name in GUIDES for m in QUOTE.finditer(text(name))
    ]


@pytest.mark.parametrize(("file", "name", "shown"), quotes())
def test_quoted_source(file: str, name: str, shown: str) -> None:
    source = (ROOT / file).read_text()
    (node,) = (n for n in ast.parse(source).body if getattr(n, "name", "") == name)
    assert shown == ast.get_source_segment(source, node)


def test_there_are_quotes() -> None:
    assert len(quotes()) == 2


def rows(name: str) -> dict[str, str]:
    """Tables of a page: first cell -> second."""
    found = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", text(name), re.MULTILINE)
    return {k: v for k, v, _ in found}


def test_every_option_is_described() -> None:
    fields = {f.name: f"`{f.default!r}`" for f in dataclasses.fields(Options)}
    listed = rows("options")
    assert {k: v for k, v in listed.items() if k in fields} == fields
    doc = Options.__doc__ or ""
    assert all(f"{name}:" in doc for name in fields)


def test_every_option_of_a_pipeline_is_described() -> None:
    fields = {f.name: f"`{f.default!r}`" for f in dataclasses.fields(corun.Options)}
    listed = rows("corun")
    assert {k: v for k, v in listed.items() if k in fields} == fields
    assert all(f"{name}" in (corun.Options.__doc__ or "") for name in fields)


def test_every_operator_is_described() -> None:
    page = text("corun")
    ours = [n for n, f in OPERATORS.items() if f.__module__.startswith("recom_jax.")]
    assert [n for n in ours if not n.startswith("_") and f"`{n}" not in page] == []


def test_every_variable_is_described() -> None:
    listed = {n for k in rows("options") for n in k.replace("`", "").split(", ") if n.isupper()}
    assert listed == set(options.VARIABLES)


def test_every_variable_that_is_read_is_known() -> None:
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', (ROOT / "recom_jax/options.py").read_text()))  # fmt: skip
    for path in (*ROOT.glob("csrc/*.cc"), *ROOT.glob("csrc/*.h"), *ROOT.glob("tests/*.py")):
        source = path.read_text()
        read |= set(re.findall(r'getenv\("(\w+)"\)', source))
        read |= set(re.findall(r'environ(?:\.get\(|\[)"(RECOM_\w+)"', source))
    assert read <= set(options.VARIABLES)


def test_only_options_reads_the_environment() -> None:
    for path in (ROOT / "recom_jax").rglob("*.py"):
        if path.name != "options.py":
            assert not re.search(r"os\.(environ|getenv)|from os import", path.read_text()), path


def test_troubleshooting_lists_every_text() -> None:
    page = " ".join(text("troubleshooting").split())
    missing = [
        f"{where}: {what}"
        for where, _, what in messages()
        if len(what) > 9 and " ".join(what.split()) not in page
    ]
    assert not missing, "add to docs/troubleshooting.md:\n" + "\n".join(missing)


def test_the_rewrite_of_the_guide_has_a_case() -> None:
    assert "unit-weight" in NAMES and "unit-weight" in CASES
    assert set(CASES) >= {"unit-weight"}
    assert (
        'Rewrite(("mul", "div"), _unit_weight, "the weight is the constant 1")'
        in (ROOT / "recom_jax/simplify/rules.py").read_text()
    )
