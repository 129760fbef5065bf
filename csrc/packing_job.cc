#include "packing_job.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "packing_pool.h"

namespace recom::packing {

namespace {

constexpr int kSpins = 2000;  // some 50 us: a chunk takes 10

std::atomic<int64_t> delay_us{0}, fault_at{-1}, pieces{0};
// To issue a copy takes 2 us, as long as it takes to copy 100 KB.
std::atomic<int64_t> piece_bytes{int64_t{1} << 20};

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Job::Job(Plan plan, std::shared_ptr<Upload> upload)
    : plan_(std::move(plan)),
      chunks_(plan_.Cut()),
      done_(std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(chunks_))),
      upload_(std::move(upload)),
      uploaded_(upload_ == nullptr) {
  for (int64_t i = 0; i < chunks_; ++i) done_[i].store(false, std::memory_order_relaxed);
}

void Job::Start(int threads, int64_t spin_us) {
  const int64_t most = upload_ ? std::max<int64_t>(chunks_ - 1, 1) : chunks_ - 1;
  const int64_t helpers = std::min<int64_t>(threads - 1, most);
  if (helpers < 1) return;
  const auto help = [self = shared_from_this()] {
    while (self->RunOne()) {
    }
    self->Pump();  // where there is nothing to copy
  };
  Offer(static_cast<int>(helpers), help, spin_us);
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
    Fail();
  }
  done_[at].store(true);
  ++finished_;
  Pump();
  if (waiting_.load() > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  return true;
}

// Of what a running thread is about to do.
void Job::Await(const std::atomic<bool>& flag) {
  for (int spin = 0; spin < kSpins && !flag.load(std::memory_order_acquire); ++spin) Pause();
  if (flag.load()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiting_;
  changed_.wait(lock, [&] { return flag.load(); });
  --waiting_;
}

// Issues what can be: by one thread at a time, which looks again if others have come by meanwhile.
void Job::Pump() {
  if (uploaded_ || pumps_.fetch_add(1) != 0) return;
  for (int seen = pumps_;;) {
    while (written_ < chunks_ && done_[written_].load(std::memory_order_acquire)) ++written_;
    const int64_t at = plan_.ChunkBegin(written_);
    const bool last = written_ == chunks_;
    if (!uploaded_ && (last || at - issued_ >= piece_bytes)) {
      try {
        if (!failed_) {
          upload_->Issue(issued_, at, last);
          ++pieces;
        }
      } catch (...) {
        Fail();
      }
      issued_ = at;
      if (last) {
        uploaded_ = true;
        const std::lock_guard<std::mutex> lock(mutex_);
        changed_.notify_all();
      }
    }
    const int before = pumps_.fetch_sub(seen);
    if (before == seen) return;
    seen = before - seen;
  }
}

void Job::Complete() {
  while (RunOne()) {
  }
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) Await(done_[chunk]);
  Pump();  // where there was nothing to copy
  Await(uploaded_);
  if (failed_) Rethrow();
}

void Job::Fail() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) error_ = std::current_exception();
  failed_ = true;
}

void Job::Rethrow() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::rethrow_exception(error_);
}

int64_t StagedPieces() { return pieces; }
void SetPieceBytes(int64_t nbytes) { piece_bytes = nbytes; }
void SetChunkDelay(int64_t microseconds) { delay_us = microseconds; }
void SetChunkFault(int64_t chunk) { fault_at = chunk; }

}  // namespace recom::packing
