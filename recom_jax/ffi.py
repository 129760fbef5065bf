"""Registers the extension's FFI targets, once per process, at import.

Targets are versioned (`recom_fused_v1`) and stateless: a program's bytes travel as an attribute of the call,
so that an exported model runs in a process that has only imported the package.
"""

from __future__ import annotations

import threading
from typing import Any

import jax

from recom_jax import compat
from recom_jax.errors import PlatformError

FUSED = "recom_fused_v1"
ROW_SUMS = "recom_row_sums_v1"
EMPTY = "recom_empty_v1"
STAGE = "recom_stage_v2"
DELIVER = "recom_deliver_v1"
ALONE = "recom_fused_alone_v1"
STREAM = "recom_corun_stream_v1"
TAKE = "recom_corun_take_v1"
EVENT = "recom_corun_event_v1"
MARK = "recom_corun_mark_v1"
PASS = "recom_corun_pass_v1"

_LOCK = threading.Lock()
_registered = False


def register() -> None:
    """Registers every target with XLA. Safe to call from any thread, any number of times."""
    global _registered
    with _LOCK:
        if _registered:
            return
        for name, capsule in extension().handlers().items():
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
        # Kept by JAX until its CUDA plugin asks for them, if ever.
        for name, stages in extension().cuda_handlers().items():
            jax.ffi.register_ffi_target(name, stages, platform="CUDA")
        for stable in (FUSED, ROW_SUMS, PASS):  # their names carry their versions
            compat.promise_stable(stable)
        _registered = True


def extension() -> Any:
    """The compiled module; a clear error where it is missing or broken."""
    try:
        from recom_jax import _recom
    except ImportError as why:
        raise PlatformError(
            "the compiled part of recom_jax cannot be loaded. Install the package (`pip install .` in the "
            f"checkout; needs a C++17 compiler). The loader says: {why}"
        ) from why
    return _recom


extension()  # where it is missing, say so before a module that imports it by itself cannot be imported
