"""The options, and the only place that reads environment variables.

``RECOM_DUMP_DIR``  folder that receives each stage's printed form, one file a stage (default: none)
``RECOM_VERIFY``    1: run the IR verifier after each pass (default: 0; the test-suite sets 1)
``RECOM_DISABLE``   comma-separated names of rewrites to leave out, as `Options.disable`
``RECOM_CACHE_DIR`` folder of compiled code (default: recom_jax in the user's cache folder); 0 or off: none
``RECOM_CACHE_BYTES``  how large that folder may grow (default: 268435456, 256 MiB)
``CUDA_HOME``, ``CUDA_PATH``  folder of a CUDA toolkit whose NVRTC is used if no installed package has one
``CXX``  the C++ compiler of the library for TensorFlow (default: the first of c++, g++, clang++)

Others have no option: the interpreter reads ``RECOM_CPU_ISA``, the tests two more (docs/options.md).
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
import os
import pathlib
from collections.abc import Callable

from recom_jax.errors import OptionError


@dataclasses.dataclass(frozen=True)
class Options:
    """What `recom_jax.optimize` may do. Frozen and hashable: it is part of every cache key.

    Attributes:
      fast_ids: fuse ids that pass through log, exp, pow or chained float arithmetic as well; their value
        may then differ from XLA's in the last bit, so an id may differ (default False: XLA computes them).
      fuse_values: fuse results for which no table is read as well, if they take many exact operations: hashes,
        bins and classes of a preprocessing program then run in the call, too (default False: XLA computes them).
      disable: names of rewrites to leave out (``recom_jax.simplify.NAMES`` lists them), for ablation and
        debugging; results stay right.
      small_table_bytes: `bind` copies tables up to this size (bytes) into one arena; larger ones are passed
        as they are, at no memory cost.
      ring_slots: staging slots `bind` keeps per batch signature; leases block when all are taken.
      lease_timeout_s: seconds a lease waits for a free slot before `LeaseError`.
      spin_us: microseconds that a thread in `Server.fetch` looks for its results before it sleeps in between, and that
        the threads which pack `bind`'s batches for a GPU look out for the next batch before
        they sleep (waking them takes tens of microseconds); None: 1,000 with 8 processors or more, else 0.
      verify: run the IR verifier after each pass; None reads ``RECOM_VERIFY``.
      dump_dir: folder for stage dumps; None reads ``RECOM_DUMP_DIR``.
      cache_dir: folder of compiled code, "0" or "off" for none; None reads ``RECOM_CACHE_DIR``.
      cache_bytes: how large that folder may grow; None reads ``RECOM_CACHE_BYTES``.
      batch_buckets: batch sizes to compile for. A call's batch is padded to the next of them and its results are cut,
        so XLA compiles once a bucket (outside of jit, vmap and grad). Only for functions that work row by row, which
        is proven: `BucketError` else.
      batch_argnums: positions of the arguments whose arrays have the batch as axis 0. Default: the last argument that
        holds arrays; of a server, all that are not bound.
      tune: on a CUDA device, measure how the kernel of new shapes is best laid out, at its first call with values, and
        keep what was found (default False: a cost model says). Results stay the same; elsewhere nothing changes.
      long_bags: on a CUDA device, let all warps of a block sum up a jagged bag of 2,048 ids or more, for features of
        which a few bags hold thousands (default False: a warp sums each bag up; other jagged kernels are 1 to 3
        percent faster). Such a bag's rows are added in another order, the same in each run. Elsewhere nothing changes.
      always_fuse: fuse single lookups too that XLA would join with the arithmetic on their rows, and gradients on a GPU
        (default False: they stay in XLA, which is faster, and `explain` says so).
    """

    fast_ids: bool = False
    fuse_values: bool = False
    disable: tuple[str, ...] = ()
    small_table_bytes: int = 1 << 20
    ring_slots: int = 8
    lease_timeout_s: float = 60.0
    spin_us: int | None = None
    verify: bool | None = None
    dump_dir: str | None = None
    cache_dir: str | None = None
    cache_bytes: int | None = None
    batch_buckets: tuple[int, ...] = ()
    batch_argnums: tuple[int, ...] = ()
    always_fuse: bool = False
    tune: bool = False
    long_bags: bool = False

    def __post_init__(self) -> None:
        from recom_jax.simplify import NAMES

        if isinstance(self.disable, str):
            raise OptionError(
                f"Options.disable is a tuple of names, not the string {self.disable!r}"
            )
        object.__setattr__(self, "disable", tuple(self.disable))
        for name in self.disable:
            if name not in NAMES:
                raise OptionError(
                    f"Options.disable: no rewrite is named {name!r}; there are {sorted(NAMES)}"
                )
        for field in dataclasses.fields(self):
            _check_kind(field.name, str(field.type), getattr(self, field.name))
        if self.ring_slots < 1:
            raise OptionError(f"Options.ring_slots is at least 1, not {self.ring_slots}")
        if not self.lease_timeout_s >= 0:
            raise OptionError(f"Options.lease_timeout_s is at least 0, not {self.lease_timeout_s}")
        if self.small_table_bytes < 0:
            raise OptionError(
                f"Options.small_table_bytes is at least 0, not {self.small_table_bytes}"
            )
        for name in ("batch_buckets", "batch_argnums"):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        if any(n < 1 for n in self.batch_buckets):
            raise OptionError(f"Options.batch_buckets are at least 1, not {self.batch_buckets}")
        if self.spin_us is not None and self.spin_us < 0:
            raise OptionError(f"Options.spin_us is at least 0, not {self.spin_us}")
        if self.cache_bytes is not None and self.cache_bytes < 0:
            raise OptionError(f"Options.cache_bytes is at least 0, not {self.cache_bytes}")

    @property
    def verifies(self) -> bool:
        return _flag("RECOM_VERIFY") if self.verify is None else self.verify

    @property
    def dumps_to(self) -> pathlib.Path | None:
        path = self.dump_dir or os.environ.get("RECOM_DUMP_DIR")
        return pathlib.Path(path) if path else None

    @property
    def caches_in(self) -> pathlib.Path | None:
        path = self.cache_dir or os.environ.get("RECOM_CACHE_DIR") or _user_cache()
        return pathlib.Path(path) if path and path.lower() not in ("0", "off") else None

    @property
    def cache_limit(self) -> int:
        if self.cache_bytes is not None:
            return self.cache_bytes
        text = os.environ.get("RECOM_CACHE_BYTES") or str(1 << 28)
        if not text.isdecimal():
            raise OptionError(f"RECOM_CACHE_BYTES is a number of bytes, not {text!r}")
        return int(text)

    @property
    def disabled(self) -> frozenset[str]:
        names = os.environ.get("RECOM_DISABLE", "")
        return frozenset(self.disable) | {n.strip() for n in names.split(",") if n.strip()}


VARIABLES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
    "RECOM_CACHE_BYTES",
    "RECOM_CACHE_DIR",
    "RECOM_CPU_ISA",
    "RECOM_DISABLE",
    "RECOM_DUMP_DIR",
    "RECOM_HYPOTHESIS",
    "RECOM_SAMPLES",
    "RECOM_VERIFY",
    "XDG_CACHE_HOME",
)
"""Every environment variable that the package, its interpreter or its tests read; docs/options.md describes them."""


def environment() -> dict[str, str]:
    """The variables of `VARIABLES` that are set, and those that look like ours and are not."""
    return {k: v for k, v in sorted(os.environ.items()) if k in VARIABLES or k.startswith("RECOM_")}


def cuda_homes() -> list[pathlib.Path]:
    """Folders of CUDA toolkits that the environment names."""
    return [pathlib.Path(p) for n in ("CUDA_HOME", "CUDA_PATH") if (p := os.environ.get(n))]


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "bool": (lambda x: isinstance(x, bool), "True or False"),
    "int": (lambda x: isinstance(x, numbers.Integral) and not isinstance(x, bool), "an integer"),
    "float": (lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool), "a number"),
    "str": (lambda x: isinstance(x, (str, os.PathLike)), "a path"),
}


def _check_kind(name: str, kind: str, value: object) -> None:
    """Raises OptionError where an option is of another type than its annotation says."""
    kind, _, optional = kind.partition(" | ")
    if kind not in _KINDS or (optional and value is None):
        return
    fits, what = _KINDS[kind]
    if not fits(value):
        raise OptionError(
            f"Options.{name} is {what}{' or None' if optional else ''}, not {value!r}"
        )


def _integers(name: str, value: object) -> tuple[int, ...]:
    """A tuple of numbers, whatever iterable it was; buckets ascending."""
    try:
        found = tuple(operator.index(n) for n in value)  # type: ignore[attr-defined]
    except TypeError:
        raise OptionError(f"Options.{name} is a tuple of integers, not {value!r}") from None
    return tuple(sorted(set(found)))


def cxx_compiler() -> str:
    """The C++ compiler that the environment names, or ""."""
    return os.environ.get("CXX", "").strip()


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1", ""):
        raise OptionError(f"{name} is 0 or 1, not {value!r}")
    return value == "1"


def _user_cache() -> str | None:
    """recom_jax in the user's cache folder; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # relative ones are to be ignored, says the XDG specification
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "recom_jax") if os.path.isabs(base) else None
