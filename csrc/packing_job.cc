#include "packing_job.h"

#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "packing_pool.h"

namespace recom::packing {

namespace {

constexpr int kSpins = 2000;  // some 50 us: a chunk takes 10

std::atomic<int64_t> delay_us{0}, fault_at{-1};

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Job::Job(Plan plan)
    : plan_(std::move(plan)),
      chunks_(plan_.Cut()),
      done_(std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(chunks_))) {
  for (int64_t i = 0; i < chunks_; ++i) done_[i].store(false, std::memory_order_relaxed);
}

void Job::Start(int threads) {
  const int64_t helpers = threads - 1 < chunks_ - 1 ? threads - 1 : chunks_ - 1;
  if (helpers < 1) return;
  Offer(static_cast<int>(helpers), [self = shared_from_this()] {
    while (self->RunOne()) {
    }
  });
}

bool Job::RunOne() {
  if (next_.load(std::memory_order_relaxed) >= chunks_) return false;
  const int64_t at = next_.fetch_add(1);
  if (at >= chunks_) return false;
  try {
    if (const int64_t us = delay_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    if (fault_at == at) throw std::runtime_error("a copy failed, as a test asked for");
    if (!failed_) plan_.RunChunk(at);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
    failed_ = true;
  }
  done_[at].store(true);
  ++finished_;
  if (waiting_.load() > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  return true;
}

// Of a chunk that somebody has taken.
void Job::Await(int64_t chunk) {
  for (int spin = 0; spin < kSpins && !done_[chunk].load(std::memory_order_acquire); ++spin)
    Pause();
  if (done_[chunk].load()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiting_;
  changed_.wait(lock, [&] { return done_[chunk].load(); });
  --waiting_;
}

int64_t Job::Ready(int64_t from, int64_t least) {
  int64_t chunk = plan_.ChunkAt(from);
  for (; chunk < chunks_; ++chunk) {
    if (done_[chunk].load(std::memory_order_acquire)) continue;
    if (plan_.ChunkBegin(chunk) - from >= least) break;
    while (!done_[chunk].load(std::memory_order_acquire)) {
      if (!RunOne()) Await(chunk);
    }
  }
  if (failed_) Rethrow();
  return plan_.ChunkBegin(chunk);
}

void Job::Join() {
  while (RunOne()) {
  }
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) Await(chunk);
  if (failed_) Rethrow();
}

void Job::Rethrow() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::rethrow_exception(error_);
}

void SetChunkDelay(int64_t microseconds) { delay_us = microseconds; }
void SetChunkFault(int64_t chunk) { fault_at = chunk; }

}  // namespace recom::packing
