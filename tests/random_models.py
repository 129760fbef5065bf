"""Models of random columns: `build` joins the columns of some seeds in one of many layouts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.random_columns import Column, column, table_of


@dataclasses.dataclass
class Model:
    """A random model: `source` defines ``model(p, b)``."""

    source: str
    fn: Callable[[Any, Any], Any]
    params: dict[str, Any]
    columns: list[Column]
    layout: Callable[[Sequence[Any], Any], Any]

    def joined(self, values: Sequence[float], batch: int) -> Any:
        """A number for each column, where the model's result holds that column (and 0 where it holds none)."""
        parts = [
            np.full((batch, c.dim), v, np.float32)
            for c, v in zip(self.columns, values, strict=True)
        ]
        return self.layout(parts, {"like": np.zeros(batch, np.float32)})

    def bounds(self, batch: int) -> Any:
        """What each value may differ by."""
        return self.joined([c.bound for c in self.columns], batch)


def build(seeds: Sequence[int], layout_seed: int) -> Model:
    made = [column(k, s) for k, s in enumerate(seeds)]
    columns = [c for c, _ in made]
    params = {"t_{}_{}_{}_{}".format(*spec): table_of(spec) for _, spec in made}
    join = _layout(random.Random(layout_seed), columns)
    lines = ["def join(c, b):", *[f"    {x}" for x in join], "", "def model(p, b):"]
    lines += [f"    {x}" for c in columns for x in c.lines]
    lines.append(f"    return join([{', '.join(f'c{k}' for k in range(len(columns)))}], b)")
    source = "\n".join(lines)
    scope: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np}
    exec(compile(source, "<random model>", "exec"), scope)
    in_numpy: dict[str, Any] = {"jnp": np}
    exec("\n".join(lines[: len(join) + 1]), in_numpy)
    return Model(source, scope["model"], params, columns, in_numpy["join"])


def _layout(r: random.Random, columns: Sequence[Column]) -> list[str]:
    """How the columns meet: groups of neighbours, each joined in a way of its own."""
    lines, names, k = [], [], 0
    while k < len(columns):
        n = min(r.choice((1, 2, 5, 12, 40)), len(columns) - k)
        part = f"c[{k}:{k + n}]"
        equal = len({c.dim for c in columns[k : k + n]}) == 1
        lines.append(
            f"g{len(names)} = "
            + r.choice(
                (
                    f"jnp.concatenate({part}, -1)",
                    f"jnp.concatenate({part}, -1)",
                    f"list({part})",
                    f"jnp.concatenate([b['like'][:, None], *{part}], -1)",
                    f"jnp.concatenate([*{part}, c[{k}]], 1)",
                    f"jnp.concatenate([x.reshape(-1) for x in {part}])",
                    f"jnp.concatenate({part}, -1).T",
                    *(
                        (
                            f"jnp.stack({part}, 1)",
                            f"(lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2]))(jnp.stack({part}, 1))",
                            f"jnp.concatenate({part}, 0)",
                            f"jnp.stack({part}, 0)",
                        )
                        if equal
                        else ()
                    ),
                )
            )
        )
        names.append(f"g{len(names)}")
        k += n
    if r.random() < 0.4:
        flat = [
            g
            for g, line in zip(names, lines, strict=True)
            if line.endswith(", -1)") and "reshape" not in line
        ]
        if flat:
            lines.append(f"wide = jnp.concatenate([{', '.join(flat)}], -1)")
            names.append("wide")
    lines.append(f"return {{{', '.join(f'{n!r}: {n}' for n in names)}}}")
    return lines
