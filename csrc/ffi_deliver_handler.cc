// The handlers of deliver.h.

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda_stage.h"
#include "ffi_call.h"
#include "ffi_handler.h"

namespace recom {
namespace {

// Operands: the token, something that says the slot was read, the results.
void deliver(ffi::RemainingArgs args, int64_t nbytes, cuda::Stream stream) {
  std::vector<std::pair<const void*, int64_t>> results;
  const void* token = nullptr;
  for (size_t k = 0; k < args.size(); ++k) {
    const auto operand = args.get<ffi::AnyBuffer>(k);
    if (!operand.has_value()) throw std::invalid_argument("recom deliver: no such operand");
    if (k == 0) token = operand->untyped_data();
    if (k > 1)
      results.emplace_back(operand->untyped_data(), static_cast<int64_t>(operand->size_bytes()));
  }
  const StageSource source = stage_source(token, nbytes);
  source.delivery->Copy(results, stream);
}

ffi::Error deliver_on_host(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> seen,
                           int64_t nbytes) {
  return guarded([&]() -> ffi::Error {
    deliver(args, nbytes, nullptr);
    *static_cast<uint8_t*>(seen->untyped_data()) = 0;
    return ffi::Error::Success();
  });
}

// `seen` is not written: it says that the call has ended, and is never read.
ffi::Error deliver_on_cuda(cuda::Stream stream, ffi::RemainingArgs args,
                           ffi::Result<ffi::AnyBuffer>, int64_t nbytes) {
  return guarded([&]() -> ffi::Error {
    deliver(args, nbytes, stream);
    return ffi::Error::Success();
  });
}

template <typename Binding>
auto deliver_call(Binding binding) {
  return std::move(binding).RemainingArgs().template Ret<ffi::AnyBuffer>().template Attr<int64_t>(
      "nbytes");
}
XLA_FFI_DEFINE_HANDLER(kDeliverOnHost, deliver_on_host, deliver_call(ffi::Ffi::Bind()));
// Not compatible with command buffers, as staging isn't: a graph would keep the slot's addresses.
XLA_FFI_DEFINE_HANDLER(kDeliverOnCuda, deliver_on_cuda,
                       deliver_call(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>()));

}  // namespace

void* deliver_on_host_handler() { return reinterpret_cast<void*>(kDeliverOnHost); }
void* deliver_on_cuda_handler() { return reinterpret_cast<void*>(kDeliverOnCuda); }

}  // namespace recom
