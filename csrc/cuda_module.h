// Kernels loaded on devices, plans uploaded to them, and the launch. Both are kept for the life of
// the process: a captured CUDA graph may refer to them at any later time, and nothing tells when it
// is gone. What they take is counted (CudaStats).

#ifndef RECOM_JAX_CSRC_CUDA_MODULE_H_
#define RECOM_JAX_CSRC_CUDA_MODULE_H_

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda_driver.h"
#include "plan.h"

namespace recom {

// A call's attributes and buffers, as XLA hands them over.
struct CudaArguments {
  std::string_view program, hash, launch, ptx, digest;
  const int64_t* layout;
  int64_t n_layout;
  int64_t pointers;
  std::vector<Buffer> operands, results;
  int device;  // ordinal
  // Where pointers is 0: memory of this execution for the addresses of all buffers, a result of the
  // call that nobody reads. Not of the prepared call, which runs on several streams at once.
  Buffer table{};
  std::string_view key{};  // a digest of launch and layout; empty: they are compared themselves
};

class PreparedCall;

// What the call needs on its device, loaded and uploaded if this is the first call of its kind. Not
// to be called while a graph is being captured unless `find_prepared` finds it. Throws ProgramError
// or CudaError.
const PreparedCall& prepare_call(const CudaArguments& arguments);

// What `prepare_call` made, or null. Cheap: it compares attributes and shapes, and takes no lock
// where the thread has run the call before.
const PreparedCall* find_prepared(const CudaArguments& arguments);

// Puts the call's kernels on the stream. Allocates nothing, waits for nothing.
void launch_call(const PreparedCall& call, const CudaArguments& arguments, cuda::Stream stream);

struct CudaStats {
  std::atomic<int64_t> modules_loaded{0}, plans_uploaded{0}, device_bytes{0}, kernel_launches{0};
  // Calls prepared in `execute` since XLA had not run `initialize`.
  std::atomic<int64_t> late_preparations{0};
};
CudaStats& cuda_stats();

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_MODULE_H_
