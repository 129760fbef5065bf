// The handlers of CUDA, and of staging.

#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "cuda_module.h"
#include "cuda_stage.h"
#include "ffi_call.h"
#include "ffi_handler.h"

namespace recom {
namespace {

struct CudaAttributes {
  std::string_view program, hash, launch, ptx, digest;
  ffi::Span<const int64_t> layout;
  int64_t pointers;
};

std::optional<ffi::Error> read_arguments(int32_t device, ffi::RemainingArgs args,
                                         ffi::RemainingRets rets, const CudaAttributes& a,
                                         CudaArguments* out) {
  *out = {a.program,
          a.hash,
          a.launch,
          a.ptx,
          a.digest,
          a.layout.begin(),
          static_cast<int64_t>(a.layout.size()),
          a.pointers,
          {},
          {},
          device};
  if (auto error = read_buffers(args, rets, &out->operands, &out->results)) return error;
  if (a.pointers == 0 && !out->results.empty()) {  // the last one is the table
    out->table = out->results.back();
    out->results.pop_back();
  }
  return std::nullopt;
}

ffi::Error cuda_initialize(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           std::string_view program, std::string_view hash, std::string_view launch,
                           std::string_view ptx, std::string_view digest,
                           ffi::Span<const int64_t> layout, int64_t pointers) {
  return guarded([&]() -> ffi::Error {
    CudaArguments a;
    const CudaAttributes attributes{program, hash, launch, ptx, digest, layout, pointers};
    if (auto error = read_arguments(device, args, rets, attributes, &a)) return *error;
    prepare_call(a);
    return ffi::Error::Success();
  });
}

ffi::Error cuda_execute(cuda::Stream stream, int32_t device, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, std::string_view program, std::string_view hash,
                        std::string_view launch, std::string_view ptx, std::string_view digest,
                        ffi::Span<const int64_t> layout, int64_t pointers) {
  return guarded([&]() -> ffi::Error {
    CudaArguments a;
    const CudaAttributes attributes{program, hash, launch, ptx, digest, layout, pointers};
    if (auto error = read_arguments(device, args, rets, attributes, &a)) return *error;
    const PreparedCall* call = find_prepared(a);
    if (!call) {
      int capturing = 0;
      const cuda::Driver& driver = cuda::Driver::get();
      driver.check(driver.stream_capturing(stream, &capturing), "tell a stream's state");
      if (capturing) {
        return ffi::Error::Internal("recom call: captured in a graph before it was initialized");
      }
      call = &prepare_call(a);
      ++cuda_stats().late_preparations;
    }
    launch_call(*call, a, stream);
    return ffi::Error::Success();
  });
}

// Outside graphs, for calls that read a slot's buffer: it is another one at most calls, and a graph
// would be captured again each time. The kernel runs while XLA still launches what comes after it.
// `key` is a digest of launch and layout.
ffi::Error cuda_alone(cuda::Stream stream, int32_t device, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, std::string_view program, std::string_view hash,
                      std::string_view launch, std::string_view ptx, std::string_view digest,
                      ffi::Span<const int64_t> layout, int64_t pointers, std::string_view key) {
  return guarded([&]() -> ffi::Error {
    CudaArguments a;
    const CudaAttributes attributes{program, hash, launch, ptx, digest, layout, pointers};
    if (auto error = read_arguments(device, args, rets, attributes, &a)) return *error;
    a.key = key;
    launch_call(prepare_call(a), a, stream);
    return ffi::Error::Success();
  });
}

// ---- staging ----

// Results: a part of the slot, if one is wanted, and `done`. The latter is not written on a GPU: it
// says that the call has ended, and is never read.
StageWish wish_of(ffi::AnyBuffer token, ffi::RemainingRets rets, int64_t nbytes, int64_t begin,
                  int64_t whole) {
  StageWish wish{static_cast<char*>(token.untyped_data()), whole != 0, nullptr, begin, 0};
  if (rets.size() > 1) {
    auto part = rets.get<ffi::AnyBuffer>(0);
    if (!part.has_value()) throw std::invalid_argument("recom stage: no part");
    wish.part = (*part)->untyped_data();
    wish.nbytes = static_cast<int64_t>((*part)->size_bytes());
  }
  const bool holds = whole == 0 || static_cast<int64_t>(token.size_bytes()) == nbytes;
  if (!holds || begin < 0 || begin > nbytes || wish.nbytes > nbytes - begin)
    throw std::invalid_argument("recom stage: a part outside its slot");
  return wish;
}

ffi::Error stage_on_host(ffi::AnyBuffer token, ffi::RemainingRets rets, int64_t nbytes,
                         int64_t begin, int64_t whole) {
  return guarded([&]() -> ffi::Error {
    stage_copy_on_host(wish_of(token, rets, nbytes, begin, whole),
                       stage_source(token.untyped_data(), nbytes));
    auto done = rets.get<ffi::AnyBuffer>(rets.size() - 1);
    if (done.has_value()) *static_cast<uint8_t*>((*done)->untyped_data()) = 0;
    return ffi::Error::Success();
  });
}

ffi::Error stage_on_cuda(cuda::Stream stream, ffi::AnyBuffer token, ffi::RemainingRets rets,
                         int64_t nbytes, int64_t begin, int64_t whole) {
  return guarded([&]() -> ffi::Error {
    stage_copy(wish_of(token, rets, nbytes, begin, whole),
               stage_source(token.untyped_data(), nbytes), stream);
    return ffi::Error::Success();
  });
}

template <typename Binding>
auto stage_call(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .RemainingRets()
      .template Attr<int64_t>("nbytes")
      .template Attr<int64_t>("begin")
      .template Attr<int64_t>("whole");
}
XLA_FFI_DEFINE_HANDLER(kStageOnHost, stage_on_host, stage_call(ffi::Ffi::Bind()));
// Not compatible with command buffers: a graph would keep the host address that it was captured
// with, and XLA captures it anew only when a *device* address changes. Calls take turns with slots,
// so it would be captured again at most calls; one copy ahead of the graph costs less.
XLA_FFI_DEFINE_HANDLER(kStageOnCuda, stage_on_cuda,
                       stage_call(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>()));

// Attributes of both stages.
template <typename Binding>
auto cuda_attributes(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("program")
      .template Attr<std::string_view>("hash")
      .template Attr<std::string_view>("launch")
      .template Attr<std::string_view>("ptx")
      .template Attr<std::string_view>("digest")
      .template Attr<ffi::Span<const int64_t>>("layout")
      .template Attr<int64_t>("pointers");
}
XLA_FFI_DEFINE_HANDLER(kCudaInitialize, cuda_initialize,
                       cuda_attributes(ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>()));
XLA_FFI_DEFINE_HANDLER(kCudaExecute, cuda_execute,
                       cuda_attributes(ffi::Ffi::Bind()
                                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                           .Ctx<ffi::DeviceOrdinal>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kCudaAlone, cuda_alone,
                       cuda_attributes(ffi::Ffi::Bind()
                                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                                           .Ctx<ffi::DeviceOrdinal>())
                           .Attr<std::string_view>("key"));

}  // namespace

void* cuda_initialize_handler() { return reinterpret_cast<void*>(kCudaInitialize); }
void* cuda_execute_handler() { return reinterpret_cast<void*>(kCudaExecute); }
void* cuda_alone_handler() { return reinterpret_cast<void*>(kCudaAlone); }
void* stage_on_host_handler() { return reinterpret_cast<void*>(kStageOnHost); }
void* stage_on_cuda_handler() { return reinterpret_cast<void*>(kStageOnCuda); }

}  // namespace recom
