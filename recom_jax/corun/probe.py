"""The capacity probe: the train step cut at its markers, each stage timed, alone and beside probe kernels.

A stage is the equations up to a marker (`corun.stage`) in the program's order. It is compiled by itself and run on
made-up values, so the user's state is not touched and donated buffers don't matter. What it leaves free is what a probe
kernel achieves beside it, less what the stage loses: one probe for arithmetic, one for memory bandwidth.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recom_jax import compat
from recom_jax.cache import Cache, key_of
from recom_jax.corun.markers import stage_p
from recom_jax.corun.plan import Stage
from recom_jax.trace import flatten

REST = "rest"


@dataclasses.dataclass(frozen=True)
class Cut:
    """Equations of one stage, as a program of its own: inputs and outputs are variables of the step's jaxpr."""

    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    eqns: tuple[Any, ...]


def cut(closed: Any) -> tuple[Cut, ...]:
    """A flat jaxpr, cut behind its stage markers. What follows the last one is the stage "rest", if anything does."""
    jaxpr = compat.open_jaxpr(closed)
    parts: list[tuple[str, list[Any]]] = []
    current: list[Any] = []
    for k, eqn in enumerate(jaxpr.eqns):
        current.append(eqn)
        if eqn.primitive is stage_p:
            name = eqn.params["name"]
            following = jaxpr.eqns[k + 1] if k + 1 < len(jaxpr.eqns) else None
            if (
                following is None
                or following.primitive is not stage_p
                or following.params["name"] != name
            ):
                parts.append((name, current))
                current = []
    if current:
        parts.append((REST, current))
    made = []
    for k, (name, eqns) in enumerate(parts):
        own = {id(v) for e in eqns for v in e.outvars}
        inputs = {
            id(v): v
            for e in eqns
            for v in e.invars
            if not isinstance(v, compat.Literal) and id(v) not in own
        }
        later = {id(v) for _, rest in parts[k + 1 :] for e in rest for v in e.invars} | set(
            map(id, jaxpr.outvars)
        )
        outputs = {id(v): v for e in eqns for v in e.outvars if id(v) in later}
        made.append(Cut(name, tuple(inputs.values()), tuple(outputs.values()), tuple(eqns)))
    return tuple(made)


def made_up(like: Any, rng: np.random.Generator) -> Any:
    """A value of a shape and dtype: small floats, ids that spread over a table, all-true masks."""
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):  # random keys
        return jnp.zeros(like.shape, like.dtype)
    kind = np.dtype(like.dtype) if like.dtype != jnp.bfloat16 else None
    if kind is not None and kind.kind in "iu":
        return jnp.asarray(
            rng.integers(0, min(1 << 15, np.iinfo(kind).max), like.shape), like.dtype
        )
    if kind is not None and kind.kind == "b":
        return jnp.ones(like.shape, bool)
    return jnp.asarray(rng.random(like.shape) * 0.1, like.dtype)


def known_stages(cache: Cache, key: str) -> tuple[Stage, ...] | None:
    """Stages measured before on this device for this step, or None."""
    kept = cache.get("probe", key)
    if kept is None:
        return None
    try:
        return tuple(Stage.from_json(fields) for fields in json.loads(kept))
    except (ValueError, TypeError, KeyError):  # of another version
        return None


def key_of_step(closed: Any, donated: list[bool], repeats: int) -> str:
    """A key of a step's jaxpr and of the machine: kind of device, cores, JAX."""
    text = re.sub(r"0x[0-9a-f]+", "", str(closed))  # addresses of Python objects
    device = jax.devices()[0]
    machine = (device.platform, device.device_kind, os.cpu_count() or 0, jax.__version__)
    return key_of("stages 3", *machine, repeats, repr(donated), text)


def stages_of(
    step: Callable[[Any, Any], Any],
    state: Any,
    batch: Any,
    repeats: int = 5,
    cache: Cache | None = None,
) -> tuple[Stage, ...]:
    """The stages of a train step, measured. `state`, `batch`: shapes and dtypes.

    Stages of one name that come several times stay apart, with a number behind the name. With a `cache`, what was
    measured for this step on such a device is taken from there.
    """
    inner = getattr(step, "__wrapped__", step)  # a jit that donates would stay one equation
    closed = flatten(jax.make_jaxpr(inner)(state, batch), keep_fused=True)
    donated = donated_inputs(step, state, batch)
    key = key_of_step(closed, donated, repeats)
    found = None if cache is None else known_stages(cache, key)
    if found is not None:
        return found
    jaxpr = compat.open_jaxpr(closed)
    rng = np.random.default_rng(0)
    values: dict[int, Any] = {id(v): made_up(v.aval, rng) for v in jaxpr.invars}
    values |= {id(v): c for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
    names: dict[str, int] = {}
    made = []
    parts = cut(closed)
    for k, part in enumerate(parts):
        program = compat.closed([], part.inputs, part.outputs, part.eqns, [], jaxpr)
        used = {id(v) for p in parts[k + 1 :] for v in p.inputs} | set(map(id, jaxpr.outvars))
        kept = used | {id(v) for v, d in zip(jaxpr.invars, donated, strict=True) if not d}
        given = in_place(part, kept | set(map(id, jaxpr.constvars)))
        run = jax.jit(compat.jaxpr_as_fun(program), donate_argnums=given)
        args = [values[id(v)] for v in part.inputs]
        call = functools.partial(_fresh, run, args, frozenset(given))
        outs = jax.block_until_ready(call()())
        values |= {id(v): o for v, o in zip(part.outputs, outs, strict=True)}
        names[part.name] = names.get(part.name, 0) + 1
        name = part.name if names[part.name] == 1 else f"{part.name}.{names[part.name]}"
        if not part.outputs:
            continue
        alone = _time(call, repeats)
        compute, memory = (_free(call, alone, probe, repeats) for probe in _probes())
        made.append(Stage(name, 1e6 * alone, compute, memory))
    if cache is not None:
        cache.put("probe", key, json.dumps([dataclasses.asdict(stage) for stage in made]).encode())
    return tuple(made)


def donated_inputs(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> list[bool]:
    """Which leaves of (state, batch) a jitted step donates."""
    eqns = compat.open_jaxpr(jax.make_jaxpr(step)(state, batch)).eqns
    flags = eqns[0].params.get("donated_invars", ()) if len(eqns) == 1 else ()
    count = len(jax.tree.leaves((state, batch)))
    return list(flags) if len(flags) == count else [False] * count


def in_place(part: Cut, kept: set[int]) -> tuple[int, ...]:
    """Inputs of a stage that nobody reads later, and whose memory a result of the same type can take."""
    results = collections.Counter((v.aval.shape, str(v.aval.dtype)) for v in part.outputs)
    made = []
    for k, v in enumerate(part.inputs):
        kind = (v.aval.shape, str(v.aval.dtype))
        if id(v) not in kept and results[kind]:
            results[kind] -= 1
            made.append(k)
    return tuple(made)


def _fresh(
    run: Callable[..., Any], args: Sequence[Any], given: frozenset[int]
) -> Callable[[], Any]:
    """A call that may be made once: what it writes over is a copy, finished."""
    own = [jnp.array(a, copy=True) if k in given else a for k, a in enumerate(args)]
    jax.block_until_ready(own)
    return functools.partial(run, *own)


def _time(prepare: Callable[[], Callable[[], Any]], repeats: int) -> float:
    """Median seconds of the calls that `prepare` makes."""
    times = []
    for _ in range(repeats):
        call = prepare()
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _probes() -> Sequence[Callable[[], Any]]:
    """Arithmetic that touches no memory to speak of, and a copy that does nothing but."""
    few, many = jnp.arange(4096, dtype=jnp.uint32), jnp.zeros(1 << 20, jnp.float32)
    return [lambda: _arithmetic(few), lambda: _copy(many)]


@jax.jit
def _arithmetic(x: jax.Array) -> jax.Array:
    for k in range(64):
        x = (x ^ (x >> 15)) * jnp.uint32(2654435761 + 2 * k)
    return x


@jax.jit
def _copy(x: jax.Array) -> jax.Array:
    return x + 1


def _free(
    stage: Callable[[], Callable[[], Any]], alone: float, probe: Callable[[], Any], repeats: int
) -> float:
    """The probe's speed beside a stage, relative to its own, less what the stage loses; in [0, 1]."""
    own = _time(lambda: probe, 2 * repeats)
    stop = threading.Event()
    runs = [0]

    def beside() -> None:
        while not stop.is_set():
            jax.block_until_ready(probe())
            runs[0] += 1

    thread = threading.Thread(target=beside, name="recom-corun-probe", daemon=True)
    begun = time.perf_counter()
    thread.start()
    try:
        both = _time(stage, repeats)
    finally:
        stop.set()
        thread.join()
    spent = time.perf_counter() - begun
    speed = runs[0] * own / spent if spent > 0 else 0.0
    lost = max(0.0, (both - alone) / both)
    return float(min(1.0, max(0.0, speed - lost)))
