"""recom_jax: hundreds of embedding columns of a JAX model as one fused kernel behind one XLA custom call."""

from __future__ import annotations

from recom_jax import errors, export, ffi, sparse, strings
from recom_jax.api import OptimizedFunction, optimize, stats
from recom_jax.errors import (
    ArgumentError,
    BatchError,
    BatchTypeError,
    BindError,
    BindTypeError,
    BucketError,
    DeletedError,
    EncodeError,
    ExportError,
    LeaseError,
    OptionError,
    PlatformError,
    RecomError,
    SparseError,
    StringError,
    TensorFlowError,
    TraceError,
    VerifyError,
)
from recom_jax.explain import ColumnReport, Report
from recom_jax.options import Options
from recom_jax.version import __version__

ffi.register()

__all__ = [
    "ArgumentError",
    "BatchError",
    "BatchTypeError",
    "BindError",
    "BindTypeError",
    "BucketError",
    "ColumnReport",
    "DeletedError",
    "EncodeError",
    "ExportError",
    "LeaseError",
    "OptimizedFunction",
    "OptionError",
    "Options",
    "PlatformError",
    "RecomError",
    "Report",
    "SparseError",
    "StringError",
    "TensorFlowError",
    "TraceError",
    "VerifyError",
    "__version__",
    "errors",
    "export",
    "ffi",
    "optimize",
    "sparse",
    "stats",
    "strings",
]
