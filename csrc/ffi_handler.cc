#include "ffi_handler.h"

#include <exception>
#include <new>
#include <string_view>
#include <utility>

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

ffi::Error fused(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 std::string_view program_bytes, std::string_view hash,
                 ffi::Span<const int64_t> binding) {
  try {
    const auto program = cached_program(hash, program_bytes);
    std::vector<Buffer> physical, results;
    physical.reserve(args.size());
    for (size_t i = 0; i < args.size(); ++i) {
      auto a = args.get<ffi::AnyBuffer>(i);
      if (!a.has_value()) return a.error();
      physical.push_back(as_buffer(*a));
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      auto r = rets.get<ffi::AnyBuffer>(i);
      if (!r.has_value()) return r.error();
      results.push_back(as_buffer(**r));
    }
    Executor executor;
    executor.threads = static_cast<int>(std::max<int64_t>(pool.num_threads(), 1));
    executor.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
    run_program(*program, physical, results, binding.begin(), binding.size(), executor);
    return ffi::Error::Success();
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(e.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "recom call: out of memory");
  } catch (const std::exception& e) {
    return ffi::Error::Internal(e.what());
  }
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
XLA_FFI_DEFINE_HANDLER(kEmpty, empty, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

}  // namespace

void* fused_v1_handler() { return reinterpret_cast<void*>(kFused); }
void* empty_v1_handler() { return reinterpret_cast<void*>(kEmpty); }

}  // namespace recom
