"""The CUDA target's plan (csrc/cuda_plan.cc), on the host: every bag of every unit in one tile, and tiles' geometry."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recom_jax
from recom_jax import _recom, pipeline, trace
from recom_jax.cpu import encode
from recom_jax.cpu.encode import constants
from recom_jax.cuda import codegen
from recom_jax.cuda.regions import STAGE_BYTES
from recom_jax.cuda.runs import STAGE_BYTES as RUN_STAGE_BYTES
from recom_jax.program import DIM, OPERAND, RESULT, Program
from tests.helpers import ids, table

pytestmark = pytest.mark.once

PLAIN, REGION, JAGGED, RUNS = 0, 1, 2, 3
SEARCHES = 4  # added to the last two
MAGIC = 0x48434E554C4D4352
TILE = np.dtype(
    [("words", "i8"), ("bag0", "i8"), ("bags", "i4"), ("cls", "i4")]
    + [(n, "i2") for n in ("columns", "lanes", "slices", "aligned")]
)
OFFSET_BITS = 44


@dataclasses.dataclass
class Call:
    """A fused call: its program, and what the plan needs beside it."""

    program: Program
    operands: list[tuple[int, list[int]]]
    results: list[tuple[int, list[int]]]
    classes: list[tuple[int, ...]]
    units: list[tuple[int, ...]]
    layout: list[int]

    def plan(self, sms: int = 132, pointers: int = 4064, **changed: Any) -> list[dict[str, Any]]:
        words = changed.get("words", self.words())
        made = _recom.cuda_plan(
            changed.get("program", encode(self.program).words),
            words if isinstance(words, bytes) else struct.pack(f"<{len(words)}q", *words),
            np.array(changed.get("layout", self.layout), np.int64),
            changed.get("operands", self.operands),
            changed.get("results", self.results),
            sms,
            pointers,
        )
        launches = made["launches"]
        for launch in launches:
            for key in ("tiles", "unaligned", "mends", "unaligned_mends"):
                launch[key] = np.frombuffer(launch[key], TILE)
            launch["words"] = np.frombuffer(launch["words"], np.int64)
        return list(launches)

    def resized(self, old: int, new: int) -> Call:
        """The same program where every dim of `old` is `new`: compiled sizes of zero have no call."""

        def change(types: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
            return [(t, [new if d == old else d for d in dims]) for t, dims in types]

        return dataclasses.replace(
            self, operands=change(self.operands), results=change(self.results)
        )

    def words(self) -> list[int]:
        flat = [x for row in (*self.classes, *self.units) for x in row]
        return [MAGIC, 1, len(self.classes), len(self.units), *flat]


def call_of(fn: Callable[..., Any], *args: Any) -> Call:
    """Compiles `fn`, which must become one call, and generates its kernel."""
    traced = trace.trace(fn, args, [f"a{k}" for k in range(len(args))])
    compiled = pipeline.compile_jaxpr(traced, recom_jax.Options(verify=True))
    ((_, scheduled, _),) = compiled.calls
    types = constants()["dtype"]

    def typed(aval: Any) -> tuple[int, list[int]]:
        return types[str(aval.dtype)], list(aval.shape)

    operands = [typed(v.aval) for v in scheduled.operands]
    results = [typed(o.var.aval) for o in scheduled.outputs]
    program = scheduled.program
    words = np.frombuffer(codegen.generate(program).launch, np.int64).tolist()
    n = 4 + 4 * words[2]
    classes = [tuple(words[k : k + 4]) for k in range(4, n, 4)]
    units = [tuple(words[k : k + 2]) for k in range(n, len(words), 2)]
    layout = [x for k in range(len(operands)) for x in (k, -1, 0)]
    return Call(program, operands, results, classes, units, layout)


def check_tiles(call: Call, launches: Sequence[dict[str, Any]], key: str = "tiles") -> None:
    """Every bag of every unit is in one tile; tiles are what recom_abi.h says."""
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for n, launch in enumerate(launches):
        assert len(launch["buffers"]) == len(set(launch["buffers"])) <= launch["pointers"]
        for t in launch[key]:
            program_class, form, width, vec = call.classes[t["cls"]]
            form %= SEARCHES
            stride = 1 + len(call.program.classes[program_class].slots)
            slots = call.program.classes[program_class].slots
            first = launch["words"][t["words"] : t["words"] + stride]
            size = int(first[1 + width]) if width >= 0 else 1
            v = vec if t["aligned"] else 1
            need = max(-(-size // v), 1)
            if form == PLAIN:
                assert t["lanes"] == min(need, 256)
                assert t["slices"] == 1
            else:
                assert t["lanes"] == min(1 << (need - 1).bit_length(), 32)
                assert t["slices"].item().bit_count() == 1
                assert t["slices"] == 1 or t["lanes"] * t["slices"] <= 32
            assert t["lanes"] * t["slices"] * t["columns"] <= 256
            assert t["bags"] > 0
            for k in range(max(t["columns"], 1)):
                at = int(t["words"]) + k * stride
                row = launch["words"][at : at + stride]
                assert 0 <= t["bag0"] <= t["bag0"] + t["bags"] <= row[0]
                covered.setdefault((n, at), []).append((int(t["bag0"]), int(t["bags"])))
                for kind, word in zip(slots, row[1:], strict=True):
                    if kind in (OPERAND, RESULT):
                        assert 0 <= word >> OFFSET_BITS < len(launch["buffers"])
                        buffer = launch["buffers"][word >> OFFSET_BITS]
                        assert (buffer >= len(call.operands)) == (kind == RESULT)
    for (n, at), pieces in covered.items():
        end = 0
        for bag, bags in sorted(pieces):
            assert bag == end
            end = bag + bags
        assert end == launches[n]["words"][at]


def lookups(n: int, batch: int, dim: int = 8, rows: int = 50) -> Call:
    """`n` plain columns side by side."""

    def model(tables: Any, ids: Any) -> Any:
        return jnp.concatenate([t[i] for t, i in zip(tables, ids, strict=True)], axis=1)

    return call_of(
        flat(model, n), *[table(rows, dim)] * n, *[ids((batch,), rows, seed=k) for k in range(n)]
    )


def flat(model: Callable[..., Any], n: int) -> Callable[..., Any]:
    return lambda *args: model(args[:n], args[n:])


def units_covered(launches: Sequence[dict[str, Any]], key: str = "tiles") -> int:
    return sum(int(t["columns"]) for launch in launches for t in launch[key] if t["bag0"] == 0)


@pytest.mark.parametrize("batch", [1, 3, 32, 256, 2048])
@pytest.mark.parametrize("dim", [1, 3, 8, 64, 300, 2000])
def test_plain_columns(batch, dim):
    call = lookups(9, batch, dim)
    launches = call.plan()
    assert len(launches) == 1
    for key in ("tiles", "unaligned"):
        check_tiles(call, launches, key)
        assert units_covered(launches, key) == 9
    tiles = launches[0]["tiles"]
    assert set(tiles["aligned"]) == {int(dim % 4 == 0)}
    assert not launches[0]["unaligned"]["aligned"].any()


def test_neighbours_share_tiles():
    (launch,) = lookups(9, 256, dim=8).plan()
    assert sorted(set(launch["tiles"]["columns"])) == [1, 4]  # 4 columns of 32 bytes: a line
    (launch,) = lookups(9, 256, dim=64).plan()
    assert set(launch["tiles"]["columns"]) == {1}


def test_heaviest_first():
    def model(t, x, m):
        return t[x], t[m].sum(1)

    call = call_of(model, table(50, 8), ids((64,), 50), ids((64, 40), 50))
    (launch,) = call.plan()
    check_tiles(call, [launch])
    forms = [call.classes[t["cls"]][1] for t in launch["tiles"]]
    assert forms == sorted(forms, reverse=True)
    assert set(forms) == {PLAIN, REGION}


def test_gaps_do_not_share_tiles():
    def model(t, x, y, z):
        return jnp.concatenate([t[x], jnp.zeros((8, 4)), t[y], t[z]], axis=1)

    call = call_of(model, table(50, 8), *[ids((8,), 50, seed=k) for k in range(3)])
    launches = call.plan()
    check_tiles(call, launches)
    assert units_covered(launches) == 4  # the zeros are a column too
    assert sorted(t["columns"] for launch in launches for t in launch["tiles"]) == [1, 1, 2]


@pytest.mark.parametrize(("batch", "length"), [(4, 1), (4, 37), (4, 500), (100_000, 5)])
def test_padded_bags(batch, length):
    call = call_of(lambda t, m: t[m].sum(1), table(50, 16), ids((batch, length), 50))
    launches = call.plan()
    for key in ("tiles", "unaligned"):
        check_tiles(call, launches, key)
    slices = {int(t["slices"]) for t in launches[0]["tiles"]}
    assert max(slices) <= max(1, 1 << max(length - 1, 0).bit_length())
    if batch == 100_000:
        assert slices == {1}
    if length == 500:
        assert slices == {8}  # 4 lanes: a warp


@pytest.mark.parametrize(("bags", "total"), [(10, 0), (10, 10), (10, 100), (10, 5000)])
def test_jagged_bags(bags, total):
    def model(t, x, seg):
        return jax.ops.segment_sum(t[x], seg, num_segments=bags)

    call = call_of(model, table(50, 16), ids((7,), 50), jnp.zeros(7, jnp.int32)).resized(7, total)
    launches = call.plan()
    check_tiles(call, launches)
    average = total / bags
    (slices,) = {int(t["slices"]) for t in launches[0]["tiles"]}
    assert slices == {0: 1, 1: 1, 10: 4, 500: 8}[int(average)]


def jagged(n: int, bags: int, positions: int) -> Call:
    """`n` columns of jagged bags, of so many positions on average."""

    def model(*args: Any) -> Any:
        t, splits, *values = args
        seg = jnp.searchsorted(splits, jnp.arange(7), side="right") - 1
        return [jax.ops.segment_sum(t[x], seg, num_segments=5) for x in values]

    values = [ids((7,), 50, seed=k) for k in range(n)]
    call = call_of(model, table(50, 16), jnp.zeros(6, jnp.int32), *values)
    return call.resized(7, bags * positions).resized(6, bags + 1).resized(5, bags)


def formed(call: Call, form: int) -> Call:
    """The same with jagged classes of that form, whatever their code is."""
    classes = [
        (c, form if f % SEARCHES in (JAGGED, RUNS) else f, *rest) for c, f, *rest in call.classes
    ]
    return dataclasses.replace(call, classes=classes)


@pytest.mark.parametrize("positions", [1, 20, 400])
@pytest.mark.parametrize("form", [JAGGED, RUNS])
def test_jagged_tiles_fit_the_stage(positions, form):
    call = formed(jagged(1, 8000, positions), form)
    (launch,) = call.plan(sms=1)
    check_tiles(call, [launch])
    stage = STAGE_BYTES if form == JAGGED else RUN_STAGE_BYTES
    assert max(launch["tiles"]["bags"]) * (positions + 1) * 4 <= 0.9 * stage  # limits, too


@pytest.mark.parametrize(("form", "few"), [(JAGGED, 32), (RUNS, 128)])
def test_few_jagged_bags_are_spread_over_the_device(form, few):
    """256 short bags: as many tiles as a multiprocessor each, or as one pass of a block fills, not a handful."""
    call = formed(jagged(1, 256, 20), form)
    (launch,) = call.plan(sms=132)
    check_tiles(call, [launch])
    assert len(launch["tiles"]) == few
    (launch,) = formed(jagged(40, 8000, 20), form).plan(sms=132)  # here beginnings cost
    assert min(launch["tiles"]["bags"][:100]) >= 40


@pytest.mark.parametrize("form", [JAGGED, RUNS])
def test_tiles_that_look_at_many_segment_ids_are_few(form):
    """Each looks at all of them before its first bag, if it doesn't search: one tile a multiprocessor. Row splits need
    no look."""

    def model(t: Any, x: Any, seg: Any) -> Any:
        return jax.ops.segment_sum(t[x], seg, num_segments=10)

    call = call_of(model, table(50, 16), ids((7,), 50), jnp.zeros(7, jnp.int32))
    (launch,) = formed(call.resized(7, 16384 * 20).resized(10, 16384), form).plan(sms=132)
    check_tiles(call.resized(7, 16384 * 20).resized(10, 16384), [launch])
    assert len(launch["tiles"]) <= 132
    (launch,) = formed(jagged(1, 16384, 20), form).plan(sms=132)
    assert len(launch["tiles"]) > 132


@pytest.mark.parametrize("far", [False, True])
def test_vectors_of_jagged_bags_need_near_rows(far):
    """Code for whole vectors multiplies a result's stride in 32 bits."""

    def model(t: Any, splits: Any, x: Any) -> Any:
        seg = jnp.searchsorted(splits, jnp.arange(7), side="right") - 1
        bags = jax.ops.segment_sum(t[x], seg, num_segments=5)
        return jnp.concatenate([bags, t[jnp.arange(5) % 3][:, :3].repeat(8, 1)], axis=1)

    call = call_of(model, table(50, 16), jnp.zeros(6, jnp.int32), ids((7,), 50))
    wide = 2**31 - 24 if not far else 2**31
    found = dataclasses.replace(
        call, results=[(t, [n if n == 5 else wide for n in dims]) for t, dims in call.results]
    )
    tiles = np.concatenate([launch["tiles"] for launch in found.plan()])
    aligned = [
        bool(t["aligned"]) for t in tiles if call.classes[t["cls"]][1] % SEARCHES in (JAGGED, RUNS)
    ]
    assert aligned and aligned == [not far] * len(aligned)


def test_jagged_tiles_do_not_depend_on_what_is_chosen_for_others():
    """Runs join a bag's parts where tiles end: tuning must not move those."""

    def model(*args: Any) -> Any:
        t, u, splits, x, y = args
        seg = jnp.searchsorted(splits, jnp.arange(7), side="right") - 1
        return jnp.concatenate([u[y]] * 9, axis=1), jax.ops.segment_sum(t[x], seg, num_segments=5)

    call = call_of(
        model, table(50, 16), table(50, 8), jnp.zeros(6, jnp.int32), ids((7,), 50), ids((5,), 50)
    )
    call = call.resized(7, 60_000).resized(6, 4097).resized(5, 4096)
    n = 4 + 4 * len(call.classes)
    words = call.words()
    found = []
    for run, tiles in ((0, 0), (32, 4), (512, 64)):
        tuned = [MAGIC, 2, *words[2:4], 0, run, tiles, *words[4:n], *words[n:]]
        (launch,) = call.plan(sms=4, words=tuned)
        jagged_ones = [call.classes[k][1] in (JAGGED, RUNS) for k in launch["tiles"]["cls"]]
        found.append((launch["tiles"][jagged_ones].tolist(), len(launch["tiles"])))
    assert len({n for _, n in found}) > 1
    assert all(tiles == found[0][0] for tiles, _ in found)


def test_jagged_tiles_shrink():
    call = jagged(24, 4096, 2)
    (launch,) = call.plan(sms=2)
    check_tiles(call, [launch])
    bags = launch["tiles"]["bags"].tolist()
    assert bags[0] >= 2 * bags[-1]
    last = np.sort(np.unique(launch["tiles"]["words"]))[-1]
    assert set(launch["tiles"]["words"][-2:]) == {last}  # columns one after the other


def test_empty_batch():
    assert lookups(3, 7).resized(7, 0).plan() == []


def test_launches_split_by_buffers():
    call = lookups(20, 16)
    launches = call.plan(pointers=7)
    assert len(launches) > 1
    check_tiles(call, launches)
    assert units_covered(launches) == 20
    assert {b for launch in launches for b in launch["buffers"]} == set(
        range(len(call.operands) + len(call.results))
    )
    with pytest.raises(ValueError, match="names more buffers"):
        call.plan(pointers=2)


def test_a_table_takes_any_number_of_buffers():
    call = lookups(20, 16)
    (launch,) = call.plan(pointers=0)
    launch["pointers"] = len(launch["buffers"])  # what it may name
    check_tiles(call, [launch])
    assert units_covered([launch]) == 20
    assert sorted(launch["buffers"]) == list(range(len(call.operands) + len(call.results)))
    with pytest.raises(ValueError, match="number of pointers"):
        call.plan(pointers=-1)


def test_grid_is_bounded():
    (launch,) = lookups(64, 2048, dim=8).plan(sms=4)
    assert len(launch["tiles"]) <= 64 * 2048 * 2 / 256  # never less than a pass
    assert len(launch["tiles"]) >= 64 * 2048 * 2 / 256 / 8
    bags = launch["tiles"]["bags"]
    assert (bags * launch["tiles"]["columns"] * launch["tiles"]["lanes"]).max() <= 8 * 256


def test_alignment_of_packs():
    call = lookups(1, 16)
    u8 = constants()["dtype"]["uint8"]
    name = call.operands.index((constants()["dtype"]["float32"], [50, 8]))

    def packed(offset: int) -> Any:
        layout, operands = [], list(call.operands)
        for k, (_, dims) in enumerate(call.operands):
            layout += [k, offset, len(dims), *dims] if k == name else [k, -1, 0]
        operands[name] = (u8, [offset + 50 * 8 * 4])
        return call.plan(layout=layout, operands=operands)

    for offset, aligned in ((0, 1), (64, 1), (16, 1), (4, 0), (40, 0)):
        (launch,) = packed(offset)
        check_tiles(call, [launch])
        assert set(launch["tiles"]["aligned"]) == {aligned}, offset
        place = {
            int(w)
            for t in launch["tiles"]
            for k, w in zip(
                call.program.classes[0].slots, launch["words"][t["words"] + 1 :], strict=False
            )
            if k == OPERAND and launch["buffers"][int(w) >> OFFSET_BITS] == name
        }
        assert {w & ((1 << OFFSET_BITS) - 1) for w in place} == {offset}
    with pytest.raises(ValueError, match="not aligned"):
        packed(2)


def test_alignment_of_results():
    def model(t, s, x, y):
        return jnp.concatenate([s[y], t[x]], axis=1)

    call = call_of(model, table(50, 8), table(50, 3), ids((16,), 50), ids((16,), 50))
    (launch,) = call.plan()
    check_tiles(call, [launch])
    assert not launch["tiles"]["aligned"].any()  # rows of 11 features


@pytest.mark.parametrize("fault", range(17))
def test_malformed_launch_words(fault):
    call = lookups(3, 8)
    good = call.words()
    cls = 4
    unit = 4 + 4 * len(call.classes)
    scalar_slot = next(
        k for k, s in enumerate(call.program.classes[0].slots) if s != DIM and s != "IMM"
    )
    wrong: list[Any] = [
        b"123",
        [],
        good[:3],
        good[:-1],
        [*good, 0],
        [1, *good[1:]],
        [MAGIC, 2, *good[2:]],
        [MAGIC, 1, 1 << 60, *good[3:]],
        [MAGIC, 1, -1, *good[3:]],
        *[
            [*good[:k], v, *good[k + 1 :]]
            for k, v in (
                (cls, 99),
                (cls + 1, 2),
                (cls + 1, 3),
                (cls + 2, scalar_slot),
                (cls + 2, -1),
                (cls + 3, 3),
                (unit, 77),
                (unit + 1, -5),
            )
        ],
    ]
    with pytest.raises(ValueError, match="recom"):
        call.plan(words=wrong[fault])


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ([], "truncated"),
        ([0, -1], "truncated"),
        ([9, -1, 0], "no such operand"),
        ([0, -2, 0], "bad offset"),
        ([0, -1, 1, 5], "dims of a whole"),
        ([0, 0, 99], "bad rank"),
        ([0, 0, 1, 5], "a pack is"),
    ],
)
def test_malformed_layout(layout, match):
    with pytest.raises(ValueError, match=match):
        lookups(1, 8).plan(layout=layout)


def test_another_batch_size():
    call = lookups(40, 7)
    for batch in (256, 2048):
        other = call.resized(7, batch)
        launches = other.plan()
        check_tiles(other, launches)
        assert units_covered(launches) == 40
