"""What a number depends on besides the code: machine, versions, commit, load."""

import datetime
import hashlib
import importlib.metadata
import math
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

import jax
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]


def _field(path: str, name: str) -> str | None:
    """The value of a line `name : value` of a file in /proc; None where there is none."""
    try:
        text = pathlib.Path(path).read_text()
    except OSError:
        return None
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else None


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory (GiB), operating system, JAX's backend."""
    kib = _field("/proc/meminfo", "MemTotal")
    affinity = getattr(os, "sched_getaffinity", None)
    gpu = {"gpu": jax.devices()[0].device_kind} if jax.default_backend() == "gpu" else {}
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gib": round(int(kib.split()[0]) / 2**20, 1) if kib else None,
        "os": platform.platform(),
        "backend": jax.default_backend(),
        **gpu,
    }


def has_gpu() -> bool:
    """Whether JAX's default device is a GPU."""
    return jax.default_backend() == "gpu"


def compiler() -> str | None:
    """The compiler that built the extension, from the note it leaves in the file; None if it left none."""
    from recom_jax import ffi

    path = getattr(ffi.extension(), "__file__", None)
    data = pathlib.Path(path).read_bytes() if path else b""
    found = re.search(rb"(GCC: \([^\0]+|clang version [^\0]+)", data)
    return found.group(1).decode(errors="replace").strip() if found else None


def versions() -> dict[str, Any]:
    """Versions of what is measured, and the instruction set that our extension picked."""
    from recom_jax import ffi
    from recom_jax.version import __version__

    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": np.__version__,
        "recom_jax": __version__,
        "compiler": compiler(),
        "isa": ffi.extension().program_stats().get("isa"),
    }


def commit() -> dict[str, Any]:
    """The git commit of the checkout, and whether files differ from it (results and docs don't count)."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changed = git("status", "--porcelain", "--", "recom_jax", "csrc", "examples", "benchmarks/*.py")
    return {
        "commit": git("rev-parse", "HEAD"),
        "modified": None if changed is None else bool(changed),
    }


def now() -> str:
    """The time, to the second, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def load() -> list[float]:
    """The load averages of 1, 5 and 15 minutes; empty where the system has none."""
    try:
        return [round(x, 2) for x in os.getloadavg()]
    except (OSError, AttributeError):
        return []


def whole_gib(machine: dict[str, Any]) -> int | None:
    """The memory that was built in: whole GiB, of which the system keeps some back, not always as much."""
    memory = machine["memory_gib"]
    return None if memory is None else math.ceil(memory)


def identity(machine: dict[str, Any], versions: dict[str, Any]) -> dict[str, Any]:
    """What numbers depend on: results that agree in it are of one kind of machine, and belong together.

    How the operating system and the compiler are called isn't part of it, nor what the former keeps back of the
    memory: machines that are lent by the minute differ in them from one loan to the next. Each result holds them.
    """
    exact = {k: machine.get(k) for k in ("backend", "cpu", "cores", "gpu")}
    names = ("python", "jax", "jaxlib", "numpy", "recom_jax", "isa")
    return exact | {"gib": whole_gib(machine)} | {k: versions.get(k) for k in names}


def key(machine: dict[str, Any], versions: dict[str, Any]) -> str:
    """A short name for a machine with versions, used in file names: equal exactly if their identities are."""
    parts = [machine.get("gpu", machine["cpu"]), f"{machine['cores']}c", f"jax{versions['jax']}"]
    if "recom_jax" in versions:
        parts.append(f"recom{versions['recom_jax']}")
    readable = re.sub(r"[^a-z0-9.]+", "-", "-".join(parts).lower()).strip("-")
    exact = repr(sorted(identity(machine, versions).items()))
    return f"{readable}-{hashlib.sha256(exact.encode()).hexdigest()[:6]}"


def peak_memory_mib() -> float:
    """The most memory that this process has held, MiB, since `reset_peak_memory` if that worked.

    `ru_maxrss` of a fresh process starts at what its *parent* held when it called exec, so Linux's
    own count for the address space (VmHWM) is read instead; ru_maxrss stands in where there is none.
    """
    kib = _field("/proc/self/status", "VmHWM")
    if kib:
        return int(kib.split()[0]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak_memory() -> bool:
    """Lets `peak_memory_mib` count from now on; False where the system can't."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory_mib() -> float | None:
    """The memory that this process holds now, MiB; None where the system doesn't say."""
    kib = _field("/proc/self/status", "VmRSS")
    return int(kib.split()[0]) / 1024 if kib else None
