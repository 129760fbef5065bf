// The handlers of co-running: `take` copies a batch for those who keep it, `stream` tells which
// stream is XLA's, `event` and `mark` say that a stage ended. `event` is part of command buffers,
// as a node that records an event; the others are not, on purpose: they act anew in each step,
// ahead of or between graphs.

#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "corun_runtime.h"
#include "cuda_driver.h"
#include "ffi_call.h"
#include "ffi_handler.h"

namespace recom {
namespace {

std::optional<ffi::Error> sizes_of(ffi::RemainingRets rets,
                                   std::vector<std::pair<corun::Address, int64_t>>* out) {
  for (size_t i = 0; i < rets.size(); ++i) {
    auto r = rets.get<ffi::AnyBuffer>(i);
    if (!r.has_value()) return r.error();
    out->push_back({reinterpret_cast<corun::Address>((*r)->untyped_data()),
                    static_cast<int64_t>((*r)->size_bytes())});
  }
  return std::nullopt;
}

ffi::Error take(corun::Stream stream, bool simulated, ffi::AnyBuffer token,
                ffi::RemainingRets rets) {
  return guarded([&]() -> ffi::Error {
    std::vector<std::pair<corun::Address, int64_t>> results;
    if (auto error = sizes_of(rets, &results)) return *error;
    const auto [runtime, slot] = corun::find_token(token.untyped_data());
    corun::set_current_runtime(stream, runtime);
    runtime->take(slot, results, stream);
    if (simulated) runtime->backend().finish(stream);
    return ffi::Error::Success();
  });
}

// Tells a runtime on which stream XLA runs its device's programs.
ffi::Error stream(corun::Stream stream, ffi::AnyBuffer token) {
  return guarded([&]() -> ffi::Error {
    corun::find_token(token.untyped_data()).first->learn(stream);
    return ffi::Error::Success();
  });
}

ffi::Error stream_on_cuda(cuda::Stream xla, ffi::AnyBuffer token, ffi::Result<ffi::AnyBuffer>) {
  return stream(xla, token);
}
ffi::Error stream_on_host(ffi::AnyBuffer token, ffi::Result<ffi::AnyBuffer> nothing) {
  std::memset(nothing->untyped_data(), 0, nothing->size_bytes());
  return stream(corun::sim_xla_stream(), token);
}

ffi::Error take_on_cuda(cuda::Stream stream, ffi::AnyBuffer token, ffi::RemainingRets rets) {
  return take(stream, false, token, rets);
}
ffi::Error take_on_host(ffi::AnyBuffer token, ffi::RemainingRets rets) {
  return take(corun::sim_xla_stream(), true, token, rets);
}

// Results are the operands' memory; where XLA gave them other memory, they are copied.
template <typename Copy>
std::optional<ffi::Error> pass(ffi::RemainingArgs args, ffi::RemainingRets rets, const Copy& copy) {
  for (size_t i = 0; i < args.size(); ++i) {
    auto from = args.get<ffi::AnyBuffer>(i);
    auto to = rets.get<ffi::AnyBuffer>(i);
    if (!from.has_value()) return from.error();
    if (!to.has_value()) return to.error();
    if (from->untyped_data() != (*to)->untyped_data() && from->size_bytes() > 0) {
      copy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
    }
  }
  return std::nullopt;
}

auto copy_on(cuda::Stream stream) {
  return [stream](void* to, const void* from, size_t bytes) {
    const cuda::Driver& d = cuda::Driver::get();
    d.check(d.copy_on_device_async(reinterpret_cast<cuda::Pointer>(to),
                                   reinterpret_cast<cuda::Pointer>(from), bytes, stream),
            "copy a stage's results");
  };
}
constexpr auto kCopyOnHost = [](void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
};

template <typename Copy>
ffi::Error mark(corun::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                std::string_view name, const Copy& copy) {
  return guarded([&]() -> ffi::Error {
    if (auto error = pass(args, rets, copy)) return *error;
    if (const auto runtime = corun::current_runtime(stream)) runtime->mark(name, stream);
    return ffi::Error::Success();
  });
}

ffi::Error mark_on_cuda(cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        std::string_view name) {
  return mark(stream, args, rets, name, copy_on(stream));
}
ffi::Error mark_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view name) {
  return mark(corun::sim_xla_stream(), args, rets, name, kCopyOnHost);
}
// A marker that records its event.
ffi::Error event_on_cuda(cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         std::string_view name) {
  return guarded([&]() -> ffi::Error {
    if (auto error = pass(args, rets, copy_on(stream))) return *error;
    corun::record_stage(name, stream);
    if (const auto runtime = corun::current_runtime(stream)) runtime->saw(name);
    return ffi::Error::Success();
  });
}
ffi::Error event_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view name) {
  return guarded([&]() -> ffi::Error {
    if (auto error = pass(args, rets, kCopyOnHost)) return *error;
    const corun::Stream stream = corun::sim_xla_stream();
    if (const auto runtime = corun::current_runtime(stream)) {
      runtime->record_stage(name, stream);
      runtime->saw(name);
    }
    return ffi::Error::Success();
  });
}
// A marker of a step that is not co-run.
ffi::Error pass_on_cuda(cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] { return pass(args, rets, copy_on(stream)).value_or(ffi::Error::Success()); });
}
ffi::Error pass_on_host(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] { return pass(args, rets, kCopyOnHost).value_or(ffi::Error::Success()); });
}

XLA_FFI_DEFINE_HANDLER(kStreamOnCuda, stream_on_cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kStreamOnHost, stream_on_host,
                       ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kTakeOnCuda, take_on_cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingRets());
XLA_FFI_DEFINE_HANDLER(kTakeOnHost, take_on_host,
                       ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().RemainingRets());
XLA_FFI_DEFINE_HANDLER(kMarkOnCuda, mark_on_cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("name"));
XLA_FFI_DEFINE_HANDLER(
    kMarkOnHost, mark_on_host,
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<std::string_view>("name"));

XLA_FFI_DEFINE_HANDLER(kEventOnCuda, event_on_cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("name"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kEventOnHost, event_on_host,
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<std::string_view>("name"));

XLA_FFI_DEFINE_HANDLER(
    kPassOnCuda, pass_on_cuda,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kPassOnHost, pass_on_host, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

}  // namespace

void* corun_pass_handler(bool cuda) {
  return cuda ? reinterpret_cast<void*>(kPassOnCuda) : reinterpret_cast<void*>(kPassOnHost);
}
void* corun_stream_handler(bool cuda) {
  return cuda ? reinterpret_cast<void*>(kStreamOnCuda) : reinterpret_cast<void*>(kStreamOnHost);
}
void* corun_take_handler(bool cuda) {
  return cuda ? reinterpret_cast<void*>(kTakeOnCuda) : reinterpret_cast<void*>(kTakeOnHost);
}
void* corun_event_handler(bool cuda) {
  return cuda ? reinterpret_cast<void*>(kEventOnCuda) : reinterpret_cast<void*>(kEventOnHost);
}
void* corun_mark_handler(bool cuda) {
  return cuda ? reinterpret_cast<void*>(kMarkOnCuda) : reinterpret_cast<void*>(kMarkOnHost);
}

}  // namespace recom
