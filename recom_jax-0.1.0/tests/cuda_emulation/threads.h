// What a kernel's text and the emulator's runtime agree on.

#ifndef RECOM_TESTS_THREADS_H_
#define RECOM_TESTS_THREADS_H_

namespace emu {

struct Dim3 {
  unsigned x, y, z;
};

struct Thread {  // what the running fiber is
  Dim3 thread, block, block_dim, grid_dim;
};

extern "C" {
extern Thread* emu_self;
[[noreturn]] void emu_fail(const char* what);
void emu_block_barrier(int kind);
int emu_block_vote(int kind, int predicate);
unsigned long long emu_warp(int kind, unsigned mask, unsigned long long value, int arg, int width);
}

enum Kind : int {
  kBarrier,
  kBarrierAnd,
  kBarrierOr,
  kBarrierCount,
  kSyncWarp,
  kShuffleIndex,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kMatchAny,
  kReduceAdd,
  kReduceMin,
  kReduceMax,
  kReduceAnd,
  kReduceOr,
  kReduceXor,
};

}  // namespace emu

#endif  // RECOM_TESTS_THREADS_H_
