// Blocks one after the other, the threads of a block as fibers. A warp runs until each of its lanes
// has ended or waits for the block; what can't go on is an error that says who waits for whom.

#include "runtime.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu {
namespace {

enum State : int { kReady, kAtWarp, kAtBlock, kDone };

struct Fiber {
  Thread self;
  ucontext_t context;  // first run, and every switch where there is no assembly for it
  void* stack_pointer;
  State state;
  int kind, arg, width, lane;
  unsigned mask;
  unsigned long long value;
};

const char* const kNames[] = {
    "__syncthreads",     "__syncthreads_and", "__syncthreads_or",  "__syncthreads_count",
    "__syncwarp",        "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",
    "__shfl_xor_sync",   "__ballot_sync",     "__any_sync",        "__all_sync",
    "__match_any_sync",  "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
    "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync"};

Fiber fibers[kMaxThreads];
char* stacks = nullptr;
int n_threads = 0;
Fiber* current = nullptr;
void (*entry)(const void*) = nullptr;
const void* params = nullptr;
char message[4096];
bool failed = false;

// ---- switching
// -------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
void* scheduler_stack = nullptr;
extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");

void to_scheduler() { emu_switch(&current->stack_pointer, scheduler_stack); }
void to_fiber(Fiber& f) { emu_switch(&scheduler_stack, f.stack_pointer); }

void fiber_main() {
  entry(params);
  current->state = kDone;
  to_scheduler();
  abort();
}

void prepare(Fiber& f, char* stack) {
  void** top = reinterpret_cast<void**>(stack + kStack - 64);
  *--top = nullptr;  // keeps the alignment of a function's entry
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int k = 0; k < 6; ++k) *--top = nullptr;
  f.stack_pointer = top;
}
#else
ucontext_t scheduler_context;
void to_scheduler() { swapcontext(&current->context, &scheduler_context); }
void to_fiber(Fiber& f) { swapcontext(&scheduler_context, &f.context); }

void fiber_main() {
  entry(params);
  current->state = kDone;
  to_scheduler();
}

void prepare(Fiber& f, char* stack) {
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = stack;
  f.context.uc_stack.ss_size = kStack;
  f.context.uc_link = nullptr;
  makecontext(&f.context, &fiber_main, 0);
}
#endif

void run_fiber(Fiber& f) {
  current = &f;
  emu_self = &f.self;
  to_fiber(f);
}

void note(const char* format, ...) {
  if (failed) return;
  failed = true;
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof(message), format, args);
  va_end(args);
}

// ---- warps
// -----------------------------------------------------------------------------------------------------

int describe(char* out, size_t size, const Fiber& f) {
  if (f.state == kDone) return snprintf(out, size, "thread %d has ended", f.self.thread.x);
  if (f.state == kReady) return snprintf(out, size, "thread %d runs", f.self.thread.x);
  if (f.state == kAtBlock) {
    return snprintf(out, size, "thread %d is in %s", f.self.thread.x, kNames[f.kind]);
  }
  return snprintf(out, size, "thread %d is in %s(mask %#x, width %d, %d bytes)", f.self.thread.x,
                  kNames[f.kind], f.mask, f.width & 255, f.width >> 8);
}

void disagree(const Fiber& a, const Fiber& b) {
  char x[200], y[200];
  describe(x, sizeof(x), a);
  describe(y, sizeof(y), b);
  note("divergent barrier in block %u: %s, but %s", a.self.block.x, x, y);
}

unsigned long long source(Fiber* warp, const Fiber& f) {
  const int width = f.width & 255, segment = f.lane & ~(width - 1);
  int from = f.lane;
  switch (f.kind) {
    case kShuffleIndex:
      from = segment + (f.arg & (width - 1));
      break;
    case kShuffleUp:
      if (f.lane - f.arg >= segment) from = f.lane - f.arg;
      break;
    case kShuffleDown:
      if (f.lane + f.arg < segment + width) from = f.lane + f.arg;
      break;
    default:
      if ((f.lane ^ f.arg) < segment + width) from = f.lane ^ f.arg;
  }
  if (from < 0 || from >= kWarp || !(f.mask >> from & 1u)) {
    note("block %u thread %u: %s reads lane %d, which mask %#x doesn't name", f.self.block.x,
         f.self.thread.x, kNames[f.kind], from, f.mask);
    return 0;
  }
  return warp[from].value;
}

// All lanes of `first`'s mask are here: exchanges their values.
void complete(Fiber* warp, unsigned mask, int kind) {
  unsigned long long result[kWarp] = {};
  unsigned ballot = 0;
  unsigned sum = 0, low = ~0u, high = 0, all = ~0u, any = 0, odd = 0;
  for (int k = 0; k < kWarp; ++k) {
    if (!(mask >> k & 1u)) continue;
    const unsigned v = static_cast<unsigned>(warp[k].value);
    if (v & 1u) ballot |= 1u << k;
    sum += v, all &= v, any |= v, odd ^= v;
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  for (int k = 0; k < kWarp; ++k) {
    if (!(mask >> k & 1u)) continue;
    switch (kind) {
      case kShuffleIndex:
      case kShuffleUp:
      case kShuffleDown:
      case kShuffleXor:
        result[k] = source(warp, warp[k]);
        break;
      case kMatchAny:
        for (int j = 0; j < kWarp; ++j) {
          if (mask >> j & 1u && warp[j].value == warp[k].value) result[k] |= 1ull << j;
        }
        break;
      case kBallot:
        result[k] = ballot;
        break;
      case kAny:
        result[k] = ballot != 0;
        break;
      case kAll:
        result[k] = ballot == mask;
        break;
      case kReduceAdd:
        result[k] = sum;
        break;
      case kReduceMin:
        result[k] = low;
        break;
      case kReduceMax:
        result[k] = high;
        break;
      case kReduceAnd:
        result[k] = all;
        break;
      case kReduceOr:
        result[k] = any;
        break;
      case kReduceXor:
        result[k] = odd;
        break;
      default:
        break;
    }
  }
  for (int k = 0; k < kWarp; ++k) {
    if (!(mask >> k & 1u)) continue;
    warp[k].value = result[k];
    warp[k].state = kReady;
  }
}

// Lets groups go that are complete; false if there is none.
bool release(Fiber* warp, int lanes) {
  bool any = false;
  for (int k = 0; k < lanes && !failed; ++k) {
    Fiber& f = warp[k];
    if (f.state != kAtWarp) continue;
    bool here = true;
    for (int j = 0; j < kWarp && here; ++j) {
      if (!(f.mask >> j & 1u)) continue;
      here = j < lanes && warp[j].state == kAtWarp && warp[j].mask == f.mask &&
             warp[j].kind == f.kind && warp[j].width == f.width;
    }
    if (!here) continue;
    complete(warp, f.mask, f.kind);
    any = true;
  }
  return any;
}

void run_warp(Fiber* warp, int lanes, int order) {
  while (!failed) {
    for (int k = 0; k < lanes && !failed; ++k) {
      Fiber& f = warp[(order & 1) ? lanes - 1 - k : k];
      if (f.state == kReady) run_fiber(f);
    }
    if (failed || !release(warp, lanes)) break;
  }
  for (int k = 0; k < lanes && !failed; ++k) {
    if (warp[k].state != kAtWarp) continue;
    for (int j = 0; j < kWarp; ++j) {
      if (!(warp[k].mask >> j & 1u)) continue;
      if (j >= lanes) {
        note("mask %#x names lane %d of a warp of %d", warp[k].mask, j, lanes);
      } else if (warp[j].state != kAtWarp || warp[j].kind != warp[k].kind ||
                 warp[j].mask != warp[k].mask || warp[j].width != warp[k].width) {
        disagree(warp[k], warp[j]);
        break;
      }
    }
  }
}

// ---- blocks
// ----------------------------------------------------------------------------------------------------

uint32_t barriers = 0;  // that the running block has passed

void run_block(int order) {
  barriers = 0;
  const int warps = (n_threads + kWarp - 1) / kWarp;
  while (!failed) {
    for (int w = 0; w < warps && !failed; ++w) {
      const int k = (order & 2) ? warps - 1 - w : w;
      run_warp(fibers + k * kWarp, n_threads - k * kWarp < kWarp ? n_threads - k * kWarp : kWarp,
               order);
    }
    if (failed) return;
    bool all_done = true;
    int votes = 0;
    for (int k = 0; k < n_threads; ++k) {
      all_done = all_done && fibers[k].state == kDone;
      votes += fibers[k].value != 0;
      if (fibers[k].state != fibers[0].state ||
          (fibers[k].state == kAtBlock && fibers[k].kind != fibers[0].kind)) {
        disagree(fibers[k], fibers[0]);
        return;
      }
    }
    if (all_done) return;
    ++barriers;
    for (int k = 0; k < n_threads; ++k) {
      Fiber& f = fibers[k];
      f.value = f.kind == kBarrierAnd  ? votes == n_threads
                : f.kind == kBarrierOr ? votes != 0
                                       : static_cast<unsigned long long>(votes);
      f.state = kReady;
    }
  }
}

void make_stacks() {
  if (stacks != nullptr) return;
  void* p = mmap(nullptr, kStack * kMaxThreads, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  stacks = static_cast<char*>(p);
  // A page without access below each stack: an overflow is no silent damage to a neighbour.
  for (int k = 0; k < kMaxThreads; ++k) mprotect(stacks + k * kStack, 4096, PROT_NONE);
}

}  // namespace

uint32_t running_thread() {
  const Thread& t = current->self;
  return t.block.x * t.block_dim.x + t.thread.x;
}

uint32_t passed_barriers() { return barriers; }

void fail_at(const void* where, const char* format, ...) {
  if (!failed) {
    failed = true;
    const Thread& t = current->self;
    size_t n = static_cast<size_t>(
        snprintf(message, sizeof(message), "block %u thread %u: ", t.block.x, t.thread.x));
    va_list args;
    va_start(args, format);
    n += static_cast<size_t>(vsnprintf(message + n, sizeof(message) - n, format, args));
    va_end(args);
    Dl_info info;
    if (where != nullptr && n < sizeof(message) && dladdr(where, &info) != 0) {
      snprintf(message + n, sizeof(message) - n, " @%s+%#zx", info.dli_fname,
               static_cast<size_t>(static_cast<const char*>(where) -
                                   static_cast<const char*>(info.dli_fbase)) -
                   1);
    }
  }
  to_scheduler();  // never returns: the fiber is left where it is
  abort();
}

extern "C" {

#define EMU_API __attribute__((visibility("default")))

EMU_API Thread* emu_self = nullptr;

EMU_API void emu_fail(const char* what) { fail_at(__builtin_return_address(0), "%s", what); }

EMU_API int emu_block_vote(int kind, int predicate) {
  current->state = kAtBlock;
  current->kind = kind;
  current->value = predicate != 0;
  to_scheduler();
  return static_cast<int>(current->value);
}

EMU_API void emu_block_barrier(int kind) { emu_block_vote(kind, 0); }

EMU_API unsigned long long emu_warp(int kind, unsigned mask, unsigned long long value, int arg,
                                    int width) {
  Fiber& f = *current;
  if (!(mask >> f.lane & 1u)) {
    fail_at(__builtin_return_address(0), "%s with mask %#x, which doesn't name the caller's lane",
            kNames[kind], mask);
  }
  const int w = width & 255;
  if (w < 1 || w > kWarp || (w & (w - 1)) != 0) {
    fail_at(__builtin_return_address(0), "%s of width %d", kNames[kind], w);
  }
  f.state = kAtWarp;
  f.kind = kind;
  f.mask = mask;
  f.value = value;
  f.arg = arg;
  f.width = width;
  to_scheduler();
  return f.value;
}

// Runs a launch. `order` picks in which order threads take their turns: bit 0 reverses lanes, bit 1
// warps. Returns the first error, or null.
EMU_API const char* emu_run(void (*kernel)(const void*), const void* kernel_params, int grid,
                            int block, const Buffer* buffers, int n_buffers, unsigned char* shared,
                            size_t shared_bytes, int order) {
  if (block < 1 || block > kMaxThreads) return "a block of too many threads";
  make_stacks();
  set_threads(reinterpret_cast<uintptr_t>(stacks), kStack * kMaxThreads,
              reinterpret_cast<uintptr_t>(fibers), sizeof(fibers));
  set_buffers(buffers, n_buffers);
  entry = kernel;
  params = kernel_params;
  n_threads = block;
  failed = false;
  for (int b = 0; b < grid && !failed; ++b) {
    if (shared_bytes != 0) memset(shared, 0xA5, shared_bytes);
    for (int t = 0; t < block; ++t) {
      Fiber& f = fibers[t];
      f.self = {{static_cast<unsigned>(t), 0, 0},
                {static_cast<unsigned>(b), 0, 0},
                {static_cast<unsigned>(block), 1, 1},
                {static_cast<unsigned>(grid), 1, 1}};
      f.state = kReady;
      f.lane = t % kWarp;
      f.value = 0;
      prepare(f, stacks + t * kStack);
    }
    run_block(order);
  }
  return failed ? message : nullptr;
}

}  // extern "C"
}  // namespace emu
