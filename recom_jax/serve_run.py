"""How a server runs a batch once its plan is known: staged, handed over, its results left or waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import pack, pipeline, stage
from recom_jax.bound import Plan
from recom_jax.bound_body import MismatchError
from recom_jax.errors import RecomError, trace_error
from recom_jax.serve_prepare import Prepared
from recom_jax.signature import blame


class Runs(Prepared):
    """The part of `Server` between a plan and its results."""

    def _bound(self, plan: Plan) -> list[Any]:
        """The leading operands of a plan: the arena, and arrays that are not in it."""
        weights = self._weights
        found = weights.ready.get(plan)
        if found is None:
            if plan.arena_leaves:
                with self._lock:  # so that an update either sees the arena or comes first
                    weights = self._weights
                    self._arena(weights, plan.arena_leaves)
            found = [self._arena(weights, plan.arena_leaves)] if plan.arena_leaves else []
            found += [weights.leaves[k] for k in plan.direct_bound]
            weights.ready[plan] = found
        return found

    def _spin(self, target: stage.Target) -> int:
        given = self._core.options.spin_us
        return target.spin_us if given is None else given

    def _stage(self, plan: Plan, leaves: Sequence[Any]) -> Any:
        """What `_run` takes: a `pack.Begun` where calls take tokens, else the slot and its bytes; None if nothing is
        staged; or the index of a packed leaf that does not fit."""
        if not plan.packed:
            return None
        chosen = leaves if plan.all_packed else [leaves[k] for k in plan.packed]
        staging, target = self._core.staging, plan.target
        staged: Any
        if target is None:
            staged = staging.try_pack(plan.layout, chosen)
        else:
            staged = staging.begin(plan.layout, chosen, target, self._spin(target))
        if not isinstance(staged, int):
            pipeline.count("bytes_packed", plan.layout.total_bytes)
        return staged

    def _run(self, plan: Plan, staged: Any, leaves: Sequence[Any], fetched: bool) -> Any:
        try:
            return self._run_staged(plan, staged, leaves, fetched)
        finally:  # whatever happened, nobody reads the caller's arrays any more
            if plan.target is not None:
                staged.join()

    def _run_staged(self, plan: Plan, staged: Any, leaves: Sequence[Any], fetched: bool) -> Any:
        bound = self._bound(plan)
        direct = [leaves[k] for k in plan.direct]
        try:
            if plan.target is not None:
                return self._run_by_token(plan, plan.target, staged, [*bound, *direct], fetched)
            if staged is None:
                return plan.call(*bound, *direct)
            if plan.words:
                return plan.call(staged[1], staged[1].view(np.uint32), *bound, *direct)
            return plan.call(staged[1], *bound, *direct)
        except RecomError:
            raise
        except Exception as why:
            first = [plan.arena_leaves[0]] if plan.arena_leaves else []  # speaks for the arena
            which = [f"bound argument {self._core.names[k]}" for k in (*first, *plan.direct_bound)]
            which += [f"argument {plan.names[k]}" for k in plan.direct]
            named = [
                (f"{w} of {self.__name__}", x)
                for w, x in zip(which, (*bound, *direct), strict=True)
            ]
            fault = blame(named, why)
            raise fault or trace_error(why, f"while serving {self.__name__}") from why

    def _run_by_token(
        self,
        plan: Plan,
        target: stage.Target,
        begun: pack.Begun,
        rest: Sequence[Any],
        fetched: bool,
    ) -> Any:
        token, delivery = begun.token.array, begun.token.delivery
        fetched = fetched and plan.delivered >= 0
        done = None
        try:
            if fetched:
                delivery.begin(plan.delivered, target.ordinal)
            result, done = plan.call(token, *rest)
            if fetched:
                found = [np.empty(k.shape, k.dtype) for k in plan.kinds]
                begun.join()  # the caller may write its arrays from here on
                stage.await_results(delivery, done, self._spin(target))
        except BaseException as why:
            if fetched:
                delivery.cancel()
            if done is not None:  # the wait was interrupted, or the call failed
                target.flights.add(done, begun.held)
            elif not isinstance(why, MismatchError):  # that is found while tracing: nothing was run
                target.flights.add_failed(token, begun.held)
            raise
        if fetched:
            delivery.take(found)
            return jax.tree_util.tree_unflatten(plan.out_tree, found)
        target.flights.add(done, begun.held)
        begun.join()
        return result
