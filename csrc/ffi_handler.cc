#include "ffi_handler.h"

#include <exception>
#include <new>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_module.h"
#include "cuda_stage.h"
#include "interp.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace recom {
namespace {

Buffer as_buffer(const ffi::AnyBuffer& b) {
  const auto dims = b.dimensions();
  return {b.untyped_data(), dims.begin(), static_cast<int>(dims.size()),
          static_cast<int>(b.element_type())};
}

// The call's operands and results. Returns the error of one that XLA cannot describe.
std::optional<ffi::Error> read_buffers(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                       std::vector<Buffer>* operands,
                                       std::vector<Buffer>* results) {
  operands->reserve(args.size());
  results->reserve(rets.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto a = args.get<ffi::AnyBuffer>(i);
    if (!a.has_value()) return a.error();
    operands->push_back(as_buffer(*a));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto r = rets.get<ffi::AnyBuffer>(i);
    if (!r.has_value()) return r.error();
    results->push_back(as_buffer(**r));
  }
  return std::nullopt;
}

// Runs `body`, turning exceptions into XLA's errors.
template <typename Body>
ffi::Error guarded(Body body) {
  try {
    return body();
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(e.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "recom call: out of memory");
  } catch (const std::exception& e) {
    return ffi::Error::Internal(e.what());
  }
}

ffi::Error fused(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 std::string_view program_bytes, std::string_view hash,
                 ffi::Span<const int64_t> binding) {
  return guarded([&]() -> ffi::Error {
    const auto program = cached_program(hash, program_bytes);
    std::vector<Buffer> physical, results;
    if (auto error = read_buffers(args, rets, &physical, &results)) return *error;
    Executor executor;
    executor.threads = static_cast<int>(std::max<int64_t>(pool.num_threads(), 1));
    executor.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
    run_program(*program, physical, results, binding.begin(), binding.size(), executor);
    return ffi::Error::Success();
  });
}

ffi::Error empty(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

// ---- CUDA ----

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
  return read_buffers(args, rets, &out->operands, &out->results);
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

XLA_FFI_DEFINE_HANDLER(kFused, fused,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("program")
                           .Attr<std::string_view>("hash")
                           .Attr<ffi::Span<const int64_t>>("binding"));
XLA_FFI_DEFINE_HANDLER(kEmpty, empty, ffi::Ffi::Bind().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

// ---- staging ----

ffi::Error stage_on_host(ffi::AnyBuffer token, ffi::Result<ffi::BufferR1<ffi::DataType::U8>> pack,
                         ffi::Result<ffi::BufferR0<ffi::DataType::U8>> done, int64_t nbytes) {
  return guarded([&]() -> ffi::Error {
    stage_copy_on_host(pack->untyped_data(), stage_source(token.untyped_data(), nbytes));
    *done->typed_data() = 0;
    return ffi::Error::Success();
  });
}

// `done` is not written: it says that the call has ended, and is never read.
ffi::Error stage_on_cuda(cuda::Stream stream, ffi::AnyBuffer token,
                         ffi::Result<ffi::BufferR1<ffi::DataType::U8>> pack,
                         ffi::Result<ffi::BufferR0<ffi::DataType::U8>>, int64_t nbytes) {
  return guarded([&]() -> ffi::Error {
    stage_copy(pack->untyped_data(), stage_source(token.untyped_data(), nbytes), stream);
    return ffi::Error::Success();
  });
}

template <typename Binding>
auto stage_call(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::BufferR1<ffi::DataType::U8>>()
      .template Ret<ffi::BufferR0<ffi::DataType::U8>>()
      .template Attr<int64_t>("nbytes");
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

}  // namespace

void* fused_v1_handler() { return reinterpret_cast<void*>(kFused); }
void* empty_v1_handler() { return reinterpret_cast<void*>(kEmpty); }
void* cuda_initialize_handler() { return reinterpret_cast<void*>(kCudaInitialize); }
void* cuda_execute_handler() { return reinterpret_cast<void*>(kCudaExecute); }
void* stage_on_host_handler() { return reinterpret_cast<void*>(kStageOnHost); }
void* stage_on_cuda_handler() { return reinterpret_cast<void*>(kStageOnCuda); }

}  // namespace recom
