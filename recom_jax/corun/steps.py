"""The user's step beside preprocessing: it reads its batch where the kernels wrote it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from recom_jax import stage as staging
from recom_jax.corun import calls
from recom_jax.corun.prep import like
from recom_jax.corun.probe import donated_inputs
from recom_jax.errors import PipelineError


class Steps:
    """The user's step on the batch in a slot: compiled once for each kind of state and batch, whatever the schedule.

    The step reads its batch where it was made. In front of it XLA's stream is made to wait for the batch, by a call of
    the driver: a program of XLA's for that would cost the host more than the rest. Places are written again; at most
    `ahead` steps are unfinished, so that none of them reads what is.

    Args:
      step: (state, batch) -> (state, metrics). What it donates of the state is donated.
      device: where it runs; a state that is committed elsewhere is an error.
    """

    def __init__(self, step: Callable[[Any, Any], Any], device: Any) -> None:
        self._step, self._device = step, device
        self._compiled: dict[Any, Any] = {}
        self._flying: collections.deque[Any] = collections.deque()
        # Without streams (tests) nothing else keeps a step in front of what the next `begin` lets happen, and its
        # markers record events when it runs.
        self._serial = device.platform == "cpu"

    def __call__(
        self, state: Any, runtime: Any, slot: Any, begun: Callable[[], None] = lambda: None
    ) -> Any:
        """Dispatches a step; calls `begun` once the batch is the step's, whatever becomes of it then."""
        leaves, tree = jax.tree.flatten(state)
        key = (tree, runtime.key)
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
        while len(self._flying) >= runtime.ahead:
            wait_for(self._flying.popleft())
        batch = runtime.views(slot, self._device, committed)
        runtime.begin(slot, self._device, committed)
        begun()
        with calls.marking(runtime.marks, runtime.in_graphs):
            made, ended = run(batch, *leaves)
        ended = ended or jax.tree.leaves(made[1])
        if self._serial:
            wait_for(ended)
        runtime.dispatched()
        self._flying.append(ended)
        return made

    def _compile(self, tree: Any, state: Any, runtime: Any) -> Any:
        out_tree = runtime.kernels.out_tree  # the runtime itself may go

        def run(batch: Any, *leaves: Any) -> Any:
            given = jax.tree.unflatten(out_tree, calls.own(batch))
            made = self._step(jax.tree.unflatten(tree, leaves), given)
            # Something must tell when the step has ended.
            return made, [] if jax.tree.leaves(made[1]) else [jnp.zeros((), jnp.uint8)]

        donated = donated_inputs(self._step, like(state), runtime.batch_like())
        donated = donated[: len(jax.tree.leaves(state))]
        return jax.jit(run, donate_argnums=[1 + k for k, d in enumerate(donated) if d])


def wait_for(results: Any) -> None:
    """Waits for results of steps, as far as they are still there: a user may have donated them."""
    there = [
        x for x in jax.tree.leaves(results) if not (isinstance(x, jax.Array) and x.is_deleted())
    ]
    jax.block_until_ready(there)
