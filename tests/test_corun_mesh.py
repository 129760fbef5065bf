"""Co-running over several devices, on virtual ones."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests import cuda_emulation

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.once
@pytest.mark.skipif(cuda_emulation.missing() is not None, reason=str(cuda_emulation.missing()))
def test_each_device_prepares_the_features_of_its_tables() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.corun_mesh"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["equal"]
