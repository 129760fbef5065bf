"""Builds `recom_jax._recom` from csrc/*.cc; everything else about the package is in pyproject.toml.

Needs a C++17 compiler, Python's headers, and the build requirements of pyproject.toml (pybind11, and jaxlib
for XLA's FFI headers). No CUDA toolkit and no TensorFlow.
"""

import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from multiprocessing.pool import ThreadPool

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

CSRC = pathlib.Path("csrc")
CUDA_HEADERS = pathlib.Path("recom_jax/cuda/headers")  # shared with the generated kernel
OBJECTS = pathlib.Path("build/objects")
COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    "-g0",  # Python's own flags often have -g; debug information is most of the size
    "-fvisibility=hidden",
    "-ffp-contract=off",  # results must equal XLA's to the last bit
    # No result depends on them, and loops vectorise: nobody reads exception flags or errno here.
    "-fno-trapping-math",
    "-fno-math-errno",
    "-pthread",
    "-Wall",
    "-Wextra",
]
LINK_ARGS = ["-pthread"] + (["-ldl"] if sys.platform.startswith("linux") else [])


def jaxlib_include() -> str:
    """The folder of the importable jaxlib that holds `xla/ffi/api/ffi.h`."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        include = os.path.join(folder, "include")
        if os.path.exists(os.path.join(include, "xla", "ffi", "api", "ffi.h")):
            return include
    raise PlatformError(
        "no jaxlib with FFI headers (xla/ffi/api/ffi.h) can be imported by "
        f"{sys.executable}. Let pip install the build requirements (don't pass "
        "--no-build-isolation), or install the jaxlib that pyproject.toml asks for."
    )


def fingerprint(ext: Extension, command: list[str]) -> str:
    """Of all that an object file depends on, its source and Python apart."""
    asked = subprocess.run([command[0], "--version"], capture_output=True, text=True)
    # Where jaxlib lies differs between build environments; what it holds counts.
    flags = [x for x in command if x != jaxlib_include()]
    digest = hashlib.sha256(repr((flags, asked.stdout)).encode())
    headers = pathlib.Path(jaxlib_include(), "xla", "ffi", "api").glob("*.h")
    for path in [*ext.depends, *sorted(map(str, headers))]:
        digest.update(pathlib.Path(path).read_bytes())
    return digest.hexdigest()[:16]


def sees_python(path: pathlib.Path, seen: set[pathlib.Path] | None = None) -> bool:
    """Whether a source includes Python's headers, itself or through one of ours."""
    seen = set() if seen is None else seen
    if path in seen or not path.exists():
        return False
    seen.add(path)
    text = path.read_text()
    if re.search(r"#include\s*<(pybind11/|Python\.h)", text):
        return True
    ours = re.findall(r'#include\s*"([^"]+)"', text)
    return any("pybind11" in x or x == "Python.h" for x in ours) or any(
        sees_python(folder / x, seen) for x in ours for folder in (CSRC, CUDA_HEADERS)
    )


class ParallelBuildExt(build_ext):
    """Compiles the sources side by side, after checking that this machine can compile them at all."""

    def build_extension(self, ext: Extension) -> None:
        ext.include_dirs = [str(CSRC), str(CUDA_HEADERS)]
        # Headers that aren't ours: no warnings about them.
        system = ["-isystem", pybind11.get_include(), "-isystem", jaxlib_include()]
        self.check_python_headers()
        self.check_compiler()
        includes = self.compiler.include_dirs + ext.include_dirs
        # What doesn't see Python is compiled once for all interpreters that this checkout is built for.
        compiler = self.compiler.compiler_so_cxx[0]
        plain = [
            *COMPILE_ARGS,
            "-fwrapv",
            "-DNDEBUG",
            "-fPIC",
            *os.environ.get("CXXFLAGS", "").split(),
        ]
        plain += [f"-I{x}" for x in ext.include_dirs] + ["-isystem", jaxlib_include()]
        kept = OBJECTS / fingerprint(ext, [compiler, *plain])

        def compile_one(source: str) -> list[str]:
            if sees_python(pathlib.Path(source)):
                objects: list[str] = self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    include_dirs=includes,
                    extra_postargs=COMPILE_ARGS + system,
                    depends=ext.depends,
                )
                return objects
            text = hashlib.sha256(pathlib.Path(source).read_bytes()).hexdigest()[:16]
            found = kept / f"{pathlib.Path(source).stem}-{text}.o"
            if not found.exists():
                partial = found.with_suffix(f".{os.getpid()}")
                self.spawn([compiler, *plain, "-c", source, "-o", str(partial)])
                partial.replace(found)
            return [str(found)]

        kept.mkdir(parents=True, exist_ok=True)
        # The largest first, so that it isn't the one that all others wait for in the end.
        sources = sorted(ext.sources, key=os.path.getsize, reverse=True)
        with ThreadPool(self.parallel or min(len(sources), os.cpu_count() or 1)) as pool:
            objects = pool.map(compile_one, sources, chunksize=1)
        ext.extra_objects = [obj for group in objects for obj in group]
        ext.sources = []  # nothing left but to link
        # Whatever the age of the library: objects are not among what it is compared with.
        self.force = True
        super().build_extension(ext)

    def check_python_headers(self) -> None:
        include = sysconfig.get_path("include")
        if not os.path.exists(os.path.join(include, "Python.h")):
            raise PlatformError(
                f"Python.h isn't in {include}: the headers of this Python are not installed. "
                "On Debian or Ubuntu: apt-get install python3-dev; on Fedora: dnf install "
                "python3-devel."
            )

    def check_compiler(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            probe = os.path.join(folder, "probe.cc")
            pathlib.Path(probe).write_text(
                "#include <optional>\nint main() { return std::optional<int>(0).value(); }\n"
            )
            try:
                self.compiler.compile([probe], output_dir=folder, extra_postargs=["-std=c++17"])
            except (CompileError, OSError) as problem:
                raise PlatformError(
                    f"no working C++17 compiler ({problem}). On Debian or Ubuntu: apt-get install "
                    "g++; on Fedora: dnf install gcc-c++; on macOS: xcode-select --install. The "
                    "environment variables CC and CXX choose another compiler."
                ) from problem


class WithSources(build_py):
    """Puts the C++ sources into the package: the library for TensorFlow is built where TensorFlow is."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout's own are found
            return
        for path in [p for kind in ("*.cc", "*.h", "*.inc") for p in CSRC.rglob(kind)]:
            to = pathlib.Path(self.build_lib, "recom_jax", path)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)


setup(
    ext_modules=[
        Extension(
            "recom_jax._recom",
            sources=sorted(str(path) for path in CSRC.glob("*.cc")),
            depends=sorted(
                str(path)
                for path in [*CSRC.glob("*.h"), *CSRC.glob("*.inc"), *CUDA_HEADERS.glob("*.h")]
            ),
            extra_link_args=LINK_ARGS,
            language="c++",
        )
    ],
    cmdclass={"build_ext": ParallelBuildExt, "build_py": WithSources},
)
