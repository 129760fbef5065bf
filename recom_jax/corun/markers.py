"""`stage`: marks where a stage of the train step ends, without changing what is computed.

A marker is an identity in the program. It differentiates to a marker named ``NAME:bwd``, so that the stages of the
backward pass are found as well. It costs nothing at run time on CPUs; on a GPU it is a call that does nothing, and a
small kernel if it has several arrays; in a co-run step there, preprocessing kernels start at markers (`calls.py`).
"""

from __future__ import annotations

from typing import Any

import jax

from recom_jax import compat
from recom_jax.corun.calls import lower_mark
from recom_jax.errors import PipelineError

stage_p = compat.identity_primitive(
    "recom_stage_end", "name", lambda name: _backward(name), lower_mark
)


def _backward(name: str) -> str:
    return name.removesuffix(":bwd") if name.endswith(":bwd") else f"{name}:bwd"


def stage(x: Any, name: str) -> Any:
    """`x`, unchanged; a stage of the train step named `name` ends with it.

    Args:
      x: a pytree of arrays: what the stage computes. On a GPU the marker stands behind the 16 largest of them, and what
        reads the largest stands behind the marker: mark all gradients together, before tables are updated.
      name: the stage's name, without ":bwd" (stages of the backward pass get it by themselves).

    Raises:
      PipelineError: the name is empty or ends with ":bwd".
    """
    if not name or name.endswith(":bwd"):
        raise PipelineError(f"corun.stage: {name!r} is no name for a stage of the forward pass")
    leaves, tree = jax.tree.flatten(x)
    return jax.tree.unflatten(tree, stage_p.bind(*leaves, name=name) if leaves else [])
