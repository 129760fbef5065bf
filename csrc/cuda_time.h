// Times a kernel's launches with device events, for benchmarks and for tuning. Not on any serving
// path.

#ifndef RECOM_JAX_CSRC_CUDA_TIME_H_
#define RECOM_JAX_CSRC_CUDA_TIME_H_

#include <cstdint>
#include <string_view>
#include <vector>

namespace recom {

// One launch: tiles, column words, and addresses of the buffers that it names; and, where tiles
// search, those of recom_mend behind it.
struct TimedLaunch {
  std::string_view tiles, words;
  std::vector<uint64_t> buffers;
  std::string_view mends{};
};

// Milliseconds per call, of `repeats` runs of `calls` calls each (a call is all launches, one after
// the other). Before each run, `flush_bytes` of device memory are overwritten, so that nothing is
// left in a cache of that size. `shared_percent`: of a multiprocessor's shared memory (-1: as calls
// have it, -2: as the driver likes). Throws CudaError.
std::vector<double> time_launches(std::string_view image, int pointers,
                                  const std::vector<TimedLaunch>& launches, int device, int calls,
                                  int repeats, int64_t flush_bytes, int shared_percent = -1);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_TIME_H_
