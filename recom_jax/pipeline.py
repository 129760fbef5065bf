"""The compiler as one function, a stage a line: a flat jaxpr in, a spliced jaxpr and a report's facts out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from recom_jax import cpu, ffi, gate, ir, kept, row_arithmetic, verify
from recom_jax.cpu import Encoded
from recom_jax.detect import detect
from recom_jax.detect_values import Detected, Read
from recom_jax.lowering import warn_once
from recom_jax.options import Options
from recom_jax.schedule import PartError, Scheduled, schedule
from recom_jax.simplify import Simplified, simplify
from recom_jax.splice import Split, splice
from recom_jax.trace import Traced

_MAX_ATTEMPTS = 64


@dataclasses.dataclass(frozen=True)
class Fused:
    """What a function is when it runs.

    Attributes:
      calls: (level, program, its encoding) of each fused call.
      jaxpr: the spliced program.
    """

    traced: Traced
    calls: tuple[tuple[int, Scheduled, Encoded], ...]
    jaxpr: Any


@dataclasses.dataclass(frozen=True)
class Compiled(Fused):
    """What the pipeline makes of one trace, stage by stage.

    Attributes:
      forced: reasons by id of variables that had to stay in XLA.
    """

    detected: Detected
    simplified: Simplified
    forced: dict[int, str]
    reads: tuple[Read, ...]


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No collections while a hundred thousand small objects that all survive are made: they cost a third."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def fuse(traced: Traced, options: Options) -> Fused:
    """Stages 2 to 8 for a function that is to run: from the disk, if an earlier process prepared the same one."""
    if not kept.applies(traced, options):
        return compile_jaxpr(traced, options)
    with gc_paused():
        try:
            name = kept.key(traced, options)
            found = None if name is None else kept.load(name, traced, options)
            if found is not None:
                split, extra, scheduled = found
                encoded = tuple((level, s, prepare(s, options)) for level, s in scheduled)
                made = Fused(traced, encoded, splice(split, extra, encoded, options))
                count("programs_from_disk", len(encoded))
                return made
        except Exception as why:
            warn_once(
                f"recom_jax: a program kept on disk is made again: {type(why).__name__}: {why}"
            )
            name = None
    return compile_jaxpr(traced, options, name)


def compile_jaxpr(traced: Traced, options: Options, name: str | None = None) -> Compiled:
    """Stages 2 to 8, see `_compile`. A defect of ours costs the fusion and a warning, never the user's call.

    Args:
      name: the key under which the next process finds what was made; None: it is not kept.
    """
    with gc_paused():
        try:
            return _compile(traced, options, name)
        except Exception as why:
            if options.verifies:
                raise
            reason = f"recom_jax failed ({type(why).__name__}: {why}); please report this with a dump (RECOM_DUMP_DIR)"
            warn_once(f"{reason}. The function runs as plain JAX")
            return _unfused(traced, options, reason)


def _unfused(traced: Traced, options: Options, reason: str) -> Compiled:
    """The original program, each table read marked with the reason."""
    everything = {id(v): reason for e in traced.jaxpr.eqns for v in e.outvars}
    detected, _ = detect(traced.jaxpr, options, everything)
    return Compiled(
        traced, (), traced.jaxpr, detected, Simplified((), {}), everything, detected.reads
    )


def _compile(traced: Traced, options: Options, name: str | None) -> Compiled:
    """Runs stages 2 to 8. A value that a later stage cannot express goes back to XLA, and detection runs again."""
    forced: dict[int, str] = {}
    for attempt in itertools.count():
        detected, detector = detect(traced.jaxpr, options, forced)
        if detected.late and attempt < _MAX_ATTEMPTS:
            forced |= {id(v): "it waits for what XLA makes of the same rows" for v in detected.late}
            continue
        settled = row_arithmetic.left_to_xla(detector, detected)
        if settled and attempt < _MAX_ATTEMPTS:
            forced |= settled
            continue
        simplified = simplify(detected.pool, detected.outputs, detected.value_of, options.disabled)
        held = {} if options.always_fuse else gate.held_back(detected, simplified.outputs)
        if held and attempt < _MAX_ATTEMPTS:
            forced |= held
            continue
        by_level: dict[int, list[Any]] = collections.defaultdict(list)
        for out in simplified.outputs:
            by_level[out.level].append(out)
        try:
            scheduled = [
                (level, schedule(detected, outs)) for level, outs in sorted(by_level.items())
            ]
        except PartError as why:
            if attempt >= _MAX_ATTEMPTS:  # a model of only such values: leave it to XLA whole
                forced = {id(v): str(why) for e in traced.jaxpr.eqns for v in e.outvars}
            forced |= {id(v): reason for v, reason in why.failed}
            continue
        break
    encoded = [(level, s, prepare(s, options)) for level, s in scheduled]
    jaxpr = splice(detected, detector.extra_consts, encoded, options)
    dump(
        options,
        trace=traced,
        detect=detected,
        simplify=simplified,
        splice=jaxpr,
        **{f"program{level}": s for level, s in scheduled},
    )
    if name is not None:
        _keep(name, traced, options, detected, detector.extra_consts, scheduled)
    return Compiled(traced, tuple(encoded), jaxpr, detected, simplified, forced, detected.reads)


def _keep(
    name: str,
    traced: Traced,
    options: Options,
    detected: Detected,
    extra: Sequence[tuple[Any, Any]],
    scheduled: Sequence[tuple[int, Scheduled]],
) -> None:
    """Keeps what was made for the next process. A defect of ours costs that process the time, and nobody the call."""
    split = Split(traced.jaxpr, detected.kept, detected.value_of)
    try:
        kept.keep(name, traced, options, (split, tuple(extra), tuple(scheduled)))
    except Exception as why:
        warn_once(f"recom_jax: a program is not kept on disk: {type(why).__name__}: {why}")


# ---- prepared programs -----------------------------------------------------------------------------------------

_LOCK = threading.Lock()
_PREPARED: collections.OrderedDict[str, Encoded] = collections.OrderedDict()
_KEEP = 4096
_COUNTS: collections.Counter[str] = collections.Counter()


def prepare(scheduled: Scheduled, options: Options) -> Encoded:
    """The encoded program; validated once per structure, whatever the batch size."""
    if options.verifies:
        verify.program(scheduled.program)
    encoded = cpu.encode(scheduled.program)
    with _LOCK:
        known = _PREPARED.get(encoded.digest)
        if known is not None:
            _PREPARED.move_to_end(encoded.digest)
            _COUNTS["program_cache_hits"] += 1
            return known
    ffi.extension().validate(encoded.words)
    with _LOCK:
        _COUNTS["programs_prepared"] += 1
        _PREPARED[encoded.digest] = encoded
        while len(_PREPARED) > _KEEP:
            _PREPARED.popitem(last=False)
    return encoded


def count(name: str, by: int = 1) -> None:
    """Adds to a counter of `recom_jax.stats`."""
    with _LOCK:
        _COUNTS[name] += by


def counters() -> dict[str, int]:
    with _LOCK:
        return dict(_COUNTS)


# ---- dumps -----------------------------------------------------------------------------------------------------

_SERIAL = itertools.count()


def dump(options: Options, **stages: Any) -> None:
    """Writes each stage's printed form, if asked to; bytes as they are, to a file that ends in the stage's name.

    A folder that cannot be written is a warning, not an error.
    """
    folder = options.dumps_to
    if folder is None:
        return
    serial = next(_SERIAL)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ir.numbered():
            for k, (name, value) in enumerate(stages.items()):
                if isinstance(value, bytes):
                    (folder / f"{serial:04d}_{k}.{name}").write_bytes(value)
                else:
                    (folder / f"{serial:04d}_{k}_{name}.txt").write_text(f"{value}\n")
    except OSError as why:
        warn_once(f"recom_jax: cannot write stage dumps to {folder}: {why}")
