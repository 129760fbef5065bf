// Host packing: a batch's numpy leaves, or a model's tables, gathered into one *pack*
// (docs/program_format.md, "Binding"): a header of int64 words (the first is program.h's
// kPackMagic), then every entry's row-major data, each at a multiple of 64 bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

// Dims one entry's header has room for.
constexpr int kPackMaxRank = 4;
// Every entry starts at a multiple of this; XLA:CPU aliases (does not copy) host memory aligned so.
constexpr int64_t kPackAlign = 64;

// Adds Layout, Packer, Slot, SlotRing, build_arena, arena_bytes and live_pack_bytes to `module`.
void bind_packing(pybind11::module_& module);
