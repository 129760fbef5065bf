"""`Options(tune=True)`: the schedule of a program that is fastest for given shapes, measured on this device.

A schedule (`text.Schedule`) changes when rows are read and how columns are laid over blocks, never what is computed:
only choices that leave every bit as it is are tried. They are measured where a function or server that was made with
``tune=True`` first meets arguments of new shapes, on those arguments, one choice after the other. The schedule that
the cost model gives is the first candidate, and stays unless another wins against it in a duel, by `MARGIN`. What was
found is kept in the disk cache. Traced calls (inside another jit, in an export) have no values: they use what was
found before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from recom_jax import compat, ffi, pipeline, stage, trace
from recom_jax.cache import Cache, key_of
from recom_jax.cuda import kernel, nvrtc
from recom_jax.cuda.codegen import DEFAULT
from recom_jax.cuda.text import Schedule
from recom_jax.cuda.units import walk
from recom_jax.errors import RecomError
from recom_jax.lowering import FusedCall, warn_once
from recom_jax.options import Options
from recom_jax.program import Program

AXES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("flight", (2, 8)),
    ("blocks", (3, 4, 5, 6)),
    ("slices", (1000, 2000, 4000)),
    ("run", (64, 128, 256)),
    ("tiles", (4, 8, 16, 32)),
)
"""What is tried, one field of a schedule after the other, the best so far kept."""

MARGIN = 0.98  # of the untuned time: another schedule must be below it, or it is noise
DUELS = 7
_FORMAT = "1"
_REPEATS, _CALLS = 7, 20

Timer = Callable[[Schedule], float | None]
"""A schedule's time in milliseconds; None if this device cannot run it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
      schedule: the winner.
      before, after: milliseconds of the untuned schedule and of the winner, in the same duel.
      tried: how many schedules were timed.
    """

    schedule: Schedule
    before: float
    after: float
    tried: int


# ---- the search ------------------------------------------------------------------------------------------------


def axes_of(program: Program) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The axes along which this program's results keep every bit.

    Slices decide the order in which a jagged bag's rows are added, so they are left out where floats are.
    """
    sums = any(
        i.op in ("POOL", "ACC")
        and i.args[1 if i.op == "POOL" else 0] in ("SUM", "PROD")
        and cls.regs[i.args[2 if i.op == "POOL" else 1]].dtype.startswith("float")
        for cls in program.classes
        for i in walk(cls.code)
    )
    jagged = any(i.op == "JREGION" for cls in program.classes for i in walk(cls.code))
    bags = jagged or any(i.op == "REGION" for cls in program.classes for i in walk(cls.code))
    return tuple(
        (name, values)
        for name, values in AXES
        if (name != "slices" or (jagged and not sums)) and (name != "flight" or bags)
    )


def search(
    axes: Sequence[tuple[str, tuple[int, ...]]],
    timer: Timer,
    step: Callable[[Schedule], None] = lambda _: None,
) -> Found:
    """The fastest schedule, one axis after the other; the untuned one unless another beats it in a duel.

    Raises:
      RuntimeError: the untuned schedule cannot be timed.
    """
    first = timer(DEFAULT)
    if first is None:
        raise RuntimeError("the untuned schedule cannot be timed")
    best, fastest, tried = DEFAULT, first, 1
    for name, values in axes:
        start = best
        for value in values:
            chosen: dict[str, Any] = {name: value}
            candidate = dataclasses.replace(start, **chosen)
            step(candidate)
            ms = timer(candidate)
            tried += 1
            if ms is not None and ms < fastest:
                best, fastest = candidate, ms
    if best == DEFAULT:
        return Found(DEFAULT, first, first, tried)
    pairs = []
    for _ in range(DUELS):  # in turns: what slows the device down for a while slows both
        old, new = timer(DEFAULT), timer(best)
        if old is not None and new is not None:
            pairs.append((old, new))
    won = bool(pairs) and statistics.median(b / max(a, 1e-9) for a, b in pairs) < MARGIN
    before = statistics.median(a for a, _ in pairs) if pairs else first
    after = statistics.median(b for _, b in pairs) if won else before
    return Found(best if won else DEFAULT, before, after, tried)


# ---- what was found --------------------------------------------------------------------------------------------

_LOCK = threading.RLock()
_FOUND: dict[str, Schedule] = {}


def shapes_of(call: FusedCall, avals: Sequence[Any]) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of a call's virtual operands, packed or not; None where one is symbolic."""
    words, shapes = list(call.layout), []
    while words:
        at, offset, rank = words[:3]
        dims = tuple(words[3 : 3 + rank]) if offset >= 0 else tuple(avals[at].shape)
        if any(compat.is_symbolic(d) for d in dims):
            return None
        shapes.append(tuple(int(d) for d in dims))
        words = words[3 + rank :]
    return tuple(shapes)


def key(untuned: kernel.Kernel, shapes: Any) -> str:
    """What a measurement depends on: the text, its headers and compiler, shapes, and the device.

    Not on how operands reach the call: what was found for separate arrays holds for a pack of them.
    """
    info = ffi.extension().cuda_info()
    device = [[d["name"], d["sms"]] for d in info["devices"][:1]]
    code = nvrtc.key(untuned.source, kernel.BUCKETS[-1], "")
    return key_of(_FORMAT, code, untuned.launch, repr(shapes), repr(device), repr(info["driver"]))


def recall(name: str, options: Options) -> Schedule | None:
    """What was found in this process, or by an earlier one."""
    with _LOCK:
        if name in _FOUND:
            return _FOUND[name]
    data = Cache.of(options).get("schedule", name)
    schedule = _decode(data) if data is not None else None
    if schedule is not None:
        with _LOCK:
            _FOUND[name] = schedule
    return schedule


def remember(name: str, found: Found, options: Options) -> None:
    with _LOCK:
        _FOUND[name] = found.schedule
    data = dataclasses.asdict(found.schedule) | {"before": found.before, "after": found.after}
    Cache.of(options).put("schedule", name, json.dumps(data).encode())


def _decode(data: bytes) -> Schedule | None:
    """A kept schedule, if this version would try it."""
    try:
        read = json.loads(data)
        made = Schedule(**{name: read[name] for name, _ in AXES})
    except (ValueError, KeyError, TypeError):
        return None
    for name, values in AXES:
        if getattr(made, name) not in (*values, getattr(DEFAULT, name)):
            return None
    return made


def schedule_for(untuned: kernel.Kernel, call: FusedCall, avals: Sequence[Any]) -> Schedule:
    """At lowering: what was found for this call, or the untuned schedule."""
    shapes = shapes_of(call, avals)
    if shapes is None:
        return DEFAULT
    return recall(key(untuned, shapes), call.options) or DEFAULT


# ---- measuring -------------------------------------------------------------------------------------------------


class _Values(threading.local):
    leaves: Callable[[], Sequence[Any]] | None = None
    off: bool = False


_VALUES = _Values()


@contextlib.contextmanager
def values(leaves: Callable[[], Sequence[Any]] | None) -> Iterator[None]:
    """While a call of these values (all leaves of the traced function, in order) is at work in this thread."""
    before, _VALUES.leaves = _VALUES.leaves, None if _VALUES.off else leaves
    try:
        yield
    finally:
        _VALUES.leaves = before


@contextlib.contextmanager
def without() -> Iterator[None]:
    """While this thread's calls have made-up values, on which nothing is to be measured."""
    before, _VALUES.off = _VALUES.off, True
    try:
        yield
    finally:
        _VALUES.off = before


def measure(compiled: pipeline.Fused, options: Options) -> None:
    """Measures the calls of a function just compiled, if it is being called with values on a CUDA device.

    Whatever goes wrong costs the tuning and a warning, never the call.
    """
    leaves = _VALUES.leaves
    if leaves is None or not compiled.calls:
        return
    try:
        with jax.ensure_compile_time_eval(), values(None):
            _measure(compiled, leaves(), options)
    except Exception as why:
        if options.verifies and not isinstance(why, RecomError):
            raise
        warn_once(f"recom_jax: Options(tune=True) measured nothing: {type(why).__name__}: {why}")


def device_of(leaves: Sequence[Any]) -> Any:
    """Where a call of these leaves runs."""
    device, _ = stage.home_of([x for x in leaves if isinstance(x, jax.Array)])
    if device is None:
        device = getattr(jax.config, "jax_default_device")  # noqa: B009 - mypy does not know it
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return device


def _measure(compiled: pipeline.Fused, leaves: Sequence[Any], options: Options) -> None:
    device = device_of(leaves)
    if not is_cuda(device):
        warn_once(
            f"recom_jax: Options(tune=True) measures schedules of the kernel for NVIDIA GPUs; calls here run on "
            f"{device.platform}, whose code has none to choose: it changes nothing"
        )
        return
    for _, scheduled, encoded in compiled.calls:
        shapes = tuple(tuple(v.aval.shape) for v in scheduled.operands)
        n_buffers = len(scheduled.operands) + len(scheduled.outputs)
        with _LOCK:  # measured by one thread at a time
            untuned = kernel.kernel_for(scheduled.program, encoded.digest, n_buffers, options)
            name = key(untuned, shapes)
            if recall(name, options) is not None:
                continue
            operands = operand_values(compiled, scheduled.operands, leaves, device)
            results = [o.var.aval for o in scheduled.outputs]
            timer = make_timer(
                scheduled.program, encoded, operands, results, n_buffers, options, device
            )
            axes = axes_of(scheduled.program)
            with _progress(sum(len(v) for _, v in axes), len(scheduled.outputs)) as step:
                found = search(axes, timer, step)
            remember(name, found, options)
            pipeline.count("schedules_tried", found.tried)
            pipeline.count("schedules_tuned", int(found.schedule != DEFAULT))


def is_cuda(device: Any) -> bool:
    return device.platform in ("gpu", "cuda") and stage.is_staged(device)


def operand_values(
    compiled: pipeline.Fused, wanted: Sequence[Any], leaves: Sequence[Any], device: Any
) -> list[jax.Array]:
    """A fused call's operands for these arguments, as XLA computes them."""
    jaxpr = compat.open_jaxpr(compiled.jaxpr)
    eqns = trace.live(jaxpr.eqns, wanted)
    consts = compiled.jaxpr.consts
    made = compat.closed(jaxpr.constvars, jaxpr.invars, list(wanted), eqns, consts, jaxpr)
    with jax.default_device(device):
        outs = jax.jit(compat.jaxpr_as_fun(made))(*leaves)
    return list(jax.block_until_ready(outs))


def make_timer(
    program: Program,
    encoded: Any,
    operands: Sequence[jax.Array],
    results: Sequence[Any],
    n_buffers: int,
    options: Options,
    device: Any,
) -> Timer:
    """Times the kernel on these operands, by device events around launches that follow one another."""
    ext = ffi.extension()
    types = ext.constants()["dtype"]
    ordinal = int(device.local_hardware_id)
    sms = ext.cuda_info()["devices"][ordinal]["sms"]
    with jax.default_device(device):
        written = [jax.numpy.zeros(a.shape, a.dtype) for a in results]
        if kernel.searches(kernel.kernel_for(program, encoded.digest, n_buffers, options).launch):
            written.append(jax.numpy.zeros(kernel.FOUND_BYTES, np.uint8))
    addresses = [x.unsafe_buffer_pointer() for x in (*operands, *jax.block_until_ready(written))]
    layout = np.array([w for k in range(len(operands)) for w in (k, -1, 0)], np.int64)
    kinds = [[(types[str(x.dtype)], list(x.shape)) for x in xs] for xs in (operands, written)]

    def time(schedule: Schedule) -> float | None:
        try:
            made = kernel.kernel_for(program, encoded.digest, n_buffers, options, schedule=schedule)
            plan = ext.cuda_plan(encoded.words, made.launch, layout, *kinds, sms, made.pointers)
            launches = [
                (x["tiles"], x["words"], [addresses[b] for b in x["buffers"]])
                for x in plan["launches"]
            ]
            mends = [x["mends"] for x in plan["launches"]]
            ms = ext.cuda_time(
                made.image, made.pointers, launches, ordinal, _CALLS, _REPEATS, 0, mends=mends
            )
        except (RecomError, RuntimeError):  # registers that do not suffice, say
            return None
        return float(statistics.median(ms))

    return time


@contextlib.contextmanager
def _progress(total: int, columns: int) -> Iterator[Callable[[Schedule], None]]:
    """A progress bar, where somebody looks at one."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"recom_jax: tuning a kernel of {columns} results", total=total)

        def step(schedule: Schedule) -> None:
            bar.update(task, advance=1, description=f"recom_jax: tuning, {_text(schedule)}")

        yield step


def _text(schedule: Schedule) -> str:
    return ", ".join(f"{name} {getattr(schedule, name)}" for name, _ in AXES)


__all__ = ["AXES", "Found", "axes_of", "measure", "schedule_for", "search", "values"]
