"""Nodes: equal by fields or by identity, small, and refused by mypy where written to."""

from __future__ import annotations

import pathlib
import pickle
import subprocess
import sys

import pytest

from recom_jax import ir
from recom_jax.immutable import node

ROOT = pathlib.Path(__file__).resolve().parents[1]


@node()
class Pair:
    a: int
    b: tuple[int, ...] = ()


@node(eq=False)
class Base:
    a: int


@node(eq=False)
class Derived(Base):
    b: int


def test_nodes_are_equal_by_their_fields_or_by_identity() -> None:
    assert Pair(1) == Pair(1, ()) != Pair(1, (2,))
    assert {Pair(1): "x"}[Pair(1)] == "x"
    assert str(Pair(1)).endswith("Pair(a=1, b=())")
    one = Derived(1, 2)
    assert one != Derived(1, 2) and one == one and len({one, Derived(1, 2)}) == 2
    assert (one.a, one.b) == (1, 2)
    assert pickle.loads(pickle.dumps(Pair(1, (2,)))) == Pair(1, (2,))
    with pytest.raises(AttributeError):
        one.c = 3  # type: ignore[attr-defined]


def test_expressions_are_equal_by_identity_alone() -> None:
    pool = ir.Pool()
    one = pool.const("float32", 1.0)
    assert pool.const("float32", 1.0) is one
    assert ir.Pool().const("float32", 1.0) != one
    assert not hasattr(one, "__dict__")


def test_the_type_checker_refuses_writing(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    path = tmp_path / "writes.py"
    path.write_text(
        "from recom_jax.detect_values import Val\n"
        "from recom_jax.ir import Op\n"
        "def f(o: Op, v: Val) -> None:\n"
        "    o.name = 'x'\n"
        "    v.expr = None\n"
    )
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    refused = [line for line in done.stdout.splitlines() if "read-only" in line]
    assert len(refused) == 2, done.stdout + done.stderr
