"""`python -m recom_jax doctor`: what is installed, what works, what is missing and what to do about it.

Where the package itself cannot be imported (its compiled part is missing), this file still runs as a script.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

OK, NOTE, BAD = "ok", "note", "problem"
PACKAGES = ("jax", "jaxlib", "numpy", "sympy", "rich")
# What pyproject.toml asks for; a test compares them.
NEEDS = {"jax": (">=0.10.2", "<0.13"), "jaxlib": (">=0.10.2", "<0.13"), "numpy": (">=2.0",),
         "sympy": (">=1.13",), "rich": (">=13",)}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
      state: "ok", "note" (something optional is missing) or "problem" (the package does not work).
      todo: what to do about it, "" if nothing.
    """

    what: str
    found: str
    state: str = OK
    todo: str = ""


def main() -> int:
    """Prints the table. Returns 1 if there is a problem."""
    found = list(examine())
    try:
        _print(found)
    except ImportError:  # no rich: one of the problems
        for f in found:
            print(f"{f.state:8} {f.what:24} {f.found}" + (f"\n{'':34}{f.todo}" if f.todo else ""))
    problems = sum(f.state == BAD for f in found)
    print(f"{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0


def _print(found: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    styles = {OK: "green", NOTE: "yellow", BAD: "bold red"}
    for f in found:
        table.add_row(Text(f.state, styles[f.state]), *(Text(t) for t in (f.what, f.found, f.todo)))
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    console.print(table)


def examine() -> Iterator[Finding]:
    """Every finding, in the order they are printed; a check that fails is a finding too."""
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}", *(
        () if sys.version_info >= (3, 11) else (BAD, "Python 3.11 or newer")))  # fmt: skip
    yield Finding("machine", f"{platform.system()} {platform.machine()}")
    for name in PACKAGES:
        yield _package(name)
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _extension, _devices, _works, _driver, _compiler, _tensorflow, _cache, _variables,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except Exception as why:
            yield Finding(
                check.__name__.strip("_"), f"{type(why).__name__}: {why}", BAD, "see above"
            )


def _package(name: str) -> Finding:
    needs = ", ".join(NEEDS[name])
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            name, "not installed", BAD, f"pip install '{name}{needs}'".replace(", ", ",")
        )
    fits = all(_fits(version, need) for need in NEEDS[name])
    return Finding(name, version, *(() if fits else (BAD, f"a version {needs}")))


def _fits(version: str, need: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", text.split("+")[0])[:3]]

    limit = numbers(need)
    return numbers(version) >= limit if need.startswith(">=") else numbers(version) < limit


def _extension() -> Iterator[Finding]:
    try:
        import recom_jax
        from recom_jax import ffi
    except Exception as why:
        yield Finding(
            "recom_jax",
            f"cannot be imported: {why}",
            BAD,
            "pip install . in the checkout (needs a C++17 compiler), or install a wheel for this Python",
        )
        return
    folder = pathlib.Path(recom_jax.__file__).parent
    yield Finding("recom_jax", f"{recom_jax.__version__}, {folder}")
    ext = ffi.extension()
    yield Finding(
        "interpreter",
        f"{pathlib.Path(ext.__file__).name}, instruction set {ext.program_stats()['isa']}",
    )
    cuda: dict[str, Any] = getattr(ext, "cuda_handlers", dict)()
    yield Finding("targets for CPU", ", ".join(sorted(ext.handlers())))
    yield Finding("targets for CUDA", ", ".join(sorted(cuda)) or "none in this build")


def _devices() -> Iterator[Finding]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as why:
        yield Finding(
            "devices",
            str(why).splitlines()[0],
            BAD,
            "JAX_PLATFORMS names a platform that JAX cannot start",
        )
        return
    kinds = sorted({f"{d.platform} ({d.device_kind})" for d in devices})
    yield Finding("devices", f"{len(devices)}: {', '.join(kinds)}")


def _works() -> Iterator[Finding]:
    """One column, run and compared."""
    import jax
    import numpy as np

    import recom_jax

    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    ids = np.array([[3, -1], [0, 2]], np.int32)

    def fn(t: Any, i: Any) -> Any:
        return jax.numpy.where((i >= 0)[..., None], t[i], 0).sum(1)

    f = recom_jax.optimize(fn)
    right = bool((np.asarray(f(table, ids)) == np.asarray(jax.jit(fn)(table, ids))).all())
    report = f.explain(table, ids)
    fused = report.num_fused == report.num_columns
    plain = next((why for _, why in report.unfused_on_cuda), "")
    if right and fused and plain:
        why = plain.removeprefix("recom_jax: ")
        yield Finding("a small model", f"runs as plain JAX on the GPU: {why}", BAD, "as it says")
    elif right and fused:
        yield Finding("a small model", "runs fused, result as plain JAX's")
    else:
        yield Finding("a small model", "wrong result" if not right else "is not fused", BAD,
                      "report it with this table")  # fmt: skip


def _driver() -> Iterator[Finding]:
    from recom_jax import ffi
    from recom_jax.cuda.kernel import OLDEST_DRIVER

    look = getattr(ffi.extension(), "cuda_info", None)
    if look is None:
        yield Finding("CUDA driver", "this build has no CUDA target", NOTE)
        return
    info = look()
    if info["error"]:
        yield Finding(
            "CUDA driver",
            info["error"].removeprefix("recom_jax: "),
            NOTE,
            "nothing, for the CPU alone",
        )
        return
    devices = ", ".join(
        f"{d['name']} (sm_{d['capability'][0]}{d['capability'][1]})" for d in info["devices"]
    )
    major, minor = info["driver"]
    if (major, minor) < OLDEST_DRIVER:
        yield Finding(
            "CUDA driver",
            f"for CUDA {major}.{minor}: {devices or 'no device'}",
            BAD if devices else NOTE,
            "fused kernels need a driver for CUDA {}.{} or newer".format(*OLDEST_DRIVER),
        )
        return
    yield Finding(
        "CUDA driver",
        f"for CUDA {major}.{minor}: {devices or 'no device'}",
        OK if devices else NOTE,
    )


def _compiler() -> Iterator[Finding]:
    try:
        from recom_jax.cuda import nvrtc
    except ImportError:
        return
    from recom_jax.errors import RecomError

    try:
        major, minor = nvrtc.version()
    except (RecomError, OSError, AttributeError) as why:
        text = str(why).removeprefix("recom_jax: ")
        yield Finding(
            "NVRTC",
            text,
            NOTE,
            "for NVIDIA GPUs: pip install 'recom_jax[cuda]'; nothing, for the CPU alone",
        )
        return
    yield Finding(
        "NVRTC", f"{major}.{minor}, {next(iter(nvrtc.libraries()), 'from the search path')}"
    )


def _tensorflow() -> Iterator[Finding]:
    """Nothing where it is not installed: few need it."""
    if importlib.util.find_spec("tensorflow") is None:
        return
    try:
        from recom_jax import tensorflow_library as library
    except ImportError:
        return
    from recom_jax.errors import ExportError

    try:
        found = library.find_tensorflow()
        kept = library.kept_library(found)
    except ExportError as why:
        yield Finding("TensorFlow", str(why), NOTE, "see docs/tensorflow.md")
        return
    state = f"library {kept}" if kept else "its library is built when it is needed"
    yield Finding("TensorFlow", f"{found.version}, {state}")


def _cache() -> Iterator[Finding]:
    from recom_jax.cache import Cache
    from recom_jax.errors import OptionError
    from recom_jax.options import Options

    try:
        state = Cache.of(Options()).state()
    except OptionError as why:
        yield Finding("cache folder", str(why), BAD, "set it right, or unset it")
        return
    if state.folder is None:
        yield Finding("cache folder", "off", NOTE, "unset RECOM_CACHE_DIR to keep compiled code")
        return
    found = f"{state.folder}: {state.entries:,} entries, {state.size / 2**20:.1f} of {state.limit / 2**20:.0f} MiB"
    if state.problem:
        yield Finding("cache folder", f"{found}; {state.problem}", NOTE,
                      "repair it, or name another in RECOM_CACHE_DIR")  # fmt: skip
    else:
        yield Finding("cache folder", found)


def _variables() -> Iterator[Finding]:
    from recom_jax import options

    for name, value in options.environment().items():
        if name in options.VARIABLES:
            yield Finding(name, value)
        else:
            yield Finding(name, value, NOTE, "no such variable: docs/options.md lists them")


if __name__ == "__main__":
    # As a script: the package's folder must not hide modules of the standard library, its parent has the package.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    sys.exit(main())
