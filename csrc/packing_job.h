// Part of packing.h: a batch that is copied into its slot while the call that reads it is already
// on its way.
//
// The copies are cut into chunks in the order of the slot's bytes. Helpers, the thread that made
// the job and the handler of the call each take the first chunk that nobody has taken: so nobody
// waits but for a copy that a running thread is in the middle of, whether or not there are helpers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_stage.h"
#include "packing_copy.h"

namespace recom::packing {

class Job final : public StageWriter, public std::enable_shared_from_this<Job> {
 public:
  explicit Job(Plan plan);

  // Offers chunks to `threads - 1` helpers.
  void Start(int threads);
  bool Finished() const { return finished_.load() == chunks_; }
  // Copies what is left and waits for the rest. Throws what a copy threw; from then on nothing is
  // copied.
  void Join();

  int64_t Ready(int64_t from, int64_t least) override;

 private:
  bool RunOne();  // false: all chunks are taken
  void Await(int64_t chunk);
  void Rethrow();

  Plan plan_;
  const int64_t chunks_;
  std::atomic<int64_t> next_{0}, finished_{0};
  std::unique_ptr<std::atomic<bool>[]> done_;
  std::atomic<bool> failed_{false};
  std::atomic<int> waiting_{0};
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::exception_ptr error_;
};

// Tests only: every chunk's copy sleeps first; the chunk of that number throws (-1: none does).
void SetChunkDelay(int64_t microseconds);
void SetChunkFault(int64_t chunk);

}  // namespace recom::packing
