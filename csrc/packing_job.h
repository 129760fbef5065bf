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
  // `upload`: gets the slot's bytes in pieces, as they are written; may be null.
  explicit Job(Plan plan, std::shared_ptr<Upload> upload = nullptr);

  // Offers chunks to `threads - 1` helpers. `spin_us`: see Offer.
  void Start(int threads, int64_t spin_us = 0);
  bool Finished() const { return finished_.load() == chunks_ && uploaded_; }
  // Copies what is left and waits for the rest. From then on nobody reads the leaves, and nobody
  // but the device the slot. Throws what a copy threw; nothing is copied after that.
  void Complete() override;

 private:
  bool RunOne();  // false: all chunks are taken
  void Await(const std::atomic<bool>& flag);
  void Pump();  // any number of times
  void Fail();  // with the exception being handled
  void Rethrow();

  Plan plan_;
  const int64_t chunks_;
  std::atomic<int64_t> next_{0}, finished_{0};
  std::unique_ptr<std::atomic<bool>[]> done_;
  std::atomic<bool> failed_{false};
  const std::shared_ptr<Upload> upload_;
  std::atomic<bool> uploaded_;
  std::atomic<int> pumps_{0};         // 0: nobody issues pieces
  int64_t written_ = 0, issued_ = 0;  // whoever issues: chunks, bytes
  std::atomic<int> waiting_{0};
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::exception_ptr error_;
};

// Pieces uploaded while a batch was being packed, since the process began.
int64_t StagedPieces();
// How many bytes make a piece.
void SetPieceBytes(int64_t nbytes);

// Tests only: every chunk's copy sleeps first; the chunk of that number throws (-1: none does).
void SetChunkDelay(int64_t microseconds);
void SetChunkFault(int64_t chunk);

}  // namespace recom::packing
