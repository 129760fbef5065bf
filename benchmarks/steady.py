"""Latency of a workload at one batch size, all contestants interleaved."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import recom_jax
from benchmarks.context import Context
from benchmarks.record import Row
from benchmarks.timing import Block, Contestant, Samples, interleave
from benchmarks.workloads import Batch, Params, Workload
from recom_jax import ffi

BATCHES = (
    4  # different inputs that calls take in turn, so that no input stays in the cache by itself
)

PLAIN, TUNED, HAND = "jax.jit", "jax.jit, tuned per column", "jax.jit, hand-batched"
HAND_LOOP = "jax.jit, hand-batched, loop search"
AGAIN = "recom_jax.optimize, program on disk"
OURS, BIND, EMPTY = "recom_jax.optimize", "recom_jax bind", "empty FFI call"
DEVICE, NUMPY, STACKED = "device arrays", "numpy arrays", "numpy arrays, stacked beforehand"
STACKING, VIEWS, FILLING = (
    "numpy arrays, stacked each time",
    "input_views",
    "input_views, with filling",
)


@dataclasses.dataclass(frozen=True)
class Steady:
    """What `measure` found. `samples` by contestant key, `outputs` of the first batch likewise."""

    rows: tuple[Row, ...]
    samples: Mapping[str, Samples]
    outputs: Mapping[str, np.ndarray]
    params: Params
    batches: list[Batch]
    server: Any
    quiet: bool = True  # nobody compiled beside it
    alternating: Mapping[str, Samples] = dataclasses.field(default_factory=dict)

    def of(self, name: str, inputs: str) -> Samples:
        return self.samples[f"{name} / {inputs}"]


def fill(views: Any, batch: Any) -> Any:
    """Copies a batch into leased views of the same structure."""
    for name, view in views.items():
        view[...] = batch[name]
    return views


def empty_call(out: jax.ShapeDtypeStruct) -> Callable[[Any, Any], jax.Array]:
    """A function of (params, batch) that hands every leaf to a custom call that does nothing."""
    call = jax.ffi.ffi_call(ffi.EMPTY, out)

    @jax.jit
    def empty(params: Params, batch: Any) -> jax.Array:
        result: jax.Array = call(*jax.tree_util.tree_leaves((params, batch)))
        return result

    return empty


def contestants(w: Workload, params: Params, batches: list[Batch], server: Any, *, plain: bool,
                tuned: bool, views: bool, empty: bool) -> list[Contestant]:  # fmt: skip
    """The ways to run `w`, slowest to compile last. The flags leave some out."""
    on_device = [jax.device_put(b) for b in batches]
    number = len(batches)

    def device(k: int) -> Any:
        return on_device[k % number]

    def numpy(k: int) -> Any:
        return batches[k % number]

    def both(
        name: str, fn: Callable[[Any, Any], Any], with_params: Params = params
    ) -> list[Contestant]:
        def call(batch: Any) -> Any:
            return fn(with_params, batch)

        return [Contestant(name, DEVICE, device, call), Contestant(name, NUMPY, numpy, call)]

    ours = recom_jax.optimize(w.fn)
    found = both(OURS, ours)
    found.append(Contestant(BIND, NUMPY, numpy, server))
    if views:
        found.append(Contestant(BIND, VIEWS, lambda k: fill(server.input_views(numpy(k)), numpy(k)),
                                server, note="filling not timed"))  # fmt: skip
        found.append(
            Contestant(BIND, FILLING, numpy, lambda b: server(fill(server.input_views(b), b)))
        )
    if empty:
        out = jax.eval_shape(w.fn, params, batches[0])
        call = empty_call(out)
        found.append(Contestant(EMPTY, DEVICE, device, lambda b: call(params, b),
                                note="same operands and result; the result is not written"))  # fmt: skip
    forms = [(n, f) for n, f in ((HAND, w.hand), (HAND_LOOP, w.hand_loop)) if f]
    if forms and w.stack_params and w.stack_batch:
        stack, stacked_params = w.stack_batch, w.stack_params(params)
        stacked = [stack(b) for b in batches]
        stacked_device = [jax.device_put(b) for b in stacked]
        for name, form in forms:
            run = functools.partial(jax.jit(form), stacked_params)
            found += [
                Contestant(name, DEVICE, lambda k: stacked_device[k % number], run),
                Contestant(name, STACKED, lambda k: stacked[k % number], run),
                Contestant(name, STACKING, numpy, functools.partial(_stack_and_run, stack, run)),
            ]
    if tuned and w.tuned:
        found += both(TUNED, jax.jit(w.tuned))
    if plain:
        found += both(PLAIN, jax.jit(w.fn))
    return found


def _stack_and_run(stack: Callable[[Any], Any], run: Callable[[Any], Any], batch: Any) -> Any:
    return run(stack(batch))


def measure(context: Context, w: Workload, group: str, size: int, *, plain: bool = True, tuned: bool = True,
            views: bool = True, empty: bool = False, block: Block | None = None,
            more: Callable[[list[Batch], Any], list[Contestant]] = lambda batches, server: []) -> Steady:  # fmt: skip
    """Compiles every contestant, compares the results, and times them interleaved.

    With `block` in blocks, and then once more one call of each after the other: `alternating`.
    `more(batches, server)` gives further contestants.

    Raises:
      RuntimeError: a contestant's result is not that of the others.
    """
    progress = context.progress
    first: dict[str, float] = {}
    outputs: dict[str, np.ndarray] = {}
    with context.turns.compiling():
        with progress.step(f"{group}: parameters and inputs"):
            params = jax.block_until_ready(w.init())
            batches = w.batches(size, BATCHES)
            server = recom_jax.optimize(w.fn).bind(params)
            runners = contestants(w, params, batches, server, plain=plain, tuned=tuned, views=views,
                                  empty=empty)  # fmt: skip
            runners = [*more(batches, server), *runners]
        for c in runners:
            with progress.step(f"{group}: first call of {c.key}"):
                begun = time.perf_counter()
                out = jax.block_until_ready(c.call(c.prepare(0)))
                took = time.perf_counter() - begun
                first[c.key] = context.first_call(f"{group} | {c.key}", took)
                if c.name != EMPTY:
                    outputs[c.key] = np.asarray(out)
                del out
                for k in range(1, BATCHES):  # warm-up: every batch once
                    jax.block_until_ready(c.call(c.prepare(k)))
    # The last one is the model as written, where it runs at all.
    differences = compare(outputs, outputs[list(outputs)[-1]])
    plan = context.settings.plan
    with context.turns.timed() as quiet:
        samples = interleave(
            runners, plan, lambda it: progress.track(it, group, plan.rounds), block
        )
        alternating = interleave(runners, plan, block=Block(1)) if block else {}
    rows = tuple(
        Row.of(
            group, c, samples[c.key], first_s=first[c.key], max_difference=differences.get(c.key)
        )
        for c in runners
    )
    return Steady(rows, samples, outputs, params, batches, server, quiet, alternating)


def compare(outputs: Mapping[str, np.ndarray], reference: np.ndarray) -> dict[str, float]:
    """The largest difference of each output from the reference.

    Raises:
      RuntimeError: it is too large for another order of summation, so something computes something else.
    """
    differences = {}
    for name, out in outputs.items():
        if out.shape != reference.shape or not np.allclose(out, reference, rtol=1e-3, atol=1e-3):
            raise RuntimeError(f"{name} computes something else: {out.shape}, {reference.shape}")
        differences[name] = float(np.abs(out - reference).max()) if out.size else 0.0
    return differences
