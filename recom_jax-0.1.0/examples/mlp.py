"""A multi-layer perceptron in plain JAX, shared by the example models."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Mlp: TypeAlias = list[dict[str, jax.Array]]
"""One `{"w": [inputs, units], "b": [units]}` a layer."""


def init_mlp(rng: np.random.Generator, inputs: int, units: Sequence[int]) -> Mlp:
    """He-initialised layers: `inputs` -> units[0] -> units[1] -> ..."""
    layers: Mlp = []
    for width in units:
        w = rng.standard_normal((inputs, width), dtype=np.float32) * np.sqrt(2 / inputs)
        layers.append({"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(width, jnp.float32)})
        inputs = width
    return layers


def apply_mlp(layers: Mlp, x: jax.Array, *, last_relu: bool = True) -> jax.Array:
    """[B, inputs] -> [B, units of the last layer]; relu after each layer (`last_relu`: the last one too)."""
    for i, layer in enumerate(layers):
        x = x @ layer["w"] + layer["b"]
        if last_relu or i + 1 < len(layers):
            x = jax.nn.relu(x)
    return x
