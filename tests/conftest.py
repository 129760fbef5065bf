"""Settings every test runs under. Nothing global is cleared: what one test leaves, the next must bear."""

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "cuda" in os.environ["JAX_PLATFORMS"]:
    # A GPU's own default rounds the factors of a product: one_hot(ids) @ table would not be the table's row.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # And it leaves out a rounding to 16 bits where the number is widened again at once (docs/semantics.md).
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_allow_excess_precision=false".strip()
os.environ["RECOM_VERIFY"] = "1"  # the IR's rules are checked after every stage

import pytest
from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("ci", max_examples=6, derandomize=True, database=None, **_COMMON)
settings.register_profile("long", max_examples=300, **_COMMON)
settings.load_profile(os.environ.get("RECOM_HYPOTHESIS", "ci"))


@pytest.fixture(scope="module")
def short_collections() -> Iterator[None]:
    """Takes what other tests left out of a module's collections: each would look at all of it, for a second or two."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
