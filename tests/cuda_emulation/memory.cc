// The kernel's text is compiled with -fsanitize=kernel-address,undefined; their calls end here.
// Each access must lie inside one buffer of the call, a fiber's stack or a loaded object's own
// data. Results are write only, and a byte of them belongs to the first thread that writes it,
// until its whole block has met at a barrier.

#include <link.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime.h"

namespace emu {
namespace {

std::vector<Buffer> known;  // ascending, disjoint
const Buffer* last = nullptr;
uintptr_t stacks_base = 0, fibers_base = 0;
size_t stacks_bytes = 0, fibers_bytes = 0;
std::vector<std::pair<uintptr_t, uintptr_t>> segments;  // of loaded objects

int add_segments(dl_phdr_info* info, size_t, void*) {
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    const auto& h = info->dlpi_phdr[k];
    const uintptr_t base = info->dlpi_addr + h.p_vaddr;
    if (h.p_type == PT_LOAD) segments.emplace_back(base, base + h.p_memsz);
  }
  return 0;
}

bool in_segment(uintptr_t address, size_t bytes) {
  for (const auto& [begin, end] : segments) {
    if (address >= begin && address + bytes <= end) return true;
  }
  return false;
}

const Buffer* find(uintptr_t address, size_t bytes) {
  auto after = std::upper_bound(known.begin(), known.end(), address,
                                [](uintptr_t a, const Buffer& b) { return a < b.base; });
  if (after == known.begin()) return nullptr;
  const Buffer& b = *(after - 1);
  return address - b.base <= b.bytes && b.bytes - (address - b.base) >= bytes ? &b : nullptr;
}

// Whether a write came before a barrier that the running thread's block has passed since.
constexpr int kThreadBits = 24;
constexpr uint32_t kThreadMask = (1u << kThreadBits) - 1;
bool settled(uint32_t owner) {
  const uint32_t size = emu_self->block_dim.x;
  return (owner & kThreadMask) - 1 == running_thread() ||
         (((owner & kThreadMask) - 1) / size == running_thread() / size &&
          owner >> kThreadBits != (passed_barriers() & 0xff));
}

[[noreturn]] void outside(uintptr_t address, size_t bytes, bool write, const void* where) {
  const char* what = write ? "write" : "read";
  auto after = std::upper_bound(known.begin(), known.end(), address,
                                [](uintptr_t a, const Buffer& b) { return a < b.base; });
  if (after == known.begin()) {
    fail_at(where, "%s of %zu bytes at %#zx, in no buffer", what, bytes, address);
  }
  const Buffer& b = *(after - 1);
  fail_at(where, "%s of %zu bytes at offset %zu of a buffer of %zu (the nearest one, %s)", what,
          bytes, address - b.base, static_cast<size_t>(b.bytes),
          b.owner ? "a result" : "an operand");
}

inline void check(uintptr_t address, size_t bytes, bool write, const void* where) {
  if (address - stacks_base < stacks_bytes) return;
  const Buffer* b = last;
  if (b == nullptr || address < b->base || address - b->base > b->bytes ||
      b->bytes - (address - b->base) < bytes) {
    // threadIdx and its like
    if (address == reinterpret_cast<uintptr_t>(&emu_self)) return;
    if (address - fibers_base < fibers_bytes) return;
    b = find(address, bytes);
    if (b == nullptr) {
      if (!in_segment(address, bytes)) outside(address, bytes, write, where);
      return;
    }
    last = b;
  }
  if (!write && b->owner == nullptr) return;
  if (!write) {
    fail_at(where, "read of %zu bytes at offset %zu of a result", bytes, address - b->base);
  }
  if (b->owner == nullptr) {
    fail_at(where, "write of %zu bytes at offset %zu of an operand", bytes, address - b->base);
  }
  const uint32_t me = (passed_barriers() & 0xff) << kThreadBits | (running_thread() + 1);
  for (size_t k = 0; k < bytes; ++k) {
    uint32_t& owner = b->owner[address - b->base + k];
    if (owner != 0 && owner != me && !settled(owner)) {
      fail_at(where, "writes byte %zu of a result that thread %u of the grid wrote",
              address - b->base + k, (owner & kThreadMask) - 1);
    }
    owner = me;
  }
}

struct Location {
  const char* file;
  uint32_t line, column;
};

[[noreturn]] void undefined(const void* data, const char* what, const void* where) {
  const auto* at = static_cast<const Location*>(data);
  fail_at(where, "%s at %s:%u:%u", what, at->file ? at->file : "?", at->line, at->column);
}

}  // namespace

void set_buffers(const Buffer* buffers, int n) {
  known.assign(buffers, buffers + n);
  std::sort(known.begin(), known.end(),
            [](const Buffer& a, const Buffer& b) { return a.base < b.base; });
  last = nullptr;
  segments.clear();
  dl_iterate_phdr(add_segments, nullptr);
}

void set_threads(uintptr_t stacks, size_t n_stacks, uintptr_t fibers, size_t n_fibers) {
  stacks_base = stacks;
  stacks_bytes = n_stacks;
  fibers_base = fibers;
  fibers_bytes = n_fibers;
}

extern "C" {

#define EMU_API __attribute__((visibility("default")))
#define HERE __builtin_return_address(0)
#define EMU_ACCESS(n)                                                              \
  EMU_API void __asan_load##n##_noabort(uintptr_t a) { check(a, n, false, HERE); } \
  EMU_API void __asan_store##n##_noabort(uintptr_t a) { check(a, n, true, HERE); }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
EMU_API void __asan_loadN_noabort(uintptr_t a, size_t n) { check(a, n, false, HERE); }
EMU_API void __asan_storeN_noabort(uintptr_t a, size_t n) { check(a, n, true, HERE); }
EMU_API void __asan_handle_no_return() {}

struct Mismatch {
  Location at;
  const void* type;
  unsigned char log_alignment, kind;
};

EMU_API void __ubsan_handle_type_mismatch_v1(Mismatch* data, uintptr_t p) {
  const uintptr_t alignment = uintptr_t(1) << data->log_alignment;
  if (p == 0) undefined(data, "access through a null pointer", HERE);
  if (p % alignment != 0) {
    fail_at(HERE, "access at %#zx, no multiple of %zu, at %s:%u:%u", p, alignment, data->at.file,
            data->at.line, data->at.column);
  }
  undefined(data, "access to too small an object", HERE);
}

#define EMU_UNDEFINED(name, what) \
  EMU_API void __ubsan_handle_##name(void* data) { undefined(data, what, HERE); }
EMU_UNDEFINED(add_overflow, "signed overflow of an addition")
EMU_UNDEFINED(sub_overflow, "signed overflow of a subtraction")
EMU_UNDEFINED(mul_overflow, "signed overflow of a multiplication")
EMU_UNDEFINED(negate_overflow, "signed overflow of a negation")
EMU_UNDEFINED(divrem_overflow, "division by zero, or overflow of a division")
EMU_UNDEFINED(shift_out_of_bounds, "shift by too much, or of a negative number")
EMU_UNDEFINED(out_of_bounds, "index outside an array")
EMU_UNDEFINED(builtin_unreachable, "unreachable code")
EMU_UNDEFINED(missing_return, "function without a returned value")
EMU_UNDEFINED(float_cast_overflow, "cast of a float that the integer doesn't hold")
EMU_UNDEFINED(load_invalid_value, "bool or enum without a valid value")
EMU_UNDEFINED(pointer_overflow, "overflow of a pointer")
EMU_UNDEFINED(invalid_builtin, "zero given to clz or ctz")
EMU_UNDEFINED(nonnull_arg, "null argument")

}  // extern "C"
}  // namespace emu
