"""CUDA text without a GPU: compiled as C++, its threads run as fibers (emulate.h), each access checked."""

from tests.cuda_emulation.build import (
    POINTERS,
    EmulationError,
    Kernel,
    Memory,
    kernel,
    memory,
    missing,
)
from tests.cuda_emulation.programs import (
    Compiled,
    Options,
    compiled,
    emulate,
    fill_table,
    interpret,
    packed,
)

__all__ = [
    "POINTERS",
    "Compiled",
    "EmulationError",
    "Kernel",
    "Memory",
    "Options",
    "compiled",
    "emulate",
    "fill_table",
    "interpret",
    "kernel",
    "memory",
    "missing",
    "packed",
]
