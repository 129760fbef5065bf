"""The shared library that brings our custom call into TensorFlow, built on the user's machine.

TensorFlow holds an XLA of its own, whose FFI is older than jaxlib's; a handler is refused by a runtime whose FFI is
older than the headers it was compiled with. So the library is compiled against the headers that the installed
TensorFlow brings: the handler and the interpreter, nothing of Python. That takes a minute, once: the library is
kept in the cache folder, by a digest of sources, headers and flags.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from recom_jax import cache, options
from recom_jax.errors import ExportError, TensorFlowError

OLDEST = (2, 21)
SOURCES = (
    "kernels_avx512.cc", "kernels_avx2.cc", "kernels_base.cc", "ffi_handler.cc", "class_decoder.cc", "plan.cc",
    "plan_chunks.cc", "program.cc", "interp.cc", "exec.cc", "exec_bags.cc", "exec_regions.cc", "row_sums.cc",
    "row_sums_words.cc", "tensorflow/library.cc",
)  # fmt: skip
FLAGS = (
    "-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno",
    "-pthread", "-fPIC", "-w",
)  # fmt: skip
"""As setup.py compiles the extension: results must be the same to the last bit."""
_LINK = ("-shared", "-pthread", "-Wl,--no-undefined")
_PACKAGE = pathlib.Path(__file__).parent
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class TensorFlow:
    """What is installed, found without importing it (which takes seconds)."""

    version: str
    include: pathlib.Path

    @property
    def numbers(self) -> tuple[int, ...]:
        """Major and minor version; () if unknown."""
        return tuple(int(n) for n in self.version.split(".")[:2] if n.isdecimal())

    @property
    def headers(self) -> list[pathlib.Path]:
        return sorted((self.include / "xla" / "ffi" / "api").glob("*.h"))


def find_tensorflow() -> TensorFlow:
    """The TensorFlow that ``import tensorflow`` would find.

    Raises:
      TensorFlowError (ImportError): there is none, it is too old, or it has no FFI headers.
    """
    spec = importlib.util.find_spec("tensorflow")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise TensorFlowError(
            "TensorFlow is not installed; export needs it: pip install 'recom_jax[tf]'"
        )
    version = "unknown"
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            break
    found = TensorFlow(version, pathlib.Path(folders[0]) / "include")
    if found.numbers and found.numbers < OLDEST:
        raise TensorFlowError(
            f"TensorFlow {version} is too old; its XLA cannot run the custom call. Install "
            f"{OLDEST[0]}.{OLDEST[1]}: pip install 'recom_jax[tf]'"
        )
    if not any(path.name == "ffi.h" for path in found.headers):
        raise TensorFlowError(
            f"TensorFlow {version} in {folders[0]} comes without XLA's FFI headers (include/xla/ffi/api/ffi.h); "
            "install one of PyPI's wheels: pip install 'recom_jax[tf]'"
        )
    return found


def tensorflow_library() -> pathlib.Path:
    """Path of the library for ``tf.load_library``, and for servers of SavedModels; built if it has to be.

    The first call takes a minute; then it is in the cache folder (docs/options.md). Where there is none, each process
    builds its own and removes it in the end. The file may be copied: it fits any process with the same version of
    TensorFlow on the same kind of machine.

    Raises:
      TensorFlowError (ImportError): no TensorFlow, a wrong version, or no headers.
      ExportError (RuntimeError): no C++17 compiler, or it failed.
    """
    found = find_tensorflow()
    path = kept_library(found)
    if path is not None:  # no lock, no writing: the folder may be part of a read-only image
        return path
    with _LOCK, _folder() as folder:
        path = folder / _name(found)
        if not path.exists():
            try:
                _build(path, found)
            except OSError as why:
                raise ExportError(
                    f"the library for TensorFlow cannot be written to {folder}: {why.strerror or why}; RECOM_CACHE_DIR "
                    "names another folder"
                ) from why
        return path


def kept_library(found: TensorFlow) -> pathlib.Path | None:
    """The library in the cache folder; None if it is not there, or others could have put it there."""
    kept = options.Options().caches_in
    if kept is None:
        return None
    path = kept / "tensorflow" / _name(found)
    try:
        for part in (kept, path.parent, path):
            cache.check_private(os.stat(part), str(part))
    except OSError:
        return None
    return path


def load(tf: Any) -> None:
    """Loads the library into the TensorFlow of this process. Any number of times, from any thread."""
    path = tensorflow_library()
    try:
        tf.load_library(str(path))
        library = ctypes.CDLL(str(path))
    except Exception as why:  # TensorFlow's own types of errors
        raise ExportError(f"the library {path} cannot be loaded: {why}") from why
    library.recom_tensorflow_status.restype = ctypes.c_char_p
    status = library.recom_tensorflow_status().decode(errors="replace")
    # A copy of the file that was loaded before is as good.
    if status and "Duplicate FFI handler" not in status:
        raise ExportError(f"TensorFlow refuses the custom call: {status}")


# ---- inside ---------------------------------------------------------------------------------------------------


def csrc() -> pathlib.Path:
    """The folder of the C++ sources: in a checkout beside the package, in an installed one inside it."""
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (folder / SOURCES[-1]).exists():
            return folder
    raise ExportError(
        f"the C++ sources are not in {_PACKAGE / 'csrc'}: this installation is not whole, install recom_jax again"
    )


def _compiler() -> list[str]:
    """The command of a C++ compiler."""
    asked = options.cxx_compiler()
    for words in [shlex.split(asked)] if asked else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(words[0])
        if path:
            return [path, *words[1:]]
    what = f"the one that CXX names, {asked!r}, is not there" if asked else "there is none"
    raise ExportError(
        f"the library for TensorFlow is built with a C++17 compiler, and {what}. On Debian or Ubuntu: apt-get "
        "install g++; or build it on another machine (python -m recom_jax tf-library --out FILE) and load the file"
    )


def _name(found: TensorFlow) -> str:
    return f"librecom_jax-tf{found.version}-{_digest(found)[:16]}.so"


def _digest(found: TensorFlow) -> str:
    made = hashlib.sha256(repr((found.version, FLAGS, _LINK, SOURCES)).encode())
    folder = csrc()
    ours = [
        *(folder / name for name in SOURCES),
        *sorted(folder.glob("*.h")),
        *sorted(folder.glob("*.inc")),
    ]
    for path in (*ours, *found.headers):
        made.update(f"{path.name}:".encode() + hashlib.sha256(path.read_bytes()).digest())
    return made.hexdigest()


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    """A folder that nobody else can write, locked against other processes."""
    kept = options.Options().caches_in
    if kept is None:
        yield _temporary()
        return
    folder = kept / "tensorflow"
    try:
        for path in (kept, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            cache.check_private(os.stat(path), str(path))
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as why:
        warnings.warn(
            f"recom_jax: cannot keep the library for TensorFlow in {folder}: {why.strerror or why}. It is built for "
            "this process alone; RECOM_CACHE_DIR names another folder",
            RuntimeWarning,
            stacklevel=4,
        )
        yield _temporary()
        return
    try:
        with contextlib.suppress(
            OSError
        ):  # some network file systems have no locks: then both build
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever waits finds the library built
        yield folder
    finally:
        os.close(lock)


@functools.cache
def _temporary() -> pathlib.Path:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="recom_jax-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _build(path: pathlib.Path, found: TensorFlow) -> None:
    sources, compiler = csrc(), _compiler()
    with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as work:

        def compile_one(name: str) -> str:
            made = os.path.join(work, name.replace("/", "_") + ".o")
            _run(*compiler, *FLAGS, f"-I{sources}", "-isystem", str(found.include), "-c",
                 str(sources / name), "-o", made)  # fmt: skip
            return made

        with ThreadPoolExecutor(min(len(SOURCES), os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compile_one, SOURCES))
        library = os.path.join(work, "library.so")
        _run(*compiler, *_LINK, *objects, "-ldl", "-o", library)
        os.chmod(library, 0o755)  # whatever the umask
        os.rename(library, path)  # whole, or not there


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as why:
        raise ExportError(f"the compiler {command[0]} cannot be run: {why}") from why
    if done.returncode:
        end = "\n".join(done.stderr.splitlines()[:20])
        raise ExportError(
            f"the library for TensorFlow cannot be compiled; it needs a C++17 compiler. {' '.join(command)} "
            f"says:\n{end}"
        )
