"""The user's step beside preprocessing: it reads its batch where the kernels wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from recom_jax import stage as staging
from recom_jax.corun import calls
from recom_jax.corun.probe import donated_inputs
from recom_jax.errors import PipelineError


class Steps:
    """The user's step on the batch in a slot: compiled once for each kind of state and batch, whatever the schedule.

    Two programs run, one behind the other: `begin`, which makes the device wait for the batch, and the step, which
    reads it where it is.

    Args:
      step: (state, batch) -> (state, metrics). What it donates of the state is donated.
      device: where it runs, unless the state is committed to another device.
    """

    def __init__(self, step: Callable[[Any, Any], Any], device: Any) -> None:
        self._step, self._device = step, device
        self._compiled: dict[Any, Any] = {}
        # Without streams (tests) nothing else keeps a step in front of what the next `begin` lets happen.
        self._serial = device.platform == "cpu"
        self._ended: Any = None

    def __call__(
        self, state: Any, runtime: Any, slot: Any, begun: Callable[[], None] = lambda: None
    ) -> Any:
        """Dispatches a step; calls `begun` once the batch is the step's, whatever becomes of it then."""
        leaves, tree = jax.tree.flatten(state)
        key = (tree, runtime.key())
        run = self._compiled.get(key)
        if run is None:
            run = self._compiled[key] = self._compile(tree, state, runtime)
        # A state is on one device, or on all of a mesh; its first array stands for all.
        first = next((x for x in leaves if isinstance(x, jax.Array)), None)
        home, committed = (None, False) if first is None else staging.home_of([first])
        if home is not None and home != self._device:
            raise PipelineError(
                f"Pipeline: the state is on {home}, and batches are prepared on {self._device}; put the state there, "
                "or pass corun.Options(runtime='threads')"
            )
        batch = runtime.views(slot, self._device, committed)
        token = runtime.token(slot, self._device, committed)
        if self._serial:
            jax.block_until_ready(self._ended)
        gone = runtime.begin(token)
        begun()
        with calls.marking(runtime.marks):
            made, ended = run(gone, batch, *leaves)
        self._ended = ended
        return made

    def _compile(self, tree: Any, state: Any, runtime: Any) -> Any:
        def run(gone: Any, batch: Any, *leaves: Any) -> Any:
            given = jax.tree.unflatten(runtime.kernels.out_tree, calls.own(batch))
            made = self._step(jax.tree.unflatten(tree, leaves), given)
            return made, (calls.own([gone]) if self._serial else [])

        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), state)
        donated = donated_inputs(self._step, like, runtime.batch_like())
        donated = donated[: len(jax.tree.leaves(state))]
        places = [2 + k for k, d in enumerate(donated) if d]
        # `gone` is used by nothing; the step waits for it all the same.
        return jax.jit(run, donate_argnums=places, keep_unused=True)
