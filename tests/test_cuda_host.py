"""What a fused call on CUDA costs its caller: the handlers run here, without XLA and with a driver that counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import cuda_host
from tests.cuda_emulation.build import compiler

HEAD = 2


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("cuda_host")
    try:
        driver = cuda_host.build(folder, compiler())
    except FileNotFoundError:
        pytest.skip(f"no C++ compiler named {compiler()[0]}")
    preloaded = " ".join(filter(None, (str(driver), os.environ.get("LD_PRELOAD"))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_host.facts", str(driver)],
        cwd=cuda_host.ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": preloaded,
            "JAX_PLATFORMS": "cpu",
            "RECOM_CACHE_DIR": str(folder / "cache"),
        },
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("FACTS ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
    return found


def test_a_call_that_was_prepared_asks_nothing_of_the_driver(facts):
    steady = facts["steady"]
    assert steady["first"]["error"] == ""
    assert steady["first"]["plans"] == steady["first"]["modules"] == 1
    assert steady["again"]["error"] == ""
    assert steady["again"]["plans"] == steady["again"]["driver"] == 0
    assert steady["again"]["allocations"] == 0


def test_a_call_asks_for_the_context_and_launches(facts):
    seen = facts["steady"]["execute"]
    assert seen["error"] == ""
    assert (seen["launches"], seen["driver"], seen["contexts_set"]) == (1, 2, 0)
    assert seen["allocations"] == 0
    assert sorted(seen["words"][HEAD:]) == facts["steady"]["addresses"]


def test_unaligned_addresses_take_the_other_tiles(facts):
    aligned, unaligned = facts["steady"]["execute"], facts["steady"]["unaligned"]
    assert unaligned["error"] == ""
    assert unaligned["words"][0] != aligned["words"][0]
    assert unaligned["words"][1] == aligned["words"][1]


def test_a_thread_in_another_context_gets_it_back(facts):
    seen = facts["steady"]["elsewhere"]
    assert (seen["error"], seen["launches"], seen["contexts_set"]) == ("", 1, 2)


def test_where_tiles_search_a_second_kernel_follows(facts):
    """On the same memory of the execution, by tiles of its own."""
    many, few = facts["searched"]["many"], facts["searched"]["few"]
    assert (few["execute"]["error"], few["execute"]["launches"]) == ("", 1)
    for name in ("execute", "unaligned"):
        seen = many[name]
        assert (seen["error"], seen["launches"], seen["driver"], seen["allocations"]) == (
            "",
            2,
            3,
            0,
        )
        assert 1 <= seen["grid"] <= 4 * 132
    assert sorted(many["execute"]["words"][HEAD:]) == many["addresses"]
    assert many["execute"]["words"][0] != many["unaligned"]["words"][0]
    assert many["again"]["plans"] == many["again"]["driver"] == 0


@pytest.mark.parametrize("what", ["layout", "shapes", "device"])
def test_a_call_that_differs_is_prepared_by_itself(facts, what):
    found = facts["mistaken"]
    assert found["same"]["plans"] == 0
    assert found[what]["error"] == ""
    assert found[what]["plans"] == 1
    assert found[what]["words"][:HEAD] != found["same"]["words"][:HEAD]


def test_a_call_whose_program_or_kernel_is_another_is_prepared_by_itself(facts):
    found = facts["mistaken"]
    assert found["hash"]["plans"] == 1
    assert (found["digest"]["plans"], found["digest"]["modules"]) == (1, 1)


def test_launch_words_are_read_at_each_call(facts):
    assert "launch" in facts["mistaken"]["launch"]["error"]


def test_what_was_taken_for_itself_still_is(facts):
    found = facts["mistaken"]
    assert found["after"]["words"] == found["same"]["words"]
    assert found["after"]["plans"] == 0


def test_more_calls_than_a_thread_remembers(facts):
    assert facts["many"] == {"right": True, "n": 200}


def test_a_call_captured_before_it_was_prepared_is_refused(facts):
    found = facts["faults"]
    assert "captured in a graph before" in found["captured"]["error"]
    assert (found["late"]["error"], found["late"]["late"], found["late"]["launches"]) == ("", 1, 1)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("attribute missing", "Wrong number of attributes"),
        ("attribute too many", "Wrong number of attributes"),
        ("attribute's type", "expected scalar but got string"),
        ("stage", "Wrong execution stage"),
    ],
)
def test_a_frame_of_another_form_is_refused_in_ffis_words(facts, what, says):
    assert says in facts["faults"][what]["error"]


def test_calls_outside_graphs_cost_no_more(facts):
    found = facts["faults"]
    assert found["alone"]["error"] == ""
    again = found["alone again"]
    assert (again["launches"], again["driver"], again["allocations"]) == (1, 2, 0)


def test_a_part_of_a_slot_is_copied_by_a_kernel(facts):
    """Whose module is loaded once."""
    found = facts["parts"]
    driver, kernel = "cuMemcpyDtoDAsync_v2", "cuLaunchKernel"
    assert all(found[x]["error"] == "" for x in ("uploaded", "again", "odd", "nothing"))
    assert found["again"]["order"] == ["cuStreamWaitEvent", kernel]
    assert found["again"]["allocations"] == 0
    assert (found["again"]["grid"], found["long"]["grid"]) == (1, 3)
    assert found["odd"]["order"] == ["cuStreamWaitEvent", driver]
    assert found["nothing"]["order"] == ["cuStreamWaitEvent"]
    first = found["not uploaded"]["order"]
    assert first.index("cuMemcpyHtoDAsync_v2") < first.index(kernel)


def test_the_drivers_copy_serves_where_it_does_not_take_the_kernel(facts):
    seen = facts["refused"]
    assert seen["error"] == ""
    assert seen["order"][-1] == "cuMemcpyDtoDAsync_v2"
    assert "cuLaunchKernel" not in seen["order"]


@pytest.mark.parametrize(
    ("what", "says"),
    [("outside", "outside its slot"), ("another size", "holds"), ("no slot", "no staging slot")],
)
def test_a_slot_that_cannot_be_read_is_not(facts, what, says):
    seen = facts["parts"][what]
    assert says in seen["error"]
    assert seen["driver"] == 0
