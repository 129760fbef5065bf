"""DictReader: the leaves of a flat dict in a fixed order, and whether they are one lease's own views."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from recom_jax import _recom, pack

pytestmark = pytest.mark.once

KEYS = ("a", "b", "c")


def lease(n: int = 3) -> tuple[Any, dict[str, Any]]:
    layout = pack.layout_of([pack.LeafSpec(np.dtype(np.float32), (4, k + 1)) for k in range(n)])
    slot = pack.SlotRing(layout, 2).acquire()
    return slot, dict(zip(KEYS, slot.views(), strict=False))


def fresh(key: str) -> str:
    """An equal string that is another object."""
    return "".join([key[:0], *key])


def test_any_order_and_any_key_objects() -> None:
    read = _recom.DictReader(KEYS).read
    values = {k: np.zeros(2) for k in KEYS}
    want = [values[k] for k in KEYS]
    for order in ("abc", "cba", "bca", "cab", "bac", "acb", "abc", "cba") * 2:
        for key in (str, fresh):
            got = read({key(k): values[k] for k in order})
            assert type(got) is tuple
            assert all(x is y for x, y in zip(got, want, strict=True))
            assert read(dict.fromkeys([*order[:2], "d"])) is None
    for other in ({}, {"a": 1}, {**values, "d": 1}, {"a": 1, "b": 2, 3: 4}):
        assert read(other) is None


def test_keys_that_are_no_strings() -> None:
    read = _recom.DictReader((1, 2)).read
    assert read({2: "y", 1: "x"}) == ("x", "y")
    assert read({2.0: "y", True: "x"}) == ("x", "y")
    assert read({1: "x", "2": "y"}) is None

    class Odd:
        def __hash__(self) -> int:
            return hash(1)

        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read({Odd(): "x", 2: "y"})


def test_values_are_not_leaked() -> None:
    class Value:
        pass

    import sys

    value = Value()
    read = _recom.DictReader(KEYS).read
    before = sys.getrefcount(value)
    for order in ("abc", "cba", "bca", "abd"):
        read(dict.fromkeys(order, value))
        read({fresh(k): value for k in order})
    assert sys.getrefcount(value) == before


def test_a_lease_is_recognised() -> None:
    slot, views = lease()
    read = _recom.DictReader(KEYS).read
    for order in ("abc", "cba"):
        batch = {k: views[k] for k in order}
        read(batch)  # an order is known once it was seen
        assert read(batch) is slot
    slot.array()
    assert read(views) is slot  # to be told that it was served


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v | {"a": v["a"].copy()},
        lambda v: v | {"a": v["a"][:]},
        lambda v: {"a": v["c"], "b": v["b"], "c": v["a"]},
        lambda v: v | {"b": v["a"]},
        lambda v: v | {"b": lease()[1]["b"]},
        lambda v: v | {"b": None},
    ],
)
def test_not_quite_a_lease(change: Any) -> None:
    _, views = lease()
    batch = change(views)
    got = _recom.DictReader(KEYS).read(batch)
    assert type(got) is tuple
    assert all(got[n] is batch[k] for n, k in enumerate(KEYS))


@pytest.mark.parametrize("name", ["shape", "dtype", "strides"])
def test_a_view_changed_in_place(name: str) -> None:
    _, views = lease()
    new = {"shape": (1, 4), "dtype": np.dtype(np.int32), "strides": (0, 4)}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setattr(views["a"], name, new)
    assert type(_recom.DictReader(KEYS).read(views)) is tuple


def test_a_lease_of_fewer_entries() -> None:
    _, views = lease(2)
    assert type(_recom.DictReader(KEYS).read({**views, "c": None})) is tuple
    _, views = lease(3)
    assert type(_recom.DictReader(KEYS[:2]).read({k: views[k] for k in "ab"})) is tuple


def test_pack_takes_a_free_slot_or_none() -> None:
    leaves = [np.arange(4, dtype=np.int32)]
    layout = pack.layout_of([pack.LeafSpec.of(x) for x in leaves])
    ring, packer = pack.SlotRing(layout, 1), pack.Packer(layout)
    assert packer.pack(ring, [np.zeros(4)]) == 0
    slot, data = packer.pack(ring, leaves)
    assert slot.state == "in_flight"
    np.testing.assert_array_equal(
        data[layout.offset(0) :][:16].view(np.int32), np.arange(4, dtype=np.int32)
    )
    assert packer.pack(ring, leaves) is None
    del slot, data
    assert type(packer.pack(ring, leaves)) is tuple
