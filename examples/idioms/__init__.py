"""How people write embedding columns in JAX: one small model an idiom.

`ALL` lists them. Each makes a function and its arguments for a `Size`; `tests/idioms` runs them small and compares
with plain JAX, `benchmarks/cases/idioms.py` runs them at the size of a serving batch.
"""

from examples.idioms.bags import BAGS
from examples.idioms.control import CONTROL
from examples.idioms.frameworks import FRAMEWORKS
from examples.idioms.idiom import REAL, SMALL, Idiom, Size
from examples.idioms.lookups import LOOKUPS
from examples.idioms.models import MODELS

ALL: dict[str, Idiom] = {**LOOKUPS, **BAGS, **MODELS, **CONTROL, **FRAMEWORKS}

__all__ = ["ALL", "REAL", "SMALL", "Idiom", "Size"]
