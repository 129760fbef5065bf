"""The CUDA target's plan where tiles search their segment ids (csrc/cuda_plan.cc), on the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recom_jax.cpu.encode import constants
from tests.helpers import ids, table
from tests.test_cuda_plan import (
    JAGGED,
    OFFSET_BITS,
    REGION,
    RUNS,
    SEARCHES,
    Call,
    call_of,
    check_tiles,
    formed,
    jagged,
    lookups,
)

pytestmark = pytest.mark.once


def segments(total: int, bags: int, dim: int = 16, columns: int = 1) -> Call:
    def model(t: Any, seg: Any, *xs: Any) -> Any:
        return [jax.ops.segment_sum(t[x], seg, num_segments=10) for x in xs]

    xs = [ids((7,), 50, seed=k) for k in range(columns)]
    call = call_of(model, table(50, dim), jnp.zeros(7, jnp.int32), *xs)
    return call.resized(7, total).resized(10, bags)


def memory(n: int = 1 << 16) -> list[tuple[int, list[int]]]:
    return [(constants()["dtype"]["uint8"], [n])]


def check_searching(call: Call, launch: dict[str, Any], room: int, set_: str = "") -> int:
    """What tiles that search are told; how many units have such. No two tiles say what they have found in one place."""
    tiles, mends = launch[f"{set_}tiles" if not set_ else "unaligned"], launch[f"{set_}mends"]
    taken: set[int] = set()
    units = {int(t["words"]) for t in tiles if t["columns"] == 0}
    assert units == {int(t["words"]) for t in mends}
    for at in units:
        mine = np.sort(tiles[tiles["words"] == at], order="bag0")
        theirs = np.sort(mends[mends["words"] == at], order="bag0")
        slots = call.program.classes[call.classes[mine[0]["cls"]][0]].slots
        place, step, n = launch["words"][at + 1 + len(slots) :][:3].tolist()
        assert launch["buffers"][place >> OFFSET_BITS] == len(call.operands) + len(call.results)
        places = range(place % (1 << OFFSET_BITS), place % (1 << OFFSET_BITS) + n)
        assert not taken & set(places) and 0 <= places[0] <= places[-1] < room
        taken |= set(places)
        assert len(mine) == n
        assert [t["bag0"] // step for t in mine] == list(range(n))
        assert all(mine["bags"][:-1] == step)
        for some in (mine, theirs):
            ends = some["bag0"] + some["bags"]
            assert some["bag0"][0] == 0 and ends[-1] == launch["words"][at]
            assert (some["bag0"][1:] == ends[:-1]).all()
            assert not some["columns"].any()
        assert not theirs["aligned"].any()
    return len(units)


@pytest.mark.parametrize("form", [JAGGED, RUNS])
@pytest.mark.parametrize("columns", [1, 3])
def test_tiles_search_many_segment_ids(form, columns):
    call = formed(segments(16384 * 20, 16384, columns=columns), SEARCHES + form)
    (launch,) = call.plan(sms=132, results=[*call.results, *memory()])
    for key in ("tiles", "unaligned"):
        check_tiles(call, [launch], key)
        assert len(launch[key]) > 132
    for set_ in ("", "unaligned_"):
        assert check_searching(call, launch, 1 << 16, set_) == columns
        assert 132 <= len(launch[f"{set_}mends"]) <= 4 * 132


@pytest.mark.parametrize(
    ("total", "bags", "room", "searched"),
    [(32767, 800, 1 << 16, 0), (32768, 800, 1 << 16, 1), (1 << 20, 1, 1 << 16, 1),
     (1 << 20, 1 << 20, 4096, 1), (1 << 20, 1 << 20, 4095, 0), (1 << 20, 0, 1 << 16, 0)],
)  # fmt: skip
def test_what_tiles_search(total, bags, room, searched):
    """Columns of many ids, while there is memory for what is found."""
    call = segments(total, bags)
    for launch in call.plan(sms=4, results=[*call.results, *memory(room)]):
        check_tiles(call, [launch])
        assert check_searching(call, launch, room) == searched
        assert check_searching(call, launch, room, "unaligned_") == searched
        assert bool(len(launch["mends"])) == bool(searched)


def test_without_memory_no_tile_searches():
    call = segments(16384 * 20, 16384)
    (launch,) = call.plan()
    assert launch["tiles"]["columns"].all() and not len(launch["mends"])
    types = constants()["dtype"]
    bad = ([(types["int32"], [9])], [(types["uint8"], [3, 3])], memory() * 2)
    for more in bad:
        with pytest.raises(ValueError, match="recom"):
            call.plan(results=[*call.results, *more])
    splits, plain = jagged(1, 100, 7), lookups(1, 32)
    with pytest.raises(ValueError, match="number of results"):
        splits.plan(results=[*splits.results, *memory()])
    for form in (SEARCHES, SEARCHES + REGION, SEARCHES + JAGGED):
        words = plain.words()
        words[5] = form
        with pytest.raises(ValueError, match="recom launch"):
            plain.plan(words=words)
