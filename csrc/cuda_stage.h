// Staging on a GPU: what the FFI target recom_stage_v1 copies, and page-locked host memory.
//
// A jitted function cannot be handed a host buffer without JAX copying it its own way. It is handed
// a slot's *token* instead, a tiny array that stays on the device for as long as the slot's ring
// lives, and the target's handler finds the slot by the token's address.

#ifndef RECOM_JAX_CSRC_CUDA_STAGE_H_
#define RECOM_JAX_CSRC_CUDA_STAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cuda_driver.h"
#include "deliver.h"
#include "stage_upload.h"

namespace recom {

// Who still writes a slot's bytes.
class StageWriter {
 public:
  virtual ~StageWriter() = default;
  // Returns once all bytes are final, and were issued to the device if they are uploaded. Writes
  // itself what nobody is writing. Throws where that failed.
  virtual void Complete() = 0;
};

// A slot's writer, null where its bytes are final.
class StageFeed {
 public:
  void Set(std::shared_ptr<StageWriter> writer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    writer_ = std::move(writer);
  }
  std::shared_ptr<StageWriter> Get() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return writer_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<StageWriter> writer_;
};

struct StageSource {
  const char* host = nullptr;
  int64_t nbytes = 0;
  const void* owner = nullptr;  // the ring
  std::shared_ptr<StageFeed> feed;
  std::shared_ptr<Upload> upload;  // null: the call copies the slot itself
  std::shared_ptr<Delivery> delivery = std::make_shared<Delivery>();
};

// A later entry at the same address replaces an older one: the older token is gone then.
void stage_register(uintptr_t token, const StageSource& source);
// Forgets what `owner` registered and nobody has replaced.
void stage_forget(const void* owner);

// The source of a call whose pack is that large. Throws std::runtime_error where the token is
// unknown, so that no call computes with bytes of another batch.
StageSource stage_source(const void* token, int64_t nbytes);

// Page-locks memory for every device; "" or why it could not be.
std::string pin_memory(void* data, size_t nbytes, int device);
void unpin_memory(void* data);

// What a call wants of its slot.
struct StageWish {
  char* token;  // the slot's buffer on the device
  bool whole;   // the call reads that buffer itself
  void* part;   // gets a copy of `nbytes` bytes from `begin` on; null: none is wanted
  int64_t begin, nbytes;
};

// Gives the call what it wants, on XLA's stream of the device.
void stage_copy(const StageWish& wish, const StageSource& source, int device, cuda::Stream stream);
// The same where device memory is host memory: for tests without a GPU.
void stage_copy_on_host(const StageWish& wish, const StageSource& source);
// Tests only: such a copy sleeps first, so that a slot written too early shows.
void set_stage_delay(int64_t microseconds);

struct StageStats {
  int64_t copies, sources;
};
StageStats stage_stats();

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_STAGE_H_
