// The CPU's handlers. Also compiled against TensorFlow's headers, whose FFI is older than jaxlib's
// (csrc/tensorflow/library.cc): nothing in here may need a newer one, Python or CUDA.

#include "ffi_handler.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi_call.h"
#include "handover.h"
#include "interp.h"
#include "row_sums.h"
#if defined(__SANITIZE_THREAD__)
#include "packing_pool.h"
#endif

namespace recom {
namespace {

Executor executor_of(ffi::ThreadPool& pool) {
  const int threads = static_cast<int>(std::max<int64_t>(pool.num_threads(), 1));
#if defined(__SANITIZE_THREAD__)
  // XLA's pool hands tasks over by atomics of its own, which the sanitizer does not see.
  return packing::Helpers(threads);
#else
  Executor executor;
  executor.threads = threads;
  executor.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
  return executor;
#endif
}

// The C library maps anew in each call what is larger (glibc's largest M_MMAP_THRESHOLD), and a
// fault for each of its pages takes longer than all that is computed.
constexpr int64_t kMappedBytes = 32 << 20;

// Asks for pages of 2 MB for results that have none yet. They are written from end to end, so no
// memory is taken that would not be; where the kernel has none to give, nothing changes.
void ask_for_huge_pages(const std::vector<Buffer>& results) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  for (const Buffer& r : results) {
    int64_t bytes = element_size(r.dtype);
    for (int i = 0; i < r.rank; ++i) bytes *= r.dims[i];
    if (bytes <= kMappedBytes) continue;
    const auto data = reinterpret_cast<uintptr_t>(r.data);
    const uintptr_t begin = (data + kPage - 1) / kPage * kPage,
                    end = (data + bytes) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#else
  static_cast<void>(results);
#endif
}

ffi::Error fused(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 std::string_view program_bytes, std::string_view hash,
                 ffi::Span<const int64_t> binding) {
  return guarded([&]() -> ffi::Error {
    const auto program = cached_program(hash, program_bytes);
    std::vector<Buffer> physical, results;
    if (auto error = read_buffers(args, rets, &physical, &results)) return *error;
    ask_for_huge_pages(results);
    const Executor executor = executor_of(pool);
    const Borrowed borrowed(physical);
    run_program(*program, physical, results, binding.begin(), binding.size(), executor);
    return ffi::Error::Success();
  });
}

ffi::Error row_sums(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    std::string_view program_bytes, std::string_view hash,
                    ffi::Span<const int64_t> binding, ffi::Span<const int64_t> sums) {
  return guarded([&]() -> ffi::Error {
    const auto program = cached_program(hash, program_bytes);
    std::vector<Buffer> physical, results;
    if (auto error = read_buffers(args, rets, &physical, &results)) return *error;
    ask_for_huge_pages(results);
    const Executor executor = executor_of(pool);
    const Borrowed borrowed(physical);
    run_row_sums(*program, physical, results, binding.begin(), binding.size(), sums.begin(),
                 sums.size(), executor);
    return ffi::Error::Success();
  });
}

ffi::Error empty(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

XLA_FFI_DEFINE_HANDLER(kFused, fused,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("program")
                           .Attr<std::string_view>("hash")
                           .Attr<ffi::Span<const int64_t>>("binding"));
XLA_FFI_DEFINE_HANDLER(kRowSums, row_sums,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("program")
                           .Attr<std::string_view>("hash")
                           .Attr<ffi::Span<const int64_t>>("binding")
                           .Attr<ffi::Span<const int64_t>>("sums"));
XLA_FFI_DEFINE_HANDLER(kEmpty, empty, ffi::Ffi::Bind().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void* fused_v1_handler() { return reinterpret_cast<void*>(kFused); }
void* row_sums_v1_handler() { return reinterpret_cast<void*>(kRowSums); }
void* empty_v1_handler() { return reinterpret_cast<void*>(kEmpty); }

}  // namespace recom
