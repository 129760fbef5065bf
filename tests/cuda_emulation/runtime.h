// What the emulator's two halves share.

#ifndef RECOM_TESTS_RUNTIME_H_
#define RECOM_TESTS_RUNTIME_H_

#include <cstddef>
#include <cstdint>

#include "threads.h"

namespace emu {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kStack = 256 << 10;  // of a fiber; only touched pages cost memory

// A buffer of the call. `owner` has an entry a byte of a result: 1 + the thread that wrote it (24
// bits), and barriers that its block had passed (8 bits).
struct Buffer {
  uintptr_t base;
  uint64_t bytes;
  uint32_t* owner;  // null: read only
};

// memory.cc
void set_buffers(const Buffer* buffers, int n);
// Where the fibers' stacks and the fibers themselves are, and how many bytes.
void set_threads(uintptr_t stacks, size_t n_stacks, uintptr_t fibers, size_t n_fibers);

// runtime.cc: ends the launch with a message. `where` is an address in the kernel's text, or null.
[[noreturn]] void fail_at(const void* where, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
uint32_t running_thread();   // its number in the grid
uint32_t passed_barriers();  // by the running thread's block

}  // namespace emu

#endif  // RECOM_TESTS_RUNTIME_H_
